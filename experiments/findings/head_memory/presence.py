"""Do some heads bring a hidden object back, and others know what it was? (presence_and_identity.md)

    python experiments/findings/head_memory/presence.py              # answers -> contrasts, figure
    python experiments/findings/head_memory/presence.py --collect    # trials of all trainings -> answers
    python experiments/findings/head_memory/presence.py --measure --device cuda --ckpt_dir outputs/mini1

--measure makes the trials of each training, FOLDER/NAME.jsonl, hours of a CPU; the same command goes on where
it stopped. presence_and_identity.json has the answer of every video, from which all else is computed.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from matplotlib.figure import Figure

from experiments.analysis.results import HEADS, presence_panels
from experiments.analysis.stats import DRAWS, holm, mean_without_nan, percentiles, rounded, t_interval
from experiments.caches.files import save_report
from experiments.extraction.provenance import environment
from experiments.figures.atlas import knockout_shares
from experiments.figures.style import save_svg
from experiments.findings.head_memory.presence_trials import (
    CHOSEN,
    HALVES,
    SEEN,
    Design,
    PresenceTrials,
    captions_behind_a_wall,
)
from experiments.findings.report import finding_parser
from experiments.miniature.moving_shapes import SHAPES
from experiments.running.cli import count, main
from experiments.session import load
from wan.config import load_config
from wan.errors import ConfigError
from wan.files import read_json

OUTPUT = Path("experiments/findings/head_memory/presence_and_identity.json")
QUESTIONS = "hides", "comes_back", "right", "donor", "shape"
EDITS = "knockout", "other seed", "other color", "rescue"
MADE_AS = {  # what needs no trial of its own: trials of the same videos
    "knockout, nobody": "unedited",
    "other seed, nobody": "unedited",
    "other color, nobody": "own color",
    "rescue, all": "unedited",
    "rescue, nobody": "knockout, all",
}
PANELS = {  # title -> captions by their colour, edit, question
    "No past: comes back": ("all captions", "knockout", "comes_back"),
    "Another seed's past: comes back": ("all captions", "other seed", "comes_back"),
    "Only these keep it: comes back": ("all captions", "rescue", "comes_back"),
    "Other colour's past: its colour": ("not named", "other color", "donor"),
}
DONORS = {"other seed": "donor: other seed", "other color": "donor: other color"}
CONTRASTS = {  # name -> edit, question, the set that should have more, the other one
    "1: comes_back, other seed, random of P less P": ("other seed", "comes_back", "random of P", "P"),
    "2: donor given back, other color, I less P": ("other color", "donor", "I", "P"),
    "3: comes_back, other seed, I less P": ("other seed", "comes_back", "I", "P"),
    "4: comes_back, rescue, P less random of P": ("rescue", "comes_back", "P", "random of P"),
}
FEWEST_PAIRS = 60  # of a training in contrast 2
HARMLESS = 0.2  # contrast 1 below this, and not above 0: the knockout was an artefact


def run(argv=None):
    parser = finding_parser(__doc__, "head_memory")
    flag = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measure", action="store_true", help="make the trials of --ckpt_dir that are missing")
    what.add_argument("--collect", action="store_true", help="read the answers of all trials in --folder")
    flag("--config_path", default="configs/wan_mini.yaml")
    flag("--device", default="auto")
    flag("--ckpt_dir", nargs="+", default=["checkpoints/wan-mini"], help="directories of miniatures")
    flag("--captions", type=count, default=Design.captions, help="on which heads are judged")
    flag("--selection", type=count, default=Design.selection, help="captions on which heads are chosen")
    flag("--seeds", type=int, choices=range(1, 10), default=3, help="of each caption")
    flag("--folder", type=Path, default=Path("cache/presence"), help="where trials are kept")
    parser.set_defaults(output_path=OUTPUT)
    args = parser.parse_args(argv)
    if args.measure:
        measure(args)
        return
    report = collected(args.folder) if args.collect else read_json(args.output_path)
    report |= findings_of(report)
    save_report(report, args.output_path)
    print(args.output_path)
    for name, figure in figures_of(report).items():
        print(save_svg(figure, args.figures / f"{name}.svg"))


def measure(args: argparse.Namespace) -> None:
    """Make the trials that are missing of each miniature."""
    design = Design(args.captions, args.selection, args.seeds)
    for ckpt_dir in args.ckpt_dir:
        weights = {"ckpt_dir": ckpt_dir, "checkpoint_path": f"{ckpt_dir}/self_forcing_mini.pt"}
        config = load_config(args.config_path, {"device": args.device, "dtype": "float32"} | weights)
        session = load(config).prepare((), PresenceTrials.texts())
        torch.backends.cudnn.benchmark = session.device.type == "cuda"  # a decoder of one size
        trials = PresenceTrials(config, session, args.folder / f"{Path(ckpt_dir).name}.jsonl", design)
        if "training" not in trials.done:
            about = {"weights_sha256": session.identity(config)["weights_sha256"], "seeds": args.seeds}
            trials.write("training", about | {"environment": environment(session.device)})
        trials.run()
        print(trials.file)


# --- Trials -> answers: a letter a video
def letters(line: Mapping[str, str], shapes: Sequence[int], donor: Sequence[str]) -> str:
    """Return a letter a video: visible, hides or comes back; then right, donor and shape."""
    found = []
    rows = zip(*(line[name] for name in ("hides", "comes_back", "color", "last_color", "shape")), strict=True)
    for (hides, back, color, last, shape), expected, other in zip(rows, shapes, donor, strict=True):
        state = int(hides) + int(back)
        right, given = (back == "1" and last == one for one in (color, other))
        found.append(chr(ord("A") + 8 * state + 4 * right + 2 * given + (shape == str(expected))))
    return "".join(found)


def answers_of(text: str) -> dict[str, np.ndarray]:
    """Return what letters() wrote, 0 or 1 a video, by question."""
    numbers = np.array([ord(letter) - ord("A") for letter in text])
    state = numbers // 8
    bits = {name: numbers // 2**n % 2 for n, name in enumerate(("shape", "donor", "right"))}
    return {"hides": state > 0, "comes_back": state == 2} | bits


def collected(folder: Path) -> dict[str, Any]:
    """Read the trials of all trainings, and write every answer in a letter."""
    files = sorted(folder.glob("*.jsonl"), key=lambda file: (file.stem != "wan-mini", file.stem))
    if not files:
        raise ConfigError(f"{folder} has no trials; make them by --measure")
    trainings, scenes = {}, [scene for _, scene in captions_behind_a_wall(Design())[0]]
    for file in files:
        lines = {line["name"]: line for line in map(json.loads, file.read_text().splitlines())}
        if f"half {HALVES - 1}" not in lines:
            raise ConfigError(f"{file} lacks trials; go on with --measure, or move it elsewhere")
        trainings[file.stem] = training_of(lines, [SHAPES.index(one.movers[0].shape) for one in scenes])
    return {
        "environments": {name: one.pop("environment") for name, one in trainings.items()},
        "captions": [scene.caption for scene in scenes],
        "names_color": "".join(str(int(not scene.unnamed_color)) for scene in scenes),
        "trainings": trainings,
    }


def training_of(lines: Mapping[str, Mapping[str, Any]], shapes: Sequence[int]) -> dict[str, Any]:
    """Return what the trials of one training found."""
    about, unedited, readers = lines["training"], lines["unedited"], lines["readers"]
    every, seeds = range(len(unedited["hides"])), about["seeds"]
    shapes = [*shapes[: len(every) // seeds]] * seeds
    pairs = {
        edit: PresenceTrials.alike(lines[MADE_AS[f"{edit}, nobody"]], lines[donor])
        for edit, donor in DONORS.items()
    }
    answers = {}
    for name, line in lines.items():
        edit, _, of = name.partition(", ")
        if edit not in (*EDITS, "unedited", "own color") or (edit in EDITS and not of):
            continue
        rows, donor = line.get("rows", every), "?" * len(every)
        if edit in DONORS:
            donor = lines[DONORS[edit]]["color"]
        if not of:  # the floor: how often does an unedited video come back in its donor's colour?
            donor = lines[DONORS["other color" if edit == "own color" else "other seed"]]["color"]
        answers[name] = letters(line, [shapes[n] for n in rows], [donor[n] for n in rows])
    # Does an edit change what is seen before it hides?
    first_colors = {
        name: round(
            float(
                np.mean(
                    [
                        line["color"][n] == lines[plain]["color"][row]
                        for n, row in enumerate(line.get("rows", every))
                    ]
                )
            ),
            3,
        )
        for name, line in lines.items()
        if name.partition(", ")[0] in EDITS
        for plain in ("own color" if name.startswith("other color") else "unedited",)
    }
    walls = {
        name.partition(", ")[2] or "nobody": {
            question: round(float(np.mean([x == "1" for x in line[question]])), 3)
            for question in ("comes_back", "seen_last")
        }
        for name, line in lines.items()
        if name.split(",")[0] == "wall"
    }
    base = np.mean([x == "1" for x in lines["selection"]["comes_back"]])
    singles = [line for name, line in lines.items() if name.startswith("without")]
    effects = [base - np.mean([x == "1" for x in line["comes_back"]]) for line in singles]
    return {
        "weights_sha256": about["weights_sha256"],
        "environment": about["environment"],
        "seeds": seeds,
        "heads": lines["sets"]["heads"],
        "effects of P": rounded(sorted(effects, reverse=True)[:CHOSEN]),
        "pairs of readers": readers["pairs"],
        "shares of I": sorted(readers["shares"], reverse=True)[:CHOSEN],
        "tracker agrees": unedited.get("agrees"),
        "largest difference to rollouts alone": unedited["alone"],
        "pairs": pairs,
        "answers": answers,
        "first second in the unedited colour": first_colors,
        "walls": walls,
        "knockout of P on the other half": [
            round(float(np.mean([x == "1" for x in lines[f"half {half}"]["comes_back"]])), 3)
            for half in range(HALVES)
        ],
    }


# --- Answers -> findings
def values_of(training: Mapping[str, Any], edit: str, of: str, question: str) -> np.ndarray:
    """Return the answers to a question [seeds, captions], a mean over draws; NaN where there is none.

    right and donor are of what comes back. The first captions, which were seen before, are left out.
    """
    answers, trial = training["answers"], MADE_AS.get(f"{edit}, {of}", f"{edit}, {of}")
    names = [name for name in answers if name.partition(":")[0] == trial]
    videos = len(answers["unedited"])
    drawn = np.full((len(names), videos), np.nan)
    for n, name in enumerate(names):
        rows = training["pairs"].get(edit, np.arange(videos))
        said = {
            question: x[rows if len(x) == videos else ...]
            for question, x in answers_of(answers[name]).items()
        }
        value = said[question].astype(float)
        if question in ("right", "donor"):
            value[~said["comes_back"]] = np.nan
        drawn[n, rows] = value
    return mean_without_nan(drawn.T).reshape(training["seeds"], -1)[:, SEEN:]


def contrast(
    trainings: Mapping[str, Mapping[str, Any]], edit: str, question: str, more: str, less: str
) -> dict[str, Any]:
    """Return the mean difference over captions and trainings with its intervals, and p.

    bootstrap resamples trainings crossed with captions; t and p are of the trainings' means.
    """
    rows, videos = [], 0
    for one in trainings.values():
        each = values_of(one, edit, more, question) - values_of(one, edit, less, question)
        videos += int((~np.isnan(each)).sum())
        rows.append(mean_without_nan(each.T))  # [captions]
    of = np.stack(rows)
    means = mean_without_nan(of)
    generator, (groups, columns) = np.random.default_rng(0), of.shape
    chosen = generator.integers(groups, size=(DRAWS, groups, 1))
    drawn = mean_without_nan(of[chosen, generator.integers(columns, size=(DRAWS, 1, columns))]).mean(1)
    return {
        "bootstrap": rounded(percentiles(float(means.mean()), drawn)),
        "t": rounded(t_interval(means.tolist())),
        "p": float(f"{scipy.stats.ttest_1samp(means, 0).pvalue:.2g}"),
        "each": rounded(means),
        "trainings": [*trainings],
        "videos": videos,
    }


def row_of(trainings: Iterable[Mapping[str, Any]], edit: str, of: str, columns: Any) -> dict[str, Any]:
    """Return shares of one set of heads under an edit: the mean of trainings with t, and each.

    right and donor are of what comes back, in `returns` videos; means of draws count as one video.
    """
    found: dict[str, Any] = {}
    for question in QUESTIONS:
        if question == "donor" and edit in ("knockout", "rescue"):
            continue
        values = [values_of(one, edit, of, question)[:, columns] for one in trainings]
        each = [float(mean_without_nan(value.ravel())) for value in values]
        found[question] = {"all": rounded(t_interval(each)), "each": rounded(each)}
        if question == "comes_back":
            found["videos"] = int(sum((~np.isnan(value)).sum() for value in values))
        if question == "right":
            found["returns"] = int(sum((~np.isnan(value)).sum() for value in values))
    return found


def findings_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Compute contrasts, the reading, and shares by edit and set of heads, from the answers."""
    trainings = report["trainings"]
    pairs = {
        edit: {
            name: sum(n % len(report["captions"]) >= SEEN for n in one["pairs"].get(edit, ()))
            for name, one in trainings.items()
        }
        for edit in DONORS
    }
    contrasts = {}
    for name, what in CONTRASTS.items():
        enough = {n: one for n, one in trainings.items() if pairs["other color"][n] >= FEWEST_PAIRS}
        contrasts[name] = contrast(enough if name.startswith("2") else trainings, *what)
    for one, p in zip(contrasts.values(), holm([x["p"] for x in contrasts.values()]), strict=True):
        one["p_holm"] = float(f"{p:.2g}")
    named = np.array([digit == "1" for digit in report["names_color"]])[SEEN:]
    captions = {"all captions": slice(None), "named": named, "not named": ~named}
    every = trainings.values()
    return {
        "pairs": pairs,
        "contrasts": contrasts,
        "reading": reading(contrasts),
        "shares": {
            label: {f"{edit}, {of}": row_of(every, edit, of, some) for edit in EDITS for of in HEADS}
            for label, some in captions.items()
        },
        "walls": {
            of: {question: wall_of(every, of, question) for question in ("comes_back", "seen_last")}
            for of in HEADS
        },
        "knockout of P on the other half": rounded(
            t_interval([float(np.mean(one["knockout of P on the other half"])) for one in every])
        ),
    }


def wall_of(trainings: Iterable[Mapping[str, Any]], of: str, question: str) -> list[float]:
    """Return the share of walls without a shape behind them, over trainings, with its interval."""
    walls = (
        [x[question] for name, x in one["walls"].items() if name.partition(":")[0] == of] for one in trainings
    )
    return rounded(t_interval([float(np.mean(draws)) for draws in walls]))


def reading(contrasts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the reading that was fixed before the run."""
    above = [one["p_holm"] < 0.05 and one["bootstrap"][0] > 0 for one in contrasts.values()]
    first = next(iter(contrasts.values()))
    _, low, high = first["t"]
    if above[0] and above[1] and above[2]:
        return "a double dissociation"
    if above[0] and above[2]:
        return "a gate for presence, identity distributed"
    if low <= 0 <= high < HARMLESS:
        return "the knockout was an artefact of inputs never seen"
    return "undecided"


def figures_of(report: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw what comes back without a past, and under every edit."""
    edits = knockout_shares(
        *presence_panels(report, PANELS, [*HEADS]),
        title="Presence and identity",
        y="Heads",
        note="last panel: shapes that come back, of captions that do not name the colour",
    )
    return {"hidden_shapes": knockout_shares(*presence_panels(report)), "presence_and_identity": edits}


if __name__ == "__main__":
    main(run)

"""Take the past of heads away, or give them an empty one: what comes back? (README.md)

    python experiments/findings/head_memory/empty_past.py --measure outputs/mini1 --device cuda
    python experiments/findings/head_memory/empty_past.py outputs/empty_past/*.json

Write a training's answers to outputs/empty_past/NAME.json; or join trainings in empty_past.json.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import intervene, load, miniature
from experiments.analysis import panels, stats
from experiments.caches.files import save_report
from experiments.provenance import environment
from experiments.running import cli
from wan import interventions
from wan.files import read_json

FOLDER = Path(__file__).parent
CAPTIONS, SEEN = 96, 8  # those of presence_and_identity.json without the first, which trials have seen
SIZES = 8, 4, 2, 1  # heads of a set; 8 is all that are left of it
DRAWN = 2  # random sets beside P, and beside I
DONORS, SEED_STEP = 8, 10_000  # seeds of a donor that are tried, and what is between them
FEWEST_PAIRS = 16  # a training with fewer is left out
PAST_FRAMES = 69  # video frames of the latent frames that the last block reads
DONOR = interventions.Source(prompt="the caption without its shape")
ALL = [*product(range(8), range(12))]  # layers and heads
CONTRASTS = {  # name -> edit and set that should have more, edit and set that should have less
    "1: empty, others of I less I": ("empty, others of I", "empty, I"),
    "2: empty, others of P less P": ("empty, others of P", "empty, P"),
    "3: P, empty less removed": ("empty, P", "removed, P"),
    "4: I, removed less empty": ("removed, I", "empty, I"),
}
QUESTIONS = {"hides": 1, "comes back": 2, "in its colour": 3}  # question -> least answer
TRAININGS = "wan-mini", "mini1", "mini2", "mini3", "mini4"
Heads = list[tuple[int, int]]


def run(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, nargs="*", help="what --measure wrote, a file a training")
    parser.add_argument("--measure", type=Path, help="directory of a training, whose answers to write")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--captions", type=int, default=CAPTIONS, help="fewer for a trial")
    parser.add_argument("--judges", type=int, default=2, help="processes that judge videos")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/empty_past"))
    args = parser.parse_args(argv)
    if args.measure and args.measure.name not in TRAININGS:
        parser.error(f"heads are chosen of {', '.join(TRAININGS)}: name the directory so")
    if args.measure:
        with ProcessPoolExecutor(args.judges, get_context("spawn")) as pool:
            return measure(args.measure, args.device, args.captions, pool, args.output_dir)
    output = FOLDER / "empty_past.json"
    trainings = {path.stem: read_json(path) for path in args.answers}
    if not trainings:
        trainings = read_json(output)["trainings"]
    report = findings_of(trainings) | {"trainings": trainings}
    save_report(report, output)
    print(panels.table([{"contrast": name} | row for name, row in report["contrasts"].items()]))


def sets_of(training: str) -> dict[str, Heads]:
    """Return P and I in the order in which they were chosen, without the heads of both, and others."""
    chosen = read_json(FOLDER / "presence_and_identity.json")["trainings"][training]["heads"]
    P, I = ([(layer, head) for layer, head in chosen[name]] for name in ("P", "I"))
    sets = {"P": [head for head in P if head not in I], "I": [head for head in I if head not in P]}
    for name, draw in product(("P", "I"), range(DRAWN)):
        generator, others = np.random.default_rng(draw), list[tuple[int, int]]()
        for layer, _ in sets[name]:  # as many of every layer, in the same order
            free = [head for head in ALL if head[0] == layer and head not in [*P, *I, *others]]
            others.append(free[generator.integers(len(free))])
        sets[f"others of {name}: {draw}"] = others
    return sets


def edits_of(edit: str, heads: Heads) -> list[interventions.Edit]:
    """Return the edits of a set: its past is removed, or is that of a run in step."""
    edits = list[interventions.Edit]()
    for layer in sorted({layer for layer, _ in heads}):
        of_layer = tuple(head for n, head in heads if n == layer)
        if edit == "removed":
            edits.append(
                interventions.Knockout(frames=("past",), layers=(layer,), heads=of_layer, passes="all")
            )
        else:
            edits.append(interventions.Patch("kv", DONOR, layers=(layer,), heads=of_layer, passes="all"))
    return edits


def answer_of(video: np.ndarray, scene: miniature.Scene) -> int:
    """Return 0 for a shape that stays in sight, 1 that hides, 2 comes back, 3 comes back in its colour."""
    torch.set_num_threads(1)
    answers = miniature.judge(torch.from_numpy(video), scene)
    steps = answers["hides"], answers["comes_back"], answers["comes_back"] and answers["same_color"]
    return sum(map(int, steps))


def is_empty(video: np.ndarray, scene: miniature.Scene) -> int:
    """Return 1 where the tracker finds no shape in any frame that a later block reads."""
    torch.set_num_threads(1)
    sight = miniature.in_sight(scene, video.shape[-1])
    return int(not miniature.track(torch.from_numpy(video[:PAST_FRAMES]), sight).seen.any())


def measure(directory: Path, device: str, count: int, pool: ProcessPoolExecutor, folder: Path) -> None:
    """Roll out all conditions of one training, and write a digit a video after each."""
    # 1. Captions with a wall, and those of donors: the same without the shape
    sets = sets_of(directory.name)
    scenes = dict[str, tuple[int, miniature.Scene]]()
    for number, scene in enumerate(miniature.held_out_scenes(["wall"], 480)):
        scenes.setdefault(scene.caption, (number, scene))
    chosen = [*scenes.values()][SEEN:count]
    captions = [scene.caption for _, scene in chosen]
    donors = [caption.partition(" behind ")[2] for caption in captions]
    checkpoint = directory / "self_forcing_mini.pt"
    session = load("wan_mini", ckpt_dir=directory, checkpoint_path=checkpoint, device=device, dtype="float32")
    session.prepare(prompts=[*captions, *donors])
    session.texts = {text: session.texts[text] for text in (*captions, *donors)}  # encoded once

    def generate(texts: Sequence[str], rows: Sequence[int], seeds: Sequence[int]) -> torch.Tensor:
        runs = session.generate([texts[n] for n in rows], seeds=seeds)
        return torch.cat([one.latents for one in runs])

    def digits(latents: torch.Tensor, rows: Sequence[int], question: Callable[..., int] = answer_of) -> str:
        videos = [one for part in latents.split(32) for one in session.vae.decode(part).cpu().numpy()]
        return "".join(map(str, pool.map(question, videos, [chosen[n][1] for n in rows])))

    # 2. Unedited videos, and donors of those that come back: the first seed whose past is empty
    every, path, own = range(len(chosen)), folder / f"{directory.name}.json", [number for number, _ in chosen]
    if path.exists():
        report = read_json(path)
    else:
        unedited, donor_seeds = digits(generate(captions, every, own), every), dict[int, int]()
        for attempt in range(DONORS):
            lacking = [n for n in every if unedited[n] in "23" and n not in donor_seeds]
            seeds = [own[n] + SEED_STEP * attempt for n in lacking]
            empty = digits(generate(donors, lacking, seeds), lacking, is_empty) if lacking else ""
            donor_seeds |= {n: seed for n, seed, one in zip(lacking, seeds, empty, strict=True) if one == "1"}
        rows = sorted(donor_seeds)
        report = {"environment": environment(session.device), "weights_sha256": session.weights_sha256}
        report |= {"heads": sets, "unedited": unedited, "rows": rows}
        report |= {"donor seeds": [donor_seeds[n] for n in rows], "answers": {}}
    # 3. The same noise under every edit
    rows = report["rows"]
    conditions = [(name, size) for size, name in product(SIZES, sets)]
    conditions.insert(len(conditions) // len(SIZES), ("all", len(ALL)))
    for (name, size), edit in product(conditions, ("removed", "empty")):
        condition = f"{edit}, {name}, {size}"
        if condition in report["answers"]:
            continue
        edits = edits_of(edit, (sets | {"all": ALL})[name][:size])
        source = interventions.RunInStep(partial(generate, donors, rows, report["donor seeds"]))
        with source, intervene(*edits, data=dict.fromkeys(edits, source)):
            latents = generate(captions, rows, [own[n] for n in rows])
        report["answers"][condition] = digits(latents, rows)
        save_report(report, path)


# --- Answers -> contrasts
def values_of(training: Mapping[str, Any], condition: str, size: int, least: int = 2) -> np.ndarray:
    """Return 1 for every caption whose answer is `least` or more, a mean over draws; NaN where none is."""
    values = np.full(CAPTIONS - SEEN, np.nan)
    names = [f"{condition}, {size}", *(f"{condition}: {draw}, {size}" for draw in range(DRAWN))]
    answers = [[*training["answers"][name]] for name in names if name in training["answers"]]
    values[training["rows"]] = (np.array(answers, int) >= least).mean(0)
    return values


def less(trainings: Mapping[str, Any], more: str, fewer: str) -> np.ndarray:
    """Return how much more comes back under one condition than under another one [trainings, captions]."""
    pairs = [[values_of(one, name, SIZES[0]) for name in (more, fewer)] for one in trainings.values()]
    return np.stack([a - b for a, b in pairs])


def findings_of(trainings: Mapping[str, Any]) -> dict[str, Any]:
    """Return contrasts with Holm's p, and what comes back by edit, set and size, from all answers."""
    trainings = {name: one for name, one in trainings.items() if len(one["rows"]) >= FEWEST_PAIRS}
    differences = {name: less(trainings, *pair) for name, pair in CONTRASTS.items()}
    names = [("all", len(ALL)), *product(("P", "I", "others of P", "others of I"), SIZES)]
    shares = dict[str, dict[str, Any]]()
    for edit, (name, size), question in product(("removed", "empty"), names, QUESTIONS):
        least, row = QUESTIONS[question], shares.setdefault(f"{edit}, {name}, {size}", {})
        values = np.stack([values_of(one, f"{edit}, {name}", size, least) for one in trainings.values()])
        interval, each = stats.bootstrap_of_trainings(values), stats.mean_without_nan(values)
        row[question] = {"all": stats.rounded(interval), "each": stats.rounded(each)}
    return {"contrasts": stats.contrasts_of_trainings(differences), "shares": shares}


if __name__ == "__main__":
    cli.main(run)

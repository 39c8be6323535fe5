"""What does a minute of video lose: objects, their colours, or their motion? (README.md)

    python experiments/findings/long_rollouts/drift_losses.py --measure outputs/mini1 --device cuda
    python experiments/findings/long_rollouts/drift_losses.py outputs/drift/*.json

The first writes a training's answers, a digit a second of each video, and its motion, to
outputs/drift/NAME.json; it goes on where it stopped. The second puts trainings together in
drift_losses.json and prints contrasts.
"""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import load, miniature
from experiments.analysis import stats
from experiments.analysis.drift import FROM, motion
from experiments.analysis.panels import table
from experiments.caches.files import Record, save_report
from experiments.provenance import environment
from experiments.running import cli
from wan.files import read_json

FOLDER = Path(__file__).parent
CAPTIONS, SEEDS, NUM_FRAMES = 18, (0, 1, 2), 240
POLICIES = {
    "full": "full",
    "9/0": "window,window=9",
    "9/3": "window,window=9,sink=3",
    "21/0": "window,window=21",
    "21/3": "window,window=21,sink=3",
}
RENDERED = "rendered"  # the control: scenes as they should be
MEASURES = "visible", "right", "right | visible", "color | visible", "motion", "motion | visible"
CONTRASTS = {  # name -> measure, the policy that should have more, the other one
    "1: visible, 9/3 less 9/0": ("visible", "9/3", "9/0"),
    "2: visible, 21/3 less 21/0": ("visible", "21/3", "21/0"),
    "3: motion, 9/0 less 9/3": ("motion", "9/0", "9/3"),
    "4: motion, 21/0 less 21/3": ("motion", "21/0", "21/3"),
}
BESIDE = {  # not tested; 5 and 6 are predicted to lie within 0.1 of 0
    "5: right | visible, 9/3 less 9/0": ("right | visible", "9/3", "9/0"),
    "6: right | visible, 21/3 less 21/0": ("right | visible", "21/3", "21/0"),
    "7: motion | visible, 9/0 less 9/3": ("motion | visible", "9/0", "9/3"),
    "8: motion | visible, 21/0 less 21/3": ("motion | visible", "21/0", "21/3"),
}


def run(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, nargs="*", help="what --measure wrote, a file a training")
    parser.add_argument("--measure", type=Path, help="directory of a training, whose answers to write")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num_frames", type=int, default=NUM_FRAMES, help="fewer for a trial")
    parser.add_argument("--judges", type=int, default=2, help="processes that judge videos")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/drift"))
    args = parser.parse_args(argv)
    if args.measure:
        with ProcessPoolExecutor(args.judges, get_context("spawn")) as pool:
            measure(args.measure, args.device, args.num_frames, pool, args.output_dir)
        return
    output = FOLDER / "drift_losses.json"
    trainings = {path.stem: read_json(path) for path in args.answers}
    if not trainings:
        trainings = read_json(output)["trainings"]
    report = findings_of(trainings)
    save_report(report | {"trainings": trainings}, output)
    for part in ("contrasts", "policies"):
        print(table([{part: name} | row for name, row in report[part].items()]))


def scenes_of() -> list[miniature.Scene]:
    """Return scenes of one shape, of two that cross and of a wall in turn, as compare_policies.py does."""
    rows = zip(
        *(miniature.held_out_scenes(kinds, 2 * CAPTIONS) for kinds in miniature.SETS.values()), strict=True
    )
    scenes = {scene.caption: scene for row in reversed([*rows]) for scene in reversed(row)}
    return [*reversed(scenes.values())][:CAPTIONS]


# --- Videos -> a digit a second, and motion
def answers_of(pixels: np.ndarray, scene: miniature.Scene) -> tuple[str, str]:
    """Judge a video uint8 [T, 3, H, W] -> a digit a second, and its motion in thousandths of a side a second.

    0: not all shapes are in sight; else 1, + 1 for the caption's outlines, + 2 for its colours.
    """
    torch.set_num_threads(1)
    seconds = miniature.judge_seconds(torch.from_numpy(pixels).float() / 255, scene)
    digits = seconds.visible * (1 + seconds.shape.int() + 2 * seconds.color.int())
    thousandths = (1000 * motion(pixels.transpose(0, 2, 3, 1))).round().astype(int)
    return "".join(map(str, digits.tolist())), " ".join(map(str, thousandths.tolist()))


def measure(directory: Path, device: str, num_frames: int, pool: ProcessPoolExecutor, folder: Path) -> None:
    """Roll out all policies of one training, and write the answers after each."""
    scenes, path = scenes_of(), folder / f"{directory.name}.json"
    pairs = [(scene, seed) for scene in scenes for seed in SEEDS]
    report: Record = {"kinds": [scene.kind for scene in scenes], "answers": {}, "motion": {}}
    if path.exists():
        report = read_json(path)
    for name in (*POLICIES, RENDERED):
        if name in report["answers"]:
            continue
        if name == RENDERED:  # a scene has no seed
            videos = [
                one for scene in scenes for one in miniature.render_videos([scene], 1 + 4 * (num_frames - 1))
            ]
            pixels = [(video * 255).round().byte().numpy() for video in videos]
            shown = scenes
        else:
            session = load(
                "wan_mini",
                ckpt_dir=directory,
                checkpoint_path=directory / "self_forcing_mini.pt",
                device=device,
                dtype="float32",
                num_frames=num_frames,
                cache_policy=POLICIES[name],
            )
            runs = session.generate([scene.caption for scene, _ in pairs], seeds=[seed for _, seed in pairs])
            latents = torch.cat([one.latents for one in runs])
            decoded = [(session.vae.decode(part) * 255).round().byte().cpu() for part in latents.split(6)]
            pixels = [*torch.cat(decoded).numpy()]
            shown = [scene for scene, _ in pairs]
            report |= {"weights_sha256": session.weights_sha256, "environment": environment(session.device)}
        answers = [*pool.map(answers_of, pixels, shown)]
        report["answers"][name] = [digits for digits, _ in answers]
        report["motion"][name] = [moves for _, moves in answers]
        save_report(report, path)


# --- Answers -> numbers
def values_of(training: Mapping[str, Any], policy: str, measure: str) -> np.ndarray:
    """Return a measure of a policy for each caption; given `visible`, NaN where nothing is ever in sight."""
    shape = len(training["kinds"]), -1  # [captions, seeds · seconds]
    digits = np.array([[*row][FROM:] for row in training["answers"][policy]], int).reshape(shape)
    seen = digits > 0
    values = {"visible": seen, "right": digits == 4, "color": digits >= 3}
    values["motion"] = np.array([row.split()[FROM:] for row in training["motion"][policy]], float) / 1000
    value = values[measure.partition(" ")[0]].reshape(shape).astype(float)
    if measure.endswith("| visible"):
        value[~seen] = np.nan
    return stats.mean_without_nan(value)


def less(trainings: Mapping[str, Any], measure: str, more: str, fewer: str) -> np.ndarray:
    """Return how much a measure of one policy is above that of another one [trainings, captions]."""
    pairs = [[values_of(one, name, measure) for name in (more, fewer)] for one in trainings.values()]
    return np.stack([a - b for a, b in pairs])


def findings_of(trainings: Mapping[str, Any]) -> dict[str, Any]:
    """Return contrasts with Holm's p, and every policy's measures: of all scenes, and of each kind."""
    contrasts = stats.contrasts_of_trainings({name: less(trainings, *row) for name, row in CONTRASTS.items()})
    contrasts |= {name: stats.contrast_of_trainings(less(trainings, *row)) for name, row in BESIDE.items()}
    kinds = np.array(next(iter(trainings.values()))["kinds"])
    policies: dict[str, Record] = {}
    for policy, measure in product((*POLICIES, RENDERED), MEASURES):
        values = np.stack([values_of(one, policy, measure) for one in trainings.values()])
        row = policies.setdefault(policy, {})
        interval, each = stats.bootstrap_of_trainings(values), stats.mean_without_nan(values)
        row[measure] = {"all": stats.rounded(interval), "each": stats.rounded(each)}
        for kind in miniature.KINDS:
            of_kind = float(stats.mean_without_nan(stats.mean_without_nan(values[:, kinds == kind])))
            if np.isfinite(of_kind):  # of trainings in which something is in sight
                row[f"{measure}, {kind}"] = round(of_kind, 3)
    return {"contrasts": contrasts, "policies": policies}


if __name__ == "__main__":
    cli.main(run)

"""Can 21 frames predict how much heads will prefer frame 0 in longer videos? (README.md)

    python experiments/findings/first_frame/sink_forecast.py --measure outputs/mini1
    python experiments/findings/first_frame/sink_forecast.py outputs/sink_forecast/*.json

The first writes r of a training of the miniature to outputs/sink_forecast/NAME.json; the second puts these
together in sink_forecast.json, with r of the real model's published attention.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import experiments.analysis.rope_waves as rw
from experiments import capture, intervene, load, miniature
from experiments.analysis import published, stats
from experiments.analysis.first_frame import matrices
from experiments.analysis.panels import table
from experiments.caches import load_cache
from experiments.caches.files import Record, save_report
from experiments.caches.view import open_profiles
from experiments.provenance import environment
from experiments.running import cli
from wan.files import read_json
from wan.interventions import Band, Move

OUTPUT = Path(__file__).with_name("sink_forecast.json")
RIDGES, RIDGE = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), 1e-3  # the best of them on castle
SHORT, LONG = 21, 72  # latent frames
JITTERS, SPREAD, CAPTIONS, BLOCK = 30, 0.35, 6, 3  # null frequencies are RoPE's times e^u, |u| < SPREAD
MOVE = Move(frames=("first",), offset=3, passes="denoise", steps=(0,))  # of the pass that is captured
BAND = Band(bands=(0,), scale=0.0, passes="denoise", steps=(0,))
EDITS = {"Move by 3": MOVE, "Band 0 off": BAND}
POLICIES = {"full": "full", "9/3": "window,window=9,sink=3", "9/3 moved": "deep_sink,window=9,sink=3"}
POLICIES |= {"21/3": "window,window=21,sink=3", "21/3 moved": "deep_sink,window=21,sink=3"}
METHODS = "waves and s", "no ridge", "s alone", "persistence", "Fourier and s"
CONTRASTS = {"1: waves and s less s alone": "s alone", "2: waves and s less persistence": "persistence"}


def run(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, nargs="*", help="what --measure wrote, a file a training")
    parser.add_argument("--measure", type=Path, help="directory of a training")
    args = parser.parse_args(argv)
    if args.measure:
        return save_report(measure(args.measure), Path(f"outputs/sink_forecast/{args.measure.name}.json"))
    trainings = {path.stem: read_json(path) for path in args.answers} or read_json(OUTPUT)["trainings"]
    report = findings_of(trainings) | {"published": of_published(), "trainings": trainings}
    save_report(report, OUTPUT)
    for part in ("contrasts", "r"):
        print(table([{part: name} | row for name, row in report[part].items()]))


class Block(NamedTuple):
    """Positions of a block's queries and of its context's keys, frame 0 first, and frame 0's excess."""

    q: Sequence[float]
    k: Sequence[float]
    excess: np.ndarray  # [layers, H] logits over the mean of the other keys, a mean over queries


def fits_of(matrix: np.ndarray, bands: np.ndarray, ridge: float = RIDGE) -> dict[str, rw.MatrixFit]:
    """Return the fits whose predictions are compared, of a short video [layers, H, F, F]."""
    blocks, last = [BLOCK] * (SHORT // BLOCK), SHORT - BLOCK
    s_alone = rw.fit_matrix(matrix, blocks, np.empty(0))
    fourier = 2 * np.pi * np.arange(1, len(bands) + 1) / SHORT
    fits = {
        "waves and s": rw.fit_matrix(matrix, blocks, bands, ridge),
        "no ridge": rw.fit_matrix(matrix, blocks, bands),
        "s alone": s_alone,
        "persistence": s_alone._replace(s=rw.first_excess(matrix[..., last:, :last])),  # of the last block
        "Fourier and s": rw.fit_matrix(matrix, blocks, fourier, ridge),
    }
    for n, draw in enumerate(np.random.default_rng(0).uniform(-SPREAD, SPREAD, (JITTERS, len(bands)))):
        fits[f"jittered {n}"] = rw.fit_matrix(matrix, blocks, bands * np.exp(draw), ridge)
    return fits


def change_of(fit: rw.MatrixFit, block: Block, edit: Any) -> np.ndarray:
    """Predict by how much an edit changes frame 0's excess."""
    k, waves = [*block.k], fit.waves
    if edit is MOVE:
        k[0] += MOVE.offset or 0
    else:
        others = np.arange(len(waves.frequencies)) > 0
        waves = waves._replace(cosine=waves.cosine * others, sine=waves.sine * others)
    return rw.predict_first(fit._replace(waves=waves), block.q, k) - rw.predict_first(fit, block.q, block.k)


def forecast(fits: Mapping[str, rw.MatrixFit], blocks: list[Block], base: list[Block], edit: Any) -> dict:
    """Return r over heads by block of each method; of an edit, of what it changes of the base's blocks."""
    r: dict[str, list[float | None]] = {"jittered": []}
    for name, fit in fits.items():
        by_block = []
        for block, unedited in zip(blocks, base, strict=True):
            pair = rw.predict_first(fit, block.q, block.k), block.excess
            if edit is not None:
                pair = change_of(fit, block, edit), block.excess - unedited.excess
            by_block.append(float(stats.pearson(*(values.ravel() for values in pair))))
        if name in METHODS:  # a method that predicts no change has no r
            r[name] = [round(value, 3) if np.isfinite(value) else None for value in by_block]
        else:
            r["jittered"].append(round(float(np.mean(by_block)), 3))
    return r


def of_published() -> dict[str, Any]:
    """Choose the ridge on castle's last block of 72 frames; predict eagle from 21 frames of both prompts."""
    views = {}
    for prompt, length in product(("castle", "eagle"), (SHORT, LONG)):
        path = published.path_of(f"self_forcing_dmd_{prompt}_{length}f.pt")
        views[prompt, length] = open_profiles(load_cache(path))
    bands, last = rw.fastest_frequencies(rw.WAN_HEAD_DIM), LONG - BLOCK
    measured = rw.first_excess(np.asarray(views["castle", LONG].profiles())[..., None, :last])
    scores = {}
    for ridge in RIDGES:
        fit = fits_of(matrices(views["castle", SHORT]), bands, ridge)["waves and s"]
        predicted = rw.predict_first(fit, range(last, LONG), range(last))
        scores[ridge] = round(float(stats.pearson(predicted.ravel(), measured.ravel())), 3)
    assert scores[RIDGE] == max(scores.values())
    rows = {n: matrices(views["eagle", LONG])[..., n : n + BLOCK, :n] for n in range(SHORT, LONG, BLOCK)}
    blocks = [Block(range(n, n + BLOCK), range(n), rw.first_excess(row)) for n, row in rows.items()]
    found: Record = {"castle: r by ridge": {str(ridge): r for ridge, r in scores.items()}}
    for prompt in ("eagle", "castle"):
        fits = fits_of(matrices(views[prompt, SHORT]), bands)
        found[f"eagle from {prompt}"] = forecast(fits, blocks, blocks, None)
    return found


def measure(directory: Path) -> dict[str, Any]:
    """Predict 72 frames of every caption from 21 of it and of the next one."""
    scenes = [miniature.held_out_scenes(kinds, CAPTIONS // 3) for kinds in miniature.SETS.values()]
    captions = [scene.caption for row in zip(*scenes, strict=True) for scene in row]
    weights = {"ckpt_dir": directory, "checkpoint_path": directory / "self_forcing_mini.pt"}
    about: Record = {"captions": captions, "r": {}}

    def rollouts(length: int, policy: str, edit: Any) -> list[Any]:
        session = load("wan_mini", num_frames=length, cache_policy=policy, device="cpu", **weights)
        edits = intervene(edit) if edit else nullcontext()
        with capture(session, layers=[*range(8)], steps=[0], mass=False), edits:
            runs = session.generate(captions, seeds=[*range(CAPTIONS)])
        about.update(weights_sha256=session.weights_sha256, environment=environment(session.device))
        return runs

    short = rollouts(SHORT, "full", None)
    bands = rw.fastest_frequencies(short[0].records[0].q_shape[-1])
    videos = [one.frame_matrices("frame_logits", one.layers, [0])[:, 0].numpy() for one in short]
    fits, unedited = [fits_of(video, bands) for video in videos], list[list[Block]]()
    for condition in (*POLICIES, *EDITS):
        edit = EDITS.get(condition)
        blocks = [blocks_of(run) for run in rollouts(LONG, POLICIES.get(condition, "full"), edit)]
        unedited = unedited or blocks
        for label, shift in (("itself", 0), ("another caption", 1)):
            about["r"][f"{condition}, from {label}"] = [
                forecast(fits[(n + shift) % CAPTIONS], blocks[n], unedited[n], edit) for n in range(CAPTIONS)
            ]
    return about


def blocks_of(run: Any) -> list[Block]:
    """Return the blocks of a run that lie behind a short video."""
    found = []
    for number in range(SHORT // BLOCK, LONG // BLOCK):
        calls = [call for call in run.records if call["block"] == number]
        positions, context = calls[0]["slot_position"], len(calls[0]["slot_position"]) - BLOCK
        rows = np.stack([call["frame_logits"][0].numpy()[..., :context] for call in calls])
        found.append(Block(positions[context:], positions[:context], rw.first_excess(rows)))
    return found


def findings_of(trainings: Mapping[str, Any]) -> dict[str, Any]:
    """Return contrasts with Holm's p, and mean r by condition: of all trainings, and of each."""
    primary, r = "full, from another caption", dict[str, dict[str, Any]]()
    waves = values_of(trainings, primary, METHODS[0])
    others = {name: values_of(trainings, primary, method) for name, method in CONTRASTS.items()}
    contrasts = stats.contrasts_of_trainings({name: waves - other for name, other in others.items()})
    for condition, videos in next(iter(trainings.values()))["r"].items():
        methods = [name for name in METHODS if None not in videos[0][name]]
        means = stats.rounded([values_of(trainings, condition, name).mean() for name in methods])
        null = [[video["jittered"] for video in one["r"][condition]] for one in trainings.values()]
        draws = np.mean(null, (0, 1))
        r[condition] = dict(zip(methods, means, strict=True))
        r[condition]["jittered: median, best"] = stats.rounded([np.median(draws), draws.max()])
        r[condition]["each"] = stats.rounded(values_of(trainings, condition, METHODS[0]).mean(1))
    return {"contrasts": contrasts, "r": r}


def values_of(trainings: Mapping[str, Any], condition: str, method: str) -> np.ndarray:
    """Return r, a mean over blocks [trainings, captions]."""
    return np.array([[np.mean(r[method]) for r in one["r"][condition]] for one in trainings.values()])


if __name__ == "__main__":
    cli.main(run)

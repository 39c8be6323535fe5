"""Measure how much of Figure 4's curves are waves of temporal RoPE (docs/first_frame.md).

python experiments/benchmarks/reproduce/rope_waves.py
"""

from functools import partial
from typing import Any

import numpy as np

import experiments.analysis.rope_waves as rw
from experiments.analysis import published
from experiments.analysis.panels import choose_heads
from experiments.analysis.stats import pearson, rounded, spearman
from experiments.benchmarks.reproduce.common import finding_parser, save_finding
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.figures.heads import curves_in_parts
from experiments.figures.heads import first_by_block as draw_by_block
from experiments.running.cli import main

PROMPTS, HEAD_DIM = ("eagle", "castle"), 128
SINK = 2.0  # logits above the other context frames: what earlier work calls a sink
STEADY_FROM, STEADY_TO = 9, 18  # first query frames of the blocks at which frame 0 must be the highest
DRAWS = 1000  # of the bootstrap
FREQUENCIES = rw.temporal_frequencies(HEAD_DIM)[: rw.NUM_BANDS]
PAPER_HEADS = {label: (layer, head) for layer, head, label in published.FIGURE4_HEADS}


def run(argv=None):
    args = finding_parser(__doc__, "docs/rope_waves.json").parse_args(argv)
    views = {
        (prompt, length): open_profiles(
            load_cache(published.FOLDER / f"self_forcing_dmd_{prompt}_{length}f.pt")
        )
        for prompt in PROMPTS
        for length in (21, 72)
    }
    curves = {key: rw.last_block_context(view.profiles(), view.block_sizes) for key, view in views.items()}
    report: dict[str, Any] = {
        "frequencies": rounded(FREQUENCIES, 4),
        "curves of 72 frames": {p: of_curves(*curves[p, 72], *curves[p, 21]) for p in PROMPTS},
        "query statistics": {p: against_queries(*curves[p, 72]) for p in PROMPTS},
        "matrices": {},
    }
    steady, sure = [], []
    for (prompt, length), view in views.items():
        if (matrix := view.frame_matrices()) is None:  # castle has no 72-frame matrix
            continue
        fit, sizes = rw.fit_matrix(matrix, view.block_sizes, FREQUENCIES), view.block_sizes
        queries, excess, rank = rw.first_by_block(matrix, sizes)
        starts, high = [block.start for block in queries], excess > SINK
        parts = rw.split_first(matrix, sizes, fit)._asdict().items()
        report["matrices"][f"{prompt}, {length} frames"] = {
            "r2 within rows median": interval(fit.r_squared_within_rows),
            "s": {"mean": interval(fit.s, np.mean), "median": interval(fit.s)},
            "first query frame": starts,
            "heads above 2 logits": high.sum((0, 1)).tolist(),
            "of those at 18-20, at each block": (high & high[..., [starts.index(18)]]).sum((0, 1)).tolist(),
            **{
                label: {
                    "first - context of the last block": {n: round(float(x[head]), 2) for n, x in parts},
                    "excess by block": rounded(excess[head], 1),
                    "rank by block": rank[head].tolist(),
                }
                for label, head in PAPER_HEADS.items()
            },
        }
        if length == 21:  # frame 0 is the highest context frame at every block from 9-11 to 18-20
            wanted = [i for i, start in enumerate(starts) if STEADY_FROM <= start <= STEADY_TO]
            steady.append((rank[..., wanted] == 1).all(-1))
            sure.append(fit.s >= 0.5)
    both = np.logical_and(*steady)
    counts = {"both": both, "both, and s at least 0.5 for both prompts": both & np.logical_and(*sure)}
    heads = dict(zip(PROMPTS, steady, strict=True)) | counts
    report["steady heads"] = {name: int(found.sum()) for name, found in heads.items()}
    shown = choose_heads(views["eagle", 72], published.FIGURE4_HEADS)[0]
    by_block, in_parts = rw.panels_of_view(views["eagle", 72], shown)
    about = "Wan2.1-T2V-1.3B, Self-Forcing, eagle, t = 1000"
    figures = {
        "first_frame_by_block": draw_by_block(by_block, "Frame 0 by block of queries", about),
        "curves_in_parts": curves_in_parts(in_parts, "Context curves in parts", about),
    }
    save_finding(args, report, figures)


def interval(values: np.ndarray, statistic=np.median) -> list[float]:
    """Return a statistic of values [layers, heads, ...] and its 95 % interval; heads are drawn in layers."""
    layers, heads = values.shape[:2]
    drawn = np.random.default_rng(0).integers(0, heads, (DRAWS, layers, heads))
    samples = [statistic(values[np.arange(layers)[:, None], d]) for d in drawn]
    return rounded([statistic(values), *np.percentile(samples, (2.5, 97.5))])


def of_curves(
    curves: np.ndarray, distances: np.ndarray, short_curves: np.ndarray, short_distances: np.ndarray
) -> dict[str, Any]:
    """Return R² of the waves, of held-out frames, of other frequencies, and r with the 21-frame curves."""

    def median_r2(frequencies: np.ndarray) -> float:
        fitted = rw.fit_waves(curves, distances, frequencies).at(distances)
        return round(float(np.median(rw.r_squared(curves, fitted))), 3)

    waves = rw.fit_waves(curves, distances, FREQUENCIES)
    held_out = partial(rw.held_out_r_squared, curves, distances)
    null = [np.median(held_out(draw)) for draw in rw.jittered(FREQUENCIES)]
    bases = {str(b): rw.temporal_frequencies(HEAD_DIM, b)[: rw.NUM_BANDS] for b in (5000, 7500, 10000, 15000)}
    return {
        "context frames": len(distances),
        "r2 median": interval(rw.r_squared(curves, waves.at(distances))),
        "held-out r2 median": interval(held_out(FREQUENCIES)),
        "jittered held-out r2: median, best of 20": rounded([np.median(null), max(null)]),
        "one band, 1 rad a frame": median_r2(FREQUENCIES[:1]),
        "scale of all frequencies": {str(s): median_r2(FREQUENCIES * s) for s in (0.95, 1.05)},
        "base": {base: median_r2(frequencies) for base, frequencies in bases.items()},
        "r with 21 frames, median": interval(pearson(waves.at(short_distances), short_curves)),
    }


def against_queries(curves: np.ndarray, distances: np.ndarray) -> dict[str, Any]:
    """Return Spearman's ρ over heads of fitted amplitudes with |E q_b| of LongLive's queries, by band."""
    amplitude = rw.fit_waves(curves, distances, FREQUENCIES).amplitude  # [layers, heads, B]
    means = np.load(published.FOLDER / "longlive_query_means.npz")
    found: dict[str, Any] = {}
    for name in ("81f", "120f"):
        size = np.abs(means[f"q_mean_{name}"])[..., : len(rw.temporal_frequencies(HEAD_DIM))]
        rows, ranks = [], []
        for b in range(rw.NUM_BANDS):
            pair = np.stack([amplitude[..., b], size[..., b]], -1)
            rows.append(interval(pair, lambda x: spearman(*x.reshape(-1, 2).T)))
            every = [
                spearman(amplitude[..., b].ravel(), other) for other in size.reshape(-1, size.shape[-1]).T
            ]
            ranks.append(1 + int((np.array(every) > every[b]).sum()))
        found[name] = {"rho by band": rows, "rank of the own band among the temporal ones": ranks}
    return found


if __name__ == "__main__":
    main(run)

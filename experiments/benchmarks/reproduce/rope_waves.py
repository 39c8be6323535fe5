"""Measure how much of Figure 4's curves are waves of temporal RoPE (docs/first_frame.md).

python experiments/benchmarks/reproduce/rope_waves.py
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis import published
from experiments.analysis.panels import choose_heads
from experiments.analysis.rope_waves import (
    NUM_BANDS,
    MatrixFit,
    first_by_block,
    fit_matrix,
    fit_waves,
    held_out_r_squared,
    jittered,
    last_block_context,
    panels_of_view,
    r_squared,
    split_first,
    temporal_frequencies,
)
from experiments.analysis.stats import pearson, spearman
from experiments.benchmarks.harness import finding_parser, save_finding
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.figures.heads import curves_in_parts
from experiments.figures.heads import first_by_block as draw_by_block
from experiments.running.cli import main

PROMPTS, LENGTHS, HEAD_DIM = ("eagle", "castle"), (21, 72), 128
SINK = 2.0  # logits above the other context frames: what earlier work calls a sink
STEADY_FROM, STEADY_TO = 9, 18  # first query frames of the blocks at which frame 0 must be the highest
DRAWS = 1000  # of the bootstrap
FREQUENCIES = temporal_frequencies(HEAD_DIM)[:NUM_BANDS]
PAPER_HEADS = {label: (layer, head) for layer, head, label in published.FIGURE4_HEADS}


def run(argv=None):
    parser = finding_parser(__doc__, "docs/rope_waves.json")
    parser.add_argument("--heads_path", type=Path, default=Path("docs/rope_waves_heads.csv"))
    args = parser.parse_args(argv)
    views = {
        (prompt, length): open_profiles(
            load_cache(published.FOLDER / f"self_forcing_dmd_{prompt}_{length}f.pt")
        )
        for prompt in PROMPTS
        for length in LENGTHS
    }
    curves = {key: last_block_context(view.profiles(), view.block_sizes) for key, view in views.items()}
    matrices = {key: (view.frame_matrices(), view.block_sizes) for key, view in views.items()}
    matrices = {key: pair for key, pair in matrices.items() if pair[0] is not None}
    fits = {key: fit_matrix(*pair, FREQUENCIES) for key, pair in matrices.items()}
    long = {prompt: curves[prompt, 72] for prompt in PROMPTS}
    report = {
        "frequencies": [round(float(w), 4) for w in FREQUENCIES],
        "curves of 72 frames": {prompt: of_curves(*long[prompt]) for prompt in PROMPTS},
        "other length": {prompt: other_length(long[prompt], curves[prompt, 21]) for prompt in PROMPTS},
        "query statistics": {prompt: against_queries(*long[prompt]) for prompt in PROMPTS},
        "matrices": {name(key): of_matrix(*matrices[key], fits[key]) for key in matrices},
        "first frame by block of queries": {name(key): by_block(*matrices[key]) for key in matrices},
        "steady heads": steady_heads({p: (*matrices[p, 21], fits[p, 21]) for p in PROMPTS}),
    }
    shown = choose_heads(views["eagle", 72], published.FIGURE4_HEADS)[0]
    by_block_panels, parts = panels_of_view(views["eagle", 72], shown)
    about = "Wan2.1-T2V-1.3B, Self-Forcing, eagle, t = 1000"
    figures = {
        "first_frame_by_block": draw_by_block(by_block_panels, "Frame 0 by block of queries", about),
        "curves_in_parts": curves_in_parts(parts, "Context curves in parts", about),
    }
    args.heads_path.write_text(heads_table(curves, fits))
    save_finding(args, report, figures)


def name(key: tuple[str, int]) -> str:
    return f"{key[0]}, {key[1]} frames"


def interval(values: np.ndarray, statistic=np.median) -> list[float]:
    """Return a statistic of values [layers, heads, ...] and its 95 % interval; heads are drawn in layers."""
    layers, heads = values.shape[:2]
    drawn = np.random.default_rng(0).integers(0, heads, (DRAWS, layers, heads))
    samples = [statistic(values[np.arange(layers)[:, None], d]) for d in drawn]
    return [round(float(x), 3) for x in (statistic(values), *np.percentile(samples, (2.5, 97.5)))]


def median_r2(curves: np.ndarray, distances: np.ndarray, frequencies: np.ndarray) -> float:
    fitted = fit_waves(curves, distances, frequencies).at(distances)
    return round(float(np.median(r_squared(curves, fitted))), 3)


def of_curves(curves: np.ndarray, distances: np.ndarray) -> dict[str, Any]:
    """Return R² of the waves, of held-out frames, of null frequencies, and the scans."""
    fitted = fit_waves(curves, distances, FREQUENCIES).at(distances)
    nulls = jittered(FREQUENCIES)
    null = [median_r2(curves, distances, draw) for draw in nulls]
    held_null = [float(np.median(held_out_r_squared(curves, distances, draw))) for draw in nulls]
    scales = np.round(np.arange(0.8, 1.2001, 0.01), 2)
    bases = (2500, 5000, 7500, 9000, 10000, 11000, 12500, 15000, 20000, 40000)
    return {
        "context frames": len(distances),
        "numbers per head": 1 + 2 * NUM_BANDS,
        "r2 median": interval(r_squared(curves, fitted)),
        "held-out r2 median": interval(held_out_r_squared(curves, distances, FREQUENCIES)),
        "jittered r2: median, best of 20": [round(float(np.median(null)), 3), max(null)],
        "jittered held-out r2: median, best of 20": [round(float(f(held_null)), 3) for f in (np.median, max)],
        "one band, 1 rad a frame": median_r2(curves, distances, FREQUENCIES[:1]),
        "scale of all frequencies": {str(s): median_r2(curves, distances, FREQUENCIES * s) for s in scales},
        "base": {
            str(b): median_r2(curves, distances, temporal_frequencies(HEAD_DIM, b)[:NUM_BANDS]) for b in bases
        },
    }


def other_length(long, short) -> dict[str, list[float]]:
    """Return the correlation per head of the 21-frame curve with the waves fitted at 72 frames."""
    (curves, distances), (short_curves, short_distances) = long, short
    predicted = fit_waves(curves, distances, FREQUENCIES).at(short_distances)

    whole, later = (pearson(predicted[..., n:], short_curves[..., n:]) for n in (0, 3))
    return {"r median": interval(whole), "r median without frames 0-2": interval(later)}


def against_queries(curves: np.ndarray, distances: np.ndarray) -> dict[str, Any]:
    """Return Spearman's ρ over heads of fitted amplitudes with |E q_b| of LongLive's queries, by band."""
    amplitude = fit_waves(curves, distances, FREQUENCIES).amplitude  # [layers, heads, B]
    means = np.load(published.FOLDER / "longlive_query_means.npz")
    found: dict[str, Any] = {}
    for run_name in ("81f", "120f"):
        size = np.abs(means[f"q_mean_{run_name}"])[..., : len(temporal_frequencies(HEAD_DIM))]
        pairs = [np.stack([amplitude[..., b], size[..., b]], -1) for b in range(NUM_BANDS)]
        flat = size.reshape(-1, size.shape[-1]).T
        crossed = np.array(
            [[spearman(amplitude[..., b].ravel(), other) for other in flat] for b in range(NUM_BANDS)]
        )
        ranks = [int(1 + (row > row[b]).sum()) for b, row in enumerate(crossed)]
        found[run_name] = {
            "rho by band": [interval(pair, lambda x: spearman(*x.reshape(-1, 2).T)) for pair in pairs],
            "rank of the own band among the temporal ones": ranks,
        }
    return found


def of_matrix(matrix: np.ndarray, block_sizes, fit: MatrixFit) -> dict[str, Any]:
    """Return the whole matrix's fit, and how first − context of Figure 4's heads splits."""
    split = split_first(matrix, block_sizes, fit)
    parts = split._asdict().items()
    return {
        "r2 within rows median": interval(fit.r_squared_within_rows),
        "s": {"mean": interval(fit.s, np.mean), "median": interval(fit.s)},
        "first - context of the last block": {
            label: {part: round(float(value[head]), 2) for part, value in parts}
            for label, head in PAPER_HEADS.items()
        },
    }


def by_block(matrix: np.ndarray, block_sizes) -> dict[str, Any]:
    """Return frame 0's excess and rank by block of queries, of Figure 4's heads and over all heads."""
    queries, excess, rank = first_by_block(matrix, block_sizes)
    starts = [block.start for block in queries]
    high = excess > SINK
    still = high & high[..., [starts.index(18)]]
    return {
        "first query frame": starts,
        "heads above 2 logits": [int(x) for x in high.sum((0, 1))],
        "of those at 18-20, at each block": [int(x) for x in still.sum((0, 1))],
        **{
            label: {
                "excess": [round(float(x), 1) for x in excess[head]],
                "rank": [int(x) for x in rank[head]],
            }
            for label, head in PAPER_HEADS.items()
        },
    }


def steady_heads(atlases: dict[str, tuple]) -> dict[str, Any]:
    """Count heads of which frame 0 is the highest context frame at every block from 9-11 to 18-20."""
    steady = {}
    for prompt, (matrix, block_sizes, _) in atlases.items():
        queries, _, rank = first_by_block(matrix, block_sizes)
        wanted = [i for i, block in enumerate(queries) if STEADY_FROM <= block.start <= STEADY_TO]
        steady[prompt] = (rank[..., wanted] == 1).all(-1)
    both = np.logical_and(*steady.values())
    least = np.minimum(*(fit.s for *_, fit in atlases.values()))
    return {
        **{prompt: int(heads.sum()) for prompt, heads in steady.items()},
        "both": int(both.sum()),
        "both, and s at least 0.5 for both prompts": int((both & (least >= 0.5)).sum()),
    }


def heads_table(curves, fits) -> str:
    """Return a CSV with a row per prompt, length, layer and head: every number above follows from it."""
    header = ["prompt", "frames", "layer", "head", "r2", "held_out_r2", "constant"]
    header += [f"{what}_{b}" for what in ("amplitude", "phase") for b in range(NUM_BANDS)]
    lines = [",".join([*header, "matrix_s", "matrix_r2_within_rows"])]
    for (prompt, length), (curve, distances) in curves.items():
        frequencies = FREQUENCIES[2 * np.pi / FREQUENCIES <= len(distances)]  # longer ones are lines there
        waves, fit = fit_waves(curve, distances, frequencies), fits.get((prompt, length))
        r2, held = r_squared(curve, waves.at(distances)), held_out_r_squared(curve, distances, frequencies)
        absent = [np.nan] * (NUM_BANDS - len(frequencies))
        for layer, head in np.ndindex(r2.shape):
            at = (layer, head)
            row = [r2[at], held[at], waves.constant[at], *waves.amplitude[at], *absent]
            row += [*waves.phase[at], *absent]
            row += [fit.s[at], fit.r_squared_within_rows[at]] if fit else []
            values = ["" if np.isnan(v) else f"{v:.3f}" for v in row]
            lines.append(",".join(map(str, [prompt, length, *at, *values])))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(run)

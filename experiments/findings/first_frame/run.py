"""Take Figure 4 apart: waves of temporal RoPE and a preference for the first frame (docs/first_frame.md).

    python experiments/findings/first_frame/run.py

All numbers come from cache/published/, on a CPU in a minute. Writes results.json beside this file and four
figures, among them the README's Figure 4 and frame 0 by block.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import experiments.analysis.rope_waves as rw
from experiments.analysis import measures, published
from experiments.analysis.first_frame import first_frame, key_frame_contrasts, matrices
from experiments.analysis.panels import choose_heads
from experiments.analysis.stats import pearson, rounded, spearman
from experiments.caches import load_cache
from experiments.caches.files import save_report
from experiments.caches.view import Profiles, open_profiles
from experiments.extraction.provenance import choose_device, environment
from experiments.figures import atlas, heads
from experiments.figures.style import save_svg
from experiments.findings.report import finding_parser
from experiments.running.cli import main

PROMPTS, LENGTHS, HEAD_DIM = ("eagle", "castle"), (21, 72), 128
WITH_MATRIX = (("eagle", 21), ("castle", 21), ("eagle", 72))  # castle's 72 frames are its last block alone
LATER_LINE = slice(12, 36)  # another reference for contrasts: level and trend are not identified
SINK = 2.0  # logits above the other context frames: what earlier work calls a sink
STEADY_FROM, STEADY_TO = 9, 18  # first query frames of the blocks at which frame 0 must be the highest
DRAWS = 1000  # of the bootstrap over heads within layers
FREQUENCIES = rw.temporal_frequencies(HEAD_DIM)[: rw.NUM_BANDS]
PAPER_HEADS = {label: (layer, head) for layer, head, label in published.FIGURE4_HEADS}

Views = Mapping[tuple[str, int], Profiles]  # by prompt and latent frames


def run(argv=None):
    args = finding_parser(__doc__, "first_frame").parse_args(argv)
    views = {
        (prompt, length): open_profiles(
            load_cache(published.FOLDER / f"self_forcing_dmd_{prompt}_{length}f.pt")
        )
        for prompt in PROMPTS
        for length in LENGTHS
    }
    made = {"environment": environment(choose_device(args.device))}
    save_report(made | report_of(views), args.output_path)
    print(args.output_path)
    for name, figure in figures_of(views).items():
        print(save_svg(figure, args.figures / f"{name}.svg"))


def report_of(views: Views) -> dict[str, Any]:
    """Return all numbers of the article: waves, frame 0 by block, and the first-frame effect s."""
    curves = {key: rw.last_block_context(view.profiles(), view.block_sizes) for key, view in views.items()}
    blocks, steady = first_frame_by_block(views)
    return {
        "frequencies": rounded(FREQUENCIES, 4),
        "curves of 72 frames": {p: of_curves(*curves[p, 72], *curves[p, 21]) for p in PROMPTS},
        "query statistics": {p: against_queries(*curves[p, 72]) for p in PROMPTS},
        "matrices": blocks,
        "steady heads": steady,
        **first_frame_effects(views),
    }


def interval(values: np.ndarray, statistic=np.median) -> list[float]:
    """Return a statistic of values [layers, heads, ...] and its 95 % interval; heads are drawn in layers."""
    layers, heads = values.shape[:2]
    drawn = np.random.default_rng(0).integers(0, heads, (DRAWS, layers, heads))
    samples = [statistic(values[np.arange(layers)[:, None], d]) for d in drawn]
    return rounded([statistic(values), *np.percentile(samples, (2.5, 97.5))])


# --- Waves
def of_curves(
    curves: np.ndarray, distances: np.ndarray, short_curves: np.ndarray, short_distances: np.ndarray
) -> dict[str, Any]:
    """Return R² of the waves, of held-out frames, of other frequencies, and r with the 21-frame curves."""

    def median_r2(frequencies: np.ndarray) -> float:
        fitted = rw.fit_waves(curves, distances, frequencies).at(distances)
        return round(float(np.median(rw.r_squared(curves, fitted))), 3)

    waves = rw.fit_waves(curves, distances, FREQUENCIES)
    held_out = partial(rw.held_out_r_squared, curves, distances)
    # The null: frequencies that are no model's, which fit as many numbers to the same frames.
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


# --- Frame 0 by block of queries
def first_frame_by_block(views: Views) -> tuple[dict[str, Any], dict[str, int]]:
    """Return frame 0's excess and rank at every block, and how many heads prefer it at all of them."""
    found, steady, sure = {}, [], []
    for prompt, length in (key for key in views if key in WITH_MATRIX):
        view = views[prompt, length]
        matrix, sizes = matrices(view), view.block_sizes
        fit = rw.fit_matrix(matrix, sizes, FREQUENCIES)
        queries, excess, rank = rw.first_by_block(matrix, sizes)  # [layers, H, blocks] each
        starts, high = [block.start for block in queries], excess > SINK
        parts = rw.split_first(matrix, sizes, fit)._asdict().items()
        found[f"{prompt}, {length} frames"] = {
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
    heads = dict(zip(PROMPTS, steady, strict=True)) | {"both": both}
    heads["both, and s at least 0.5 for both prompts"] = both & np.logical_and(*sure)
    return found, {name: int(which.sum()) for name, which in heads.items()}


# --- The first-frame effect s and its placebos
def first_frame_effects(views: Views) -> dict[str, Any]:
    """Return s, placebos and contrasts of every atlas with a matrix, and how s agrees between atlases."""
    atlases, effects = {}, []
    for prompt, length in WITH_MATRIX:
        view = views[prompt, length]
        found, _ = first_frame(view)
        assert found is not None
        s, placebos = found.fit.effect, np.abs(found.placebos.mean((0, 1)))
        effects.append(s.ravel())
        later = None
        if length >= LATER_LINE.stop:  # long enough for a line through later frames
            far = key_frame_contrasts(matrices(view), view.block_sizes, LATER_LINE.stop, LATER_LINE)
            later = mean_interval(far[..., : LATER_LINE.start]).round(2).tolist()
        error, r_squared = (np.median(x) for x in (found.fit.residual_error, found.fit.r_squared_within_rows))
        atlases[f"{prompt}, {length} frames"] = {
            "heads": s.size,
            "first_minus_middle": summary(measures.head_statistics(view.profiles()).delta),
            "effect": summary(s) | {"residual_error_median": round(float(error), 2)},
            "r_squared_within_rows_median": round(float(r_squared), 2),
            "placebos": {
                "frames": [found.frames[0], found.frames[-1]],
                "largest_mean": round(float(placebos.max()), 2),
                "its_frame": found.frames[int(placebos.argmax())],
                "heads_above_all": int((found.rank == 1).sum()),
                "heads_above_all_to_24": int(found.above_placebos.sum()),
            },
            "contrasts": mean_interval(found.contrasts).round(2).tolist(),  # mean, low, high
            "contrasts_to_frames_12_to_35": later,
        }
    prompts, lengths = (round(float(np.corrcoef(effects[0], s)[0, 1]), 2) for s in effects[1:])
    return {
        "atlases": atlases,
        "correlation_of_s": {"between prompts": prompts, "between lengths": lengths},
    }


def mean_interval(values: np.ndarray) -> np.ndarray:
    """Return the mean over heads of values [layers, H, n] and its 95 % interval, [3, n]."""
    layers, heads, _ = values.shape
    drawn = np.random.default_rng(0).integers(0, heads, (DRAWS, layers, heads, 1))
    means = [np.take_along_axis(values, d, 1).mean((0, 1)) for d in drawn]
    return np.stack([values.mean((0, 1)), *np.percentile(means, (2.5, 97.5), axis=0)])


def summary(values: np.ndarray) -> dict[str, Any]:
    """Return mean, median and how many heads are above 2 logits."""
    above = int((values > measures.DELTA_THRESHOLD).sum())
    mean, median = (round(float(f(values)), 2) for f in (np.mean, np.median))
    return {"mean": mean, "median": median, "heads_above_2": above}


# --- Figures
def figures_of(views: Views) -> dict[str, Figure]:
    """Draw the paper's heads over its curves, frame 0 by block, curves in parts, and key-frame contrasts."""
    # 1. The README's Figure 4: the paper's two heads over its digitised curves.
    view = views["eagle", 21]
    curves, _ = published.curves_for(view, published.FOLDER / published.FIGURE4_CSV, published.FIGURE4_MODEL)
    panels = published.add_reference(choose_heads(view, published.FIGURE4_HEADS)[0], view, curves)
    figure4 = heads.head_curves(panels, view.caption)
    # 2. The same heads at every block of 72 frames, and their curves as waves, s and rest.
    long = views["eagle", 72]
    by_block, in_parts = rw.panels_of_view(long, choose_heads(long, published.FIGURE4_HEADS)[0])
    about = "Wan2.1-T2V-1.3B, Self-Forcing, eagle, t = 1000"
    # 3. Contrasts of the first key frames, of every atlas that has a matrix.
    lines = {}
    for prompt, length in WITH_MATRIX:
        found, _ = first_frame(views[prompt, length])
        assert found is not None
        lines[f"{prompt}, {length} frames"] = mean_interval(found.contrasts)
    num_heads = len(long.layers) * long.num_heads
    about_lines = f"{long.model}, Self-Forcing, {long.pass_label}; mean over {num_heads} heads"
    about_lines += "; grey: every other block"
    return {
        "figure4_published": figure4,
        "first_frame_by_block": heads.first_by_block(by_block, "Frame 0 by block of queries", about),
        "curves_in_parts": heads.curves_in_parts(in_parts, "Context curves in parts", about),
        "key_frames_published": atlas.contrasts_by_frame(lines, about_lines, block=3),
    }


if __name__ == "__main__":
    main(run)

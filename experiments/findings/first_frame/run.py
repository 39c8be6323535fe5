"""Take Figure 4 apart: waves of temporal RoPE and a preference for the first frame (docs/first_frame.md).

    python experiments/findings/first_frame/run.py

All numbers come from cache/published/, on a CPU in a minute. Writes results.json beside this file and two
figures: the README's Figure 4 and frame 0 by block.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import experiments.analysis.rope_waves as rw
from experiments.analysis import published
from experiments.analysis.first_frame import first_frame, matrices
from experiments.analysis.panels import choose_heads
from experiments.analysis.stats import partial_spearman, pearson, rounded, spearman
from experiments.caches import load_cache
from experiments.caches.files import save_report
from experiments.caches.view import Profiles, open_profiles
from experiments.extraction.provenance import environment
from experiments.figures import heads
from experiments.figures.style import save_svg
from experiments.findings.report import finding_parser
from experiments.running.cli import main

PROMPTS, LENGTHS, HEAD_DIM = ("eagle", "castle"), (21, 72), 128
WITH_MATRIX = (("eagle", 21), ("castle", 21), ("eagle", 72))  # castle's 72 frames are its last block alone
STEADY_FROM, STEADY_TO = 9, 18  # first query frames of the blocks at which frame 0 must be the highest
STEADY_S = 0.5  # logits: weights of frame 0 are e^0.5 = 1.6 times those at the same distance
HELD_OUT = {"every third frame": (1, 0.0), "blocks of 3 frames": (3, 0.0), "whole thirds, ridge 1": (23, 1.0)}
JITTERS = 60  # null frequencies of each held-out score
DRAWS = 1000  # of the bootstrap over heads within layers
FREQUENCIES = rw.temporal_frequencies(HEAD_DIM)[: rw.NUM_BANDS]
PAPER_HEADS = {label: (layer, head) for layer, head, label in published.FIGURE4_HEADS}

Views = Mapping[tuple[str, int], Profiles]  # by prompt and latent frames


def run(argv=None):
    args = finding_parser(__doc__, "first_frame").parse_args(argv)
    views = {key: open_profiles(cache_of(*key)) for key in product(PROMPTS, LENGTHS)}
    made = {"environment": environment(torch.device("cpu"))}
    save_report(made | report_of(views), args.output_path)
    print(args.output_path)
    for name, figure in figures_of(views).items():
        print(save_svg(figure, args.figures / f"{name}.svg"))


def cache_of(prompt: str, length: int) -> dict[str, Any]:
    """Load a published atlas."""
    return load_cache(published.FOLDER / f"self_forcing_dmd_{prompt}_{length}f.pt")


def report_of(views: Views) -> dict[str, Any]:
    """Return all numbers of the article: waves, frame 0 by block, and the first-frame effect s."""
    curves = {key: rw.last_block_context(view.profiles(), view.block_sizes) for key, view in views.items()}
    errors = {key: cache_of(*key)["frame_logits_error"] for key in WITH_MATRIX}
    blocks, steady = first_frame_by_block(views, {key: np.asarray(x) for key, x in errors.items()})
    return {
        "frequencies": rounded(FREQUENCIES, 4),
        "curves of 72 frames": {p: of_curves(*curves[p, 72], *curves[p, 21]) for p in PROMPTS},
        "query statistics": {p: against_queries(*curves[p, 72]) for p in PROMPTS},
        "matrices": blocks,
        "steady heads": steady,
        **first_frame_effects(views),
    }


def median(values: np.ndarray) -> np.ndarray:
    return np.median(values, -1)


def interval(*values: np.ndarray, statistic=median) -> list[float]:
    """Return a statistic, along the last axis, of values [layers, heads] and its 95 % interval.

    Heads are drawn in layers; all draws [DRAWS, layers * heads] are handed to the statistic at once.
    """
    layers, heads = values[0].shape
    drawn = np.random.default_rng(0).integers(0, heads, (DRAWS, layers, heads))
    samples = statistic(*(x[np.arange(layers)[:, None], drawn].reshape(DRAWS, -1) for x in values))
    return rounded([statistic(*(x.ravel() for x in values)), *np.percentile(samples, (2.5, 97.5))])


# --- Waves
def of_curves(
    curves: np.ndarray, distances: np.ndarray, short_curves: np.ndarray, short_distances: np.ndarray
) -> dict[str, Any]:
    """Return R² of the waves, of held-out frames, of other frequencies, and r with the 21-frame curves."""

    def median_r2(frequencies: np.ndarray) -> float:
        fitted = rw.fit_waves(curves, distances, frequencies).at(distances)
        return round(float(np.median(rw.r_squared(curves, fitted))), 3)

    waves = rw.fit_waves(curves, distances, FREQUENCIES)
    bases = {str(b): rw.temporal_frequencies(HEAD_DIM, b)[: rw.NUM_BANDS] for b in (7500, 10000)}
    at = [
        int(np.abs(distances - d).argmin()) for d in short_distances
    ]  # the same distances in the long curve
    return {
        "context frames": len(distances),
        "r2 median": interval(rw.r_squared(curves, waves.at(distances))),
        "held out": {
            name: held_out(curves, distances, size, ridge) for name, (size, ridge) in HELD_OUT.items()
        },
        "scale of all frequencies": {str(s): median_r2(FREQUENCIES * s) for s in (0.95, 1.05)},
        "base": {base: median_r2(frequencies) for base, frequencies in bases.items()},
        "r with 21 frames, median": interval(pearson(waves.at(short_distances), short_curves)),
        "r of the raw curve with 21 frames": interval(pearson(curves[..., at], short_curves)),
    }


def held_out(curves: np.ndarray, distances: np.ndarray, size: int, ridge: float) -> dict[str, Any]:
    """Return median R² of held-out frames for RoPE's frequencies, with one more band, and for two nulls.

    Fourier's waves have the context's length as their period: as many numbers, and no model. Jittered
    frequencies are RoPE's, each times e^u.
    """

    def score(frequencies: np.ndarray, statistic=np.median) -> Any:
        return statistic(rw.held_out_r_squared(curves, distances, frequencies, size, ridge))

    own = score(FREQUENCIES, interval)
    more = rw.temporal_frequencies(HEAD_DIM)[: rw.NUM_BANDS + 1]
    fourier = 2 * np.pi * np.arange(1, rw.NUM_BANDS + 1) / len(distances)
    null = np.array([score(draw) for draw in rw.jittered(FREQUENCIES, JITTERS)])
    return {
        "RoPE": own,
        "seven bands": round(float(score(more)), 3),
        "Fourier": round(float(score(fourier)), 3),
        "jittered: median, best": rounded([np.median(null), null.max()]),
        f"of {JITTERS} jittered as good": int((null >= own[0]).sum()),
    }


def against_queries(curves: np.ndarray, distances: np.ndarray) -> dict[str, Any]:
    """Return Spearman's ρ over heads of fitted amplitudes with |E q_b| of LongLive's queries, by band."""
    amplitude = rw.fit_waves(curves, distances, FREQUENCIES).amplitude  # [layers, heads, B]
    means = np.load(published.FOLDER / "longlive_query_means.npz")["q_mean_81f"]
    size = np.abs(means)[..., : rw.NUM_BANDS]
    # Strong heads are strong in every band: ρ is also given all bands together and the queries' norm.
    given = [np.sqrt((amplitude**2).sum(-1)).ravel(), np.linalg.norm(means, axis=-1).ravel()]
    bands = range(rw.NUM_BANDS)
    return {
        "rho by band": [interval(amplitude[..., b], size[..., b], statistic=spearman) for b in bands],
        "given all amplitudes and the queries' norm": rounded(
            [partial_spearman(amplitude[..., b].ravel(), size[..., b].ravel(), given) for b in bands]
        ),
    }


# --- Frame 0 by block of queries
def first_frame_by_block(views: Views, errors: Mapping[tuple[str, int], np.ndarray]) -> tuple[dict, dict]:
    """Return frame 0's excess and rank at every block, and which heads prefer it at all of them.

    errors: of single logits that were read from colours, by layer.
    """
    found, ranked = {}, {}
    for key in WITH_MATRIX:
        view = views[key]
        matrix, sizes = matrices(view), view.block_sizes
        fit = rw.fit_matrix(matrix, sizes, FREQUENCIES)
        queries, excess, rank = rw.first_by_block(matrix, sizes)  # [layers, H, blocks] each
        starts = [block.start for block in queries]
        ranked[key] = matrix, fit, starts, rank
        found["{}, {} frames".format(*key)] = {
            "r2 within rows median": interval(fit.r_squared_within_rows),
            "first query frame": starts,
            **{
                label: {
                    "excess by block": rounded(excess[head], 1),
                    "rank by block": rank[head].tolist(),
                }
                for label, head in PAPER_HEADS.items()
            },
        }
    return found, steady_heads(ranked, errors)


def margins(matrix: np.ndarray, frame: int = 0) -> np.ndarray:
    """Return a frame's lead over the highest other context frame, the least of the blocks 9-11 to 18-20."""
    leads = []
    for first in range(max(STEADY_FROM, 3 * (frame // 3 + 1)), STEADY_TO + 1, 3):
        row = matrix[..., first : first + 3, :first].mean(-2)
        leads.append(row[..., frame] - np.delete(row, frame, -1).max(-1))
    return np.min(leads, 0)


def steady_heads(ranked: Mapping[tuple[str, int], tuple], errors: Mapping) -> dict[str, Any]:
    """Count heads whose highest context frame is frame 0 at every block from 9-11 to 18-20, and controls.

    Controls: what the fit makes of waves alone and of waves and s; and any other frame in the place of 0.
    """
    lead = {p: margins(ranked[p, 21][0]) for p in PROMPTS}
    steady = {p: lead[p] >= 0 for p in PROMPTS}
    both, strictly = (
        np.logical_and(*(f(lead[p], 0) for p in PROMPTS)) for f in (np.greater_equal, np.greater)
    )
    close = np.logical_or(*(lead[p] <= 2 * errors[p, 21][:, None] for p in PROMPTS))
    _, long_fit, starts, long_rank = ranked["eagle", 72]
    first = {start: long_rank[..., i] == 1 for i, start in enumerate(starts) if start >= STEADY_FROM}
    fitted = {}
    for p in PROMPTS:
        matrix, fit, _, _ = ranked[p, 21]
        frames = np.arange(matrix.shape[-1])
        distances = (frames[:, None] - frames).astype(float)
        waves = fit.waves.at(distances.ravel()).reshape(matrix.shape)
        with_s = waves.copy()
        with_s[..., 0] += fit.s[..., None]
        fitted[p] = {
            "waves": int((margins(waves) >= 0).sum()),
            "waves and s": int((margins(with_s) >= 0).sum()),
            "measured": int(steady[p].sum()),
        }
    others = [
        np.logical_and(*(margins(ranked[p, 21][0], k) >= 0 for p in PROMPTS)).sum() for k in range(1, 9)
    ]
    return {
        "by prompt": fitted,
        "both": int(both.sum()),
        "both, strictly": int(strictly.sum()),
        "strictly, within twice the error of colours": int((strictly & close).sum()),
        "both, and s at least 0.5 at 72 frames": int((both & (long_fit.s >= STEADY_S)).sum()),
        "of both, frame 0 is first at a block of 72 frames": {
            str(start): int((both & at).sum()) for start, at in first.items() if start <= 33
        },
        "first at every block of 72 frames from 9-11 on": int(np.logical_and.reduce([*first.values()]).sum()),
        "another frame, 1 to 8, is always highest for both prompts": [int(count) for count in others],
    }


# --- The first-frame effect s and its placebos
def first_frame_effects(views: Views) -> dict[str, Any]:
    """Return s and placebos of every atlas with a matrix, and how s agrees between atlases."""
    atlases, effects = {}, []
    for prompt, length in WITH_MATRIX:
        found, _ = first_frame(views[prompt, length])
        assert found is not None
        s, placebos = found.fit.effect, np.abs(found.placebos.mean((0, 1)))
        effects.append(s.ravel())
        atlases[f"{prompt}, {length} frames"] = {
            "heads": s.size,
            "mean s": round(float(s.mean()), 2),
            "placebos": {
                "frames": [found.frames[0], found.frames[-1]],
                "largest_mean": round(float(placebos.max()), 2),
                "its_frame": found.frames[int(placebos.argmax())],
                "heads_above_all": int((found.rank == 1).sum()),
            },
        }
    prompts, lengths = (round(float(np.corrcoef(effects[0], s)[0, 1]), 2) for s in effects[1:])
    return {
        "atlases": atlases,
        "correlation_of_s": {"between prompts": prompts, "between lengths": lengths},
    }


# --- Figures
def figures_of(views: Views) -> dict[str, Figure]:
    """Draw the paper's heads over its curves, and frame 0 by block."""
    # 1. The README's Figure 4: the paper's two heads over its digitised curves.
    view = views["eagle", 21]
    curves, _ = published.curves_for(view, published.FOLDER / published.FIGURE4_CSV, published.FIGURE4_MODEL)
    panels = published.add_reference(choose_heads(view, published.FIGURE4_HEADS)[0], view, curves)
    figure4 = heads.head_curves(panels, view.caption)
    # 2. The same heads at every block of 72 frames.
    long = views["eagle", 72]
    by_block, _ = rw.panels_of_view(long, choose_heads(long, published.FIGURE4_HEADS)[0])
    about = "Wan2.1-T2V-1.3B, Self-Forcing, eagle, t = 1000"
    return {
        "figure4_published": figure4,
        "first_frame_by_block": heads.first_by_block(by_block, "Frame 0 by block of queries", about),
    }


if __name__ == "__main__":
    main(run)

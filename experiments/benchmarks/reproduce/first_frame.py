"""Measure the first-frame effect on the published atlases and draw contrasts (docs/first_frame.md).

python experiments/benchmarks/reproduce/first_frame.py
"""

from typing import Any

import numpy as np

from experiments.analysis import measures, published
from experiments.analysis.first_frame import first_frame, key_frame_contrasts, matrices
from experiments.benchmarks.reproduce.common import finding_parser, save_finding
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.figures.atlas import contrasts_by_frame
from experiments.running.cli import main

ATLASES = {  # castle has no 72-frame matrix
    "eagle, 21 frames": "self_forcing_dmd_eagle_21f.pt",
    "castle, 21 frames": "self_forcing_dmd_castle_21f.pt",
    "eagle, 72 frames": "self_forcing_dmd_eagle_72f.pt",
}
LATER_LINE = slice(12, 36)  # another reference for contrasts: level and trend are not identified


def run(argv=None):
    args = finding_parser(__doc__, "docs/first_frame.json").parse_args(argv)
    views = {name: open_profiles(load_cache(published.FOLDER / file)) for name, file in ATLASES.items()}
    atlases, effects, lines = {}, [], {}
    for name, view in views.items():
        found, _ = first_frame(view)
        assert found is not None
        s, placebos = found.fit.effect, np.abs(found.placebos.mean((0, 1)))
        effects.append(s.ravel())
        lines[name], later = mean_interval(found.contrasts), None
        if view.num_frames >= LATER_LINE.stop:  # long enough for a line through later frames
            far = key_frame_contrasts(matrices(view), view.block_sizes, LATER_LINE.stop, LATER_LINE)
            later = mean_interval(far[..., : LATER_LINE.start]).round(2).tolist()
        atlases[name] = {
            "heads": s.size,
            "first_minus_middle": summary(measures.head_statistics(view.profiles()).delta),
            "effect": summary(s) | {"residual_error_median": rounded(np.median(found.fit.residual_error))},
            "r_squared_within_rows_median": rounded(np.median(found.fit.r_squared_within_rows)),
            "placebos": {
                "frames": [found.frames[0], found.frames[-1]],
                "largest_mean": rounded(placebos.max()),
                "its_frame": found.frames[int(placebos.argmax())],
                "heads_above_all": int((found.rank == 1).sum()),
                "heads_above_all_to_24": int(found.above_placebos.sum()),
            },
            "contrasts": lines[name].round(2).tolist(),  # mean, low, high
            "contrasts_to_frames_12_to_35": later,
        }
    prompts, lengths = (rounded(np.corrcoef(effects[0], s)[0, 1]) for s in effects[1:])
    correlations = {"between prompts": prompts, "between lengths": lengths}
    about = f"{view.model}, Self-Forcing, {view.pass_label}; mean over {s.size} heads"
    about += "; grey: every other block"
    figures = {"key_frames_published": contrasts_by_frame(lines, about, block=3)}
    save_finding(args, {"atlases": atlases, "correlation_of_s": correlations}, figures)


def mean_interval(values: np.ndarray) -> np.ndarray:
    """Return the mean over heads of values [layers, H, n] and its 95 % interval, [3, n]."""
    layers, heads, _ = values.shape
    drawn = np.random.default_rng(0).integers(0, heads, (1000, layers, heads, 1))
    means = [np.take_along_axis(values, d, 1).mean((0, 1)) for d in drawn]
    return np.stack([values.mean((0, 1)), *np.percentile(means, (2.5, 97.5), axis=0)])


def summary(values: np.ndarray) -> dict[str, Any]:
    above = int((values > measures.DELTA_THRESHOLD).sum())
    return {"mean": rounded(values.mean()), "median": rounded(np.median(values)), "heads_above_2": above}


def rounded(value: float) -> float:
    return round(float(value), 2)


if __name__ == "__main__":
    main(run)

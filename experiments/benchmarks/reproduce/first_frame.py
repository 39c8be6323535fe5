"""Measure the first-frame effect on the published atlases, and draw its two figures (docs/first_frame.md).

python experiments/benchmarks/reproduce/first_frame.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.analysis import curve_matching, measures, published
from experiments.analysis.first_frame import first_frame, key_frame_contrasts
from experiments.analysis.panels import choose_heads
from experiments.benchmarks.harness import save_report
from experiments.caches import load_cache
from experiments.caches.view import Profiles, open_profiles
from experiments.extraction.provenance import environment
from experiments.figures.first_frame import contrasts_by_frame, score_against_effect
from experiments.figures.style import save_svg
from experiments.running.cli import Parser, main

ATLASES = {  # castle has no 72-frame matrix
    "eagle, 21 frames": "self_forcing_dmd_eagle_21f.pt",
    "castle, 21 frames": "self_forcing_dmd_castle_21f.pt",
    "eagle, 72 frames": "self_forcing_dmd_eagle_72f.pt",
}


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_path", type=Path, default=Path("docs/first_frame.json"))
    parser.add_argument("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    args = parser.parse_args(argv)

    views = {name: open_profiles(load_cache(published.FOLDER / file)) for name, file in ATLASES.items()}
    found = {name: numbers(view) for name, view in views.items()}
    effects = [measured(view).fit.effect.ravel() for view in views.values()]
    between = {"between prompts": effects[1], "between lengths": effects[2]}
    report = {
        "environment": environment(torch.device("cpu")),
        "atlases": found,
        "correlation_of_s": {n: rounded(np.corrcoef(effects[0], s)[0, 1]) for n, s in between.items()},
        "paper": paper_agreement(views),
    }
    save_report(report, args.output_path)
    print(args.output_path)

    about = "Wan2.1-T2V-1.3B, Self-Forcing, pass 0 (t = 1000)"
    dots = {
        name: (measures.head_statistics(view.profiles()).delta, measured(view).fit.effect)
        for name, view in views.items()
    }
    lines = {
        name: key_frame_contrasts(matrices(view), view.block_sizes).mean((0, 1))
        for name, view in views.items()
    }
    title = f"What first − middle measures, a dot a head: {about}"
    figure = score_against_effect(dots, title, "first − middle (logits)", "first-frame effect s (logits)")
    print(save_svg(figure, args.figures / "first_frame_published.svg"))
    title = f"Key-frame contrasts, mean over 360 heads: {about}"
    print(save_svg(contrasts_by_frame(lines, title, block=3), args.figures / "key_frames_published.svg"))


def matrices(view: Profiles) -> np.ndarray:
    """Return [layers, H, F, F] of a published atlas, which holds all of them."""
    found = view.frame_matrices()
    assert found is not None
    return found


def measured(view: Profiles):
    """Return s, placebos and contrasts of every head."""
    found = first_frame(view)
    assert found is not None
    return found


def numbers(view: Profiles) -> dict[str, Any]:
    """Return first − middle, s, placebos and contrasts of one atlas, over all heads."""
    found = measured(view)
    s, mean = found.fit.effect, np.abs(found.placebos.mean((0, 1)))
    return {
        "heads": s.size,
        "first_minus_middle": summary(measures.head_statistics(view.profiles()).delta),
        "effect": summary(s) | {"residual_error_median": rounded(np.median(found.fit.residual_error))},
        "r_squared_within_rows_median": rounded(np.median(found.fit.r_squared_within_rows)),
        "placebos": {
            "frames": [found.frames[0], found.frames[-1]],
            "largest_mean": rounded(mean.max()),
            "its_frame": found.frames[int(mean.argmax())],
            "heads_above_all": int((found.rank == 1).sum()),
            "heads_above_all_to_24": int(found.above_placebos.sum()),
        },
        "contrasts": [rounded(c) for c in found.contrasts.mean((0, 1))],
    }


def paper_agreement(views: dict[str, Profiles]) -> dict[str, Any]:
    """Return Pearson's r and the RMS in logits of each prompt's heads with the paper's curves."""
    curves = published.read_curves(published.FOLDER / published.FIGURE4_CSV)
    found: dict[str, Any] = {}
    for name, view in views.items():
        if view.num_frames == len(next(iter(curves.values())).values):
            panels = choose_heads(view, published.FIGURE4_HEADS).panels
            for panel in curve_matching.add_reference(panels, view, curves):
                r, rms, _ = panel.agreement or (np.nan, np.nan, ())
                found.setdefault(panel.label, {})[name] = {"r": rounded(r, 3), "rms": rounded(rms)}
    return found


def summary(values: np.ndarray) -> dict[str, Any]:
    above = int((values > measures.DELTA_THRESHOLD).sum())
    return {"mean": rounded(values.mean()), "median": rounded(np.median(values)), "heads_above_2": above}


def rounded(value: float, digits: int = 2) -> float:
    return round(float(value), digits)


if __name__ == "__main__":
    main(run)

"""What first_frame_numbers.py measures of the published atlases: its report, two figures and a table."""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.analysis import curve_matching, first_frame_findings, measures, published
from experiments.analysis.first_frame import key_frame_contrasts
from experiments.analysis.head_measures import choose_heads
from experiments.caches import load_cache
from experiments.caches.view import Profiles, open_profiles
from experiments.extraction.provenance import environment
from experiments.figures import first_frame

ATLASES = {  # castle has no 72-frame matrix
    "eagle, 21 frames": "self_forcing_dmd_eagle_21f.pt",
    "castle, 21 frames": "self_forcing_dmd_castle_21f.pt",
    "eagle, 72 frames": "self_forcing_dmd_eagle_72f.pt",
}
FIRST = (12, 24, 36)  # numbers of free key frames with which contrasts are compared


def published_views() -> dict[str, Profiles]:
    """The atlases that are measured, open."""
    return {name: open_profiles(load_cache(published.FOLDER / file)) for name, file in ATLASES.items()}


def matrices(view: Profiles) -> np.ndarray:
    """[layers, H, F, F] of a published atlas, which holds all of them."""
    found = view.frame_matrices()
    assert found is not None
    return found


def numbers(view: Profiles) -> dict[str, Any]:
    """First − middle, s, placebos and contrasts of one atlas."""
    found = first_frame_findings.first_frame(view)
    assert found is not None
    delta = measures.head_statistics(view.profiles()).delta
    s, mean = found.fit.effect, np.abs(found.placebos.mean((0, 1)))
    special = (found.placebos > measures.DELTA_THRESHOLD).sum((0, 1))
    values = np.concatenate([s[..., None], found.placebos], -1)  # of frame 0 and of every placebo
    is_largest = (values == np.abs(values).max(-1, keepdims=True)).sum((0, 1))
    contrasts = {first: key_frame_contrasts(matrices(view), view.block_sizes, first) for first in FIRST}
    return {
        "heads": s.size,
        "first_minus_middle": _summary(delta),
        "effect": _summary(s) | {"residual_error_median": _round(np.median(found.fit.residual_error))},
        "r_squared_within_rows_median": _round(np.median(found.fit.r_squared_within_rows)),
        "placebos": {
            "frames": [found.frames[0], found.frames[-1]],
            "largest_mean": _round(mean.max()),
            "its_frame": found.frames[int(mean.argmax())],
            "most_heads_above_2": int(special.max()),
            "that_frame": found.frames[int(special.argmax())],
            "heads_above_all": int((found.rank == 1).sum()),
            "largest_in_most_heads": (0, *found.frames)[int(is_largest.argmax())],
            "in_heads": int(is_largest.max()),
            "heads_above_all_to_24": int(found.above_placebos.sum()),
        },
        "contrasts": [_round(c) for c in contrasts[12].mean((0, 1))],
        "contrasts_by_free_frames": {
            n: [_round(x) for x in c.mean((0, 1))[:3]] for n, c in contrasts.items()
        },
        "heads_above_2_by_contrast": int((contrasts[12][..., 0] > measures.DELTA_THRESHOLD).sum()),
        "wave_r2_median": _round(np.median(measures.wave(view.profiles(), view.context_frames).r2)),
    }


def paper_agreement(views: dict[str, Profiles]) -> dict[str, Any]:
    """How well each prompt's heads agree with the paper's curves: Pearson's r and RMS in logits."""
    curves = published.read_curves(published.FOLDER / published.FIGURE4_CSV)
    found: dict[str, Any] = {}
    for name, view in views.items():
        if view.num_frames == len(next(iter(curves.values())).values):
            panels = choose_heads(view, published.FIGURE4_HEADS).panels
            for panel in curve_matching.add_reference(panels, view, curves):
                r, rms, _ = panel.agreement or (np.nan, np.nan, ())
                found.setdefault(panel.label, {})[name] = {"r": _round(r, 3), "rms": _round(rms)}
    return found


def report(views: dict[str, Profiles]) -> dict[str, Any]:
    """Everything that the documents say."""
    effects = {
        name: measures.first_frame_effect(matrices(v), v.block_sizes).effect for name, v in views.items()
    }
    eagle, castle, longer = (effects[name].ravel() for name in ATLASES)
    return {
        "environment": environment(torch.device("cpu")),
        "atlases": {name: numbers(view) for name, view in views.items()},
        "correlation_of_s": {
            "between prompts": _round(np.corrcoef(eagle, castle)[0, 1]),
            "between lengths": _round(np.corrcoef(eagle, longer)[0, 1]),
        },
        "paper": paper_agreement(views),
    }


def draw(views: dict[str, Profiles]) -> dict[str, Figure]:
    """First − middle against s, a dot a head; and contrasts by key frame."""
    dots, lines = {}, {}
    for name, view in views.items():
        matrix = matrices(view)
        s = measures.first_frame_effect(matrix, view.block_sizes).effect
        dots[name] = (measures.head_statistics(view.profiles()).delta, s)
        lines[name] = key_frame_contrasts(matrix, view.block_sizes).mean((0, 1))
    about = "Wan2.1-T2V-1.3B, Self-Forcing, pass 0 (t = 1000)"
    return {
        "first_frame_published.svg": first_frame.score_against_effect(
            dots,
            f"What first − middle measures, a dot a head: {about}",
            "first − middle (logits)",
            "first-frame effect s (logits)",
        ),
        "key_frames_published.svg": first_frame.contrasts_by_frame(
            lines, f"Key-frame contrasts, mean over 360 heads: {about}", block=3
        ),
    }


def table(report: dict[str, Any]) -> str:
    """The rows of the README and of docs/first_frame.md, and what holds on all atlases."""
    lines = [
        "| mean logits of all heads | first − middle: mean, heads above 2 | s: mean, median, heads above 2 | "
        "largest placebo mean | heads where s exceeds every placebo | contrasts of frames 0, 1, 2 |",
        "|---" * 6 + "|",
    ]
    lines += [_row(name, one) for name, one in report["atlases"].items()]
    env = report["environment"]
    paper = "; ".join(
        f"{label} "
        + ", ".join(
            f"{name.split(',')[0]} r = {v['r']:.3f}, RMS {v['rms']:.2f}" for name, v in prompts.items()
        )
        for label, prompts in report["paper"].items()
    )
    return "\n".join(lines) + (
        f"\n\n{_contrast(report)} {_standing(report['atlases'])} The paper's own curves, over context "
        f"frames, in logits: {paper}. Pass 0 of the published atlases, {env['date']}, `{env['git'][:9]}`: "
        f"`{env['command']}`\n"
    )


def _contrast(report: dict[str, Any]) -> str:
    """By how much heads prefer frame 0 to a line through later frames, and whether the same ones do."""
    first = [one["contrasts"][0] for one in report["atlases"].values()]
    r = report["correlation_of_s"]
    return (
        f"The mean contrast c(0) is {min(first):.2f} to {max(first):.2f} logits, and the same heads have a "
        f"high s for both prompts (r = {r['between prompts']:.2f}) and both lengths "
        f"(r = {r['between lengths']:.2f})."
    )


def _standing(atlases: dict[str, dict[str, Any]]) -> str:
    """Where frame 0 exceeds all other frames in most heads, and what does so more often where it does not."""
    alone, said = [], []
    for name, one in atlases.items():
        of, called = one["placebos"], name.replace(", ", " at ")
        if 2 * of["heads_above_all"] > one["heads"]:
            alone.append(called)
            continue
        said.append(
            f"In {called} no frame does: frame {of['largest_in_most_heads']} exceeds the others in "
            f"{of['in_heads']} heads, frame 0 in {of['heads_above_all']}; the largest mean placebo is "
            f"{of['largest_mean']:.2f}, the mean of s {one['effect']['mean']:.2f}."
        )
    if alone:
        said.insert(0, f"Frame 0 exceeds every other frame in most heads of {' and '.join(alone)}.")
    return " ".join(said)


def _row(name: str, one: dict[str, Any]) -> str:
    older, s, placebos = one["first_minus_middle"], one["effect"], one["placebos"]
    above = f"{placebos['heads_above_all']} of {one['heads']}"
    if placebos["heads_above_all_to_24"] != placebos["heads_above_all"]:
        frames = f"{placebos['frames'][0]}–{placebos['frames'][1]}"
        above = f"{placebos['heads_above_all_to_24']} (frames 1–24), {above} ({frames})"
    contrasts = ", ".join(f"{c:.2f}" for c in one["contrasts"][:3])
    return (
        f"| {name} | {older['mean']:.2f}, {older['heads_above_2']} | "
        f"{s['mean']:.2f}, {s['median']:.2f}, {s['heads_above_2']} | "
        f"{placebos['largest_mean']:.2f}, frame {placebos['its_frame']} | {above} | {contrasts} |"
    )


def _summary(values: np.ndarray) -> dict[str, Any]:
    above = int((values > measures.DELTA_THRESHOLD).sum())
    return {"mean": _round(values.mean()), "median": _round(np.median(values)), "heads_above_2": above}


def _round(value: float, digits: int = 2) -> float:
    return round(float(value), digits)

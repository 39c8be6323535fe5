"""Figures of every family on small data, and those that no notebook draws."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from experiments import figures
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import HeadMap, HeadPanel, LabelMap, ProfileMap
from experiments.analysis.taxonomy import KINDS, LOCALITY
from experiments.analysis.video_maps import VideoMap
from experiments.caches.view import Caption
from experiments.figures import training
from helpers import synthetic_caches

OWN = "own block (noise at t = 1000)"
SOURCE = "wan-mini (checkpoint: a.pt), “a red circle moving right over a dark blue background”, seed 42"
CAPTION = Caption("mean_logit", "pass 0 (t = 1000), query frames 18–20", {OWN: (18, 19, 20)}, source=SOURCE)
ABOUT = CAPTION.about
POLICIES = ("full", "window 9, no sink", "window 9, sink 3", "deep sink 21/10", "frozen", "vae")
NAN = np.nan


def drawings(N: int, H: int, F: int, absent=()) -> dict[str, Callable[[], Figure]]:
    """Drawings of N layers of H heads and F frames, by name; frames that are absent are NaN."""
    rng = np.random.default_rng(0)
    blocks = [F % 3] * (F % 3 > 0) + [3] * (F // 3)
    matrices = np.stack([synthetic_caches.frame_matrix(H, blocks, seed).numpy() for seed in range(N)])
    profiles = matrices[:, :, -min(F, 3) :].mean(2)
    profiles[..., list(absent)] = NAN
    last = tuple(range(max(0, F - 3), F))
    caption = replace(CAPTION, highlighted_frames={OWN: last})
    s, mass = head_statistics(profiles), np.abs(profiles) / 10
    one = profiles[0, -1]
    curve = np.repeat(one, 5) + np.tile(np.arange(5) / 10, F)
    panel = HeadPanel("L1H1", 1, H - 1, one, curve, no_preference=0.1)
    told = "r = 0.993, RMS 0.30 over context frames 0–17"
    compared = panel._replace(reference=one + 0.3, clipped=np.arange(F) == F - 1, agreement=told)
    bars, labels = panel._replace(curve=None), np.where(s.delta > 0, 1, -1)
    strips = [ProfileMap(f"Layer {n}", "mean_logit", profiles[n]) for n in range(N)]
    strips += [ProfileMap("mass", "mass", mass[0]), ProfileMap("c", "mass", None, "why")]
    titles = ("First − middle", "First / middle", "Mass on the first frame", "Excess at equal distance")
    scales, queries = ("diverging", "ratio", "share", "sequential"), ("", "all query frames") * 2
    maps = [
        HeadMap(t, t, "share of 1", scale, s.first, "", q)
        for t, scale, q in zip(titles, scales, queries, strict=True)
    ]
    kinds = [LabelMap("our rule", KINDS, labels, "", labels == 1), LabelMap("l", LOCALITY, None, "none")]
    kinds.insert(1, LabelMap("published, Pyramid Forcing", KINDS, labels, queries="all query frames"))
    pictures = [np.full((48, 64, 3), 100, np.uint8)] * F
    over = {name: dict.fromkeys(("mean", "low", "high"), rng.random(30)) for name in POLICIES}
    dots = {name: float(rng.random()) for name in POLICIES}
    seen = np.abs(rng.normal(size=(F, 4, 6))).astype(np.float32)
    query = ("mass", 2, 5, "pass 0 (t = 1000)", (F - 1, 1, 2), last, last, 20, 0.1, "wan-mini", SOURCE)
    seen_map = VideoMap(seen, *query)
    slots = np.arange(4)[:, None] * 3 - np.arange(min(F, 21))
    slots = np.where(slots < 0, -9, slots)
    shares = np.sort(rng.random((4, 5)), 1)[:, [2, 1, 3, 0, 4]]
    steps = [0, 100, 1000, 20000]
    runs = {name: [[(i, i, 1 / (i + 1)) for i in range(20)]] * 2 for name in ("VAE", "base")}
    of_heads = rng.normal(size=(N * H, max(F - 3, 3)))
    return {
        "curves": lambda: figures.head_curves([panel, compared], caption),
        "pictures": lambda: figures.head_curves([bars], caption, pictures, "A title"),
        "grid": lambda: figures.head_grid(profiles[0], figures.head_titles(s.delta[0]), caption, layer=1),
        "statistics": lambda: figures.layer_statistics(s.first, s.middle, s.last, range(N), caption),
        "maps": lambda: figures.frame_maps(matrices[0], range(F), caption, layer=1),
        "profiles": lambda: figures.profile_heat_maps(
            strips, "Every layer", ABOUT, highlighted_frames=caption.highlighted_frames
        ),
        "measures": lambda: figures.head_maps(maps, range(N), subtitle=ABOUT),
        "labels": lambda: figures.label_maps(kinds, range(N), subtitle=ABOUT),
        "slots": lambda: figures.slot_map(slots, slots, F, "deep_sink", ABOUT),
        "shares": lambda: figures.share_bars(
            {"all routes of it": shares[0], "one": shares[1]},
            {"rendered": 0.9, "VAE": 0.8},
            "Routes",
            "Share",
            {"best single threshold": [0.5, 0.6]},
        ),
        "budgets": lambda: figures.budget_curves(
            {
                (sink, rule): {name: {3: shares[0], 6: shares[1]} for name in ("all", "one", "other")}
                for sink in ("sink 0", "sink 3")
                for rule in ("uniform", "mass on the older past", "Pyramid Forcing", "effect")
            },
            {"rendered": 0.9},
            "Budgets",
        ),
        "contrasts": lambda: (
            figures.contrasts_by_frame({"eagle": np.sort(of_heads[:3])}, "Contrasts", block=3)
            if N * H >= 3
            else figures.survival_map(np.ones((N, F)), "")
        ),
        "drift": lambda: figures.drift_over_time({"Right": over, "Hue": over}, ["frozen", "vae"], ABOUT),
        "motion": lambda: figures.against_motion(dots, {"Right": dots, "Hue": dots}, ABOUT),
        "map strip": lambda: figures.map_strip([seen_map] * 2, pictures, [0, F - 1]),
        "all by r": lambda: figures.heads_by_agreement(
            {"here": np.linspace(-1, 1, 9)}, [figures.HeadPair("L1H1", one, one, 0.9)] * 2, "Agreement"
        ),
        "training": lambda: training.training_curves(runs, [(i, 20 + i, 21, 19) for i in range(9)], 5, ABOUT),
        "checkpoints": lambda: training.training_checkpoints(
            steps, {"Excess": ("logits", 0, rng.normal(size=(4, 2, 3)))}, [0, 20000], ABOUT, 1000
        ),
        "videos": lambda: training.video_strips(
            ["a red circle moving right"] * 2, {"causal": [np.full((81, 32, 32, 3), 0.5)] * 2}, subtitle=ABOUT
        ),
    }

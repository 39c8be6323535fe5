"""Every drawing function of experiments/figures, on small data: what the tests of figures draw."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from experiments import figures
from experiments.analysis.axes import KeyColumns
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import Agreement, HeadMap, HeadPanel, LabelMap, ProfileMap
from experiments.analysis.rope_waves import BlockPanel, PartsPanel
from experiments.analysis.stats import Interval
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
    """Every drawing of N layers of H heads and F frames, by name; frames that are absent are NaN."""
    rng = np.random.default_rng(0)
    blocks = [F % 3] * (F % 3 > 0) + [3] * (F // 3)
    matrices = np.stack([synthetic_caches.frame_matrix(H, blocks, seed).numpy() for seed in range(N)])
    profiles = matrices[:, :, -min(F, 3) :].mean(2)
    profiles[..., list(absent)] = NAN
    last = tuple(range(max(0, F - 3), F))
    caption = replace(CAPTION, highlighted_frames={OWN: last})
    averages = replace(caption, averages=2)
    s, mass = head_statistics(profiles), np.abs(profiles) / 10
    one = profiles[0, -1]
    curve = np.repeat(one, 5) + np.tile(np.arange(5) / 10, F)
    panel = HeadPanel("L1H1", 1, H - 1, one, curve, no_preference=0.1)
    told = Agreement(0.993, 0.3, tuple(range(max(1, F - 3))))
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
    intervals = {name: Interval(0.5 + 0.05 * i, 0.4, 0.9) for i, name in enumerate(POLICIES)}
    over = {name: dict.fromkeys(("mean", "low", "high"), rng.random(30)) for name in POLICIES}
    dots = {name: float(rng.random()) for name in POLICIES}
    videos = {name: np.full((81, 48, 64, 3), 90, np.uint8) for name in ("unedited", "edited")}
    seen = np.abs(rng.normal(size=(F, 4, 6))).astype(np.float32)
    query = ("mass", 2, 5, "pass 0 (t = 1000)", (F - 1, 1, 2), last, False, 20, 0.1, "wan-mini", SOURCE)
    seen_map = VideoMap(seen, *query)
    names, marks = (*map(str, range(F)), "μ1", "μ2"), ("sink", *[""] * (F - 1), "average", "average")
    keys = KeyColumns("frame", names, marks, np.concatenate([mass[0], mass[0][:, :2]], 1))
    slots = np.arange(4)[:, None] * 3 - np.arange(min(F, 21))
    slots = np.where(slots < 0, -9, slots)
    shares = np.sort(rng.random((4, 5)), 1)[:, [2, 1, 3, 0, 4]]
    steps = [0, 100, 1000, 20000]
    runs = {name: [[(i, i, 1 / (i + 1)) for i in range(20)]] * 2 for name in ("VAE", "base")}
    of_heads = rng.normal(size=(N * H, max(F - 3, 3)))
    passes = {f"pass {n} (t = {1000 - 100 * n})": s.first for n in range(3)} | {"clean pass (t = 0)": s.last}
    measures = {f"{n}, first pass": s.first for n in ("mass on frame 0", "first-frame effect s")}
    notes = dict.fromkeys(measures, "ρ = 0.12 [0.01, 0.23]\npartial ρ = 0.20 [0.01, 0.40]")
    bands = np.resize(profiles[0], (8, F)).T
    heads = {f"L{n}H1: layer {n}, head 1": np.stack([profiles[0, 0]] * 2) for n in (1, 5)}
    parts = {f"L1H{n}, queries 18–20": PartsPanel(one, one, 0.6) for n in range(3)}
    by_block = {"L1H1: layer 1, head 1": BlockPanel(np.arange(3, 21, 3), rng.random(6), rng.random(6))}
    reach = {"window with a sink, to frame 240": (0, 239), "deep sink, window 21": (0, 20)}
    wide = np.concatenate([profiles[0], mass[0][:, :2]], 1)
    return {
        "curves": lambda: figures.head_curves([panel, compared], caption),
        "pictures": lambda: figures.head_curves([bars], caption, pictures, "A title"),
        "one": lambda: figures.one_head(panel, caption),
        "grid": lambda: figures.head_grid(profiles[0], figures.head_titles(s.delta[0]), caption, layer=1),
        "averages": lambda: figures.head_grid(wide, figures.head_titles(s.delta[0]), averages, layer=1),
        "sweep": lambda: figures.sweep_curves(heads, caption, ["castle_21f", "eagle_21f"]),
        "heat": lambda: figures.all_heads(profiles[0], caption, layer=1),
        "layers": lambda: figures.layer_comparison(profiles, range(N), caption),
        "middle 80 %": lambda: figures.layer_comparison(mass, range(N), replace(caption, quantity="mass")),
        "together": lambda: figures.layers_together(profiles, range(N), caption),
        "statistics": lambda: figures.layer_statistics(s.first, s.middle, s.last, range(N), caption),
        "maps": lambda: figures.frame_maps(matrices[0], range(F), caption, layer=1),
        "one map": lambda: figures.frame_maps(
            matrices[0, :1, -2:], range(F - 2, F), caption, layer=1, heads=[5]
        ),
        "no map": lambda: figures.frame_maps(NAN * matrices[0], range(F), caption, layer=1),
        "compared": lambda: figures.compared_maps(
            {"causal": matrices[0], "base": matrices[0]}, range(min(H, 3)), "mass", title="t", subtitle=ABOUT
        ),
        "profiles": lambda: figures.profile_heat_maps(
            strips, "Every layer", ABOUT, highlighted_frames=caption.highlighted_frames
        ),
        "keys": lambda: figures.key_maps({f"Layer {n}": keys for n in range(N)}, "mass", "Keys", ABOUT),
        "words": lambda: figures.prompt_words(mass[0], ["cinematic"] * F, layer=1, subtitle=ABOUT),
        "bands": lambda: figures.rope_bands(
            bands, [f"time, period {n}.1 frames" for n in range(8)], caption, layer=1, head=0
        ),
        "measures": lambda: figures.head_maps(maps, range(N), subtitle=ABOUT),
        "labels": lambda: figures.label_maps(kinds, range(N), subtitle=ABOUT),
        "agreement": lambda: figures.agreement_matrix(
            ["a", "b"], np.array([[1, NAN], [0.3, 1]]), what="kind"
        ),
        "passes": lambda: figures.effect_by_pass(passes, "First-frame effect", ABOUT),
        "kept": lambda: figures.survival_map(np.ones((N, F)), "What survives", ABOUT),
        "slots": lambda: figures.slot_map(slots, slots, F, "deep_sink", ABOUT),
        "last block": lambda: figures.last_block_attention(
            np.abs(rng.normal(size=(H, 9))), np.arange(9), np.arange(9), "deep_sink", ABOUT
        ),
        "effects": lambda: figures.effects_by_frame(
            {"total": np.ones(F), "floor": np.full(F, 1e-6)}, subtitle=ABOUT
        ),
        "strips": lambda: figures.video_strips(videos, range(0, 81, 7), subtitle=ABOUT),
        "against": lambda: figures.effect_against(
            np.abs(s.first) + 0.1,
            measures,
            notes,
            subtitle=ABOUT,
            kinds=np.where(labels > 0, "anchor", "wave"),
        ),
        "knockout": lambda: figures.knockout_curves(
            [1, 2, 4, 8],
            {"largest effect": shares[:, :3]},
            shares,
            (shares[3], shares[0]),
            ABOUT,
            {"rendered": 0.9},
        ),
        "shares": lambda: figures.share_bars(
            {"all routes of it": shares[0], "one": shares[1]},
            {"rendered": 0.9, "VAE": 0.8},
            "Routes",
            "Share",
            {"best single threshold": [0.5, 0.6]},
        ),
        "budgets": lambda: figures.budget_curves(
            {"measured": {rule: {3: shares[0], 6: shares[1]} for rule in ("uniform", "by s")}},
            {"rendered": 0.9},
            "Budgets",
        ),
        "placebos": lambda: figures.placebo_strips(
            of_heads[:, 0], of_heads[:, 1:3], [1, 2], "Placebos", ABOUT
        ),
        "distances": lambda: figures.distances_and_contrasts(of_heads, of_heads, "By distance", ABOUT),
        "contrasts": lambda: (
            figures.contrasts_by_frame({"eagle": np.sort(of_heads[:3])}, "Contrasts", block=3)
            if N * H >= 3
            else figures.survival_map(np.ones((N, F)), "")
        ),
        "by block": lambda: figures.first_by_block(by_block, "Frame 0 by block of queries", ABOUT),
        "in parts": lambda: figures.curves_in_parts(parts, "Context curves in parts", ABOUT),
        "long strips": lambda: figures.long_strips(
            dict.fromkeys(POLICIES[:3], np.full((64, 640, 3), 99, np.uint8)), range(0, 50, 5), ABOUT
        ),
        "dots": lambda: figures.policy_dots(intervals, ["frozen", "vae"], "Right seconds", ABOUT),
        "drift": lambda: figures.drift_over_time({"Right": over, "Hue": over}, ["frozen", "vae"], ABOUT),
        "motion": lambda: figures.against_motion(dots, {"Right": dots, "Hue": dots}, ABOUT),
        "sinks": lambda: figures.sink_maps(
            {name: ([9, 12], [0, 3, 6], rng.random((2, 3))) for name in ("window", "deep sink")},
            "Right",
            ABOUT,
        ),
        "cost": lambda: figures.cost_and_quality(
            {name: (x, 2 * x, x) for name, x in dots.items()}, "Right seconds", ABOUT
        ),
        "length": lambda: figures.effect_by_length(
            {"full": dict.fromkeys((21, 93, 240), intervals["full"])}, {21: 0.2, 240: 0.1}, ABOUT
        ),
        "rope": lambda: figures.rope_against_distance(
            np.arange(99), np.cos(np.arange(99) / 4), reach, [(25, 1.0), (50, 1.0)], ABOUT
        ),
        "video map": lambda: figures.video_map(seen_map, pictures),
        "map strip": lambda: figures.map_strip([seen_map] * 2, pictures, [0, F - 1]),
        "word strip": lambda: figures.word_strip(
            {"red": seen[-2:]}, [0, 1], pictures, title="Where words are read", subtitle=ABOUT
        ),
        "lens": lambda: figures.lens_strip([pictures[:2]] * 2, [0, 5], [0, 1], rng.random((2, 2))),
        "all by r": lambda: figures.heads_by_agreement(
            {"here": np.linspace(-1, 1, 9)}, [figures.HeadPair("L1H1", one, one, 0.9)] * 2, "Agreement"
        ),
        "correlation": lambda: figures.correlation_map(rng.random((N, H)), range(N), "mass"),
        "by layer": lambda: figures.lines_by_layer(
            rng.random((3, 2)), [0, 1, 2], ["a", "b"], "norm of a token"
        ),
        "training": lambda: training.training_curves(runs, [(i, 20 + i, 21, 19) for i in range(9)], 5, ABOUT),
        "checkpoints": lambda: training.training_checkpoints(
            steps, {"Excess": ("logits", 0, rng.normal(size=(4, 2, 3)))}, [0, 20000], ABOUT, 1000
        ),
        "videos": lambda: training.video_strips(
            ["a red circle moving right"] * 2, {"causal": [np.full((81, 32, 32, 3), 0.5)] * 2}, subtitle=ABOUT
        ),
    }

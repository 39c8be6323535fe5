"""One figure of every public drawing function, on synthetic arrays of so many layers, heads and frames."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from experiments import figures
from experiments.analysis import panels, stats, taxonomy
from experiments.analysis.axes import KeyColumns
from experiments.analysis.measures import head_statistics
from experiments.analysis.video_maps import VideoMap
from experiments.caches.view import Caption
from experiments.miniature import figures as training

SOURCE = "wan-mini (checkpoint: a.pt), “a red circle moving right over a dark blue background”, seed 42"
POLICIES = ("full", "window 9, no sink", "window 9, sink 3", "deep sink 21/10", "frozen", "vae")
# Figures with a panel for each layer or head; the grid of the others is the same for all models
BY_LAYER: tuple[str, ...] = (
    "head_curves",
    "head_grid",
    "sweep_curves",
    "layer_comparison",
    "layer_statistics",
)
BY_LAYER += ("first_by_block", "curves_in_parts", "heads_by_agreement", "frame_maps")
BY_LAYER += ("profile_heat_maps", "key_maps")
WORDS = ["a", "red", "circle", "moving", "right", "over", "a", "dark", "blue", "background", "</s>"]


def caption_of(F: int, quantity="mean_logit", **options) -> Caption:
    """Return the caption of a pass whose last block of three frames is noise."""
    own_block = {"own block (noise at t = 1000)": (F - 3, F - 2, F - 1)}
    about = f"pass 0 (t = 1000), query frames {F - 3}–{F - 1}"
    return Caption(quantity, about, own_block, source=SOURCE, **options)


def profiles_of(N: int, H: int, F: int, seed=0) -> np.ndarray:
    """Return mean logits [N, H, F]: a first frame, a wave and noise, each of its own size in a head."""
    rng = np.random.default_rng(seed)
    frames = np.arange(F)
    sizes, speeds = rng.normal(1, 1, (2, N, H, 1))
    waves = np.cos(frames * speeds) + 0.2 * rng.normal(size=(N, H, F))
    return waves + 2 * sizes * (frames == 0)


def gallery(N: int, H: int, F: int) -> dict[str, Callable[[], Figure]]:
    """Return a call for every figure, by the name of its function, of N layers, H heads and F frames."""
    rng = np.random.default_rng(0)
    layers = range(N)
    caption = caption_of(F)
    about = caption.about
    profiles = profiles_of(N, H, F)
    masses = np.exp(profiles) / np.exp(profiles).sum(-1, keepdims=True)
    statistics = head_statistics(profiles.reshape(-1, F))
    of_heads = np.array(statistics.delta).reshape(N, H)
    # [N, F, F], absent where a key is of a later block
    matrices = np.stack([profiles_of(1, N, F, seed)[0] for seed in range(F)], 1)
    later = np.arange(F) // 3 > (np.arange(F) // 3)[:, None]
    matrices[:, later] = np.nan
    curve = np.repeat(profiles[0], 5, axis=-1) + np.tile(np.arange(5) / 10, F)
    heads = [panels.HeadPanel(f"L{n}H1", n, 1, profiles[n, 1], None) for n in layers]
    told = "r = 0.993, RMS 0.30 over context frames 0–17"
    compared = panels.HeadPanel("L0H1", 0, 1, profiles[0, 1], curve[1], profiles[0, 1] + 0.3)
    compared = compared._replace(clipped=np.arange(F) == F - 1, agreement=told, no_preference=0.1)
    blocks = np.arange(3, max(F, 7), 3)
    of_block = panels.BlockPanel(blocks, rng.normal(1, 1, len(blocks)), rng.normal(1, 1, len(blocks)))
    parts = panels.PartsPanel(profiles[0, 0], profiles[0, 0] / 2, 1.5)
    strips = [panels.ProfileMap(f"Layer {n}", "mean_logit", profiles[n]) for n in layers]
    labels = ["sink", *["memory"] * 2, *[""] * (F - 3)]
    keys = {
        f"Layer {n}": KeyColumns("frame", tuple(map(str, range(F))), tuple(labels), masses[n]) for n in layers
    }
    names = ("First − middle", "First / middle", "Mass on the first frame", "Excess at equal distance")
    scales = ("diverging", "ratio", "share", "sequential")
    maps = [
        panels.HeadMap(name, name, "share of 1", scale, of_heads)
        for name, scale in zip(names, scales, strict=True)
    ]
    kinds = [
        panels.LabelMap("our rule", taxonomy.KINDS, np.where(of_heads > 1, 1, -1), "", of_heads > 1.5),
        panels.LabelMap("published, Pyramid Forcing", taxonomy.KINDS, np.where(of_heads > 0, 1, -1)),
        panels.LabelMap("locality", taxonomy.LOCALITY, None, "no mass in this cache"),
    ]
    slots = np.arange(F // 3)[:, None] * 3 + 2 - np.arange(min(F, 12))
    slots = np.where(slots < 0, -9, slots)
    slots[1:, 0], slots[2:, 1] = 0, -1
    picture = np.full((48, 84, 3), 100, np.uint8)
    seen = np.abs(rng.normal(size=(F, 4, 6))).astype(np.float32)
    seen[:2] = np.nan
    own = (F - 3, F - 2, F - 1)
    query = ("mass", 2, 5, "pass 0 (t = 1000)", (F - 1, 1, 2), own, own, 20, 0.1, "wan-mini", SOURCE)
    video_map = VideoMap(seen, *query)
    share = stats.Interval(0.8, 0.7, 0.9)
    by_policy = {name: share._replace(estimate=0.7 + 0.2 * rng.random()) for name in POLICIES}
    drift = dict.fromkeys(("mean", "low", "high"), rng.random(30))
    dots = {name: float(rng.random()) for name in POLICIES}
    condition = {name: (0.9, 0.8, 1.0, [0.8, 0.9]) for name in ("none", "presence layers, others", "all 96")}
    budget = {
        "all": {3: (0.5, 0.4, 0.6), 6: (0.7, 0.6, 0.8)},
        "one": {3: [0.5], 6: [0.7]},
        "other": {3: [0.2], 6: [0.3]},
    }
    rules = ("uniform", "mass on the older past", "Pyramid Forcing", "effect", "attribution")
    films = np.random.default_rng(0).integers(0, 255, (81, 48, 84, 3)).astype(np.uint8)
    effects = {"direct": rng.random(F), "own block": rng.random(F), "total": rng.random(F)}
    runs = {name: [[(i, i, 1 / (i + 1)) for i in range(20)]] * 2 for name in ("VAE", "base")}
    pair = figures.HeadPair("L1H1", profiles[0, 0], profiles[0, 1], 0.9)
    bands = rng.normal(size=(F, 22))
    grid = rng.random((3, 4))
    calls: dict[str, Callable[[], Figure]] = {
        "head_curves": lambda: figures.head_curves(heads, caption),
        "head_curves, compared": lambda: figures.head_curves([compared] * 2, caption, [picture] * F),
        "head_grid": lambda: figures.head_grid(
            profiles[:, 0],
            figures.head_titles(of_heads[:, 0]),
            caption,
            layer=1,
            note="Δ = first − middle",
        ),
        "sweep_curves": lambda: figures.sweep_curves(
            {f"L{n}H1": profiles[:3, n % H] for n in layers}, caption, ["eagle", "castle", "boat"]
        ),
        "layer_comparison": lambda: figures.layer_comparison(profiles, layers, caption),
        "layer_comparison, mass": lambda: figures.layer_comparison(masses, layers, caption_of(F, "mass")),
        "layers_together": lambda: figures.layers_together(profiles, layers, caption),
        "layer_statistics": lambda: figures.layer_statistics(
            *np.stack([profiles[..., 0], profiles[..., 1:-1].mean(-1), profiles[..., -1]]), layers, caption
        ),
        "first_by_block": lambda: figures.first_by_block(
            {f"L{n}H1": of_block for n in layers}, "By block", about
        ),
        "curves_in_parts": lambda: figures.curves_in_parts(
            {f"L{n}H1, queries {q}–{q + 2}": parts for n in layers for q in (3, 18)}, "Curves in parts", about
        ),
        "heads_by_agreement": lambda: figures.heads_by_agreement(
            {"here": np.linspace(-1, 1, 9), "there": np.linspace(0, 1, 9)},
            [pair._replace(name=f"L{n}H1") for n in layers],
            "Agreement",
        ),
        "frame_maps": lambda: figures.frame_maps(matrices, range(F), caption, layer=1),
        "frame_maps, one head": lambda: figures.frame_maps(
            matrices[:1], range(F), caption, layer=1, heads=[3]
        ),
        "frame_maps, last block": lambda: figures.frame_maps(matrices[:, -3:], own, caption, layer=1),
        "profile_heat_maps": lambda: figures.profile_heat_maps(
            strips, "Every layer", about, highlighted_frames=caption.highlighted_frames
        ),
        "key_maps": lambda: figures.key_maps(keys, "mass", "Every layer", about),
        "prompt_words": lambda: figures.prompt_words(
            rng.random((H, len(WORDS))) / 12, WORDS, layer=1, subtitle=about
        ),
        "rope_bands": lambda: figures.rope_bands(
            bands, [f"t {n}" for n in range(22)], caption, layer=1, head=2
        ),
        "slot_map": lambda: figures.slot_map(slots, slots, F, "deep_sink", about),
        "last_block_attention": lambda: figures.last_block_attention(
            masses[0][:, : min(F, 12)], slots[-1], slots[-1], "The last block", about
        ),
        "survival_map": lambda: figures.survival_map(rng.random((N, F)), "What is left", about),
        "head_maps": lambda: figures.head_maps(maps, layers, subtitle=about),
        "label_maps": lambda: figures.label_maps(kinds, layers, subtitle=about),
        "correlation_map": lambda: figures.correlation_map(rng.uniform(-1, 1, (N, H)), layers, "Mean logits"),
        "attribution_maps": lambda: figures.attribution_maps(
            {"attention.head_output": of_heads, "mlp.output": of_heads[:, :1]}, layers, subtitle=about
        ),
        "attribution_against": lambda: figures.attribution_against(
            {name: (rng.random((4, N, H)), rng.random((4, N, H))) for name in ("color", "shape")}
        ),
        "preference_dots": lambda: figures.preference_dots(
            maps[0], maps[2:], border=2, title="Preference", subtitle=about
        ),
        "effect_against": lambda: figures.effect_against(
            np.exp(of_heads),
            dict.fromkeys(names, of_heads),
            dict.fromkeys(names, "ρ = 0.5\npartial ρ = 0.4"),
            title="Mass follows it",
            subtitle=about,
        ),
        "placebo_strips": lambda: figures.placebo_strips(
            of_heads.ravel(), rng.normal(size=(N * H, F - 4)), range(1, F - 3), about
        ),
        "distances_and_contrasts": lambda: figures.distances_and_contrasts(
            rng.random((N * H, F)), rng.random((N * H, F - 3)), about
        ),
        "effect_by_pass": lambda: figures.effect_by_pass(
            {f"pass {n} (t = {1000 - 200 * n})": of_heads for n in range(5)}, about
        ),
        "effect_by_model": lambda: figures.effect_by_model(
            {"causal": of_heads, "one step of training": -of_heads}, about
        ),
        "effects_by_frame": lambda: figures.effects_by_frame(effects, subtitle=about),
        "knockout_shares": lambda: figures.knockout_shares(
            {"Does a shape come back?": condition, "In its colour?": condition},
            {"none": 182, "all 96": 9},
            about,
            "Without 8 heads 10 % come back",
        ),
        "budget_shares": lambda: figures.budget_shares(dict.fromkeys(rules, budget), about),
        "share_bars": lambda: figures.share_bars(
            {"all routes of it": (0.8, 0.7, 0.9), "one": (0.5, 0.4, 0.6)},
            {"rendered": 0.9, "VAE": 0.8},
            "Routes",
            "Share",
            {"best single": [0.5, 0.6]},
        ),
        "lens_strip": lambda: figures.lens_strip(
            [[picture] * 4] * min(N, 6), list(layers)[:6], range(4), rng.random((min(N, 6), 4))
        ),
        "lines_by_layer": lambda: figures.lines_by_layer(
            rng.random((N, 3)), layers, ["self-attention", "cross-attention", "MLP"], "Norm of the update"
        ),
        "long_strips": lambda: figures.long_strips(
            {name: np.concatenate([picture] * 5, 1) for name in POLICIES},
            [0, 15, 30, 45, 60],
            "Long rollouts",
            about,
        ),
        "policy_dots": lambda: figures.policy_dots(
            {"one shape": by_policy, "two that cross": by_policy, "behind a wall": by_policy},
            ["frozen", "vae"],
            "Right in colour and shape",
            about,
        ),
        "drift_over_time": lambda: figures.drift_over_time(
            {"Right": dict.fromkeys(POLICIES, drift), "Hue": dict.fromkeys(POLICIES, drift)},
            ["frozen", "vae"],
            about,
        ),
        "policy_measures": lambda: figures.policy_measures(
            {"Right": dots, "Motion (sides per second)": dots}, ["frozen", "vae"], "Motion", about
        ),
        "sink_maps": lambda: figures.sink_maps(
            dict.fromkeys(("global positions", "block positions"), ([6, 9, 12], [0, 1, 3, 6], grid)),
            "Right",
            about,
        ),
        "rope_against_distance": lambda: figures.rope_against_distance(
            np.arange(100),
            np.cos(np.arange(100) / 5),
            dict.fromkeys(POLICIES, (3, 60)),
            [(31, 1.0), (63, 1.0)],
        ),
        "effect_by_length": lambda: figures.effect_by_length(
            {name: {21: share, 42: share, 84: share} for name in POLICIES[:4]},
            {21: 0.4, 42: 0.5, 84: 0.3},
            about,
        ),
        "video_map": lambda: figures.video_map(video_map, [picture] * F),
        "map_strip": lambda: figures.map_strip([video_map] * 2, [picture] * F, [0, F // 2, F - 1]),
        "map_rows": lambda: figures.map_rows(
            dict.fromkeys(("red", "circle"), seen[-3:]), own, [picture] * F, title="Words", subtitle=about
        ),
        "panels_beside": lambda: figures.panels_beside(picture, ["the video", "red", "circle"]),
        "video_strips": lambda: figures.video_strips(
            {"unedited": films, "edited": films}, [0, 20, 40, 60, 80], title="Videos", subtitle=about
        ),
        "training_curves": lambda: training.training_curves(
            runs, [(i, 20 + i, 21, 19) for i in range(9)], 5, about
        ),
        "training.video_strips": lambda: training.video_strips(
            ["a red circle moving right"] * 2, {"causal": [films / 255] * 2}, subtitle=about
        ),
    }
    return calls

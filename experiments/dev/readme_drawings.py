"""The figures of the README and of docs/miniature.md, drawn from the published data and the miniature."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.analysis import curve_matching, head_measures, published
from experiments.analysis import head_measures as head_choice
from experiments.analysis import taxonomy as head_taxonomy
from experiments.caches import load_cache
from experiments.caches.view import Profiles, open_profiles
from experiments.dev.first_frame_training import few_step_from
from experiments.figures import atlas, heads
from experiments.figures import training as training_figures
from experiments.figures.training import training_curves, video_strips
from experiments.miniature.checkpoint_analysis import read_report

MINI, MOMENTS = Path("checkpoints/wan-mini"), Path("cache/wan-mini-training")
STRIPS = {"one shape": 3, "two that cross": 1, "behind a wall": 2}  # captions shown: the first of each set
SHORT = published.FOLDER / "self_forcing_dmd_eagle_21f.pt"


def drawings(mini_cache: str | None, miniature: bool) -> dict[str, Callable[[], Figure]]:
    """What draws each file: the real model's heads, the miniature's from a cache, its videos and training."""
    drawn: dict[str, Callable[[], Figure]] = {
        "figure4_published.svg": lambda: figure4(
            open_profiles(load_cache(SHORT)), published.FOLDER / published.FIGURE4_CSV
        ),
        "kinds_of_heads_published.svg": lambda: kinds_of_heads(open_profiles(load_cache(SHORT))),
    }
    if mini_cache:
        mini = open_profiles(load_cache(mini_cache, expect=("figure4", "atlas")))
        drawn["figure4_mini.svg"] = lambda: figure4(mini, None)
    if miniature:
        drawn |= {"videos_mini.svg": videos, "training_mini.svg": training, "moments_mini.svg": moments}
    return drawn


def figure4(view: Profiles, curves_csv: Path | None) -> Figure:
    """The heads of the paper's Figure 4, over the paper's own curves where they are given."""
    curves, _ = published.curves_for(view, curves_csv, published.FIGURE4_MODEL)
    panels = head_choice.choose_heads(view, published.FIGURE4_HEADS).panels
    return heads.head_curves(curve_matching.add_reference(panels, view, curves), view.caption)


def kinds_of_heads(view: Profiles) -> Figure:
    """Anchor, wave and veil by our rule beside the published labels."""
    thresholds = head_taxonomy.load_thresholds("configs/taxonomy.yaml")
    maps = head_measures.label_maps(view, None, thresholds, published.labels_for(view))[:2]
    subtitle = f"Wan2.1-T2V-1.3B, Self-Forcing\neagle, 21 frames, {view.pass_label}"
    return atlas.label_maps(maps, view.layers, subtitle=subtitle)


def videos() -> Figure:
    """Strips of the first held-out captions of each set: rendered, few-step rollout, base model."""
    # Torch models, for this figure only.
    from experiments.miniature.evaluation import Miniature, rendered
    from experiments.miniature.frozen import SETS, held_out_scenes
    from experiments.miniature.recipe import FRAMES
    from wan.config import load_config

    mini = Miniature(load_config("configs/wan_mini.yaml"))
    chosen: list[str] = []
    rows: dict[str, list] = {"rendered": [], "causal": [], "base": []}
    for name, count in STRIPS.items():
        some = held_out_scenes(SETS[name], count)
        captions = [scene.caption for scene in some]
        rows["rendered"] += rendered(some, FRAMES)
        rows["causal"] += mini.causal(captions)
        rows["base"] += mini.base(captions)
        chosen += captions
    return video_strips(
        chosen, {name: [v.permute(0, 2, 3, 1).numpy() for v in row] for name, row in rows.items()}
    )


def training() -> Figure:
    """Losses of the stages and PSNR of the VAE, from the log of the shipped weights."""
    log = json.loads((MINI / "training.json").read_text(encoding="utf-8"))
    names = {"vae": "VAE", "base": "base", "causal": "causal", "few_step": "few-step"}
    first, again = log["vae"], log.get("vae_resumed")  # a second run of the VAE, from the first one's weights
    psnr = [*first["psnr_curve"], vae_end(first)]
    if again:
        later = [*again["psnr_curve"][1:], vae_end(again)]  # its beginning is the first one's end
        psnr += [[first["steps"] + step, *values] for step, *values in later]
    runs = {stage: [log[name] for name in (f"{stage}_first", stage) if name in log] for stage in names}
    losses = {names[stage]: [run["loss_curve"] for run in each] for stage, each in runs.items() if each}
    subtitle = "wan-mini, the stages of the shipped weights"
    return training_curves(losses, psnr, first["steps"] if again else None, subtitle)


def vae_end(run: dict) -> list[float]:
    """Step and PSNR of all, the first and the last second at the end of a run, over more clips than its
    curve."""
    return [run["steps"], run["psnr"], run["psnr_first_second"], run["psnr_last_second"]]


def moments() -> Figure:
    """Preferences for the first frame while the causal weights are trained."""
    report = read_report(MOMENTS / "moments.json")
    captured = [int(path.stem.removeprefix("step_")) for path in sorted(MOMENTS.glob("step_*.pt"))]
    context = load_cache(MOMENTS / f"step_{captured[0]:05d}.pt")["block_sizes"][:-1]
    measures = {
        "Excess of frame 0 at equal distance\nall queries with context": (
            "logits",
            0,
            "equal_distance_excess",
        ),
        "Mass on frame 0, of the context's\nlast block's queries": (
            "share",
            1 / sum(context),
            "first_context_mass",
        ),
    }
    first_pass = [moment["first pass"] for moment in report["training_checkpoints"]]
    values = {
        title: (unit, neutral, np.array([means[name] for means in first_pass]))
        for title, (unit, neutral, name) in measures.items()
    }
    steps, count = [moment["step"] for moment in report["training_checkpoints"]], len(report["captions"])
    subtitle = f"wan-mini in training, pass t = 1000, mean over {count} captions"
    return training_figures.training_checkpoints(steps, values, captured, subtitle, few_step_from())

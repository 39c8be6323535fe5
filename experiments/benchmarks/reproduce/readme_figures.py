"""Draw the figures of the README and docs/miniature.md that no finding makes, into notebooks/figures/.

    python experiments/benchmarks/reproduce/readme_figures.py
    python experiments/benchmarks/reproduce/readme_figures.py --miniature

The real model's Figure 4 is drawn from cache/published/. --miniature draws the logs in checkpoints/wan-mini/
and videos that are generated again. --layers BASE CAUSAL draws one layer of two caches, and no other figure.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.analysis import published
from experiments.analysis.panels import choose_heads
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.figures import heads
from experiments.figures.style import save_svg
from experiments.figures.training import training_checkpoints, training_curves, video_strips
from experiments.miniature.evaluation import Miniature, read_report, rendered
from experiments.miniature.moving_shapes import FRAMES
from experiments.miniature.tracking import SETS, held_out_scenes
from experiments.running.cli import Parser, main
from wan.config import load_config
from wan.files import read_json

TRAINING, LOG = Path("cache/wan-mini-training"), Path("checkpoints/wan-mini/training.json")
STRIPS = {"one shape": 3, "two that cross": 1, "behind a wall": 2}  # captions shown: the first of each set
HEADS_SHOWN = 4  # of a layer of two caches: those that differ most


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--miniature", action="store_true", help="its videos, its training and its attention meanwhile")
    flag("--layers", nargs=2, metavar=("BASE", "CAUSAL"), help="layer caches: draw base above causal")
    flag("--output_dir", type=Path, default=Path("notebooks/figures"))
    args = parser.parse_args(argv)
    if args.layers:
        figures = {"base_and_causal_mini": base_and_causal(*args.layers)}
    elif args.miniature:
        figures = {"videos_mini": videos(), "training_mini": training(), "moments_mini": moments()}
    else:
        figures = {"figure4_published": figure4()}
    for name, figure in figures.items():
        print(save_svg(figure, args.output_dir / f"{name}.svg"))


def figure4() -> Figure:
    """Draw the heads of the paper's Figure 4 over the paper's own curves."""
    view = open_profiles(load_cache(published.FOLDER / published.DEFAULT_ATLAS))
    csv, model = published.FOLDER / published.FIGURE4_CSV, published.FIGURE4_MODEL
    curves, _ = published.curves_for(view, csv, model)
    panels = choose_heads(view, published.FIGURE4_HEADS)[0]
    return heads.head_curves(published.add_reference(panels, view, curves), view.caption)


def base_and_causal(*paths: str) -> Figure:
    """Draw a layer of base and of causal weights: heads of the largest mean absolute difference, by row."""
    base, causal = (open_profiles(load_cache(path, expect=("layer",))) for path in paths)
    (layer,) = base.layers
    of_base, of_causal = base.frame_matrix(layer), causal.frame_matrix(layer)
    assert of_base is not None and of_causal is not None
    both = {"base": of_base, "causal": of_causal}
    difference = of_base - of_causal  # NaN in later blocks; softmax ignores a row's mean
    apart = np.abs(difference - np.nanmean(difference, -1, keepdims=True))
    shown = sorted(np.argsort(-np.nanmean(apart, (1, 2)))[:HEADS_SHOWN].tolist())
    matrices = np.concatenate([matrix[shown] for matrix in both.values()])
    names = [f"{weights}, H{head}" for weights in both for head in shown]
    about = f"base, {base.pass_label}; causal, {causal.pass_label}; the heads that differ most"
    caption = replace(causal.caption, subtitle=about, highlighted_frames={})
    return heads.frame_maps(matrices, range(base.num_frames), caption, layer=layer, heads=names)


def videos() -> Figure:
    """Draw strips of the first held-out captions of each set: rendered, few-step rollout, base model."""
    mini = Miniature(load_config("configs/wan_mini.yaml"))
    scenes = [scene for name, count in STRIPS.items() for scene in held_out_scenes(SETS[name], count)]
    captions = [scene.caption for scene in scenes]
    made = {
        "rendered": rendered(scenes, FRAMES),
        "causal": mini.causal(captions),
        "base": mini.base(captions),
    }
    strips = {name: [v.permute(0, 2, 3, 1).numpy() for v in row] for name, row in made.items()}
    about = "wan-mini: held-out captions; rendered, causal in 4 steps, base model"
    return video_strips(captions, strips, "Videos of the miniature", about)


def training() -> Figure:
    """Draw losses of the stages and PSNR of the VAE, from the log of the shipped weights."""
    log = read_json(LOG)
    names = {"vae": "VAE", "base": "base", "causal": "causal", "few_step": "few-step"}
    first, again = log["vae"], log["vae_resumed"]  # a second run of the VAE, from the first one's weights
    ends = ("steps", "psnr", "psnr_first_second", "psnr_last_second")  # of more clips than the curve's
    later = [*again["psnr_curve"][1:], [again[name] for name in ends]]  # it begins at the first one's end
    psnr = [*first["psnr_curve"], [first[name] for name in ends]]
    psnr += [[first["steps"] + step, *values] for step, *values in later]
    runs = {stage: [log[name] for name in (f"{stage}_first", stage) if name in log] for stage in names}
    losses = {names[stage]: [run["loss_curve"] for run in each] for stage, each in runs.items()}
    return training_curves(losses, psnr, first["steps"], "wan-mini, the stages of the shipped weights")


def moments() -> Figure:
    """Draw preferences for the first frame while the causal weights are trained."""
    report = read_report(TRAINING / "moments.json")
    captured = [int(path.stem.removeprefix("step_")) for path in sorted(TRAINING.glob("step_*.pt"))]
    context = load_cache(TRAINING / f"step_{captured[0]:05d}.pt")["block_sizes"][:-1]
    checkpoints = report["training_checkpoints"]
    excess, mass = (
        np.array([checkpoint["first pass"][name] for checkpoint in checkpoints])
        for name in ("equal_distance_excess", "first_context_mass")
    )
    values = {
        "Excess of frame 0 over\nothers at equal distance": ("logits", 0, excess),
        "Share of context mass on\nframe 0, last block": ("share", 1 / sum(context), mass),
    }
    subtitle = f"wan-mini in training, pass t = 1000, mean over {len(report['captions'])} captions"
    steps = [checkpoint["step"] for checkpoint in checkpoints]
    few_step_from = read_json(LOG)["causal_first"]["steps"]  # few-step stages follow the first causal one
    return training_checkpoints(steps, values, captured, subtitle, few_step_from)


if __name__ == "__main__":
    main(run)

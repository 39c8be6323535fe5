"""Draw the heads that the README and docs/miniature.md show, into notebooks/figures/.

    python experiments/benchmarks/reproduce/readme_figures.py
    python experiments/benchmarks/reproduce/readme_figures.py --miniature --mini_cache cache/atlas.pt

The real model's are drawn from cache/published/. The miniature's Figure 4 comes from a cache of its own, the
others from the logs in checkpoints/wan-mini/ and from videos that are generated again.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.analysis import published
from experiments.analysis.panels import choose_heads
from experiments.analysis.taxonomy import label_maps, load_thresholds
from experiments.benchmarks.reproduce.first_frame import LOG, TRAINING, few_step_from
from experiments.caches import load_cache
from experiments.caches.view import Profiles, open_profiles
from experiments.figures import atlas, heads
from experiments.figures.style import save_svg
from experiments.figures.training import training_checkpoints, training_curves, video_strips
from experiments.miniature.evaluation import Miniature, read_report, rendered
from experiments.miniature.recipe import FRAMES
from experiments.miniature.tracking import SETS, held_out_scenes
from experiments.running.cli import Parser, main
from wan.config import load_config
from wan.files import read_json

FOLDER = Path("notebooks/figures")
STRIPS = {"one shape": 3, "two that cross": 1, "behind a wall": 2}  # captions shown: the first of each set


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--mini_cache", help="a figure4 or atlas cache of the miniature, with --key_curve")
    flag("--miniature", action="store_true", help="also its videos, its training and its attention meanwhile")
    flag("--output_dir", type=Path, default=FOLDER)
    args = parser.parse_args(argv)

    eagle = open_profiles(load_cache(published.FOLDER / "self_forcing_dmd_eagle_21f.pt"))
    figures = {
        "figure4_published": figure4(eagle, published.FOLDER / published.FIGURE4_CSV),
        "kinds_of_heads_published": kinds_of_heads(eagle),
    }
    if args.mini_cache:
        mini = open_profiles(load_cache(args.mini_cache, expect=("figure4", "atlas")))
        figures["figure4_mini"] = figure4(mini, None)
    if args.miniature:
        figures |= {"videos_mini": videos(), "training_mini": training(), "moments_mini": moments()}
    for name, figure in figures.items():
        print(save_svg(figure, args.output_dir / f"{name}.svg"))


def figure4(view: Profiles, curves_csv: Path | None) -> Figure:
    """Draw the heads of the paper's Figure 4, over the paper's own curves where they are given."""
    curves, _ = published.curves_for(view, curves_csv, published.FIGURE4_MODEL)
    panels = choose_heads(view, published.FIGURE4_HEADS).panels
    return heads.head_curves(published.add_reference(panels, view, curves), view.caption)


def kinds_of_heads(view: Profiles) -> Figure:
    """Draw anchor, wave and veil by our rule beside the published labels."""
    thresholds = load_thresholds("configs/taxonomy.yaml")
    maps = label_maps(view, None, thresholds, published.labels_for(view))[:2]
    subtitle = f"{view.pass_label}; {view.caption.source}"
    return atlas.label_maps(maps, view.layers, subtitle=subtitle)


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
    first, again = log["vae"], log.get("vae_resumed")  # a second run of the VAE, from the first one's weights
    ends = ("steps", "psnr", "psnr_first_second", "psnr_last_second")  # of more clips than the curve's
    psnr = [*first["psnr_curve"], [first[name] for name in ends]]
    if again:
        later = [*again["psnr_curve"][1:], [again[name] for name in ends]]  # it begins at the first one's end
        psnr += [[first["steps"] + step, *values] for step, *values in later]
    runs = {stage: [log[name] for name in (f"{stage}_first", stage) if name in log] for stage in names}
    losses = {names[stage]: [run["loss_curve"] for run in each] for stage, each in runs.items() if each}
    resumed = first["steps"] if again else None
    return training_curves(losses, psnr, resumed, "wan-mini, the stages of the shipped weights")


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
        "Excess of frame 0 at equal distance\nall queries with context": ("logits", 0, excess),
        "Mass on frame 0, of the context's\nlast block's queries": ("share", 1 / sum(context), mass),
    }
    subtitle = f"wan-mini in training, pass t = 1000, mean over {len(report['captions'])} captions"
    steps = [checkpoint["step"] for checkpoint in checkpoints]
    return training_checkpoints(steps, values, captured, subtitle, few_step_from())


if __name__ == "__main__":
    main(run)

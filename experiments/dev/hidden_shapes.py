"""Which heads bring a hidden shape back, and does attention to frame 0 say what removing it does?

    python experiments/dev/hidden_shapes.py
    torchrun --nproc_per_node 4 experiments/dev/hidden_shapes.py --device cuda

Writes docs/hidden_shapes.json, from which readme_tables.py fills docs/interventions.md, and two figures.
Pieces are kept in --folder: the same command goes on where it stopped. --draw computes the curves
of that file again, and draws the figures.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from experiments.running.cli import Parser, count, main
from wan.errors import ConfigError

OUTPUT = Path("docs/hidden_shapes.json")
FIGURES = Path("notebooks/figures")
SCALE = 8  # pixels of a latent


def parser() -> Parser:
    flags = Parser(description=__doc__.splitlines()[0])
    add = flags.add_argument
    add("--config_path", default="configs/wan_mini.yaml")
    add("--ckpt_dir", help="directory of another miniature, with self_forcing_mini.pt in it")
    add("--captions", type=count, default=96, help="captions behind a wall, on which heads are judged")
    add("--selection", type=count, default=24, help="other captions, by which heads are ranked")
    add("--first_frame_captions", type=count, default=32, help="captions of every kind, for frame 0")
    add("--seeds", type=count, default=3, help="seeds of each caption")
    add("--draws", type=count, default=20, help="random orders")
    add("--counts", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="heads without a past")
    add("--layers", type=int, nargs="+", help="edit heads of these layers alone")
    add("--num_frames", type=count, default=21, help="latent frames")
    add(
        "--workers",
        type=count,
        help="processes that judge videos; this rank's share of the cores if left out",
    )
    add("--device", default="auto")
    add("--dtype", default="float32")
    add("--folder", type=Path, default=Path("cache/hidden_shapes"), help="where pieces are kept")
    add("--output_path", type=Path, default=OUTPUT)
    add("--figures", type=Path, default=FIGURES, help="folder of the two SVGs")
    add("--draw", action="store_true", help="only the curves and figures of --output_path, again")
    return flags


def run(argv=None):
    args = parser().parse_args(argv)

    from experiments.caches.files import replacing, require_writable  # no torch for --help

    require_writable(args.output_path)
    report = drawn_again(args.output_path) if args.draw else measure(args)
    if report is None:
        return
    with replacing(args.output_path) as file:
        file.write(compact(report).encode())
    print(args.output_path)
    draw_figures(args.output_path, args.figures)


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Make what is not done yet -> the report, of the first rank alone. StoppedError after Ctrl-C."""
    from experiments.miniature.evaluation import EvalPool
    from experiments.miniature.recipe import SIDE
    from experiments.running.progress import Progress, stopping_when_asked
    from experiments.running.ranks import on_own_device, this_rank, workers_of
    from experiments.studies.hidden_shapes import Design
    from wan.config import load_config

    if args.seeds > 9:
        raise ConfigError(f"--seeds {args.seeds}: at most 9, the report has a digit for each caption")
    paths = {}
    if args.ckpt_dir:
        paths = {"ckpt_dir": args.ckpt_dir, "checkpoint_path": f"{args.ckpt_dir}/self_forcing_mini.pt"}
    settings = {"device": args.device, "dtype": args.dtype, "num_frames": args.num_frames}
    config = load_config(args.config_path, paths | settings)
    if config.height * SCALE != SIDE:
        raise ConfigError(f"{args.config_path} is not of the miniature, whose tracker this needs")
    rank = this_rank()
    workers = workers_of(args.workers, rank)
    layers = None if args.layers is None else tuple(sorted(set(args.layers)))
    design = Design(
        args.captions, args.selection, args.seeds, args.draws, tuple(sorted(set(args.counts))), layers
    )
    with (
        Progress(quiet=not rank.is_first) as watch,
        stopping_when_asked(watch, "condition"),
        EvalPool(workers) as judges,  # before a GPU is touched: it forks
    ):
        return study(args, design, on_own_device(config, rank), judges, watch, rank)


def study(args, design, config, judges, watch, rank) -> dict[str, Any] | None:
    """Both studies -> the report of what they found."""
    import torch

    from experiments.analysis.effects import first_frame_report
    from experiments.caches.files import StoppedError
    from experiments.dev.hidden_shapes_report import knockouts
    from experiments.extraction import causal
    from experiments.extraction.provenance import environment
    from experiments.studies import hidden_shapes as first_frame_removed
    from experiments.studies.hidden_shapes import HiddenShapes, captions_behind_a_wall
    from wan.vae import VAE

    of_frame_0 = first_frame_removed.captions(args.first_frame_captions)
    behind_walls = [scene.caption for part in reversed(captions_behind_a_wall(design)) for _, scene in part]
    session = causal.prepare(config, [], [*behind_walls, *of_frame_0], watch)
    check_layers(design, session.model_config)
    vae = VAE.from_pretrained(config.ckpt_dir, device=session.device)
    torch.backends.cudnn.benchmark = session.device.type == "cuda"  # a decoder of few sizes
    removed = first_frame_removed.FirstFrameRemoved(
        of_frame_0, args.seeds, config, session, args.folder / "first_frame", design.layers
    )
    shapes = HiddenShapes(design, config, session, vae, judges, args.folder, watch)
    if not (shapes.run(rank) and removed.run(watch, rank)):
        raise StoppedError("stopped; what is done is not made again: run the same command to go on")
    if not rank.is_first:
        return None
    return {
        "environment": environment(session.device),
        "model": config.model,
        "weights_sha256": session.sha256.result(),
        "dtype": str(session.dtype).removeprefix("torch."),
        "first_frame": first_frame_report(removed.numbers(), [layer or 0 for layer in removed.study.layers]),
        "knockouts": knockouts(shapes),
    }


def check_layers(design, sizes) -> None:
    """Raise ConfigError for layers that the model lacks, and counts that are no part of its heads."""
    layers = range(sizes.num_layers) if design.layers is None else design.layers
    for layer in layers:
        if not 0 <= layer < sizes.num_layers:
            raise ConfigError(f"layer {layer} is not in 0..{sizes.num_layers - 1}")
    heads = len(layers) * sizes.num_heads
    if design.counts[-1] >= heads:
        raise ConfigError(f"--counts {design.counts[-1]}: fewer than all {heads} heads lose their past")


def compact(report: dict[str, Any]) -> str:
    """JSON with a line for each innermost list."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def drawn_again(path: Path) -> dict[str, Any]:
    """The report of a file, with its curves computed again."""
    from experiments.dev.hidden_shapes_report import with_curves

    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        return report | {"knockouts": with_curves(report["knockouts"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not what this script writes: {error}") from None


def draw_figures(path: Path, folder: Path) -> None:
    """The figures of a report."""
    from experiments.dev.hidden_shapes_report import draw
    from experiments.figures.style import save_svg

    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        figures = draw(report, report["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not what this script writes: {error}") from None
    for name, figure in figures.items():
        print(save_svg(figure, folder / name))


if __name__ == "__main__":
    main(run)

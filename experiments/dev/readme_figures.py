"""Draw the heads that the README shows, into notebooks/figures/.

    python experiments/dev/readme_figures.py
    python experiments/dev/readme_figures.py --miniature --mini_cache cache/atlas.pt

The real model's are made from cache/published/. The miniature's Figure 4 comes from a cache of its own, the
others from the logs in checkpoints/wan-mini/ and from videos that are generated again.
"""

from pathlib import Path

from experiments.running.cli import Parser, main

FOLDER = Path("notebooks/figures")


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--mini_cache", help="a figure4 or atlas cache of the miniature, with --key_curve")
    parser.add_argument(
        "--miniature", action="store_true", help="also its videos, its training and its attention meanwhile"
    )
    parser.add_argument("--output_dir", type=Path, default=FOLDER)
    args = parser.parse_args(argv)

    from experiments.dev.readme_drawings import drawings  # after the flags: it needs torch
    from experiments.figures.style import save_svg

    for name, draw in drawings(args.mini_cache, args.miniature).items():
        print(save_svg(draw(), args.output_dir / name))


if __name__ == "__main__":
    main(run)

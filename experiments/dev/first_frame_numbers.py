"""Measure the first-frame effect on the published atlases, for the README and docs/first_frame.md.

    python experiments/dev/first_frame_numbers.py

Writes docs/first_frame.json, from which readme_tables.py fills both documents, and two figures.
"""

import json
from pathlib import Path

from experiments.caches.files import replacing
from experiments.running.cli import Parser, main

OUTPUT = Path("docs/first_frame.json")
FIGURES = Path("notebooks/figures")


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_path", type=Path, default=OUTPUT)
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder of the two SVGs")
    args = parser.parse_args(argv)

    from experiments.dev.first_frame_report import (  # after the flags, with torch
        draw,
        published_views,
        report,
    )
    from experiments.figures.style import save_svg

    views = published_views()
    with replacing(args.output_path) as file:
        file.write(json.dumps(report(views), indent=1).encode() + b"\n")
    print(args.output_path)
    for name, figure in draw(views).items():
        print(save_svg(figure, args.figures / name))


if __name__ == "__main__":
    main(run)

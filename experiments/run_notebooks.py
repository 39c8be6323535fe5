"""Execute a notebook once per layer and collect its figures: notebooks, SVGs, a contact sheet, an HTML page.

    python experiments/run_notebooks.py extract_all_attention.ipynb CACHE 0-29

A layer that was done by the same notebook, cache and code is not done again, if its figures are still there.
"""

import os
from pathlib import Path

from experiments.running.cli import Parser, count, main


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("notebook", help="extract_all_attention, plt_fig4, plot_figure4 or layer_atlas, with .ipynb")
    flag("cache", type=Path, help="a cache of many layers, or a folder of layerN.pt")
    flag("layers", nargs="+", help="numbers from 0, ranges such as 0-29, or all")
    flag("--output_dir", type=Path, help="where everything goes; outputs/NOTEBOOK/CACHE where not given")
    flag("--jobs", type=count, default=min(4, os.cpu_count() or 1), help="notebooks executed at once")
    args = parser.parse_args(argv)

    from experiments.running.notebooks import run_notebooks  # after the flags: a --help needs no torch

    run_notebooks(args)


if __name__ == "__main__":
    main(run)

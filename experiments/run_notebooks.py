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

    from experiments.caches.files import claimed
    from experiments.figures.folder import save_contact_sheet  # after the flags: a --help needs no torch
    from experiments.figures.html_page import save_page
    from experiments.running.notebooks import NotebookRuns

    name = args.notebook.removeprefix("notebooks/")
    folder = args.output_dir or Path("outputs") / Path(name).stem / args.cache.stem
    runs = NotebookRuns(name, args.cache, folder)
    layers = runs.choose(args.layers)
    with claimed({str(folder / "index.html"): 0}):
        try:
            runs.run(layers, args.jobs)
        except KeyboardInterrupt:
            print(f"\nthe layers that are done stay in {folder}; the same command continues there")
            raise
        svg = runs.notebook.sheet
        figures = {f"Layer {layer}": runs.figures(layer) / svg.format(layer) for layer in layers}
        sheet = save_contact_sheet(folder / "contact_sheet.svg", figures, f"{name}, {args.cache.name}")
        page = save_page(folder / "index.html", args.cache, layers=layers)
    print(f"{len(layers)} layers:      {folder}/notebooks/layerN.ipynb, {folder}/layerN/*.svg")
    print(f"contact sheet:  {sheet}")
    print(f"page:           {page}")


if __name__ == "__main__":
    main(run)

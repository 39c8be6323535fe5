"""Execute a notebook once per layer and collect its figures: notebooks, SVGs, a contact sheet, an HTML page.

    python experiments/run_notebooks.py extract_all_attention.ipynb CACHE 0-29

A layer that was done by the same notebook, cache and code is not done again, if its figures are still there.
"""

import os
from pathlib import Path

from experiments.running.cli import Parser, main
from experiments.running.notebooks import NOTEBOOKS
from wan.errors import ConfigError

FOLDER = Path("notebooks")


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", help=f"one of {', '.join(NOTEBOOKS)}")
    parser.add_argument("cache", type=Path, help="a cache of many layers, or a folder of layerN.pt")
    parser.add_argument("layers", nargs="+", help="numbers from 0, ranges such as 0-29, or all")
    parser.add_argument(
        "--output_dir", type=Path, help="where everything goes; outputs/NOTEBOOK/CACHE where not given"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="notebooks executed at once"
    )
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {args.jobs}")
    run_notebook(name_of(Path(args.notebook)), args.cache, args.layers, args.output_dir, args.jobs)


def name_of(notebook: Path) -> str:
    """The name of a notebook of the table. Raises ConfigError for the path of another file."""
    mine, is_path = FOLDER / notebook.name, notebook.is_file() or notebook.name != str(notebook)
    if notebook.name in NOTEBOOKS and is_path and notebook.resolve() != mine.resolve():
        raise ConfigError(f"{notebook} is not {mine}, which this script executes; give {notebook.name}")
    return notebook.name


def run_notebook(name: str, cache: Path, words: list[str], output_dir: Path | None, jobs: int) -> None:
    """Execute a notebook for the layers that words name; make the contact sheet and the page."""
    from experiments.figures.folder import save_contact_sheet
    from experiments.figures.html_page import save_page
    from experiments.running.locks import claimed
    from experiments.running.notebooks import LayerCaches, NotebookRuns

    folder = output_dir or Path("outputs") / Path(name).stem / cache.stem
    caches = LayerCaches(name, cache, folder / "caches")
    layers = caches.choose(words)
    with claimed({str(folder / "index.html"): 0}):
        runs = NotebookRuns(FOLDER / name, caches, folder)
        try:
            runs.run(layers, jobs)
        except KeyboardInterrupt:
            print(f"\nthe layers that are done stay in {folder}; the same command continues there")
            raise
        svg = NOTEBOOKS[name].sheet
        figures = {f"Layer {layer}": runs.figures(layer) / svg.format(layer) for layer in layers}
        sheet = save_contact_sheet(folder / "contact_sheet.svg", figures, f"{name}, {cache.name}")
        page = save_page(folder / "index.html", cache, layers)
    print(f"{len(layers)} layers:      {folder}/notebooks/layerN.ipynb, {folder}/layerN/*.svg")
    print(f"contact sheet:  {sheet}")
    print(f"page:           {page}")


if __name__ == "__main__":
    main(run)

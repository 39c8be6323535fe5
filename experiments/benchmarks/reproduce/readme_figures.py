"""Draw the README's Figure 4 of the real model from cache/published/ into notebooks/figures/.

python experiments/benchmarks/reproduce/readme_figures.py
"""

from pathlib import Path

from matplotlib.figure import Figure

from experiments.analysis import published
from experiments.analysis.panels import choose_heads
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.figures import heads
from experiments.figures.style import save_svg
from experiments.running.cli import Parser, main


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("notebooks/figures"))
    args = parser.parse_args(argv)
    print(save_svg(figure4(), args.output_dir / "figure4_published.svg"))


def figure4() -> Figure:
    """Draw the heads of the paper's Figure 4 over the paper's own curves."""
    view = open_profiles(load_cache(published.FOLDER / published.DEFAULT_ATLAS))
    csv, model = published.FOLDER / published.FIGURE4_CSV, published.FIGURE4_MODEL
    curves, _ = published.curves_for(view, csv, model)
    panels = choose_heads(view, published.FIGURE4_HEADS)[0]
    return heads.head_curves(published.add_reference(panels, view, curves), view.caption)


if __name__ == "__main__":
    main(run)

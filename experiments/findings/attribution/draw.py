"""Draw attribution scores of heads beside patches of them, and print how both agree (README.md).

    python experiments/findings/attribution/draw.py

results.json beside this file has, for every pair of captions, the scores of all heads and what patching them
does.
"""

from pathlib import Path

from experiments import figures
from experiments.analysis import results
from experiments.analysis.panels import table
from experiments.running import cli
from wan.files import read_json


def run(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVG")
    parser.add_argument("--overwrite", action="store_true", help="replace figures that were changed since")
    args = parser.parse_args(argv)
    folder = args.figures
    report = read_json(Path(__file__).with_name("results.json"))
    print(table(results.attribution_rows(report)))
    figure = figures.attribution_against(results.attribution_pairs(report))
    print(figures.save_figure(figure, folder / "attribution_against.svg", overwrite=args.overwrite))


if __name__ == "__main__":
    cli.main(run)

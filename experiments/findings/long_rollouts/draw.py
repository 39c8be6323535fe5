"""Draw one caption with a wall under cache policies, 60 seconds long (README.md).

    python experiments/findings/long_rollouts/draw.py

strips.json beside this file has the frames, results.json and results_heads.json every policy's numbers, which
it prints, and effect_by_length.json those of the first frame.
"""

from pathlib import Path

from experiments import figures
from experiments.analysis import results
from experiments.analysis.panels import table
from experiments.running import cli


def run(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVG")
    parser.add_argument("--overwrite", action="store_true", help="replace figures that were changed since")
    args = parser.parse_args(argv)
    folder = args.figures
    here = Path(__file__)
    strips = results.read_strips(here.with_name("strips.json"), here.with_name("results.json"))
    figure = figures.long_strips(*strips)
    print(figures.save_figure(figure, folder / "long_rollouts.svg", overwrite=args.overwrite))
    print(table(results.LongRollouts.open(here.with_name("results.json")).rows()))


if __name__ == "__main__":
    cli.main(run)

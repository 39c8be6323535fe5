"""Many SVG figures on one labelled page, as one SVG whose text stays text.

python experiments/contact_sheet.py sheet.svg --title "Two layers" "1=layer1/a.svg" "2=layer2/a.svg"
"""

from functools import partial
from pathlib import Path

from experiments.caches.files import CacheError
from experiments.running.cli import Parser, main


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("sheet", help="the SVG to write")
    parser.add_argument("figures", nargs="+", metavar="LABEL=SVG")
    parser.add_argument("--title", default="")
    args = parser.parse_args(argv)

    from experiments.figures.folder import save_contact_sheet  # after the flags: a --help needs no torch

    pairs = [word.partition("=")[::2] for word in args.figures]
    for label, file in pairs:
        if not Path(file).is_file():
            raise CacheError(f"{file or label} not found; figures are given as LABEL=SVG")
    print(save_contact_sheet(args.sheet, {label: Path(file) for label, file in pairs}, args.title))


command = partial(main, run)

if __name__ == "__main__":
    command()

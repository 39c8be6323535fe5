"""The flags that all findings have."""

from pathlib import Path

from experiments.running.cli import Parser


def finding_parser(description: str, folder: str) -> Parser:
    """Return the flags of a finding whose results lie in experiments/findings/FOLDER."""
    parser = Parser(description=description.splitlines()[0])
    flag = parser.add_argument
    flag("--output_path", type=Path, default=Path(f"experiments/findings/{folder}/results.json"))
    flag("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    return parser

"""Execute a notebook once per layer and collect its figures: notebooks, SVGs, a contact sheet, an HTML page.

    python experiments/run_notebooks.py extract_all_attention.ipynb CACHE 0-29

A layer of the same notebook, cache and parameters is not done again while its figures are there.
"""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from experiments.running import cli
from experiments.running.parameters import NOTEBOOKS
from wan.errors import ConfigError


def layers(text: str) -> list[int]:
    """Return the layers of numbers and ranges, such as 0,5-7; of all, nothing."""
    if text == "all":
        return []
    if "," in text:
        return [layer for part in text.split(",") if part for layer in layers(part)]
    first, dash, last = text.partition("-")
    if not dash:
        last = first
    numbers = list(range(cli.count_or_none(first), cli.count_or_none(last) + 1))
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} goes backwards: write {last}-{first}")
    return numbers


def parameter(text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE, which is read as YAML, as papermill does."""
    name, sign, value = text.partition("=")
    with suppress(yaml.YAMLError):
        if sign:
            return name, yaml.safe_load(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")


def run(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument
    flag("notebook", type=lambda text: Path(text).name, choices=NOTEBOOKS, help="of notebooks/")
    flag("cache", type=cli.input_path, help="a cache of many layers, or a folder of layerN.pt")
    flag("layers", type=layers, nargs="+", help="numbers from 0, ranges such as 0-29, or all")
    flag("--output_dir", type=Path, help="where everything goes; outputs/NOTEBOOK/CACHE where not given")
    flag("--parameter", type=parameter, nargs="+", metavar="NAME=VALUE", help="others, such as STEP=4")
    flag("--jobs", type=cli.count, help=argparse.SUPPRESS)  # of 1.0: one kernel draws all layers
    args = parser.parse_args(argv)
    names = [name for name, _ in args.parameter or ()]
    for name in names:
        if names.count(name) > 1:
            parser.error(f"--parameter has {name} twice")

    if args.jobs:
        raise ConfigError("--jobs has no effect, since one kernel draws all layers; leave it out")

    from experiments.running.notebooks import run_notebooks  # after the flags: a --help needs no torch

    run_notebooks(args)


if __name__ == "__main__":
    cli.main(run)

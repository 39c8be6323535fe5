"""The flags of a script, from its own parser: nothing is run but what makes it."""

import argparse
import contextlib
from functools import cache
from importlib import import_module

from conftest import ROOT

from experiments.running import cli


class _SeenError(Exception):
    """The command line would be read here."""


@cache
def arguments(name: str) -> list[argparse.Action]:
    """What a script of experiments/ takes, flags or not; one of the workshop is benchmarks.NAME."""
    found: list[argparse.Action] = []

    def parse_args(self, args=None, namespace=None):
        found.extend(self._actions)
        raise _SeenError

    before, cli.Parser.parse_args = cli.Parser.parse_args, parse_args
    try:
        with contextlib.suppress(_SeenError):
            import_module(f"experiments.{name}").run([])
    finally:
        cli.Parser.parse_args = before
    return [action for action in found if action.dest != "help"]


def flags(name: str) -> list[argparse.Action]:
    return [action for action in arguments(name) if action.option_strings]


def scripts() -> list[str]:
    """Every script that users or the workshop start, by the names that arguments() takes."""
    found = []
    for folder, prefix in (("experiments", ""), ("experiments/benchmarks", "benchmarks.")):
        for path in sorted((ROOT / folder).glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "__main__" in text:
                found.append(prefix + path.stem)
    return found

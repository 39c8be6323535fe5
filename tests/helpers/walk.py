"""Follow the settings of a command through our calls until its cache is written.

python tests/helpers/walk.py   # the way of run_extraction_figure4.py, a line a function
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
OWN = tuple(f"{ROOT / name}/" for name in ("wan", "experiments"))
CHECKS = ("check", "require")  # what functions that only check are called


def walk(call: Callable[[list[str]], None], argv: list[str]) -> list[tuple[str, str, bool]]:
    """Call it with argv -> file, name and whether it checks, of every function that gets the settings.

    Settings are argv, the parsed flags and the config, as arguments; a function checks if it raises, or calls
    one that is named so. Comprehensions and lambdas do not count.
    """
    from wan.config import RunConfig

    entered = set[CodeType]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OWN) or code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in names:
            value = frame.f_locals.get(name)
            if value is argv or isinstance(value, argparse.Namespace | RunConfig):
                entered.add(code)

    sys.setprofile(note)
    try:
        call(argv)
    finally:
        sys.setprofile(None)
    found = [
        (str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname, checks(code)) for code in entered
    ]
    return sorted(found)


def checks(code: CodeType) -> bool:
    """Return whether a function raises, or calls one whose name says that it checks."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.startswith(CHECKS):
                return True
    return False


if __name__ == "__main__":
    from experiments import run_extraction_figure4

    flags = "--config_path configs/wan_mini.yaml --num_frames 6 --granularity frame --quiet"
    way = walk(run_extraction_figure4.run, [*flags.split(), "--output_path", "outputs/walk.pt"])
    for file, name, is_check in way:
        print(file, name, "checks" if is_check else "")
    files = {file for file, _, _ in way}
    print(f"{len(way)} functions in {len(files)} files; {sum(row[2] for row in way)} check")

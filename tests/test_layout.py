"""The rooms of wan/ and experiments/: who imports whom, what users type."""

import ast
import subprocess
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import ROOT

# An import goes to the same package or to a lower level.
ROOMS = [
    "caches",
    "analysis extraction",
    "session",
    "figures",
    "running",
    "base_session",
    "miniature",
    "studies",
    "",
    "benchmarks",
    "findings",
]
LEVELS = {f"experiments.{room}": n for n, rooms in enumerate(ROOMS) for room in rooms.split()}
LEVELS |= {"wan": -1, "experiments": ROOMS.index("")}  # the scripts, captured.py
APART = {("experiments.running", "experiments.analysis"), ("experiments.figures", "experiments.extraction")}
NO_MODELS = ("experiments.analysis", "experiments.figures")  # of wan they know these modules alone
WITHOUT_TORCH_MODELS = {"wan.blocks", "wan.config", "wan.errors", "wan.files"}


def tracked(*folders: str) -> list[str]:
    """Files that git knows or would add, as paths below the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(name for name in listed if name and (ROOT / name).is_file())


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of wan and experiments -> its syntax tree."""
    files = [name for name in tracked("wan", "experiments") if name.endswith(".py")]
    names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
    return {name: ast.parse((ROOT / file).read_text()) for name, file in zip(names, files, strict=True)}


def package(module: str) -> str:
    """The row of the table: `wan` for all of it, `experiments.caches`, or `experiments` for a script."""
    return max((name for name in LEVELS if f"{module}.".startswith(f"{name}.")), key=len)


def at_run_time(tree: ast.AST):
    """All nodes but those below `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from at_run_time(node)


def imports(module: str, nodes) -> set[str]:
    """Modules of ours that these nodes import, by their full names."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write `from {package(module)}... import`, no relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in names}
    return {name for name in found if name.split(".")[0] in ("wan", "experiments")} - {module}


def test_imports_follow_the_table_of_levels():
    wrong = []
    for module, tree in modules().items():
        mine = package(module)
        for imported in imports(module, at_run_time(tree)):
            theirs = package(imported)
            upwards = theirs != mine and LEVELS[theirs] >= LEVELS[mine]
            models = mine in NO_MODELS and theirs == "wan" and imported not in WITHOUT_TORCH_MODELS
            if upwards or (mine, theirs) in APART or models:
                wrong.append(f"{module} imports {imported}")
    assert not wrong


def test_no_import_goes_in_a_circle():
    graph = {module: imports(module, at_run_time(tree)) for module, tree in modules().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names it


def test_figure_4_imports_few_modules():
    """All that may be imported, also late, for the paper's figure."""
    found, left = set(), ["experiments.run_extraction_figure4"]
    while left:
        if (module := left.pop()) in modules() and module not in found:
            found.add(module)
            left += imports(module, ast.walk(modules()[module]))
    assert len(found) <= 60, sorted(found)


def test_no_two_test_files_have_one_name():
    """pytest imports them by name alone."""
    names = [Path(name).name for name in tracked("tests") if Path(name).name.startswith("test_")]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)

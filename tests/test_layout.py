"""The layout of wan/ and experiments/: imports, what an eager run skips."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
import transformers.models.umt5.modeling_umt5  # noqa: F401  here, not where it is watched
from conftest import ROOT
from helpers.forked import forked
from helpers.walk import walk

# An import goes to the same room or to an earlier one. "" has the scripts.
ROOMS = ["caches", "analysis configs progress provenance", "memory", "edits extraction.video prompts"]
ROOMS += ["lens pipeline_calls runs", "pipeline_session session"]
ROOMS += ["extraction", "figures", "words", "captured", "attribution", "running", "base_session"]
ROOMS += ["miniature", "studies", "", "benchmarks findings"]
LEVELS = {
    f"experiments.{room}".rstrip("."): n for n, rooms in enumerate(ROOMS) for room in rooms.split() or [""]
}
LEVELS |= {"wan": -1}
NO_MODELS = ("experiments.analysis", "experiments.figures")  # of wan they know these modules alone
WITHOUT_TORCH_MODELS = {"wan.blocks", "wan.config", "wan.errors", "wan.files", "wan.keys"}

LONGEST_CHAIN = 12  # of imports, those within functions too
OPTIONAL = ("wan.wings", "wan.kernels.fused", "wan.kernels.mass", "wan.kernels.vae")  # on a CPU

# How dense the code is, for 1,000 lines: ours at version 1.0 had 29.4, 3.7 and 10.5, nanochat has 9.4, 0, 2.7
MOST_CONDITIONAL_EXPRESSIONS, MOST_WALRUSES, MOST_RAISES = 6.5, 0.4, 11.5
MOST_IMPORTED_NAMES = 20  # of a file, in the mean
MOST_ANY = 45  # annotations of variables with Any
# Of all assigned names, those that say a place in a sentence instead of a thing: 6.4 % at version 2.0
SAYING_NO_THING = ("found", "own", "one", "each", "made", "said", "held", "known", "there", "given", "some")
SAYING_NO_THING += ("more", "kept", "theirs", "mine", "asked")
MOST_SAYING_NO_THING = 0.009
MOST_CALLS, MOST_CHECKS = 50, 17  # that a setting of Figure 4's command passes; 1.0: 48 and 14
MOST_ROWS = 40  # of "Where things live"


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


def is_script(module: str) -> bool:
    """Return whether a module of experiments/ is a command: it has `if __name__ == "__main__"`."""
    return any(
        isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in modules()[module].body
    )


def room(module: str) -> str:
    """The row of the table: `wan` for all of it, `experiments.caches`, or `experiments` for a script."""
    return max((name for name in LEVELS if f"{module}.".startswith(f"{name}.")), key=len)


def on_import(tree: ast.AST, with_functions: bool = False):
    """Yield the nodes that run when a module is imported, or at all: none that is for types alone."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if for_types or (is_function and not with_functions):
            continue
        yield node
        yield from on_import(node, with_functions)


def imports(module: str, nodes) -> set[str]:
    """Return the modules of ours that these nodes import, with the packages that hold them."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write `from {room(module)}... import`, no relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in names}
    found |= {
        str(parent).replace("/", ".") for name in found for parent in Path(name.replace(".", "/")).parents
    }
    own = {
        module,
        *(m for m in modules() if module.startswith(f"{m}.")),
    }  # a package is there before its modules
    return {name for name in found if name in modules()} - own


def test_imports_follow_the_table_of_levels():
    wrong = []
    for module, tree in modules().items():
        for imported in imports(module, on_import(tree, with_functions=True)) - {
            "experiments",
            "experiments.extraction",
        }:
            mine, theirs = room(module), room(imported)
            upwards = theirs != mine and LEVELS[theirs] >= LEVELS[mine] and not is_export(module, imported)
            models = mine in NO_MODELS and theirs == "wan" and imported not in {"wan", *WITHOUT_TORCH_MODELS}
            findings = "experiments.findings" == theirs != mine
            if upwards or models or findings:
                wrong.append(f"{module} imports {imported}")
    assert not wrong


def is_export(module: str, imported: str) -> bool:
    """Return whether a package only hands on what is asked of it: `from experiments import load`."""
    return module == "experiments" and imported in (
        "experiments.runs",
        "experiments.session",
        "experiments.captured",
        "experiments.attribution",
    )


def test_no_circle_and_no_long_chain():
    graph = {
        module: imports(module, on_import(tree, with_functions=True)) for module, tree in modules().items()
    }
    graph["experiments"] = set()  # which hands on what is asked of it
    depth: dict[str, int] = {}
    longest: dict[str, list[str]] = {}
    for module in TopologicalSorter(graph).static_order():  # raises CycleError, which names the circle
        below = max(graph[module], key=depth.__getitem__, default=None)
        depth[module] = 1 + (depth[below] if below else 0)
        longest[module] = [module, *(longest[below] if below else [])]
    deepest = max(depth, key=depth.__getitem__)
    assert depth[deepest] <= LONGEST_CHAIN, " -> ".join(longest[deepest])


def test_a_script_imports_torch_after_its_flags():
    """It has one import within a function, so that --help loads no torch."""
    late = {}
    for module, tree in modules().items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        nodes = [node for function in functions for node in ast.walk(function)]
        late[module] = sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes)
    assert not {module: count for module, count in late.items() if is_script(module) and count > 1}


def test_the_code_is_not_dense():
    nodes = [node for tree in modules().values() for node in ast.walk(tree)]
    files = [name for name in tracked("wan", "experiments") if name.endswith(".py")]
    thousands = sum(len((ROOT / name).read_text().splitlines()) for name in files) / 1000

    def share(kind) -> float:
        return sum(isinstance(node, kind) for node in nodes) / thousands

    assert share(ast.IfExp) <= MOST_CONDITIONAL_EXPRESSIONS
    assert share(ast.NamedExpr) <= MOST_WALRUSES
    assert share(ast.Raise) <= MOST_RAISES
    assigned = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    saying_no_thing = sum(name in SAYING_NO_THING for name in assigned)
    assert saying_no_thing / len(assigned) <= MOST_SAYING_NO_THING
    imported = sum(len(node.names) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))
    assert imported / len(files) <= MOST_IMPORTED_NAMES
    of_variables = [node.annotation for node in nodes if isinstance(node, ast.AnnAssign)]
    names = [{part.id for part in ast.walk(kind) if isinstance(part, ast.Name)} for kind in of_variables]
    assert sum("Any" in found for found in names) <= MOST_ANY


def test_where_things_live_names_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Where things live")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert 20 < len(rows) <= MOST_ROWS
    for row in rows:
        paths = re.findall(r"`([\w./*-]+/[\w./*-]*)`", row)
        assert paths, row
        for path in paths:
            assert list(ROOT.glob(path.rstrip("/"))), f"{path} of {row}"


@pytest.fixture(scope="module")
def walked(tmp_path_factory) -> tuple[list[tuple[str, str, bool]], list[str]]:
    """Return which functions get the settings of Figure 4's command, and which modules of ours it imports.

    In a fork that forgets our modules: others' code takes seconds to import, and four times that where it is
    watched.
    """
    path = tmp_path_factory.mktemp("walk") / "figure4.pt"
    config = (ROOT / "configs/wan_mini.yaml").read_text().replace("num_frames: 21", "num_frames: 6")
    Path(f"{path}.yaml").write_text(f"{config}\nembeds_dir: null\n")  # by the encoder, whatever is remembered
    argv = ["--config_path", f"{path}.yaml", "--granularity", "frame", "--quiet"]

    def call():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("wan", "experiments")]:
            del sys.modules[name]
        script = import_module("experiments.run_extraction_figure4")
        way = walk(script.run, [*argv, "--output_path", str(path)])
        return way, [name for name in sys.modules if name.startswith(("wan.", "experiments."))]

    done = forked(call)
    assert done.code == 0, done.value
    return done.value


def test_the_way_of_a_setting_is_no_longer_than_it_was(walked):
    way, _ = walked
    assert len(way) <= MOST_CALLS, way
    assert sum(is_check for _, _, is_check in way) <= MOST_CHECKS, way


def test_an_eager_run_on_a_cpu_imports_nothing_optional(walked):
    _, imported = walked
    assert not [name for name in imported if name.startswith(OPTIONAL)]


def test_no_two_test_files_have_one_name():
    """pytest imports them by name alone."""
    names = [Path(name).name for name in tracked("tests") if Path(name).name.startswith("test_")]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)

"""Fifty small mistakes in wan/ and the caches, and a hundred in who goes by fingerprints: are they noticed?

python tests/mutations.py --choose OLDER_TREE                  # mistakes that both trees can have
python tests/mutations.py --root OLDER_TREE --label before     # makes them there; counts what is noticed
python tests/mutations.py --label after [--count 2]            # the same here
python tests/mutations.py --fingerprints [--count 2]           # the hundred; chooses them anew

A mistake is an expression of a function and what takes its place, so it is found again in a tree whose files
have moved. Each is made in a copy of the tree; the fast tests of its package run there, in a fork of one
warmed process, to the first failure. A campaign that is stopped goes on where it was.
"""

import argparse
import ast
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs/benchmarks/mutations.json"
SEED, COUNT, SECONDS = 13, 50, 300  # seconds after which a run counts as noticed: the mistake hangs
SOURCES = {"wan": "wan/**/*.py", "caches": "experiments/caches/*.py"}
TESTS = {"wan": ["tests/wan"], "caches": ["tests/caches"]}
FAST = ["-m", "not slow and not beside"]

# Who makes, stores and compares fingerprints, with the tests of each; an entry of a dict and the call of a
# check may be left out, too.
IDENTITY, MACHINE = "extraction/test_provenance.py", "robustness/test_nothing_wrong.py"
TORN = "test_torn_results_and_those_of_others_are_none"
PROMPTS, LONG = "extraction/test_prompts.py", "extraction/test_long_rollout.py"
ITEMS = "studies/test_policy_comparison.py::"
ITEMS += "test_an_item_is_known_by_its_policys_classes_and_the_first_seed_has_the_video"
MADE = "studies/test_policy_comparison.py::test_what_is_done_is_not_made_again_and_what_is_torn_is"
BLOCKS = f"{LONG}::test_blocks_are_missing_unless_they_are_this_runs"
BLOCKS += f" {LONG}::test_a_file_of_latents_is_whole_at_every_block"
PAGE = "figures/test_page_data.py"
USERS = {
    "experiments/extraction/provenance.py": ("identity fingerprint code_version video_tag", IDENTITY),
    "experiments/caches/files.py": (
        "require_same mp4_tag tag_in mp4_boxes",
        f"caches/test_mp4_files.py {IDENTITY} {LONG}::test_a_torn_video_is_cut_to_its_whole_pieces {MACHINE}",
    ),
    "experiments/caches/store.py": ("peek", "caches/test_formats.py::test_a_look_at_a_file_never_fails"),
    "experiments/extraction/causal.py": (
        "require_loaded reference_means _read_means",
        f"{IDENTITY} running/test_own_code.py::test_what_a_rollout_takes_anew_is_honoured "
        "studies/test_intervention_runs.py::test_every_ablation_runs_with_what_it_needs",
    ),
    "experiments/extraction/prompt_embeds.py": (
        "needs_encoder is_of states_files",
        f"{PROMPTS}::test_a_name_for_all_that_the_bits_depend_on {MACHINE} "
        f"{PROMPTS}::test_the_same_bytes_with_remembered_states_and_without",
    ),
    "experiments/extraction/long_rollout.py": (
        "missing LatentFile.__init__ frames",
        f"{BLOCKS} {LONG}::test_files_of_others_are_left_alone {MACHINE}",
    ),
    "experiments/extraction/video.py": (
        "tag_of GrowingVideo.__init__ keep",
        f"{LONG}::test_files_of_others_are_left_alone {LONG}::test_a_torn_video_is_cut_to_its_whole_pieces "
        f"{MACHINE}",
    ),
    "experiments/running/engine.py": (
        "Results.read Results.write",
        f"running/test_engine.py::{TORN} {MACHINE}",
    ),
    "experiments/running/sweep.py": (
        "Sweep.is_done is_of has_video state_of_cache",
        f"{MACHINE} running/test_sweep.py",
    ),
    "experiments/studies/causal_atlas.py": ("identity name", f"{IDENTITY} {MACHINE}"),
    "experiments/studies/policy_comparison.py": ("items is_done", f"{IDENTITY} {MADE} {ITEMS}"),
    "experiments/studies/intervention_job.py": (
        "base_runs",
        f"{IDENTITY} studies/test_intervention_runs.py::"
        "test_the_script_writes_a_cache_and_a_video_and_keeps_the_base_run",
    ),
    "experiments/figures/video_maps.py": (
        "video_of",
        f"{PAGE}::test_thumbnails {PAGE}::test_the_video_in_a_folder_of_layers_is_known_by_its_run",
    ),
    "experiments/running/notebooks.py": (
        "mark is_done",
        "notebooks/test_notebooks.py::test_stopped_and_continued",
    ),
}
FINGERPRINTS = 100
LOG = "mutations.log"  # of the tests, in a copy of the tree
NOTICED = ("failed", "error", "hung")
Mistake = tuple[str, str, str, str]  # package, function, expression, what takes its place
SWAPPED = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)]
SWAPPED += [(ast.Is, ast.IsNot), (ast.And, ast.Or), (ast.Add, ast.Sub)]
REPLACED = [(ast.Mult, ast.Add), (ast.Div, ast.Mult), (ast.FloorDiv, ast.Mult)]
OPERATORS: dict[type, type] = dict([*SWAPPED, *((new, old) for old, new in SWAPPED), *REPLACED])


# --- Mistakes
def with_a_mistake(node: ast.expr) -> set[str]:
    """Return what may take an expression's place: another operator, sides swapped, a number off by one."""
    found = set()
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in OPERATORS:
            found.add(ast.unparse(ast.Compare(left, [OPERATORS[type(operator)]()], [right])))
        case ast.BoolOp(operator, values):
            found.add(ast.unparse(ast.BoolOp(OPERATORS[type(operator)](), values)))
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS and not is_text(node):
            found.add(ast.unparse(ast.BinOp(left, OPERATORS[type(operator)](), right)))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            found.add(ast.unparse(operand))
        case ast.IfExp(test, body, orelse):
            found.add(ast.unparse(ast.IfExp(test, orelse, body)))
    if isinstance(node, ast.Dict):
        for n in range(len(node.keys)):
            found.add(
                ast.unparse(
                    ast.Dict(node.keys[:n] + node.keys[n + 1 :], node.values[:n] + node.values[n + 1 :])
                )
            )
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("require_same", "loaded.require_loaded"):
        found.add("None")
    for number in ast.iter_child_nodes(node):
        if isinstance(number, ast.Constant) and isinstance(number.value, int):
            right = number.value
            number.value = not right if isinstance(right, bool) else right + 1
            found.add(ast.unparse(node))
            number.value = right
    return found - {ast.unparse(node)}


def is_text(node: ast.expr) -> bool:
    parts = (part.value if isinstance(part, ast.Constant) else part for part in ast.walk(node))
    return any(isinstance(part, str | ast.JoinedStr) for part in parts)


def mistakes(root: Path) -> dict[Mistake, tuple[Path, ast.expr]]:
    """Return every mistake that a tree can have in one place alone, with its file and expression."""
    places: dict[Mistake, list[tuple[Path, ast.expr]]] = {}
    for package, pattern in SOURCES.items():
        for path in sorted(root.glob(pattern)):
            source = path.read_text()
            if "@triton.jit" in source or "import cutlass" in source:  # of a GPU: no test on a CPU runs them
                continue
            for function in (f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef)):
                for node in (part for statement in function.body for part in code(statement)):
                    if isinstance(node, ast.expr):
                        for new in with_a_mistake(node):
                            key = package, function.name, ast.unparse(node), new
                            places.setdefault(key, []).append((path, node))
    return {key: found[0] for key, found in places.items() if len(found) == 1}


def faults(root: Path) -> dict[Mistake, tuple[Path, ast.expr]]:
    """Return every mistake in the users of fingerprints, each with its file and expression."""
    found: dict[Mistake, tuple[Path, ast.expr]] = {}
    for name, (functions, _) in USERS.items():
        tree = ast.parse((root / name).read_text())
        classes = [(f"{c.name}.", c) for c in ast.walk(tree) if isinstance(c, ast.ClassDef)]
        for prefix, owner in [("", tree), *classes]:
            for function in ast.walk(owner):
                named = getattr(function, "name", "")
                if not isinstance(function, ast.FunctionDef) or f"{prefix}{named}" not in functions.split():
                    continue
                for node in (part for statement in function.body for part in code(statement)):
                    for new in with_a_mistake(node) if isinstance(node, ast.expr) else ():
                        key = name, named, f"{node.lineno}: {ast.unparse(node)}", new
                        found[key] = root / name, node
    return found


def code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when nothing fails: no messages, and no functions inside, which have their own turn."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Raise | ast.JoinedStr | ast.FunctionDef):
            yield from code(child)


def choose(roots: list[Path]) -> list[Mistake]:
    """Return COUNT mistakes that every tree can have, by seed: three of five in wan, one an expression."""
    shuffled = sorted(set.intersection(*(set(mistakes(root)) for root in roots)))
    random.Random(SEED).shuffle(shuffled)
    left, seen, chosen = {"wan": COUNT * 3 // 5, "caches": COUNT - COUNT * 3 // 5}, set(), []
    for mistake in shuffled:
        if left[mistake[0]] and mistake[:3] not in seen:
            left[mistake[0]] -= 1
            seen.add(mistake[:3])
            chosen.append(mistake)
    return chosen


def make(path: Path, node: ast.expr, new: str) -> None:
    """Write the mistake into a file."""
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    path.write_bytes(source[:start] + f"({new})".encode() + source[end:])


# --- Tests
def run_tests(root: Path, package: str) -> str:
    """Return how a mistake was noticed, as failed, error (while importing) or hung; or survived."""
    child = os.fork()
    if child == 0:
        run_in_fork(root, package)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return {0: "survived", 1: "failed"}.get(os.waitstatus_to_exitcode(status), "error")
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def run_in_fork(root: Path, package: str) -> None:
    """Never returns."""
    code = 3
    try:
        import pytest

        os.chdir(root)
        sys.path[:0] = [str(root)]
        path = os.environ.get("PYTHONPATH", "")  # of the processes that tests start
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(root), path) if part)
        sys.dont_write_bytecode = True
        log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        chosen = [*FAST, *TESTS[package]] if package in TESTS else []
        chosen = chosen or [f"tests/{name}" for name in USERS[package][1].split()]
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen]))
    finally:
        os._exit(code)


def campaign(root: Path, chosen: list[Mistake], results: list[str], workers: int) -> Iterator[list[str]]:
    """Make the mistakes without a result, each worker in its copy of the tree; yield all results so far.

    Mistakes in what has failing tests as it is stay without: "not run".
    """
    packages = sorted({mistake[0] for mistake in chosen})
    results += ["not run"] * (len(chosen) - len(results))
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, fork.Pool(workers, copy_tree, (root, Path(folder))) as pool:
        whole = dict(zip(packages, pool.imap(as_it_is, packages, chunksize=1), strict=True))
        print(*(f"the tests of {p} fail as it is:\n{log}" for p, log in whole.items() if log), flush=True)
        left = [n for n, m in enumerate(chosen) if results[n] == "not run" and not whole[m[0]]]
        for n, found in zip(left, pool.imap(try_mistake, [chosen[n] for n in left]), strict=True):
            results[n] = found
            print(f"{found:10s} {chosen[n][1]}: {chosen[n][2]} -> {chosen[n][3]}", flush=True)
            yield results


def copy_tree(root: Path, folder: Path) -> None:
    """Copy what git tracks into this worker's own folder and go there."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    copy = folder / str(os.getpid())
    for name in listed.stdout.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, copy / name)
    os.chdir(copy)


def as_it_is(package: str) -> str:
    """Return the end of the log of tests that fail without a mistake, or nothing."""
    found = run_tests(Path.cwd(), package)
    return "" if found == "survived" else f"{found}: {Path(LOG).read_text()[-1500:]}"


def try_mistake(mistake: Mistake) -> str:
    copy = Path.cwd()
    path, node = (mistakes(copy) | faults(copy))[mistake]
    right = path.read_bytes()
    make(path, node, mistake[3])
    found = run_tests(copy, mistake[0])
    path.write_bytes(right)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choose", type=Path, help="choose mistakes that an older tree has too")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to make them in")
    parser.add_argument("--label", help="what the result is called in the report")
    parser.add_argument("--fingerprints", action="store_true", help="make mistakes in who goes by them")
    parser.add_argument("--count", type=int, default=COUNT, help="no more than the first so many")
    parser.add_argument("--workers", type=int, default=1, help="mistakes at a time, each in its own copy")
    parser.add_argument("--report", type=Path, default=REPORT)
    args = parser.parse_args()
    if args.choose:
        chosen = choose([ROOT, args.choose.resolve()])
        args.report.write_text(
            json.dumps({"seed": SEED, "mistakes": chosen, "campaigns": {}}, indent=1) + "\n"
        )
    report = json.loads(args.report.read_text())
    if args.fingerprints:
        every = sorted(faults(args.root.resolve()))
        random.Random(SEED).shuffle(every)
        different = {mistake[:3]: mistake for mistake in every}.values()  # one an expression
        report["fingerprints"] = list(different)[:FINGERPRINTS]
        args.label, args.count = args.label or "fingerprints", min(args.count * 2, FINGERPRINTS)
    if args.label:
        os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py, before anything imports Triton
        import torch
        import transformers  # noqa: F401  a fork has them for free
        from diffusers import AutoencoderKLWan, WanTransformer3DModel  # noqa: F401

        torch.set_num_threads(1)
        chosen = report["fingerprints" if args.fingerprints else "mistakes"][: args.count]
        chosen = [tuple(mistake) for mistake in chosen]
        git = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(git, cwd=args.root, capture_output=True, text=True).stdout.strip()
        earlier = report["campaigns"].get(args.label, {})
        results = earlier.get("results", []) if earlier.get("git") == commit else []
        for found in campaign(args.root.resolve(), chosen, results, args.workers):
            noticed = sum(result in NOTICED for result in found)
            of = len(found) - found.count("not run")
            result = {"git": commit, "noticed": noticed, "of": of, "results": found}
            report["campaigns"][args.label] = result
            args.report.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{noticed} of {of} noticed", flush=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{used.ru_utime + used.ru_stime:.0f} CPU seconds")


if __name__ == "__main__":
    main()

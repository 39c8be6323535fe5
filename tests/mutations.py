"""Fifty small mistakes in wan/ and the caches, one at a time: how many do the tests notice?

python tests/mutations.py --choose OLDER_TREE                  # chooses mistakes that both trees can have
python tests/mutations.py --root OLDER_TREE --label before     # makes them there; counts what is noticed
python tests/mutations.py --label after [--again]              # the same here; again: what survived

A mistake is an expression of a function and what takes its place, so it is found again in a tree whose files
have moved; REWRITTEN names it in the words of code that has changed. Each is made in a copy of the tree. The
tests of its package run there, in a fork of one warmed process, to the first failure.
"""

import argparse
import ast
import json
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
GPU_ONLY = ("fused.py", "mass_kernel.py")  # Triton kernels: the tests named here do not run them
OLDER_CACHES = ("caches", "formats", "older_caches", "profiles", "calls", "frames", "files")  # flat
TESTS = {
    "wan": "golden layers kv_cache rope_bands reductions capture pipeline text2video config checkpoint "
    "native offload damaged_weights vae",
    "caches": "caches older_caches frames profiles taxonomy measures published",
}
NOTICED = ("failed", "error", "hung")
Mistake = tuple[str, ...]  # package, function, expression, what takes its place; and the file, of several
REWRITTEN = """\
wan | frame_mass   | q.device.type == 'cuda' and q.dtype in (torch.bfloat16, torch.float16) \
  | q.device.type == 'cuda' or q.dtype in (torch.bfloat16, torch.float16)
wan | kernels_take | q.device.type == 'cuda' and q.dtype in (torch.bfloat16, torch.float16) \
  | q.device.type == 'cuda' or q.dtype in (torch.bfloat16, torch.float16)
wan | _crc32_of_record | record.header_offset + 26 | record.header_offset - 26
wan | _entry           | local + LOCAL.size        | local - LOCAL.size
wan | rotate | -2 | 2
wan | rotate | -2 | 2 | rope.py
wan | inference | noise.shape[1] | noise.shape[2]
wan | inference | noise.shape[1] | noise.shape[2] | text2video.py
wan | decode   | (video.float() / 2 + 0.5).clamp(0, 1)               | (video.float() / 2 + 0.5).clamp(1, 1)
wan | __call__ | (torch.cat(video, 2).float() / 2 + 0.5).clamp(0, 1) \
  | (torch.cat(video, 2).float() / 2 + 0.5).clamp(1, 1)
wan | encode | video.transpose(1, 2) * 2             | video.transpose(1, 2) + 2
wan | encode | video[:, :whole].transpose(1, 2) * 2  | video[:, :whole].transpose(1, 2) + 2
caches | _inference | len(blocks) - 1 | len(blocks) - 2
caches | _place     | len(blocks) - 1 | len(blocks) - 2
caches | _inference | passes < 1 | passes < 2
caches | _place     | passes < 1 | passes < 2
wan | _blocks       | 0 if initial_latent is None else initial_latent.shape[1] \
  | initial_latent.shape[1] if initial_latent is None else 0
wan | _given_frames | initial_latent is None | initial_latent is not None
wan | fresh_noise | renoise is not None      | renoise is None
wan | fresh       | self.renoise is not None | self.renoise is None
wan | _blocks       | noise.ndim != 5 | noise.ndim != 6
wan | _given_frames | noise.ndim != 5 | noise.ndim != 6
caches | noise_frames | self.own_block if self.is_clean_pass is False else () \
  | () if self.is_clean_pass is False else self.own_block
caches | noise_levels | self.is_clean_pass is not False | self.is_clean_pass is False
caches | _from_tokens | S if quantity == 'mass' else 1 | 1 if quantity == 'mass' else S
caches | _by_frame    | 1 if mean else S | S if mean else 1
wan | token_mass | q.unflatten(1, (num_query_frames, -1)) | q.unflatten(2, (num_query_frames, -1))
wan | token_mass | _softmax_(_logits(part, keys, bias)).unflatten(2, (-1, S)) \
  | _softmax_(_logits(part, keys, bias)).unflatten(3, (-1, S))
wan | attention_with_lse | q.device.type == 'cuda' and q.dtype in (torch.bfloat16, torch.float16) \
  | q.device.type == 'cuda' or q.dtype in (torch.bfloat16, torch.float16)
wan | attention_with_lse | q.device.type == 'cuda' and q.dtype in backends.HALF \
  | q.device.type == 'cuda' or q.dtype in backends.HALF
"""  # a mistake of the older tree, and under it the same one in code that was rewritten since
SWAPPED = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)]
SWAPPED += [(ast.Is, ast.IsNot), (ast.And, ast.Or), (ast.Add, ast.Sub)]
REPLACED = [(ast.Mult, ast.Add), (ast.Div, ast.Mult), (ast.FloorDiv, ast.Mult)]
OPERATORS: dict[type, type] = dict([*SWAPPED, *((new, old) for old, new in SWAPPED), *REPLACED])


def rewritten() -> dict[Mistake, Mistake]:
    lines = [tuple(part.strip() for part in line.split("|")) for line in REWRITTEN.strip().splitlines()]
    return dict(zip(lines[::2], lines[1::2], strict=True))


# -- mistakes -----------------------------------------------------------------------------------------------
def with_a_mistake(node: ast.expr) -> set[str]:
    """What may take an expression's place: its operator changed, its sides swapped, or one of its numbers."""
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


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """The package and the path of every file of wan/ and of the caches, in today's tree or in a flat one."""
    for path in sorted(root.glob("wan/**/*.py")):
        if path.name not in GPU_ONLY:
            yield "wan", path
    rooms = sorted(root.glob("experiments/caches/*.py"))
    flat = (root / f"experiments/{name}.py" for name in OLDER_CACHES)
    yield from (("caches", path) for path in rooms or filter(Path.is_file, flat))


def mistakes(root: Path) -> dict[Mistake, tuple[Path, ast.expr]]:
    """Every mistake that can be made in one place alone, of all or of a named file -> file and expression."""
    places: dict[Mistake, list[tuple[Path, ast.expr]]] = {}
    for package, path in sources(root):
        tree = ast.parse(path.read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for node in (part for statement in function.body for part in code(statement)):
                if isinstance(node, ast.expr):
                    for new in with_a_mistake(node):
                        key = package, function.name, ast.unparse(node), new
                        for name in (key, (*key, path.name)):
                            places.setdefault(name, []).append((path, node))
    return {key: found[0] for key, found in places.items() if len(found) == 1}


def code(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when nothing fails: no messages, and no functions inside, which are listed themselves."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Raise | ast.JoinedStr | ast.FunctionDef):
            yield from code(child)


def choose(roots: list[Path]) -> list[Mistake]:
    """COUNT mistakes that every tree can have, by seed: three of five in wan, no two of one expression."""
    common = set.intersection(*(set(mistakes(root)) for root in roots))
    shuffled = sorted(mistake for mistake in common if len(mistake) == 4)  # not those of a named file
    random.Random(SEED).shuffle(shuffled)
    chosen: list[Mistake] = []
    for package, count in (("wan", COUNT * 3 // 5), ("caches", COUNT - COUNT * 3 // 5)):
        seen: set[tuple[str, ...]] = set()
        for mistake in (mistake for mistake in shuffled if mistake[0] == package):
            if mistake[1:3] not in seen and len(seen) < count:
                seen.add(mistake[1:3])
                chosen.append(mistake)
    return chosen


def make(path: Path, node: ast.expr, new: str) -> None:
    """Write the mistake into a file."""
    lines = path.read_bytes().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    source = path.read_bytes()
    path.write_bytes(source[:start] + f"({new})".encode() + source[end:])


# -- tests --------------------------------------------------------------------------------------------------
def test_files(root: Path, package: str) -> list[str]:
    names = {path.stem: str(path) for path in (root / "tests").rglob("test_*.py")}
    return [names[f"test_{name}"] for name in TESTS[package].split() if f"test_{name}" in names]


def run_tests(root: Path, files: list[str]) -> str:
    """How a mistake was noticed, as failed, error (while importing) or hung; or survived."""
    child = os.fork()
    if child == 0:
        run_in_fork(root, files)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "survived", 1: "failed"}.get(code, "error")
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def run_in_fork(root: Path, files: list[str]) -> None:
    """Never returns."""
    code = 3
    try:
        import pytest

        os.chdir(root)
        sys.path[:0] = [str(root)]
        sys.dont_write_bytecode = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]))
    finally:
        os._exit(code)


def campaign(root: Path, chosen: list[Mistake]) -> list[dict]:
    """Make every mistake in a copy of the tree, and say what the tests said."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        for name in filter(None, listed.stdout.split("\n")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
        there = mistakes(copy)
        for package in TESTS:
            assert run_tests(copy, test_files(copy, package)) == "survived", (
                f"the tests of {package} fail as it is"
            )
        for mistake in chosen:
            row = dict(zip(("package", "function", "expression", "mistake"), mistake, strict=True))
            here = mistake if mistake in there else rewritten().get(mistake)
            if here in there:
                path, node = there[here]
                right = path.read_bytes()
                make(path, node, here[3])
                row["result"] = run_tests(copy, test_files(copy, mistake[0]))
                path.write_bytes(right)
            else:
                row["result"] = "not found"
            rows.append(row)
            print(f"{row['result']:10s} {mistake[1]}: {mistake[2]} -> {mistake[3]}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--choose", type=Path, help="choose the mistakes anew: those that an older tree has too"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to make them in")
    parser.add_argument("--label", help="what the result is called in the report")
    parser.add_argument("--again", action="store_true", help="of LABEL, only those that no test noticed then")
    args = parser.parse_args()
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {"campaigns": {}}
    if args.choose:
        report = {"seed": SEED, "mistakes": choose([ROOT, args.choose.resolve()]), "campaigns": {}}
    if args.label:
        import torch
        import transformers  # noqa: F401  a fork has them for free
        from diffusers import AutoencoderKLWan, WanTransformer3DModel  # noqa: F401

        torch.set_num_threads(1)
        chosen = [tuple(mistake) for mistake in report["mistakes"]]
        earlier = report["campaigns"].get(args.label, {}).get("results", []) if args.again else []
        kept = dict(zip(chosen, earlier, strict=False))
        left = [mistake for mistake in chosen if kept.get(mistake) not in NOTICED]
        new = dict(zip(left, (row["result"] for row in campaign(args.root.resolve(), left)), strict=True))
        results = [(kept | new)[mistake] for mistake in chosen]
        noticed = sum(result in NOTICED for result in results)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{noticed} of {len(results)} noticed, {used.ru_utime + used.ru_stime:.0f} CPU seconds")
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=args.root, capture_output=True, text=True)
        result = {"git": commit.stdout.strip(), "noticed": noticed, "of": len(results), "results": results}
        if kept:
            result["tried_again"] = len(left)  # the others were noticed at an earlier commit
        report["campaigns"][args.label] = result
    REPORT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

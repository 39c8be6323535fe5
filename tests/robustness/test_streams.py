"""What is printed, where it goes, and in which alphabet never decides what is written;
nor does a closed terminal.
"""

import ast
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import synthetic_caches
from helpers.forked import exit_code, forked

from experiments import layers_from_atlas, run_extraction_each
from experiments.caches import load_cache, save_cache
from experiments.running import cli
from experiments.running.cli import _Unfailing as Unfailing
from experiments.running.progress import Progress
from wan.errors import ConfigError, UserError, one_line, reason_of, short_repr

SHORT = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "6"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def with_streams(script, argv, stdout, stderr=None, encoding="utf-8"):
    """Run a script in a fork whose descriptors 1 and 2 are what these functions open;
    None leaves one closed.
    """

    def call():
        for number, name, make in ((1, "stdout", stdout), (2, "stderr", stderr or stdout)):
            os.close(number)
            if make:
                os.dup2(made := make(), number)
                os.close(made) if made != number else None
            stream = open(number, "w", encoding=encoding) if make else None  # noqa: SIM115
            setattr(sys, name, stream)
        cli.main(script.run, [str(word) for word in argv])

    return forked(exit_code(call), timeout=60)


@pytest.mark.parametrize(
    "stream",
    [closed_pipe, lambda: os.open("/dev/full", os.O_WRONLY), None],
    ids=["closed pipe", "full disk", "no stream"],
)
def test_streams_that_take_nothing(stream, tmp_path):
    done = with_streams(run_extraction_each, [*SHORT, "--output_path", tmp_path / "a.pt"], stream)
    assert done.value == 0 and load_cache(tmp_path / "a.pt")["format"] == "layer"
    save_cache(tmp_path / "atlas.pt", synthetic_caches.atlas(layers=range(30)))
    done = with_streams(layers_from_atlas, [tmp_path / "atlas.pt", "--output_dir", tmp_path / "l"], stream)
    assert done.value == 0 and len(os.listdir(tmp_path / "l")) == 30


def test_an_alphabet_of_seven_bits(tmp_path):
    prompt, seen = "a “red” circle — 圆", tmp_path / "seen"
    opened = lambda: os.open(seen, os.O_WRONLY | os.O_CREAT)  # noqa: E731
    argv = [*SHORT, "--prompt", prompt, "--output_path", tmp_path / "a.pt", "--log_file", tmp_path / "log"]
    done = with_streams(run_extraction_each, argv, opened, encoding="ascii")
    assert done.value == 0 and load_cache(tmp_path / "a.pt")["prompt"] == prompt
    assert "\\u201c" in seen.read_text(encoding="ascii")
    assert json.loads((tmp_path / "log").read_text(encoding="utf-8").splitlines()[0])["prompt"] == prompt


def test_an_unfailing_stream():
    inner = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream = Unfailing(inner)
    stream.writelines(["a “b”", "c\udcff"])
    stream.flush()
    assert inner.buffer.getvalue() == b"a \\u201cb\\u201dc\\udcff" and stream.encoding == "ascii"
    inner.close()
    assert stream.write("gone") == 4
    stream.flush()


def hung_up(path, *numbers, ignored=False):
    """A run that gets signals after its first block."""

    def call():
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        original = Progress.block

        def block(self, index, frames, num_blocks):
            original(self, index, frames, num_blocks)
            for number in numbers if index == 0 else ():
                os.kill(os.getpid(), number)
                time.sleep(0.01)

        Progress.block = block
        argv = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "9", "--output_path", str(path)]
        cli.main(run_extraction_each.run, argv)

    return forked(exit_code(call))


@pytest.mark.parametrize(
    "numbers", [(signal.SIGHUP,), (signal.SIGHUP, signal.SIGHUP), (signal.SIGTERM, signal.SIGHUP)], ids=str
)
def test_a_terminal_that_is_closed_keeps_finished_blocks(numbers, tmp_path):
    done = hung_up(tmp_path / "a.pt", *numbers)
    assert done.value == 130 and "stopped after 1 of 3 blocks; saved as partial" in done.said
    assert load_cache(tmp_path / "a.pt")["partial"] and os.listdir(tmp_path) == ["a.pt"]


def test_nohup_outlives_its_terminal(tmp_path):
    done = hung_up(tmp_path / "a.pt", signal.SIGHUP, ignored=True)
    assert done.value == 0 and "partial" not in load_cache(tmp_path / "a.pt")


def test_the_last_resort_is_one_line(tmp_path, monkeypatch):
    """What nobody foresaw: one line, exit code 1, the traceback in the log, or printed with --debug."""

    def surprise(*args):
        raise ZeroDivisionError("first\nsecond \x1b[31m")

    monkeypatch.setattr("experiments.extraction.causal.extract", surprise)
    flags = [*SHORT, "--output_path", str(tmp_path / "a.pt")]
    told = "error: unexpected ZeroDivisionError: first: please report it with the traceback, "
    told += "which --debug prints"
    done = forked(exit_code(lambda: cli.main(run_extraction_each.run, flags)))
    assert done.value == 1 and done.said == f"{told}\n"
    log = tmp_path / "log"
    done = forked(exit_code(lambda: cli.main(run_extraction_each.run, [*flags, "--log_file", str(log)])))
    assert done.value == 1 and done.said == f"{told}\n"
    assert "in surprise" in json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["traceback"]
    done = forked(exit_code(lambda: cli.main(run_extraction_each.run, [*flags, "--debug"])))
    assert done.said.startswith("Traceback") and done.said.count("\nerror: ") == 1


HOSTILE = ["a\nb", "\x1b[31mred\x1b[0m", "\x00", "\ud800", "x" * 10**6, "\u202eabc", "\r\x08", 10**5000]


@pytest.mark.parametrize("said", HOSTILE, ids=range(len(HOSTILE)))
def test_whatever_is_quoted_is_one_short_line(said):
    for text in (
        short_repr(said),
        short_repr([said] * 1000),
        short_repr({"a": said}),
        reason_of(ValueError(short_repr(said))),
    ):
        assert len(text) <= 300 and text.isprintable(), text
    if isinstance(said, str):
        for error in (ConfigError, *UserError.__subclasses__()):
            assert str(error(said)).isprintable() and len(str(error(said))) <= 1005
        assert one_line(said).isprintable()


def test_every_error_of_ours_is_one_line_by_construction():
    """The next class of errors that a user sees derives from UserError, or this fails."""
    own = []
    for path in [*(ROOT / "wan").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.ClassDef)
                and node.name.endswith("Error")
                and not node.name.startswith("_")
            ):
                bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
                ours = {base for base in bases if base.endswith("Error") and base not in dir(__builtins__)}
                own.append((path.name, node.name, bool(ours - {"ValueError", "RuntimeError"})))
    assert len(own) >= 6 and all(derived for *_, derived in own if _[1] != "UserError"), own


def opens_without_encoding(path: Path) -> list[int]:
    """Lines that open a text file in whatever alphabet the machine has."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        words = {word.arg for word in node.keywords}
        first = 1 if isinstance(node.func, ast.Name) or name == "fdopen" else 0
        mode = next((w.value for w in node.keywords if w.arg == "mode"), (node.args[first:] or [None])[0])
        modes = [part.value for part in ast.walk(mode) if isinstance(part, ast.Constant)] if mode else []
        binary = bool(modes) and all("b" in str(value) for value in modes)
        low = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in (
            "os",
            "Image",
            "nbformat",
            "browser",
        )
        own = isinstance(node.func, ast.Name) and name == "read_text"  # wan/files.py
        text = (name in ("read_text", "write_text") and not own) or (
            name in ("open", "fdopen") and not binary and not low
        )
        if text and "encoding" not in words and "opener" not in words:
            found.append(node.lineno)
    return found


def test_text_is_utf_8_by_name():
    """LC_ALL=C and PYTHONUTF8=0 change nothing: no file is opened in the machine's own alphabet."""
    paths = [*(ROOT / "wan").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    wrong = {str(path.relative_to(ROOT)): lines for path in paths if (lines := opens_without_encoding(path))}
    assert not wrong


def test_no_help_waits_for_torch():
    """Every script prints its flags without torch, in one process: an import of it fails there."""
    files = sorted((ROOT / "experiments").glob("*.py"))
    scripts = [file.stem for file in files if "__main__" in file.read_text(encoding="utf-8")]
    code = (
        "import importlib, sys, time\n"
        "for name in ('torch', 'transformers', 'diffusers', 'matplotlib', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        f"for name in {scripts!r}:\n"
        "    start = time.process_time()\n"
        "    try: importlib.import_module('experiments.' + name).run(['--help'])\n"
        "    except SystemExit as ended: assert not ended.code, name\n"
        "    seconds = time.process_time() - start\n"
        "    print('took', name, round(seconds, 2)); assert seconds < 0.5, name\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.count("took ") == len(scripts) >= 10

"""Every flag of every script with values that nobody meant: exit code 0 or 2, one line, at once; derived from
the parsers.

Scripts stop where their work would begin: what is fuzzed is how a command line and its config are read.
"""

import argparse
import contextlib
import io
import os
import time
from importlib import import_module

import pytest
from conftest import ROOT
from helpers.flags import flags
from helpers.forked import FULL, tell
from helpers.judged import HUNG, record
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.running import cli, sweep
from experiments.running import cli as entry
from experiments.running import run as jobs

NAMES = (
    "run_extraction",
    "run_extraction_all",
    "run_extraction_each",
    "run_extraction_figure4",
    "run_extraction_maps",
    "extract_attention_wan",
    "layer_page",
    "layers_from_atlas",
    "match_curve",
    "contact_sheet",
)
EXAMPLES = 400 if FULL else 12
START = {  # what makes a command line whole, so that more than the parser is reached
    "extract_attention_wan": ["--ckpt_dir", "checkpoints/wan-mini"],
    "layer_page": ["cache/published/self_forcing_dmd_castle_72f.pt"],
    "layers_from_atlas": ["cache/published/self_forcing_dmd_castle_72f.pt"],
    "match_curve": ["--cache_path", "cache/published/self_forcing_dmd_castle_72f.pt"],
    "contact_sheet": ["sheet.svg", "A=docs/no.svg"],
}
LINKED = ("configs", "checkpoints", "cache", "README.md", "docs")


class BeganError(Exception):
    """The work would begin here."""


def begins(*args, **more):
    raise BeganError


NUMBERS = st.sampled_from(
    [
        "0",
        "-1",
        "1",
        "3",
        "5",
        "21",
        "99",
        "1e9",
        "nan",
        "inf",
        "-inf",
        "1_0",
        "٣",
        " 7",
        "0x10",
        "+5",
        "-0",
        "",
    ]
) | st.integers(-(10**40), 10**40).map(str)
WORDS = (
    st.text(max_size=12)
    | st.sampled_from(
        [
            "/dev/null",
            "/proc/self/mem",
            ".",
            "..",
            "/",
            "configs/wan_mini.yaml",
            "a\nb",
            "\x1b[31m",
            "~",
            "a" * 300,
        ]
    )
    | st.sampled_from(
        ["README.md", "cache/published/self_forcing_dmd_castle_72f.pt", "checkpoints/wan-mini", "cuda:99"]
    )
)


@st.composite
def command_line(draw, name: str) -> list[str]:
    words = list(START.get(name, ["--config_path", "configs/wan_mini.yaml"]))
    for action in draw(st.lists(st.sampled_from(flags(name)), min_size=1, max_size=4)):
        words.append(draw(st.sampled_from(action.option_strings)))
        if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
            continue
        values = (
            st.sampled_from([str(choice) for choice in action.choices]) if action.choices else NUMBERS | WORDS
        )
        count = draw(st.integers(0, 3)) if action.nargs in ("+", "*", "?") else 1
        words += [draw(values | NUMBERS | WORDS) for _ in range(count)]
    return words


def said(script, words) -> tuple[int, str, float]:
    lines, start = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(lines), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main(script.run, words)
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
    return code, lines.getvalue(), time.monotonic() - start


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder like the root, from which scripts start; whatever begins to work or to write raises."""
    monkeypatch.chdir(tmp_path)
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(jobs, "make_outputs", begins)
    monkeypatch.setattr(sweep, "run_sweep", begins)
    monkeypatch.setattr("experiments.caches.store.save_cache", begins)
    monkeypatch.setattr("experiments.figures.html_page.save_page", begins)
    monkeypatch.setattr("experiments.running.locks.claimed", begins)
    explained = entry.explained
    monkeypatch.setattr(
        entry, "explained", lambda e: ("began", 0) if isinstance(e, BeganError) else explained(e)
    )
    return tmp_path


def fuzz(name: str, found: dict) -> None:
    """Count what the command lines of a script come to: refused in one line, or begun."""
    script = import_module(f"experiments.{name}")

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(command_line(name))
    def try_one(words):
        code, line, seconds = said(script, words)
        lines = [text for text in line.splitlines() if not text.startswith("warning: ")]
        assert seconds < HUNG, words
        assert code in (0, 2), (words, code, line[-500:])
        if code:
            one_line = len(lines) == 1 and lines[0].startswith("error: ")
            assert "--debug" in words or one_line, (words, line[-500:])
            assert "unexpected " not in lines[-1] and len(lines[-1]) < 1500, (words, line[-500:])
        found["refused" if code else "began"] += 1
        found["slowest"] = max(found["slowest"], seconds)

    try_one()


@pytest.mark.parametrize("name", NAMES)
def test_flags(name, folder, capfd):
    """No traceback, no flood, no file: whatever is given, a script begins its work or says in one line why
    not.
    """
    found = {"refused": 0, "began": 0, "slowest": 0.0}
    fuzz(name, found)
    assert {path.name for path in folder.iterdir()} == set(LINKED)
    assert not os.system(f"cd {ROOT} && git diff --quiet -- configs checkpoints cache README.md docs/page.md")
    tried = found["refused"] + found["began"]
    count = len({action.dest for action in flags(name)})
    row = {"tried": tried, "inside": tried, "seed": 0, "refused": found["refused"], "read": found["began"]}
    record(f"flags of {name}", **row, tracebacks=0, hangs=0, lost=0, slowest=round(found["slowest"], 2))
    tell(
        capfd,
        f"{name}: {tried} command lines over {count} flags: {found['refused']} refused, "
        f"{found['began']} began",
    )

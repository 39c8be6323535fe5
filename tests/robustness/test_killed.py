"""SIGKILL at random moments, two runs to one path, leftovers:
the old file or the new one, never a mixture.
"""

import contextlib
import os
import random

import pytest
import torch
from conftest import ROOT
from helpers.forked import FULL, exit_code, forked, tell
from helpers.judged import record

from experiments import run_extraction_all
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.running import cli
from experiments.running.locks import claimed

FLAGS = ["--config_path", str(ROOT / "configs/wan_mini.yaml"), "--num_frames", "6", "--quiet"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def extracting(path, *flags):
    return lambda: run_extraction_all.run([*FLAGS, "--output_path", str(path), *flags])


@pytest.fixture(scope="module")
def old_and_new(tmp_path_factory) -> tuple[bytes, bytes, float]:
    """The bytes of two undisturbed runs, and the seconds that the second one takes in a fork."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with contextlib.chdir(ROOT):
        torch.set_num_threads(1)
        extracting(folder / "old.pt", "--seed", "1")()
        done = forked(extracting(folder / "new.pt"))
    assert done.code == 0, done
    return (folder / "old.pt").read_bytes(), (folder / "new.pt").read_bytes(), done.seconds


@pytest.mark.beside
def test_sigkill_at_any_moment(tmp_path, old_and_new, capfd):
    old, new, seconds = old_and_new
    path, dice, wanted = tmp_path / "out.pt", random.Random(0), 200 if FULL else 4
    found, slowest = {"old": 0, "new": 0, "finished": 0}, 0.0
    while found["old"] + found["new"] < wanted:
        path.write_bytes(old)
        # half of the kills fall on the last tenth, where the file is written
        when = seconds * (dice.random() if sum(found.values()) % 2 else 0.9 + 0.15 * dice.random())
        killed = forked(extracting(path), kill_after=when)
        content = path.read_bytes()
        assert content in (old, new)
        found["finished" if killed.code == 0 else "new" if content == new else "old"] += 1
        load_cache(path)
        again = forked(extracting(path))
        assert again.code == 0 and path.read_bytes() == new and os.listdir(tmp_path) == ["out.pt"], again
        slowest = max(slowest, again.seconds)
    record("kills", tried=wanted, inside=0, seed=0, refused=0, read=wanted, tracebacks=0, hangs=0, lost=0,
           slowest=round(slowest, 2))  # fmt: skip
    tell(capfd, f"{wanted} kills: {found}, none unreadable or mixed, reruns with the bytes of a whole run")


def test_two_runs_to_one_path(tmp_path):
    path = str(tmp_path / "out.pt")
    with claimed({path: 0}):
        other = forked(exit_code(lambda: cli.main(run_extraction_all.run, [*FLAGS, "--output_path", path])))
    assert other.value == 2
    assert other.said == (
        f"error: {path} is being made by another run; wait for it, or choose another --output_path\n"
    )
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    dead = forked(lambda: os.getpid()).value
    for name in (f".out.pt.{dead}.part", ".out.pt.lock"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / f".other.pt.{dead}.part").write_bytes(b"not ours")
    with claimed({str(tmp_path / "out.pt"): 0}):
        assert sorted(os.listdir(tmp_path)) == [f".other.pt.{dead}.part", ".out.pt.lock"]


def test_no_overwrite(tmp_path):
    (tmp_path / "out.pt").write_bytes(b"precious")
    with pytest.raises(CacheError, match="is there already, and --no-overwrite keeps it"):
        extracting(tmp_path / "out.pt", "--no-overwrite")()
    assert (tmp_path / "out.pt").read_bytes() == b"precious"

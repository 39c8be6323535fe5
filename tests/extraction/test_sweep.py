"""Lists of items: nothing is lost or made twice, failures are told, the same command goes on."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT
from helpers.sleeping import STOPPED, Sleeping, items_of

from experiments.caches.files import CacheError, RunError, StoppedError, finished
from experiments.extraction import sweep
from experiments.extraction.sweep import Results, dask_client, work_through
from experiments.progress import Progress
from wan.errors import ConfigError


# --- The one test of done
def test_a_file_is_finished_if_it_is_whole_and_of_this_run(tmp_path):
    path = tmp_path / "atlas.pt"
    assert finished(path, "a") is None
    torch.save({"fingerprint": "a", "frame_logits": torch.arange(9.0)}, path)
    assert finished(path, "a")["frame_logits"][8] == 8
    with pytest.raises(CacheError, match=r"atlas.pt belongs to another run.*choose another --output_dir"):
        finished(path, "b")
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(9.0).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    assert finished(path, "a") is None
    torch.save({"fingerprint": "a", "partial": True}, path)
    assert finished(path, "a") is None


def test_numbers_of_items(tmp_path):
    results, numbers = Results(tmp_path), {"prompt": "一只猫", "effects": [[0.5, 1e-300]], "seconds": 1.0}
    assert results.read("a") is None
    results.write("a", numbers)
    assert results.read("a") == numbers | {"fingerprint": "a"}
    results.path("a").rename(results.path("b"))
    with pytest.raises(CacheError, match=r"b.json belongs to another run"):
        results.read("b")
    results.path("b").write_text('{"seconds"')
    assert results.read("b") is None


# --- In this process
@dataclass(frozen=True)
class Numbers:
    """Writes each item; some fail the first time."""

    folder: Path
    failing: tuple[str, ...] = ()

    def is_done(self, item):
        return Results(self.folder / "items").read(item) is not None

    def make(self, item, watch):
        calls = self.folder / f"{item}.calls"
        calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
        if item == "bad":
            raise ConfigError("no such model")
        if item in self.failing and calls.read_text() == "x":
            raise ZeroDivisionError("of this item")
        Results(self.folder / "items").write(item, {})
        watch.stopping = item == "last"


def test_an_item_that_fails_stops_no_other_and_the_same_command_tries_again(tmp_path, capfd):
    work, log = Numbers(tmp_path, ("b",)), tmp_path / "log.jsonl"
    message = "1 of 3 failed; first b: ZeroDivisionError: of this item; the same command tries again"
    with Progress(log_file=log) as watch, pytest.raises(RunError, match=message):
        work_through(work, ["a", "b", "c"], watch)
    assert "failed  b  ZeroDivisionError" in capfd.readouterr().err and "in make" in log.read_text()
    work_through(work, ["a", "b", "c"], Progress())
    assert "2 of 3 are done already" in capfd.readouterr().err
    assert {name: (tmp_path / f"{name}.calls").read_text() for name in "abc"} == {
        "a": "x",
        "b": "xx",
        "c": "x",
    }


def test_bad_input_and_a_wish_to_stop_end_at_once(tmp_path):
    with pytest.raises(ConfigError, match="no such model"):
        work_through(Numbers(tmp_path), ["bad", "good"], Progress(quiet=True))
    assert not (tmp_path / "good.calls").exists()
    with pytest.raises(StoppedError, match="1 of 2 are done and will not be made again"):
        work_through(Numbers(tmp_path), ["last", "more"], Progress(quiet=True))


# --- Workers
def counts(work, items, **flags):
    """Make items by the workers that flags ask for; return how many are there, and how many made twice."""
    flags = {"workers": None, "scheduler": None, "slurm": None, "quiet": True} | flags
    with dask_client(Namespace(**flags), "cpu") as client, Progress(quiet=True) as watch:
        work_through(work, items, watch, client)
    return len(list((work.folder / "items").glob("*.json"))), len(list(work.folder.glob("*.twice")))


def test_each_local_worker_has_a_gpu_of_its_own(monkeypatch):
    environments = []

    def start(command, env, start_new_session):
        environments.append(dict(env))
        return SimpleNamespace(pid=0, wait=lambda: 0)

    monkeypatch.setattr(sweep.subprocess, "Popen", start)
    monkeypatch.setattr(sweep.os, "killpg", lambda pid, number: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    with sweep.local_cluster(2, "auto") as address:
        assert address.startswith("tcp://127.0.0.1:")
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["3", "5"]
    with pytest.raises(ConfigError, match="--workers 3, and the number of GPUs here is 2"):
        sweep.local_cluster(3, "auto").__enter__()


@pytest.mark.beside
def test_a_killed_worker_and_ctrl_c_lose_nothing_and_nothing_is_made_twice(tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options |= {"start_new_session": True, "env": os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}}
    command = [sys.executable, str(tmp_path / "stopped.py"), str(tmp_path)]
    running, items = subprocess.Popen(command, **options), tmp_path / "items"

    def wait_for(count):
        while len(list(items.glob("*.json"))) < count and running.poll() is None:
            time.sleep(0.05)

    wait_for(4)
    [first] = list(items.glob("*.json"))[:1]
    os.kill(json.loads(first.read_text())["worker"], signal.SIGKILL)
    wait_for(20)
    workers = psutil.Process(running.pid).children(recursive=True)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    output = running.communicate(timeout=60)[0].replace("\r", "\n").splitlines()
    assert running.returncode == 130 and "Traceback" not in "".join(output), output
    told = re.fullmatch(r"error: stopped; (\d+) of 100 are done and will not be made again: .*", output[-1])
    # Two workers may each have written an item that they had not reported yet
    assert told and 0 <= len(list(items.glob("*.json"))) - int(told[1]) <= 2, output
    assert workers and not psutil.wait_procs(workers, timeout=10)[1]
    assert counts(Sleeping(tmp_path), items_of(100, 0.001)) == (100, 0)


@pytest.mark.beside
def test_a_scheduler_that_is_gone_ends_the_command_and_the_same_one_goes_on(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    options = {"env": os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}, "stderr": subprocess.DEVNULL}
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", address]
    scheduler += ["--dashboard-address", "127.0.0.1:0"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1", "--no-nanny"]
    running = [subprocess.Popen(command, **options) for command in (scheduler, worker)]

    def kill():
        while not list((tmp_path / "items").glob("*.json")):
            time.sleep(0.1)
        for process in running:
            process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(RunError, match="the scheduler is gone"):
            counts(Sleeping(tmp_path), items_of(40, 0.2), scheduler=address)
        # No tracebacks of what Dask runs on: the error is one line
        levels = {logging.getLogger(name).level for name in ("distributed.client", "tornado", "asyncio")}
        assert levels == {logging.CRITICAL}
        thread.join()
        assert counts(Sleeping(tmp_path), items_of(40, 0.01)) == (40, 0)
    finally:
        for process in running:
            process.kill()


FAKE = {  # a queue of jobs that run here at once
    "sbatch": "#!/bin/bash\ncp $1 $0.$$\nsetsid bash $0.$$ > $0.log 2>&1 &\necho Submitted batch job $!\n",
    "scancel": '#!/bin/bash\nfor job in "$@"; do kill -- -$job; done\n',
}


@pytest.mark.beside
def test_workers_that_slurm_starts(tmp_path, monkeypatch):
    for name, text in FAKE.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = "jobs: 1\nmemory: 1GB\nwalltime: '00:10:00'\nqueue: gpu\n"
    settings += f"job_script_prologue: ['export PYTHONPATH={ROOT}:{ROOT}/tests']\n"
    (tmp_path / "slurm.yaml").write_text(settings)
    hashed = partial(pytest.fail, "Dask hashes what it is given, and a loaded model cannot be hashed")
    monkeypatch.setattr(Sleeping, "__dask_tokenize__", hashed, raising=False)
    work, items = Sleeping(tmp_path), items_of(6, 0.02)
    assert counts(work, items, slurm=str(tmp_path / "slurm.yaml")) == (6, 0)
    (tmp_path / "slurm.yaml").write_text("jobz: 1\nmemory: 1GB\n")
    with pytest.raises(ConfigError, match=r"slurm.yaml: .*jobz"):
        counts(work, items, slurm=str(tmp_path / "slurm.yaml"))

"""Lists of items: nothing is lost or made twice, failures are recorded, the same command goes on."""

import json
import os
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

import psutil
import pytest
from conftest import ROOT
from helpers.sleeping import Sleeping, items_of

from experiments.caches.files import RunError, StoppedError
from experiments.progress import Progress
from experiments.running import engine
from experiments.running.engine import Results, work_through
from wan.errors import ConfigError


@dataclass(frozen=True)
class Numbers:
    """Writes each item; some fail, some for ever."""

    folder: Path
    fails: dict[str, int]  # name -> how often

    def is_done(self, name, item):
        return Results(self.folder / "items").read(name) is not None

    def make(self, name, item, watch):
        calls = self.folder / f"{name}.calls"
        calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
        watch.log("rollout", item=item)
        if item == "bad":
            raise ConfigError("no such model")
        if len(calls.read_text()) <= self.fails.get(name, 0):
            raise ZeroDivisionError("of this item")
        Results(self.folder / "items").write(name, {"item": item})
        watch.stopping = item == "last"


def test_an_item_that_fails_is_tried_again_and_the_rest_goes_on(tmp_path, capfd):
    items, ended = {name: f"item {name}" for name in "abc"}, []
    work = Numbers(tmp_path, {"a": 2, "b": 3})
    with pytest.raises(RunError, match="1 of 3 failed; first item b: ZeroDivisionError: of this item"):
        work_through(work, items, tmp_path, Progress(), after=lambda name, state: ended.append((name, state)))
    assert ended == [("a", "done"), ("b", "failed"), ("c", "done")]
    record = json.loads((tmp_path / "failed/b.json").read_text())
    assert record["item"] == "item b" and "in make" in record["traceback"]
    assert "failed 3 times  item b" in capfd.readouterr().err
    work_through(work, items, tmp_path, Progress())  # the same command
    assert not (tmp_path / "failed/b.json").exists() and "2 of 3 are done already" in capfd.readouterr().err
    assert {name: len((tmp_path / f"{name}.calls").read_text()) for name in items} == {"a": 3, "b": 4, "c": 1}


def test_bad_input_and_a_wish_to_stop_end_at_once(tmp_path):
    with pytest.raises(ConfigError, match="no such model"):
        work_through(Numbers(tmp_path, {}), {"a": "bad", "b": "good"}, tmp_path, Progress(quiet=True))
    assert not (tmp_path / "b.calls").exists()
    with pytest.raises(StoppedError, match="1 of 2 are done and will not be made again"):
        work_through(Numbers(tmp_path, {}), {"c": "last", "d": "more"}, tmp_path, Progress(quiet=True))


def test_torn_results_and_those_of_others_are_none(tmp_path):
    results = Results(tmp_path)
    for name in ("a", "b"):
        results.write(name, {"number": 1, "prompt": "一只猫"})
    assert results.read("a") == {"number": 1, "prompt": "一只猫", "name": "a"}
    results.path("a").write_text('{"number"')
    results.path("b").replace(results.path("c"))
    assert [results.read(name) for name in "abc"] == [None] * 3
    results.write("d", {"effects": [[0.5, 1e-300]], "seconds": 1.0})
    assert results.read("d")["effects"] == [[0.5, 1e-300]]
    changed = results.path("d").read_text().replace("0.5", "0.6")  # JSON all the same
    results.path("d").write_text(changed)
    assert results.read("d") is None
    results.path("e").write_text('{"name": "e"}')  # an older one has no checksum
    assert results.read("e") == {"name": "e"}


# --- Workers
def made(work, items, **flags):
    """Make items by the workers that flags ask for; return how many are there, and how many made twice."""
    given = {"workers": None, "scheduler": None, "slurm": None, "quiet": True} | flags
    with engine.dask_client(Namespace(**given), "cpu") as client, Progress(quiet=True) as watch:
        work_through(work, items, work.folder, watch, client)
    return len(list((work.folder / "items").glob("*.json"))), len(list(work.folder.glob("*.twice")))


STOPPED = """
import sys
from argparse import Namespace
from pathlib import Path
from helpers.sleeping import Sleeping, items_of
from experiments.running.cli import main
from experiments.running.engine import dask_client, work_through
from experiments.progress import observed

def run(argv):
    folder = Path(sys.argv[1])
    flags = Namespace(workers=2, scheduler=None, slurm=None, quiet=False, log_file=None, deterministic=False)
    with observed(flags, "item") as watch, dask_client(flags, "cpu") as client:
        work_through(Sleeping(folder), items_of(100, 0.1), folder, watch, client)

if __name__ == "__main__":
    main(run)
"""


@pytest.mark.beside
def test_a_killed_worker_and_ctrl_c_lose_nothing_and_nothing_is_made_twice(tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options |= {"start_new_session": True, "env": os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}}
    command = [sys.executable, str(tmp_path / "stopped.py"), str(tmp_path)]
    running, items = subprocess.Popen(command, **options), tmp_path / "items"

    def workers_after(count):
        while len(list(items.glob("*.json"))) < count and running.poll() is None:
            time.sleep(0.05)
        started = [p for p in psutil.process_iter(["ppid", "cmdline"]) if p.info["ppid"] == running.pid]
        return [p for p in started if "--multiprocessing-fork" in (p.info["cmdline"] or ())]

    workers_after(4)[0].kill()
    workers = workers_after(20)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: workers get it too
    said = running.communicate(timeout=60)[0].replace("\r", "\n").splitlines()
    done = len(list(items.glob("*.json")))
    assert running.returncode == 130 and "stopping after this item" in "".join(said), said
    assert f"{done} of 100 are done and will not be made again" in said[-1] and 20 <= done < 100
    assert workers and not psutil.wait_procs(workers, timeout=10)[1]
    assert made(Sleeping(tmp_path), items_of(100, 0.001)) == (100, 0)


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
            made(Sleeping(tmp_path), items_of(40, 0.2), scheduler=address)
        thread.join()
        assert made(Sleeping(tmp_path), items_of(40, 0.01)) == (40, 0)
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
    assert made(work, items, slurm=str(tmp_path / "slurm.yaml")) == (6, 0)
    (tmp_path / "slurm.yaml").write_text("jobz: 1\nmemory: 1GB\n")
    with pytest.raises(ConfigError, match=r"slurm.yaml: .*jobz"):
        made(work, items, slurm=str(tmp_path / "slurm.yaml"))

"""Lists of items: nothing is lost or made twice, failures are recorded, the same command goes on."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.benchmarks import engine as simulation
from experiments.caches.files import RunError, StoppedError
from experiments.running import engine
from experiments.running.engine import Results, work_through
from experiments.running.progress import Progress
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
    events = [json.loads(line)["event"] for line in (tmp_path / "logs/c.jsonl").read_text().splitlines()]
    assert events == ["rollout", "end"]
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


def test_one_of_a_kind_is_kept():
    loaded = []
    for name in ("a", "a", "b", "a"):
        assert engine.kept("model", name, lambda name=name: loaded.append(name) or name) == name
    assert loaded == ["a", "b", "a"]
    engine._kept.clear()


@pytest.mark.beside
def test_nothing_is_lost_or_made_twice_where_workers_are_killed(tmp_path):
    items = simulation.items_of(60, 0.2)
    found = simulation.killing(simulation.Sleeping(tmp_path, slow=0.05), items, kill_every=3)
    assert (found["lost"], found["twice"]) == (0, 0) and found["killed"], found


@pytest.mark.beside
def test_a_scheduler_that_comes_back(tmp_path):
    found = simulation.restarting(simulation.Sleeping(tmp_path), simulation.items_of(40, 0.5), after=1)
    assert (found["lost"], found["twice"]) == (0, 0), found


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
    (tmp_path / "slurm.yaml").write_text("jobs: 1\nmemory: 1GB\nwalltime: '00:10:00'\nqueue: gpu\n")
    work, items = simulation.Sleeping(tmp_path), simulation.items_of(6, 0.02)
    found = simulation.made(work, items, slurm=str(tmp_path / "slurm.yaml"))
    assert (found["lost"], found["twice"], found["workers"]) == (0, 0, 1)
    (tmp_path / "slurm.yaml").write_text("jobz: 1\nmemory: 1GB\n")
    with pytest.raises(ConfigError, match=r"slurm.yaml: .*jobz"):
        simulation.made(work, items, slurm=str(tmp_path / "slurm.yaml"))

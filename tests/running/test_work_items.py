"""Work items shared by processes: none is made twice or lost, also where one is killed or joins late."""

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.forked import exit_code

from experiments.caches.files import CacheError
from experiments.extraction.observer import RunObserver
from experiments.running import work_items
from experiments.running.ranks import Rank
from experiments.running.work_items import WorkItems

NAMES = [f"item{i}" for i in range(12)]
LEASE = 0.8  # seconds


def make_all(folder: Path, rank: Rank, seconds: float = 0.02, stuck: str = "") -> None:
    """What one process does: it appends its number to the file of every item that it makes."""
    with WorkItems(folder / "items", rank, LEASE) as claims:
        for name in claims.claim(NAMES, lambda name: (folder / name).exists()):
            if name == stuck:
                time.sleep(60)
            time.sleep(seconds)
            with open(folder / f"{name}.making", "a", encoding="utf-8") as file:
                file.write(f"{rank.number}\n")
            os.replace(folder / f"{name}.making", folder / name)


def make_all_beside(folder: Path, rank: Rank) -> None:
    """make_all of a process that goes on from its first item when every other one has one too."""
    with WorkItems(folder / "items", rank, LEASE) as claims:
        for name in claims.claim(NAMES, lambda name: (folder / name).exists()):
            (folder / f"begun.{rank.number}").touch()
            begin = time.monotonic()
            while len(list(folder.glob("begun.*"))) < rank.count:
                assert time.monotonic() - begin < 60
                time.sleep(0.01)
            with open(folder / name, "a", encoding="utf-8") as file:
                file.write(f"{rank.number}\n")


def in_child(function) -> int:
    child = os.fork()
    if child == 0:
        os._exit(exit_code(function)())
    return child


def test_three_processes_make_every_item_once(tmp_path):
    children = [in_child(lambda n=n: make_all_beside(tmp_path, Rank(n, 3, n))) for n in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    makers = [(tmp_path / name).read_text().split() for name in NAMES]
    assert all(len(maker) == 1 for maker in makers) and {n for (n,) in makers} == {"0", "1", "2"}
    assert not list((tmp_path / "items").iterdir())


def test_what_a_dead_process_had_claimed_is_made_by_another_that_joins(tmp_path):
    stuck = in_child(lambda: make_all(tmp_path, Rank(0, 2), stuck="item3"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "items/item3.claim").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other = in_child(lambda: make_all(tmp_path, Rank(1, 2)))
    time.sleep(1.5 * LEASE)
    assert not (tmp_path / "item3").exists()  # its owner is alive
    os.kill(stuck, signal.SIGKILL)
    os.waitpid(stuck, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
    assert (tmp_path / "item3").read_text() == "1\n" and not list((tmp_path / "items").iterdir())


def test_a_claim_is_gone_whose_owner_died_right_after_it_was_done(tmp_path):
    def killed():
        for name in WorkItems(tmp_path / "items").claim(["item0", "item1"], lambda name: False):
            (tmp_path / name).touch()
            if name == "item1":
                os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(killed), 0)
    assert [path.name for path in (tmp_path / "items").iterdir()] == ["item1.claim"]
    with WorkItems(tmp_path / "items") as living:
        assert next(living.claim(["item0"])) == "item0"
        with WorkItems(tmp_path / "items") as claims:
            assert not list(claims.claim(["item0", "item1"], lambda name: (tmp_path / name).exists()))
        assert [path.name for path in (tmp_path / "items").iterdir()] == ["item0.claim"]


def test_what_a_killed_process_had_half_written_is_removed(tmp_path):
    (tmp_path / "items").mkdir()
    half, of_another = (
        tmp_path / "items" / name for name in (".item3.json.9-0a.part", ".item31.json.9-0a.part")
    )
    for file in (half, of_another):
        file.write_bytes(b"{")
    make_all(tmp_path, Rank(), seconds=0)
    assert not half.exists() and of_another.exists()


def test_it_is_removed_too_where_another_process_finished_the_item(tmp_path):
    half = tmp_path / ".item3.json.9-0a.part"
    half.write_bytes(b"{")
    answers = iter([False, True, True])
    with WorkItems(tmp_path) as items:
        assert not list(items.claim(["item3"], lambda name: next(answers)))
    assert not half.exists()


def test_a_claim_of_another_host_is_taken_when_its_time_stands_still(tmp_path):
    """Its process ids mean nothing here: only the lease decides."""
    with WorkItems(tmp_path / "items", lease=LEASE) as claims:
        assert next(claims.claim(["item0"])) == "item0"
        text = (tmp_path / "items/item0.claim").read_text()
    host = os.uname().nodename
    assert host in text
    far = text.replace(host, "another-host")
    (tmp_path / "items/item0.claim").write_text(far)
    start = time.monotonic()
    with WorkItems(tmp_path / "items", lease=LEASE) as claims:
        assert list(claims.claim(["item0"], lambda name: False)) == ["item0"]
    assert LEASE <= time.monotonic() - start < 6 * LEASE


def test_items_that_are_finished_later_stay_claimed(tmp_path):
    """As many as `behind`, and at the end until the context is left: nobody makes them a second time."""
    claimed = lambda: sorted(file.stem for file in (tmp_path / "items").iterdir())  # noqa: E731
    done = set()
    with WorkItems(tmp_path / "items") as claims:
        for number, name in enumerate(claims.claim(NAMES[:4], done.__contains__, behind=2)):
            assert claimed() == NAMES[max(0, number - 2) : number + 1]
            with WorkItems(tmp_path / "items") as others:
                assert not others._acquire(name) and not others._acquire(NAMES[max(0, number - 2)])
            done.update(NAMES[: max(0, number - 1)])
        assert claimed() == NAMES[2:4]
        done.update(NAMES)
        assert not list(claims.claim(NAMES[:4], done.__contains__)) and claimed() == NAMES[2:4]
    assert not claimed()


def test_one_line_tells_how_far_all_ranks_are(tmp_path, monkeypatch):
    monkeypatch.setattr(work_items, "REPORT_SECONDS", 0.0)
    said, done = [], {"item0"}
    watch = RunObserver()
    watch.print = said.append
    with WorkItems(tmp_path / "items", Rank(0, 4)) as claims:
        for name in claims.claim(NAMES[:3], done.__contains__, watch):
            done.add(name)
    assert said[0].startswith("2 of 3 done, 0 in work by 4 ranks") and said[-1].startswith("3 of 3 done")
    said.clear()
    with WorkItems(tmp_path / "items", Rank(1, 4)) as claims:
        list(claims.claim(NAMES[:3], lambda name: False, watch))
    assert not said


def test_a_folder_that_cannot_hold_claims(tmp_path):
    (tmp_path / "items").write_text("a file")
    with pytest.raises(CacheError, match="items cannot hold the claims: "):
        list(WorkItems(tmp_path / "items").claim(["a"], lambda name: False))


def test_results_are_read_back_and_damaged_ones_are_made_again(tmp_path):
    names = ["a", "b", "c"]
    for _ in range(2):
        with WorkItems(tmp_path) as items:
            for number, name in enumerate(items.claim(names)):
                items.write(name, {"number": number, "prompt": "一只猫"})
        assert [items.read(name)["number"] for name in names] == [0, 1, 2]
    items.path(names[1]).write_text('{"number"')
    items.path(names[2]).write_bytes(items.path(names[0]).read_bytes())  # of another
    assert items.read(names[1]) is None is items.read(names[2]) and items.read("absent") is None
    assert list(items.claim(names)) == names[1:]

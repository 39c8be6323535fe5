"""How many processes measure: what was asked for, or a rank's share of its host's cores."""

import json
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psutil
import pytest

from experiments.running import ranks as workers
from experiments.running.ranks import Rank, exit_with_parent, workers_of
from wan.errors import ConfigError


@pytest.fixture(autouse=True)
def sixty_four_cores(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 64)


@pytest.mark.parametrize(
    ("rank", "environment", "expected"),
    [
        (Rank(), {}, 64),
        (Rank(), {"LOCAL_WORLD_SIZE": "8"}, 64),  # of a process that torchrun did not start
        (Rank(3, 4, 3), {"LOCAL_WORLD_SIZE": "4"}, 16),
        (Rank(9, 16, 1), {"LOCAL_WORLD_SIZE": "8"}, 8),  # two hosts of eight
        (Rank(9, 16, 1), {}, 4),
        (Rank(3, 100, 3), {"LOCAL_WORLD_SIZE": "100"}, 1),
        (Rank(1, 4, 1), {"LOCAL_WORLD_SIZE": "0"}, 16),
        (Rank(1, 4, 1), {"LOCAL_WORLD_SIZE": "x"}, 16),
    ],
)
def test_ranks_share_the_cores_of_their_host(rank, environment, expected):
    assert workers_of(None, rank, environment) == expected
    assert workers_of(3, rank, environment) == 3 and workers_of(0, rank, environment) == 0


@pytest.mark.parametrize("asked", [-1, 1025, 2**63])
def test_a_number_that_cannot_be_is_refused(asked):
    with pytest.raises(ConfigError, match=r"--workers must be in 0\.\.1024"):
        workers_of(asked, Rank())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_with_the_process_that_was_killed(method):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        pool = ProcessPoolExecutor(2, get_context(method), exit_with_parent, (os.getpid(),))
        pool.submit(os.getpid).result()
        os.write(writing, json.dumps(sorted(pool._processes)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    workers = json.loads(os.read(reading, 1000))
    os.waitpid(child, 0)
    deadline = time.monotonic() + 20
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

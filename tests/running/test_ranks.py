"""One of several processes: its rank, its GPU, its share of the cores, and the end of its workers."""

import json
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psutil
import pytest

from experiments.running.ranks import Rank, exit_with_parent, this_rank


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


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def test_ranks_of_torchrun():
    assert this_rank({}) == Rank() == this_rank({"LOCAL_RANK": "3"})
    assert this_rank(TORCHRUN) == Rank(1, 4, 1)
    assert this_rank({"RANK": "0", "WORLD_SIZE": "1"}) == Rank(0, 1, 0)

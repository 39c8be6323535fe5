"""One of several processes: its rank, its GPU, its share of the cores, and the end of its workers."""

import json
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psutil
import pytest

from experiments.extraction.devices import choose_device
from experiments.running.ranks import Rank, exit_with_parent, on_own_device, this_rank
from wan import backends as attention_backend
from wan.config import load_config
from wan.errors import ConfigError


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


def test_every_rank_has_its_own_gpu(monkeypatch):
    import torch

    auto = load_config("configs/wan_mini.yaml")
    assert on_own_device(auto, Rank()) is auto
    of_ranks = (0, Rank(1, 2, 1), "cpu"), (2, Rank(3, 4, 1), "cuda:1")
    for count, rank, device in of_ranks:
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert on_own_device(auto, rank).device == device
    current = []
    with monkeypatch.context() as patch:  # Triton's kernels run on the current GPU
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(torch.cuda, "set_device", current.append)
        patch.setattr(attention_backend, "check", lambda device: None)
        own = on_own_device(auto, Rank(3, 4, 3)).device
        assert choose_device(own) == current[0] == torch.device("cuda:3")
        assert choose_device("cuda") == torch.device("cuda") and len(current) == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="rank 1 is number 1 of its host, and 1 GPU"):
        on_own_device(auto, Rank(1, 2, 1))
    with pytest.raises(ConfigError, match="device cuda:0 was asked for 2 ranks"):
        on_own_device(load_config("configs/wan_mini.yaml", {"device": "cuda:0"}), Rank(1, 2, 1))

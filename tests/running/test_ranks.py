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
from experiments.running import ranks as workers
from experiments.running.ranks import Rank, exit_with_parent, on_own_device, this_rank, workers_of
from wan import backends as attention_backend
from wan.config import load_config
from wan.errors import ConfigError


def test_a_process_has_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 64)
    assert (workers_of(None), workers_of(3), workers_of(0)) == (64, 3, 0)
    for beside, share in (("8", 8), ("100", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
        assert workers_of(None) == share
    for asked in (-1, 1025):
        with pytest.raises(ConfigError, match="processes were asked for; 0 to 1024 can be"):
            workers_of(asked)


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


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        (TORCHRUN | {"RANK": "4"}, "RANK 4 is not one of WORLD_SIZE 4"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is '-1', not a number"),
        (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK is not set beside RANK and WORLD_SIZE"),
    ],
)
def test_half_an_environment_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        this_rank(environment)


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
    with pytest.raises(ConfigError, match="rank 1 is number 1 of its host, which has 1 GPU: start at most 1"):
        on_own_device(auto, Rank(1, 2, 1))
    with pytest.raises(ConfigError, match="device cuda:0 was asked for 2 ranks"):
        on_own_device(load_config("configs/wan_mini.yaml", {"device": "cuda:0"}), Rank(1, 2, 1))

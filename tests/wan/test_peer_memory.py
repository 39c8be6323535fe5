"""Writing into peers' memory against the all-to-all: the same bits to every reader, nobody overtaken.

Processes of this machine reach each other's memory through files; barriers are the host's.
"""

import os
import time
from itertools import count
from math import prod

import pytest
import torch
import torch.distributed as dist
from helpers.parallel_rollouts import REQUESTS, small_model, together
from test_cuda_graphs import assert_equal, roll_out

from wan.wings import peer_memory
from wan.wings.graphs import apply_cuda_graphs
from wan.wings.parallel import apply_head_parallel
from wan.wings.peer_memory import AFTER, BEFORE, TIMEOUT, AllToAll, PeerMemory, peer_memory_of

CPU = torch.device("cpu")
GARBAGE = 0x7B  # in every byte of new memory: a finite number that nobody computes, in any dtype


class FileHandle:
    """The memory of all processes of a group, by files of this machine."""

    late = None  # the rank that goes on late, and behind which barrier

    def __init__(self, files, group):
        self.files, self.group = files, group
        self.barriers = []  # channel and time-out of each

    def get_buffer(self, rank, sizes, dtype):
        return mapped(self.files[rank], sizes, dtype)

    def barrier(self, channel, timeout_ms):
        self.barriers.append((channel, timeout_ms))
        dist.barrier(self.group)
        if self.late == (self.group.rank(), channel):
            time.sleep(0.1)


def mapped(file, sizes, dtype):
    return torch.from_file(file, shared=True, size=prod(sizes), dtype=dtype).view(sizes)


@pytest.fixture(autouse=True)
def memory(monkeypatch, tmp_path):
    """Let processes that are forked from now on have peers' memory on the CPU, in files of a folder."""
    numbers, files = count(), {}

    def allocate(shape, dtype, device):
        file = str(tmp_path / f"{os.getpid()}-{next(numbers)}")
        memory = mapped(file, shape, dtype)
        memory.view(-1).view(torch.uint8).fill_(GARBAGE)
        files[memory.data_ptr()] = file
        return memory

    def introduce(memory, group):
        of_all = [""] * group.size()
        dist.all_gather_object(of_all, files[memory.data_ptr()], group=group)
        return FileHandle(of_all, group)

    monkeypatch.setattr(peer_memory, "DEVICES", ("cpu",))
    monkeypatch.setattr(peer_memory, "are_linked", lambda group, device: True)
    monkeypatch.setattr(peer_memory, "allocate", allocate)
    monkeypatch.setattr(peer_memory, "introduce", introduce)


# --- One exchange
HALF, FULL = torch.bfloat16, torch.float32
# Batch, tensors, head dim; some whose rows are no elements of 16 bytes.
SHAPES = (1, 3, 8, HALF), (2, 4, 8, FULL), (2, 3, 6, HALF), (1, 1, 6, FULL), (1, 2, 1, FULL)


@torch.no_grad()
def exchanged(group):
    """Both ways give the same, twice of every shape, laid out alike and at one address."""
    ways, size = (PeerMemory(group), AllToAll(group)), group.size()
    generator = torch.Generator().manual_seed(group.rank())
    for batch, parts, dim, dtype in SHAPES:
        addresses = set()
        for _ in range(2):
            x = torch.randn(parts, batch, 5, 2 * size, dim, generator=generator).to(dtype).unbind()
            seen = torch.randn(batch, 2, 5 * size, dim, generator=generator).to(dtype).transpose(1, 2)
            there = [way.receive(way.send(x), lasts=False) for way in ways]
            back = [way.receive_back(way.send_back(seen)) for way in ways]
            assert torch.equal(*back) and back[0].is_contiguous()
            for mine, usual in zip(*there, strict=True):
                steps = [x.stride(n) for x in (mine, usual) for n in range(x.ndim) if x.shape[n] > 1]
                assert torch.equal(mine, usual) and steps[: len(steps) // 2] == steps[len(steps) // 2 :]
            addresses.add((there[0][0].data_ptr(), back[0].data_ptr()))
        assert len(addresses) == 1


def test_the_same_bits_in_the_same_layout():
    together(3, exchanged)


@torch.no_grad()
def overwritten(group):
    """What a late reader finds when the same buffer is written twice in a row, and what it keeps."""
    FileHandle.late = 1, AFTER
    way, found = PeerMemory(group), []
    for turn in range(3):
        x = torch.full((1, 2, 2, 4), float(turn))
        sent = way.send([x])
        (view,), (kept,) = way.receive(sent, lasts=False), way.receive(sent, lasts=True)
        found.append((view.clone(), view, kept))
    barriers = way.to_heads([x])._handle.barriers
    return [[values.unique().tolist() for values in row] for row in found], barriers


def test_a_buffer_is_written_when_it_was_read():
    limit = int(TIMEOUT.total_seconds() * 1000)
    for found, barriers in together(2, overwritten):
        assert found == [[[0], [2], [0]], [[1], [2], [1]], [[2], [2], [2]]]
        assert barriers == [(BEFORE, limit), (AFTER, limit)] * 3


# --- Rollouts
def replayed(group):
    """Peers' memory, and graphs that are put on before or after, change no bit."""
    usual, by_graphs, direct, first = (small_model() for _ in range(4))
    devices, peer_memory.DEVICES = peer_memory.DEVICES, ()
    for model in (usual, by_graphs):
        apply_head_parallel(model, group)
        assert model.head_shard.peer_memory is None
    peer_memory.DEVICES = devices
    apply_cuda_graphs(first)
    for model in (direct, first):
        apply_head_parallel(model, group)
    assert isinstance(direct.head_shard.exchange, AllToAll)  # with gradients
    with torch.no_grad():
        assert isinstance(direct.head_shard.exchange, PeerMemory)
    for model in (by_graphs, direct):
        apply_cuda_graphs(model)
    for seed, requests in ((1, ()), (2, REQUESTS)):
        expected = roll_out(usual, "relative", seed, requests, batch=2)  # whose clean pass brings raw keys
        for model in (by_graphs, direct, first):
            assert_equal(roll_out(model, "relative", seed, requests, batch=2), expected)


def test_graphs_replay_their_exchange():
    together(2, replayed)


# --- Whether it can be had
def decided(group):
    found = peer_memory_of(group, CPU)
    return found and type(found)


@pytest.mark.parametrize("name", [None, "DEVICES", "allocate", "introduce"])
def test_what_one_cannot_have_none_uses(name, monkeypatch):
    function = getattr(peer_memory, name) if name else None

    def refused(*given):
        found = function(*given)
        if dist.get_rank() == 1:
            raise RuntimeError("CUDA driver error: invalid argument")
        return found

    if name:
        monkeypatch.setattr(peer_memory, name, ("cuda",) if name == "DEVICES" else refused)
    assert together(2, decided) == [None if name else PeerMemory] * 2

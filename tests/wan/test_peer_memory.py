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
from helpers.parallel_rollouts import REQUESTS, roll_out, small_model, together

from wan.kernels import peer_memory
from wan.kernels.graphs import apply_cuda_graphs
from wan.kernels.peer_memory import AFTER, BEFORE, TIMEOUT, AllToAll, PeerMemory, peer_memory_of
from wan.parallel import apply_head_parallel
from wan.policies import make_policy

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
    """Whether both ways give the same, twice of every shape, laid out alike and at one address."""
    ways, found, size = (PeerMemory(group), AllToAll(group)), [], group.size()
    generator = torch.Generator().manual_seed(group.rank())
    for batch, parts, dim, dtype in SHAPES:
        addresses = set()
        for _ in range(2):
            x = torch.randn(parts, batch, 5, 2 * size, dim, generator=generator).to(dtype).unbind()
            seen = torch.randn(batch, 2, 5 * size, dim, generator=generator).to(dtype).transpose(1, 2)
            there = [way.receive(way.send(x), lasts=False) for way in ways]
            found += [torch.equal(mine, usual) for mine, usual in zip(*there, strict=True)]
            found += [laid_out(mine) == laid_out(usual) for mine, usual in zip(*there, strict=True)]
            back = [way.receive_back(way.send_back(seen)) for way in ways]
            found.append(torch.equal(*back) and back[0].is_contiguous())
            addresses.add((there[0][0].data_ptr(), back[0].data_ptr()))
        found.append(len(addresses) == 1)
    return found


def laid_out(x):
    return x.shape, [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


def test_the_same_bits_in_the_same_layout():
    for found in together(3, exchanged):
        assert len(found) == 5 + 2 * (5 + 2 * (3 + 4 + 3 + 1 + 2)) and all(found)


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


def same(found, expected) -> bool:
    """Latents and captured values, in bits."""
    runs = found, expected
    one, other = ([latents, *(x for c in calls for x in c.values.values())] for latents, calls in runs)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(one, other, strict=True))


def replayed(group):
    """Whether peers' memory, and graphs that are put on before or after, change a bit."""
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
    found, policy = [], make_policy("relative", window=9, sink=3)  # its clean pass brings raw keys
    for seed, requests in ((1, ()), (2, REQUESTS)):
        models = usual, by_graphs, direct, first
        runs = [roll_out(model, policy, *requests, seed=seed, batch=2) for model in models]
        found += [same(run, runs[0]) for run in runs[1:]]
    return found


def test_graphs_replay_their_exchange():
    assert together(2, replayed) == [[True] * 6] * 2


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

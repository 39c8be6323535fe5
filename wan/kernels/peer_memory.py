"""The exchange of wan/exchange.py without collectives: each GPU writes into its peers' memory, in place.

Of symmetric memory (torch.distributed._symmetric_memory, CUDA) every process has a buffer of the same size,
into which all others can write over NVLink. Where it cannot be had, none of the processes uses it.

What keeps a reader from being overwritten: barriers of all GPUs, which wait in their streams and not on the
host. A buffer is written between two of them. A stream comes to the first one only behind everything that it
was given before, so behind whoever reads what the buffer held; behind the second one all have written. Views
of a buffer are therefore good for what is launched before its next exchange, on the same stream, which is
also where graphs with an exchange in them are replayed. Who needs them longer copies them: the KV cache,
captures that wait for numbers (AttentionCapture.observe), and receive() itself under edits, where the source
of a patch exchanges the same layer in between (RunInStep).

A process that fails or is killed leaves others waiting on their GPUs, which keeps no signal from ending them:
torchrun's agent sends it, as it does where others wait in NCCL. One that lives and does not come lets their
barriers fail after TIMEOUT, as NCCL's watchdog would: the GPU says which process was missing, and whatever
the host asks of it next raises.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wan.exchange import AllToAll, Group, widened
from wan.process_group import TIMEOUT

DEVICES = ("cuda",)
BEFORE, AFTER = 0, 1  # channels of barriers
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of cuda.h


class Handle(Protocol):
    """What processes have of each other's memory: torch's _SymmetricMemory."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def barrier(self, channel: int, timeout_ms: int) -> None: ...


class Buffer:
    """Memory of one shape in every process of a group, all of which must make it."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, group: Group, part: Callable[[Tensor], Tensor]):
        """part is the view of each process's memory that this one writes."""
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("peers' memory cannot be had while a CUDA graph is recorded")
        self._memory = allocate(shape, like.dtype, like.device)  # its owner; what a handle gives is none
        self._handle = introduce(self._memory, group)
        every = [self._handle.get_buffer(rank, shape, like.dtype) for rank in range(group.size())]
        self.own = every[group.rank()]
        self._parts = [part(memory) for memory in every]
        self._wide = widened(*self._parts)

    def parts(self, *sources: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What is to be written by process, and its sources; of 16 bytes an element where both may be."""
        *found, part = widened(*sources, self._parts[0])
        return (self._parts if part is self._parts[0] else self._wide), found

    @contextmanager
    def written(self) -> Iterator[None]:
        """All processes write inside: none of them reads any more, and behind it everything is there."""
        self._wait(BEFORE)
        yield
        self._wait(AFTER)

    def _wait(self, channel: int) -> None:
        self._handle.barrier(channel=channel, timeout_ms=int(TIMEOUT.total_seconds() * 1000))


class PeerMemory:
    """An Exchange between GPUs of one host. What arrives lies where it is read: nothing is unpacked."""

    def __init__(self, group: Group):
        self.group, self.size = group, group.size()
        # This process first, so that no two write to the same one at a time.
        self._order = [(group.rank() + i) % self.size for i in range(self.size)]
        self._buffers: dict[Hashable, Buffer] = {}

    def send(self, parts: Sequence[Tensor]) -> Tensor:
        """Write own tokens of n tensors to whose heads they are -> own buffer [B, L, n, H/P, D]."""
        buffer = self.to_heads(parts)
        by_heads = [x.unflatten(2, (self.size, -1)).flatten(3) for x in parts]  # [B, L/P, P, H/P·D]
        targets, sources = buffer.parts(*by_heads)
        for_peers = [x.unbind(2) for x in sources]
        with buffer.written():
            for peer in self._order:
                torch.stack([x[peer] for x in for_peers], 2, out=targets[peer])  # one kernel, of 4 dims
        return buffer.own

    def receive(self, sent: Tensor, lasts: bool) -> tuple[Tensor, ...]:
        """Views of the buffer, or of a copy that is laid out alike, which gives the same bits."""
        return (sent.clone() if lasts else sent).unbind(2)

    def send_back(self, seen: Tensor) -> Tensor:
        """Write what own heads saw to whose tokens saw it -> own buffer [B, L/P, H, D]."""
        buffer = self.to_tokens(seen)
        targets, (source,) = buffer.parts(seen)
        for_peers = source.split(seen.shape[1] // self.size, 1)
        with buffer.written():
            torch._foreach_copy_([targets[p] for p in self._order], [for_peers[p] for p in self._order])
        return buffer.own

    def receive_back(self, sent: Tensor) -> Tensor:
        return sent

    def to_heads(self, parts: Sequence[Tensor]) -> Buffer:
        """Where n tensors [B, L/P, H, D] go; all that have their shape go there one after the other."""
        batch, share, heads, head_dim = parts[0].shape
        rows = slice(self.group.rank() * share, (self.group.rank() + 1) * share)
        shape = (batch, share * self.size, len(parts), heads // self.size, head_dim)
        return self._buffer("heads", shape, parts[0], lambda x: x[:, rows].flatten(3))

    def to_tokens(self, seen: Tensor) -> Buffer:
        """Where [B, L, H/P, D] goes."""
        batch, length, heads, head_dim = seen.shape
        columns = slice(self.group.rank() * heads, (self.group.rank() + 1) * heads)
        shape = (batch, length // self.size, heads * self.size, head_dim)
        return self._buffer("tokens", shape, seen, lambda x: x[:, :, columns])

    def _buffer(
        self, name: str, shape: tuple[int, ...], like: Tensor, part: Callable[[Tensor], Tensor]
    ) -> Buffer:
        key = name, shape, like.dtype
        if key not in self._buffers:
            self._buffers[key] = Buffer(shape, like, self.group, part)
        return self._buffers[key]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that others can be given."""
    return _symmetric_memory().empty(shape, dtype=dtype, device=device)


def introduce(memory: Tensor, group: Group) -> Handle:
    """Let all processes of a group, which must ask, have each other's memory of the same size."""
    return _symmetric_memory().rendezvous(memory, group)


def _symmetric_memory() -> ModuleType:
    """torch's module, which not every build has."""
    # Nothing here needs NVLink multicast, whose set-up fails on hosts that have all the rest.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return import_module("torch.distributed._symmetric_memory")


# -- whether it can be had -----------------------------------------------------------------------------------


def peer_memory_of(group: Group, device: torch.device) -> PeerMemory | None:
    """The processes' exchange by peers' memory, or None for all of them where one cannot have it.

    Each step is taken where all took the one before: who fails alone would be waited for in the next one. All
    processes of the group must ask.
    """
    if device.type not in DEVICES:
        return None
    direct, usual = PeerMemory(group), AllToAll(group)
    parts, seen = _examples(group, device)
    steps = (
        lambda: _is_one_host(group),
        lambda: _are_linked(group, device),
        lambda: allocate((1,), torch.uint8, device).device.type == device.type,
        lambda: bool(direct.to_heads(parts)),
        lambda: bool(direct.to_tokens(seen)),
        lambda: _is_same(direct, usual, parts, seen),
    )
    return direct if all(_all_say(step, group, device) for step in steps) else None


def _examples(group: Group, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Two tensors to send() and one to send_back(), of other numbers in every process."""
    heads, first = 2 * group.size(), 1000 * group.rank()
    numbers = torch.arange(first, first + 3 * heads * 4, dtype=torch.float32, device=device)
    x = numbers.view(1, 3, heads, 4)
    return [x, -x], x.reshape(1, 3 * group.size(), 2, 4)


@torch.no_grad()
def _is_same(direct: PeerMemory, usual: AllToAll, parts: Sequence[Tensor], seen: Tensor) -> bool:
    """Whether both exchanges give the same numbers."""
    there = [way.receive(way.send(parts), lasts=False) for way in (direct, usual)]
    back = [way.receive_back(way.send_back(seen)) for way in (direct, usual)]
    pairs = [*zip(*there, strict=True), back]
    return all(torch.equal(x, y) for x, y in pairs)


def _is_one_host(group: Group) -> bool:
    """Whether all processes run under one kernel, by the number of its start, and in one container."""
    number = ""
    with suppress(OSError):
        number = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    names: list[tuple[str, str] | None] = [None] * group.size()
    dist.all_gather_object(names, (platform.node(), number), group=group)
    return len(set(names)) == 1


def _are_linked(group: Group, device: torch.device) -> bool:
    """Whether this process's GPU is one of its own, and its atomic operations reach all others: by NVLink.

    Barriers are made of them. Over PCIe they would wait for ever. GPUs that a process does not see are not
    reached.
    """
    devices = [""] * group.size()
    dist.all_gather_object(devices, str(torch.cuda.get_device_properties(device).uuid), group=group)
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    mine = seen.index(devices[group.rank()])
    others = [seen.index(name) for name in devices if name != seen[mine] and name in seen]
    return len(set(others)) == group.size() - 1 and all(_has_atomics(mine, other) for other in others)


def _has_atomics(device: int, other: int) -> bool:
    driver, answer = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), NATIVE_ATOMICS, device, other)
    return not failed and bool(answer.value)


def _all_say(step: Callable[[], bool], group: Group, device: torch.device) -> bool:
    """Whether a step gives True in every process; one that raises says no."""
    said = False
    with suppress(Exception):
        said = step()
    answer = torch.tensor([float(said)], device=device)
    dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
    return bool(answer.item())

"""Tokens of all heads for heads of all tokens, and back, between the processes of wan/wings/parallel.py.

Letters: P processes, L tokens of a call, of which each process has L/P; H heads, of which each has H/P.
AllToAll is the plain path, on every device and over any network. PeerMemory writes into the memory of other
GPUs of one host: torch's symmetric memory, over NVLink. All processes of a group call the same methods of one
exchange in the same order: send(), receive(), and back. A CUDA graph may end or begin between them.

A buffer is written between two barriers of all GPUs, which wait in their streams. Its views are good for what
is launched before its next exchange, on the same stream. Who needs them longer copies them: the KV cache,
captures that wait for numbers, and receive() under edits, where a patch's source exchanges the same layer.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
TIMEOUT = timedelta(minutes=20)  # of one exchange: longer than a process may need to load its weights
WIDE = torch.complex128
DEVICES = ("cuda",)  # with peer memory
BEFORE, AFTER = 0, 1  # channels of barriers
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of cuda.h


def widened(*tensors: Tensor) -> list[Tensor]:
    """View memory in elements of 16 bytes: on a GPU strided memory is copied element by element.

    Return the tensors themselves where that is not possible for all alike.
    """

    def may_be_wide(x: Tensor) -> bool:
        ratio = WIDE.itemsize // x.dtype.itemsize
        distances = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        return x.stride(-1) == 1 and not x.requires_grad and not any(n % ratio for n in distances)

    is_one_kind = len({x.dtype for x in tensors}) == 1
    return [x.view(WIDE) for x in tensors] if is_one_kind and all(map(may_be_wide, tensors)) else [*tensors]


class AllToAll:
    """Exchange by all_to_all_single of torch.distributed."""

    def __init__(self, group: Group):
        self.group, self.size = group, group.size()
        self._buffers: dict[Hashable, Tensor] = {}  # by name, shape and dtype: the same ones in every layer

    def send(self, parts: Sequence[Tensor]) -> Tensor:
        """Pack n tensors of own tokens [B, L/P, H, D] by who gets them: [P, B, L/P, n, H/P, D].

        So they leave in one piece, and what arrives is whole sequences without another copy.
        """
        batch, heads = parts[0].shape[0], parts[0].shape[2] // self.size
        by_process = [x.reshape(-1, self.size, heads * x.shape[3]).transpose(0, 1) for x in parts]
        shape = (*by_process[0].shape[:2], len(parts), by_process[0].shape[2])
        if torch.is_grad_enabled():
            stacked = torch.stack(by_process, 2)
        else:
            stacked = self._buffer("heads", shape, parts[0])
            *sources, target = widened(*by_process, stacked)
            torch.stack(sources, 2, out=target)  # in 4 dims, which CUDA does in one kernel
        return stacked.unflatten(3, (heads, -1)).unflatten(1, (batch, -1))

    def receive(self, sent: Tensor, lasts: bool) -> tuple[Tensor, ...]:
        """Return n tensors of all tokens and own heads [B, L, H/P, D], in memory of their own."""
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self.group)
        return arrived.transpose(0, 1).flatten(1, 2).unbind(2)

    def send_back(self, seen: Tensor) -> Tensor:
        """Send what own heads saw [B, L, H/P, D], and receive what others saw: [P, B, L/P, H/P, D]."""
        outgoing = seen.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        arrived = self._buffer("tokens", outgoing.shape, outgoing)
        dist.all_to_all_single(arrived, outgoing, group=self.group)
        return arrived

    def receive_back(self, sent: Tensor) -> Tensor:
        """Return what all heads saw for own tokens, [B, L/P, H, D]."""
        by_token = widened(sent.permute(1, 2, 0, 3, 4))[0].contiguous()
        return by_token.view(sent.dtype).flatten(2, 3)

    def _buffer(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        key = name, tuple(shape), like.dtype
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(shape)
        return self._buffers[key]


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
        """Return the views to write by process, and their sources; widened() where both may be."""
        *found, part = widened(*sources, self._parts[0])
        return (self._parts if part is self._parts[0] else self._wide), found

    def wait(self, channel: int) -> None:
        """Wait for all processes: BEFORE they write none reads any more, AFTER it everything is there."""
        self._handle.barrier(channel=channel, timeout_ms=int(TIMEOUT.total_seconds() * 1000))


class PeerMemory:
    """Exchange into the memory of other GPUs: peers write into the destination buffer, without a copy."""

    def __init__(self, group: Group):
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self._order = [(self.rank + i) % self.size for i in range(self.size)]  # no two write to the same one
        self._buffers: dict[Hashable, Buffer] = {}

    def send(self, parts: Sequence[Tensor]) -> Tensor:
        """Write own tokens of n tensors [B, L/P, H, D] to whose heads they are -> own [B, L, n, H/P, D]."""
        buffer = self.to_heads(parts)
        by_heads = [x.unflatten(2, (self.size, -1)).flatten(3) for x in parts]  # [B, L/P, P, H/P·D]
        targets, sources = buffer.parts(*by_heads)
        for_peers = [x.unbind(2) for x in sources]
        buffer.wait(BEFORE)
        for peer in self._order:
            torch.stack([x[peer] for x in for_peers], 2, out=targets[peer])  # one kernel, of 4 dims
        buffer.wait(AFTER)
        return buffer.own

    def receive(self, sent: Tensor, lasts: bool) -> tuple[Tensor, ...]:
        """Return n views [B, L, H/P, D] of the buffer, good until the next exchange, or with lasts of a copy.

        The copy is laid out alike, which gives the same bits.
        """
        return (sent.clone() if lasts else sent).unbind(2)

    def send_back(self, seen: Tensor) -> Tensor:
        """Write what own heads saw [B, L, H/P, D] to whose tokens saw it -> own buffer [B, L/P, H, D]."""
        buffer = self.to_tokens(seen)
        targets, (source,) = buffer.parts(seen)
        for_peers = source.split(seen.shape[1] // self.size, 1)
        buffer.wait(BEFORE)
        torch._foreach_copy_([targets[p] for p in self._order], [for_peers[p] for p in self._order])
        buffer.wait(AFTER)
        return buffer.own

    def receive_back(self, sent: Tensor) -> Tensor:
        return sent

    def to_heads(self, parts: Sequence[Tensor]) -> Buffer:
        """Return the buffer of n tensors [B, L/P, H, D]; all of their shape go there, one after the other."""
        batch, share, heads, head_dim = parts[0].shape
        rows = slice(self.rank * share, (self.rank + 1) * share)
        shape = (batch, share * self.size, len(parts), heads // self.size, head_dim)
        return self._buffer("heads", shape, parts[0], lambda x: x[:, rows].flatten(3))

    def to_tokens(self, seen: Tensor) -> Buffer:
        """Return the buffer of [B, L, H/P, D]."""
        batch, length, heads, head_dim = seen.shape
        columns = slice(self.rank * heads, (self.rank + 1) * heads)
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
    """Allocate memory that others can be given."""
    return _symmetric_memory().empty(shape, dtype=dtype, device=device)


def introduce(memory: Tensor, group: Group) -> Any:
    """Let all processes of a group, which must ask, have each other's memory -> torch's _SymmetricMemory."""
    return _symmetric_memory().rendezvous(memory, group)


def _symmetric_memory() -> ModuleType:
    """Import torch's module, which not every build has."""
    # Nothing here needs NVLink multicast, whose set-up fails on hosts that have all the rest.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return import_module("torch.distributed._symmetric_memory")


def peer_memory_of(group: Group, device: torch.device) -> PeerMemory | None:
    """Return the processes' exchange by peers' memory, or None for all of them where one cannot have it.

    Each step is taken where all took the one before: who fails alone would be waited for in the next one. All
    processes of the group must ask.
    """
    if device.type not in DEVICES:
        return None
    direct, usual = PeerMemory(group), AllToAll(group)
    heads, first = 2 * direct.size, 1000 * direct.rank  # other numbers in every process
    x = torch.arange(first, first + 12 * heads, dtype=torch.float32, device=device).view(1, 3, heads, 4)
    parts, seen = [x, -x], x.reshape(1, 3 * direct.size, 2, 4)

    @torch.no_grad()
    def gives_the_same() -> bool:
        there = [way.receive(way.send(parts), lasts=False) for way in (direct, usual)]
        back = [way.receive_back(way.send_back(seen)) for way in (direct, usual)]
        return all(torch.equal(x, y) for x, y in [*zip(*there, strict=True), back])

    steps: tuple[Callable[[], bool], ...] = (
        lambda: are_linked(group, device),
        lambda: allocate((1,), torch.uint8, device).device.type == device.type,
        lambda: bool(direct.to_heads(parts)),
        lambda: bool(direct.to_tokens(seen)),
        gives_the_same,
    )
    for step in steps:
        said = False
        with suppress(Exception):
            said = step()
        answer = torch.tensor([float(said)], device=device)
        dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
        if not answer.item():
            return None
    return direct


def are_linked(group: Group, device: torch.device) -> bool:
    """Return True where all processes have GPUs of their own in one host, and atomics reach them: by NVLink.

    Barriers are made of atomics. Over PCIe they would wait for ever. GPUs that a process does not see are not
    reached. One host is one boot of one kernel, and one container.
    """
    number = ""
    with suppress(OSError):
        number = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    of_all: list[Any] = [None] * group.size()
    dist.all_gather_object(of_all, ((platform.node(), number), uuid), group=group)
    hosts, uuids = zip(*of_all, strict=True)
    here = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    others = {here.index(name) for name in uuids if name != uuid and name in here}
    driver, answer = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)

    def has_atomics(other: int) -> bool:
        mine = here.index(uuid)
        failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), NATIVE_ATOMICS, mine, other)
        return not failed and bool(answer.value)

    return len(set(hosts)) == 1 and len(others) == group.size() - 1 and all(map(has_atomics, others))

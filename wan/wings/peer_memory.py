"""Exchange shares of tokens (all heads) for shares of heads (all tokens), and back (wan/wings/parallel.py).

Letters: P processes, L tokens of a call, of which each process has L/P; H heads, of which each has H/P.
AllToAll is the plain path, on every device and over any network. PeerMemory writes into the memory of other
GPUs of one host: torch's symmetric memory, over NVLink. All processes of a group call the same methods of one
exchange in the same order: send(), receive(), and back. A CUDA graph may end or begin between them.

A buffer is written between two barriers of all GPUs, which wait on their streams. Its views are valid for
work launched on the same stream before its next exchange. Callers that need them longer copy them: the KV
cache, captures, and receive() under edits, where a patch's source exchanges the same layer.
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
    """View tensors in elements of 16 bytes, since a GPU copies strided memory element by element.

    Return the tensors unchanged if that is not possible for all of them.
    """

    def may_be_wide(x: Tensor) -> bool:
        ratio = WIDE.itemsize // x.dtype.itemsize
        distances = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        return x.stride(-1) == 1 and not x.requires_grad and not any(n % ratio for n in distances)

    is_one_kind = len({x.dtype for x in tensors}) == 1
    if is_one_kind and all(map(may_be_wide, tensors)):
        return [x.view(WIDE) for x in tensors]
    return [*tensors]


class AllToAll:
    """Exchange by all_to_all_single of torch.distributed."""

    def __init__(self, group: Group):
        self.group, self.size = group, group.size()
        self._buffers: dict[Hashable, Tensor] = {}  # by name, shape and dtype: the same ones in every layer

    def send(self, parts: Sequence[Tensor]) -> Tensor:
        """Pack n tensors of own tokens [B, L/P, H, D] by receiver: [P, B, L/P, n, H/P, D].

        They are sent in one piece and arrive as whole sequences, without another copy.
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
        """Return n tensors of all tokens and own heads [B, L, H/P, D], in new memory."""
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self.group)
        return arrived.transpose(0, 1).flatten(1, 2).unbind(2)

    def send_back(self, seen: Tensor) -> Tensor:
        """Send outputs of own heads [B, L, H/P, D]; receive those of the others, [P, B, L/P, H/P, D]."""
        outgoing = seen.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        arrived = self._buffer("tokens", outgoing.shape, outgoing)
        dist.all_to_all_single(arrived, outgoing, group=self.group)
        return arrived

    def receive_back(self, sent: Tensor) -> Tensor:
        """Return outputs of all heads for own tokens, [B, L/P, H, D]."""
        by_token = widened(sent.permute(1, 2, 0, 3, 4))[0].contiguous()
        return by_token.view(sent.dtype).flatten(2, 3)

    def _buffer(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        key = name, tuple(shape), like.dtype
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(shape)
        return self._buffers[key]


class Buffer:
    """Memory of one shape in every process of a group; all processes must create it together."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, group: Group, part: Callable[[Tensor], Tensor]):
        """Create the memory; part is the view of each process's memory that this process writes."""
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("peers' memory cannot be had while a CUDA graph is recorded")
        self._memory = allocate(shape, like.dtype, like.device)  # its owner; what a handle gives is none
        self._handle = introduce(self._memory, group)
        every = [self._handle.get_buffer(rank, shape, like.dtype) for rank in range(group.size())]
        self.own = every[group.rank()]
        self._parts = [part(memory) for memory in every]
        self._wide = widened(*self._parts)

    def parts(self, *sources: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the views to write by process, and their sources, both widened() if possible."""
        *views, part = widened(*sources, self._parts[0])
        if part is self._parts[0]:
            return self._parts, views
        return self._wide, views

    def wait(self, channel: int) -> None:
        """Wait for all processes: BEFORE a write nobody reads any more, AFTER it all data has arrived."""
        self._handle.barrier(channel=channel, timeout_ms=int(TIMEOUT.total_seconds() * 1000))


class PeerMemory:
    """Exchange by writing into the memory of other GPUs, without an extra copy."""

    def __init__(self, group: Group):
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self._order = [(self.rank + i) % self.size for i in range(self.size)]  # no two write to the same one
        self._buffers: dict[Hashable, Buffer] = {}

    def send(self, parts: Sequence[Tensor]) -> Tensor:
        """Write own tokens of n tensors [B, L/P, H, D] to the heads' owners -> own [B, L, n, H/P, D]."""
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
        """Return n views [B, L, H/P, D] of the buffer, valid until the next exchange; lasts: of a copy.

        The copy has the same strides, so results have the same bits.
        """
        if lasts:
            sent = sent.clone()
        return sent.unbind(2)

    def send_back(self, seen: Tensor) -> Tensor:
        """Write outputs of own heads [B, L, H/P, D] to the tokens' owners -> own buffer [B, L/P, H, D]."""
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
        """Return the buffer for n tensors [B, L/P, H, D]; calls of the same shape share it."""
        batch, share, heads, head_dim = parts[0].shape
        rows = slice(self.rank * share, (self.rank + 1) * share)
        shape = (batch, share * self.size, len(parts), heads // self.size, head_dim)
        return self._buffer("heads", shape, like=parts[0], part=lambda x: x[:, rows].flatten(3))

    def to_tokens(self, seen: Tensor) -> Buffer:
        """Return the buffer for [B, L, H/P, D]."""
        batch, length, heads, head_dim = seen.shape
        columns = slice(self.rank * heads, (self.rank + 1) * heads)
        shape = (batch, length // self.size, heads * self.size, head_dim)
        return self._buffer("tokens", shape, like=seen, part=lambda x: x[:, :, columns])

    def _buffer(
        self, name: str, shape: tuple[int, ...], like: Tensor, part: Callable[[Tensor], Tensor]
    ) -> Buffer:
        key = name, shape, like.dtype
        if key not in self._buffers:
            self._buffers[key] = Buffer(shape, like=like, group=self.group, part=part)
        return self._buffers[key]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory that other processes can map."""
    return _symmetric_memory().empty(shape, dtype=dtype, device=device)


def introduce(memory: Tensor, group: Group) -> Any:
    """Map each other's memory in all processes of a group -> torch's _SymmetricMemory; all must call it."""
    return _symmetric_memory().rendezvous(memory, group)


def _symmetric_memory() -> ModuleType:
    """Import torch's module for symmetric memory, which some builds lack."""
    # Nothing here needs NVLink multicast, whose set-up fails on hosts that have all the rest.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return import_module("torch.distributed._symmetric_memory")


def peer_memory_of(group: Group, device: torch.device) -> PeerMemory | None:
    """Return the group's exchange by peer memory, or None in all processes if one of them cannot have it.

    All processes agree after each step, since the others would wait for one that failed alone. All processes
    of the group must call it.
    """
    if device.type not in DEVICES:
        return None
    direct, usual = PeerMemory(group), AllToAll(group)
    num_heads, first = 2 * direct.size, 1000 * direct.rank  # other numbers in every process
    x = torch.arange(first, first + 12 * num_heads, dtype=torch.float32, device=device)
    x = x.view(1, 3, num_heads, 4)
    parts, seen = [x, -x], x.reshape(1, 3 * direct.size, 2, 4)

    @torch.no_grad()
    def gives_the_same() -> bool:
        heads = [way.receive(way.send(parts), lasts=False) for way in (direct, usual)]
        tokens = [way.receive_back(way.send_back(seen)) for way in (direct, usual)]
        return all(torch.equal(x, y) for x, y in [*zip(*heads, strict=True), tokens])

    steps: tuple[Callable[[], bool], ...] = (
        lambda: are_linked(group, device),
        lambda: allocate((1,), torch.uint8, device).device.type == device.type,
        lambda: bool(direct.to_heads(parts)),
        lambda: bool(direct.to_tokens(seen)),
        gives_the_same,
    )
    for step in steps:
        works = False
        with suppress(Exception):
            works = step()
        answer = torch.tensor([float(works)], device=device)
        dist.all_reduce(answer, dist.ReduceOp.MIN, group=group)
        if not answer.item():
            return None
    return direct


def are_linked(group: Group, device: torch.device) -> bool:
    """Return True if every process has its own GPU in one host and atomics work between them, as over NVLink.

    Barriers use atomics, and over PCIe they would wait forever. A process reaches only GPUs that it sees. One
    host means one boot of one kernel, and one container.
    """
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    places: list[tuple[tuple[str, str], str]] = [(("", ""), "")] * group.size()  # host and GPU of each
    dist.all_gather_object(places, ((platform.node(), boot), uuid), group=group)
    hosts, uuids = zip(*places, strict=True)
    here = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    peers = {here.index(name) for name in uuids if name != uuid and name in here}
    driver, answer = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)

    def has_atomics(other: int) -> bool:
        number = here.index(uuid)
        failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), NATIVE_ATOMICS, number, other)
        return not failed and bool(answer.value)

    return len(set(hosts)) == 1 and len(peers) == group.size() - 1 and all(map(has_atomics, peers))

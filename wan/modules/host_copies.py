"""Copies between a GPU and the host while the rollout goes on: what launches its kernels does not wait.

Large captured values: memory that a process never used takes longer to get than the copy into it. So threads
get it; and what they copy comes by pinned memory of theirs, so that the driver, which launches kernels too,
touches no new memory. Small tensors: send() them, and have them Fetched.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

SMALL = 1 << 15  # elements; values up to here are copied together at the end
THREADS = 4
ALIGNED = 4  # elements of 4 bytes: a kernel is compiled anew for memory that does not start at 16 bytes
STAGED = 1 << 24  # bytes of pinned memory of a thread

_under_way: list[Future[None]] = []
_of_thread = threading.local()


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device."""
    leaves = x.device.type == "cpu" and device.type == "cuda"
    return x.pin_memory().to(device, non_blocking=True) if leaves else x.to(device)


def send_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host, of 4 bytes an element, on a device: a GPU gets them by one copy."""
    if device.type != "cuda":
        return [x.to(device) for x in tensors]
    sizes = [-(-x.numel() // ALIGNED) * ALIGNED for x in tensors]
    together = torch.zeros(sum(sizes), dtype=torch.int32)
    for place, x in zip(together.split(sizes), tensors, strict=True):
        place[: x.numel()] = x.flatten().view(torch.int32)
    sent = send(together, device).split(sizes)
    return [part[: x.numel()].view(x.dtype).view(x.shape) for part, x in zip(sent, tensors, strict=True)]


def places(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """An index of a dim's places; a list would have to go there, and whoever gave it would wait."""
    first = numbers[0] if numbers else 0
    if list(numbers) == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return send(torch.tensor(numbers, dtype=torch.long), device)


def picked(x: Tensor, numbers: Sequence[int], dim: int) -> Tensor:
    """x at these places of a dim; a view where they follow each other."""
    return x[(slice(None),) * dim + (places(numbers, x.device),)]


class Fetched:
    """A tensor of a GPU on its way to the host."""

    def __init__(self, x: Tensor):
        self._host = x.to("cpu", non_blocking=True)  # pinned memory
        self._arrived = torch.cuda.current_stream(x.device).record_event()

    def wait(self) -> Tensor:
        """It, in host memory that is not pinned."""
        self._arrived.synchronize()
        return self._host.clone()


def start(values: dict[str, Tensor]) -> None:
    """Begin to replace the large values that are on a GPU by copies on the CPU, in place."""
    for name, value in values.items():
        if value.is_cuda and value.numel() > SMALL:
            ready = torch.cuda.current_stream(value.device).record_event()
            _under_way.append(_threads().submit(_copy, values, name, ready))


def wait() -> None:
    """Until all copies have been made. What one of them raised is raised here."""
    waiting = _under_way.copy()
    forget()
    for copy in waiting:
        copy.result()


def forget() -> None:
    """Wait for none of them."""
    _under_way.clear()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="host_copies")


def _copy(values: dict[str, Tensor], name: str, ready: torch.cuda.Event) -> None:
    value = values[name]
    host, place = np.empty(value.nbytes, np.uint8), _pinned()
    with torch.cuda.stream(_stream(value.device)):
        ready.wait()
        whole = value.contiguous().view(-1).view(torch.uint8)
        for start in range(0, len(whole), STAGED):
            part = whole[start : start + STAGED]
            place[: len(part)].copy_(part, non_blocking=True)
            torch.cuda.current_stream(value.device).synchronize()
            host[start : start + len(part)] = place[: len(part)].numpy()
    values[name] = torch.from_numpy(host).view(value.dtype).view(value.shape)


def _pinned() -> Tensor:
    """Of this thread, uint8 [STAGED]."""
    if "pinned" not in _of_thread.__dict__:
        _of_thread.pinned = torch.empty(STAGED, dtype=torch.uint8, pin_memory=True)
    return _of_thread.pinned


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of this thread: copies on the stream of the rollout would wait for what it was given since."""
    streams = _of_thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]

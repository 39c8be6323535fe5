"""The processes of one rollout find each other, and say what went wrong once.

torchrun starts them and tells each its rank; torch.distributed connects them, NCCL between GPUs and gloo
between CPUs, which also brings together what was captured.
"""

import os
import signal
import threading
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(minutes=20)  # of one exchange: longer than a process may need to load its weights

_stores: list[Store] = []  # of the group that this process has joined


def join(device: torch.device) -> dist.ProcessGroup:
    """The group of all processes that were started together, for tensors on the CPU and on a GPU each."""
    timeout = TIMEOUT
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    _stores.append(PrefixStore("errors", store))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        # torch's flight recorder walks through Python's frames at every exchange, and every layer has two.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    if threading.current_thread() is threading.main_thread():
        # A process that waits in NCCL or gloo runs no Python: let a signal end it all the same.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def joined() -> dist.ProcessGroup | None:
    """The group that this process has joined."""
    return dist.group.WORLD if dist.is_initialized() else None


def leave() -> None:
    """Part, all at once; nothing where no group was joined."""
    if (group := joined()) is not None:
        wait_for_all(group)
        dist.destroy_process_group()


def wait_for_all(group: dist.ProcessGroup) -> None:
    """Wait until every process of a group is here; no GPU takes part."""
    dist.all_reduce(torch.zeros(1), group=group)


LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket closed",
    "Broken pipe",
    "remote error",
)
LATE = ("timed out", "timeout")


def trouble_with_others(error: BaseException) -> str:
    """lost or late where an exchange failed because of another process; nothing for other errors."""
    text = str(error)
    if joined() is None or not isinstance(error, RuntimeError):
        return ""
    return "late" if any(s in text.lower() for s in LATE) else "lost" if any(s in text for s in LOST) else ""


def is_first_to_fail(message: str) -> bool:
    """Whether no other process of the group has said what went wrong; this one is about to."""
    if not _stores:
        return True
    with suppress(Exception):  # the store is gone with the process that had it
        mine = f"{os.getpid()} {message}"
        return _stores[-1].compare_set("first", "", mine) == mine.encode()
    return True

"""Symmetric memory that is not there: processes of this machine reach each other's memory through files.

What wan/kernels/peer_memory.py does on GPUs it then does here; barriers are the host's.
"""

import os
import time
from itertools import count
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from wan.kernels import peer_memory
from wan.kernels.peer_memory import Group

GARBAGE = 0x7B  # in every byte of new memory: a finite number that nobody computes, in any dtype


class FileHandle:
    """The memory of all processes of a group, by its files."""

    late: tuple[int, int] | None = None  # the rank that goes on late, and behind which barrier

    def __init__(self, files: list[str], group: Group):
        self.files, self.group = files, group
        self.barriers: list[tuple[int, int]] = []  # channel and time-out of each

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return mapped(self.files[rank], sizes, dtype)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self.barriers.append((channel, timeout_ms))
        dist.barrier(self.group)
        if self.late == (self.group.rank(), channel):
            time.sleep(0.1)


def mapped(file: str, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_file(file, shared=True, size=prod(sizes), dtype=dtype).view(sizes)


def give_peers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let processes that are forked from now on have peers' memory on the CPU, in files of a folder."""
    numbers, files = count(), dict[int, str]()

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        file = str(folder / f"{os.getpid()}-{next(numbers)}")
        memory = mapped(file, shape, dtype)
        memory.view(-1).view(torch.uint8).fill_(GARBAGE)
        files[memory.data_ptr()] = file
        return memory

    def introduce(memory: Tensor, group: Group) -> FileHandle:
        of_all = [""] * group.size()
        dist.all_gather_object(of_all, files[memory.data_ptr()], group=group)
        return FileHandle(of_all, group)

    monkeypatch.setattr(peer_memory, "DEVICES", ("cpu",))
    monkeypatch.setattr(peer_memory, "_are_linked", lambda group, device: True)
    monkeypatch.setattr(peer_memory, "allocate", allocate)
    monkeypatch.setattr(peer_memory, "introduce", introduce)

"""Tokens of all heads for heads of all tokens, and back, between the processes of wan/parallel.py.

Letters: P processes, L tokens of a call, of which each process has L/P; H heads, of which each has H/P.
AllToAll goes everywhere; wan/kernels/peer_memory.py is for GPUs that reach each other's memory.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
WIDE = torch.complex128


class Exchange(Protocol):
    """There in two steps, and back in two: a CUDA graph may end between them, or begin.

    All processes of a group must call the same ones in the same order.
    """

    def send(self, parts: Sequence[Tensor]) -> Tensor:
        """Let go of n tensors of own tokens and all heads, [B, L/P, H, D] -> what receive() takes."""
        ...

    def receive(self, sent: Tensor, lasts: bool) -> tuple[Tensor, ...]:
        """n tensors of all tokens and own heads, [B, L, H/P, D].

        Without lasts they are read until the next exchange is called for, and no later.
        """
        ...

    def send_back(self, seen: Tensor) -> Tensor:
        """Let go of what own heads saw, [B, L, H/P, D] -> what receive_back() takes.

        It lies in the same place in every layer.
        """
        ...

    def receive_back(self, sent: Tensor) -> Tensor:
        """What all heads saw for own tokens, [B, L/P, H, D]."""
        ...


class AllToAll:
    """By all_to_all_single of torch.distributed, on every device and over any network."""

    def __init__(self, group: Group):
        self.group, self.size = group, group.size()
        self._places: dict[Hashable, Tensor] = {}

    def send(self, parts: Sequence[Tensor]) -> Tensor:
        """Pack them by who gets them: [P, B, L/P, n, H/P, D].

        So they leave in one piece, and what arrives is whole sequences without another copy. They leave from
        the same place in every layer.
        """
        batch, heads = parts[0].shape[0], parts[0].shape[2] // self.size
        by_process = [x.reshape(-1, self.size, heads * x.shape[3]).transpose(0, 1) for x in parts]
        if torch.is_grad_enabled():
            stacked = torch.stack(by_process, 2)
        else:
            shape = (*by_process[0].shape[:2], len(parts), by_process[0].shape[2])
            stacked = self._place("heads", shape, parts[0])
            *sources, target = widened(*by_process, stacked)
            torch.stack(sources, 2, out=target)  # in 4 dims, which CUDA does in one kernel
        return stacked.unflatten(3, (heads, -1)).unflatten(1, (batch, -1))

    def receive(self, sent: Tensor, lasts: bool) -> tuple[Tensor, ...]:
        """They arrive in memory of their own, and last."""
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self.group)
        return arrived.transpose(0, 1).flatten(1, 2).unbind(2)

    def send_back(self, seen: Tensor) -> Tensor:
        """Send it, and receive what others saw: [P, B, L/P, H/P, D]."""
        outgoing = seen.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        arrived = self._place("tokens", outgoing.shape, outgoing)
        dist.all_to_all_single(arrived, outgoing, group=self.group)
        return arrived

    def receive_back(self, sent: Tensor) -> Tensor:
        by_token = widened(sent.permute(1, 2, 0, 3, 4))[0].contiguous()
        return by_token.view(sent.dtype).flatten(2, 3)

    def _place(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory for tensors of one name, shape and dtype, one after the other."""
        key = name, tuple(shape), like.dtype
        if key not in self._places:
            self._places[key] = like.new_empty(shape)
        return self._places[key]


def widened(*tensors: Tensor) -> list[Tensor]:
    """The same memory in elements of 16 bytes: on a GPU strided memory is copied element by element.

    The tensors themselves, where that is not possible for all alike.
    """
    is_one_kind = len({x.dtype for x in tensors}) == 1
    return [x.view(WIDE) for x in tensors] if is_one_kind and all(map(_may_be_wide, tensors)) else [*tensors]


def _may_be_wide(x: Tensor) -> bool:
    ratio = WIDE.itemsize // x.dtype.itemsize
    places = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and not x.requires_grad and not any(n % ratio for n in places)

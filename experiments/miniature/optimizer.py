"""Muon for the matrices of a network's layers, AdamW for every other parameter.

torch.optim.Muon takes its learning rate from the host and works matrix by matrix, in bfloat16 on a CPU too;
here a tensor gives it and matrices of one shape are one batch, so that an update can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ADAM_BETAS = (0.9, 0.95)
MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
# Makes an update's RMS that of AdamW's, so both take the same learning rate (arXiv 2502.16982, eq. 4).
UPDATE_RMS = 0.2
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon


class Muon:
    """Momentum, made orthogonal (https://kellerjordan.github.io/posts/muon), of float32 matrices [out, in].

    Kernels [out, in, ...] count as matrices of `out` rows.
    """

    def __init__(self, matrices: Sequence[Tensor], lr: Tensor):
        self.lr = lr
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(tuple(sorted(matrix.flatten(1).shape)), []).append(matrix)
        self.groups = list(by_shape.values())
        self.momenta = [[torch.zeros_like(m) for m in group] for group in self.groups]

    @torch.no_grad()
    def step(self) -> None:
        for matrices, momenta in zip(self.groups, self.momenta, strict=True):
            gradients = [m.grad for m in matrices if m.grad is not None]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's
            update = orthogonal(torch.stack([as_wide(x) for x in ahead]))
            update *= self.lr * UPDATE_RMS * max(update.shape[1:]) ** 0.5
            torch._foreach_mul_(matrices, 1 - WEIGHT_DECAY * self.lr)
            torch._foreach_sub_(matrices, [of_wide(u, m) for u, m in zip(update, matrices, strict=True)])


def as_wide(x: Tensor) -> Tensor:
    """[rows, columns] of a matrix or kernel, rows <= columns."""
    x = x.flatten(1)
    return x.T if x.shape[0] > x.shape[1] else x


def of_wide(x: Tensor, like: Tensor) -> Tensor:
    """as_wide() undone."""
    return (x if x.shape[0] == like.shape[0] else x.T).reshape(like.shape)


def orthogonal(x: Tensor) -> Tensor:
    """Matrices [n, rows, columns], rows <= columns, with all singular values brought near 1; float32."""
    a, b, c = NEWTON_SCHULZ
    x = x.to(fast_dtype(x.device))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.float()


def fast_dtype(device: torch.device) -> torch.dtype:
    """In which products are fast. bfloat16 is exact enough here, and slow on most CPUs."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Optimizer:
    """One update of masters whose gradients are there. Steps of a CUDA graph see `lr` change."""

    def __init__(self, masters: Sequence[Tensor], is_matrix: Sequence[bool], lr: Tensor):
        chosen = [m for m, muon in zip(masters, is_matrix, strict=True) if muon]
        others = [m for m, muon in zip(masters, is_matrix, strict=True) if not muon]
        on_gpu = lr.device.type == "cuda"
        self.muon = Muon(chosen, lr)
        self.adamw = torch.optim.AdamW(
            others, lr=lr, betas=ADAM_BETAS, weight_decay=WEIGHT_DECAY, fused=on_gpu, capturable=on_gpu
        )

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def state(self) -> dict:
        """What later steps depend on."""
        return {"muon": self.muon.momenta, "adamw": self.adamw.state_dict()["state"]}

    @torch.no_grad()
    def load(self, state: dict) -> None:
        """Go on from state()."""
        for momenta, saved in zip(self.muon.momenta, state["muon"], strict=True):
            torch._foreach_copy_(momenta, saved)
        self.adamw.load_state_dict(self.adamw.state_dict() | {"state": state["adamw"]})
        self.adamw.param_groups[0]["lr"] = self.muon.lr  # loading copied the tensor

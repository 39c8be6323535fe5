"""Choose optional fast paths: a module of kernels, or None for the plain path. Start and launch them."""

from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from importlib import import_module
from threading import Thread
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

THREAD = "compiling kernels"  # the name of prepare()'s threads


@cache
def prepare(
    device: torch.device, num_heads: int = 0, head_dim: int = 0, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Start Triton in a thread, once, and compile the kernels of mass for a model's heads if they are given.

    The first launch would take 1 to 3 s for it.
    """
    if device.type == "cuda":  # the process may end without the thread
        arguments = device, num_heads, head_dim, dtype
        Thread(target=_start_triton, args=arguments, name=THREAD, daemon=True).start()


def _start_triton(device: torch.device, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    with (
        suppress(Exception),
        torch.cuda.device(device),
        torch.no_grad(),
    ):  # the first launch says what is wrong
        import_module("wan.kernels.fused").nothing.warmup(grid=(1,))
        q = torch.zeros(1, 64, num_heads, head_dim, device=device, dtype=dtype)
        kernels = mass_kernels(q)
        if q.numel() and kernels is not None:
            kernels.query_frame_mass(q, q, torch.zeros(1, num_heads, 64, device=device), num_key_frames=1)
            kernels.segment_lse(q, q, [(0, 64)])


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a Triton kernel on (x, *args) on the GPU of x; Triton alone would use the current GPU."""
    is_elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    on_device: AbstractContextManager[object] = nullcontext()
    if is_elsewhere:
        on_device = torch.cuda.device(x.device)
    with on_device:
        kernel[grid](x, *args, **constants)


def fused_kernels(x: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the fused kernels if they support these inputs: on CUDA, without gradients."""
    if not x.is_cuda:
        return None
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x, *others)):
        return None
    return import_module("wan.kernels.fused")  # Triton is there only beside CUDA


def mass_kernels(q: Tensor) -> ModuleType | None:
    """Return the kernels of softmax mass if they support a call's queries: half precision on CUDA."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    return import_module("wan.kernels.mass")


def vae_kernels(x: Tensor) -> ModuleType | None:
    """Return the kernels of the VAE's decoder if they support x: on CUDA."""
    if not x.is_cuda:
        return None
    return import_module("wan.kernels.vae")

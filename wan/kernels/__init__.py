"""Optional fast paths, each beside the plain one: fused.py is taken where fused_kernels() gives it."""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


def fused_kernels(x: Tensor) -> ModuleType | None:
    """Return the kernels if they apply to x: on CUDA, without gradients."""
    if not x.is_cuda or (torch.is_grad_enabled() and x.requires_grad):
        return None
    return import_module("wan.kernels.fused")  # Triton is there only beside CUDA

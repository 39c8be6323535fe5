"""A GPU that is not there: tensors that say cuda and compute on the CPU, and refuse what a GPU refuses.

A test then finds without a GPU: tensors of two devices in one operation, host memory read without a copy,
what waits for the device, and mistakes in code that GPUs alone run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from wan import attention as call_attention
from wan import backends as attention_backend
from wan import cache, keys, reductions
from wan import model as layers

aten = torch.ops.aten
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
GUARDED = {Tensor.copy_, Tensor.contiguous, Tensor.__invert__}  # these ask a driver on their way
TO_HOST = {aten._local_scalar_dense.default, aten.equal.default}
waited: list[str] = []  # what waits for a GPU: numbers that are read from it, unpinned ones that go there


class OnGPU(Tensor):
    """Looks like a tensor of the GPU; inner, on the CPU, has its numbers."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGPU":
        same = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        # dispatch_device asks __torch_dispatch__ where it is
        return Tensor._make_wrapper_subclass(cls, inner.shape, device="cpu", dispatch_device=True, **same)

    def __init__(self, inner: Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


class Pinned(Tensor):
    """On the host, and copied from there without waiting."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def inner_of(x: Any) -> Any:
    return x.inner if isinstance(x, OnGPU) else x


def computed(function: Any, args: tuple, kwargs: dict) -> Any:
    """An operation on the CPU; its results are where a GPU would have them."""
    if function is torch.ops.prim.device.default:
        return GPU if isinstance(args[0], OnGPU) else HOST
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in given if isinstance(x, OnGPU)]
    # copies go between devices; a GPU's tensor takes indices from the host, not the other way round
    mixes = function in COPIES or (function in INDEXED and isinstance(args[0], OnGPU))
    if here and any(x.dim() for x in given if not isinstance(x, OnGPU)) and not mixes:
        raise RuntimeError(f"{function}: Expected all tensors to be on the same device, not cuda:0 and cpu")
    device = kwargs.get("device")
    stays = bool(here) if device is None else torch.device(device).type == "cuda"
    asynchronous = kwargs.get("non_blocking") and isinstance(args[0], OnGPU | Pinned)
    crosses = device is not None and stays != bool(here) and function in COPIES and not asynchronous
    reads = here and function in TO_HOST | {aten.nonzero.default}
    if crosses or reads or (here and len(here) < len(given) and mixes):
        waited.append(str(function))
    kwargs = kwargs if device is None else kwargs | {"device": HOST}
    inner_args, inner_kwargs = tree_map(inner_of, (args, kwargs))
    if function in FUSED_ATTENTION:
        found = FUSED_ATTENTION[function](*inner_args[:4])
        return tuple(OnGPU(x) if isinstance(x, Tensor) else x for x in found)
    found = function(*inner_args, **inner_kwargs)
    if function in TO_HOST or not stays:
        return found
    known = {id(x.inner): x for x in here}  # an operation in place returns what it was given
    return tree_map(lambda x: known.get(id(x), OnGPU(x)) if isinstance(x, Tensor) else x, found)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output, laid out in memory as a GPU's kernels do, and log-sum-exp [B, H, Lq]."""
    if q.shape[-1] * q.element_size() % 16:
        raise RuntimeError("a GPU's attention reads rows at multiples of 16 bytes; cuDNN's crashes at others")
    logits = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    logits = logits if bias is None else logits + bias
    lse = logits.logsumexp(-1)
    out = (logits - lse[..., None]).exp() @ v.float()
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse


def efficient(*inputs: Any) -> tuple:
    """Rows of the log-sum-exp are padded to 32; two tensors of random numbers' state follow."""
    out, lse = attention(*inputs)
    return out, F.pad(lse, (0, -lse.shape[-1] % 32)), torch.tensor(0), torch.tensor(0)


def cudnn(*inputs: Any) -> tuple:
    """Log-sum-exp [B, H, Lq, 1]; then lengths of a batch of unequal ones, state, and a mask for debugging."""
    if inputs[0].dtype == torch.float32:
        raise RuntimeError("cuDNN's attention takes no float32")
    out, lse = attention(*inputs)
    none = [torch.tensor(0) for _ in range(5)]
    return out, lse[..., None], *none[:2], 0, 0, *none[2:]


FUSED_ATTENTION = {
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
}


class Operations(TorchDispatchMode):
    """What makes tensors, too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


class Functions(TorchFunctionMode):
    """What would ask a driver for the GPU before it is an operation."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args = tuple(map(named, args))
        kwargs = {name: named(x) for name, x in kwargs.items()} if kwargs else {}
        if function is torch.tensor and kwargs.get("device") == GPU:
            waited.append("numbers of the host")
            return OnGPU(torch.tensor(*args, **kwargs | {"device": HOST}))
        if function is Tensor.pin_memory:
            return args[0].clone().as_subclass(Pinned)
        if not args or not isinstance(args[0], OnGPU):
            return function(*args, **kwargs)
        inner, rest = args[0].inner, tree_map(inner_of, args[1:])
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else args[1:2]
            if any(isinstance(x, list | Tensor) and not isinstance(x, OnGPU) for x in index):
                waited.append("an index of the host")
            found = function(inner, *rest)
            return found if found is None else OnGPU(found)
        if function in GUARDED:
            found = function(inner, *rest, **tree_map(inner_of, kwargs))
            return args[0] if found is inner else OnGPU(found)
        if function is Tensor.tolist:
            return inner.tolist()
        return function(*args, **kwargs)


def named(x: Any) -> Any:
    """A device with its number."""
    return GPU if isinstance(x, str | torch.device) and str(x) == "cuda" else x


@contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """Inside, "cuda" is a device. Triton's kernels and gradients, which need a real one, are left out."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), Operations(), Functions():
        torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter becomes what it is moved to
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(f"synchronize {device}"))
        patch.setattr(keys, "LEFT", set())
        for module in (layers, cache, call_attention):
            patch.setattr(module, "fused_kernels", lambda *x: None)
        patch.setattr(reductions, "mass_kernels", lambda q: None)
        patch.setattr(attention_backend, "takes", lambda q, k, v: False)
        waited.clear()
        try:
            yield GPU
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

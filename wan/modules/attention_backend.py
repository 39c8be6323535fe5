"""Which kernel computes attention on CUDA: cuDNN's, or FlashAttention-4's for long calls.

    WAN_ATTENTION=auto|cudnn|fa4      auto, the default, takes FlashAttention-4 where it is and runs

The choice follows from that variable, what is installed, the device and the sizes of a call, never from
whether anybody looks. FlashAttention-4 (package flash-attn-4, pip install ".[fa4]") is called by its own
function: torch's activate_flash_attention_impl("FA4") unpacks two results where 4.0.0b36 gives five (torch
2.13).
"""

import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from wan.errors import ConfigError, one_line, quoted

VARIABLE, CHOICES = "WAN_ATTENTION", ("auto", "cudnn", "fa4")
CAPABILITIES = (9, 10)  # major compute capability: Hopper, and Blackwell in data centres
HALF = (torch.bfloat16, torch.float16)
# On an H200 cuDNN is faster up to 3120 keys, both are even at 4680, FlashAttention-4 is faster from 9360 on
# (docs/benchmarks/attention_h200.json).
FEWEST_KEYS = 9360
LARGEST_HEAD = 128
ROW_BYTES = 16


def wanted() -> str:
    """One of CHOICES, as the environment says. ConfigError for anything else."""
    choice = os.environ.get(VARIABLE) or CHOICES[0]
    if choice not in CHOICES:
        raise ConfigError(f"{VARIABLE} is {quoted(choice)}, not one of {', '.join(CHOICES)}; unset it")
    return choice


def check(device: torch.device) -> None:
    """Refuse now what the first call would refuse. ConfigError, also on devices without a choice."""
    wanted()
    if device.type == "cuda":
        has_fa4(device)


def kernel_name(device: torch.device, dtype: torch.dtype) -> str | None:
    """What computes attention on a GPU, for the record of a run; None on other devices."""
    if device.type != "cuda":
        return None
    if dtype not in HALF:
        return "efficient"
    return f"fa4 {fa4_version()}, cudnn below {FEWEST_KEYS} keys" if has_fa4(device) else "cudnn"


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call over [B, H, L, D] on a GPU is FlashAttention-4's; those of a training step are not."""
    long, head_dim = k.shape[2] >= FEWEST_KEYS, q.shape[3]
    fits = head_dim % 8 == 0 and head_dim <= LARGEST_HEAD and q.dtype in HALF
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return long and fits and not trains and has_fa4(q.device)


def kernels_can_read(q: Tensor) -> bool:
    """Whether rows [D] of q start at multiples of 16 bytes: D is 8n in half precision, 4n in float32.

    cuDNN's attention ends the process by a segmentation fault where they do not (D = 12 in bfloat16, H200,
    torch 2.11); the memory-efficient one has no kernel for them from compute capability 8 on.
    """
    return q.shape[-1] * q.element_size() % ROW_BYTES == 0


def fa4_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over [B, H, L, D] and its natural log-sum-exp, float32 [B, H, Lq], by FlashAttention-4."""
    out, lse = _fa4_function()(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True)  # [B, L, H, D]
    return out.transpose(1, 2), lse


@cache
def has_fa4(device: torch.device) -> bool:
    """Whether a CUDA device uses FlashAttention-4. ConfigError where it was asked for and cannot be."""
    choice = wanted()
    if choice == "cudnn":
        return False
    lacks = None
    if fa4_version() is None:
        lacks = 'flash-attn-4 is not installed; run: pip install ".[fa4]"'
    elif (major := torch.cuda.get_device_capability(device)[0]) not in CAPABILITIES:
        lacks = f"it needs a GPU of compute capability 9 or 10, and {device} has {major}; unset it"
    if lacks and choice == "fa4":
        raise ConfigError(f"{VARIABLE} is fa4, but {lacks}")
    return lacks is None


def fa4_version() -> str | None:
    """Of the installed package; looking imports nothing."""
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None


@cache
def _fa4_function() -> Callable[..., tuple[Tensor, Tensor]]:
    try:
        from flash_attn.cute import flash_attn_func
    except Exception as error:  # its own dependencies, in any way
        raise ConfigError(
            f"flash-attn-4 {fa4_version()} cannot be imported ({one_line(error)}); install it again, or set "
            f"{VARIABLE}=cudnn"
        ) from error
    return flash_attn_func

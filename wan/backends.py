"""Choose the kernel of attention on CUDA: cuDNN's, or FlashAttention-4's for long calls.

    WAN_ATTENTION=auto|cudnn|fa4      auto, the default, takes FlashAttention-4 where it is and runs

The choice depends on that variable, installed packages, the device and the sizes of a call, never on whether
anything is captured. FlashAttention-4 (package flash-attn-4, pip install ".[fa4]") is launched on Hopper by
wan/wings/fa4.py, and elsewhere by its own function: torch's activate_flash_attention_impl("FA4") unpacks
two results where 4.0.0b36 gives five (torch 2.13).
"""

import os
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch
from torch import Tensor

from wan import errors

VARIABLE, CHOICES = "WAN_ATTENTION", ("auto", "cudnn", "fa4")
FA4 = "flash-attn-4"
HOPPER, BLACKWELL = 9, 10  # major compute capability, of data centres
HALF = (torch.bfloat16, torch.float16)
LAUNCHED = "4.0.0b36"  # the version whose kernel wings/fa4.py launches; others go by their own function
# On an H200 FlashAttention-4 and cuDNN are within a tenth of each other at 512 keys, the text's, and at 1024;
# beyond, the former wins. Its own function is slower up to 2048 keys, for its 0.07 ms on the host
# (docs/benchmarks/attention_h200.json at 01e1ad6).
FEWEST_KEYS, FEWEST_KEYS_OF_FUNCTION = 512, 9360
LARGEST_HEAD = 128
TILE = 128  # queries, and keys, that wings/fa4.py takes at once: one may hold one frame's beginning
ROW_BYTES = 16


# --- What there is
def installed_version(package: str) -> str | None:
    """Return the installed version, None if there is none; imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def has_fa4(device: torch.device) -> bool:
    """Return whether a device uses FlashAttention-4.

    ConfigError if it was asked for but cannot run, and if the environment names none of CHOICES.
    """
    choice = os.environ.get(VARIABLE) or CHOICES[0]
    errors.require_known(choice, CHOICES, f"{VARIABLE} is {{}}; unset it")
    if choice == "cudnn" or device.type != "cuda":
        return False
    problem = ""
    if installed_version(FA4) is None:
        problem = 'flash-attn-4 is not installed; run: pip install ".[fa4]"'
    else:
        major, _ = torch.cuda.get_device_capability(device)
        if major not in (HOPPER, BLACKWELL):
            problem = f"it needs a GPU of compute capability 9 or 10, and {device} has {major}; unset it"
    if problem and choice == "fa4":
        raise errors.ConfigError(f"{VARIABLE} is fa4, but {problem}")
    return not problem


@cache
def is_launched(device: torch.device) -> bool:
    """Return whether FlashAttention-4's kernel is launched without its own function on this device."""
    return installed_version(FA4) == LAUNCHED and torch.cuda.get_device_capability(device)[0] == HOPPER


def kernel_name(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the name of attention's kernel on a GPU, for the record of a run; None on other devices."""
    if device.type != "cuda":
        return None
    if dtype not in HALF:
        return "efficient"
    if not has_fa4(device):
        return "cudnn"
    fewest = FEWEST_KEYS_OF_FUNCTION
    if is_launched(device):
        fewest = FEWEST_KEYS
    return f"fa4 {installed_version(FA4)}, cudnn below {fewest} keys"


def imported(name: str) -> ModuleType:
    """Import a module of FlashAttention-4 or its dependencies. ConfigError if it is broken."""
    remedy = f"install it again, or set {VARIABLE}=cudnn"
    with errors.library_reads(f"flash-attn-4 {installed_version(FA4)}", remedy=remedy):
        return import_module(name)


# --- Calls over [B, H, L, D]
def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether FlashAttention-4 computes a call on a GPU; never during training."""
    # What the kernel can do, where it is the faster one, and where it is installed.
    head_dim = q.shape[3]
    fits = head_dim % 8 == 0 and head_dim <= LARGEST_HEAD and q.dtype in HALF
    if not fits or k.shape[2] < FEWEST_KEYS or not has_fa4(q.device):
        return False
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return not trains and (k.shape[2] >= FEWEST_KEYS_OF_FUNCTION or launches(q))


def launches(q: Tensor) -> bool:
    """Return whether a call goes to FlashAttention-4's kernel without its Python function."""
    return q.shape[3] == LARGEST_HEAD and is_launched(q.device)


def gives_tails(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel can also give the mass of key frames of TILE keys or more."""
    return q.is_cuda and takes(q, k, v) and launches(q)


def kernels_can_read(q: Tensor) -> bool:
    """Return whether rows [D] of q start at multiples of 16 bytes: D is 8n in half precision, 4n in float32.

    Otherwise cuDNN's attention crashes the process (D = 12 in bfloat16, H200, torch 2.11), and the
    memory-efficient one has no kernel for compute capability 8 and later.
    """
    return q.shape[-1] * q.element_size() % ROW_BYTES == 0


def can_read(x: Tensor) -> bool:
    """Return whether kernels can read x [B, H, L, D] in place, by its strides and alignment."""
    if x.stride(3) != 1 and x.shape[3] != 1:
        return False
    if x.device.type != "cuda" or not kernels_can_read(x):  # then no kernel is called
        return True
    # Where x begins, as an offset and not as an address, which torch.compile could not follow
    steps = [step for step, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    whole_rows = all(step * x.element_size() % ROW_BYTES == 0 for step in (x.storage_offset(), *steps))
    return whole_rows and 0 not in steps


def fa4_attention(
    q: Tensor, k: Tensor, v: Tensor, num_frames: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return FlashAttention-4's output, its natural log-sum-exp, float32 [B, H, Lq], and tails or None.

    With num_frames and gives_tails() there are tails [2, B, H, Fk, Lq] of the key frames (wan/wings/fa4.py).
    """
    tokens_first = (x.transpose(1, 2) for x in (q, k, v))  # [B, L, H, D], as the package has them
    if not launches(q):
        out, lse, *_ = imported("flash_attn.cute").flash_attn_func(*tokens_first, return_lse=True)
        return out.transpose(1, 2), lse, None
    frame_size = 0
    if num_frames:
        frame_size = k.shape[2] // num_frames
    out, lse, tails = imported("wan.wings.fa4").attention(*tokens_first, frame_size)
    return out.transpose(1, 2), lse, tails

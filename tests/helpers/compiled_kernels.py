"""Compile the Triton kernels for a Hopper GPU that need not be here, as their callers call them.

A script: in the process of the tests Triton interprets. It fails where a kernel spills registers, takes more
memory than there is or leaves the tensor cores out.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from wan.kernels import fused
from wan.kernels import mass as mass_kernel

TARGET = GPUTarget("cuda", 90, 32)
NAMES = ("get_current_target", "get_current_device", "get_current_stream")


def compiled(kernel: JITFunction, grid: Any) -> Any:
    """What stands in for kernel[grid]: compiles for these arguments, and looks at what came out."""

    def call(*args: Any, **constants: Any) -> None:
        found, name = kernel.run(*args, grid=grid, warmup=True, **constants), kernel.fn.__name__
        with tempfile.NamedTemporaryFile(suffix=".ptx") as ptx:
            Path(ptx.name).write_text(found.asm["ptx"])
            assembler = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"]
            said = subprocess.run(assembler, capture_output=True, text=True, check=True).stderr
        assert not sum(map(int, re.findall(r"(\d+) bytes spill", said))), (name, said)
        assert found.metadata.shared <= 227 * 1024, (name, found.metadata.shared)
        assert ("mma" in found.asm["ptx"]) == name.endswith(
            ("mass_kernel", "segment_kernel", "column_kernel")
        ), name
        print(name)

    return call


if __name__ == "__main__":
    values = zip(NAMES, (TARGET, 0, 0), strict=True)  # a driver that launches nothing
    driver.set_active(SimpleNamespace(**{name: lambda *given, value=value: value for name, value in values}))
    JITFunction.__getitem__ = compiled
    assert fused.nothing.warmup(grid=(1,)).asm["ptx"]  # kernels.prepare() hides errors
    q, k = (torch.empty(1, length, 12, 128, dtype=torch.bfloat16) for length in (4680, 9360))
    lse = torch.empty(1, 12, 4680)
    mass_kernel.query_frame_mass(q, k, lse, 6)
    mass_kernel.segment_lse(q, k, [(0, 1560), (1560, 3120), (3120, 3376)])
    mass_kernel.key_token_means(q, k, lse)
    mass_kernel.key_token_mass(q, k, lse)
    x, rows = torch.empty(1, 15, 1536, dtype=torch.bfloat16), torch.empty(1, 3, 1536)
    fused.modulated_norm(x, rows, rows, 1e-6)
    fused.gated_add(x, x, rows)
    fused.add_norm(x, x, rows, x[0, 0], x[0, 0], 1e-6, affine=True)
    fused.add_norm(x, x, None, rows, rows, 1e-6)
    tables = (torch.empty(15, 1, 128),) * 2
    fused.rotate_into(x.unflatten(2, (12, 128)), x.unflatten(2, (12, 128)), *tables)
    fused.norm_rotate(x, x[0, 0], tables, 12, 1e-6)
    fused.merge_parts([x.unflatten(2, (12, 128)).transpose(1, 2)] * 2, [torch.empty(1, 12, 15)] * 2)

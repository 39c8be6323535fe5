"""Compile the Triton kernels for a GPU that need not be here, as their callers call them.

PYTHONPATH=. python tests/helpers/compiled_kernels.py 90      # compute capability 9.0; a JSON line a kernel
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from wan.kernels import fused
from wan.kernels import mass as mass_kernel

TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)


class NoGPU:
    """A driver that compiles for TARGET and launches nothing."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(kernel: JITFunction, grid: Any) -> Any:
    """What stands in for kernel[grid]: compiles for these arguments, and prints what came out."""

    def call(*args: Any, **constants: Any) -> None:
        found = kernel.run(*args, grid=grid, warmup=True, **constants)
        code, chip = found.asm["ptx"], f"sm_{TARGET.arch}{'a' if TARGET.arch >= 90 else ''}"
        with tempfile.NamedTemporaryFile(suffix=".ptx") as ptx:
            Path(ptx.name).write_text(code)
            assembler = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={chip}", ptx.name, "-o", "/dev/null"]
            said = subprocess.run(assembler, capture_output=True, text=True, check=True).stderr
        spilled = re.findall(r"(\d+) bytes spill", said)
        numbers = {
            "name": kernel.fn.__name__,
            "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
            "spilled_bytes": sum(map(int, spilled)),
            "shared_bytes": found.metadata.shared,
            "on_tensor_cores": "mma" in code,
        }
        shown = ("HEAD_DIM", "UNEQUAL", "ROTATE")
        print(json.dumps(numbers | {n: v for n, v in constants.items() if n in shown}))

    return call


def main() -> None:
    driver.set_active(NoGPU())
    JITFunction.__getitem__ = compiled
    q, k = (torch.empty(1, length, 12, 128, dtype=torch.bfloat16) for length in (4680, 9360))
    lse = torch.empty(1, 12, 4680)
    mass_kernel.query_frame_mass(q, k, lse, 6)
    mass_kernel.key_token_means(q, k, lse)
    mass_kernel.key_token_mass(q, k, lse)
    x, rows = torch.empty(1, 15, 1536, dtype=torch.bfloat16), torch.empty(1, 3, 1536)
    fused.modulated_norm(x, rows, rows, 1e-6)
    fused.gated_add(x, x, rows)
    fused.add_norm(x, x, rows, x[0, 0], x[0, 0], 1e-6, affine=True)
    fused.add_norm(x, x, None, rows, rows, 1e-6)
    fused.rotate_into(x.unflatten(2, (12, 128)), x.unflatten(2, (12, 128)), *(torch.empty(15, 1, 128),) * 2)
    tables = (torch.empty(15, 1, 128),) * 2
    fused.norm_rotate(x, x[0, 0], tables, 12, 1e-6)


if __name__ == "__main__":
    main()

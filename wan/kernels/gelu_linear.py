"""The FFN's first product, with its GELU while it is stored: the widest tensor of a layer is touched once.

cuBLAS multiplies and then stores, tile by tile. On Hopper quack's kernel has two groups of warps take turns:
one stores, with the GELU, while the other multiplies, which is faster for a block of the 1.3B
(docs/benchmarks/attention_h200.json). quack-kernels comes with flash-attn-4 and is taken where that is
launched (attention_backend.py). For a layer's other products cuBLAS is faster, and they are its own.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wan import backends as attention_backend
from wan.errors import ConfigError, one_line

FEWEST_ROWS, FEWEST_COLUMNS = 1024, 1024  # of a product that fills a GPU; below, cuBLAS


class Tile(NamedTuple):
    """What a program of quack's kernel computes at once."""

    rows: int
    columns: int
    in_turns: bool  # two groups of warps, of which one stores while the other multiplies


# The fastest of those that were tried on an H200 for 4680 x 8960 x 1536; benchmark_attention.py times some.
TILE = Tile(128, 160, True)


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh) of x wᵀ + b on a GPU, in half precision: x [L, in], weight [out, in] -> [L, out]."""
    if takes(x, weight):
        return by_quack("gelu_tanh_approx", TILE)(x, weight, bias)
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether such a product is quack's. It follows from the device, what is installed and the sizes."""
    large = len(x) >= FEWEST_ROWS and min(weight.shape) >= FEWEST_COLUMNS and weight.shape[1] % 64 == 0
    fits = large and len(weight) % 8 == 0 and x.dtype in attention_backend.HALF
    return fits and attention_backend.has_quack(x.device)


@cache
def by_quack(activation: str | None, tile: Tile) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """x wᵀ + b, and its activation, of x [L, in], weight [out, in] and bias [out].

    The first call builds the kernel. ConfigError where quack's package, or what it needs, cannot do that.
    """
    gemm = attention_backend.imported("quack.gemm_interface")
    config = attention_backend.imported("quack.gemm_config").GemmConfig(
        tile_m=tile.rows,
        tile_n=tile.columns,
        cluster_m=1,
        cluster_n=2,  # that share what they read
        pingpong=tile.in_turns,
        is_dynamic_persistent=False,
    )
    options: dict[str, Any] = {
        "activation": activation,
        "store_preact": False,
        "tuned": False,
        "config": config,
    }

    def multiply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        try:
            return gemm.gemm_act(x, weight.t(), bias=bias, **options)[1]
        except TypeError as error:  # it names a kernel by what is called there; packages' code has a name
            raise ConfigError(
                f"quack-kernels cannot build its kernel ({one_line(error)}); install it with all it needs "
                f"in a virtual environment's site-packages, or set {attention_backend.VARIABLE}=cudnn"
            ) from error

    return multiply

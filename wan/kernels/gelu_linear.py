"""The FFN's first product, with its GELU while it is stored: the widest tensor of a layer is touched once.

cuBLAS multiplies and then stores, tile by tile. On Hopper quack's kernel has two groups of warps take turns:
one stores, with the GELU, while the other multiplies, which is faster for a block of the 1.3B. quack-kernels
comes with flash-attn-4 and is taken where that is launched. For a layer's other products cuBLAS is faster.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from wan import backends

FEWEST = 1024  # rows and columns of a product that fills a GPU; below, cuBLAS


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh) of x wᵀ + b on a GPU, in half precision: x [L, in], weight [out, in] -> [L, out]."""
    if takes(x, weight):
        return _quack()(x, weight.t(), bias=bias)[1]
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return True where such a product is quack's: by the device, what is installed and the sizes."""
    large = len(x) >= FEWEST and min(weight.shape) >= FEWEST and weight.shape[1] % 64 == 0
    return large and len(weight) % 8 == 0 and x.dtype in backends.HALF and backends.has_quack(x.device)


@cache
def _quack() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return quack's product with GELU; its first call builds the kernel."""
    config = backends.imported("quack.gemm_config").GemmConfig(
        tile_m=128,  # the fastest tile of those that were tried on an H200 for 4680 x 8960 x 1536
        tile_n=160,
        cluster_m=1,
        cluster_n=2,  # that share what they read
        pingpong=True,  # two groups of warps, of which one stores while the other multiplies
        is_dynamic_persistent=False,
    )
    function = backends.imported("quack.gemm_interface").gemm_act
    return partial(function, activation="gelu_tanh_approx", store_preact=False, tuned=False, config=config)

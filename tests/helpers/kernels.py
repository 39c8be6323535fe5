"""What tests of Triton's kernels share: they are interpreted, or run where there is a GPU."""

import pytest
import torch

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))
CPU = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here"))
where = pytest.mark.parametrize("place", [CPU, GPU])


def require_triton() -> None:
    """Skip a module where kernels cannot run: 3.6 interprets no loop over an argument, with NumPy 2.4."""
    pytest.importorskip("triton", "3.7", reason="no Triton here: bash tests/run.sh --full installs it")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

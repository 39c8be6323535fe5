"""The Triton kernels without a GPU: interpreted against float64, and compiled for GPUs that are not here.

Where there is a GPU the tests of layers, reductions and maps run them there.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from helpers.behind_attention import LAYER_ERROR, error_behind_attention
from helpers.kernels import drawn, require_triton
from helpers.rollouts import rollout, tiny_pipeline
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from wan import model as layers
from wan import reductions, rope
from wan.config import ModelConfig
from wan.kernels import graphs as cuda_graphs
from wan.kernels.graphs import apply_cuda_graphs
from wan.model import GatedAdd, ModulatedNorm, QueryKeyNorm
from wan.pipeline import CausalInferencePipeline
from wan.rope import RotaryTable

require_triton()
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: the other tests run them on it"
)
BFLOAT16 = 2**-7  # relative: the interpreter cuts off where a GPU rounds


@pytest.fixture(params=[(3, 16, 33, 70), (2, 24, 130, 135), (1, 128, 128, 192), (2, 64, 7, 64)], ids=str)
def call(request, monkeypatch):
    """q and k that lie in larger buffers, as a cache's do, with their log-sum-exp and logits in float64."""
    heads, dim, len_q, len_k = request.param
    q = drawn(2, len_q + 3, heads + 1, dim)[:, 2:-1, 1:] * 2
    k = (drawn(2, len_k + 5, heads + 1, dim) + 0.5)[:, 5:, :-1]
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * dim**-0.5
    monkeypatch.setattr(reductions, "kernels_take", lambda q: True)
    return q, k, logits.logsumexp(-1).float(), logits


def test_mass_of_frames(call):
    q, k, lse, logits = call
    for frames in (1, k.shape[1] // next(n for n in (5, 32) if k.shape[1] % n == 0)):
        found = reductions.frame_mass(q, k, lse, 1, frames)
        expected = logits.softmax(-1).unflatten(-1, (frames, -1)).sum(-1).mean(2, keepdim=True)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


def test_programs_share_the_frames(call, monkeypatch):
    """A program's share follows from KEYS_EACH and changes no bit."""
    from wan.kernels import mass as mass_kernel

    q, k, lse, _ = call
    frames = next(n for n in (7, 9, 6, 4) if k.shape[1] % n == 0)
    expected = mass_kernel.query_frame_mass(q, k, lse, frames, frames_each=frames)
    assert (mass_kernel.query_frame_mass(q, k, lse, frames, frames_each=2) == expected).all()
    programs, kernel = [], mass_kernel._mass_kernel

    class Counted:
        def __getitem__(self, grid):
            programs.append(grid[2])
            return kernel[grid]

    monkeypatch.setattr(mass_kernel, "_mass_kernel", Counted())
    for keys in (k.shape[1] // frames * 3 + 1, 1):
        monkeypatch.setattr(mass_kernel, "KEYS_EACH", keys)
        assert (mass_kernel.query_frame_mass(q, k, lse, frames) == expected).all()
    assert programs == [-(-frames // 3), frames]


def test_key_tokens(call):
    q, k, lse, logits = call
    found, mass = reductions.key_token_means(q, k, lse)
    atol = 1e-5 * logits.abs().max().item()
    torch.testing.assert_close(found.double(), logits.mean(2), atol=atol, rtol=0)
    torch.testing.assert_close(mass.double(), logits.softmax(-1).mean(2), atol=1e-6, rtol=0)


def test_key_tokens_by_query_frame(call):
    from wan.kernels import mass as map_kernel

    q, k, lse, logits = call
    frames = next(n for n in (3, 5, 4, 7) if q.shape[1] % n == 0)
    found, mass = map_kernel.key_token_means(q, k, lse, frames)
    of_frames = logits.unflatten(2, (frames, -1)).mean(3)
    torch.testing.assert_close(found.double(), of_frames, atol=1e-5 * logits.abs().max().item(), rtol=0)
    expected = logits.softmax(-1).unflatten(2, (frames, -1)).mean(3)
    torch.testing.assert_close(mass.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tables", [1, 2], ids=["of all", "of each item"])
def test_keys_that_are_turned_into_a_cache(tables, dtype, monkeypatch):
    """And what lies around them stays; rows that do not lie as a cache's do are turned without the kernel."""
    from wan.kernels import fused

    raw, keys = drawn(2, 9, 3, 24).to(dtype), drawn(2, 12, 3, 24).to(dtype)
    cos, sin = RotaryTable(24)(range(4, 9), 1, 1, torch.device("cpu"))
    cos, sin = (torch.stack([x, x.flip(0)]) if tables == 2 else x for x in (cos, sin))
    expected = keys.clone()
    expected[:, 3:8] = rope.rotate(raw[:, 2:7].double(), cos, sin).to(dtype)
    called = []
    monkeypatch.setattr(rope, "fused_kernels", lambda x: called.append(x) or fused)
    strided = drawn(2, 12, 4, 24).to(dtype)[:, :, 1:].copy_(keys)
    for target in (keys, strided):
        rope.rotate_into(target[:, 3:8], raw[:, 2:7], cos, sin)
        rtol = BFLOAT16 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(target, expected, atol=1e-6, rtol=rtol)
    assert len(called) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "rows"), [(3, 16, 3), (12, 16, 1), (5, 24, 3)])
@torch.no_grad()
def test_what_stands_between_the_products(heads, head_dim, rows, dtype, monkeypatch):
    """Each module with its kernel against itself in float64 without it."""
    from wan.kernels import fused

    dim, length = heads * head_dim, 15
    x, y = ((drawn(2, length, dim) * 3 + shift).to(dtype) for shift in (2, 0))
    scale, shift, gate = drawn(2, rows, 4, dim).unbind(2)[1:]  # strided, as in a layer
    turned = QueryKeyNorm(ModelConfig(dim=dim, ffn_dim=8, num_heads=heads, num_layers=1))
    turned.weight.copy_(drawn(dim))
    rope = RotaryTable(head_dim)(range(1030, 1033), 1, length // 3, torch.device("cpu"))
    calls = [
        (ModulatedNorm(dim, 1e-6), (x, scale, shift)),
        (GatedAdd(), (x, y, gate)),
        (turned, (x,)),
        (turned, (x, rope)),
    ]
    for module, given in calls:
        expected = module.double()(*tree_map(torch.Tensor.double, given))
        with monkeypatch.context() as patch:
            patch.setattr(layers, "fused_kernels", lambda _: fused)
            found = module.float()(*given)
        assert found.dtype == dtype
        atol, rtol = 3e-6 * expected.abs().max().item(), BFLOAT16 if dtype == torch.bfloat16 else 0
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_behind_attention(rows, dtype, monkeypatch):
    """By the kernels that add and norm at once, where the module is in half or in whole precision."""
    from wan.kernels import fused

    called, kernel = [], fused.add_norm
    monkeypatch.setattr(fused, "add_norm", lambda *given, **more: called.append(1) or kernel(*given, **more))
    monkeypatch.setattr(layers, "fused_kernels", lambda x: None if x.dtype == torch.float64 else fused)
    monkeypatch.setattr(layers.FeedForward, "forward", torch.nn.Sequential.forward)  # cuBLAS's is CUDA's
    cut_off = 2 if dtype == torch.bfloat16 else 1  # where a GPU rounds
    assert error_behind_attention(rows, dtype) <= cut_off * LAYER_ERROR[dtype] and len(called) == 2


def test_queries_and_keys_in_a_place_of_their_own(monkeypatch):
    from wan.kernels import fused

    norm = QueryKeyNorm(ModelConfig(dim=48, ffn_dim=8, num_heads=3, num_layers=1)).requires_grad_(False)
    tables = RotaryTable(16)(range(3), 1, 5, torch.device("cpu"))
    monkeypatch.setattr(layers, "fused_kernels", lambda _: fused)
    x, cache = drawn(1, 15, 48), drawn(1, 25, 3, 16)
    expected, before = norm(x, tables), cache.clone()
    assert norm(x, tables, place := cache[:, 5:20]) is place and torch.equal(place, expected)
    assert torch.equal(cache[:, :5], before[:, :5]) and torch.equal(cache[:, 20:], before[:, 20:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_what_comes_to_a_place_of_its_own(dtype, monkeypatch):
    """The same bits, also over what was read."""
    from wan.kernels import fused

    monkeypatch.setattr(layers, "fused_kernels", lambda _: fused)
    (x, y), rows = drawn(2, 2, 15, 48).to(dtype), drawn(2, 3, 4, 48).unbind(2)
    norm, add, place = ModulatedNorm(48, 1e-6), GatedAdd(), torch.empty_like(x)
    assert norm(x, *rows[:2], place) is place and torch.equal(place, norm(x, *rows[:2]))
    added = add(x, y, rows[2])
    assert add(x, y, rows[2], x) is x and torch.equal(x, added)


class Copies(TorchDispatchMode):
    """Counts copies of so many numbers at least, but for those of Triton's interpreter: to the same place."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.found = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        moved = function is torch.ops.aten.copy_.default and args[0].data_ptr() != args[1].data_ptr()
        copies = moved or function is torch.ops.aten.clone.default
        self.found += copies and args[0].numel() >= self.size
        return function(*args, **kwargs or {})


def test_graphs_copy_activations_once_a_forward(monkeypatch):
    """A layer's input, and nothing within layers: other kernels write where graphs read, and to the cache."""
    from wan.kernels import fused

    for module in (layers, cuda_graphs):
        monkeypatch.setattr(module, "fused_kernels", lambda _: fused)
    models = tiny_pipeline().model, tiny_pipeline().model
    eager, replayed = (CausalInferencePipeline(model, denoising_step_list=[1000]) for model in models)
    apply_cuda_graphs(replayed.model)
    forwards, latents, counts = [], [], []
    replayed.model.register_forward_hook(lambda *call: forwards.append(1))
    rollout(replayed, 3)  # a first forward without graphs, and a clean one
    forwards.clear()
    for pipeline in (eager, replayed):
        with Copies(15 * 48) as copies:  # tables have 15 x 16 numbers, the text 7 x 48
            latents.append(rollout(pipeline, 3))
        counts.append(copies.found)
    assert torch.equal(*latents) and counts[1] - counts[0] == len(forwards) == 2


@pytest.mark.beside
@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile(capability, tmp_path):
    """For A100 and Hopper, as callers call them: on tensor cores, within registers and memory."""
    command = [sys.executable, "tests/helpers/compiled_kernels.py", str(capability)]
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(kernels) == 25
    for kernel in kernels:
        assert (
            kernel["spilled_bytes"] == 0 and kernel["shared_bytes"] <= {80: 163, 90: 227}[capability] * 1024
        ), kernel
        assert kernel["on_tensor_cores"] == kernel["name"].endswith(("mass_kernel", "column_kernel")), kernel

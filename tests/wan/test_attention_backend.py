"""The kernel of attention on a GPU: who gets FlashAttention-4, by what rule, and what is made of its results.

A module of its signature stands in for it; CUDA tensors are torch's fake ones.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from conftest import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments import run_extraction_each
from experiments.extraction.provenance import provenance
from experiments.running import cli
from wan.config import load_config
from wan.errors import ConfigError
from wan.modules import attention, attention_backend

GPU, LONG, SHORT = torch.device("cuda:0"), attention_backend.FEWEST_KEYS, attention_backend.FEWEST_KEYS - 1


def flash_attn_func(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
    """flash_attn.cute's: tensors [B, L, H, D] -> output in that layout, natural log-sum-exp [B, H, Lq]."""
    assert softmax_scale is None and not causal and return_lse
    assert q.shape[2:] == k.shape[2:] and k.shape == v.shape
    if q.is_cuda:  # a fake one
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    out = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.double())
    return out.to(q.dtype).contiguous(), logits.logsumexp(-1).float()


@pytest.fixture
def machine(monkeypatch):
    """A function that says which GPU is there, and which version of flash-attn-4."""

    def prepare(installed: str | None = "4.0.0b36", capability: tuple[int, int] = (9, 0), wanted: str = ""):
        module = ModuleType("flash_attn.cute")
        module.flash_attn_func = flash_attn_func
        package = ModuleType("flash_attn")
        package.__spec__ = ModuleSpec("flash_attn", None)  # transformers looks at it
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.cute", module if installed else None)
        monkeypatch.setattr(attention_backend, "fa4_version", lambda: installed)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setenv(attention_backend.VARIABLE, wanted)

    remembered = attention_backend.has_fa4, attention_backend._fa4_function  # for the process
    for function in remembered:
        function.cache_clear()
    yield prepare
    for function in remembered:
        function.cache_clear()


def fake_call(keys: int, dtype=torch.bfloat16, head_dim: int = 128, trains: bool = False):
    """Queries, keys and values [B, H, L, D] of a call on a GPU."""
    q = torch.empty(1, 2, 48, head_dim, dtype=dtype, device=GPU, requires_grad=trains)
    k = torch.empty(1, 2, keys, head_dim, dtype=dtype, device=GPU)
    return q, k, k


def called(monkeypatch, keys: int) -> bool:
    """Whether a call of attention goes to FlashAttention-4."""
    calls = []

    def counted(*args, **more):
        calls.append(args)
        return flash_attn_func(*args, **more)

    monkeypatch.setattr(attention_backend, "_fa4_function", lambda: counted)
    with FakeTensorMode():
        q, k, v = fake_call(keys)
        out, lse = attention.attention_with_lse(q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == q.shape[:3]
    return bool(calls)


@pytest.mark.parametrize(
    "found, capability, wanted, expected",
    [
        ("4.0.0b36", (9, 0), "", True),
        ("4.0.0b36", (10, 0), "auto", True),
        ("4.0.0b36", (9, 0), "fa4", True),
        ("4.0.0b36", (9, 0), "cudnn", False),
        ("4.0.0b36", (8, 0), "", False),  # A100
        (None, (9, 0), "", False),
    ],
)
def test_the_rule(machine, monkeypatch, found, capability, wanted, expected):
    machine(found, capability, wanted)
    assert called(monkeypatch, LONG) is expected
    assert not called(monkeypatch, SHORT)  # cuDNN wins there
    name = attention_backend.kernel_name(GPU, torch.bfloat16)
    assert name == (f"fa4 4.0.0b36, cudnn below {LONG} keys" if expected else "cudnn")


def test_calls_it_was_not_made_for_stay_where_they_were(machine):
    machine()
    others = ({"dtype": torch.float32}, {"head_dim": 136}, {"head_dim": 20}, {"trains": True})
    with FakeTensorMode():
        assert attention_backend.takes(*fake_call(LONG))
        assert not any(attention_backend.takes(*fake_call(LONG, **other)) for other in others)
    assert attention_backend.kernel_name(GPU, torch.float32) == "efficient"


def test_its_results_in_our_layout(machine):
    """Heads first, natural logarithm: those of the CPU's call within bfloat16's rounding."""
    machine()
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, length, 3, 16) for length in (10, 35, 35))
    q, k, v = (torch.randn(size, generator=generator).bfloat16().transpose(1, 2) for size in sizes)
    out, lse = attention_backend.fa4_attention(q, k, v)
    expected, expected_lse = attention.attention_with_lse(q.float(), k.float(), v.float())
    assert out.shape == q.shape and out.dtype == q.dtype and lse.dtype == torch.float32
    assert (out.float() - expected).abs().max() <= 2**-8 * v.float().abs().max()
    assert (lse - expected_lse).abs().max() <= 1e-5
    assert out.transpose(1, 2).is_contiguous()  # the next product takes it as it is


@pytest.mark.parametrize("value", ["fa3", "FA4", "cudnn ", "\n", "a" * 3000])
def test_another_value_is_refused_in_one_line(machine, monkeypatch, capsys, tmp_path, value):
    machine(wanted=value)
    monkeypatch.chdir(ROOT)
    flags = ["--config_path", "configs/wan_mini.yaml", "--output_path", str(tmp_path / "layer.pt")]
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_each.run, [*flags, "--device", "cpu"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "WAN_ATTENTION is" in said and "auto, cudnn, fa4; unset it" in said
    assert len(said) < 300 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "found, capability, said",
    [(None, (9, 0), "is not installed; run: pip"), ("4.0", (8, 6), "and cuda:0 has 8")],
)
def test_asked_for_where_it_cannot_be(machine, found, capability, said):
    machine(found, capability, "fa4")
    with pytest.raises(ConfigError, match=said):
        attention_backend.kernel_name(GPU, torch.bfloat16)


def test_an_installation_that_does_not_import(machine, monkeypatch):
    machine()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ConfigError, match=r"flash-attn-4 4.0.0b36 cannot be imported .*WAN_ATTENTION=cudnn"):
        attention_backend.fa4_attention(q, q, q)


def test_caches_of_a_gpu_say_which(machine, monkeypatch):
    machine()
    monkeypatch.chdir(ROOT)
    config = load_config("configs/wan_mini.yaml")
    weights = ROOT / config.checkpoint_path
    of_gpu = provenance(config, weights, torch.bfloat16, GPU)
    assert of_gpu["attention"].startswith("fa4 4.0.0b36")
    assert "attention" not in provenance(config, weights, torch.float32, torch.device("cpu"))
    assert "flash_attn.cute.interface" not in sys.modules

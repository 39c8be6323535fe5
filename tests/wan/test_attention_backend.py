"""The kernel of attention on a GPU: who gets FlashAttention-4, by what rule, and what is made of its results.

A module of its signature stands in for it; CUDA tensors are torch's fake ones.
"""

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ROOT
from helpers.rollouts import rollout, tiny_pipeline
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments import run_extraction_each
from experiments.extraction.provenance import provenance
from experiments.running import cli
from wan import attention
from wan import backends as attention_backend
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.config import load_config
from wan.errors import ConfigError
from wan.kernels import gelu_linear
from wan.policies import make_policy

GPU, LONG = torch.device("cuda:0"), attention_backend.FEWEST_KEYS_OF_FUNCTION
SHORT = attention_backend.FEWEST_KEYS - 1
INSTALLED, QUACK = attention_backend.LAUNCHED, attention_backend.LAUNCHED_QUACK


def flash_attn_func(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
    """flash_attn.cute's: tensors [B, L, H, D] -> output in that layout, natural log-sum-exp [B, H, Lq]."""
    assert softmax_scale is None and not causal and return_lse
    assert q.shape[2:] == k.shape[2:] and k.shape == v.shape
    if q.is_cuda:  # a fake one
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    out = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.double())
    return out.to(q.dtype).contiguous(), logits.logsumexp(-1).float()


def launched(q, k, v, frame_size=0):
    """hopper_attention.attention(): the same, and tails [2, B, H, Fk, Lq] of frames."""
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    if not frame_size or q.is_cuda:
        shape = (2, *lse.shape[:2], k.shape[1] // frame_size, lse.shape[2]) if frame_size else None
        return out, lse, shape and lse.new_empty(shape)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5 / math.log(2)
    begins = range(0, k.shape[1], frame_size)
    maxima = torch.stack([logits[..., begin:].amax(-1) for begin in begins], 2)
    sums = [(logits[..., b:] - maxima[:, :, i, :, None]).exp2().sum(-1) for i, b in enumerate(begins)]
    return out, lse, torch.stack([torch.stack(sums, 2), maxima]).float()


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
        of_hopper = ModuleType("wan.kernels.fa4")
        of_hopper.attention = launched
        monkeypatch.setitem(sys.modules, "wan.kernels.fa4", of_hopper if installed else None)
        monkeypatch.setattr(attention_backend, "fa4_version", lambda: installed)
        monkeypatch.setattr(attention_backend, "installed_version", lambda name: QUACK if installed else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setenv(attention_backend.VARIABLE, wanted)

    names = ("has_fa4", "has_quack", "_is_launched", "_fa4_function", "_hopper")
    remembered = [getattr(attention_backend, name) for name in names]  # for the process
    for function in remembered:
        function.cache_clear()
    yield prepare
    for function in remembered:
        function.cache_clear()


@pytest.fixture
def quack_with(monkeypatch):
    """A function that puts a gemm_act in the place of quack's."""

    def prepare(gemm_act):
        interface, configs = ModuleType("quack.gemm_interface"), ModuleType("quack.gemm_config")
        interface.gemm_act, configs.GemmConfig = gemm_act, SimpleNamespace
        monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
        monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
        monkeypatch.setitem(sys.modules, "quack.gemm_config", configs)
        gelu_linear.by_quack.cache_clear()

    yield prepare
    gelu_linear.by_quack.cache_clear()


def fake_call(keys: int, dtype=torch.bfloat16, head_dim: int = 128, trains: bool = False):
    """Queries, keys and values [B, H, L, D] of a call on a GPU."""
    q = torch.empty(1, 2, 48, head_dim, dtype=dtype, device=GPU, requires_grad=trains)
    k = torch.empty(1, 2, keys, head_dim, dtype=dtype, device=GPU)
    return q, k, k


def called(monkeypatch, keys: int) -> str | None:
    """By which way a call of attention goes to FlashAttention-4: its own function, or launched here."""
    calls = []

    def counted(*args, **more):
        calls.append("function")
        return flash_attn_func(*args, **more)

    def counted_launches(*args):
        calls.append("launched")
        return launched(*args)

    monkeypatch.setattr(attention_backend, "_fa4_function", lambda: counted)
    monkeypatch.setattr(attention_backend, "_hopper", lambda: SimpleNamespace(attention=counted_launches))
    with FakeTensorMode():
        q, k, v = fake_call(keys)
        out, lse = attention.attention_with_lse(q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == q.shape[:3]
    return calls[0] if calls else None


@pytest.mark.parametrize(
    "found, capability, wanted, expected",
    [
        (INSTALLED, (9, 0), "", "launched"),
        (INSTALLED, (9, 0), "fa4", "launched"),
        ("4.0.0b99", (9, 0), "", "function"),  # whose inside may be another one
        (INSTALLED, (10, 0), "auto", "function"),
        (INSTALLED, (9, 0), "cudnn", None),
        (INSTALLED, (8, 0), "", None),  # A100
        (None, (9, 0), "", None),
    ],
)
def test_the_rule(machine, monkeypatch, found, capability, wanted, expected):
    machine(found, capability, wanted)
    assert called(monkeypatch, LONG) == expected
    assert called(monkeypatch, LONG - 1) == (expected if expected == "launched" else None)
    assert called(monkeypatch, SHORT) is None  # cuDNN wins there
    name = attention_backend.kernel_name(GPU, torch.bfloat16)
    below = SHORT + 1 if expected == "launched" else LONG
    ffn = f"; FFN by quack {QUACK}" if expected == "launched" else ""
    assert name == (f"fa4 {found}, cudnn below {below} keys{ffn}" if expected else "cudnn")


@pytest.mark.parametrize(
    "found, quack, rows, columns, dtype, expected",
    [
        (INSTALLED, QUACK, 4680, 8960, torch.bfloat16, "quack"),
        (INSTALLED, QUACK, 4680, 8960, torch.float16, "quack"),
        (INSTALLED, QUACK, 1023, 8960, torch.bfloat16, "cuBLAS"),
        (INSTALLED, QUACK, 4680, 640, torch.bfloat16, "cuBLAS"),  # the miniature's
        (INSTALLED, QUACK, 4680, 8964, torch.bfloat16, "cuBLAS"),  # rows without 16 bytes at their ends
        (INSTALLED, "0.9", 4680, 8960, torch.bfloat16, "cuBLAS"),  # which may be called in another way
        ("4.0.0b99", QUACK, 4680, 8960, torch.bfloat16, "cuBLAS"),
        (None, None, 4680, 8960, torch.bfloat16, "cuBLAS"),
    ],
)
def test_who_applies_gelu_to_the_ffns_first_product(
    machine, quack_with, monkeypatch, found, quack, rows, columns, dtype, expected
):
    machine(found)
    monkeypatch.setattr(attention_backend, "installed_version", lambda name: quack)
    asked = []

    def gemm_act(x, weight, bias, activation, store_preact, tuned, config):
        asked.append((activation, store_preact, tuned, config.tile_m, config.tile_n))
        return None, x @ weight + bias

    quack_with(gemm_act)
    monkeypatch.setattr(torch, "_addmm_activation", lambda bias, x, weight, use_gelu: x @ weight + bias)
    with FakeTensorMode():
        x, weight, bias = (
            torch.empty(shape, dtype=dtype, device=GPU) for shape in ((rows, 1536), (columns, 1536), columns)
        )
        assert gelu_linear.gelu_linear(x, weight, bias).shape == (rows, columns)
    assert asked == ([("gelu_tanh_approx", False, False, 128, 160)] if expected == "quack" else [])


def test_who_says_what_mass_frames_have(machine):
    """The launched kernel; no other, and none of training."""
    machine()
    with FakeTensorMode():
        assert attention_backend.gives_tails(*fake_call(1280))
        tails = attention_backend.fa4_with_tails(*fake_call(1280), 10)[2]
        assert tails.shape == (2, 1, 2, 10, 48)
        assert not attention_backend.gives_tails(*fake_call(SHORT))
        for other in ({"dtype": torch.float32}, {"head_dim": 64}, {"trains": True}):
            assert not attention_backend.gives_tails(*fake_call(1280, **other))
        assert not attention_backend.gives_tails(*(x.cpu() for x in fake_call(1280)))
    machine(capability=(10, 0))
    attention_backend._is_launched.cache_clear()
    with FakeTensorMode():
        assert not attention_backend.gives_tails(*fake_call(LONG))


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "window", "window": 4, "sink": 1},
        {"name": "ema_sink"},
        {"name": "participative", "window": 6, "sink": 1, "budget": 5, "recent": 3},
    ],
    ids=lambda policy: policy["name"],
)
def test_a_captured_mass_follows_from_the_kernels_own_sums(machine, monkeypatch, policy):
    """The same numbers as from q, k and the log-sum-exp, and the same latents; asked for mass alone."""
    machine()
    pipeline = tiny_pipeline(local_attn_size=6)
    pipeline.cache_policy = make_policy(**policy)
    asked = []

    def captured(**request):
        with ATTENTION_WEIGHT_CAPTURE.capture(**request) as calls:
            return rollout(pipeline, 9), calls

    def tails(q, k, v, frames):
        asked.append(frames)
        by_token = (x.transpose(1, 2) for x in (q, k, v))
        return *attention.attention_with_lse(q, k, v), launched(*by_token, k.shape[2] // frames)[2]

    latents, expected = captured(granularity="frame")
    monkeypatch.setattr(attention_backend, "gives_tails", lambda *call: True)
    monkeypatch.setattr(attention_backend, "fa4_with_tails", tails)
    captured(granularity="frame")
    assert not asked  # a tile could hold the beginnings of two of these frames
    monkeypatch.setattr(attention_backend, "TILE", 5)
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="key"):  # the inner one is served
        again, found = captured(granularity="frame")
    assert torch.equal(latents, again)
    by_slot = [call.layout for call in found if call.layout.chosen is None]
    assert asked == [len(layout.slots) for layout in by_slot] and len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.values.keys() == other.values.keys()
        assert torch.equal(one["frame_logits"], other["frame_logits"])
        for name in {"frame_mass", "slot_mass"} & one.values.keys():
            torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=0)
    asked.clear()
    for other in ({"granularity": "frame", "mass": False}, {"granularity": "key"}, {"granularity": "token"}):
        assert torch.equal(captured(**other)[0], latents) and not asked


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


def test_a_kernel_that_cannot_be_built(quack_with):
    """quack refuses what lies outside a folder site-packages, as pip install --target leaves it."""

    def gemm_act(x, weight, **options):
        raise TypeError("epilogue fn depends on <ContextVar>\nwhich has no key")

    quack_with(gemm_act)
    x = torch.zeros(2, 2)
    with pytest.raises(ConfigError, match=r"quack-kernels cannot build .*site-packages.*WAN_ATTENTION=cudnn"):
        gelu_linear.by_quack(None, gelu_linear.TILE)(x, x, x[0])


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

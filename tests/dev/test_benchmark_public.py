"""The public code beside ours: a checkout is imported beside our own wan, and rolled out by the same passes.

The checkout here is a stand-in: the modules' names and calls are the public code's, the sums are ours.
"""

import sys
from types import ModuleType

import pytest
import torch
from conftest import ROOT

import wan
from experiments.dev import benchmark_public, measure_capture, measure_public
from experiments.extraction.devices import threads_for
from wan.config import load_config
from wan.errors import ConfigError
from wan.model import CausalWanModel

ATTENTION = """
FLASH_ATTN_3_AVAILABLE, FLASH_ATTN_2_AVAILABLE = False, True
import flash_attn
def attention(q, k, v): pass
def flash_attention(q, k, v): pass
"""
MODEL = "from .attention import flash_attention\n"
CAUSAL = """
from wan.attention import attention
from wan.model import flash_attention
from test_benchmark_public import StandIn as CausalWanModel
"""


class StandIn(CausalWanModel):
    """Our transformer behind the public one's constructor and call."""

    def __init__(self, *, eps, **sizes):
        assert sizes.keys() == set(measure_public.SIZES)
        super().__init__(eps=eps, **sizes)
        self.calls = []

    def forward(self, x, *, t, context, seq_len, kv_cache, crossattn_cache, current_start):
        batch, _, num_frames, height, width = x.shape
        S = self.config.tokens_per_frame(height, width)
        first = current_start // S
        assert t.shape == (batch, num_frames) and seq_len == kv_cache[0]["k"].shape[1]
        assert len(kv_cache) == len(crossattn_cache) == self.config.num_layers
        assert kv_cache[0]["k"].shape[2:] == (self.config.num_heads, self.config.head_dim)
        assert crossattn_cache[0]["v"].shape[1] == self.config.text_len
        assert not crossattn_cache[0]["is_init"] and kv_cache[0]["global_end_index"] == 0
        if first == 0 and not self.calls:
            self.cache = self.new_kv_cache(batch, seq_len // S, height, width)
        if (first, num_frames) not in self.calls:
            self.cache.advance(range(first, first + num_frames))
        self.calls.append((first, num_frames))
        assert (t == t[0, 0]).all()
        text = self.text_keys_values(context)
        return super().forward(x.transpose(1, 2), t[0, 0], text, self.cache).transpose(1, 2)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "Self-Forcing"
    (folder / "wan/modules").mkdir(parents=True)
    (folder / "wan/__init__.py").write_text("raise ImportError('every model of the release')")
    for name, text in (("attention", ATTENTION), ("model", MODEL), ("causal_model", CAUSAL)):
        (folder / f"wan/modules/{name}.py").write_text(text)
    monkeypatch.setitem(sys.modules, "flash_attn", type(sys)("flash_attn"))  # as flash-attn-4 alone leaves it
    monkeypatch.setitem(sys.modules, "test_benchmark_public", sys.modules[__name__])
    return folder


def test_it_is_imported_beside_our_own_package(checkout):
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "wan"}
    found, attention = measure_public.import_public(checkout)
    after = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "wan"}
    assert found is StandIn and after == before and sys.modules["wan"] is wan
    assert attention == "PyTorch's scaled_dot_product_attention"  # that package has no FlashAttention-2


def test_its_fallback_keeps_the_dtype_of_the_weights():
    attention, model, causal_model = (ModuleType(name) for name in ("attention", "model", "causal_model"))
    vars(attention).update(
        FLASH_ATTN_3_AVAILABLE=False,
        attention=lambda q, k, v, k_lens=None, dtype=torch.bfloat16: q.to(dtype),  # as the public one
    )
    measure_public._choose_attention(attention, model, causal_model)
    q = torch.ones(2)
    assert causal_model.attention(q, q, q).dtype == torch.float32
    assert model.flash_attention(q, q, q, k_lens=None).dtype == torch.float32


@pytest.mark.parametrize(
    "text, said",
    [("import no_such_package", "no_such_package.*requirements.txt"), ("def", "cannot be imported")],
)
def test_what_cannot_be_imported_is_one_line(checkout, text, said):
    (checkout / "wan/model.py").write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        measure_public.import_public(checkout)
    assert "\n" not in str(refused.value) and sys.modules["wan"] is wan


def test_the_same_weights_noise_and_passes(checkout, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config("configs/wan_mini.yaml", {"num_frames": 9, "device": "cpu"})
    rollout, sizes = measure_capture.make_rollout(config, random_weights=False)
    public = measure_public.build_public(
        measure_public.import_public(checkout)[0], rollout.pipeline.model, sizes
    )
    with threads_for(rollout.noise, sizes):
        found = measure_public.roll_out_public(public, rollout, sizes)
    assert [first for first, _ in public.calls] == [0] * 5 + [3] * 5 + [6] * 5
    assert torch.equal(found, rollout.run([]).latents)


def test_other_parameters_are_refused(checkout):
    sizes = measure_public.ModelConfig(
        dim=24, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8, text_dim=8, text_len=4
    )
    with pytest.raises(ConfigError, match="has other parameters: "):
        measure_public.build_public(StandIn, torch.nn.Linear(2, 2), sizes)


def test_frames_that_the_public_code_does_not_attend_to_are_refused(checkout, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(measure_public, "MOST_TOKENS", 9 * 16 - 1)
    with pytest.raises(ConfigError, match="9 frames are 144 tokens"):
        flags = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "9", "--device", "cpu"]
        benchmark_public.run([str(checkout), *flags])


def test_table():
    device = torch.device("cpu")
    rows = {"public code": lambda: torch.ones(3), "ours, plain": lambda: torch.ones(3) * 1.01}
    found = measure_public.measure(rows, device, 2)
    assert found["ours, plain"]["relative_difference"] == pytest.approx(0.01, rel=1e-3)
    assert found["public code"]["times_public"] == 1 and len(found["ours, plain"]["seconds"]) == 2
    assert "| 1.00 % |" in benchmark_public.rows_of(found).splitlines()[-1]
    found[list(found)[-1]]["relative_difference"] = 1.37e-6
    assert "| 1.4e-06 |" in benchmark_public.rows_of(found).splitlines()[-1]


def test_errors_are_against_float32(checkout, monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = {"public code": lambda: torch.full((3,), 1.02), "ours, plain": lambda: torch.full((3,), 1.01)}
    found = measure_public.measure(rows, torch.device("cpu"), 1, exact=lambda: torch.ones(3))
    assert [row["error"] for row in found.values()] == pytest.approx([0.02, 0.01], rel=1e-3)
    assert benchmark_public.rows_of(found).splitlines()[-1].endswith("| 0.98 % | 1.00 % |")

    overrides = {"num_frames": 3, "device": "cpu"}
    config = load_config("configs/wan_mini.yaml", overrides)
    half, _ = measure_capture.make_rollout(
        load_config("configs/wan_mini.yaml", overrides | {"dtype": "bfloat16"}), random_weights=False
    )
    whole, _ = measure_capture.make_rollout(config, random_weights=False)
    latents, right, expected = half.latents([]), measure_public.in_float32(half), whole.latents([])
    assert latents.dtype == torch.bfloat16 and right.dtype == torch.float32
    for one in (latents, expected):  # which has the weights before they were rounded
        assert 0 < (one - right).norm() < 0.1 * right.norm()

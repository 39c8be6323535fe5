"""Timed rollouts: rows in turn, and the public code beside ours."""

import json
import sys
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from experiments.benchmarks import peers, rollouts
from experiments.benchmarks.rollouts import in_turn
from wan.cache import of_window
from wan.model import CausalWanModel
from wan.sites import SITES

MINI = ["--config_path", "configs/wan_mini.yaml"]
ON_CPU = [*MINI, "--device", "cpu"]


def test_rows_take_turns_and_ratios_are_of_one_round():
    clock = iter([1.0, 2.0, 9.0, 3.0, 4.0, 6.0])  # the second round runs to the front
    order: list[str] = []

    def row(name):
        def seconds():
            order.append(name)
            return next(clock)

        return seconds

    kept: list[dict] = []
    found = in_turn({"a": row("a"), "b": row("b")}, 3, keep=lambda rows: kept.append(dict(rows)))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found["b"]["seconds"] == [2.0, 9.0, 6.0] and found["b"]["median_seconds"] == 6.0
    assert found["b"]["ratio"] == 2.0 and found["a"]["ratio_interval"] == [1.0, 1.0]
    assert [len(rows["a"]["seconds"]) for rows in kept] == [1, 2, 3] or len(kept) == 3


@pytest.mark.slow
def test_rows_of_the_miniature(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "rows.json"
    groups = ["mass", "interventions"]
    flags = ["--num_frames", "6", "--repeats", "1", "--output_path", str(output)]
    rollouts.run([*ON_CPU, *flags, "--what", *groups])
    found = json.loads(output.read_text())["rows"]
    assert found["mass"]["same_bits"] and found["mass"]["sha256"] != found["plain"]["sha256"]
    assert not found["interventions: knockout of frame 0, all heads"]["same_bits"]
    assert found["plain"]["last_block_ms"] > 0
    rollouts.run([*ON_CPU, *flags, "--num_frames", "3", "--what", "gradients"])
    sites = json.loads(output.read_text())["rows"]["gradients at every site"]
    found = [sites[name] for name in SITES]
    assert all(one["is_finite"] and one["is_shaped"] and not one["is_zero"] for one in found)


# --- The public code beside ours: a stand-in with its names and calls, whose sums are ours
ATTENTION = """
FLASH_ATTN_3_AVAILABLE, FLASH_ATTN_2_AVAILABLE = False, True
import flash_attn
def attention(q, k, v): pass
def flash_attention(q, k, v): pass
"""
MODEL = "from .attention import flash_attention\n"
CAUSAL = """
from wan.modules.attention import attention
from wan.modules.model import flash_attention
from test_rollouts import StandIn as CausalWanModel
"""


class StandIn(CausalWanModel):
    """Our transformer behind the public one's constructor and call."""

    def __init__(self, *, eps, **sizes):
        assert sizes.keys() == set(peers.SIZES)
        super().__init__(eps=eps, **sizes)

    def forward(self, x, *, t, context, seq_len, kv_cache, crossattn_cache, current_start):
        batch, _, num_frames, height, width = x.shape
        S = self.config.tokens_per_frame(height, width)
        first = current_start // S
        assert t.shape == (batch, num_frames) and seq_len == kv_cache[0]["k"].shape[1]
        assert kv_cache[0]["k"].shape[2:] == (self.config.num_heads, self.config.head_dim)
        assert crossattn_cache[0]["v"].shape[1] == self.config.text_len
        if not crossattn_cache[0]["is_init"]:  # a rollout begins
            crossattn_cache[0]["is_init"].fill_(True)
            whole = of_window(-1, 0)
            self.cache = self.new_kv_cache(batch, seq_len // S, height, width, whole)
            self.firsts = []
        if first not in self.firsts:
            self.cache.advance(range(first, first + num_frames))
        self.firsts.append(first)
        text = self.text_keys_values(context)
        return super().forward(x.transpose(1, 2), t[0, 0], text, self.cache).transpose(1, 2)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "Self-Forcing"
    (folder / "wan/modules").mkdir(parents=True)
    (folder / "wan/__init__.py").write_text("raise ImportError('every model of the release')")
    for name, text in (("attention", ATTENTION), ("model", MODEL), ("causal_model", CAUSAL)):
        (folder / f"wan/modules/{name}.py").write_text(text)
    monkeypatch.setitem(
        sys.modules, "flash_attn", ModuleType("flash_attn")
    )  # as flash-attn-4 alone leaves it
    monkeypatch.setitem(sys.modules, "test_rollouts", sys.modules[__name__])
    monkeypatch.chdir(ROOT)
    return folder


def test_its_fallback_keeps_the_dtype_of_the_weights():
    attention, model, causal_model = (ModuleType(name) for name in ("attention", "model", "causal_model"))
    vars(attention).update(
        FLASH_ATTN_3_AVAILABLE=False,
        attention=lambda q, k, v, k_lens=None, dtype=torch.bfloat16: q.to(dtype),  # as the public one
    )
    peers.choose_attention(attention, model, causal_model)
    q = torch.ones(2)
    assert causal_model.attention(q, q, q).dtype == torch.float32
    assert model.flash_attention(q, q, q, k_lens=None).dtype == torch.float32


@pytest.mark.slow
def test_the_same_weights_noise_and_passes(checkout, tmp_path):
    output = tmp_path / "peers.json"
    flags = ["--num_frames", "6", "--repeats", "1", "--output_path", str(output)]
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "wan"}
    peers.run(["--checkout", str(checkout), "--what", "rollouts", "pipelines", *ON_CPU, *flags])
    assert before.items() <= sys.modules.items()  # our own package is there again
    report = json.loads(output.read_text())
    found = report["rows"]
    shared = ["public code", "public code, our kernel", "ours, plain", "ours, logits", "ours, mass"]
    assert shared == [name for name, row in found.items() if "difference" in row]
    assert found["public code"]["public_attention"] == "PyTorch's scaled_dot_product_attention"
    assert all(found[name]["difference"] == found[name]["error"] == 0 for name in shared)
    assert found["FlashDreams 0.1.0"]["absent"]
    theirs = [row for name, row in found.items() if name.startswith("WanPipeline")]
    assert len(theirs) == 5 and all(row["same_bits"] for row in theirs)
    maps = [row for name, row in found.items() if name.startswith("attention-map-diffusers")]
    assert len(maps) == 3 and all("seconds" in row or "attention_map" in row["absent"] for row in maps)

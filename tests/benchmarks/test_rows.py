"""Timed rows take turns; the public code beside ours."""

import json
import sys
from dataclasses import fields, replace
from types import ModuleType

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
from conftest import ROOT

from experiments.benchmarks import peers, rows
from experiments.benchmarks.rows import Row, in_turn
from experiments.benchmarks.video_models import LAYERS, VIDEO_MODELS, made
from wan.cache import of_window
from wan.config import ModelConfig
from wan.diffusers_capture import capture_diffusers
from wan.model import CausalWanModel


@pytest.fixture
def flags(tiny) -> list[str]:
    """Flags of a small run: two blocks of a tiny model, each row once."""
    return ["--config_path", tiny.path, "--num_frames", "6", "--repeats", "1"]


def test_rows_take_turns_and_ratios_are_of_one_round():
    clock = iter(
        [0.5, 0.5, 1.0, 2.0, 9.0, 3.0, 4.0, 6.0]
    )  # a call each first; the second round goes backwards
    order: list[str] = []

    def row(name):
        def seconds():
            order.append(name)
            return next(clock)

        return Row(name, "a clock", seconds, facts=lambda: {"calls": len(order)})

    table = in_turn([row("a"), row("b")], repeats=3)
    assert "".join(order) == "ab" + "abbaab"
    assert table["b"]["seconds"] == [2.0, 9.0, 6.0] and table["b"]["median_seconds"] == 6.0
    assert table["b"]["ratio"] == 2.0 and table["a"]["ratio_interval"] == [1.0, 1.0]
    assert table["b"]["ratio_interval"] == [1.5, 3.0] and table["b"]["beside"] == "a"
    assert [table[name]["calls"] for name in "ab"] == [1, 2] and table["a"]["measured"] == "a clock"
    assert table["a"]["python_seconds"] > 0  # how fast the host was


def test_an_interval_of_many_rounds_is_of_their_median():
    seconds = {"a": 1.0, "b": 1.0}

    def slower():
        seconds["b"] += 1.0
        return seconds["b"]

    table = in_turn([Row("a", "", lambda: 1.0), Row("b", "", slower)], repeats=15)
    assert table["b"]["ratio"] == 10.0  # of 3, 4, ... 17, after one call that is not counted
    assert table["b"]["ratio_interval"] == [6.0, 14.0]  # 4 of 15 outside on each side: 3.5 % of coin flips


def test_a_package_that_is_missing_makes_its_row_absent_alone():
    def missing():
        raise ModuleNotFoundError("No module named 'attention_map_diffusers'")

    rows_of = [Row("theirs", "", missing, optional=True), Row("ours", "", lambda: 2.0)]
    table = in_turn(rows_of, repeats=1)
    assert table["theirs"]["absent"] == "No module named 'attention_map_diffusers'"
    assert table["ours"]["ratio"] == 1.0
    with pytest.raises(ModuleNotFoundError):
        in_turn([Row("ours", "", missing)], repeats=1)


@pytest.mark.slow
def test_rows_of_a_model(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "rows.json"
    groups = ["plain", "logits", "mass", "edits", "sites", "gradients", "video", "pipeline"]
    rows.run([*flags, "--output_path", str(output), "--what", *groups, "--policies", "longlive"])
    report = json.loads(output.read_text())
    table = report["rows"]
    assert {"command", "date", "device", "git"} <= report["environment"].keys()
    assert all(row["measured"] and row["seconds"] for row in table.values())
    digests = {name: row["sha256"] for name, row in table.items()}
    # Latents stay under sites and gradients; captured numbers and edits make other bytes
    same = ("sites", "gradients", "gradients: to the host", "gradients: recomputed", "video")
    assert {digests[name] for name in same} == {digests["plain"]}
    assert digests["video: mass"] == digests["mass"]
    assert (
        len({digests[name] for name in ("plain", "logits", "mass", "edits: frame 0 moved by 1, all heads")})
        == 4
    )
    theirs = {digest for name, digest in digests.items() if name.startswith("WanPipeline")}
    assert len(theirs) == 1  # plain and captured


# --- The public code beside ours: a stand-in with its names and calls, whose sums are ours
ATTENTION = """
FLASH_ATTN_3_AVAILABLE, FLASH_ATTN_2_AVAILABLE = False, True
import flash_attn
def attention(q, k, v, dtype): return dtype
def flash_attention(q, k, v): pass
"""
MODEL = "from .attention import flash_attention\n"
CAUSAL = """
import torch
from wan.modules import model
from wan.modules.attention import attention
from wan.modules.model import flash_attention
from test_rows import StandIn

class CausalWanModel(StandIn):
    def forward(self, x, **given):
        assert attention(1, 2, 3) == model.flash_attention(1, 2, 3) == torch.float32  # the fallback
        return super().forward(x, **given)
"""


class StandIn(CausalWanModel):
    """Our transformer behind the public one's constructor and call."""

    def __init__(self, **sizes):
        assert sizes.keys() == {field.name for field in fields(ModelConfig)}
        super().__init__(**sizes)

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
    monkeypatch.setitem(sys.modules, "test_rows", sys.modules[__name__])
    monkeypatch.chdir(ROOT)
    return folder


@pytest.mark.slow
def test_the_public_code_gets_the_same_weights_noise_and_passes(flags, checkout, tmp_path):
    output = tmp_path / "peers.json"
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "wan"}
    flags = [*flags, "--checkout", str(checkout), "--output_path", str(output)]
    peers.run([*flags, "--what", "rollouts", "decoder", "maps"])
    assert before.items() <= sys.modules.items()  # our own package is there again
    table = json.loads(output.read_text())["rows"]
    shared = ["public code", "plain", "logits", "mass"]
    assert all(table[name]["seconds"] and table[name]["error"] == 0 for name in shared)
    assert table["diffusers, float32"]["psnr"] > 90 > table["diffusers, bfloat16"]["psnr"] > 40
    blocks = table["ours, bfloat16, block by block to the host"]
    assert blocks["psnr"] == table["ours, bfloat16"]["psnr"] > 40
    maps = [row for name, row in table.items() if name.startswith("attention-map-diffusers")]
    assert len(maps) == 2 and all("seconds" in row or "attention_map" in row["absent"] for row in maps)
    assert table["WanPipeline"]["seconds"]


@pytest.mark.parametrize("title", VIDEO_MODELS)
def test_video_models_run_with_tiny_sizes(title, monkeypatch):
    """Their real sizes need a GPU."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    sizes = VIDEO_MODELS[title]
    tiny = replace(sizes, heads=(2, 128), latents=(*sizes.latents[:2], 4, 8), sizes=dict(sizes.sizes))
    for name in {"ffn_dim"} & sizes.sizes.keys():
        tiny.sizes[name] = 32
    if "LTX" in title:
        tiny.sizes["cross_attention_dim"] = 256
    if "LTX-2" in title:
        tiny.sizes["audio_num_attention_heads"], tiny.sizes["audio_cross_attention_dim"] = 2, 128
    model, arguments = made(tiny, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        plain = model(**arguments)[0]
        with capture_diffusers(model, granularity="frame") as calls:
            assert torch.equal(model(**arguments)[0], plain)
    assert len(calls) == LAYERS and {call.frames for call in calls} <= {"verified", "told"}

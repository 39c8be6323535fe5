"""Cache policies, of heads too, as public releases run them: 30 runs (tests/golden/README.md)."""

import json
from contextlib import nullcontext
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from helpers.rollouts import golden_run, golden_runs, release_rollout

from wan import model as layers
from wan.attention import attention, attention_by_heads
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.keys import CHOSEN, EMPTY, KeyLayout
from wan.policies import POLICIES, make_policy
from wan.sites import current_pass

ATOL = 2e-5  # the smallest wrong policy moves the latents by 5e-3
LAYER = 2  # whose slots were recorded


def of(name: str, window: int, sink: int = 0, released: bool | str = True, **fields) -> dict:
    return {"name": name, "window": window, "sink": sink, "released": released, **fields}


def chosen(window: int, sink: int, budget: int, recent: int, **fields) -> dict:
    return of("participative", window, sink, budget=budget, recent=recent, **fields)


CASES = {
    "sf_w12_s3": of("window", 12, 3, "self_forcing"),
    "ds_w12_s6": of("deep_sink", 12, 6),
    "inf_w6_s0": of("relative", 6),
    "inf_w6_s1": of("relative", 6, 1, "infinity_rope"),
    "inf_w6_s1_flush6": of("relative", 6, 1),
    "inf_w6_s1_cut6": of("relative", 6, 1),
    "llinf_w12_s3": of("relative", 12, 3, "longlive_infinity"),
    "ll_w12_s6": of("window", 12, 6, "longlive"),
    "ll_w12_s3_switch18": of("window", 12, 3, "longlive"),
    "ll_w12_s3_switch18_globalsink": of("window", 12, 3, "longlive", global_sink=True),
    "rf_w9_s3_a0.9": of("ema_sink", 9, 3, alpha=0.9),
    "mr_w12_s3": of("two_memories", 12, 3),
    "rs_w9": of("rolling_sink", 9),
    "mf_w9_s3_bank2_ri2": of("memory_bank", 9, 3, bank=2, interval=2),
    "dspc_w12_s4_n9_r3": chosen(12, 4, 9, 3),
    "dspc_w9_s3_n7_r3": chosen(9, 3, 7, 3),
}
LONG = ("inf_w6_s1_cut6", "mf_w9_s3_bank2_ri2", "dspc_w9_s3_n7_r3")  # others repeat themselves before
SWITCHES = {"flush6": "flush", "cut6": "cut", "switch18": "recache"}  # by the name of a run


class Recorder:
    """Keeps what calls handed to attention: the layouts of all layers, the first value of LAYER's slots."""

    def __init__(self, monkeypatch):
        self.layouts: list[list[KeyLayout]] = []  # per call and layer
        self.firsts: list[list[bytes]] = []  # per call the first value vector of every slot
        monkeypatch.setattr(layers, "attention", self.attention)

    def attention(self, q, k, v, site=None, mask=None, layout=None):
        if site is not None and site.kind == "self":
            if site.layer == 0:
                self.layouts.append([])
            self.layouts[-1].append(layout)
            if site.layer == LAYER:
                first = range(0, v.shape[1], layout.tokens_per_slot)
                self.firsts.append([v[0, i].numpy().tobytes() for i in first])
        return attention(q, k, v, site, mask, layout)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_policy(case, monkeypatch):
    recorder, (golden, expected) = Recorder(monkeypatch), golden_run("policies", case)
    frames = 36 if case in LONG else 24
    how = next((how for named, how in SWITCHES.items() if named in case), None)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[LAYER], blocks=[frames // 3 - 1], steps=[0]) as calls:
        latents = release_rollout(make_policy(**CASES[case]), frames, [18] if how else [], how)
    torch.testing.assert_close(latents[0, 2::3], expected[: frames // 3], atol=ATOL, rtol=0)
    assert len(recorder.layouts) == (golden["call_start"] < frames).sum()
    writers: dict[bytes, int] = {}  # values are first seen in the call that wrote them
    for call, of_layers in enumerate(recorder.layouts):
        layout, slots = of_layers[LAYER], golden["slot_frame"][call]
        frames, present = np.array(layout.frames), slots != -9
        assert frames.tolist() == slots[present].tolist(), call
        wrote = np.array([writers.setdefault(value, call) for value in recorder.firsts[call]])
        assert (golden["slot_writer"][call][present] == wrote)[frames >= 0].all(), call
        stands = golden["slot_pos"][call][present] == layout.positions
        assert stands[frames != EMPTY].all(), call
        asks = golden["query_pos"][call]
        assert list(layout.query_positions) == asks[asks != -99].tolist(), call
    if case in LONG:
        tokens = calls[0]["attn_weights"][0].double()
        logits = tokens.unflatten(1, (-1, 24)).unflatten(3, (-1, 24)).mean((2, 4)).float()
        expected = torch.from_numpy(golden["frame_logits"])[..., : logits.shape[-1]]
        torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)
    if "tok_frame_l0" in golden:
        check_choices(case, golden, recorder)


def check_choices(case, golden, recorder):
    """Chosen tokens and banked frames of every layer, at the first pass of every block."""
    for block, call in enumerate(recorder.layouts[::5]):
        for layer, layout in enumerate(call):
            S = layout.tokens_per_slot
            frames, positions = np.repeat(layout.frames, S), np.repeat(layout.positions, S)
            indices = np.tile(np.arange(S), len(layout.slots))
            if layout.chosen is not None:
                slots = layout.chosen.slots
                at = slice(slots.start * S, slots.stop * S)
                assert set(layout.frames[slots.start : slots.stop]) == {CHOSEN}
                frames[at], indices[at], positions[at] = (
                    getattr(layout.chosen, name)[0] for name in ("frames", "indices", "positions")
                )
            count = len(frames)
            assert (golden[f"tok_frame_l{layer}"][block, :count] == frames).all(), (block, layer)
            assert (golden[f"tok_index_l{layer}"][block, :count] == indices).all(), (block, layer)
            assert (golden[f"tok_frame_l{layer}"][block, count:] < 0).all()
            if case.startswith("dspc"):
                assert (golden[f"tok_pos_l{layer}"][block, :count] == positions).all(), (block, layer)


# --- Head-wise policies: 14 runs of three repositories
HEAD_CASES = json.loads((GOLDEN / "policies/heads.json").read_text())["cases"]
TRIATTENTION = {"kv_budget_tokens": "budget_tokens", "local_attn_size": "window", "sink_size": "sink"}
TRIATTENTION["kv_compression_mode"] = ""


OF_CLEAN_RULE = {field.name for field in fields(POLICIES["triattention"])}


def policy_of_heads(case: str, released: bool | None = None, **changes):
    """The policy of a run, as released unless the release was changed for it, or by the clean rule."""
    run = HEAD_CASES[case]
    sizes = run["model_kwargs"]
    if released is None:
        released = "changed" not in run
    if case.startswith("df"):
        settings = run["dummy_forcing"] | {"row_seed": run["row_seed"], "num_recomputed": 12}
        return make_policy("dummy_forcing", released=released, **settings)
    if case.startswith("fkv"):
        settings = run["forcingkv"] | {"sink": sizes["sink_size"]}
        has_chunks = settings.pop("dynamic_temporal_enabled")
        ratio = settings.pop("sim_retention_ratio")  # the same said twice
        chunks = settings["dynamic_context_length"] * settings["num_frame_patch"]
        assert chunks == round(3 * settings["num_frame_patch"] * ratio) * has_chunks
        if sizes["local_attn_size"] > 0:
            settings["num_recomputed"] = 1
        if released:
            settings["global_sink"] = run.get("args", {}).get("global_sink", False)
        settings["heads"] = golden_run("heads", case)[0]["head_static"]
        return make_policy("forcing_kv", released=released, **settings)
    names = {name: TRIATTENTION.get(name, name.removeprefix("kv_")) for name in sizes}
    settings = {names[name]: value for name, value in sizes.items() if names[name]} | changes
    if not released:
        settings = {name: value for name, value in settings.items() if name in OF_CLEAN_RULE}
    return make_policy("triattention", released=released, **settings, statistics=golden_runs("heads"))


class HeadRecorder:
    """Notes the tokens that each head sees in the first pass of every block."""

    def __init__(self, monkeypatch):
        self.blocks: list[dict[tuple[int, int], list[int]]] = []
        monkeypatch.setattr(layers, "attention_by_heads", self.attend)

    def attend(self, groups, site, batch):
        if site.layer == 0 and current_pass().step == 0:
            self.blocks.append({})
        for group in groups if current_pass().step == 0 else ():
            cache, kind = group.parts.func.__self__, group.parts.args[0]
            seen = cache.seen(kind)[0].expand(-1, len(kind.heads)).sort(0).values.T
            for head, row in zip(kind.heads, seen.tolist(), strict=True):
                self.blocks[-1][site.layer, head] = row
        return attention_by_heads(groups, site, batch)


@pytest.mark.parametrize("case", HEAD_CASES)
def test_policy_of_heads(case, monkeypatch):
    recorder, (golden, expected) = HeadRecorder(monkeypatch), golden_run("heads", case)
    frames, switches = HEAD_CASES[case]["frames"], HEAD_CASES[case].get("switch", ())
    request = {"granularity": "frame", "blocks": [frames // 3 - 1], "steps": [0]}
    is_captured = "frame_logits" in golden
    with ATTENTION_WEIGHT_CAPTURE.capture(**request) if is_captured else nullcontext([]) as calls:
        latents = release_rollout(policy_of_heads(case), frames, switches)
    torch.testing.assert_close(latents[0, -3:], expected, atol=ATOL, rtol=0)
    keys = golden["keys"].astype(int).cumsum(-1)  # [block, layer, head, key]
    assert len(recorder.blocks) == len(keys)
    for block, of_heads in enumerate(recorder.blocks):
        assert len(of_heads) == 60
        for (layer, head), seen in of_heads.items():
            expected = keys[block, layer, head]
            assert seen == expected[expected < 30000].tolist(), (block, layer, head)
    for call in calls:
        expected = torch.from_numpy(golden["frame_logits"][call["layer"]])
        found = torch.full_like(expected, torch.nan)
        found[..., call["key_frames"]] = call["frame_logits"][0]
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=0, equal_nan=True)


KINDS = ["df_a2_l2_n30_switch12", "fkv_a1_s1_c2_r1_d1_switch18_all", "tri_lph_s1_b154_e3_switch18"]
short = partial(release_rollout, frames=18, steps=(1000, 500), size=(4, 6))


def small(case, released=True):
    """The policy for 6 tokens a frame."""
    return policy_of_heads(case, released, budget_tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS)
def test_a_second_video_and_one_of_a_batch_are_as_if_alone(case):
    """But for the released TriAttention without a switch: it compresses beyond its last frame alone."""
    policy = small(case)
    assert torch.equal(short(policy, switches=[15]), short(policy, switches=[15]))
    clean = small(case, released=False)
    both, alone = (short(clean, rows=rows, switches=[15]) for rows in ((0, 1), (1,)))
    torch.testing.assert_close(both[1:], alone, atol=ATOL, rtol=0)
    if case.startswith("tri"):
        policy = small(case)
        first, second, window = map(short, (policy, policy, make_policy("window", window=12, sink=1)))
        torch.testing.assert_close(second, window, atol=ATOL, rtol=0)
        assert not torch.equal(first, second) and torch.equal(short(clean), short(clean))

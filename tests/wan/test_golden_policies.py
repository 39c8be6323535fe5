"""Cache policies as public releases run them: 16 runs of eight repositories (tests/golden/README.md)."""

import numpy as np
import pytest
import torch
from helpers.rollouts import golden_run, release_rollout

from wan import model as layers
from wan.attention import attention
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.keys import CHOSEN, EMPTY, KeyLayout
from wan.policies import make_policy

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
SWITCHES = {
    "inf_w6_s1_flush6": "flush",
    "inf_w6_s1_cut6": "cut",
    "ll_w12_s3_switch18": "recache",
    "ll_w12_s3_switch18_globalsink": "recache",
}


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


@pytest.mark.parametrize("case", CASES)
def test_policy(case, monkeypatch):
    recorder, (golden, expected) = Recorder(monkeypatch), golden_run("policies", case)
    frames = 36 if case in LONG else 24
    switches, how = ([18], SWITCHES[case]) if case in SWITCHES else ([], "keep")
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[LAYER], blocks=[frames // 3 - 1], steps=[0]) as calls:
        latents = release_rollout(make_policy(**CASES[case]), frames, switches, how)
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

"""Cache policies as their public releases run them:
25 runs of eight repositories (tests/golden/README.md).
"""

import json
from functools import cache

import numpy as np
import pytest
import torch
from conftest import GOLDEN, golden_model

from wan import model as layers
from wan.attention import ATTENTION_WEIGHT_CAPTURE, attention
from wan.keys import CHOSEN, EMPTY, KeyLayout
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch, make_policy

ATOL = 2e-5  # the smallest wrong policy moves the latents by 5e-3
LAYER = 2  # whose slots were recorded
FOLDER = GOLDEN / "policies"
PARTICIPATIVE = {"name": "participative", "released": True}
CASES = {
    "sf_w9_s0": {"name": "window", "window": 9, "sink": 0, "released": True},
    "sf_w9_s3": {"name": "window", "window": 9, "sink": 3},
    "sf_w12_s3": {"name": "window", "window": 12, "sink": 3, "released": "self_forcing"},
    "ds_w12_s6": {"name": "deep_sink", "window": 12, "sink": 6, "released": True},
    "ds_w21_s10": {"name": "deep_sink", "window": 21, "sink": 10, "released": "deep_forcing"},
    "inf_w6_s0": {"name": "relative", "window": 6, "sink": 0, "released": True},
    "inf_w6_s1": {"name": "relative", "window": 6, "sink": 1, "released": "infinity_rope"},
    "inf_w6_s1_flush6": {"name": "relative", "window": 6, "sink": 1, "released": True},
    "inf_w6_s1_cut6": {"name": "relative", "window": 6, "sink": 1, "released": True},
    "llinf_w12_s3": {"name": "relative", "window": 12, "sink": 3, "released": "longlive_infinity"},
    "ll_w12_s3": {"name": "window", "window": 12, "sink": 3, "released": "longlive"},
    "ll_w12_s6": {"name": "window", "window": 12, "sink": 6, "released": "longlive"},
    "ll_w12_s3_switch18": {"name": "window", "window": 12, "sink": 3, "released": "longlive"},
    "ll_w12_s3_switch18_globalsink": {
        "name": "window",
        "window": 12,
        "sink": 3,
        "released": "longlive",
        "global_sink": True,
    },
    "rf_w9_s3_a0.999": {"name": "ema_sink", "window": 9, "sink": 3, "alpha": 0.999, "released": True},
    "rf_w9_s3_a0.9": {"name": "ema_sink", "window": 9, "sink": 3, "alpha": 0.9, "released": True},
    "mr_w12_s3": {"name": "two_memories", "window": 12, "sink": 3, "released": True},
    "rs_w21": {"name": "rolling_sink", "window": 21, "released": True},
    "rs_w9": {"name": "rolling_sink", "window": 9, "released": True},
    "mf_w12_s3_bank3_ri3": {"name": "memory_bank", "window": 12, "sink": 3, "bank": 3, "interval": 3},
    "mf_w9_s3_bank2_ri2": {
        "name": "memory_bank",
        "window": 9,
        "sink": 3,
        "bank": 2,
        "interval": 2,
        "released": True,
    },
    "dspc_w12_s4_n9_r3": PARTICIPATIVE | {"window": 12, "sink": 4, "budget": 9, "recent": 3},
    "dspc_w12_s4_n9_r3_first_w": PARTICIPATIVE
    | {"window": 12, "sink": 4, "budget": 9, "recent": 3, "first_turn": 12},
    "dspc_w21_s10_n16_r4": PARTICIPATIVE | {"window": 21, "sink": 10, "budget": 16, "recent": 4},
    "dspc_w9_s3_n7_r3": PARTICIPATIVE | {"window": 9, "sink": 3, "budget": 7, "recent": 3},
}
SWITCHES = {
    "inf_w6_s1_flush6": "flush",
    "inf_w6_s1_cut6": "cut",
    "ll_w12_s3_switch18": "recache",
    "ll_w12_s3_switch18_globalsink": "recache",
}


@cache
def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


@cache
def model():
    """It keeps nothing of a rollout."""
    return golden_model()


class Recorder:
    """What each call handed to attention: of LAYER the layout and the first value of every slot,
    of all the choices.
    """

    def __init__(self, monkeypatch):
        self.layouts: list[KeyLayout] = []
        self.firsts: list[list[bytes]] = []  # per call the first value vector of every slot
        self.chosen: list[list] = []  # per call and layer
        monkeypatch.setattr(layers, "attention", self.attention)

    def attention(self, q, k, v, site=None, mask=None, layout=None):
        if site is not None and site.kind == "self":
            if site.layer == 0:
                self.chosen.append([])
            self.chosen[-1].append(layout)
            if site.layer == LAYER:
                self.layouts.append(layout)
                S = layout.tokens_per_slot
                self.firsts.append([v[0, i].numpy().tobytes() for i in range(0, v.shape[1], S)])
        return attention(q, k, v, site, mask, layout)


def run(case: str) -> tuple[torch.Tensor, list]:
    inputs = {name: torch.from_numpy(x).float() for name, x in arrays("inputs").items()}
    noise, renoise, prompts = inputs["noise"], inputs["renoise"], inputs["prompt_embeds"]
    pipeline = CausalInferencePipeline(model(), cache_policy=make_policy(**CASES[case]))
    how = SWITCHES.get(case)
    schedule = [PromptSwitch(18, how=how, prompt_embeds=prompts[1:2])] if how else []
    with ATTENTION_WEIGHT_CAPTURE.capture(
        layers=[LAYER], blocks=[11], steps=[0], granularity="token"
    ) as calls:
        _, latents = pipeline.inference(
            noise, prompt_embeds=prompts[:1], renoise=renoise[:, None], prompt_schedule=schedule
        )
    return latents, calls


@pytest.mark.parametrize("case", CASES)
def test_policy(case, monkeypatch):
    recorder = Recorder(monkeypatch)
    latents, calls = run(case)
    golden = {key.partition("/")[2]: x for key, x in arrays("policies").items() if key.startswith(f"{case}/")}
    torch.testing.assert_close(latents, torch.from_numpy(golden["latents"]), atol=ATOL, rtol=0)
    assert len(recorder.layouts) == len(golden["call_start"])
    writers: dict[bytes, int] = {}  # values are first seen in the call that wrote them
    for call, layout in enumerate(recorder.layouts):
        slots = golden["slot_frame"][call]
        present = slots != -9
        assert list(layout.frames) == slots[present].tolist(), call
        wrote = [writers.setdefault(value, call) for value in recorder.firsts[call]]
        real = np.array(layout.frames) >= 0
        assert (golden["slot_writer"][call][present][real] == np.array(wrote)[real]).all(), call
        positions = golden["slot_pos"][call][present]
        known = [slot.frame != EMPTY for slot in layout.slots]
        assert [p for p, k in zip(layout.positions, known, strict=True) if k] == positions[known].tolist(), (
            call
        )
        asks = golden["query_pos"][call]
        assert list(layout.query_positions) == asks[asks != -99].tolist(), call
    logits = calls[0]["attn_weights"][0].double().unflatten(1, (-1, 24)).unflatten(3, (-1, 24)).mean((2, 4))
    expected = torch.from_numpy(golden["frame_logits"])[..., : logits.shape[-1]]
    torch.testing.assert_close(logits.float(), expected, atol=ATOL, rtol=0)
    check_choices(case, golden, recorder)


def check_choices(case, golden, recorder):
    """Chosen tokens and banked frames of every layer, at the first pass of every block."""
    if "tok_frame_l0" not in golden:
        return
    for block in range(12):
        for layer, layout in enumerate(recorder.chosen[5 * block]):
            S = layout.tokens_per_slot
            frames = np.repeat(layout.frames, S)
            positions = np.repeat(layout.positions, S)
            indices = np.tile(np.arange(S), len(layout.slots))
            if layout.chosen is not None:
                at = slice(layout.chosen.slots.start * S, layout.chosen.slots.stop * S)
                assert set(layout.frames[layout.chosen.slots.start : layout.chosen.slots.stop]) == {CHOSEN}
                frames[at], indices[at], positions[at] = (
                    getattr(layout.chosen, name)[0] for name in ("frames", "indices", "positions")
                )
            count = len(frames)
            assert (golden[f"tok_frame_l{layer}"][block, :count] == frames).all(), (block, layer)
            assert (golden[f"tok_index_l{layer}"][block, :count] == indices).all(), (block, layer)
            assert (golden[f"tok_frame_l{layer}"][block, count:] < 0).all()
            if case.startswith("dspc"):
                assert (golden[f"tok_pos_l{layer}"][block, :count] == positions).all(), (block, layer)


def test_every_golden_case_is_here():
    assert set(CASES) == set(json.loads((FOLDER / "policies.json").read_text())["cases"])

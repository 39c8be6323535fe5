"""Cache policies as public releases run them: 25 runs of eight repositories (tests/golden/README.md)."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from conftest import GOLDEN, golden_model

from wan import model as layers
from wan.attention import attention
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.keys import CHOSEN, EMPTY, KeyLayout
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch, make_policy

ATOL = 2e-5  # the smallest wrong policy moves the latents by 5e-3
LAYER = 2  # whose slots were recorded
FOLDER = GOLDEN / "policies"


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
SIZES_ALONE = {  # what differs in sizes from these
    "sf_w9_s0": of("window", 9),
    "sf_w9_s3": of("window", 9, 3, released=False),
    "ds_w21_s10": of("deep_sink", 21, 10, "deep_forcing"),
    "ll_w12_s3": of("window", 12, 3, "longlive"),
    "rf_w9_s3_a0.999": of("ema_sink", 9, 3, alpha=0.999),
    "rs_w21": of("rolling_sink", 21),
    "mf_w12_s3_bank3_ri3": of("memory_bank", 12, 3, released=False, bank=3, interval=3),
    "dspc_w12_s4_n9_r3_first_w": chosen(12, 4, 9, 3, first_turn=12),
    "dspc_w21_s10_n16_r4": chosen(21, 10, 16, 4),
}
CASES |= SIZES_ALONE
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
def latents_of_cases() -> dict[str, np.ndarray]:
    """Latents [1, 12, 16, 8, 12] of every case, each block's last frame, stored byte by byte of float32."""
    stored = arrays("policies")
    values = np.ascontiguousarray(stored["latents_bytes"].T).view(np.float32)
    return dict(zip(stored["cases"].tolist(), values.reshape(-1, 1, 12, 16, 8, 12), strict=True))


@cache
def model():
    """It keeps nothing of a rollout."""
    return golden_model()


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


def run(case: str) -> tuple[torch.Tensor, list]:
    inputs = {name: torch.from_numpy(x).float() for name, x in arrays("inputs").items()}
    noise, renoise, prompts = inputs["noise"], inputs["renoise"], inputs["prompt_embeds"]
    pipeline = CausalInferencePipeline(model(), cache_policy=make_policy(**CASES[case]))
    how = SWITCHES.get(case)
    schedule = [PromptSwitch(18, how=how, prompt_embeds=prompts[1:2])] if how else []
    request = {"layers": [LAYER], "blocks": [11], "steps": [0], "granularity": "token"}
    with ATTENTION_WEIGHT_CAPTURE.capture(**request) as calls:
        options = {"renoise": renoise[:, None], "prompt_schedule": schedule}
        _, latents = pipeline.inference(noise, prompt_embeds=prompts[:1], **options)
    return latents, calls


def test_every_golden_case_is_here():
    assert set(CASES) == set(json.loads((FOLDER / "policies.json").read_text())["cases"])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.beside] * (case in SIZES_ALONE)) for case in CASES]
)
def test_policy(case, monkeypatch):
    recorder = Recorder(monkeypatch)
    latents, calls = run(case)
    golden = {key.partition("/")[2]: x for key, x in arrays("policies").items() if key.startswith(f"{case}/")}
    torch.testing.assert_close(
        latents[:, 2::3], torch.from_numpy(latents_of_cases()[case]), atol=ATOL, rtol=0
    )
    assert len(recorder.layouts) == len(golden["call_start"])
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
    logits = calls[0]["attn_weights"][0].double().unflatten(1, (-1, 24)).unflatten(3, (-1, 24)).mean((2, 4))
    expected = torch.from_numpy(golden["frame_logits"])[..., : logits.shape[-1]]
    torch.testing.assert_close(logits.float(), expected, atol=ATOL, rtol=0)
    if "tok_frame_l0" in golden:
        check_choices(case, golden, recorder)


def check_choices(case, golden, recorder):
    """Chosen tokens and banked frames of every layer, at the first pass of every block."""
    for block in range(12):
        for layer, layout in enumerate(recorder.layouts[5 * block]):
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

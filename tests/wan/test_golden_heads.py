"""Head-wise policies as their releases run them: 20 runs of three repositories (tests/golden/README.md)."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from conftest import GOLDEN, golden_model

from wan import model as layers
from wan.attention import ATTENTION_WEIGHT_CAPTURE, attention_by_heads
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch, make_policy

import os
FOLDER = __import__("pathlib").Path("/work/shared/golden_heads")
CASES = json.loads((FOLDER / "policies.json").read_text())["cases"]
S, ATOL = 24, 2e-5


@cache
def arrays():
    with np.load(FOLDER / "policies.npz") as file:
        return {key: file[key] for key in file.files}


@cache
def inputs():
    with np.load(GOLDEN / "policies/inputs.npz") as file:
        return {key: torch.from_numpy(file[key]).float() for key in file.files}


@cache
def model():
    return golden_model()


def policy_of(name):
    case, fields = CASES[name], {}
    released = not name.endswith("_fixed")
    kwargs = case["model_kwargs"]
    if name.startswith("df"):
        fields = case["dummy_forcing"] | {"row_seed": case["row_seed"], "num_recomputed": 12}
        return make_policy("dummy_forcing", released=released, **fields)
    if name.startswith("fkv"):
        fields = case["forcingkv"] | {"sink": kwargs["sink_size"], "heads": arrays()[f"{name}/head_static"]}
        fields["global_sink"] = case.get("args", {}).get("global_sink", False)
        if kwargs["local_attn_size"] > 0:
            fields["num_recomputed"] = 1
        return make_policy("forcing_kv", released=released, **fields)
    fields = {k[3:]: v for k, v in kwargs.items() if k.startswith("kv_") and k != "kv_compression_mode"}
    fields |= {"window": kwargs["local_attn_size"], "sink": kwargs["sink_size"]}
    return make_policy("triattention", released=released, statistics=str(FOLDER / "tri_stats_A.npz"), **fields)


class Recorder:
    """Notes which tokens each head sees in every call, by their values and by the layouts."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(layers, "attention_by_heads", self.attend)

    def attend(self, groups, site, batch):
        if site.layer == 0:
            self.calls.append({})
        for group in groups:
            values = group.v[0].numpy()
            for rows, layout in group.parts():
                for row in rows:
                    self.calls[-1][site.layer, group.numbers[row]] = (layout, values[:, row].copy())
        return attention_by_heads(groups, site, batch)


def run(name, pipeline=None, **capture):
    case, given = CASES[name], inputs()
    frames = case["frames"]
    pipeline = pipeline or CausalInferencePipeline(model(), cache_policy=policy_of(name))
    switch = [PromptSwitch(f, how="recache", prompt_embeds=given["prompt_embeds"][1:2]) for f in case.get("switch", [])]
    noise = given["noise"][:, :frames]
    return pipeline.inference(noise, prompt_embeds=given["prompt_embeds"][:1], renoise=given["renoise"][:, None, :frames] if given["renoise"].ndim == 5 else given["renoise"][:, :, :frames], prompt_schedule=switch)[1]


@pytest.mark.parametrize("name", CASES)
def test_run(name, monkeypatch):
    recorder = Recorder(monkeypatch)
    golden = {key.partition("/")[2]: x for key, x in arrays().items() if key.startswith(f"{name}/")}
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", blocks=[CASES[name]["frames"] // 3 - 1], steps=[0]) as calls:
        latents = run(name)
    diff = (latents - torch.from_numpy(golden["latents"])).abs().amax((0, 2, 3, 4))
    firsts = [i for i, t in enumerate(golden["call_t"]) if t == 1000]
    for block, call in enumerate(firsts):
        for (layer, head), (layout, values) in recorder.calls[call].items():
            from wan.keys import key_frames, key_tokens
            seen = sorted(zip(key_frames(layout, 1)[0][0].tolist(), key_tokens(layout, 1)[0].tolist()))
            which = "tok_key" if "tok_key_frame" in golden else "tok"
            f, i = golden[f"{which}_frame"][block, layer, head], golden[f"{which}_index"][block, layer, head]
            expected = sorted((int(a), int(b)) for a, b in zip(f, i) if a != -9)
            assert seen == expected, (block, layer, head)
    assert diff.max() < ATOL, diff
    logits = torch.stack([call["frame_logits"][0] for call in calls]) if len({tuple(c["key_frames"]) for c in calls}) == 1 else None
    for call in calls:
        expected = torch.from_numpy(golden["frame_logits"][call["layer"]])
        found = torch.full_like(expected, torch.nan)
        found[..., call["key_frames"]] = call["frame_logits"][0]
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=0, equal_nan=True)

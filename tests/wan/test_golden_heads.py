"""Head-wise policies as their releases run them: 20 runs of three repositories (tests/golden/README.md)."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from conftest import GOLDEN, golden_model

from wan import model as layers
from wan.attention import attention_by_heads
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.interventions import Knockout, intervene
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch, make_policy
from wan.sites import now

FOLDER = GOLDEN / "policies"
CASES = json.loads((FOLDER / "heads.json").read_text())["cases"]
SIZES_ALONE = {  # what differs in sizes from other runs
    *("df_a1_l1_n30", "df_a2_l1_n30", "df_a2_l2_n40_switch18", "fkv_a1_s1_c1_r1_d1", "fkv_a1_s2_c2_r3_nodyn"),
    *("tri_ph_s1_b144_e3", "tri_lph_s3_b192_e3"),
}
ATOL = 2e-5  # the smallest wrong policy moves the latents by 0.038
TRIATTENTION = {
    "kv_budget_tokens": "budget_tokens",
    "local_attn_size": "window",
    "sink_size": "sink",
    "kv_compression_mode": "",
}


@cache
def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def of_case(case: str) -> dict[str, np.ndarray]:
    return {key.partition("/")[2]: x for key, x in arrays("heads").items() if key.startswith(f"{case}/")}


@cache
def last_blocks() -> dict[str, torch.Tensor]:
    """Latents [3, 16, 8, 12] of every run's last block."""
    stored = arrays("heads")
    values = np.ascontiguousarray(stored["latents_bytes"].T).view(np.float32).reshape(-1, 3, 16, 8, 12)
    return dict(zip(stored["cases"].tolist(), map(torch.from_numpy, values), strict=True))


@cache
def model():
    """It keeps nothing of a rollout."""
    return golden_model()


def policy_of(case: str):
    run = CASES[case]
    fields, sizes = {"released": "changed" not in run}, run["model_kwargs"]
    if case.startswith("df"):
        given = run["dummy_forcing"] | {"row_seed": run["row_seed"], "num_recomputed": 12}
        return make_policy("dummy_forcing", **fields, **given)
    if case.startswith("fkv"):
        recomputed = None if sizes["local_attn_size"] < 0 else 1
        given = run["forcingkv"] | {"sink": sizes["sink_size"], "num_recomputed": recomputed}
        is_kept = run.get("args", {}).get("global_sink", False)
        heads = of_case(case)["head_static"]
        return make_policy("forcing_kv", **fields, **given, global_sink=is_kept, heads=heads)
    named = {TRIATTENTION.get(name, name.removeprefix("kv_")): value for name, value in sizes.items()}
    named.pop("")
    return make_policy("triattention", **fields, **named, statistics=arrays("heads"))


def pipeline_of(policy) -> CausalInferencePipeline:
    """Two steps a block, and 24 frames, where a test is of no golden run."""
    return CausalInferencePipeline(model(), cache_policy=policy, denoising_step_list=[1000, 500])


def roll_out(case: str, pipeline=None, rows=(0,)):
    """The run of a case; rows name a batch: 0 its video, 1 one with other noise and another prompt."""
    given = {name: torch.from_numpy(x).float() for name, x in arrays("inputs").items()}
    frames = 24 if pipeline else CASES[case]["frames"]
    noise = torch.cat([given["noise"], given["noise"].flip(1)])[list(rows), :frames]
    renoise = torch.stack([given["renoise"], given["renoise"].flip(1)], 1)[:, list(rows)]
    prompts = given["prompt_embeds"]
    pipeline = pipeline or CausalInferencePipeline(model(), cache_policy=policy_of(case))
    switches = CASES[case].get("switch", [])
    schedule = [PromptSwitch(f, how="recache", prompt_embeds=prompts[[1] * len(rows)]) for f in switches]
    renoise = renoise[: len(pipeline.timesteps) - 1, :, :frames]
    options = {"renoise": renoise, "prompt_schedule": schedule}
    return pipeline.inference(noise, prompt_embeds=prompts[[2 * row for row in rows]], **options)[1]


class Recorder:
    """Notes the tokens that each head sees in the first pass of every block."""

    def __init__(self, monkeypatch):
        self.blocks: list[dict[tuple[int, int], list[int]]] = []
        monkeypatch.setattr(layers, "attention_by_heads", self.attend)

    def attend(self, groups, site, batch):
        if site.layer == 0 and now().step == 0:
            self.blocks.append({})
        for group in groups if now().step == 0 else ():
            cache, kind = group.parts.func.__self__, group.parts.args[0]
            seen = cache.seen(kind)[0].expand(-1, len(kind.heads)).sort(0).values.T
            for head, row in zip(kind.heads, seen.tolist(), strict=True):
                self.blocks[-1][site.layer, head] = row
        return attention_by_heads(groups, site, batch)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.beside] * (case in SIZES_ALONE)) for case in CASES]
)
def test_run(case, monkeypatch):
    recorder, golden, last = Recorder(monkeypatch), of_case(case), CASES[case]["frames"] // 3 - 1
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", blocks=[last], steps=[0]) as calls:
        latents = roll_out(case)
    torch.testing.assert_close(latents[0, -3:], last_blocks()[case], atol=ATOL, rtol=0)
    keys = golden["keys"].astype(int).cumsum(-1)  # [block, layer, head, key]
    assert len(recorder.blocks) == len(keys)
    for block, of_heads in enumerate(recorder.blocks):
        assert len(of_heads) == 60
        for (layer, head), seen in of_heads.items():
            expected = keys[block, layer, head]
            assert seen == expected[expected < 30000].tolist(), (block, layer, head)
    for call in calls if "frame_logits" in golden else ():
        expected = torch.from_numpy(golden["frame_logits"][call["layer"]])
        found = torch.full_like(expected, torch.nan)
        found[..., call["key_frames"]] = call["frame_logits"][0]
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=0, equal_nan=True)


MANY = ["df_a2_l2_n40_switch18", "fkv_a1_s1_c2_r1_d1_switch18_all", "tri_lph_s1_b154_e3_switch18"]


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY)
def test_a_second_video_and_one_of_a_batch_are_as_if_alone(case):
    pipeline = pipeline_of(policy_of(case))
    assert torch.equal(roll_out(case, pipeline), roll_out(case, pipeline))
    clean = pipeline_of(replace(policy_of(case), released=False))
    both, alone = (roll_out(case, clean, rows=rows) for rows in ((0, 1), (1,)))
    torch.testing.assert_close(both[1:], alone, atol=ATOL, rtol=0)


def test_an_edit_reaches_heads_by_their_numbers_and_frames():
    case, pipeline = MANY[1], pipeline_of(policy_of(MANY[1]))
    plain = roll_out(case, pipeline)
    with intervene(Knockout(frames=("past",), heads=(5,), layers=(2,), passes="all")):
        assert not torch.equal(roll_out(case, pipeline), plain)


@pytest.mark.slow
def test_the_released_triattention_compresses_no_next_video_and_the_clean_rule_does():
    """Beyond the last compressed frame alone; LongLive's window is left."""
    case = "tri_lph_s3_b192_e3"
    pipeline = pipeline_of(policy_of(case))
    first, second = roll_out(case, pipeline), roll_out(case, pipeline)
    window = roll_out(case, pipeline_of(make_policy("window", window=12, sink=3)))
    torch.testing.assert_close(second[:, :21], window[:, :21], atol=ATOL, rtol=0)
    assert not torch.equal(first, second)
    pipeline = pipeline_of(replace(policy_of(case), released=False))
    assert torch.equal(roll_out(case, pipeline), roll_out(case, pipeline))

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
from wan.interventions import Bias, Knockout, intervene
from wan.keys import key_frames, key_tokens
from wan.pipeline import CausalInferencePipeline
from wan.policies import PromptSwitch, make_policy
from wan.sites import now

FOLDER = GOLDEN / "policies"
CASES = json.loads((FOLDER / "heads.json").read_text())["cases"]
S, ATOL = 24, 2e-5  # the smallest wrong policy moves the latents by 0.038
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


def roll_out(case: str, policy=None, pipeline=None, rows=(0,)):
    """The run of a case; rows name a batch: 0 its video, 1 one with other noise and another prompt."""
    given = {name: torch.from_numpy(x).float() for name, x in arrays("inputs").items()}
    noise = torch.cat([given["noise"], given["noise"].flip(1)])[list(rows), : CASES[case]["frames"]]
    renoise = torch.stack([given["renoise"], given["renoise"].flip(1)], 1)[:, list(rows)]
    prompts = given["prompt_embeds"]
    pipeline = pipeline or CausalInferencePipeline(model(), cache_policy=policy or policy_of(case))
    switches = CASES[case].get("switch", [])
    schedule = [PromptSwitch(f, how="recache", prompt_embeds=prompts[[1] * len(rows)]) for f in switches]
    options = {"renoise": renoise[:, :, : noise.shape[1]], "prompt_schedule": schedule}
    return pipeline.inference(noise, prompt_embeds=prompts[[2 * row for row in rows]], **options)[1]


class Recorder:
    """Notes the tokens that each head sees in the first pass of every block."""

    def __init__(self, monkeypatch):
        self.blocks: list[dict[tuple[int, int], list[int]]] = []
        monkeypatch.setattr(layers, "attention_by_heads", self.attend)

    def attend(self, groups, site, batch):
        self.policy = groups[0].parts.func.__self__.policy
        if site.layer == 0 and now().step == 0:
            self.blocks.append({})
        for group in groups if now().step == 0 else ():
            for rows, layout in group.parts():
                seen = key_frames(layout, 1)[0][0] * S + key_tokens(layout, 1)[0]
                assert group.k.shape[1] == len(seen)
                for row in rows:
                    self.blocks[-1][site.layer, group.numbers[row]] = sorted(seen.tolist())
        return attention_by_heads(groups, site, batch)


@pytest.mark.parametrize("case", CASES)
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
    check_choices(recorder.policy, golden)


def check_choices(policy, golden):
    """Classes, rows, chunks and compressions, and where they were kept the numbers behind them."""
    if "head_class" in golden:
        assert (policy.head_class[0].numpy() == golden["head_class"]).all()
        assert (torch.stack(policy.sampled_rows).numpy() == golden["sampled_rows"]).all()
        mass = torch.stack(policy.head_mass)[:, 0].numpy()
        np.testing.assert_allclose(mass, golden["head_mass"], atol=ATOL)
    if "dynamic_keep" in golden:
        assert (torch.cat(policy.dynamic_keep).numpy() == golden["dynamic_keep"]).all()
    if "dynamic_score" in golden:
        np.testing.assert_allclose(torch.cat(policy.dynamic_score), golden["dynamic_score"], atol=ATOL)
    if "compress_end_frame" in golden:
        pairs = zip(golden["compress_end_frame"], golden["compress_seq_tokens"], strict=True)
        assert policy.compressions == [(int(frame), int(tokens)) for frame, tokens in pairs]


def test_scores_are_those_of_the_release(monkeypatch):
    found, golden = [], of_case("tri_lph_s3_b192_e3")["score_0"]
    from wan.policies import TriAttention

    original = TriAttention._scores

    def scores(self, *args):
        made = original(self, *args)
        found.append(self.raw_scores[:, 0])
        return made

    monkeypatch.setattr(TriAttention, "_scores", scores)
    roll_out("tri_lph_s3_b192_e3")
    raw = (found[0] - found[0].mean(-1, keepdim=True)) / found[0].std(-1, unbiased=False, keepdim=True)
    stored = torch.from_numpy(golden)
    stored = (stored - stored.mean(-1, keepdim=True)) / stored.std(-1, unbiased=False, keepdim=True)
    torch.testing.assert_close(raw, stored, atol=5e-5, rtol=0)


MANY = ["df_a2_l2_n40_switch18", "fkv_a1_s1_c2_r1_d1_switch18_all", "tri_lph_s1_b154_e3_switch18"]


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY)
def test_a_second_video_and_one_of_a_batch_are_as_if_alone(case):
    pipeline = CausalInferencePipeline(model(), cache_policy=policy_of(case))
    assert torch.equal(roll_out(case, pipeline=pipeline), roll_out(case, pipeline=pipeline))
    clean = replace(policy_of(case), released=False)
    both, alone = (roll_out(case, clean, rows=rows) for rows in ((0, 1), (1,)))
    torch.testing.assert_close(both[1:], alone, atol=ATOL, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY)
def test_an_edit_reaches_heads_by_their_numbers_and_frames(case):
    plain = roll_out(case)
    for edit, changes in (
        (Bias(frames=("first",), b=0.0, passes="all"), False),
        (Knockout(frames=("past",), heads=(5,), layers=(2,), passes="all"), True),
    ):
        with intervene(edit):
            assert torch.equal(roll_out(case), plain) != changes


def test_the_released_triattention_compresses_no_next_video_and_the_clean_rule_does():
    """Beyond the last compressed frame alone; LongLive's window is left."""
    case = "tri_lph_s3_b192_e3"
    window = make_policy("window", window=12, sink=3)
    pipeline = CausalInferencePipeline(model(), cache_policy=policy_of(case))
    first, second = roll_out(case, pipeline=pipeline), roll_out(case, pipeline=pipeline)
    torch.testing.assert_close(second[:, :27], roll_out(case, window)[:, :27], atol=ATOL, rtol=0)
    assert not torch.equal(first, second)
    pipeline = CausalInferencePipeline(model(), cache_policy=replace(policy_of(case), released=False))
    assert torch.equal(roll_out(case, pipeline=pipeline), roll_out(case, pipeline=pipeline))

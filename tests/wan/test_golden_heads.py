"""Head-wise policies as their releases run them: 14 runs of three repositories (tests/golden/README.md)."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import GOLDEN
from helpers.rollouts import golden_run, golden_runs, release_rollout

from wan import model as layers
from wan.attention import attention_by_heads
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.policies import make_policy
from wan.sites import now

CASES = json.loads((GOLDEN / "policies/heads.json").read_text())["cases"]
ATOL = 2e-5  # the smallest wrong policy moves the latents by 0.038
TRIATTENTION = {"kv_budget_tokens": "budget_tokens", "local_attn_size": "window", "sink_size": "sink"}
TRIATTENTION["kv_compression_mode"] = ""


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
        heads = golden_run("heads", case)[0]["head_static"]
        return make_policy("forcing_kv", **fields, **given, global_sink=is_kept, heads=heads)
    named = {TRIATTENTION.get(name, name.removeprefix("kv_")): value for name, value in sizes.items()}
    named.pop("")
    return make_policy("triattention", **fields, **named, statistics=golden_runs("heads"))


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


@pytest.mark.parametrize("case", CASES)
def test_run(case, monkeypatch):
    recorder, (golden, expected) = Recorder(monkeypatch), golden_run("heads", case)
    frames, switches = CASES[case]["frames"], CASES[case].get("switch", ())
    request = {"granularity": "frame", "blocks": [frames // 3 - 1], "steps": [0]}
    is_captured = "frame_logits" in golden
    with ATTENTION_WEIGHT_CAPTURE.capture(**request) if is_captured else nullcontext([]) as calls:
        latents = release_rollout(policy_of(case), frames, switches)
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


def small(case):
    """The policy for 6 tokens a frame."""
    policy = policy_of(case)
    return replace(policy, budget_tokens=40) if case.startswith("tri") else policy


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS)
def test_a_second_video_and_one_of_a_batch_are_as_if_alone(case):
    """But for the released TriAttention without a switch: it compresses beyond its last frame alone."""
    policy = small(case)
    assert torch.equal(short(policy, switches=[15]), short(policy, switches=[15]))
    clean = replace(policy, released=False)
    both, alone = (short(clean, rows=rows, switches=[15]) for rows in ((0, 1), (1,)))
    torch.testing.assert_close(both[1:], alone, atol=ATOL, rtol=0)
    if case.startswith("tri"):
        policy = small(case)
        first, second, window = map(short, (policy, policy, make_policy("window", window=12, sink=1)))
        torch.testing.assert_close(second, window, atol=ATOL, rtol=0)
        assert not torch.equal(first, second) and torch.equal(short(clean), short(clean))

"""Cache policies: every slot against what it was fed, every call against the rules in float64, settings."""

import re
from dataclasses import fields
from functools import cache
from typing import get_args

import pytest
import torch
from conftest import ROOT, golden_model
from helpers.policies import POLICIES as ROWS
from helpers.policies import settings_of_any_size
from helpers.policy_oracle import NAMES, Frame, LayerOracle
from helpers.rollouts import TWO_STEPS, golden_inputs, rollout, tiny_pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from wan import model as layers
from wan.cache import CacheSizes, How, KVCache
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.files import read_yaml
from wan.keys import key_frames, key_tokens
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline
from wan.policies import POLICIES, PromptSwitch, make_policy, read_policy

each_policy = pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])


def test_every_policy_has_a_row_and_a_file():
    files = {read_yaml(path)["name"] for path in FILES}
    by_heads = {name for name, policy in POLICIES.items() if policy.by_heads}  # test_golden_heads.py
    assert {row["name"] for row in ROWS} | by_heads == files | {"full"} == set(POLICIES)


def test_a_rollout_longer_than_announced_is_refused():
    cache = KVCache(CacheSizes([HEADS] * LAYERS, 4, S, 3), make_policy("full"))
    cache.advance(range(3))
    with pytest.raises(ValueError, match="frame 5 is beyond the frames"):
        cache.advance(range(3, 6))


# -- every call of a rollout against the rules in float64 (helpers/policy_oracle.py) -------------------------

HEADS, LAYERS, WIDTH, S = 2, 2, 2, 2
BLOCKS, SWITCH = 6, 4  # the prompt changes before block 4
KNOWN = [row for row in ROWS if row["name"] in NAMES]


@cache
def small_model() -> CausalWanModel:
    torch.manual_seed(5)
    sizes = {"dim": 24, "ffn_dim": 16, "num_heads": HEADS, "num_layers": LAYERS, "freq_dim": 8}
    model = CausalWanModel(**sizes, text_dim=6, text_len=3, in_dim=2, out_dim=2, patch_size=(1, 1, 1))
    for name, value in model.named_parameters():
        if not name.endswith(("norm_q.weight", "norm_k.weight")):
            torch.nn.init.normal_(value, std=0.4)
    return model.eval().requires_grad_(False)


def hows_of(row) -> list[str]:
    """The ways to change the prompt that a policy has."""
    return [how for how in get_args(How) if make_policy(**row).switch_from(how) is not None]


class Watch:
    """Compares what every self-attention call hands on with the oracle of its layer."""

    def __init__(self, row, block_size, how_at):
        self.oracles = [LayerOracle(row, block_size, WIDTH) for _ in range(LAYERS)]
        self.how_at, self.block, self.calls = how_at, [-1] * LAYERS, 0

    def __enter__(self):
        self.before = layers.SelfAttention.forward, layers.Block.forward
        before_attention, before_block = self.before

        def block_forward(module, x, time, rope, text, *rest):
            self.text = text[0].double()
            return before_block(module, x, time, rope, text, *rest)

        def forward(module, x, rope, cache, *rest):
            out = before_attention(module, x, rope, cache, *rest)
            self.compare(module, x, out, cache)
            return out

        layers.SelfAttention.forward, layers.Block.forward = forward, block_forward
        return self

    def __exit__(self, *error):
        layers.SelfAttention.forward, layers.Block.forward = self.before

    def compare(self, module, x, out, cache):
        at, layer = ATTENTION_WEIGHT_CAPTURE.now, module.site.layer
        oracle, is_first = self.oracles[layer], self.block[layer] != at.block
        block = range(at.query_frames[0], at.query_frames[-1] + 1)
        if is_first and at.step >= 0:
            self.block[layer] = at.block
            oracle.begin(block, self.text, self.how_at.get(at.block, "keep"))
        q, k = (norm(to(x)).double() for norm, to in ((module.norm_q, module.q), (module.norm_k, module.k)))
        own = zip(block, k.split(S, 1), module.values(x).double().split(S, 1), strict=True)
        tokens = torch.arange(S).expand(len(x), S)
        frames = [
            Frame(raw, v, torch.full_like(tokens, f), tokens, torch.full_like(tokens, f)) for f, raw, v in own
        ]
        expected = oracle.recache(q, frames) if at.step < 0 else oracle.attend(q, frames, is_first)
        expected = expected.flatten(2) @ module.o.weight.double().T + module.o.bias.double()
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
        layout = cache.layouts[layer]
        told = torch.stack([*key_frames(layout, len(x)), key_tokens(layout, len(x))], -1).tolist()
        assert list(map(sorted, told)) == list(map(sorted, oracle.seen().tolist()))
        assert len(layout.slots) <= cache.capacity
        if at.step >= 0:  # a block sees itself, last
            own = layout.slots[layout.own.start :]
            assert [slot.frame for slot in own] == list(block) and len(own) == len(layout.own)
            assert list(layout.query_positions) == [slot.position for slot in own]
        self.calls += 1


def roll_out(row, size=2, first=False, batch=2, blocks=BLOCKS, given_blocks=0, switch=None):
    sizes = [1 if first else size, *[size] * (blocks - 1)]
    given_frames, generator = sum(sizes[:given_blocks]), torch.Generator().manual_seed(7)
    noise = torch.randn(batch, sum(sizes), 2, 1, 2, generator=generator)
    renoise = torch.randn(1, *noise[:, given_frames:].shape, generator=generator)
    embeds = torch.randn(2, batch, 3, 6, generator=generator)
    pipeline = CausalInferencePipeline(
        small_model(), size, first, **TWO_STEPS, cache_policy=make_policy(**row)
    )
    schedule = [PromptSwitch(sum(sizes[:at]), how=how, prompt_embeds=embeds[1]) for at, how in switch or ()]
    beginning = {"initial_latent": noise[:, :given_frames]} if given_frames else {}
    return pipeline.inference(
        noise[:, given_frames:],
        prompt_embeds=embeds[0],
        renoise=renoise,
        prompt_schedule=schedule,
        **beginning,
    )[1]


@pytest.mark.parametrize(
    "row, how", [pytest.param(row, how, id=f"{row['name']}-{how}") for row in KNOWN for how in hows_of(row)]
)
def test_every_call_after_a_switch_sees_what_its_policy_says(row, how):
    with Watch(row, 2, {SWITCH: how}) as watch:
        roll_out(row, switch=[(SWITCH, how)])
    assert watch.calls >= 3 * BLOCKS * LAYERS


@given(
    data=st.data(),
    size=st.integers(1, 3),
    first=st.booleans(),
    batch=st.integers(1, 2),
    blocks=st.integers(4, 6),
    given_blocks=st.integers(0, 2),
)
@settings(max_examples=8, deadline=None)
def test_every_call_sees_what_its_policy_says(data, size, first, batch, blocks, given_blocks):
    row = data.draw(settings_of_any_size(size, KNOWN))
    at = st.tuples(st.integers(1, blocks - 1), st.sampled_from(hows_of(row)))
    switch = data.draw(st.lists(at, max_size=1))
    case = (row, size, first, batch, blocks, given_blocks, switch)
    with Watch(row, size, dict(switch)):
        latents = roll_out(*case)
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[1], steps=[0, 2]) as calls:
        assert torch.equal(latents, roll_out(*case))  # a second video equals the first, looked at or not
    for call in calls:  # all mass is on frames or slots
        mass = call.values.get("slot_mass", call.values["frame_mass"])
        torch.testing.assert_close(mass.sum(-1), torch.ones(mass.shape[:-1]), atol=1e-5, rtol=0)


# -- whole rollouts of the golden model ----------------------------------------------------------------------


@cache
def model() -> CausalWanModel:
    """It keeps nothing of a rollout."""
    return golden_model()


def pipeline_of(row, **options) -> CausalInferencePipeline:
    return CausalInferencePipeline(model(), cache_policy=make_policy(**row), **TWO_STEPS, **options)


@pytest.mark.parametrize("how", ["cut", "recache"])
def test_a_switch_that_a_policy_cannot_make_is_refused(how):
    inputs = golden_inputs(12)
    switch = PromptSwitch(9, how=how, prompt_embeds=inputs["prompt_embeds"])
    cannot = [row for row in ROWS if how not in hows_of(row)]
    assert 0 < len(cannot) < len(ROWS)
    for row in cannot:
        with pytest.raises(ConfigError, match=f"cache_policy {row['name']}: cannot"):
            pipeline_of(row).inference(**inputs, prompt_schedule=[switch])


def test_a_probe_that_would_change_the_rollout_is_refused():
    inputs = golden_inputs(9) | {"probe": lambda block, denoise: denoise()}
    released = {"name": "window", "window": 9, "sink": 6, "released": "longlive"}
    for row in (released, {"name": "memory_bank", "window": 6, "sink": 1}):
        with pytest.raises(ConfigError, match=f"{row['name']}: changes its cache"):
            pipeline_of(row).inference(**inputs)
    del inputs["renoise"]
    with pytest.raises(ConfigError, match="a probe needs renoise: fresh noise would change"):
        pipeline_of({"name": "full"}).inference(**inputs)


def test_a_stride_keeps_every_other_frame_of_the_past():
    row = {"name": "window", "window": 7, "sink": 1, "stride": 2}
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[0], steps=[0]) as calls:
        pipeline_of(row).inference(**golden_inputs(15))
    assert calls[-1]["key_frames"] == [0, 6, 8, 10, 12, 13, 14]


# -- settings, files and documents ---------------------------------------------------------------------------

FILES = sorted((ROOT / "configs/policies").glob("*.yaml"))
HOSTILE = [None, True, -1, 2.5, float("nan"), "x", "é" * 500, "x\0", [3], {"a": 1}, 10**30, -(10**30)]
NOT_A_MISTAKE = [("participative", "reuse_limit", None), ("window", "global_sink", True)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_a_policy_and_names_its_source(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    policy = read_policy(read_yaml(path))
    assert path.read_text().startswith("# ") and read_policy(policy.describe()) == policy
    assert RunConfig(cache_policy=read_yaml(path)).policy == policy


@each_policy
def test_any_wrong_value_of_any_field_is_one_line(row):
    """What is not refused is a policy that can be described; a field that nothing has is refused too."""
    name = row["name"]
    for field in [*(f.name for f in fields(POLICIES[name])), "nope", "name", 3]:
        for value in HOSTILE:
            if (name, field, value) in NOT_A_MISTAKE or (field == "released" and value is True):
                continue
            with pytest.raises(ConfigError) as refused:
                read_policy({**row, field: value})
            assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "row, sizes, message",
    [
        ({"name": "magic"}, [], "'magic' is not one of full, window"),
        ({"name": "window", "windw": 3}, [], "has no field 'windw'; it has"),
        ({"name": "window", "window": "9"}, [], "window '9' is not int in 1"),
        ({"name": "window", "window": 5, "sink": 3}, [1, 3], "must be at least 6"),
        ({"name": "full", "released": True}, [], "leave it out"),
        ({"name": "deep_sink", "released": True}, [1, 3], "has blocks of 3 frames"),
        ({"name": "participative", "recent": 2, "budget": 14}, [3], "recent 2 must be at least a block, 3"),
        ({"name": "rolling_sink", "sink": 1}, [], r"sink 1 is not int in 0\.\.0"),
        ({"name": "rolling_sink", "window": 5}, [3], "window 5 .* must be at least 6"),
    ],
)
def test_what_does_not_fit_is_refused(row, sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(**row).check(sizes)


LONG_SINK = {"name": "relative", "window": 12, "sink": 6, "released": "longlive_infinity"}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"prompt_schedule": [{"frame": 4, "prompt": "a"}]}, "does not begin a block .* begin at 3, 6"),
        ({"prompt_schedule": [{"frame": 6, "prompt": "a"}] * 2}, "frame 6 .* has two prompts"),
        ({"prompt_schedule": [{"frame": 6, "text": "a"}]}, "has a frame, a prompt and perhaps how, not"),
        ({"prompt_schedule": [{"frame": 6, "prompt": "a\0b"}]}, "prompt_schedule: prompt has a NUL"),
        (
            {"cache_policy": LONG_SINK, "prompt_schedule": [{"frame": 3, "prompt": "a", "how": "cut"}]},
            "cannot cut at frame 3; it can .*cut from frame 6 on",
        ),
        ({"recompute_context": -5}, "recompute_context -5 is not"),
        ({"recompute_context": 6, "local_attn_size": 6}, "recompute_context 6 .* take a window of 9"),
        ({"recompute_context": 6, "cache_policy": {"name": "rolling_sink"}}, "take window or relative"),
        ({"local_attn_size": 9, "sink_size": 3, "cache_policy": {"name": "full"}}, "window: 9, sink: 3"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_weights_are_read(config, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(**config)


def test_the_policy_of_the_contributors_page_runs():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names: dict = {}
    source = re.search(r"```python\n(@dataclass\nclass Earliest.*?)```", text, re.S)[1]
    exec("from wan.policies import *\n" + source, names)
    pipeline = CausalInferencePipeline(model(), cache_policy=names["Earliest"](window=8, sink=1))
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0], steps=[0], granularity="frame") as calls:
        pipeline.inference(torch.randn(1, 15, 16, 2, 4), prompt_embeds=torch.randn(1, 32, 64))
    assert calls[-1]["key_frames"] == [0, 1, 2, 3, 4, 12, 13, 14]


def test_the_page_has_every_released_policy():
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name, policy in POLICIES.items() if policy.releases)
    shown = re.findall(r"\]\(policies/(\w+)\.svg\)", page)
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "docs/policies").glob("*.svg"))


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row["name"])
def test_a_memory_as_large_as_the_video_is_the_whole_past_but_for_a_bank(row):
    """A bank holds copies of frames that are in the window (docs/policies.md)."""
    pipeline, large = tiny_pipeline(), {"window": 24} | ({"budget": 24} if "budget" in row else {})
    policy = make_policy(**row | large)
    latents = rollout(CausalInferencePipeline(pipeline.model, cache_policy=policy), num_frames=12)
    assert torch.equal(latents, rollout(pipeline, num_frames=12)) == (row["name"] != "memory_bank")

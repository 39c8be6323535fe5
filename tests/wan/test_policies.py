"""Cache policies: every slot against what it was fed, every call against the rules in float64, settings."""

import re
from dataclasses import fields
from functools import cache
from typing import get_args

import pytest
import torch
from conftest import ROOT
from helpers.policies import POLICIES as ROWS
from helpers.policies import settings_of_any_size
from helpers.policy_oracle import NAMES, Frame, LayerOracle
from helpers.rollouts import TWO_STEPS, golden_inputs, shared_golden_model
from hypothesis import given, settings
from hypothesis import strategies as st

from wan.cache import How, PromptSwitch
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.files import read_yaml
from wan.keys import key_frames, key_tokens
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline
from wan.policies import POLICIES, RELEASES, make_policy, policy_of, read_policy


def test_every_policy_has_a_row_and_a_file_and_every_released_one_is_on_the_page():
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in RELEASES)
    shown = re.findall(r"\]\(policies/(\w+)\.svg\)", page)
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "docs/policies").glob("*.svg"))
    files = {read_yaml(path)["name"] for path in FILES}
    by_heads = {name for name, policy in POLICIES.items() if policy.by_heads}  # test_golden_policies.py
    assert {row["name"] for row in ROWS} | by_heads == files | {"full"} == set(POLICIES)


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
        blocks = small_model().blocks
        self.hooks = [block.register_forward_pre_hook(self.read) for block in blocks]
        self.hooks += [block.self_attn.register_forward_hook(self.compare) for block in blocks]
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()

    def read(self, module, args):
        _, (keys, _), _ = args
        self.text = keys.double()

    def compare(self, module, args, out):
        x, inputs = args
        cache = inputs.kv_cache
        at, layer = ATTENTION_WEIGHT_CAPTURE.current_pass, module.site.layer
        oracle, is_first = self.oracles[layer], self.block[layer] != at.block
        block = range(at.query_frames[0], at.query_frames[-1] + 1)
        if is_first and not at.is_recache:
            self.block[layer] = at.block
            oracle.begin(block, self.text, self.how_at.get(at.block, "keep"))
        q, k = (norm(to(x)).double() for norm, to in ((module.norm_q, module.q), (module.norm_k, module.k)))
        own = zip(block, k.split(S, 1), module.values(x).double().split(S, 1), strict=True)
        tokens = torch.arange(S).expand(len(x), S)
        frames = [
            Frame(raw, v, torch.full_like(tokens, f), tokens, torch.full_like(tokens, f)) for f, raw, v in own
        ]
        expected = oracle.recache(q, frames) if at.is_recache else oracle.attend(q, frames, is_first)
        expected = expected.flatten(2) @ module.o.weight.double().T + module.o.bias.double()
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
        layout = cache.layouts[layer]
        told = torch.stack([*key_frames(layout, len(x)), key_tokens(layout, len(x))], -1).tolist()
        assert list(map(sorted, told)) == list(map(sorted, oracle.seen.tolist()))
        assert len(layout.slots) <= cache.capacity
        if not at.is_recache:  # a block sees itself, last
            own = layout.slots[layout.own.start :]
            assert [slot.frame for slot in own] == list(block) and len(own) == len(layout.own)
            assert list(layout.query_positions) == [slot.position for slot in own]
        self.calls += 1


def roll_out(row, size=2, first=False, batch=2, blocks=BLOCKS, given_blocks=0, switch=None):
    sizes = [1 if first else size, *[size] * (blocks - 1)]
    given_frames, generator = sum(sizes[:given_blocks]), torch.Generator().manual_seed(7)
    noise = torch.randn(batch, sum(sizes), 2, 1, 2, generator=generator)
    beginning, noise = noise.split([given_frames, sum(sizes) - given_frames], 1)
    more = {"renoise": torch.randn(1, *noise.shape, generator=generator)}
    embeds, policy = torch.randn(2, batch, 3, 6, generator=generator), make_policy(**row)
    pipeline = CausalInferencePipeline(small_model(), size, first, **TWO_STEPS, cache_policy=policy)
    schedule = [PromptSwitch(sum(sizes[:at]), how=how, prompt_embeds=embeds[1]) for at, how in switch or ()]
    more |= {"prompt_schedule": schedule} | ({"initial_latent": beginning} if given_frames else {})
    return pipeline.inference(noise, prompt_embeds=embeds[0], **more)[1]


@pytest.mark.parametrize(
    "row, how", [pytest.param(row, how, id=f"{row['name']}-{how}") for row in KNOWN for how in hows_of(row)]
)
def test_every_call_after_a_switch_sees_what_its_policy_says(row, how):
    with Watch(row, 2, {SWITCH: how}) as watch:
        roll_out(row, switch=[(SWITCH, how)])
    assert watch.calls >= 3 * BLOCKS * LAYERS


SHAPE = st.integers(1, 3), st.booleans(), st.integers(1, 2), st.integers(4, 6), st.integers(0, 2)


@given(data=st.data(), shape=st.tuples(*SHAPE))
@settings(max_examples=8, deadline=None)
def test_every_call_sees_what_its_policy_says(data, shape):
    size, _, _, blocks, _ = shape
    row = data.draw(settings_of_any_size(size, KNOWN))
    at = st.tuples(st.integers(1, blocks - 1), st.sampled_from(hows_of(row)))
    switch = data.draw(st.lists(at, max_size=1))
    case = (row, *shape, switch)
    with Watch(row, size, dict(switch)):
        latents = roll_out(*case)
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[1], steps=[0, 2]) as calls:
        assert torch.equal(latents, roll_out(*case))  # a second video equals the first, looked at or not
    for call in calls:  # all mass is on frames or slots
        mass = call.values.get("slot_mass", call.values["frame_mass"])
        torch.testing.assert_close(mass.sum(-1), torch.ones(mass.shape[:-1]), atol=1e-5, rtol=0)


# -- whole rollouts of the golden model ----------------------------------------------------------------------


def pipeline_of(row) -> CausalInferencePipeline:
    return CausalInferencePipeline(shared_golden_model(), cache_policy=make_policy(**row), **TWO_STEPS)


@pytest.mark.parametrize("how", ["cut", "recache"])
def test_a_switch_that_a_policy_cannot_make_is_refused(how):
    inputs = golden_inputs(12)
    switch = PromptSwitch(9, how=how, prompt_embeds=inputs["prompt_embeds"])
    cannot = [row for row in ROWS if how not in hows_of(row)]
    assert 0 < len(cannot) < len(ROWS)
    for row in cannot:
        with pytest.raises(ConfigError, match=f"cannot {how} under cache_policy {row['name']};"):
            pipeline_of(row).inference(**inputs, prompt_schedule=[switch])


def test_a_probe_that_would_change_the_rollout_is_refused():
    inputs = golden_inputs(9) | {"probe": lambda block, denoise: denoise()}
    released = {"name": "window", "window": 9, "sink": 6, "released": "longlive"}
    for row in (released, {"name": "memory_bank", "window": 6, "sink": 1}):
        with pytest.raises(ConfigError, match=rf"noise or cache \({row['name']}\)"):
            pipeline_of(row).inference(**inputs)
    del inputs["renoise"]
    with pytest.raises(ConfigError, match="a probe would change noise"):
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
    assert policy_of(RunConfig(cache_policy=read_yaml(path))) == policy


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_any_wrong_value_of_any_field_is_one_line(row):
    """What is not refused is a policy that can be described; a field that nothing has is refused too."""
    name = row["name"]
    for field in [*(f.name for f in fields(POLICIES[name])), "released", "nope", "name", 3]:
        for value in HOSTILE:
            is_release = field == "released" and value is True and name in RELEASES
            if (name, field, value) in NOT_A_MISTAKE or is_release:
                continue
            with pytest.raises(ConfigError) as refused:
                read_policy({**row, field: value})
            assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def of(name, **fields) -> dict:
    return {"cache_policy": {"name": name, **fields}}


def then(*prompts) -> dict:
    return {"prompt_schedule": [{"frame": 6, "prompt": "a"} | prompt for prompt in prompts]}


FIRST, LONG_SINK = {"independent_first_frame": True, "num_frames": 4}, {"window": 12, "sink": 6}
REFUSED = {  # what is said -> a config, before weights are read
    "there is no cache_policy 'magic'; known ones: ": of("magic"),
    "unknown key 'windw'; did you mean window": of("window", windw=3),
    "window '9' should be a valid integer": of("window", window="9"),
    "window 5 .* must be at least 6": of("window", window=5, sink=3) | FIRST,
    "leave it out": of("full", released=True),
    "has blocks of 3 frames": of("deep_sink", released=True) | FIRST,
    "recent 2 must be at least a block, 3": of("participative", recent=2, budget=14),
    "sink 1 should be 0": of("rolling_sink", sink=1),
    "does not begin a later block, .* begin at 3, 6": then({"frame": 4}),
    "frame 6 .* has two prompts": then({}, {}),
    "unknown key 'text'; known ones: frame, how, prompt": then({"text": "a"}),
    "frame 6 has no prompt": then({"prompt": None}),
    "frame 3 cannot cut under .*; it can .*cut from frame 6 on": then({"frame": 3, "how": "cut"})
    | of("relative", **LONG_SINK, released="longlive_infinity"),
    "6 frames .* again .* with a window of 9": {"recompute_context": 6, "local_attn_size": 6},
    "take window or relative": {"recompute_context": 6} | of("rolling_sink"),
    "window: 9, sink: 3": {"local_attn_size": 9, "sink_size": 3} | of("full"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        policy_of(RunConfig(**REFUSED[message]))


def test_the_policy_of_the_contributors_page_runs():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names: dict = {}
    source = re.search(r"```python\n(@dataclass\nclass Earliest.*?)```", text, re.S)[1]
    exec("from wan.policies.frames import *\n" + source, names)
    pipeline = CausalInferencePipeline(
        shared_golden_model(), cache_policy=names["Earliest"](window=8, sink=1)
    )
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0], steps=[0], granularity="frame") as calls:
        pipeline.inference(torch.randn(1, 15, 16, 2, 4), prompt_embeds=torch.randn(1, 32, 64))
    assert calls[-1]["key_frames"] == [0, 1, 2, 3, 4, 12, 13, 14]

"""Every call of a rollout against the rules of its policy in float64 (helpers/policy_oracle.py).

Fields, block sizes, given frames and prompt switches are drawn at random, on another small model; every way
to change the prompt is tried under every policy.
"""

from functools import cache

import pytest
import torch
from helpers.policy_oracle import Frame, LayerOracle
from hypothesis import given, settings
from hypothesis import strategies as st

from wan import model as layers
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.keys import key_frames
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline
from wan.policies import POLICIES, PromptSwitch, make_policy

HEADS, LAYERS, WIDTH, S = 2, 2, 2, 2


def small_model() -> CausalWanModel:
    torch.manual_seed(5)
    sizes = {"dim": 24, "ffn_dim": 16, "num_heads": HEADS, "num_layers": LAYERS, "freq_dim": 8}
    model = CausalWanModel(**sizes, text_dim=6, text_len=3, in_dim=2, out_dim=2, patch_size=(1, 1, 1))
    for name, value in model.named_parameters():
        if not name.endswith(("norm_q.weight", "norm_k.weight")):
            torch.nn.init.normal_(value, std=0.4)
    return model.eval().requires_grad_(False)


MODEL = small_model()


def hows_of(policy) -> list[str]:
    """The ways to change the prompt that a policy has."""
    hows = ["keep", "flush", *(["cut"] if policy.positions_follow_slots else [])]
    return hows + (["recache"] if policy.can_recache else [])


@st.composite
def cases(draw):
    """Fields of a policy, options of a rollout, and where and how its prompt changes."""
    size, first, batch = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.integers(1, 2))
    blocks = draw(st.integers(4, 8))
    name = draw(st.sampled_from([name for name in POLICIES if name != "per_head"]))
    sink, extra = draw(st.integers(1 if name == "ema_sink" else 0, 4)), draw(st.integers(0, 3))
    fields = {"name": name, "window": sink + size + extra, "sink": sink}
    if name == "full":
        fields = {"name": name}
    elif name == "rolling_sink":
        fields = {"name": name, "window": 2 * size + extra}
    elif name == "participative":
        recent = size + draw(st.integers(0, 3))
        budget = sink + recent + draw(st.integers(0, 2))
        fields |= {"recent": recent, "budget": budget, "window": budget + extra}
        fields |= {"reuse_limit": 2} if draw(st.booleans()) else {}
    elif name == "memory_bank":
        fields |= {"bank": draw(st.integers(1, 3)), "interval": draw(st.integers(1, 2))}
    elif name == "window":
        fields |= {"global_sink": draw(st.booleans())}
    elif name == "ema_sink":
        fields |= {"alpha": draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))}
    elif name == "two_memories":
        fields |= {"window": fields["window"] + 2, "alpha_long": 0.1, "alpha_short": 0.6}
    policy = make_policy(**fields)
    hows = st.sampled_from(hows_of(policy))
    switch = (draw(st.integers(1, blocks - 1)), draw(hows)) if draw(st.booleans()) else None
    options = {"num_frame_per_block": size, "independent_first_frame": first}
    return fields, options, batch, blocks, draw(st.integers(0, 2)), switch


class Watch:
    """Compares what every self-attention call hands on with the oracle of its layer."""

    def __init__(self, fields, block_size, how_at):
        self.oracles = [LayerOracle(fields, block_size, WIDTH) for _ in range(LAYERS)]
        self.how_at, self.block, self.calls, self.text = how_at, [-1] * LAYERS, 0, None

    def __enter__(self):
        self.before = layers.SelfAttention.forward, layers.Block.forward
        before_attention, before_block = self.before

        def block_forward(module, x, time, rope, text, *rest):
            self.text = text[0].double()
            return before_block(module, x, time, rope, text, *rest)

        def forward(module, x, rope, *rest):
            out = before_attention(module, x, rope, *rest)
            self.compare(module, x, out)
            return out

        layers.SelfAttention.forward, layers.Block.forward = forward, block_forward
        return self

    def __exit__(self, *error):
        layers.SelfAttention.forward, layers.Block.forward = self.before

    def compare(self, module, x, out):
        at, layer = ATTENTION_WEIGHT_CAPTURE.now, module.site.layer
        oracle = self.oracles[layer]
        first = self.block[layer] != at.block
        block = range(at.query_frames[0], at.query_frames[-1] + 1)
        if first and at.step >= 0:
            self.block[layer] = at.block
            oracle.begin(block, self.text, self.how_at.get(at.block, "keep"))
        q, k = (norm(to(x)).double() for norm, to in ((module.norm_q, module.q), (module.norm_k, module.k)))
        v = module.values(x).double()
        index = torch.arange(S).expand(len(x), S)
        frames = [
            Frame(
                k[:, i * S : (i + 1) * S],
                v[:, i * S : (i + 1) * S],
                torch.full((len(x), S), frame),
                index,
                torch.full((len(x), S), frame),
            )
            for i, frame in enumerate(block)
        ]
        expected = oracle.recache(q, frames) if at.step < 0 else oracle.attend(q, frames, first)
        expected = expected.flatten(2) @ module.o.weight.double().T + module.o.bias.double()
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)
        self.calls += 1


def roll_out(fields, options, batch, blocks, given_blocks, switch):
    n = options["num_frame_per_block"]
    sizes = [1 if options["independent_first_frame"] else n, *[n] * (blocks - 1)]
    given_frames = sum(sizes[:given_blocks])
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(batch, sum(sizes), 2, 1, 2, generator=generator)
    renoise = torch.randn(1, *noise[:, given_frames:].shape, generator=generator)
    embeds = torch.randn(2, batch, 3, 6, generator=generator)
    pipeline = CausalInferencePipeline(
        MODEL, denoising_step_list=[1000, 500], cache_policy=make_policy(**fields), **options
    )
    schedule = (
        [PromptSwitch(sum(sizes[: switch[0]]), how=switch[1], prompt_embeds=embeds[1])] if switch else []
    )
    first = {"initial_latent": noise[:, :given_frames]} if given_frames else {}
    return pipeline.inference(
        noise[:, given_frames:], prompt_embeds=embeds[0], renoise=renoise, prompt_schedule=schedule, **first
    )[1]


def check_captured(call, name: str) -> None:
    """All mass is on frames or slots; no two slots stand at one place; the own block comes last, in a row."""
    mass = call.values.get("slot_mass", call.values["frame_mass"])
    torch.testing.assert_close(mass.sum(-1), torch.ones(mass.shape[:-1]), atol=1e-5, rtol=0)
    positions = key_frames(call.layout, len(mass))[1].unflatten(1, (-1, S))  # [B, slots, S]
    assert (positions == positions[..., :1]).all()
    own = positions[:, -len(call["query_frames"]) :]
    assert (own.diff(dim=1) == 1).all() and positions.min() >= 0 and positions.max() == own.max()
    if name != "memory_bank":  # whose window may hold a banked frame too
        assert all(len(set(row)) == len(row) for row in positions[..., 0].tolist())


FIELDS = [  # with blocks of two frames all of them forget before the switch, and again after it
    {"name": "full"},
    {"name": "window", "window": 5, "sink": 1},
    {"name": "relative", "window": 5, "sink": 1},
    {"name": "deep_sink", "window": 6, "sink": 2},
    {"name": "participative", "window": 7, "sink": 1, "budget": 5, "recent": 3},
    {"name": "ema_sink", "window": 5, "sink": 1, "alpha": 0.5},
    {"name": "two_memories", "window": 6, "sink": 1, "alpha_long": 0.1, "alpha_short": 0.6},
    {"name": "rolling_sink", "window": 5},
    {"name": "memory_bank", "window": 5, "sink": 1, "bank": 2, "interval": 1},
]
SWITCHES = [(fields, how) for fields in FIELDS for how in hows_of(make_policy(**fields))]
OPTIONS = {"num_frame_per_block": 2, "independent_first_frame": False}
SWITCH, BLOCKS, BATCH = 4, 8, 2  # the prompt changes before block 4


@cache
def unswitched(number: int) -> torch.Tensor:
    return roll_out(FIELDS[number], OPTIONS, BATCH, BLOCKS, 0, None)


@pytest.mark.parametrize("fields, how", SWITCHES, ids=[f"{fields['name']}-{how}" for fields, how in SWITCHES])
def test_every_call_after_a_switch_sees_what_its_policy_says(fields, how):
    with Watch(fields, 2, {SWITCH: how}) as watch:
        switched = roll_out(fields, OPTIONS, BATCH, BLOCKS, 0, (SWITCH, how))
    plain, at = unswitched(FIELDS.index(fields)), 2 * SWITCH
    assert watch.calls >= 3 * BLOCKS * LAYERS and torch.equal(switched[:, :at], plain[:, :at])
    assert not torch.equal(switched[:, at:], plain[:, at:])


@given(case=cases())
@settings(max_examples=15, deadline=None)
def test_every_call_sees_what_its_policy_says(case):
    fields, options, *_, switch = case
    with Watch(fields, options["num_frame_per_block"], dict([switch]) if switch else {}) as watch:
        first = roll_out(*case)
    assert watch.calls and first.isfinite().all()
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[1], steps=[0, 2]) as calls:
        assert torch.equal(first, roll_out(*case))  # a second video equals the first, looked at or not
    for call in calls:
        check_captured(call, fields["name"])

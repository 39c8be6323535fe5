"""Single attention calls under edit, against float64 softmax and RoPE written out by hand."""

from dataclasses import replace

import pytest
import torch

from wan.attention import ATTENTION_WEIGHT_CAPTURE, attention
from wan.capture import Pass, Site
from wan.interventions import Ablate, Bias, InterventionError, Jitter, Knockout, Move, Patch, intervene
from wan.keys import KeyLayout, Slot

HEADS, DIM, S = 3, 12, 5  # the temporal share of 12 dims is 4: two frequencies
PAST, OWN = (0, 1, 4, 5), (6, 7)  # frames 2 and 3 have left; key frames in order
FRAMES = (*PAST, *OWN)
LAYOUT = KeyLayout(tuple(Slot(f, f) for f in FRAMES), S, range(4, 6), OWN, sink=range(2))
HERE = Pass(query_frames=OWN, block=3, step=1, timestep=900.0)
SITE = Site(2, "self")


def inputs(device="cpu", dtype=torch.float32, batch=2):
    generator = torch.Generator().manual_seed(0)
    sizes = (len(OWN) * S, len(FRAMES) * S, len(FRAMES) * S)
    q, k, v = (torch.randn(batch, n, HEADS, DIM, generator=generator) for n in sizes)
    return [x.to(device, dtype) for x in (2 * q, k, v)]


def run(*edits, data=None, at=HERE, x=None, **capture):
    """Output of the call under edits, and what was captured of it."""
    q, k, v = x or inputs()
    before = [tensor.clone() for tensor in (q, k, v)]
    with (
        intervene(*edits, data=data),
        ATTENTION_WEIGHT_CAPTURE.capture(**(capture or {"granularity": "frame"})) as calls,
        ATTENTION_WEIGHT_CAPTURE.during(at),
    ):
        out = attention(q, k, v, SITE, layout=LAYOUT)
    assert all(map(torch.equal, before, (q, k, v)))  # views of the cache stay what they are
    return out, calls[0]


def softmax(q, k, v, bias):
    """Output [B, Lq, H, D] and probabilities [B, H, Lq, Lk] in float64; bias [H, Lk]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    p = (q @ k.mT * DIM**-0.5 + bias.double()[:, None]).softmax(-1)
    return (p @ v).transpose(1, 2), p


def bias_of(added: dict[int, dict[int, float]]) -> torch.Tensor:
    """{head: {slot: b}} -> [H, Lk]."""
    values = torch.zeros(HEADS, len(FRAMES))
    for head, slots in added.items():
        for slot, b in slots.items():
            values[head, slot] += b
    return values.repeat_interleave(S, 1)


OUT = -torch.inf
CASES = {
    "first": (Knockout(frames="first", heads=[1], passes="all"), {1: {0: OUT}}),
    "a middle frame of all heads": (
        Knockout(frames=4, passes="denoise"),
        {h: {2: OUT} for h in range(HEADS)},
    ),
    "sink": (Knockout(frames="sink", heads=[0, 2], passes="all"), {0: {0: OUT, 1: OUT}, 2: {0: OUT, 1: OUT}}),
    "past": (Knockout(frames="past", heads=[2], passes="all"), {2: dict.fromkeys(range(4), OUT)}),
    "own": (Knockout(frames="own", heads=[2], passes="all"), {2: {4: OUT, 5: OUT}}),
    "one own frame": (Knockout(frames="own:7", heads=[2], passes="all"), {2: {5: OUT}}),
    "a number is never own": (Knockout(frames=[5, 6], heads=[0], passes="all"), {0: {3: OUT}}),
    "bias": (Bias(-1.5, frames=[0, 5], heads=[1], passes="all"), {1: {0: -1.5, 3: -1.5}}),
}


@pytest.mark.parametrize("name", CASES)
def test_keys_left_out_and_biased_against_float64(name, device):
    edit, added = CASES[name]
    x = inputs(device)
    out, call = run(edit, x=x)
    expected, p = softmax(*x, bias_of(added).to(device))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    mass = p.unflatten(3, (-1, S)).sum(-1).unflatten(2, (-1, S)).mean(3).cpu()
    torch.testing.assert_close(call["frame_mass"].double(), mass, atol=1e-5, rtol=0)


def test_captured_is_what_the_softmax_saw():
    both = (Knockout(frames="first", heads=[1], passes="all"), Bias(2, frames=4, heads=[0, 1], passes="all"))
    q, k, v = inputs()
    with (
        ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as plain,
        ATTENTION_WEIGHT_CAPTURE.during(HERE),
    ):
        attention(q, k, v, SITE, layout=LAYOUT)
    _, call = run(*both)
    logits, attended = call["frame_logits"], call["attended"]
    out = torch.zeros_like(attended)
    out[:, 1, :, 0] = True
    assert torch.equal(~attended, out) and torch.equal(logits.isnan(), out)
    assert (call["frame_mass"][out] == 0).all() and call["frame_mass"].sum(-1).allclose(torch.ones(1))
    expected = plain[0]["frame_logits"].clone()
    expected[:, :2, :, 2] += 2
    torch.testing.assert_close(logits[~out], expected[~out], atol=1e-6, rtol=0)


@pytest.mark.parametrize("is_logits", [True, False])
def test_token_matrices_and_key_curves_show_it_too(is_logits):
    edit = Knockout(frames="first", heads=[1], passes="all")
    _, call = run(edit, granularity="token", is_logits=is_logits)
    tokens = call["token_logits" if is_logits else "token_probabilities"]
    _, p = softmax(*inputs(), bias_of({1: {0: OUT}}))
    shown = tokens.softmax(-1) if is_logits else tokens
    if is_logits:
        assert tokens[:, 1, :, :S].isnan().all() and tokens.isnan().sum() == 2 * len(OWN) * S * S
        shown = tokens.nan_to_num(-torch.inf).softmax(-1)
    torch.testing.assert_close(shown.double(), p, atol=1e-5, rtol=0)
    _, curve = run(edit, granularity="key")
    assert torch.equal(curve["key_curve"].isnan(), ~curve["attended"])
    assert curve["attended"].sum() == 2 * (HEADS * len(FRAMES) - 1) * S


def test_a_knockout_wins_and_biases_add_up():
    edits = [
        Bias(1, frames=4, passes="all"),
        Knockout(frames=4, heads=[0], passes="all"),
        Bias(3, frames=4, passes="all"),
    ]
    out, _ = run(*edits)
    expected, _ = softmax(*inputs(), bias_of({0: {2: OUT}, 1: {2: 4}, 2: {2: 4}}))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_knockouts_that_leave_no_key_are_an_error_when_the_call_comes():
    with (
        pytest.raises(InterventionError, match="layer 2, block 3: head 1 would lose all its keys"),
        intervene(Knockout(frames="own", heads=[1], passes="all")),
    ):
        run(Knockout(frames="past", passes="all"))


def test_ablated_heads_are_replaced_and_the_others_keep_their_bits():
    class Means:
        def of(self, site, at):
            return torch.arange(2.0 * HEADS * DIM).view(1, 2, HEADS, DIM)

    q, k, v = inputs()
    plain = attention(q, k, v, SITE, layout=LAYOUT)
    edit = Ablate("mean", heads=[1], passes="all")
    out, call = run(edit, data={edit: Means()})
    assert torch.equal(out[:, :, [0, 2]], plain[:, :, [0, 2]]) and "attended" not in call
    expected = Means().of(SITE, HERE)[:, :, 1].repeat_interleave(S, 1).expand(2, -1, -1)
    assert torch.equal(out[:, :, 1], expected)
    zero, _ = run(Ablate("zero", passes="all"))
    assert (zero == 0).all()


class Source:
    """The same call of another run, with tensors that this file made."""

    q, k, v = (x.flip(0) + 0.5 for x in inputs())
    z = torch.full_like(q, 7.0)
    layout = LAYOUT

    def call(self, site, at, of_heads=None):
        return self


PATCHED = {  # heads 0 and 2 -> which of their tensors are the source's, and of which keys
    "qk": (Patch("qk", {"seed": 1}, heads=[0, 2], passes="all"), ("q", "k"), range(len(FRAMES))),
    "kv of the past": (Patch("kv", {"seed": 1}, heads=[0, 2], passes="all"), ("k", "v"), range(4)),
    "kv of frame 4": (Patch("kv", {"seed": 1}, frames=4, heads=[0, 2], passes="all"), ("k", "v"), [2]),
}


@pytest.mark.parametrize("name", PATCHED)
def test_patched_heads_against_float64(name):
    edit, taken, slots = PATCHED[name]
    source, mixed = Source(), dict(zip("qkv", (x.clone() for x in inputs()), strict=True))
    for tensor in taken:
        keys = [slot * S + n for slot in slots for n in range(S)]
        rows = torch.arange(len(OWN) * S) if tensor == "q" else torch.tensor(keys)
        for head in (0, 2):
            mixed[tensor][:, rows, head] = getattr(source, tensor)[:, rows, head]
    out, call = run(edit, data={edit: source})
    expected, p = softmax(*mixed.values(), bias_of({}))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    mass = p.unflatten(3, (-1, S)).sum(-1).unflatten(2, (-1, S)).mean(3)
    torch.testing.assert_close(call["frame_mass"].double(), mass, atol=1e-5, rtol=0)
    edit = Patch("z", {"seed": 1}, heads=[1], passes="all")
    assert (run(edit, data={edit: source})[0][:, :, 1] == 7).all()


def test_kv_of_a_slot_is_taken_where_the_source_holds_the_same_frame():
    slots = [Slot(3, 3) if slot.frame == 4 else slot for slot in LAYOUT.slots]  # a bank chose frame 3 there
    source = Source()
    source.layout = replace(LAYOUT, slots=tuple(slots))
    for frames in (4, "past"):
        edit = Patch("kv", {"seed": 1}, frames=frames, passes="all")
        with pytest.raises(InterventionError, match="the source chose other keys for slot 2"):
            run(edit, data={edit: source})
    edit = Patch("kv", {"seed": 1}, frames=[0, 5], passes="all")
    assert torch.equal(run(edit, data={edit: source})[0], run(edit, data={edit: Source()})[0])


def rope_by_hand(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn the first pairs of x [..., D] by angles [..., pairs], as complex numbers in float64."""
    z = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    pairs = angles.shape[-1]
    turned = torch.cat([z[..., :pairs] * torch.polar(torch.ones_like(angles), angles), z[..., pairs:]], -1)
    return torch.view_as_real(turned).flatten(-2)


def frequencies(bases: torch.Tensor) -> torch.Tensor:
    return bases[..., None].double() ** -(torch.tensor([0, 2], dtype=torch.float64) / 4)


@pytest.mark.parametrize(
    "edit, turns",
    [
        (Move("first", offset=3, passes="all"), {0: 3}),
        (Move(["sink", 5], position=9, heads=[1], passes="all"), {0: 9, 1: 8, 3: 4}),
    ],
    ids=["offset", "position"],
)
def test_moved_keys_stand_elsewhere(edit, turns):
    q, k, v = inputs()
    out, call = run(edit)
    moved = k.double()
    heads = edit.heads or range(HEADS)
    for slot, by in turns.items():
        for head in heads:
            rows = slice(slot * S, (slot + 1) * S)
            angle = by * frequencies(torch.tensor(1e4)).expand(2, S, 2)
            moved[:, rows, head] = rope_by_hand(k[:, rows, head], angle)
    expected, _ = softmax(q, moved, v, bias_of({}))
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    means = [x.double().unflatten(1, (-1, S)).mean(2).transpose(1, 2) for x in (q, moved)]
    logits = means[0] @ means[1].mT * DIM**-0.5
    torch.testing.assert_close(call["frame_logits"].double(), logits, atol=1e-5, rtol=0)


def test_jitter_gives_every_head_its_own_base():
    edit = Jitter(scale=0.5, seed=3, heads=[0, 2])
    q, k, v = inputs()
    bases = edit.bases(SITE.layer, HEADS)
    assert ((bases / 1e4 - 1).abs() <= 0.5).all() and len(set(bases.tolist())) == HEADS
    assert not torch.equal(bases, edit.bases(SITE.layer + 1, HEADS))
    turned = [q.double(), k.double()]
    for x, plain, frames in zip(turned, (q, k), (OWN, FRAMES), strict=True):
        position = torch.tensor(frames, dtype=torch.float64).repeat_interleave(S)[:, None]  # [L, 1]
        for head in edit.heads:
            drift = frequencies(bases[head]) - frequencies(torch.tensor(1e4))
            x[:, :, head] = rope_by_hand(plain[:, :, head], (position * drift).expand(2, -1, -1))
    expected, _ = softmax(*turned, v, bias_of({}))
    torch.testing.assert_close(run(edit)[0].double(), expected, atol=1e-5, rtol=0)
    still, _ = run(Jitter(scale=0.0))
    torch.testing.assert_close(still, attention(q, k, v, SITE, layout=LAYOUT), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "edit, at",
    [
        (Knockout(frames="first", layers=[1], passes="all"), HERE),
        (Knockout(frames="first", blocks=[0], passes="all"), HERE),
        (Knockout(frames="first", passes="clean"), HERE),
        (Knockout(frames="first", steps=[0], passes="denoise"), HERE),
        (Knockout(frames="first", branch="uncond", passes="all"), HERE),
        (Knockout(frames=2, passes="all"), HERE),
        (Knockout(tokens=[0], passes="all"), HERE),
        (Ablate("zero", attention="cross", passes="all"), HERE),
        (Knockout(frames="first", passes="all"), Pass(query_frames=OWN, step=-1, is_clean_pass=True)),
    ],
    ids=str,
)
def test_a_call_that_is_not_selected_keeps_its_bits_and_an_edit_without_calls_warns(edit, at):
    q, k, v = inputs()
    plain = attention(q, k, v, SITE, layout=LAYOUT)
    with pytest.warns(UserWarning, match="no call was edited by"):
        out, _ = run(edit, at=at, steps=[at.step])
    assert torch.equal(out, plain)


def test_an_edit_needs_the_pass_and_what_it_takes_its_values_from():
    q, k, v = inputs()
    with (
        pytest.raises(InterventionError, match="needs to know the pass"),
        intervene(Knockout(frames=0, passes="all")),
    ):
        attention(q, k, v, SITE, layout=LAYOUT)
    with pytest.raises(InterventionError, match="needs data"), intervene(Ablate("mean", passes="all")):
        pass
    with pytest.raises(InterventionError, match="intervene takes"), intervene():
        pass


def test_prompt_tokens_are_knocked_out_of_cross_attention():
    q, k, v = inputs()
    site, at = Site(0, "cross"), HERE
    edit = Knockout(tokens=[0, 3], heads=[1], passes="all")
    with (
        intervene(edit),
        ATTENTION_WEIGHT_CAPTURE.capture(kinds=("cross",), granularity="frame") as calls,
        ATTENTION_WEIGHT_CAPTURE.during(at),
    ):
        out = attention(q, k, v, site)
    bias = torch.zeros(HEADS, k.shape[1])
    bias[1, [0, 3]] = OUT
    expected, p = softmax(q, k, v, bias)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    mass = calls[0]["cross_mass"].double()
    torch.testing.assert_close(mass, p.unflatten(2, (-1, S)).mean(3), atol=1e-6, rtol=0)
    assert (mass[:, 1, :, [0, 3]] == 0).all() and not calls[0]["attended"][:, 1, :, [0, 3]].any()


def test_a_slot_with_another_frame_for_each_item_is_edited_where_all_items_agree():
    """Item 0 holds frame 4 in slot 2, item 1 frame 3: there a number, or a position, is of one item alone."""
    slots = [Slot(4, 4, items=(4, 3)) if slot.frame == 4 else slot for slot in LAYOUT.slots]
    layout = replace(LAYOUT, slots=tuple(slots))
    numbers = [Knockout(frames=frame, passes="all") for frame in (3, 4)]
    for edit in (*numbers, Move("past", position=0, passes="all"), Jitter()):
        message = pytest.raises(InterventionError, match="slot 2 holds another frame for each batch item")
        with message, intervene(edit), ATTENTION_WEIGHT_CAPTURE.during(HERE):
            attention(*inputs(), SITE, layout=layout)
    for edit in (Knockout(frames=[0, 5], passes="all"), Move("past", offset=2, passes="all")):
        with intervene(edit), ATTENTION_WEIGHT_CAPTURE.during(HERE):
            out = attention(*inputs(), SITE, layout=layout)
        assert torch.equal(out, run(edit)[0])

"""Edits as values and in files, and single edited calls against float64 softmax and RoPE by hand."""

import cmath
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.refusals import refused
from helpers.rollouts import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.provenance import record_of
from experiments.running.cli import config_from, run_parser
from wan import interventions
from wan.attention import attention
from wan.capture import ATTENTION_WEIGHT_CAPTURE, Call
from wan.errors import ConfigError
from wan.interventions import Ablate, InterventionError, Jitter, Knockout, Move, Patch, intervene, read_edits
from wan.keys import MIXED, KeyLayout, Slot
from wan.sites import ActivationSite, Pass, Site

close = partial(torch.testing.assert_close, atol=1e-5, rtol=0)

# --- Values. A new edit has a row here
EDITS = [
    Knockout(frames="first", layers=[5], heads=[10], passes="denoise"),
    Knockout(tokens=range(3), passes="denoise", branch="cond"),
    Knockout(frames=["own:18", "own:19"], layers=(3, 1, 3), blocks=6, passes="all"),
    interventions.Bias(-2, frames=["sink", 0], passes="all", steps=[1, 0]),
    Ablate("mean", heads=range(12), passes="denoise"),
    Ablate("mean", "means.pt", passes="denoise"),
    Ablate("zero", attention="cross", passes="clean"),
    Ablate("resample", source=interventions.Source("a dog", 3), passes="all"),
    Patch("kv", {"seed": 1, "weights": "base"}, passes="denoise"),
    Patch("kv", {"seed": 1}, frames=[4, "sink"], passes="denoise"),
    Move("first", offset=3, passes="clean"),
    Jitter(layers=2),
    interventions.Band([1, 0], phase=1.5, heads=[3], passes="denoise"),
]


def test_edits_survive_python_and_json_and_are_told_apart():
    for edit in EDITS:
        assert eval(repr(edit), vars(interventions)) == edit and "\n" not in repr(edit)
        assert interventions.edit_from_dict(json.loads(json.dumps(edit.to_dict()))) == edit
    assert len({record_of([one])["hash"] for one in EDITS}) == len({*EDITS}) == len(EDITS)
    one = Knockout(frames=0, heads=[2, 1], passes="all")
    same = Knockout(frames=[0], heads=(1, 2), passes="all")
    assert one == same and hash(one) == hash(same) and record_of([one]) == record_of([same])
    assert record_of([one, EDITS[0]])["hash"] != record_of([EDITS[0], one])["hash"]
    assert one.to_dict() == {"edit": "knockout", "heads": [1, 2], "passes": "all", "frames": 0}
    for chosen, passes in (({}, "all"), ({"steps": 1}, "denoise"), ({"steps": 1, "passes": "all"}, "all")):
        assert interventions.at("z", **chosen).passes == passes  # the clean pass has no step


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Knockout, {"frames": "past"}),
        (interventions.Bias, {"b": 1.0, "tokens": [3]}),
        (Ablate, {"how": "zero"}),
        (Patch, {"what": "z", "source": {"seed": 1}}),
        (Move, {"frames": "first", "offset": 1}),
        (interventions.Band, {"bands": [0], "scale": 0.0}),
        (interventions.Steer, {"site": "z", "direction": [1.0]}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_edit_is_of_denoising_passes_and_says_so(kind, fields):
    """Without passes it equals, and is recorded as, the one that names them."""
    edit, named = kind(**fields), kind(**fields, passes="denoise")
    assert edit == named and edit.to_dict() == named.to_dict() and edit.to_dict()["passes"] == "denoise"
    assert "passes='denoise'" in repr(edit)
    values = {key: value for key, value in edit.to_dict().items() if key != "passes"}
    assert interventions.edit_from_dict(values) == named


def test_a_field_that_an_edit_lacks_is_named_with_the_nearest():
    with refused("Knockout takes no 'layer'; did you mean layers?"):
        Knockout(frames="past", layer=3)
    with refused("Steer takes no 'vector'; known ones: .*direction"):
        interventions.Steer("z", [1.0], vector=[1.0])


A_SOURCE = {"seed": 1}
REFUSED = {  # what is named -> the fields as a YAML has them
    "passes 'both' should be 'denoise', 'clean'": {
        "edit": "knockout",
        "frames": 0,
        "passes": "both",
    },
    "frames .*or tokens": {"edit": "knockout", "passes": "all"},
    "frames 'last'": {"edit": "knockout", "frames": "last", "passes": "all"},
    r"heads \[-1\]": {"edit": "ablate", "how": "zero", "heads": [-1], "passes": "all"},
    "'residpost'.*resid_post": {"edit": "patch", "what": "residpost", "source": A_SOURCE, "passes": "all"},
    "source 'x' should be": {"edit": "patch", "what": "z", "source": "x", "passes": "all"},
    "what='kv'": {"edit": "patch", "what": "z", "source": A_SOURCE, "frames": [0], "passes": "all"},
    "source: unknown key 'sed'; did you mean seed": {
        "edit": "patch",
        "what": "z",
        "source": {"sed": 1},
        "passes": "all",
    },
    "offset= or position=": {"edit": "move", "frames": "first", "passes": "all"},
    "edit .'frames': 0.*knockout": {"frames": 0, "passes": "all"},
    "bias: b 'x' should be a valid number": {"edit": "bias", "b": "x", "frames": 0, "passes": "all"},
    "frame'.*frames": {"edit": "knockout", "frame": 0, "passes": "all"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_an_edit_is_refused_in_one_line(message):
    with pytest.raises(InterventionError, match=message) as error:
        interventions.edit_from_dict(REFUSED[message])
    assert "\n" not in str(error.value)


# --- Edits in files, and in flags
def written(tmp_path, text, name="edits.yaml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_yaml_and_back(tmp_path):
    record = record_of(EDITS)
    assert read_edits(written(tmp_path, json.dumps(record["edits"]))) == EDITS  # JSON is YAML
    assert len(record["hash"]) == 16 and record["words"].startswith("Knockout(layers=5")
    bare = "- {edit: ablate, how: zero, layers: 3, heads: [0, 2], passes: denoise}"
    assert read_edits(written(tmp_path, bare)) == [Ablate("zero", layers=[3], heads=[0, 2], passes="denoise")]


HOSTILE = {
    "holds no list of interventions; write": "interventions: knockout\n",
    "intervention 2: edit 'cut' is none": "- {edit: bias, b: 1, frames: 0, passes: all}\n- {edit: cut}\n",
    "passes ('no'|False) should be 'denoise'": "- {edit: knockout, frames: 0, passes: no}\n",
    "the YAML of interventions cannot be read: .* in line": "- {edit: [",
    "YAML of interventions cannot be read: could not determine": "- !!python/object/apply:os.system [echo]\n",
    "duplicate key layers in line 1": "- {edit: ablate, how: zero, layers: 5, layers: 3}\n",
    "holds no intervention": "[]\n",
    "no plain file of at most 1048576 bytes": "#" * (2 << 20),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_a_hostile_yaml_is_one_line(tmp_path, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_edits(written(tmp_path, HOSTILE[message]))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_flags_name_edits_and_replace_those_of_the_config(tmp_path):
    def edits_by(*flags):
        words = ["--config_path", "configs/wan_mini.yaml", *flags]
        return config_from(run_parser("a script", "cache/x.pt").parse_args(words)).interventions

    edits = [edit.to_dict() for edit in EDITS]
    assert edits_by() == [] != edits_by("--interventions", str(written(tmp_path, json.dumps(edits)))) == edits


# --- Single calls
HEADS, DIM, S = 3, 12, 5  # the temporal share of 12 dims is 4: two frequencies
PAST, OWN = (0, 1, 4, 5), (6, 7)  # frames 2 and 3 have left; key frames in order
FRAMES = (*PAST, *OWN)
SLOTS = tuple(Slot(f, f) for f in FRAMES)
LAYOUT = KeyLayout(SLOTS, S, range(4, 6), OWN, sink=range(2))
HERE = Pass(query_frames=OWN, block=3, step=1, timestep=900.0)
SITE = Site(2, "self")
NAMED = {"first": [0], "sink": [0, 1], "past": [0, 1, 2, 3], "own": [4, 5], "own:7": [5]}  # -> slots
NAMED |= {4: [2], 5: [3], 6: []}  # a number is never own


def inputs():
    return drawn(2, 2 * S, HEADS, DIM) * 2, *drawn(2, 2, 6 * S, HEADS, DIM)


def run(*edits, data=None, at=HERE, layout=LAYOUT, site=SITE, **request):
    """Output of the call under edits, and what was captured of it."""
    q, k, v = inputs()
    capture = ATTENTION_WEIGHT_CAPTURE.capture(
        **{"granularity": "frame", "kinds": ("self", "cross")} | request
    )
    with intervene(*edits, data=data), capture as calls, ATTENTION_WEIGHT_CAPTURE.during(at):
        out = attention(q, k, v, site, layout=layout)
    assert all(map(torch.equal, inputs(), (q, k, v)))  # views of the cache stay what they are
    return out, calls[0] if calls else None


def logits_of(q, k):
    return torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * DIM**-0.5


def check(found, q, k, v, bias=0):
    """Compare output and mass of a call with the float64 softmax of q, k and v under bias [H, 1, Lk]."""
    out, call = found
    p = (logits_of(q, k) + bias).softmax(-1)
    close(out.double(), torch.einsum("bhqk,bkhd->bqhd", p, v.double()))
    mass = p.unflatten(3, (-1, S)).sum(-1).unflatten(2, (-1, S)).mean(3)
    close(call["frame_mass"].double(), mass)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_keys_left_out_and_biased_against_float64(data):
    """Edits add up, whatever their number and heads; a head without keys is an error."""
    added, edits = torch.zeros(HEADS, len(FRAMES)), []
    for _ in range(data.draw(st.integers(1, 3))):
        names = data.draw(st.lists(st.sampled_from(list(NAMED)[:-1]), min_size=1, max_size=2, unique=True))
        heads = data.draw(st.lists(st.integers(0, HEADS - 1), min_size=1, max_size=HEADS, unique=True))
        b = data.draw(st.sampled_from([-torch.inf, -1.5, 2.0]))
        chosen = {"frames": [*names, 6], "heads": heads, "passes": "all"}
        edits.append(Knockout(**chosen) if b == -torch.inf else interventions.Bias(b, **chosen))
        slots = sorted({slot for name in names for slot in NAMED[name]})
        added[torch.tensor(heads)[:, None], torch.tensor(slots)] += b
    blind = added.isinf().all(1)
    if blind.any():
        lost = r"head \d would see no key"
        with pytest.raises(InterventionError, match=lost):
            run(*edits)
        return
    (out, call), bias = run(*edits), added.repeat_interleave(S, 1).double()[:, None]
    check((out, call), *inputs(), bias=bias)
    gone = added.isinf()[None, :, None].expand_as(call["frame_logits"])
    assert torch.equal(call["frame_logits"].isnan(), gone) and (call["frame_mass"][gone] == 0).all()
    assert ("attended" in call) == bool(gone.any())
    if gone.any():
        assert torch.equal(call["attended"], ~gone)
    logits = logits_of(*inputs()[:2]) + bias
    for request, name, expected in (
        ({"granularity": "token"}, "attn_weights", logits),
        ({"granularity": "token", "is_logits": False}, "attn_weights", logits.softmax(-1)),
        ({"granularity": "key"}, "key_curve", logits.mean(2)),
    ):
        expected = expected.masked_fill(expected == -torch.inf, torch.nan)
        close(run(*edits, **request)[1][name].double(), expected, equal_nan=True)


class OtherRun:
    """The same call of another run, with tensors that this file made."""

    layout = LAYOUT

    def value(self, where):
        if where.site == "z":
            return torch.full_like(inputs()[0], 7.0)
        return Call(SITE, HERE, *(x.flip(0) + 0.5 for x in inputs()), self.layout)


@pytest.mark.parametrize(
    "what, frames, slots", [("qk", None, range(6)), ("kv", None, range(4)), ("kv", [0, 5], [0, 3])]
)
def test_patched_heads_against_float64(what, frames, slots):
    source, mixed = OtherRun(), dict(zip("qkv", inputs(), strict=True))
    keys = torch.tensor([slot * S + n for slot in slots for n in range(S)])
    for name in what:
        rows = torch.arange(len(OWN) * S) if name == "q" else keys
        for head in (0, 2):
            theirs = getattr(source.value(ActivationSite("self", 2, HERE)), name)
            mixed[name][:, rows, head] = theirs[:, rows, head]
    edit = Patch(what, {"seed": 1}, frames=frames, heads=[0, 2], passes="all")
    check(run(edit, data={edit: source}), *mixed.values())
    outputs = Patch("z", {"seed": 1}, heads=[1], passes="all"), Ablate("resample", {"seed": 1}, passes="all")
    for edit in outputs:
        assert (run(edit, data={edit: source})[0][:, :, 1] == 7).all()


def rope_by_hand(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn the first pairs of x [..., D] by angles [..., pairs], as complex numbers in float64."""
    z = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    pairs = angles.shape[-1]
    turned = torch.cat([z[..., :pairs] * torch.polar(torch.ones_like(angles), angles), z[..., pairs:]], -1)
    return torch.view_as_real(turned).flatten(-2)


def frequencies(base) -> torch.Tensor:
    return torch.as_tensor(base).double() ** -(torch.tensor([0, 2], dtype=torch.float64) / 4)


def test_moved_keys_stand_elsewhere():
    for edit, turns in (
        (Move("first", offset=3, passes="all"), {0: 3}),
        (Move(["sink", 5], position=9, heads=[1], passes="all"), {0: 9, 1: 8, 3: 4}),
    ):
        q, k, v = inputs()
        moved = k.double()
        for slot, by in turns.items():
            for head in edit.heads or range(HEADS):
                rows = slice(slot * S, (slot + 1) * S)
                moved[:, rows, head] = rope_by_hand(k[:, rows, head], (by * frequencies(1e4)).expand(2, S, 2))
        check(run(edit), q, moved, v)


def test_edits_that_turn_keys_know_of_each_other():
    """Keys that were moved or turned by a base of their head's own already stand where the edits say."""
    there, jitter = Move("first", position=9, heads=[0, 2], passes="all"), Jitter(0.5, seed=3, heads=[1, 2])
    alone = run(there)[0]
    for before in (Move("first", offset=4, passes="all"), Move("first", position=2, passes="all")):
        close(run(before, there)[0][:, :, [0, 2]], alone[:, :, [0, 2]])
        assert not torch.allclose(run(before, there)[0][:, :, 1], alone[:, :, 1])
    close(run(there, jitter)[0], run(jitter, there)[0])


def test_jitter_gives_every_head_its_own_base():
    edit, (q, k, v) = Jitter(scale=0.5, seed=3, heads=[0, 2]), inputs()
    bases = edit.bases(SITE.layer, HEADS)
    others = torch.stack([Jitter(0.5, seed=n % 2).bases(n // 2, HEADS) for n in range(4)])
    assert ((bases / 1e4 - 1).abs() <= 0.5).all() and len(others.unique()) == 4 * HEADS
    turned = [q.double(), k.double()]
    for x, plain, frames in zip(turned, (q, k), (OWN, FRAMES), strict=True):
        position = torch.tensor(frames, dtype=torch.float64).repeat_interleave(S)[:, None]  # [L, 1]
        for head in edit.heads:
            drift = frequencies(bases[head]) - frequencies(1e4)
            x[:, :, head] = rope_by_hand(plain[:, :, head], (position * drift).expand(2, -1, -1))
    check(run(edit), *turned, v)
    check(run(Jitter(scale=0.0)), q, k, v)
    everything, one = run(Jitter(0.5))[0], run(Jitter(0.5, heads=[2]))[0]
    assert torch.equal(one[:, :, 2], everything[:, :, 2])  # whichever others it takes


@pytest.mark.parametrize("phase, scale", [(0.0, 0.0), (-2.0, 0.5)])
def test_a_band_is_turned_and_scaled_in_the_queries_of_its_heads(phase, scale):
    edit, (q, k, v) = interventions.Band([1], phase, scale, heads=[0, 2], passes="all"), inputs()
    changed = q.double()
    pair = torch.view_as_complex(changed.unflatten(-1, (-1, 2)).contiguous())
    pair[:, :, [0, 2], 1] *= scale * cmath.exp(1j * phase)
    check(run(edit), torch.view_as_real(pair).flatten(-2), k, v)
    with pytest.raises(InterventionError, match=r"band 9 is not in 0..\d"):
        run(interventions.Band(9, phase=1, passes="all"))


def with_slot(slot: Slot) -> KeyLayout:
    """The layout with another slot of frame 5."""
    return replace(LAYOUT, slots=(*SLOTS[:3], slot, *SLOTS[4:]))


@pytest.mark.parametrize("edit", [Move(5, position=9, passes="all"), Jitter(0.5)], ids=["move", "jitter"])
def test_keys_without_rope_stand_at_0_and_keys_at_several_positions_move_by_an_offset_alone(edit):
    slots = Slot(5, 5, is_rotated=False), Slot(5, 0), Slot(5, 5)
    unturned, at_0, at_5 = (run(edit, layout=with_slot(slot))[0] for slot in slots)
    assert torch.equal(unturned, at_0) and not torch.allclose(unturned, at_5, atol=1e-3)
    mixed, by = with_slot(Slot(5, MIXED)), Move(5, offset=2, passes="all")
    assert torch.equal(run(by, layout=mixed)[0], run(by)[0])
    with pytest.raises(InterventionError, match="stand at several positions"):
        run(edit, layout=mixed)


def test_a_slot_with_another_frame_for_each_item_is_edited_where_all_items_agree():
    """Item 0 holds frame 4 in slot 2, item 1 frame 3: there a number, or a position, is of one item alone."""
    layout = replace(LAYOUT, slots=(*SLOTS[:2], Slot(4, 4, items=(4, 3)), *SLOTS[3:]))
    numbers = [Knockout(frames=frame, passes="all") for frame in (3, 4)]
    for edit in (*numbers, Move("past", position=0, passes="all"), Jitter()):
        with pytest.raises(InterventionError, match="slot 2 holds another frame for each batch item"):
            run(edit, layout=layout)
    for edit in (Knockout(frames=[0, 5], passes="all"), Move("past", offset=2, passes="all")):
        assert torch.equal(run(edit, layout=layout)[0], run(edit)[0])


def test_prompt_tokens_are_knocked_out_of_cross_attention():
    q, k, v = inputs()
    out, call = run(Knockout(tokens=[0, 3], heads=[1], passes="all"), site=Site(0, "cross"), layout=None)
    logits = logits_of(q, k)
    logits[:, 1, :, [0, 3]] = -torch.inf
    p = logits.softmax(-1)
    close(out.double(), torch.einsum("bhqk,bkhd->bqhd", p, v.double()))
    close(call["cross_mass"].double(), p.unflatten(2, (-1, S)).mean(3), atol=1e-6)
    assert torch.equal(call["attended"], call["cross_mass"] > 0)


def test_a_call_that_is_not_selected_keeps_its_bits_and_an_edit_without_calls_warns():
    recache = Pass(query_frames=OWN, step=None, is_clean_pass=True, is_recache=True)
    first = {"frames": "first", "passes": "all"}
    others = [{"layers": [1]}, {"blocks": [0]}, {"branch": "uncond"}, {"frames": [2, 6]}]
    edits = [Knockout(**first | other) for other in (*others, {"steps": [0], "passes": "denoise"})]
    edits += [Ablate("zero", attention="cross", passes="all"), Knockout(**first)]
    for edit in edits:
        at = recache if edit is edits[-1] else HERE
        with pytest.warns(UserWarning, match="no call was edited by"):
            out, call = run(edit, at=at)
        assert (call is None) == at.is_recache  # which is not captured
        assert torch.equal(out, attention(*inputs(), SITE, layout=LAYOUT)), edit


def test_an_edit_needs_the_pass_and_what_it_takes_its_values_from():
    knockout = Knockout(frames=0, passes="all")
    with pytest.raises(ConfigError, match="need the pass of each call"), intervene(knockout):
        attention(*inputs(), SITE, layout=LAYOUT)
    with pytest.raises(ValueError, match="takes no edits"), intervene(knockout):
        attention(*inputs(), SITE, torch.ones(10, 30, dtype=torch.bool), LAYOUT)
    for edit in (Ablate("mean", passes="all"), Patch("z", {"seed": 1}, passes="all")):
        with pytest.raises(InterventionError, match="needs data"):
            run(edit)
    with pytest.raises(InterventionError, match="intervene takes"), intervene():
        pass

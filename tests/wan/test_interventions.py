"""Edits as values: what is accepted, how they read, and that they survive being written down."""

import json

import pytest

from wan.interventions import (
    Ablate,
    Bias,
    InterventionError,
    Jitter,
    Knockout,
    Move,
    Patch,
    Source,
    edit_from_dict,
    fingerprint,
)

EDITS = {
    "knock out the first frame: layer 5, head 10, denoising passes": Knockout(
        frames="first", layers=[5], heads=[10], passes="denoise"
    ),
    "knock out prompt tokens 0..2: all layers, all heads, denoising passes, branch cond": Knockout(
        tokens=range(3), passes="denoise", branch="cond"
    ),
    "add -2 to the logits of frame 0 and the sink: all layers, all heads, denoising steps 0 and 1 and "
    "clean pass": Bias(-2, frames=["sink", 0], passes="all", steps=[1, 0]),
    "knock out own frames 18 and 19: layers 1 and 3, all heads, block 6, all passes": Knockout(
        frames=["own:18", "own:19"], layers=(3, 1, 3), blocks=6, passes="all"
    ),
    "replace the output of heads by its mean over the reference set: all layers, heads 0..11, "
    "denoising passes": Ablate("mean", heads=range(12), passes="denoise"),
    "replace the output of cross-attention heads by 0: all layers, all heads, clean pass": Ablate(
        "zero", attention="cross", passes="clean"
    ),
    "replace the output of heads by that of the run of prompt 'a dog', seed 3: all layers, all heads, "
    "all passes": Ablate("resample", source=Source("a dog", 3), passes="all"),
    "take keys and values of heads, for the past, from the run of seed 1: all layers, all heads, "
    "denoising passes": Patch("kv", {"seed": 1}, passes="denoise"),
    "move the keys of the first frame by +3 frames: all layers, all heads, clean pass": Move(
        "first", offset=3, passes="clean"
    ),
    "jitter the RoPE base of every head by up to 80% (seed 0): layer 2, all heads, all passes": Jitter(
        layers=2
    ),
}
REFUSED = {
    "passes 'both' is not one of denoise, clean, all": lambda: Knockout(frames=0, passes="both"),
    "takes frames .* or tokens": lambda: Knockout(passes="all"),
    "Bias takes frames": lambda: Bias(1.0, frames=0, tokens=[1], passes="all"),
    "b nan is not a finite number": lambda: Bias(float("nan"), frames=0, passes="all"),
    "frame 'last' is not a number from 0, nor first, sink, past, own": lambda: Knockout(
        frames="last", passes="all"
    ),
    "frame True is not": lambda: Knockout(frames=[True], passes="all"),
    "frame -1 is not": lambda: Knockout(frames=-1, passes="all"),
    "frame 'own:x' is not": lambda: Knockout(frames="own:x", passes="all"),
    r"frames \[\]: name a number": lambda: Knockout(frames=[], passes="all"),
    r"heads \[-1\]: they count from 0": lambda: Ablate("zero", heads=[-1], passes="all"),
    r"layers \[\]: name at least one": lambda: Ablate("zero", layers=[], passes="all"),
    "layers '5' are not whole numbers": lambda: Ablate("zero", layers="5", passes="all"),
    r"blocks \[1.0\] are not whole numbers": lambda: Ablate("zero", blocks=[1.0], passes="all"),
    "branch 'both' is not one of cond, uncond": lambda: Ablate("zero", passes="all", branch="both"),
    "steps are denoising steps": lambda: Ablate("zero", steps=[4], passes="clean"),
    "how 'one' is not one of zero, mean": lambda: Ablate("one", passes="all"),
    "resample, and nothing else, takes a source": lambda: Ablate("resample", passes="all"),
    "takes a source of prompt, seed or weights": lambda: Ablate("zero", Source(seed=1), passes="all"),
    "takes no file of means": lambda: Ablate("frame_mean", "means.pt", passes="all"),
    "what 'k' is not one of z, qk, kv": lambda: Patch("k", Source(seed=1), passes="all"),
    "Patch takes a source": lambda: Patch("z", None, passes="all"),
    "frames are of what='kv'": lambda: Patch("z", Source(seed=1), frames=[0], passes="all"),
    "what='kv' is of cached frames": lambda: Patch("kv", Source(seed=1), attention="cross", passes="all"),
    "name another prompt, seed or weights": Source,
    "seed '1' is not a whole number": lambda: Source(seed="1"),
    "takes offset= or position=": lambda: Move("first", passes="all"),
    "offset 0.5 is not a whole number": lambda: Move("first", offset=0.5, passes="all"),
    "own keys stand where their queries stand": lambda: Move("own", offset=1, passes="all"),
    "scale 1 is not in 0 .. 1": lambda: Jitter(1),
    "Jitter is of a whole rollout": lambda: Jitter(blocks=[1]),
}

MALFORMED = {
    "'knockout' is not an edit": "knockout",
    "edit None is not one of knockout, bias": {"frames": 0, "passes": "all"},
    "edit 'cut' is not one of": {"edit": "cut"},
    "knockout: unknown field 'frame'; it takes": {"edit": "knockout", "frame": 0, "passes": "all"},
    "knockout: passes is missing and has no default: denoise, clean, all": {"edit": "knockout", "frames": 0},
    "bias: b is missing": {"edit": "bias", "frames": 0, "passes": "all"},
    "bias: b 'x' is not a finite number": {"edit": "bias", "b": "x", "frames": 0, "passes": "all"},
    "patch: source: unknown field 'sed'": {
        "edit": "patch",
        "what": "z",
        "source": {"sed": 1},
        "passes": "all",
    },
}


@pytest.mark.parametrize("words", EDITS)
def test_an_edit_reads_as_words_and_survives_python_and_json(words):
    edit = EDITS[words]
    assert eval(repr(edit)) == edit
    assert edit_from_dict(json.loads(json.dumps(edit.to_dict()))) == edit


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_an_edit_is_refused_in_one_line(message):
    with pytest.raises(InterventionError, match=message) as error:
        REFUSED[message]()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("message", MALFORMED)
def test_what_is_not_an_edits_mapping_is_refused_in_one_line(message):
    with pytest.raises(InterventionError, match=message):
        edit_from_dict(MALFORMED[message])


def test_passes_have_no_default():
    with pytest.raises(TypeError, match="passes"):
        Knockout(frames=0)


def test_equal_edits_are_one_value_and_have_one_fingerprint():
    one, same = (
        Knockout(frames=0, heads=[2, 1], passes="all"),
        Knockout(frames=[0], heads=(1, 2), passes="all"),
    )
    other = Knockout(frames="first", heads=[1, 2], passes="all")
    assert one == same and hash(one) == hash(same) and fingerprint([one]) == fingerprint([same])
    assert len({fingerprint(edits) for edits in ([one], [other], [one, other], [other, one])}) == 4


@pytest.mark.parametrize(
    "passes, steps, chosen",
    [("denoise", None, [0, 1, 2]), ("denoise", [1], [1]), ("clean", None, [3]), ("all", [0], [0, 3])],
)
def test_passes_choose_and_steps_narrow_denoising(passes, steps, chosen):
    edit = Ablate("zero", passes=passes, steps=steps)
    assert [step for step in (-1, 0, 1, 2, 3) if edit.selects_pass(step, step in (-1, 3))] == chosen

"""Words of titles: every kind of edit has plain ones, without Python and without a hash."""

import pytest

from experiments.caches import titles
from wan.interventions import KINDS, edit_from_dict

EDITS = {
    "knockout": ({"frames": "past", "layers": [3, 4]}, "keys of past frames left out, in layers 3–4"),
    "bias": ({"frames": [0, 1, "own:2"], "b": -2}, "logits of keys of frames 0–1 and own:2 -2"),
    "ablate": ({"how": "mean", "heads": 5}, "outputs of heads set to their mean over prompts, in head 5"),
    "patch": (
        {"what": "kv", "source": {"prompt": "a"}},
        "keys and values of past frames taken from prompt “a”",
    ),
    "move": ({"frames": "first", "offset": 3}, "keys of the first frame moved by +3 frames"),
    "jitter": ({"scale": 0.5}, "RoPE's base of every head jittered by 0.5"),
    "band": ({"bands": [0, 2], "scale": 0}, "RoPE bands 0, 2 turned by 0 rad, scaled by 0"),
    "steer": (
        {"site": "resid_post", "direction": [1.0, 2.0]},
        "the residual stream steered by 1 times a direction",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_edit_has_words(kind):
    fields, words = EDITS[kind]
    edit = edit_from_dict({"edit": kind, "passes": "denoise", **fields}).to_dict()
    assert titles.edit_in_words(edit) == f"{words}, in denoising passes"


def test_words_of_prompt_and_seed():
    assert titles.prompt_in_words("a\nred circle") == "“a red circle”"
    assert titles.prompt_in_words(None) == "prompt not recorded"
    assert (titles.seed_in_words(0), titles.seed_in_words(None)) == ("seed 0", "seed not recorded")


def test_edits_of_users_older_files_and_many():
    custom = {
        "edit": "custom",
        "sites": ["resid_post", "z"],
        "function": "halve",
        "passes": "all",
        "steps": [0, 1],
    }
    words = "the residual stream and outputs of heads changed by halve, in steps 0–1"
    assert titles.edits_in_words({"edits": [custom], "hash": "0123"}) == words
    assert titles.edits_in_words({"words": "Knockout(frames='past')"}) == "Knockout(frames='past')"
    assert titles.edits_in_words(None) == ""
    long = titles.edits_in_words({"edits": [custom] * 9})
    assert len(long) <= titles.LONGEST and long.endswith("…")

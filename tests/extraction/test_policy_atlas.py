"""An atlas under each kind of policy: what it says of slots, and that it can be saved and read."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers.rollouts import TWO_STEPS
from omegaconf import OmegaConf

from experiments import figures
from experiments.analysis.axes import AXES, key_columns, key_matrix, slot_mass, slots_of, survival
from experiments.caches import load_cache, save_cache
from experiments.caches.view import open_profiles
from experiments.extraction.causal import policy_atlas
from experiments.figures.layer import last_block_attention, slot_map, survival_map

POLICIES = [
    {"name": "window", "window": 6, "sink": 1},
    {"name": "deep_sink", "window": 6, "sink": 2},
    {"name": "participative", "window": 6, "sink": 1, "budget": 5, "recent": 3},
    {"name": "two_memories", "window": 6, "sink": 1},
    {"name": "memory_bank", "window": 6, "sink": 1, "bank": 2, "interval": 1},
    {"name": "relative", "window": 9, "sink": 5, "released": "longlive_infinity"},  # zeros in block 0
]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The miniature's, of fewer steps."""
    monkeypatch.chdir(ROOT)
    path = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.merge(OmegaConf.load("configs/wan_mini.yaml"), TWO_STEPS), path)
    return path


@pytest.mark.parametrize("settings", POLICIES, ids=lambda settings: settings["name"])
def test_an_atlas_says_what_lay_in_its_slots(settings, tmp_path, config):
    made = policy_atlas(config, settings, 12)
    save_cache(tmp_path / "atlas.pt", made)
    atlas = load_cache(tmp_path / "atlas.pt")
    frames, positions = slots_of(atlas, layer=1)
    mass = slot_mass(atlas, layer=1, step=0)
    np.testing.assert_allclose(mass.sum(1), 1, atol=1e-5)
    assert frames.shape == positions.shape and len(frames) == 4 and mass.shape[1] == (frames[-1] != -9).sum()
    assert list(frames[-1][frames[-1] != -9][-3:]) == [9, 10, 11]
    assert atlas["schema_version"] == (1 if settings["name"] == "window" else 2)
    assert ("slot_mass" in atlas) == (settings["name"] not in ("window", "deep_sink"))
    if settings["name"] == "deep_sink":
        assert positions[-1].tolist() == list(range(6, 12))
        assert torch.isfinite(atlas["frame_logits"][:, :, :, 9, [0, 1, 8, 9, 10, 11]]).all()
    if settings["name"] == "participative":
        tokens = atlas["tokens_kept"].sum(2)
        assert (tokens[:, -1] == 5 * atlas["frame_seq_length"]).all()
    view = open_profiles(atlas, 0, "mass")
    rows = slice(3 if settings.get("released") else 0, None)  # zeros, which are of no frame, have mass too
    np.testing.assert_allclose(np.nansum(view.key_matrix(1), -1)[:, rows], 1, atol=1e-5)
    for axis in AXES:
        check_axis(atlas, axis, settings)
    kept = survival(atlas)
    assert kept.shape == (8, 12) and (kept[:, -3:] == 1).all() and 0 <= kept.min() < 1
    count = mass.shape[1]
    for figure in (
        slot_map(frames, positions, 12, "slots"),
        last_block_attention(mass, frames[-1][:count], positions[-1][:count], "attention"),
        survival_map(kept, "survival"),
    ):
        figure.draw_without_rendering()
        assert figure.axes[0].get_title()


def check_axis(atlas, axis, settings):
    """Columns along an axis hold all of the mass, and the matrix the same values."""
    columns = key_columns(atlas, 1, 0, "mass", axis)
    assert columns.values.shape[1] == len(columns.labels) == len(columns.marks)
    matrix, labels = key_matrix(atlas, 1, 0, "mass", axis)
    own = matrix[:, -3:].mean(1)
    doubled = settings["name"] == "memory_bank"  # a banked frame may lie in the window, too
    if not doubled:
        np.testing.assert_allclose(np.nansum(columns.values, 1), 1, atol=1e-5)
        at = {label: n for n, label in enumerate(labels)}
        for n, label in enumerate(columns.labels):
            np.testing.assert_allclose(own[:, at[label]], columns.values[:, n], atol=1e-6)
    np.testing.assert_allclose(np.nansum(own, 1), 1, atol=1e-5)
    sink = settings.get("sink", 0) if settings["name"] != "window" or axis == "position" else settings["sink"]
    assert columns.marks.count("sink") == sink
    assert ("average" in columns.marks) == (settings["name"] == "two_memories")
    assert ("chosen tokens" in columns.marks) == (settings["name"] == "participative")
    bank, later = (set(slots_of(atlas, 1)[0][-1][at].tolist()) for at in (slice(1, 3), slice(3, None)))
    in_columns = len(bank - later) if axis == "frame" else 2  # a frame has one column, a slot has another
    assert columns.marks.count("memory") == (in_columns if doubled else 0)
    figure = figures.key_maps({"Layer 1": columns}, "mass", "keys")
    figure.draw_without_rendering()
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= {m for m in columns.marks if m}


def test_an_atlas_of_classes_of_heads_can_be_saved(tmp_path, config):
    """Also where one class keeps averages, whose mass is of no frame."""
    rows = [",".join("ab"[(layer + head) % 2] for head in range(12)) for layer in range(8)]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    for one, other in (
        ({"name": "full"}, {"name": "window", "window": 6, "sink": 1}),
        ({"name": "relative", "window": 6, "sink": 1}, {"name": "ema_sink", "window": 6, "sink": 2}),
    ):
        settings = {
            "name": "per_head",
            "file": str(tmp_path / "labels.csv"),
            "policies": {"a": one, "b": other},
        }
        save_cache(tmp_path / "atlas.pt", policy_atlas(config, settings, 12))
        atlas = load_cache(tmp_path / "atlas.pt")
        assert atlas["schema_version"] == 2
        torch.testing.assert_close(atlas["slot_mass"].nansum(-1), torch.ones(8, 3, 12, 12))
        averages = atlas["slot_frame"][0, -1] == -1
        assert averages.any() == (other["name"] == "ema_sink")

"""Averages of frames that are gone: columns of their own in views, figures and the page's numbers."""

import numpy as np
import pytest
import torch
from helpers import synthetic_caches
from helpers.pages import decode, decode_matrices

from experiments import figures
from experiments.analysis import head_measures as head_choice
from experiments.analysis import reports
from experiments.analysis.panels import ProfileMap
from experiments.caches import load_cache, save_cache
from experiments.caches.view import Caption, open_profiles
from experiments.figures.html_page import fit, open_passes_of
from experiments.figures.style import AVERAGES

SLOTS = [[0, 1, 2, -9, -9], [-1, 3, 4, 5, -9], [-1, -1, 6, 7, 8]]  # frames of the slots of three blocks


@pytest.fixture
def atlas(tmp_path):
    """Nine frames, three a block; the second block sees one average, the last one two."""
    cache, random = synthetic_caches.atlas(curve=False), np.random.default_rng(3)
    layers, passes, H, F, _ = cache["frame_mass"].shape
    slots = torch.full((layers, passes, H, F, 5), torch.nan)
    for name in ("logits", "mass"):
        cache[f"frame_{name}"] = torch.full((layers, passes, H, F, F), torch.nan)
        cache[f"slot_{name}"] = slots.clone()
        for block, frames in enumerate(SLOTS):
            there = [n for n, frame in enumerate(frames) if frame != -9]
            drawn = torch.tensor(random.normal(size=(layers, passes, H, 3, len(there)))).float()
            values = drawn.softmax(-1) if name == "mass" else drawn
            cache[f"slot_{name}"][..., 3 * block : 3 * block + 3, : len(there)] = values
            for n in there:
                if frames[n] >= 0:
                    cache[f"frame_{name}"][..., 3 * block : 3 * block + 3, frames[n]] = values[..., n]
    fields = torch.tensor(SLOTS, dtype=torch.int32).expand(layers, -1, -1).contiguous()
    cache |= {"schema_version": 2, "slot_frame": fields, "slot_position": fields, "sink_slots": [0, 1, 2]}
    cache |= {"slot_tokens": torch.full_like(fields, 5), "memory_slots": [0, 0, 0]}
    save_cache(tmp_path / "a.pt", cache)
    return tmp_path / "a.pt"


@pytest.mark.parametrize(("quantity", "stored"), [("mean_logit", "slot_logits"), ("mass", "slot_mass")])
def test_a_view_has_them_after_the_frames(atlas, quantity, stored):
    cache = load_cache(atlas)
    view = open_profiles(cache, 4, quantity)
    assert view.num_averages == view.caption.averages == 2
    matrix, profile, slots = view.key_matrix(5), view.key_profile(5), cache[stored][2, 1].numpy()
    np.testing.assert_array_equal(matrix[..., :9], view.frame_matrix(5))
    np.testing.assert_array_equal(matrix[:, 6:, 9:], slots[:, 6:, :2])
    np.testing.assert_array_equal(matrix[:, 3:6, 9], slots[:, 3:6, 0])
    assert np.isnan(matrix[:, :3, 9:]).all() and np.isnan(matrix[:, 3:6, 10]).all()
    np.testing.assert_allclose(profile[:, 9:], slots[:, 6:, :2].mean(1), rtol=1e-6)
    if quantity == "mass":
        np.testing.assert_allclose(np.nansum(matrix, -1), 1, atol=1e-6)
    assert "on keys of frames 6–8 and 2 averages of frames that are gone" in reports.describe(view)
    assert open_profiles(synthetic_caches.atlas()).key_profile(0).shape == (3, 9)


def test_figures_mark_them(atlas):
    view = open_profiles(load_cache(atlas), 4, "mass")
    panels = head_choice.choose_heads(view, [(5, 1, "x")]).panels
    assert panels[0].profile.shape == (9,) and panels[0].no_preference == 1 / 5
    profile, matrix = view.key_profile(5), view.key_matrix(5)
    beside = Caption(view.quantity, view.pass_label, averages=view.num_averages)
    maps = [ProfileMap("m", "mass", profile, averages=2)]
    made = [
        figures.head_curves(panels, view.caption),
        figures.one_head(panels[0], view.caption),
        figures.head_grid(profile, ["a", "b", "c"], view.caption, layer=5),
        figures.all_heads(profile, view.caption, layer=5),
        figures.layer_comparison(view.key_profiles(), view.layers, view.caption),
        figures.layers_together(view.key_profiles(), view.layers, view.caption),
        figures.frame_maps(matrix, view.matrix_rows, beside, layer=5),
        figures.profile_heat_maps(maps, "t"),
        figures.sweep_curves({"x": profile[:2]}, view.caption, ["a", "b"]),
    ]
    for figure in made:
        axis = next(axis for axis in figure.axes if axis.get_xticklabels())  # the lowest have labels
        words = {text.get_text() for text in figure.legends[0].get_texts()}
        names = {label.get_text() for label in axis.get_xticklabels()}
        assert AVERAGES in words and (names >= {"μ1", "μ2"} or "μ" in names)
        assert axis.get_xlim()[1] >= 10.4
        assert all(int(name) < 9 for name in names if not name.startswith("μ"))
    bars = {round(bar.get_x() + bar.get_width() / 2): bar for bar in made[2].axes[0].containers[1]}
    assert {at: bar.get_height() for at, bar in bars.items()} == pytest.approx(
        {9: profile[0, 9], 10: profile[0, 10]}
    )
    plain = figures.head_grid(profile[:, :9], ["a"] * 3, Caption("mass", "s"), layer=5)
    assert not any(AVERAGES in text.get_text() for one in plain.legends for text in one.get_texts())


def test_the_page_carries_them(atlas):
    passes, layers = open_passes_of(atlas)
    data, cache = fit(passes, layers, 10**7), load_cache(atlas)
    assert data["averages"] == ["μ1", "μ2"] and data["num_frames"] == 9
    for p, step in enumerate((0, 4)):
        view, one = open_profiles(cache, step, "mass"), data["passes"][p]
        found = decode(one["quantities"]["mass"]["profiles"], 3, 3)
        np.testing.assert_allclose(found, view.key_profiles(), atol=1e-4)
        cells = decode_matrices(one["matrices"]["mass"], 3, 3, 9, averages=2)
        np.testing.assert_allclose(cells, [view.key_matrix(layer) for layer in layers], atol=1e-4)
        np.testing.assert_allclose(np.nansum(cells, -1), 1, atol=1e-3)

"""layer_atlas.ipynb from top to bottom, the head_measures behind it, and its drawings."""

import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import executed, synthetic_caches
from helpers.smaller import smaller_atlas

from experiments.analysis import head_measures, panels, published
from experiments.analysis import reports as atlas_reports
from experiments.analysis import taxonomy as head_taxonomy
from experiments.caches import load_cache, save_cache
from experiments.caches.view import open_profiles
from experiments.extraction.causal import policy_atlas
from experiments.figures import atlas, style


def always(layer):
    """Files of any atlas that has logits."""
    of_layer = {
        f"layer{layer}_{name}.svg" for name in ("per_head_grid", "frame_maps", "passes", "logits_and_mass")
    }
    whole = {"profile_strips.svg", "measures.svg", "first_frame.svg", "placebos.svg", "key_frames.svg"}
    return of_layer | whole | {"kinds_of_heads.svg", "stability.svg"}


def run(tmp_path, **parameters):
    return executed.run("layer_atlas.ipynb", tmp_path, **parameters)


def words(path):
    return re.sub(r"<[^>]*>", " ", path.read_text())


def with_bands(cache, names=("time, period 6.28 frames", "height", "width")):
    """Bands that are known shares of the logits."""
    shares = torch.tensor([0.5, 0.3, 0.2])[: len(names)]
    return cache | {
        "frame_logits_by_band": cache["frame_logits"][..., None] * shares,
        "rope_bands": list(names),
    }


def with_words(cache, tokens=("▁a", "▁cine", "matic", "</s>")):
    """Mass on prompt tokens: head h gives (h + 1) / 100 to each."""
    N, P, H, F, _ = cache["frame_logits"].shape
    mass = (torch.arange(H)[:, None, None] + 1.0).expand(N, P, H, F, len(tokens)) / 100
    return cache | {"cross_mass": mass.contiguous(), "cross_tokens": list(tokens)}


def test_published_data(tmp_path):
    printed = run(tmp_path, CACHE_PATH="../cache/published/self_forcing_dmd_eagle_21f.pt")
    assert {p.name for p in (tmp_path / "figures").iterdir()} == always(1) | {"label_agreement.svg"}
    assert (
        "First-frame effect: mean 0.64, median 0.42 logits; 23 of 360 heads above 2; "
        "208 above all of 14 placebo frames\n"
        "Key-frame contrasts: 0.76, 0.13, 0.23 for frames 0, 1, 2\n"
    ) in printed
    assert re.search(r"eagle_21f|this cache, pass 0.*: 90\.0% agree .* majority class 47\.8%", printed)
    assert "One pass in this cache" in printed and "Mass per prompt word: absent in this cache" in printed
    assert "Shown: layer 1\n" in printed and "absent: attention mass: no mass in this cache" in " ".join(
        words(tmp_path / "figures" / "layer1_logits_and_mass.svg").split()
    )
    assert all(f"Layer {layer} " in words(tmp_path / "figures" / "profile_strips.svg") for layer in range(30))
    agree = re.search(r"anchor / wave / veil: agree on (\d+\.\d)% of 360 heads", printed)[1]
    assert float(agree) >= 88
    assert "static / dynamic: ours absent, no mass in this cache; published there" in printed
    assert "first_mass: absent, no mass in this cache" in printed
    assert "RoPE bands: absent in this cache; capture them with: " in printed
    assert re.search(r"chosen on this cache.* 8[89]\.\d% on self_forcing_dmd_castle_21f", printed)
    shown = words(tmp_path / "figures" / "kinds_of_heads.svg")
    assert f"{agree}% agree" in shown and "absent:" in shown and "label differs" in shown


def test_own_atlas_with_everything(tmp_path):
    cache = with_words(with_bands(synthetic_caches.atlas(F=12, H=3, layers=(0, 1, 5))))
    save_cache(tmp_path / "c.pt", cache)
    printed = run(tmp_path, CACHE_PATH=str(tmp_path / "c.pt"), LAYER=5, HEAD=2, STEP=4)
    assert {p.name for p in (tmp_path / "figures").iterdir()} == always(5) | {
        "rope_bands_layer5_head2.svg",
        "layer5_prompt_words.svg",
        "first_frame_passes.svg",
    }
    assert re.search(r"clean pass \(t = 0\): mean -?\d\.\d\d, r = -?\d\.\d\d with the first pass", printed)
    assert "2 passes in this cache" in printed
    assert "On the whole prompt: 0.080 of the mass, mean over heads" in printed
    assert "  cinematic: 0.040, at most 0.060 (H2)\n" in printed
    assert "absent" not in printed.replace("published absent, published for another model", "")
    assert "No published labels of this model" in printed and "clean pass (t = 0)" in printed
    shown = words(tmp_path / "figures" / "rope_bands_layer5_head2.svg")
    assert "Layer 5, head 2" in shown and "time, period 6.28 frames" in shown
    assert "time, period 6.28 frames: mean" in printed


def test_mass_alone_and_a_head_that_is_not_there(tmp_path):
    cache = with_bands(synthetic_caches.atlas(curve=False))
    for name in ("frame_logits", "frame_logits_by_band", "rope_bands"):
        cache.pop(name)
    save_cache(tmp_path / "c.pt", cache | {"is_logits": False})
    printed = run(tmp_path, CACHE_PATH=str(tmp_path / "c.pt"), LAYER=77)
    assert "first_minus_middle: absent, no mean logits in this cache" in printed
    assert "first_mass (share of all): mean" in printed
    assert {p.name for p in (tmp_path / "figures").iterdir()} == always(0) - {
        "stability.svg",
        "placebos.svg",
        "key_frames.svg",
    }
    assert "First-frame effect: absent, no mean logits in this cache" in printed
    assert "Note: layer 77 not in this cache, which has layers 0–1, 5; shown: layer 0" in printed


def test_measures_keep_noise_apart():
    """Only the two older scores and the mass as a share of all may change when the own block's values do."""
    cache = synthetic_caches.atlas(F=12, H=3)
    spoiled = {name: value.clone() if torch.is_tensor(value) else value for name, value in cache.items()}
    block = torch.arange(12) // 3
    for name in ("frame_logits", "frame_mass"):
        spoiled[name][..., block[:, None] == block[None]] += 7
    maps, after = (
        {
            m.name: m.values
            for m in head_measures.measure_heads(
                head_measures.open_quantity(c, 0, "mean_logit"), head_measures.open_quantity(c, 0, "mass")
            )
        }
        for c in (cache, spoiled)
    )
    changed = {name for name in maps if not np.allclose(maps[name], after[name], equal_nan=True)}
    assert changed == {"first_minus_middle"}
    assert all(values.shape == (3, 3) for values in maps.values())


def test_label_maps_and_confusion():
    view = open_profiles(load_cache(ROOT / published.FOLDER / "self_forcing_dmd_castle_21f.pt"))
    labels = published.labels_for(view, ROOT / published.FOLDER)
    rule = head_taxonomy.load_thresholds(ROOT / "configs/taxonomy.yaml")
    ours, theirs, reach, static = head_measures.label_maps(view, None, rule, labels)
    assert (
        reach.labels is None
        and reach.missing_reason == "no mass in this cache"
        and static.labels.sum() == labels[1].sum()
    )
    assert ours.differs.sum() == (ours.labels != theirs.labels).sum() and 0 < ours.differs.sum() <= 43
    lines = atlas_reports.confusion_lines([ours, theirs, reach, static])
    counts = [int(n) for n in re.findall(r"published (\d+) anchor, (\d+) wave, (\d+) veil", lines)[0]]
    assert sum(counts) == (ours.labels == head_taxonomy.ANCHOR).sum()
    assert published.labels_for(open_profiles(synthetic_caches.atlas()), ROOT / published.FOLDER) is None
    assert sorted(published.views_like(view, ROOT / published.FOLDER)) == [
        "self_forcing_dmd_castle_72f",
        "self_forcing_dmd_eagle_21f",
        "self_forcing_dmd_eagle_72f",
    ]


def test_bands_of_a_head():
    cache = with_bands(synthetic_caches.atlas(curve=False))
    view = open_profiles(cache, step=4)
    values, names = head_measures.band_profile(cache, view, 1, 2)
    np.testing.assert_allclose(values.sum(-1), view.frame_profile(1)[2], atol=1e-6)
    np.testing.assert_allclose(values[:, 1], 0.3 * view.frame_profile(1)[2], atol=1e-6)
    assert atlas_reports.why_no_bands(cache, 4, 0) == "RoPE bands: layer 4, head 0 is not in this cache"
    assert "--rope_bands" in atlas_reports.why_no_bands(synthetic_caches.atlas(), 1, 0)
    assert (
        head_measures.band_profile(cache, view, 1, 3) is None
        and head_measures.band_profile(cache, view, 4, 0) is None
    )
    lines = atlas_reports.band_lines(values, names, view.context_frames).split("\n")
    profile = view.frame_profile(1)[2, :6]  # half of it is in the first band
    assert lines[0] == (
        f"time, period 6.28 frames: mean {profile.mean() / 2:+.3f}, "
        f"std over context frames {profile.std() / 2:.3f}"
    )
    assert atlas_reports.band_lines(values, names, ()).startswith("no context")


@pytest.mark.parametrize(("N", "H"), [(1, 3), (8, 12), (40, 40)])
def test_every_size_draws(tmp_path, N, H):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(N, H))
    maps = [panels.HeadMap(s, s, "unit", s, values) for s in ("diverging", "ratio", "share", "sequential")]
    maps += [panels.HeadMap("gone", "gone", "unit", "share", None, "no mass in this cache")]
    maps += [panels.HeadMap("nan", "nan", "unit", "sequential", np.full((N, H), np.nan))]
    figure = atlas.head_maps(maps, range(N), subtitle="pass 0")
    assert "no mass in this cache" in " ".join(words(style.save_svg(figure, tmp_path / "m.svg")).split())
    labels = rng.choice([1, -1, 2], (N, H))
    kinds = [
        panels.LabelMap("a", head_taxonomy.KINDS, labels, "", labels == 1),
        panels.LabelMap("b", head_taxonomy.LOCALITY, None, "none"),
    ]
    figure = atlas.label_maps(kinds, range(N), subtitle="pass 0")
    (dots,) = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert len(dots.get_xdata()) == (labels == 1).sum()
    drawn = figure.axes[0].collections[0].get_array().reshape(N, H)
    np.testing.assert_array_equal(np.array(list(head_taxonomy.KINDS))[drawn.astype(int)], labels)


def test_keys_of_a_cache_policy_along_positions(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = {"name": "two_memories", "window": 6, "sink": 1}
    atlas = policy_atlas("configs/wan_mini.yaml", settings, 12)
    save_cache(tmp_path / "atlas.pt", smaller_atlas(atlas, layers=(0, 1), heads=3))
    run(tmp_path, CACHE_PATH=str(tmp_path / "atlas.pt"), KEY_AXIS="position", PUBLISHED=str(tmp_path))
    drawn = tmp_path / "figures"
    assert {"keys.svg", "survival.svg"} <= {path.name for path in drawn.iterdir()}
    assert "average" in words(drawn / "keys.svg")
    assert "Temporal position" in words(drawn / "layer1_frame_maps.svg")

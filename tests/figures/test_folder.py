"""Figures name their model, prompt and cache; a journal's width is exact; a PDF stands beside where asked."""

import re

import numpy as np
import pytest
from helpers import synthetic_caches

from experiments.analysis.head_measures import choose_heads, heads_of, no_preference
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from experiments.figures import FigureFolder, about, head_curves, head_grid, layer_comparison, one_head, style


@pytest.fixture(autouse=True)
def natural_width():
    yield
    style.use_width(None)


@pytest.fixture
def opened(tmp_path):
    path = tmp_path / "c.pt"
    save_cache(path, synthetic_caches.atlas(F=21, H=4))
    return open_profiles(load_cache(path)), path


def drawings(view):
    panels = choose_heads(view, heads_of(view, "auto")).panels
    profile = view.frame_profile(view.layers[0])
    titles = [f"H{h}" for h in range(len(profile))]
    return {
        "curves": lambda: head_curves(panels, view.caption),
        "one": lambda: one_head(panels[0], view.caption),
        "grid": lambda: head_grid(profile, titles, view.caption, layer=0),
        "layers": lambda: layer_comparison(view.profiles(), view.layers, view.caption),
    }


@pytest.mark.parametrize(("width", "points"), [("column", 3.25 * 72), ("page", 6.75 * 72)])
def test_a_journals_width_is_exact_and_its_letters_are_8_points(opened, tmp_path, width, points):
    view, path = opened
    out = FigureFolder(tmp_path / "figures", about(view, path), width, pdf=True)
    for name, draw in drawings(view).items():
        out.save(draw(), f"{name}.svg")
        svg = (tmp_path / "figures" / f"{name}.svg").read_text()
        assert float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)[1]) == pytest.approx(points)
        sizes = [float(size) for size in re.findall(r"font(?:-size)?:[^;\"]*?([\d.]+)px", svg)]
        assert sizes and max(sizes) <= 8
        assert (tmp_path / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert len(out.paths) == 2 * len(drawings(view)) and str(out.paths[0]) in str(out)


def test_metadata_say_what_it_is_of_and_the_bytes_are_the_same_again(opened, tmp_path):
    view, path = opened
    for run in ("a", "b"):
        FigureFolder(tmp_path / run, about(view, path), pdf=True).save(drawings(view)["one"](), "f.svg")
    svg = (tmp_path / "a" / "f.svg").read_text()
    assert f"<dc:title>{view.model}, {view.pass_label}</dc:title>" in svg
    assert "seed" in re.search(r"<dc:description>(.*)</dc:description>", svg)[1]
    made_by = "format atlas of experiments/run_extraction_all.py"
    assert re.search(rf"<dc:source>c.pt, sha256 [0-9a-f]{{16}}, {made_by}</dc:source>", svg)
    assert str(tmp_path) not in svg
    for kind in ("svg", "pdf"):
        assert (tmp_path / "a" / f"f.{kind}").read_bytes() == (tmp_path / "b" / f"f.{kind}").read_bytes()


def test_another_width_is_one_line(tmp_path):
    with pytest.raises(CacheError, match="FIGURE_WIDTH must be None, column or page, not 'wide'"):
        FigureFolder(tmp_path, {}, "wide")


def test_auto_takes_the_heads_with_the_largest_effect_of_another_model():
    cache = synthetic_caches.atlas(F=21, H=3, layers=(0, 1, 5), curve=False)
    cache["frame_logits"][2, 0, 1, :, 0] += 40
    cache["frame_logits"][0, 0, 2, :, 0] += 30
    view = open_profiles(cache, step=0)
    assert heads_of(view, "auto") == ((5, 1, "L5H1"), (0, 2, "L0H2"))
    assert heads_of(view, [[1, 2, "mine"]]) == ((1, 2, "mine"),)
    with pytest.raises(CacheError, match="HEADS must be"):
        heads_of(view, "best")


def test_no_preference_is_what_even_tokens_would_get():
    cache = synthetic_caches.inference(H=3)
    mass, mean = (open_profiles(cache, quantity=quantity) for quantity in ("mass", "mean_prob"))
    frames = len(mass.key_frames)
    assert no_preference(mass) == pytest.approx(1 / frames)
    assert no_preference(mean) * mean.frame_seq_length == pytest.approx(1 / frames)
    np.testing.assert_allclose(mass.profiles().sum(-1), 1, atol=1e-3)  # so it is the mean over frames
    assert no_preference(open_profiles(synthetic_caches.atlas())) is None

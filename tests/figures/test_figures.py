"""Figures: what is drawn is what was given, absent stays absent, the SVG is text and its bytes the same."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import executed, synthetic_caches

from experiments import figures
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import (
    Agreement,
    HeadMap,
    HeadPanel,
    LabelMap,
    ProfileMap,
    choose_heads,
    profile_maps,
)
from experiments.analysis.taxonomy import KINDS, LOCALITY
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import Caption, open_profiles
from experiments.figures import style
from experiments.figures.heads import compared_maps

OWN = "own block (noise at t = 1000)"
CAPTION = Caption("mean_logit", "pass 0 (t = 1000), query frames 18–20", {OWN: (18, 19, 20)})
NAN = np.nan


def words(figure, tmp_path):
    return executed.words(style.save_svg(figure, tmp_path / "f.svg").read_bytes())


def drawings(N, H, F, absent=()):
    """Every drawing of profiles and matrices at a size, by name."""
    blocks = [F % 3] * (F % 3 > 0) + [3] * (F // 3)
    matrices = np.stack([synthetic_caches.frame_matrix(H, blocks, seed).numpy() for seed in range(N)])
    profiles = matrices[:, :, -min(F, 3) :].mean(2)
    profiles[..., list(absent)] = NAN
    caption = replace(CAPTION, highlighted_frames={OWN: range(max(0, F - 3), F)})
    s, mass = head_statistics(profiles), np.abs(profiles) / 10
    panel = HeadPanel("L1H1", 1, H - 1, profiles[0, -1], np.repeat(profiles[0, -1], 5), no_preference=0.1)
    bars, labels = panel._replace(curve=None), np.where(s.delta > 0, 1, -1)
    two = [
        ProfileMap("a", "mean_logit", profiles[0]),
        ProfileMap("b", "mass", mass[0]),
        ProfileMap("c", "mass", None, "why"),
    ]
    maps = [
        HeadMap(scale, scale, "unit", scale, s.first)
        for scale in ("diverging", "ratio", "share", "sequential")
    ]
    kinds = [LabelMap("k", KINDS, labels, "", labels == 1), LabelMap("l", LOCALITY, None, "none")]
    spread = {"of distance": (s.first, s.delta)}
    return {
        "curves": figures.head_curves([panel, bars], caption),
        "one": figures.one_head(panel, caption),
        "grid": figures.head_grid(profiles[0], figures.head_titles(s.delta[0]), caption, layer=1),
        "sweep": figures.sweep_curves({"L1H1": np.stack([profiles[0, 0]] * 2)}, caption, ["a", "b"]),
        "heat": figures.all_heads(profiles[0], caption, layer=1),
        "layers": figures.layer_comparison(profiles, range(N), caption),
        "middle 80 %": figures.layer_comparison(mass, range(N), replace(caption, quantity="mass")),
        "together": figures.layers_together(profiles, range(N), caption),
        "statistics": figures.layer_statistics(s.first, s.middle, s.last, range(N), caption),
        "maps": figures.frame_maps(matrices[0], range(F), caption, layer=1),
        "one map": figures.frame_maps(matrices[0, :1, -2:], range(F - 2, F), caption, layer=1, heads=[5]),
        "compared": compared_maps({"a": matrices[0]}, range(H), "mean_logit", title="t"),
        "profiles": figures.profile_heat_maps(two, "t", highlighted_frames=caption.highlighted_frames),
        "words": figures.prompt_words(mass[0], [f"w{n}" for n in range(F)], layer=1, subtitle="pass 0"),
        "bands": figures.rope_bands(profiles[0].T, [f"b{n}" for n in range(H)], caption, layer=1, head=0),
        "measures": figures.head_maps(maps, range(N), subtitle="pass 0"),
        "labels": figures.label_maps(kinds, range(N), subtitle="pass 0"),
        "agreement": figures.agreement_matrix(["a", "b"], np.array([[1, NAN], [0.3, 1]]), what="kind"),
        "scores": figures.score_against_effect(spread, "t", "x", "y"),
        "passes": figures.effect_by_pass({"pass 0 (t = 1)": s.first, "clean": s.last}, "t"),
        "kept": figures.survival_map(np.ones((N, F)), "policy"),
        "effects": figures.effects_by_frame({"total": np.ones(F), "floor": np.full(F, 1e-6)}, subtitle="x"),
    }  # fmt: skip


@pytest.mark.parametrize(("N", "H", "F"), [(2, 3, 21), (1, 1, 2), (1, 12, 72)])
def test_every_size_draws(tmp_path, N, H, F):
    plt.get_backend()  # it is chosen when it is first asked for
    before, there = plt.rcParams.copy(), plt.get_fignums()
    drawn = drawings(N, H, F)
    assert plt.rcParams == before and len(plt.get_fignums()) == len(there) + 1  # survival_map stays open
    for name, figure in drawn.items():
        said = words(figure, tmp_path)
        assert len(said) > 20, name
        if name in ("curves", "grid", "layers", "together", "heat"):
            assert "pass 0 (t = 1000)" in said and "ean logit" in said and OWN in said, name
            assert "Mean logit q·k/√D" in said and "Key frame (latent)" in said, name
    assert "absent: c: why" in words(drawn["profiles"], tmp_path)
    assert "absent: l: none" in words(drawn["labels"], tmp_path)
    assert "floor, at most 1e-06" in words(drawn["effects"], tmp_path)
    plt.close("all")


def test_bytes_are_the_same_again_and_absent_frames_are_not_zero(tmp_path):
    first, again = (drawings(1, 2, 12, absent=[3, 4, 9]) for _ in range(2))
    first.pop("kept")  # its layout is not fixed
    for name, figure in first.items():
        one = style.save_svg(figure, tmp_path / "a.svg").read_bytes()
        assert one == style.save_svg(figure, tmp_path / "a.svg").read_bytes(), name
        assert one == style.save_svg(again[name], tmp_path / "b.svg").read_bytes(), name
        assert b"<dc:date>" not in one and b"Arial" in one
        if name in ("curves", "grid", "heat", "layers", "one"):
            assert "not attended" in executed.words(one), name
    heights = [np.isnan(bar.get_height()) for bar in first["grid"].axes[0].containers[0]]
    assert np.flatnonzero(heights).tolist() == [3, 4, 9]
    mesh = first["heat"].axes[0].collections[0].get_array()
    assert np.flatnonzero(np.ma.getmaskarray(mesh).reshape(2, 12)[0]).tolist() == [3, 4, 9]
    hatched = [patch for patch in first["grid"].axes[0].patches if patch.get_hatch()]
    assert len(hatched) == 2  # frames 3 and 4, frame 9
    with pytest.raises(OSError):
        style.save_svg(first["heat"], "/proc/f.svg")


def test_bars_curve_maximum_and_reference():
    values = np.linspace(-1, 1, 21)
    values[7] = 9
    bars = figures.head_curves([HeadPanel("x", 0, 2, values, None)], CAPTION).axes[0]
    np.testing.assert_allclose([bar.get_height() for bar in bars.containers[0]], values)
    assert [text.get_text() for text in bars.texts] == ["max@7"]
    curve = np.arange(21 * 5, dtype=float)  # 5 tokens per frame: frame k covers k - 1/2 .. k + 1/2
    reference, clipped = np.linspace(-3, 9, 21), np.arange(21) == 20
    panel = HeadPanel("x", 0, 2, values, curve, reference, clipped, Agreement(0.5, 1, (0, 1)))
    axis = figures.head_curves([panel], CAPTION).axes[0]
    assert not axis.containers
    drawn = axis.patches[0].get_data()
    np.testing.assert_array_equal(drawn.values, curve)
    np.testing.assert_allclose(drawn.edges[:6], [-0.5, -0.3, -0.1, 0.1, 0.3, 0.5])
    lines = {line.get_label(): line for line in axis.lines}
    np.testing.assert_array_equal(lines["read off the paper"].get_ydata(), reference)
    np.testing.assert_array_equal(lines["cut off by the paper's plot"].get_xydata(), [[20, 9]])
    assert "r = 0.500, RMS 1.00 over context frames 0–1" in [text.get_text() for text in axis.texts]


def test_a_notebooks_display_stays_on_after_the_first_figure():
    code = """
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance()
import numpy as np
from experiments.figures import heads
import matplotlib.pyplot as plt
heads.survival_map(np.ones((2, 3)), "x")
print(plt.isinteractive())
"""
    for backend, shown in (("inline", True), ("agg", False)):
        command = [sys.executable, "-c", code]
        env = os.environ | {"MPLBACKEND": backend}
        said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
        assert said.stdout.split() == [str(shown)], said.stderr


# Averages of gone frames, as columns of their own


@pytest.fixture
def with_averages():
    """A pass of nine frames, three a block; the second block sees one average, the last one two."""
    slots = [[0, 1, 2, -9, -9], [-1, 3, 4, 5, -9], [-1, -1, 6, 7, 8]]
    cache = synthetic_caches.atlas(curve=False)
    N, P, H, F, _ = cache["frame_mass"].shape
    cache["frame_mass"] = torch.full((N, P, H, F, F), NAN)
    cache["slot_mass"] = torch.full((N, P, H, F, 5), NAN)
    for block, frames in enumerate(slots):
        there = [n for n, frame in enumerate(frames) if frame != -9]
        rows = slice(3 * block, 3 * block + 3)
        generator = torch.Generator().manual_seed(block)
        values = torch.randn(N, P, H, 3, len(there), generator=generator).softmax(-1)
        cache["slot_mass"][..., rows, : len(there)] = values
        for n in there:
            if frames[n] >= 0:
                cache["frame_mass"][..., rows, frames[n]] = values[..., n]
    fields = torch.tensor(slots, dtype=torch.int32).expand(N, -1, -1).contiguous()
    del cache["frame_logits"]
    cache |= {"schema_version": 2, "slot_frame": fields, "slot_position": fields, "sink_slots": [0, 1, 2]}
    cache |= {"slot_tokens": torch.full_like(fields, 5), "memory_slots": [0, 0, 0], "is_logits": False}
    return cache


def test_averages_are_marked_in_every_figure(with_averages):
    view = open_profiles(with_averages, 4, "mass")
    profile, matrix = view.key_profile(5), view.key_matrix(5)
    np.testing.assert_allclose(profile[:, 9:], with_averages["slot_mass"][2, 1, :, 6:, :2].mean(1), rtol=1e-6)
    np.testing.assert_allclose(np.nansum(matrix, -1), 1, atol=1e-6)
    panels, both = choose_heads(view, [(5, 1, "x")]).panels, Caption("mass", "s", averages=2)
    assert panels[0].profile.shape == (9,) and panels[0].no_preference == 1 / 5
    made = [
        figures.head_grid(profile, ["a", "b", "c"], view.caption, layer=5),
        figures.head_curves(panels, view.caption),
        figures.one_head(panels[0], view.caption),
        figures.all_heads(profile, view.caption, layer=5),
        figures.layer_comparison(view.key_profiles(), view.layers, view.caption),
        figures.layers_together(view.key_profiles(), view.layers, view.caption),
        figures.frame_maps(matrix, view.matrix_rows, both, layer=5),
        figures.profile_heat_maps(profile_maps(view, {5: "m"}), "t"),
        figures.sweep_curves({"x": profile[:2]}, view.caption, ["a", "b"]),
    ]
    for figure in made:
        axis = next(axis for axis in figure.axes if axis.get_xticklabels())  # the lowest have labels
        names = {label.get_text() for label in axis.get_xticklabels()}
        assert style.AVERAGES in {text.get_text() for text in figure.legends[0].get_texts()}
        assert (names >= {"μ1", "μ2"} or "μ" in names) and axis.get_xlim()[1] >= 10.4
        assert all(int(name) < 9 for name in names if not name.startswith("μ"))
    heights = [bar.get_height() for bar in made[0].axes[0].containers[1]]
    assert heights == pytest.approx([profile[0, 9], profile[0, 10]])
    plain = figures.head_grid(profile[:, 6:9], ["a"] * 3, Caption("mass", "s"), layer=5)
    assert not plain.legends


# Where a notebook's figures go


@pytest.fixture
def opened(tmp_path):
    yield open_profiles(save_and_load(tmp_path / "c.pt", synthetic_caches.atlas(F=21))), tmp_path / "c.pt"
    style.use_width(None)


def save_and_load(path, cache):
    save_cache(path, cache)
    return load_cache(path)


@pytest.mark.parametrize(("width", "points"), [("column", 3.25 * 72), ("page", 6.75 * 72)])
def test_a_journals_width_is_exact_and_its_letters_are_8_points(opened, tmp_path, width, points):
    view, path = opened
    out = figures.FigureFolder(tmp_path / "figures", figures.about(view, path), width, pdf=True)
    panels = choose_heads(view, [(1, 1, "a"), (5, 2, "b")]).panels
    draw = {
        "curves": lambda: figures.head_curves(panels, view.caption),
        "grid": lambda: figures.head_grid(view.frame_profile(0), ["H0", "H1", "H2"], view.caption, layer=0),
    }
    for name in draw:
        out.save(draw[name](), f"{name}.svg")
        svg = (tmp_path / "figures" / f"{name}.svg").read_text()
        assert float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)[1]) == pytest.approx(points)
        sizes = [float(size) for size in re.findall(r"font(?:-size)?:[^;\"]*?([\d.]+)px", svg)]
        assert sizes and max(sizes) <= 8
        assert (tmp_path / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert len(out.paths) == 4 and str(out.paths[0]) in str(out)


def test_metadata_say_what_a_figure_is_of(opened, tmp_path):
    view, path = opened
    for run in ("a", "b"):
        out = figures.FigureFolder(tmp_path / run, figures.about(view, path), pdf=True)
        out.save(figures.all_heads(view.frame_profile(1), view.caption, layer=1), "f.svg")
    svg = (tmp_path / "a" / "f.svg").read_text()
    assert f"<dc:title>{view.model}, {view.pass_label}</dc:title>" in svg and str(tmp_path) not in svg
    assert "seed" in re.search(r"<dc:description>(.*)</dc:description>", svg)[1]
    made_by = "format atlas of experiments/run_extraction_all.py"
    assert re.search(rf"<dc:source>c.pt, sha256 [0-9a-f]{{16}}, {made_by}</dc:source>", svg)
    for kind in ("svg", "pdf"):
        assert (tmp_path / "a" / f"f.{kind}").read_bytes() == (tmp_path / "b" / f"f.{kind}").read_bytes()
    with pytest.raises(CacheError, match="FIGURE_WIDTH must be None, column or page, not 'wide'"):
        figures.FigureFolder(tmp_path, {}, "wide")

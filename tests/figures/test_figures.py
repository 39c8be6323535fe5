"""Figures: what is drawn is what was given, absent stays absent, and the SVG is text and the same bytes every
time."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT

from experiments.analysis import panels, reports
from experiments.analysis.measures import head_statistics
from experiments.caches.view import Caption
from experiments.figures import heads, layer, style
from experiments.figures import layer as layers

CAPTION = Caption(
    "mean_logit", "pass 0 (t = 1000), query frames 18–20", {"own block (noise at t = 1000)": (18, 19, 20)}
)


def profiles(N=2, H=3, F=21, absent=()):
    values = np.random.default_rng(0).normal(size=(N, H, F)).astype(np.float32)
    values[..., list(absent)] = np.nan
    return values


def all_figures(values, caption=CAPTION, numbers=None, curve=None):
    N, H = values.shape[:2]
    numbers = numbers or list(range(N))
    panel, s = panels.HeadPanel("L1H1", numbers[0], H - 1, values[0, -1], curve), head_statistics(values)
    return {
        "curves": heads.head_curves([panel, panel], caption),
        "grid": heads.head_grid(values[0], reports.delta_titles(s.delta[0]), caption, layer=numbers[0]),
        "heat": layer.all_heads(values[0], caption, layer=numbers[0]),
        "layers": layers.layer_comparison(values, numbers, caption),
        "statistics": layers.layer_statistics(s.first, s.middle, s.last, numbers, caption),
    }


def texts(figure, tmp_path):
    """The words of the SVG, read as a viewer or an editor would."""
    root = ET.parse(style.save_svg(figure, tmp_path / "f.svg")).getroot()
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_titles_and_labels_say_what_it_is(tmp_path):
    for name, figure in all_figures(profiles(), numbers=[1, 5]).items():
        words = texts(figure, tmp_path)
        title = next(word for word in words if "pass 0 (t = 1000)" in word)
        assert "ean logit" in title, name
        assert "Mean logit q·k/√D" in words, name
        assert "Key frame (latent)" in words or name == "statistics"
        assert ("own block (noise at t = 1000)" in words) == (name != "statistics")
        assert "not attended" not in words
        if name == "curves":
            assert title.startswith("L1H1: layer 1, head 2")
        elif name in ("grid", "heat"):
            assert title.startswith("Layer 1, 3 heads")
        elif name == "layers":
            assert {"Layer 1", "Layer 5"} <= set(words)


REAL = [pytest.param(30, 12, 72, marks=pytest.mark.beside), pytest.param(1, 40, 19, marks=pytest.mark.beside)]


@pytest.mark.parametrize(("N", "H", "F"), [(1, 3, 7), (2, 12, 21), (3, 1, 2), *REAL])
def test_every_size_draws(tmp_path, N, H, F):
    caption = replace(CAPTION, highlighted_frames={"own block": range(max(0, F - 3), F)})
    for figure in all_figures(profiles(N, H, F), caption).values():
        assert len(texts(figure, tmp_path)) > 3


def test_bytes_are_the_same_again(tmp_path):
    curve = np.repeat(profiles(F=12)[0, -1], 16)
    for run in ("a", "b"):
        for name, figure in all_figures(profiles(F=12, absent=[3, 4]), curve=curve).items():
            style.save_svg(figure, tmp_path / run / f"{name}.svg")
            style.save_svg(figure, tmp_path / run / f"{name} saved twice.svg")
    for file in (tmp_path / "a").iterdir():
        content = file.read_bytes()
        assert content == (tmp_path / "b" / file.name).read_bytes(), file.name
        assert content == (tmp_path / "a" / file.name.replace(" saved twice", "")).read_bytes(), file.name
        assert b"<dc:date>" not in content
        assert b"Arial" in content
    assert len(list((tmp_path / "a").iterdir())) == 10


def test_bars_curve_and_maximum():
    values = profiles()
    values[0, -1, 7] = 9
    bars = heads.head_curves([panels.HeadPanel("x", 0, 2, values[0, -1], None)], CAPTION).axes[0]
    np.testing.assert_allclose([bar.get_height() for bar in bars.containers[0]], values[0, -1])
    np.testing.assert_allclose(bars.lines[0].get_ydata(), values[0, -1])
    assert [text.get_text() for text in bars.texts] == ["max@7"]
    curve = np.arange(21 * 5, dtype=float)  # 5 tokens per frame: frame k covers k - 1/2 .. k + 1/2
    filled = heads.head_curves([panels.HeadPanel("x", 0, 2, values[0, -1], curve)], CAPTION).axes[0]
    assert not filled.containers
    drawn = filled.patches[0].get_data()
    np.testing.assert_array_equal(drawn.values, curve)
    np.testing.assert_allclose(drawn.edges[:6], [-0.5, -0.3, -0.1, 0.1, 0.3, 0.5])


def test_a_reference_lies_over_the_head():
    values, reference = profiles()[0, -1], np.linspace(-3, 9, 21)
    clipped = np.arange(21) == 20
    panel = panels.HeadPanel("x", 0, 2, values, None, reference, clipped, panels.Agreement(0.5, 1, (0, 1)))
    axis = heads.head_curves([panel], CAPTION).axes[0]
    line, arrow = (
        next(line for line in axis.lines if line.get_label() == label)
        for label in ("read off the paper", "cut off by the paper's plot")
    )
    np.testing.assert_array_equal(line.get_ydata(), reference)
    np.testing.assert_array_equal(arrow.get_xydata(), [[20, 9]])
    assert "r = 0.500, RMS 1.00 over context frames 0–1" in [text.get_text() for text in axis.texts]


def test_absent_frames_are_not_zero(tmp_path):
    values = profiles(absent=[1, 2, 3, 9])
    drawn = all_figures(values)
    for name in ("curves", "grid", "heat", "layers"):
        assert "not attended" in texts(drawn[name], tmp_path), name
    heights = np.array([bar.get_height() for bar in drawn["grid"].axes[0].containers[0]])
    np.testing.assert_array_equal(np.isnan(heights), np.isnan(values[0, 0]))
    mesh = drawn["heat"].axes[0].collections[0].get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(mesh).reshape(3, 21), np.isnan(values[0]))
    hatched = [patch.get_extents() for patch in drawn["grid"].axes[0].patches if patch.get_hatch()]
    assert len(hatched) == 2  # frames 1-3, frame 9


def test_delta_in_the_titles():
    values = profiles(H=3, absent=[0])
    values[:, :2, 0] = [[5, -5]] * 2
    titles = reports.delta_titles(head_statistics(values[0]).delta)
    figure = heads.head_grid(values[0], titles, CAPTION, layer=0)
    titles = [axis.get_title() for axis in figure.axes]
    assert re.fullmatch(r"H0, Δ = \+[45]\.\d\d", titles[0])
    assert re.fullmatch(r"H1, Δ = −[45]\.\d\d", titles[1])
    assert titles[2] == "H2, Δ = N/A"


@pytest.mark.parametrize(("F", "room", "expected"), [
    (21, 25, list(range(21))), (7, 25, list(range(7))), (72, 25, list(range(0, 72, 5))),
    (72, 8, list(range(0, 72, 10))), (26, 25, list(range(0, 26, 2))), (1, 8, [0]),
])  # fmt: skip
def test_ticks_thin_out(F, room, expected):
    figure = heads.plt.figure()
    axis = figure.add_subplot()
    style.frame_axis(axis, F, room)
    assert axis.get_xticks().tolist() == expected
    heads.plt.close(figure)


def test_nothing_stays_open_and_nothing_leaks(tmp_path):
    before, there = heads.plt.rcParams.copy(), heads.plt.get_fignums()
    drawn = all_figures(profiles())
    assert heads.plt.get_fignums() == there
    assert heads.plt.rcParams == before
    with pytest.raises(OSError):
        style.save_svg(drawn["heat"], "/proc/f.svg")


def test_a_notebooks_display_stays_on_after_the_first_figure():
    code = """
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance()
import numpy as np
from experiments.figures import policies, style
import matplotlib.pyplot as plt
(FIGURE)
print(plt.isinteractive())
"""
    bare, styled = 'policies.survival_map(np.ones((2, 3)), "x")', "style.styled(plt.figure)()"
    for backend, figure, shown in (("inline", bare, True), ("inline", styled, True), ("agg", bare, False)):
        command = [sys.executable, "-c", code.replace("(FIGURE)", figure)]
        env = os.environ | {"MPLBACKEND": backend}
        said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
        assert said.stdout.split() == [str(shown)], said.stderr


def test_places_are_hundredths_of_a_point_and_words_stay_as_they_are():
    words = b'style="stroke-width: 0.8125"/>\n<text>0.12345</text></g>'
    drawn = b'<g>\n  <path d="M 1.23456 -0.5004 L 2 3.1" ' + words.replace(b"<text", b"  <text")
    kept = b'<g>\n<path d="M 1.23 -0.5 L 2 3.1" ' + words
    assert style.lean(drawn) == kept == style.lean(kept)

"""Figures: what is drawn is what was given, fits every width, and the SVG is text, its bytes the same."""

import os
import re
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import executed, geometry, synthetic_caches
from helpers.drawings import CAPTION, NAN, OWN, SOURCE, drawings

from experiments import figures
from experiments.analysis.panels import Agreement, HeadPanel, choose_heads, grouped, profile_maps
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import Caption, open_profiles, short_source
from experiments.figures import style, training


@pytest.fixture(autouse=True)
def free_width():
    yield
    style.use_size()


def words(figure, tmp_path):
    return executed.words(style.save_svg(figure, tmp_path / "f.svg").read_bytes())


@pytest.mark.parametrize(("width", "size"), [("column", (2, 3, 9)), ("page", (2, 3, 9)), (None, (1, 1, 2))])
def test_nothing_overlaps_or_is_cut_or_too_small(width, size, tmp_path):
    """Of every figure: words over words or data, outside, letters not of 6-9 points, panels below 12 mm."""
    style.use_size(width)
    drawn = drawings(*size)
    plt.get_backend()  # it is chosen when it is first asked for
    before, there = plt.rcParams.copy(), plt.get_fignums()
    of_module = {name for name, made in vars(figures).items() if getattr(made, "__wrapped__", None)}
    assert len(drawn) >= len(of_module) > 30
    wrong = {}
    for name, draw in drawn.items():
        figure = draw()
        wrong[name] = geometry.problems(figure)
        if width:
            assert figure.get_figwidth() == style.WIDTHS[width]
        if name in ("curves", "grid", "layers", "together", "heat"):
            said = words(figure, tmp_path)
            for part in ("pass 0 (t = 1000)", "ean logit", OWN, "wan-mini", "seed 42", "Key frame (latent)"):
                assert part in said, (name, part)
    assert {name: found for name, found in wrong.items() if found} == {}
    assert plt.rcParams == before and plt.get_fignums() == there


def test_the_check_of_figures_sees_what_is_wrong():
    figure, (left, right) = style.panels(2, 2, (2, 2))
    left.plot([0, 1], [0, 1])
    left.annotate("over data", (0.4, 0.5))
    right.annotate("one", (0.5, 0.5))
    right.annotate("two", (0.5, 0.5), fontsize=12)
    right.annotate("outside", (1.0, 0.5))
    right.set_position((0.9, 0.1, 0.05, 0.5))
    found = " ".join(geometry.problems(figure))
    for said in (
        "'over data' lies over data",
        "lies over 'two'",
        "12.0 points",
        "'outside' is cut",
        "a panel",
    ):
        assert said in found


def test_many_heads_and_frames(tmp_path):
    style.use_size("page")
    drawn = drawings(1, 12, 72)
    for name in ("curves", "grid", "heat", "maps"):
        assert geometry.problems(drawn[name]()) == []
    assert "absent: c: why" in words(drawn["profiles"](), tmp_path)
    assert "absent: l: none" in words(drawn["labels"](), tmp_path)
    assert "floor, at most 1e-06" in words(drawn["effects"](), tmp_path)


def test_bytes_are_the_same_again_and_absent_frames_are_not_zero(tmp_path):
    names = ("curves", "grid", "heat", "layers", "one")
    first, again = ({name: drawings(1, 2, 12, [3, 4, 9])[name]() for name in names} for _ in range(2))
    for name, figure in first.items():
        one = style.save_svg(figure, tmp_path / "a.svg").read_bytes()
        assert one == style.save_svg(figure, tmp_path / "a.svg").read_bytes(), name
        assert one == style.save_svg(again[name], tmp_path / "b.svg").read_bytes(), name
        assert b"<dc:date>" not in one and b"Arial" in one and "not attended" in executed.words(one)
    heights = [np.isnan(bar.get_height()) for bar in first["grid"].axes[0].containers[0]]
    assert np.flatnonzero(heights).tolist() == [3, 4, 9]
    image = first["heat"].axes[0].images[0].get_array()
    assert np.flatnonzero(np.ma.getmaskarray(image)[0]).tolist() == [3, 4, 9]
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
    curve = np.arange(21 * 6, dtype=float)  # 6 tokens per frame: frame k covers k - 1/2 .. k + 1/2
    reference, clipped = np.linspace(-3, 9, 21), np.arange(21) == 20
    panel = HeadPanel("x", 0, 2, values, curve, reference, clipped, Agreement(0.5, 1, (0, 1)))
    axis = figures.head_curves([panel], CAPTION).axes[0]
    assert not axis.containers
    drawn = axis.patches[0].get_data()
    np.testing.assert_array_equal(drawn.values, curve)
    np.testing.assert_allclose(drawn.edges[:4], [-0.5, -1 / 3, -1 / 6, 0], atol=1e-12)
    lines = {line.get_label(): line for line in axis.lines}
    np.testing.assert_array_equal(lines["read off the paper"].get_ydata(), reference)
    np.testing.assert_array_equal(lines["cut off by the paper's plot"].get_xydata(), [[20, 9]])
    assert "r\u00a0=\u00a00.500, RMS 1.00 over context frames 0–1" in axis.get_title(loc="left").replace(
        "\n", " "
    )
    (windows,) = grouped([panel], 3)
    np.testing.assert_allclose(windows.curve, curve.reshape(-1, 3).mean(1))
    assert "mean of 3 key tokens" in style.handles(figures.head_curves([windows], CAPTION).axes[0])
    with pytest.raises(CacheError, match="windows of 4 tokens do not divide a frame's 6"):
        grouped([panel], 4)


def test_colours_are_told_apart_in_grey():
    """CIE lightness of the colours that stand for kinds of heads, and of lines drawn together."""

    def lightness(color):
        rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return 116 * np.cbrt(linear @ [0.2126, 0.7152, 0.0722]) - 16

    for together in (("anchor", "wave", "veil"), ("static", "dynamic")):
        shades = sorted(lightness(figures.atlas.COLORS[name]) for name in together)
        assert min(np.diff(shades)) > 8
    assert lightness(style.DARK) + 15 < lightness(style.BLUE) < lightness(style.ORANGE) - 15


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


def test_averages_are_marked_in_every_figure():
    cache = with_averages()
    view = open_profiles(cache, 4, "mass")
    profile, matrix = view.key_profile(5), view.key_matrix(5)
    np.testing.assert_allclose(profile[:, 9:], cache["slot_mass"][2, 1, :, 6:, :2].mean(1), rtol=1e-6)
    np.testing.assert_allclose(np.nansum(matrix, -1), 1, atol=1e-6)
    panels, both = choose_heads(view, [(5, 1, "x")]).panels, Caption("mass", "s", averages=2)
    assert panels[0].profile.shape == (9,) and panels[0].no_preference == 1 / 5
    made = [
        figures.head_grid(profile, ["a", "b", "c"], view.caption, layer=5),
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
        assert "μ" in names and axis.get_xlim()[1] >= 10.4
        assert all(int(name) < 9 for name in names if not name.startswith("μ"))
    heights = [bar.get_height() for bar in made[0].axes[0].containers[1]]
    assert heights == pytest.approx([profile[0, 9], profile[0, 10]])


# Where a notebook's figures go


def test_a_folder_of_figures_says_what_they_are_of(tmp_path):
    save_cache(tmp_path / "c.pt", synthetic_caches.atlas(F=21))
    view = open_profiles(load_cache(tmp_path / "c.pt"))
    for run in ("a", "b"):
        about = figures.about(view, tmp_path / "c.pt")
        out = figures.FigureFolder(tmp_path / run, about, 5, pdf=True, height=3)
        figure = figures.all_heads(view.frame_profile(1), view.caption, layer=1)
        assert tuple(figure.get_size_inches()) == (5, 3)
        out.save(figure, "f.svg")
    svg = (tmp_path / "a" / "f.svg").read_text()
    assert float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)[1]) == 5 * 72
    assert f"<dc:title>{view.model}, {view.pass_label}</dc:title>" in svg and str(tmp_path) not in svg
    assert "seed" in re.search(r"<dc:description>(.*)</dc:description>", svg)[1]
    made_by = "format atlas of experiments/run_extraction_all.py"
    assert re.search(rf"<dc:source>c.pt, sha256 [0-9a-f]{{16}}, {made_by}</dc:source>", svg)
    for kind in ("svg", "pdf"):
        assert (tmp_path / "a" / f"f.{kind}").read_bytes() == (tmp_path / "b" / f"f.{kind}").read_bytes()
    assert len(out.paths) == 2 and (tmp_path / "a" / "f.pdf").read_bytes().startswith(b"%PDF")
    for bad in ("wide", 0, True):
        with pytest.raises(
            CacheError, match="FIGURE_WIDTH must be None, column, page or 1 to 40 inches, not"
        ):
            figures.FigureFolder(tmp_path, {}, bad)
    assert short_source(SOURCE) == SOURCE.replace(" (checkpoint: a.pt)", "")
    assert len(short_source(f"m (w: f), “{'word ' * 99}”, seed 1")) < 130


def test_a_head_has_one_colour_in_every_row():
    values, other = np.zeros((2, 4, 2, 3))
    values[-1], other[-1] = [[5, 4, 0], [0, 0, 3]], [[4, 5, 0], [0, 2, 0]]
    measures = {"logit": ("logits", 0, values), "mass": ("share", 0, other)}
    figure = training.training_checkpoints([0, 100, 1000, 20000], measures, [0, 20000], "m", few_step=1000)
    first, second = (
        {line.get_label(): line.get_color() for line in figure.axes[i].lines if line.get_label()[0] == "L"}
        for i in (0, 3)
    )
    assert set(first) == {"L0H0", "L0H1", "L1H2"} and set(second) == {"L0H0", "L0H1", "L1H1"}
    assert first["L0H0"] == second["L0H0"] and first["L0H1"] == second["L0H1"]
    assert len({*first.values(), *second.values()}) == 4

"""Figures: what is drawn is what was given, fits a narrow column, and the SVG is text, its bytes the same."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import ROOT
from helpers import gallery, geometry, synthetic_caches
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from experiments import figures
from experiments.analysis.panels import HeadMap, HeadPanel, LabelMap, grouped
from experiments.analysis.taxonomy import KINDS, LOCALITY
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import Caption, open_profiles
from experiments.figures import style
from experiments.miniature import figures as training

N, H, F = 2, 3, 9  # layers of heads over frames
LAST = {"own block (noise at t = 1000)": (6, 7, 8)}
SOURCE = "wan-mini (checkpoint: a.pt), “a red circle moving right over a dark blue background”, seed 42"
CAPTION = Caption("mean_logit", "pass 0 (t = 1000), query frames 6–8", LAST, source=SOURCE)
ABOUT = CAPTION.about
POLICIES = ("full", "window 9, no sink", "window 9, sink 3", "deep sink 21/10", "frozen", "vae")


@pytest.fixture(autouse=True)
def free_width():
    yield
    style.use_size()


@pytest.mark.parametrize("layers", [2, 12, 30])
@pytest.mark.parametrize("width", style.WIDTHS)
def test_nothing_overlaps_or_is_cut_or_too_small(width, layers):
    """Words over words or data, outside, letters not of 6-9 points, panels below 0.7 inch, over a page."""
    style.use_size(width)
    plt.get_backend()  # it is chosen when it is first asked for
    before, numbers = plt.rcParams.copy(), plt.get_fignums()
    calls = gallery.gallery(layers, H=2, F=6)
    if layers > 2:
        calls = {name: calls[name] for name in gallery.BY_LAYER}
    wrong = {}
    for name, draw in calls.items():
        figure = draw()
        problems = geometry.problems(figure)
        if figure.get_figwidth() != style.WIDTHS[width] or figure.get_figheight() > style.PAGE_HEIGHT + 1.5:
            problems.append(f"{figure.get_size_inches()} inches")
        if problems:
            wrong[name] = problems
    assert wrong == {}
    assert plt.rcParams == before and plt.get_fignums() == numbers


def test_every_figure_is_in_the_gallery():
    modules = ("experiments.figures", "experiments.miniature.figures")
    public = {
        name
        for module in (figures, training)
        for name, function in vars(module).items()
        if hasattr(function, "__wrapped__") and function.__module__.startswith(modules)
        if name == function.__name__  # not an older name
    }
    names = {name.partition(",")[0].removeprefix("training.") for name in gallery.gallery(2, H=3, F=9)}
    assert names == public and len(public) > 40


def test_many_layers_are_one_map_where_panels_have_no_room():
    profiles = gallery.profiles_of(30, 3, 9)
    style.use_size("column")
    figure = figures.layer_comparison(profiles, range(30), CAPTION)
    mean, deviation = (axis.images[0].get_array() for axis in figure.axes[:2])
    np.testing.assert_allclose(mean, profiles.mean(1))
    np.testing.assert_allclose(deviation, profiles.std(1))
    style.use_size("page")
    assert len(style.panels_of(figures.layer_comparison(profiles, range(30), CAPTION))) == 30


def test_long_tick_labels_leave_panels_wide_enough():
    style.use_size("page")
    values = 1e4 + gallery.profiles_of(1, 10, 9)[0]
    small = figures.head_grid(values / 1e10, ["a"] * 10, CAPTION, layer=1)
    for figure in (small, figures.head_grid(values, ["a"] * 10, CAPTION, layer=1)):
        assert geometry.problems(figure) == []


def test_a_meaning_has_one_colour_that_no_other_has():
    hues = ["BLUE", "ORANGE", "GREEN", "RED", "PURPLE", "BROWN", "PINK", "SILVER", "YELLOW", "SKY"]
    meanings = {
        name: value for name, value in vars(style).items() if value in style.PALETTE and name not in hues
    }
    assert len(meanings) == len({*meanings.values()}) == 10
    series = {matplotlib.colors.to_hex(color) for color in style.series(7)}
    assert not series & {*style.PALETTE}
    pattern = rf"\b(st|style)\.({'|'.join(hues)})\b"
    for path in (ROOT / "experiments").rglob("*.py"):
        assert path.name == "style.py" or not re.search(pattern, path.read_text(encoding="utf-8")), path
    cells = [
        cell
        for path in (ROOT / "notebooks").glob("*.ipynb")
        for cell in json.loads(path.read_text())["cells"]
    ]
    code = "".join(line for cell in cells if cell["cell_type"] == "code" for line in cell["source"])
    assert not re.search(r"#[0-9a-fA-F]{6}|\bcolor=|\bcmap=|palette", code)
    marks = (ROOT / "experiments/figures/page/drawing.css").read_text()
    for mark, color in {"sink": style.FIRST, "average": style.AVERAGED, "memory": style.PAST}.items():
        assert re.search(rf"\.mark-{mark} {{\s+fill: {color};", marks)


def test_the_check_of_figures_sees_what_is_wrong():
    figure, (left, right) = style.panels(2, 2, (2, 2))
    left.plot([0, 1], [0, 1])
    left.annotate("over data", (0.4, 0.5))
    right.annotate("one", (0.5, 0.5))
    right.annotate("two", (0.5, 0.5), fontsize=12)
    right.annotate("outside", (1.0, 0.5))
    right.set_position((0.9, 0.1, 0.05, 0.5))
    found = " ".join(geometry.problems(figure))
    wrong = ("'over data' lies over data", "lies over 'two'", "12.0 points", "'outside' is cut", "a panel")
    assert all(said in found for said in wrong)


def test_bytes_are_the_same_again_and_absent_frames_are_not_zero(tmp_path):
    values = np.ones((2, 12))
    values[:, [3, 4, 9]] = np.nan
    first, again = (figures.head_grid(values, ["a", "b"], CAPTION, layer=1) for _ in range(2))
    one = style.save_svg(first, tmp_path / "a.svg").read_bytes()
    assert one == style.save_svg(again, tmp_path / "b.svg").read_bytes()
    assert one == style.save_svg(first, tmp_path / "a.svg").read_bytes()  # saving lays nothing out again
    assert b"<dc:date>" not in one and b"Arial" in one and b">not attended<" in one
    heights = first.axes[0].patches[0].get_data().values[::2]  # between two bars stands a gap
    assert np.flatnonzero(np.isnan(heights)).tolist() == [3, 4, 9]
    hatched = [patch for patch in first.axes[0].patches if patch.get_hatch()]
    assert len(hatched) == 2  # frames 3 and 4, frame 9
    image = figures.survival_map(values, "x").axes[0].images[0].get_array()
    assert np.flatnonzero(np.ma.getmaskarray(image)[0]).tolist() == [3, 4, 9]


def test_a_notebook_shows_what_it_has_saved_drawn_once(tmp_path, monkeypatch):
    draws, shown = [], []
    draw = Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: (draws.append(self), draw(self, renderer)))
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data["image/svg+xml"]))
    figure = figures.head_grid(np.ones((2, 12)), ["a", "b"], CAPTION, layer=1)
    saved = style.save_svg(figure, tmp_path / "a.svg", {"Title": "A title"}).read_text()
    figure._ipython_display_()
    assert draws.count(figure) == 1
    assert "<title>A title</title>" in saved and "A title" not in shown[0]
    assert saved.partition("</metadata>")[2] == shown[0].partition("</metadata>")[2]
    figure.axes[0].set_title("changed since")
    figure._ipython_display_()
    assert "changed since" in shown[1] and draws.count(figure) == 2


def test_equal_arguments_are_drawn_once_where_the_environment_asks_for_it(monkeypatch):
    def grid(values, title="a"):
        return figures.head_grid(values, [title, "b"], CAPTION, layer=1)

    values = np.ones((2, 12))
    assert grid(values) is not grid(values)
    monkeypatch.setenv(style.REMEMBER, "1")
    monkeypatch.setattr(style, "_remembered", {})
    first = grid(values)
    assert grid(values.copy()) is first
    others = [grid(values, "c"), grid(2 * values)]
    style.use_size("column")
    others.append(grid(values))
    style.use_size()
    assert first not in others
    monkeypatch.setattr(style, "REMEMBERED_FIGURES", 4)
    grid(values)
    grid(values, "d")  # the one that was not asked for longest leaves, and that is not the first
    assert grid(values) is first and len(style._remembered) == 4


def test_bars_are_an_artist_a_color_and_absent_where_nan():
    axis = Figure().subplots()
    style.bars(axis, np.array([1.0, np.nan, -2.0]), [style.RED, style.BLUE, style.BLUE])
    red, blue = (patch.get_data() for patch in axis.patches)
    np.testing.assert_array_equal(red.values, [1, np.nan, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(blue.values, [np.nan, np.nan, np.nan, np.nan, -2])
    np.testing.assert_allclose(blue.edges, [-0.4, 0.4, 0.6, 1.4, 1.6, 2.4])


def test_seaborn_is_imported_by_the_style_alone_and_its_palette_is_ours():
    sources = [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "wan").rglob("*.py")]
    importing = [path.name for path in sources if re.search(r"(import|from) seaborn", path.read_text())]
    assert importing == ["style.py"]
    assert list(style.PALETTE) == style.seaborn().color_palette("colorblind").as_hex()


def test_a_figure_is_laid_out_once(monkeypatch, tmp_path):
    layouts = []
    execute = ConstrainedLayoutEngine.execute
    monkeypatch.setattr(
        ConstrainedLayoutEngine, "execute", lambda self, figure: (layouts.append(1), execute(self, figure))
    )
    figure = figures.head_grid(np.ones((3, 21)), "abc", CAPTION, layer=1)
    assert len(layouts) == 1
    style.save_svg(figure, tmp_path / "a.svg")
    assert len(layouts) == 1


@pytest.mark.parametrize("size", [(1.0, 0.8), (2.0, 1.0), (6.0, 4.0)])
@pytest.mark.parametrize("count, averages", [(1, 0), (21, 0), (21, 2), (72, 3)])
def test_labels_of_places_have_room_and_averages_share_one(size, count, averages):
    figure = Figure(figsize=size)
    axis = figure.subplots()
    axis.set_xlim(-0.5, count + averages - 0.5)
    style.label_places(axis.xaxis, [*range(count), *["μ1", "μ2", "μ3"][:averages]])
    figure.canvas.draw()
    boxes = {label.get_text(): label.get_window_extent() for label in axis.get_xticklabels()}
    order = sorted(boxes.values(), key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in pairwise(order))
    assert "0" in boxes and ("μ" in boxes) == bool(averages)
    middle = axis.transData.transform((count + (averages - 1) / 2, 0))[0]
    assert not averages or (boxes["μ"].x0 + boxes["μ"].x1) / 2 == pytest.approx(middle, abs=1)


def test_means_and_spreads_are_those_of_numpy():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(2, 3, 5))  # [places, groups, n]
    figure = Figure()
    axis = figure.subplots()
    style.mean_bars(axis, values, style.PALETTE[:3])
    heights = np.array([[bar.get_height() for bar in bars] for bars in axis.containers]).T
    np.testing.assert_allclose(heights, values.mean(2))
    ends = np.array([line.get_ydata() for line in axis.lines]).reshape(3, 2, 2).swapaxes(0, 1)
    np.testing.assert_allclose(ends[..., 1] - ends[..., 0], 2 * values.std(2))
    excess = rng.normal(size=(40, 6))
    excess[:, 2] = np.nan  # no head has this distance
    left, right = figures.distances_and_contrasts(excess, excess).axes[:2]
    known = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(left.lines[0].get_xdata(), known)
    np.testing.assert_allclose(left.lines[0].get_ydata(), excess[:, known].mean(0))
    band = left.collections[0].get_paths()[0].vertices
    # The band is the 95 % interval of the mean that is drawn
    mean, error = excess[:, known].mean(0), excess[:, known].std(0, ddof=1) / np.sqrt(len(excess))
    low, high = mean - 1.96 * error, mean + 1.96 * error
    assert band[:, 1].min() == pytest.approx(low.min()) and band[:, 1].max() == pytest.approx(high.max())
    bars = {round(bar.get_x() + bar.get_width() / 2): bar for bars in right.containers for bar in bars}
    assert {place: bar.get_height() for place, bar in bars.items()} == pytest.approx(
        dict(zip(known, excess[:, known].mean(0), strict=True))
    )


def test_bars_curve_maximum_and_reference():
    values = np.linspace(-1, 1, 21)
    values[7] = 9
    bars = figures.head_curves([HeadPanel("x", 0, 2, values, None)], CAPTION).axes[0]
    np.testing.assert_allclose([bar.get_height() for bar in bars.containers[0]], values)
    assert [text.get_text() for text in bars.texts] == ["frame 7: 9"]
    curve = np.arange(21 * 6, dtype=float)  # 6 tokens per frame: frame k covers k - 1/2 .. k + 1/2
    reference, clipped = np.linspace(-3, 9, 21), np.arange(21) == 20
    panel = HeadPanel("x", 0, 2, values, curve, reference, clipped, "r = 0.500, RMS 1.00 over frames 0–1")
    axis = figures.head_curves([panel], CAPTION).axes[0]
    assert not axis.containers
    drawn = axis.patches[0].get_data()
    np.testing.assert_array_equal(drawn.values, curve)
    np.testing.assert_allclose(drawn.edges[:4], [-0.5, -1 / 3, -1 / 6, 0], atol=1e-12)
    lines = {line.get_label(): line for line in axis.lines}
    np.testing.assert_array_equal(lines["read off the paper"].get_ydata(), reference)
    np.testing.assert_array_equal(lines["cut off by the paper's plot"].get_xydata(), [[20, 9]])
    assert "RMS 1.00" in axis.get_title(loc="left")
    (windows,) = grouped([panel], 3)
    np.testing.assert_allclose(windows.curve, curve.reshape(-1, 3).mean(1))
    assert "mean of 3 key tokens" in style.handles(figures.head_curves([windows], CAPTION).axes[0])
    with pytest.raises(CacheError, match="windows of 4 tokens do not divide a frame's 6"):
        grouped([panel], 4)


FIRST_FIGURE = """
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance()
import sys
import numpy as np
import matplotlib
import matplotlib.pyplot as plt
from experiments import figures
from experiments.caches.view import Caption
print("seaborn" in sys.modules)
figures.layer_statistics(*np.ones((3, 2, 3)), range(2), Caption("mean_logit", "a pass"))
print("seaborn" in sys.modules)
plt.figure()
print(plt.isinteractive())
"""


@pytest.mark.beside
def test_the_first_figure_imports_seaborn_and_leaves_a_notebooks_display_on():
    env = os.environ | {"MPLBACKEND": "inline"}
    command = [sys.executable, "-c", FIRST_FIGURE]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert process.stdout.split() == ["False", "True", "True"], process.stderr


def test_a_notebook_shows_a_figure_as_it_is_saved(tmp_path, monkeypatch):
    """With its title, which Jupyter's own PNG leaves out."""
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data["image/svg+xml"]))
    figure = figures.survival_map(open_profiles(synthetic_caches.atlas()).frame_profile(1), "the title")
    figure._ipython_display_()
    saved = style.save_svg(figure, tmp_path / "f.svg").read_text()
    (box,) = re.findall(r'viewBox="[^"]*"', saved)
    assert "the title: the last block sees" in shown[0] and box in shown[0]


def test_a_folder_of_figures_says_what_they_are_of(tmp_path):
    save_cache(tmp_path / "c.pt", synthetic_caches.atlas(F=21))
    view = open_profiles(load_cache(tmp_path / "c.pt"))
    for run in ("a", "b"):
        about = figures.about(view, tmp_path / "c.pt")
        out = figures.FigureFolder(tmp_path / run, about, 5, pdf=True, height=3)
        figure = figures.survival_map(view.frame_profile(1), view.pass_label)
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


def title_of(figure):
    (title,) = [text.get_text() for text in figure.texts if text.get_gid() == "title"]
    return " ".join(title.split())


def test_titles_say_what_the_numbers_are():
    sets = {"no head": (0.95, 0.9, 1.0, [0.95]), "8 heads": (-0.0, -0.02, 0.04, [0.0])}
    figure = figures.knockout_shares({"Back?": sets}, {}, ABOUT, "t", chosen=["8 heads"])
    assert [text.get_text() for text in figure.axes[0].texts] == ["95\u00a0%", "0\u00a0%"]
    ends = figure.axes[0].collections[1].get_segments()[0][:, 0]
    np.testing.assert_allclose(ends, [0, 0.04])  # a share has no interval below 0
    alike = {size: (share, share - 0.1, share + 0.1) for size, share in ((7, 0.3), (9, 0.5), (15, 0.7))}
    worse = {size: (share / 2, 0, share) for size, (share, *_) in alike.items()}
    budgets = {
        "uniform": {"all": alike},
        "effect": {"all": worse},
        "random": {"all": {**worse, 15: (0.6, 0.5, 0.7)}},
    }
    title = title_of(figures.budget_shares(budgets, ABOUT))
    assert "At 15 frames a head, equal windows bring 70 % of" in title
    assert "the best of 2 rules that favour some heads brings 60 % (random)" in title
    effects = {"causal": np.full((2, 3), -1.0), "base": np.array([[0.5, np.nan, 0.5]])}
    title = title_of(figures.effect_by_model(effects))
    assert title == "Mean first-frame effect of all heads: −1.00 logits in causal, 0.50 in base"
    labels = np.array([[1, 1, -1]])
    figure = figures.label_maps(
        [LabelMap("ours", KINDS, labels), LabelMap("l", LOCALITY, None)], [0], subtitle=""
    )
    assert title_of(figure) == "Kinds of 3 heads: 2 anchor, 1 wave, 0 veil"
    assert "absent" not in " ".join(text.get_text() for text in figure.findobj(plt.Text))
    absent = HeadMap("a", "first − middle", "logits", "diverging", None, "no logits in this cache")
    mass = absent._replace(title="first-frame effect on mass", values=labels + 0.0, missing_reason="")
    figure = figures.preference_dots(absent, [mass], border=2, title="Frame 0")
    note = figure.legends[0].get_title().get_text()
    assert note == "not drawn: first − middle (no logits in this cache)"
    total = np.array([0.0, 0.5, 0.2])
    title = title_of(figures.effects_by_frame({"total": total, "floor": total / 1e6}, subtitle=""))
    assert title == "The edit changes frame 1 most, by 0.5 of the way to another seed"


def test_titles_of_heads_are_computed_from_their_curves():
    one, other = np.array([0.0, 3.0, 1.0, 0.0]), np.array([5.0, 3.0, 1.0, 0.0])
    caption = Caption("mean_logit", "a pass", {"own block (noise)": (2, 3)})
    panels = [HeadPanel(f"L1H{n}", 1, n, curve, None) for n, curve in enumerate((one, other))]
    assert title_of(figures.head_curves(panels, caption)) == "L1H0 is highest on frame 1, L1H1 on frame 0"
    grid = figures.head_grid(np.stack([one, other, one[::-1]]), "abc", caption, layer=1)
    expected = "Layer 1: 1 of 3 heads are highest in frame 0, 1 in the own block; scales differ"
    assert title_of(grid) == expected
    masses = np.array([[[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])  # [layers, heads, frames]
    line = figures.layer_comparison(masses, [0], Caption("mass", "a pass")).axes[0].lines[0]
    np.testing.assert_array_equal(line.get_ydata(), [0.0, 1.0])  # the median, in the middle 80 % of heads
    frames = np.array([[0, 1, -9], [0, 1, 2]])
    assert title_of(figures.slot_map(frames, frames, 4, "window")) == (
        "window: the last block sees 3 of 4 frames, 0–2"
    )
    kept = np.array([[1.0, 0.5, 0.0], [1.0, 0.0, 0.0]])
    expected = "window: the last block sees 1 of 3 frames whole, 1 in part"
    assert title_of(figures.survival_map(kept, "window")) == expected
    words = figures.prompt_words(np.array([[0.1, 0.3], [0.1, 0.1]]), ["a", "circle"], layer=3, subtitle="")
    assert "heads read “circle” most, with 20 % of their mass; the whole prompt gets 30 %" in title_of(words)
    curves = np.stack([one, one + 1])
    sweep = title_of(figures.sweep_curves({"L1H0": curves, "L1H1": curves}, caption, ["eagle", "castle"]))
    assert sweep == "Over 2 atlases, curves of a head correlate by at least r = 1.00 (L1H0), 1.00 (L1H1)"

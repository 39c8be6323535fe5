"""How the page looks in a browser: themes, widths, type, and what a cache lacks."""

import pytest
from conftest import ROOT
from helpers import synthetic_caches
from helpers.pages import box, text_of

from experiments.caches import save_cache
from experiments.figures.html_page import save_page

pytestmark = pytest.mark.beside

PUBLISHED = ROOT / "cache" / "published"


def test_themes(page):
    """Dark where the system is, unless the page is told otherwise; text is told from its ground in both."""
    browser = page()
    light = """(() => {
      const bright = (name, of) => {
        const c = getComputedStyle(document.querySelector(name))[of].match(/[\\d.]+/g).map(Number);
        return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];
      };
      return [bright("section", "backgroundColor"), bright("section", "color"),
        bright("#profile text", "fill")];
    })()"""
    for system, theme, dark in (
        ("light", "", False),
        ("dark", "", True),
        ("dark", "light", False),
        ("light", "dark", True),
    ):
        browser.send(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": system}]
        )
        browser.js(f"choose({{ theme: {theme!r} }})")
        ground, ink, label = browser.js(light)
        assert (ground < 60 < 160 < min(ink, label)) if dark else (ground > 200 > 80 > max(ink, label))
    browser.send("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("width", [360, 600, 700, 860, 1280, 1900, 2560])
def test_it_fits_the_window(page, width):
    browser = page("layer=1&head=1&pins=0.1_5.2&list=all", width, 800)
    assert browser.js("document.documentElement.scrollWidth") <= width
    outside = browser.js(
        "[...document.querySelectorAll('svg, select, button, input')].filter(e => !e.closest('.scroll') && "
        "e.getBoundingClientRect().right > innerWidth).map(e => e.id)"
    )
    assert outside == []
    x = browser.js(
        "['left', 'middle', 'right'].map(id => document.getElementById(id).getBoundingClientRect().x)"
    )
    assert len(set(x)) == (1 if width <= 860 else 2 if width < 1800 else 3)
    sections = "[...document.querySelectorAll('#left > section')].map(s => s.getBoundingClientRect().x)"
    beside = len(set(browser.js(sections))) == 2
    assert beside == (600 <= width <= 860)


def test_type_stops_growing(page):
    """Body and drawings: larger at 2560 px than at 1000, and no larger at 3840."""
    sizes = {}
    for width in (1000, 2560, 3840):
        browser = page("", width, 900)
        sizes[width] = browser.js(
            "[parseFloat(getComputedStyle(document.body).fontSize), "
            "document.querySelector('#profile text').getBoundingClientRect().height]"
        )
    assert sizes[1000][0] < sizes[2560][0] == sizes[3840][0] <= 16
    assert sizes[1000][1] < sizes[2560][1] == pytest.approx(sizes[3840][1], abs=0.5)


def test_a_cache_without_matrix_passes_or_measures_of_context(page, tmp_path):
    save_page(tmp_path / "c.html", PUBLISHED / "self_forcing_dmd_castle_72f.pt")
    browser = page(path=tmp_path / "c.html")
    assert "no whole frame matrix" in text_of(browser, "matrix")
    assert browser.js("['pass-box', 'quantity-box'].every(id => document.getElementById(id).hidden)")
    assert browser.js("document.getElementById('save-matrix').disabled")
    browser.key("p")
    assert browser.js("document.querySelectorAll('#compare .strong').length") == 3
    base = synthetic_caches.atlas(layers=(0,), steps=(0,), F=6, blocks=[6], H=3)
    save_cache(tmp_path / "b.pt", base)
    save_page(tmp_path / "b.html", tmp_path / "b.pt")
    browser = page(path=tmp_path / "b.html")
    assert "Every frame is noise" in text_of(browser, "profile-note")


def test_matrices_that_are_left_out(page, tmp_path):
    save_cache(
        tmp_path / "a.pt", synthetic_caches.atlas(layers=list(range(30)), steps=(0, 4), F=21, H=12, S=1)
    )
    save_page(tmp_path / "p.html", tmp_path / "a.pt", max_mb=0.7)
    browser = page("pass=1", path=tmp_path / "p.html")
    assert "left out of this page for its size" in text_of(browser, "matrix")
    browser.key("[")
    x, y, _, _ = box(browser, "#matrix")
    browser.point(x + 60, y + 20)
    assert " ± " in text_of(browser, "tip")  # one byte a cell: the step is named

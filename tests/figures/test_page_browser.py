"""What the page does in a browser: keys, links, quantities, pinned heads, lists, downloads, hostile words."""

import csv
import io
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from conftest import ROOT
from helpers import synthetic_caches
from helpers.page_fixtures import SHOWN, box, set_value, text_of

from experiments.caches import load_cache, save_cache
from experiments.caches.view import open_profiles
from experiments.extraction.causal import policy_atlas
from experiments.figures.html_page import save_page

pytestmark = pytest.mark.beside


def test_the_link_keeps_the_whole_state(page):
    link = (
        "layer=5&head=2&pass=1&quantity=mass&measure=first_mass&scale=all&list=all&kind=wave&min=0.01&max=0.9"
        "&sort=last&descending=0&pins=0.1_5.2&theme=dark"
    )
    browser = page(link)
    assert browser.js("location.hash.slice(1)") == link
    assert browser.js("[data.layers[state.layer], state.head, state.pass, state.quantity, state.scale]") == [
        5,
        2,
        1,
        "mass",
        "all",
    ]
    browser.js("choose({ scale: 'head', theme: '', pins: [] })")
    assert "scale" not in browser.js("location.hash") and "pins" not in browser.js("location.hash")
    browser.js("location.hash = 'layer=1&head=1'")
    assert browser.wait_for(f"{SHOWN} === 'Layer 1, head 1'") and browser.js("state.quantity") == "mean_logit"
    page("layer=7&head=99&pass=-1&quantity=<b>&measure=x&sort=y&pins=0.1.2_9.9_x_&min=abc&theme=no&kind=%00")
    assert browser.js(SHOWN) == "Layer 0, head 0" and browser.js("state.pins") == [[0, 1]]


def test_hovering_shows_the_value_of_the_cache(page, atlas_page):
    browser = page("layer=5&head=2&pass=0")
    cache = load_cache(atlas_page.with_name("a.pt"))
    scale = browser.js("MATRIX.size / F * zoom()")
    for query, key in ((20, 3), (4, 4), (0, 20)):
        x, y, _, _ = box(browser, "#matrix")
        left, top = browser.js("[MATRIX.left * zoom(), MATRIX.top * zoom()]")
        browser.point(x + left + scale * (key + 0.5), y + top + scale * (query + 0.5))
        value = cache["frame_logits"][2, 0, 2, query, key].item()
        tip = text_of(browser, "tip")
        assert tip.startswith(f"query {query}, key {key}: ")
        shown = tip.split(": ")[1].replace("−", "-")
        if np.isnan(value):
            assert shown == "never attended"
        else:
            assert float(shown) == pytest.approx(value, abs=6e-4)
        assert browser.js("document.querySelectorAll('#tip img').length") == 2
    x, y, width, height = box(browser, "#map")
    browser.point(x + width / 2, y + 12, click=True)
    layer, head = browser.js("[data.layers[state.layer], state.head]")
    assert text_of(browser, "tip").startswith(f"layer {layer}, head {head}: first-frame effect s ")
    x, y, width, height = box(browser, "tr[data-head='1']")
    browser.point(x + 20, y + height / 2, click=True)
    assert browser.js("state.head") == 1


def test_a_widget_and_its_page_show_the_same_head(browser, atlas_page, tmp_path):
    pytest.importorskip("anywidget", reason="an extra: pip install -e '.[widget]'")
    from experiments.figures.widget import RENDER

    model = """
      const values = { page: PAGE, height: 700, layer: 5, head: 2, pass_number: 0, measure: "wave_r2" };
      const heard = {};
      const model = { get: (name) => values[name], save_changes() {},
        set(name, value) { if (values[name] !== value) { values[name] = value; heard[name]?.(); } },
        on(name, call) { heard[name.slice(7)] = call; } };
      render({ model, el: document.body });
    """
    page = json.dumps(atlas_page.read_text()).replace("</", "<\\/")
    path = tmp_path / "w.html"
    path.write_text(f"<body><script>{RENDER}{model.replace('PAGE', page)}</script></body>")
    browser.open(f"file://{path}", 1000, 800)
    assert browser.wait_for("values.layer === 5 && values.head === 2 && values.measure === 'wave_r2'")
    browser.js("model.set('head', 1)")
    assert browser.wait_for("values.head === 1")
    x, y, *_ = box(browser, "iframe")
    browser.point(x + 200, y + 400)
    for name in ("k", "j", "j"):
        browser.key(name)
    assert browser.complaints() == []


def test_downloads(page, atlas_page, tmp_path):
    browser = page("layer=5&head=2&pins=0.1_1.1&theme=dark&list=all")
    cache = load_cache(atlas_page.with_name("a.pt"))
    rows = list(csv.DictReader(io.StringIO(browser.js("headsAsCsv()"))))
    assert len(rows) == 9 and (rows[-1]["layer"], rows[-1]["head"]) == ("5", "2")
    profile = open_profiles(cache, 0, "mean_logit").frame_profile(5)[2]
    found = [float(rows[-1][f"mean_logit_frame_{f}"]) for f in range(21)]
    np.testing.assert_allclose(found, profile, atol=1e-3)
    cells = list(csv.DictReader(io.StringIO(browser.js("matrixAsCsv()"))))
    matrix = cache["frame_logits"][2, 0, 2].numpy()
    assert len(cells) == np.isfinite(matrix).sum()
    at = [(int(cell["query_frame"]), int(cell["key_frame"])) for cell in cells]
    np.testing.assert_allclose(
        [float(c["mean_logit"]) for c in cells], [matrix[q, k] for q, k in at], atol=1e-3
    )
    drawn = browser.js("viewAsSvg()")
    assert "var(" not in drawn and drawn.count("<svg") >= 5 and "A: layer 0, head 1" in drawn
    ET.fromstring(drawn)
    assert browser.js("fileName('svg', here())") == "wan-mini_layer5_head2_pass0_mean_logit.svg"
    browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.js("document.getElementById('save-matrix').click()")
    saved = tmp_path / "wan-mini_layer5_head2_pass0_mean_logit.csv"
    browser.wait_for("false", seconds=1, until=saved.is_file)
    assert saved.read_text() == browser.js("matrixAsCsv()")


def test_hostile_words_stay_words(page, tmp_path):
    cache = synthetic_caches.atlas()
    bad = "<img src=x onerror='window.owned=1'></script><script>window.owned=1</script>\"'&"
    cache["prompt"], cache["model"], cache["notes"] = bad, bad, [bad]
    save_cache(tmp_path / "a.pt", cache)
    save_page(tmp_path / "p.html", tmp_path / "a.pt")
    browser = page("kind=<img src=x onerror='window.owned=1'>&pins=0.1", path=tmp_path / "p.html")
    assert browser.js("typeof owned") == "undefined" and browser.js("document.images.length") == 0
    assert text_of(browser, "notes") == bad and bad in text_of(browser, "source")
    assert bad in browser.js("document.title")
    drawn = browser.js(
        "new DOMParser().parseFromString(viewAsSvg(), 'image/svg+xml').querySelectorAll('img, script').length"
    )
    assert drawn == 0 and "/" not in browser.js("fileName('svg', here())")


def test_keys_of_a_cache_policy_along_frames_and_positions(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    atlas = policy_atlas("configs/wan_mini.yaml", {"name": "two_memories", "window": 6, "sink": 1}, 12)
    save_cache(tmp_path / "a.pt", atlas)
    path = save_page(tmp_path / "a.html", tmp_path / "a.pt")
    browser = page("layer=2&head=3&quantity=mass", path=path)
    drawn = "document.getElementById('keys').textContent"
    assert "Key frame" in browser.js(drawn) and "μ" in browser.js(drawn) and "average" in browser.js(drawn)
    along = "rowOf(data.keys[state.axis].passes[0].mass, 2, 3).filter(there)"
    assert abs(sum(browser.js(along)) - 1) < 1e-3  # averages hold their share
    assert browser.js("data.averages") == ["μ1", "μ2"] and "mass_average_2" in browser.js("headsAsCsv()")
    x, y, *_ = box(browser, "#matrix")
    right, step = browser.js("[(MATRIX.left + MATRIX.size) * zoom(), (MATRIX.size / C) * zoom()]")
    browser.point(x + right - 0.5 * step, y + browser.js("MATRIX.top * zoom()") + 11.5 * step)
    value = atlas["slot_mass"][2, 0, 3, 11][atlas["slot_frame"][2, -1] == -1][-1].item()
    said = text_of(browser, "tip")
    assert said.startswith("query 11, μ2, an average of gone frames: ")
    assert float(said.split(": ")[1]) == pytest.approx(value, abs=6e-4)
    set_value(browser, "axis", "position")
    assert "axis=position" in browser.js("location.hash") and "Temporal position" in browser.js(drawn)
    assert browser.js("data.keys.position.labels[2]") == [str(n) for n in range(6)]
    assert len(browser.js(along)) == 6 and abs(sum(browser.js(along)) - 1) < 1e-3
    assert "sink" in browser.js(drawn)

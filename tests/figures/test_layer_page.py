"""The page of all layers: its data against the cache it was made from, its size, and what it does in a browser."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import chromium, synthetic_caches

from experiments import layer_page
from experiments.analysis.measures import equal_distance_excess, head_statistics
from experiments.caches import load_cache, save_cache
from experiments.caches.errors import CacheError
from experiments.caches.view import open_profiles
from experiments.figures import html_page
from experiments.figures.html_page import open_passes_of, page_data, save_page
from experiments.running import cli

PUBLISHED = ROOT / "cache" / "published"
EAGLE = PUBLISHED / "self_forcing_dmd_eagle_21f.pt"


def read_page(path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def decode(matrices: dict, cell_bytes: int, N: int, H: int, F: int) -> np.ndarray:
    """Frame matrices [N, H, F, F], NaN where absent, as the page decodes them."""
    top = 256**cell_bytes - 1
    codes = (
        np.frombuffer(base64.b64decode(matrices["codes"]), f"<u{cell_bytes}").reshape(N, H, -1).astype(float)
    )
    low, high = (np.array(matrices[name])[..., None] for name in ("low", "high"))
    out = np.full((N, H, F * F), np.nan)
    out[..., matrices["cells"]] = np.where(codes == top, np.nan, low + (high - low) * codes / (top - 1))
    return out.reshape(N, H, F, F)


def data_of(path, layers=None):
    passes, there = open_passes_of(path)
    return page_data(passes, layers or there)


def test_the_published_data(tmp_path):
    data, cache = data_of(EAGLE), load_cache(EAGLE)
    assert (data["layers"], data["num_heads"], data["num_frames"]) == (list(range(30)), 12, 21)
    (one,) = data["passes"]
    assert one["label"] == "pass 0 (t = 1000)" and one["noise"] == [18, 19, 20]
    (quantity,) = one["quantities"].values()
    profiles = cache["last_block_frame_logits"][:, 0].float().numpy()
    np.testing.assert_allclose(quantity["profiles"], profiles, rtol=1e-3)
    np.testing.assert_allclose(quantity["statistics"]["delta"], head_statistics(profiles).delta, rtol=1e-3)
    matrices = decode(quantity["matrices"], data["cell_bytes"], 30, 12, 21)
    expected = cache["frame_logits"][:, 0].float().numpy()
    span = np.nanmax(expected, (2, 3)) - np.nanmin(expected, (2, 3))
    assert (np.isnan(matrices) == np.isnan(expected)).all()
    assert (np.nanmax(np.abs(matrices - expected), (2, 3)) <= span / 65000 + 2e-5).all()
    named = {m["name"]: m for m in one["measures"]}
    np.testing.assert_allclose(
        named["equal_distance_excess"]["values"],
        equal_distance_excess(expected, cache["block_sizes"]),
        rtol=1e-3,
        atol=1e-6,
    )
    assert one["kinds"][1][1] in ("anchor", "wave", "veil")


def test_every_pass_and_both_quantities(tmp_path):
    save_cache(tmp_path / "a.pt", synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4)))
    data = data_of(tmp_path / "a.pt", [1, 5])
    assert [p["label"] for p in data["passes"]] == ["pass 0 (t = 1000)", "clean pass (t = 0)"]
    assert [p["noise"] for p in data["passes"]] == [[6, 7, 8], []] and data["layers"] == [1, 5]
    cache = load_cache(tmp_path / "a.pt")
    for p, one in enumerate(data["passes"]):
        assert list(one["quantities"]) == ["mean_logit", "mass"]
        for quantity, name in (("mean_logit", "frame_logits"), ("mass", "frame_mass")):
            found = decode(one["quantities"][quantity]["matrices"], 2, 2, 3, 9)
            np.testing.assert_allclose(found, cache[name][[1, 2], p], atol=2e-4)


def test_a_folder_of_layers_and_its_mistakes(tmp_path):
    for N in (10, 2):
        save_cache(tmp_path / f"layer{N}.pt", synthetic_caches.layer(N))
    data = data_of(tmp_path)
    assert data["layers"] == [2, 10]
    for i, N in enumerate((2, 10)):
        profile = open_profiles(load_cache(tmp_path / f"layer{N}.pt")).frame_profile(N)
        np.testing.assert_allclose(
            data["passes"][0]["quantities"]["mean_logit"]["profiles"][i], profile, rtol=1e-3
        )
    save_cache(tmp_path / "layer3.pt", synthetic_caches.layer(3, F=12))
    with pytest.raises(CacheError, match=r"layer 3 has 12 frames, .* One page shows one rollout"):
        data_of(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        CacheError, match=r"holds no layerN\.pt; run: bash experiments/extract_all_layers\.sh"
    ):
        data_of(tmp_path / "empty")


def test_what_a_cache_lacks(tmp_path):
    """No matrix at 72 frames, only the last block in a figure4 cache, nothing but NaN in a head."""
    castle = data_of(PUBLISHED / "self_forcing_dmd_castle_72f.pt")
    assert castle["passes"][0]["quantities"]["mean_logit"]["matrices"] is None
    assert "equal_distance_excess" not in [m["name"] for m in castle["passes"][0]["measures"]]
    save_cache(tmp_path / "f.pt", synthetic_caches.figure4(layers=(1, 5), H=3, S=4))
    assert data_of(tmp_path / "f.pt")["layers"] == [1, 5]
    atlas = synthetic_caches.atlas()
    atlas["frame_logits"][0, 0, 1] = torch.nan
    save_cache(tmp_path / "n.pt", atlas)
    one = data_of(tmp_path / "n.pt")["passes"][0]["quantities"]["mean_logit"]
    assert one["profiles"][0][1] == [None] * 9 and one["statistics"]["max_frame"][0][1] == -1
    assert np.isnan(decode(one["matrices"], 2, 3, 3, 9)[0, 1]).all()


def test_the_page_stays_under_3_mb(tmp_path, monkeypatch):
    """Logits and mass of a whole 1.3B rollout in one byte a cell; where that is too much, fewer passes, and it says so."""
    save_cache(
        tmp_path / "a.pt", synthetic_caches.atlas(layers=list(range(30)), steps=range(5), F=21, H=12, S=1)
    )
    data = read_page(save_page(tmp_path / "p.html", tmp_path / "a.pt"))
    assert (tmp_path / "p.html").stat().st_size < 3e6
    assert data["cell_bytes"] == 1 and len(data["passes"]) == 5
    monkeypatch.setattr(html_page, "BUDGET", 1_000_000)
    data = data_of(tmp_path / "a.pt")
    assert [one["label"][:6] for one in data["passes"]] == ["pass 0", "clean "]
    assert data["notes"] == ["2 of 5 passes are shown: more would not fit in one page."]


def test_the_page_is_one_file(tmp_path):
    cache = synthetic_caches.atlas()
    cache["prompt"] = 'quotes " and </script><b>tags</b>'
    save_cache(tmp_path / "a.pt", cache)
    path = save_page(tmp_path / "p.html", tmp_path / "a.pt")
    page = path.read_text()
    assert "tags</b>" not in page and "</script><b>" in read_page(path)["source"]
    assert not re.search(
        r"(src|href)=|url\(|@import|fetch\(|XMLHttp|https?://(?!www\.w3\.org)", page.split('id="data"')[0]
    )
    assert save_page(tmp_path / "q.html", tmp_path / "a.pt").read_bytes() == path.read_bytes()


def test_bad_input(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(layer_page.run, [str(tmp_path / "no.pt")])
    said = capfd.readouterr().err.strip()
    assert ended.value.code == 2 and "no.pt not found; run: " in said and "\n" not in said


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    pytest.importorskip("websocket", reason="websocket-client, which comes with jupyterlab, is not installed")
    if not chromium.FOUND:
        pytest.skip("Chromium is not installed; on Debian: apt-get install chromium")
    browser = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def atlas_page(tmp_path_factory):
    """Two passes, two quantities, layers 0, 1 and 5 of three heads."""
    folder = tmp_path_factory.mktemp("page")
    save_cache(folder / "a.pt", synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4), F=21))
    return save_page(folder / "index.html", folder / "a.pt")


SHOWN = "document.getElementById('detail-title').textContent.split(' · ')[1]"


def box(browser, selector) -> tuple[float, float, float, float]:
    """x, y, width and height of an element, brought into view."""
    return browser.js(
        f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}}); "
        "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )


def test_keys_and_pickers(browser, atlas_page):
    browser.open(f"file://{atlas_page}", 1280, 900)
    assert browser.js(SHOWN) == "Layer 0, head 0"
    for key, shown in (
        ("ArrowRight", "Layer 0, head 1"),
        ("ArrowDown", "Layer 1, head 1"),
        ("ArrowDown", "Layer 5, head 1"),
        ("ArrowDown", "Layer 0, head 1"),
        ("ArrowLeft", "Layer 0, head 0"),
        ("ArrowLeft", "Layer 0, head 2"),
        ("ArrowUp", "Layer 5, head 2"),
    ):
        browser.key(key)
        assert browser.js(SHOWN) == shown
    assert browser.js("document.getElementById('layer').selectedOptions[0].text") == "5"
    browser.key("]")
    assert browser.js("document.getElementById('pass-label').textContent") == "clean pass (t = 0)"
    browser.key("[")
    assert browser.js("document.getElementById('pass').value") == "0"
    browser.js(
        "(() => { const s = document.getElementById('head'); s.value = 1; s.dispatchEvent(new Event('change')); })()"
    )
    assert browser.js(SHOWN) == "Layer 5, head 1"
    browser.js("document.getElementById('layer-up').click()")
    assert browser.js(SHOWN) == "Layer 0, head 1"
    browser.open(f"file://{atlas_page}#layer=5&head=2&pass=1", 1280, 900)
    assert (
        browser.js(SHOWN) == "Layer 5, head 2" and browser.js("document.getElementById('pass').value") == "1"
    )
    assert browser.complaints() == []


def test_hovering_shows_the_value_of_the_cache(browser, atlas_page):
    browser.open(f"file://{atlas_page}#layer=5&head=2&pass=0", 1280, 900)
    cache = load_cache(atlas_page.with_name("a.pt"))
    scale = browser.js(
        "document.getElementById('matrix').getBoundingClientRect().width / "
        "document.getElementById('matrix').viewBox.baseVal.width"
    )
    x, y, _, _ = box(browser, "#matrix")
    for query, key in ((20, 3), (4, 4), (0, 20)):
        browser.point(x + scale * (34 + (key + 0.5) * 300 / 21), y + scale * (4 + (query + 0.5) * 300 / 21))
        value = cache["frame_logits"][2, 0, 2, query, key].item()
        tip = browser.js("document.getElementById('tip').textContent")
        assert tip.startswith(f"query {query}, key {key}: ")
        shown = tip.split(": ")[1].replace("−", "-")
        assert (
            shown == "never attended" if np.isnan(value) else float(shown) == pytest.approx(value, abs=6e-4)
        )
    x, y, width, height = box(browser, "#map")
    browser.point(x + width / 2, y + height / 4, click=True)
    layer = browser.js("data.layers[state.layer]")
    assert browser.js("document.getElementById('tip').textContent").startswith(f"layer {layer}, ")
    x, y, width, height = box(browser, "tr[data-head='1']")
    browser.point(x + 20, y + height / 2, click=True)
    assert browser.js("state.head") == 1
    assert browser.complaints() == []


def test_both_quantities_and_every_measure_are_drawn(browser, atlas_page):
    browser.open(f"file://{atlas_page}", 1280, 900)
    for quantity in ("mass", "mean_logit"):
        browser.js(f"choose({{ quantity: {quantity!r} }})")
        labels = browser.js("[...document.querySelectorAll('#profile text')].map(t => t.textContent).join()")
        assert ("Attention mass" in labels) == (quantity == "mass")
        assert browser.js("document.querySelectorAll('#matrix rect').length") > 252
    for name in browser.js("data.passes[0].measures.map(m => m.name)"):
        browser.js(f"choose({{ measure: {name!r} }})")
        assert browser.js("document.querySelectorAll('#map rect[fill^=rgb]').length") >= 9
        assert "NaN" not in browser.js("document.querySelector('main').innerHTML")
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_it_fits_the_window(browser, atlas_page, width):
    browser.open(f"file://{atlas_page}", width, 800)
    assert browser.js("document.documentElement.scrollWidth") <= width
    assert browser.js(
        "[...document.querySelectorAll('svg, select, button')].every(e => "
        "e.getBoundingClientRect().right <= innerWidth)"
    )
    one_column = browser.js("document.getElementById('right').getBoundingClientRect().left < 40")
    assert one_column == (width < 860)
    assert browser.complaints() == []


def test_a_cache_without_matrix_passes_or_measures_of_context(browser, tmp_path):
    save_page(tmp_path / "c.html", PUBLISHED / "self_forcing_dmd_castle_72f.pt")
    browser.open(f"file://{tmp_path}/c.html", 1280, 900)
    assert "no whole frame matrix" in browser.js("document.getElementById('matrix').textContent")
    assert browser.js(
        "document.getElementById('pass-box').hidden && document.getElementById('quantity-box').hidden"
    )
    base = synthetic_caches.atlas(layers=(0,), steps=(0,), F=6, blocks=[6], H=3)
    save_cache(tmp_path / "b.pt", base)
    save_page(tmp_path / "b.html", tmp_path / "b.pt")
    browser.open(f"file://{tmp_path}/b.html", 1280, 900)
    assert "Every frame is noise" in browser.js("document.getElementById('profile-note').textContent")
    assert browser.complaints() == []

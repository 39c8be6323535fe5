"""The page's panel on the video: what a click on a patch shows, and maps that no page takes."""

import numpy as np
import pytest
import torch
from helpers import synthetic_caches
from helpers.page_fixtures import box, set_value, text_of

from experiments.analysis.video_maps import open_map
from experiments.caches import save_cache
from experiments.caches.files import CacheError
from experiments.figures.html_page import pooled, save_page

H, S, F = 3, 6, 21  # a frame has 2 x 3 tokens


def maps(heads=(0, 2), places=((18, 0, 1), (18, 1, 2)), **changes):
    """Layers 0 and 5, passes 0 and 4 of the synthetic atlas: query n reads token n of every frame most."""
    cache = synthetic_caches.common("maps", F, H, S)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2, len(heads), len(places), F * S, generator=generator)
    for n in range(len(places)):
        logits[..., n, n::S] += 4
    keys = torch.arange(F * S, dtype=torch.int32).expand(2, 2, -1)
    block = {
        "block": 6,
        "query_frames": [18, 19, 20],
        "queries": torch.tensor(places, dtype=torch.int32),
        "key_frame": keys // S,
        "key_token": keys % S,
        "key_position": keys // S,
        "map_logits": logits.half(),
        "map_mass": (S * logits.softmax(-1)).half(),
    }
    passes = {"pass_timesteps": [1000.0, 0.0], "pass_steps": [0, 4], "pass_is_clean": [False, True]}
    grid = {"rows": 2, "columns": 3, "layers": [0, 5], "heads": list(heads)}
    return cache | passes | grid | {"blocks": [block]} | changes


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    import imageio.v3 as iio

    folder = tmp_path_factory.mktemp("page")
    save_cache(folder / "a.pt", synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4), F=F, H=H, S=S))
    save_cache(folder / "maps.pt", maps())
    iio.imwrite(folder / "a.mp4", np.full((81, 64, 96, 3), 90, np.uint8), fps=16, codec="libx264")
    save_page(folder / "index.html", folder / "a.pt", maps=folder / "maps.pt")
    return folder


SEEN = "document.querySelectorAll('#onvideo image').length"


@pytest.mark.slow
def test_a_click_on_a_patch_shows_what_it_sees(page, files):
    browser = page("layer=5&head=2&pass=1", path=files / "index.html")
    assert browser.js("document.getElementById('onvideo-box').hidden") is False
    assert browser.js(SEEN) == 2 * (F + 1)  # a picture and a map of every frame, and the query's, larger
    x, y, _, _ = box(browser, "#onvideo")
    for patch, (row, column) in enumerate([(0, 1), (1, 2)]):
        shown = browser.js("FRAMES.shown[0]")
        at = [x + (shown["x"] + (column + 0.5) * shown["w"] / 3) * browser.js("zoom()")]
        at.append(y + (shown["y"] + (row + 0.5) * shown["h"] / 2) * browser.js("zoom()"))
        browser.point(*at, click=True)
        assert (
            browser.js("state.patch") == patch and f"patch={patch}" in browser.js("location.hash") + "patch=0"
        )
        seen = open_map(maps(), 5, 2, 4, (18, row, column))
        values = browser.js(f"seenBy({patch})")
        assert np.allclose(np.array(values).reshape(F, 2, 3), seen.values, atol=0.02 * seen.values.max())
        assert text_of(browser, "tip").startswith(f"frame 18, row {row}, column {column}: ")
    browser.key("ArrowRight")  # the click has focused the drawing
    assert browser.js("[state.patch, state.head]") == [0, 2]
    assert "noise" not in text_of(browser, "onvideo-note")
    browser.key("[")
    assert "Hatched: noise in this pass." in text_of(browser, "onvideo-note")
    set_value(browser, "head", "1", "input")
    assert browser.js(SEEN) == 0 and "layers 0, 5; heads 0, 2" in text_of(browser, "onvideo")


def test_maps_of_another_rollout_are_refused(files, tmp_path):
    save_cache(tmp_path / "other.pt", maps(seed=43))
    with pytest.raises(CacheError, match="belongs to another rollout"):
        save_page(tmp_path / "p.html", files / "a.pt", maps=tmp_path / "other.pt")
    sink = {"config": {"cache_policy": {"name": "deep_sink"}}}
    save_cache(tmp_path / "a.pt", synthetic_caches.atlas(F=F, H=H, S=S) | sink)
    save_cache(tmp_path / "maps.pt", maps(config={"height": 8}))
    with pytest.raises(CacheError, match="another rollout than the page, by its cache_policy"):
        save_page(tmp_path / "p.html", tmp_path / "a.pt", maps=tmp_path / "maps.pt")
    assert not (tmp_path / "p.html").exists()


def test_maps_are_pooled_until_they_fit(files, tmp_path):
    large = files / "index.html"
    room = large.stat().st_size / 1e6
    small = save_page(tmp_path / "s.html", files / "a.pt", maps=files / "maps.pt", max_mb=room - 0.003)
    assert '"grid":[2,3]' in small.read_text() and small.stat().st_size < large.stat().st_size
    values = np.arange(6.0).reshape(2, 3)
    values[0, 2] = np.nan
    assert np.array_equal(pooled(values), [[2.0, 5.0]])
    assert np.isnan(pooled(np.full((2, 2), np.nan))).all()

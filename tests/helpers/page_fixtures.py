"""The page in a browser, for the tests of what it does and of how it looks."""

import numpy as np
import pytest

from experiments.caches import save_cache
from experiments.figures.html_page import save_page
from helpers import chromium, synthetic_caches


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
    """Two passes, two quantities, layers 0, 1 and 5 of three heads, and a video."""
    import imageio.v3 as iio

    folder = tmp_path_factory.mktemp("page")
    save_cache(folder / "a.pt", synthetic_caches.atlas(layers=(0, 1, 5), steps=(0, 4), F=21))
    film = np.zeros((81, 64, 64, 3), np.uint8)
    iio.imwrite(folder / "a.mp4", film, fps=16, codec="libx264", macro_block_size=8)
    return save_page(folder / "index.html", folder / "a.pt")


@pytest.fixture
def page(browser, atlas_page):
    """Opens the page at a link; afterwards nothing was complained about and nothing asked of a network."""

    def open_at(link="", width=1280, height=900, path=atlas_page):
        browser.open(f"file://{path}{link and '#'}{link}", width, height)
        return browser

    yield open_at
    assert browser.complaints() == []

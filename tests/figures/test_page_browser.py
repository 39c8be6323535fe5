"""The page in headless Chromium, driven over its DevTools protocol like a user: keys, links, quantities,
pinned heads, lists, downloads, hostile words, the panel on the video; and maps that no page takes.
"""

import csv
import io
import json
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from functools import partial
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import imageio.v3 as iio
import numpy as np
import pytest
from helpers import synthetic_caches

from experiments.analysis.video_maps import open_map
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.mp4 import VideoWriter, count_frames, write_mp4
from experiments.caches.view import open_profiles
from experiments.captured import policy_atlas
from experiments.figures.html_page import pooled, save_page

PUBLISHED = Path(__file__).parents[2] / "cache" / "published"
FOUND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
FLAGS += " disable-component-update disable-sync remote-debugging-port=0 remote-allow-origins=*"
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "[": 219, "]": 221}
KEYS |= {"j": 74, "k": 75, "p": 80}


class Browser:
    """One tab with an empty profile. events keeps its reports: exceptions, log entries, network requests."""

    def __init__(self, profile: Path):
        import websocket

        assert FOUND is not None  # who opens a browser has looked
        null = subprocess.DEVNULL
        flags = [f"--{flag}" for flag in (*FLAGS.split(), f"user-data-dir={profile}")]
        self.process = subprocess.Popen([FOUND, *flags, "about:blank"], stdout=null, stderr=null)
        port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text(encoding="utf-8").strip()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{FOUND} does not start")
            time.sleep(0.05)
        port = port_file.read_text(encoding="utf-8").split()[0]
        with urlopen(f"http://127.0.0.1:{port}/json") as answer:
            (tab,) = [t for t in json.load(answer) if t["type"] == "page"]
        self.socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=60)
        self.count = 0
        self.events: list[dict] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params) -> dict:
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": params}))
        while (message := json.loads(self.socket.recv())).get("id") != self.count:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def open(self, url: str, width: int, height: int) -> None:
        self.events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState == 'complete'", 30)

    def js(self, expression: str):
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 5, until=lambda: False) -> bool:
        """Whether an expression, or until(), becomes true in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.js(expression) or until():
                return True
            time.sleep(0.02)
        return False

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=KEYS[name])

    def point(self, x: float, y: float, click: bool = False) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def complaints(self) -> list:
        """Exceptions, log entries, and requests for anything but the page itself."""
        found = []
        for event in self.events:
            kind, of = event.get("method"), event.get("params", {}).get("request", {}).get("url", "")
            asked = kind == "Network.requestWillBeSent" and not of.startswith(("file:", "about:", "data:"))
            if asked or kind in ("Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(event)
        return found

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    pytest.importorskip("websocket", reason="websocket-client, which comes with jupyterlab, is not installed")
    if not FOUND:
        pytest.skip("Chromium is not installed; on Debian: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


H, S, F = 3, 6, 21  # a frame has 2 x 3 tokens
atlas = partial(synthetic_caches.atlas, (0, 1, 5), (0, 4), F, H, S)
maps = partial(synthetic_caches.maps, F, 2, 3, (0, 5), (0, 4), (0, 2), ((18, 0, 1), (18, 1, 2)))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two passes, two quantities, layers 0, 1 and 5 of three heads, maps of two layers, and a video."""
    folder = tmp_path_factory.mktemp("page")
    save_cache(folder / "a.pt", atlas())
    save_cache(folder / "maps.pt", maps())
    film = np.full((81, 64, 96, 3), 90, np.uint8)
    iio.imwrite(folder / "a.mp4", film, fps=16, codec="libx264", macro_block_size=8)
    save_page(folder / "index.html", folder / "a.pt", maps=folder / "maps.pt")
    return folder


@pytest.fixture
def page(browser, files):
    """Opens the page at a link; afterwards nothing was complained about and nothing asked of a network."""

    def open_at(link, path=files / "index.html"):
        browser.open(f"file://{path}#{link}", 1280, 900)
        return browser

    yield open_at
    assert browser.complaints() == []


# --- What tests ask an open page, and how its numbers are read
SHOWN = "document.getElementById('detail-title').textContent"


def box(browser, selector) -> tuple[float, float, float, float]:
    """x, y, width and height of an element, brought into view."""
    return browser.js(
        f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}}); "
        "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )


def text_of(browser, name) -> str:
    return browser.js(f"document.getElementById({name!r}).textContent")


def set_value(browser, name, value, event="change"):
    browser.js(
        f"(() => {{ const e = document.getElementById({name!r}); e.value = {value!r}; "
        f"e.dispatchEvent(new Event({event!r})); }})()"
    )


@pytest.mark.beside
def test_the_link_keeps_the_whole_state(page):
    link = (
        "layer=5&head=2&pass=1&quantity=mass&measure=first_mass&scale=all&list=all&kind=wave&min=0.01&max=0.9"
        "&sort=last&descending=0&pins=0.1_5.2&theme=dark"
    )
    browser = page(link)
    assert browser.js("location.hash.slice(1)") == link
    state = "[data.layers[state.layer], state.head, state.pass, state.quantity, state.scale]"
    assert browser.js(state) == [5, 2, 1, "mass", "all"]
    browser.js("choose({ scale: 'head', theme: '', pins: [] })")
    assert "scale" not in browser.js("location.hash") and "pins" not in browser.js("location.hash")
    browser.js("location.hash = 'layer=1&head=1'")
    assert browser.wait_for(f"{SHOWN} === 'Layer 1, head 1'") and browser.js("state.quantity") == "mean_logit"
    page("layer=7&head=99&pass=-1&quantity=<b>&measure=x&sort=y&pins=0.1.2_9.9_x_&min=abc&theme=no&kind=%00")
    assert browser.js(SHOWN) == "Layer 0, head 0" and browser.js("state.pins") == [[0, 1]]
    # Without a link: of the heads with maps that of the largest effect; one language at a time
    page("")
    effects = np.array(browser.js("measure().values"))[[0, 2]][:, [0, 2]]
    assert browser.js("measured(state.layer, state.head)") == effects.max()
    assert "of heads with maps on the video it has the largest first-frame" in text_of(browser, "detail-line")
    assert browser.js("document.querySelector('h1').innerText") == "Attention by layer and head"
    browser.js("choose({ language: 'zh' })")
    assert browser.js(SHOWN).startswith("第") and browser.js(
        "document.querySelector('h1').innerText"
    ).startswith("逐")
    browser.js("choose({ language: '' })")


@pytest.mark.beside
def test_a_caption_stands_once_and_every_kind_and_measure_is_explained(page, files):
    browser = page("layer=5&head=2")
    prompt = load_cache(files / "a.pt")["prompt"]
    assert browser.js("document.querySelector('header').innerText").count(prompt) == 1
    kinds = browser.js("[...new Set(pass().kinds.flat())].sort()")
    lines = browser.js("[...document.querySelectorAll('#kind-note p')].map((line) => line.textContent)")
    assert [line.split(": ")[0] for line in lines] == kinds
    kind = browser.js("pass().kinds[state.layer][state.head]")
    assert f"Kind {kind}: q·k is positive for" in text_of(browser, "detail-line")
    for measure in browser.js("pass().measures.map((m) => m.name)"):
        set_value(browser, "measure", measure)
        assert browser.js("meaningOf(measure())") and browser.js(
            "document.getElementById('map-note').textContent.includes(meaningOf(measure()))"
        )


@pytest.mark.beside
@pytest.mark.parametrize("width", [420, 1280])
def test_without_a_mouse_at_both_widths(browser, files, width):
    """Tab reaches each drawing, arrows move from there, and nothing is wider than the window."""
    browser.open(f"file://{files / 'index.html'}#layer=0&head=0", width, 900)
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    for drawing, key, state in (("map", "ArrowDown", [1, 0]), ("heads", "ArrowRight", [1, 1])):
        browser.js(f"document.getElementById('{drawing}').focus()")
        assert browser.js("document.activeElement.id") == drawing
        browser.key(key)
        assert browser.js("[state.layer, state.head]") == state
    assert browser.js("document.querySelectorAll('#detail-line p, #map-note p, #kind-note p').length") >= 5
    assert browser.complaints() == []


@pytest.mark.beside
def test_keys_work_while_a_control_has_focus(page):
    """Sliders and lists keep their arrows, fields of text keep every key."""
    browser = page("layer=0&head=0&pass=0")
    state = "[state.layer, state.pass, state.pins.length]"
    for control, keys, after in (
        ("pass", "j]p", [1, 1, 1]),
        ("layer", "k[p", [0, 0, 2]),
        ("min", "j]p", [0, 0, 2]),
    ):
        browser.js(f"document.getElementById('{control}').focus()")
        for key in keys:
            browser.key(key)
        assert browser.js(state) == after
    browser.js("document.getElementById('pass').focus()")
    browser.key("ArrowRight")
    assert browser.js("[state.pass, state.head]") == [1, 0]


@pytest.mark.beside
def test_a_short_clip_shows_its_one_map_once(page, tmp_path):
    """One block sees no earlier frame: Δ alone is a measure of its logits. A ratio is of mass alone."""
    columns = "columnsShown().includes('ratio')"
    browser = page("layer=0&head=0")
    assert not browser.js(columns) and browser.js("choose({ quantity: 'mass' })") is None
    assert browser.js(columns) and "ratio" in browser.js("headsAsCsv()").split("\n")[0]
    cache = synthetic_caches.atlas(blocks=[9])
    save_cache(tmp_path / "a.pt", cache)
    save_page(tmp_path / "p.html", tmp_path / "a.pt")
    browser = page("", path=tmp_path / "p.html")
    names = browser.js("pass().measures.map((m) => m.name)")
    assert names[0] == "first_minus_middle" and "wave_amplitude" not in names
    assert browser.js("besideMeasure()?.name") != browser.js("measure().name")
    browser.js("data.passes.forEach((one) => one.measures.splice(1)), choose({ beside: '' })")
    assert browser.js("isShown($('map'))") and not browser.js("isShown($('map2'))")


@pytest.mark.beside
def test_numbers_of_twelve_heads_do_not_touch(browser, tmp_path):
    """Two maps stand side by side in a window of 1280 pixels."""
    save_page(tmp_path / "eagle.html", PUBLISHED / "self_forcing_dmd_eagle_21f.pt")
    browser.open(f"file://{tmp_path / 'eagle.html'}", 1280, 900)
    labels = browser.js(
        "[...document.querySelectorAll('#map > text.middle.small')]"
        ".map((e) => e.getBoundingClientRect()).map((b) => [b.top, b.left, b.right])"
    )
    heads = sorted(label[1:] for label in labels if label[0] == labels[0][0])
    assert len(heads) >= 6
    assert all(right[0] - left[1] >= 2 for left, right in pairwise(heads))


@pytest.mark.beside
def test_hovering_shows_the_value_of_the_cache(page, files):
    browser = page("layer=5&head=2&pass=0")
    cache = load_cache(files / "a.pt")
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


@pytest.mark.beside
def test_downloads(page, files, tmp_path):
    browser = page("layer=5&head=2&pins=0.1_1.1&theme=dark&list=all")
    cache = load_cache(files / "a.pt")
    rows = list(csv.DictReader(io.StringIO(browser.js("headsAsCsv()"))))
    assert len(rows) == 9 and (rows[-1]["layer"], rows[-1]["head"]) == ("5", "2")
    profile = open_profiles(cache, 0, "mean_logit").frame_profile(5)[2]
    found = [float(rows[-1][f"mean_logit_frame_{f}"]) for f in range(21)]
    np.testing.assert_allclose(found, profile, atol=1e-3)
    cells = list(csv.DictReader(io.StringIO(browser.js("matrixAsCsv()"))))
    matrix = cache["frame_logits"][2, 0, 2].numpy()
    assert len(cells) == np.isfinite(matrix).sum()
    at = [(int(cell["query_frame"]), int(cell["key_frame"])) for cell in cells]
    found = [float(cell["mean_logit"]) for cell in cells]
    np.testing.assert_allclose(found, [matrix[q, k] for q, k in at], atol=1e-3)
    drawn = browser.js("viewAsSvg()")
    assert "var(" not in drawn and drawn.count("<svg") >= 5 and "A: layer 0, head 1" in drawn
    ET.fromstring(drawn)
    assert browser.js("fileName('svg', here())") == "wan-mini_layer5_head2_pass0_mean_logit.svg"
    browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.js("document.getElementById('save-matrix').click()")
    saved = tmp_path / "wan-mini_layer5_head2_pass0_mean_logit.csv"
    browser.wait_for("false", seconds=1, until=saved.is_file)
    assert saved.read_text() == browser.js("matrixAsCsv()")


@pytest.mark.beside
def test_hostile_words_stay_words(page, tmp_path):
    cache = synthetic_caches.atlas()
    bad = "<img src=x onerror='window.owned=1'></script><script>window.owned=1</script>\"'&"
    cache["prompt"], cache["model"], cache["notes"] = bad, bad, [bad]
    save_cache(tmp_path / "a.pt", cache)
    save_page(tmp_path / "p.html", tmp_path / "a.pt")
    browser = page("kind=<img src=x onerror='window.owned=1'>&pins=0.1", path=tmp_path / "p.html")
    assert browser.js("typeof owned") == "undefined" and browser.js("document.images.length") == 0
    assert text_of(browser, "notes") == bad and bad in text_of(browser, "what")
    assert bad in browser.js("document.title")
    drawn = "new DOMParser().parseFromString(viewAsSvg(), 'image/svg+xml')"
    assert browser.js(f"{drawn}.querySelectorAll('img, script').length") == 0
    assert "/" not in browser.js("fileName('svg', here())")


@pytest.mark.beside
def test_keys_of_a_cache_policy_along_frames_and_positions(page, tiny, tmp_path):
    atlas = policy_atlas(tiny.path, {"name": "two_memories", "window": 6, "sink": 1}, 12)
    save_cache(tmp_path / "a.pt", atlas)
    path = save_page(tmp_path / "a.html", tmp_path / "a.pt")
    browser = page("layer=1&head=1&quantity=mass", path=path)
    drawn = "document.getElementById('keys').textContent"
    assert "Cache policy two_memories,window=6,sink=1" in text_of(browser, "source")
    assert "Key frame" in browser.js(drawn) and "μ" in browser.js(drawn) and "average" in browser.js(drawn)
    along = "rowOf(data.keys[state.axis].passes[0].mass, 1, 1).filter(there)"
    assert abs(sum(browser.js(along)) - 1) < 1e-3  # averages hold their share
    assert browser.js("data.averages") == ["μ1", "μ2"] and "mass_average_2" in browser.js("headsAsCsv()")
    x, y, *_ = box(browser, "#matrix")
    right, step = browser.js("[(MATRIX.left + MATRIX.size) * zoom(), (MATRIX.size / C) * zoom()]")
    browser.point(x + right - 0.5 * step, y + browser.js("MATRIX.top * zoom()") + 11.5 * step)
    value = atlas["slot_mass"][1, 0, 1, 11][atlas["slot_frame"][1, -1] == -1][-1].item()
    said = text_of(browser, "tip")
    assert said.startswith("query 11, μ2, an average of gone frames: ")
    assert float(said.split(": ")[1]) == pytest.approx(value, abs=6e-4)
    set_value(browser, "axis", "position")
    assert "axis=position" in browser.js("location.hash") and "Temporal position" in browser.js(drawn)
    assert browser.js("data.keys.position.labels[1]") == [str(n) for n in range(6)]
    assert len(browser.js(along)) == 6 and abs(sum(browser.js(along)) - 1) < 1e-3
    assert "sink" in browser.js(drawn)


# --- The panel on the video
SEEN = "document.querySelectorAll('#onvideo image').length"


@pytest.mark.slow
def test_a_click_on_a_patch_shows_what_it_sees(page, files):
    browser = page("layer=5&head=2&pass=1")
    assert browser.js("document.getElementById('onvideo-box').hidden") is False
    assert browser.js(SEEN) == 2 * (F + 1)  # a picture and a map of every frame, and the query's, larger
    x, y, _, _ = box(browser, "#onvideo")
    for patch, (row, column) in enumerate([(0, 1), (1, 2)]):
        shown = browser.js("FRAMES.shown[0]")
        at = [x + (shown["x"] + (column + 0.5) * shown["w"] / 3) * browser.js("zoom()")]
        at.append(y + (shown["y"] + (row + 0.5) * shown["h"] / 2) * browser.js("zoom()"))
        browser.point(*at, click=True)
        assert browser.js("state.patch") == patch
        assert f"patch={patch}" in browser.js("location.hash") + "patch=0"
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
    assert browser.js(SEEN) == 0 and "layers 0, 5; heads 0, 2" in text_of(browser, "onvideo-note")


def test_a_video_plays_also_while_it_grows(browser, tmp_path):
    film = np.random.default_rng(0).integers(0, 255, (160, 64, 64, 3), np.uint8)
    (tmp_path / "a.html").write_text(
        "<video id=whole src=a.mp4 muted></video><video id=part src=b.mp4 muted>"
    )
    write_mp4(film[:33], tmp_path / "a.mp4", tag="run")
    with VideoWriter(tmp_path / "c.mp4", growing=tmp_path / "b.mp4") as growing:
        growing.append(film)
        deadline = time.monotonic() + 60
        while not (tmp_path / "b.mp4").exists() or count_frames(tmp_path / "b.mp4") < 33:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        browser.open(f"file://{tmp_path}/a.html", 600, 400)
        assert browser.wait_for("whole.readyState == 4 && part.readyState == 4", 30)
        assert browser.js("[whole.duration, whole.videoWidth, whole.videoHeight]") == [33 / 16, 256, 256]
        browser.js("whole.currentTime = part.currentTime = 31.5 / 16")
        assert browser.wait_for("!whole.seeking && !part.seeking && whole.currentTime == 31.5 / 16", 30)
        browser.js("whole.play(), part.play(), 0")
        assert browser.wait_for("whole.ended", 30)
        assert browser.js("[whole.error, part.error]") == [None, None]


def test_maps_of_another_rollout_are_refused(files, tmp_path):
    save_cache(tmp_path / "other.pt", maps(seed=43))
    with pytest.raises(CacheError, match="belongs to another rollout"):
        save_page(tmp_path / "p.html", files / "a.pt", maps=tmp_path / "other.pt")
    sink = {"config": {"cache_policy": {"name": "deep_sink"}}}
    save_cache(tmp_path / "a.pt", atlas() | sink)
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

"""A page in headless Chromium, driven over its DevTools protocol like a user: keys, pointer, window sizes."""

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from experiments.caches import save_cache
from experiments.figures.html_page import save_page
from helpers import synthetic_caches

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

    def screenshot(self, path: Path) -> None:
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

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


# --- What tests ask an open page, and how its numbers are read
SHOWN = "document.getElementById('detail-title').textContent.split(' · ')[1]"


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


def decode(coded: dict, N: int, H: int) -> np.ndarray:
    """Rows [N, H, n], NaN where absent, as the page decodes them."""
    top = 256 ** coded["bytes"] - 2
    codes = np.frombuffer(base64.b64decode(coded["codes"]), f"<u{coded['bytes']}").reshape(N, H, -1) / top
    low, high = (np.array(coded[name])[..., None] for name in ("low", "high"))
    return np.where(codes > 1, np.nan, low + (high - low) * codes ** coded["power"])


def decode_matrices(coded: dict, N: int, H: int, F: int, averages: int = 0) -> np.ndarray:
    """Frame matrices [N, H, F, F + averages]; the cells that no head has are NaN."""
    out = np.full((N, H, F * (F + averages)), np.nan)
    out[..., coded["cells"]] = decode(coded, N, H)
    return out.reshape(N, H, F, F + averages)

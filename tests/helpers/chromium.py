"""A page in headless Chromium, driven over its DevTools protocol like a user: keys, pointer, window sizes."""

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

FOUND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "[": 219,
    "]": 221,
    "j": 74,
    "k": 75,
    "p": 80,
}


class Browser:
    """One tab with an empty profile. events keeps its reports: exceptions, log entries, network requests."""

    def __init__(self, profile: Path):
        import websocket

        assert FOUND is not None  # who opens a browser has looked

        self.process = subprocess.Popen(
            [FOUND, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
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
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        deadline = time.monotonic() + 30
        while self.js("document.readyState") != "complete" and time.monotonic() < deadline:
            time.sleep(0.02)

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
        path.write_bytes(
            base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        )

    def complaints(self) -> list:
        """Exceptions, log entries, and requests for anything but the page itself."""
        wrong = [e for e in self.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
        requests = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return wrong + [url for url in requests if not url.startswith(("file:", "about:", "data:"))]

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(timeout=30)

"""experiments/download_weights.sh against a small server that answers as the hub does:
asks, fetches nothing twice, and compares what arrived.
"""

import hashlib
import json
import os
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT

from wan.config import load_config

MODEL, TUNED = "Wan-AI/Wan2.1-T2V-1.3B", "gdhe17/Self-Forcing"
WEIGHTS, COMMIT = "diffusion_pytorch_model.safetensors", "0" * 40
FILES = {
    MODEL: {
        "config.json": b"{}",
        WEIGHTS: os.urandom(3 << 20),
        "models_t5_umt5-xxl-enc-bf16.pth": os.urandom(2 << 20),
        "Wan2.1_VAE.pth": os.urandom(1 << 20),
    },
    TUNED: {"checkpoints/self_forcing_dmd.pt": os.urandom(1 << 20), "checkpoints/other.pt": b"not asked for"},
    "tianweiy/CausVid": {"autoregressive_checkpoint/model.pt": b"few bytes"},
}
WHOLE = {f"wan_models/Wan2.1-T2V-1.3B/{name}": data for name, data in FILES[MODEL].items()}
WHOLE["checkpoints/self_forcing_dmd.pt"] = FILES[TUNED]["checkpoints/self_forcing_dmd.pt"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """What `hf download` uses of the hub: a repository's files, and their bytes from an offset."""

    protocol_version = "HTTP/1.1"
    sent: list[str]
    spoiled: str

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.partition("?")[0]
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/\w+", path)
        wanted = re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path)
        if listing:
            files = FILES[listing[1]]
            tree = []
            for name, data in files.items():
                tree.append({"type": "file", "path": name, "size": len(data), "oid": "0"})
                if len(data) > 100:
                    oid = "0" * 64 if name == self.spoiled else sha256(data)
                    tree[-1]["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 130}
            about = {"id": listing[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.send(json.dumps(tree if listing[2] == "tree" else about).encode())
        else:
            data = FILES[wanted[1]][wanted[2]]
            self.sent.extend([wanted[2]] * (self.command == "GET"))
            self.send(data, {"ETag": f'"{sha256(data)}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def send(self, body: bytes, headers: dict[str, str] | None = None):
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(warm):
    Hub.sent, Hub.spoiled = [], ""
    server = ThreadingHTTPServer(warm.hub, Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def download(warm, clone, *flags, answer=""):
    environment = os.environ | {"HF_ENDPOINT": "http://{}:{}".format(*warm.hub), "NO_PROXY": "127.0.0.1"}
    command = ["bash", str(clone / "experiments/download_weights.sh"), *flags]
    options = {"capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, input=answer, env=environment | {"PYTHONPATH": str(clone)}, **options)


def fetched(folder) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_without_a_network_and_with_bad_flags_it_says_so_in_one_line(warm, clone, tmp_path):
    done = download(warm, clone, "--yes", str(tmp_path / "here"))
    wrong = download(warm, clone, "no_such", "x")
    assert (done.returncode, wrong.returncode) == (1, 2) and "does not answer" in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == wrong.stderr.count("\n") == 1


def test_nothing_is_fetched_without_a_yes_or_twice_and_what_arrived_is_compared(hub, warm, clone, tmp_path):
    here = tmp_path / "here"
    for flags, said in (
        ([], "nothing was downloaded; --yes"),
        (["--yes", "causvid"], "nothing was downloaded; --accept_licence"),  # to which that yes is none
    ):
        done = download(warm, clone, *flags, str(here))
        assert done.returncode == 2 and said in done.stderr and "licence" in done.stdout
        assert "3.1M" in done.stdout and not hub.sent and not fetched(here)
    done = download(warm, clone, str(here), answer="y\n")
    assert done.returncode == 0, done.stderr
    assert fetched(here) == WHOLE and "next: python experiments/check_model.py" in done.stdout
    assert "the sizes of 5 files are the hub's, and so are the SHA-256 of 4" in done.stdout
    assert len(hub.sent) == len(set(hub.sent)) == 5
    hub.spoiled = WEIGHTS  # the hub says another hash than that of the file that it sent
    done = download(warm, clone, "--yes", str(here))
    assert done.returncode == 1 and len(hub.sent) == 5
    assert f"{WEIGHTS} is not the file that the hub has; remove it" in done.stderr


RELEASED = [path.stem for path in (ROOT / "configs").glob("*.yaml") if "\nrelease:" in path.read_text()]


def test_every_release_is_complete_and_its_files_are_those_of_the_config():
    assert len(RELEASED) > 5
    for name in RELEASED:
        config = load_config(ROOT / f"configs/{name}.yaml")
        said = config.release
        paths = [str(Path(said["folder"]) / file) for file in said["files"]]
        assert paths == [path for path in (config.checkpoint_path, config.lora_path) if path], name
        assert said["ask"] == ("non-commercial" in said["licence"] or "its own" in said["licence"]), name
        assert said["source"].startswith("https://github.com/"), name

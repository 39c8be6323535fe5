"""Make, kill, tear, swap, delete, go on, change one setting, in random orders: never a wrong file in silence.

Long videos, sweeps and causal atlases of a tiny model run as their scripts run; the text encoder, the VAE and
ffmpeg are stand-ins. Whatever was done to the files before: a command that ends well leaves what it leaves in
an empty folder, byte for byte.
"""

import json
import os
import shutil
from collections import Counter
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT
from helpers.checkpoints import write_transformer
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from experiments import run_causal_atlas, run_extraction_all, run_rollout
from experiments import session as sessions
from experiments.caches import files
from experiments.extraction import provenance, video
from experiments.running import cli
from wan.config import ModelConfig, load_config
from wan.errors import UserError
from wan.model import CausalWanModel
from wan.vae import VAE

EXAMPLES, STEPS = 27, 21
SIZES = ModelConfig(dim=24, ffn_dim=32, num_heads=2, num_layers=1, freq_dim=8, text_dim=8, text_len=4)
CONFIG = {"model": "tiny", "num_frames": 6, "height": 2, "width": 2, "denoising_step_list": [1000]}
CONFIG |= {"layer_indices": [0], "layer_index": 0}
MINI, PROMPTS = ROOT / "checkpoints/wan-mini", ("a red circle", "a blue square")
COUNTS: Counter = Counter()


class Killed(BaseException):
    """As if the process had ended here."""


# --- What stands in for the encoder, the VAE and ffmpeg
class Encoder:
    """States that are of a prompt."""

    def __call__(self, prompts):
        seed = int.from_bytes(sha256(prompts[0].encode()).digest()[:4], "big")
        return torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(seed))

    def words(self, prompt):
        return prompt.split()


class Decoder:
    """Pixels that are of the latents: four frames each, the first of a video one."""

    vae, made_by = SimpleNamespace(dtype=torch.float32), "a stand-in"

    def __init__(self, model=None):
        self.started = False

    def __call__(self, latents):
        pixels = latents[:, :, :3].float().sigmoid().repeat_interleave(8, 3).repeat_interleave(8, 4)
        skipped, self.started = 0 if self.started else 3, True
        return pixels.repeat_interleave(4, 1)[:, skipped:]

    def decode(self, latents):
        return Decoder()(latents)

    def stream(self):
        return Decoder()


def box(kind: bytes, content: bytes) -> bytes:
    return (8 + len(content)).to_bytes(4, "big") + kind + content


def fake_mp4(pixels, multiple=8, options=(), tag="", about="", shortest=1) -> bytes:
    """An mp4 as far as its boxes go: whole, or a fragment as GrowingVideo asks for."""
    comment = box(b"\xa9cmt", box(b"data", bytes(8) + tag.encode()))
    head, data = box(b"ftyp", bytes(8)), box(b"mdat", sha256(pixels.tobytes()).digest())
    if "-movflags" not in options:
        return head + data + box(b"moov", comment)
    return head + box(b"moov", comment) + box(b"moof", box(b"tfdt", bytes(12))) + data + box(b"mfra", b"")


def fake_finish(self) -> None:
    """Put the pictures of all pieces behind the head, without fragments."""
    content = self.path.read_bytes()
    boxes = [(kind, content[start:end]) for kind, start, end in files.mp4_boxes(self.path)]
    with files.replacing(self.path) as file:
        file.write(b"".join(part for kind, part in boxes if kind in (b"ftyp", b"moov", b"mdat")))
    self.is_finished = True


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(sessions.TextEncoder, "from_pretrained", lambda *given: Encoder())
    monkeypatch.setattr(VAE, "from_pretrained", lambda *given, **more: Decoder())
    monkeypatch.setattr(video.GrowingVideo, "finish", fake_finish)
    for module in (files, video):
        monkeypatch.setattr(module, "encode_mp4", fake_mp4)
    monkeypatch.setattr(files, "require_ffmpeg", lambda *given: "ffmpeg")
    monkeypatch.setattr(video, "require_ffmpeg", lambda *given: "ffmpeg")
    monkeypatch.setattr(cli, "load_config", lambda path, given: known_config(path, json.dumps(given)))


@cache
def known_config(path: str, given: str):
    return load_config(path, json.loads(given))


# --- The model, and what its commands leave in an empty folder
def write_weights(folder: Path, version: int) -> None:
    """Write weights of the same names and sizes, in place."""
    torch.manual_seed(version)
    shutil.rmtree(folder / "model/transformer", ignore_errors=True)
    write_transformer(folder / "model", CausalWanModel(**vars(SIZES)).state_dict(), sizes=SIZES)


def write_model(folder: Path) -> None:
    paths = {"ckpt_dir": str(folder / "model"), "embeds_dir": str(folder / "states")}
    files = {"config.yaml": yaml.safe_dump(CONFIG | paths), "full.yaml": "name: full"}
    files["window.yaml"] = "{name: window, window: 3}"
    files |= {"edit.yaml": "- {edit: ablate, how: zero, passes: denoise}", "model/vae/config.json": "{}"}
    files |= {f"model/tokenizer/{name}.json": "{}" for name in ("tokenizer", "tokenizer_config")}
    names = ("text_encoder/model", "vae/diffusion_pytorch_model")
    files |= {f"model/{name}.safetensors": "{}" for name in names}
    files["model/text_encoder/config.json"] = (MINI / "text_encoder/config.json").read_text()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


Settings = tuple[int, int, str, int, int]  # prompt, seed, policy, weights, code
BIT = st.integers(0, 1)
SETTINGS = st.tuples(BIT, BIT, st.sampled_from(["full", "window"]), BIT, BIT)
NUMBER = st.integers(0, 1 << 16)  # which of the files that are there
KINDS, HOW = ("long", "sweep", "study"), ("killed", "as it is", "killed", "anew")


def command(kind: str, home: Path, out: Path, chosen: Settings, *flags: str) -> None:
    """Run the script of a kind of work."""
    prompt, seed, policy, weights, code = chosen
    if WEIGHTS.get(home) != weights:
        write_weights(home, weights)
        WEIGHTS[home] = weights
    provenance.code_version.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "code_version", lambda: str(code))
        patch.setattr(sessions, "code_version", lambda: str(code))
        words = ["--config_path", str(home / "config.yaml"), "--device", "cpu", "--quiet", *flags]
        words += ["--cache_policy", str(home / f"{policy}.yaml")]
        if kind == "long":
            words += ["--prompt", PROMPTS[prompt], "--seed", str(seed), "--capture", "all"]
            run_rollout.run([*words, "--output_path", str(out / "long.mp4")])
            return
        (home / "prompts.txt").write_text(PROMPTS[prompt])
        words += ["--prompts", str(home / "prompts.txt"), "--seeds", str(seed)]
        words += ["--output_dir", str(out / kind)]
        if kind == "sweep":
            run_extraction_all.run([*words, "--save_video"])
        else:
            run_causal_atlas.run([*words, "--each", "layer", "--edit", str(home / "edit.yaml")])


WEIGHTS: dict[Path, int] = {}
HOMES: list[Path] = []
MUTABLE = ("manifest.json",)  # lists of what there is, and logs: nobody takes a number from them


def contents(folder: Path) -> dict[str, bytes]:
    """The outputs below a folder."""
    found = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    of_numbers = [path for path in found if path.name not in MUTABLE and path.suffix != ".jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in of_numbers}


@cache
def fresh(kind: str, chosen: Settings) -> dict[str, bytes]:
    """What a command leaves in an empty folder."""
    out = HOMES[0] / "fresh" / str(len(list((HOMES[0] / "fresh").iterdir())))
    out.mkdir()
    command(kind, HOMES[0], out, chosen)
    return contents(out)


class Folder(RuleBasedStateMachine):
    """One folder of outputs, and everything that happens to it."""

    @initialize()
    def begin(self):
        self.home = HOMES[0]
        self.out = self.home / "out"
        for folder in (self.out, self.home / "states"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def run(self, kind, chosen, *flags):
        """Run a command -> whether it ended well; then its outputs are those of a fresh run."""
        COUNTS["steps"] += 1
        try:
            command(kind, self.home, self.out, chosen, *flags)
        except UserError as error:
            assert "\n" not in str(error)
            COUNTS["refused"] += 1
            return False
        COUNTS["made"] += 1
        there = contents(self.out)
        for name, content in fresh(kind, chosen).items():
            assert there.get(name) == content, f"{kind} {chosen}: {name} is wrong"
        return True

    @rule(kind=st.sampled_from(KINDS), chosen=SETTINGS, how=st.sampled_from(HOW))
    def make(self, kind, chosen, how):
        if how == "killed":
            self.kill(kind, chosen, len(self.files("out")) % 7)
        elif how == "as it is" or kind == "study":  # which has no --overwrite
            self.run(kind, chosen)
        else:
            assert self.run(kind, chosen, "--overwrite")  # the remedy of all refusals

    def kill(self, kind, chosen, after):
        """End a command when it has written so many files or blocks."""
        left, fsync = [after], os.fsync
        COUNTS["steps"] += 1

        def dying(file):
            fsync(file)
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", dying)
            try:
                command(kind, self.home, self.out, chosen)
            except (Killed, UserError):
                COUNTS["killed"] += 1

    def files(self, *folders: str) -> list[Path]:
        """Files that a hand may touch."""
        there = [path for folder in folders for path in sorted((self.home / folder).rglob("*"))]
        return [path for path in there if path.is_file() and not path.name.startswith(".")]

    def one_of(self, paths: list[Path], number: int) -> Path | None:
        COUNTS["steps"] += 1
        return paths[number % len(paths)] if paths else None

    @rule(number=NUMBER, share=st.sampled_from([0.0, 0.01, 0.3, 0.7, 0.95, 0.999]))
    def tear(self, number, share):
        if path := self.one_of(self.files("out", "states"), number):
            os.truncate(path, int(share * path.stat().st_size))

    @rule(number=NUMBER)
    def delete(self, number):
        if path := self.one_of(self.files("out", "states"), number):
            path.unlink()

    @rule(number=NUMBER, of_other=NUMBER, swaps=st.booleans())
    def confuse(self, number, of_other, swaps):
        """Give a file the content, and the age, of another of its kind."""
        path = self.one_of(self.files("out", "states"), number)
        others = self.files("out", "states", *([] if swaps else ["donors"]))
        others = [other for other in others if path and other.suffix == path.suffix and other != path]
        if not path or not others:
            return
        other = others[of_other % len(others)]
        if swaps:
            for one, two in ((path, self.home / "between"), (other, path), (self.home / "between", other)):
                os.replace(one, two)
        else:
            shutil.copy2(other, path)

    def teardown(self):
        """At the end every command ends well and right, or says why not."""
        for kind in KINDS:
            if not self.run(kind, USUAL) and kind != "study":
                assert self.run(kind, USUAL, "--overwrite")


USUAL: Settings = (0, 0, "full", 0, 0)


def test_no_wrong_file_in_silence(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    write_model(tmp_path)
    for name in ("fresh", "donors"):
        (tmp_path / name).mkdir()
    HOMES[:] = [tmp_path]
    fresh.cache_clear()
    COUNTS.clear()
    for kind in KINDS:
        command(kind, tmp_path, tmp_path / "donors", (1, 1, "full", 0, 0))
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    how = {"max_examples": EXAMPLES, "stateful_step_count": STEPS, "derandomize": True, "deadline": None}
    how |= {"database": None, "phases": [Phase.generate], "suppress_health_check": checks}
    run_state_machine_as_test(Folder, settings=settings(**how))
    assert COUNTS["steps"] >= 500 and min(COUNTS[kind] for kind in ("made", "refused", "killed")) >= 5, COUNTS

"""One identity: everything that numbers depend on changes it, nothing else does, and studies go by it."""

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file

from experiments import edits, named, provenance, run_extraction_all
from experiments import session as sessions
from experiments.caches.files import ONLY, CacheError, require_same
from experiments.progress import Progress
from experiments.provenance import fingerprint, identity, video_tag
from experiments.studies.causal_atlas import Study
from experiments.studies.interventions import base_runs
from experiments.studies.policy_comparison import PolicyRuns, with_session
from wan import checkpoint
from wan.config import RunConfig, load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, Bias, Knockout, Patch, Source, at, intervene

OTHERS = {"prompt": "a cyan square moving up", "seed": 7, "num_frames": 6, "timestep_shift": 4.0}
OTHERS |= {"cache_policy": {"name": "deep_sink"}, "prompt_schedule": [{"frame": 3, "prompt": "a dog"}]}


@pytest.fixture
def config():
    return load_config("configs/wan_mini.yaml", {"num_frames": 9, "device": "cpu"})


def changed(config, **settings) -> RunConfig:
    """The same config with settings that are not checked: what is asked is whether they count."""
    other = replace(config)
    for name, value in settings.items():
        object.__setattr__(other, name, value)
    return other


def test_every_setting_counts_or_is_said_not_to(config):
    counting = [item.name for item in fields(RunConfig) if item.metadata["changes_numbers"]]
    names = {"as it is": fingerprint(identity(config, "0"))}
    for name in counting:
        other = changed(config, **{name: OTHERS.get(name, "another")})
        names[name] = fingerprint(identity(other, "0"))
    assert len(set(names.values())) == len(names) > 20
    idle = {"layer_indices": [2], "layer_index": 2, "step": 1, "embeds_dir": "x", "release": {"a": 1}}
    assert fingerprint(identity(changed(config, **idle), "0")) == names["as it is"]
    assert fingerprint({"a": 1}, a=2) == fingerprint({"a": 2}) != fingerprint({"a": 1})
    assert len(names["as it is"]) == 32


def test_weights_edits_and_numbers_count_and_versions_and_devices_do_not(config, monkeypatch):
    names = [fingerprint(identity(config, "0")), fingerprint(identity(config, "0", more=1))]
    names.append(fingerprint(identity(replace(config, dtype="bfloat16"), "0")))
    names.append(fingerprint(identity(config, "1")))
    names += [fingerprint(identity(config, "0", [Bias(b, frames="first", passes="all")])) for b in (1.0, 2.0)]
    assert fingerprint(identity(replace(config, dtype="float32"), "0")) == names[0]  # what auto is here
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "NUMBERS", 10**6)
        names.append(fingerprint(identity(config, "0")))
    assert len(set(names)) == len(names)
    with monkeypatch.context() as patch:  # where the card draws the noise, its name counts
        patch.setattr(provenance, "device_name", lambda device: "a card")
        assert "card" not in identity(config, "0")
        assert identity(changed(config, noise="released"), "0")["card"] == "a card"
    monkeypatch.setattr(torch, "__version__", "0")
    assert fingerprint(identity(config, "0")) == names[0]


@pytest.mark.slow
def test_a_comment_in_the_code_leaves_a_finished_sweep_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    copy, output = tmp_path / "copy", tmp_path / "sweep"
    flags = "--config_path configs/wan_mini.yaml --num_frames 3 --seeds 0 1 --quiet --output_dir"
    command = [*flags.split(), str(output)]
    for name in ("wan", "experiments", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "checkpoints").symlink_to(ROOT / "checkpoints")
    with open(copy / "wan/model.py", "a") as file:
        file.write("# a comment\n")
    run_extraction_all.run(command)
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("*.pt")}
    script = [sys.executable, "experiments/run_extraction_all.py", *command]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(script, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = {path.name: path.stat().st_mtime_ns for path in output.glob("*.pt")}
    assert before == after and len(before) == 2


def test_a_hash_is_remembered_by_path_size_and_time(tmp_path):
    weights, memory = tmp_path / "weights.pt", tmp_path / "hashes.json"
    weights.write_bytes(b"some")
    first = checkpoint.file_sha256(weights, memory).result()
    assert first == hashlib.sha256(b"some").hexdigest()
    stat = weights.stat()
    weights.write_bytes(b"same")  # of one size, and the time of change is put back: taken for the same
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert checkpoint.file_sha256(weights, memory).result() == first
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert checkpoint.file_sha256(weights, memory).result() == hashlib.sha256(b"same").hexdigest()
    memory.write_text("[")  # damaged: hashed again
    assert checkpoint.file_sha256(weights, memory).result() == hashlib.sha256(b"same").hexdigest()


def test_files_count_by_what_they_hold(config, tmp_path):
    model = tmp_path / "model"
    for name in ("transformer", "text_encoder", "tokenizer", "vae"):
        shutil.copytree(f"checkpoints/wan-mini/{name}", model / name)
    heads, means, lora, weights = (tmp_path / n for n in ("heads.csv", "means.pt", "lora.pt", "weights.pt"))
    heads.write_text("\n".join([",".join("ab" * 6)] * 8))
    for path in (means, lora, weights):
        path.write_bytes(b"some")
    policies = {"a": {"name": "full"}, "b": {"name": "window", "window": 9}}
    means_of_file = Ablate("mean", str(means), passes="denoise")
    edits = [edit.to_dict() for edit in (means_of_file, Patch("z", Source(weights="base"), passes="denoise"))]
    paths = {"ckpt_dir": str(model), "checkpoint_path": str(weights), "lora_path": str(lora)}
    by_file = {"name": "per_head", "file": str(heads), "policies": policies}
    config = replace(config, **paths, cache_policy=by_file, interventions=edits)

    def tag() -> str:
        return video_tag(fingerprint(identity(config)), config)

    run, _, vae = tag().partition(" ")
    text = model / "text_encoder/model.safetensors"
    base = model / "transformer/diffusion_pytorch_model.safetensors"
    for path in (weights, lora, heads, means, text, model / "tokenizer/tokenizer.json", base):
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert tag().partition(" ")[0] != run and tag().endswith(vae), path
        path.write_bytes(before)
    decoder = model / "vae/diffusion_pytorch_model.safetensors"
    decoder.write_bytes(decoder.read_bytes()[:-1] + b"?")
    assert tag().startswith(run) and tag() != f"{run} {vae}"
    decoders = ("auto", "float32", "bfloat16", "preview by a")
    assert len({video_tag(run, config, dtype) for dtype in decoders}) == 3
    means.unlink()
    with pytest.raises(ConfigError, match="not found; leave source out"):
        identity(config)


def test_another_fingerprint_is_refused_in_a_line_that_names_both():
    require_same("a.pt", "ab", "ab", "remove it")
    for found, said in (("cd", "fingerprint 'cd'"), (None, "no fingerprint"), ("", "no fingerprint")):
        with pytest.raises(CacheError, match=f"^a.pt belongs to another run .*{said}.*, not ab; remove it$"):
            require_same("a.pt", found, "ab", "remove it")


# --- Who goes by it
SIZES = SimpleNamespace(num_layers=8, num_heads=12)


def session_of(config, weights="0"):
    """What names need of a session; its rollouts are asked for by prompt and seed, and make nothing."""
    sha256, asked = Future(), []
    sha256.set_result(weights)
    found = SimpleNamespace(sha256=sha256, asked=asked, device=torch.device("cpu"), model_config=SIZES)
    found.kind, found.files_now = sessions.Session.kind, lambda *given: None
    found.live_weights, found.are_changed = lambda: None, lambda live: False
    found.identity = lambda *given, **more: sessions.Session.identity(found, *given, **more)
    found.rollout = lambda one: asked.append((one.prompt, one.seed)) or torch.zeros(1)
    return found


def of_atlas(session, config, tmp_path):
    edit = Knockout(frames="first", layers=[1], passes="denoise")
    return str([*Study(tmp_path, edit, "head", [config], session).items])


def of_comparison(session, config, tmp_path):
    planned = PolicyRuns(tmp_path, {"a": {"name": "full"}}, [config], {})
    return with_session(session, planned, 1).items[0].name


def of_base_runs(session, config, tmp_path):
    (tmp_path / "base.pt").unlink(missing_ok=True)
    base_runs(str(tmp_path / "base.pt"), session, config)
    return torch.load(tmp_path / "base.pt")["fingerprint"]


@pytest.mark.parametrize("name_of", [of_atlas, of_comparison, of_base_runs])
def test_another_input_is_another_name(name_of, config, tmp_path):
    names = [name_of(session_of(config, weights), config, tmp_path) for weights in ("0", "1")]
    for name in ("prompt", "seed", "num_frames", "timestep_shift"):
        names.append(name_of(session_of(config), replace(config, **{name: OTHERS[name]}), tmp_path))
    assert len(set(names)) == len(names)
    assert name_of(session_of(config), config, tmp_path) == names[0]


def test_a_reference_set_is_every_prompt_with_two_seeds_and_is_of_its_run(config, tmp_path, monkeypatch):
    monkeypatch.setattr(edits, "MEANS", tmp_path)
    monkeypatch.setattr(edits, "_read_means", lambda path, sizes, made_of: {"made_of": made_of})
    few, session = replace(config, reference_prompts=["a", "b"]), session_of(config)
    edits.reference_means(session, few)
    assert session.asked == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    runs = edits.MeanRuns(session, few, ["z"])
    assert torch.load(runs.path, weights_only=True)["fingerprint"] == runs.made_of
    edits.reference_means(session, replace(few, prompt="another", seed=3))  # whatever it is that is edited
    assert len(session.asked) == 4  # they are made once
    runs = edits.MeanRuns(session, few, ["resid_post"])  # of workers, who make an item each
    for run in runs.runs:
        runs.make(run, Progress(quiet=True))
    assert all(map(runs.is_done, runs.runs)) and len(session.asked) == 8
    edits.reference_means(session, few, None, ["resid_post"])
    assert len(session.asked) == 8 and runs.path.is_file() and not runs.part(runs.runs[0]).exists()
    for other in ({"reference_prompts": ["a"]}, {"timestep_shift": 4.0}):
        before = len(session.asked)
        edits.reference_means(session, replace(few, **other))
        assert len(session.asked) > before


def test_means_of_another_run_under_this_ones_name_are_refused(tmp_path):
    path, sizes = tmp_path / "means.pt", SimpleNamespace(num_heads=12, head_dim=8)
    torch.save({"self|0|0|cond": torch.zeros(3, 12, 8), "fingerprint": "ab"}, path)
    assert [*edits._read_means(path, sizes)] == [*edits._read_means(path, sizes, "ab")]  # a named file
    torch.save({"self|0|0|cond": torch.zeros(3, 8, 12)}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match="holds no means"):
        edits._read_means(tmp_path / "other.pt", sizes)
    with pytest.raises(CacheError, match=r"means.pt belongs to another run .*; remove it"):
        edits._read_means(path, sizes, "cd")


# --- Files are described once, when they are read
def test_a_file_that_is_replaced_afterwards_changes_no_run(tiny, tmp_path):
    model = tiny.session.model
    states = [{name: factor * x for name, x in model.state_dict().items()} for factor in (1.0, 1.5)]
    width = tiny.session.model_config.text_dim

    def write(kind: str, which: int) -> None:
        if kind == "prompt_embeds":
            torch.save({"prompt": "a", "prompt_embeds": torch.full((1, 4, width), 1.0 + which)}, paths[kind])
        elif kind == "checkpoint_path":
            torch.save({"generator_ema": states[which]}, paths[kind])
        else:
            lora = {
                f"blocks.0.self_attn.q.lora_{half}.weight": torch.ones(shape) * (1 + which)
                for half, shape in (("A", (2, 32)), ("B", (32, 2)))
            }
            save_file(lora, paths[kind])

    names = {"checkpoint_path": "w.pt", "prompt_embeds": "states.pt", "lora_path": "lora.safetensors"}
    paths = {kind: tmp_path / name for kind, name in names.items()}
    for kind, path in paths.items():
        given = {"embeds_dir": None} | ({"lora_alpha": 2.0} if kind == "lora_path" else {})
        write(kind, 0)
        session = sessions.load(tiny.config, num_frames=3, **(given | {kind: str(path)}))
        before = session.generate("a", seed=1)
        write(kind, 1)
        after = session.generate("a", seed=1)
        assert torch.equal(before.latents, after.latents) and before.common == after.common, kind
        other = sessions.load(tiny.config, num_frames=3, **(given | {kind: str(path)}))
        changed = other.generate("a", seed=1)
        assert not torch.equal(changed.latents, after.latents), kind
        assert changed.common["fingerprint"] != after.common["fingerprint"], kind


def test_a_file_that_is_replaced_while_it_is_read_is_no_model(tiny, tmp_path, monkeypatch):
    path = tmp_path / "w.pt"
    torch.save(tiny.session.model.state_dict(), path)
    session = sessions.load(tiny.config, num_frames=3, checkpoint_path=str(path))
    read, hashed, described = checkpoint.read_weights, checkpoint.file_sha256, []

    def hash_what_is_described(*given):
        described.append(session.files is not None)  # else one could be hashed, and another one read
        return hashed(*given)

    def read_while_written(*given):
        found = read(*given)
        session.weights_sha256  # noqa: B018  # a file that shrinks while it is mapped ends the process
        torch.save({}, path)
        return found

    monkeypatch.setattr(checkpoint, "read_weights", read_while_written)
    monkeypatch.setattr(checkpoint, "file_sha256", hash_what_is_described)
    with pytest.raises(ConfigError, match=r"w\.pt was replaced after it was read: load the model again"):
        session.prepare()
    assert described == [True]


def test_edits_of_ones_own_count_by_their_name_and_text(tiny):
    def fingerprint_with(function):
        with intervene(at("z"), function):
            return tiny.session.generate("a", seed=1, config=small).common["fingerprint"]

    small = replace(tiny.config, num_frames=3)
    names = [fingerprint_with(named(name, lambda z, where: 2 * z)) for name in ("a", "a", "b")]
    assert names[0] == names[1] != names[2]
    assert fingerprint_with(lambda z, where: 2 * z).startswith(ONLY)

"""A folder of activations: a subfolder a run, whole or named as interrupted, of one model and one request."""

import json
import random
from contextlib import suppress

import pytest
import torch

from experiments import at, capture, intervene, load
from experiments.caches import load_cache
from experiments.caches.activations import ActivationFolder
from experiments.caches.files import CacheError
from experiments.extraction.rollout import Progress
from wan.errors import ConfigError

PROMPTS = ["a red circle", "a blue square"]
ASKED = {"layers": [0, 1], "steps": [0]}


@pytest.fixture(scope="module")
def pipe(tiny):
    return load(tiny.path, num_frames=6)


def stored(folder) -> dict:
    """Every complete run's values by prompt, seed and number of frames."""
    found = {}
    for run in ActivationFolder(folder).runs:
        name = run.manifest["prompt"], run.manifest["seed"], run.manifest["num_frames"]
        found[name] = run.tables["z"].stack()
    return found


def alone(pipe, prompt, seed, **settings):
    with capture(pipe, "z", **ASKED, **settings) as seen:
        pipe.generate(prompt, seed=seed)
    return seen["z"].stack()


def test_each_run_of_any_capture_has_a_folder_of_its_own(pipe, tiny, tmp_path):
    with capture(pipe, "z", **ASKED, stream_to=tmp_path) as seen:
        first = pipe.generate("a red circle", seed=1)
        pipe.generate("a red circle", seed=2)
        assert seen["z"].values[0].shape[0] == 1
        of_last = seen["z"].stack()
    with capture(pipe, "z", **ASKED, stream_to=tmp_path) as seen:
        pipe.generate(PROMPTS, seeds=[3, 4])
    shorter = load(tiny.path, num_frames=3)
    with capture(shorter, "z", **ASKED, stream_to=tmp_path):
        shorter.generate("a red circle", seed=1)
    found = stored(tmp_path)
    assert {*found} == {
        *[("a red circle", seed, 6) for seed in (1, 2, 3)],
        ("a blue square", 4, 6),
        ("a red circle", 1, 3),
    }
    assert torch.equal(of_last, found["a red circle", 2, 6])
    assert torch.equal(found["a red circle", 1, 6], alone(pipe, "a red circle", 1))
    assert torch.equal(found["a red circle", 1, 3], alone(shorter, "a red circle", 1))
    of_batch = alone(pipe, "a blue square", 4)
    torch.testing.assert_close(found["a blue square", 4, 6], of_batch, atol=1e-5, rtol=0)
    run = next(run for run in ActivationFolder(tmp_path).runs if run.path.name.endswith("_seed1"))
    assert {"fingerprint", "policy", "edits", "model"} <= run.manifest.keys()
    assert any(
        torch.equal(one.latents, first.latents)
        for one in ActivationFolder(tmp_path).runs
        if one.manifest["num_frames"] == 6
    )


def test_what_is_whole_stays_and_is_not_made_again(pipe, tmp_path, monkeypatch):
    class Stopped(Progress):
        def advance(self, unit, index, *rest):
            if index == 1:
                raise KeyboardInterrupt

    def call(observer=None):
        with capture(pipe, "z", **ASKED, stream_to=tmp_path) as seen:
            return [pipe.generate("a red circle", seed=seed, observer=observer) for seed in (1, 2)], seen

    with capture(pipe, "z", **ASKED, stream_to=tmp_path):
        whole = pipe.generate("a red circle", seed=1)
    with capture(pipe, "z", **ASKED, stream_to=tmp_path), suppress(KeyboardInterrupt):
        pipe.generate("a red circle", seed=2, observer=Stopped(quiet=True))
    (part,) = [run for run in ActivationFolder(tmp_path).all_runs if not run.is_complete]
    assert len(part.shards) == 1 and {place.block for place in part.tables["z"].places} == {0}
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*_seed1/*")}
    rolled, original = [], type(pipe)._roll_out
    monkeypatch.setattr(type(pipe), "_roll_out", lambda *args: rolled.append(args[1]) or original(*args))
    runs, seen = call()
    assert [len(configs) for configs in rolled] == [1]  # of seed 2 alone
    assert torch.equal(runs[0].latents, whole.latents) and runs[0].common == whole.common
    assert files == {path: path.stat().st_mtime_ns for path in files}
    assert torch.equal(seen["z"].stack(), alone(pipe, "a red circle", 2))
    rolled.clear()
    with intervene(at("z"), lambda z, where: z):
        call()
    assert len(rolled) == 2  # somebody else looks, and an edit is another run
    hook = pipe.model.blocks[0].register_forward_hook(lambda block, inputs, x: 2 * x)
    with hook, pytest.raises(CacheError, match="other latents: torch hooks"):
        call()


@pytest.mark.parametrize("other", ["sites", "layers", "reduce", "model"])
def test_a_folder_of_another_model_or_request_is_refused(pipe, tiny, tmp_path, other):
    with capture(pipe, "z", **ASKED, stream_to=tmp_path):
        pipe.generate("a red circle", seed=1)
    changed = {"layers": {"layers": [0]}, "reduce": {"reduce": lambda x, where: x.mean()}}.get(other, {})
    site, session = "v" if other == "sites" else "z", pipe
    if other == "model":
        session = load("wan_mini", num_frames=6)
    said = pytest.raises(CacheError, match=r"holds another (model|request)'s activations: .*another folder")
    with said, capture(session, site, **(ASKED | changed), stream_to=tmp_path):
        session.generate("a red circle", seed=1)
    with pytest.raises(ConfigError, match="name a site"), capture(pipe, stream_to=tmp_path):
        pass


def test_every_changed_byte_is_refused(pipe, tmp_path):
    with capture(pipe, "z", **ASKED, stream_to=tmp_path / "runs") as seen:
        pipe.generate("a red circle", seed=1)
    path = seen.save(tmp_path / "all.safetensors")
    shard = next(iter(ActivationFolder(tmp_path / "runs").runs[0].shards))
    draw = random.Random(0)
    for file, read in (
        (path, load_cache),
        (shard, lambda _: ActivationFolder(tmp_path / "runs").runs[0].tables),
    ):
        whole = file.read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(CacheError, match="activations cannot be read"):
                read(file)
        file.write_bytes(whole)
    manifest = next((tmp_path / "runs").glob("*/manifest.json"))
    whole = manifest.read_text()
    for text in ("", "[]", "{}", json.dumps({"shards": 3}), whole.replace("a red circle", "a red square")):
        manifest.write_text(text)
        with pytest.raises(CacheError, match="capture that run again"):
            _ = ActivationFolder(tmp_path / "runs").runs

"""Direct effects against whole edited rollouts; pieces that are resumed give the same atlas."""

import os
import signal
import time
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from helpers.rollouts import TWO_STEPS

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, StoppedError
from experiments.caches.view import open_profiles
from experiments.extraction import causal
from experiments.extraction.rollout import RunObserver
from experiments.studies import causal_atlas
from experiments.studies.causal_atlas import atlas_cache, make_atlas
from experiments.studies.runs import ANOTHER_SEED, distance
from wan.config import load_config
from wan.errors import ConfigError
from wan.interventions import Ablate, Knockout, intervene

PROMPTS = (
    "a red circle moving right over a dark blue background",
    "a cyan square moving up over a gray background",
)
EDIT = Knockout(frames="first", layers=[1, 3], heads=[0, 5], passes="denoise")
FRAMES = 6


@pytest.fixture(scope="module")
def configs():
    config = load_config("configs/wan_mini.yaml", {"num_frames": FRAMES} | TWO_STEPS)
    return [replace(config, prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def session(configs):
    return causal.prepare(configs[0], [], PROMPTS)


def study(folder, session, configs, edit=EDIT, each="head"):
    return causal_atlas.Study(folder, edit, each, configs, session)


class Lines(RunObserver):
    """Keeps lines, and asks to stop after so many."""

    def __init__(self, most=99):
        self.lines, self.most = [], most

    def print(self, line):
        self.lines.append(line)
        self.stopping = len(self.lines) > self.most


def make(one, batch=2, stop_after=99):
    watch = Lines(stop_after)
    causal_atlas.run(one, batch, watch)
    return watch.lines


@pytest.fixture(scope="module")
def finished(tmp_path_factory, session, configs):
    one = study(tmp_path_factory.mktemp("atlas"), session, configs)
    make(one)
    return one


def test_a_direct_effect_is_the_change_of_a_rollout_edited_in_that_block_alone(finished, session, configs):
    atlas = causal_atlas.merged(finished)
    assert atlas["effects"].shape == (2, 2, 2, FRAMES) and atlas["effects"][..., :3].isnan().all()
    with torch.no_grad():
        for row, config in enumerate(configs):
            base = session.rollout(config)
            other = session.rollout(replace(config, seed=config.seed + ANOTHER_SEED))
            between = distance(base, other)[0]
            with intervene(replace(EDIT, layers=(3,), heads=(5,), blocks=(1,))):
                edited = session.rollout(config)
            expected = distance(base, edited)[0] / between
            torch.testing.assert_close(atlas["between_seeds"][row].double(), between, atol=2e-6, rtol=0)
            effects = atlas["effects"][row, 1, 1, 3:].double()
            torch.testing.assert_close(effects, expected[3:], atol=2e-6, rtol=0)
    assert atlas["floor"].max() < 1e-3 < atlas["effects"][..., 3:].max()


def test_a_stopped_atlas_goes_on_and_is_the_same(finished, tmp_path, session, configs):
    again = study(tmp_path, session, configs)
    with pytest.raises(StoppedError, match="1 of 2 are done and will not be made again"):
        make(again, stop_after=0)
    assert {layer for name, (_, layer) in again.items.items() if again.store.read(name)} == {1}
    first = {path.name: path.read_bytes() for path in (tmp_path / "items").iterdir()}
    assert len(first) == 2 and '"items"' in (tmp_path / "index.json").read_text()
    (tmp_path / "items" / min(first)).write_text("cut off")  # what cannot be read is made again
    make(again)
    for path in (finished.folder / "items").iterdir():
        assert (tmp_path / "items" / path.name).read_bytes() == path.read_bytes()
    assert (finished.folder / "index.json").read_bytes() == (tmp_path / "index.json").read_bytes()
    assert make(again) == ["2 of 2 are done already"]
    other = study(tmp_path, session, configs, replace(EDIT, frames=("past",)))
    assert not other.items.keys() & again.items.keys()
    with pytest.raises(ConfigError, match="4 of 4 items are missing"):
        causal_atlas.merged(other)


def test_the_cache_keeps_to_its_schema(finished, session, tmp_path):
    save_cache(tmp_path / "causal_atlas.pt", atlas_cache(finished))
    cache = load_cache(tmp_path / "causal_atlas.pt", expect=("causal_atlas",))
    assert cache["interventions"]["words"] == str(EDIT) and cache["units"] == [0, 5]
    assert cache["prompts"] == list(PROMPTS) and cache["each"] == "head"
    with pytest.raises(CacheError, match="causal_atlas holds no values per frame; give one of figure4"):
        open_profiles(cache)


def flags(folder) -> Namespace:
    """Of an atlas of layers, with edit.yaml of a folder."""
    given = {"edit": str(folder / "edit.yaml"), "each": "layer", "output_dir": str(folder), "batch": 2}
    run = {"quiet": True, "log_file": None, "deterministic": False, "inputs": []}
    run |= dict.fromkeys(("workers", "scheduler", "slurm"))
    return Namespace(**given, **run)


def test_ctrl_c_ends_a_layer_and_keeps_it(tmp_path, session, configs, monkeypatch, capfd):
    (tmp_path / "edit.yaml").write_text("- {edit: ablate, how: zero, layers: [1, 3], passes: denoise}")
    monkeypatch.setattr(causal, "prepare", lambda *_: session)
    measured = causal_atlas.measure

    def while_measuring(runs, edits):
        if ("effect", 0) in edits:  # not while it looks for the floor
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return measured(runs, edits)

    monkeypatch.setattr(causal_atlas, "measure", while_measuring)
    with pytest.raises(StoppedError, match="1 of 2 are done and will not be made again"):
        make_atlas(flags(tmp_path), configs)
    assert "stopping after this layer" in capfd.readouterr().err
    assert len(list((tmp_path / "items").glob("*.json"))) == 2  # two runs of one layer


def test_what_has_no_direct_effect_is_refused(tmp_path, session, configs):
    for message, edit, each in (
        ("a clean pass has no direct effect", replace(EDIT, passes="clean"), "head"),
        ("its edit takes frames, not tokens", Knockout(tokens=[0], passes="denoise"), "head"),
        ("needs an edit of frames", Ablate("zero", passes="denoise"), "frame"),
        ("is not one of head, layer, frame", EDIT, "token"),
    ):
        with pytest.raises(ConfigError, match=message):
            study(tmp_path, session, configs, edit, each)


def test_attention_cross_attention_and_mlp_are_ablated_one_by_one(tmp_path, session, configs):
    edit = Ablate("zero", layers=[1], passes="denoise")
    one = study(tmp_path, session, configs[:1], edit, "site")
    make(one)
    atlas = atlas_cache(one)
    save_cache(tmp_path / "atlas.pt", atlas)
    assert atlas["effects"].shape == atlas["head_control"].shape == (1, 1, 3, FRAMES)
    for unit, site in enumerate(causal_atlas.ADDED):
        with intervene(replace(edit, site=site, blocks=(0,))):
            latents = session.rollout(configs[0])
        plain = session.rollout(configs[0])
        expected = distance(latents, plain)[0, :3] / atlas["between_seeds"][0, :3]
        torch.testing.assert_close(atlas["effects"][0, 0, unit, :3], expected.float(), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="needs an ablate without heads"):
        study(tmp_path, session, configs, EDIT, "site")

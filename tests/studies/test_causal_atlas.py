"""Direct effects against whole edited rollouts; pieces that are resumed give the same atlas."""

from dataclasses import replace

import pytest
import torch

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, StoppedError
from experiments.caches.view import open_profiles
from experiments.progress import Progress
from experiments.studies import causal_atlas
from experiments.studies.causal_atlas import Study, atlas_cache
from experiments.studies.interventions import ANOTHER_SEED, distance
from wan.errors import ConfigError
from wan.interventions import Ablate, Knockout, intervene

PROMPTS = ("a red circle moving right over a dark blue background", "a cyan square moving up")
EDIT = Knockout(frames="first", layers=[0, 1], heads=[0, 1], passes="denoise")


@pytest.fixture(scope="module")
def configs(tiny):
    return [replace(tiny.config, prompt=prompt, seed=seed) for seed, prompt in enumerate(PROMPTS)]


def make(study, batch=2):
    causal_atlas.run(study, batch, Progress(quiet=True))
    return study


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny, configs):
    return make(Study(tmp_path_factory.mktemp("atlas"), EDIT, "head", configs, tiny.session))


def test_a_direct_effect_is_the_change_of_a_rollout_edited_in_that_block_alone(finished, tiny, configs):
    atlas = causal_atlas.merged(finished)
    assert atlas["effects"].shape == (2, 2, 2, 9) and atlas["effects"][..., :3].isnan().all()
    for row, config in enumerate(configs):
        base = tiny.session.rollout(config)
        between = distance(base, tiny.session.rollout(replace(config, seed=config.seed + ANOTHER_SEED)))[0]
        torch.testing.assert_close(atlas["between_seeds"][row].double(), between, atol=2e-6, rtol=0)
        with intervene(replace(EDIT, layers=(1,), heads=(0,), blocks=(1,))):
            expected = distance(base, tiny.session.rollout(config))[0] / between
        effects = atlas["effects"][row, 1, 0, 3:6].double()
        torch.testing.assert_close(effects, expected[3:6], atol=2e-6, rtol=0)
    assert atlas["floor"].max() < 1e-3 < atlas["effects"][..., 3:].max()


def test_a_stopped_atlas_goes_on_and_is_the_same_and_its_cache_keeps_to_its_schema(
    finished, tmp_path, tiny, configs
):
    again, watch = Study(tmp_path, EDIT, "head", configs, tiny.session), Progress(quiet=True)
    watch.log = lambda event, **_: setattr(watch, "stopping", True)
    with pytest.raises(StoppedError, match="1 of 2 are done and will not be made again"):
        causal_atlas.run(again, 2, watch)
    first = {path.name: path.read_bytes() for path in (tmp_path / "items").iterdir()}
    assert len(first) == 2
    (tmp_path / "items" / min(first)).write_text("cut off")  # what cannot be read is made again
    make(again)
    for path in (finished.folder / "items").iterdir():
        assert (tmp_path / "items" / path.name).read_bytes() == path.read_bytes()
    other = Study(tmp_path, replace(EDIT, frames=("past",)), "head", configs, tiny.session)
    assert not other.items.keys() & again.items.keys()
    with pytest.raises(AssertionError, match="an item is missing"):
        causal_atlas.merged(other)
    save_cache(tmp_path / "causal_atlas.pt", atlas_cache(finished))
    cache = load_cache(tmp_path / "causal_atlas.pt", expect=("causal_atlas",))
    assert cache["interventions"]["words"] == str(EDIT) and cache["units"] == [0, 1]
    assert cache["prompts"] == list(PROMPTS) and cache["each"] == "head"
    assert {"frame_control", "head_control", "head_norms"} <= cache.keys()
    with pytest.raises(CacheError, match="causal_atlas holds no values per frame"):
        open_profiles(cache)


def test_what_has_no_direct_effect_is_refused(tmp_path, tiny, configs):
    for message, edit, each in (
        ("a clean pass has no direct effect", replace(EDIT, passes="clean"), "head"),
        ("edits self-attention: frames, not tokens", Knockout(tokens=[0], passes="denoise"), "head"),
        ("--each frame needs knockout", Ablate("zero", passes="denoise"), "frame"),
        ("needs an ablate without heads", EDIT, "site"),
    ):
        with pytest.raises(ConfigError, match=message):
            Study(tmp_path, edit, each, configs, tiny.session)


def test_attention_cross_attention_and_mlp_are_ablated_one_by_one(tmp_path, tiny, configs):
    edit = Ablate("frame_mean", layers=[1], passes="denoise")
    make(Study(tmp_path / "means", edit, "site", configs[:1], tiny.session))
    edit = Ablate("zero", layers=[1], passes="denoise")
    atlas = atlas_cache(make(Study(tmp_path, edit, "site", configs[:1], tiny.session)))
    assert atlas["effects"].shape == atlas["head_control"].shape == (1, 1, 3, 9)
    plain = tiny.session.rollout(configs[0])
    for unit, site in enumerate(causal_atlas.ADDED):
        with intervene(replace(edit, site=site, blocks=(0,))):
            changed = distance(tiny.session.rollout(configs[0]), plain)[0, :3]
        expected = changed / atlas["between_seeds"][0, :3]
        torch.testing.assert_close(atlas["effects"][0, 0, unit, :3], expected.float(), atol=1e-4, rtol=1e-4)

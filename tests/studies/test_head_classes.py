"""Classes of heads and mean queries of the miniature, and a comparison that was cut short."""

import json

import numpy as np
import pytest
from helpers.long_findings import comparison

from experiments.benchmarks.reproduce import long_rollouts
from experiments.caches.files import CacheError
from experiments.extraction import causal
from experiments.studies import head_classes
from experiments.studies.policy_comparison import held_out
from wan.config import load_config
from wan.policies import make_policy

CONFIG = "configs/wan_mini.yaml"


@pytest.fixture(scope="module")
def atlas():
    return causal.policy_atlas(CONFIG, {"name": "full"}, 12)


@pytest.mark.parametrize(
    ("rule", "labels"), [("dummy", {0, 1, 2}), ("pyramid", {1, -1, 2}), ("mass", {0, 1})]
)
def test_every_head_has_a_class(rule, labels, atlas):
    found = head_classes.classes_of(rule, atlas, num=40)
    assert found.shape == (8, 12) and set(found.flat) <= labels
    if rule != "pyramid":  # 40 dummy heads, or 40 of the most mass
        assert (found == max(labels)).sum() == 40


def test_dummy_heads_have_the_least_mass_on_the_past():
    mass = np.array([[[0.5, 0.1, 0.4], [0.1, 0.5, 0.4], [0.01, 0.02, 0.97]]])
    assert head_classes.dummy(mass, [2], 1).tolist() == [[0, 1, 2]]


def test_an_atlas_without_enough_frames_is_refused(atlas):
    with pytest.raises(CacheError, match="needs an atlas"):
        head_classes.classes_of("dummy", atlas, block=0)


def test_mean_queries_are_those_that_a_policy_takes():
    found = head_classes.query_means(
        load_config(CONFIG, {"num_frames": 6, "denoising_step_list": [1000, 500]})
    )
    policy = make_policy("triattention", statistics=found)
    assert policy.q_mean.shape == (8, 12, 8)
    assert (policy.q_mean.abs() <= policy.q_abs_mean + 1e-5).all() and policy.q_mean.abs().max() > 0.1


def test_prompts_whose_videos_are_all_there_count(tmp_path):
    """Of two policies and two seeds; the second prompt lacks one video."""
    (tmp_path / "items").mkdir()
    made = comparison({"full": 0.0, "own": 0.1}, prompts=2)["videos"]
    prompts = dict(zip(dict.fromkeys(video["prompt"] for video in made), held_out(2), strict=True))
    for number, video in enumerate(made[:-1]):
        video |= {"prompt": prompts[video["prompt"]], "cost": {"seconds": 1.0}}
        (tmp_path / f"items/{number}.json").write_text(json.dumps(video))
    found = long_rollouts.whole(tmp_path, 2, 240)
    assert found["prompts"] == [*held_out(2)][:1] and {v["label"] for v in found["videos"]} == {"full", "own"}

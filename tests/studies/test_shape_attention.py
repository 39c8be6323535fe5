"""What heads look at in moving shapes, for attention that is known; classes and mean queries of heads."""

import json

import numpy as np
import pytest
import torch
from helpers.rollouts import TWO_STEPS

from experiments.analysis.stats import sign_flip_p
from experiments.benchmarks.reproduce.shape_attention import report_of
from experiments.caches.files import CacheError
from experiments.extraction import causal
from experiments.miniature.evaluation import rendered
from experiments.miniature.tracking import SETS, held_out_scenes
from experiments.studies import head_classes, shape_attention
from experiments.studies.shape_attention import MASKS, Cover, ShapeAttention, followers, lifts_of, measure
from wan.capture import CapturedCall, Pass, Site
from wan.config import load_config
from wan.keys import KeyLayout
from wan.policies import make_policy

S = 9


def test_lifts_of_attention_that_is_known():
    """A shape on one token moves a token a frame, over a wall of the last two; frame 5 hides it."""
    shape, wall = torch.zeros(6, S), (torch.arange(S) >= S - 2).float()
    shape[torch.arange(5), torch.arange(5)] = 1
    cover = Cover(shape, wall, torch.tensor([False] * 5 + [True]))
    rows = torch.zeros(4, 3 * S, 6 * S)  # of the second block of three frames
    rows[0, :, : 3 * S] = 1
    rows[1, :, : 3 * S] = cover.shape.flatten()[: 3 * S]
    rows[2, :, : 3 * S] = torch.eye(S).repeat(1, 3).repeat(3, 1)  # every query at its own place
    rows[3, :, : 3 * S] = cover.wall.repeat(3)
    rows[:, :, 3 * S :] = 5  # the own block does not count
    at, layout = Pass(query_frames=(3, 4, 5), block=1), KeyLayout.of_frames(range(6), 6 * S)
    values = {"token_probabilities": (rows / rows.sum(-1, keepdim=True))[None]}
    (lifts,) = lifts_of([CapturedCall(Site(0, "self"), at, values, (), (), layout)], cover, 4)
    found = dict(zip(MASKS, lifts.T.T, strict=True))
    assert torch.allclose(lifts[:, 0], torch.ones(5))
    assert found["moving"][1] == pytest.approx(S) and found["shuffled"][1] == pytest.approx(S / 3)
    assert found["here"][2] == pytest.approx(S) and found["moving"][2] == 0  # the shape was never there
    assert found["first"][1] == pytest.approx(S / 3)
    assert found["wall"][3] == pytest.approx(S / 2) and found["moving"][3] == 0


@pytest.mark.parametrize("kind", ["one shape", "behind a wall"])
def test_the_cover_of_rendered_videos(kind):
    (scene,) = held_out_scenes(SETS[kind], 1)
    cover = shape_attention.cover_of(*rendered([scene], 81), scene, 4, 4)
    assert cover.shape.shape == (21, 16) and not cover.hidden[0] and cover.shape[0].sum() > 0.3
    if kind == "one shape":
        assert not cover.wall.any() and not cover.hidden.any()
        assert 0.02 < cover.shape.mean() < 0.3 and (cover.shape.sum(1) > 0.3).all()
    else:
        assert cover.hidden.any() and 0.3 < cover.wall.mean() < 0.6 and not cover.shape[cover.hidden].any()


def test_followers_the_table_and_the_heads_of_the_picture(tmp_path):
    rng = np.random.default_rng(0)
    lifts = np.ones((8, 2, 3, 5, 4)) + 0.1 * rng.standard_normal((8, 2, 3, 5, 4))
    lifts[:, :, 1, 0, 2] = 5  # layer 1, head 2 follows; layer 2, head 3 stays where the query is
    lifts[:, :, 2, [0, 2], 3] = 4, 6
    lifts[4:, :, :, 4] = np.nan  # no wall
    found = ShapeAttention([f"caption {n}" for n in range(8)], [0, 4], lifts, "0")
    lifts[1:7, :, :, :4] = np.nan  # videos without a shape
    follows = followers(found, 0).follows
    assert follows[1, 2] and not follows[2, 3] and follows.sum() <= 2
    assert not followers(ShapeAttention(found.captions, [0], lifts[1:4], "0"), 0).follows.any()
    assert found.maps(4)[0].values.shape == (3, 4) and "follows" in {m.name for m in found.maps(4)}
    report = report_of(found)
    best = report["passes"]["pass 0"]["top"][0]
    assert (best["layer"], best["head"], best["lifts"][0]) == (1, 2, 5.0)
    json.dumps(report)


def test_heads_that_follow_are_adjusted_for_all_of_them():
    """Of 40 heads that do not follow some do by their own intervals; adjusted for all of them none does."""
    lifts = 2 + np.random.default_rng(1).standard_normal((24, 1, 10, 5, 4))
    lifts[..., 2:4, :] = -9  # one control is left: many a head beats it by chance
    lifts[:, :, 3, 0, 1] += 3
    found = ShapeAttention([f"caption {n}" for n in range(24)], [0], lifts, "0")
    each = followers(found, 0)
    assert each.follows.sum() > 1 and each.surely.sum() == 1 and each.surely[3, 1]
    assert each.p[3, 1] == pytest.approx(40 / 10_001, rel=0.5)
    by_hand = [sign_flip_p(lifts[:, 0, 5, 0, 2] - lifts[:, 0, 5, control, 2]) for control in (1, 2, 3)]
    assert max(by_hand) <= each.p[5, 2] <= 1


def test_heads_of_the_miniature_are_measured():
    config = load_config("configs/wan_mini.yaml", {"num_frames": 9} | TWO_STEPS)
    found = measure(config, held_out_scenes(SETS["behind a wall"], 1), [2])
    assert found.lifts.shape == (1, 1, 8, 5, 12) and np.isfinite(found.lifts[:, :, :, :4]).all()
    assert 0.5 < np.nanmean(found.lifts[:, :, :, 0]) < 16


RULES = {"dummy": {0, 1, 2}, "pyramid": {1, -1, 2}, "mass": {0, 1}, "forcing_kv": {0, 1}}


def test_every_head_has_a_class_and_dummy_heads_have_the_least_mass_on_the_past():
    atlas = causal.policy_atlas("configs/wan_mini.yaml", {"name": "full"}, 12)
    for rule, labels in RULES.items():
        found = head_classes.classes_of(rule, atlas, num=40)
        assert found.shape == (8, 12) and set(found.flat) <= labels
        if rule in ("dummy", "mass"):  # 40 dummy heads, or 40 of the most mass
            assert (found == max(labels)).sum() == 40
    mass = np.array([[[0.5, 0.1, 0.4], [0.1, 0.5, 0.4], [0.01, 0.02, 0.97]]])
    assert head_classes.dummy(mass, [2], 1).tolist() == [[0, 1, 2]]
    with pytest.raises(CacheError, match="needs an atlas"):
        head_classes.classes_of("dummy", atlas, block=0)


def test_mean_queries_are_those_that_a_policy_takes(tiny):
    policy = make_policy("triattention", statistics=head_classes.query_means(tiny.config))
    assert policy.q_mean.shape == (2, 2, 8)
    assert (policy.q_mean.abs() <= policy.q_abs_mean + 1e-5).all() and policy.q_mean.abs().max() > 0.1

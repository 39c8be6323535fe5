"""Heads without a past: against policies and by hand; sets of heads, the judge, and contrasts of answers."""

from dataclasses import replace

import pytest
import torch

from experiments.findings.head_memory.presence import answers_of, contrast, letters
from experiments.findings.head_memory.presence_trials import (
    BlindHeads,
    Design,
    agrees,
    captions_behind_a_wall,
    judge_returns,
    knockouts_of,
    plain_pairs,
)
from experiments.miniature.moving_shapes import rendered
from experiments.studies.batches import Runs, knockouts, matched, outside
from experiments.studies.paired_prompts import PairedRuns
from wan.interventions import intervene

DESIGN = Design(captions=2, selection=1, seeds=1)


def test_knockouts_are_the_windows_of_a_policy(tiny):
    scenes = captions_behind_a_wall(DESIGN)[0]
    configs = [replace(tiny.config, prompt=scene.caption, seed=number) for number, scene in scenes]
    runs, heads = Runs(tiny.session, configs), [(layer, head) for layer in range(2) for head in range(2)]
    for window, sink in ((3, 0), (4, 1)):
        seen = {"local_attn_size": window, "sink_size": sink}
        policy = tiny.session.with_weights(replace(tiny.config, **seen))
        expected = torch.cat([policy.rollout(replace(one, **seen)) for one in configs])
        with intervene(*knockouts(heads, outside(window, sink), tiny.config.block_sizes)):
            found = runs.rollout()
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
        assert (found - runs.latents)[:, 3:].abs().max() > 1e-3


def test_matched_heads_are_others_of_the_same_layers():
    heads = [(layer, head) for layer in range(8) for head in range(12)]
    for draw in range(5):
        found = matched(heads, [(3, 1), (3, 2), (1, 0)], draw)
        assert sorted(layer for layer, _ in found) == [1, 3, 3] and not {(3, 1), (3, 2), (1, 0)} & {*found}


def test_a_batch_of_videos_is_judged_as_the_tracker_judges_each():
    # Every other shape hides for ever after frame 30, two are never there, and the colour of some changes.
    scenes = [scene for _, scene in captions_behind_a_wall(DESIGN)[0]] * 4
    videos = torch.stack(rendered(scenes, 81))
    videos[2:4, 30:] = videos[2:4, 30:31]
    videos[4:6] = videos[4:6, 30:31]
    videos[6:, 50:] = videos[6:, 50:].flip(2)
    answers = judge_returns(videos, scenes, [3] * 7)
    assert agrees(answers, videos, scenes) == len(scenes)
    assert len({*answers["comes_back"]}) == 2


def test_a_head_of_each_video_sees_its_own_block_alone(tiny):
    pairs = plain_pairs([(1, scene) for _, scene in captions_behind_a_wall(DESIGN)[0]])
    runs = PairedRuns(tiny.config, tiny.session, pairs)
    heads = [(0, 1), (1, 0)]
    found = runs.rollout(0, BlindHeads(heads))
    for n, head in enumerate(heads):
        with intervene(*knockouts_of([head])):
            torch.testing.assert_close(found[n], runs.rollout(0)[n], atol=2e-4, rtol=0)


def test_contrasts_are_means_of_differences_within_videos():
    line = {"hides": "1111", "comes_back": "0111", "color": "1111", "last_color": "-123", "shape": "2222"}
    text = letters(line, [2, 2, 2, 0], "2222")
    assert {name: x.astype(int).tolist() for name, x in answers_of(text).items()} == {
        "hides": [1, 1, 1, 1],
        "comes_back": [0, 1, 1, 1],
        "right": [0, 1, 0, 0],
        "donor": [0, 0, 1, 0],
        "shape": [1, 1, 1, 0],
    }
    # Six captions and two seeds, of which the first four captions are left out; one pair is missing.
    pairs, back, gone = {"rescue": [4, 5, 10]}, "Q", "A"
    trainings = {
        name: {
            "seeds": 2,
            "pairs": pairs,
            "answers": {"unedited": back * 12, "rescue, P": p, "rescue, random of P: 0": back * 3}
            | {"rescue, random of P: 1": other},
        }
        for name, p, other in (("a", gone + back * 2, back * 3), ("b", gone * 3, back * 2 + gone))
    }
    found = contrast(trainings, "rescue", "comes_back", "random of P", "P")
    # a: captions of 0.5 and 0; b: captions of 0.75 (one draw of the second seed is gone) and 1
    assert found["each"] == [0.25, 0.875] and found["videos"] == 6
    assert found["bootstrap"][0] == pytest.approx(0.5625, abs=1e-3)

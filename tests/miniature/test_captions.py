"""A scene comes back from its caption, as far as a tracker needs it."""

import pytest
import torch

from experiments.miniature.evaluation import rendered
from experiments.miniature.frozen import held_out_scenes
from experiments.miniature.moving_shapes import KINDS
from experiments.miniature.tracking import answers, judge, scene_of


@pytest.mark.parametrize("kind", KINDS)
def test_a_video_is_judged_by_its_caption_as_by_its_scene(kind):
    scenes = held_out_scenes([kind], 40)
    for scene in scenes:
        found = scene_of(scene.caption)
        assert found is not None and found.caption == scene.caption and found.kind == scene.kind
        assert found.unnamed_color == scene.unnamed_color and found.landmark == scene.landmark
    video = rendered(scenes[:1], 33)[0]
    other = video.flip(3)  # what it shows moves the other way, or is elsewhere
    said = answers(scenes[0].caption, [video, other])
    assert {question: first for question, (first, _) in said.items()} == judge(video, scenes[0])
    assert any(first != second for first, second in said.values()) or kind == "wall"


def test_other_texts_and_sizes_have_no_answers():
    caption = "a red circle moving right over a dark blue background"
    assert scene_of(caption) is not None and set(answers(caption, [torch.rand(20, 3, 64, 64)])) > {"color"}
    for text in ("", "a red fox", f"{caption}.", f"{caption} at night", caption.replace("a red", "an red")):
        assert scene_of(text) is None and answers(text, [torch.rand(20, 3, 64, 64)]) == {}
    assert answers(caption, [torch.rand(20, 3, 64, 96)]) == {}

"""Words on the video: which tokens a word has, and its map of a run against the map of all tokens."""

import pytest
import torch
from helpers.checkpoints import small_wan_pipeline
from helpers.refusals import refused

from experiments import capture, load, words
from experiments.caches import mp4
from experiments.caches.files import CacheError, RunError
from wan.capture import CaptureRequest

PROMPT = "a red circle moving right over a dark blue background"
SENTENCEPIECE = ["▁a", "▁red", "▁cir", "cle", ",", "▁a", "▁Red", "▁wall", "</s>"]
BYTE_LEVEL = ["a", "Ġred", "Ġcaf", "Ã©", "Ġat", "Ġnight", "<|endoftext|>"]
CLIP = ["<|startoftext|>", "a</w>", "red</w>", "cir", "cle</w>", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("tokens", "word", "numbers"),
    [
        pytest.param(SENTENCEPIECE, "circle", (2, 3), id="pieces"),
        pytest.param(SENTENCEPIECE, "red", (1, 6), id="twice"),
        pytest.param(SENTENCEPIECE, "red circle", (1, 2, 3), id="two words"),
        pytest.param(BYTE_LEVEL, "café", (2, 3), id="bytes"),
        pytest.param(CLIP, "circle", (3, 4), id="clip"),
        pytest.param(["▁一只", "红色", "的", "猫", "</s>"], "红色", (1,), id="Chinese"),
    ],
)
def test_a_word_has_all_its_tokens(tokens, word, numbers):
    assert words.tokens_of_words(tokens, [word]) == (numbers,)


@pytest.mark.parametrize("word", ["square", "cir", "cle", "</s>", "ed"])
def test_pieces_special_tokens_and_absent_words_are_no_words(word):
    with refused("is not in the prompt; its words are a, red, circle"):
        words.tokens_of_words(SENTENCEPIECE, [word])


@pytest.mark.parametrize("value", [[], "", [3], ["red", "Red"], None, [" "]], ids=str)
def test_words_are_a_list_of_texts_each_once(value):
    with refused("words="):
        words.check_words(value)


@pytest.fixture(scope="module")
def run():
    session = load("wan_mini", num_frames=6)
    session.prepare(prompts=[PROMPT])
    tokens = session.texts[PROMPT][1]
    of_words = words.word_request(["circle", "blue"], [tokens], by_head=True)
    of_tokens = CaptureRequest(kinds=("cross",), granularity="map")
    return session.generate(PROMPT, seed=1, requests=[of_words, of_tokens])


def test_the_map_of_a_word_is_the_mean_over_layers_heads_and_passes(run):
    maps = words.maps_of_run(run, ["circle", "blue"])
    tokens = [n for n, token in enumerate(run.prompt_tokens) if "circle" in token]
    calls = [call for call in run.records if "word_map" in call.values]
    expected = torch.zeros(6, 16)
    for call in calls:
        values = call["word_map"][0].float()[..., tokens].sum(-1).mean(0)  # [Lq]
        expected[call["query_frames"]] += values.unflatten(0, (3, 16))
    expected /= len(calls) / 2  # two blocks of frames
    assert list(maps) == ["circle", "blue"] and maps["circle"].shape == (6, 4, 4)
    torch.testing.assert_close(maps["circle"], expected.unflatten(1, (4, 4)), atol=2e-4, rtol=0)


def test_each_keeps_all_axes(run):
    maps = words.maps_of_run(run, ["circle", "blue"], each=True)
    assert maps["circle"].shape == (8, 12, 5, 6, 4, 4)
    mean = words.maps_of_run(run, ["circle", "blue"])
    torch.testing.assert_close(maps.mean("blue"), mean["blue"], atol=1e-5, rtol=0)


def test_maps_are_drawn_and_laid_over_the_video(run, tmp_path):
    maps = words.maps_of_run(run, ["circle", "blue"])
    assert len(maps.plot(frames=[0, 5]).axes) >= 4
    path = maps.save(tmp_path / "maps.mp4")
    assert mp4.count_frames(path) == len(run.video)
    with pytest.raises(CacheError, match="mp4"):
        maps.save(tmp_path / "maps.gif")


def test_what_was_not_captured_has_no_map(run):
    with pytest.raises(RunError, match="no text_share of words was captured"):
        words.maps_of_run(run, ["circle"], direction="text_to_video")
    with refused("direction is 'up'"):
        words.maps_of_run(run, ["circle"], direction="up")


# --- capture(session, words=...)
def test_words_are_captured_of_every_video_of_a_batch():
    """Each has the words of its own prompt, at their own places."""
    session = load("wan_mini", num_frames=3)
    prompts = [
        "a red circle moving right over a dark blue background",
        "a dark blue background, a red circle",
    ]
    with capture(session, words=["circle"], layers=[2, 5], steps=[0, 1]) as captured:
        both = session.generate(prompts, seeds=[1, 1])
    for prompt, run in zip(prompts, both, strict=True):
        with capture(session, words=["circle"], layers=[2, 5], steps=[0, 1]) as alone:
            session.generate(prompt, seed=1)
        maps = captured.words(run)["circle"]
        assert maps.shape == (3, 4, 4)
        torch.testing.assert_close(maps, alone.words()["circle"], atol=1e-5, rtol=0)
    with capture(session, words="circle", each=True, layers=[2], steps=[0]) as captured:
        session.generate(prompts[0], seed=1)
    assert captured.words()["circle"].shape == (1, 12, 1, 3, 4, 4)


def test_words_of_a_pipeline_are_the_softmax_on_their_tokens():
    """Of the conditional branch, whose text has them."""
    pipe = small_wan_pipeline()
    sizes = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "output_type": "latent"}

    def make() -> None:
        generator = torch.Generator().manual_seed(1)
        pipe("a red circle", max_sequence_length=16, guidance_scale=5.0, generator=generator, **sizes)

    with capture(pipe, words=["circle"]) as captured:
        make()
    with capture(pipe, granularity="map", cross=True) as every:
        make()
    [run] = captured.runs
    tokens = [n for n, token in enumerate(run.prompt_tokens) if "circle" in token]
    calls = [call for call in every.calls if "word_map" in call.values and call["branch"] == "cond"]
    means = [call["word_map"][0].float()[..., tokens].sum(-1).mean(0) for call in calls]  # [Lq] each
    expected = torch.stack(means).mean(0).view(3, 4, 4)
    assert tokens and {call["branch"] for call in run.records} == {"cond"}
    torch.testing.assert_close(captured.words()["circle"], expected, atol=2e-4, rtol=0)


def test_what_has_no_words_is_refused_before_the_video():
    session = load("wan_mini", num_frames=3)
    with refused("the word 'square' is not in the prompt"), capture(session, words=["square"]):
        session.generate(PROMPT, seed=1)
    with refused("words are captured alone"), capture(session, "z", words=["circle"]):
        pass
    with refused("capture of words knows no 'heads'"), capture(session, words=["circle"], heads=[1]):
        pass
    with refused("which keys of .* are of text is not known"):
        capture(small_wan_pipeline().transformer, words=["circle"]).__enter__()
    with capture(session) as captured, refused("no words were asked for"):
        captured.words()

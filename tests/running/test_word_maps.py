"""Words on the video: which tokens a word has, and its map of a run against the map of all tokens."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import video_pipelines
from helpers.checkpoints import small_wan_pipeline
from helpers.refusals import refused

from experiments import capture, figures, load, pipeline_calls, words
from experiments.analysis import prompt_words
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
        pytest.param(["a", "Ġcaf", "Ã", "©", "Ġat"], "café", (1, 2, 3), id="halves of a character"),
        pytest.param(SENTENCEPIECE, "RED CIRCLE,", (1, 2, 3, 4), id="upper case, punctuation"),
        pytest.param(["▁一只", "红色", "的", "猫", "</s>"], "红色", (1,), id="Chinese"),
        pytest.param(["▁a", "▁", "<0xE7>", "<0x8C>", "<0xAB>", "</s>"], "猫", (2, 3, 4), id="single bytes"),
        pytest.param(["▁a", "▁แมว", "แดง", "</s>"], "แมว", (1,), id="Thai"),
        pytest.param(["▁a", "▁caf", "e\u0301", "</s>"], "café", (1, 2), id="accents apart"),
        pytest.param(["▁a", "▁fish", "</s>"], "ﬁsh", (1,), id="ligature"),
        pytest.param(["", "", "▁a", "▁red", ""], "red", (3,), id="behind a template"),
    ],
)
def test_a_word_has_all_its_tokens(tokens, word, numbers):
    assert prompt_words.tokens_of_words(tokens, [word]) == (numbers,)


@pytest.mark.parametrize(
    ("tokens", "expected", "numbers"),
    [
        (SENTENCEPIECE, "a red circle, a Red wall (end)", [0, 1, 2, 2, 2, 3, 4, 5, 6]),
        (BYTE_LEVEL, "a red café at night (end)", [0, 1, 2, 2, 3, 4, 5]),
        (CLIP, "(start) a red circle (end)", [0, 1, 2, 3, 3, 4]),
        (["▁a", "▁", "<0xE7>", "<0x8C>", "<0xAB>", "</s>", "x"], "a 猫 (end) x", [0, 1, 1, 1, 1, 2, 3]),
    ],
    ids=["sentencepiece", "bytes", "clip", "single bytes"],
)
def test_tokens_are_joined_to_words(tokens, expected, numbers):
    names, word_of_token = prompt_words.words_of(tokens)
    assert names == expected.split() and word_of_token.tolist() == numbers


@pytest.mark.parametrize("word", ["square", "cir", "cle", "</s>", "ed", "circles"])
def test_pieces_special_tokens_and_absent_words_are_no_words(word):
    with refused("is not in the prompt; its words are a, red, circle"):
        prompt_words.tokens_of_words(SENTENCEPIECE, [word])


@pytest.mark.parametrize("value", [[], "", [3], ["red", "Red"], None, [" "]], ids=str)
def test_words_are_a_list_of_texts_each_once(value):
    with refused("words="):
        words.check_words(value)


@pytest.fixture(scope="module")
def run():
    session = load("wan_mini", num_frames=6)
    session.prepare(prompts=[PROMPT])
    tokens = session.texts[PROMPT][1]
    numbers = (prompt_words.tokens_of_words(tokens, ["circle", "blue"]),)
    of_words = CaptureRequest(kinds=("cross",), granularity="words", words=numbers, by_head=True)
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
    with refused("frame 6 is not in 0..5"):
        maps.plot(frames=6)
    nowhere = words.WordMaps(
        {"circle": torch.zeros(6, 4, 4)}, run, [0], [0]
    )  # of a word that was knocked out
    assert np.isfinite(nowhere.plot().axes[0].images[0].get_array()).all()
    path = maps.save(tmp_path / "maps.mp4")
    assert mp4.count_frames(path) == len(run.video)
    with pytest.raises(CacheError, match="mp4"):
        maps.save(tmp_path / "maps.gif")


def test_each_row_of_maps_has_its_own_scale_and_the_query_is_left_out_of_it(tmp_path):
    maps = np.random.default_rng(0).random((3, 4, 4))
    pictures = np.full((3, 64, 64, 3), 90, np.uint8)
    rows = {"a": maps, "b": 10 * maps, "c": maps.copy()}
    rows["c"][2] = 100  # the frame of the query
    figure = figures.map_rows(rows, [0, 1, 2], pictures, title="", queries={"c": (2, 1, 1)})
    drawn = [axis.images[0].get_array() for axis in figure.axes[:9]]
    alone = figures.map_rows({"c": maps[:2]}, [0, 1], pictures, title="")
    assert all(np.array_equal(drawn[n], drawn[3 + n]) for n in range(3))
    assert np.array_equal(drawn[6], alone.axes[0].images[0].get_array())
    assert len(figure.axes[8].patches) == 1 and not figure.axes[7].patches
    video = np.full((9, 64, 64, 3), 90, np.uint8)
    path = figures.save_rows_movie(tmp_path / "rows.mp4", video, rows)
    assert mp4.count_frames(path) == 9


def test_what_was_not_captured_has_no_map(run):
    with pytest.raises(RunError, match="its words have video_to_text alone"):
        words.maps_of_run(run, ["circle"], direction="text_to_video")
    run = replace(run, records=[])
    with pytest.raises(RunError, match="no word_share of words was captured"):
        words.maps_of_run(run, ["circle"])
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
    assert "red" not in captured.words() and captured.words().get("red") is None
    with pytest.raises(KeyError, match="no map of 'red', only of circle"):
        captured.words().mean("red")
    every = captured.words()["circle"]
    assert every.shape == (1, 12, 1, 3, 4, 4)
    for keeps_axes in (True, False):
        with capture(session, words="circle", each=keeps_axes, layers=2, heads=[7, 3], steps=0) as captured:
            session.generate(prompts[0], seed=1)
        chosen = every[:, [7, 3]]
        if not keeps_axes:
            chosen = chosen.mean((0, 1, 2))
        torch.testing.assert_close(
            captured.words()["circle"], chosen, atol=2.5e-4, rtol=0
        )  # half a step of float16 below 1


TEXT = "a red circle, a Red wall"  # tokens a, red, circle, ",", a, "", R, ed, wall
OF_WORDS = {"circle": (2,), "red": (1, 6, 7)}


@pytest.fixture
def attended(monkeypatch):
    """Every q, k and v [B, H, L, 16] of the video's attention, and its mask."""
    calls, original = [], torch.nn.functional.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, **more):
        if query.shape[2] >= 18 and query.shape[3] == 16:
            calls.append((query.double(), key.double(), attn_mask))
        return original(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    return calls


def float64_softmax(call) -> torch.Tensor:
    """The softmax [B, H, Lq, Lk] of one call by its definition."""
    q, k, mask = call
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize("name", ["wan", "cosmos"])
def test_words_of_cross_attention_are_a_float64_softmax(name, attended):
    """Of the conditional branch alone, though the negative prompt has the word too."""
    pipe, given = small_wan_pipeline(), video_pipelines.SIZES | {"num_frames": 9}
    if name == "cosmos":
        pipe, given = video_pipelines.cosmos_with_text()
    given |= {"prompt": TEXT, "negative_prompt": "circle red circle wall", "guidance_scale": 5.0}
    given["num_inference_steps"] = 2
    plain = video_pipelines.call(pipe, given)
    attended.clear()
    with capture(pipe, words=list(OF_WORDS), each=True) as captured:
        assert torch.equal(plain, video_pipelines.call(pipe, given))
    # Two steps, of each the conditional forward, then the other; two layers of self- and cross-attention.
    cross = [call for call in attended if call[1].shape[2] == 16]
    chosen = [float64_softmax(cross[n])[0] for step in range(2) for n in (4 * step, 4 * step + 1)]
    maps = captured.words()
    assert len(cross) == 8 and maps["circle"].shape == (2, 3, 2, 3, 4, 4)
    for word, tokens in OF_WORDS.items():
        expected = torch.stack([softmax[..., list(tokens)].sum(-1) for softmax in chosen])
        expected = expected.view(2, 2, 3, 3, 4, 4).transpose(0, 1).transpose(1, 2)  # [layer, head, step, ...]
        torch.testing.assert_close(
            maps[word].double(), expected, atol=2.5e-4, rtol=0
        )  # half a step of float16
    with pytest.raises(RunError, match="its words have video_to_text alone"):
        captured.words(direction="text_to_video")


@dataclass
class Joint:
    """A pipeline of joint attention: videos of a prompt, calls of the conditional branch, tokens, places."""

    name: str
    videos: int
    chosen: tuple[int, ...]
    grid: tuple[int, int, int]
    first: int  # key of the prompt's first token: behind the video's, an image's, letters', a template's


JOINT = [
    Joint("hunyuan", videos=2, chosen=(0, 1, 2, 3), grid=(3, 2, 3), first=18),
    Joint("hunyuan_image", videos=1, chosen=(0, 1, 2, 3), grid=(3, 2, 3), first=18 + 4),
    Joint("hunyuan15", videos=1, chosen=(0, 1, 4, 5), grid=(3, 2, 2), first=12 + 8 + 2),
    Joint("hunyuan15_image", videos=1, chosen=(0, 1, 4, 5), grid=(3, 2, 2), first=12 + 4 + 8 + 2),
]


@pytest.mark.parametrize("joint", JOINT, ids=lambda joint: joint.name)
def test_words_of_joint_attention_are_a_float64_softmax_in_both_directions(joint, attended):
    """Behind a template that says "red" too, whose last tokens the model may read."""
    pipe, given = getattr(video_pipelines, joint.name)()
    given |= {"prompt": f'{TEXT} "hi"', "num_videos_per_prompt": joint.videos}
    with capture(pipe, words=list(OF_WORDS)) as captured:
        video_pipelines.call(pipe, given)
    length = max(q.shape[2] for q, _, _ in attended)  # refiners of text have fewer
    calls = [call for call in attended if call[0].shape[2] == length]
    grid, first = joint.grid, joint.first
    assert len(captured.runs) == joint.videos
    video = grid[0] * grid[1] * grid[2]
    for item, run in enumerate(captured.runs):
        softmax = torch.stack([float64_softmax(calls[n])[item] for n in joint.chosen]).mean((0, 1))
        to_text, from_text = captured.words(run), captured.words(run, direction="text_to_video")
        for word, tokens in OF_WORDS.items():
            rows = [first + token for token in tokens]
            expected = softmax[:video, rows].sum(-1).view(grid)
            torch.testing.assert_close(to_text[word].double(), expected, atol=1e-6, rtol=0)
            expected = softmax[rows, :video].sum(0).view(grid)
            torch.testing.assert_close(from_text[word].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("text", "cut", "left", "expected"),
    [
        pytest.param("{}", 0, 0, (1, 2), id="alone"),
        pytest.param("a red circle: {}, right", 0, 0, (5, 6), id="within a template that has the words"),
        pytest.param("a red circle: {}", 5, 0, (0, 1), id="behind a template that is cut off"),
        pytest.param("{}", 0, 4, (5, 6), id="behind padding"),
        pytest.param("{}", 0, -4, (1, 2), id="registers in place of padding"),
    ],
)
def test_the_prompts_own_tokens_are_found_in_what_the_text_encoder_got(text, cut, left, expected):
    """As chat templates put text around it, and pipelines cut that off in front; left: padding before it."""
    tokenizer = small_wan_pipeline().tokenizer
    registers = {}
    if left < 0:
        registers = {"video_connector_num_learnable_registers": 8}
    pipe = SimpleNamespace(tokenizer=tokenizer, connectors=SimpleNamespace(config=registers))
    ids = tokenizer(text.format("a red circle")).input_ids
    ids, is_read = [tokenizer.pad_token_id] * abs(left) + ids, [False] * abs(left) + [True] * len(ids)
    states = torch.randn(2, len(ids), 8)
    row = pipeline_calls.EncoderRow(ids, is_read, states=[*states])
    embeds = states[1:, cut:].bfloat16()
    [encoded] = pipeline_calls.encoded_prompts(pipe, ["a red circle"], [row], embeds).values()
    assert prompt_words.tokens_of_words(encoded.of_prompt, ["red circle"]) == (expected,)
    assert [encoded.tokens[n] for n in expected] == ["▁red", "▁circle"]


def test_words_that_are_cut_off_or_of_a_prompt_that_nobody_saw_are_refused():
    pipe, given = video_pipelines.hunyuan()
    given |= {"prompt": TEXT, "max_sequence_length": 4}
    refusal = refused(
        "the word 'wall' is not among the 4 tokens that the model reads of the prompt: it is cut"
    )
    with capture(pipe, words=["wall"]), refusal:
        video_pipelines.call(pipe, given)
    pipe, given = video_pipelines.cosmos()
    pipe.register_modules(
        **{name: getattr(small_wan_pipeline(), name) for name in ("tokenizer", "text_encoder")}
    )
    with capture(pipe, words=["wall"]), refused("words= needs the prompt: give it in place of prompt_embeds"):
        video_pipelines.call(pipe, given)


def test_what_has_no_words_is_refused_before_the_video():
    session = load("wan_mini", num_frames=3)
    with refused("the word 'square' is not in the prompt"), capture(session, words=["square"]):
        session.generate(PROMPT, seed=1)
    with refused("words are captured alone"), capture(session, "z", words=["circle"]):
        pass
    with refused("head 12 is not in 0..11"), capture(session, words=["circle"], heads=[12]):
        pass
    with refused("capture of words knows no 'blocks'"), capture(session, words=["circle"], blocks=[1]):
        pass
    with refused("which keys of .* are of text is not known"):
        capture(small_wan_pipeline().transformer, words=["circle"]).__enter__()
    with capture(session) as captured, refused("no words were asked for"):
        captured.words()
    with (
        capture(session, words="circle") as captured,
        refused("words takes a run of this capture, not 'run'"),
    ):
        captured.words("run")

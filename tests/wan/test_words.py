"""Mass on words of the prompt: against a softmax in float64, of cross-attention and of joint attention."""

import pytest
import torch
from helpers.refusals import refused
from helpers.rollouts import drawn, rollout, tiny_pipeline

from wan.attention import Call
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest, values_of
from wan.sites import Site

S = 4  # tokens of a frame


def softmax_of(call: Call, mask=None) -> torch.Tensor:
    """The softmax [B, H, Lq, Lk] by definition, float64."""
    logits = torch.einsum("bqhd,bkhd->bhqk", call.q.double(), call.k.double()) * call.q.shape[-1] ** -0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.softmax(-1)


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("by_head", [False, True])
def test_words_of_cross_attention(by_head):
    """Pieces of a word are summed, and a word that stands twice is both."""
    q, k = drawn(2, 3 * S, 3, 16), drawn(2, 9, 3, 16)
    call = Call(Site(1, "cross"), None, q, k, k)
    words = (((0, 1), (4, 7)), ((2,), (3, 5)))  # of two prompts
    request = CaptureRequest(kinds=("cross",), granularity="words", words=words, by_head=by_head)
    mass = values_of(request, call)["word_share"]
    softmax = softmax_of(call)
    for item, of_item in enumerate(words):
        for number, tokens in enumerate(of_item):
            expected = softmax[item][..., list(tokens)].sum(-1)
            if by_head:
                close(mass[item, ..., number], expected, atol=3e-4)  # float16
            else:
                close(mass[item, 0, :, number], expected.mean(0))


@pytest.mark.parametrize("is_masked", [False, True])
def test_words_of_joint_attention_in_both_directions(is_masked):
    """Two tokens of history, six of the video, five of text, of which one is padding."""
    q, k = drawn(1, 13, 3, 16), drawn(1, 13, 3, 16)
    call = Call(Site(1, "self"), None, q, k, k, around=(2, 5), around_q=(2, 5), text=8)
    if is_masked:
        call.mask = torch.ones(1, 1, 1, 13, dtype=torch.bool)
        call.mask[..., 12] = False
    request = CaptureRequest(granularity="words", words=(((1, 2), (3,)),))
    values = values_of(request, call)
    softmax = softmax_of(call, call.mask).mean(1)[0]
    close(values["word_share"][0, 0, :, 0], softmax[2:8, 9:11].sum(-1))
    close(values["word_share"][0, 0, :, 1], softmax[2:8, 11])
    close(values["text_share"][0, 0, :, 0], softmax[9:11, 2:8].sum(0))
    close(values["text_share"][0, 0, :, 1], softmax[11, 2:8])


def test_words_are_a_part_of_the_map_that_keeps_all():
    request = CaptureRequest(kinds=("cross",), granularity="words", words=(((0,), (1, 3)),), by_head=True)
    every = CaptureRequest(kinds=("cross",), granularity="map")
    with ATTENTION_WEIGHT_CAPTURE.capture(request, every) as calls:
        rollout(tiny_pipeline())
    of_words = [call["word_share"] for call in calls if "word_share" in call.values]
    of_tokens = [call["word_map"] for call in calls if "word_map" in call.values]
    assert len(of_words) == len(of_tokens) > 0
    for words, tokens in zip(of_words, of_tokens, strict=True):
        tokens = tokens.float()
        expected = torch.stack([tokens[..., 0], tokens[..., 1] + tokens[..., 3]], -1)
        torch.testing.assert_close(words.float(), expected, atol=2e-3, rtol=0)


def test_where_the_text_stands_is_known_or_words_are_refused():
    q = drawn(1, 4, 3, 16)
    request = CaptureRequest(granularity="words", words=(((0,),),))
    with refused("which keys are of text is not known"):
        values_of(request, Call(Site(0, "self"), None, q, q, q))
    with refused("granularity 'words' takes words"):
        CaptureRequest(granularity="words")

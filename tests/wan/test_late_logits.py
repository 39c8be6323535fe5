"""Mean logits that are formed when a forward ends: each call has its own, in time, or is not kept."""

from contextlib import suppress

import pytest
import torch
from helpers.rollouts import rollout, tiny_pipeline

from wan.modules import late_logits, reductions
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE, attention
from wan.modules.capture import CaptureRequest
from wan.modules.captured_call import Pass, Site
from wan.modules.key_layout import KeyLayout

S, AT = 5, Pass(query_frames=(2, 3))
LOGITS, MASS = (CaptureRequest(granularity="frame", mass=mass) for mass in (False, True))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def call(layer: int, batch: int = 1, heads: int = 3, key_frames: int = 4, layout: KeyLayout | None = None):
    """Attention of two query frames -> what its frame_logits are by definition, in float64."""
    q, k = drawn(batch, 2 * S, heads, 16 + layer)[..., :16], drawn(batch, key_frames * S, heads, 17)[..., :16]
    layout = layout or KeyLayout.of_frames(range(key_frames), key_frames * S)
    attention(q, k, k, Site(layer, "self"), layout=layout)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
    return logits.unflatten(3, (-1, S)).unflatten(2, (-1, S)).mean((3, 5))


def assert_logits(calls, expected):
    for found, logits in zip(calls, expected, strict=True):
        torch.testing.assert_close(found["frame_logits"].double(), logits, atol=1e-5, rtol=0)


def test_calls_of_several_sizes_are_complete_when_their_pass_ends():
    sizes = [{}, {"batch": 2}, {"heads": 1}, {"key_frames": 7}, {}, {"batch": 2}]
    with ATTENTION_WEIGHT_CAPTURE.capture(MASS) as calls:
        with ATTENTION_WEIGHT_CAPTURE.during(AT):
            expected = [call(layer, **size) for layer, size in enumerate(sizes)]
            assert [found["layer"] for found in calls] == list(range(len(sizes)))
        assert_logits(calls, expected)
    for found in calls:
        assert list(found.values) == ["frame_logits", "frame_mass"]
        for value in found.values.values():
            assert value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes


def test_one_product_serves_a_pass(monkeypatch):
    products, of_sums = [], reductions.logits_of_sums

    def counted(q_sums, *rest):
        products.append(q_sums.shape[2])
        return of_sums(q_sums, *rest)

    monkeypatch.setattr(late_logits.reductions, "logits_of_sums", counted)
    pipeline = tiny_pipeline()
    with ATTENTION_WEIGHT_CAPTURE.capture(LOGITS) as calls:
        rollout(pipeline)
    sizes = pipeline.model.config
    assert products == [sizes.num_layers * sizes.num_heads] * (len(calls) // sizes.num_layers)


def test_a_layer_that_is_called_twice_keeps_the_mean_keys_of_each_call():
    layout = KeyLayout.of_frames(range(4), 4 * S)
    with ATTENTION_WEIGHT_CAPTURE.capture(LOGITS) as calls, ATTENTION_WEIGHT_CAPTURE.during(AT):
        expected = [call(0, layout=layout), call(1, layout=layout)]
        q = k = drawn(1, 4 * S, 3, 16)
        attention(q[:, : 2 * S], k, k, Site(0, "self"), layout=layout)
    logits = torch.einsum("bqhd,bkhd->bhqk", q[:, : 2 * S].double(), k.double()) / 4
    assert_logits(calls, [*expected, logits.unflatten(3, (-1, S)).unflatten(2, (-1, S)).mean((3, 5))])


def test_several_requests_for_a_call_get_the_same():
    with ATTENTION_WEIGHT_CAPTURE.capture(LOGITS, MASS) as calls, ATTENTION_WEIGHT_CAPTURE.during(AT):
        expected = [call(layer) for layer in (0, 0, 1, 1)][::2]
    assert [list(found.values) for found in calls[:2]] == [["frame_logits"], ["frame_logits", "frame_mass"]]
    assert_logits(calls, [logits for logits in expected for _ in range(4)])


def test_a_capture_that_ends_within_a_pass_is_complete():
    with ATTENTION_WEIGHT_CAPTURE.during(AT):
        with ATTENTION_WEIGHT_CAPTURE.capture(LOGITS) as calls:
            expected = [call(0), call(1)]
        assert_logits(calls, expected)


@pytest.mark.parametrize("inside", [False, True], ids=["a pass in the capture", "a capture in the pass"])
def test_an_error_leaves_no_call_without_its_values(inside):
    capture, during = ATTENTION_WEIGHT_CAPTURE.capture(LOGITS), ATTENTION_WEIGHT_CAPTURE.during
    expected = []
    if inside:
        with suppress(KeyboardInterrupt), during(AT), capture as calls:
            call(0)
            raise KeyboardInterrupt
    else:
        with capture as calls:
            with during(AT):
                expected = [call(0), call(1)]
            with suppress(KeyboardInterrupt), during(AT):
                call(0)
                raise KeyboardInterrupt
    assert_logits(calls, expected)


def test_the_older_interface_gives_complete_calls_within_a_pass():
    with ATTENTION_WEIGHT_CAPTURE.capture(LOGITS), ATTENTION_WEIGHT_CAPTURE.during(AT):
        expected = [call(0)]
        assert_logits(ATTENTION_WEIGHT_CAPTURE.captured_weights, expected)

"""Mean logits that are formed when a forward ends: each call has its own, in time, or is not kept."""

from contextlib import suppress

import pytest
import torch
from helpers.kernels import drawn
from helpers.rollouts import rollout, tiny_pipeline

from wan import late_logits, reductions
from wan.attention import ATTENTION_WEIGHT_CAPTURE, attention
from wan.capture import CaptureRequest
from wan.captured_call import Pass, Site
from wan.keys import KeyLayout, Slot

S, AT = 5, Pass(query_frames=(2, 3))
KINDS = pytest.mark.parametrize("of_rollout", [True, False], ids=["of a rollout", "of nobody's rollout"])
LOGITS, MASS = (CaptureRequest(granularity="frame", mass=mass) for mass in (False, True))


def layout_of(frames: int, version: int = 0, rollout: object = None) -> KeyLayout:
    """Frames of which the last two are the queries' own."""
    own, slots = range(frames - 2, frames), tuple(Slot(frame, frame) for frame in range(frames))
    return KeyLayout(slots, S, own, tuple(own), rollout, version, unchanged=frames - 2)


def call(layer: int, batch: int = 1, heads: int = 3, key_frames: int = 4, layout: KeyLayout | None = None):
    """Attention of two query frames -> what its frame_logits are by definition, in float64."""
    key_frames = len(layout.slots) if layout else key_frames
    q, k = drawn(batch, 2 * S, heads, 16 + layer)[..., :16], drawn(batch, key_frames * S, heads, 17)[..., :16]
    layout = layout or KeyLayout.of_frames(range(key_frames), key_frames * S)
    attention(q, k, k, Site(layer, "self"), layout=layout)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
    return logits.unflatten(3, (-1, S)).unflatten(2, (-1, S)).mean((3, 5))


def assert_logits(calls, expected):
    for found, logits in zip(calls, expected, strict=True):
        torch.testing.assert_close(found["frame_logits"].double(), logits, atol=1e-5, rtol=0)


@KINDS
def test_calls_of_several_sizes_are_complete_when_their_pass_ends(of_rollout):
    one, other = (layout_of(4, rollout=object()) if of_rollout else None for _ in range(2))
    sizes = [{"layout": one}, {"batch": 2, "layout": one}, {"heads": 1, "layout": one}, {"key_frames": 7}]
    sizes += [{"layout": one}, {"batch": 2, "layout": one}, {"layout": other}]
    with ATTENTION_WEIGHT_CAPTURE.capture(MASS) as calls:
        with ATTENTION_WEIGHT_CAPTURE.during(AT):
            expected = [call(layer, **size) for layer, size in enumerate(sizes)]
            assert [found["layer"] for found in calls] == list(range(len(sizes)))
        assert_logits(calls, expected)
    for found in calls:
        assert list(found.values) == ["frame_logits", "frame_mass"]
        for value in found.values.values():
            assert value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("small", [late_logits.SMALL, 0], ids=["small calls", "large calls"])
def test_one_product_serves_a_pass(monkeypatch, small):
    products, of_sums = [], reductions.logits_of_sums
    monkeypatch.setattr(late_logits, "SMALL", small)

    def counted(q_sums, *rest):
        products.append(q_sums.shape[2])
        return of_sums(q_sums, *rest)

    monkeypatch.setattr(late_logits.reductions, "logits_of_sums", counted)
    pipeline = tiny_pipeline()
    with ATTENTION_WEIGHT_CAPTURE.capture(LOGITS) as calls:
        rollout(pipeline)
    sizes = pipeline.model.config
    assert products == [sizes.num_layers * sizes.num_heads] * (len(calls) // sizes.num_layers)


def test_small_calls_are_summed_together(monkeypatch):
    summed, of_queries = [], reductions.frame_sums
    monkeypatch.setattr(
        late_logits.reductions, "frame_sums", lambda q, n: (summed.append(q.shape), of_queries(q, n))[1]
    )
    layout = layout_of(4, rollout=object())
    with ATTENTION_WEIGHT_CAPTURE.capture(LOGITS) as calls, ATTENTION_WEIGHT_CAPTURE.during(AT):
        expected = [call(0, layout=layout), call(1, layout=layout)]
        assert not summed
    assert summed == [(1, 2 * S, 2 * 3, 16)]
    assert_logits(calls, expected)


def test_means_of_the_past_are_formed_once():
    rollout, keys, expected = object(), [drawn(1, 6 * S, 3, 16 + layer)[..., :16] for layer in (0, 1)], []
    means = [k.double().unflatten(1, (6, S)).mean(2) for k in keys]
    with ATTENTION_WEIGHT_CAPTURE.capture(LOGITS) as calls:
        for version, frames in enumerate((4, 6)):
            layout = layout_of(frames, version, rollout)
            with ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=layout.query_positions)):
                for layer, k in enumerate(keys):
                    q, seen = drawn(1, 2 * S, 3, 20 + layer)[..., :16], k[:, : frames * S]
                    attention(q, seen, seen, Site(layer, "self"), layout=layout)
                    q_means = q.double().unflatten(1, (2, S)).mean(2)
                    expected.append(torch.einsum("bqhd,bkhd->bhqk", q_means, means[layer][:, :frames]) / 4)
            for k in keys:
                k[:, : 2 * S] = torch.nan  # frames of the past, which nobody reads again
    assert_logits(calls, expected)


@KINDS
def test_a_layer_that_is_called_twice_keeps_the_mean_keys_of_each_call(of_rollout):
    layout = layout_of(4, rollout=object()) if of_rollout else KeyLayout.of_frames(range(4), 4 * S)
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

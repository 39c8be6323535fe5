"""Masks as runs of queries and intervals of keys: the values of a softmax in chunks, without one."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
from helpers.rollouts import drawn
from helpers.video_transformers import made

from wan import diffusers_attention, masks, reductions
from wan.attention import Call
from wan.capture import CaptureRequest, values_of
from wan.diffusers_capture import capture_diffusers
from wan.errors import ConfigError
from wan.keys import KeyLayout
from wan.sites import Pass, Site

F, S, HEADS, DIM = 4, 5, 3, 16


def padding(length: int, *seen: int) -> torch.Tensor:
    return (torch.arange(length) < torch.tensor(seen)[:, None])[:, None, None]


def blocks(length: int, size: int) -> torch.Tensor:
    block = torch.arange(length) // size
    return (block[None] <= block[:, None])[None, None]


def both_sides(length: int, *seen: int) -> torch.Tensor:
    """Padding is hidden from keys and sees nothing itself, as in HunyuanVideo-1.5."""
    keys = padding(length, *seen)
    return keys & keys.transpose(2, 3)


def islands(length: int) -> torch.Tensor:
    """Three intervals for two runs that end within a frame."""
    mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
    mask[..., :7, :3], mask[..., :7, 6:9], mask[..., :7, 14:] = True, True, True
    mask[..., 7:, 2:11] = True
    return mask


def padding_behind(length):
    return padding(length, length - 2, length - 6)


def padding_within_frames(length):
    return padding(length, length - 7, length)


def two_frames_a_block(length):
    return blocks(length, 2 * S)


def added_numbers(length):
    return torch.zeros(length, length).masked_fill(~blocks(length, S)[0, 0], -torch.inf)


def padding_of_both_sides(length):
    return both_sides(length, length - 4, length - 1)


def no_mask(length):
    return None


@pytest.mark.parametrize(
    ("make", "around"),  # a mask; tokens before and behind the frames' keys and queries
    [
        (padding_behind, (0, 6)),
        (padding_within_frames, (0, 0)),
        (two_frames_a_block, (0, 0)),
        (added_numbers, (0, 0)),
        (padding_of_both_sides, (0, 6)),
        (islands, (3, 2)),
        (no_mask, (4, 3)),
    ],
)
@pytest.mark.parametrize("mass", [True, False])
def test_values_of_runs_are_those_of_chunks(make, around, mass):
    length = F * S + sum(around)
    mask = make(length)
    q, k = (drawn(2, length, HEADS, DIM) * scale for scale in (2, 1.5))
    at = Pass(query_frames=tuple(range(F)))
    call = Call(Site(0, "self"), at, q, k, k, KeyLayout.of_frames(range(F), F * S))
    call.around = call.around_q = around
    request = CaptureRequest(granularity="frame", mass=mass)
    call.mask = mask
    if mask is not None:
        call.mask = mask.view(*[1] * (4 - mask.ndim), *mask.shape)
    expected = values_of(request, call)
    call.mask, call.runs = None, masks.runs_of_mask(mask, 2, length, length)
    assert call.runs is not None
    values = values_of(request, call)
    assert values.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(values[key], value, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_masks_that_are_more_than_a_few_intervals_keep_the_chunks():
    length = 300
    assert masks.runs_of_mask(torch.ones(length, length).tril().bool(), 1, length, length) is None
    assert masks.runs_of_mask(torch.arange(length)[None] % 2 == 0, 1, length, length) is None
    assert masks.runs_of_mask(drawn(1, 1, 1, length), 1, length, length) is None  # numbers that are added
    assert masks.runs_of_mask(torch.ones(1, 2, 1, length).bool(), 1, length, length) is None  # by head


def test_a_mask_is_read_once_for_all_layers_and_again_where_it_changed(monkeypatch):
    count, original = [], masks._runs_of
    monkeypatch.setattr(masks, "_runs_of", lambda *args: count.append(1) or original(*args))
    mask = padding(9, 5)
    for _ in range(2):
        [runs] = masks.runs_of_mask(mask, 1, 9, 9)
        assert runs == (masks.QueryRun((0, 9), ((0, 5),)),)
    assert len(count) == 1
    mask[..., 5] = True
    assert masks.runs_of_mask(mask, 1, 9, 9)[0][0].keys == ((0, 6),) and len(count) == 2


def test_a_block_mask_is_read_without_the_whole_matrix(monkeypatch):
    monkeypatch.setattr(masks, "ROWS_AT_ONCE", 7)

    def causal(item, head, row, column):
        return column // 8 <= row // 8

    mask = flex_attention.create_block_mask(causal, None, None, 40, 40, device="cpu", BLOCK_SIZE=8)
    [runs] = masks.runs_of_mask(mask, 1, 40, 40)
    assert runs == tuple(masks.QueryRun((n, n + 8), ((0, n + 8),)) for n in range(0, 40, 8))


@pytest.mark.parametrize("name", ["hunyuan", "hunyuan15", "skyreels", "helios", "anyflow", "anyflow_cached"])
def test_captures_by_runs_are_those_of_chunks(name, monkeypatch):
    """As on a GPU, with sums in place of its kernels."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model, given = made(name)
    with torch.no_grad(), capture_diffusers(model, granularity="frame") as expected:
        plain = model(**given)[0]
    monkeypatch.setattr(diffusers_attention, "mass_kernels", lambda q: reductions)
    counted, original = [], reductions.values_of_runs
    monkeypatch.setattr(
        reductions, "values_of_runs", lambda *a, **more: counted.append(1) or original(*a, **more)
    )
    with torch.no_grad(), capture_diffusers(model, granularity="frame") as calls:
        assert torch.equal(model(**given)[0], plain)
    assert len(counted) == len(calls) == len(expected)
    for call, other in zip(calls, expected, strict=True):
        assert call.values.keys() == other.values.keys()
        for key, value in other.values.items():
            torch.testing.assert_close(call.values[key], value, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_mask_that_is_neither_boolean_nor_additive_is_refused():
    arguments = {"attn_mask": torch.ones(1, 1, 1, 4, dtype=torch.int64), "is_causal": False}
    q = drawn(1, 4, 1, 8)
    with pytest.raises(ConfigError, match=r"boolean or added to logits; one of torch.int64 cannot be seen"):
        diffusers_attention.mask_of(arguments, q, q)


# --- On a GPU: run by tests/run.sh --gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize("name", ["hunyuan", "hunyuan15", "skyreels", "helios", "ltx2"])
def test_kernels_weigh_masked_calls_as_chunks_do(name, device, monkeypatch):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    model, given = made(name)
    model = model.to(device, torch.bfloat16)
    for key, value in given.items():
        if isinstance(value, torch.Tensor):
            given[key] = value.to(device)
            if value.is_floating_point() and "mask" not in key:
                given[key] = value.to(device, torch.bfloat16)
    with torch.no_grad():
        plain = model(**given)[0]
        with capture_diffusers(model, granularity="frame") as calls:
            assert torch.equal(model(**given)[0], plain)
        monkeypatch.setattr(diffusers_attention, "mass_kernels", lambda q: None)
        with capture_diffusers(model, granularity="frame") as expected:
            assert torch.equal(model(**given)[0], plain)
    for call, other in zip(calls, expected, strict=True):
        assert call.values.keys() == other.values.keys()
        for key, value in other.values.items():
            torch.testing.assert_close(call.values[key], value, atol=1e-5, rtol=1e-4, equal_nan=True)

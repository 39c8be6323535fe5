"""Mean logits by RoPE band: they add up, each band is its own,
and they travel from the hook to the notebook's cache.
"""

import math

import pytest
import torch
from conftest import ROOT
from helpers.rollouts import rollout, tiny_pipeline

from experiments import run_extraction_all
from experiments.caches import load_cache
from wan import reductions
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CaptureRequest
from wan.rope import RotaryTable, rotate

SIZES = [
    (16, 5, 3, 6),
    (64, 5, 1, 7),
    (128, 24, 3, 5),
    (128, 1560, 1, 2),
]  # head dim, tokens a frame, query, key frames


def q_and_k(size, device="cpu", dtype=torch.float32):
    dim, S, query_frames, key_frames = size
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, n * S, 3, dim, generator=generator).to(device, dtype) * 2
        for n in (query_frames, key_frames)
    ]


def test_the_bands_of_a_head():
    """Head dim 128: 22 time frequencies from 1 rad/frame down, 42 dims each of height and width."""
    bands = RotaryTable(128).bands
    assert list(bands.values()) == [2] * 22 + [42, 42] and sum(bands.values()) == 128
    assert list(bands)[:2] == [
        "time, period 6.28 frames",
        f"time, period {2 * math.pi * 10000 ** (2 / 44):.2f} frames",
    ]
    assert list(bands)[-2:] == ["height", "width"]
    assert list(RotaryTable(16).bands.values()) == [2] * 4 + [4, 4]


def test_names_are_the_table_s_own_frequencies():
    """The turn of each time pair from one frame to the next, taken from the table that rotates q and k."""
    table = RotaryTable(64)
    angles = table.freqs_cis(0, torch.tensor([1])).angle()[0]
    named = [float(name.split()[2]) for name in table.bands if name.startswith("time")]
    assert named == pytest.approx((2 * math.pi / angles).tolist(), rel=5e-3)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bands_add_up_to_the_mean_logits(size, device):
    q, k = q_and_k(size, device)
    bands = RotaryTable(size[0]).bands.values()
    means = reductions.frame_means(k, size[3])
    found = reductions.frame_logits_by_band(q, means, size[2], bands)
    assert found.shape == (2, 3, size[2], size[3], len(bands)) and found.dtype == torch.float32
    logits = reductions.frame_logits(q, means, size[2])
    assert (found.sum(-1) - logits).abs().max() <= 1e-5 * max(1.0, logits.abs().max().item())
    tokens = [x.double().unflatten(1, (-1, size[1])).mean(2) for x in (q, k)]
    start = 0
    for n, width in enumerate(bands):  # each band from its own dims alone, in float64
        part = [x[..., start : start + width] for x in tokens]
        expected = torch.einsum("bqhd,bkhd->bhqk", *part) * size[0] ** -0.5
        assert (found[..., n] - expected).abs().max() <= 1e-5
        start += width


@pytest.mark.parametrize("band", range(6))
def test_one_band_in_one_band_out(band):
    """q and k of one band, rotated as the model does:
    RoPE keeps it where it is, and only that band is not zero.
    """
    table = RotaryTable(16)
    sizes = list(table.bands.values())
    q, k = q_and_k((16, 6, 2, 4))
    mask = torch.zeros(16)
    start = sum(sizes[:band])
    mask[start : start + sizes[band]] = 1
    q, k = (
        rotate(x * mask, *table(range(first, first + n), 2, 3, x.device))
        for x, first, n in ((q, 2, 2), (k, 0, 4))
    )
    found = reductions.frame_logits_by_band(q, reductions.frame_means(k, 4), 2, sizes)
    others = [n for n in range(6) if n != band]
    assert found[..., others].abs().max() == 0 and found[..., band].abs().min() > 0


def test_a_time_band_turns_with_distance():
    """The fastest band of q and k that are the same in every frame is a wave of 2 pi frames and nothing
    else.
    """
    table = RotaryTable(16)
    q = torch.ones(1, 1, 1, 16).expand(1, 12, 1, 16)
    turned = rotate(q, *table(range(12), 1, 1, q.device))
    found = reductions.frame_logits_by_band(
        turned, reductions.frame_means(turned, 12), 12, table.bands.values()
    )[0, 0, ..., 0]
    distance = torch.arange(12)[:, None] - torch.arange(12)
    torch.testing.assert_close(
        found, 2 * torch.cos(distance.float()) / 4, atol=1e-5, rtol=0
    )  # scale 1/sqrt(16)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.real_gpu)], ids=str
)
def test_looking_changes_no_bit(dtype, device):
    pipeline = tiny_pipeline(dtype, device)
    plain = rollout(pipeline)
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", rope_bands=True) as calls:
        assert torch.equal(plain, rollout(pipeline))
    for call in calls:
        total = call["frame_logits_by_band"].sum(-1)
        torch.testing.assert_close(total, call["frame_logits"], atol=1e-5, rtol=1e-5)
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls:
        rollout(pipeline)
    assert not any("frame_logits_by_band" in call for call in calls)


@pytest.mark.parametrize(
    "fields",
    [{"granularity": "token"}, {"granularity": "key"}, {"granularity": "frame", "kinds": ("cross",)}],
)
def test_only_mean_logits_of_self_attention_have_bands(fields):
    with pytest.raises(ValueError, match="rope_bands needs granularity 'frame' of self-attention"):
        CaptureRequest(rope_bands=True, **fields)


def test_bands_in_an_atlas(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = [
        "--config_path",
        "configs/wan_mini.yaml",
        "--num_frames",
        "6",
        "--output_path",
        str(tmp_path / "a.pt"),
    ]
    run_extraction_all.run([*flags, "--rope_bands"])
    atlas = load_cache(tmp_path / "a.pt")
    by_band, logits = atlas["frame_logits_by_band"], atlas["frame_logits"]
    assert by_band.shape == (*logits.shape, len(atlas["rope_bands"])) and atlas["rope_bands"][-2:] == [
        "height",
        "width",
    ]
    assert torch.equal(by_band.isnan().any(-1), logits.isnan())
    torch.testing.assert_close(by_band.sum(-1), logits, atol=1e-5, rtol=1e-5, equal_nan=True)
    run_extraction_all.run(flags)
    assert "frame_logits_by_band" not in load_cache(tmp_path / "a.pt")

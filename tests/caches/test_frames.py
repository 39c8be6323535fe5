"""Frame reductions against a float64 einsum and the golden captures;
frame indices against the golden windows.
"""

import json

import numpy as np
import pytest
import torch
from conftest import GOLDEN

from experiments.caches import frames
from wan.blocks import block_frames, later_block, video_to_latent_frame, visible_frames


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "golden_capture.npz")


def reference_means(tokens, S):
    """[H, Fq, Fk] in float64, by an einsum with frame indicators instead of a reshape."""
    x = tokens.double().numpy()
    query, key = (np.repeat(np.eye(n // S), S, axis=0) / S for n in x.shape[1:])  # [L, F]
    return np.einsum("hij,ia,jb->hab", x, query, key)


@pytest.mark.parametrize(
    "chunk", [1, 40, 2**21]
)  # one row, a few rows that do not divide S, everything at once
@pytest.mark.parametrize(("H", "S", "Fq", "Fk"), [(3, 5, 2, 7), (1, 1, 1, 1), (12, 16, 3, 21), (2, 7, 1, 4)])
def test_frame_means_match_einsum(monkeypatch, chunk, H, S, Fq, Fk):
    monkeypatch.setattr(frames, "CHUNK_ELEMENTS", chunk)
    tokens = torch.randn(H, Fq * S, Fk * S, generator=torch.Generator().manual_seed(0)) * 3
    means = frames.token_matrix_to_frames(tokens, S)
    assert means.dtype == torch.float32
    np.testing.assert_allclose(means, reference_means(tokens, S), atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_float32(dtype):
    """512 equal tokens beside one of 1: a float16 sum of them would be off by far more than the tolerance."""
    tokens = torch.full((1, 600, 1200), 7.01).to(dtype)
    tokens[0, 0, 0] = 1.0
    np.testing.assert_allclose(
        frames.token_matrix_to_frames(tokens, 600), reference_means(tokens, 600), rtol=1e-6
    )


def test_curves_and_mass():
    S, logits = 5, torch.randn(3, 10, 35, generator=torch.Generator().manual_seed(1)) * 2
    probabilities = logits.double().softmax(-1)
    mass = reference_means(probabilities, S) * S
    np.testing.assert_allclose(frames.token_matrix_to_frames(probabilities.float(), S) * S, mass, atol=1e-6)
    np.testing.assert_allclose(
        frames.curves_to_frames(frames.softmax_curves(logits, S), S) * S, mass, atol=1e-6
    )
    np.testing.assert_allclose(
        frames.query_frame_curves(logits, S).mean(1), logits.double().mean(1), atol=1e-6
    )


def test_ragged_tokens_are_refused():
    with pytest.raises(ValueError, match="10 x 36 tokens are not whole frames of 5"):
        frames.token_matrix_to_frames(torch.zeros(1, 10, 36), 5)


@pytest.mark.parametrize("layer", [0, 4])
def test_golden_last_block(golden, layer):
    """Token logits of the last block's first pass -> the frame logits that were recorded beside them."""
    logits = torch.from_numpy(golden[f"blocks9/logits_layer{layer}_lastblock_t1000"])  # [12, 72, 216]
    frame_logits = frames.token_matrix_to_frames(logits, 24)
    recorded = golden["blocks9/all_calls_frame_logits"][10, [0, 4].index(layer)]  # call 10: block 2, pass 0
    np.testing.assert_allclose(frame_logits, recorded, atol=5e-6)
    figure4 = frames.token_matrix_to_frames(logits.half(), 24).mean(1)
    np.testing.assert_allclose(
        figure4, golden[f"blocks9/figure4_layer{layer}_frame_attention_fp16src"], atol=5e-6
    )


def test_golden_mean_prob(golden):
    heads = golden["blocks9/probs_layer4_lastblock_t1000_heads0_9"]
    recorded = golden["blocks9/all_calls_frame_probs_mean"][10, 1, [0, 9]]
    np.testing.assert_allclose(
        frames.token_matrix_to_frames(torch.from_numpy(heads), 24), recorded, atol=1e-8
    )
    logits = torch.from_numpy(golden["blocks9/logits_layer4_lastblock_t1000"])[[0, 9]]
    np.testing.assert_allclose(
        frames.curves_to_frames(frames.softmax_curves(logits, 24), 24), recorded, atol=1e-8
    )


@pytest.mark.parametrize(("case", "block_sizes"), [("blocks9", [3, 3, 3]), ("indep7", [1, 3, 3])])
def test_golden_assembly(golden, case, block_sizes):
    """The calls at t = 1000 of every block put together are the older layer cache,
    where that was attended.
    """
    calls = torch.from_numpy(golden[f"{case}/all_calls_frame_logits"])  # [calls, layers, H, 3, F], NaN-padded
    pieces = []
    for block, size in enumerate(block_sizes):
        keys = visible_frames(block_sizes, block)
        pieces.append((block_frames(block_sizes, block), keys, calls[5 * block, 0, :, :size, : len(keys)]))
    matrix = frames.assemble(pieces, sum(block_sizes))
    older = golden[f"{case}/each_layer0_full_frame_attention"]
    absent = later_block(block_sizes).numpy()
    assert np.isnan(matrix.numpy()[:, absent]).all()
    np.testing.assert_allclose(matrix.numpy()[:, ~absent], older[:, ~absent], atol=1e-6)
    last = matrix[:, block_frames(block_sizes, -1)].mean(1)
    np.testing.assert_allclose(last, older[:, block_frames(block_sizes, -1)].mean(1), atol=1e-6)


def test_windows_keep_global_frames():
    cases = json.loads((GOLDEN / "golden_config.json").read_text())["cases"]
    windows = [case for case in cases.values() if "local_attn_size" in case]
    assert len(windows) == 4
    for case in windows:
        blocks, window = [3] * (case["frames"] // 3), (case["local_attn_size"], case["sink_size"])
        seen = [visible_frames(blocks, b, *window) for b in range(len(blocks))]
        assert seen == case["visible_key_frames_per_block"]


def test_assembly_of_a_window():
    """The third block of blocks of two sees the sink 0 and 3..5:
    value = 10 * query + key in its global place.
    """
    pieces = [
        (q, k, (10 * torch.tensor(q)[:, None] + torch.tensor(k)).expand(3, len(q), len(k)))
        for q, k in [([0, 1], [0, 1]), ([2, 3], [0, 1, 2, 3]), ([4, 5], [0, 3, 4, 5])]
    ]
    matrix = frames.assemble(pieces, 6)
    assert matrix[2, 5].isnan().tolist() == [False, True, True, False, False, False]
    assert matrix[2, 5, 3] == 53
    assert matrix[0, 0].isnan().tolist() == [False, False, True, True, True, True]
    np.testing.assert_array_equal(frames.spread_keys(pieces[2][2], [0, 3, 4, 5], 6), matrix[:, 4:])
    with pytest.raises(RuntimeError):
        frames.assemble([([0, 1], [0], torch.zeros(3, 1, 2))], 6)


def test_frame_indices():
    assert block_frames([1, 3, 3], 0) == [0]
    assert block_frames([1, 3, 3], -1) == [4, 5, 6]
    assert [video_to_latent_frame(i) for i in (0, 1, 4, 5, 8, 80)] == [0, 1, 1, 2, 2, 20]
    assert later_block([1, 2]).tolist() == [[False, True, True], [False] * 3, [False] * 3]

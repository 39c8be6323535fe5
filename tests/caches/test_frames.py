"""Frame reductions against float64 and the golden captures; frame indices against the golden windows."""

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from helpers.synthetic_caches import token_matrix_to_frames
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.caches import frames
from wan.blocks import block_ranges, later_block, visible_frames

BLOCKS = st.lists(st.integers(1, 4), min_size=1, max_size=7)
SEEDS = st.integers(0, 2**32)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference_means(tokens, S):
    """[H, Fq, Fk] in float64, by an einsum with frame indicators instead of a reshape."""
    x = tokens.double().numpy()
    query, key = (np.repeat(np.eye(n // S), S, axis=0) / S for n in x.shape[1:])  # [L, F]
    return np.einsum("hij,ia,jb->hab", x, query, key)


@given(
    H=st.integers(1, 3),
    S=st.integers(1, 6),
    Fq=st.integers(1, 4),
    Fk=st.integers(1, 8),
    chunk=st.sampled_from([1, 40, 2**21]),
    seed=SEEDS,
)
@settings(max_examples=60, deadline=None)
def test_reductions_of_tokens(H, S, Fq, Fk, chunk, seed):
    """In chunks of one row, of a few rows that do not divide S, and of everything at once."""
    logits = noise(seed, H, Fq * S, Fk * S) * 3
    probabilities = logits.double().softmax(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "CHUNK_ELEMENTS", chunk)
        means = token_matrix_to_frames(logits, S)
        curves, soft = frames.query_frame_curves(logits, S), frames.softmax_curves(logits, S)
        prob = token_matrix_to_frames(probabilities.float(), S)
    assert means.dtype == torch.float32
    np.testing.assert_allclose(means, reference_means(logits, S), atol=5e-6)
    np.testing.assert_allclose(prob, reference_means(probabilities, S), atol=1e-6)
    np.testing.assert_allclose(frames.curves_to_frames(soft, S), prob, atol=1e-6)
    np.testing.assert_allclose(curves.mean(1), logits.double().mean(1), atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_float32(dtype):
    """512 equal tokens beside one of 1: a float16 sum of them would be off by far more than the tolerance."""
    tokens = torch.full((1, 600, 1200), 7.01).to(dtype)
    tokens[0, 0, 0] = 1.0
    found = token_matrix_to_frames(tokens, 600)
    np.testing.assert_allclose(found, reference_means(tokens, 600), rtol=1e-6)


@given(sizes=BLOCKS, sink=st.integers(0, 3), extra=st.integers(0, 4), windowed=st.booleans(), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_assembly_puts_every_cell_where_it_belongs(sizes, sink, extra, windowed, seed):
    """Against a table of cells: a window's pieces land at global frames, what was not attended is NaN."""
    F, window = sum(sizes), sink + max(sizes) + extra if windowed else -1
    expected, pieces = torch.full((2, F, F), torch.nan), []
    for block, queries in enumerate(block_ranges(sizes)):
        keys = visible_frames(sizes, block, window, sink)
        values = noise(seed + block, 2, len(queries), len(keys))
        pieces.append((list(queries), keys, values))
        for i, q in enumerate(queries):
            for j, k in enumerate(keys):
                expected[:, q, k] = values[:, i, j]
        assert set(queries) <= set(keys) and keys == sorted(set(keys))
        assert not windowed or len(keys) <= window
        torch.testing.assert_close(
            frames.spread_keys(values, keys, F), expected[:, list(queries)], rtol=0, atol=0, equal_nan=True
        )
    found = frames.assemble(pieces, F)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found[:, later_block(sizes)].isnan().all()


@given(keys=st.lists(st.tuples(st.integers(-2, 4), st.integers(0, 2)), min_size=1, max_size=20), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_named_keys_by_frame_and_at_their_tokens(keys, seed):
    """Keys in any order, some of them twice, some of no frame, against a loop over cells."""
    S, F, curves = 3, 5, noise(seed, 2, len(keys))
    key_frame, key_token = (torch.tensor(column) for column in zip(*keys, strict=True))
    seen = sorted({frame for frame, _ in keys if frame >= 0})
    for frame in range(F):
        there = curves.double()[:, key_frame == frame]
        for mean in (True, False):
            found = frames.by_key_frame(curves, key_frame, F, mean)[:, frame]
            if not there.numel():
                assert found.isnan().all()
                continue
            np.testing.assert_allclose(found, there.mean(1) if mean else there.sum(1), atol=2e-6)
    if not seen:
        return
    spread = frames.spread_tokens(curves, key_frame, key_token, seen, S).unflatten(1, (-1, S))
    for i, frame in enumerate(seen):
        for token in range(S):
            there = curves.double()[:, (key_frame == frame) & (key_token == token)]
            np.testing.assert_allclose(spread[:, i, token], there.mean(1), atol=1e-6)


# --- Golden captures
@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "golden_capture.npz")


@pytest.mark.parametrize("layer", [0, 4])
def test_golden_last_block(golden, layer):
    """Token logits of the last block's first pass -> the frame logits that were recorded beside them."""
    logits = torch.from_numpy(golden[f"blocks9/logits_layer{layer}_lastblock_t1000"])  # [12, 72, 216]
    recorded = golden["blocks9/all_calls_frame_logits"][10, [0, 4].index(layer)]  # call 10: block 2, pass 0
    np.testing.assert_allclose(token_matrix_to_frames(logits, 24), recorded, atol=5e-6)
    figure4 = golden[f"blocks9/figure4_layer{layer}_frame_attention_fp16src"]
    np.testing.assert_allclose(token_matrix_to_frames(logits.half(), 24).mean(1), figure4, atol=5e-6)

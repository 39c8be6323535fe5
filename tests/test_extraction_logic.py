"""The arithmetic of frames, without a model: blocks, means of tokens by frame, where calls land."""

import numpy as np
import pytest
import torch
from helpers.synthetic_caches import reference_means, token_matrix_to_frames
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.caches import frames
from wan.blocks import block_ranges, block_sizes, visible_frames
from wan.errors import ConfigError
from wan.keys import later_block

BLOCKS = st.lists(st.integers(1, 4), min_size=1, max_size=7)
SEEDS = st.integers(0, 2**32)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(frames=st.integers(-5, 200), per_block=st.integers(1, 8), independent=st.booleans())
def test_block_sizes_add_up_or_say_what_would(frames, per_block, independent):
    try:
        sizes = block_sizes(frames, per_block, independent)
    except ConfigError as error:
        suggestions = [int(word) for word in str(error).split("try ")[1].split(" or ")]
        assert all(sum(block_sizes(n, per_block, independent)) == n for n in suggestions)
    else:
        assert sum(sizes) == frames
        assert [f for block in block_ranges(sizes) for f in block] == list(range(frames))


@given(st.tuples(*map(st.integers, [1] * 4, (3, 6, 4, 8))), st.sampled_from([1, 40, 2**21]), SEEDS)
@settings(max_examples=60, deadline=None)
def test_reductions_of_tokens(sizes, chunk, seed):
    """In chunks of one row, of a few rows that do not divide S, and of everything at once."""
    H, S, Fq, Fk = sizes
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
        np.testing.assert_array_equal(frames.spread_keys(values, keys, F), expected[:, list(queries)])
    found = frames.assemble(pieces, F)
    np.testing.assert_array_equal(found, expected)
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

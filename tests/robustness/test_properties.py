"""What must hold for any block structure and any numbers:
frame reductions, frame indices, assembly, the cache round trip.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from helpers.older_caches import same
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.caches import frames, load_cache, save_cache
from experiments.running.sweep import slugs_of
from wan.blocks import (
    block_frames,
    block_ranges,
    earlier_block,
    later_block,
    video_to_latent_frame,
    visible_frames,
)

BLOCKS = st.lists(st.integers(1, 4), min_size=1, max_size=7)
SEEDS = st.integers(0, 2**32)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(H=st.integers(1, 3), S=st.integers(1, 6), Fq=st.integers(1, 4), Fk=st.integers(1, 8), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_frame_reductions_against_loops(H, S, Fq, Fk, seed):
    logits = noise(seed, H, Fq * S, Fk * S) * 3
    probabilities = logits.double().softmax(-1)
    means, mass = np.zeros((H, Fq, Fk)), np.zeros((H, Fq, Fk))
    for q in range(Fq):
        for k in range(Fk):
            rows, columns = slice(q * S, (q + 1) * S), slice(k * S, (k + 1) * S)
            means[:, q, k] = logits.double()[:, rows, columns].mean((1, 2))
            mass[:, q, k] = probabilities[:, rows, columns].sum(2).mean(1)
    np.testing.assert_allclose(frames.token_matrix_to_frames(logits, S), means, atol=5e-6)
    np.testing.assert_allclose(frames.token_matrix_to_frames(probabilities.float(), S) * S, mass, atol=1e-6)


@given(sizes=BLOCKS, sink=st.integers(0, 3), extra=st.integers(0, 4), windowed=st.booleans(), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_assembly_puts_every_cell_where_it_belongs(sizes, sink, extra, windowed, seed):
    """Against a table of cells: a window's pieces land at global frames, what was not attended is NaN."""
    F, window = sum(sizes), sink + max(sizes) + extra if windowed else -1
    cells, pieces = {}, []
    for block, queries in enumerate(block_ranges(sizes)):
        keys = visible_frames(sizes, block, window, sink)
        values = noise(seed + block, 2, len(queries), len(keys))
        pieces.append((list(queries), keys, values))
        cells |= {(q, k): values[:, i, j] for i, q in enumerate(queries) for j, k in enumerate(keys)}
        assert (
            set(queries) <= set(keys) and keys == sorted(set(keys)) and (not windowed or len(keys) <= window)
        )
    matrix = frames.assemble(pieces, F)
    for q in range(F):
        for k in range(F):
            if (q, k) in cells:
                assert torch.equal(matrix[:, q, k], cells[q, k])
            else:
                assert matrix[:, q, k].isnan().all()
    assert matrix[:, later_block(sizes)].isnan().all()


@given(sizes=BLOCKS)
def test_blocks_partition_frames(sizes):
    every = [frame for block in range(len(sizes)) for frame in block_frames(sizes, block)]
    assert every == list(range(sum(sizes)))
    earlier, later = earlier_block(sizes), later_block(sizes)
    own = ~(earlier | later)
    assert (
        torch.equal(later, earlier.T)
        and own.diagonal().all()
        and int(own.sum()) == sum(size**2 for size in sizes)
    )


@given(frame=st.integers(0, 10**6))
def test_video_frames_to_latent_frames(frame):
    latent = video_to_latent_frame(frame)
    assert (latent == 0) == (frame == 0) and (frame == 0 or 4 * (latent - 1) + 1 <= frame <= 4 * latent)


TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # what a figure's XML can hold

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False)
    | st.text(TEXT, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(TEXT, max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    sizes=BLOCKS,
    H=st.integers(1, 3),
    half=st.booleans(),
    prompt=st.text(TEXT, max_size=40),
    seed=st.none() | st.integers(0, 2**62),
    extra=PLAIN,
    noise_seed=SEEDS,
)
@settings(max_examples=40, deadline=None)
def test_any_layer_cache_comes_back(sizes, H, half, prompt, seed, extra, noise_seed):
    F, last = sum(sizes), block_frames(sizes, -1)
    matrix = noise(noise_seed, H, F, F).masked_fill(later_block(sizes), float("nan"))
    matrix = matrix.half() if half else matrix
    cache = {
        "format": "layer",
        "schema_version": 1,
        "prompt": prompt,
        "seed": seed,
        "num_frames": F,
        "num_frame_per_block": 3,
        "frame_seq_length": 5,
        "block_sizes": sizes,
        "num_heads": H,
        "model": "m",
        "weights": "base",
        "weights_file": None,
        "weights_sha256": None,
        "is_logits": True,
        "step": 0,
        "timestep": 1000.0,
        "is_clean_pass": False,
        "layer_index": 0,
        "full_frame_attention": matrix,
        "last_block_frame_attention": matrix[:, last].float().mean(1),
        "query_frames": list(range(F)),
        "key_frames": list(range(F)),
        "last_block_query_frames": last,
        "more": extra,
    }
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a.pt", Path(folder) / "another.pt"
        save_cache(a, cache)
        read = load_cache(a, mmap=False)
        assert same(read, cache)
        save_cache(b, read)
        assert a.read_bytes() == b.read_bytes()


@given(prompts=st.lists(st.text(min_size=1, max_size=100), unique=True, max_size=8))
def test_slugs_are_file_names_and_differ(prompts):
    slugs = slugs_of(prompts)
    assert len(set(slugs.values())) == len(prompts)
    for slug in slugs.values():
        assert (
            slug
            and "/" not in slug
            and "\0" not in slug
            and not slug.startswith(".")
            and len(slug.encode()) < 100
        )

"""Attention calls in whole waves and chunks of keys, and what mass follows; kernels are interpreted."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from helpers.kernels import drawn, require_triton

from wan import reductions

require_triton()
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: test_hopper_attention.py runs them on it"
)
LOG2_E = 1.4426950408889634


def tails_of(logits: torch.Tensor, begins: Sequence[int]) -> torch.Tensor:
    """What an attention kernel that walks from the last key to the first keeps; logits [..., Lq, Lk]."""
    behind = [logits[..., begin:] * LOG2_E for begin in begins]
    maxima = [x.amax(-1) for x in behind]
    sums = [(x - top[..., None]).exp2().sum(-1) for x, top in zip(behind, maxima, strict=True)]
    return torch.stack([torch.stack(x, -2) for x in (sums, maxima)]).float()  # [2, ..., Fk, Lq]


@pytest.mark.parametrize("chunks", [2, 3, 7])
@pytest.mark.parametrize("frames", [1, 5, 6])
def test_chunks_of_keys_are_joined(frames, chunks):
    """To what all keys give, also where frames begin in the middle of chunks, or chunks in that of frames."""
    from wan.kernels import split_keys as waves

    heads, rows, size, head_dim = 3, 20, 42, 16
    q, k, v = (
        drawn(heads, rows, head_dim) * 3,
        *(drawn(heads, frames * size, head_dim + i)[..., i:] for i in (0, 1)),
    )
    logits, chunk = (q @ k.mT).double() / 4, frames * size // chunks
    parts = [
        x.softmax(-1) @ y for x, y in zip(logits.split(chunk, 2), v.double().split(chunk, 1), strict=True)
    ]
    lses = torch.stack([x.logsumexp(-1) for x in logits.split(chunk, 2)]).float()
    out, lse = torch.empty(rows + 2, heads, head_dim)[2:], torch.empty(heads, rows + 3)[:, 3:]
    waves.join(torch.stack(parts).transpose(1, 2).float().contiguous(), lses, out, lse)
    torch.testing.assert_close(
        out.transpose(0, 1).double(), logits.softmax(-1) @ v.double(), atol=2e-6, rtol=0
    )
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), atol=2e-6, rtol=0)
    begins = [frame * size for frame in range(frames)]
    ends = [min(begin // chunk * chunk + chunk, frames * size) for begin in begins]
    tails = torch.cat([tails_of(logits[..., a:b], [0]) for a, b in zip(begins, ends, strict=True)], 2)
    waves.join_tails(tails, lses, lse, chunk, size)
    found = reductions.mass_of_tails(tails[:, None], 1)[0, :, 0]
    expected = logits.softmax(-1).unflatten(-1, (frames, -1)).sum(-1).mean(1)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("frame_size", [0, 40, 60])
@pytest.mark.parametrize("plan", [(30, 1), (20, 3), (0, 8), (29, 2)], ids=str)
def test_a_call_of_which_some_queries_see_chunks(plan, frame_size, monkeypatch):
    """A kernel by formulas stands in; keys lie in a larger buffer, as a cache's do."""
    from wan.kernels import split_keys as waves

    asked, sizes = [], []
    monkeypatch.setattr(waves, "plan", lambda *given: sizes.append(given) or plan)

    def launch(q, k, v, seen, frame_size, are_chunks):
        out, lse, tails = seen
        asked.append((q.shape[1], len(q)))
        logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
        out.copy_(torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.double()))
        lse.copy_(logits.logsumexp(-1))
        for frame in range(0 if tails is None else tails.shape[3]):
            item, begin = slice(None), frame * frame_size
            if are_chunks:
                item, begin = begin // k.shape[1], begin % k.shape[1]
            kept = tails[:, :, :, frame]
            kept.copy_(tails_of(logits[item], [begin])[..., 0, :].view(kept.shape))

    q, k, v = drawn(1, 30, 3, 16) * 3, *(drawn(1, 125 + i, 4, 16)[:, i : 120 + i, 1:] for i in (2, 5))
    out, lse, tails = waves.attend(launch, q, k, v, frame_size, 132)
    assert sizes == [(30, 120, 1, 3, 132)]
    assert asked == [x for x in ((plan[0], 1), (30 - plan[0], plan[1])) if x[0]]
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
    expected = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.double())
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), atol=2e-6, rtol=0)
    if not frame_size:
        assert tails is None
        return
    mass = logits.softmax(-1).unflatten(-1, (-1, frame_size)).sum(-1).mean(2)
    torch.testing.assert_close(reductions.mass_of_tails(tails, 1)[:, :, 0].double(), mass, atol=2e-6, rtol=0)


@pytest.mark.parametrize("heads", [1, 3, 6, 10, 12, 20, 40])
@pytest.mark.parametrize("processors", [114, 132, 148])
def test_who_sees_keys_in_chunks(heads, processors):
    """The queries behind the last whole wave, where that saves time; never those of several items."""
    from wan.kernels import split_keys as waves

    for len_q, len_k in itertools.product((1, 128, 1560, 4680), (77, 512, 4680, 14040, 32760)):
        whole, chunks = waves.plan(len_q, len_k, 1, heads, processors)
        assert (len_k % chunks == 0 and whole % 128 == 0) or chunks == 1
        if chunks == 1:
            assert whole == len_q
            continue
        blocks = -(-len_q // 128)
        waves_as_one = -(-blocks * heads // processors)
        assert -(-(whole // 128) * heads // processors) < waves_as_one
        assert waves.plan(len_q, len_k, 2, heads, processors) == (len_q, 1)
    assert waves.plan(4680, 32760, 1, 12, 132) == (33 * 128, 8)


@pytest.mark.parametrize("frames, query_frames", [(1, 5), (7, 1), (6, 2)])
def test_mass_of_the_tails_of_frames(frames, query_frames):
    """By the two ways of a mass."""
    from wan.kernels import mass as mass_kernel

    logits = drawn(2, 3, 10, 14 * frames).double() * 4
    kept = tails_of(logits, range(0, 14 * frames, 14))
    expected = logits.softmax(-1).unflatten(-1, (frames, -1)).sum(-1).unflatten(2, (query_frames, -1)).mean(3)
    for found in (
        reductions.mass_of_tails(kept, query_frames),
        mass_kernel.mass_of_tails(kept, query_frames),
    ):
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)

"""From tokens to frames: pure reductions and frame indices, no files.

Letters: H heads, S tokens per frame, Lq/Lk query/key tokens, Fq/Fk query/key frames, F frames of the video.
Key and query tokens are frame-major, so a frame is S neighbouring rows or columns. Three quantities share the
name "frame attention"; here they are told apart:

    mean_logit   mean over the token pairs of (query frame, key frame) of q.k/sqrt(D)
    mass         softmax summed over the key frame's tokens, mean over the query frame's; rows sum to 1
    mean_prob    mass / S
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from experiments.caches.formats import AVERAGE

CHUNK_ELEMENTS = 2**20  # 4 MiB of float32: a chunk is still in the CPU's cache when it is summed


def _row_chunks(tokens: Tensor, S: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (head, query frame, float32 rows [n, Lk]) of tokens [H, Lq, Lk], for a moment."""
    H, Lq, Lk = tokens.shape
    n = min(S, max(1, CHUNK_ELEMENTS // Lk))
    # The buffer is reused: a fresh float32 copy of every chunk costs more than its sum
    buffer = torch.empty(n, Lk, device=tokens.device)
    for h in range(H):
        for start in range(0, Lq, S):
            for row in range(start, start + S, n):
                rows = tokens[h, row : min(row + n, start + S)]
                yield h, start // S, buffer[: len(rows)].copy_(rows)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread: for small operations, handing data between cores takes longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def query_frame_curves(tokens: Tensor, S: int) -> Tensor:
    """Mean over each query frame's tokens: [H, Lq, Lk] -> [H, Fq, Lk] float32, a head in each thread."""

    def of_head(head: Tensor) -> Tensor:  # [1, Lq, Lk] -> [Fq, Lk]
        curves = torch.zeros(head.shape[1] // S, head.shape[2], device=head.device)
        for _, q, rows in _row_chunks(head, S):
            curves[q] += rows.sum(0)
        return curves.div_(S)

    with one_thread(), ThreadPoolExecutor(os.cpu_count()) as pool:
        return torch.stack(list(pool.map(of_head, tokens.split(1))))


def softmax_curves(logits: Tensor, S: int) -> Tensor:
    """query_frame_curves of softmax(logits) over the keys: logits [H, Lq, Lk] -> [H, Fq, Lk] float32."""
    H, Lq, Lk = logits.shape
    curves = torch.zeros(H, Lq // S, Lk, device=logits.device)
    for h, q, rows in _row_chunks(logits, S):
        curves[h, q] += rows.softmax(-1).sum(0)
    return curves.div_(S)


def curves_to_frames(curves: Tensor, S: int) -> Tensor:
    """Mean over each key frame's tokens: [..., Lk] -> [..., Fk]."""
    return curves.unflatten(-1, (-1, S)).mean(-1)


def assemble(pieces: Iterable[tuple[Sequence[int], Sequence[int], Tensor]], num_frames: int) -> Tensor:
    """Pieces (query_frames, key_frames, values [H, Fq, Fk, ...]) -> [H, F, F, ...] float32, NaN elsewhere."""
    pieces = list(pieces)
    heads, _, _, *rest = pieces[0][2].shape
    matrix = torch.full((heads, num_frames, num_frames, *rest), float("nan"))
    for query_frames, key_frames, values in pieces:
        rows, columns = torch.as_tensor(query_frames), torch.as_tensor(key_frames)
        matrix[:, rows[:, None], columns] = values.float().cpu()
    return matrix


def stack(value: Callable[..., Tensor], rows: Iterable[int], columns: Iterable[int | None]) -> Tensor:
    """Stack value(row, column), of layers and steps for example -> [rows, columns, ...]."""
    return torch.stack([torch.stack([value(row, column) for column in columns]) for row in rows])


def rows_of(pieces: Iterable[tuple[Sequence[int], Tensor]], num_frames: int, width: int = 0) -> Tensor:
    """Pieces (query_frames, values [H, Fq, ..., n]) -> [H, F, ..., width or the largest n], NaN elsewhere."""
    pieces = list(pieces)
    width = width or max(values.shape[-1] for _, values in pieces)
    heads, _, *between, _ = pieces[0][1].shape
    # NaN stays for query frames of blocks that a stopped run did not reach
    rows = torch.full((heads, num_frames, *between, width), torch.nan)
    for queries, values in pieces:
        rows[:, queries, ..., : values.shape[-1]] = values.float()
    return rows


def spread_keys(values: Tensor, key_frames: Sequence[int], num_frames: int) -> Tensor:
    """Columns of key_frames among all frames: [..., Fk] -> [..., F] float32, NaN elsewhere."""
    spread = torch.full((*values.shape[:-1], num_frames), float("nan"))
    spread[..., torch.as_tensor(key_frames)] = values.float()
    return spread


def by_key_frame(curves: Tensor, key_frame: Tensor, num_frames: int, mean: bool) -> Tensor:
    """Mean or sum of curves [..., Lk] over the tokens of each frame in key_frame [Lk] -> [..., F]."""
    members = (key_frame[:, None] == torch.arange(num_frames)).float()  # [Lk, F]
    counts = members.sum(0)  # [F] tokens of each frame among the keys
    values = curves.float() @ members
    if mean:
        values = values / counts
    return values.masked_fill(counts == 0, float("nan"))


def spread_tokens(
    curves: Tensor, key_frame: Tensor, key_token: Tensor, frames: Sequence[int], S: int
) -> Tensor:
    """Put curves [..., Lk] at their tokens (mean of two slots) -> [..., len(frames)·S], NaN elsewhere."""
    # 1. The column of every key whose frame is shown: frame-major, as tokens are.
    place_of_frame = {frame: place for place, frame in enumerate(frames)}
    keys, columns = [], []
    for key, (frame, token) in enumerate(zip(key_frame.tolist(), key_token.tolist(), strict=True)):
        if frame in place_of_frame:
            keys.append(key)
            columns.append(place_of_frame[frame] * S + token)
    # 2. A token that two slots hold gets the mean of both.
    shape = curves.shape[:-1]
    index = torch.tensor(columns).expand(*shape, -1)
    spread = torch.full((*shape, len(frames) * S), float("nan"))
    return spread.scatter_reduce(-1, index, curves[..., keys].float(), "mean", include_self=False)


# --- Averages of evicted frames, which are of no frame
def most_averages(slot_frame: Tensor) -> int:
    """Return how many averages a row of slots [..., slots] holds at most."""
    if slot_frame.numel() == 0:
        return 0
    return int((slot_frame == AVERAGE).sum(-1).max())


def averages_of_slots(values: Tensor, slot_frame: Tensor, count: int) -> Tensor:
    """Pick values [H, rows, slots] of the averages in slot_frame [slots] -> [H, rows, count], NaN: absent."""
    picked = values[..., slot_frame == AVERAGE].float()
    return torch.nn.functional.pad(picked, (0, count - picked.shape[-1]), value=torch.nan)


def averages_of_tokens(curves: Tensor, key_frame: Tensor, key_token: Tensor, mean: bool) -> Tensor:
    """Take the mean or sum over each average's tokens of curves [H, rows, Lk] -> [H, rows, count].

    The tokens of a slot lie together; an average begins where key_token [Lk] is 0.
    """
    is_average = key_frame == AVERAGE
    number = (is_average & (key_token == 0)).cumsum(0)[is_average]
    return by_key_frame(curves[..., is_average], number - 1, int(number.max()), mean)

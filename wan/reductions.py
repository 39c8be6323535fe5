"""Reduce one attention call from tokens to frames, exactly, from its q and k and without keeping the matrix.

Letters: q [B, Lq, H, D], k [B, Lk, H, D], frames of S tokens each, scale = 1/√D. All results are float32. The
mean logit of a frame pair is linear in q and in k, so it follows from their means. The mass of a key frame is
the sum of the softmax over its keys; on CUDA a kernel takes the call's own log-sum-exp and forms no matrix at
all. A bias, where an edit made one, was added to the logits: [H, Lk] or [H, Fk], -inf where a key was left
out, whose logit is NaN then.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.kernels import mass_kernels
from wan.keys import (
    KeyBias,
    KeyLayout,
    RotaryTable,
    as_index,
    key_frames,
    key_tokens,
    select,
    send,
    slot_frames,
)
from wan.masks import QueryRun, Runs

CHUNK_ELEMENTS = 1 << 26  # logits held at once where they must be formed: 256 MiB in float32


# --- By frame and slot
def frame_values(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    layout: KeyLayout,
    num_query_frames: int,
    mass: bool = True,
    bands: Sequence[int] = (),
    bias: KeyBias | None = None,
    tails: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return frame_logits and, where wanted, frame_mass and frame_logits_by_band, [B, H, Fq, Fk (, bands)].

    Fk are layout.columns. Where a slot is not one frame of its own, slot_logits and slot_mass [B, H, Fq,
    slots] come with them, and tokens_kept [B, Fk]: frame values are then over the kept tokens of a frame, and
    rows of slot_mass sum to 1. attended [B, H, Fq, Fk] comes where a bias leaves keys out. bands are the
    sizes of consecutive bands of the head's dims, tails what the attention kernel itself knows of the mass of
    slots (wings/fa4.py).
    """
    # 1. Values of every slot, or of every token where slots hold tokens of several frames.
    by_slot = layout.chosen is None
    num_slots = len(layout.slots)
    if by_slot:
        means = frame_sums(k, num_slots) / layout.tokens_per_slot
    else:
        means = k.float()
    added: Tensor | None = None
    if bias is not None and by_slot:
        added = send(bias.values, q.device)
    elif bias is not None:
        added = send(bias.per_token(), q.device)
    parts = {"logits": with_bias(frame_logits(q, means, num_query_frames), added)}
    if mass and tails is not None:
        parts["mass"] = mass_of_tails(tails, num_query_frames)
    elif mass and by_slot:
        parts["mass"] = frame_mass(
            q, k, lse, num_query_frames=num_query_frames, num_key_frames=num_slots, bias=added
        )
    elif mass:
        parts["mass"] = token_mass(q, k, num_query_frames, bias=added, lse=lse)
    by_band = []  # a bias belongs to no band: only what was left out shows in it
    if bands:
        for band in frame_logits_by_band(q, means, num_query_frames, bands).unbind(-1):
            by_band.append(band.masked_fill(parts["logits"].isnan(), torch.nan))
    # 2. Of every frame: its one slot, or all slots or tokens that are of it.
    values = {}
    if layout.is_plain:
        values = {f"frame_{name}": part for name, part in parts.items()}
    else:
        if by_slot:
            frames, tokens = slot_frames(layout, len(q)), layout.tokens_per_slot
        else:
            frames, tokens = key_frames(layout, len(q))[0], 1
        members = (frames[:, :, None] == torch.tensor(layout.columns)).float()  # [B, slots or tokens, Fk]
        tokens_kept = members.sum(1).long() * tokens
        members = send(members[:, None], q.device)
        values = {"frame_logits": _visible_mean(parts["logits"], members), "slot_logits": parts["logits"]}
        if mass:
            values |= {"frame_mass": parts["mass"] @ members, "slot_mass": parts["mass"]}
        if not by_slot:
            for name, reduce in (("slot_logits", torch.nanmean), ("slot_mass", torch.sum)):
                if name in values:
                    values[name] = reduce(values[name].unflatten(-1, (num_slots, -1)), -1)
        by_band = [_visible_mean(band, members) for band in by_band]
        values["tokens_kept"] = tokens_kept
    if bands:
        values["frame_logits_by_band"] = torch.stack(by_band, -1)
    if bias is not None and bias.leaves_out:
        values["attended"] = ~values["frame_logits"].isnan()
    return values


def temporal_means(x: Tensor, positions: Sequence[int]) -> Tensor:
    """Return the mean before RoPE of each frame's queries or keys, [B, H, F, temporal pairs, 2], float32.

    x [B, F·S, H, D] is rotated. All tokens of a frame are turned by one angle in time, that of its position,
    so the mean is turned back.
    """
    # Only the dims of time can be turned back: height and width differ from token to token.
    table = RotaryTable(x.shape[-1])
    time = x[..., : table.axes_dim[0]].unflatten(1, (len(positions), -1)).float().mean(2)  # [B, F, H, time]
    turned = torch.view_as_complex(time.unflatten(-1, (-1, 2)).contiguous())
    back = table.freqs_cis(0, send(torch.tensor(positions), x.device)).conj()[:, None]  # [F, 1, pairs]
    return torch.view_as_real((turned * back).to(torch.complex64)).transpose(1, 2).contiguous()


def _visible_mean(logits: Tensor, members: Tensor) -> Tensor:
    """Mean of logits [B, H, Fq, n] that are not NaN over members [B, 1, n, Fk]; NaN where all are."""
    return (logits.nan_to_num() @ members) / ((~logits.isnan()).float() @ members)


def frame_sums(x: Tensor, num_frames: int) -> Tensor:
    """Sum over the tokens of each frame, accumulated in float32: [B, F·S, H, D] -> [B, F, H, D]."""
    x = x.unflatten(1, (num_frames, -1))
    if x.is_cuda:
        # Frames of a few heads have too few sums for a GPU: those of rows first, then those of the frame.
        rows = next(n for n in range(isqrt(x.shape[2]), 0, -1) if x.shape[2] % n == 0)
        x = x.unflatten(2, (rows, -1)).sum(3, dtype=torch.float32)
    return x.sum(2, dtype=torch.float32)


def frame_logits(q: Tensor, frame_key_means: Tensor, num_query_frames: int) -> Tensor:
    """Mean logit of every frame pair from the frames' mean keys [B, Fk, H, D] -> [B, H, Fq, Fk]."""
    # mean over i, j of q_i · k_j = (mean of q) · (mean of k): no logit is formed.
    sums = frame_sums(q, num_query_frames)  # [B, Fq, H, D]
    tokens = q.shape[1] // num_query_frames
    q_means = sums * (q.shape[-1] ** -0.5 / tokens)  # at once: a mean would divide first
    return q_means.transpose(1, 2) @ frame_key_means.permute(0, 2, 3, 1)


def frame_logits_by_band(
    q: Tensor, frame_key_means: Tensor, num_query_frames: int, bands: Sequence[int]
) -> Tensor:
    """Split frame_logits into consecutive bands of the head's dims of these sizes -> [B, H, Fq, Fk, bands].

    Exact: a dot product is the sum of those of its parts, and RoPE turns every pair of dims within one band.
    """
    tokens = q.shape[1] // num_query_frames
    q_means = frame_sums(q, num_query_frames) / tokens * q.shape[-1] ** -0.5
    parts = (x.transpose(1, 2).split(list(bands), -1) for x in (q_means, frame_key_means))  # [B, H, F, size]
    return torch.stack([q_part @ k_part.mT for q_part, k_part in zip(*parts, strict=True)], -1)


def frame_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    num_query_frames: int,
    num_key_frames: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax mass on each key frame, averaged over the queries of each query frame -> [B, H, Fq, Fk].

    bias [H, Fk] is of whole key frames. lse [B, H, Lq] is the call's log-sum-exp, None where nobody knows it.
    Every row of the result sums to 1. On the CPU lse is not used: in bfloat16 it is only good to 5e-5 there,
    and the softmax of a chunk costs the same.
    """
    kernels = mass_kernels(q)
    if lse is not None and kernels:
        # The call's lse counts the bias, the kernel's logits do not: e^bias is still to come.
        mass = kernels.query_frame_mass(q, k, lse, num_key_frames)  # [B, H, Fk, Lq]
        if bias is not None:
            mass = _weighted(mass, bias[..., None])
        return mass.unflatten(3, (num_query_frames, -1)).mean(4).mT
    if bias is not None:
        bias = bias.repeat_interleave(k.shape[1] // num_key_frames, 1)
    by_token = token_mass(q, k, num_query_frames, bias=bias)
    return by_token.unflatten(-1, (num_key_frames, -1)).sum(-1)


def _weighted(mass: Tensor, bias: Tensor) -> Tensor:
    """Multiply a mass by e^bias; what was left out is 0, as it may have overflowed."""
    weight = bias.exp()
    return torch.where(weight > 0, mass * weight, 0)


def mass_of_tails(tails: Tensor, num_query_frames: int) -> Tensor:
    """frame_mass [B, H, Fq, Fk] from the sums that the attention kernel kept, tails [2, B, H, Fk, Lq]."""
    # A tail is the sum of exponentials from a frame's first key to the end: frame n has tail n - tail n + 1.
    # Each was kept under its own running maximum; here all come to that of the first, over all keys.
    sums, maxima = tails.unbind()
    to_the_end = sums * (maxima - maxima[:, :, :1]).exp2() / sums[:, :, :1]  # from each frame's first key on
    mass = to_the_end - F.pad(to_the_end[:, :, 1:], (0, 0, 0, 1))
    return mass.unflatten(3, (num_query_frames, -1)).mean(4).mT


# --- Under a mask of a few intervals
def values_of_runs(
    q: Tensor,
    k: Tensor,
    runs: Sequence[Runs],
    num_query_frames: int,
    num_slots: int,
    around: tuple[int, int],
    around_q: tuple[int, int],
    mass: bool = True,
) -> dict[str, Tensor]:
    """Return frame_logits [B, H, Fq, slots], frame_mass, condition_mass and attended of a masked call.

    runs are those of each item: which keys its queries see (wan/masks.py). q [B, Lq, H, D] and k [B, Lk, H,
    D] have around_q and around tokens of no frame before and behind. Means are over the pairs that are seen,
    NaN where none is. No logit is formed but by kernels.
    """
    items = []
    for item, runs_of_item in enumerate(runs):
        of_item = _values_of_item(
            q[item : item + 1, around_q[0] : q.shape[1] - around_q[1]],
            k[item : item + 1],
            runs=runs_of_item,
            num_query_frames=num_query_frames,
            num_slots=num_slots,
            around=around,
            first_row=around_q[0],
            mass=mass,
        )
        items.append(of_item)
    values = {name: torch.cat([values[name] for values in items]) for name in items[0]}
    if not any(around):
        values.pop("condition_mass", None)
    if bool(values["attended"].all()):
        del values["attended"]
    return values


class Segment(NamedTuple):
    """Consecutive keys of one slot that every query sees together, or not at all."""

    start: int
    stop: int
    slot: int  # -1: of no frame


def segments_of_keys(runs: Runs, len_k: int, num_slots: int, around: tuple[int, int]) -> list[Segment]:
    """Cut the keys of an item where a slot, or an interval that some queries see, begins or ends."""
    first, end = around[0], len_k - around[1]  # keys of frames
    size = (end - first) // num_slots
    cuts = {0, end, len_k} | {first + n * size for n in range(num_slots)}
    for run in runs:
        for interval in run.keys:
            cuts.update(interval)
    segments = []
    for start, stop in pairwise(sorted(cuts)):
        slot = -1
        if first <= start < end:
            slot = (start - first) // size
        segments.append(Segment(start, stop, slot))
    return segments


def _values_of_item(
    q: Tensor,
    k: Tensor,
    runs: Runs,
    num_query_frames: int,
    num_slots: int,
    around: tuple[int, int],
    first_row: int,
    mass: bool,
) -> dict[str, Tensor]:
    """values_of_runs of one item, whose q [1, Fq·S, H, D] are of frames, from first_row of its runs on."""
    _, len_q, heads, head_dim = q.shape
    S, len_k, (before, behind) = len_q // num_query_frames, k.shape[1], around
    # 1. Sums of the keys of each segment, [H, segments, D]. A logit is linear in its key.
    segments = segments_of_keys(runs, len_k, num_slots, around)
    sums_of_keys = [k[0, segment.start : segment.stop].sum(0, dtype=torch.float32) for segment in segments]
    key_sums = torch.stack(sums_of_keys, 1)
    # 2. Sums by query frame and slot: of logits, of pairs that are seen, of mass; and mass on each other key.
    logits = torch.zeros(heads, num_query_frames, num_slots, device=q.device)
    pairs = torch.zeros(num_query_frames, num_slots)
    masses = torch.zeros(heads, num_query_frames, num_slots, device=q.device)
    other_masses = torch.zeros(heads, num_query_frames, before + behind, device=q.device)
    for run in runs:
        # 3. The run's queries of frames, and the segments that they see. Those of frames are neighbours: the
        #    others lie before or behind all of them.
        first, last = max(run.rows[0] - first_row, 0), min(run.rows[1] - first_row, len_q)
        seen = [n for n, segment in enumerate(segments) if is_seen(segment, run)]
        if last <= first or not seen:
            continue
        of_frames = [n for n in seen if segments[n].slot >= 0]
        others = [segments[n] for n in seen if segments[n].slot < 0]
        frame_keys = key_sums[:, as_index(of_frames, q.device)]
        slots = send(torch.tensor([segments[n].slot for n in of_frames], dtype=torch.int64), q.device)
        places = as_index([seen.index(n) for n in of_frames], q.device)
        if mass:
            # The softmax mass of each query on each segment, [H, segments, rows], from log-sum-exps.
            lses = segment_lse(q[:, first:last], k, [segments[n][:2] for n in seen])[0]
            lse = lses.logsumexp(1)  # [H, rows]
            shares = lses.sub_(lse[:, None]).exp_()
        # 4. Add the queries of one frame at once.
        for frame in range(first // S, (last - 1) // S + 1):
            rows = slice(max(first, frame * S), min(last, (frame + 1) * S))
            count = rows.stop - rows.start
            query_sum = q[0, rows].sum(0, dtype=torch.float32) * head_dim**-0.5  # [H, D]
            logits[:, frame].index_add_(1, slots, (frame_keys @ query_sum[..., None])[..., 0])
            for n in of_frames:
                pairs[frame, segments[n].slot] += count * (segments[n].stop - segments[n].start)
            if not mass:
                continue
            in_run = slice(rows.start - first, rows.stop - first)
            masses[:, frame].index_add_(1, slots, shares[:, places, in_run].sum(2))
            for segment in others:
                weights = _mass_of_tokens(
                    q[:, rows], k[:, segment.start : segment.stop], lse[None, :, in_run]
                )
                start = segment.start
                if start >= before:  # columns of keys behind the frames follow those before them
                    start -= len_k - behind - before
                other_masses[:, frame, start : start + weights.shape[2]] += weights[0] * count
    # 5. Means.
    on_device = send(pairs, q.device)
    values = {"frame_logits": (logits / on_device)[None]}
    if mass:
        values |= {"frame_mass": masses[None] / S, "condition_mass": other_masses[None] / S}
    values["attended"] = (on_device > 0).expand(1, heads, -1, -1).clone()
    return values


def is_seen(segment: Segment, run: QueryRun) -> bool:
    """Return whether the queries of a run see a segment of keys."""
    return any(start <= segment.start and segment.stop <= stop for start, stop in run.keys)


def segment_lse(q: Tensor, k: Tensor, segments: Sequence[tuple[int, int]]) -> Tensor:
    """Log-sum-exp of every query on every segment of keys, float32 [B, H, segments, Lq]."""
    kernels = mass_kernels(q)
    if kernels:
        return kernels.segment_lse(q, k, segments)
    parts = []
    for start, stop in segments:
        rows = [logits.logsumexp(-1) for logits in scaled_logits(q, k[:, start:stop])]
        parts.append(torch.cat(rows, 2))
    return torch.stack(parts, 2)


def _mass_of_tokens(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """Mean mass of all queries on each key, [B, H, Lk], where lse [B, H, Lq] is of more keys than these."""
    kernels = mass_kernels(q)
    if kernels:
        return kernels.key_token_mass(q, k, lse)[:, :, 0]
    start, total = 0, torch.zeros(q.shape[0], q.shape[2], k.shape[1], device=q.device)
    for logits in scaled_logits(q, k):
        stop = start + logits.shape[2]
        total += (logits - lse[:, :, start:stop, None]).exp().sum(2)
        start = stop
    return total / q.shape[1]


# --- By word
def word_mass(
    q: Tensor,
    k: Tensor,
    words: Sequence[Sequence[int]],
    lse: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Sum the softmax of every query over the keys of each word -> float32 [B, H, Lq, words].

    words are the keys of each word. With the call's log-sum-exp lse [B, H, Lq] (on CUDA, as in frame_mass)
    only their logits are formed; else all are, some rows at a time. DAAM's map (arXiv 2210.04885).
    """
    # 1. Which of the chosen keys are of which word.
    keys = sorted({key for word in words for key in word})
    members = torch.tensor([[float(key in word) for word in words] for key in keys])  # [keys, words]
    members = send(members, q.device)
    # 2. Their logits, and the log-sum-exp of all.
    of_call: Tensor | None = None
    if lse is not None and q.is_cuda:
        of_call = lse
        k = select(k, keys, 1)
        if bias is not None:
            bias = select(bias, keys, 1)
        if mask is not None:
            mask = select(mask, keys, 3)
    # 3. Rows of queries; one that sees no key has no mass.
    parts, start = [], 0
    for logits in scaled_logits(q, k, bias=bias, mask=mask):
        stop = start + logits.shape[2]
        if of_call is not None:
            of_all, chosen = of_call[:, :, start:stop], logits
        else:
            of_all, chosen = logits.logsumexp(-1), select(logits, keys, 3)
        parts.append((chosen - of_all[..., None]).exp().nan_to_num() @ members)
        start = stop
    return torch.cat(parts, 2)


def mass_of_queries(
    q: Tensor,
    k: Tensor,
    words: Sequence[Sequence[int]],
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Sum the softmax of each word's own queries on every key -> float32 [B, H, words, Lk]."""
    sums = []
    for word in words:
        of_word = mask
        if mask is not None and mask.shape[2] > 1:
            of_word = select(mask, word, 2)
        parts = [
            logits.softmax(-1).nan_to_num().sum(2)
            for logits in scaled_logits(select(q, word, 1), k, bias=bias, mask=of_word)
        ]
        sums.append(torch.stack(parts).sum(0))
    return torch.stack(sums, 2)


# --- By key token
def key_curve(q: Tensor, k: Tensor) -> Tensor:
    """Logit of every key, averaged over all queries of the call -> [B, H, Lk]."""
    q_mean = q.mean(1, dtype=torch.float32) * q.shape[-1] ** -0.5  # [B, H, D]
    curves = [
        (q_mean[:, :, None] @ part.float().permute(0, 2, 3, 1)).squeeze(2)  # [B, H, 1, D] @ [B, H, D, keys]
        for part in k.split(max(1, CHUNK_ELEMENTS // k[:, 0].numel()), dim=1)
    ]
    return torch.cat(curves, -1)


def token_mass(
    q: Tensor, k: Tensor, num_query_frames: int, bias: Tensor | None = None, lse: Tensor | None = None
) -> Tensor:
    """Softmax mass on each key token, averaged over the queries of each query frame -> [B, H, Fq, Lk].

    With the unedited call's lse [B, H, Lq] a kernel forms it on CUDA. Else whole query frames are taken at
    once, as many as fit: their means run along memory. Where not one fits it is taken in pieces.
    """
    kernels = mass_kernels(q)
    if lse is not None and kernels:
        mass = kernels.key_token_mass(q, k, lse, num_query_frames)
        if bias is None:
            return mass
        return _weighted(mass, bias[:, None])
    # 1. How many query frames fit at once; where not one does, its queries go in pieces.
    S = q.shape[1] // num_query_frames
    frames = CHUNK_ELEMENTS // (k.shape[0] * k.shape[1] * k.shape[2] * S)
    if frames == 0:
        sums = [
            torch.stack([rows.softmax(-1).sum(2) for rows in scaled_logits(frame, k, bias)]).sum(0)
            for frame in q.split(S, dim=1)
        ]
        return torch.stack(sums, 2) / S
    # 2. Whole frames: [B, H, frames·S, Lk] -> [B, H, frames, Lk].
    keys = k.permute(0, 2, 3, 1).float()  # [B, H, D, Lk]
    means = [
        _logits(part, keys, bias).softmax(-1).unflatten(2, (-1, S)).mean(3)
        for part in q.split(frames * S, dim=1)
    ]
    if len(means) == 1:
        return means[0]
    return torch.cat(means, 2)


def key_token_means(
    q: Tensor, k: Tensor, lse: Tensor | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean logit and softmax mass of every key token, means over all queries -> [B, H, Lk] each.

    lse is used on CUDA alone, as in frame_mass.
    """
    kernels = mass_kernels(q)
    if lse is not None and kernels:
        logits, mass = (x[:, :, 0] for x in kernels.key_token_means(q, k, lse))
        if bias is not None:
            mass = _weighted(mass, bias)
    else:
        logits, mass = key_curve(q, k), token_mass(q, k, 1, bias=bias)[:, :, 0]
    return with_bias(logits, bias), mass


def key_names(layout: KeyLayout | None, k: Tensor) -> dict[str, Tensor]:
    """key_frame, key_token and key_position of every key, int64 [B, Lk], where key_frames do not say it."""
    if layout is None or layout.is_in_place:
        return {}
    frames, positions = key_frames(layout, len(k))
    return {"key_frame": frames, "key_token": key_tokens(layout, len(k)), "key_position": positions}


def token_matrix(
    q: Tensor,
    k: Tensor,
    is_logits: bool,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Logits or probabilities of every token pair -> [B, H, Lq, Lk] on the CPU, in dtype.

    Formed in chunks of float32 and copied straight into the result, so that the device holds one chunk at a
    time. Where a bias is -inf, or a mask hides a key, logits are NaN and probabilities 0.
    """
    batch, len_q, heads, _ = q.shape
    out = torch.empty(batch, heads, len_q, k.shape[1], dtype=dtype)
    start = 0
    for rows in scaled_logits(q, k, bias=bias, mask=mask):
        if not is_logits:
            rows = rows.softmax(-1)
        elif bias is not None or mask is not None:
            rows = absent(rows)
        rows = rows.to(dtype)
        pieces = zip(out.flatten(0, 1), rows.flatten(0, 1), strict=True)  # contiguous: straight copies
        for target, source in pieces:
            target[start : start + len(source)].copy_(source)
        start += rows.shape[2]
    return out


# --- Logits, some query rows at a time
def scaled_logits(
    q: Tensor, k: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield scaled float32 logits [B, H, rows, Lk], some query rows at a time; -inf where a mask hides."""
    keys = k.permute(0, 2, 3, 1).float()  # [B, H, D, Lk]
    rows = max(1, CHUNK_ELEMENTS // (k.shape[0] * k.shape[1] * k.shape[2]))
    for start in range(0, q.shape[1], rows):
        chunk = slice(start, start + rows)
        logits, hidden = _logits(q[:, chunk], keys, bias), rows_of_mask(mask, chunk)
        if hidden is not None and hidden.dtype == torch.bool:
            logits = logits.masked_fill(~hidden, -torch.inf)
        elif hidden is not None:
            logits = logits + hidden
        yield logits


def rows_of_mask(mask: Tensor | None, rows: slice) -> Tensor | None:
    """Return the rows of a mask [..., Lq or 1, Lk] that are of some queries."""
    if mask is None or mask.shape[-2] == 1:
        return mask
    return mask[..., rows, :]


def visible_sums(
    q: Tensor, k: Tensor, groups: int, mask: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of logits, numbers of their pairs and mean softmax of every key, by group of queries.

    q [B, Lq, H, D] are groups of equal size, k [B, Lk, H, D] -> [B, H, groups, Lk] each. A mask (boolean, or
    what is added to the logits) and a bias [H, Lk] say which pairs count: those whose logit is not -inf.
    """
    size = q.shape[1] // groups
    of_groups = []
    for group in range(groups):
        rows = slice(group * size, (group + 1) * size)
        parts = []
        for logits in scaled_logits(q[:, rows], k, bias=bias, mask=rows_of_mask(mask, rows)):
            is_seen = logits > -torch.inf
            # A query that sees no key at all gives 0 / 0; it has no mass.
            mass = logits.softmax(-1).nan_to_num().sum(2)
            parts.append(torch.stack([logits.masked_fill(~is_seen, 0).sum(2), is_seen.sum(2), mass]))
        of_groups.append(torch.stack(parts).sum(0))
    sums, pairs, mass = torch.stack(of_groups, 3).unbind()
    return sums, pairs, mass / size


def _logits(q: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """Scaled float32 logits [B, H, Lq, Lk] of queries [B, Lq, H, D] and keys [B, H, D, Lk], plus bias."""
    logits = (q.transpose(1, 2).float() * q.shape[-1] ** -0.5) @ keys
    if bias is None:
        return logits
    return logits + bias[:, None]


def with_bias(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias [H, keys] to logits [B, H, ..., keys]; NaN where it is -inf."""
    if bias is None:
        return logits
    return absent(logits + bias.view(bias.shape[0], *[1] * (logits.ndim - 3), bias.shape[1]))


def absent(logits: Tensor) -> Tensor:
    """Put NaN in place of the -inf of a bias."""
    return logits.masked_fill(logits == -torch.inf, torch.nan)

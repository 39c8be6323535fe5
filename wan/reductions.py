"""Exact statistics of one attention call from its q and k, without keeping the matrix.

Letters: q [B, Lq, H, D], k [B, Lk, H, D], frames of S tokens each, scale = 1/√D. All results are float32. The
mean logit of a frame pair is linear in q and in k, so it follows from their means. The mass of a key frame is
the sum of the softmax over its keys; on CUDA a kernel takes the call's own log-sum-exp and forms no matrix at
all.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wan.keys import Gathering, KeyLayout, key_frames, key_tokens, segments_of
from wan.rope import RotaryTable

# --- Exact statistics of one attention call from its q and k, without keeping the matrix
CHUNK_ELEMENTS = 1 << 26  # logits held at once where they must be formed: 256 MiB in float32


def frame_means(x: Tensor, num_frames: int) -> Tensor:
    """Mean over the tokens of each frame, accumulated in float32: [B, F·S, H, D] -> [B, F, H, D]."""
    return x.unflatten(1, (num_frames, -1)).mean(2, dtype=torch.float32)


def frame_logits(q: Tensor, frame_key_means: Tensor, num_query_frames: int) -> Tensor:
    """Mean logit of every frame pair from the frames' mean keys [B, Fk, H, D] -> [B, H, Fq, Fk]."""
    return logits_of_sums(frame_sums(q, num_query_frames), frame_key_means, q.shape[1] // num_query_frames)


def frame_sums(x: Tensor, num_frames: int) -> Tensor:
    """Sum over the tokens of each frame, in float32: [B, F·S, H, D] -> [B, F, H, D]."""
    return x.unflatten(1, (num_frames, -1)).sum(2, dtype=torch.float32)


def logits_of_sums(q_sums: Tensor, frame_key_means: Tensor, tokens: int) -> Tensor:
    """frame_logits from the sums of query frames of so many tokens, [B, Fq, H, D] -> [B, H, Fq, Fk]."""
    q_means = q_sums * (q_sums.shape[-1] ** -0.5 / tokens)  # at once: a mean would divide first
    return q_means.transpose(1, 2) @ frame_key_means.permute(0, 2, 3, 1)


def frame_logits_by_band(
    q: Tensor, frame_key_means: Tensor, num_query_frames: int, bands: Sequence[int]
) -> Tensor:
    """frame_logits split into consecutive bands of the head's dims of these sizes -> [B, H, Fq, Fk, bands].

    Exact: a dot product is the sum of those of its parts, and RoPE turns every pair of dims within one band.
    """
    q_means = frame_means(q, num_query_frames) * q.shape[-1] ** -0.5
    parts = (x.transpose(1, 2).split(list(bands), -1) for x in (q_means, frame_key_means))  # [B, H, F, size]
    return torch.stack([q_part @ k_part.mT for q_part, k_part in zip(*parts, strict=True)], -1)


def kernels_take(q: Tensor) -> bool:
    """Whether the Triton kernels are for such a call."""
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)


def key_curve(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logit of every key, averaged over the queries of the call that see it -> [B, H, Lk]; NaN for none."""
    if mask is not None:
        return absent(torch.cat([*scaled_logits(q, k, mask)], 2)).nanmean(2)
    q_mean = q.mean(1, dtype=torch.float32) * q.shape[-1] ** -0.5  # [B, H, D]
    curves = [
        (q_mean[:, :, None] @ part.float().permute(0, 2, 3, 1)).squeeze(2)  # [B, H, 1, D] @ [B, H, D, keys]
        for part in k.split(max(1, CHUNK_ELEMENTS // k[:, 0].numel()), dim=1)
    ]
    return torch.cat(curves, -1)


def frame_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    num_query_frames: int,
    num_key_frames: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax mass on each key frame, averaged over the queries of each query frame -> [B, H, Fq, Fk].

    bias [H, Fk] was added to the logits of whole key frames, -inf where a frame was left out.
    lse [B, H, Lq] is the call's log-sum-exp. Every row of the result sums to 1 over the key frames. On the
    CPU lse is not used: in bfloat16 it is only good to 5e-5 there, and the softmax of a chunk costs the same.
    """
    if kernels_take(q):
        from wan.kernels.mass import query_frame_mass  # Triton is there only beside CUDA

        mass = query_frame_mass(q, k, lse, num_key_frames)  # [B, H, Fk, Lq]
        if bias is not None:
            weight = bias.exp()[None, :, :, None]
            mass = torch.where(weight > 0, mass * weight, 0)  # what was left out may have overflowed
        return mass.unflatten(3, (num_query_frames, -1)).mean(4).mT
    if bias is not None:
        bias = bias.repeat_interleave(k.shape[1] // num_key_frames, 1)
    return token_mass(q, k, num_query_frames, bias).unflatten(-1, (num_key_frames, -1)).sum(-1)


def mass_of_tails(tails: Tensor, num_query_frames: int) -> Tensor:
    """frame_mass [B, H, Fq, Fk] from the sums that the attention kernel kept, tails [2, B, H, Fk, Lq]."""
    if tails.is_cuda:
        from wan.kernels import mass as mass_kernel

        return mass_kernel.mass_of_tails(tails, num_query_frames)
    sums, maxima = tails.unbind()
    to_the_end = sums * (maxima - maxima[:, :, :1]).exp2() / sums[:, :, :1]  # from each frame's first key on
    mass = to_the_end - F.pad(to_the_end[:, :, 1:], (0, 0, 0, 1))
    return mass.unflatten(3, (num_query_frames, -1)).mean(4).mT


def segment_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    num_query_frames: int,
    bounds: Tensor,
    unequal: range,
    tokens_per_slot: int,
    tails: Tensor | None = None,
) -> Tensor:
    """frame_mass for segments of unequal length, which may differ between batch items -> [B, H, Fq, n].

    Segment i of an item is its keys bounds[i] .. bounds[i + 1] - 1: bounds [B or 1, n + 1]. Those before and
    after unequal have tokens_per_slot keys each. No number of bounds is read by the host. tails [2, B, H,
    slots, Lq] are those of mass_of_tails; like lse they are used on CUDA alone.
    """
    count = bounds.shape[1] - 1
    before, after = unequal.start, count - unequal.stop
    start, stop = before * tokens_per_slot, k.shape[1] - after * tokens_per_slot
    if kernels_take(q):
        by_slot = None if tails is None else mass_of_tails(tails, num_query_frames)
        if not unequal:
            return frame_mass(q, k, lse, num_query_frames, count) if by_slot is None else by_slot
        from wan.kernels import mass as map_kernel
        from wan.kernels import mass as mass_kernel
        from wan.kernels import mass as segment_kernel

        if by_slot is not None:
            whole = by_slot.mT
        elif before + after:
            whole = mass_kernel.query_frame_mass(q, k, lse, before + after, left_out=range(start, stop))
        else:
            whole = lse.new_empty(*lse.shape[:2], 0, q.shape[1])
        # by token first: to the kernel of rows every short segment is a whole tile
        tokens = map_kernel.key_token_mass(q, k[:, start:stop], lse, num_query_frames)
        return segment_kernel.segment_sums(whole, tokens, bounds.to(q.device), unequal, start)
    inner = bounds.expand(len(q), -1)[:, before : unequal.stop + 1].to(q.device) - start
    mass = token_mass(q, k, num_query_frames)  # [B, H, Fq, Lk]
    slots = [mass[..., :start], mass[..., stop:]]
    sums = [x.unflatten(-1, (-1, tokens_per_slot)).sum(-1) if x.shape[-1] else x for x in slots]
    return torch.cat([sums[0], _run_sums(mass[..., start:stop], inner), sums[1]], -1)


def _run_sums(x: Tensor, bounds: Tensor) -> Tensor:
    """Sums of x [B, H, Fq, n] over the runs between bounds [B, runs + 1]: differences of sums in float64."""
    sums = F.pad(x.double().cumsum(-1), (1, 0))
    at = bounds.long()[:, None, None].expand(*x.shape[:3], -1)
    return sums.gather(-1, at).diff(dim=-1).float()


def masked_frames(
    q: Tensor, k: Tensor, mask: Tensor, num_query_frames: int, num_key_frames: int, mass: bool
) -> dict[str, Tensor]:
    """frame_logits and, with mass, frame_mass under a mask [Lq, Lk] -> [B, H, Fq, Fk] each.

    Means are over the token pairs that may attend. Logits of frame pairs that have none are NaN.
    """
    pairs, masses = [], []
    for rows in scaled_logits(q, k, mask):
        pairs.append(absent(rows).unflatten(-1, (num_key_frames, -1)))
        masses.append(rows.softmax(-1).unflatten(-1, (num_key_frames, -1)).sum(-1))
    logits = torch.cat(pairs, 2).unflatten(2, (num_query_frames, -1))  # [B, H, Fq, S, Fk, S]
    values = {"frame_logits": logits.nanmean((3, 5))}
    return values | (
        {"frame_mass": torch.cat(masses, 2).unflatten(2, (num_query_frames, -1)).mean(3)} if mass else {}
    )


def token_mass(q: Tensor, k: Tensor, num_query_frames: int, bias: Tensor | None = None) -> Tensor:
    """Softmax mass on each key token, averaged over the queries of each query frame -> [B, H, Fq, Lk].

    bias [H, Lk] was added to the logits. Whole query frames are taken at once, as many as fit: their means
    run along memory. Where not one fits it is taken in pieces.
    """
    S = q.shape[1] // num_query_frames
    frames = CHUNK_ELEMENTS // (k.shape[0] * k.shape[1] * k.shape[2] * S)
    if frames == 0:
        sums = [
            torch.stack([_softmax_(rows).sum(2) for rows in scaled_logits(frame, k, bias=bias)]).sum(0)
            for frame in q.split(S, dim=1)
        ]
        return torch.stack(sums, 2) / S
    keys = _keys_last(k)
    means = [
        _softmax_(_logits(part, keys, bias)).unflatten(2, (-1, S)).mean(3)
        for part in q.split(frames * S, dim=1)
    ]
    return means[0] if len(means) == 1 else torch.cat(means, 2)


def key_token_means(q: Tensor, k: Tensor, lse: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean logit and softmax mass of every key token, means over all queries -> [B, H, Lk] each.

    bias [H, Lk] was added to the logits, -inf where a key was left out: NaN and 0 there. lse is used on CUDA
    alone, as in frame_mass.
    """
    if kernels_take(q):
        from wan.kernels import mass as map_kernel  # Triton is there only beside CUDA

        logits, mass = (x[:, :, 0] for x in map_kernel.key_token_means(q, k, lse))
        if bias is not None:
            weight = bias.exp()
            mass = torch.where(weight > 0, mass * weight, 0)  # what was left out may have overflowed
    else:
        logits, mass = key_curve(q, k), token_mass(q, k, 1, bias)[:, :, 0]
    return (logits if bias is None else absent(logits + bias)), mass


def token_matrix(
    q: Tensor,
    k: Tensor,
    is_logits: bool,
    dtype: torch.dtype,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Logits or probabilities of every token pair -> [B, H, Lq, Lk] on the CPU, in dtype.

    Formed in chunks of float32 and copied straight into the result, so that the device holds one chunk at a
    time. Where a mask [Lq, Lk] is False, or a bias [H, Lk] is -inf, logits are NaN and probabilities 0.
    """
    batch, len_q, heads, _ = q.shape
    out = torch.empty(batch, heads, len_q, k.shape[1], dtype=dtype)
    start = 0
    for rows in scaled_logits(q, k, mask, bias):
        if not is_logits:
            rows = rows.softmax(-1)
        elif mask is not None or bias is not None:
            rows = absent(rows)
        rows = rows.to(dtype)
        pieces = zip(out.flatten(0, 1), rows.flatten(0, 1), strict=True)  # contiguous: straight copies
        for target, source in pieces:
            target[start : start + len(source)].copy_(source)
        start += rows.shape[2]
    return out


def scaled_logits(
    q: Tensor, k: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield scaled float32 logits [B, H, rows, Lk], some query rows at a time; -inf where mask is False.

    bias [H, Lk] is added to them.
    """
    keys = _keys_last(k)
    rows = max(1, CHUNK_ELEMENTS // (k.shape[0] * k.shape[1] * k.shape[2]))
    masks = [None] * -(-q.shape[1] // rows) if mask is None else mask.split(rows)
    for part, part_mask in zip(q.split(rows, dim=1), masks, strict=True):
        logits = _logits(part, keys, bias)
        yield logits if part_mask is None else logits.masked_fill(~part_mask, -torch.inf)


def _keys_last(k: Tensor) -> Tensor:
    """Keys [B, Lk, H, D] -> float32 [B, H, D, Lk]."""
    return k.permute(0, 2, 3, 1).float()


def _logits(q: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    """Scaled float32 logits [B, H, Lq, Lk] of queries [B, Lq, H, D] and keys [B, H, D, Lk], plus bias."""
    logits = (q.transpose(1, 2).float() * q.shape[-1] ** -0.5) @ keys
    return logits if bias is None else logits + bias[:, None]


def _softmax_(logits: Tensor) -> Tensor:
    """Softmax over the last dim; on a CPU in the place of logits, as new memory takes time there."""
    if logits.device.type != "cpu" or logits.requires_grad:
        return logits.softmax(-1)
    return torch.softmax(logits, -1, out=logits)


def absent(logits: Tensor) -> Tensor:
    """Logits with NaN in place of the -inf of a mask."""
    return logits.masked_fill(logits == -torch.inf, torch.nan)


# --- What is kept of one call by frame, whatever its keys are: frames, averages of frames, or chosen tokens
class Call(NamedTuple):
    """One call of self-attention: q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq].

    tails [2, B, H, slots, Lq] are what the attention kernel itself knows of the mass. exchanged: q came from
    other processes, into memory that the next layer takes too.
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    layout: KeyLayout
    num_query_frames: int
    tails: Tensor | None = None
    exchanged: bool = False


def of_frames(call: Call, means: Tensor, mass: bool, rope_bands: bool) -> dict[str, Tensor]:
    """frame_logits and, where wanted, frame_mass and frame_logits_by_band of a call, [B, H, Fq, Fk].

    means [B, segments, H, D] are mean keys: of slots, and of runs in place of slots of chosen tokens.
    Where a slot is not one frame of its own, slot_logits and slot_mass [B, H, Fq, slots] come with them, and
    tokens_kept [B, Fk]: then frame values are over the kept tokens of a frame, and rows of slot_mass sum to
    1.
    """
    layout = call.layout
    segments = None if layout.is_plain else segments_of(layout)
    parts = {"logits": frame_logits(call.q, means, call.num_query_frames)}
    if rope_bands:
        bands = list(RotaryTable(call.q.shape[-1]).bands.values())
        by_band = frame_logits_by_band(call.q, means, call.num_query_frames, bands)
        parts["logits_by_band"] = by_band
    if mass:
        parts["mass"] = mass_of(call)
    if segments is None:
        return {f"frame_{name}": values for name, values in parts.items()}
    values = _gathered(parts, segments.gathering(call.q.device), kernels_take(call.q))
    return values | {"tokens_kept": segments.tokens_kept.expand(len(call.q), -1).clone()}


def mass_of(call: Call) -> Tensor:
    """Mass of every slot, or segment where some slots hold chosen tokens -> [B, H, Fq, n]."""
    q, k, lse, layout = call.q, call.k, call.lse, call.layout
    if layout.chosen is not None:
        segments, tokens = segments_of(layout), layout.tokens_per_slot
        bounds = segments.gathering(q.device).bounds
        return segment_mass(q, k, lse, call.num_query_frames, bounds, segments.chosen, tokens, call.tails)
    if call.tails is not None:
        return mass_of_tails(call.tails, call.num_query_frames)
    return frame_mass(q, k, lse, call.num_query_frames, len(layout.slots))


def of_keys(layout: KeyLayout | None, k: Tensor) -> dict[str, Tensor]:
    """key_frame, key_token and key_position of every key, int64 [B, Lk], where key_frames do not say it."""
    if layout is None or layout.is_in_place:
        return {}
    frames, positions = key_frames(layout, len(k))
    return {"key_frame": frames, "key_token": key_tokens(layout, len(k)), "key_position": positions}


def _gathered(parts: dict[str, Tensor], by: Gathering, with_kernel: bool) -> dict[str, Tensor]:
    """Values of segments [B, H, Fq, n] by frame and by slot; logits by band by frame alone."""
    found: dict[str, Tensor] = {}
    if with_kernel:
        from wan.kernels import mass as segment_kernel  # Triton is there only beside CUDA

        means, sums = (by.frame_means, by.slot_means), (by.frame_sums, by.slot_sums)
        for name, values in segment_kernel.gathered(parts["logits"], parts.get("mass"), means, sums).items():
            found |= {f"frame_{name}": values[0], f"slot_{name}": values[1]}
    else:
        found |= {
            "frame_logits": parts["logits"] @ by.frame_means,
            "slot_logits": parts["logits"] @ by.slot_means,
        }
        if "mass" in parts:
            found |= {"frame_mass": parts["mass"] @ by.frame_sums, "slot_mass": parts["mass"] @ by.slot_sums}
    if "logits_by_band" in parts:
        bands = [band @ by.frame_means for band in parts["logits_by_band"].unbind(-1)]
        found["frame_logits_by_band"] = torch.stack(bands, -1)
    return found

"""How each format is read: one pass of a cache as profiles, matrices and key curves of its layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as remember
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.caches import averages, frames
from experiments.caches.common import QUANTITIES, Cache, PassTag, Tokens
from experiments.caches.errors import CacheError
from experiments.caches.schema import AtlasCache, Figure4Cache, InferenceCache, LayerCache
from wan.blocks import block_frames, block_ranges
from wan.errors import quoted
from wan.safe_load import UnreadableError, verify


class LayerValues(NamedTuple):
    """Frame attention of one layer."""

    profile: Tensor  # [H, F], mean over the queries of the last block
    matrix: Tensor | None  # [H, rows, F]
    key_curve: Tensor | None  # [H, Lk]
    averages: Tensor | None = None  # [H, rows, averages] beside the matrix: keys that are of no frame


@dataclass(frozen=True)
class PassReading:
    """One pass of a cache: which frames its values are of, and how the values of a layer are had."""

    at: PassTag
    layers: Sequence[int]
    key_frames: Sequence[int]
    matrix_rows: Sequence[int]  # query frames of the matrix, () where there is none
    read: Callable[[int], LayerValues]
    query_frames: Sequence[int] | None = None  # what the profile averages; None: the last block
    num_averages: int = 0  # columns of LayerValues.averages


def read_pass(cache: Cache, step: int | None, quantity: str) -> PassReading:
    """One pass (None: the first) in a quantity. Raises CacheError for one that the cache does not hold."""
    if quantity not in QUANTITIES:
        raise CacheError(f"quantity {quoted(quantity)} is not one of {', '.join(QUANTITIES)}")
    if not isinstance(cache, (Figure4Cache, LayerCache, InferenceCache, AtlasCache)):
        raise CacheError(
            f"a cache of format {cache.format} holds no values per frame; give one of figure4, inference, "
            "layer or atlas"
        )
    at = _pick(cache.passes(), step)
    if isinstance(cache, Figure4Cache):
        return _figure4(cache, at, quantity)
    if isinstance(cache, LayerCache):
        return _layer(cache, at, quantity)
    if isinstance(cache, InferenceCache):
        return _inference(cache, at, quantity)
    return _atlas(cache, at, quantity)


def _pick(passes: Sequence[PassTag], step: int | None) -> PassTag:
    for at in passes:
        if step is None or at.step == step:
            return at
    known = ", ".join("an unrecorded one" if at.step is None else str(at.step) for at in passes)
    raise CacheError(f"pass {step} is not in this cache; it has {known}")


def _figure4(cache: Figure4Cache, at: PassTag, quantity: str) -> PassReading:
    entries = {entry.layer: entry for entry in cache.entries}
    queries, keys, S = cache.query_frames, cache.key_frames, cache.frame_seq_length
    by_means = quantity == "mean_logit"

    @remember
    def read(layer: int) -> LayerValues:
        entry = entries[layer]
        if entry.token_logits is not None or entry.token_probabilities is not None:
            return _from_tokens(entry, keys, cache, quantity)
        curve = _verified(entry.key_curve) if by_means and entry.key_curve is not None else None
        spread = None if curve is None else _at_frames(curve, entry.named_keys, keys, S)
        if curve is not None and entry.frame_logits is None:
            profile = _by_frame(curve.float(), entry.named_keys, keys, cache, mean=True)
            return LayerValues(profile, None, spread)
        matrix = _in_quantity(entry.frame_logits, entry.frame_mass, S, quantity)
        slots = _slots_in_quantity(entry.slot_logits, entry.slot_mass, S, quantity)
        gone = None
        if slots is not None and entry.slot_frame is not None:
            gone = averages.averages_of_slots(slots, entry.slot_frame, count)
        return LayerValues(matrix.mean(1), matrix, spread, gone)

    count = max(_averages_of(entry) for entry in entries.values())
    return PassReading(at, list(entries), keys, queries, read, queries, count)


def _layer(cache: LayerCache, at: PassTag, quantity: str) -> PassReading:
    stored = cache.quantity or ("mean_logit" if cache.is_logits else "mean_prob")
    matrix, profile = (
        _convert(_verified(values).float(), stored, quantity, cache.frame_seq_length)
        for values in (cache.full_frame_attention, cache.last_block_frame_attention)
    )
    gone = cache.average_attention
    if gone is not None:
        gone = _convert(_verified(gone).float(), stored, quantity, cache.frame_seq_length)
    return PassReading(
        at,
        [cache.layer_index],
        _seen(profile),
        cache.query_frames,
        lambda layer: LayerValues(profile, matrix, None, gone),
        cache.last_block_query_frames,
        0 if gone is None else gone.shape[-1],
    )


def _inference(cache: InferenceCache, at: PassTag, quantity: str) -> PassReading:
    """The last captured block's calls of one pass."""
    by_layer = {call.layer: call for call in reversed(cache.last_calls()) if call.step == at.step}
    first = by_layer[min(by_layer)]

    @remember
    def read(layer: int) -> LayerValues:
        return _from_tokens(by_layer[layer], by_layer[layer].key_frames, cache, quantity)

    return PassReading(
        first.tag,
        sorted(by_layer),
        first.key_frames,
        first.query_frames,
        read,
        first.query_frames,
        max(_averages_of(call) for call in by_layer.values()),
    )


def _atlas(cache: AtlasCache, at: PassTag, quantity: str) -> PassReading:
    p, S, layers = cache.passes().index(at), cache.frame_seq_length, cache.layers
    last = block_frames(cache.block_sizes, cache.done - 1)
    by_means = quantity == "mean_logit"
    logits, mass, last_logits, curves = (
        None if values is None else values[:, p]
        for values in (
            cache.frame_logits,
            cache.frame_mass,
            cache.last_block_frame_logits if by_means else None,  # exact where the matrix is quantised
            cache.key_curve if by_means else None,
        )
    )
    matrices = None
    if last_logits is None or logits is not None:
        matrices = _in_quantity(logits, mass, S, quantity)  # [layers, H, F, F]
        if last_logits is None:
            last = _last_block_with(matrices, cache.block_sizes, last)
    if last_logits is not None:
        profiles = _verified(last_logits)
    else:
        assert matrices is not None
        profiles = matrices[..., last, :].float().mean(-2)
    slots = _slots_in_quantity(cache.slot_logits, cache.slot_mass, S, quantity)
    has_slots = slots is not None and matrices is not None
    count = averages.most_averages(cache.slot_frame) if has_slots and cache.slot_frame is not None else 0
    keys = _seen(profiles)
    columns = (torch.tensor(keys)[:, None] * S + torch.arange(S)).flatten()

    def curve_of(i: int, curve: Tensor) -> Tensor:
        if cache.key_frame is None or cache.key_token is None:
            return curve[:, columns]
        return frames.spread_tokens(curve, cache.key_frame[i], cache.key_token[i], keys, S)

    def averages_at(i: int) -> Tensor | None:
        if slots is None or cache.slot_frame is None or not count:
            return None
        return averages.averages_of_blocks(slots[i, p], cache.slot_frame[i], cache.block_sizes)

    def read(layer: int) -> LayerValues:
        i = layers.index(layer)
        return LayerValues(
            profiles[i],
            None if matrices is None else matrices[i],
            None if curves is None else curve_of(i, _verified(curves)[i]),
            averages_at(i),
        )

    rows = [] if matrices is None else list(range(cache.num_frames))
    return PassReading(at, layers, keys, rows, read, last, count)


def _last_block_with(matrices: Tensor, block_sizes: list[int], last: list[int]) -> list[int]:
    """The last block's frames, or those of the last block that has the pass: the first one may have more."""
    for block in reversed(block_ranges(block_sizes)):
        if block.start <= last[0] and not matrices[..., block.start, :].isnan().all():
            return list(block)
    return last


def _from_tokens(entry: Tokens, keys: Sequence[int], cache: Cache, quantity: str) -> LayerValues:
    """A token matrix [1, H, Lq, Lk], logits or probabilities, read once."""
    S = cache.frame_seq_length
    if entry.token_logits is not None:
        by_means = quantity == "mean_logit"
        reduce = frames.query_frame_curves if by_means else frames.softmax_curves
        curves = reduce(_verified(entry.token_logits)[0], S)
    elif quantity == "mean_logit":
        raise CacheError("this cache holds probabilities, no mean_logit; it has mass, mean_prob")
    else:
        assert entry.token_probabilities is not None
        curves = frames.query_frame_curves(_verified(entry.token_probabilities)[0], S)
    matrix = _by_frame(curves, entry.named_keys, keys, cache, mean=quantity != "mass")
    gone = None
    key_frame, key_token, _ = entry.named_keys
    if key_frame is not None and key_token is not None and _averages_of(entry):
        gone = averages.averages_of_tokens(curves, key_frame, key_token, mean=quantity != "mass")
    return LayerValues(matrix.mean(1), matrix, _at_frames(curves.mean(1), entry.named_keys, keys, S), gone)


NamedKeys = tuple[Tensor | None, Tensor | None, Tensor | None]  # frame, token and position of every key


def _by_frame(curves: Tensor, named: NamedKeys, keys: Sequence[int], cache: Cache, mean: bool) -> Tensor:
    """Curves per key [..., Lk] by frame [..., F], as the mean or the sum of a frame's tokens."""
    S = cache.frame_seq_length
    if named[0] is not None:
        return frames.by_key_frame(curves, named[0], cache.num_frames, mean)
    values = frames.curves_to_frames(curves, S) * (1 if mean else S)
    return frames.spread_keys(values, keys, cache.num_frames)


def _at_frames(curve: Tensor, named: NamedKeys, keys: Sequence[int], S: int) -> Tensor:
    """A curve per key [..., Lk] at the tokens of key frames [..., Fk·S]; NaN for tokens that did not stay."""
    frame, token, _ = named
    return curve if frame is None or token is None else frames.spread_tokens(curve, frame, token, keys, S)


def _averages_of(entry: Tokens) -> int:
    """How many averages of frames that are gone are among the keys of a token matrix, or the slots."""
    key_frame, key_token, _ = entry.named_keys
    if entry.token_logits is None and entry.token_probabilities is None:
        slot_frame = getattr(entry, "slot_frame", None)
        return 0 if slot_frame is None else averages.most_averages(slot_frame)
    if key_frame is None or key_token is None:
        return 0
    return int(((key_frame == averages.AVERAGE) & (key_token == 0)).sum())


def _slots_in_quantity(
    slot_logits: Tensor | None, slot_mass: Tensor | None, S: int, quantity: str
) -> Tensor | None:
    """Values of slots in a quantity; None where the cache does not have them."""
    if (slot_logits if quantity == "mean_logit" else slot_mass) is None:
        return None
    return _in_quantity(slot_logits, slot_mass, S, quantity)


def _verified(values: Tensor) -> Tensor:
    """A tensor on disk, compared with its checksum before it is first reduced. Raises CacheError."""
    try:
        verify(values)
    except UnreadableError as error:
        raise CacheError(f"{error}; make it again") from None
    return values


def _in_quantity(frame_logits: Tensor | None, frame_mass: Tensor | None, S: int, quantity: str) -> Tensor:
    """Stored mean logits or masses as the wanted quantity."""
    stored = frame_logits if quantity == "mean_logit" else frame_mass
    if stored is None:
        held = (("mean_logit", frame_logits), ("mass", frame_mass))
        has = ", ".join(name for name, values in held if values is not None)
        raise CacheError(f"this cache holds no {quantity}; it has {has or 'a key curve alone'}")
    return _convert(_verified(stored), "mean_logit" if quantity == "mean_logit" else "mass", quantity, S)


def _convert(values: Tensor, stored: str, wanted: str, S: int) -> Tensor:
    factors: Mapping[tuple[str, str], float] = {("mass", "mean_prob"): 1 / S, ("mean_prob", "mass"): S}
    if stored != wanted and (stored, wanted) not in factors:
        raise CacheError(f"this cache holds no {wanted}; it has {stored}")
    return values * factors.get((stored, wanted), 1)


def _seen(profiles: Tensor) -> list[int]:
    """Frames with a value in any row of [..., F]."""
    frames_with = (~profiles.isnan()).flatten(0, -2).any(0).nonzero()[:, 0].tolist()
    if not frames_with:
        raise CacheError("this cache holds no values for its last block")
    return frames_with

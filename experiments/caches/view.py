"""One view of every cache format: what each head gives to each frame, and what exactly that number is.

A notebook opens any cache with open_profiles(load_cache(path)) and never asks which format it was.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as remember
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.caches import frames
from experiments.caches.files import CacheError
from experiments.caches.formats import (
    QUANTITIES,
    AtlasCache,
    Cache,
    Figure4Cache,
    InferenceCache,
    LayerCache,
    PassTag,
    Tokens,
    as_cache,
)
from wan.blocks import block_frames, block_of_frame, block_ranges, window_levels
from wan.errors import short_repr
from wan.files import UnreadableError, is_verified, verify

# --- Averages of frames that are gone: keys of a cache policy that are of no frame, as columns of their own
AVERAGE = -1  # in slot_frame and key_frame


def average_names(count: int) -> tuple[str, ...]:
    """What their columns are called: μ1, μ2, ..., in the order of their slots."""
    return tuple(f"μ{n}" for n in range(1, count + 1))


def averages_of_slots(values: Tensor, slot_frame: Tensor, count: int) -> Tensor:
    """Values of slots [H, rows, slots], which hold the frames slot_frame [slots] -> [H, rows, count]; NaN for
    an average that is not there."""
    found = torch.full((*values.shape[:-1], count), torch.nan)
    columns = (slot_frame == AVERAGE).nonzero()[:, 0]
    found[..., : len(columns)] = values[..., columns].float()
    return found


def averages_of_blocks(values: Tensor, slot_frame: Tensor, block_sizes: Sequence[int]) -> Tensor:
    """Values of slots [H, F, slots] of every block's queries; slot_frame [blocks, slots] -> [H, F, most]."""
    found = torch.full((*values.shape[:2], most_averages(slot_frame)), torch.nan)
    blocks = block_ranges(list(block_sizes))
    for queries, shown in zip(blocks, slot_frame, strict=False):  # slot_frame ends with the blocks done
        rows = slice(queries.start, queries.stop)
        found[:, rows] = averages_of_slots(values[:, rows], shown, found.shape[-1])
    return found


def averages_of_tokens(curves: Tensor, key_frame: Tensor, key_token: Tensor, mean: bool) -> Tensor:
    """Curves per key token [H, rows, Lk] -> their mean or sum over each average's tokens [H, rows, count].

    The tokens of a slot lie together; an average begins where key_token [Lk] is 0.
    """
    there = key_frame == AVERAGE
    index = (there & (key_token == 0)).cumsum(0) - 1
    members = ((index[:, None] == torch.arange(int(index.max()) + 1)) & there[:, None]).float()
    values = curves.float() @ members
    return values / members.sum(0) if mean else values


def most_averages(slot_frame: Tensor) -> int:
    """How many averages a row of slots [..., slots] holds at most."""
    return int((slot_frame == AVERAGE).sum(-1).max()) if slot_frame.numel() else 0


# --- How each format is read: one pass of a cache as profiles, matrices and key curves of its layers
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
        raise CacheError(f"quantity {short_repr(quantity)} is not one of {', '.join(QUANTITIES)}")
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
            gone = averages_of_slots(slots, entry.slot_frame, count)
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
    count = most_averages(cache.slot_frame) if has_slots and cache.slot_frame is not None else 0
    keys = _seen(profiles)
    columns = (torch.tensor(keys)[:, None] * S + torch.arange(S)).flatten()

    def curve_of(i: int, curve: Tensor) -> Tensor:
        if cache.key_frame is None or cache.key_token is None:
            return curve[:, columns]
        return frames.spread_tokens(curve, cache.key_frame[i], cache.key_token[i], keys, S)

    def averages_at(i: int) -> Tensor | None:
        if slots is None or cache.slot_frame is None or not count:
            return None
        return averages_of_blocks(slots[i, p], cache.slot_frame[i], cache.block_sizes)

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
        gone = averages_of_tokens(curves, key_frame, key_token, mean=quantity != "mass")
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
        return 0 if slot_frame is None else most_averages(slot_frame)
    if key_frame is None or key_token is None:
        return 0
    return int(((key_frame == AVERAGE) & (key_token == 0)).sum())


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


# --- What a figure says about the numbers it draws: quantity, pass and queries, frames to point out
NOTHING: Mapping[str, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True)
class Caption:
    """Goes with frame profiles or matrices from a view to every drawing function."""

    quantity: str  # mean_logit, mass or mean_prob
    subtitle: str  # pass and queries, for titles: "pass 0 (t = 1000), query frames 18–20"
    highlighted_frames: Mapping[str, Sequence[int]] = field(
        default_factory=lambda: NOTHING
    )  # legend -> frames
    unit: str = "latent"  # what the frame axis counts: latent or video frames
    averages: int = 0  # columns after the frames: averages of frames that are gone


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0–2, 5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def pass_name(step: int | None, timestep: float | None, is_clean: bool | None) -> str:
    """What a pass is called: "pass 0 (t = 1000)", "clean pass (t = 0)"; a denoising one at t = 0 says so."""
    name = "clean pass" if is_clean else f"pass {step}"
    if timestep == 0 and is_clean is False:
        name += ", denoising"
    return name if timestep is None else f"{name} (t = {timestep:g})"


def subtitle(pass_label: str, query_frames: Sequence[int]) -> str:
    """Pass and queries in one line: "clean pass (t = 0), query frame 3"."""
    return f"{pass_label}, query frame{'s' if len(query_frames) > 1 else ''} {ranges(query_frames)}"


def noise_label(timestep: float | None, levels: Iterable[float | None] = ()) -> str:
    """Legend entry of the queries' own block in a noisy pass, or of a window at several noise levels."""
    known = {level for level in levels if level is not None}
    if len(known) > 1:
        return f"window (noise from t = {min(known):.4g} to {max(known):.4g})"
    return "own block (noise)" if timestep is None else f"own block (noise at t = {timestep:g})"


# --- One view of every cache format: what each head gives to each frame, and what exactly that number is
LONGEST_WORDS = 100  # of edits in a subtitle


@dataclass(frozen=True)
class Profiles:
    """Frame attention of some layers in one pass. Frames are global latent frames; NaN was not attended."""

    kind: str  # format of the cache
    model: str
    layers: tuple[int, ...]
    num_heads: int
    num_frames: int
    frame_seq_length: int  # tokens S of a frame
    block_sizes: tuple[int, ...]
    query_frames: tuple[int, ...]  # what frame_profile averages: the last block
    key_frames: tuple[int, ...]  # what those queries attend to
    matrix_rows: tuple[int, ...]  # query frames of frame_matrix, () where the cache has none
    quantity: str  # mean_logit, mass or mean_prob (see experiments/caches/frames.py)
    step: int | None  # pass: 0 is the noisiest; None where the file does not say
    timestep: float | None
    is_clean_pass: bool | None
    branch: str | None  # of a base model's guidance: cond or uncond; None where there is one alone
    source: str  # one line: model, weights, prompt, seed
    notes: tuple[str, ...]
    settings: Mapping[str, Any]  # of the rollout, those that caches keep; {} where the file has none
    edits: str  # of an edited run what was done, in words; nothing otherwise
    rolling_timesteps: tuple[float, ...]  # of a rolling window's blocks; () of other samplers
    num_averages: int  # keys that are averages of frames that are gone; 0 but under some cache policies
    _read: Callable[[int], LayerValues]
    _is_verified: Callable[[], bool]

    def frame_profile(self, layer: int) -> np.ndarray:
        """[H, F] float32: mean over the last block's query frames."""
        return self.values(layer).profile.float().numpy()

    def frame_matrix(self, layer: int) -> np.ndarray | None:
        """[H, rows, F] float32 for the query frames matrix_rows, None where only profiles are stored."""
        matrix = self.values(layer).matrix
        return None if matrix is None else matrix.float().numpy()

    def frame_matrices(self) -> np.ndarray | None:
        """[layers, H, F, F] float32: frame_matrix of all layers, None where a query frame is not there."""
        if len(self.matrix_rows) < self.num_frames:
            return None
        found = [self.frame_matrix(layer) for layer in self.layers]
        return np.stack([matrix for matrix in found if matrix is not None])

    def key_profile(self, layer: int) -> np.ndarray:
        """[H, F + num_averages] float32: frame_profile, then the averages of frames that are gone."""
        gone = self.values(layer).averages
        if gone is not None:
            gone = gone[:, [self.matrix_rows.index(frame) for frame in self.query_frames]].mean(1)
        return self._beside(self.frame_profile(layer), gone)

    def key_matrix(self, layer: int) -> np.ndarray | None:
        """[H, rows, F + num_averages] float32: frame_matrix, then the averages of frames that are gone."""
        matrix = self.frame_matrix(layer)
        return None if matrix is None else self._beside(matrix, self.values(layer).averages)

    def key_profiles(self) -> np.ndarray:
        """[layers, H, F + num_averages] float32: key_profile of all layers."""
        return np.stack([self.key_profile(layer) for layer in self.layers])

    def _beside(self, frames: np.ndarray, gone: Tensor | None) -> np.ndarray:
        """Averages after frames; NaN where a layer has none."""
        if not self.num_averages:
            return frames
        columns = np.full((*frames.shape[:-1], self.num_averages), np.nan, np.float32)
        if gone is not None:
            columns[..., : gone.shape[-1]] = gone.float().numpy()
        return np.concatenate([frames, columns], -1)

    def key_curve(self, layer: int) -> np.ndarray | None:
        """[H, Lk] float32 per key token of key_frames, mean over the last block's queries; None where absent.

        Of a mass it is the mean probability of each token: its sum over a frame is that frame's mass.
        """
        curve = self.values(layer).key_curve
        return None if curve is None else curve.float().numpy()

    def profiles(self) -> np.ndarray:
        """[layers, H, F] float32: frame_profile of all layers."""
        return np.stack([self.frame_profile(layer) for layer in self.layers])

    @property
    def verified(self) -> bool:
        """Whether all of the cache was compared with its checksums.

        Large tensors are when they are first reduced, or by load_cache(path, verify=True).
        """
        return self._is_verified()

    @property
    def own_block(self) -> tuple[int, ...]:
        """Key frames that are the queries' own block; at a noisy pass they are noise, not context."""
        blocks = block_ranges(list(self.block_sizes))
        own = {f for block in blocks if not set(block).isdisjoint(self.query_frames) for f in block}
        return tuple(f for f in self.key_frames if f in own)

    @property
    def context_frames(self) -> tuple[int, ...]:
        """Key frames of earlier blocks that are clean, the only ones that a head can remember."""
        return tuple(f for f in self.key_frames if f not in {*self.own_block, *self.noise_levels})

    @property
    def noise_frames(self) -> tuple[int, ...]:
        """Key frames that are noise in this pass: the own block, unless the pass is clean or unknown."""
        return tuple(self.noise_levels)

    @property
    def noise_levels(self) -> dict[int, float | None]:
        """Key frame -> the timestep at which it is noise. All are at the pass's, but in a rolling window."""
        if self.is_clean_pass is not False:
            return {}
        if not self.rolling_timesteps or self.step is None:
            return dict.fromkeys(self.own_block, self.timestep)
        block = block_of_frame(self.block_sizes, self.query_frames[-1])
        levels = window_levels(self.block_sizes, block, self.step, self.rolling_timesteps)
        return {frame: t for frame, t in levels.items() if frame in self.key_frames}

    @property
    def pass_label(self) -> str:
        """For titles: "pass 0 (t = 1000)", "clean pass (t = 0)", "pass 9 (t = 640), unconditional branch"."""
        branch = ", unconditional branch" if self.branch == "uncond" else ""
        if self.timestep is None:
            return ("pass not recorded" if self.step is None else f"pass {self.step}") + branch
        return pass_name(self.step, self.timestep, self.is_clean_pass) + branch

    @property
    def captured(self) -> str:
        """What the queries could see: "full", "window" or "within block"."""
        if set(self.key_frames) <= set(self.query_frames):
            return "within block"
        return "full" if self.key_frames == tuple(range(self.query_frames[-1] + 1)) else "window"

    @property
    def caption(self) -> Caption:
        """What figures say about this view: quantity, pass and queries, and the frames that are noise."""
        has_context = len(self.noise_frames) < len(self.key_frames)  # else nothing to tell noise from
        label = noise_label(self.timestep, self.noise_levels.values())
        noise = {label: self.noise_frames} if self.noise_frames and has_context else {}
        said = subtitle(self.pass_label, self.query_frames) + (
            f"; edited: {self.edits}" if self.edits else ""
        )
        return Caption(self.quantity, said, noise, averages=self.num_averages)

    def values(self, layer: int) -> LayerValues:
        """Profile, matrix and key curve of a layer as they are stored, as tensors."""
        if layer not in self.layers:
            raise CacheError(f"layer {layer} is not in this cache; it has {', '.join(map(str, self.layers))}")
        return self._read(layer)


def open_profiles(cache: Mapping[str, Any], step: int | None = None, quantity: str | None = None) -> Profiles:
    """View of a cache that load_cache returned.

    step picks the pass (None: the first one stored). quantity is mean_logit, mass or mean_prob; None takes
    mean_logit from logits, mass from probabilities. Raises CacheError for a pass or quantity that the cache
    does not hold.
    """
    typed = as_cache(cache)
    quantity = quantity or ("mean_logit" if typed.is_logits else "mass")
    found = read_pass(typed, step, quantity)
    last = block_frames(typed.block_sizes, typed.done - 1)
    return Profiles(
        kind=typed.format,
        model=typed.model,
        layers=tuple(found.layers),
        num_heads=typed.num_heads,
        num_frames=typed.num_frames,
        frame_seq_length=typed.frame_seq_length,
        block_sizes=tuple(typed.block_sizes),
        query_frames=tuple(last if found.query_frames is None else found.query_frames),
        key_frames=tuple(found.key_frames),
        matrix_rows=tuple(found.matrix_rows),
        quantity=quantity,
        step=found.at.step,
        timestep=found.at.timestep,
        is_clean_pass=found.at.is_clean_pass,
        branch=cache.get("branch"),
        source=source_of(typed),
        notes=(*(typed.notes or ()), *_partial_note(typed)),
        settings=typed.config or {},
        edits=edits_in_words(typed.interventions),
        rolling_timesteps=tuple(typed.rolling_timesteps or ()),
        num_averages=found.num_averages,
        _read=found.read,
        _is_verified=lambda: is_verified(cache),
    )


def edits_in_words(interventions: Mapping[str, Any] | None) -> str:
    """What was edited, short enough for a subtitle, with the hash that tells edits apart."""
    if not interventions:
        return ""
    words = str(interventions.get("words", "not said"))
    cut = words if len(words) <= LONGEST_WORDS else f"{words[: LONGEST_WORDS - 3]}..."
    return f"{cut} ({interventions.get('hash', 'no hash')})"


def open_passes(cache: Mapping[str, Any], opened: Profiles) -> list[Profiles]:
    """Every pass of a cache, in the quantity of one that is open already, which is not read again."""
    return [
        opened if at.step == opened.step else open_profiles(cache, at.step, opened.quantity)
        for at in as_cache(cache).passes()
    ]


def open_call(cache: Mapping[str, Any], index: int, quantity: str = "mean_prob") -> Profiles:
    """View of one captured call alone, whatever its layer, block and pass. CacheError for an absent one.

    The calls of an atlas are its layers, pass after pass, with the queries of the last block.
    """
    typed = as_cache(cache)
    if typed.format == "atlas":
        return _atlas_call(cache, index, quantity)
    calls = cache["attention_weights"]
    if not 0 <= index < len(calls):
        raise CacheError(f"call {index} is not in 0..{len(calls) - 1}, the calls of this cache")
    view = open_profiles({**cache, "attention_weights": [calls[index]]}, quantity=quantity)
    view.values(view.layers[0])  # a call that does not hold the quantity says so here
    return view


def _atlas_call(cache: Mapping[str, Any], index: int, quantity: str) -> Profiles:
    passes, layers = as_cache(cache).passes(), cache["layers"]
    if not 0 <= index < len(passes) * len(layers):
        raise CacheError(
            f"call {index} is not in 0..{len(passes) * len(layers) - 1}, the layers and passes of this atlas"
        )
    at, layer = passes[index // len(layers)], layers[index % len(layers)]
    return replace(open_profiles(cache, at.step, quantity), layers=(layer,))


def _partial_note(cache: Cache) -> list[str]:
    total = len(cache.block_sizes)
    if cache.done == total:
        return []
    return [f"partial: the run was stopped after {cache.done} of {total} blocks; what comes later is absent"]


def source_of(cache: Cache) -> str:
    """Model, weights, prompt and seed in a line."""
    weights = ": ".join(filter(None, (cache.weights, cache.weights_file)))
    prompt = f"“{cache.prompt}”" if cache.prompt else "prompt not recorded"
    seed = "not recorded" if cache.seed is None else cache.seed
    return f"{cache.model} ({weights}), {prompt}, seed {seed}"

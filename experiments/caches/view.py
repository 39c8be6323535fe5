"""One view of every cache format: attention of each head to each frame, and which quantity that is.

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

from experiments.caches import files, formats, frames, titles
from wan.blocks import block_frames, block_of_frame, block_ranges, window_levels
from wan.errors import require_known

NOTHING: Mapping[str, Sequence[int]] = MappingProxyType({})
LONGEST_WORDS = 100  # letters of a prompt in a subtitle


# --- Captions: quantity, pass and queries, frames to point out
@dataclass(frozen=True)
class Caption:
    """Goes with frame profiles or matrices from a view to every drawing function."""

    quantity: str  # mean_logit, mass or mean_prob
    subtitle: str  # pass and queries, for titles: "pass 0 (t = 1000), query frames 18–20"
    highlighted_frames: Mapping[str, Sequence[int]] = field(default_factory=lambda: NOTHING)  # legend: frames
    unit: str = "latent"  # what the frame axis counts: latent or video frames
    averages: int = 0  # columns after the frames: averages of evicted frames
    source: str = ""  # model, prompt and seed

    @property
    def about(self) -> str:
        """Return the line under a figure's title: pass, queries, model, prompt and seed."""
        return "; ".join(filter(None, (self.subtitle, self.source)))


def pass_name(step: int | None, timestep: float | None, is_clean: bool | None) -> str:
    """Return "pass 0 (t = 1000)" or "clean pass (t = 0)"; a denoising one at t = 0 says so."""
    name = f"pass {step}"
    if is_clean:
        name = "clean pass"
    elif step is None:
        name = "pass not recorded"
    if timestep is None:
        return name
    if timestep == 0 and is_clean is False:
        name += ", denoising"
    return f"{name} (t = {timestep:.4g})"


def subtitle(pass_label: str, query_frames: Sequence[int]) -> str:
    """Return pass and queries in one line: "clean pass (t = 0), query frame 3"."""
    noun = "query frames" if len(query_frames) > 1 else "query frame"
    return f"{pass_label}, {noun} {titles.ranges(query_frames)}"


def noise_label(timestep: float | None, levels: Iterable[float | None] = ()) -> str:
    """Return the legend of the queries' own block in a noisy pass, or of a window at several noise levels."""
    timesteps = {level for level in levels if level is not None}
    if len(timesteps) > 1:
        return f"window (noise from t = {min(timesteps):.4g} to {max(timesteps):.4g})"
    if timestep is None:
        return "own block (noise)"
    return f"own block (noise at t = {timestep:.4g})"


def source_of(cache: formats.Cache) -> str:
    """Return model, weights, prompt and seed in a line."""
    weights = ": ".join(filter(None, (cache.weights, cache.weights_file)))
    prompt, seed = titles.prompt_in_words(cache.prompt), titles.seed_in_words(cache.seed)
    return f"{cache.model} ({weights}), {prompt}, {seed}"


def short_source(source: str) -> str:
    """Return model, prompt and seed of a source_of, for a line under a title: a long prompt is cut."""
    model, _, rest = source.partition(" (")
    prompt, _, seed = rest.partition("), ")[2].rpartition(", seed ")
    if len(prompt) > LONGEST_WORDS:
        prompt = f"{prompt[: LONGEST_WORDS - 1].rstrip()}…”"
    return f"{model}, {prompt}, seed {seed}"


# --- Keys that are averages of evicted frames: columns of their own, after the frames
def average_names(count: int) -> tuple[str, ...]:
    """Return the names of their columns: μ1, μ2, ..., in the order of their slots."""
    return tuple(f"μ{n}" for n in range(1, count + 1))


# --- The view
class LayerValues(NamedTuple):
    """Frame attention of one layer."""

    profile: Tensor  # [H, F], mean over the queries of the last block
    matrix: Tensor | None  # [H, rows, F]
    key_curve: Tensor | None  # [H, Lk]
    averages: Tensor | None = None  # [H, rows, averages] beside the matrix: keys that are of no frame


@dataclass(frozen=True)
class Profiles:
    """Frame attention of some layers in one pass. Frames are global latent frames; NaN was not attended."""

    kind: str  # format of the cache
    model: str
    layers: tuple[int, ...]
    num_heads: int
    head_dim: int | None  # None where an older cache of an unknown model does not say it
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
    settings: Mapping[str, object]  # of the rollout, those that caches keep; {} where the file has none
    edits: str  # of an edited run what was done, in words; nothing otherwise
    edits_hash: str  # which tells edits of the same words apart
    rolling_timesteps: tuple[float, ...]  # of a rolling window's blocks; () of other samplers
    num_averages: int  # keys that are averages of evicted frames; 0 but under some cache policies
    _read: Callable[[int], LayerValues]

    def __repr__(self) -> str:
        layers = ", ".join(map(str, self.layers))
        return f"Profiles: {self.quantity}, {self.pass_label}, layers {layers}; {self.source}"

    def values(self, layer: int) -> LayerValues:
        """Return profile, matrix and key curve of a layer as tensors.

        Args:
            layer: the number of the layer.

        Raises:
            CacheError: for a layer that is not there.
        """
        files.require_held("layer", layer, self.layers)
        return self._read(layer)

    def frame_profile(self, layer: int) -> np.ndarray:
        """[H, F] float32: mean over the last block's query frames."""
        return self.values(layer).profile.float().numpy()

    def profiles(self) -> np.ndarray:
        """[layers, H, F] float32: frame_profile of all layers."""
        return np.stack([self.frame_profile(layer) for layer in self.layers])

    def frame_matrix(self, layer: int) -> np.ndarray | None:
        """[H, rows, F] float32 for the query frames matrix_rows, None where only profiles are stored."""
        matrix = self.values(layer).matrix
        if matrix is None:
            return None
        return matrix.float().numpy()

    def frame_matrices(self) -> np.ndarray | None:
        """[layers, H, F, F] float32: frame_matrix of all layers, None where a query frame is absent."""
        if len(self.matrix_rows) < self.num_frames:
            return None
        matrices = [self.frame_matrix(layer) for layer in self.layers]
        return np.stack([matrix for matrix in matrices if matrix is not None])

    def key_profile(self, layer: int) -> np.ndarray:
        """[H, F + num_averages] float32: frame_profile, then the averages of evicted frames."""
        averages = self.values(layer).averages
        if averages is not None:  # [H, rows, averages] -> [H, averages], the mean over the queries
            averages = averages[:, [self.matrix_rows.index(frame) for frame in self.query_frames]].mean(1)
        return self._beside(self.frame_profile(layer), averages)

    def key_profiles(self) -> np.ndarray:
        """[layers, H, F + num_averages] float32: key_profile of all layers."""
        return np.stack([self.key_profile(layer) for layer in self.layers])

    def key_matrix(self, layer: int) -> np.ndarray | None:
        """[H, rows, F + num_averages] float32: frame_matrix, then the averages of evicted frames."""
        matrix = self.frame_matrix(layer)
        if matrix is None:
            return None
        return self._beside(matrix, self.values(layer).averages)

    def _beside(self, values: np.ndarray, averages: Tensor | None) -> np.ndarray:
        """Put averages after frames; NaN where a layer has none."""
        columns = np.full((*values.shape[:-1], self.num_averages), np.nan, np.float32)
        if averages is not None:
            columns[..., : averages.shape[-1]] = averages.float().numpy()
        return np.concatenate([values, columns], -1)

    def key_curve(self, layer: int) -> np.ndarray | None:
        """[H, Lk] float32 per key token of key_frames, mean over the last block's queries; None where absent.

        Of a mass it is the mean probability of each token: its sum over a frame is that frame's mass.
        """
        curve = self.values(layer).key_curve
        if curve is None:
            return None
        return curve.float().numpy()

    @property
    def own_block(self) -> tuple[int, ...]:
        """Key frames that are the queries' own block; at a noisy pass they are noise, not context."""
        blocks = block_ranges(list(self.block_sizes))
        frames = {f for block in blocks if not set(block).isdisjoint(self.query_frames) for f in block}
        return tuple(f for f in self.key_frames if f in frames)

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
        name = pass_name(self.step, self.timestep, self.is_clean_pass)
        if self.branch == "uncond":
            name += ", unconditional branch"
        return name

    @property
    def captured(self) -> str:
        """Return what the queries see: "full", "window" or "within block"."""
        if set(self.key_frames) <= set(self.query_frames):
            return "within block"
        if self.key_frames == tuple(range(self.query_frames[-1] + 1)):
            return "full"
        return "window"

    @property
    def caption(self) -> Caption:
        """For figures: quantity, pass and queries, and the frames that are noise."""
        title = subtitle(self.pass_label, self.query_frames)
        if self.edits:
            title += f"; edited: {self.edits}"
        noise = {}
        if 0 < len(self.noise_frames) < len(self.key_frames):  # else nothing to tell noise from
            noise[noise_label(self.timestep, self.noise_levels.values())] = self.noise_frames
        return Caption(
            quantity=self.quantity,
            subtitle=title,
            highlighted_frames=noise,
            averages=self.num_averages,
            source=short_source(self.source),
        )


WAN_HEAD_DIM = 128  # of every published size


def open_profiles(cache: Mapping[str, Any], step: int | None = None, quantity: str | None = None) -> Profiles:
    """Open a view of a cache that load_cache returned.

    Args:
        cache: of a format with values per frame: figure4, inference, layer or atlas.
        step: the pass; None: the first that is stored.
        quantity: mean_logit, mass or mean_prob; None: mean_logit of logits, mass of probabilities.

    Raises:
        CacheError: for a pass or quantity that is not there.
    """
    typed = formats.as_cache(cache)
    # 1. The quantity and the pass that are asked for
    if quantity is None:
        quantity = "mean_logit" if typed.is_logits else "mass"
    require_known(quantity, formats.QUANTITIES, "there is no quantity {}", files.CacheError)
    if type(typed) not in READERS:
        raise files.CacheError(
            f"a cache of format {typed.format} holds no values per frame; give one of figure4, inference, "
            "layer or atlas"
        )
    passes = typed.passes()
    if step is not None:
        steps: list[int | str] = [at.step for at in passes if at.step is not None]
        if not steps:
            steps = ["an unrecorded one"]
        files.require_held("pass", step, steps)
        passes = [at for at in passes if at.step == step]
    at = passes[0]
    # 2. Layers and frames, as the format has them; values are read when they are asked for
    part = READERS[type(typed)](typed, at, quantity)
    head_dim = typed.head_dim
    if head_dim is None and typed.model.startswith("Wan2.1"):
        head_dim = WAN_HEAD_DIM
    notes, total = list(typed.notes or ()), len(typed.block_sizes)
    if typed.done < total:
        notes.append(
            f"partial: the run was stopped after {typed.done} of {total} blocks; what comes later is absent"
        )
    return Profiles(
        kind=typed.format,
        model=typed.model,
        layers=tuple(part.layers),
        num_heads=typed.num_heads,
        head_dim=head_dim,
        num_frames=typed.num_frames,
        frame_seq_length=typed.frame_seq_length,
        block_sizes=tuple(typed.block_sizes),
        query_frames=tuple(part.query_frames),
        key_frames=tuple(part.key_frames),
        matrix_rows=tuple(part.matrix_rows),
        quantity=quantity,
        **at._asdict(),
        branch=cache.get("branch"),
        source=source_of(typed),
        notes=tuple(notes),
        settings=typed.config or {},
        edits=titles.edits_in_words(typed.interventions),
        edits_hash=str((typed.interventions or {}).get("hash", "")),
        rolling_timesteps=tuple(typed.rolling_timesteps or ()),
        num_averages=part.num_averages,
        _read=remember(part.read),
    )


def open_passes(cache: Mapping[str, Any], opened: Profiles) -> list[Profiles]:
    """Open every pass of a cache, in the quantity of one that is open already, which is not read again."""
    views = []
    for at in formats.as_cache(cache).passes():
        view = opened
        if at.step != opened.step:
            view = open_profiles(cache, at.step, opened.quantity)
        views.append(view)
    return views


def open_call(cache: Mapping[str, Any], index: int, quantity: str = "mean_prob") -> Profiles:
    """Open one captured call alone (of an atlas: a layer, pass after pass). CacheError: no such call."""
    typed = formats.as_cache(cache)
    if isinstance(typed, formats.AtlasCache):
        pairs = [(at.step, layer) for at in typed.passes() for layer in typed.layers]
        files.require_held("call", index, range(len(pairs)), "the layers and passes of this atlas")
        step, layer = pairs[index]
        return replace(open_profiles(cache, step, quantity), layers=(layer,))
    calls = cache["attention_weights"]
    files.require_held("call", index, range(len(calls)), "the calls of this cache")
    view = open_profiles({**cache, "attention_weights": [calls[index]]}, None, quantity)
    view.values(view.layers[0])  # a call that does not hold the quantity says so here
    return view


def require_alike(view: Profiles, other: Profiles, names: Sequence[str], problem: str) -> None:
    """Raise CacheError where two views differ in one of these attributes: heads are compared by index."""
    for name in names:
        values = getattr(view, name), getattr(other, name)
        if values[0] != values[1]:
            raise files.CacheError(f"{problem}: {name.removeprefix('num_')} {values[0]} and {values[1]}")


# --- How each format is read
class _Pass(NamedTuple):
    """One pass of a cache in a quantity."""

    layers: Sequence[int]
    query_frames: Sequence[int]  # what the profile averages
    key_frames: Sequence[int]
    matrix_rows: Sequence[int]  # query frames of the matrix, () where there is none
    num_averages: int  # columns of LayerValues.averages
    read: Callable[[int], LayerValues]


def _figure4(cache: formats.Figure4Cache, at: formats.PassTag, quantity: str) -> _Pass:
    entries = {entry.layer_idx: entry for entry in cache.attention_weights}
    queries, keys, S = cache.query_frames, cache.key_frames, cache.frame_seq_length
    count = max(_num_averages(entry) for entry in entries.values())

    def read(layer: int) -> LayerValues:
        entry = entries[layer]
        if entry.has_tokens:
            return _from_tokens(entry, keys, cache, quantity)
        # Coarser granularity: a curve by key token, a matrix by frames, or both
        curve = averages = None
        if quantity == "mean_logit" and entry.key_curve is not None:
            curve = _at_frames(entry.key_curve, entry, keys, S)
            if entry.frame_logits is None:
                profile = _by_frame(entry.key_curve.float(), entry, keys, cache, mean=True)
                return LayerValues(profile, None, curve)
        matrix = _in_quantity(_stored(entry, "frame"), quantity, S)  # [H, Fq, F]
        slots = _stored(entry, "slot")
        if entry.slot_frame is not None and slots:
            by_slot = _in_quantity(slots, quantity, S)
            averages = frames.averages_of_slots(by_slot, entry.slot_frame, count)
        return LayerValues(matrix.mean(1), matrix, curve, averages)

    return _Pass(list(entries), queries, keys, queries, count, read)


def _inference(cache: formats.InferenceCache, at: formats.PassTag, quantity: str) -> _Pass:
    """The last captured block's calls of one pass."""
    by_layer = {call.layer_idx: call for call in reversed(cache.last_calls()) if call.step == at.step}
    first = by_layer[min(by_layer)]
    count = max(_num_averages(call) for call in by_layer.values())

    def read(layer: int) -> LayerValues:
        return _from_tokens(by_layer[layer], by_layer[layer].key_frames, cache, quantity)

    return _Pass(sorted(by_layer), first.query_frames, first.key_frames, first.query_frames, count, read)


def _layer(cache: formats.LayerCache, at: formats.PassTag, quantity: str) -> _Pass:
    stored = cache.quantity
    if stored is None:
        stored = "mean_logit" if cache.is_logits else "mean_prob"

    def converted(values: Tensor) -> Tensor:
        return _in_quantity({stored: values.float()}, quantity, cache.frame_seq_length)

    profile, averages, count = converted(cache.last_block_frame_attention), None, 0
    if cache.average_attention is not None:
        averages, count = converted(cache.average_attention), cache.average_attention.shape[-1]
    values = LayerValues(profile, converted(cache.full_frame_attention), None, averages)
    queries, rows = cache.last_block_query_frames, cache.query_frames
    return _Pass([cache.layer_index], queries, _seen(profile), rows, count, lambda layer: values)


def _atlas(cache: formats.AtlasCache, at: formats.PassTag, quantity: str) -> _Pass:
    p, S, by_means = cache.passes().index(at), cache.frame_seq_length, quantity == "mean_logit"
    # 1. Matrices of this pass [N, H, F, F], and the profiles of the last block [N, H, F]
    last = block_frames(cache.block_sizes, cache.done - 1)
    matrices = slots = None  # [layers, H, F, F], [layers, H, F, slots]
    if by_means and cache.last_block_frame_logits is not None:  # exact, where the matrix is quantised
        profiles = cache.last_block_frame_logits[:, p]
        if cache.frame_logits is not None:
            matrices = cache.frame_logits[:, p]
    else:
        matrices = _in_quantity(_stored(cache, "frame", p), quantity, S)
        for block in reversed(block_ranges(cache.block_sizes)):  # the first may have passes that others lack
            if block.start <= last[0] and not matrices[..., block.start, :].isnan().all():
                last = list(block)
                break
        profiles = matrices[..., last, :].float().mean(-2)
    # 2. The frames that the last block sees, their tokens in key_curve, and averages among the slots
    keys, count = _seen(profiles), 0
    columns = (torch.tensor(keys)[:, None] * S + torch.arange(S)).flatten()
    stored = _stored(cache, "slot", p)
    if matrices is not None and cache.slot_frame is not None and stored:
        slots, count = _in_quantity(stored, quantity, S), frames.most_averages(cache.slot_frame)

    # 3. One layer of them
    def read(layer: int) -> LayerValues:
        i, matrix, curve, averages = cache.layers.index(layer), None, None, None
        if matrices is not None:
            matrix = matrices[i]
        # Averages block by block, since a block's slots hold frames of its own
        if slots is not None and cache.slot_frame is not None and count:
            of_layer = cache.slot_frame[i]
            shape = cache.num_heads, cache.num_frames, frames.most_averages(of_layer)
            averages = torch.full(shape, torch.nan)
            for queries, of_block in zip(block_ranges(cache.block_sizes), of_layer, strict=False):
                averages[:, queries] = frames.averages_of_slots(slots[i][:, queries], of_block, shape[-1])
        if by_means and cache.key_curve is not None:
            curve = cache.key_curve[i, p]
            if cache.key_frame is None or cache.key_token is None:
                curve = curve[:, columns]  # [H, L] -> [H, Lk]
            else:
                curve = frames.spread_tokens(curve, cache.key_frame[i], cache.key_token[i], keys, S)
        return LayerValues(profiles[i], matrix, curve, averages)

    rows = range(0 if matrices is None else cache.num_frames)
    return _Pass(cache.layers, last, keys, rows, count, read)


# How each format is read: (cache, pass, quantity) -> the values of that pass
READERS: Mapping[type[formats.Cache], Callable[..., _Pass]] = {
    formats.Figure4Cache: _figure4,
    formats.LayerCache: _layer,
    formats.InferenceCache: _inference,
    formats.AtlasCache: _atlas,
}


def _from_tokens(
    entry: formats.Tokens, keys: Sequence[int], cache: formats.Cache, quantity: str
) -> LayerValues:
    """Reduce a token matrix [1, H, Lq, Lk], logits or probabilities, in one reading."""
    S, mean, wants_logits = cache.frame_seq_length, quantity != "mass", quantity == "mean_logit"
    tokens, reduce = entry.attn_logits, frames.query_frame_curves
    if tokens is None and not wants_logits:
        tokens = entry.attn_weights
    elif not wants_logits:
        reduce = frames.softmax_curves  # type: ignore[assignment]  # the same but for a name
    if tokens is None:
        raise files.CacheError("this cache holds probabilities, no mean_logit; it has mass, mean_prob")
    curves = reduce(tokens[0], S)
    matrix, averages = _by_frame(curves, entry, keys, cache, mean), None  # [H, Fq, Lk] -> [H, Fq, F]
    if _num_averages(entry):
        assert entry.key_frame is not None and entry.key_token is not None
        averages = frames.averages_of_tokens(curves, entry.key_frame, entry.key_token, mean)
    return LayerValues(matrix.mean(1), matrix, _at_frames(curves.mean(1), entry, keys, S), averages)


def _by_frame(
    curves: Tensor, entry: formats.Tokens, keys: Sequence[int], cache: formats.Cache, mean: bool
) -> Tensor:
    """Curves per key [..., Lk] -> [..., F], as the mean or the sum of a frame's tokens."""
    S = cache.frame_seq_length
    if entry.key_frame is not None:
        return frames.by_key_frame(curves, entry.key_frame, cache.num_frames, mean)
    values = frames.curves_to_frames(curves, S)
    if not mean:
        values = values * S
    return frames.spread_keys(values, keys, cache.num_frames)


def _at_frames(curve: Tensor, entry: formats.Tokens, keys: Sequence[int], S: int) -> Tensor:
    """A curve per key [..., Lk] at the tokens of key frames [..., Fk·S]; NaN for tokens that did not stay."""
    if entry.key_frame is None or entry.key_token is None:
        return curve
    return frames.spread_tokens(curve, entry.key_frame, entry.key_token, keys, S)


def _num_averages(entry: formats.Tokens) -> int:
    """Count the averages of evicted frames, among the keys of a token matrix or among the slots."""
    # A token matrix has a row of tokens for each average, which begins at token 0
    if not entry.has_tokens:
        slot_frame = getattr(entry, "slot_frame", None)
        if slot_frame is None:
            return 0
        return frames.most_averages(slot_frame)
    if entry.key_frame is None or entry.key_token is None:
        return 0
    return int(((entry.key_frame == formats.AVERAGE) & (entry.key_token == 0)).sum())


def _stored(values: formats.Fields, of: str, p: int | None = None) -> dict[str, Tensor]:
    """Return OF_logits and OF_mass by what they are, those that are there, of pass p [:, p]."""
    stored = {}
    for name, field_name in (("mean_logit", f"{of}_logits"), ("mass", f"{of}_mass")):
        x = getattr(values, field_name)
        if x is not None:
            stored[name] = x if p is None else x[:, p]
    return stored


def _in_quantity(stored: Mapping[str, Tensor], wanted: str, S: int) -> Tensor:
    """Return the stored values that give a quantity, converted to it."""
    # A frame's mass is the sum over its S tokens, mean_prob their mean; logits turn into neither
    factors = {("mass", "mean_prob"): 1 / S, ("mean_prob", "mass"): S}
    for name, values in stored.items():
        if name == wanted:
            return values
        if (name, wanted) in factors:
            return values * factors[name, wanted]
    raise files.CacheError(f"this cache holds no {wanted}; it has {', '.join(stored) or 'a key curve alone'}")


def _seen(profiles: Tensor) -> list[int]:
    """List the frames with a value in any row of [..., F]."""
    seen = (~profiles.isnan()).flatten(0, -2).any(0).nonzero()[:, 0].tolist()
    if not seen:
        raise files.CacheError("this cache holds no values for its last block")
    return seen

"""One view of every cache format: what each head gives to each frame, and what exactly that number is.

A notebook opens any cache with open_profiles(load_cache(path)) and never asks which format it was.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from experiments.caches.caption import Caption, noise_label, pass_name, subtitle
from experiments.caches.common import Cache
from experiments.caches.errors import CacheError
from experiments.caches.readers import LayerValues, read_pass
from experiments.caches.schema import as_cache
from wan.blocks import block_frames, block_of_frame, block_ranges, window_levels
from wan.safe_load import is_verified

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

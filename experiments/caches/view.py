"""One view of every cache format: what each head of a layer gives to each frame, and what exactly that number is.

A notebook opens any cache with open_profiles(load_cache(path)) and never asks which format it was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache as remember
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.caches import frames
from experiments.caches.errors import CacheError
from wan.blocks import block_frames, block_ranges


class LayerValues(NamedTuple):
    profile: Tensor  # [H, F]
    matrix: Tensor | None  # [H, rows, F]
    key_curve: Tensor | None  # [H, Lk]


@dataclass(frozen=True)
class Profiles:
    """Frame attention of some layers in one pass. Frames are global latent frames; what was not attended is NaN."""

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
    _read: Callable[[int], LayerValues]

    def frame_profile(self, layer: int) -> np.ndarray:
        """[H, F] float32: mean over the last block's query frames."""
        return self._values(layer).profile.float().numpy()

    def frame_matrix(self, layer: int) -> np.ndarray | None:
        """[H, rows, F] float32 for the query frames matrix_rows, None where only profiles are stored."""
        matrix = self._values(layer).matrix
        return None if matrix is None else matrix.float().numpy()

    def frame_matrices(self) -> np.ndarray | None:
        """[layers, H, F, F] float32: frame_matrix of all layers, None where a query frame is not there."""
        if len(self.matrix_rows) < self.num_frames:
            return None
        return np.stack([self.frame_matrix(layer) for layer in self.layers])

    def key_curve(self, layer: int) -> np.ndarray | None:
        """[H, Lk] float32, mean over all queries of the last block per key token of key_frames; None where absent.

        Of a mass it is the mean probability of each token: its sum over a frame is that frame's mass.
        """
        curve = self._values(layer).key_curve
        return None if curve is None else curve.float().numpy()

    def profiles(self) -> np.ndarray:
        """[layers, H, F] float32: frame_profile of all layers."""
        return np.stack([self.frame_profile(layer) for layer in self.layers])

    @property
    def own_block(self) -> tuple[int, ...]:
        """Key frames that are the queries' own block; at a noisy pass they are noise, not context."""
        blocks = block_ranges(list(self.block_sizes))
        own = {f for block in blocks if not set(block).isdisjoint(self.query_frames) for f in block}
        return tuple(f for f in self.key_frames if f in own)

    @property
    def context_frames(self) -> tuple[int, ...]:
        """Key frames of earlier blocks: clean in every pass, the only ones that a head can remember."""
        return tuple(f for f in self.key_frames if f not in self.own_block)

    @property
    def noise_frames(self) -> tuple[int, ...]:
        """Key frames that are noise in this pass: the own block, unless the pass is clean or unknown."""
        return self.own_block if self.is_clean_pass is False else ()

    @property
    def pass_label(self) -> str:
        """For titles: "pass 0 (t = 1000)", "clean pass (t = 0)", "pass 9 (t = 640), unconditional branch"."""
        branch = ", unconditional branch" if self.branch == "uncond" else ""
        if self.timestep is None:
            return ("pass not recorded" if self.step is None else f"pass {self.step}") + branch
        return (
            f"{'clean pass' if self.is_clean_pass else f'pass {self.step}'} (t = {self.timestep:g}){branch}"
        )

    @property
    def captured(self) -> str:
        """What the queries could see: "full", "window" or "within block"."""
        if set(self.key_frames) <= set(self.query_frames):
            return "within block"
        return "full" if self.key_frames == tuple(range(self.query_frames[-1] + 1)) else "window"

    @property
    def caption(self) -> dict[str, Any]:
        """What experiments/figures/style.py wants to know beside the arrays: quantity, taken, shaded."""
        first, last = self.query_frames[0], self.query_frames[-1]
        t = "" if self.timestep is None else f" at t = {self.timestep:g}"
        noise = (
            self.noise_frames if len(self.noise_frames) < len(self.key_frames) else ()
        )  # else there is no context
        return {
            "quantity": self.quantity,
            "taken": f"{self.pass_label}, query frame{f's {first}–{last}' if first < last else f' {first}'}",
            "shaded": {f"own block (noise{t})": noise} if noise else {},
        }

    def _values(self, layer: int) -> LayerValues:
        if layer not in self.layers:
            raise CacheError(f"layer {layer} is not in this cache; it has {', '.join(map(str, self.layers))}")
        return self._read(layer)


def open_profiles(cache: Mapping[str, Any], step: int | None = None, quantity: str | None = None) -> Profiles:
    """View of a cache that load_cache returned.

    step picks the pass (None: the first one stored). quantity is mean_logit, mass or mean_prob; None takes mean_logit
    from logits, mass from probabilities. Raises CacheError for a pass or quantity that the cache does not hold.
    """
    quantity = quantity or ("mean_logit" if cache["is_logits"] else "mass")
    opener = {"figure4": _figure4, "layer": _layer, "inference": _inference, "atlas": _atlas}[cache["format"]]
    fields = opener(cache, step, quantity)
    last = block_frames(cache["block_sizes"], _last_block(cache))
    return Profiles(**{
        "kind": cache["format"],
        "model": cache["model"],
        "num_heads": cache["num_heads"],
        "num_frames": cache["num_frames"],
        "frame_seq_length": cache["frame_seq_length"],
        "block_sizes": tuple(cache["block_sizes"]),
        "query_frames": tuple(last),
        "quantity": quantity,
        "branch": cache.get("branch"),
        "source": _source(cache),
        "notes": (*cache.get("notes", ()), *_partial_note(cache)),
    } | {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()})  # fmt: skip


def open_passes(cache: Mapping[str, Any], opened: Profiles) -> list[Profiles]:
    """Every pass of a cache, in the quantity of one that is open already, which is not read again."""
    return [
        opened if step == opened.step else open_profiles(cache, step, opened.quantity)
        for step in _steps(cache)
    ]


def _figure4(cache: Mapping[str, Any], step: int | None, quantity: str) -> dict[str, Any]:
    _pick([cache["step"]], step)
    entries = {entry["layer_idx"]: entry for entry in cache["attention_weights"]}
    queries, keys = cache["query_frames"], cache["key_frames"]

    @remember
    def read(layer: int) -> LayerValues:
        entry = entries[layer]
        if "attn_logits" in entry or "attn_weights" in entry:
            return _from_tokens(entry, keys, cache, quantity)
        if "key_curve" in entry and quantity == "mean_logit" and "frame_logits" not in entry:
            means = frames.curves_to_frames(entry["key_curve"].float(), cache["frame_seq_length"])
            return LayerValues(frames.spread_keys(means, keys, cache["num_frames"]), None, entry["key_curve"])
        matrix = _stored(entry, cache["frame_seq_length"], quantity)
        return LayerValues(
            matrix.mean(1), matrix, entry.get("key_curve") if quantity == "mean_logit" else None
        )

    return _pass_of(cache) | {
        "layers": list(entries),
        "query_frames": queries,
        "key_frames": keys,
        "matrix_rows": queries,
        "_read": read,
    }


def _layer(cache: Mapping[str, Any], step: int | None, quantity: str) -> dict[str, Any]:
    _pick([cache["step"]], step)
    stored = cache.get("quantity", "mean_logit" if cache["is_logits"] else "mean_prob")
    matrix, profile = (
        _convert(cache[name].float(), stored, quantity, cache["frame_seq_length"])
        for name in ("full_frame_attention", "last_block_frame_attention")
    )
    return _pass_of(cache) | {
        "layers": [cache["layer_index"]], "query_frames": cache["last_block_query_frames"],
        "key_frames": _seen(profile), "matrix_rows": cache["query_frames"],
        "_read": lambda layer: LayerValues(profile, matrix, None),
    }  # fmt: skip


def _inference(cache: Mapping[str, Any], step: int | None, quantity: str) -> dict[str, Any]:
    """The last captured block's calls of one pass."""
    calls, step = _last_calls(cache), _pick(_steps(cache), step)
    by_layer = {call["layer_idx"]: call for call in reversed(calls) if call["step"] == step}
    first = by_layer[min(by_layer)]

    @remember
    def read(layer: int) -> LayerValues:
        return _from_tokens(by_layer[layer], by_layer[layer]["key_frames"], cache, quantity)

    return _pass_of(first) | {
        "layers": sorted(by_layer),
        "query_frames": first["query_frames"],
        "key_frames": first["key_frames"],
        "matrix_rows": first["query_frames"],
        "_read": read,
    }


def _atlas(cache: Mapping[str, Any], step: int | None, quantity: str) -> dict[str, Any]:
    timesteps, steps = [float(t) for t in cache["pass_timesteps"]], _steps(cache)
    step = _pick(steps, step)
    p = steps.index(step)
    clean = cache.get("pass_is_clean", [t == 0 for t in timesteps])[p]
    S, last, layers = (
        cache["frame_seq_length"],
        block_frames(cache["block_sizes"], _last_block(cache)),
        cache["layers"],
    )
    of_pass = {
        name: cache[name][:, p]
        for name in ("frame_logits", "frame_mass", "last_block_frame_logits", "key_curve")
        if name in cache
    }
    by_means = quantity == "mean_logit"
    profiles = (
        of_pass.get("last_block_frame_logits") if by_means else None
    )  # exact where the matrix is quantised
    matrices = None
    if profiles is None or "frame_logits" in of_pass:
        matrices = _stored(of_pass, S, quantity)  # [layers, H, F, F]
        profiles = matrices[..., last, :].float().mean(-2) if profiles is None else profiles
    curves = of_pass.get("key_curve") if by_means else None  # [layers, H, L]
    keys = _seen(profiles)
    columns = (torch.tensor(keys)[:, None] * S + torch.arange(S)).flatten()

    def read(layer: int) -> LayerValues:
        i = layers.index(layer)
        return LayerValues(
            profiles[i],
            None if matrices is None else matrices[i],
            None if curves is None else curves[i][:, columns],
        )

    return {
        "layers": layers,
        "step": step,
        "timestep": timesteps[p],
        "is_clean_pass": clean,
        "key_frames": keys,
        "matrix_rows": [] if matrices is None else list(range(cache["num_frames"])),
        "_read": read,
    }


def _from_tokens(
    entry: Mapping[str, Any], keys: Sequence[int], cache: Mapping[str, Any], quantity: str
) -> LayerValues:
    """A token matrix [1, H, Lq, Lk], logits or probabilities, read once."""
    S, logits = cache["frame_seq_length"], entry.get("attn_logits")
    if logits is None and quantity == "mean_logit":
        raise CacheError("this cache holds probabilities, no mean_logit; it has mass, mean_prob")
    if logits is None:
        curves = frames.query_frame_curves(entry["attn_weights"][0], S)
    else:
        curves = (frames.query_frame_curves if quantity == "mean_logit" else frames.softmax_curves)(
            logits[0], S
        )
    values = frames.curves_to_frames(curves, S) * (S if quantity == "mass" else 1)
    matrix = frames.spread_keys(values, keys, cache["num_frames"])
    return LayerValues(matrix.mean(1), matrix, curves.mean(1))


def _stored(values: Mapping[str, Tensor], S: int, quantity: str) -> Tensor:
    """Stored frame_logits or frame_mass as the wanted quantity."""
    stored = {"mean_logit": "frame_logits"}.get(quantity, "frame_mass")
    if stored not in values:
        has = [q for q, name in (("mean_logit", "frame_logits"), ("mass", "frame_mass")) if name in values]
        raise CacheError(f"this cache holds no {quantity}; it has {', '.join(has) or 'a key curve alone'}")
    return _convert(values[stored], "mass" if stored == "frame_mass" else "mean_logit", quantity, S)


def _convert(values: Tensor, stored: str, wanted: str, S: int) -> Tensor:
    factors = {("mass", "mean_prob"): 1 / S, ("mean_prob", "mass"): S}
    if stored != wanted and (stored, wanted) not in factors:
        raise CacheError(f"this cache holds no {wanted}; it has {stored}")
    return values * factors.get((stored, wanted), 1)


def _last_block(cache: Mapping[str, Any]) -> int:
    """The last block that a cache has: of a run that was stopped, the last one it finished."""
    return cache.get("blocks_done", len(cache["block_sizes"])) - 1


def _partial_note(cache: Mapping[str, Any]) -> list[str]:
    done, total = _last_block(cache) + 1, len(cache["block_sizes"])
    return (
        [f"partial: the run was stopped after {done} of {total} blocks; what comes later is absent"]
        if done < total
        else []
    )


def _last_calls(cache: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    block = max(call["block"] for call in cache["attention_weights"])
    return [call for call in cache["attention_weights"] if call["block"] == block]


def _steps(cache: Mapping[str, Any]) -> list[int | None]:
    """Passes that a cache holds, in its order."""
    if cache["format"] == "atlas":
        return list(cache.get("pass_steps", range(len(cache["pass_timesteps"]))))
    if cache["format"] == "inference":
        return list(dict.fromkeys(call["step"] for call in _last_calls(cache)))
    return [cache["step"]]


def _pick(stored: Sequence[int | None], step: int | None) -> int | None:
    if step is None:
        return stored[0]
    if step not in stored:
        known = ", ".join("an unrecorded one" if s is None else str(s) for s in dict.fromkeys(stored))
        raise CacheError(f"pass {step} is not in this cache; it has {known}")
    return step


def _pass_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("step", "timestep", "is_clean_pass")}


def _seen(profiles: Tensor) -> list[int]:
    """Frames with a value in any row of [..., F]."""
    frames_with = (~profiles.isnan()).flatten(0, -2).any(0).nonzero()[:, 0].tolist()
    if not frames_with:
        raise CacheError("this cache holds no values for its last block")
    return frames_with


def _source(cache: Mapping[str, Any]) -> str:
    weights = ": ".join(filter(None, (cache["weights"], cache["weights_file"])))
    prompt = f"“{cache['prompt']}”" if cache["prompt"] else "prompt not recorded"
    return f"{cache['model']} ({weights}), {prompt}, seed {'not recorded' if cache['seed'] is None else cache['seed']}"


def open_call(cache: Mapping[str, Any], index: int, quantity: str = "mean_prob") -> Profiles:
    """View of one captured call alone, whatever its layer, block and pass. CacheError for one that is not there."""
    calls = cache["attention_weights"]
    if not 0 <= index < len(calls):
        raise CacheError(f"call {index} is not in 0..{len(calls) - 1}, the calls of this cache")
    view = open_profiles(
        cache | {"attention_weights": [calls[index]], "layer_indices": [calls[index]["layer_idx"]]},
        quantity=quantity,
    )
    view.frame_profile(view.layers[0])  # a call that does not hold the quantity says so here
    return view

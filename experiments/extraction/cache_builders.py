"""A rollout in each cache format: what it asks of the capture (*_requests), and its dict (*_cache)."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.caches import frames
from experiments.caches.files import RunError
from experiments.caches.formats import AVERAGE, NO_KEY, Figure4Layer, PassTag, build_layer_cache
from experiments.caches.view import averages_of_slots, averages_of_tokens, most_averages
from wan.blocks import block_frames
from wan.capture import CapturedCall, CaptureRequest
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.rope import RotaryTable

LEAST_MASS = 1e-4  # on averages of frames: what is less is rounding


@dataclass(frozen=True)
class Extraction:
    """One rollout, finished or stopped: what was captured and generated, and the fields that caches share."""

    config: RunConfig
    num_layers: int
    records: list[CapturedCall]
    latents: Tensor  # [1, F, C, h, w]; fewer frames where the run was stopped
    pass_timesteps: list[float]  # of a block's passes, the clean pass last
    prompt_tokens: list[str]  # text of each prompt token, without padding
    common: dict[str, Any]
    stopped: str = ""  # where, of a run that was stopped: "3 of 7 blocks"

    @property
    def last_block(self) -> list[int]:
        """Frames of the last finished block."""
        return block_frames(self.config.block_sizes, self.blocks_done - 1)

    @property
    def blocks_done(self) -> int:
        return self.common.get("blocks_done", len(self.config.block_sizes))

    def pass_tag(self, step: int) -> PassTag:
        """A pass of the causal rollout, whose last one is the clean pass."""
        return PassTag(step, self.pass_timesteps[step], step == len(self.pass_timesteps) - 1)

    @cached_property
    def _calls(self) -> dict[tuple[str, int, int], list[CapturedCall]]:
        """The calls of every quantity, layer and step, in block order."""
        calls = defaultdict(list)
        for call in self.records:
            for name in call.values:
                calls[name, call.site.layer, call["step"]].append(call)
        return dict(calls)

    @property
    def layers(self) -> list[int]:
        """Layers of which anything was captured."""
        return sorted({layer for _, layer, _ in self._calls})

    @property
    def quantities(self) -> set[str]:
        """Names of what was captured: frame_logits, key_curve, token_logits and so on."""
        return {name for name, _, _ in self._calls}

    def captured(self, name: str, layer: int, step: int) -> list[CapturedCall]:
        """Return the calls of one layer and pass that hold a quantity. RunError where there is none."""
        if (name, layer, step) not in self._calls:
            raise RunError(f"layer {layer}, step {step}: no {name} was captured")
        return self._calls[name, layer, step]

    def frame_matrix(self, name: str, layer: int, step: int) -> Tensor:
        """Assemble frame_logits or frame_mass of all blocks [H, F, F], NaN where nothing was attended.

        Where token logits were captured, the mean logits are those of their frame pairs.
        """
        S, num_frames = self.common["frame_seq_length"], self.config.num_frames
        if name != "frame_logits" or "token_logits" not in self.quantities:
            pieces = [(call, call.values[name][0]) for call in self.captured(name, layer, step)]
        else:
            pieces = []
            for call in self.captured("token_logits", layer, step):
                curves = frames.query_frame_curves(call.values["token_logits"][0], S)
                if "key_frame" in call.values:
                    by_frame = frames.by_key_frame(curves, call.values["key_frame"][0], num_frames, mean=True)
                    pieces.append((call, by_frame[..., call["key_frames"]]))
                else:
                    pieces.append((call, frames.curves_to_frames(curves, S)))
        where = [(call["query_frames"], call["key_frames"], piece) for call, piece in pieces]
        return frames.assemble(where, num_frames)

    def stack(
        self, value: Callable[[int, int], Tensor], layers: Sequence[int], steps: Sequence[int]
    ) -> Tensor:
        """Stack value(layer, step) of some layers and steps -> [layers, steps, ...]."""
        return torch.stack([torch.stack([value(layer, step) for step in steps]) for layer in layers])

    def frame_matrices(self, name: str, layers: Sequence[int], steps: Sequence[int]) -> Tensor:
        """Stack frame_matrix of some layers and steps -> [layers, steps, H, F, F]."""
        return self.stack(lambda layer, step: self.frame_matrix(name, layer, step), layers, steps)


def padded(values: Tensor, length: int, filler: float) -> Tensor:
    """[..., n] -> [..., length]."""
    return torch.nn.functional.pad(values, (0, length - values.shape[-1]), value=filler)


def call_values(call: CapturedCall) -> dict[str, Any]:
    """Return the values of a call as caches have them: of one video, key and token numbers as int32."""
    found = {}
    for name, value in call.values.items():
        if name in ("token_logits", "token_probabilities"):
            found["attn_logits" if name == "token_logits" else "attn_weights"] = value
        elif name == "attended":
            found[name] = value
        else:
            found[name] = value[0] if value.is_floating_point() else value[0].int()
    return found


def version_of(run: Extraction) -> dict[str, int]:
    """schema_version 2 where keys are not frames in their places: who reads 1 alone would misread them."""
    in_place = all(call.layout is None or call.layout.is_in_place for call in run.records)
    return {} if in_place else {"schema_version": 2}


# --- figure4: the last block, an entry per layer
def figure4_requests(config: RunConfig, granularity: str, is_logits: bool = True) -> list[CaptureRequest]:
    """Ask for the last block of the chosen layers in the chosen pass."""
    if granularity != "token" and not is_logits:
        raise ConfigError(
            f"--capture probabilities needs --granularity token, not {granularity}; its mass is in every one"
        )
    last, layers = len(config.block_sizes) - 1, config.layer_indices
    frame = CaptureRequest(layers=layers, blocks=[last], steps=[config.step], granularity="frame")
    if granularity == "token":
        dtype = torch.float16 if is_logits else torch.float32
        return [replace(frame, granularity="token", is_logits=is_logits, token_dtype=dtype)]
    return [frame] if granularity == "frame" else [replace(frame, granularity="key"), frame]


def figure4_cache(run: Extraction, is_logits: bool = True) -> dict[str, Any]:
    """Return attention of the last block, an entry per layer: tokens, or key curve, mean logits and mass."""
    if run.blocks_done < len(run.config.block_sizes):
        raise RunError("the last block was not reached")
    layers = list(dict.fromkeys(run.config.layer_indices))
    seen = sorted({frame for call in run.records for frame in call["key_frames"]})
    sizes = {name: run.common[name] for name in ("num_frames", "frame_seq_length", "num_heads")}
    repeated = Figure4Layer.repeated(**sizes, query_frames=run.last_block, key_frames=seen)
    entries = []
    for layer in layers:
        entry: dict[str, Any] = {"layer_idx": layer, "is_logits": is_logits, **repeated}
        for call in run.records:
            if call.site.layer != layer:
                continue
            entry |= call_values(call) | _slots_of_call(call, run.config.num_frames)
            for name in ("frame_logits", "frame_mass"):
                if name in call.values:
                    entry[name] = frames.spread_keys(entry[name], call["key_frames"], run.config.num_frames)
        if "attn_logits" in entry:
            entry["attn_weights"] = entry["attn_logits"]  # older notebooks read either name
        entries.append(entry)
    own = {
        "format": "figure4",
        "is_logits": is_logits,
        "attention_weights": entries,
        "capture_method": "native_inference_capture",
        "layer_indices": layers,
        "query_frames": run.last_block,
        "key_frames": seen,
    }
    return {**run.common, **version_of(run), **run.pass_tag(run.config.step)._asdict(), **own}


def _slots_of_call(call: CapturedCall, num_frames: int) -> dict[str, Tensor]:
    """slot_frame, slot_position and tokens_kept of a call whose slots are not frames in their places."""
    if call.layout is None or call.layout.is_in_place:
        return {}
    slots = {name: torch.tensor(call[name], dtype=torch.int32) for name in ("slot_frame", "slot_position")}
    if "tokens_kept" in call.values:
        slots["tokens_kept"] = torch.zeros(num_frames, dtype=torch.int32)
        slots["tokens_kept"][call["key_frames"]] = call.values["tokens_kept"][0].int()
    return slots


# --- inference: token matrices, an entry per call
def inference_requests(
    config: RunConfig,
    blocks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    is_logits: bool = False,
) -> list[CaptureRequest]:
    """Ask for token matrices of the config's layers: float32 probabilities, or float16 logits.

    blocks None is the last one, and -1 counts from the end; steps None is the config's.
    """
    count = len(config.block_sizes)
    return [
        CaptureRequest(
            layers=config.layer_indices,
            blocks=[block + count if -count <= block < 0 else block for block in (blocks or [-1])],
            steps=steps or [config.step],
            is_logits=is_logits,
            token_dtype=torch.float16 if is_logits else torch.float32,
        )
    ]


def inference_cache(run: Extraction) -> dict[str, Any]:
    """Return the captured calls in the order of the rollout, each with its layer and pass."""
    names = ("is_logits", "block", "step", "timestep", "is_clean_pass", "query_frames", "q_shape", "k_shape")
    calls = [
        {"layer_idx": call.site.layer, **call_values(call), **{name: call[name] for name in names}}
        | {"key_frames": sorted(call["key_frames"])}
        for call in run.records
    ]
    own = {
        "format": "inference",
        "is_logits": run.records[0].is_logits,
        "attention_weights": calls,
        "layer_indices": list(dict.fromkeys(run.config.layer_indices)),
        "num_transformer_blocks": run.num_layers,
    }
    return {**run.common, **version_of(run), **own}


# --- layer: every frame pair of one layer
def layer_requests(
    config: RunConfig, granularity: Literal["token", "frame"] = "frame"
) -> list[CaptureRequest]:
    """Ask for all blocks of one layer in the chosen pass; both granularities give the same numbers."""
    return [
        CaptureRequest(layers=[config.layer_index], steps=[config.step], granularity=granularity, mass=False)
    ]


def layer_cache(run: Extraction, layer: int) -> dict[str, Any]:
    """Return mean logits of every frame pair of one layer, each block at the chosen pass."""
    step = run.config.step
    matrix = run.frame_matrix("frame_logits", layer, step)
    averages = average_columns(run, layer, step)
    return build_layer_cache(run.common, run.pass_tag(step), layer, matrix, run.last_block, averages=averages)


def average_columns(run: Extraction, layer: int, step: int) -> Tensor | None:
    """Mean logits of averages of frames that are gone [H, F, averages]; None where no block sees one."""
    name = "token_logits" if "token_logits" in run.quantities else "frame_logits"
    pieces = []
    for call in run.captured(name, layer, step):
        values = call.values
        if "slot_logits" in values:
            slot_frame = torch.tensor(call["slot_frame"])
            if count := most_averages(slot_frame):
                found = averages_of_slots(values["slot_logits"][0], slot_frame, count)
                pieces.append((call["query_frames"], found))
        elif "token_logits" in values and "key_frame" in values and AVERAGE in values["key_frame"][0]:
            curves = frames.query_frame_curves(values["token_logits"][0], run.common["frame_seq_length"])
            keys = values["key_frame"][0], values["key_token"][0]
            pieces.append((call["query_frames"], averages_of_tokens(curves, *keys, mean=True)))
    if not pieces:
        return None
    most = max(found.shape[-1] for _, found in pieces)
    columns = torch.full((len(pieces[0][1]), run.config.num_frames, most), torch.nan)
    for queries, found in pieces:
        columns[:, queries, : found.shape[-1]] = found
    return columns


# --- atlas: all layers, blocks and passes by frame
def atlas_requests(
    config: RunConfig,
    mass: bool,
    key_curve: bool,
    cross: bool,
    rope_bands: bool = False,
    query_key_means: bool = False,
    layers: Collection[int] | None = None,
) -> list[CaptureRequest]:
    """Ask for every block and pass of some layers (None: all) by frame; the key curve is the last block's."""
    by_frame = CaptureRequest(
        layers=layers, granularity="frame", mass=mass, rope_bands=rope_bands, query_key_means=query_key_means
    )
    requests = [by_frame]
    if key_curve:
        last = [len(config.block_sizes) - 1]
        requests.append(CaptureRequest(layers=layers, granularity="key", blocks=last))
    if cross:
        requests.append(CaptureRequest(layers=layers, granularity="frame", kinds=("cross",)))
    return requests


def atlas_cache(run: Extraction) -> dict[str, Any]:
    """Return everything a rollout's frame-level figures need, [layers, passes, H, F, F] and the like."""
    layers, steps, num_frames = run.layers, range(len(run.pass_timesteps)), run.config.num_frames
    atlas: dict[str, Any] = {
        **run.common,
        "format": "atlas",
        "is_logits": True,
        "layers": layers,
        "pass_timesteps": run.pass_timesteps,
        "frame_logits": run.frame_matrices("frame_logits", layers, steps),
    }
    clean = [run.pass_tag(step).is_clean_pass for step in steps]
    if clean != [t == 0 for t in run.pass_timesteps]:  # what readers take it for
        atlas["pass_is_clean"] = clean
    atlas |= slot_fields(run, layers, steps)
    for name in ("frame_mass", "frame_logits_by_band"):
        if name in run.quantities:
            atlas[name] = run.frame_matrices(name, layers, steps)
    if "frame_logits_by_band" in atlas:
        atlas["rope_bands"] = list(RotaryTable(run.records[0].q_shape[-1]).bands)

    def attended(layer: int, step: int) -> Tensor:  # bool [H, F, F]: False where an edit left one out, too
        calls = run.captured("frame_logits", layer, step)
        there = [(call, (~call.values["frame_logits"][0].isnan()).float()) for call in calls]
        pieces = [(call["query_frames"], call["key_frames"], piece) for call, piece in there]
        return frames.assemble(pieces, num_frames) == 1

    def cross_mass(layer: int, step: int) -> Tensor:  # [H, F, tokens]; NaN for frames that were not reached
        calls, words = run.captured("cross_mass", layer, step), len(run.prompt_tokens)
        rows = torch.full((run.common["num_heads"], num_frames, words), torch.nan)
        for call in calls:
            rows[:, call["query_frames"]] = call.values["cross_mass"][0, ..., :words].float()
        return rows

    def means(name: str) -> Callable[[int, int], Tensor]:  # [H, F, pairs, 2]; NaN for unreached frames
        def of_pass(layer: int, step: int) -> Tensor:
            calls = run.captured(name, layer, step)
            H, _, *pair = calls[0].values[name][0].shape
            rows = torch.full((H, num_frames, *pair), torch.nan)
            for call in calls:
                rows[:, call["query_frames"]] = call.values[name][0]
            return rows

        return of_pass

    for name in ("query_means", "key_means"):
        if name in run.quantities:
            atlas[name] = run.stack(means(name), layers, steps)
    if "attended" in run.quantities:
        atlas["attended"] = run.stack(attended, layers, steps)
    if "key_curve" in run.quantities:
        atlas |= last_key_curves(run, layers, steps)
    if "cross_mass" in run.quantities:
        atlas["cross_mass"] = run.stack(cross_mass, layers, steps)
        atlas["cross_tokens"] = run.prompt_tokens
    return atlas


def last_key_curves(run: Extraction, layers: Sequence[int], steps: Sequence[int]) -> dict[str, Tensor]:
    """key_curve [N, P, H, keys] float16 of the last block's queries, NaN where not attended.

    keys are the tokens of all frames, F·S. Where slots are not frames in their places they are the cache's
    keys as they lie, and key_frame, key_token, key_position [N, keys] say what each is.
    """
    S, num_frames, H = run.common["frame_seq_length"], run.config.num_frames, run.common["num_heads"]
    passes = run.config.passes_of_block(len(run.config.block_sizes) - 1)
    first = {layer: run.captured("key_curve", layer, passes[-1])[0] for layer in layers}
    named = {layer: call for layer, call in first.items() if "key_frame" in call.values}
    length = max(call.k_shape[1] for call in first.values()) if named else num_frames * S

    def curve(layer: int, step: int) -> Tensor:
        if step not in passes:  # a pass of the first block alone
            return torch.full((H, length), torch.nan).half()
        call = run.captured("key_curve", layer, step)[0]
        values = call.values["key_curve"][0]
        if named:
            return padded(values.half(), length, torch.nan)
        per_frame = values.unflatten(-1, (-1, S)).mT  # [H, S, Fk]
        return frames.spread_keys(per_frame, call["key_frames"], num_frames).mT.flatten(1).half()

    fields = {"key_curve": run.stack(curve, layers, steps)}
    for name, filler in (("key_frame", NO_KEY), ("key_token", 0), ("key_position", NO_KEY)) if named else ():
        rows = [padded(named[layer].values[name][0].int(), length, filler) for layer in layers]
        fields[name] = torch.stack(rows)
    return fields


def slot_fields(run: Extraction, layers: Sequence[int], steps: Sequence[int]) -> dict[str, Any]:
    """slot_frame, slot_position, slot_tokens [layers, blocks, slots]; slot_logits, slot_mass, tokens_kept.

    Nothing under the policies that version 1 of the schema knows: the whole past, and a window.
    """
    policy, num_frames = run.config.policy, run.config.num_frames
    if policy.name in ("full", "window") and not policy.source:
        return {}
    calls = [
        [run.captured("frame_logits", layer, step) for step in steps] for layer in layers
    ]  # [N][P][blocks]
    every = [call for of_layer in calls for blocks in of_layer for call in blocks]
    slots = max(len(call["slot_frame"]) for call in every)
    found: dict[str, Any] = {"schema_version": 2}
    for name, absent in (("slot_frame", NO_KEY), ("slot_position", NO_KEY), ("slot_tokens", 0)):
        rows = [
            [padded(torch.tensor(call[name], dtype=torch.int32), slots, absent) for call in of_layer[0]]
            for of_layer in calls
        ]
        found[name] = torch.stack([torch.stack(row) for row in rows])
    layouts = [call.layout for call in calls[0][0] if call.layout is not None]
    found["sink_slots"] = [layout.sink.stop for layout in layouts]
    found["memory_slots"] = [sum(bool(slot.items) for slot in layout.slots) for layout in layouts]
    if policy.keeps_whole_frames and not any("slot_logits" in call.values for call in every):
        return found  # a release may have zeros among its frames

    def rows_of(name: str, blocks: Sequence[CapturedCall]) -> Tensor:
        """Values of every slot for the queries of all blocks [H, F, slots]; NaN: no slot, or no query."""
        of_frames = name.replace("slot", "frame")  # where frames are the slots
        rows = torch.full((run.common["num_heads"], num_frames, slots), torch.nan)
        for call in blocks:
            values = call.values.get(name, call.values[of_frames])[0]
            rows[:, call["query_frames"], : values.shape[-1]] = values.float()
        return rows

    for name in ("slot_logits", "slot_mass"):
        if name.replace("slot", "frame") in run.quantities:
            parts = [torch.stack([rows_of(name, blocks) for blocks in of_layer]) for of_layer in calls]
            found[name] = torch.stack(parts)  # [layers, P, H, F, slots]
    if policy.name == "per_head" and "slot_mass" in found:
        _add_averages(found)
    if policy.name == "participative":
        kept = torch.zeros(len(layers), len(calls[0][0]), num_frames, dtype=torch.int32)
        for n, of_layer in enumerate(calls):
            for b, call in enumerate(of_layer[0]):
                counts = call.values.get("tokens_kept")
                whole = run.common["frame_seq_length"]
                kept[n, b, call["key_frames"]] = whole if counts is None else counts[0].int()
        found["tokens_kept"] = kept
    return found


def _add_averages(found: dict[str, Any]) -> None:
    """Add one slot for the mass on averages, which heads of a class may see and which are no frames."""
    mass = found["slot_mass"]  # [N, P, H, F, slots]
    rest = (1 - mass.nansum(-1, keepdim=True)).masked_fill(mass.isnan().all(-1, keepdim=True), torch.nan)
    if not (rest > LEAST_MASS).any():
        return
    found["slot_mass"] = torch.cat([mass, rest.clamp(min=0)], -1)
    slots = mass.shape[-1] + 1
    for name, filler in (
        ("slot_logits", torch.nan), ("slot_frame", AVERAGE), ("slot_position", AVERAGE), ("slot_tokens", 0)
    ):  # fmt: skip
        found[name] = padded(found[name], slots, filler)

"""A rollout in each cache format: what it asks of the capture (*_requests), and its dict (*_cache)."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
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
from wan.keys import RotaryTable

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
    def blocks_done(self) -> int:
        return self.common.get("blocks_done", len(self.config.block_sizes))

    @property
    def last_block(self) -> list[int]:
        """Frames of the last finished block."""
        return block_frames(self.config.block_sizes, self.blocks_done - 1)

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
        for (name, layer, step), here in calls.items():
            most = max(len(calls.get((name, other, step), ())) for other in {key[1] for key in calls})
            if len(here) < most:  # its rows would be NaN
                raise RunError(
                    f"layer {layer}, step {step}: {len(here)} of {most} calls reported their {name}"
                )
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
        """Assemble frame_logits, also from token logits, or frame_mass of all blocks [H, F, F]."""
        S, num_frames = self.common["frame_seq_length"], self.config.num_frames
        from_tokens = name == "frame_logits" and "token_logits" in self.quantities
        pieces = []
        for call in self.captured("token_logits" if from_tokens else name, layer, step):
            if not from_tokens:
                piece = call.values[name][0]
            else:
                piece = frames.query_frame_curves(call.values["token_logits"][0], S)
                if "key_frame" in call.values:
                    keys = call.values["key_frame"][0]
                    piece = frames.by_key_frame(piece, keys, num_frames, mean=True)[..., call["key_frames"]]
                else:
                    piece = frames.curves_to_frames(piece, S)
            pieces.append((call["query_frames"], call["key_frames"], piece))
        return frames.assemble(pieces, num_frames)

    def query_rows(self, name: str, layer: int, step: int) -> Tensor:
        """Put a quantity per query frame of all blocks together [H, F, ...], NaN for unreached frames."""
        calls = self.captured(name, layer, step)
        return rows_of(((c["query_frames"], c.values[name][0]) for c in calls), self.config.num_frames)

    def frame_matrices(self, name: str, layers: Sequence[int], steps: Sequence[int]) -> Tensor:
        """Stack frame_matrix of some layers and steps -> [layers, steps, H, F, F]."""
        return stack(lambda layer, step: self.frame_matrix(name, layer, step), layers, steps)


def stack(value: Callable[..., Tensor], rows: Iterable[int], columns: Iterable[int]) -> Tensor:
    """Stack value(row, column), of layers and steps for example -> [rows, columns, ...]."""
    return torch.stack([torch.stack([value(row, column) for column in columns]) for row in rows])


def rows_of(pieces: Iterable[tuple[Sequence[int], Tensor]], num_frames: int, width: int = 0) -> Tensor:
    """Pieces (query_frames, values [H, Fq, ..., n]) -> [H, F, ..., width or the largest n], NaN elsewhere."""
    pieces = list(pieces)
    width = width or max(values.shape[-1] for _, values in pieces)
    heads, _, *between, _ = pieces[0][1].shape
    rows = torch.full((heads, num_frames, *between, width), torch.nan)
    for queries, values in pieces:
        rows[:, queries, ..., : values.shape[-1]] = values.float()
    return rows


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
    num_frames = run.config.num_frames
    layers = list(dict.fromkeys(run.config.layer_indices))
    seen = sorted({frame for call in run.records for frame in call["key_frames"]})
    sizes = {name: run.common[name] for name in ("num_frames", "frame_seq_length", "num_heads")}
    repeated = Figure4Layer.repeated(**sizes, query_frames=run.last_block, key_frames=seen)
    entries: dict[int, dict[str, Any]] = {
        layer: {"layer_idx": layer, "is_logits": is_logits, **repeated} for layer in layers
    }
    for call in run.records:
        if call.site.layer not in entries:
            continue
        entry, keys = entries[call.site.layer], call["key_frames"]
        entry |= call_values(call)
        for name in {"frame_logits", "frame_mass"} & call.values.keys():
            entry[name] = frames.spread_keys(entry[name], keys, num_frames)
        if call.layout is not None and not call.layout.is_in_place:
            for name in ("slot_frame", "slot_position"):
                entry[name] = torch.tensor(call[name], dtype=torch.int32)
            if "tokens_kept" in call.values:
                entry["tokens_kept"] = torch.zeros(num_frames, dtype=torch.int32)
                entry["tokens_kept"][keys] = call.values["tokens_kept"][0].int()
        if "attn_logits" in entry:
            entry["attn_weights"] = entry["attn_logits"]  # older notebooks read either name
    own = {
        "format": "figure4",
        "is_logits": is_logits,
        "attention_weights": list(entries.values()),
        "capture_method": "native_inference_capture",
        "layer_indices": layers,
        "query_frames": run.last_block,
        "key_frames": seen,
    }
    return {**run.common, **version_of(run), **run.pass_tag(run.config.step)._asdict(), **own}


# --- inference: token matrices, an entry per call
def counted_blocks(blocks: Sequence[int] | None, count: int) -> list[int] | None:
    """Count blocks from 0, where -1 was the last one."""
    return None if blocks is None else [b + count if -count <= b < 0 else b for b in blocks]


def inference_requests(
    config: RunConfig,
    blocks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    is_logits: bool = False,
) -> list[CaptureRequest]:
    """Ask for token matrices of the config's layers; blocks None: the last one, steps None: the config's."""
    request = CaptureRequest(
        layers=config.layer_indices,
        blocks=counted_blocks(blocks or [-1], len(config.block_sizes)),
        steps=steps or [config.step],
        is_logits=is_logits,
        token_dtype=torch.float16 if is_logits else torch.float32,
    )
    return [request]


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
    chosen: dict[str, Any] = {"layers": [config.layer_index], "steps": [config.step]}
    return [CaptureRequest(**chosen, granularity=granularity, mass=False)]


def layer_cache(run: Extraction, layer: int) -> dict[str, Any]:
    """Return mean logits of every frame pair of one layer, each block at the chosen pass."""
    step, name = run.config.step, "token_logits" if "token_logits" in run.quantities else "frame_logits"
    pieces = []  # of keys that are averages of frames that are gone
    for call in run.captured(name, layer, step):
        values = call.values
        if "slot_logits" in values:
            slot_frame = torch.tensor(call["slot_frame"])
            if count := most_averages(slot_frame):
                averages = averages_of_slots(values["slot_logits"][0], slot_frame, count)
                pieces.append((call["query_frames"], averages))
        elif "token_logits" in values and "key_frame" in values and AVERAGE in values["key_frame"][0]:
            curves = frames.query_frame_curves(values["token_logits"][0], run.common["frame_seq_length"])
            keys = values["key_frame"][0], values["key_token"][0]
            pieces.append((call["query_frames"], averages_of_tokens(curves, *keys, mean=True)))
    columns = rows_of(pieces, run.config.num_frames) if pieces else None
    matrix = run.frame_matrix("frame_logits", layer, step)
    return build_layer_cache(run.common, run.pass_tag(step), layer, matrix, run.last_block, averages=columns)


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
    frame = CaptureRequest(layers=layers, granularity="frame")
    requests = [replace(frame, mass=mass, rope_bands=rope_bands, query_key_means=query_key_means)]
    if key_curve:
        requests.append(replace(frame, granularity="key", blocks=[len(config.block_sizes) - 1]))
    if cross:
        requests.append(replace(frame, kinds=("cross",)))
    return requests


def atlas_cache(run: Extraction) -> dict[str, Any]:
    """Return everything a rollout's frame-level figures need, [layers, passes, H, F, F] and the like."""
    layers, steps = run.layers, range(len(run.pass_timesteps))
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
    for name in ("query_means", "key_means"):
        if name in run.quantities:
            atlas[name] = stack(
                lambda layer, step, name=name: run.query_rows(name, layer, step), layers, steps
            )

    def attended(layer: int, step: int) -> Tensor:  # bool [H, F, F]: False where an edit left one out, too
        calls = run.captured("frame_logits", layer, step)
        there = [(call, (~call.values["frame_logits"][0].isnan()).float()) for call in calls]
        pieces = [(call["query_frames"], call["key_frames"], piece) for call, piece in there]
        return frames.assemble(pieces, run.config.num_frames) == 1

    if "attended" in run.quantities:
        atlas["attended"] = stack(attended, layers, steps)
    if "key_curve" in run.quantities:
        atlas |= last_key_curves(run, layers, steps)
    if "cross_mass" in run.quantities:
        words = len(run.prompt_tokens)
        rows = stack(
            lambda layer, step: run.query_rows("cross_mass", layer, step)[..., :words], layers, steps
        )
        atlas |= {"cross_mass": rows, "cross_tokens": run.prompt_tokens}
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

    fields = {"key_curve": stack(curve, layers, steps)}
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
    every = [call for layer in layers for step in steps for call in run.captured("frame_logits", layer, step)]
    slots = max(len(call["slot_frame"]) for call in every)
    blocks = range(len(run.captured("frame_logits", layers[0], steps[0])))

    def of_block(name: str, absent: int) -> Tensor:  # in the first pass -> [layers, blocks, slots]
        def numbers(layer: int, block: int) -> Tensor:
            values = run.captured("frame_logits", layer, steps[0])[block][name]
            return padded(torch.tensor(values, dtype=torch.int32), slots, absent)

        return stack(numbers, layers, blocks)

    found: dict[str, Any] = {"schema_version": 2}
    for name, absent in (("slot_frame", NO_KEY), ("slot_position", NO_KEY), ("slot_tokens", 0)):
        found[name] = of_block(name, absent)
    first = run.captured("frame_logits", layers[0], steps[0])
    layouts = [call.layout for call in first if call.layout is not None]
    found["sink_slots"] = [layout.sink.stop for layout in layouts]
    found["memory_slots"] = [sum(bool(slot.items) for slot in layout.slots) for layout in layouts]
    if policy.keeps_whole_frames and not any("slot_logits" in call.values for call in every):
        return found  # a release may have zeros among its frames

    def of_slots(name: str, layer: int, step: int) -> Tensor:
        """Values of every slot for the queries of all blocks [H, F, slots]; NaN: no slot, or no query."""
        of_frames = name.replace("slot", "frame")  # where frames are the slots
        calls = run.captured("frame_logits", layer, step)
        pieces = [(c["query_frames"], c.values.get(name, c.values[of_frames])[0]) for c in calls]
        return rows_of(pieces, num_frames, slots)

    for name in ("slot_logits", "slot_mass"):
        if name.replace("slot", "frame") in run.quantities:
            found[name] = stack(lambda layer, step, name=name: of_slots(name, layer, step), layers, steps)
    if policy.by_heads and "slot_mass" in found:
        # One slot more for the mass on averages, which heads of a class may see and which are no frames:
        mass = found["slot_mass"]  # [N, P, H, F, slots]
        rest = (1 - mass.nansum(-1, keepdim=True)).masked_fill(mass.isnan().all(-1, keepdim=True), torch.nan)
        if (rest > LEAST_MASS).any():
            found["slot_mass"] = torch.cat([mass, rest.clamp(min=0)], -1)
            fillers = {
                "slot_logits": torch.nan,
                "slot_frame": AVERAGE,
                "slot_position": AVERAGE,
                "slot_tokens": 0,
            }
            found |= {name: padded(found[name], slots + 1, filler) for name, filler in fillers.items()}
    if policy.name == "participative":

        def kept(layer: int, block: int) -> Tensor:  # tokens of each frame [F]
            call, counts = run.captured("frame_logits", layer, steps[0])[block], torch.zeros(num_frames).int()
            chosen, whole = call.values.get("tokens_kept"), run.common["frame_seq_length"]
            counts[call["key_frames"]] = whole if chosen is None else chosen[0].int()
            return counts

        found["tokens_kept"] = stack(kept, layers, blocks)
    return found

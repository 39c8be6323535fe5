"""Each cache format: what it asks of the capture (*_requests), and its dict of a run (*_cache)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.caches import files, formats, outputs, store
from experiments.caches.frames import (
    assemble,
    averages_of_slots,
    averages_of_tokens,
    most_averages,
    query_frame_curves,
    rows_of,
    spread_keys,
    stack,
)
from experiments.provenance import model_facts
from experiments.runs import Run
from wan import capture, errors
from wan.blocks import VIDEO_FRAMES_PER_LATENT, block_ranges
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.keys import RotaryTable, key_frames, key_tokens
from wan.policies import policy_of
from wan.sites import check_indices

LEAST_MASS = 1e-4  # on averages of frames: what is less is rounding
ABSENT = {"key_frame": formats.NO_KEY, "key_position": formats.NO_KEY, "key_token": 0, "attended": 0}
Place = tuple[int, int, int]  # frame, row, column; -1: all of them


def require_free_cache(
    path: str | Path, kind: str, parts: Mapping[str, Any], config: RunConfig, overwrite: bool = False
) -> None:
    """Raise CacheError, before a run, unless overwrite, where a file that must stay is at its cache's path.

    parts are those of the cache to come, as caches/contents.py has them.
    """
    if Path(path).exists() and not overwrite:
        new = outputs.Contents(f"{kind} cache", model_facts(config), parts)
        outputs.require_replaceable(path, new, store.cache_contents)


def padded(values: Tensor, length: int, filler: float) -> Tensor:
    """[..., n] -> [..., length]."""
    return torch.nn.functional.pad(values, (0, length - values.shape[-1]), value=filler)


def call_values(call: capture.CapturedCall) -> dict[str, Any]:
    """Return the values of a call as caches have them: of one video, key and token numbers as int32."""
    names = {"token_logits": "attn_logits", "token_probabilities": "attn_weights"}
    values = {}
    for name, value in call.values.items():
        if name not in (*names, "attended"):
            value = value[0]
            if not value.is_floating_point():
                value = value.int()
        values[names.get(name, name)] = value
    return values


def with_fields(run: Run, **fields: Any) -> dict[str, Any]:
    """Return a cache; its schema_version is 2 where keys are not frames in their places."""
    cache = dict(run.common)
    if not all(call.layout is None or call.layout.is_in_place for call in run.records):
        cache["schema_version"] = 2
    return cache | fields


# --- figure4: the last block, an entry per layer
def figure4_requests(
    config: RunConfig, granularity: str, is_logits: bool = True
) -> list[capture.CaptureRequest]:
    """Ask for the last block of the chosen layers in the chosen pass."""
    if granularity != "token" and not is_logits:
        raise errors.ConfigError(
            f"--capture probabilities needs --granularity token, not {granularity}; its mass is in every one"
        )
    frame = capture.CaptureRequest(
        layers=config.layer_indices,
        blocks=[len(config.block_sizes) - 1],
        steps=[config.step],
        granularity="frame",
    )
    if granularity == "frame":
        return [frame]
    if granularity == "key":
        return [replace(frame, granularity="key"), frame]
    dtype = token_dtype(is_logits)
    return [replace(frame, granularity="token", is_logits=is_logits, token_dtype=dtype)]


def token_dtype(is_logits: bool) -> torch.dtype:
    """Return float16 for logits, which fit; probabilities of thousands of keys are too small for it."""
    if is_logits:
        return torch.float16
    return torch.float32


def figure4_cache(run: Run, is_logits: bool = True) -> dict[str, Any]:
    """Return attention of the last block, an entry per layer: tokens, or key curve, mean logits and mass."""
    if run.common.get("partial"):
        raise files.RunError("the last block was not reached")
    num_frames = run.config.num_frames
    # 1. Layers may see different frames, where a policy chooses by layer.
    layouts = {call.site.layer: call.layout for call in run.records if call.layout is not None}
    key_frames_seen = sorted({frame for layout in layouts.values() for frame in layout.columns})
    # 2. Every entry repeats lengths that follow from the cache's own fields: older notebooks read them there.
    entries = dict[int, dict[str, Any]]()
    for layer in run.config.layer_indices:
        entries[layer] = {
            "num_frames": run.common["num_frames"],
            "frame_seq_length": run.common["frame_seq_length"],
            "num_heads": run.common["num_heads"],
            "num_query_frames": len(run.last_block),
            "num_key_frames": len(key_frames_seen),
            "layer_idx": layer,
            "is_logits": is_logits,
            "last_block_start_frame": run.last_block[0],
        }
    # 3. The values of each call, by global frame.
    for call in run.records:
        if call.site.layer not in entries:
            continue
        entry, layout = entries[call.site.layer], layouts[call.site.layer]
        columns = list(layout.columns)
        entry |= call_values(call)
        for name in {"frame_logits", "frame_mass"} & call.values.keys():
            entry[name] = spread_keys(entry[name], columns, num_frames)
        if not layout.is_in_place:
            entry["slot_frame"] = torch.tensor(layout.frames, dtype=torch.int32)
            entry["slot_position"] = torch.tensor(layout.positions, dtype=torch.int32)
            if "tokens_kept" in call.values:
                entry["tokens_kept"] = torch.zeros(num_frames, dtype=torch.int32)
                entry["tokens_kept"][columns] = call.values["tokens_kept"][0].int()
        if "attn_logits" in entry:
            entry["attn_weights"] = entry["attn_logits"]  # older notebooks read either name
    return with_fields(
        run,
        **run.pass_tag(run.config.step)._asdict(),
        format="figure4",
        is_logits=is_logits,
        attention_weights=list(entries.values()),
        capture_method="native_inference_capture",
        layer_indices=list(entries),
        query_frames=run.last_block,
        key_frames=key_frames_seen,
    )


# --- inference: token matrices, an entry per call
def counted_blocks(blocks: Sequence[int] | None, count: int) -> list[int] | None:
    """Count blocks from 0, where -1 was the last one; None stays None."""
    if blocks is None:
        return None
    counted = []
    for block in blocks:
        if -count <= block < 0:
            block += count
        counted.append(block)
    return counted


def inference_requests(
    config: RunConfig,
    blocks: Sequence[int] = (-1,),
    steps: Sequence[int] | None = None,
    is_logits: bool = False,
) -> list[capture.CaptureRequest]:
    """Ask for token matrices of the config's layers; steps None: the config's."""
    request = capture.CaptureRequest(
        layers=config.layer_indices,
        blocks=errors.as_numbers("blocks", counted_blocks(blocks, len(config.block_sizes))),
        steps=errors.as_numbers("steps", steps or [config.step]),
        is_logits=is_logits,
        token_dtype=token_dtype(is_logits),
    )
    return [request]


def inference_cache(run: Run) -> dict[str, Any]:
    """Return the captured calls in the order of the rollout, those of a pass as layer_indices names them."""
    names = ("is_logits", "block", "step", "timestep", "is_clean_pass", "query_frames", "q_shape", "k_shape")
    layers, records, calls = run.config.layer_indices, list(run.records), []
    if layers != sorted(layers):
        records.sort(key=lambda call: (call["block"], call["step"], layers.index(call.site.layer)))
    for call in records:
        facts = {name: call[name] for name in names} | {"key_frames": sorted(call["key_frames"])}
        calls.append({"layer_idx": call.site.layer} | call_values(call) | facts)
    return with_fields(
        run,
        format="inference",
        is_logits=run.records[0].is_logits,
        attention_weights=calls,
        layer_indices=list(layers),
        num_transformer_blocks=run.num_layers,
    )


# --- layer: every frame pair of one layer
def layer_requests(
    config: RunConfig, granularity: Literal["token", "frame"] = "frame", every: bool = False
) -> list[capture.CaptureRequest]:
    """Ask for all blocks of one layer, or of every one, in the chosen pass; both granularities agree."""
    layers = [config.layer_index]
    if every:
        layers = list(range(read_model_config(config.ckpt_dir).num_layers))
    return [capture.CaptureRequest(layers, steps=[config.step], granularity=granularity, mass=False)]


def layer_cache(run: Run, layer: int) -> dict[str, Any]:
    """Return mean logits of every frame pair of one layer, each block at the chosen pass."""
    step = run.config.step
    name = "frame_logits"
    if "token_logits" in run.quantities:
        name = "token_logits"
    # Keys that are averages of evicted frames have columns of their own.
    pieces = []
    for call in run.captured(name, layer, step):
        averages = _averages(call, run.common["frame_seq_length"])
        if averages is not None:
            pieces.append((call["query_frames"], averages))
    columns: Tensor | None = None
    if pieces:
        columns = rows_of(pieces, run.config.num_frames)
    matrix = run.frame_matrix("frame_logits", layer, step)
    return formats.build_layer_cache(
        run.common, run.pass_tag(step), layer, matrix, run.last_block, averages=columns
    )


def _averages(call: capture.CapturedCall, tokens_per_frame: int) -> Tensor | None:
    """Return the mean logits of a call on averages of frames [H, F, averages]; None where it has none."""
    values = call.values
    if "slot_logits" in values:
        slot_frame = torch.tensor(call["slot_frame"])
        count = most_averages(slot_frame)
        if not count:
            return None
        return averages_of_slots(values["slot_logits"][0], slot_frame, count)
    if "token_logits" in values and "key_frame" in values and formats.AVERAGE in values["key_frame"][0]:
        curves = query_frame_curves(values["token_logits"][0], tokens_per_frame)
        return averages_of_tokens(curves, values["key_frame"][0], values["key_token"][0], mean=True)
    return None


# --- atlas: all layers, blocks and passes by frame
def atlas_requests(
    config: RunConfig,
    mass: bool,
    key_curve: bool,
    cross: bool,
    rope_bands: bool = False,
    query_key_means: bool = False,
    layers: Collection[int] | None = None,
) -> list[capture.CaptureRequest]:
    """Ask for every block and pass of some layers (None: all) by frame; the key curve is the last block's."""
    # Keys of the last block alone: a curve of every block would be as large as the KV cache
    frame = capture.CaptureRequest(layers=layers, granularity="frame")
    requests = [replace(frame, mass=mass, rope_bands=rope_bands, query_key_means=query_key_means)]
    if key_curve:
        requests.append(replace(frame, granularity="key", blocks=[len(config.block_sizes) - 1]))
    if cross:
        requests.append(replace(frame, kinds=("cross",)))
    return requests


def atlas_cache(run: Run) -> dict[str, Any]:
    """Return everything a rollout's frame-level figures need, [layers, passes, H, F, F] and the like."""
    layers, steps, quantities = run.layers, range(len(run.pass_timesteps)), run.quantities
    # 1. What every atlas has.
    atlas: files.Record = {
        **run.common,
        "format": "atlas",
        "is_logits": True,
        "layers": layers,
        "pass_timesteps": run.pass_timesteps,
        "frame_logits": run.frame_matrices("frame_logits", layers, steps),
    }
    # Readers take t = 0 for the clean pass, which context_noise changes.
    is_clean = [run.pass_tag(step).is_clean_pass for step in steps]
    if is_clean != [timestep == 0 for timestep in run.pass_timesteps]:
        atlas["pass_is_clean"] = is_clean
    atlas |= slot_fields(run, layers, steps)
    # 2. What was asked for beside the logits.
    for name in ("frame_mass", "frame_logits_by_band"):
        if name in quantities:
            atlas[name] = run.frame_matrices(name, layers, steps)
    if "frame_logits_by_band" in atlas:
        atlas["rope_bands"] = list(RotaryTable(run.records[0].q_shape[-1]).bands)
    for name in ("query_means", "key_means"):
        if name in quantities:
            atlas[name] = stack(partial(run.query_rows, name), layers, steps)
    if "attended" in quantities:
        atlas["attended"] = stack(partial(_attended_frames, run), layers, steps)
    if "key_curve" in quantities:
        atlas |= last_key_curves(run, layers, steps)
    if "cross_mass" in quantities:
        rows = stack(partial(run.query_rows, "cross_mass"), layers, steps)
        atlas["cross_mass"] = rows[..., : len(run.prompt_tokens)].contiguous()
        atlas["cross_tokens"] = run.prompt_tokens
    return atlas


def _attended_frames(run: Run, layer: int, step: int) -> Tensor:
    """Return which frames were attended, bool [H, F, F]: False also where an edit left one out."""
    pieces = []
    for call in run.captured("frame_logits", layer, step):
        is_seen = (~call.values["frame_logits"][0].isnan()).float()
        pieces.append((call["query_frames"], call["key_frames"], is_seen))
    return assemble(pieces, run.config.num_frames) == 1


def last_key_curves(run: Run, layers: Sequence[int], steps: Sequence[int]) -> dict[str, Tensor]:
    """key_curve [N, P, H, keys] float16 of the last block's queries, NaN where not attended.

    keys are the tokens of all frames, F·S. Where slots are not frames in their places they are the cache's
    keys as they lie, and key_frame, key_token, key_position [N, keys] say what each is.
    """
    S, num_frames, num_heads = run.common["frame_seq_length"], run.config.num_frames, run.common["num_heads"]
    passes = run.config.passes_of_block(len(run.config.block_sizes) - 1)
    first = {layer: run.captured("key_curve", layer, passes[-1])[0] for layer in layers}
    # Names say which token each key is, where slots are not frames in their places.
    has_names = any("key_frame" in call.values for call in first.values())
    length = num_frames * S
    if has_names:
        length = max(call.k_shape[1] for call in first.values())

    def curve(layer: int, step: int) -> Tensor:
        if step not in passes:  # a pass of the first block alone
            return torch.full((num_heads, length), torch.nan).half()
        call = run.captured("key_curve", layer, step)[0]
        values = call.values["key_curve"][0]
        if has_names:
            return padded(values.half(), length, torch.nan)
        per_frame = values.unflatten(-1, (-1, S)).mT  # [H, S, Fk]
        return spread_keys(per_frame, call["key_frames"], num_frames).mT.flatten(1).half()

    fields = {"key_curve": stack(curve, layers, steps)}
    if has_names:
        for name in ("key_frame", "key_token", "key_position"):
            rows = [padded(first[layer].values[name][0].int(), length, ABSENT[name]) for layer in layers]
            fields[name] = torch.stack(rows)
    return fields


def slot_fields(run: Run, layers: Sequence[int], steps: Sequence[int]) -> dict[str, Any]:
    """slot_frame, slot_position, slot_tokens [layers, blocks, slots]; slot_logits, slot_mass, tokens_kept.

    Nothing under the policies that version 1 of the schema knows: the whole past, and a window.
    """
    policy, num_frames = policy_of(run.config), run.config.num_frames
    if policy.name in ("full", "window") and not policy.release:
        return {}
    # 1. What each slot of the cache held in each block: a frame, an average, or nothing.
    every_call = [
        call for layer in layers for step in steps for call in run.captured("frame_logits", layer, step)
    ]
    num_slots = max(len(call["slot_frame"]) for call in every_call)
    of_blocks = {layer: run.captured("frame_logits", layer, steps[0]) for layer in layers}
    fields: files.Record = {"schema_version": 2}
    for name, absent in (
        ("slot_frame", formats.NO_KEY),
        ("slot_position", formats.NO_KEY),
        ("slot_tokens", 0),
    ):
        rows = []
        for layer in layers:
            numbers = [torch.tensor(call[name], dtype=torch.int32) for call in of_blocks[layer]]
            rows.append(torch.stack([padded(x, num_slots, absent) for x in numbers]))
        fields[name] = torch.stack(rows)
    layouts = [call.layout for call in of_blocks[layers[0]] if call.layout is not None]
    fields["sink_slots"] = [layout.sink.stop for layout in layouts]
    fields["memory_slots"] = [sum(bool(slot.items) for slot in layout.slots) for layout in layouts]
    # A release may have zeros among its frames, though its policy keeps whole ones.
    if policy.keeps_whole_frames and not any("slot_logits" in call.values for call in every_call):
        return fields
    # 2. Logits and mass by slot [layers, passes, H, F, slots]; NaN: no slot, or no query.
    for name, of_frames in (("slot_logits", "frame_logits"), ("slot_mass", "frame_mass")):

        def of_slots(layer: int, step: int, name: str = name, of_frames: str = of_frames) -> Tensor:
            pieces = []
            for call in run.captured("frame_logits", layer, step):
                values = call.values.get(name, call.values[of_frames])
                pieces.append((call["query_frames"], values[0]))
            return rows_of(pieces, num_frames, num_slots)

        if of_frames in run.quantities:
            fields[name] = stack(of_slots, layers, steps)
    # 3. One slot more for the mass on averages, which heads of a class may see and which are no frames.
    if policy.by_heads and "slot_mass" in fields:
        mass = fields["slot_mass"]
        is_absent = mass.isnan().all(-1, keepdim=True)
        rest = (1 - mass.nansum(-1, keepdim=True)).masked_fill(is_absent, torch.nan)
        if (rest > LEAST_MASS).any():
            fields["slot_mass"] = torch.cat([mass, rest.clamp(min=0)], -1)
            fillers = {"slot_frame": formats.AVERAGE, "slot_position": formats.AVERAGE, "slot_tokens": 0}
            for name, filler in (fillers | {"slot_logits": torch.nan}).items():
                fields[name] = padded(fields[name], num_slots + 1, filler)
    # 4. How many tokens of each frame were kept, where a policy chooses tokens.
    if policy.name == "participative":

        def tokens_kept(layer: int, block: int) -> Tensor:
            call = of_blocks[layer][block]
            counts = torch.zeros(num_frames).int()
            counts[call["key_frames"]] = run.common["frame_seq_length"]
            if "tokens_kept" in call.values:
                counts[call["key_frames"]] = call.values["tokens_kept"][0].int()
            return counts

        fields["tokens_kept"] = stack(tokens_kept, layers, range(len(of_blocks[layers[0]])))
    return fields


# --- maps: what some places see of every key token
def token_grid(config: RunConfig) -> tuple[int, int]:
    """Rows and columns of the tokens of a frame."""
    _, high, wide = read_model_config(config.ckpt_dir).patch_size
    return config.height // high, config.width // wide


def pixel_grid(config: RunConfig) -> tuple[int, int]:
    """Rows and columns of the pixels of a video frame."""
    return config.height * config.pixels_per_latent, config.width * config.pixels_per_latent


def patches_of_grid(frame: int, rows: int, columns: int, grid: tuple[int, int]) -> list[Place]:
    """Choose rows x columns patches of a frame, evenly spaced. ConfigError where it has fewer."""
    places = []
    for name, count, tokens in (("rows", rows, grid[0]), ("columns", columns, grid[1])):
        if not 1 <= count <= tokens:
            raise errors.ConfigError(
                f"a frame has {tokens} {name} of tokens, and the grid of patches {count}"
            )
        # The middles of equal parts
        places.append([(2 * i + 1) * tokens // (2 * count) for i in range(count)])
    return [(frame, row, column) for row in places[0] for column in places[1]]


def patches_of_mask(mask: Any, config: RunConfig) -> list[Place]:
    """Return the patches that a mask covers at least by half, frame by frame, row by row.

    mask: boolean [F, H, W], in latent or video frames, of tokens or pixels. ConfigError for others, and for
    a mask that covers none.
    """
    num_frames, grid = config.num_frames, token_grid(config)
    with errors.library_reads("a mask of queries", remedy="give a boolean array or tensor"):
        drawn, (rows, columns) = torch.as_tensor(mask), grid
    video_frames = 1 + VIDEO_FRAMES_PER_LATENT * (num_frames - 1)
    high, wide = pixel_grid(config)
    fits = drawn.ndim == 3 and len(drawn) in (num_frames, video_frames)
    if not fits or drawn.dtype != torch.bool or tuple(drawn.shape[1:]) not in (grid, (high, wide)):
        raise errors.ConfigError(
            f"a mask of queries is boolean, [{num_frames} or {video_frames} frames] of {rows} x {columns} "
            f"tokens or {high} x {wide} pixels, not {drawn.dtype} {list(drawn.shape)}"
        )
    # 1. Shares of tokens, [F, rows, columns]
    shares = drawn.float().unflatten(1, (rows, -1)).unflatten(3, (columns, -1)).mean((2, 4))
    # 2. Of latent frames: the VAE encodes the first video frame alone, then groups of four
    if len(drawn) == video_frames > num_frames:
        groups = shares[1:].unflatten(0, (num_frames - 1, -1)).mean(1)
        shares = torch.cat([shares[:1], groups])
    if not (shares >= 0.5).any():
        raise errors.ConfigError("the mask of queries covers half of no token; draw a larger one")
    return [(frame, row, column) for frame, row, column in (shares >= 0.5).nonzero().tolist()]


def patches_of_image(image: Any, frame: int | None, config: RunConfig) -> list[Place]:
    """Return the patches of a latent frame (None: the last) that are white in a grey image of any size."""
    if frame is None:
        frame = config.num_frames - 1
    check_indices("query_mask: frame", [frame], config.num_frames)
    mask = torch.zeros(config.num_frames, *pixel_grid(config), dtype=torch.bool)
    small = image.resize((mask.shape[2], mask.shape[1]))
    mask[frame] = torch.tensor(list(small.tobytes())).view(mask.shape[1:]) > 127
    return patches_of_mask(mask, config)


def map_requests(
    config: RunConfig,
    grid: tuple[int, int],
    places: Sequence[Place] = (),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    words: bool = False,
) -> list[capture.CaptureRequest]:
    """Ask for maps of some places; without places of all queries of each block (blocks None: the last one).

    Blocks of places that name a frame are those that denoise it. words adds the maps of the prompt's words
    over the query frames. Raises ConfigError for a place that is named twice or is not in the video.
    """
    # 1. Each place as a query, and the blocks that denoise their frames.
    ranges = block_ranges(config.block_sizes)
    block_of_frame = {frame: block for block, frames in enumerate(ranges) for frame in frames}
    queries, blocks_of_queries = list[capture.MapQuery](), set[int]()
    for number, place in enumerate(places or [(formats.ANY, formats.ANY, formats.ANY)]):
        if place in places[:number]:
            raise errors.ConfigError(f"query {_name_of(place)} is named twice")
        _check_place(place, len(block_of_frame), grid)
        frame, row, column = place
        token = capture.ALL
        if row != formats.ANY or column != formats.ANY:
            token = row * grid[1] + column
        queries.append(capture.MapQuery(frame, token))
        if frame != formats.ANY:
            blocks_of_queries.add(block_of_frame[frame])
        elif blocks is None:
            blocks_of_queries.add(len(ranges) - 1)
    # 2. Blocks that were named have to hold them.
    if blocks is not None:
        outside = blocks_of_queries - set(blocks)
        if outside:
            raise errors.ConfigError(
                f"a query lies in block {min(outside)}, and --blocks names {sorted(blocks)} alone"
            )
    # 3. What was asked for keeps its order; blocks and steps have that of the rollout.
    for name, numbers in (("blocks", blocks), ("steps", steps)):
        errors.require_ascending(
            name, errors.as_numbers(name, numbers), "maps come in the order of the rollout"
        )
    request = capture.CaptureRequest(
        layers=errors.as_numbers("layers", layers),
        blocks=errors.as_numbers("blocks", blocks) or sorted(blocks_of_queries),
        steps=errors.as_numbers("steps", steps) or [config.step],
        granularity="map",
        queries=tuple(queries),
    )
    if heads is not None:
        request = replace(request, heads=tuple(errors.as_numbers("heads", heads) or ()))
    if not words:
        return [request]
    return [request, replace(request, kinds=("cross",), queries=(capture.MapQuery(),))]


def _name_of(place: Place) -> str:
    """Return a place as flags name it: 18,1,1 for a patch, 18 for a frame."""
    if place[1] == formats.ANY:
        return str(place[0])
    return ",".join(map(str, place))


def _check_place(place: Place, num_frames: int, grid: tuple[int, int]) -> None:
    """Raise ConfigError for a place outside the video; a whole frame has no row and no column."""
    frame, row, column = place
    if row == column == formats.ANY:
        if frame != formats.ANY:
            check_indices(f"query {_name_of(place)}: frame", [frame], num_frames)
        return
    check_indices(f"query {_name_of(place)}: frame", [frame], num_frames)
    check_indices(f"query {_name_of(place)}: row", [row], grid[0])
    check_indices(f"query {_name_of(place)}: column", [column], grid[1])


def maps_cache(
    run: Run,
    grid: tuple[int, int],
    heads: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the captured maps, block by block; heads and layers as they were asked for, None: all.

    RunError where there are none.
    """
    if layers is None:
        layers = run.layers
    steps = sorted({call["step"] for call in run.records})
    blocks = sorted({call["block"] for call in run.records})
    if not blocks:
        raise files.RunError("none of the blocks that maps were asked for was reached")
    if heads is None:
        heads = range(run.common["num_heads"])
    tags = [run.pass_tag(step) for step in steps]
    fields: files.Record = {
        "format": "maps",
        "is_logits": True,
        "layers": list(layers),
        "heads": list(heads),
        "rows": grid[0],
        "columns": grid[1],
        "pass_timesteps": [tag.timestep for tag in tags],
        "pass_steps": steps,
        "pass_is_clean": [tag.is_clean_pass for tag in tags],
        "blocks": [_block_maps(run, block, layers, steps, grid[1]) for block in blocks],
    }
    if "word_map" in run.quantities:
        fields["words"] = run.prompt_tokens
    return run.common | fields


def _block_maps(
    run: Run, block: int, layers: Sequence[int], steps: Sequence[int], columns: int
) -> dict[str, Any]:
    """Return the entry of one block: values of its calls, [layers, steps, ...]."""

    def call_of(name: str, layer: int, step: int) -> capture.CapturedCall:
        return next(call for call in run.captured(name, layer, step) if call["block"] == block)

    entry: files.Record = {"block": block}
    # 1. What each query sees of every key token.
    if "map_mass" in run.quantities:
        first = call_of("map_mass", layers[0], steps[0])
        places = []
        for frame, token in first["map_queries"].tolist():
            row, column = (formats.ANY, formats.ANY) if token == capture.ALL else divmod(token, columns)
            places.append([frame, row, column])
        entry["query_frames"] = first["query_frames"]
        entry["queries"] = torch.tensor(places, dtype=torch.int32)
        values = {
            (layer, step): _map_values(call_of("map_mass", layer, step)) for layer in layers for step in steps
        }
        # Layers may hold different numbers of keys: shorter ones are padded.
        num_keys = max(of_call["key_frame"].shape[-1] for of_call in values.values())
        examples: dict[str, Tensor] = {}
        for of_call in values.values():
            examples = of_call | examples
        for name, example in examples.items():

            def value(layer: int, step: int, name: str = name, example: Tensor = example) -> Tensor:
                of_call = values[layer, step]
                unedited = torch.ones_like(example)  # all keys attended
                return padded(of_call.get(name, unedited), num_keys, ABSENT.get(name, torch.nan))

            entry[name] = stack(value, layers, steps)
    # 2. The words that each query token reads.
    if "word_map" in run.quantities:
        entry["query_frames"] = call_of("word_map", layers[0], steps[0])["query_frames"]

        def word_map(layer: int, step: int) -> Tensor:
            return call_of("word_map", layer, step).values["word_map"][0]

        entry["word_map"] = stack(word_map, layers, steps)
    return entry


def _map_values(call: capture.CapturedCall) -> dict[str, Tensor]:
    """Return key_frame, key_token, key_position [Lk], logits and mass [heads, n, Lk], attended if edited."""
    assert call.layout is not None
    frames, positions = key_frames(call.layout, 1)
    keys = {"key_frame": frames, "key_token": key_tokens(call.layout, 1), "key_position": positions}
    values = {name: numbers[0].int() for name, numbers in keys.items()}
    values |= {name: call.values[name][0] for name in ("map_logits", "map_mass")}
    if "attended" in call.values:
        values["attended"] = call.values["attended"][0, :, 0]  # [heads, Lk]
    return values


# --- The base model: layer and atlas caches of its sampler's steps
BRANCHES = ("cond", "uncond")  # of guidance: with the prompt and without
LAST_FRAMES = 3  # query frames of last_block_frame_attention: as many as the last block of a causal rollout


def base_layer_cache(run: Run, layer: int, step: int) -> dict[str, Any]:
    """Return mean logits of every frame pair of one layer at one step, with the prompt and without."""
    cond, uncond = (run.of_branch(name).frame_matrix("frame_logits", layer, step) for name in BRANCHES)
    last = list(range(run.config.num_frames))[-LAST_FRAMES:]
    at = formats.PassTag(step, run.pass_timesteps[step], False)
    return formats.build_layer_cache(run.common, at, layer, cond, last, uncond=uncond)


def base_atlas_cache(run: Run, steps: Sequence[int], branch: str) -> dict[str, Any]:
    """Return mean logits and mass of every layer at the steps that were reached, of one branch."""
    reached = {call["step"] for call in run.records}
    steps = [step for step in steps if step in reached]
    if not steps:
        raise files.RunError(f"none of the steps was reached for {branch}")
    # An atlas has one branch of guidance; a layer cache has both
    of_branch, layers = run.of_branch(branch), list(range(run.num_layers))
    fields: files.Record = {
        "format": "atlas",
        "is_logits": True,
        "branch": branch,
        "layers": layers,
        "pass_steps": steps,
        "pass_timesteps": [run.pass_timesteps[step] for step in steps],
        "pass_is_clean": [False] * len(steps),
    }
    for name in ("frame_logits", "frame_mass"):
        fields[name] = of_branch.frame_matrices(name, layers, steps)
    return run.common | fields


def bidirectional_atlas(run: Run, branch: str | None = None, **chosen: Any) -> dict[str, Any]:
    """Return the attention by frame of a run of all frames at once, of one branch of guidance.

    branch None is cond, or the only one. chosen are a block, an evaluation or a model, where a pipeline has
    several that one atlas cannot hold: chunks of frames that overlap, several forwards at a step. RunError
    where calls are left that nothing tells apart.
    """
    run, branch = _chosen_part(run, branch, chosen)
    calls = [call for call in run.records if "frame_logits" in call.values and call.at]
    if not calls:
        raise files.RunError('an atlas needs frames: capture granularity="frame", of self-attention')
    # 1. Its passes, in which no two calls of a layer have the same query frames.
    places = [(call.site.layer, call["step"], frame) for call in calls for frame in call["query_frames"]]
    if len(set(places)) < len(places):
        raise files.RunError(_what_differs(calls))
    by_step: dict[int | None, capture.CapturedCall] = {call["step"]: call for call in calls}
    steps: list[int | None] = []
    if None in by_step:  # nobody told the step of a forward
        steps.append(None)
    steps += sorted(step for step in by_step if step is not None)
    layers = sorted({call.site.layer for call in calls})
    atlas: files.Record = {
        "format": "atlas",
        "is_logits": True,
        "layers": layers,
        "pass_timesteps": [float(by_step[step]["timestep"]) for step in steps],
        "pass_is_clean": [by_step[step]["is_clean_pass"] for step in steps],
    }
    if branch is not None:
        atlas["branch"] = branch
    if steps != [None]:
        atlas["pass_steps"] = steps
    # 2. What was kept of each call, [layers, passes, H, F, ...].
    in_all_calls = set.intersection(*(set(call.values) for call in calls))
    for name in ("frame_logits", "frame_mass", "frame_logits_by_band", "attended"):
        if name in in_all_calls:
            atlas[name] = run.frame_matrices(name, layers, steps)
    if "attended" in atlas:
        atlas["attended"] = atlas["attended"] == 1
    if "condition_mass" in in_all_calls:
        widths = {call.values["condition_mass"].shape[-1] for call in calls}
        if len(widths) == 1:  # passes of other texts make no tensor
            atlas["condition_mass"] = stack(partial(run.query_rows, "condition_mass"), layers, steps)
    words = len(run.prompt_tokens)
    if "cross_mass" in run.quantities and branch != "uncond" and words:
        rows = stack(partial(run.query_rows, "cross_mass"), layers, steps)
        atlas |= {"cross_mass": rows[..., :words], "cross_tokens": run.prompt_tokens}
    return run.common | atlas


def _chosen_part(run: Run, branch: str | None, chosen: Mapping[str, object]) -> tuple[Run, str | None]:
    """Return a run as if a branch of guidance alone, and a block or so, had been captured; and the branch."""
    for name in chosen:
        errors.require_known(name, ("block", "evaluation", "model"), "an atlas is chosen by no {}")
    branches = list(dict.fromkeys(call.at.branch for call in run.records if call.at))
    if branch is None:
        branch = "cond"
        if "cond" not in branches and len(branches) == 1:
            branch = branches[0]
    files.require_held("branch", branch, branches, "what was captured", files.RunError)
    run = run.of_branch(branch)
    for name, value in chosen.items():
        values = list(dict.fromkeys(call[name] for call in run.records))
        files.require_held(name, value, values, "this run", files.RunError)
        run = replace(run, records=[call for call in run.records if call[name] == value])
    return run, branch


def _what_differs(calls: Sequence[capture.CapturedCall]) -> str:
    """Say why calls make no atlas, and what to choose."""
    for name in ("evaluation", "block", "model"):
        values = list(dict.fromkeys(call[name] for call in calls))
        if len(values) > 1:
            return (
                f"calls of a layer and step have {name} {', '.join(map(str, values))}: choose one, "
                f"captured.atlas({name}={values[0]!r})"
            )
    return "two calls are of the same layer, step and frames, and nobody told what else they are of"

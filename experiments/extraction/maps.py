"""Maps over video frames as a cache: what they ask of the capture, and the dict of format "maps"."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.caches.files import RunError
from experiments.caches.formats import ANY, NO_KEY
from experiments.extraction.cache_builders import Extraction, padded, stack
from wan.blocks import block_ranges
from wan.capture import ALL, CapturedCall, CaptureRequest, MapQuery
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.keys import key_frames, key_tokens

Place = tuple[int, int, int]  # frame, row, column; -1: all of them
FILLERS = {"key_frame": NO_KEY, "key_position": NO_KEY, "key_token": 0, "attended": 0}  # of absent keys


def token_grid(config: RunConfig, model_config: ModelConfig) -> tuple[int, int]:
    """Rows and columns of the tokens of a frame."""
    _, high, wide = model_config.patch_size
    return config.height // high, config.width // wide


def patches_of_grid(frame: int, rows: int, columns: int, grid: tuple[int, int]) -> list[Place]:
    """Choose rows x columns patches of a frame, evenly spaced. ConfigError where it has fewer."""
    places = []
    for name, wanted, there in (("rows", rows, grid[0]), ("columns", columns, grid[1])):
        if not 1 <= wanted <= there:
            raise ConfigError(f"a frame has {there} {name} of tokens, and the grid of patches {wanted}")
        places.append([(2 * i + 1) * there // (2 * wanted) for i in range(wanted)])
    return [(frame, row, column) for row in places[0] for column in places[1]]


def map_requests(
    config: RunConfig,
    grid: tuple[int, int],
    places: Sequence[Place] = (),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    words: bool = False,
) -> list[CaptureRequest]:
    """Ask for maps of some places; without places of all queries of each block (blocks None: the last one).

    Blocks of places that name a frame are those that denoise it. words adds the maps of the prompt's words
    over the query frames. Raises ConfigError for a place that is named twice or is not in the video.
    """
    sizes = config.block_sizes
    block_of = {frame: block for block, some in enumerate(block_ranges(sizes)) for frame in some}
    queries = []
    for n, (frame, row, column) in enumerate(places):
        whole = row == column == ANY
        named = ",".join(map(str, (frame,) if row == ANY else (frame, row, column)))
        if (frame, row, column) in places[:n]:
            raise ConfigError(f"query {named} is named twice")
        if whole and frame == ANY:
            queries.append(MapQuery())
            continue
        indices = (("row", row, grid[0]), ("column", column, grid[1]))
        for name, index, count in (("frame", frame, len(block_of)), *(() if whole else indices)):
            if not 0 <= index < count:
                raise ConfigError(f"query {named}: {name} {index} is not in 0..{count - 1}")
        queries.append(MapQuery(frame) if whole else MapQuery(frame, row * grid[1] + column))
    queries = queries or [MapQuery()]
    chosen = {block_of[query.frame] for query in queries if query.frame != ALL}
    if any(query.frame == ALL for query in queries) and blocks is None:
        chosen.add(len(sizes) - 1)
    if blocks is not None and (outside := chosen - set(blocks)):
        raise ConfigError(f"a query lies in block {min(outside)}, and --blocks names {sorted(blocks)} alone")
    common: dict[str, Any] = {
        "layers": None if layers is None else sorted(set(layers)),
        "heads": None if heads is None else tuple(dict.fromkeys(heads)),
        "blocks": sorted(set(blocks) if blocks is not None else chosen),
        "steps": [config.step] if steps is None else sorted(set(steps)),
        "granularity": "map",
    }
    found = [CaptureRequest(queries=tuple(queries), **common)]
    return [*found, CaptureRequest(kinds=("cross",), **common)] if words else found


def maps_cache(run: Extraction, grid: tuple[int, int], heads: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the captured maps, block by block; heads None: all. RunError where there are none."""
    steps = sorted({call["step"] for call in run.records})
    blocks = sorted({call["block"] for call in run.records})
    if not blocks:
        raise RunError("none of the blocks that maps were asked for was reached")
    tags = [run.pass_tag(step) for step in steps]
    own: dict[str, Any] = {
        "format": "maps",
        "is_logits": True,
        "layers": run.layers,
        "heads": list(range(run.common["num_heads"]) if heads is None else dict.fromkeys(heads)),
        "rows": grid[0],
        "columns": grid[1],
        "pass_timesteps": [tag.timestep for tag in tags],
        "pass_steps": steps,
        "pass_is_clean": [tag.is_clean_pass for tag in tags],
    }
    if "word_map" in run.quantities:
        own["words"] = run.prompt_tokens
    return run.common | own | {"blocks": [_block_maps(run, block, steps, grid[1]) for block in blocks]}


def _block_maps(run: Extraction, block: int, steps: Sequence[int], columns: int) -> dict[str, Any]:
    """Return the entry of one block: values of its calls, [layers, steps, ...]."""

    def call_of(name: str, layer: int, step: int) -> CapturedCall:
        return next(call for call in run.captured(name, layer, step) if call["block"] == block)

    name = "map_mass" if "map_mass" in run.quantities else "word_map"
    first = call_of(name, run.layers[0], steps[0])
    entry: dict[str, Any] = {"block": block, "query_frames": first["query_frames"]}
    if name == "map_mass":
        queries = first["map_queries"].tolist()
        places = [[frame, *((ANY, ANY) if t == ALL else divmod(t, columns))] for frame, t in queries]
        entry["queries"] = torch.tensor(places, dtype=torch.int32)
        found = {
            (layer, step): _map_values(call_of(name, layer, step)) for layer in run.layers for step in steps
        }
        keys = max(values["key_frame"].shape[-1] for values in found.values())
        for name in {name: None for values in found.values() for name in values}:
            like = next(values[name] for values in found.values() if name in values)

            def value(layer: int, step: int, name: str = name, like: Tensor = like) -> Tensor:
                there = found[layer, step].get(name, torch.ones_like(like))  # unedited: all attended
                return padded(there, keys, FILLERS.get(name, torch.nan))

            entry[name] = stack(value, run.layers, steps)
    if "word_map" in run.quantities:
        entry["word_map"] = stack(
            lambda layer, step: call_of("word_map", layer, step).values["word_map"][0], run.layers, steps
        )
    return entry


def _map_values(call: CapturedCall) -> dict[str, Tensor]:
    """Return key_frame, key_token, key_position [Lk], logits and mass [heads, n, Lk], attended if edited."""
    assert call.layout is not None
    frames, positions = key_frames(call.layout, 1)
    keys = {"key_frame": frames, "key_token": key_tokens(call.layout, 1), "key_position": positions}
    found = {name: values[0].int() for name, values in keys.items()}
    found |= {name: call.values[name][0] for name in ("map_logits", "map_mass")}
    if "attended" in call.values:
        found["attended"] = call.values["attended"][0, :, 0]  # [heads, Lk]
    return found

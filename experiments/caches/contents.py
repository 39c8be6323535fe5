"""What a cache holds, and what one will hold that a run makes: replacing it may lose something."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.caches import formats, outputs
from experiments.caches.files import Record
from experiments.caches.titles import seed_in_words
from wan import capture
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import short_repr

# Fields that a run measures or leaves out, and those that follow from them
FIELDS = {"frame_logits", "frame_mass", "condition_mass", "key_curve", "cross_mass", "frame_logits_by_band"}
FIELDS |= {"query_means", "key_means", "last_block_frame_logits", "full_frame_attention_uncond"}
FIELDS |= {"attn_logits", "attn_weights", "map_logits", "map_mass", "word_map", "psnr", "ssim"}
FIELDS |= {"frame_control", "head_control"}
FOLLOWING = {
    "attn_logits": ("attn_weights", "key_curve", "frame_logits", "frame_mass", "last_block_frame_logits"),
    "attn_weights": ("frame_mass",),
    "frame_logits": ("last_block_frame_logits",),
}


def with_following(names: Collection[str]) -> set[str]:
    """Return names of fields with those that can be computed of them."""
    return {*names, *(name for known in names for name in FOLLOWING.get(known, ()))}


def contents_of(values: Mapping[str, Any]) -> outputs.Contents:
    """Return what a cache holds. CacheError for a dict that is no cache."""
    cache = formats.as_cache(values)
    entries = [entry for _, entry in cache.entries]
    names = {name for part in (cache, *entries) for name in part.present}
    if isinstance(cache, formats.Figure4Cache | formats.InferenceCache) and cache.is_logits:
        names -= {"attn_weights"}  # another name of the logits
    parts: dict[str, outputs.Items] = {"fields": with_following(names & FIELDS)}
    parts["frames"] = range(sum(cache.block_sizes[: cache.done]))
    parts["layers"] = layers_held(cache)
    parts["steps"] = {tag.step for tag in cache.passes() if tag.step is not None}
    if isinstance(cache, formats.InferenceCache):
        calls = cache.attention_weights
        parts["steps"] = {call.step for call in calls if call.step is not None}
        parts["blocks"] = {call.block for call in calls if call.block is not None}
    if isinstance(cache, formats.MapsCache):
        queries = [block.queries.tolist() for block in cache.blocks if block.queries is not None]
        parts |= {"heads": cache.heads, "blocks": {block.block for block in cache.blocks}}
        parts["queries"] = {tuple(place) for places in queries for place in places}
    if isinstance(cache, formats.CausalAtlasCache):
        parts |= {"units": cache.units, "prompts": cache.prompts, "seeds": cache.seeds}
    if values["format"] == "attribution":
        parts["sites"] = {site["site"] for site in values["sites"]}
        parts["steps"], parts["blocks"] = {*values["pass_steps"]}, {*values["pass_blocks"]}
    about = f"{short_repr(cache.prompt)}, {seed_in_words(cache.seed)}"
    return outputs.Contents(f"{values['format']} cache", outputs.facts_of_model(values), parts, about)


def layers_held(cache: formats.Cache) -> Collection[int]:
    """Return the layers that a cache is of; none for effects."""
    if isinstance(cache, formats.LayerCache):
        return [cache.layer_index]
    if isinstance(cache, formats.Figure4Cache | formats.InferenceCache):
        return cache.layer_indices
    return getattr(cache, "layers", [])


# --- Before a run
@dataclass(frozen=True)
class PlannedCache:
    """A cache that a run will write: its format, the function that makes it, its layers (None: all)."""

    kind: str
    build: Callable[..., Record]  # of a Run
    layers: Collection[int] | None = None
    guided: bool = False  # of the base model, whose layer caches have both branches of guidance

    def parts(
        self, config: RunConfig, requests: Sequence[capture.CaptureRequest]
    ) -> dict[str, outputs.Items]:
        """Return the parts that the cache of a config's run will have."""
        sizes = read_model_config(config.ckpt_dir)
        parts: dict[str, outputs.Items] = {"frames": range(config.num_frames)}
        # 1. Layers, passes and blocks: None asks for all
        ranges = {"layers": sizes.num_layers, "steps": config.num_passes, "blocks": len(config.block_sizes)}
        for name, count in ranges.items():
            chosen = set[int]()
            for request in requests:
                numbers = getattr(request, name)
                chosen |= {*range(count)} if numbers is None else {*numbers}
            parts[name] = chosen
        if self.layers is not None:
            parts["layers"] = self.layers
        # 2. Fields, and the places of maps
        fields = {name for request in requests for name in fields_of(request)}
        if self.kind == "layer" and self.guided:
            fields.add("full_frame_attention_uncond")
        parts["fields"] = with_following(fields)
        if self.kind == "maps":
            columns = config.width // sizes.patch_size[2]
            parts["heads"] = requests[0].heads or range(sizes.num_heads)
            parts["queries"] = {
                (frame, capture.ALL, capture.ALL)
                if token == capture.ALL
                else (frame, *divmod(token, columns))
                for frame, token in requests[0].queries
            }
        return parts


def fields_of(request: capture.CaptureRequest) -> set[str]:
    """Return the fields of a cache that a request is captured for."""
    fields = set[str]()
    if "cross" in request.kinds:
        fields.add("word_map" if request.granularity == "map" else "cross_mass")
    if "self" not in request.kinds:
        return fields
    if request.granularity == "token":
        fields.add("attn_logits" if request.is_logits else "attn_weights")
    elif request.granularity == "key":
        fields.add("key_curve")
    elif request.granularity == "map":
        fields |= {"map_logits", "map_mass"}
    else:
        fields.add("frame_logits")
    if request.granularity == "frame" and request.mass:
        fields.add("frame_mass")
    if request.rope_bands:
        fields.add("frame_logits_by_band")
    if request.query_key_means:
        fields |= {"query_means", "key_means"}
    return fields

"""From one cache format to another: layers taken out of an atlas."""

from collections.abc import Mapping
from typing import Any

import torch

from experiments.caches.schema import ATLAS, COMMON, SAMPLING
from experiments.caches.view import open_profiles
from wan.blocks import block_frames


def one_layer(atlas: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """An atlas of one of an atlas's layers."""
    i = atlas["layers"].index(layer)
    by_layer = [
        name for field, declared in ATLAS.items() if "[N" in declared and (name := field.rstrip("?")) in atlas
    ]
    return dict(atlas) | {name: atlas[name][i : i + 1] for name in by_layer}


def layer_from_atlas(atlas: Mapping[str, Any], layer: int, step: int | None = None) -> dict[str, Any]:
    """The layer cache of one layer of an atlas in one pass (None: the first); mean logits.

    Where the atlas has the last block's mean alone, the frame matrix is NaN. Raises CacheError for a layer, pass or
    quantity that the atlas does not hold.
    """
    view = open_profiles(atlas, step, "mean_logit")
    blocks, everything = list(view.block_sizes), list(range(view.num_frames))
    last = (
        everything[-3:] if len(blocks) == 1 else block_frames(blocks, -1)
    )  # a bidirectional run is one block
    profile, matrix = view.frame_profile(layer), view.frame_matrix(layer)
    H, F = profile.shape
    profile = torch.from_numpy(profile if matrix is None or len(blocks) > 1 else matrix[:, last].mean(1))
    matrix = torch.full((H, F, F), torch.nan) if matrix is None else torch.from_numpy(matrix)
    kept = {name: atlas[name] for field in COMMON | SAMPLING if (name := field.rstrip("?")) in atlas}
    return kept | {
        "format": "layer", "is_logits": True, "step": view.step, "timestep": view.timestep,
        "is_clean_pass": view.is_clean_pass, "layer_index": layer, "full_frame_attention": matrix,
        "last_block_frame_attention": profile, "query_frames": everything, "key_frames": everything,
        "last_block_query_frames": last,
    }  # fmt: skip

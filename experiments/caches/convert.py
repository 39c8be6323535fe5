"""From one cache format to another: layers or passes taken out of an atlas."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.caches.common import Cache, PassTag, Sampling
from experiments.caches.errors import CacheError
from experiments.caches.schema import AtlasCache, LayerCache
from experiments.caches.view import open_profiles


def one_layer(atlas: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """An atlas of one of an atlas's layers."""
    i = atlas["layers"].index(layer)
    by_layer = [name.rstrip("?") for name, declared in AtlasCache.table().items() if "[N" in declared]
    return dict(atlas) | {name: atlas[name][i : i + 1] for name in by_layer if name in atlas}


def select_passes(atlas: Mapping[str, Any], steps: Sequence[int]) -> dict[str, Any]:
    """An atlas of some of an atlas's passes, given by their steps (0 is the noisiest). Raises CacheError."""
    stored = list(atlas.get("pass_steps") or range(len(atlas["pass_timesteps"])))
    clean = atlas.get("pass_is_clean") or [float(t) == 0 for t in atlas["pass_timesteps"]]
    if absent := [step for step in steps if step not in stored]:
        raise CacheError(f"pass {absent[0]} is not in this cache; it has {', '.join(map(str, stored))}")
    rows = [stored.index(step) for step in steps]
    by_pass = [name.rstrip("?") for name, declared in AtlasCache.table().items() if "[N, P" in declared]
    return dict(atlas) | {
        **{name: atlas[name][:, rows].clone() for name in by_pass if name in atlas},
        "pass_timesteps": [float(atlas["pass_timesteps"][row]) for row in rows],
        "pass_steps": list(steps),
        "pass_is_clean": [bool(clean[row]) for row in rows],
    }


def layer_from_atlas(atlas: Mapping[str, Any], layer: int, step: int | None = None) -> dict[str, Any]:
    """The layer cache of one layer of an atlas in one pass (None: the first); mean logits.

    Where the atlas has the last block's mean alone, the frame matrix is NaN. Raises CacheError for a layer,
    pass or quantity that the atlas does not hold.
    """
    view = open_profiles(atlas, step, "mean_logit")
    profile, matrix, _, averages = view.values(layer)
    one_block = len(view.block_sizes) == 1  # a bidirectional run: its last frames are the queries
    last = list(range(view.num_frames))[-3:] if one_block else list(view.query_frames)
    if matrix is None:
        matrix = torch.full((view.num_heads, view.num_frames, view.num_frames), torch.nan)
    elif one_block:
        profile = matrix[:, last].mean(1)
    names = [field.rstrip("?") for field in Cache.table() | Sampling.table()]
    common = {name: atlas[name] for name in names if name in atlas}
    at = PassTag(view.step, view.timestep, view.is_clean_pass)
    values = matrix.float(), last, profile.float()
    return LayerCache.build(common, at, layer, *values, averages=averages).to_dict()

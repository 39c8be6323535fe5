"""A part of an atlas: what draws faster and says the same."""

from collections.abc import Sequence
from typing import Any

import torch


def smaller_atlas(atlas: dict[str, Any], layers: Sequence[int], heads: int) -> dict[str, Any]:
    """Some layers and the first heads of an atlas; layers are numbers of the model's."""
    rows = [atlas["layers"].index(layer) for layer in layers]
    part = atlas | {"layers": list(layers), "num_heads": heads}
    for name, values in atlas.items():
        if torch.is_tensor(values) and len(values) == len(atlas["layers"]):
            part[name] = values[rows]
            if values.ndim > 2 and values.shape[2] == atlas["num_heads"]:  # [N, P, H, ...]
                part[name] = part[name][:, :, :heads].contiguous()
    return part

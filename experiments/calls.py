"""One captured call of a figure4 or inference cache, by its place in attention_weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.formats import CacheError
from experiments.profiles import Profiles, open_profiles
from experiments.reports import ranges


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


def call_lines(cache: Mapping[str, Any]) -> str:
    """What is captured, a line per call: its place, layer, pass, block and frames."""
    lines = []
    for i, call in enumerate(cache["attention_weights"]):
        at = cache | call  # a figure4 cache has the tags of its calls at the top
        step = "not recorded" if at["step"] is None else "clean" if at["is_clean_pass"] else str(at["step"])
        timestep = "" if at["timestep"] is None else f" (t = {at['timestep']:g})"
        lines.append(
            f"  {i}: layer {at['layer_idx']}, pass {step}{timestep}, queries of frames {ranges(at['query_frames'])} "
            f"on keys of frames {ranges(at['key_frames'])}"
        )
    return "\n".join(lines)


def summary_lines(view: Profiles, head: int) -> str:
    """Layer, highest and lowest frame with their values, first and last frame of one head's profile."""
    (layer,) = view.layers
    profile = view.frame_profile(layer)[head]
    high, low = int(np.nanargmax(profile)), int(np.nanargmin(profile))
    first, last = view.key_frames[0], view.key_frames[-1]
    return "\n".join([
        f"Layer {layer}, head {head}, {view.quantity}, {view.pass_label}",
        f"  max: frame {high}, {profile[high]:.6f}",
        f"  min: frame {low}, {profile[low]:.6f}",
        f"  first (frame {first}): {profile[first]:.6f}",
        f"  last (frame {last}): {profile[last]:.6f}",
        f"  sum of mass over all key frames: {np.nansum(profile) * view.frame_seq_length:.4f}",
    ])  # fmt: skip

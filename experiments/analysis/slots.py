"""What lay in the slots of a rollout's cache, block by block, from an atlas."""

from typing import Any

import numpy as np

from experiments.caches.errors import CacheError

NO_SLOT, CHOSEN, EMPTY, AVERAGE = -9, -3, -2, -1  # codes of slot_frame beside frames


def slots_of(atlas: dict[str, Any], layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Frame and temporal position of every slot that a block saw: [blocks, slots], -9 for none.

    layer is an index into the atlas. Without slot fields the slots are the frames that were attended.
    """
    if "slot_frame" in atlas:
        return atlas["slot_frame"][layer].numpy(), atlas["slot_position"][layer].numpy()
    held = [atlas[name] for name in ("frame_logits", "frame_mass") if name in atlas]
    if not held:
        raise CacheError("this cache holds no frame matrices: what its blocks saw is not known")
    seen = ~held[0][layer, 0].isnan().all(0)  # [F queries, F keys]
    ends = np.cumsum(atlas["block_sizes"])
    rows = [np.flatnonzero(seen[end - 1].numpy()) for end in ends]
    frames = np.full((len(rows), max(map(len, rows))), NO_SLOT)
    for block, row in enumerate(rows):
        frames[block, : len(row)] = row
    return frames, frames.copy()


def slot_mass(atlas: dict[str, Any], layer: int, step: int) -> np.ndarray:
    """Attention mass of every slot of the last block, mean over its queries: [H, slots]."""
    frames, _ = slots_of(atlas, layer)
    count, size = int((frames[-1] != NO_SLOT).sum()), atlas["block_sizes"][-1]
    if "slot_mass" in atlas:
        return atlas["slot_mass"][layer, step, :, -size:, :count].mean(1).numpy()
    return atlas["frame_mass"][layer, step, :, -size:].mean(1).numpy()[:, frames[-1][:count]]


def survival(atlas: dict[str, Any]) -> np.ndarray:
    """Share of each frame's tokens that the last block still sees, per layer: [layers, F].

    Averages are of no frame. Where no tokens are chosen a frame is there or not.
    """
    if "tokens_kept" in atlas:
        return np.minimum(atlas["tokens_kept"][:, -1].numpy() / atlas["frame_seq_length"], 1)
    kept = np.zeros((len(atlas["layers"]), atlas["num_frames"]))
    for layer in range(len(kept)):
        frames = slots_of(atlas, layer)[0][-1]
        kept[layer, frames[frames >= 0]] = 1
    return kept

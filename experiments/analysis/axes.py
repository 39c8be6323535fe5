"""The axes of figures: keys along frames or temporal positions, and latent or video frames.

Frame: global latent index. Position: temporal RoPE index of a slot's keys. An atlas without slot fields
has frames in their places. Averages of gone frames are columns of their own, after the frames.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.analysis.stats import mean_without_nan
from experiments.caches.files import CacheError
from experiments.caches.formats import as_cache
from experiments.caches.view import Caption, Profiles, noise_label, subtitle
from wan import blocks
from wan.errors import require_known

NO_SLOT, CHOSEN, EMPTY, AVERAGE = -9, -3, -2, -1  # codes of slot_frame beside frames
AXES = ("frame", "position")
SPECIAL = {AVERAGE: "average", CHOSEN: "chosen tokens", EMPTY: "zeros"}  # marks beside sink and memory
STORED = {"mean_logit": "logits", "mass": "mass", "mean_prob": "mass"}

# --- What lay in the slots of a rollout's cache, block by block


def slots_of(atlas: dict, layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return frame and temporal position of every slot that a block saw: [blocks, slots], -9 for none."""
    if "slot_frame" in atlas:
        return atlas["slot_frame"][layer].numpy(), atlas["slot_position"][layer].numpy()
    matrices = atlas.get("frame_logits", atlas.get("frame_mass"))
    if matrices is None:
        raise CacheError("this cache holds no frame matrices: what its blocks saw is not known")
    # A cache of whole frames: what any head of a block's last query has is what its slots held
    seen = ~matrices[layer, 0].isnan().all(0)  # [F queries, F keys]
    rows = [np.flatnonzero(seen[end - 1].numpy()) for end in np.cumsum(atlas["block_sizes"])]
    frames = np.full((len(rows), max(map(len, rows))), NO_SLOT)
    for block, row in enumerate(rows):
        frames[block, : len(row)] = row
    return frames, frames.copy()


def slot_mass(atlas: dict, layer: int, step: int) -> np.ndarray:
    """Return the attention mass of every slot of the last block, mean over its queries: [H, slots]."""
    count = int((slots_of(atlas, layer)[0][-1] != NO_SLOT).sum())
    return _slot_values(atlas, layer, step, "mass")[:, -atlas["block_sizes"][-1] :, :count].mean(1)


def survival(atlas: dict) -> np.ndarray:
    """Return the share of each frame's tokens that the last block still sees, per layer: [layers, F]."""
    if "tokens_kept" in atlas:
        return np.minimum(atlas["tokens_kept"][:, -1].numpy() / atlas["frame_seq_length"], 1)
    visible = np.zeros((len(atlas["layers"]), atlas["num_frames"]))
    for layer in range(len(visible)):
        frames = slots_of(atlas, layer)[0][-1]
        visible[layer, frames[frames >= 0]] = 1
    return visible


@dataclass(frozen=True)
class KeyColumns:
    """Values of the last block's queries per column of keys; what each column is, and how it is marked."""

    axis: str
    labels: tuple[str, ...]  # frame or position; μ: an average
    marks: tuple[str, ...]  # sink, average, memory, chosen tokens, zeros, or nothing
    values: np.ndarray  # [H, columns]; NaN: not there


def key_columns(atlas: dict, layer: int, step: int | None, quantity: str, axis="frame") -> KeyColumns:
    """Return what the last block's queries see in one layer and pass, along an axis."""
    require_known(axis, AXES, "KEY_AXIS is {}", CacheError)
    # 1. Slots of the last block that was done, and their values [H, slots], mean over its queries
    i, block = atlas["layers"].index(layer), as_cache(atlas).done - 1
    queries = list(blocks.block_ranges(list(atlas["block_sizes"]))[block])
    frames, positions = (rows[block] for rows in slots_of(atlas, i))
    count = int((frames != NO_SLOT).sum())
    frames, positions = frames[:count], positions[:count]
    by_slot = _slot_values(atlas, i, step, quantity)[:, queries, :count].mean(1)
    marks = slot_marks(atlas, i, block)
    # 2. By position: slots in the order of RoPE, or as they lie where a position is not known
    if axis == "position":
        order = list(range(count))
        if positions.min() >= 0:
            order = np.argsort(positions, kind="stable").tolist()
        labels = tuple(str(positions[slot]) if positions[slot] >= 0 else "·" for slot in order)
        return KeyColumns(axis, labels, tuple(marks[slot] for slot in order), by_slot[:, order])
    # 3. By frame: all frames of the video, then a column for each average
    averages = np.flatnonzero(frames == AVERAGE)
    by_frame = _stored(atlas, "frame", i, step, quantity)[:, queries].mean(1)  # [H, F]
    F = by_frame.shape[1]
    frame_marks = [""] * F
    if "tokens_kept" in atlas:
        # Chosen tokens lie in slots of no frame: their frames are marked by what is kept of them
        for frame in np.flatnonzero(atlas["tokens_kept"][i, block].numpy()).tolist():
            frame_marks[frame] = SPECIAL[CHOSEN]
    for slot in reversed(range(count)):
        if frames[slot] >= 0:
            frame_marks[frames[slot]] = marks[slot]
    labels = (*map(str, range(F)), *(f"μ{k}" for k in range(1, len(averages) + 1)))
    column_marks = (*frame_marks, *[SPECIAL[AVERAGE]] * len(averages))
    return KeyColumns(axis, labels, column_marks, np.concatenate([by_frame, by_slot[:, averages]], 1))


def position_matrix(
    atlas: dict, layer: int, step: int | None, quantity: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return query frames × temporal positions of keys [H, F, positions], and labels of the positions."""
    i = atlas["layers"].index(layer)
    _, positions = slots_of(atlas, i)
    by_slot = _slot_values(atlas, i, step, quantity)
    count = max(0, int(positions.max())) + 1
    matrix = np.full((*by_slot.shape[:2], count), np.nan, np.float32)
    # Slots at one position: shares of mass add, logits do not
    reduce = np.mean if quantity == "mean_logit" else np.sum
    for block, queries in enumerate(blocks.block_ranges(list(atlas["block_sizes"]))[: as_cache(atlas).done]):
        for position in {int(p) for p in positions[block] if p >= 0}:
            values = by_slot[:, list(queries)][:, :, positions[block] == position]
            matrix[:, list(queries), position] = reduce(values, 2)
    return matrix, tuple(map(str, range(count)))


def slot_marks(atlas: dict, i: int, block: int) -> list[str]:
    """Name the slots that a block sees: memories are between the sink and the run of newest frames."""
    frames = slots_of(atlas, i)[0][block]
    frames = frames[frames != NO_SLOT].tolist()
    # The newest frames are a run of neighbours at the end
    recent = len(frames) - 1
    while recent and frames[recent - 1] == frames[recent] - 1:
        recent -= 1
    sink = recent  # a window lets nothing stand between the two
    if atlas.get("sink_slots") is not None:
        sink = atlas["sink_slots"][block]
    if "memory_slots" in atlas:
        recent = max(recent, sink + atlas["memory_slots"][block])
    marks = []
    for slot, frame in enumerate(frames):
        mark = ""
        if slot < sink:
            mark = "sink"
        elif slot < recent:
            mark = "memory"
        marks.append(SPECIAL.get(frame, mark))
    return marks


def _slot_values(atlas: dict, i: int, step: int | None, quantity: str) -> np.ndarray:
    """Values of slots [H, F, slots]; values of frames where slots are the frames."""
    if f"slot_{STORED[quantity]}" in atlas:
        return _stored(atlas, "slot", i, step, quantity)
    by_frame = _stored(atlas, "frame", i, step, quantity)
    frames, _ = slots_of(atlas, i)
    # [H, F, F] -> [H, F, slots], block by block
    by_slot = np.full((*by_frame.shape[:2], frames.shape[1]), np.nan, np.float32)
    for block, queries in enumerate(blocks.block_ranges(list(atlas["block_sizes"]))):
        slots, rows = np.flatnonzero(frames[block] >= 0), np.array(queries)[:, None]
        by_slot[:, rows, slots] = by_frame[:, rows, frames[block][slots]]
    return by_slot


def _stored(atlas: dict, kind: str, i: int, step: int | None, quantity: str) -> np.ndarray:
    """Values [H, F, F] of frames or [H, F, slots] of slots, of the layer at index i."""
    name = f"{kind}_{STORED[quantity]}"
    if name not in atlas:
        raise CacheError(f"this cache holds no {quantity}")
    number = 0  # of the pass
    if step is not None:
        number = [at.step for at in as_cache(atlas).passes()].index(step)
    values = atlas[name][i, number].float().numpy()
    if quantity == "mean_prob":
        values = values / atlas["frame_seq_length"]
    return values


# --- Latent or video frames along the axes of a layer's figures


@dataclass(frozen=True)
class FrameView:
    """Which latent frame each shown frame is in; a video frame shows the value of its latent frame."""

    unit: str  # "latent" or "video", for axis labels
    latent: np.ndarray  # [n] latent frame of every shown frame

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Profiles [..., F] of latent frames -> [..., n] of shown frames; columns after them stay."""
        return np.concatenate([values[..., self.latent], values[..., self.latent[-1] + 1 :]], -1)

    def shown(self, latent_frames: Sequence[int]) -> list[int]:
        """List the shown frames that are in some latent frames."""
        return np.flatnonzero(np.isin(self.latent, list(latent_frames))).tolist()


def choose_view(
    cache: Mapping,
    use_video: bool | None = None,
    num_video_frames: int | None = None,
    stride: int | None = None,
) -> FrameView:
    """Choose the frames to show: of the video if use_video, or with orig_num_frames, else latent ones."""
    F = cache["num_frames"]
    if use_video is None:
        use_video = "orig_num_frames" in cache
    if not use_video:
        return FrameView("latent", np.arange(F))
    stride = stride or cache.get("vae_stride_t", blocks.VIDEO_FRAMES_PER_LATENT)
    n = num_video_frames or cache.get("orig_num_frames", 1 + stride * (F - 1))
    # The first video frame is a latent one alone, then groups of stride (Wan2.1: 4)
    latent = np.array([blocks.video_to_latent_frame(i, stride) for i in range(n)])
    if latent[-1] + 1 != F:
        fits = f"ORIG_NUM_FRAMES may be {max(1, 2 + stride * (F - 2))}..{1 + stride * (F - 1)}"
        raise CacheError(f"{n} video frames are {latent[-1] + 1} latent ones, but this cache has {F}; {fits}")
    return FrameView("video", latent)


def query_profile(
    view: Profiles, axes: FrameView, query_frames: Sequence[int] | None = None
) -> tuple[np.ndarray, Caption]:
    """Return the profile [H, F + averages] of some query frames, None: of the last block, and its caption."""
    (layer,) = view.layers
    if query_frames is None:
        profile, noise = view.key_profile(layer), view.noise_frames
        query_frames = axes.shown(view.query_frames)
    else:
        matrix = view.key_matrix(layer)
        if matrix is None:
            raise CacheError("this cache has no frame matrix: QUERY_FRAMES must be None")
        latent = axes.latent[list(query_frames)]
        profile = mean_without_nan(np.moveaxis(matrix[:, latent], 1, -1))
        noise = ()
        if view.is_clean_pass is False:
            # What is denoised together with the queries
            block = np.repeat(np.arange(len(view.block_sizes)), view.block_sizes)
            noise = tuple(np.flatnonzero(np.isin(block, block[latent])).tolist())
    highlighted = {}
    if noise and len(noise) < len(view.key_frames):  # else there is no context to tell them from
        highlighted = {noise_label(view.timestep, view.noise_levels.values()): axes.shown(noise)}
    about = subtitle(view.pass_label, query_frames)
    source = view.caption.source
    return profile, Caption(view.quantity, about, highlighted, axes.unit, view.num_averages, source)


def select_branch(cache: Mapping, branch: str) -> Mapping[str, Any]:
    """Return a layer cache of the "cond" or "uncond" branch of guidance. CacheError if it is absent."""
    if branch == "cond":
        return cache
    if f"full_frame_attention_{branch}" not in cache:
        raise CacheError(f"this cache has no branch {branch}; BRANCH must be cond")
    matrix = cache[f"full_frame_attention_{branch}"]
    last = matrix[:, cache["last_block_query_frames"]].float().mean(1)
    return {**cache, "branch": branch, "full_frame_attention": matrix, "last_block_frame_attention": last}

"""Where the tokens of a video's frames lie in the attention of diffusers' transformers, and two checks of it.

    video = FAMILIES["WanTransformer3DModel"].locate(model.config, arguments, {})  # VideoTokens(21, 1560)

A family reads it from a forward's arguments. The checks believe nobody: an experiment changes frames of the
input and looks which queries change (slices_of_rows); and since RoPE keeps norms, the queries that attention
gets have those that the module's own norm returned, row by row (compare_norms).
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wan import errors
from wan.sites import Checked

SAY_WHERE = "say where frames lie, layout=(frames, tokens of each) or (frames, tokens of each, tokens before)"
Variables = Mapping[str, Any]  # of the pipeline's method that calls the transformer


class VideoTokens(NamedTuple):
    """Frames of a forward, tokens per frame, and the tokens before them in self-attention.

    Other tokens of a call, text, conditions or padding, come after them.
    """

    frames: int
    tokens: int
    before: int = 0  # tokens in front: a history at another resolution, reference images
    past: int | None = None  # frames whose cached keys lie between; a rollout block by block says 0 or more
    start: int = 0  # the number of its first frame
    names: tuple[tuple[str, int], ...] = ()  # of the tokens in front: what they are, and how many
    skipped: int = 0  # frames of the input before its first one

    @property
    def total(self) -> int:
        return self.frames * self.tokens


# --- Where frames lie, by family: from a model's config, its forward's arguments and its pipeline's variables
Locate = Callable[[Any, Mapping[str, Any], Variables], VideoTokens]


def of_latents(config: Any, arguments: Mapping[str, Any], variables: Variables) -> VideoTokens:
    """Tokens of latents [B, C, F, h, w]; patch_size is of time, height, width, or patch_size_t is time's."""
    size = config.patch_size
    if isinstance(size, int):
        size = config.patch_size_t, size, size
    time, high, wide = size
    *_, frames, rows, columns = arguments["hidden_states"].shape
    return VideoTokens(frames // time, (rows // high) * (columns // wide))


def with_references(config: Any, arguments: Mapping[str, Any], variables: Variables) -> VideoTokens:
    """Tokens of latents that begin with a frame for each reference image, as their pipeline says (VACE)."""
    video, count = of_latents(config, arguments, variables), variables.get("num_reference_images") or 0
    names = tuple((f"ref {number}", video.tokens) for number in range(count))
    return video._replace(
        frames=video.frames - count, before=count * video.tokens, names=names, skipped=count
    )


def with_history(config: Any, arguments: Mapping[str, Any], variables: Variables) -> VideoTokens:
    """Tokens of latents behind those of three histories (Helios), each coarser than the one before."""
    before = 0
    for name, times in (("short", 1), ("mid", 2), ("long", 4)):
        history = arguments.get(f"latents_history_{name}")
        if history is not None:
            sizes = zip(history.shape[2:], config.patch_size, strict=True)
            before += math.prod(math.ceil(size / (times * patch)) for size, patch in sizes)
    video = of_latents(config, arguments, variables)
    return video._replace(before=before, names=(("history", before),))


def of_chunks(config: Any, arguments: Mapping[str, Any], variables: Variables) -> VideoTokens:
    """Tokens of latents [B, F, C, h, w], of which early chunks are compressed to larger patches (FAR).

    With a cache the last chunk alone is computed, and the keys of the others lie in front.
    """
    flags = arguments.get("kv_cache_flag") or {}
    is_cache_step = bool(flags.get("is_cache_step"))
    rows, columns = arguments["hidden_states"].shape[-2:]
    full, compressed = (
        (rows // high) * (columns // wide)
        for _, high, wide in (config.patch_size, config.compressed_patch_size)
    )
    chunks = arguments["chunk_partition"]
    far = max(0, len(chunks) - (config.full_chunk_limit - is_cache_step))
    first = sum(chunks[:far])
    is_cached = arguments.get("kv_cache") is not None and not is_cache_step
    past, start, skipped = None, first, first
    if is_cached:
        past = sum(chunks[far:-1])
        start, skipped = first + past, 0
    before = first * compressed
    return VideoTokens(
        frames=sum(chunks) - start,
        tokens=full,
        before=before,
        past=past,
        start=start,
        names=(("compressed", before),),
        skipped=skipped,
    )


def of_sequence(config: Any, arguments: Mapping[str, Any], variables: Variables) -> VideoTokens:
    """Tokens [B, L, C]: num_frames x height x width of a video, and others of conditions.

    Without any others the video is all. Else LTXConditionPipeline says how many lie in front of it; LTX-2's
    pipelines append them. Where nobody told sizes, or all are 1, the coordinates of tokens decide.
    """
    length = arguments["hidden_states"].shape[1]
    sizes: list[Any] = [arguments.get(name) for name in ("num_frames", "height", "width")]
    before = variables.get("extra_conditioning_num_latents")
    if None in sizes and before is not None:
        sizes = [variables.get(f"latent_{name}") for name in ("num_frames", "height", "width")]
    # 1. Coordinates (time, height, width) of every token.
    if None in sizes or (math.prod(sizes) == 1 and length > 1):
        coordinates = arguments.get("video_coords")
        if coordinates is None:
            raise errors.ConfigError(f"num_frames is {sizes[0]} for {length} tokens: {SAY_WHERE}")
        return of_coordinates(coordinates, sizes[0])
    # 2. Sizes, in patches.
    patches = [getattr(config, name, 1) for name in ("patch_size_t", "patch_size", "patch_size")]
    frames, rows, columns = (size // patch for size, patch in zip(sizes, patches, strict=True))
    video = VideoTokens(frames, rows * columns)
    if before is None and length > video.total:
        before = _conditions_before(config, video, length)
    video = video._replace(before=before or 0, names=(("condition", before or 0),))
    if length < video.before + video.total:
        raise errors.ConfigError(
            f"{length} tokens are not {frames} frames of {video.tokens} behind {video.before}: {SAY_WHERE}"
        )
    return video


def _conditions_before(config: Any, video: VideoTokens, length: int) -> int:
    """Return how many condition tokens lie in front where no pipeline says it: none in LTX-2."""
    if hasattr(config, "audio_in_channels"):
        return 0
    raise errors.ConfigError(
        f"{length} tokens are more than {video.frames} frames of {video.tokens}, and whether conditions come "
        f"first is not known: {SAY_WHERE}"
    )


def of_coordinates(coordinates: Tensor, num_frames: Any) -> VideoTokens:
    """Tokens at coordinates [B, 3, L] or, as intervals, [B, 3, L, 2]: a frame is what shares its time.

    Tokens before time 0 are conditions. ConfigError where they are no frames in order, or stand twice.
    """
    places = coordinates[0].float()
    if places.ndim == 3:
        places = places[..., 0]
    length = places.shape[1]
    times, counts = (x.tolist() for x in places[0].unique_consecutive(return_counts=True))
    if len(places.T.unique(dim=0)) < length:
        raise errors.ConfigError(
            f"of {length} tokens several have the same time, row and column, so conditions cannot be told "
            f"from frames: {SAY_WHERE}"
        )
    # Runs of tokens of one time; those before time 0 may lie before or behind the video.
    shown = [n for n, time in enumerate(times) if time >= 0]
    of_video = [times[n] for n in shown]
    is_in_order = (
        bool(shown) and of_video == sorted(set(of_video)) and shown == list(range(shown[0], shown[-1] + 1))
    )
    if not is_in_order or len({counts[n] for n in shown}) > 1:
        raise errors.ConfigError(f"num_frames is {num_frames} for {length} tokens: {SAY_WHERE}")
    before = sum(counts[: shown[0]])
    return VideoTokens(len(shown), counts[shown[0]], before, names=(("condition", before),))


def require_two_parameters(layout: Callable[..., Any]) -> None:
    """Raise ConfigError for a function that cannot be called as layout(config, arguments)."""
    try:
        inspect.signature(layout).bind(None, None)
    except ValueError:  # some functions of C do not say what they take
        return
    except TypeError:
        raise errors.ConfigError(
            f"{errors.short_repr(layout)} is no layout: it is called with the model's config "
            "and the arguments of "
            "its forward, and returns (frames, tokens of each)"
        ) from None


def checked_layout(layout: Any) -> VideoTokens:
    """Return where frames lie, of numbers of a user or of the user's function. ConfigError for others."""
    numbers = layout
    if isinstance(layout, VideoTokens):
        numbers = layout[:3]
    is_numbers = isinstance(numbers, Sequence) and len(numbers) in (2, 3) and {*map(type, numbers)} == {int}
    if not (is_numbers and min(numbers[:2]) > 0 and min(numbers) >= 0):
        raise errors.ConfigError(f"{errors.short_repr(layout)} is no layout: {SAY_WHERE}")
    return VideoTokens(*layout)


def told_layout(layout: Any, family: "Family | None") -> Locate:
    """Return where frames lie as a user says it; ConfigError for what is no layout."""
    if callable(layout):
        require_two_parameters(layout)
    else:
        checked_layout(layout)

    def locate(config: Any, arguments: Mapping[str, Any], variables: Variables) -> VideoTokens:
        numbers = layout
        if callable(layout):
            numbers = layout(config, arguments)
        video = checked_layout(numbers)
        if not video.names:
            video = video._replace(names=(("before", video.before),))
        if family is not None and family.locate is of_latents:
            total = of_latents(config, arguments, {}).total
            if video.total != total:
                raise errors.ConfigError(
                    f"layout {video[:2]} is of {video.total} tokens, not of {total}: {SAY_WHERE}"
                )
        return video

    return locate


@dataclass(frozen=True)
class Family:
    """How a class of transformers is built."""

    locate: Locate
    layers: tuple[str, ...] = ("blocks",)  # lists of layers, numbered through
    attn: str = "attn1"
    cross: str = "attn2"
    mlp: str = "ffn"
    frame_axis: int | None = 2  # of hidden_states; None: tokens
    early: str = ""  # a list of blocks that run before the layers
    behind: str = "condition"  # what tokens behind the video are
    # Of a forward's arguments: how many tokens behind the video come before the prompt's first, by item
    text_of: Callable[[Mapping[str, Any]], list[int]] | None = None
    has_wan_rope: bool = False  # pairs of dims, and bands of time, height and width, as RotaryTable's
    is_told: bool = False  # by a user's layout


WAN = Family(of_latents, has_wan_rope=True)


def text_at_once(arguments: Mapping[str, Any]) -> list[int]:
    """Return where the prompt begins among text tokens: at once (HunyuanVideo)."""
    return [0] * len(arguments["hidden_states"])


def text_behind_glyphs(arguments: Mapping[str, Any]) -> list[int]:
    """Return where the prompt begins: behind the valid tokens of an image and of ByT5 (HunyuanVideo-1.5)."""
    glyphs = arguments["encoder_attention_mask_2"].bool().sum(1)
    if bool((arguments["image_embeds"] != 0).any()):
        glyphs = glyphs + arguments["image_embeds"].shape[1]
    return glyphs.tolist()


JOINT = Family(of_latents, ("transformer_blocks",), attn="attn", cross="", mlp="ff", behind="text")
PACKED = Family(of_sequence, ("transformer_blocks",), mlp="ff", frame_axis=None)
FAMILIES: dict[str, Family] = {
    "WanTransformer3DModel": WAN,
    "WanVACETransformer3DModel": replace(WAN, locate=with_references, early="vace_blocks"),
    "SkyReelsV2Transformer3DModel": WAN,
    "CosmosTransformer3DModel": Family(of_latents, ("transformer_blocks",), mlp="ff"),
    "LTXVideoTransformer3DModel": PACKED,
    "LTX2VideoTransformer3DModel": PACKED,  # without its audio
    "HeliosTransformer3DModel": Family(with_history),
    "AnyFlowFARTransformer3DModel": Family(of_chunks, frame_axis=1, behind="padding"),
    "HunyuanVideo15Transformer3DModel": replace(JOINT, text_of=text_behind_glyphs),
    "HunyuanVideoTransformer3DModel": replace(
        JOINT, layers=("transformer_blocks", "single_transformer_blocks"), text_of=text_at_once
    ),
}


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a transformer's class; None where it is not known."""
    for kind in type(model).__mro__:
        if kind.__name__ in FAMILIES:
            return FAMILIES[kind.__name__]
    return None


# --- The experiment: which queries change where a frame of the input does
NOTICED = 0.01  # of the largest change


def slices_of_rows(
    queries_of: Callable[[Tensor], Tensor], x: Tensor, plain: Tensor, slices: Tensor, axis: int
) -> Tensor:
    """Return of which slice of the input each row of queries is, int64 [Lq]: 1, 2, ...; 0 for none.

    queries_of(x) returns queries [B, Lq, H, channels] that an input gives, plain are of x. slices are the
    numbers along an axis of x; entries of 0 stay as they are. Binary digits of the number are found one by
    one: slices that have the digit are replaced by random numbers of x's mean and spread, from a generator of
    their own.
    """
    shape = [1] * x.ndim
    shape[axis] = -1
    generator = torch.Generator(x.device).manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    noise = (noise * x.float().std() + x.float().mean()).to(x.dtype)
    rows = torch.zeros(plain.shape[1], dtype=torch.int64, device=plain.device)
    for digit in range(int(slices.max()).bit_length()):
        is_replaced = (slices >> digit & 1).bool().view(shape)
        change = (queries_of(torch.where(is_replaced, noise, x)) - plain).abs()
        by_row = change.amax((0, 2, 3)).float()
        rows += (by_row > NOTICED * by_row.max()).long() << digit
    return rows


def place_by_experiment(
    queries_of: Callable[[Tensor], Tensor],
    x: Tensor,
    plain: Tensor,
    num_behind: int,
    family: Family,
    video: VideoTokens,
) -> Checked:
    """Return how sure it is that frames lie where a family says, by an experiment with its input x.

    queries_of and plain are those of slices_of_rows(); num_behind rows come after the video's. Which packed
    tokens are of a frame nobody but the pipeline or the user knows ("told"). ConfigError where queries show
    another place.
    """
    # 1. The frame of each slice of the input, from 1 on: a frame may have several, and several one slice.
    axis, num_frames, tokens = family.frame_axis, video.skipped + video.frames, video.tokens
    place: Checked = "verified"
    is_part = False
    if axis is None or x.ndim == 3:
        axis, place = 1, "told"
        if x.shape[1] < video.total:
            raise errors.ConfigError(
                f"the model was given {x.shape[1]} tokens, not {video.frames} frames of {tokens}: {SAY_WHERE}"
            )
        first = video.before
        if x.shape[1] < first + video.total:  # text, which the model puts in front of the video's tokens
            first = 0
        slices = torch.zeros(x.shape[1], dtype=torch.int64)
        slices[first : first + video.total] = 1 + torch.arange(video.total) // tokens
    elif x.shape[axis] % num_frames == 0:
        slices = 1 + torch.arange(x.shape[axis]) // (x.shape[axis] // num_frames)
    elif num_frames % x.shape[axis] == 0 and not video.skipped:
        slices, place = 1 + torch.arange(x.shape[axis]), "told"
        tokens *= num_frames // x.shape[axis]
    else:
        slices, is_part = 1 + torch.arange(x.shape[axis]), True
    start = plain.shape[1] - num_behind - video.total
    if min(start, num_behind) < 0 or not bool(x.isfinite().all()):  # too many tokens: the call refuses them
        return "unverified"
    # 2. The frame of each row of the queries; negative where it is none of the video's.
    rows = slices_of_rows(queries_of, x, plain, slices.to(x.device), axis).cpu()
    skipped = video.skipped
    if is_part:  # the user knows what the others are
        skipped = int(rows[start]) - 1
    frames = (rows - 1 - skipped).clamp(min=-1)
    if is_part:
        frames[frames >= num_frames] = -1
    expected = torch.full_like(frames, -1)
    expected[start : start + video.total] = torch.arange(video.total) // tokens
    if torch.equal(frames, expected):
        return place
    wrong, remedy = int((frames != expected).nonzero()[0]), SAY_WHERE
    begins = (frames >= 0).nonzero().flatten().tolist()[:1]
    if begins and begins != [start]:
        remedy = f"the first of a frame is token {begins[0]}, layout=(frames, tokens of each, {begins[0]})"
    raise errors.ConfigError(
        f"token {wrong} is not of the frame where {video.frames} frames of {video.tokens} tokens behind "
        f"{start} others would have it: {remedy}"
    )


# --- The norms of queries
SAMPLED_ROWS = (
    1024  # whose norms are compared: an order that moves 1 % of the tokens stays unseen 3 times in 10^5
)


@lru_cache(maxsize=64)
def sampled_rows(length: int, device: torch.device) -> tuple[Sequence[int], Tensor | None]:
    """Return which of so many rows are compared, ascending, and their index on a device; None for all."""
    if length <= SAMPLED_ROWS:
        return range(length), None
    generator = torch.Generator().manual_seed(length)
    rows = torch.randperm(length, generator=generator)[:SAMPLED_ROWS].sort().values
    return rows.tolist(), rows.to(device)


def norms_of(x: Tensor) -> Tensor:
    """Return the norms of the quarters of each head's dims, float32 [B, L, H, 4], of x [B, L, H, D]."""
    if x.shape[-1] % 4:
        half = x.shape[-1] // 2  # of each half, one dim of 0 behind it
        x = torch.nn.functional.pad(x.unflatten(-1, (2, half)), (0, half % 2)).flatten(-2)
    return torch.linalg.vector_norm(x.unflatten(-1, (4, -1)), dim=-1, dtype=torch.float32)


def compare_norms(normed: Tensor, sent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [in order, in order or scaled], bool [..., 2], of a module's queries and those that it sent.

    normed and sent [..., B, L, H, 4] are norms_of() queries in this dtype. Scaled: times a number per head.
    Neither: tokens were permuted.
    """
    error = 2e-3
    if dtype in (torch.float16, torch.bfloat16):
        error = 2e-2
    # 1. Norms that RoPE keeps, [3, ..., B, L, H]: of all dims; of the first half, whose pairs are neighbours
    # (2n, 2n + 1); of what pairs of dims (n, n + D/2) have in the first and third quarter. Where a norm per
    # head makes the first one equal for all tokens, one of the others tells tokens apart.
    before, after = _kept_norms(normed), _kept_norms(sent)
    is_void = (before == 0) & (after == 0) | ~(before.isfinite() & after.isfinite())
    ratios = torch.where(is_void, 1.0, after / before)
    # 2. By how much tokens differ, [3, ..., B, H].
    spread = _spread(ratios)
    is_flat = _spread(before[0]) < 4 * error  # then equal norms say nothing
    is_proportional = (spread[0] < 2 * error) & (~is_flat | (spread[1:] < 4 * error).any(0))
    # 3. Of all heads and items.
    is_proportional = is_proportional.flatten(-2).all(-1)
    is_equal = ((ratios[0] - 1).abs() < error).flatten(-3).all(-1)
    return torch.stack([is_proportional & is_equal, is_proportional], -1)


def _kept_norms(quarters: Tensor) -> Tensor:
    """Return the three norms [3, ...] that RoPE keeps, of norms of quarters [..., 4]."""
    first, second, third, fourth = quarters.square().unbind(-1)
    return torch.stack([first + second + third + fourth, first + second, first + third]).sqrt()


def _spread(x: Tensor) -> Tensor:
    """Return by how much tokens differ, relatively, [..., H], of x [..., L, H]."""
    least, most = x.amin(-2), x.amax(-2)
    return (most - least) / most.clamp(min=1e-30)

"""What types and shapes do not show: numbers count from 0, frames are in the video, absent cells are NaN."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from experiments.caches.errors import CacheError
from experiments.caches.fields import describe
from wan.blocks import block_frames, later_block
from wan.errors import ConfigError, named, quoted, require_text
from wan.limits import MAX_COUNT, MAX_TEXT
from wan.safe_load import is_verified

NO_KEY = -9  # the least of key_frame: nothing is there
MASS_TOLERANCE = 1e-3  # float32 rows are good to 1e-5; a lost or doubled key frame is at least 1e-2


def check_counts(values: Mapping[str, Any]) -> None:
    """Raise CacheError for counts that no video has: lists and masks are made from them early."""
    for name in ("num_frames", "frame_seq_length", "num_frame_per_block", "num_heads"):
        value = values.get(name)
        if isinstance(value, (int, float)) and not 1 <= value <= MAX_COUNT:
            raise CacheError(f"{name} is {quoted(value)}, not a number of 1..{MAX_COUNT}")


def check_texts(value: Any, name: str = "") -> None:
    """Raise CacheError for texts that are no UTF-8, or longer than a title or a page can carry."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise CacheError(f"{name} has {len(value)} characters, at most {MAX_TEXT} are read")
        try:
            require_text(value.replace("\0", ""), name)  # a page shows NUL as an escape
        except ConfigError as error:
            raise CacheError(str(error)) from None
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_texts(key, "a key")
            check_texts(inner, named(key))
    elif isinstance(value, list) and not (value and isinstance(value[0], int)):  # such as frames
        for inner in value:
            check_texts(inner, name)


def check_numbers(values: Mapping[str, Any], where: str = "") -> None:
    """Raise CacheError for layers, passes, blocks or timesteps that do not count from 0."""
    for name, value in values.items():
        numbers = (
            value.tolist() if isinstance(value, Tensor) else value if isinstance(value, list) else [value]
        )
        if not numbers or not all(number is None or 0 <= number < float("inf") for number in numbers):
            raise CacheError(f"{where}{name} is {describe(value)}; it counts from 0")


def check_any_of(values: Mapping[str, Any], names: Sequence[str], where: str = "") -> None:
    """Raise CacheError where none of some fields is there."""
    if not any(name in values for name in names):
        raise CacheError(f"{where}none of {', '.join(names)} is there")


def check_once(values: Mapping[str, list[int] | None]) -> None:
    """Raise CacheError where a list names one layer or pass twice."""
    for name, numbers in values.items():
        if numbers is not None and len(set(numbers)) < len(numbers):
            raise CacheError(f"{name} {numbers} name one twice")


def check_frames(values: Mapping[str, Sequence[int]], num_frames: int, where: str = "") -> None:
    """Raise CacheError for frames that do not increase, or are not in the video."""
    for name, frames in values.items():
        if list(frames) != sorted(set(frames)) or not all(0 <= n < num_frames for n in frames):
            raise CacheError(f"{where}{name} {frames} are not increasing frames of 0..{num_frames - 1}")


def check_block(
    where: str,
    block_sizes: list[int],
    block: int | None,
    query_frames: list[int],
    key_frames: list[int],
    ahead: int = 0,
) -> None:
    """Raise CacheError where a call's queries are not those of its block, or a key comes after them."""
    if block is not None:
        own = block_frames(block_sizes, block) if block < len(block_sizes) else None
        if query_frames != own:
            raise CacheError(
                f"{where}query_frames {query_frames} are not those of block {block} of {block_sizes}"
            )
    if later_block(block_sizes, ahead)[query_frames[-1], key_frames].any():
        raise CacheError(f"{where}key_frames {key_frames} come after the queries' block")


def check_absent(name: str, matrices: Tensor, block_sizes: list[int], done: int, ahead: int = 0) -> None:
    """Raise CacheError where matrices [..., F, F] have values that no query of the done blocks can have."""
    if not is_verified(
        matrices
    ):  # it stays on disk until it is read, and checked with load_cache(verify=True)
        return
    if not matrices[..., later_block(block_sizes, ahead)].isnan().all():
        raise CacheError(f"{name} has values where the key's block comes after the query's; absent is NaN")
    if not matrices[..., sum(block_sizes[:done]) :, :].isnan().all():
        raise CacheError(f"{name} has values in blocks that were not done; absent is NaN")


def check_values(values: Mapping[str, Tensor | None], where: str = "") -> None:
    """Raise CacheError for values that are infinite, and for rows of frame_mass that do not sum to 1."""
    there = {name: tensor for name, tensor in values.items() if tensor is not None and is_verified(tensor)}
    for name, tensor in there.items():
        if tensor.isinf().any():
            raise CacheError(f"{where}{name} has values that are infinite; absent is NaN")
    for name in ("frame_mass", "slot_mass"):
        if (mass := there.get(name)) is None:
            continue
        rows = mass.float()
        attended = ~rows.isnan().all(-1)
        off = (rows.nan_to_num().sum(-1) - 1)[attended].abs()
        if (rows < 0).any() or (off > MASS_TOLERANCE).any():
            raise CacheError(f"{where}rows of {name} do not sum to 1")


def check_keys(
    named: Sequence[Tensor | None],
    values: Mapping[str, Tensor | None],
    num_frames: int,
    S: int,
    seen: int,
    where: str = "",
) -> None:
    """Raise CacheError where values [..., keys] are not of seen frames of S tokens, nor of named keys.

    named are key_frame, key_token and key_position, where keys have names.
    """
    frame, token, position = named
    if (frame is None) != (token is None) or (frame is None) != (position is None):
        raise CacheError(f"{where}key_frame, key_token and key_position go together")
    for name, tensor in values.items():
        if tensor is not None and frame is None and tensor.shape[-1] != seen * S:
            raise CacheError(
                f"{where}{name} is {describe(tensor)}, not of {seen} key frames of {S} tokens each"
            )
    if frame is None or token is None:
        return
    if not ((frame >= NO_KEY) & (frame < num_frames)).all():
        raise CacheError(f"{where}key_frame is not in 0..{num_frames - 1}, or negative for what is no frame")
    if not ((token >= 0) & (token < S)).all():
        raise CacheError(f"{where}key_token is not in 0..{S - 1}")

"""How many bytes a cache takes in its file."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

MARGIN = 1 << 16  # bytes of a cache beside its tensors: names, numbers, the archive's directory


def tensor_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Bytes that a cache, or what is in it, takes in a file; a little too many. One tensor counts once."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        new = value.data_ptr() not in seen
        seen.add(value.data_ptr())
        return value.numel() * value.element_size() * new + 512
    if isinstance(value, Mapping):
        return MARGIN * ("format" in value) + sum(tensor_bytes(inner, seen) for inner in value.values())
    return sum(tensor_bytes(inner, seen) for inner in value) if isinstance(value, list) else 16

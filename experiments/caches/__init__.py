"""The .pt caches: what is on disk, how it is checked, and one typed view of every format."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.caches.store import load_cache, save_cache

__all__ = ["load_cache", "save_cache"]


def __getattr__(name: str) -> Any:
    """Import the reader and writer when they are first asked for: errors and field tables need no torch."""
    if name in __all__:
        return getattr(import_module("experiments.caches.store"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""A folder of layerN.pt: one rollout, each layer once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.caches.errors import CacheError
from experiments.caches.store import load_cache
from experiments.caches.view import Profiles, open_profiles
from wan.errors import quoted

REMEDY = "a folder of layers is of one rollout, each layer once: move one of the files out"


def open_layers(folder: Path, formats: Sequence[str] = ()) -> dict[Path, dict[str, Any]]:
    """Path -> cache of every layerN.pt, by their numbers.

    formats: those that will do, () all. Raises CacheError where there are none, for other formats, for a
    layer twice, and for two rollouts.
    """
    paths = sorted(folder.glob("layer*.pt"), key=lambda p: int("0" + "".join(filter(str.isdigit, p.stem))))
    if not paths:
        command = f"bash experiments/extract_all_layers.sh CONFIG {folder}"
        raise CacheError(f"{folder} holds no layerN.pt; run: {command}")
    caches = {path: load_cache(path, expect=formats) for path in paths}
    _require_one_rollout({path: open_profiles(cache) for path, cache in caches.items()})
    return caches


def _require_one_rollout(views: Mapping[Path, Profiles]) -> None:
    first, expected = next((path, _said(view)) for path, view in views.items())
    there: dict[int, Path] = {}
    for path, view in views.items():
        for mine, other in zip(_said(view), expected, strict=True):
            if mine != other:
                raise CacheError(f"{path} is of {quoted(mine)}, {first} of {quoted(other)}; {REMEDY}")
        for layer in view.layers:
            if there.setdefault(layer, path) != path:
                raise CacheError(f"{there[layer]} and {path} both hold layer {layer}; {REMEDY}")


def _said(view: Profiles) -> tuple[str, ...]:
    """What all layers of a rollout have in common, in words."""
    edited = f"a run edited by {view.edits}" if view.edits else "a run without edits"
    sizes = f"{view.num_frames} frames", f"{view.num_heads} heads"
    return view.source, *sizes, view.pass_label, edited

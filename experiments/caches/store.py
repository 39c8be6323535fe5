"""The one reader and writer of .pt caches.

A cache is a dict of tensors and plain Python values; experiments/caches/formats.py has the fields of each
format. Data flows extraction -> save_cache -> load_cache -> experiments/caches/view.py, which gives notebooks
one view of all formats.
"""

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.caches import legacy
from experiments.caches.files import CacheError, replacing, tensor_bytes
from experiments.caches.formats import (
    FORMATS,
    SCHEMA_VERSION,
    AtlasCache,
    Cache,
    LayerCache,
    PassTag,
    Sampling,
    check,
    check_counts,
)
from experiments.caches.view import Profiles, open_profiles
from wan.errors import reason_of, short_repr
from wan.files import UnreadableError, load_tensors

# --- The one reader and writer of .pt caches
__all__ = ["SCHEMA_VERSION", "CacheError", "check", "load_cache", "save_cache"]


def save_cache(path: str | Path, cache: Cache | Mapping[str, Any]) -> None:
    """Check a cache and write it, whole or not at all; the same content gives the same bytes under any name.

    Raises CacheError for a field that is missing or wrong and for a path that cannot be written. Tensors are
    written from where they are: the only copies are of those not contiguous on the CPU.
    """
    try:
        values = _plain(cache.to_dict() if isinstance(cache, Cache) else cache, "cache")
        check(values)
    except CacheError as error:
        raise CacheError(f"{path} not written: {error}") from None
    try:
        with replacing(path) as file:
            torch.save(values, file)  # an open file, not a path: its archive is then always called "archive"
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        needed, free = (
            tensor_bytes(values),
            shutil.disk_usage(Path(path).parent).free if Path(path).parent.is_dir() else 0,
        )
        full = f"; it needs {needed} bytes, {free} are free" if 0 < free < needed else ""
        raise CacheError(f"{path} cannot be written: {reason_of(error)}{full}") from error


def load_cache(
    path: str | Path, mmap: bool = True, expect: Sequence[str] = (), verify: bool = False
) -> dict[str, Any]:
    """Read a cache of any format and age as a dict with today's fields; with mmap, tensors stay on disk.

    Tensors that stay on disk are compared with their checksums when a view first reduces them, or here with
    verify. expect names the formats that will do, () all. Raises CacheError: not there, not a cache, damaged,
    of another format, or with fields that are missing or wrong. Nothing in the file is executed.
    """
    path, expect = Path(path), tuple(expect)
    if not path.is_file():
        raise CacheError(f"{path} not found{_others_of_its_kind(path)}; run: {_command(path, expect)}")
    try:
        with torch.serialization.safe_globals(legacy.ALLOWED):
            raw = load_tensors(path, mmap, verify)
    except UnreadableError as error:
        raise CacheError(
            f"{path} cannot be read as a cache: {error}; make it again: {_command(path, expect)}"
        ) from error
    try:
        if not isinstance(raw, dict):
            raise CacheError(f"holds a {type(raw).__name__}, not a dict")
        if "format" not in raw:
            raw = legacy.to_plain(raw)
            check_counts(raw)
            raw = legacy.modernise(raw)
        check(raw)
    except (
        Exception
    ) as error:  # fields of unheard-of types can fail in any way; the reader must hear of it in one line
        reason = (
            str(error)
            if isinstance(error, ValueError)
            else f"{type(error).__name__} in its fields: {reason_of(error)}"
        )
        raise CacheError(f"{path}: {reason}; make it again: {_command(path, expect)}") from None
    if expect and raw["format"] not in expect:
        raise CacheError(
            f"{path} is a cache of format {raw['format']}: open it with "
            f"notebooks/{FORMATS[raw['format']].notebook}. Here it takes {' or '.join(expect)}, "
            f"made by: python experiments/{FORMATS[expect[0]].script}"
        )
    return raw


def _plain(value: Any, where: str, kept: dict[int, Tensor] | None = None) -> Any:
    """A copy of a dict's structure whose bytes depend on its content alone; tensors are kept, not copied.

    Pickle writes an object it has seen as a reference to it, so two equal strings give other bytes than one
    string used twice: interning makes them one. A tensor under two names stays one. Raises CacheError for
    what is neither tensor nor plain value.
    """
    kept = {} if kept is None else kept  # by the id of a tensor: what is written for it
    if isinstance(value, Tensor):
        if id(value) not in kept:
            kept[id(value)] = _whole(value.detach())
        return kept[id(value)]
    if isinstance(value, Mapping):
        return {
            _plain(key, f"a key of {where}"): _plain(inner, f"{where}[{key!r}]", kept)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]", kept) for i, v in enumerate(value)]
    if type(value) is str:
        return sys.intern(value)
    if value is None or type(value) in (bool, int, float):
        return value
    raise CacheError(
        f"{where} is a {type(value).__module__}.{type(value).__name__}; "
        "only tensors and plain Python values are stored"
    )


def _whole(tensor: Tensor) -> Tensor:
    """A contiguous tensor on the CPU with a storage of its own, a copy only where it is none."""
    own = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor.contiguous() if tensor.device.type == "cpu" and own else tensor.cpu().clone().contiguous()


def _command(path: Path, expect: Sequence[str]) -> str:
    """The command that makes a cache, by its expected format or else by its name."""
    by_name = [kind for kind, form in FORMATS.items() if form.default == path.name]
    kind = (by_name or list(expect) or (["layer"] if path.name.startswith("layer") else ["figure4"]))[0]
    flags = "" if path.name == FORMATS[kind].default else f" --output_path cache/{path.name}"
    if kind == "layer" and (layer := re.fullmatch(r"layer(\d+)\.pt", path.name)):
        published = "python experiments/layers_from_atlas.py cache/published/self_forcing_dmd_eagle_21f.pt"
        return (
            f"python experiments/{FORMATS[kind].script} --layer_index {layer[1]} "
            f"(without a model: {published} --layers {layer[1]})"
        )
    return (
        f"python experiments/{FORMATS[kind].script}{flags} (on a CPU add --config_path configs/wan_mini.yaml)"
    )


def _others_of_its_kind(path: Path) -> str:
    """Which layerN.pt are there where one is not."""
    if not re.fullmatch(r"layer\d+\.pt", path.name):
        return ""
    there = sorted(path.parent.glob("layer*.pt"), key=lambda p: (len(p.name), p.name))
    return (
        f"; there is {', '.join(p.name for p in there[:8])}{', ...' if len(there) > 8 else ''}"
        if there
        else ""
    )


# --- From one cache format to another: layers or passes taken out of an atlas
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


# --- A folder of layerN.pt: one rollout, each layer once
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
                raise CacheError(f"{path} is of {short_repr(mine)}, {first} of {short_repr(other)}; {REMEDY}")
        for layer in view.layers:
            if there.setdefault(layer, path) != path:
                raise CacheError(f"{there[layer]} and {path} both hold layer {layer}; {REMEDY}")


def _said(view: Profiles) -> tuple[str, ...]:
    """What all layers of a rollout have in common, in words."""
    edited = f"a run edited by {view.edits}" if view.edits else "a run without edits"
    sizes = f"{view.num_frames} frames", f"{view.num_heads} heads"
    return view.source, *sizes, view.pass_label, edited

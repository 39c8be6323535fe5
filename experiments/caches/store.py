"""The one reader and writer of .pt caches.

A cache is a dict of tensors and plain Python values; experiments/caches/schema.py has the fields of each
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
from experiments.caches.atomic_files import replacing
from experiments.caches.common import Cache
from experiments.caches.errors import CacheError
from experiments.caches.schema import FORMATS, SCHEMA_VERSION, check
from experiments.caches.sizes import tensor_bytes
from experiments.caches.value_checks import check_counts
from wan.errors import reason_of
from wan.safe_load import UnreadableError, load_tensors

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

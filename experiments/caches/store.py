"""The writer and the reader of .pt caches, and caches made of others.

A cache is a dict of tensors and plain Python values; experiments/caches/formats.py has the fields of each
format. Data flows extraction -> save_cache -> load_cache -> experiments/caches/view.py.

    cache = load_cache("cache/atlas.pt", expect=("atlas",))
    save_cache("cache/layer20.pt", layer_from_atlas(cache, 20))
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from experiments.caches import legacy
from experiments.caches.activations import load_activations, model_of
from experiments.caches.files import CacheError, replacing, require_held
from experiments.caches.formats import (
    FORMATS,
    AtlasCache,
    Cache,
    PassTag,
    Sampling,
    build_layer_cache,
    check,
    check_counts,
    declared_fields,
)
from experiments.caches.view import open_profiles
from wan.config import changed_settings
from wan.errors import UserError, library_writes, short_repr
from wan.files import UnreadableError, load_tensors

ROOT = Path(__file__).parents[2]


def save_cache(path: str | Path, cache: Mapping[str, Any]) -> None:
    """Check a cache and write it, whole or not at all; the same content gives the same bytes under any name.

    Raises CacheError for a field that is missing or wrong and for a path that cannot be written. Tensors are
    written from where they are: the only copies are of those not contiguous on the CPU.
    """
    try:
        values = _plain(cache, "cache", {})
        check(values)
    except (UserError, RecursionError) as error:
        said = error if isinstance(error, UserError) else "it holds itself"
        raise CacheError(f"{path} not written: {said}") from None
    with library_writes(path, CacheError), replacing(path) as file:
        torch.save(values, file)  # an open file, not a path: its archive is then always called "archive"


def _plain(value: Any, where: str, kept: dict[int, Tensor]) -> Any:
    """Copy a dict's structure so that its bytes depend on its content alone; tensors are kept, not copied.

    Pickle writes an object it has seen as a reference to it, so two equal strings give other bytes than one
    string used twice: interning makes them one. A tensor under two names stays one. Raises CacheError for
    what is neither tensor nor plain value.
    """
    if isinstance(value, Tensor):
        if id(value) not in kept:
            # A view of a larger storage is copied: torch.save would write the whole storage
            x = value.detach()
            in_place = x.device.type == "cpu" and x.untyped_storage().nbytes() == x.nbytes
            kept[id(value)] = x.contiguous() if in_place else x.cpu().clone().contiguous()
        return kept[id(value)]
    if isinstance(value, Mapping):
        return {_plain(key, where, kept): _plain(v, f"{where}[{key!r}]", kept) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]", kept) for i, v in enumerate(value)]
    if type(value) is str:
        return sys.intern(value)
    if value is None or type(value) in (bool, int, float):
        return value
    raise CacheError(f"{where} is a {type(value).__name__}; only tensors and plain Python values are stored")


def peek(path: str | Path) -> dict[str, Any]:
    """Return the fields of a cache that is as it was written, unchecked; none of any other file."""
    try:
        raw = load_tensors(path)
    except UnreadableError:  # not there, torn, older, or of another program
        return {}
    return raw if isinstance(raw, dict) else {}


def load_cache(path: str | Path, mmap: bool = True, expect: Sequence[str] = ()) -> dict[str, Any]:
    """Read a cache of any format and age as a dict with today's fields; with mmap, tensors stay on disk.

    expect names the formats that will do, () all. Raises CacheError: not there, not a cache, damaged,
    of another format, or with fields that are missing or wrong. Nothing in the file is executed.
    """
    # 1. Not there: say what is, and how to make it
    path, expect = Path(path), tuple(expect)
    if path.suffix == ".safetensors" and path.is_file() and not expect:
        return load_activations(path)
    if not path.is_file():
        there = sorted(path.parent.glob("layer*.pt"), key=lambda p: (len(p.name), p.name))
        names = ", ".join(p.name for p in there[:8]) + ", ..." * (len(there) > 8)
        others = f"; there is {names}" if there and path.name.startswith("layer") else ""
        raise CacheError(f"{path} not found{others}; {remedy(path, expect)}")
    try:
        # 2. Tensors and plain values; files of the forks' scripts hold configuration objects too
        with torch.serialization.safe_globals(legacy.ALLOWED):
            raw = load_tensors(path, mmap)
        # 3. Today's fields, checked
        if "format" not in raw:
            raw = legacy.to_plain(raw)
            check_counts(raw)
            raw = legacy.modernise(raw)
        check(raw)
    except MemoryError:  # no fault of the file
        raise
    except Exception as error:  # fields of unheard-of types can fail in any way
        known = isinstance(error, ValueError)
        reason = str(error) if known else f"{type(error).__name__} in its fields: {error}"
        raise CacheError(f"{path} cannot be read as a cache: {reason}; {remedy(path, expect)}") from None
    if expect and raw["format"] not in expect:
        raise CacheError(
            f"{path} is a cache of format {raw['format']}: open it with "
            f"notebooks/{FORMATS[raw['format']].notebook}. Here it takes {' or '.join(expect)}, "
            f"made by experiments/{FORMATS[expect[0]].script}"
        )
    return raw


def from_root(path: str | Path) -> Path:
    """Return a path as a command in the root of the repository names it."""
    whole = Path(os.path.realpath(path))  # Path.resolve() raises RuntimeError for a link to itself
    return whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole


def remedy(path: str | Path, formats: Sequence[str] = ()) -> str:
    """Return "run: COMMAND", which makes a cache of the first of these formats at this path.

    Its own file name, or else that of an atlas, decides where several formats will do. The command is of the
    miniature, whose weights are shipped: it runs as it is, in the root of the repository.
    """
    # 1. The format
    name = Path(path).name
    kind = (list(formats) or ["atlas"])[0]
    for one, form in FORMATS.items():
        if (not formats or one in formats) and name == form.default:
            kind = one
    layer = re.fullmatch(r"layer(\d+)\.pt", name)
    if layer and (not formats or "layer" in formats):
        kind = "layer"
    # 2. The command
    at = from_root(path)
    words = ["python", f"experiments/{FORMATS[kind].script}", "--config_path configs/wan_mini.yaml"]
    words += filter(None, [FORMATS[kind].flags])
    if kind == "layer":
        words.append(f"--layer_index {layer[1] if layer else 3}")
    if kind == "causal_atlas":
        words.append(f"--output_dir {quote(str(at.parent))}")
    elif at != Path("cache") / (name if kind == "layer" else FORMATS[kind].default):
        words.append(f"--output_path {quote(str(at))}")
    return f"run: {' '.join(words)}"


# --- Layers taken out of an atlas
def one_layer(atlas: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return an atlas of one of an atlas's layers. CacheError where it lacks the layer."""
    require_held("layer", layer, atlas["layers"])
    i = atlas["layers"].index(layer)
    by_layer = [name for name, declared in declared_fields(AtlasCache).items() if "[N" in declared]
    return dict(atlas) | {name: atlas[name][i : i + 1] for name in by_layer if name in atlas}


def layer_from_atlas(atlas: Mapping[str, Any], layer: int, step: int | None = None) -> dict[str, Any]:
    """Return one layer of an atlas in one pass (None: the first) as a layer cache. CacheError: absent."""
    view = open_profiles(atlas, step, "mean_logit")
    profile, matrix, _, averages = view.values(layer)  # [H, F], [H, F, F], -, [H, F, averages]
    one_block = len(view.block_sizes) == 1  # a bidirectional run: its last frames are the queries
    last = list(range(view.num_frames))[-3:] if one_block else list(view.query_frames)
    if matrix is None:
        matrix = torch.full((view.num_heads, view.num_frames, view.num_frames), torch.nan)
    elif one_block:
        profile = matrix[:, last].mean(1)
    names = declared_fields(Cache) | declared_fields(Sampling)
    common = {name: atlas[name] for name in names if name in atlas}
    at = PassTag(view.step, view.timestep, view.is_clean_pass)
    return build_layer_cache(common, at, layer, matrix.float(), last, profile.float(), averages=averages)


# --- Runs that count together: of one model and schedule, each once
def schedule_of(atlas: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a run was made, but for its model, prompts and seed, and what was kept of it."""
    config = changed_settings(atlas.get("config") or {})
    switches = [switch.get("frame") for switch in config.pop("prompt_schedule", ())]
    names: tuple[str, ...] = ("layers", "pass_timesteps", "pass_steps", "pass_is_clean", "num_frames")
    names += ("block_sizes", "branch", "blocks_done", "rolling_timesteps", "guidance_scale")
    found = {name: atlas.get(name) for name in names}
    lists = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in found.items()}
    edits = (atlas.get("interventions") or {}).get("hash")
    return lists | {"config": config, "frames of later prompts": switches, "edits": edits}


def files_by_name(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the files that a run read, such as the text encoder's."""
    return {f"file {each['name']}": each["sampled_sha256"] for each in cache.get("files") or ()}


def require_one_model(caches: Mapping[str, Mapping[str, Any]], what: str) -> None:
    """Raise CacheError, which says what takes them, unless caches by name differ in prompt and seed alone."""
    (first, one), *others = [
        (name, model_of(each) | schedule_of(each) | files_by_name(each)) for name, each in caches.items()
    ]
    for name, other in others:
        # Files of prompts are each run's own; what has one name must be one file
        if differs := [key for key in one if one[key] != other.get(key, one[key])]:
            values = f"{short_repr(one[differs[0]])} and {short_repr(other[differs[0]])}"
            raise CacheError(
                f"{what} takes atlases of one model and schedule, which differ in prompt and seed: "
                f"{differs[0]} is {values} in {first} and {name}"
            )
    runs = [run for each in caches.values() if (run := each.get("fingerprint"))]
    if len({*runs}) < len(runs):
        raise CacheError(f"{what} takes every run once: two of {', '.join(caches)} are of the same run")


# --- A folder of layerN.pt: one rollout, each layer once
def open_layers(folder: Path, formats: Sequence[str] = ()) -> dict[Path, dict[str, Any]]:
    """Open every layerN.pt of a folder by number. CacheError unless all belong to one rollout."""
    paths = sorted(folder.glob("layer*.pt"), key=lambda p: int("0" + "".join(filter(str.isdigit, p.stem))))
    if not paths:
        script = "python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml"
        raise CacheError(
            f"{folder} holds no layerN.pt; run: {script} --output_dir {quote(str(from_root(folder)))}"
        )
    caches = {path: load_cache(path, expect=formats) for path in paths}
    # Layers of different runs, or a file copied under another name, would be drawn as one rollout
    views = [open_profiles(cache) for cache in caches.values()]
    layers = [layer for view in views for layer in view.layers]
    rollouts = [
        {
            **{"source": view.source, "frames": view.num_frames, "heads": view.num_heads},
            **{"pass": view.pass_label, "edits": view.edits, "settings": view.settings},
            **{"model": model_of(cache), "given frames": cache.get("first_frames")},
            "fingerprint": cache.get("fingerprint"),  # of all that numbers depend on; older files have none
        }
        for cache, view in zip(caches.values(), views, strict=True)
    ]
    other = next((n for n, rollout in enumerate(rollouts) if rollout != rollouts[0]), None)
    if other is not None or len(set(layers)) < len(layers):
        what = f"a layer twice: {layers}"
        if other is not None:
            one, two = rollouts[0], rollouts[other]
            differs = next(name for name in one if one[name] != two[name])
            both = [f"{paths[n].name} has {short_repr(r[differs], 200)}" for n, r in ((0, one), (other, two))]
            what = f"files of several, by their {differs}: {', '.join(both)}"
        raise CacheError(
            f"{folder} must hold one rollout, each layer once, and holds {what}; move some of the files out"
        )
    return caches

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
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from experiments.caches import files, legacy, outputs
from experiments.caches.activations import load_activations, model_of
from experiments.caches.contents import contents_of
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
from wan import errors
from wan.config import changed_settings
from wan.files import load_tensors


def save_cache(path: str | Path, cache: Mapping[str, Any], overwrite: bool = False) -> None:
    """Check a cache and write it, whole or not at all; the same content gives the same bytes under any name.

    Raises CacheError for a field that is missing or wrong, for a path that cannot be written, and, unless
    overwrite, for a file there that must stay (outputs.py). Tensors are written from where they are: the only
    copies are of those not contiguous on the CPU.
    """
    files.require_suffix(path, ".pt")
    try:
        values = _plain(cache, "cache", {})
        check(values)
    except RecursionError:
        raise files.CacheError(f"{path} not written: it holds itself") from None
    except errors.UserError as error:
        raise files.CacheError(f"{path} not written: {error}") from None
    with errors.library_writes(path, files.CacheError):
        if not overwrite:
            outputs.require_replaceable(path, contents_of(values), cache_contents)
        with files.replacing(path) as file:
            torch.save(values, file)  # an open file, not a path: its archive is then always called "archive"


def cache_contents(path: Path) -> outputs.Contents | None:
    """Return what a cache of any age holds; None for a file that is none, or is damaged."""
    try:
        return contents_of(load_cache(path))
    except files.CacheError:
        return None


def _plain(value: Any, where: str, kept: dict[int, Tensor]) -> Any:
    """Copy a dict's structure so that its bytes depend on its content alone; tensors are kept, not copied.

    Pickle writes an object it has seen as a reference to it, so two equal strings give other bytes than one
    string used twice: interning makes them one. A tensor under two names stays one. Raises CacheError for
    what is neither tensor nor plain value.
    """
    if isinstance(value, Tensor):
        if id(value) not in kept:
            x = value.detach().cpu()
            if x.untyped_storage().nbytes() != x.nbytes:
                x = x.clone()  # a view of a larger storage, which torch.save would write whole
            kept[id(value)] = x.contiguous()
        return kept[id(value)]
    if isinstance(value, Mapping):
        return {_plain(key, where, kept): _plain(v, f"{where}[{key!r}]", kept) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]", kept) for i, v in enumerate(value)]
    if type(value) is str:
        return sys.intern(value)
    if value is None or type(value) in (bool, int, float):
        return value
    raise files.CacheError(
        f"{where} is {errors.short_repr(value)}; only tensors and plain Python values are stored"
    )


def load_cache(path: str | Path, mmap: bool = True, expect: Sequence[str] = ()) -> dict[str, Any]:
    """Read a cache of any format and age as a dict with today's fields. Nothing in the file is executed.

    Args:
        path: of the file.
        mmap: leave tensors on disk until they are used.
        expect: the formats that will do; () all.

    Raises:
        CacheError: for a file that is not there, is no cache, is damaged or of another format, or has
            fields that are missing or wrong.
    """
    # 1. Not there: say what is, and how to make it
    path, expect = Path(path), tuple(expect)
    is_there = os.path.isfile(path)  # False for a name that is too long
    if path.suffix == ".safetensors" and is_there and not expect:
        return load_activations(path)
    if not is_there:
        others = ""
        layers = sorted(path.parent.glob("layer*.pt"), key=lambda p: (len(p.name), p.name))
        if layers and path.name.startswith("layer"):
            others = f"; there is {files.in_words([layer.name for layer in layers])}"
        names = {cache.name for cache in path.parent.glob("*.pt")}
        nearest = get_close_matches(path.name, names - {path.name}, 1, cutoff=0.8)  # itself: a broken link
        usual_names = {format.default for format in FORMATS.values()}
        if nearest and not others and path.name not in usual_names:
            raise files.CacheError(f"{path} not found; did you mean {nearest[0]}?")
        raise files.CacheError(f"{path} not found{others}; {remedy(path, expect)}")
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
        reason = str(error)
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__} in its fields: {error}"
        raise files.CacheError(
            f"{path} cannot be read as a cache: {reason}; {remedy(path, expect)}"
        ) from None
    if expect and raw["format"] not in expect:
        raise files.CacheError(
            f"{path} is a cache of format {raw['format']}: open it with "
            f"notebooks/{FORMATS[raw['format']].notebook}. Here it takes {' or '.join(expect)}, "
            f"made by experiments/{FORMATS[expect[0]].script}"
        )
    return raw


def from_root(path: str | Path) -> Path:
    """Return a path as a command in the root of the repository names it."""
    try:
        whole = Path(os.path.realpath(path))  # Path.resolve() raises RuntimeError for a link to itself
    except ValueError:  # a NUL, which no disk has in a name
        return Path(path)
    if whole.is_relative_to(files.ROOT):
        return whole.relative_to(files.ROOT)
    return whole


def remedy(path: str | Path, formats: Sequence[str] = ()) -> str:
    """Return "run: COMMAND", which makes a cache of the first of these formats.

    It makes it at this path if nothing is there, or a damaged cache; any other file is nobody's to replace,
    and is not named. The file name, or else that of an atlas, decides where several formats will do. The
    command is of the miniature, whose weights are shipped: it runs as it is, in the root of the repository.
    """
    # 1. The format
    name, allowed = Path(path).name, list(formats or FORMATS)
    kind = allowed[0] if formats else "atlas"
    for name_of_format in allowed:
        if name == FORMATS[name_of_format].default:
            kind = name_of_format
    layer = re.fullmatch(r"layer(\d+)\.pt", name)
    if layer and "layer" in allowed:
        kind = "layer"
    # 2. The command
    target, default = from_root(path), Path("cache") / FORMATS[kind].default
    words = ["python", f"experiments/{FORMATS[kind].script}", "--config_path configs/wan_mini.yaml"]
    if FORMATS[kind].flags:
        words.append(FORMATS[kind].flags)
    if kind == "layer":
        number = layer[1] if layer else "3"
        words.append(f"--layer_index {number}")
        default = Path("cache") / name
    # 3. Where it goes
    has_content = os.path.exists(path) and os.path.getsize(path) > 0
    is_damaged, before = is_damaged_cache(Path(path)), ""
    if target.suffix != ".pt" or (has_content and not is_damaged):
        if target == default:
            before = "move it away, then "
    elif kind == "causal_atlas":
        words.append(f"--output_dir {quote(str(target.parent))}")
    else:
        if target != default:
            words.append(f"--output_path {quote(str(target))}")
        if is_damaged:
            words.append("--overwrite")
    return before + f"run: {' '.join(words)}"


def is_damaged_cache(path: Path) -> bool:
    """Return True for a file that begins as save_cache() writes one, whatever follows."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(1 << 16)
    return start.startswith(b"PK") and b"archive/data.pkl" in start and b"schema_version" in start


# --- Layers taken out of an atlas
def one_layer(atlas: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Return an atlas of one of an atlas's layers. CacheError where it lacks the layer."""
    return layers_of(atlas, [layer])


def layers_of(atlas: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return an atlas of some of an atlas's layers, in this order. CacheError where it lacks one."""
    for layer in layers:
        files.require_held("layer", layer, atlas["layers"])
    if list(layers) == atlas["layers"]:
        return dict(atlas)
    rows = [atlas["layers"].index(layer) for layer in layers]
    smaller = dict(atlas)
    for name, declared in declared_fields(AtlasCache).items():
        if "[N" not in declared or name not in atlas:
            continue
        values = atlas[name]
        smaller[name] = values[rows] if isinstance(values, Tensor) else [values[row] for row in rows]
    return smaller


def layer_from_atlas(atlas: Mapping[str, Any], layer: int, step: int | None = None) -> dict[str, Any]:
    """Return one layer of an atlas in one pass (None: the first) as a layer cache. CacheError: absent."""
    view = open_profiles(atlas, step, "mean_logit")
    profile, matrix, _, averages = view.values(layer)  # [H, F], [H, F, F], -, [H, F, averages]
    last, is_bidirectional = list(view.query_frames), len(view.block_sizes) == 1
    if is_bidirectional:  # its last frames are the queries
        last = list(range(view.num_frames))[-3:]
    if matrix is None:
        matrix = torch.full((view.num_heads, view.num_frames, view.num_frames), torch.nan)
    elif is_bidirectional:
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
    schedule = {name: atlas.get(name) for name in names}
    for name, x in schedule.items():
        if isinstance(x, Tensor):
            schedule[name] = x.tolist()
    edits = (atlas.get("interventions") or {}).get("hash")
    return schedule | {"config": config, "frames of later prompts": switches, "edits": edits}


def files_by_name(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the files that a run read, such as the text encoder's."""
    return {f"file {file['name']}": file["sampled_sha256"] for file in cache.get("files") or ()}


def require_one_model(caches: Mapping[str, Mapping[str, Any]], what: str) -> None:
    """Raise CacheError, which says what takes them, unless caches by name differ in prompt and seed alone."""
    facts = {
        name: model_of(cache) | schedule_of(cache) | files_by_name(cache) for name, cache in caches.items()
    }
    first = next(iter(facts))
    for name, other in facts.items():
        for key, value in facts[first].items():
            # Files of prompts are each run's own; what has one name must be one file
            if key in other and other[key] != value:
                values = f"{errors.short_repr(value)} and {errors.short_repr(other[key])}"
                raise files.CacheError(
                    f"{what} takes atlases of one model and schedule, which differ in prompt and seed: "
                    f"{key} is {values} in {first} and {name}"
                )
    runs = [cache["fingerprint"] for cache in caches.values() if cache.get("fingerprint")]
    if len({*runs}) < len(runs):
        raise files.CacheError(f"{what} takes every run once: two of {', '.join(caches)} are of the same run")


# --- A folder of layerN.pt: one rollout, each layer once
def open_layers(folder: Path, formats: Sequence[str] = ()) -> dict[Path, dict[str, Any]]:
    """Open every layerN.pt of a folder by number. CacheError unless all belong to one rollout."""
    paths = sorted(folder.glob("layer*.pt"), key=lambda p: int("0" + "".join(filter(str.isdigit, p.stem))))
    if not paths:
        script = "python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml"
        raise files.CacheError(
            f"{folder} holds no layerN.pt; run: {script} --output_dir {quote(str(from_root(folder)))}"
        )
    caches = {path: load_cache(path, expect=formats) for path in paths}
    # Layers of different runs, or a file copied under another name, would be drawn as one rollout
    rule = f"{folder} must hold one rollout, each layer once, and holds"
    views = [open_profiles(cache) for cache in caches.values()]
    layers = [layer for view in views for layer in view.layers]
    if len(set(layers)) < len(layers):
        raise files.CacheError(f"{rule} a layer twice: {layers}; move some of the files out")
    facts = []
    for cache, view in zip(caches.values(), views, strict=True):
        rollout = {"source": view.source, "frames": view.num_frames, "heads": view.num_heads}
        rollout |= {"pass": view.pass_label, "edits": view.edits, "settings": view.settings}
        rollout |= {"model": model_of(cache), "given frames": cache.get("first_frames")}
        rollout["fingerprint"] = cache.get("fingerprint")  # older files have none
        facts.append(rollout)
    for path, other in zip(paths, facts, strict=True):
        for key, value in facts[0].items():
            if other[key] != value:
                values = f"{paths[0].name} has {errors.short_repr(value, 200)}, {path.name} has "
                values += errors.short_repr(other[key], 200)
                raise files.CacheError(
                    f"{rule} files of several, by their {key}: {values}; move some of the files out"
                )
    return caches

"""Check the parameters of the notebooks once, in the first cell after them.

    check_parameters("layer_atlas", globals())                                  # names and kinds
    check_parameters("layer_atlas", globals(), HEAD=range(view.num_heads))      # and what this cache holds

papermill only warns of a name that a notebook does not have, and draws the default.
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import is_dataclass
from pathlib import PurePath
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from experiments.caches.files import in_words
from wan.errors import ConfigError, did_you_mean, from_values, require_text, short_repr

NUMBER = r":(0|[1-9]\d{0,4})"
Width = Literal["column", "page"] | Annotated[float, 1, 40] | None  # a journal's, or inches
Count = Annotated[int, 1, 100_000]
KINDS: dict[str, Any] = {
    "ACTIVE": Count,
    "ALPHA": Annotated[float, 0, 1],
    "ATLAS": str,
    "ATTRIBUTION": str,
    "ATTRIBUTION_FINDING": str,
    "BASE": bool,
    "BLOCK": int,
    "BRANCH": Literal["cond", "uncond"],
    "CACHE_PATH": str,
    "CAPTIONS": Annotated[int, 4, 100_000],
    "CAUSAL_ATLAS": str,
    "CONFIG": str,
    "CONFIG_PATH": str,
    "DATA_PATH": str | None,
    "DISTANCES": Count,
    "EDIT": dict,
    "EFFECTS": str,
    "EPOCHS": Count,
    "FEATURES": Count,
    "FIGURE_HEIGHT": Annotated[float, 1, 40] | None,
    "FIGURE_WIDTH": Width,
    "FINDING": str,
    "FINDINGS": str,
    "HEAD": int,
    "HEADS": Annotated[list[tuple[int, int, str]], 1, 1000] | Literal["auto"],
    "KEY_AXIS": Literal["frame", "position"],
    "KINDS": list[str],
    "LAYER": int,
    "LAYERS": list[int],
    "MODEL": str,
    "MODELS": dict[str, tuple[str, dict]],
    "MULTI_HEADS": list[int] | None,
    "NUM_FRAMES": Count,
    "ORIG_NUM_FRAMES": Count | None,
    "PDF": bool,
    "PIPELINE": str,
    "PICTURE": Annotated[int, 0, 3],
    "POLICIES": list[str],
    "PROMPT": str,
    "PUBLISHED": str,
    "QUANTITY": Literal["mean_logit", "mass", "mean_prob"] | None,
    "QUERY": Annotated[list[int], 1, 3] | None,
    "QUERY_FRAMES": list[int] | None,
    "REFERENCE_CSV": str | None,
    "REFERENCE_MODEL": str | None,
    "SAVE_DIR": str,
    "SAVE_SVG": bool,
    "SCALE": float,
    "SEED": int,
    "STEERED_LAYER": int,
    "STEP": int | None,
    "STRIPS": str,
    "SWEEP_DIR": str,
    "TEMPORAL_STRIDE": Count | None,
    "THRESHOLDS": str,
    "TITLE": str | None,
    "TOKENS_PER_BAR": Count | None,
    "TRAINING": str,
    "USE_ORIG_FRAMES": bool | None,
    "VIDEO": str | None,
    "WEIGHT_INDEX": int,
    "WORDS": list[str],
}
PARAMETERS = {  # of each notebook, as its first code cell has them
    "activations": "CONFIG PROMPT SEED NUM_FRAMES LAYERS BLOCK STEERED_LAYER SCALE SAVE_DIR",
    "extract_all_attention": "CACHE_PATH DATA_PATH LAYER STEP SAVE_DIR SAVE_SVG USE_ORIG_FRAMES "
    "ORIG_NUM_FRAMES TEMPORAL_STRIDE QUERY_FRAMES BRANCH FIGURE_WIDTH PDF",
    "interventions": "CACHE_PATH CAUSAL_ATLAS ATLAS ATTRIBUTION ATTRIBUTION_FINDING FINDING MODEL EDIT "
    "PROMPT SEED LAYER SAVE_DIR",
    "layer_atlas": "CACHE_PATH LAYER HEAD STEP KEY_AXIS SAVE_DIR PUBLISHED THRESHOLDS FIGURE_WIDTH PDF",
    "long_rollouts": "FINDINGS HEADS KINDS STRIPS EFFECTS DISTANCES SAVE_DIR FIGURE_WIDTH",
    "models": "MODELS BASE TRAINING PROMPT SEED STEP THRESHOLDS SAVE_DIR",
    "on_the_video": "CACHE_PATH VIDEO HEADS CAUSAL_ATLAS QUERY QUANTITY STEP PICTURE ALPHA WORDS SAVE_DIR "
    "FIGURE_WIDTH PDF",
    "plot_figure4": "CACHE_PATH WEIGHT_INDEX QUANTITY HEAD MULTI_HEADS SAVE_DIR FIGURE_WIDTH PDF",
    "plt_fig4": "CACHE_PATH SAVE_DIR HEADS QUANTITY STEP VIDEO REFERENCE_CSV REFERENCE_MODEL TOKENS_PER_BAR "
    "TITLE FIGURE_WIDTH FIGURE_HEIGHT PDF",
    "policies": "CONFIG_PATH POLICIES NUM_FRAMES LAYER STEP SAVE_DIR FIGURE_WIDTH",
    "sae": "CONFIG CAPTIONS NUM_FRAMES LAYER FEATURES ACTIVE EPOCHS SCALE SEED SAVE_DIR",
    "sweep": "SWEEP_DIR HEADS STEP SAVE_DIR PUBLISHED FIGURE_WIDTH PDF",
    "your_own_pipeline": "PIPELINE PROMPT SEED NUM_FRAMES LAYER SAVE_DIR",
}
OTHERS: dict[tuple[str, str], Any] = {  # of the same name in one notebook alone
    ("long_rollouts", "HEADS"): str,
    ("on_the_video", "HEADS"): Annotated[list[tuple[int, int]], 1, 1000] | Literal["effect"],
    ("on_the_video", "QUANTITY"): Literal["mean_logit", "mass"],
    ("plot_figure4", "QUANTITY"): Literal["mean_prob", "mass"] | None,
    ("policies", "STEP"): int,
    ("models", "STEP"): int,
}
WORDS = {  # of kinds whose own words would be riddles
    "EDIT": "an edit written as in YAML, such as {'edit': 'knockout', 'frames': 'past'}",
    "HEADS": 'a list of (layer, head, label), such as [(1, 1, "L1H1")], or "auto"',
    "MODELS": "names with (config, settings)",
    "QUERY": "frame, row, column, or a frame alone: 1..3 whole numbers, or None",
}
OTHER_WORDS = {
    ("on_the_video", "HEADS"): 'a list of (layer, head), such as [(1, 1)], or "effect"',
    ("long_rollouts", "HEADS"): "text",
}
CHECKED = "_parameters_were_checked"  # a name of a kernel's namespace: what comes later are its variables
OF_IPYTHON = ("In", "Out", "exit", "quit", "get_ipython", "open")


def check_parameters(
    notebook: str, names: MutableMapping[str, Any], **ranges: Collection[int] | Collection[str]
) -> None:
    """Raise ConfigError, one line, for a parameter that is unknown, of another kind, or out of range.

    names are the notebook's globals(). ranges say what a value, or every value of a list, may be, and a list
    with a range has at least one.
    """
    known = PARAMETERS[notebook].split()
    # 1. Names; of a kernel that went on, variables stand beside them: what resembles one is refused
    for name, value in names.items():
        of_others = name.startswith("_") or name in OF_IPYTHON or callable(value)
        if name in known or of_others or isinstance(value, ModuleType):
            continue
        hint = did_you_mean(name.upper(), known)
        if CHECKED not in names or (name.isupper() and "did you mean" in hint):
            raise ConfigError(f"{notebook}.ipynb has no parameter {short_repr(name)[1:-1]}{hint}")
    # 2. Kinds
    for name in known:
        kind = OTHERS.get((notebook, name), KINDS[name])
        if name not in names:
            raise ConfigError(
                f"{notebook}.ipynb needs its parameter {name}; write it back into the first cell"
            )
        value = str(names[name]) if isinstance(names[name], PurePath) else names[name]
        if get_origin(kind) is dict:  # of one kind of values, and of one at least
            names[name], kind = value, Annotated[list[get_args(kind)[1]], 1, 1000]  # type: ignore[misc]
            _, fits = fitted(list(value.values()) if isinstance(value, dict) else value, kind, name)
        else:
            names[name], fits = fitted(value, kind, name)
        if fits:
            fits = OTHER_WORDS.get((notebook, name)) or WORDS.get(name, fits).replace("null", "None")
            raise ConfigError(f"{name} = {short_repr(value)} is not {fits}")
    # 3. Ranges
    for name, allowed in ranges.items():
        if (value := names[name]) is None:
            continue
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        wrong = [one for one in values if one not in allowed]
        if wrong or not values:
            said = f"{name} has {short_repr(wrong[0])}, which" if values and value != wrong[0] else ""
            said = said or f"{name} = {short_repr(value)}"
            raise ConfigError(f"{said} is not in {in_words(allowed)}")
    names[CHECKED] = True


def check_given(notebook: str, given: Mapping[str, Any], own: Collection[str]) -> None:
    """Raise ConfigError for a name that a notebook does not have, or that its runner sets itself."""
    known = PARAMETERS[notebook].split()
    for name in given:
        if name in own:
            raise ConfigError(f"{name} follows from the cache and the layers; leave it out of --parameter")
        if name not in known:
            raise ConfigError(f"{notebook}.ipynb has no parameter {name}{did_you_mean(name.upper(), known)}")


def fitted(value: Any, kind: Any, name: str) -> tuple[Any, str]:
    """Return a value in the form of an annotation, and ""; where none fits, the value and what would."""
    # 1. One of several kinds; a kind and its limits.
    if get_origin(kind) in (Union, UnionType):
        tried = [fitted(value, one, name) for one in get_args(kind)]
        words = " or ".join(known for _, known in tried)
        return next((one for one in tried if not one[1]), (value, words))
    limits: tuple[Any, ...] = ()
    if get_origin(kind) is Annotated:
        kind, *limits = get_args(kind)  # type: ignore[assignment]
    if get_origin(kind) is Literal:
        kind, limits = str, (get_args(kind),)
    # 2. Several values of one kind, or values of these kinds in this order.
    origin, items = get_origin(kind) or kind, get_args(kind)
    if origin in (list, tuple) and items:
        given = [value]
        if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
            given = [*value]
        kinds = items if origin is tuple and items[-1] is not Ellipsis else items[:1] * len(given)
        parts = [fitted(x, one, name) for x, one in zip(given, kinds, strict=False)]
        low, high = limits or (0, sys.maxsize) if kinds is not items else [len(items)] * 2
        fits = low <= len(given) <= high and (origin is tuple or given != [value])
        fits = fits and not any(known for _, known in parts)
        many = f"{low}..{high} of " if limits else "a list of "
        words = many + (fitted(object(), items[0], name)[1] or "anything")
        return (origin(x for x, _ in parts), "") if fits else (value, words)
    if origin in (Sequence, Collection) and items:  # of an argument, which stays as it is
        words = "a list of " + (fitted(object(), items[0], name)[1] or "anything")
        several = isinstance(value, origin) and not isinstance(value, (str, bytes, Mapping))
        return value, "" if several and not any(fitted(x, items[0], name)[1] for x in value) else words
    # 3. A dataclass by its fields; other classes are not looked into.
    if isinstance(origin, type) and is_dataclass(origin) and isinstance(value, Mapping):
        return from_values(origin, value, f"{name}: "), ""
    if origin not in (bool, int, float, str, NoneType):
        fits = origin is Any or not isinstance(origin, type) or isinstance(value, origin)
        return value, "" if fits else f"a {origin.__name__}"
    # 4. Numbers and texts: the type itself, for True is no 1, and the known ones or the range.
    fits = type(value) is kind or (kind is float and type(value) is int)
    words = {NoneType: "null", str: "text"}.get(kind, kind.__name__)
    if type(value) is str:
        require_text(value, name)
    if len(limits) == 1:
        words = f"one of {', '.join(limits[0])}"
        fits = fits and any(re.fullmatch(one.replace(":N", NUMBER), value) for one in limits[0])
    elif limits:
        low, high = limits
        words = f"{words} in {low}..{high}" + " characters" * (kind is str)
        fits = fits and low <= (len(value.strip()) if kind is str else value) <= high
    return float(value) if fits and type(value) is int and kind is float else value, "" if fits else words

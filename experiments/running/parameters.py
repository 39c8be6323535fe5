"""Check the parameters of a notebook against its cell tagged `parameters`.

    check_parameters("layer_atlas", globals())                                  # names and types
    check_parameters("layer_atlas", globals(), HEAD=range(view.num_heads))      # and what this cache holds

papermill only warns of a name that a notebook does not have, and draws the default.
"""

import ast
import json
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from experiments.caches.files import in_words
from wan import errors

FOLDER = Path(__file__).parents[2] / "notebooks"
# Those that run_notebooks.py runs a layer at a time
NOTEBOOKS = [f"{n}.ipynb" for n in ("extract_all_attention", "plt_fig4", "plot_figure4", "layer_atlas")]
CHECKED = "_parameters_were_checked"  # a name in a kernel: what appears later are the user's variables
OF_IPYTHON = ("In", "Out", "exit", "quit", "get_ipython", "open")


def check_parameters(
    notebook: str, names: MutableMapping[str, Any], **ranges: Collection[int] | Collection[str]
) -> None:
    """Raise ConfigError, one line, for a parameter that is unknown, of another type, or out of range.

    names are the notebook's globals(). A range holds all that a value, or every value of a list, may be, and
    a list with a range has at least one value. Only ranges are checked where notebooks/ lacks the notebook.
    """
    path = FOLDER / f"{notebook}.ipynb"
    types = parameter_types(path) if path.is_file() else {}
    # 1. Names. A kernel that goes on has variables too: only what resembles a parameter is refused
    for name, value in names.items():
        is_tool = name.startswith("_") or name in OF_IPYTHON or callable(value)
        if not types or name in types or is_tool or isinstance(value, ModuleType):
            continue
        hint = errors.did_you_mean(name.upper(), types)
        if CHECKED not in names or (name.isupper() and "did you mean" in hint):
            raise errors.ConfigError(
                f"{notebook}.ipynb has no parameter {errors.short_repr(name)[1:-1]}{hint}"
            )
    # 2. Types
    names.update(typed({name: names[name] for name in types if name in names}, types))
    # 3. Ranges
    for name, allowed in ranges.items():
        require_in_range(name, names[name], allowed)
    names[CHECKED] = True


def require_in_range(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise ConfigError for a value, or one of a list, that is not allowed, and for an empty list."""
    values = value if isinstance(value, list) else [value]
    wrong = [item for item in values if item not in allowed]
    if value is None or (values and not wrong):
        return
    words = in_words(allowed)
    if isinstance(allowed, range) and len(allowed) > 2:
        words = f"{allowed[0]}..{allowed[-1]}"
    subject = f"{name} = {errors.short_repr(value)}"
    if values is value and values:
        subject = f"{name} has {errors.short_repr(wrong[0])}, which"
    raise errors.ConfigError(f"{subject} is not in {words}")


def parameter_types(path: Path) -> dict[str, str]:
    """Return what a notebook's cell tagged `parameters` declares: name -> type, such as "int | None".

    The type is the annotation, or else that of the default value. ConfigError for a file that is no notebook.
    """
    with errors.library_reads(path):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", [])]
        statements = ast.parse("\n".join(sources)).body
    types = {}
    for statement in statements:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            types[statement.target.id] = ast.unparse(statement.annotation)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            types[statement.targets[0].id] = type_of(ast.literal_eval(statement.value))
    return types


def type_of(default: Any) -> str:
    """Return the type of a default value as text; of a list, with the type of its first item."""
    if isinstance(default, list) and default:
        return f"list[{type_of(default[0])}]"
    return type(default).__name__


def typed(values: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """Return parameters as their declared types. ConfigError for a value that is not of its type.

    Types are strict: neither "3" nor True is an int, but 3 becomes the float 3.0. A path becomes text, and
    numbers and arrays of numpy become Python's.
    """
    checked = {}
    for name, value in values.items():
        # As JSON, in which a list may become a tuple though the check is strict
        adapter = TypeAdapter(eval(types[name], {}))  # of a notebook, whose code runs anyway
        try:
            checked[name] = adapter.validate_json(json.dumps(value, default=plain), strict=True)
        except ValidationError:
            raise errors.ConfigError(f"{name} = {errors.short_repr(value)} is not {types[name]}") from None
    return checked


def plain(value: Any) -> Any:
    """Return what JSON does not know as what it knows: arrays and ranges as lists, paths as text."""
    if hasattr(value, "tolist"):  # of numpy and torch
        return value.tolist()
    if isinstance(value, range):
        return list(value)
    return str(value)

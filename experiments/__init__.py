"""Attention of Wan2.1 videos: load a model, capture while it generates, look at what came of it.

    from experiments import at, capture, compare, intervene, load, x0_lens

experiments/session.py has them; they are imported when they are asked for.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.session import Atlas, Steer, at, capture, compare, intervene, load, x0_lens

__all__ = ["Atlas", "Steer", "at", "capture", "compare", "intervene", "load", "x0_lens"]


# `wan` may be another project's package, such as Wan's or Self-Forcing's own.
_home, _found = Path(__file__).resolve().parents[1], importlib.util.find_spec("wan")
_places = [Path(place).resolve() for place in (_found and _found.submodule_search_locations) or ()]
if _home / "wan" not in _places:
    raise ImportError(
        f"the package `wan` is {_places[0] if _places else 'not there'}, and this project needs its own, "
        f"{_home / 'wan'}: put {_home} first on PYTHONPATH, or work with the other one in a process of its "
        "own (docs/own_code.md)"
    )


def __getattr__(name: str) -> Any:
    """Import the session when it is first asked for: other users of this package need no model."""
    if name in __all__:
        from experiments import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

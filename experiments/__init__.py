"""Attention of Wan2.1 videos: load a model, capture while it generates, look at what came of it.

    from experiments import capture, load

experiments/session.py has both; they are imported when they are asked for.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.session import Atlas, capture, load

__all__ = ["Atlas", "capture", "load"]


def _require_own_wan() -> None:
    """Raise ImportError where `wan` is another project's package, such as Wan's or Self-Forcing's own."""
    home = Path(__file__).resolve().parents[1]
    found = importlib.util.find_spec("wan")
    places = [] if found is None else [Path(p).resolve() for p in found.submodule_search_locations or ()]
    if home / "wan" not in places:
        there = f"is {places[0]}" if places else "is not there"
        raise ImportError(
            f"the package `wan` {there}, and this project needs its own, {home / 'wan'}: put {home} first on "
            "PYTHONPATH, or work with the other one in a process of its own (docs/own_code.md)"
        )


_require_own_wan()


def __getattr__(name: str) -> Any:
    """Import the session when it is first asked for: other users of this package need no model."""
    if name in __all__:
        from experiments import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

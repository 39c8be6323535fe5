"""Attention of Wan2.1 videos: load a model, capture while it generates, look at what came of it.

    from experiments import Knockout, capture, compare, intervene, load

    session = load("wan_mini")
    with capture(session, layers=[1, 5]) as captured:
        run = session.generate("a red circle moving right over a dark blue background", seed=42)
    print(captured.atlas())

dir(experiments) lists the public names. Each is imported from its home when it is first asked for: other
users of this package need no model.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.attribution import Scores, SiteGradients, attribute, gradients
    from experiments.caches.activations import ActivationStore
    from experiments.captured import Atlas, Captured, capture, compare, intervene, x0_lens
    from experiments.runs import Run
    from experiments.session import Session, load
    from wan.identity import named
    from wan.interventions import Ablate, Band, Bias, Jitter, Knockout, Move, Patch, Source, Steer, at

__all__ = ["Atlas", "Captured", "Run", "Session", "capture", "compare", "load", "x0_lens"]
__all__ += ["Ablate", "Band", "Bias", "Jitter", "Knockout", "Move", "Patch", "Source", "Steer"]
__all__ += ["at", "intervene", "named"]
__all__ += ["ActivationStore", "Scores", "SiteGradients", "attribute", "gradients"]
HOMES = {
    "experiments.caches.activations": ("ActivationStore",),
    "experiments.runs": ("Run",),
    "experiments.session": ("Session", "load"),
    "experiments.captured": ("Atlas", "Captured", "capture", "compare", "intervene", "x0_lens"),
    "experiments.attribution": ("Scores", "SiteGradients", "attribute", "gradients"),
    "wan.identity": ("named",),
    "wan.interventions": (
        *("Ablate", "Band", "Bias", "Jitter", "Knockout", "Move", "Patch", "Steer"),
        *("Source", "at"),
    ),
}


_home = Path(__file__).resolve().parents[1]
# `wan` may be another project's package, such as Wan's or Self-Forcing's own.
_found = importlib.util.find_spec("wan")
_places = [Path(place).resolve() for place in (_found and _found.submodule_search_locations) or ()]
if _home / "wan" not in _places:
    raise ImportError(
        f"the package `wan` is {_places[0] if _places else 'not there'}, and this project needs its own, "
        f"{_home / 'wan'}: put {_home} first on PYTHONPATH, or work with the other one in a process of its "
        "own (docs/own_code.md)"
    )


def __getattr__(name: str) -> Any:
    """Import a name from its home when it is first asked for."""
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, for completion in a notebook."""
    return sorted(__all__)

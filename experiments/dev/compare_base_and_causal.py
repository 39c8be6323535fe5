"""Draw a layer of the miniature's base weights above the same layer of its causal weights.

    python experiments/dev/compare_base_and_causal.py base/layer5.pt causal/layer5.pt sheet.svg

Shown are the four heads whose maps differ most. experiments/base_and_causal.sh makes the caches.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.caches.files import CacheError
from experiments.running.cli import Parser, main

if TYPE_CHECKING:  # the rest is imported after the flags: --help needs no torch
    from matplotlib.figure import Figure

    from experiments.caches.view import Profiles

HEADS_SHOWN = 4


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, help="a layer cache of the base weights")
    parser.add_argument("causal", type=Path, help="the same layer of the causal weights")
    parser.add_argument("sheet", type=Path, help="the SVG to write")
    args = parser.parse_args(argv)

    from experiments.caches import load_cache
    from experiments.caches.view import open_profiles
    from experiments.figures.style import save_svg

    base, causal = (open_profiles(load_cache(path, expect=("layer",))) for path in (args.base, args.causal))
    print(save_svg(draw(base, causal), args.sheet))


def draw(base: "Profiles", causal: "Profiles") -> "Figure":
    """Both as rows of one figure. Raises CacheError where they are not the same layer and frames."""
    from experiments.figures.layer import compared_maps

    same = ("layers", "num_heads", "num_frames", "quantity")
    if differ := [name for name in same if getattr(base, name) != getattr(causal, name)]:
        raise CacheError(
            f"the two caches differ in {', '.join(differ)}: they cannot be compared cell by cell"
        )
    (layer,) = base.layers
    of_base, of_causal = base.frame_matrix(layer), causal.frame_matrix(layer)
    if of_base is None or of_causal is None:
        raise CacheError("one of the two caches holds profiles alone: there are no maps to compare")
    heads = most_different(of_base, of_causal)
    rows = {"base": of_base, "causal": of_causal}
    which = f"{causal.model}, layer {layer}, the {len(heads)} heads that differ most"
    title = f"{which}: base, {base.pass_label}; causal, {causal.pass_label}"
    return compared_maps(rows, heads, base.quantity, title=title)


def most_different(one: np.ndarray, other: np.ndarray, count: int = HEADS_SHOWN) -> list[int]:
    """The heads [H, F, F] with the largest mean absolute difference, over cells that both attend to, each
    row without its mean: softmax ignores a constant per query."""
    there = np.isfinite(one) & np.isfinite(other)
    centred = [_without_row_means(np.where(there, values, np.nan)) for values in (one, other)]
    difference = np.nanmean(np.abs(centred[0] - centred[1]), axis=(1, 2))
    return sorted(int(head) for head in np.argsort(-difference)[:count])


def _without_row_means(values: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a row that nothing was read of
        return values - np.nanmean(values, axis=-1, keepdims=True)


if __name__ == "__main__":
    main(run)

"""Draw a layer of the miniature's base weights above the same layer of its causal weights.

    python experiments/benchmarks/reproduce/base_and_causal.py base/layer5.pt causal/layer5.pt sheet.svg

Shown are the four heads whose maps differ most. experiments/base_and_causal.sh makes the caches.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.caches.view import Profiles, open_profiles
from experiments.figures.heads import compared_maps
from experiments.figures.style import save_svg
from experiments.running.cli import Parser, main

HEADS_SHOWN = 4


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, help="a layer cache of the base weights")
    parser.add_argument("causal", type=Path, help="the same layer of the causal weights")
    parser.add_argument("sheet", type=Path, help="the SVG to write")
    args = parser.parse_args(argv)
    base, causal = (open_profiles(load_cache(path, expect=("layer",))) for path in (args.base, args.causal))
    print(save_svg(draw(base, causal), args.sheet))


def draw(base: Profiles, causal: Profiles) -> Figure:
    """Draw both as rows of one figure. Raises CacheError where they are not the same layer and frames."""
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
    which = f"Layer {layer}, the {len(heads)} heads that differ most"
    about = f"base, {base.pass_label}; causal, {causal.pass_label}; {causal.caption.source}"
    both = {"base": of_base, "causal": of_causal}
    return compared_maps(both, heads, base.quantity, title=which, subtitle=about)


def most_different(one: np.ndarray, other: np.ndarray, count: int = HEADS_SHOWN) -> list[int]:
    """Return the heads of [H, F, F] with the largest mean absolute difference, over cells that both see.

    Each row is taken without its mean: softmax ignores a constant per query.
    """
    seen = np.isfinite(one) & np.isfinite(other)
    difference = np.where(seen, one - other, 0)  # so are the differences of rows without their means
    count_seen = np.maximum(seen.sum(-1, keepdims=True), 1)
    centred = np.where(seen, difference - difference.sum(-1, keepdims=True) / count_seen, 0)
    distance = np.abs(centred).sum((1, 2)) / seen.sum((1, 2))
    return sorted(int(head) for head in np.argsort(-distance)[:count])


if __name__ == "__main__":
    main(run)

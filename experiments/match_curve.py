"""Rank every head and pass of a cache against digitised curves, such as the paper's Figure 4.

python experiments/match_curve.py --cache_path cache/published/self_forcing_dmd_eagle_21f.pt
"""

from functools import partial

from experiments.caches.files import CacheError
from experiments.running.cli import Parser, main


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache_path", default="cache/atlas.pt", help="a cache of logits")
    parser.add_argument("--curves", help="CSV: key_frame and a column per curve; the paper's Figure 4")
    parser.add_argument("--step", type=int, help="the pass of heads that a curve names; the first")
    args = parser.parse_args(argv)

    from experiments.analysis.published import (  # after the flags: a --help needs no torch
        FIGURE4_CSV,
        FIGURE4_HEADS,
        FIGURE4_MODEL,
        FOLDER,
        curves_for,
        match_rows,
    )
    from experiments.analysis.tables import table
    from experiments.caches import load_cache
    from experiments.caches.view import open_passes, open_profiles

    cache = load_cache(args.cache_path)
    view = open_profiles(cache, args.step)
    curves, why_not = curves_for(view, args.curves or FOLDER / FIGURE4_CSV)
    if why_not:
        raise CacheError(f"{args.cache_path}: {why_not}")
    print(f"{args.cache_path}: {view.source}")
    heads = FIGURE4_HEADS if view.model == FIGURE4_MODEL else ()  # other models have no such heads
    passes = open_passes(cache, view)
    print(table(match_rows(passes, heads, curves, view.step)))


command = partial(main, run)

if __name__ == "__main__":
    command()

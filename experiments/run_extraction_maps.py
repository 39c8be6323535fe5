"""Capture what query frames or patches see of every key token: maps to lay over the video.

python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_patch 18,2,1
python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_grid 18,4,4 --words
"""

import argparse
from functools import partial
from typing import Any

from experiments.running.cli import add_config_flags, config_from, main, run_parser
from experiments.running.ranks import this_rank
from wan.errors import ConfigError, short_repr


def numbers(what: str) -> dict[str, Any]:
    """Return the options of a flag for whole numbers from 0, separated by commas, as many as `what` names."""

    def read(text: str) -> tuple[int, ...]:
        words = text.split(",")
        if len(words) != len(what.split(",")) or not all(w.isdecimal() and len(w) < 10 for w in words):
            raise argparse.ArgumentTypeError(f"{short_repr(text)} is not {what}, whole numbers from 0")
        return tuple(map(int, words))

    return {"type": read, "metavar": what}


def run(argv=None):
    parser = run_parser(__doc__, "cache/maps.pt")
    add_config_flags(parser, "layer_indices", "gpus")
    flag, some = parser.add_argument, {"nargs": "+", "default": []}
    patch, frame, grid = numbers("FRAME,ROW,COLUMN"), numbers("FRAME"), numbers("FRAME,ROWS,COLUMNS")
    flag("--query_patch", **some, **patch, help="tokens that look, each on its own: frame, row, column")
    flag("--query_frame", **some, **frame, help="frames that look, a mean over each one's tokens")
    flag("--query_grid", **grid, help="evenly spaced tokens of a frame, which the HTML page lets one click")
    flag("--heads", type=int, nargs="+", help="heads, counted from 0; all where not given")
    flag("--blocks", type=int, nargs="+", help="whose queries look; those of the patches, else the last")
    flag("--steps", type=int, nargs="+", help="passes, in place of one --step")
    flag("--words", action="store_true", help="also where each word of the prompt is read")
    args = parser.parse_args(argv)

    from experiments.extraction import cache_builders as maps  # after the flags: a --help needs no torch
    from experiments.extraction.memory import amount, estimate_bytes
    from experiments.running.run import make_caches
    from wan.checkpoint import read_model_config

    if args.step is not None and args.steps:
        raise ConfigError("--step and --steps exclude each other")
    config = config_from(args)
    # Places are rows and columns of tokens: a token is 2 x 2 latents, or 16 x 16 pixels
    grid = maps.token_grid(config, read_model_config(config.ckpt_dir))
    places = [*args.query_patch, *((frame, -1, -1) for (frame,) in args.query_frame)]  # -1: the whole frame
    if args.query_grid:
        places += [p for p in maps.patches_of_grid(*args.query_grid, grid=grid) if p not in places]
    blocks = maps.counted_blocks(args.blocks, len(config.block_sizes))
    requests = maps.map_requests(
        config, grid, places, config.layer_indices, args.heads, blocks, args.steps, args.words
    )
    rank = this_rank()
    if not args.quiet and rank.is_first and config.gpus in (1, rank.count):  # once, not by the launcher
        print(f"keeps at most {amount(estimate_bytes(config, requests))} of maps")
    build = partial(maps.maps_cache, grid=grid, heads=args.heads)
    make_caches(args, config, requests, {args.output_path: build})


if __name__ == "__main__":
    main(run)

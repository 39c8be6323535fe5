"""Capture what query frames or patches see of every key token: maps to lay over the video.

python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_patch 18,2,1
python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_grid 18,4,4 --words
python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_mask 18,drawn.png
"""

import argparse
from functools import partial
from typing import Any

from PIL import Image

from experiments.running.cli import add_config_flags, config_from, main, run_parser
from wan.errors import reason_of, short_repr


def numbers(what: str) -> dict[str, Any]:
    """Return the options of a flag for whole numbers from 0, separated by commas, as many as `what` names."""

    def read(text: str) -> tuple[int, ...]:
        words = text.split(",")
        are_numbers = text.isascii() and all(w.isdecimal() and len(w) < 10 for w in words)
        if len(words) != len(what.split(",")) or not are_numbers:
            raise argparse.ArgumentTypeError(f"{short_repr(text)} is not {what}, whole numbers from 0")
        return tuple(map(int, words))

    return {"type": read, "metavar": what}


def mask(text: str) -> tuple[int | None, Image.Image]:
    """Return the frame, or None, and the image of FRAME,FILE.png."""
    frame, comma, file = text.partition(",")
    has_frame = comma and frame.isdecimal() and len(frame) < 10
    file = file if has_frame else text
    try:
        with Image.open(file) as image:
            return int(frame) if has_frame else None, image.convert("L")
    except (OSError, ValueError, SyntaxError) as error:  # PIL's of a damaged PNG
        raise argparse.ArgumentTypeError(f"{short_repr(file)} is no image: {reason_of(error)}") from None


def run(argv=None):
    parser = run_parser(__doc__, "cache/maps.pt", steps=True)
    add_config_flags(parser, "layer_indices", "gpus")
    flag, some = parser.add_argument, {"nargs": "+", "default": []}
    patch, frame, grid = numbers("FRAME,ROW,COLUMN"), numbers("FRAME"), numbers("FRAME,ROWS,COLUMNS")
    flag("--query_patch", **some, **patch, help="tokens that look, each on its own: frame, row, column")
    flag("--query_frame", **some, **frame, help="frames that look, a mean over each one's tokens")
    flag("--query_grid", **grid, help="evenly spaced tokens of a frame, which the HTML page lets one click")
    flag(
        "--query_mask",
        type=mask,
        nargs="+",
        default=[],
        metavar="[FRAME,]FILE.png",
        help="tokens that are white in an image, of a frame, else of the last one",
    )
    flag("--heads", type=int, nargs="+", help="heads, counted from 0; all where not given")
    flag("--blocks", type=int, nargs="+", help="whose queries look; those of the patches, else the last")
    flag("--words", action="store_true", help="also where each word of the prompt is read")
    args = parser.parse_args(argv)
    config = config_from(args)

    from experiments.running.run import cache_builders, make_caches  # a --help needs no torch

    grid = cache_builders.token_grid(config)
    places = [*args.query_patch, *((frame, -1, -1) for (frame,) in args.query_frame)]  # -1: the whole frame
    for frame, image in args.query_mask:
        places += [
            place for place in cache_builders.patches_of_image(image, frame, config) if place not in places
        ]
    if args.query_grid:
        evenly = cache_builders.patches_of_grid(*args.query_grid, grid=grid)
        places += [place for place in evenly if place not in places]
    blocks = cache_builders.counted_blocks(args.blocks, len(config.block_sizes))
    requests = cache_builders.map_requests(
        config, grid, places, config.layer_indices, args.heads, blocks, args.steps, args.words
    )
    build = partial(cache_builders.maps_cache, grid=grid, heads=args.heads)
    make_caches(args, config, requests, {args.output_path: build})


if __name__ == "__main__":
    main(run)

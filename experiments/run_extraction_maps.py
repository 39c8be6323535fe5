"""Capture what query frames or patches see of every key token: maps to lay over the video.

python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_patch 18,2,1
python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_grid 18,4,4 --words
python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_mask 18,drawn.png
"""

import argparse
import re
from functools import partial
from typing import Any

from PIL import Image

from experiments.running import cli
from wan import errors


def numbers(what: str) -> dict[str, Any]:
    """Return the options of a flag for whole numbers from 0, separated by commas, as many as `what` names."""
    pattern = ",".join(["[0-9]{1,9}"] * len(what.split(",")))

    def read(text: str) -> tuple[int, ...]:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{errors.short_repr(text)} is not {what}, whole numbers from 0")
        return tuple(map(int, text.split(",")))

    return {"type": read, "metavar": what}


def mask(text: str) -> tuple[int | None, Image.Image]:
    """Return the frame, or None, and the image of FRAME,FILE.png."""
    with_frame = re.fullmatch("([0-9]{1,9}),(.*)", text)
    frame, file = None, text
    if with_frame:
        frame, file = int(with_frame[1]), with_frame[2]
    try:
        with Image.open(file) as image:
            return frame, image.convert("L")
    except (OSError, ValueError, SyntaxError) as error:  # PIL's of a damaged PNG
        raise argparse.ArgumentTypeError(
            f"{errors.short_repr(file)} is no image: {errors.reason_of(error)}"
        ) from None


def run(argv=None):
    parser = cli.run_parser(__doc__, "cache/maps.pt", steps=True)
    cli.add_config_flags(parser, "layer_indices", "gpus")
    flag = parser.add_argument
    flag(
        "--query_patch",
        nargs="+",
        default=[],
        **numbers("FRAME,ROW,COLUMN"),
        help="tokens that look, each on its own",
    )
    flag(
        "--query_frame",
        nargs="+",
        default=[],
        **numbers("FRAME"),
        help="frames that look, a mean over the tokens of each",
    )
    flag(
        "--query_grid",
        **numbers("FRAME,ROWS,COLUMNS"),
        help="evenly spaced tokens of a frame, which the HTML page lets one click",
    )
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
    config = cli.config_from(args)

    from experiments.running.run import PlannedCache, cache_builders, make_caches  # a --help needs no torch

    grid = cache_builders.token_grid(config)
    places = [*args.query_patch]
    places += [(frame, -1, -1) for (frame,) in args.query_frame]  # -1: the whole frame
    marked = []
    for frame, image in args.query_mask:
        marked += cache_builders.patches_of_image(image, frame, config)
    if args.query_grid:
        marked += cache_builders.patches_of_grid(*args.query_grid, grid=grid)
    places += [place for place in dict.fromkeys(marked) if place not in places]
    blocks = cache_builders.counted_blocks(args.blocks, len(config.block_sizes))
    requests = cache_builders.map_requests(
        config, grid, places, config.layer_indices, args.heads, blocks, args.steps, args.words
    )
    build = partial(cache_builders.maps_cache, grid=grid, heads=args.heads, layers=config.layer_indices)
    make_caches(args, config, requests, {args.output_path: PlannedCache("maps", build)})


if __name__ == "__main__":
    cli.main(run)

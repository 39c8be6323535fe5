"""Flags that say whose maps are kept: query patches, frames, grids of patches, heads, blocks, passes."""

import argparse
from collections.abc import Callable

from wan.errors import quoted

Place = tuple[int, int, int]  # frame, row, column; -1: all of the frame


def numbers(text: str, what: str) -> Place:
    """Three whole numbers from 0, separated by commas."""
    words = text.split(",")
    if len(words) != 3 or not all(word.strip().isdecimal() and len(word) < 10 for word in words):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not {what}: three whole numbers from 0")
    first, second, third = (int(word) for word in words)
    return first, second, third


def patch(text: str) -> Place:
    """--query_patch: 18,2,1."""
    return numbers(text, "frame,row,column")


def grid(text: str) -> Place:
    """--query_grid: 18,4,4."""
    return numbers(text, "frame,rows,columns")


def frame(text: str) -> int:
    """--query_frame: 18."""
    if not text.isdecimal() or len(text) >= 10:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a latent frame, counted from 0")
    return int(text)


def add_map_flags(parser: argparse.ArgumentParser) -> None:
    """Whose maps, and which of them."""
    flag = parser.add_argument
    flag(
        "--query_patch",
        type=patch,
        nargs="+",
        default=[],
        metavar="FRAME,ROW,COLUMN",
        help="tokens that look, each on its own: latent frame, row and column of the token, from 0",
    )
    flag(
        "--query_frame",
        type=frame,
        nargs="+",
        default=[],
        help="frames that look, a mean over each one's tokens",
    )
    flag(
        "--query_grid",
        type=grid,
        metavar="FRAME,ROWS,COLUMNS",
        help="evenly spaced tokens of a frame: those that the HTML page lets one click",
    )
    flag("--heads", type=int, nargs="+", help="heads, counted from 0; all where not given")
    flag(
        "--blocks",
        type=int,
        nargs="+",
        help="blocks whose queries look; -1 is the last; those of the patches and frames, else the last",
    )
    flag("--steps", type=int, nargs="+", help="passes, in place of one --step")
    flag(
        "--words", action="store_true", help="also where in the query frames each word of the prompt is read"
    )


def places_of(
    args: argparse.Namespace, patches_of_grid: Callable[[int, int, int], list[Place]]
) -> list[Place]:
    """The places that flags name, in their order; the grid adds those that were not named already."""
    places = [*args.query_patch, *((frame, -1, -1) for frame in args.query_frame)]
    if args.query_grid:
        places += [place for place in patches_of_grid(*args.query_grid) if place not in places]
    return places

"""Draw what the README shows on the video: where heads look that follow the miniature's shape.

    python experiments/dev/on_the_video_figure.py

Heads are those of docs/shape_attention.json (shape_attention.py); the tracker says on which patch the query
is.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.running.cli import Parser, main
from wan.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from experiments.analysis.video_maps import VideoMap

REPORT, OUTPUT = Path("docs/shape_attention.json"), Path("notebooks/figures/on_the_video_mini.svg")
HEADS, HEIGHT = 3, 72  # rows; pixels of a picture
TOP = 10  # of the scale, mass per token where 1 is even: newest frames alone have more
SEEN = 0.3  # share of a patch that the shape covers, at least where the query is
FRAME, STEP = 18, 4  # of the query: the last block's first frame, in the clean pass


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--config_path", default="configs/wan_mini.yaml")
    parser.add_argument("--heads", type=Path, default=REPORT, help="the report by which heads are chosen")
    parser.add_argument("--prompt", help="of one shape; the config's where not given")
    parser.add_argument("--seed", type=int, help="the config's where not given")
    parser.add_argument("--output_path", type=Path, default=OUTPUT)
    args = parser.parse_args(argv)

    from experiments.caches.files import require_writable  # no torch for --help
    from experiments.figures.style import save_svg

    require_writable(args.output_path)
    print(save_svg(draw(args), args.output_path))


def draw(args: argparse.Namespace):
    """The figure of one scene."""
    from experiments.analysis.video_maps import open_map
    from experiments.extraction import causal, video
    from experiments.extraction import maps as map_builders
    from experiments.figures.video_maps import map_strip
    from experiments.miniature.moving_shapes import Scene
    from experiments.studies import shape_attention
    from wan.config import load_config

    config = load_config(args.config_path, {"prompt": args.prompt, "seed": args.seed})
    heads = chosen_heads(args.heads)
    session = causal.prepare(config, [])
    grid = map_builders.token_grid(config, session.model_config)
    pixels = video.decode(causal.extract_next(session, config, []))
    cover = shape_attention.cover_of(pixels.permute(0, 3, 1, 2) / 255, Scene((), ""), *grid)
    if cover.shape[FRAME].max() < SEEN:
        raise ConfigError(f"no shape is seen in frame {FRAME} of seed {config.seed}: draw another --seed")
    place = (FRAME, *divmod(int(cover.shape[FRAME].argmax()), grid[1]))
    asked = map_builders.map_requests(config, grid, [place], steps=[STEP])
    cache = map_builders.maps_cache(causal.extract_next(session, config, asked), grid)
    maps = [open_map(cache, *head, STEP, place) for head in heads]
    pictures = [resized(pixels[max(0, 4 * frame - 1)].numpy()) for frame in range(config.num_frames)]
    about = (config.model, config.prompt, config.seed)
    return map_strip(maps, pictures, range(0, FRAME, 2), title=title_of(maps[0], *about), top=TOP)


def title_of(seen: "VideoMap", model: str, prompt: str, seed: int) -> str:
    """What is drawn, of which video, and whose attention it is: pass, query frame and patch."""
    run = f"{model}, seed {seed}, {seen.pass_label}, query: {seen.query_label}"
    return f"Three heads that follow the shape: “{prompt}”\n{run}"


def chosen_heads(report: Path) -> list[tuple[int, int]]:
    """The heads that follow the shape most surely, as the report orders them."""
    try:
        found = json.loads(report.read_text(encoding="utf-8"))["passes"]["clean pass"]["top"]
        return [(found[n]["layer"], found[n]["head"]) for n in range(HEADS)]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        said = f"{report} names no {HEADS} heads that follow; run: python experiments/dev/shape_attention.py"
        raise ConfigError(said) from None


def resized(picture: "np.ndarray") -> "np.ndarray":
    """A picture of HEIGHT pixels."""
    import numpy as np
    from PIL import Image

    image = Image.fromarray(picture)
    return np.asarray(
        image.resize((round(image.width * HEIGHT / image.height), HEIGHT), Image.Resampling.BICUBIC)
    )


if __name__ == "__main__":
    main(run)

"""Which heads of the miniature follow the moving shape, its old place, or the wall that it hid behind?

    python experiments/benchmarks/reproduce/shape_attention.py --captions 32
    python experiments/benchmarks/reproduce/shape_attention.py --draw

Writes docs/shape_attention.json (docs/on_the_video.md). --draw draws the README's figure instead: where the
heads of that file look that follow the shape most surely, on one video. The tracker finds the query's patch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from experiments.analysis.video_maps import open_map
from experiments.benchmarks.harness import save_report
from experiments.caches.files import require_writable
from experiments.extraction import causal, video
from experiments.extraction import maps as map_builders
from experiments.extraction.devices import choose_device
from experiments.extraction.provenance import environment
from experiments.figures.style import save_svg
from experiments.figures.video_maps import map_strip
from experiments.miniature.moving_shapes import Scene
from experiments.miniature.tracking import SETS, held_out_scenes
from experiments.running.cli import Parser, count, main
from experiments.studies.shape_attention import MASKS, ShapeAttention, cover_of, followers, measure
from wan.config import RunConfig, load_config
from wan.errors import ConfigError

OUTPUT, STRIP = Path("docs/shape_attention.json"), Path("notebooks/figures/on_the_video_mini.svg")
STEPS = {0: "pass 0", 4: "clean pass"}
LISTED = 5  # heads of the report, by the lower end of moving minus the best control
HEADS, HEIGHT = 3, 72  # rows of the strip; pixels of a picture
TOP = 10  # of its scale, mass per token where 1 is even: newest frames alone have more
SEEN = 0.3  # share of a patch that the shape covers, at least where the query is
FRAME, STEP = 18, 4  # of the query: the last block's first frame, in the clean pass


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml")
    flag("--captions", type=count, default=48, help="captions, half of them behind a wall")
    flag("--device", default="auto")
    flag("--output_path", type=Path, default=OUTPUT, help="the report, which --draw reads")
    flag("--figure", type=Path, default=STRIP, help="the strip of --draw")
    flag("--draw", action="store_true", help="draw the strip of one video instead")
    flag("--prompt", help="of --draw, of one shape; the config's where not given")
    flag("--seed", type=int, help="of --draw; the config's where not given")
    args = parser.parse_args(argv)

    settings = {"device": args.device, "prompt": args.prompt, "seed": args.seed}
    config = load_config(args.config_path, settings)
    if args.draw:
        require_writable(args.figure)
        print(save_svg(draw_strip(config, chosen_heads(args.output_path)), args.figure))
        return
    require_writable(args.output_path)
    half = -(-args.captions // 2)
    scenes = held_out_scenes(SETS["one shape"], half)
    scenes += held_out_scenes(SETS["behind a wall"], args.captions - half)
    found = measure(config, scenes, list(STEPS))
    made = environment(choose_device(config.device))
    save_report(report_of(found, config.model) | {"environment": made}, args.output_path)
    print(args.output_path)


def report_of(found: ShapeAttention, model: str) -> dict[str, Any]:
    """Return means over heads of every mask, how many heads follow, and those that do it most surely."""
    passes = {}
    for step, name in STEPS.items():
        mean, each = found.mean(step), followers(found, step)
        surely = np.where(each.follows, each.low, 0)
        order = np.argsort(-surely, axis=None)[:LISTED].tolist()
        top = [divmod(i, surely.shape[1]) for i in order if surely.flat[i]]
        passes[name] = {
            "mean": [round(float(x), 3) for x in np.nanmean(mean, (0, 2))],
            "follow": int(each.follows.sum()),
            "surely": int(each.surely.sum()),
            "top": [
                {
                    "layer": layer,
                    "head": head,
                    "lifts": [round(float(x), 3) for x in mean[layer, :, head]],
                    "interval": [round(float(x[layer, head]), 3) for x in (each.low, each.high)],
                }
                for layer, head in top
            ],
        }
    return {
        "model": model,
        "captions": len(found.captions),
        "heads": found.lifts.shape[2] * found.lifts.shape[4],
        "masks": MASKS,
        "weights_sha256": found.weights_sha256,
        "passes": passes,
    }


def chosen_heads(report: Path) -> list[tuple[int, int]]:
    """Return the heads that follow the shape most surely, as the report orders them."""
    try:
        found = json.loads(report.read_text(encoding="utf-8"))["passes"]["clean pass"]["top"]
        return [(found[n]["layer"], found[n]["head"]) for n in range(HEADS)]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        script = "experiments/benchmarks/reproduce/shape_attention.py"
        raise ConfigError(f"{report} names no {HEADS} heads that follow; run: python {script}") from None


def draw_strip(config: RunConfig, heads: list[tuple[int, int]]) -> Figure:
    """Roll out one scene and draw where the heads look, a row a head over the frames."""
    session = causal.prepare(config, [])
    grid = map_builders.token_grid(config, session.model_config)
    pixels = video.decode(causal.extract_next(session, config, []))
    cover = cover_of(pixels.permute(0, 3, 1, 2) / 255, Scene((), ""), *grid)
    if cover.shape[FRAME].max() < SEEN:
        raise ConfigError(f"no shape is seen in frame {FRAME} of seed {config.seed}: draw another --seed")
    place = (FRAME, *divmod(int(cover.shape[FRAME].argmax()), grid[1]))
    asked = map_builders.map_requests(config, grid, [place], steps=[STEP])
    cache = map_builders.maps_cache(causal.extract_next(session, config, asked), grid)
    maps = [open_map(cache, *head, STEP, place) for head in heads]
    pictures = []
    for frame in range(config.num_frames):
        image = Image.fromarray(pixels[max(0, 4 * frame - 1)].numpy())
        size = round(image.width * HEIGHT / image.height), HEIGHT
        pictures.append(np.asarray(image.resize(size, Image.Resampling.BICUBIC)))
    title = "Three heads that follow the shape: attention mass per token, 1 is even"
    return map_strip(maps, pictures, range(0, FRAME, 2), title=title, top=TOP)


if __name__ == "__main__":
    main(run)

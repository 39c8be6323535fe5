"""Which heads of the miniature follow the moving shape, its old place, or the wall that it hid behind?

    python experiments/benchmarks/reproduce/shape_attention.py --captions 32

Writes docs/shape_attention.json (docs/on_the_video.md).
"""

from typing import Any

import numpy as np

from experiments.analysis.stats import rounded
from experiments.benchmarks.harness import finding_parser, save_finding
from experiments.miniature.tracking import SETS, held_out_scenes
from experiments.running.cli import count, main
from experiments.studies.shape_attention import MASKS, ShapeAttention, followers, measure
from wan.config import load_config

STEPS = {0: "pass 0", 4: "clean pass"}
LISTED = 5  # heads of the report, by the lower end of moving minus the best control


def run(argv=None):
    parser = finding_parser(__doc__, "docs/shape_attention.json")
    parser.add_argument("--captions", type=count, default=48, help="captions, half of them behind a wall")
    args = parser.parse_args(argv)
    config = load_config(args.config_path, {"device": args.device})
    half = -(-args.captions // 2)
    scenes = held_out_scenes(SETS["one shape"], half)
    scenes += held_out_scenes(SETS["behind a wall"], args.captions - half)
    save_finding(args, {"model": config.model} | report_of(measure(config, scenes, list(STEPS))))


def report_of(found: ShapeAttention) -> dict[str, Any]:
    """Return means over heads of every mask, how many heads follow, and those that do it most surely."""
    passes = {}
    for step, name in STEPS.items():
        mean, each = found.mean(step), followers(found, step)
        surely = np.where(each.follows, each.low, 0)
        top = [divmod(int(i), surely.shape[1]) for i in np.argsort(-surely, axis=None)[:LISTED]]
        passes[name] = {
            "mean": np.nanmean(mean, (0, 2)).round(3).tolist(),
            "follow": int(each.follows.sum()),
            "surely": int(each.surely.sum()),
            "top": [
                {
                    "layer": layer,
                    "head": head,
                    "lifts": rounded(mean[layer, :, head]),
                    "interval": rounded([each.low[layer, head], each.high[layer, head]]),
                }
                for layer, head in top
                if surely[layer, head]
            ],
        }
    heads = found.lifts.shape[2] * found.lifts.shape[4]
    about = {"captions": len(found.captions), "heads": heads, "masks": MASKS}
    return about | {"weights_sha256": found.weights_sha256, "passes": passes}


if __name__ == "__main__":
    main(run)

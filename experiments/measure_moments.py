"""Does a preference for the first frame form in training, when, and in which heads? Atlases of a training's moments.

    python experiments/train_mini.py --stage causal --moments moments
    python experiments/measure_moments.py moments --steps 0 500 9000 --output_path cache/wan-mini-training/moments.json

Every moment is rolled out on the same held-out captions and seeds, and measured as notebooks/layer_atlas.ipynb does, mean
over the captions. The atlas of the first caption is kept for the steps asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.analysis.head_measures import measure_heads, open_quantity
from experiments.caches import save_cache
from experiments.caches.atomic_files import replacing
from experiments.evaluate_mini import scenes
from experiments.extraction import cache_builders, causal, devices
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, main
from wan.config import RunConfig, load_config
from wan.errors import ConfigError

NOTABLE = 0.25  # logits, of a preference at equal distance that is counted in what is printed
MEASURES = ("first_minus_context", "equal_distance_excess", "wave_r2", "first_context_mass")


def measured(atlases: Sequence[dict], step: int) -> dict[str, list]:
    """Measures [layers, heads] of one pass, mean over the atlases."""
    of_atlases = [
        measure_heads(open_quantity(a, step, "mean_logit"), open_quantity(a, step, "mass")) for a in atlases
    ]
    maps = {
        name: np.mean([next(m.values for m in s if m.name == name) for s in of_atlases], 0)
        for name in MEASURES
    }
    return {name: values.round(4).tolist() for name, values in maps.items()}


def atlases(config: RunConfig, captions: Sequence[str]) -> list[dict]:
    """Of each caption, with its number as seed."""
    requests = cache_builders.atlas_requests(config, mass=True, key_curve=False, cross=False)
    session = causal.prepare(config, requests, captions)
    runs = (
        causal.extract_next(session, replace(config, prompt=c, seed=i), requests)
        for i, c in enumerate(captions)
    )
    return [cache_builders.atlas_cache(run) for run in runs]


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="step_*.pt of train_mini.py --moments")
    parser.add_argument("--config_path", default="configs/wan_mini.yaml")
    parser.add_argument("--ckpt_dir", help="directory of another miniature")
    parser.add_argument("--captions", type=int, default=4)
    parser.add_argument(
        "--steps", type=int, nargs="*", default=[], help="moments whose atlas is kept beside the JSON"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output_path", type=Path, default=Path("cache/wan-mini-training/moments.json"))
    args = parser.parse_args(argv)
    files = {int(path.stem.removeprefix("step_")): path for path in sorted(args.folder.glob("step_*.pt"))}
    if missing := sorted(set(args.steps) - set(files)):
        raise ConfigError(
            f"{args.folder} has no step_*.pt of step {missing[0]}; it has {sorted(files) or 'none'}"
        )
    if not files:
        raise ConfigError(
            f"{args.folder} has no step_*.pt; make them with: python experiments/train_mini.py --moments"
        )
    overrides = {"ckpt_dir": args.ckpt_dir} if args.ckpt_dir else {}
    config = load_config(args.config_path, overrides | {"device": args.device, "dtype": "float32"})
    captions = [scene.caption for scene in scenes(("single", "landmark", "crossing", "wall"), args.captions)]
    moments = []
    for number, path in files.items():
        made = atlases(replace(config, checkpoint_path=str(path)), captions)
        last = len(made[0]["pass_timesteps"]) - 1
        moments.append({"step": number, "first pass": measured(made, 0), "clean pass": measured(made, last)})
        excess = np.array(moments[-1]["first pass"]["equal_distance_excess"])
        below, above = (excess < -NOTABLE).sum(), (excess > NOTABLE).sum()
        print(f"step {number}: excess at equal distance, mean {excess.mean():.2f}; of {excess.size} heads {below} are below "
              f"{-NOTABLE} and {above} above {NOTABLE}")  # fmt: skip
        if number in args.steps:
            save_cache(args.output_path.with_name(path.name), made[0])
    device = devices.choose_device(args.device)
    report = {"environment": environment(device), "captions": captions, "moments": moments}
    with replacing(args.output_path) as file:
        file.write(json.dumps(report).encode() + b"\n")
    print(args.output_path)


if __name__ == "__main__":
    main(run)

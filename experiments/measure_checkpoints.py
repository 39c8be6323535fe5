"""When does a preference for the first frame form in training, and in which heads? Atlases of checkpoints.

    python experiments/train_mini.py --stage causal --training_checkpoints outputs/training
    python experiments/measure_checkpoints.py outputs/training --steps 0 500 -1

Every checkpoint is rolled out on the same held-out captions and seeds, and measured as
notebooks/layer_atlas.ipynb does, mean over the captions. The atlas of the first caption is kept for the
steps asked for, its first and its clean pass.
"""

import json
from itertools import chain
from pathlib import Path
from statistics import fmean

from experiments.running.cli import Parser, count, main
from experiments.running.locks import require_distinct
from wan.errors import ConfigError

NOTABLE = 0.25  # logits, of a preference at equal distance that is counted in what is printed


def run(argv=None):
    flags = Parser(description=__doc__.splitlines()[0])
    flags.add_argument("folder", type=Path, help="step_*.pt of train_mini.py --training_checkpoints")
    flags.add_argument("--config_path", default="configs/wan_mini.yaml")
    flags.add_argument("--ckpt_dir", help="directory of another miniature")
    flags.add_argument("--captions", type=count, default=4)
    flags.add_argument("--steps", type=int, nargs="*", default=[], help="whose atlas is kept; -1: the last")
    flags.add_argument("--device", default="auto")
    flags.add_argument("--extend", action="store_true", help="keep what OUTPUT_PATH has of other steps")
    flags.add_argument("--output_path", type=Path, default=Path("cache/wan-mini-training/moments.json"))
    args = flags.parse_args(argv)

    from experiments.caches import save_cache  # after the flags: a --help needs no torch
    from experiments.caches.files import CacheError, replacing, require_writable
    from experiments.caches.store import select_passes
    from experiments.extraction.devices import choose_device
    from experiments.extraction.provenance import environment
    from experiments.miniature.evaluation import kept_weights, measure, read_report
    from experiments.miniature.moving_shapes import KINDS
    from experiments.miniature.tracking import held_out_scenes
    from wan.config import load_config

    files = kept_weights(args.folder)
    kept = {max(files, default=0) if step == -1 else step for step in args.steps}
    if missing := sorted(kept - set(files)):
        raise ConfigError(f"{args.folder} has no step_*.pt of step {missing[0]}; it has {sorted(files)}")
    out, atlases = args.output_path, {step: args.output_path.with_name(files[step].name) for step in kept}
    require_distinct([out, *atlases.values()], files.values())
    require_writable(out)
    settings = {"ckpt_dir": args.ckpt_dir, "device": args.device, "dtype": "float32"}
    config = load_config(args.config_path, settings)
    captions = [scene.caption for scene in held_out_scenes(KINDS, args.captions)]
    about = {"environment": environment(choose_device(args.device)), "captions": captions}
    measured: dict[int, dict] = {}
    if args.extend and out.exists():
        report = read_report(out)
        if report.get("captions") != captions:
            raise CacheError(f"{out} has other captions; leave --extend out to replace it")
        before = {"environment": report.get("environment")}
        measured = {row["step"]: before | row for row in report["training_checkpoints"]}
    for numbers, atlas in measure(config, files, captions):
        step, excess = numbers["step"], [*chain(*numbers["first pass"]["equal_distance_excess"])]
        measured[step] = numbers | {"environment": about["environment"]}
        below, above = sum(x < -NOTABLE for x in excess), sum(x > NOTABLE for x in excess)
        print(
            f"step {step}: excess at equal distance, mean {fmean(excess):.2f}; of {len(excess)} heads "
            f"{below} are below {-NOTABLE} and {above} above {NOTABLE}"
        )
        if step in kept:
            ends = select_passes(atlas, [0, len(atlas["pass_timesteps"]) - 1])  # the passes that are measured
            save_cache(atlases[step], ends)
    rows = [measured[step] for step in sorted(measured)]
    with replacing(out) as file:
        file.write(json.dumps(about | {"training_checkpoints": rows}).encode() + b"\n")
    print(out)


if __name__ == "__main__":
    main(run)

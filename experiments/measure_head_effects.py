"""Which heads need their past? Measure it on pairs of prompts, and give the cache to those heads.

    python experiments/measure_head_effects.py --config_path configs/self_forcing_dmd.yaml --budget 9
    python experiments/measure_head_effects.py --config_path configs/wan_mini.yaml --pairs my_pairs.yaml

A pair is two prompts that differ in one thing, such as a colour, and a third one without it. Either run
begins with its own prompt and goes on, from block 1, with the third: what still differs in the last block has
been remembered. Its region is the tenth of the places where the two differ most. The effect of a head is how
far x0 of the last block moves there when the head loses what a small window would drop, in units of the
distance between the two runs; no tracker is needed. With --measure patch the head takes the other run's past
in place of losing its own.

OUTPUT_PATH is a CSV for cache_policy head_budget: the heads of largest effect keep the whole past, the others
a window, --budget frames on average. Effects and times are in a JSON beside it. Pairs that are done are not
measured again.
"""

from pathlib import Path

from experiments.running.cli import add_engine_flags, config_from, count, main, run_parser
from wan.errors import ConfigError

WITHOUT_USE = ("step", "save_video", "overwrite", "prompt")  # all passes of the last block are edited


def run(argv=None):
    parser = run_parser(__doc__, without=WITHOUT_USE)
    flag = parser.add_argument
    flag("--pairs", default="configs/paired_prompts.yaml", help="YAML of pairs of prompts")
    flag("--measure", choices=("knockout", "patch"), default="knockout", help="lose the past, or exchange it")
    flag("--budget", type=count, default=9, help="frames of the mean head's cache")
    flag("--window", type=count, default=6, help="frames of the heads that do not keep all")
    flag("--sink", type=int, default=3, help="of these, the first frames of the video")
    flag("--layers", type=int, nargs="+", help="measure these alone: a rehearsal, in files *_rehearsal")
    flag("--folder", type=Path, default=Path("cache/head_effects"), help="where pairs are kept")
    add_engine_flags(parser)
    args = parser.parse_args(argv)
    config = config_from(args)
    out = Path(args.output_path or "outputs/head_budget.csv")
    block, frames = max(config.block_sizes), config.num_frames
    if not args.sink + block <= args.window < args.budget < frames:
        sizes = f"--sink {args.sink}, --window {args.window}, --budget {args.budget}"
        raise ConfigError(f"{sizes}: sink and a block of {block} <= window < budget < {frames} frames")
    from experiments.studies.paired_prompts import measure_heads  # after the flags: a --help needs no torch

    measure_heads(args, config, out)


if __name__ == "__main__":
    main(run)

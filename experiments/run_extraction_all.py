"""Capture every layer, head, block and pass of one rollout as frame logits and mass: an atlas.

python experiments/run_extraction_all.py --config_path configs/wan_mini.yaml --key_curve --cross
python experiments/run_extraction_all.py --prompts prompts.txt --seeds 0 1 2 --output_dir cache/sweep
python experiments/run_extraction_all.py --prompts prompts.txt --output_dir cache/sweep --workers 4
"""

import argparse
from functools import partial

from experiments.running import cli
from wan.errors import ConfigError


def run(argv=None):
    parser = cli.run_parser(__doc__, "cache/atlas.pt")
    flag = parser.add_argument
    flag("--mass", action=argparse.BooleanOptionalAction, default=True, help="softmax mass beside the logits")
    flag("--key_curve", action="store_true", help="also the last block's curve over key tokens")
    flag("--cross", action="store_true", help="also the mass on every prompt token")
    flag("--rope_bands", action="store_true", help="also the mean logits by RoPE band: time, height, width")
    flag("--query_key_means", action="store_true", help="also the means of q and k before RoPE, per frame")
    cli.add_config_flags(parser, "gpus")
    cli.add_sweep_flags(parser, checkpoints=True)
    cli.add_engine_flags(parser)
    args = parser.parse_args(argv)

    from experiments.extraction import cache_builders  # after the flags: a --help needs no torch
    from experiments.running import sweep
    from experiments.running.run import make_caches

    config = cli.config_from(args)
    requests = cache_builders.atlas_requests(
        config, args.mass, args.key_curve, args.cross, args.rope_bands, args.query_key_means
    )
    if not (args.prompts or args.seeds or args.checkpoints or args.output_dir):
        make_caches(args, config, requests, {args.output_path: cache_builders.atlas_cache})
        return
    if args.output_path != parser.get_default("output_path"):
        raise ConfigError("--output_path is for one cache: a sweep takes --output_dir")
    quantities = {"frame_mass": args.mass, "key_curve": args.key_curve, "cross_mass": args.cross}
    quantities |= {"frame_logits_by_band": args.rope_bands, "query_means": args.query_key_means}
    sweep.run_sweep(args, config, requests, cache_builders.atlas_cache, quantities)


command = partial(cli.main, run)

if __name__ == "__main__":
    command()

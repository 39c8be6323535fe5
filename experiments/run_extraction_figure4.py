"""Capture the last block's attention of chosen layers: the cache of Figure 4 of Deep Forcing.

python experiments/run_extraction_figure4.py --config_path configs/wan_mini.yaml --layer_indices 1 5
"""

from functools import partial

from experiments.running import cli


def run(argv=None):
    parser = cli.run_parser(__doc__, "cache/attention_cache_figure4.pt")
    cli.add_config_flags(parser, "layer_indices")
    flag = parser.add_argument
    flag(
        "--granularity",
        choices=("token", "key", "frame"),
        default="token",
        help="token: whole matrix; key: mean over queries; frame: frame pairs",
    )
    flag("--capture", choices=("logits", "probabilities"), default="logits", help="of a token matrix")
    cli.add_config_flags(parser, "gpus")
    args = parser.parse_args(argv)
    config = cli.config_from(args)

    from experiments.running.run import PlannedCache, cache_builders, make_caches  # a --help needs no torch

    is_logits = args.capture == "logits"
    requests = cache_builders.figure4_requests(config, args.granularity, is_logits)
    build = partial(cache_builders.figure4_cache, is_logits=is_logits)
    cache = PlannedCache("figure4", build, config.layer_indices)
    make_caches(args, config, requests, {args.output_path: cache})


command = partial(cli.main, run)

if __name__ == "__main__":
    command()

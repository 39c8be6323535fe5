"""Capture the last block's attention of chosen layers: the cache of Figure 4 of Deep Forcing (arXiv
2512.05081).

python experiments/run_extraction_figure4.py --config_path configs/wan_mini.yaml --layer_indices 1 5
"""

from functools import partial

from experiments.running.cli import add_config_flags, config_from, main, run_parser


def run(argv=None):
    parser = run_parser(__doc__, "cache/attention_cache_figure4.pt")
    add_config_flags(parser, "layer_indices")
    parser.add_argument(
        "--granularity",
        choices=("token", "key", "frame"),
        default="token",
        help="token: the whole matrix; key: query-averaged curve; frame: mean logits and mass of frame pairs",
    )
    parser.add_argument(
        "--capture", choices=("logits", "probabilities"), default="logits", help="what a token matrix holds"
    )
    add_config_flags(parser, "gpus")
    args = parser.parse_args(argv)

    from experiments.extraction import cache_builders  # after the flags: a --help needs no torch
    from experiments.running.run import make_caches

    config, is_logits = config_from(args), args.capture == "logits"
    requests = cache_builders.figure4_requests(config, args.granularity, is_logits)
    make_caches(
        args, config, requests, {args.output_path: partial(cache_builders.figure4_cache, is_logits=is_logits)}
    )


command = partial(main, run)

if __name__ == "__main__":
    command()

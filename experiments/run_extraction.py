"""Capture token matrices of chosen layers, blocks and passes, probabilities by default: the inference cache.

python experiments/run_extraction.py --config_path configs/wan_mini.yaml --layer_indices 1 5 --steps 0 4
"""

from functools import partial

from experiments.running import cli


def run(argv=None):
    parser = cli.run_parser(__doc__, "cache/attention_cache.pt", steps=True)
    cli.add_config_flags(parser, "layer_indices")
    flag = parser.add_argument
    flag("--blocks", type=int, nargs="+", default=[-1], help="from 0; -1 is the last")
    flag(
        "--capture",
        choices=("probabilities", "logits"),
        default="probabilities",
        help="probabilities in float32, or logits in float16",
    )
    cli.add_config_flags(parser, "gpus")
    args = parser.parse_args(argv)
    config = cli.config_from(args)

    from experiments.running.run import PlannedCache, cache_builders, make_caches  # a --help needs no torch

    requests = cache_builders.inference_requests(config, args.blocks, args.steps, args.capture == "logits")
    cache = PlannedCache("inference", cache_builders.inference_cache)
    make_caches(args, config, requests, {args.output_path: cache})


command = partial(cli.main, run)

if __name__ == "__main__":
    command()

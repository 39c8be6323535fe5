"""Capture the full frame x frame matrix of mean logits of one layer, each block at the chosen pass.

python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml --layer_index 3
python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml --output_dir cache/layers
"""

from functools import partial

from experiments.running import cli


def run(argv=None):
    parser = cli.run_parser(__doc__, None)
    cli.add_config_flags(parser, "layer_index")
    flag = parser.add_argument
    flag("--output_dir", help="folder for layerN.pt of every layer, from one rollout")
    parser.exclude("output_dir", "layer_index")
    parser.exclude("output_dir", "output_path")
    flag(
        "--granularity",
        choices=("token", "frame"),
        default="frame",
        help="frame: exact means, no matrix; token: the same from whole matrices, slower, as a check",
    )
    cli.add_config_flags(parser, "gpus")
    args = parser.parse_args(argv)
    config = cli.config_from(args)

    from experiments.running.run import PlannedCache, cache_builders, make_caches  # a --help needs no torch

    requests = cache_builders.layer_requests(config, args.granularity, args.output_dir is not None)
    folder = args.output_dir or "cache"
    outputs = {}
    for layer in requests[0].layers:
        path = args.output_path or f"{folder}/layer{layer}.pt"
        build = partial(cache_builders.layer_cache, layer=layer)
        outputs[path] = PlannedCache("layer", build, [layer])
    make_caches(args, config, requests, outputs)


command = partial(cli.main, run)

if __name__ == "__main__":
    command()

"""Capture the full frame x frame matrix of mean logits of one layer, each block at the chosen pass.

python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml --layer_index 3
python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml --output_dir cache/layers
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.running.cli import add_config_flags, config_from, main, run_parser
from wan.errors import ConfigError


def run(argv=None):
    parser = run_parser(__doc__, None)
    add_config_flags(parser, "layer_index")
    parser.add_argument("--output_dir", help="folder for layerN.pt of every layer, from one rollout")
    how = "frame: exact means, no matrix; token: the same from whole matrices, slower, as a check"
    parser.add_argument("--granularity", choices=("token", "frame"), default="frame", help=how)
    add_config_flags(parser, "gpus")
    args = parser.parse_args(argv)

    from experiments.extraction import cache_builders  # after the flags: a --help needs no torch
    from experiments.running.run import make_caches
    from wan.checkpoint import read_model_config

    config = config_from(args)
    if args.output_dir and (args.output_path or args.layer_index is not None):
        raise ConfigError("--output_dir takes every layer: it excludes --layer_index and --output_path")
    if args.output_dir and args.granularity == "token":
        raise ConfigError("--output_dir keeps frames: whole matrices of every layer would not fit in memory")
    layers = range(read_model_config(config.ckpt_dir).num_layers) if args.output_dir else [config.layer_index]
    folder = Path(args.output_dir or "cache")
    paths = {layer: args.output_path or str(folder / f"layer{layer}.pt") for layer in layers}
    request = cache_builders.layer_requests(config, args.granularity)[0]
    outputs = {path: partial(cache_builders.layer_cache, layer=layer) for layer, path in paths.items()}
    make_caches(args, config, [replace(request, layers=list(layers))], outputs)


command = partial(main, run)

if __name__ == "__main__":
    command()

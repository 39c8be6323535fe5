"""Capture what query frames or patches see of every key token: maps to lay over the video.

python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_patch 18,2,1
python experiments/run_extraction_maps.py --config_path configs/wan_mini.yaml --query_grid 18,4,4 --words
"""

from functools import partial

from experiments.running.cli import add_gpus, add_map_flags, config_from, main, places_of, run_parser
from experiments.running.ranks import this_rank
from wan.errors import ConfigError


def run(argv=None):
    parser = run_parser(__doc__, "cache/maps.pt")
    parser.add_argument("--layer_indices", type=int, nargs="+", help="layers, counted from 0")
    add_map_flags(parser)
    add_gpus(parser)
    args = parser.parse_args(argv)

    from experiments.extraction import maps as map_builders  # after the flags: a --help needs no torch
    from experiments.extraction.memory import said_of
    from experiments.running.jobs import make_caches
    from wan.checkpoint import read_model_config

    if args.step is not None and args.steps:
        raise ConfigError("--step and --steps exclude each other")
    config = config_from(args)
    grid = map_builders.token_grid(config, read_model_config(config.ckpt_dir))
    places = places_of(args, partial(map_builders.patches_of_grid, grid=grid))
    blocks = map_builders.counted_blocks(args.blocks, len(config.block_sizes))
    requests = map_builders.map_requests(
        config, grid, places, config.layer_indices, args.heads, blocks, args.steps, args.words
    )
    rank = this_rank()
    if not args.quiet and rank.is_first and config.gpus in (1, rank.count):  # said once, not by the launcher
        print(f"keeps {said_of(requests, config)}")
    build = partial(map_builders.maps_cache, grid=grid, heads=args.heads)
    make_caches(args, config, requests, {args.output_path: build})


command = partial(main, run)

if __name__ == "__main__":
    command()

"""Capture every layer, head, block and pass of one rollout as frame logits and mass: an atlas.

python experiments/run_extraction_all.py --config_path configs/wan_mini.yaml --key_curve --cross
python experiments/run_extraction_all.py --prompts prompts.txt --seeds 0 1 2 --output_dir cache/sweep
python experiments/run_extraction_all.py --prompts prompts.txt --output_dir cache/sweep --workers 4
"""

import argparse
from functools import partial

from experiments.running import cli


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
    cli.add_worker_flags(parser)
    args = parser.parse_args(argv)
    config = cli.config_from(args)

    from experiments.running.atlases import make_atlases  # after the flags: a --help needs no torch

    make_atlases(args, config)


command = partial(cli.main, run)

if __name__ == "__main__":
    command()

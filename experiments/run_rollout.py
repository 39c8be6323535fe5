"""Make a video of any length, block by block. The same command goes on where it was stopped or killed.

    python experiments/run_rollout.py --config_path configs/wan_mini.yaml --num_frames 240
    python experiments/run_rollout.py --num_frames 2400 --cache_policy deep_sink --capture last:3

Beside the mp4, which plays while it grows, NAME.latents/ has a file for each block, and NAME.attention/ has
one for each captured block. docs/policies.md tells more.
"""

from experiments.running import cli


def run(argv=None):
    parser = cli.run_parser(__doc__, "outputs/long.mp4", without=["save_video"], suffixes=(".mp4",))
    parser.add_argument("--capture", default="none", help="attention: none, last:N blocks, band:D, all")
    args = parser.parse_args(argv)
    config = cli.config_from(args)

    from experiments.extraction import long_rollout  # after the flags: a --help needs no torch

    long_rollout.make_from_flags(args, config)


if __name__ == "__main__":
    cli.main(run)

"""Compare cache policies on long videos: drift per second, a row a video. It goes on where it stopped.

    python experiments/compare_policies.py --policies full window,window=9,sink=3 deep_sink --num_frames 240
    python experiments/compare_policies.py --policies family --held_out 18 --seeds 0 1 2 --output_dir OUT

Without --prompts the prompts are held-out scenes of the miniature, whose tracker then answers, and three
controls stand beside the policies. A table of means over prompts is printed, with each policy's difference to
the first one. docs/policies.md says what the numbers are.
"""

from dataclasses import replace
from itertools import product

from experiments.running import cli

CONTROLS = ("frozen", "vae", "rendered")
# --policies names the policies, and what is written lies in --output_dir, where videos that are done stay
WITHOUT_USE = ("output_path", "save_video", "overwrite", "cache_policy")


def run(argv=None):
    parser = cli.run_parser(__doc__, without=WITHOUT_USE)
    flag = parser.add_argument
    flag(
        "--policies",
        nargs="+",
        metavar="POLICY",  # with a metavar it is not split at commas
        default=["family"],
        help="NAME,FIELD=VALUE,..., YAMLs, or family: published settings",
    )
    flag("--held_out", type=cli.count, help="so many held-out scenes of the miniature in place of --prompts")
    flag("--controls", nargs="*", choices=CONTROLS, help="beside held-out scenes; all where not given")
    flag("--batch", type=cli.count, help="videos rolled out together; 64 on a GPU, 8 on a CPU")
    flag("--judges", type=cli.count_or_none, help="processes that measure; the cores beside a GPU, else none")
    flag("--videos", type=cli.count_or_none, default=2, help="prompts whose first seed is kept as an mp4")
    flag("--capture", default="none", help="attention kept of every video: none, last:N blocks, band:D, all")
    flag("--vbench_dir", help="also write every video into DIR/POLICY as VBench-Long reads it")
    cli.add_sweep_flags(parser)
    for prompts, of_scenes in product(("prompt", "prompts"), ("held_out", "controls")):
        parser.exclude(prompts, of_scenes)
    cli.add_worker_flags(parser)
    parser.set_defaults(config_path="configs/wan_mini.yaml", num_frames=240, vae_dtype="float32")
    args = parser.parse_args(argv)
    args.output_dir = args.output_dir or "outputs/policies"
    if args.controls is None:
        args.controls = list(CONTROLS)
    config = replace(cli.config_from(args), cache_policy=None, local_attn_size=-1, sink_size=0)

    from experiments.studies.policy_comparison import compare  # after the flags: a --help needs no torch

    compare(args, config)


if __name__ == "__main__":
    cli.main(run)

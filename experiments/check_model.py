"""Check a model within a minute: compare its attention with published atlases, head by head.

    python experiments/check_model.py
    python experiments/check_model.py --frames 72 --output_path outputs/check_model.svg

Generates the published videos (two prompts, seed 42) and compares the mean logits of their first pass with
cache/published. The verdict is "attends alike", "differs like another prompt" or "wrong"; wrong ends with
exit code 1. Noise on a GPU depends on the kind of card, so several are tried. --reference FILE ... compares
with other atlases, such as your own of before. docs/real_model.md says how reliable the verdict is.
"""

from experiments.caches.files import located
from experiments.running import cli

OF_REFERENCES = ("prompt", "seed", "num_frames", "step", "cache_policy", "prompt_schedule")
OF_VIDEOS = ("save_video", *cli.DECODING)


def run(argv=None):
    suffixes = (".svg", ".pdf", ".png")
    parser = cli.run_parser(
        __doc__, "outputs/check_model.svg", without=(*OF_REFERENCES, *OF_VIDEOS), suffixes=suffixes
    )
    flag = parser.add_argument
    flag("--frames", type=int, choices=(21, 72), default=21, help="length of the published videos")
    flag(
        "--reference",
        type=located,
        nargs="+",
        metavar="FILE",
        help="atlases to compare with; the published ones",
    )
    args = parser.parse_args(argv)
    config = cli.config_from(args)

    from experiments.studies.model_check import check  # after the flags: a --help needs no torch

    check(args, config)


if __name__ == "__main__":
    cli.main(run)

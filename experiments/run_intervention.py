"""Roll out with and without interventions, from the same noise: what they change, and both videos.

python experiments/run_intervention.py --config_path wan_mini --interventions configs/edits/forget_past.yaml
ls cache/effects.pt cache/effects.mp4

docs/interventions.md says what can be edited, and explains the numbers.
"""

from experiments.running import cli
from wan.errors import ConfigError


def run(argv=None):
    parser = cli.run_parser(__doc__, "cache/effects.pt", without=("step", *cli.DECODING))
    flag = parser.add_argument
    flag(
        "--save_base",
        type=cli.output_file((".pt",)),
        metavar="FILE.pt",
        help="keep the unedited run, and use it where it is there",
    )
    flag("--dry_run", action="store_true", help="say what would be edited, and stop")
    flag("--no_video", action="store_true", help="the numbers alone, without an mp4; needs no ffmpeg")
    parser.exclude("no_video", "save_video")
    args = parser.parse_args(argv)
    config = cli.config_from(args)
    if not config.interventions:
        raise ConfigError(
            "nothing to edit: give --interventions a file, such as configs/edits/forget_past.yaml"
        )

    from experiments.studies.interventions import make_effects  # after the flags: a --help needs no torch

    make_effects(args, config)


if __name__ == "__main__":
    cli.main(run)

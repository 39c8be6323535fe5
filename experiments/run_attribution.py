"""Score every head and MLP by what the difference to another prompt does through it: attribution patching.

    python experiments/run_attribution.py --config_path configs/wan_mini.yaml --source_prompt "a blue square"
    ls cache/attribution.pt

docs/interventions.md says what the scores are.
"""

from experiments.running import cli

# It makes no video, takes every denoising pass, and no edits
WITHOUT_USE = ("interventions", "save_video", "step", *cli.DECODING)


def run(argv=None):
    parser = cli.run_parser(__doc__, "cache/attribution.pt", without=WITHOUT_USE)
    flag = parser.add_argument
    flag("--source_prompt", required=True, help="of the run whose activations are taken")
    flag("--sites", nargs="+", default=["z", "mlp_out"], help="of wan.sites.SITES")
    flag("--blocks", nargs="+", type=int, help="every one where not given")
    flag("--integrated", type=cli.count, default=1, help="points between the inputs of both runs")
    args = parser.parse_args(argv)
    config = cli.config_from(args)

    from experiments.attribution import make_scores  # after the flags: a --help needs no torch

    make_scores(args, config)


if __name__ == "__main__":
    cli.main(run)

"""Measure the direct effect of one edit on every head, layer or frame: a causal atlas.

    python experiments/run_causal_atlas.py --config_path configs/wan_mini.yaml --prompts FILE --seeds 0 1
    python experiments/run_causal_atlas.py --each head --edit edit.yaml --output_dir cache/causal_atlas
    python experiments/run_causal_atlas.py --prompts FILE --seeds 0 1 --workers 4

Without --edit every head's output is replaced by its mean over a reference set, in the denoising passes. The
same command goes on where it stopped. docs/interventions.md explains the numbers.
"""

from experiments.caches.files import located
from experiments.running import cli
from wan.errors import ConfigError

# An atlas covers every pass, keeps the pieces that are done, and makes the edits of --edit
WITHOUT_USE = ("output_path", "step", "save_video", "overwrite", "interventions", *cli.DECODING)


def run(argv=None):
    parser = cli.run_parser(__doc__, without=WITHOUT_USE)
    flag = parser.add_argument
    flag(
        "--each",
        choices=("head", "layer", "frame", "site"),
        default="head",
        help="what is edited in turn; site: attn_out, cross_out, mlp_out",
    )
    flag("--edit", type=located, metavar="FILE", help="a YAML of one edit, without the layer and head")
    flag("--batch", type=cli.count, default=8, help="runs that are made together")
    cli.add_sweep_flags(parser)
    cli.add_worker_flags(parser)
    args = parser.parse_args(argv)
    args.output_dir = args.output_dir or "cache/causal_atlas"
    config = cli.config_from(args)
    if config.interventions:
        raise ConfigError("a causal atlas makes its own edits: take a config without interventions")

    from experiments.studies.causal_atlas import make_atlas  # after the flags: a --help needs no torch

    make_atlas(args, config)


if __name__ == "__main__":
    cli.main(run)

"""Make what head-wise cache policies need, for any model: classes of heads from an atlas, or mean queries.

    python experiments/run_extraction_all.py --config_path configs/wan_mini.yaml --output_path cache/atlas.pt
    python experiments/make_head_classes.py cache/atlas.pt --rule forcing_kv --output_path cache/static.csv
    python experiments/make_head_classes.py cache/causal_atlas/causal_atlas.pt --rule effect --num 19
    python experiments/make_head_classes.py --rule triattention --config_path configs/wan_mini.yaml

forcing_kv: 1 static, 0 dynamic, by the mass on the last frames (policy forcing_kv). dummy: 0 sink, 1
neighbour, 2 dummy, by Dummy Forcing's rule; pyramid: 1 anchor, -1 wave, 2 veil, by signs of logits; mass: 1
the heads with the most mass on older frames, 0 the others; effect: 1 the heads of the largest direct effect
in a causal atlas, 0 the others (policy per_head). triattention rolls the config's model out with its whole
past and writes its mean queries as an .npz (policy triattention).
"""

from experiments.caches.files import located
from experiments.running import cli
from wan.errors import ConfigError

RULES = ("forcing_kv", "dummy", "pyramid", "mass", "effect", "triattention")
COUNTED = ("dummy", "mass", "effect")  # rules that choose --num heads
OF_ATLASES = {"rule", "num", "block", "step", "output_path", "overwrite", "debug"}


def run(argv=None):
    parser = cli.run_parser(__doc__, suffixes=(".csv", ".npz"))
    flag = parser.add_argument
    flag(
        "atlas",
        type=located,
        nargs="?",
        help="an atlas with masses, a causal atlas for effect; none for triattention",
    )
    flag("--rule", choices=RULES, required=True, help="what decides a head's class")
    flag(
        "--num",
        type=cli.count,
        help="heads of class dummy, of most mass, or of the largest effect; else half",
    )
    flag("--block", type=cli.count, default=1, help="the block that dummy classifies by (ar_start)")
    args = parser.parse_args(argv)
    rolls_out = args.rule == "triattention"
    if rolls_out and args.atlas:
        raise ConfigError(f"--rule triattention rolls --config_path out; leave {args.atlas} out")
    if not rolls_out and not args.atlas:
        raise ConfigError(f"--rule {args.rule} takes an atlas: give its path")
    if args.rule not in COUNTED:
        cli.require_effect(args, ["num"], f"on rule {args.rule}")
    if args.rule != "dummy":
        cli.require_effect(args, ["block"], f"on rule {args.rule}")
    if not rolls_out:  # the flags of a run, but for those that say which pass and where it goes
        flags = {word.removeprefix("--").partition("=")[0] for word in args.words if word.startswith("--")}
        cli.require_effect(args, flags - OF_ATLASES, "on the classes of an atlas")
    config = cli.config_from(args) if rolls_out else None

    from experiments.studies.head_classes import write_classes  # after the flags: a --help needs no torch

    write_classes(args, config)


if __name__ == "__main__":
    cli.main(run)

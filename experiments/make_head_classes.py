"""Make what head-wise cache policies need, for any model: classes of heads from an atlas, or mean queries.

    python experiments/run_extraction_all.py --config_path configs/wan_mini.yaml --output_path cache/atlas.pt
    python experiments/make_head_classes.py cache/atlas.pt --rule forcing_kv --output_path cache/static.csv
    python experiments/make_head_classes.py --rule triattention --config_path configs/wan_mini.yaml

forcing_kv: 1 static, 0 dynamic, by the mass on the last frames (policy forcing_kv). dummy: 0 sink, 1
neighbour, 2 dummy, by Dummy Forcing's rule; pyramid: 1 anchor, -1 wave, 2 veil, by signs of logits; mass: 1
the heads with the most mass on older frames, 0 the others (policy per_head). triattention rolls the config's
model out with its whole past and writes its mean queries as an .npz (policy triattention).
"""

from pathlib import Path

from experiments.caches.files import replacing
from experiments.running.cli import config_from, count, main, run_parser
from wan.errors import ConfigError

RULES = ("forcing_kv", "dummy", "pyramid", "mass", "triattention")


def run(argv=None):
    parser = run_parser(__doc__, None)
    flag = parser.add_argument
    flag("atlas", nargs="?", help="an atlas cache with masses; none for triattention")
    flag("--rule", choices=RULES, required=True)
    flag("--num", type=count, help="heads of class dummy, or of the most mass; half of all where not given")
    flag("--block", type=count, default=1, help="the block that dummy classifies by (ar_start)")
    args = parser.parse_args(argv)
    rolls_out = args.rule == "triattention"
    if (args.atlas is None) != rolls_out:
        raise ConfigError("give an atlas, but for --rule triattention, which rolls --config_path out")
    output = Path(args.output_path or f"outputs/head_classes/{args.rule}.{'npz' if rolls_out else 'csv'}")

    import numpy as np  # after the flags: a --help needs no torch

    from experiments.caches import load_cache
    from experiments.studies.head_classes import classes_of, query_means

    if rolls_out:
        with replacing(output) as file:
            np.savez_compressed(file, **query_means(config_from(args)))
        print(output)
        return
    classes = classes_of(args.rule, load_cache(args.atlas), args.step, args.num, args.block)
    with replacing(output) as file:
        np.savetxt(file, classes, "%d", ",")
    counts = zip(*np.unique(classes, return_counts=True), strict=True)
    print(f"{output}: {', '.join(f'{n} of class {label}' for label, n in counts)}")


if __name__ == "__main__":
    main(run)

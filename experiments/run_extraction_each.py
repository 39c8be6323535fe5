"""Capture the full frame x frame matrix of mean logits of one layer, each block at the chosen pass.

    python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml --layer_index 3
"""

from experiments import extraction
from experiments.cli import config_from, main, run_parser, save_results


def run(argv=None):
    parser = run_parser(__doc__, None)
    parser.add_argument("--layer_index", type=int, help="layer, counted from 0; the cache goes to cache/layerN.pt")
    parser.add_argument("--granularity", choices=("token", "frame"), default="frame",
                        help="frame: exact means, no matrix; token: the same from whole matrices, slower, as a check")
    args = parser.parse_args(argv)
    config = config_from(args)
    path = args.output_path or f"cache/layer{config.layer_index}.pt"
    extraction.require_writable(path)
    result = extraction.extract(config, extraction.layer_requests(config, args.granularity))
    save_results(args, result, {path: extraction.layer_cache(result, config.layer_index)})


if __name__ == "__main__":
    main(run)

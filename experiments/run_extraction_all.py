"""Capture every layer, head, block and pass of one rollout as frame logits and mass: an atlas.

    python experiments/run_extraction_all.py --config_path configs/wan_mini.yaml --key_curve --cross
"""

import argparse

from experiments import extraction
from experiments.cli import config_from, main, run_parser, save_results


def run(argv=None):
    parser = run_parser(__doc__, "cache/atlas.pt")
    parser.add_argument("--mass", action=argparse.BooleanOptionalAction, default=True, help="softmax mass beside the logits")
    parser.add_argument("--key_curve", action="store_true", help="also the last block's curve over key tokens")
    parser.add_argument("--cross", action="store_true", help="also the mass on every prompt token")
    parser.add_argument("--rope_bands", action="store_true", help="also the mean logits by RoPE band: time frequencies, "
                                                                  "height, width; 4 bytes per band, frame pair, head and pass")
    args = parser.parse_args(argv)
    config = config_from(args)
    extraction.require_writable(args.output_path)
    requests = extraction.atlas_requests(config, args.mass, args.key_curve, args.cross, args.rope_bands)
    result = extraction.extract(config, requests)
    save_results(args, result, {args.output_path: extraction.atlas_cache(result)})


if __name__ == "__main__":
    main(run)

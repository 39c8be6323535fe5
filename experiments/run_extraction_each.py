"""Capture the full frame x frame matrix of mean logits of one layer or several, from one rollout.

    python experiments/run_extraction_each.py --config_path configs/wan_mini.yaml --layer_index 3
"""

from experiments import extraction
from experiments.cli import config_from, main, run_parser, save_results
from wan.modules.capture import CaptureRequest


def run(argv=None):
    parser = run_parser(__doc__, None)
    parser.add_argument("--layer_index", type=int, help="layer, counted from 0; the cache goes to cache/layerN.pt")
    args = parser.parse_args(argv)
    config = config_from(args)
    path = args.output_path or f"cache/layer{config.layer_index}.pt"
    extraction.require_writable(path)
    request = CaptureRequest(layers=[config.layer_index], steps=[config.step], granularity="frame", mass=False)
    result = extraction.extract(config, [request], args.compile)
    save_results(args, result, {path: extraction.layer_cache(result, config.layer_index)})


if __name__ == "__main__":
    main(run)

"""All layers, heads and passes of a cache as one HTML file that opens from disk: no server, no network.

    python experiments/layer_page.py cache/published/self_forcing_dmd_eagle_21f.pt --output_path outputs/eagle.html

Everything drawn is in the file as JSON; experiments/figures/html_page.html draws it.
"""

from pathlib import Path

from experiments.figures.html_page import save_page
from experiments.running.cli import Parser, main


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", help="a cache of any format, or a folder of layerN.pt")
    parser.add_argument("--output_path", type=Path, help="the page; beside the cache where not given")
    args = parser.parse_args(argv)
    path = args.output_path or Path(args.cache).with_suffix(".html")
    print(f"{save_page(path, args.cache)}: open it in a browser, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(run)

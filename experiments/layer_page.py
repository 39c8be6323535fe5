"""All layers, heads and passes of a cache as one HTML file that opens from disk: no server, no network.

    python experiments/layer_page.py cache/atlas.pt --output_path outputs/atlas.html

docs/page.md says what the page does.
"""

from functools import partial
from pathlib import Path

from experiments.caches.files import require_distinct
from experiments.running.cli import Parser, main, number


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", help="a cache of any format, or a folder of layerN.pt")
    parser.add_argument("--output_path", type=Path, help="the page; beside the cache where not given")
    parser.add_argument(
        "--max_mb", type=number(float, 1e-9, 1e9), help="size; passes are left out for it; 16"
    )
    parser.add_argument("--video", type=Path, help="an mp4 of the rollout; the one beside the cache if any")
    parser.add_argument("--maps", type=Path, help="a maps cache of the rollout, to click on patches")
    parser.add_argument("--compare", type=Path, help="a second cache of the same sizes: heads side by side")
    args = parser.parse_args(argv)

    from experiments.figures.html_page import MAX_MB, save_page  # after the flags: a --help needs no torch

    cache = Path(args.cache) if Path(args.cache).name.strip(".") else Path(args.cache).resolve()  # . or ..
    path = args.output_path or cache.with_suffix(".html")
    require_distinct([path], [args.cache, *args.inputs])
    chosen = {"video": args.video, "maps": args.maps, "compare": args.compare}
    save_page(path, args.cache, max_mb=args.max_mb or MAX_MB, **chosen)
    print(f"{path}: open it in a browser, {path.stat().st_size / 1e6:.1f} MB")


command = partial(main, run)

if __name__ == "__main__":
    command()

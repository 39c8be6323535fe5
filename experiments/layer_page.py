"""Write all layers, heads and passes of a cache as one HTML file that opens from disk, without a server.

    python experiments/layer_page.py cache/atlas.pt --output_path outputs/atlas.html

notebooks/README.md says what the page does.
"""

from functools import partial
from pathlib import Path

from experiments.caches import files
from experiments.running import cli


def run(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument
    flag("cache", type=files.located, help="a cache of any format, or a folder of layerN.pt")
    flag("--output_path", type=Path, help="the page; if not given, CACHE.html beside the cache")
    flag(
        "--max_mb",
        type=cli.number(float, 1e-9, 1e9),
        help="largest page; passes that do not fit are left out; if not given, 16",
    )
    flag("--video", type=cli.input_path, help="an mp4 of the rollout; if not given, the one beside the cache")
    flag("--maps", type=cli.input_path, help="a maps cache of the rollout, to click on patches")
    flag("--compare", type=cli.input_path, help="a second cache of the same sizes: heads side by side")
    flag(
        "--overwrite",
        action="store_true",
        help="replace a file that this program did not write, or changed since",
    )
    args = parser.parse_args(argv)

    from experiments.figures.html_page import MAX_MB, save_page  # after the flags: a --help needs no torch

    cache = Path(args.cache)
    if not cache.name.strip("."):  # . or ..
        cache = cache.resolve()
    path = args.output_path or cache.with_suffix(".html")
    files.require_suffix(path, ".html")
    files.require_distinct([path], [args.cache, *args.inputs])
    save_page(
        path,
        args.cache,
        overwrite=args.overwrite,
        max_mb=args.max_mb or MAX_MB,
        video=args.video,
        maps=args.maps,
        compare=args.compare,
    )
    print(f"{path}: open it in a browser, {path.stat().st_size / 1e6:.1f} MB")


command = partial(cli.main, run)

if __name__ == "__main__":
    command()

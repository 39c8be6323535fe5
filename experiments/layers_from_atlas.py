"""Take layers out of an atlas as layer caches, one file each.

python experiments/layers_from_atlas.py cache/published/self_forcing_dmd_eagle_21f.pt --layers 20
"""

from functools import partial
from pathlib import Path

from experiments.caches.files import CacheError
from experiments.running.cli import Parser, main


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("atlas", help="an atlas cache")
    parser.add_argument("--layers", type=int, nargs="+", help="counted from 0; every layer where not given")
    parser.add_argument("--step", type=int, help="which pass; the first of the atlas where not given")
    parser.add_argument("--output_dir", type=Path, default=Path("cache"), help="where layerN.pt go")
    args = parser.parse_args(argv)

    from experiments.caches import load_cache, save_cache  # after the flags: a --help needs no torch
    from experiments.caches.store import layer_from_atlas
    from experiments.running.locks import claimed, require_distinct

    atlas = load_cache(args.atlas, expect=("atlas",))
    layers = args.layers or atlas["layers"]
    if absent := sorted(set(layers) - set(atlas["layers"])):
        raise CacheError(
            f"layer {absent[0]} is not in {args.atlas}; it has {', '.join(map(str, atlas['layers']))}"
        )
    paths = {layer: args.output_dir / f"layer{layer}.pt" for layer in layers}
    require_distinct(paths.values(), args.inputs)
    with claimed(dict.fromkeys(map(str, paths.values()), 0)):
        for layer, path in paths.items():
            save_cache(path, layer_from_atlas(atlas, layer, args.step))
            print(
                f"{path}: layer cache of {atlas['model']} ({atlas['weights']} weights), "
                f"{atlas['num_frames']} latent frames, {atlas['prompt']!r}"
            )


command = partial(main, run)

if __name__ == "__main__":
    command()

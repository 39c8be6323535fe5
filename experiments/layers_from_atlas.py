"""Take layers out of an atlas as layer caches, one file each: no second rollout, and the published data as well.

python experiments/layers_from_atlas.py cache/published/self_forcing_dmd_eagle_21f.pt --layers 20
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.caches import load_cache, save_cache
from experiments.cli import Parser, main
from experiments.formats import COMMON, SAMPLING, CacheError
from experiments.frames import block_frames
from experiments.profiles import open_profiles


def layer_from_atlas(atlas: Mapping[str, Any], layer: int, step: int | None = None) -> dict[str, Any]:
    """The layer cache of one layer of an atlas in one pass (None: the first); mean logits.

    Where the atlas has the last block's mean alone, the frame matrix is NaN. Raises CacheError for a layer, pass or
    quantity that the atlas does not hold.
    """
    view = open_profiles(atlas, step, "mean_logit")
    blocks, everything = list(view.block_sizes), list(range(view.num_frames))
    last = (
        everything[-3:] if len(blocks) == 1 else block_frames(blocks, -1)
    )  # a bidirectional run is one block
    profile, matrix = view.frame_profile(layer), view.frame_matrix(layer)
    H, F = profile.shape
    profile = torch.from_numpy(profile if matrix is None or len(blocks) > 1 else matrix[:, last].mean(1))
    matrix = torch.full((H, F, F), torch.nan) if matrix is None else torch.from_numpy(matrix)
    kept = {name: atlas[name] for field in COMMON | SAMPLING if (name := field.rstrip("?")) in atlas}
    return kept | {
        "format": "layer", "is_logits": True, "step": view.step, "timestep": view.timestep,
        "is_clean_pass": view.is_clean_pass, "layer_index": layer, "full_frame_attention": matrix,
        "last_block_frame_attention": profile, "query_frames": everything, "key_frames": everything,
        "last_block_query_frames": last,
    }  # fmt: skip


def run(argv=None):
    parser = Parser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("atlas", help="an atlas cache")
    parser.add_argument("--layers", type=int, nargs="+", help="counted from 0; every layer where not given")
    parser.add_argument("--step", type=int, help="which pass; the first of the atlas where not given")
    parser.add_argument("--output_dir", type=Path, default=Path("cache"), help="where layerN.pt go")
    args = parser.parse_args(argv)
    atlas = load_cache(args.atlas, expect=("atlas",))
    layers = args.layers or atlas["layers"]
    if absent := sorted(set(layers) - set(atlas["layers"])):
        raise CacheError(
            f"layer {absent[0]} is not in {args.atlas}; it has {', '.join(map(str, atlas['layers']))}"
        )
    for layer in layers:
        path = args.output_dir / f"layer{layer}.pt"
        save_cache(path, layer_from_atlas(atlas, layer, args.step))
        print(
            f"{path}: layer cache of {atlas['model']} ({atlas['weights']} weights), {atlas['num_frames']} latent frames, "
            f"{atlas['prompt']!r}"
        )


if __name__ == "__main__":
    main(run)

"""Capture a base Wan model's frame attention while it samples a video: one layer, or all of them as an atlas.

python experiments/extract_attention_wan.py --ckpt_dir checkpoints/wan-mini --layer_index 7
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.running.cli import Parser, add_config_flags, add_run_flags, main
from wan.config import RunConfig, as_one_block, load_config
from wan.errors import ConfigError, short_repr

RUN_FLAGS = ("ckpt_dir", "prompt", "seed", "device", "dtype", "offload", "t5_cpu")
SAMPLING_FLAGS = ("num_frames", "guidance_scale", "shift", "num_steps", "negative_prompt")


def choose_steps(config: RunConfig, names: Sequence[str]) -> list[int]:
    """first, last, all or numbers -> increasing steps of the sampler."""
    last = config.base.num_steps - 1
    known = {str(step): [step] for step in range(last + 1)}
    known |= {"first": [0], "last": [last], "all": [*range(last + 1)]}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"step {short_repr(unknown[0])} is not first, last, all or in 0..{last}")
    return sorted({step for name in names for step in known[name]})


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    add_config_flags(parser, "ckpt_dir", "prompt", "seed", "device")
    flag("--config_path", help="YAML with the settings; where not given the model's sizes choose them")
    flag("--layer_index", type=int, help="layer, counted from 0; 20, or the last one where there are fewer")
    flag("--all_layers", action="store_true", help="every layer at once, as an atlas per branch of guidance")
    flag("--step", nargs="+", default=["first"], help="first, last, a number; an atlas takes several, or all")
    flag("--output_dir", default="cache", help="folder of layerN.pt, or atlas_base.pt and _uncond.pt")
    flag("--negative_prompt", help="text to stay away from; the model's own where not given")
    flag("--num_frames", type=int, help="VIDEO frames, 4n + 1; 21 are 6 latent frames")
    flag("--num_steps", type=int, help="of the sampler")
    flag("--guidance_scale", type=float, help="of classifier-free guidance; the model's own where not given")
    flag("--shift", type=float, help="of the noise levels; the model's own where not given")
    flag("--gpu_id", type=int, help="short for --device cuda:N")
    flag("--save_video", metavar="PATH", nargs="?", const="", help="also decode the video and write an mp4")
    add_run_flags(parser)
    args = parser.parse_args(argv)

    from experiments.base_session import BaseSession
    from experiments.caches.formats import FORMATS  # after the flags: a --help needs no torch
    from experiments.extraction.cache_builders import base_atlas_cache, base_layer_cache
    from experiments.extraction.project_files import CONFIGS, config_for
    from experiments.running.run import make_caches
    from wan.capture import CaptureRequest
    from wan.checkpoint import read_model_config

    chosen = config_for(args.ckpt_dir) if args.ckpt_dir else CONFIGS[0]
    path = args.config_path or chosen
    if args.gpu_id is not None:
        args.device = f"cuda:{args.gpu_id}"
    config = load_config(path, {name: getattr(args, name) for name in RUN_FLAGS})
    if config.lora_path:
        raise ConfigError(
            f"{path} names a LoRA, {config.lora_path}, and runs of the base model have none; give a config "
            "without lora_path"
        )
    given = {name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None}
    if "num_frames" in given:
        given["num_video_frames"] = given.pop("num_frames")
    # All frames are one block, which attends to itself
    config = as_one_block(replace(config, base=replace(config.base, **given)))
    steps, folder = choose_steps(config, args.step), Path(args.output_dir)
    # One cache of a layer, or an atlas for each branch of guidance
    if args.all_layers and args.layer_index is not None:
        raise ConfigError("--all_layers and --layer_index exclude each other")
    if len(steps) > 1 and not args.all_layers:
        raise ConfigError(f"a layer cache holds one step, not {len(steps)}; give one, or --all_layers")
    if args.all_layers:
        layers, kind = None, "atlas"
        names = {"cond": "atlas_base.pt", "uncond": "atlas_base_uncond.pt"}
        builds = {name: partial(base_atlas_cache, steps=steps, branch=b) for b, name in names.items()}
    else:
        last = read_model_config(config.ckpt_dir).num_layers - 1
        layer = min(config.base.layer_index, last) if args.layer_index is None else args.layer_index
        if not 0 <= layer <= last:
            raise ConfigError(f"layer {layer} is not in 0..{last}")
        layers, kind = [layer], "layer"
        builds = {f"layer{layer}.pt": partial(base_layer_cache, layer=layer, step=steps[0])}
    request = CaptureRequest(layers=layers, steps=steps, granularity="frame", mass=args.all_layers)
    outputs = {str(folder / name): build for name, build in builds.items()}
    make_caches(args, config, [request], outputs, BaseSession)
    if not args.quiet:
        path = next(iter(outputs))
        from_notebooks = path if Path(path).is_absolute() else os.path.relpath(path, "notebooks")
        print(f'next: open notebooks/{FORMATS[kind].notebook} and set CACHE_PATH = "{from_notebooks}"')


if __name__ == "__main__":
    main(run)

"""Capture a base Wan model's frame attention while it samples a video: one layer, or all of them as an atlas.

python experiments/extract_attention_wan.py --ckpt_dir checkpoints/wan-mini --layer_index 7
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from experiments.running.cli import Parser, add_memory_flags, add_run_flags, main
from wan.config import RunConfig, load_config
from wan.errors import ConfigError

OF_RUN = ("ckpt_dir", "prompt", "seed", "device", "dtype", "offload", "t5_cpu")
OF_SAMPLING = {
    "num_frames": "num_video_frames",
    "guidance_scale": "guidance_scale",
    "shift": "shift",
    "num_steps": "num_steps",
    "negative_prompt": "negative_prompt",
}


def parser() -> Parser:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--ckpt_dir", help="directory of the base model in diffusers layout; its sizes choose the settings"
    )
    p.add_argument(
        "--config_path", help="YAML with the settings, instead of those that the directory's sizes choose"
    )
    p.add_argument(
        "--layer_index", type=int, help="layer, counted from 0; 20, or the last one where there are fewer"
    )
    p.add_argument(
        "--all_layers", action="store_true", help="every layer at once, as an atlas per branch of guidance"
    )
    p.add_argument(
        "--step",
        nargs="+",
        default=["first"],
        help="first, last, a number from 0; an atlas takes several, or all",
    )
    p.add_argument(
        "--output_dir",
        default="cache",
        help="folder of layerN.pt, or of atlas_base.pt and atlas_base_uncond.pt",
    )
    p.add_argument("--prompt", help="text to generate from")
    p.add_argument("--negative_prompt", help="text to stay away from; the model's own where not given")
    p.add_argument("--num_frames", type=int, help="VIDEO frames, 4n + 1; 21 are 6 latent frames")
    p.add_argument("--num_steps", type=int, help="of the sampler")
    p.add_argument(
        "--guidance_scale", type=float, help="of classifier-free guidance; the model's own where not given"
    )
    p.add_argument("--shift", type=float, help="of the noise levels; the model's own where not given")
    p.add_argument("--seed", type=int, help="of the noise")
    p.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    p.add_argument("--gpu_id", type=int, help="short for --device cuda:N")
    p.add_argument(
        "--save_video", metavar="PATH", nargs="?", const="", help="also decode the video and write an mp4"
    )
    add_memory_flags(p)
    add_run_flags(p)
    return p


def config_from(args: argparse.Namespace) -> RunConfig:
    """The settings of the directory's model, overridden by what was given on the command line."""
    from experiments.extraction import base as bidirectional

    path = args.config_path or (
        bidirectional.config_for(args.ckpt_dir) if args.ckpt_dir else bidirectional.CONFIGS[0]
    )
    if args.gpu_id is not None:
        args.device = f"cuda:{args.gpu_id}"
    config = load_config(path, {name: getattr(args, name) for name in OF_RUN})
    if config.lora_path:
        raise ConfigError(
            f"{path} names a LoRA, {config.lora_path}, and runs of the base model have none; give a config "
            "without lora_path"
        )
    given = {
        field: getattr(args, flag) for flag, field in OF_SAMPLING.items() if getattr(args, flag) is not None
    }
    return replace(config, base=replace(config.base, **given))


def run(argv=None):
    args = parser().parse_args(argv)

    from experiments.extraction import base as bidirectional  # after the flags: a --help needs no torch
    from experiments.running import jobs

    config = config_from(args)
    bidirectional.as_one_block(config)  # refuses what does not fit
    steps = bidirectional.choose_steps(config, args.step)
    if args.all_layers and args.layer_index is not None:
        raise ConfigError("--all_layers and --layer_index exclude each other")
    if len(steps) > 1 and not args.all_layers:
        raise ConfigError(
            f"a layer cache holds one step, not {len(steps)}; give one, or --all_layers for an atlas"
        )
    layer = None if args.all_layers else bidirectional.choose_layer(config, args.layer_index)
    paths = jobs.make_base_caches(args, config, layer, steps)
    if not args.quiet:
        say_what_next(paths[0], "atlas" if args.all_layers else "layer")


def say_what_next(path: str, kind: str) -> None:
    from experiments.caches.formats import FORMATS

    parameter = {"layer": "DATA_PATH", "atlas": "CACHE_PATH"}[kind]
    from_notebooks = path if Path(path).is_absolute() else os.path.relpath(path, "notebooks")
    print(f'next: open notebooks/{FORMATS[kind].notebook} and set {parameter} = "{from_notebooks}"')


if __name__ == "__main__":
    main(run)

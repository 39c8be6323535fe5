"""Capture a base Wan model's frame attention while it samples a video: one layer, or all of them as an atlas.

python experiments/extract_attention_wan.py --ckpt_dir checkpoints/wan-mini --layer_index 7
"""

from experiments.running import cli


def run(argv=None):
    parser = cli.Parser(description=__doc__)
    flag = parser.add_argument
    cli.add_config_flags(parser, "ckpt_dir", "prompt", "seed", "device")
    flag(
        "--config_path",
        type=cli.config_file,
        help="YAML with the settings; where not given the model's sizes choose them",
    )
    flag("--layer_index", type=int, help="layer, counted from 0; 20, or the last one where there are fewer")
    flag("--all_layers", action="store_true", help="every layer at once, as an atlas per branch of guidance")
    parser.exclude("layer_index", "all_layers")
    flag("--step", nargs="+", default=["first"], help="first, last, a number; an atlas takes several, or all")
    flag("--output_dir", default="cache", help="folder of layerN.pt, or atlas_base.pt and _uncond.pt")
    flag("--negative_prompt", help="text to stay away from; the model's own where not given")
    flag("--num_frames", type=int, help="VIDEO frames, 4n + 1; 21 are 6 latent frames")
    flag("--num_steps", type=int, help="of the sampler")
    flag("--guidance_scale", type=float, help="of classifier-free guidance; the model's own where not given")
    flag("--shift", type=float, help="of the noise levels; the model's own where not given")
    flag("--gpu_id", type=int, help="short for --device cuda:N")
    flag("--save_video", metavar="PATH", nargs="?", const="", help="also decode the video and write an mp4")
    cli.add_run_flags(parser)
    parser.exclude("gpu_id", "device")
    parser.set_defaults(vae_dtype="auto", preview=None)
    args = parser.parse_args(argv)

    from experiments.base_session import extract  # after the flags: a --help needs no torch

    extract(args)


if __name__ == "__main__":
    cli.main(run)

"""A video of any length: blocks are written as they are made. It goes on where it was stopped or killed.

    python experiments/run_rollout.py --config_path configs/wan_mini.yaml --num_frames 240
    python experiments/run_rollout.py --num_frames 2400 --cache_policy deep_sink --capture last:3

Beside the mp4, which plays at any moment, NAME.latents.safetensors grows, and NAME.attention/ has a file for
each captured block. docs/long_rollouts.md tells more.
"""

import time
from pathlib import Path

from experiments.running.cli import config_from, main, run_parser
from wan.errors import ConfigError


def run(argv=None):
    parser = run_parser(__doc__, "outputs/long.mp4")
    parser.add_argument("--capture", default="none", help="attention: none, last:N blocks, band:D, all")
    args = parser.parse_args(argv)
    if args.save_video is not None:
        raise ConfigError("the video is --output_path; leave --save_video out")
    config = config_from(args)

    from experiments.caches.files import (
        CacheError,
        claimed,
        remove_leftovers,
        require_ffmpeg,
        require_space,
        require_writable,
    )
    from experiments.extraction.long_rollout import (
        BlockCapture,
        LatentFile,
        LongVideo,
        make_long_video,
        path_of,
    )
    from experiments.extraction.memory import amount
    from experiments.extraction.provenance import choose_device, choose_dtype, fingerprint
    from experiments.extraction.rollout import check_outputs, memory, observed
    from experiments.extraction.video import load_vae
    from experiments.session import edited, load
    from wan import checkpoint
    from wan.interventions import edits_of

    place, capture = LongVideo(Path(args.output_path)), BlockCapture.read(args.capture, config.step)
    if place.path.suffix != ".mp4":
        raise ConfigError(f"--output_path {place.path} does not end in .mp4")
    if config.sampler == "rolling_forcing" and capture.kind != "none":
        raise ConfigError("--capture knows no rolling_forcing; run_extraction_all.py captures it")
    attention = [path_of(place.attention, block) for block in capture.blocks(len(config.block_sizes))]
    check_outputs(args, config, [place.path, place.latents, *attention])
    require_writable(place.latents)
    with claimed({str(place.path): 0}), observed(args) as watch:
        require_ffmpeg()
        vae = load_vae(config, args.vae_dtype, args.preview)
        # 1. Sizes, before anything is loaded
        model = checkpoint.read_model_config(config.ckpt_dir)
        dtype = choose_dtype(config.dtype, choose_device(config.device, config.offload))
        shape = (config.num_frames, model.in_dim, config.height, config.width)
        latent_bytes = config.num_frames * model.in_dim * config.height * config.width * dtype.itemsize
        sizes = {str(place.latents): latent_bytes, str(place.attention): capture.bytes(config, model)}
        require_space(place.path.parent, sizes)
        session = load(config).prepare(observer=watch, replays=True, decodes="this script")
        written = [f"{amount(size)} to {path}" for path, size in sizes.items() if size]
        watch.print(f"writes {', '.join(written)}")
        # 2. What an earlier run left
        for path in attention:
            remove_leftovers(path)
        if args.overwrite:
            for path in (place.path, place.latents, *place.attention.glob("block_*.pt")):
                path.unlink(missing_ok=True)
        if place.path.exists() and not place.latents.exists():
            raise CacheError(f"{place.path} is there without its latents; --overwrite makes it again")
        latents = LatentFile(place.latents, shape, session.dtype, fingerprint(session.identity(config)))
        # 3. The video
        start, before = time.monotonic(), latents.frames
        with edited(session, config, edits_of(config.interventions, "config")):
            make_long_video(session, config, place, latents, capture, vae, watch)
        made, seconds = config.num_frames - before, time.monotonic() - start
        frames = f"{made} of {config.num_frames} frames made now"
        watch.print(f"{place.path}: {frames}, {seconds:.1f} s, {memory()}")


if __name__ == "__main__":
    main(run)

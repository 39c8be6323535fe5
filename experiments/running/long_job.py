"""From flags to a long video: sizes are printed before, files go on where a kill left them."""

import argparse
import time
from pathlib import Path

from experiments.caches.files import CacheError, require_ffmpeg, require_writable
from experiments.extraction import causal
from experiments.extraction.devices import choose_device, choose_dtype
from experiments.extraction.edits import edits_of
from experiments.extraction.long_rollout import BlockCapture, LatentFile, LongVideo, make_long_video, path_of
from experiments.extraction.memory import amount
from experiments.extraction.provenance import fingerprint
from experiments.extraction.video import load_vae
from experiments.running.locks import claimed, remove_leftovers, require_space
from experiments.running.progress import check_outputs, memory, observed
from wan import checkpoint
from wan.config import RunConfig
from wan.errors import ConfigError


def make_long(args: argparse.Namespace, config: RunConfig) -> None:
    """Make a long video, or go on with one. Raises StoppedError after Ctrl-C."""
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
        session = causal.prepare(config, [], observer=watch, replays=True, decodes="this script")
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
        with causal.edited(session, config, edits_of(config.interventions, "config")):
            make_long_video(session, config, place, latents, capture, vae, watch)
        made, seconds = config.num_frames - before, time.monotonic() - start
        frames = f"{made} of {config.num_frames} frames made now"
        watch.print(f"{place.path}: {frames}, {seconds:.1f} s, {memory()}")

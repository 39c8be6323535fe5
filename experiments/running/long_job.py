"""From flags to a long video: sizes said before, files that go on where a kill left them."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from experiments.caches.files import CacheError, require_writable
from experiments.extraction import causal
from experiments.extraction.block_capture import BlockCapture, path_of
from experiments.extraction.devices import choose_device, choose_dtype
from experiments.extraction.edits import edited, edits_of
from experiments.extraction.long_rollout import LatentFile, LongVideo, make_long_video
from experiments.extraction.memory import amount
from experiments.extraction.provenance import vae_files
from experiments.extraction.video import check_video
from experiments.running.jobs import deterministic, name_inputs
from experiments.running.locks import claimed, remove_leftovers, require_space
from experiments.running.progress import Progress, memory, stopping_when_asked
from experiments.running.sweep_state import NOT_SETTINGS
from experiments.running.work_items import item_name
from wan import checkpoint
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.vae import VAE


def make_long(args: argparse.Namespace, config: RunConfig) -> None:
    """Make a long video, or go on with one. Raises StoppedError after Ctrl-C."""
    place, capture = LongVideo(Path(args.output_path)), BlockCapture.read(args.capture, config.step)
    if place.path.suffix != ".mp4":
        raise ConfigError(f"--output_path {place.path} does not end in .mp4")
    if config.sampler == "rolling_forcing" and capture.kind != "none":
        raise ConfigError(
            "--capture knows no rolling_forcing, which denoises several blocks at a time; "
            "run_extraction_all.py captures it"
        )
    require_writable(place.latents)
    name_inputs(args, config)
    attention = [path_of(place.attention, block) for block in capture.blocks(len(config.block_sizes))]
    args.files.writes("the latents", place.latents)
    args.files.writes("captured attention", *attention)
    with (
        Progress(args.quiet, args.log_file) as watch,
        claimed({str(place.path): 0}),
        stopping_when_asked(watch),
        deterministic(args.deterministic),
    ):
        check_video(config)
        sizes = _sizes(config, place, capture)
        session = causal.prepare(config, [], observer=watch, replays=True)
        watch.print(
            "writes " + ", ".join(f"{amount(size)} to {path}" for path, size in sizes.items() if size)
        )
        for path in attention:
            remove_leftovers(path)
        if args.overwrite:
            _remove(place)
        if place.path.exists() and not place.latents.exists():
            raise CacheError(f"{place.path} is there without its latents; --overwrite makes it again")
        latents = LatentFile(
            place.latents,
            (config.num_frames, session.model_config.in_dim, config.height, config.width),
            session.dtype,
            _made_of(config, session),
        )
        start, before = time.monotonic(), latents.frames
        vae = VAE.from_pretrained(config.ckpt_dir, device=session.device)
        with edited(session, config, edits_of(config.interventions, "config")):
            make_long_video(session, config, place, latents, capture, vae, watch)
        made, seconds = config.num_frames - before, time.monotonic() - start
        watch.print(
            f"{place.path}: {made} of {config.num_frames} frames made now, {seconds:.1f} s, {memory()}"
        )


def _sizes(config: RunConfig, place: LongVideo, capture: BlockCapture) -> dict[str, int]:
    """Bytes of latents and captured attention by their paths. CacheError where the disk is too small."""
    model = checkpoint.read_model_config(config.ckpt_dir)
    dtype = choose_dtype(config.dtype, choose_device(config.device, config.offload))
    values = config.num_frames * model.in_dim * config.height * config.width
    sizes = {str(place.latents): values * dtype.itemsize, str(place.attention): capture.bytes(config, model)}
    require_space(place.path.parent, sizes)
    return sizes


def _made_of(config: RunConfig, session: causal.Session) -> str:
    """The name of a run, which is that of its files: another seed, device or file has another."""
    said = {name: value for name, value in asdict(config).items() if name not in NOT_SETTINGS}
    run = [config.prompt, config.seed, session.sha256.result(), str(session.dtype), session.device.type]
    files = [*session.common["files"], *vae_files(config)]
    return item_name(json.dumps(said, sort_keys=True, default=str), *run, files)


def _remove(place: LongVideo) -> None:
    """Take away what an earlier run wrote, and nothing else."""
    for path in (place.path, place.latents, *place.attention.glob("block_*.pt")):
        path.unlink(missing_ok=True)

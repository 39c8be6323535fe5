"""Make an atlas for each prompt, seed and checkpoint of a sweep, here or by workers (extraction/sweep.py).

A cache carries the fingerprint of everything it depends on: the same command makes missing ones, and never
uses or replaces caches of other settings.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments import progress, provenance
from experiments.caches import files, mp4, store
from experiments.extraction import sweep
from experiments.extraction.video import check_video, require_free
from experiments.memory import estimate_bytes
from experiments.prompts import encode_prompts
from experiments.provenance import fingerprint
from experiments.running import cli
from experiments.running.run import PlannedCache, cache_builders, make_caches, save, video_of
from experiments.session import Session, load
from wan.capture import CaptureRequest
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError

PROMPTS_AT_ONCE = 64  # that one worker encodes


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: where its cache goes, its settings, and the fingerprint that the cache has."""

    path: str
    config: RunConfig
    fingerprint: str
    model: str  # a fingerprint of all but prompt and seed

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class AtlasSweep:
    """Makes an atlas for each run (the Work of extraction/sweep.py)."""

    args: argparse.Namespace
    requests: Sequence[CaptureRequest]
    cache: PlannedCache
    fields: Sequence[str]  # optional ones that the caches must have
    prompts: Sequence[str] = ()  # that this process will need, in their order

    def is_done(self, run: PlannedRun) -> bool:
        """Return whether the cache, and the wanted video, are there. CacheError for other settings."""
        if self.args.overwrite:
            return False
        cache = files.finished(run.path, run.fingerprint)
        if cache is None:
            path = Path(run.path)
            if path.exists() and store.cache_contents(path) is None and not store.is_damaged_cache(path):
                raise files.CacheError(
                    f"{run.path} is there, and is no whole cache; move it away, or {files.REMEDY}"
                )
            return False
        for name in self.fields:
            if name not in cache:
                raise files.CacheError(
                    f"{run.path} belongs to a sweep that did not capture {name}; {files.REMEDY}"
                )
        tag = provenance.video_tag(run.fingerprint, run.config, self.args.vae_dtype)
        return all(mp4.mp4_tag(video) == tag for video in cli.videos_of(self.args, [run.path]))

    def make(self, run: PlannedRun, watch: progress.Progress) -> None:
        """Make one cache, after its video if one is wanted."""
        videos = cli.videos_of(self.args, [run.path])
        for path in (run.path, *videos):  # of killed processes
            files.remove_leftovers(Path(path))
        for video in videos:
            if Path(video).exists() and not mp4.shows_nothing(video):
                require_free(video, run.config, bool(self.args.overwrite))
        # What is left at these paths is missing, partial or damaged
        args = argparse.Namespace(**{**vars(self.args), "overwrite": True})
        with ExitStack() as stack:
            if self.args.deterministic:
                stack.enter_context(progress.deterministic())
            session = sweep.cached("model", run.model, lambda: self.load(run.config, watch))
            if videos:
                stack.enter_context(video_of(self.args, run.config, videos[0], watch))
            result = session.generate(config=run.config, requests=self.requests, observer=watch)
            save(args, result, {run.path: self.cache}, watch)

    def load(self, config: RunConfig, watch: progress.Progress) -> Session:
        decodes = self.args.save_video is not None
        return load(config).prepare(self.requests, self.prompts, watch, replays=True, decodes=decodes)


def encode(config: RunConfig, prompts: Sequence[str]) -> None:
    """Store the states of prompts in embeds_dir, where all workers find them."""
    device = provenance.choose_device(config.device)
    dtype = provenance.choose_dtype(config.dtype, device)
    encode_prompts(config, prompts, read_model_config(config.ckpt_dir), dtype, device)


def make_atlases(args: argparse.Namespace, config: RunConfig) -> None:
    """Make the atlas of one run, or every missing one of a sweep, with the quantities of the flags.

    Raises CacheError where the folder holds caches of other settings, RunError at the end where runs failed,
    and StoppedError after Ctrl-C.
    """
    requests = cache_builders.atlas_requests(
        config, args.mass, args.key_curve, args.cross, args.rope_bands, args.query_key_means
    )
    cache = PlannedCache("atlas", cache_builders.atlas_cache)
    cli.require_effect(args, ["step"], "on an atlas, which has every pass")
    if not (args.prompts or args.seeds or args.checkpoints or args.output_dir):
        cli.require_effect(args, cli.WORKERS, "on one run; a sweep takes --prompts, --seeds or --checkpoints")
        make_caches(args, config, requests, {args.output_path: cache})
        return
    if config.gpus > 1:
        raise ConfigError(f"--gpus {config.gpus} makes one rollout; a sweep takes --workers N for N GPUs")
    quantities = {
        "frame_mass": args.mass,
        "key_curve": args.key_curve,
        "cross_mass": args.cross,
        "frame_logits_by_band": args.rope_bands,
        "query_means": args.query_key_means,
    }

    # 1. Which runs, and where their files go
    planned = cli.plan(args, config)
    folder = Path(args.output_dir)
    videos = [video for path in planned for video in cli.videos_of(args, [path])]
    models = {run.checkpoint_path: provenance.of_any_prompt(run) for run in planned.values()}
    for model in models.values():
        provenance.check_outputs(args, model, [*planned, *videos])
    with (
        files.claimed({str(folder / "atlases"): 0}),  # one command works in a folder at a time
        progress.observed(args) as watch,
        sweep.dask_client(args, config.device) as client,
    ):
        # 2. Whether there is room and a decoder for the missing files
        missing = [path for path in planned if not Path(path).exists()]
        files.require_space(folder, dict.fromkeys(missing, estimate_bytes(config, requests)))
        if not all(Path(video).exists() for video in videos):
            check_video(config)

        # 3. Fingerprints, by the weights and the device of whoever makes the caches
        runs = []
        identities = {
            path: sweep.call_on_worker(client, provenance.identity, model) for path, model in models.items()
        }
        for path, run in planned.items():
            settings = identities[run.checkpoint_path]
            key = fingerprint(settings, requests=str(requests))  # a model in memory serves these requests
            runs.append(PlannedRun(path, run, fingerprint(settings, prompt=run.prompt, seed=run.seed), key))

        # 4. Make them. umT5 is large to load: workers encode many prompts at a time, before the first run
        prompts = list(dict.fromkeys(run.prompt for run in planned.values()))
        fields = [name for name, captured in quantities.items() if captured]
        if client is None:
            work = AtlasSweep(args, requests, cache, fields, prompts)
        else:
            quiet = argparse.Namespace(**{**vars(args), "quiet": True})  # nobody watches a worker
            work = AtlasSweep(quiet, requests, cache, fields)
            if missing and config.embeds_dir and not config.prompt_embeds:
                parts = range(0, len(prompts), PROMPTS_AT_ONCE)
                batches = [prompts[start : start + PROMPTS_AT_ONCE] for start in parts]
                client.gather(client.map(partial(encode, config), batches, pure=False))
        sweep.work_through(work, runs, watch, client)

"""Compare cache policies on long videos, a work item each: items/NAME.json has its measures per second.

Videos of one policy are rolled out together. Each has noise of its own generator, so that another batch
changes rounding alone.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import progress, provenance
from experiments.analysis import drift
from experiments.analysis.panels import table as table_of
from experiments.analysis.results import CONTROLS
from experiments.caches import files, mp4, outputs
from experiments.caches.blocks import BlockCapture
from experiments.configs import policy_settings
from experiments.extraction import sweep
from experiments.extraction.video import decoded_blocks, to_pixels
from experiments.memory import kv_cache
from experiments.miniature import moving_shapes
from experiments.miniature.judges import EvalPool, workers_of
from experiments.miniature.tracking import judge_seconds
from experiments.progress import deterministic
from experiments.provenance import identity
from experiments.running import cli
from experiments.runs import capturing
from experiments.session import Session, load, pipeline_of
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.capture import CapturedCall
from wan.checkpoint import describe_files
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.pipeline import RolloutInputs
from wan.policies import policy_of, read_policy
from wan.vae import VAE
from wan.wings.seeded_noise import seeded_noise

ANSWERS = ("visible", "color", "shape", "background", "right")  # of the tracker, for each second
DIGITS = 5  # that are kept of a number
PROMPT_BYTES = 180  # of a prompt that names a file
TABLE = "comparison.json"
GPU_BATCH, CPU_BATCH = 64, 8
NO_WINDOW: files.Record = {"local_attn_size": -1, "sink_size": 0}  # the policy has its own

# --- The list of policies that --policies names: published settings, and the plain window they came from
FULL = "full"
FAMILY = (
    FULL,
    "window,window=9",
    "window,window=9,sink=3",
    "window,window=12,sink=3",
    "relative,window=6,sink=1",
    "relative,window=12,sink=3",
    "deep_sink,window=21,sink=10",
    "participative,window=21,sink=10,budget=16,recent=4",
    "ema_sink,window=9,sink=3",
    "two_memories,window=12,sink=3",
    "rolling_sink,window=21",
    "memory_bank,window=12,sink=3,bank=3,interval=3",
)


def read_policies(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return label -> settings of every policy named: NAME,FIELD=VALUE,..., a file, or family.

    Raises ConfigError for what is no policy.
    """
    policies: dict[str, files.Record] = {}
    for word in words:
        for label in FAMILY if word == "family" else (word,):
            policies[label] = policy_settings(label)
            read_policy(policies[label])
    return policies


def held_out(count: int) -> dict[str, moving_shapes.Scene]:
    """Return caption -> held-out scene: one shape, two that cross, one behind a wall, in turn."""
    # Twice as many of each kind: some captions repeat.
    by_kind = [moving_shapes.held_out_scenes(kinds, 2 * count) for kinds in moving_shapes.SETS.values()]
    scenes: dict[str, moving_shapes.Scene] = {}
    for row in zip(*by_kind, strict=True):
        for scene in row:
            scenes.setdefault(scene.caption, scene)
    return dict(list(scenes.items())[:count])


def measure(
    pixels: np.ndarray,
    scene: moving_shapes.Scene | None,
    about: Mapping[str, Any],
    folder: Path,
    mp4s: Mapping[Path, int],
) -> None:
    """Measure a video uint8 [T, H, W, 3] and write its numbers, after the mp4s that are asked for.

    "seconds" has lists by measure; "whole" numbers; "tracker", of a video with a scene, 0 or 1 a second. JSON
    has no NaN: None stands for it.
    """

    def short(value: float) -> float | None:
        if not np.isfinite(value):
            return None
        return float(f"{value:.{DIGITS}g}")

    measures: files.Record = {
        "seconds": {name: [short(x) for x in values] for name, values in drift.per_second(pixels).items()},
        "whole": {name: short(value) for name, value in drift.summaries(pixels).items()},
    }
    if scene is not None:
        answers = judge_seconds(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, scene)
        measures["tracker"] = {name: getattr(answers, name).int().tolist() for name in ANSWERS}
    for file, shortest in mp4s.items():
        mp4.write_mp4(pixels, file, tag=about["fingerprint"], shortest=shortest, overwrite=True)
    sweep.Results(folder).write(about["fingerprint"], {**about, **measures})


# --- What is compared
@dataclass(frozen=True)
class Item:
    """One video: a policy or a control by its label, with its settings, and the run's prompt and seed."""

    label: str
    settings: files.Record
    config: RunConfig
    name: str
    mp4s: Mapping[Path, int]  # where the video is written -> the least pixels of its shorter side there


@dataclass(frozen=True)
class Group:
    """Videos of one policy that are rolled out together."""

    items: Sequence[Item]

    def __str__(self) -> str:
        return f"{self.items[0].label}: {len(self.items)} videos"


@dataclass(frozen=True)
class PolicyRuns:
    """Policies, runs and the folder of the items; makes them (the Work of extraction/sweep.py)."""

    folder: Path
    policies: Mapping[str, files.Record]  # label -> settings
    runs: Sequence[RunConfig]  # of all prompts and seeds
    scenes: Mapping[
        str, moving_shapes.Scene
    ]  # prompt -> scene, for the tracker and the controls; may be empty
    identity: files.Record = field(default_factory=dict)  # of all items, but for policy, prompt, seed
    batch: int = 1
    vbench: Path | None = None  # where videos are written as VBench-Long reads them
    videos: int = 0  # prompts whose first seed is written as an mp4
    controls: Sequence[str] = tuple(CONTROLS)
    capture: BlockCapture = field(default_factory=BlockCapture)  # of attention, in attention/NAME
    session: Session | None = None
    judges: int | None = None  # processes that measure videos
    vae_dtype: str = "float32"
    deterministic: bool = False

    @property
    def store(self) -> sweep.Results:
        return sweep.Results(self.folder / "items")

    @cached_property
    def items(self) -> list[Item]:
        """All videos, grouped by policy."""
        settings_of = dict(self.policies)
        if self.scenes:
            settings_of |= {label: {"control": label} for label in self.controls}
        # VBench reads the prompt from the file's name; disks take names of 255 bytes.
        names = cli.unique_slugs(
            {run.prompt: run.prompt.replace("/", " ") for run in self.runs}, PROMPT_BYTES
        )
        shown = list(names)[: self.videos]
        items = []
        for label, settings in settings_of.items():
            # What an item's name depends on: settings, and the content of the policy's CSV of head classes.
            policy: files.Record = {"policy": dict(settings), "classes": None}
            if settings.get("file"):
                policy["classes"] = describe_files([str(settings["file"])])
            file, seeds = label.replace("/", "_"), Counter[str]()
            for run in self.runs:
                scene, index, mp4s = self.scenes.get(run.prompt), seeds[run.prompt], {}
                seeds[run.prompt] += 1
                if run.prompt in shown and index == 0:
                    mp4s[self.folder / "videos" / f"{file}_{shown.index(run.prompt)}.mp4"] = 256
                if self.vbench is not None:
                    mp4s[self.vbench / file / f"{names[run.prompt]}-{index}.mp4"] = 1
                about = {"prompt": run.prompt, "seed": run.seed, "scene": scene and asdict(scene)}
                name = provenance.fingerprint(self.identity, **policy, **about)
                items.append(Item(label, settings, run, name, mp4s))
        return items

    def groups(self) -> list[Group]:
        """Return items of one policy that are made together."""
        groups = []
        for _, of_label in groupby(self.items, key=lambda item: item.label):
            items = list(of_label)
            for start in range(0, len(items), self.batch):
                groups.append(Group(items[start : start + self.batch]))
        return groups

    def is_done(self, group: Group) -> bool:
        return all(map(self.has, group.items))

    def has(self, item: Item) -> bool:
        """Return whether an item's numbers, and the videos and the attention asked for, are there."""
        if self.store.read(item.name) is None or any(mp4.mp4_tag(path) != item.name for path in item.mp4s):
            return False
        if self.capture.kind == "none" or "control" in item.settings:
            return True
        return not self.capture.missing(self.attention(item), len(item.config.block_sizes), item.name)

    def attention(self, item: Item) -> Path:
        return self.folder / "attention" / item.name

    def make(self, group: Group, watch: progress.Progress) -> None:
        """Roll out and decode items of one policy, and measure those not done yet.

        All are rolled out where one is missing: bits may depend on the size of a batch, and not on a kill.
        """
        watch.log("rollout", videos=str(group))
        assert self.session is not None
        session = self.session.here(sweep.cached)
        on_gpu = session.device.type == "cuda"
        judges = self.judges
        if judges is None and not on_gpu:
            judges = 0

        def load_vae() -> VAE:
            # the decoder's convolutions are always of one size
            torch.backends.cudnn.benchmark = on_gpu and not self.deterministic
            dtype = provenance.choose_dtype(self.vae_dtype, session.device)
            return VAE.from_pretrained(session.config.ckpt_dir, dtype, session.device)

        # 1. Processes that judge have one core each; threads of NumPy would fight for it.
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that are about to start
        judges = workers_of(judges)
        pool = sweep.cached("judges", str(judges), lambda: EvalPool(judges, "spawn"))
        # 2. Make the videos.
        with ExitStack() as stack:
            if self.deterministic:
                stack.enter_context(deterministic())
            vae = sweep.cached("vae", provenance.fingerprint(self.identity), load_vae)
            control = group.items[0].settings.get("control")
            if control is None:
                videos, cost = self._roll_out(session, vae, group.items)
            else:
                videos, cost = self._control(session, vae, control, group.items), {}
        # 3. Measure those of a group at the same time.
        measured = []
        for item, video in zip(group.items, videos, strict=True):
            if self.has(item):
                continue
            about = {
                "label": item.label,
                "fingerprint": item.name,
                "prompt": item.config.prompt,
                "seed": item.config.seed,
                "cost": cost,
            }
            scene = self.scenes.get(item.config.prompt)
            measured.append(pool.submit(measure, video, scene, about, self.store.folder, item.mp4s))
        for future in measured:
            future.result()

    def _roll_out(
        self, session: Session, vae: VAE, items: Sequence[Item], num_frames: int | None = None
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Make videos uint8 [T, H, W, 3] of a policy; return them and their cost.

        num_frames: latent frames of a video that is cut short, whose attention is not kept.
        """
        # 1. A pipeline of the policy. Each video has the noise of its own generator, whatever the batch.
        config = replace(items[0].config, cache_policy=dict(items[0].settings), **NO_WINDOW)
        pipeline = pipeline_of(session.pipeline.model, config)
        configs = [item.config for item in items]
        noise = seeded_noise(configs, session.model_config, session.dtype, session.device)
        inputs = RolloutInputs(
            noise=noise,
            prompt_embeds=torch.cat([session.texts[config.prompt][0] for config in configs]),
            num_frames=num_frames,
        )
        capture = self.capture
        if num_frames is not None:
            capture = BlockCapture()
        requests = capture.requests(capture.blocks(len(config.block_sizes)))
        # 2. Roll out and decode; time the blocks alone, and save the attention of each.
        seconds: list[float] = []
        on_gpu = session.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(session.device)

        def timed_blocks(calls: list[CapturedCall]) -> Iterator[Tensor]:
            start = time.monotonic()
            for number, (_, latents) in enumerate(pipeline.blocks(inputs)):
                if on_gpu:
                    torch.cuda.synchronize(session.device)
                seconds.append(time.monotonic() - start)
                if calls:
                    for row, item in enumerate(items):
                        capture.save(self.attention(item), number, calls, item.name, row)
                    calls.clear()
                yield latents
                start = time.monotonic()  # without the decoder

        one_video = torch.empty(1, *noise.shape[1:])
        with provenance.threads_for(one_video, session.model_config), capturing(requests) as calls:
            pixels = torch.cat(list(decoded_blocks(vae, timed_blocks(calls))), 1).numpy()
        # 3. The cost: medians of a tenth of the blocks. The first block compiles and warms up.
        few = max(1, len(seconds) // 10)
        early = seconds[1 : 1 + few] or seconds
        cost: files.Record = {
            "seconds": round(sum(seconds), 6),
            "last_block_seconds": round(float(np.median(seconds[-few:])), 6),
            "first_block_seconds": round(float(np.median(early)), 6),
            "batch": len(items),
            # What the cache holds for one video, not what the allocator does.
            "cache_bytes": kv_cache(config, session.model_config, session.dtype),
        }
        if policy_of(config).by_heads:  # how many heads are of which class shows in the rollout alone
            cost["cache_bytes"] = pipeline.cache_bytes // len(items)
        if on_gpu:
            cost["peak_bytes"] = torch.cuda.max_memory_allocated(session.device)
        return list(pixels), cost

    def _control(self, session: Session, vae: VAE, control: str, items: Sequence[Item]) -> list[np.ndarray]:
        """Return the first frame for ever, or the scenes as rendered, or those after the VAE."""
        first = items[0].config
        length = 1 + VIDEO_FRAMES_PER_LATENT * (first.num_frames - 1)
        if control == "frozen":
            with_past = [replace(item, settings={"name": FULL}) for item in items]
            videos, _ = self._roll_out(session, vae, with_past, first.num_frame_per_block)
            return [np.repeat(video[:1], length, 0) for video in videos]
        by_prompt: dict[str, np.ndarray] = {}
        for prompt in dict.fromkeys(item.config.prompt for item in items):
            # -1..1 -> 0..1, with a batch of one: [1, T, 3, H, W]
            video = (
                moving_shapes.render(self.scenes[prompt], length, first.pixels_per_latent * first.height)[
                    None
                ]
                / 2
                + 0.5
            )
            if control == "vae":
                latents = vae.encode(video.to(session.device))
                by_prompt[prompt] = torch.cat(list(decoded_blocks(vae, latents.split(3, 1))), 1)[0].numpy()
            else:
                by_prompt[prompt] = to_pixels(video)[0].numpy()
        return [by_prompt[item.config.prompt] for item in items]


# --- From flags to a table
def compare(args: argparse.Namespace, config: RunConfig) -> None:
    """Make missing videos, and the table when all are there. Raises StoppedError after Ctrl-C."""
    if args.videos or args.vbench_dir:
        mp4.require_ffmpeg("write none by --videos 0, without --vbench_dir")
    runs, scenes = list(cli.plan(args, config).values()), dict[str, moving_shapes.Scene]()
    if not args.prompts and not args.prompt:
        scenes = held_out(args.held_out or 16)
        runs = [replace(run, prompt=prompt) for prompt in scenes for run in runs]
    planned = policy_runs(args, runs, scenes)
    path = planned.folder / TABLE
    with (
        files.claimed({str(path): 0}),
        progress.observed(args, "policy") as watch,
        sweep.dask_client(args, runs[0].device) as client,
    ):
        outputs.require_replaceable(path, outputs.Contents("comparison"), comparison_contents)
        start = time.monotonic()
        comparison = sweep.call_on_worker(client, prepared, planned, args.batch, *([] if client else [watch]))
        sweep.work_through(comparison, comparison.groups(), watch, client)
        seconds = round(time.monotonic() - start, 1)
        table = {"measures": drift.MEASURES | drift.SUMMARIES} | merged(comparison)
        assert comparison.session is not None  # prepared() has loaded it
        table["made"] = sweep.call_on_worker(client, provenance.environment, comparison.session.device)
        table["made_seconds"] = seconds
        files.save_report(table, path)
        print(table_of(drift.policy_rows(table["videos"])))
        watch.print(f"{path}: {len(table['videos'])} videos, {seconds} s, {progress.memory()}")


def policy_runs(
    args: argparse.Namespace, runs: Sequence[RunConfig], scenes: dict[str, moving_shapes.Scene]
) -> PolicyRuns:
    """Return what the flags ask for, before a model is there.

    Raises ConfigError or CacheError for what cannot be compared or written.
    """
    first, policies = runs[0], read_policies(args.policies)
    folders = [Path(folder) for folder in (args.output_dir, args.vbench_dir) if folder]
    if first.prompt_schedule or first.interventions:
        raise ConfigError("policies are compared on one prompt each, without interventions")
    for settings in policies.values():
        read_policy(settings).check(first.block_sizes)
        provenance.check_outputs(
            args, replace(first, cache_policy=dict(settings), **NO_WINDOW), [folders[0] / TABLE]
        )
    planned = PolicyRuns(
        folders[0],
        policies,
        runs,
        scenes,
        vbench=folders[1] if args.vbench_dir else None,
        videos=args.videos,
        controls=args.controls,
        capture=BlockCapture.read(args.capture, first.step),
        judges=args.judges,
        vae_dtype=args.vae_dtype,
        deterministic=args.deterministic,
    )
    # No two files of one name, and none that the disk refuses: the longest of each folder is tried now.
    videos = [path for item in planned.items for path in item.mp4s]
    for path, count in Counter(videos).items():
        if count > 1:
            raise ConfigError(f"two of --policies would write {path}; rename a file of one")
    longest = {path.parent: path for path in sorted(videos, key=lambda path: len(os.fsencode(path)))}
    for path in (*(folder / TABLE for folder in folders), *longest.values()):
        files.require_writable(path)
    for path in videos:
        if Path(path).exists():
            outputs.require_replaceable(path, outputs.Contents("video"), mp4.video_contents)
    return planned


def comparison_contents(path: Path) -> outputs.Contents | None:
    """Return what a table holds that compare() wrote; None for any other file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return outputs.Contents("comparison") if {"measures", "videos"} <= {*table} else None
    except (OSError, TypeError, ValueError):
        return None


def prepared(planned: PolicyRuns, batch: int | None, watch: progress.Progress | None = None) -> PolicyRuns:
    """Return what was planned, with a model that is loaded here; it leaves a worker without that."""
    first, prompts = planned.runs[0], list(dict.fromkeys(run.prompt for run in planned.runs))
    prepare = partial(load(first).prepare, (), prompts, watch, decodes=True)
    return with_session(
        sweep.cached("model", provenance.fingerprint(identity(first)), prepare), planned, batch
    )


def with_session(session: Session, planned: PolicyRuns, batch: int | None) -> PolicyRuns:
    """Return the plan with the weights and files that a session has read."""
    plain = provenance.of_any_prompt(planned.runs[0])
    if batch is None:
        batch = GPU_BATCH if session.device.type == "cuda" else CPU_BATCH
    made_of = session.identity(plain, vae=provenance.vae_files(plain), vae_dtype=planned.vae_dtype)
    return replace(planned, session=session, identity=made_of, batch=batch)


def merged(comparison: PolicyRuns) -> dict[str, Any]:
    """Return all items of a comparison as one table: policies, prompts, seeds, and a row for each video."""
    results = [comparison.store.read(item.name) for item in comparison.items]
    rows = [row for row in results if row is not None and "seconds" in row]
    costs: files.Record = {}
    for row in rows:
        cost = row.pop("cost")
        if cost:  # a policy's cost is that of its first batch
            costs.setdefault(row["label"], cost)
    prompts = list(dict.fromkeys(run.prompt for run in comparison.runs))
    scenes = [comparison.scenes[prompt] for prompt in prompts if prompt in comparison.scenes]
    return {
        "policies": {label: dict(settings) for label, settings in comparison.policies.items()},
        "prompts": prompts,
        "kinds": [scene.kind for scene in scenes],
        "unnamed": [scene.unnamed_color for scene in scenes],
        "model": comparison.runs[0].model,
        "num_frames": comparison.runs[0].num_frames,
        "weights_sha256": comparison.identity.get("weights_sha256", ""),
        "missing": len(results) - len(rows),
        "costs": costs,
        "videos": rows,
    }

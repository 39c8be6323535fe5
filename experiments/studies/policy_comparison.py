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
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.analysis import drift
from experiments.analysis.drift import MEASURES, SUMMARIES
from experiments.analysis.long_rollouts import CONTROLS
from experiments.caches.files import StoppedError, mp4_tag, replacing, require_writable
from experiments.extraction import causal
from experiments.extraction.causal import LoadedModel, pipeline_of, seeded_noise
from experiments.extraction.devices import threads_for
from experiments.extraction.long_rollout import BlockCapture
from experiments.extraction.memory import kv_cache
from experiments.extraction.provenance import environment, fingerprint, vae_files
from experiments.extraction.rollout import capturing
from experiments.extraction.video import decoded_blocks, to_pixels, write_mp4
from experiments.miniature.moving_shapes import Scene, render
from experiments.miniature.tracking import SETS, held_out_scenes, judge_seconds
from experiments.running.cli import policy_settings, unique_slugs
from experiments.running.progress import check_outputs, memory, observed
from experiments.running.ranks import exit_with_parent, on_own_device, this_rank, workers_of
from experiments.running.work_items import WorkItems
from experiments.studies.policy_findings import FULL, NAMED
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.checkpoint import describe_files
from wan.config import RunConfig
from wan.errors import ConfigError, short_repr
from wan.policies import read_policy
from wan.vae import VAE

ANSWERS = ("visible", "color", "shape", "background", "right")  # of the tracker, for each second
DIGITS = 5  # that are kept of a number
PROMPT_BYTES = 180  # of a prompt that names a file
TABLE = "comparison.json"
GPU_BATCH, CPU_BATCH = 64, 8


def read_policies(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return label -> settings of every policy named: NAME,FIELD=VALUE,..., a file, or one of NAMED.

    Raises ConfigError for what is no policy, and for two of one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for word in (each for name in words for each in NAMED.get(name, (name,))):
        name, *pairs = word.split(",")
        settings = {str(key): value for key, value in policy_settings(name).items()}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not (key and equals and text):
                raise ConfigError(f"--policies: {short_repr(pair)} in {short_repr(word)} is not FIELD=VALUE")
            try:
                settings[key] = json.loads(text)  # true, false, a number
            except ValueError:
                settings[key] = text
        read_policy(settings)
        if found.setdefault(word, settings) != settings:
            raise ConfigError(f"--policies names {short_repr(word)} twice")
    return found


def held_out(count: int) -> dict[str, Scene]:
    """Return caption -> held-out scene: one shape, two that cross, one behind a wall, in turn."""
    by_kind = [held_out_scenes(kinds, 2 * count) for kinds in SETS.values()]
    in_turn = [scene for row in zip(*by_kind, strict=True) for scene in row]
    scenes = {scene.caption: scene for scene in reversed(in_turn)}  # the first of each caption
    captions = list(dict.fromkeys(scene.caption for scene in in_turn))[:count]
    return {caption: scenes[caption] for caption in captions}


# -- what is measured of one video -------------------------------------------------------------------------


def measure(pixels: np.ndarray, scene: Scene | None) -> dict[str, Any]:
    """Measure a video uint8 [T, H, W, 3] -> "seconds", lists by measure; "whole"; "tracker", 0 or 1 a second.

    The tracker needs the scene that the prompt describes. JSON has no NaN: None stands for it.
    """
    torch.set_num_threads(1)  # processes beside each other measure one video each

    def short(value: float) -> float | None:
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None

    found: dict[str, Any] = {
        "seconds": {name: [short(x) for x in values] for name, values in drift.per_second(pixels).items()},
        "whole": {name: short(value) for name, value in drift.summaries(pixels).items()},
    }
    if scene is not None:
        answers = judge_seconds(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, scene)
        found["tracker"] = {name: getattr(answers, name).int().tolist() for name in ANSWERS}
    return found


def write_item(
    pixels: np.ndarray, scene: Scene | None, about: Mapping[str, Any], folder: Path, mp4s: Mapping[Path, int]
) -> None:
    """Measure one video and write its numbers, after the mp4s that are asked for."""
    for file, shortest in mp4s.items():
        write_mp4(torch.from_numpy(pixels), file, shortest, about["name"])
    WorkItems(folder).write(about["name"], {**about, **measure(pixels, scene)})


# -- what is compared --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One video: a policy or a control by its label, with its settings, and the run's prompt and seed."""

    label: str
    settings: Mapping[str, Any]
    config: RunConfig
    name: str


@dataclass(frozen=True)
class Comparison:
    """Policies, runs and the folder of the items."""

    folder: Path
    policies: Mapping[str, Mapping[str, Any]]  # label -> settings
    runs: Sequence[RunConfig]  # of all prompts and seeds
    scenes: Mapping[str, Scene]  # prompt -> scene, for the tracker and the controls; may be empty
    identity: Mapping[str, Any] = field(default_factory=dict)  # of all items, but for policy, prompt, seed
    batch: int = 1
    vbench: Path | None = None  # where videos are written as VBench-Long reads them
    videos: int = 0  # prompts whose first seed is written as an mp4
    controls: Sequence[str] = CONTROLS
    capture: BlockCapture = field(default_factory=BlockCapture)  # of attention, in attention/NAME

    @property
    def store(self) -> WorkItems:
        return WorkItems(self.folder / "items")

    @cached_property
    def items(self) -> list[Item]:
        """All videos, those of one policy together."""
        controls = {label: {"control": label} for label in self.controls} if self.scenes else {}
        paths = {str(one["file"]) for one in self.policies.values() if one.get("file")}
        classes = {path: describe_files([path]) for path in paths}  # CSVs of head classes
        found: list[Item] = []
        for label, settings in (*self.policies.items(), *controls.items()):
            own = {"policy": dict(settings), "classes": classes.get(str(settings.get("file")))}
            for run in self.runs:
                scene = self.scenes.get(run.prompt)
                own |= {"prompt": run.prompt, "seed": run.seed, "scene": scene and asdict(scene)}
                found.append(Item(label, settings, run, fingerprint(self.identity, **own)))
        return found

    def groups(self) -> dict[str, list[Item]]:
        """Return items of one policy that are made together, by the name of the group."""
        found: dict[str, list[Item]] = {}
        for _, of_label in groupby(self.items, key=lambda item: item.label):
            items = list(of_label)
            for start in range(0, len(items), self.batch):
                group = items[start : start + self.batch]
                found[fingerprint({"items": [item.name for item in group]})] = group
        return found

    def is_done(self, item: Item) -> bool:
        """Return whether an item's numbers, and the videos and the attention asked for, are there."""
        found = self.store.read(item.name)
        if found is None or any(mp4_tag(path) != item.name for path in self.mp4s(item)):
            return False
        if self.capture.kind == "none" or "control" in item.settings:
            return True
        return not self.capture.missing(self.attention(item), len(item.config.block_sizes), item.name)

    def attention(self, item: Item) -> Path:
        return self.folder / "attention" / item.name

    def mp4s(self, item: Item) -> dict[Path, int]:
        """Return where an item's video is written -> the least pixels of its shorter side there."""
        names = self._names_of_prompts
        number = list(names).index(item.config.prompt)
        index = [run.seed for run in self.runs if run.prompt == item.config.prompt].index(item.config.seed)
        label, found = item.label.replace("/", "_"), {}
        if number < self.videos and index == 0:
            found[self.folder / "videos" / f"{label}_{number}.mp4"] = 256
        if self.vbench is not None:
            found[self.vbench / label / f"{names[item.config.prompt]}-{index}.mp4"] = 1
        return found

    @cached_property
    def _names_of_prompts(self) -> dict[str, str]:
        """Prompt -> its name in files, where VBench reads it; disks take names of 255 bytes."""
        return unique_slugs({run.prompt: run.prompt.replace("/", " ") for run in self.runs}, PROMPT_BYTES)


# -- making videos ------------------------------------------------------------------------------------------


@dataclass
class Maker:
    """Makes the videos of a comparison by a session's model and the VAE; a pool measures them."""

    comparison: Comparison
    session: LoadedModel
    vae: VAE
    pool: Executor | None
    waiting: list[Future] = field(default_factory=list)

    def make(self, items: Sequence[Item]) -> None:
        """Roll out and decode items of one policy, and have those not done yet measured meanwhile.

        All are rolled out where one is missing: bits may depend on the size of a batch, and not on a kill.
        """
        comparison, control = self.comparison, items[0].settings.get("control")
        pixels, cost = self._rolled_out(items) if control is None else (self._control(control, items), {})
        self.wait()  # for the group before: a video takes 12 MB at 64 x 64 and 240 frames
        for item, video in zip(items, pixels, strict=True):
            if comparison.is_done(item):
                continue
            about = {
                "label": item.label,
                "name": item.name,
                "prompt": item.config.prompt,
                "seed": item.config.seed,
                "cost": cost,
            }
            scene = comparison.scenes.get(item.config.prompt)
            arguments = (video, scene, about, comparison.store.folder, comparison.mp4s(item))
            if self.pool is None:
                write_item(*arguments)
            else:
                self.waiting.append(self.pool.submit(write_item, *arguments))

    def wait(self) -> None:
        """Wait until all videos are measured."""
        while self.waiting:
            self.waiting.pop().result()

    def _rolled_out(
        self, items: Sequence[Item], num_frames: int | None = None
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Make videos uint8 [T, H, W, 3] under the policy of items; return them and their cost."""
        session, first = self.session, items[0].config
        config = replace(first, cache_policy=dict(items[0].settings), local_attn_size=-1, sink_size=0)
        pipeline = pipeline_of(session.pipeline.model, config)
        configs = [item.config for item in items]
        noise = seeded_noise(configs, session.model_config, session.dtype, session.device)
        text = torch.cat([session.texts[item.config.prompt][0] for item in items])
        capture = self.comparison.capture if num_frames is None else BlockCapture()
        requests, seconds = capture.requests(capture.blocks(len(first.block_sizes))), list[float]()
        on_gpu = session.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(session.device)
        with (
            threads_for(torch.empty(1, *noise.shape[1:]), session.model_config),
            capturing(requests) as calls,
        ):

            def blocks() -> Iterator[torch.Tensor]:
                """Yield the latents of each block, timed without the decoder; save its attention."""
                rollout = pipeline.blocks(noise, text, num_frames=num_frames)
                start = time.monotonic()
                for number, (_, latents) in enumerate(rollout):
                    if on_gpu:
                        torch.cuda.synchronize(session.device)
                    seconds.append(time.monotonic() - start)
                    for row, item in enumerate(items if calls else ()):
                        capture.save(self.comparison.attention(item), number, calls, item.name, row)
                    calls.clear()
                    yield latents
                    start = time.monotonic()

            pixels = torch.cat(list(decoded_blocks(self.vae, blocks())), 1).numpy()
        few = max(1, len(seconds) // 10)  # medians of a tenth of the blocks
        cost: dict[str, Any] = {
            "seconds": round(sum(seconds), 6),
            "last_block_seconds": round(float(np.median(seconds[-few:])), 6),
            "first_block_seconds": round(float(np.median(seconds[1 : 1 + few] or seconds)), 6),
        }
        if on_gpu:
            cost["peak_bytes"] = torch.cuda.max_memory_allocated(session.device)
        cost |= {"batch": len(items), "cache_bytes": kv_cache(config, session.model_config, session.dtype)}
        return list(pixels), cost

    def _control(self, control: str, items: Sequence[Item]) -> list[np.ndarray]:
        """Return the first frame for ever, or the scenes as rendered, or those after the VAE."""
        first = items[0].config
        length = 1 + VIDEO_FRAMES_PER_LATENT * (first.num_frames - 1)
        if control == "frozen":
            whole = [replace(item, settings={"name": FULL}) for item in items]
            videos, _ = self._rolled_out(whole, first.num_frame_per_block)
            return [np.repeat(video[:1], length, 0) for video in videos]
        found: dict[str, np.ndarray] = {}
        for prompt in dict.fromkeys(item.config.prompt for item in items):
            video = render(self.comparison.scenes[prompt], length, 8 * first.height)[None] / 2 + 0.5
            if control == "vae":
                latents = self.vae.encode(video.to(self.session.device))
                found[prompt] = torch.cat(list(decoded_blocks(self.vae, latents.split(3, 1))), 1)[0].numpy()
            else:
                found[prompt] = to_pixels(video)[0].numpy()
        return [found[item.config.prompt] for item in items]


# -- from flags to a table ---------------------------------------------------------------------------------


def compare(args: argparse.Namespace, runs: Sequence[RunConfig], scenes: dict[str, Scene]) -> None:
    """Make missing videos, and the table when all are there. Raises StoppedError after Ctrl-C."""
    rank = this_rank()
    first = on_own_device(runs[0], rank)
    planned = plan(args, runs, scenes)
    args.quiet |= not rank.is_first
    args.log_file = args.log_file if rank.is_first else None
    with observed(args, "policy") as watch, ExitStack() as stack:
        start = time.monotonic()
        session = causal.prepare(
            first, [], list(dict.fromkeys(run.prompt for run in runs)), watch, decodes=True
        )
        comparison = with_session(args, session, planned)
        watch.log("rollout", videos=len(comparison.items))
        on_gpu = session.device.type == "cuda"
        vae = VAE.from_pretrained(first.ckpt_dir, getattr(torch, args.vae_dtype), session.device)
        torch.backends.cudnn.benchmark = (
            on_gpu and not args.deterministic
        )  # the decoder's convolutions, always of one size
        workers = workers_of(args.workers if args.workers is not None or on_gpu else 0, rank)
        pool = None  # on a CPU this process measures videos itself
        if workers:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that are about to start
            context = get_context("spawn")
            pool = ProcessPoolExecutor(workers, context, exit_with_parent, (os.getpid(),))
            stack.enter_context(pool)
        items = stack.enter_context(WorkItems(comparison.store.folder, rank))
        maker, groups = Maker(comparison, session, vae, pool), comparison.groups()

        def is_done(name: str) -> bool:
            return all(comparison.is_done(item) for item in groups[name])

        for name in items.claim(list(groups), is_done, watch, behind=1):
            maker.make(groups[name])
            watch.print(f"{groups[name][0].label}: {len(groups[name])} videos")
            if watch.stopping:
                break
        maker.wait()
        table = merged(comparison)
        if table["missing"]:
            left = f"{table['missing']} of {len(comparison.items)} videos are missing"
            raise StoppedError(f"{left}; what is done is not made again: run the same command to go on")
        if rank.is_first:
            seconds = round(time.monotonic() - start, 1)
            made = {"made": environment(session.device), "made_seconds": seconds}
            table = {"measures": MEASURES | SUMMARIES} | table | made
            path = comparison.folder / TABLE
            with replacing(path) as file:
                file.write(json.dumps(table, ensure_ascii=False).encode() + b"\n")
            watch.print(f"{path}: {len(table['videos'])} videos, {seconds} s, {memory()}")


def plan(args: argparse.Namespace, runs: Sequence[RunConfig], scenes: dict[str, Scene]) -> Comparison:
    """Return what the flags ask for, before a model is there.

    Raises ConfigError or CacheError for what cannot be compared or written.
    """
    first, policies = runs[0], read_policies(args.policies)
    if first.prompt_schedule or first.interventions:
        raise ConfigError("policies are compared on one prompt each, without interventions")
    for settings in policies.values():
        read_policy(settings).check(first.block_sizes)
        config = replace(first, cache_policy=dict(settings), local_attn_size=-1, sink_size=0)
        check_outputs(args, config, [Path(args.output_dir) / TABLE])
    folders = [Path(folder) for folder in (args.output_dir, args.vbench_dir) if folder]
    planned = Comparison(
        folders[0],
        policies,
        runs,
        scenes,
        vbench=folders[1] if args.vbench_dir else None,
        videos=args.videos,
        controls=args.controls,
        capture=BlockCapture.read(args.capture, first.step),
    )
    for folder in folders:
        require_writable(folder / TABLE)
    videos = [path for item in planned.items for path in planned.mp4s(item)]
    if twins := [path for path, count in Counter(videos).items() if count > 1]:
        raise ConfigError(f"two of --policies would write {twins[0]}; rename a file of one")
    longest = {path.parent: path for path in sorted(videos, key=lambda path: len(os.fsencode(path)))}
    for path in longest.values():
        require_writable(path)
    return planned


def with_session(args: argparse.Namespace, session: LoadedModel, planned: Comparison) -> Comparison:
    """Return what was planned, with the weights and files that a session has read."""
    first = replace(planned.runs[0], prompt="", seed=0)
    return replace(
        planned,
        identity=session.identity(first, vae=vae_files(first), vae_dtype=args.vae_dtype),
        batch=args.batch or (GPU_BATCH if session.device.type == "cuda" else CPU_BATCH),
    )


def merged(comparison: Comparison) -> dict[str, Any]:
    """Return all items of a comparison as one table: policies, prompts, seeds, and a row for each video."""
    read = [comparison.store.read(item.name) for item in comparison.items]
    rows = [row for row in read if row is not None and "seconds" in row]
    costs: dict[str, Any] = {}
    for row in rows:
        if cost := row.pop("cost"):
            costs.setdefault(row["label"], cost)
    prompts = list(dict.fromkeys(run.prompt for run in comparison.runs))
    scenes = [comparison.scenes[prompt] for prompt in prompts if prompt in comparison.scenes]
    return {
        "policies": {label: dict(settings) for label, settings in comparison.policies.items()},
        "prompts": prompts,
        "kinds": [scene.kind for scene in scenes],
        "unnamed": [scene.unnamed_color for scene in scenes],
        "num_frames": comparison.runs[0].num_frames,
        "weights_sha256": comparison.identity.get("weights_sha256", ""),
        "missing": len(read) - len(rows),
        "costs": costs,
        "videos": rows,
    }

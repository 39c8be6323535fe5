"""Policies x prompts x seeds: a long video each, measured per second, made in pieces by any rank.

A work item is one video, named by the hash of all that its numbers depend on: items/NAME.json. Videos of one
policy are rolled out together; each has noise of its own generator, so that others change only rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.analysis import drift
from experiments.analysis.drift import MEASURES, SUMMARIES
from experiments.caches.files import StoppedError, replacing, require_writable
from experiments.extraction import causal
from experiments.extraction.block_capture import BlockCapture, path_of
from experiments.extraction.causal import Session, pipeline_of, seeded_noise
from experiments.extraction.devices import threads_for
from experiments.extraction.memory import kv_cache
from experiments.extraction.provenance import environment, vae_files
from experiments.extraction.rollout import capturing
from experiments.extraction.video import decoded_blocks, to_pixels, write_mp4
from experiments.miniature.frozen import SETS, held_out_scenes
from experiments.miniature.moving_shapes import Scene, render
from experiments.miniature.tracking import judge_seconds
from experiments.running.cli import policy_settings
from experiments.running.jobs import name_inputs
from experiments.running.progress import Progress, memory, stopping_when_asked
from experiments.running.ranks import Rank, exit_with_parent, on_own_device, this_rank, workers_of
from experiments.running.sweep_state import NOT_SETTINGS, told_apart
from experiments.running.work_items import WorkItems, item_name
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.capture import CapturedCall
from wan.checkpoint import describe_files
from wan.config import RunConfig
from wan.errors import ConfigError, short_repr
from wan.policies import read_policy
from wan.vae import VAE

# --- Which cache policies are compared, and how one is written on the command line
FULL = "full"
CONTROLS = {
    "frozen": "the first frame of the rollout, over and over",
    "vae": "the rendered scene through the VAE: the ceiling of any policy",
    "rendered": "the rendered scene itself",
}

DEEP_SINK = "deep_sink,window=21,sink=10"  # Deep Forcing's, and the same with compression
PARTICIPATIVE = "participative,window=21,sink=10,budget=16,recent=4"

# Compared with full, and Holm-adjusted together: published settings, and the plain window they came from.
FAMILY = (
    "window,window=9",
    "window,window=9,sink=3",
    "window,window=12,sink=3",
    "relative,window=6,sink=1",
    "relative,window=12,sink=3",
    DEEP_SINK,
    PARTICIPATIVE,
    "ema_sink,window=9,sink=3",
    "two_memories,window=12,sink=3",
    "rolling_sink,window=21",
    "memory_bank,window=12,sink=3,bank=3,interval=3",
)

WINDOWS, SINKS = (6, 9, 12, 21), (0, 3, 6, 9, 12, 15)  # frames; a block has three


def sink_map(policy: str) -> Iterator[str]:
    """The policy with every window and sink of the map that leave room for a block."""
    for window in WINDOWS:
        for sink in SINKS:
            if sink + 3 <= window and (sink or policy == "window"):
                yield spec(policy, window, sink)


def spec(policy: str, window: int, sink: int) -> str:
    """How a policy of a window and a sink is written."""
    return f"{policy},window={window}" + (f",sink={sink}" if sink else "")


NAMED = {
    "family": (FULL, *FAMILY),
    "findings": tuple(dict.fromkeys((FULL, *FAMILY, *sink_map("window"), *sink_map("deep_sink")))),
}


def read_policies(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Label -> settings of every policy that is named: NAME,FIELD=VALUE,..., a file, or one of NAMED.

    Raises ConfigError for what is no policy, and for two of one name.
    """
    from wan.policies import read_policy

    found: dict[str, dict[str, Any]] = {}
    for word in (each for name in words for each in NAMED.get(name, (name,))):
        settings = _read(word)
        read_policy(settings)
        if found.setdefault(word, settings) != settings:
            raise ConfigError(f"--policies names {short_repr(word)} twice")
    return found


def _read(word: str) -> dict[str, Any]:
    name, *pairs = word.split(",")
    settings = {str(key): value for key, value in policy_settings(name).items()}
    for pair in pairs:
        field, equals, text = pair.partition("=")
        if not (field and equals and text):
            raise ConfigError(f"--policies: {short_repr(pair)} in {short_repr(word)} is not FIELD=VALUE")
        settings[field] = _value(text)
    return settings


def _value(text: str) -> Any:
    """true, false, a number or a word."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def short_label(label: str) -> str:
    """How figures name a policy: deep_sink 21/10."""
    name, *pairs = label.split(",")
    fields = dict(pair.partition("=")[::2] for pair in pairs)
    if "window" not in fields:
        return name
    return f"{name} {fields['window']}/{fields.get('sink', 0)}"


# --- Everything that is measured of one long video, per second and as a whole, as plain numbers
ANSWERS = ("visible", "color", "shape", "background", "right")  # of the tracker, for each second
DIGITS = 5  # that are kept of a number


def measure(pixels: np.ndarray, scene: Scene | None) -> dict[str, Any]:
    """Of a video uint8 [T, H, W, 3]: "seconds", a list of each measure; "whole"; "tracker", 0 or 1 a second.

    The tracker answers where the scene is known that the prompt describes.
    """
    torch.set_num_threads(1)  # processes beside each other measure one video each
    found: dict[str, Any] = {
        "seconds": {name: [_short(x) for x in values] for name, values in drift.per_second(pixels).items()},
        "whole": {name: _short(value) for name, value in drift.summaries(pixels).items()},
    }
    if scene is not None:
        video = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        answers = judge_seconds(video, scene)
        found["tracker"] = {name: getattr(answers, name).int().tolist() for name in ANSWERS}
    return found


def _short(value: float) -> float | None:
    """A number with a few digits; None where there is none: JSON has no NaN."""
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


# --- Policies x prompts x seeds: a long video each, measured per second, made in pieces by any rank
PROMPT_BYTES = 180  # of a prompt that names a file
Block = tuple[range, torch.Tensor]  # frames, latents [B, n, C, h, w]


@dataclass(frozen=True)
class Item:
    """One video: a policy or a control by its label, with its settings, and the run's prompt and seed."""

    label: str
    settings: Mapping[str, Any]
    config: RunConfig
    name: str


@dataclass(frozen=True)
class Comparison:
    """What is compared, and where the pieces lie."""

    folder: Path
    policies: Mapping[str, Mapping[str, Any]]  # label -> settings
    runs: Sequence[RunConfig]  # of all prompts and seeds
    scenes: Mapping[str, Scene]  # prompt -> scene, for the tracker and the controls; may be empty
    weights_sha256: str
    dtype: str
    batch: int
    vbench: Path | None = None  # where videos are written as VBench-Long reads them
    videos: int = 0  # prompts whose first seed is written as an mp4
    controls: Sequence[str] = tuple(CONTROLS)
    capture: BlockCapture = field(default_factory=BlockCapture)  # of attention, in attention/NAME
    files: Sequence[Mapping[str, Any]] = ()  # what the runs read, by what they hold, and the VAE

    def items(self) -> list[Item]:
        controls = {label: {"control": label} for label in self.controls} if self.scenes else {}
        return [
            Item(label, settings, run, self._name(settings, run))
            for label, settings in (*self.policies.items(), *controls.items())
            for run in self.runs
        ]

    def groups(self) -> dict[str, list[Item]]:
        """Items of one policy that are made together, by the name of the group."""
        found, by_label = dict[str, list[Item]](), dict[str, list[Item]]()
        for item in self.items():
            by_label.setdefault(item.label, []).append(item)
        for items in by_label.values():
            for start in range(0, len(items), self.batch):
                group = items[start : start + self.batch]
                found[item_name([item.name for item in group])] = group
        return found

    def path(self, item: Item) -> Path:
        return self.folder / "items" / f"{item.name}.json"

    def read(self, item: Item) -> dict[str, Any] | None:
        """An item's numbers, or None where it is not done; what cannot be read is made again."""
        try:
            found = json.loads(self.path(item).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and "seconds" in found else None

    def is_done(self, item: Item) -> bool:
        """Whether an item's numbers are there, with the videos and the attention that are asked for."""
        found = self.read(item)
        if found is None or not all(path.is_file() for path, _ in self.mp4s(item)):
            return False
        if self.capture.kind == "none" or "control" in item.settings:
            return True
        asked, blocks = asdict(self.capture), self.capture.blocks(len(item.config.block_sizes))
        kept = all(path_of(self.attention(item), block).is_file() for block in blocks)
        return kept and found.get("capture", asked) == asked  # older items do not say

    def attention(self, item: Item) -> Path:
        return self.folder / "attention" / item.name

    def mp4s(self, item: Item) -> list[tuple[Path, int]]:
        """Where an item's video is written, and how many pixels its shorter side has there at least."""
        number, index = self._places[item.config.prompt, item.config.seed]
        label, found = item.label.replace("/", "_"), []
        if number < self.videos and index == 0:
            found.append((self.folder / "videos" / f"{label}_{number}.mp4", 256))
        if self.vbench is not None:
            name = self._vbench_names[item.config.prompt]
            found.append((self.vbench / label / f"{name}-{index}.mp4", 1))
        return found

    @cached_property
    def _places(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Prompt and seed -> the number of the prompt, and of the seed among those of the prompt."""
        seeds: dict[str, list[int]] = {}
        for run in self.runs:
            seeds.setdefault(run.prompt, []).append(run.seed)
        return {
            (prompt, seed): (number, index)
            for number, (prompt, mine) in enumerate(seeds.items())
            for index, seed in enumerate(mine)
        }

    @cached_property
    def _vbench_names(self) -> dict[str, str]:
        """Prompt -> its name in files, where VBench reads it; disks take names of 255 bytes."""
        return told_apart({run.prompt: run.prompt.replace("/", " ") for run in self.runs}, PROMPT_BYTES)

    def _name(self, settings: Mapping[str, Any], run: RunConfig) -> str:
        config = {name: value for name, value in asdict(run).items() if name not in NOT_SETTINGS}
        del config["cache_policy"]
        scene = self.scenes.get(run.prompt)
        depends = [config, dict(settings), run.prompt, run.seed, self.weights_sha256, self.dtype]
        files = [*self.files, *self._classes.get(settings.get("file"), ())]
        return item_name(*depends, None if scene is None else asdict(scene), files)

    @cached_property
    def _classes(self) -> dict[Any, list[dict[str, Any]]]:
        """By its path, what each CSV of head classes holds that a policy names."""
        paths = {str(one["file"]) for one in self.policies.values() if one.get("file")}
        return {path: describe_files([path]) for path in paths}


@dataclass
class Maker:
    """What makes the videos of a comparison: a session's model, the VAE, and processes that measure."""

    comparison: Comparison
    session: Session
    vae: VAE
    pool: Executor | None
    waiting: list[Future] = field(default_factory=list)

    def make(self, items: Sequence[Item], say: Callable[[str], None]) -> None:
        """Roll out and decode items of one policy, and hand those not done yet to be measured and written.

        All are rolled out where one is missing: bits may depend on the size of a batch, and not on a kill.
        """
        start = time.monotonic()
        control = items[0].settings.get("control")
        pixels, cost = self._rolled_out(items) if control is None else (self._control(control, items), {})
        made = time.monotonic() - start
        for item, video in zip(items, pixels, strict=True):
            if self.comparison.is_done(item):
                continue
            about = {
                "label": item.label,
                "name": item.name,
                "prompt": item.config.prompt,
                "seed": item.config.seed,
                "cost": cost,
                "capture": asdict(self.comparison.capture),
            }
            scene = self.comparison.scenes.get(item.config.prompt)
            arguments = (video, scene, about, self.comparison.path(item), self.comparison.mp4s(item))
            if self.pool is None:
                write_item(*arguments)
            else:
                self.waiting.append(self.pool.submit(write_item, *arguments))
        say(f"{items[0].label}: {len(items)} videos in {made:.1f} s")

    def settle(self, most: int = 0) -> None:
        """Wait until at most so many videos are still being measured."""
        while len(self.waiting) > most:
            self.waiting.pop(0).result()

    def _rolled_out(
        self, items: Sequence[Item], num_frames: int | None = None
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Videos uint8 [T, H, W, 3] under the policy of items, and what they cost."""
        session, first = self.session, items[0].config
        config = replace(first, cache_policy=dict(items[0].settings), local_attn_size=-1, sink_size=0)
        pipeline = pipeline_of(session.pipeline.model, config)
        configs = [item.config for item in items]
        noise = seeded_noise(configs, session.model_config, session.dtype, session.device)
        text = torch.cat([session.texts[item.config.prompt][0] for item in items])
        clock = _Clock(session.device)
        capture = self.comparison.capture if num_frames is None else BlockCapture()
        requests = capture.requests(capture.blocks(len(first.block_sizes)))
        with (
            threads_for(torch.empty(1, *noise.shape[1:]), session.model_config),
            capturing(requests) as calls,
        ):
            rollout = clock.around(pipeline.blocks(noise, text, num_frames=num_frames))
            blocks = self._captured(rollout, items, calls)
            parts = list(decoded_blocks(self.vae, blocks))
        pixels = torch.cat(parts, 1).numpy()
        cost = clock.cost() | {
            "batch": len(items),
            "cache_bytes": kv_cache(config, session.model_config, session.dtype),
        }
        return list(pixels), cost

    def _captured(
        self, rollout: Iterator[Block], items: Sequence[Item], calls: list[CapturedCall]
    ) -> Iterator[torch.Tensor]:
        """The latents of each block, after what was captured of it is written for every item."""
        for number, (_, latents) in enumerate(rollout):
            if calls:
                for row, item in enumerate(items):
                    self.comparison.capture.save(self.comparison.attention(item), number, calls, row)
                calls.clear()
            yield latents

    def _control(self, control: str, items: Sequence[Item]) -> list[np.ndarray]:
        """The first frame for ever, or the scenes as rendered, or after the VAE."""
        num_frames = items[0].config.num_frames
        length = 1 + VIDEO_FRAMES_PER_LATENT * (num_frames - 1)
        if control == "frozen":
            whole = [replace(item, settings={"name": FULL}) for item in items]
            first, _ = self._rolled_out(whole, items[0].config.num_frame_per_block)
            return [np.repeat(video[:1], length, 0) for video in first]
        scenes = [self.comparison.scenes[item.config.prompt] for item in items]
        rendered = {scene: render(scene, length, first_side(items[0].config)) for scene in scenes}
        if control == "vae":
            rendered = {scene: self._through_vae(video) for scene, video in rendered.items()}
        else:
            rendered = {scene: to_pixels(video[None] / 2 + 0.5)[0] for scene, video in rendered.items()}
        return [rendered[scene].numpy() for scene in scenes]

    def _through_vae(self, video: torch.Tensor) -> torch.Tensor:
        """Pixels of a rendered scene [T, 3, H, W] in -1..1, encoded and decoded again."""
        latents = self.vae.encode((video[None] / 2 + 0.5).to(self.session.device))
        return torch.cat(list(decoded_blocks(self.vae, latents.split(3, 1))), 1)[0]


class _Clock:
    """Seconds of the rollout without the decoder, and the most memory it took."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, list[float]()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def around(self, rollout: Iterator[Block]) -> Iterator[Block]:
        while True:
            start = time.monotonic()
            block = next(rollout, None)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if block is None:
                return
            self.seconds.append(time.monotonic() - start)
            yield block

    def cost(self) -> dict[str, Any]:
        """Seconds of all blocks, and of one early and one late: medians of a tenth of them."""
        few = max(1, len(self.seconds) // 10)
        found = {"seconds": sum(self.seconds), "last_block_seconds": float(np.median(self.seconds[-few:]))}
        found["first_block_seconds"] = float(np.median(self.seconds[1 : 1 + few] or self.seconds))
        if self.device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return {name: round(value, 6) for name, value in found.items()}


def first_side(config: RunConfig) -> int:
    """Pixels of a video's side."""
    return 8 * config.height


def write_item(
    pixels: np.ndarray,
    scene: Scene | None,
    about: Mapping[str, Any],
    path: Path,
    mp4s: Sequence[tuple[Path, int]],
) -> None:
    """Measure one video and write its numbers, after the videos that are asked for."""
    for file, shortest in mp4s:
        write_mp4(torch.from_numpy(pixels), file, shortest)
    found = dict(about) | measure(pixels, scene)
    with replacing(path) as target:
        target.write(json.dumps(found).encode() + b"\n")


def merged(comparison: Comparison) -> dict[str, Any]:
    """All items of a comparison as one table: policies, prompts, seeds, and a row for each video."""
    rows = [found for item in comparison.items() if (found := comparison.read(item)) is not None]
    costs: dict[str, Any] = {}
    for row in rows:
        cost, _ = row.pop("cost"), row.pop("capture", None)
        if cost:
            costs.setdefault(row["label"], cost)
    prompts = list(dict.fromkeys(run.prompt for run in comparison.runs))
    return {
        "policies": {label: dict(settings) for label, settings in comparison.policies.items()},
        "prompts": prompts,
        "kinds": [comparison.scenes[prompt].kind for prompt in prompts if prompt in comparison.scenes],
        "unnamed": [comparison.scenes[p].unnamed_color for p in prompts if p in comparison.scenes],
        "num_frames": comparison.runs[0].num_frames,
        "weights_sha256": comparison.weights_sha256,
        "missing": len(comparison.items()) - len(rows),
        "costs": costs,
        "videos": rows,
    }


# --- From flags to a comparison of policies: videos until asked to stop, the table when all are there
TABLE = "comparison.json"
GPU_BATCH, CPU_BATCH = 64, 8
WAITING = 128  # videos that may wait to be measured: 12 MB each at 64 x 64 and 240 frames


def held_out(count: int) -> dict[str, Scene]:
    """Caption -> held-out scene of the miniature: one shape, two that cross, one behind a wall, in turn."""
    scenes: dict[str, Scene] = {}
    by_kind = [held_out_scenes(kinds, 2 * count) for kinds in SETS.values()]
    for row in zip(*by_kind, strict=True):
        for scene in row:
            if len(scenes) < count:
                scenes.setdefault(scene.caption, scene)
    return scenes


def compare(args: argparse.Namespace, runs: Sequence[RunConfig], scenes: dict[str, Scene]) -> None:
    """Make what is not done yet, and the table of what is. Raises StoppedError after Ctrl-C."""
    rank = this_rank()
    first = on_own_device(runs[0], rank)
    planned = _checked(args, runs, scenes)
    args.quiet |= not rank.is_first
    args.log_file = args.log_file if rank.is_first else None
    with Progress(args.quiet, args.log_file) as watch, stopping_when_asked(watch, "policy"):
        start = time.monotonic()
        session = causal.prepare(first, [], list(dict.fromkeys(run.prompt for run in runs)), watch)
        comparison = _comparison(args, session, planned)
        watch.log("rollout", videos=len(comparison.items()))
        vae = VAE.from_pretrained(first.ckpt_dir, getattr(torch, args.vae_dtype), session.device)
        _make(comparison, session, vae, args.workers, rank, watch)
        table = merged(comparison)
        if table["missing"]:
            left = f"{table['missing']} of {len(comparison.items())} videos are missing"
            raise StoppedError(f"{left}; what is done is not made again: run the same command to go on")
        if rank.is_first:
            seconds = round(time.monotonic() - start, 1)
            made = {"made": environment(session.device), "made_seconds": seconds}
            write_table(comparison.folder / TABLE, table | made)
            said = f"{len(table['videos'])} videos, {seconds} s, {memory()}"
            watch.print(f"{comparison.folder / TABLE}: {said}")


def _checked(args: argparse.Namespace, runs: Sequence[RunConfig], scenes: dict[str, Scene]) -> Comparison:
    """What the flags ask for, before a model is there.

    Raises ConfigError or CacheError for what cannot be compared or written.
    """
    first, policies = runs[0], read_policies(args.policies)
    if first.prompt_schedule or first.interventions:
        raise ConfigError("policies are compared on one prompt each, without interventions")
    for settings in policies.values():
        read_policy(settings).check(first.block_sizes)
        name_inputs(args, replace(first, cache_policy=dict(settings), local_attn_size=-1, sink_size=0))
    args.files.writes("the table", Path(args.output_dir) / TABLE)
    planned = Comparison(
        Path(args.output_dir),
        policies,
        runs,
        scenes,
        weights_sha256="",
        dtype="",
        batch=1,
        vbench=Path(args.vbench_dir) if args.vbench_dir else None,
        videos=args.videos,
        controls=args.controls,
        capture=BlockCapture.read(args.capture, first.step),
    )
    for place in (args.output_dir, *([args.vbench_dir] if args.vbench_dir else [])):
        require_writable(Path(place) / TABLE)
    videos = [path for item in planned.items() for path, _ in planned.mp4s(item)]
    if twins := [path for path, count in Counter(videos).items() if count > 1]:
        raise ConfigError(f"two of --policies would write {twins[0]}; rename a file of one")
    longest = {path.parent: path for path in sorted(videos, key=lambda path: len(os.fsencode(path)))}
    for path in longest.values():
        require_writable(path)
    return planned


def _comparison(args: argparse.Namespace, session: causal.Session, planned: Comparison) -> Comparison:
    """What was planned, with the weights that a session has."""
    return replace(
        planned,
        weights_sha256=session.sha256.result(),
        dtype=f"{session.dtype} {args.vae_dtype}",
        batch=args.batch or (GPU_BATCH if session.device.type == "cuda" else CPU_BATCH),
        files=[*session.common["files"], *vae_files(planned.runs[0])],
    )


def _make(
    comparison: Comparison,
    session: causal.Session,
    vae: VAE,
    workers: int | None,
    rank: Rank,
    watch: Progress,
) -> None:
    """Make all groups that are not done, until asked to stop."""
    on_gpu, groups = session.device.type == "cuda", comparison.groups()
    torch.backends.cudnn.benchmark = on_gpu  # the decoder's convolutions, always of one size

    def is_done(name: str) -> bool:
        return all(comparison.is_done(item) for item in groups[name])

    behind = 1 + WAITING // min(map(len, groups.values()))  # groups that videos which wait belong to
    with _pool(workers, on_gpu, rank) as pool, WorkItems(comparison.folder / "claims", rank) as claims:
        maker = Maker(comparison, session, vae, pool)
        for name in claims.claim(list(groups), is_done, watch, behind):
            maker.make(groups[name], watch.print)
            maker.settle(WAITING)
            if watch.stopping:
                break
        maker.settle()


def write_table(path: Path, table: dict) -> None:
    """comparison.json, with what each measure is."""
    about = {name: asdict(one) for name, one in (MEASURES | SUMMARIES).items()}
    with replacing(path) as file:
        file.write(json.dumps({"measures": about} | table, ensure_ascii=False).encode() + b"\n")


@contextmanager
def _pool(workers: int | None, on_gpu: bool, rank: Rank) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that measure videos while the next ones are made; on a CPU this one measures them itself."""
    count = workers_of(workers if workers is not None or on_gpu else 0, rank)
    if not count:
        yield None
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that are about to start
    with ProcessPoolExecutor(count, get_context("spawn"), exit_with_parent, (os.getpid(),)) as pool:
        yield pool

"""Policies x prompts x seeds: a long video each, measured per second, made in pieces by any rank.

A work item is one video, named by the hash of all that its numbers depend on: items/NAME.json. Videos of one
policy are rolled out together; each has noise of its own generator, so that others change only rounding.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.caches.atomic_files import replacing
from experiments.extraction.block_capture import BlockCapture, path_of
from experiments.extraction.causal import Session, pipeline_of, seeded_noise
from experiments.extraction.devices import threads_for
from experiments.extraction.memory_parts import kv_cache
from experiments.extraction.rollout import capturing
from experiments.extraction.streaming import decoded_blocks
from experiments.extraction.video import to_pixels, write_mp4
from experiments.miniature.moving_shapes import Scene, render
from experiments.running.claims import item_name
from experiments.running.sweep_plan import told_apart
from experiments.running.sweep_state import NOT_SETTINGS
from experiments.studies.policy_grid import CONTROLS, FULL
from experiments.studies.video_measures import measure
from wan.blocks import VIDEO_FRAMES_PER_LATENT
from wan.checkpoint import describe_files
from wan.config import RunConfig
from wan.modules.captured_call import CapturedCall
from wan.modules.vae import VAE

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

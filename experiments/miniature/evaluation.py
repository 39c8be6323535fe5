"""What the miniature's videos show of held-out captions, how sure that is, and what its past is good for.

Every video is the one that the extraction scripts make of that prompt and seed. tracking.py and
long_tracking.py judge.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.caches.files import replacing
from experiments.caches.frames import one_thread
from experiments.extraction import devices
from experiments.extraction.base import as_one_block
from experiments.extraction.causal import draw_noise, load_pipeline
from experiments.miniature.frozen import SETS, hashes, held_out_scenes
from experiments.miniature.moving_shapes import FPS, Scene, render
from experiments.miniature.recipe import FRAMES, SIDE, Counts
from experiments.miniature.tracking import judge, judge_seconds
from experiments.miniature.vae_training import psnr, receptive_field, vae_quality
from experiments.running.ranks import exit_with_parent
from wan import checkpoint
from wan.config import RunConfig
from wan.model import WanModel
from wan.text2video import TextToVideoPipeline
from wan.text_encoder import TextEncoder
from wan.vae import VAE

# --- Processes that judge videos of moving shapes while the next ones are made
DTYPE = torch.float32  # what a decoder gives: the tracker sees every bit of it

Answers = list[dict[str, bool]]


class Judges:
    """Workers that share memory with this process: videos are copied once, and nothing is pickled.

    Workers are forked, so make them before a GPU is touched. With one, this process judges by itself.
    """

    def __init__(self, workers: int, slots: int, shape: Sequence[int]):
        """slots: videos that are judged or wait at a time; shape: of each at most, [frames, 3, H, W]."""
        size = (1 if workers <= 1 else slots, *shape)
        memory = mmap.mmap(-1, torch.Size(size).numel() * DTYPE.itemsize)
        self._slots = torch.frombuffer(memory, dtype=DTYPE).view(size)
        self._waiting: list[Future[Any] | None] = [None] * len(self._slots)
        self._next, self._pool = 0, None
        if workers > 1:
            self._pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, (self._slots, os.getpid()))
            self._pool.submit(os.getpid).result()  # all are forked here and now

    def submit(self, video: Tensor, scene: Scene) -> Future[dict[str, bool]]:
        """Have a video [frames, 3, H, W] in 0..1 judged; waits for a slot where all are taken."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        if (earlier := self._waiting[slot]) is not None:
            earlier.result()
        self._slots[slot, : len(video)].copy_(video)
        if self._pool is None:
            return _done(_judged(self._slots[slot, : len(video)], scene))
        future = self._waiting[slot] = self._pool.submit(_judge_slot, slot, len(video), scene)
        return future

    def call(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        """Have function(*given) computed; both are pickled, so arrays are numpy's."""
        if self._pool is None:
            with one_thread():
                return _done(function(*given))
        return self._pool.submit(function, *given)

    def __enter__(self) -> Judges:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


_shared: dict[str, Tensor] = {}  # in a worker: the videos


def _begin(slots: Tensor, parent: int) -> None:
    exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked
    torch.set_num_threads(1)
    _shared["slots"] = slots


def _judge_slot(slot: int, frames: int, scene: Scene) -> dict[str, bool]:
    return judge(_shared["slots"][slot, :frames], scene)


def _judged(video: Tensor, scene: Scene) -> dict[str, bool]:
    with one_thread():
        return judge(video, scene)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# --- Videos of the miniature in batches: causal rollouts, guided sampling of the base weights, the round trip
GPU_BATCH, CPU_BATCH = 96, 16  # videos of 81 frames: a GPU takes about as long for all of them as for a few


class Miniature:
    """The miniature's parts, loaded once, and its videos [frames, 3, H, W] in 0..1; the i-th caption is
    given seed i."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.device = devices.choose_device(config.device)
        self.batch = GPU_BATCH if self.device.type == "cuda" else CPU_BATCH
        self.sizes = checkpoint.read_model_config(config.ckpt_dir)
        self.vae = VAE.from_pretrained(config.ckpt_dir, device=self.device)
        self.encoder = TextEncoder.from_pretrained(
            config.ckpt_dir, self.sizes.text_len, torch.float32, self.device
        )

    def causal(self, captions: list[str], local_attn_size: int = -1, sink_size: int = 0) -> Iterator[Tensor]:
        """Few-step rollouts of the checkpoint, with all of the past or a window of it."""
        config = replace(self.config, local_attn_size=local_attn_size, sink_size=sink_size)
        pipeline = load_pipeline(config, self.sizes, torch.float32, self.device)
        for prompts, noise, renoise in self._batches(config, captions):
            _, latents = pipeline.inference(noise, prompt_embeds=self.encoder(prompts), renoise=renoise)
            yield from self.vae.decode(latents).cpu()

    def base(self, captions: list[str]) -> Iterator[Tensor]:
        """Guided sampling of the base weights, all frames at once."""
        base = replace(self.config.base, num_video_frames=FRAMES)
        config = as_one_block(replace(self.config, base=base))
        state = checkpoint.read_transformer_state(config.ckpt_dir)
        model = checkpoint.build_model(
            WanModel, self.sizes, state, config.ckpt_dir, torch.float32, self.device
        )
        pipeline = TextToVideoPipeline(model, base.shift, base.guidance_scale, base.num_steps)
        for prompts, noise, _ in self._batches(config, captions):
            negative = self.encoder([base.negative_prompt] * len(prompts))
            yield from self.vae.decode(pipeline.inference(noise, self.encoder(prompts), negative)).cpu()

    def reconstructed(self, videos: Sequence[Tensor]) -> Iterator[Tensor]:
        """Videos of one length through the VAE: as good as the model can be."""
        size = max(1, self.batch * FRAMES // max(FRAMES, *map(len, videos)))
        for i in range(0, len(videos), size):
            batch = torch.stack(list(videos[i : i + size])).to(self.device)
            yield from self.vae.decode(self.vae.encode(batch)).cpu()

    def _batches(self, config: RunConfig, captions: list[str]) -> Iterator[tuple[list[str], Tensor, Tensor]]:
        """Captions with the noise that a script would draw for each."""
        for i in range(0, len(captions), self.batch):
            prompts = captions[i : i + self.batch]
            seeded = (replace(config, seed=i + n) for n in range(len(prompts)))
            drawn = (draw_noise(one, self.sizes, torch.float32, self.device) for one in seeded)
            noise, renoise = zip(*drawn, strict=True)
            with devices.threads_for(noise[0], self.sizes):
                yield prompts, torch.cat(noise), torch.cat(renoise, 1)


# --- What the miniature's videos show of held-out captions, how sure that is, and what its past is good for
PASTS = ((-1, 0), (9, 0), (6, 3), (6, 0), (3, 0))  # frames of local_attn_size and sink_size; a block has 3
NORMAL_95 = 1.959964  # standard deviations of a 95 % interval
LONG_SECONDS, SETTLED = 60, 5  # of long videos, and the second from which their shares count
WAITING = 4  # videos that wait to be judged or are, for each worker


class Parts:
    """Measurements that are done, in a file beside the result, so that a killed evaluation goes on."""

    def __init__(self, path: Path, settings: dict):
        self.path = path
        self.key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self.done: dict[str, Any] = {}
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.done = kept["done"] if kept["key"] == self.key else {}
        except (OSError, ValueError, KeyError, TypeError):  # none, or of another evaluation
            pass

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was measured under this name before, or is now."""
        if name not in self.done:
            self.done[name] = measure()
            with replacing(self.path) as file:
                file.write(json.dumps({"key": self.key, "done": self.done}).encode())
        return self.done[name]


def evaluate(config: RunConfig, counts: Counts, partial: Path, workers: int = 1) -> dict:
    """All of it, as plain numbers. Parts that are done are kept in `partial`, which is removed at the end."""
    weights = weight_hashes(config)
    with Judges(workers, WAITING * workers, (FRAMES, 3, SIDE, SIDE)) as judges:  # forks: before a GPU
        frozen, mini = hashes(), Miniature(config)
        torch.backends.cudnn.benchmark = mini.device.type == "cuda"  # a decoder of few sizes
        settings = {"weights": weights, "frozen": frozen, "counts": vars(counts)}
        parts = Parts(partial, settings | {"device": str(mini.device)})
        report = {
            "weights": weights,
            "frozen": frozen,
            "vae": parts.get("vae", lambda: measure_vae(mini, counts.clips, judges)),
            "captions": {name: caption_set(mini, name, counts, parts, judges) for name in SETS},
            "past": pasts(mini, counts, parts, judges),
            "long": {name: long_set(mini, name, counts.long_videos, parts, judges) for name in SETS},
        }
    partial.unlink(missing_ok=True)
    return report


def weight_hashes(config: RunConfig) -> dict[str, str]:
    """Path below the model's folder, or its whole path elsewhere -> SHA-256, of what is evaluated."""
    folder = Path(config.ckpt_dir)
    named = [Path(file) for file in (config.checkpoint_path, config.lora_path) if file]
    files = {path: path for path in (*sorted(folder.glob("*/*.safetensors")), *named)}
    inside = {path: path.relative_to(folder) for path in files if path.is_relative_to(folder)}
    return {name.as_posix(): checkpoint.file_sha256(path) for path, name in (files | inside).items()}


# -- shares ------------------------------------------------------------------------------------------------


def shares(answers: Answers) -> dict[str, float]:
    """For each question, the share of the videos it was asked of that answer yes."""
    return {q: round(sum(said) / len(said), 3) for q, said in _by_question(answers).items()}


def intervals(answers: Answers) -> dict[str, list[float]]:
    """For each question, the 95 % Wilson interval of that share."""
    return {
        q: [round(bound, 3) for bound in wilson(sum(said), len(said))]
        for q, said in _by_question(answers).items()
    }


def wilson(yes: int, asked: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson 1927)."""
    z2 = NORMAL_95**2
    middle = (yes + z2 / 2) / (asked + z2)
    half = NORMAL_95 / (asked + z2) * sqrt(yes * (asked - yes) / asked + z2 / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def _by_question(answers: Answers) -> dict[str, list[bool]]:
    questions = dict.fromkeys(q for one in answers for q in one)
    return {q: [one[q] for one in answers if q in one] for q in questions}


# -- what is measured --------------------------------------------------------------------------------------


def measure_vae(mini: Miniature, clips: int, judges: Judges) -> dict[str, float]:
    """PSNR on held-out clips, how far the decoder sees back, seconds per latent frame decoded."""
    vae, ckpt_dir = mini.vae.vae, mini.config.ckpt_dir
    times = judges.call(decoding_times, ckpt_dir)  # a worker's: nothing else is judged meanwhile
    sizes = {"clips": clips, "receptive_field": receptive_field(vae.config)}
    return sizes | vae_quality(vae, mini.device, clips) | times.result()


def decoding_times(ckpt_dir: str, frames: int = 21, repeats: int = 5) -> dict[str, float]:
    """Seconds per latent frame on one thread of the CPU, best of some: as this repository decodes, and frame
    by frame as diffusers."""
    latents = torch.randn(1, frames, 16, SIDE // 8, SIDE // 8)
    vae = VAE.from_pretrained(ckpt_dir)
    ways = {
        "decode_seconds_per_latent_frame": lambda: vae.decode(latents),
        "diffusers_seconds_per_latent_frame": lambda: vae.vae.decode(latents.transpose(1, 2)),
    }
    best = dict.fromkeys(ways, float("inf"))
    with one_thread(), torch.no_grad():
        for _ in range(repeats):
            for name, way in ways.items():  # in turn: whatever else runs here slows both
                begin = time.perf_counter()
                way()
                best[name] = min(best[name], time.perf_counter() - begin)
    return {name: round(seconds / frames, 5) for name, seconds in best.items()}


def caption_set(mini: Miniature, name: str, counts: Counts, parts: Parts, judges: Judges) -> dict:
    """Shares of one set: rendered, through the VAE, causal, base."""
    chosen = held_out_scenes(SETS[name], counts.captions)
    prompts = [scene.caption for scene in chosen]
    sources: dict[str, Callable[[], Answers]] = {
        "rendered": lambda: results(judges.call(judge_rendered, scene) for scene in chosen),
        "vae": lambda: judged(mini.reconstructed(rendered(chosen, FRAMES)), chosen, judges),
        "causal": lambda: judged(mini.causal(prompts), chosen, judges),
    }
    if counts.base:
        sources["base"] = lambda: judged(mini.base(prompts), chosen, judges)
    answers = {source: parts.get(f"{name}, {source}", make) for source, make in sources.items()}
    models = [source for source in answers if source in ("causal", "base")]
    return {
        "count": len(chosen),
        "shares": {source: shares(each) for source, each in answers.items()},
        "intervals": {source: intervals(each) for source, each in answers.items()},
        "each": [
            {"caption": prompt, "seed": i} | {model: answers[model][i] for model in models}
            for i, prompt in enumerate(prompts)
        ],
    }


def pasts(mini: Miniature, counts: Counts, parts: Parts, judges: Judges) -> list[dict]:
    """What comes back from behind a wall, by what of the past a block sees."""
    chosen = held_out_scenes(SETS["behind a wall"], counts.pasts)
    prompts, rows = [scene.caption for scene in chosen], []
    whole_past = parts.done["behind a wall, causal"]  # the first captions of that set
    for size, sink in PASTS:

        def measure(size: int = size, sink: int = sink) -> Answers:
            if size < 0 and len(chosen) <= len(whole_past):
                return whole_past[: len(chosen)]
            return judged(mini.causal(prompts, size, sink), chosen, judges)

        answers = parts.get(f"past {size} {sink}", measure)
        window = {"local_attn_size": size, "sink_size": sink, "count": len(chosen)}
        rows.append(window | shares(answers) | {"intervals": intervals(answers)})
    return rows


def long_set(mini: Miniature, name: str, count: int, parts: Parts, judges: Judges) -> dict:
    """A minute of rendered scenes and what the VAE keeps of it: PSNR and the tracker's shares."""
    chosen = held_out_scenes(SETS[name], count)
    each = parts.get(f"long {name}", lambda: long_videos(mini, chosen, judges))
    numbers = {key: [one[key] for one in each] for key in (each[0] if each else ())}
    means = {
        key: {q: round(sum(v[q] for v in values) / count, 3) for q in values[0]}
        for key, values in numbers.items()
    }
    return {"count": count, "seconds": LONG_SECONDS, "shares_from_second": SETTLED} | means


def long_videos(
    mini: Miniature, scenes: Sequence[Scene], judges: Judges
) -> list[dict[str, dict[str, float]]]:
    """Of each scene: dB of its first and last second through the VAE, shares of what is rendered and what
    comes out."""
    frames, found = LONG_SECONDS * FPS + 1, []
    shares_of = [judges.call(long_shares_rendered, scene, frames) for scene in scenes]
    videos = rendered(scenes, frames)
    for scene, video, out in zip(scenes, videos, mini.reconstructed(videos), strict=True):
        shares_of.append(judges.call(long_shares, out.numpy(), scene))
        squared = (out - video).square().mean((1, 2, 3))
        seconds = {"first_second": squared[None, :FPS], "last_second": squared[None, -FPS:]}
        found.append({name: psnr(errors).item() for name, errors in seconds.items()})
    of_rendered, of_vae = (results(part) for part in (shares_of[: len(scenes)], shares_of[len(scenes) :]))
    return [
        {"psnr": db, "rendered": one, "vae": other}
        for db, one, other in zip(found, of_rendered, of_vae, strict=True)
    ]


def rendered(scenes: Sequence[Scene], frames: int) -> list[Tensor]:
    """Videos [frames, 3, H, W] in 0..1."""
    with one_thread():
        return [render(scene, frames, SIDE) / 2 + 0.5 for scene in scenes]


# -- what workers do ---------------------------------------------------------------------------------------


def judge_rendered(scene: Scene) -> dict[str, bool]:
    """What the tracker says of a scene as it is drawn."""
    return judge(rendered([scene], FRAMES)[0], scene)


def long_shares_rendered(scene: Scene, frames: int) -> dict[str, float]:
    """Shares of the seconds of a scene as it is drawn."""
    return judge_seconds(rendered([scene], frames)[0], scene).shares(SETTLED)


def long_shares(video: np.ndarray, scene: Scene) -> dict[str, float]:
    """Shares of the seconds of a video [frames, 3, H, W] in 0..1."""
    return judge_seconds(torch.from_numpy(video), scene).shares(SETTLED)


def judged(videos: Iterable[Tensor], of: Sequence[Scene], judges: Judges) -> Answers:
    """What each video shows of its scene; they are judged while the next ones are made."""
    return results([judges.submit(video, scene) for video, scene in zip(videos, of, strict=True)])


def results(futures: Iterable[Future[Any]]) -> list[Any]:
    """What was asked for, once all of it is there; all are asked for before."""
    return [future.result() for future in list(futures)]

"""What the miniature's videos show of held-out captions, how sure that is, and what its past is good for.

Every video is the one that the extraction scripts make of that prompt and seed. tracking.py and
long_tracking.py judge.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.caches.atomic_files import replacing
from experiments.caches.frames import one_thread
from experiments.miniature.autoencoder import psnr, receptive_field, vae_quality
from experiments.miniature.frozen import SETS, hashes, held_out_scenes
from experiments.miniature.generation import Miniature
from experiments.miniature.judges import Answers, Judges
from experiments.miniature.long_tracking import judge_seconds
from experiments.miniature.moving_shapes import FPS, Scene, render
from experiments.miniature.recipe import FRAMES, SIDE, Counts
from experiments.miniature.tracking import judge
from wan import checkpoint
from wan.config import RunConfig
from wan.modules.vae import VAE

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

"""Measure the miniature's videos of held-out captions: shares with intervals, and how much its past matters.

Every video is the one that the extraction scripts make of that prompt and seed; tracking.py judges it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from experiments.caches import files
from experiments.miniature import judges, moving_shapes, tracking, training
from experiments.provenance import choose_device, environment, threads_for
from experiments.session import load_pipeline
from wan import checkpoint
from wan.config import RunConfig, as_one_block
from wan.errors import ConfigError
from wan.files import read_json
from wan.model import WanModel
from wan.noise import draw_noise
from wan.text2video import TextToVideoPipeline
from wan.text_encoder import TextEncoder
from wan.vae import VAE

GPU_BATCH, CPU_BATCH = 96, 16  # videos of 81 frames: a GPU takes about as long for all of them as for a few
PASTS = ((-1, 0), (9, 0), (6, 3), (6, 0), (3, 0))  # frames of local_attn_size and sink_size; a block has 3
DRAWS = 10_000  # of captions, for an interval
FROZEN_SCENES = 96  # of each set, whose hash an evaluation records

Answers = list[dict[str, bool]]


class Miniature:
    """The miniature, loaded once, and its videos [frames, 3, H, W] in 0..1; the i-th caption has seed i."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.device = choose_device(config.device)
        self.batch = CPU_BATCH
        if self.device.type == "cuda":
            self.batch = GPU_BATCH
        self.sizes = checkpoint.read_model_config(config.ckpt_dir)
        self.vae = VAE.from_pretrained(config.ckpt_dir, device=self.device)
        self.encoder = TextEncoder.from_pretrained(
            config.ckpt_dir, self.sizes.text_len, torch.float32, self.device
        )

    def causal(self, captions: list[str], local_attn_size: int = -1, sink_size: int = 0) -> Iterator[Tensor]:
        """Roll out the checkpoint in few steps, with all of the past or a window of it."""
        config = replace(self.config, local_attn_size=local_attn_size, sink_size=sink_size)
        pipeline = load_pipeline(config, self.sizes, torch.float32, self.device)
        for prompts, noise, renoise in self._batches(config, captions):
            _, latents = pipeline.inference(noise, prompt_embeds=self.encoder(prompts), renoise=renoise)
            yield from self.vae.decode(latents).cpu()

    def base(self, captions: list[str]) -> Iterator[Tensor]:
        """Sample the base weights with guidance, all frames at once."""
        base = replace(self.config.base, num_video_frames=moving_shapes.FRAMES)
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
        """Encode and decode videos of one length: as good as the model can be."""
        size = max(1, self.batch * moving_shapes.FRAMES // max(moving_shapes.FRAMES, *map(len, videos)))
        for i in range(0, len(videos), size):
            batch = torch.stack(list(videos[i : i + size])).to(self.device)
            yield from self.vae.decode(self.vae.encode(batch)).cpu()

    def _batches(self, config: RunConfig, captions: list[str]) -> Iterator[tuple[list[str], Tensor, Tensor]]:
        """Yield captions with the noise that a script would draw for each."""
        for i in range(0, len(captions), self.batch):
            prompts = captions[i : i + self.batch]
            noise, renoise = [], []
            for seed in range(i, i + len(prompts)):
                of_seed = replace(config, seed=seed)
                drawn = draw_noise(of_seed, self.sizes, torch.float32, self.device)
                noise.append(drawn[0])
                renoise.append(drawn[1])
            with threads_for(noise[0], self.sizes):
                yield prompts, torch.cat(noise), torch.cat(renoise, 1)


class Parts:
    """Finished measurements in a file beside the result, from which a killed evaluation goes on."""

    def __init__(self, path: Path, settings: dict):
        self.path = path
        self.key = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        self.done: files.Record = {}
        with suppress(ConfigError):  # not there, or damaged
            report = read_json(path)
            if report.get("key") == self.key:
                self.done = report["done"]

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return what was measured under this name before, or measure it now."""
        if name not in self.done:
            self.done[name] = measure()
            files.save_report({"key": self.key, "done": self.done}, self.path)
        return self.done[name]


def evaluate(
    config: RunConfig, captions: int, clips: int, partial_file: Path, workers: int | None = 1
) -> dict:
    """Measure `captions` of each set, and the VAE on `clips` of 81 frames -> plain numbers.

    Finished parts are kept in `partial_file`, removed at the end. workers judge videos; None: one a core.
    """
    weights = weight_hashes(config)
    # Workers are forks, and a fork cannot use a GPU that its parent has touched: they come first.
    with judges.EvalPool(judges.workers_of(workers)) as pool:
        frozen, mini = hashes(), Miniature(config)
        torch.backends.cudnn.benchmark = mini.device.type == "cuda"  # a decoder of few sizes
        settings = {"weights": weights, "frozen": frozen, "counts": [captions, clips]}
        parts = Parts(partial_file, settings | {"device": str(mini.device)})
        report = {
            "environment": environment(mini.device),
            "weights": weights,
            "frozen": frozen,
            "vae": parts.get("vae", lambda: measure_vae(mini, clips)),
            "captions": {name: caption_set(mini, name, captions, parts, pool) for name in moving_shapes.SETS},
            "past": pasts(mini, captions, parts, pool),
        }
    partial_file.unlink(missing_ok=True)
    return report


def weight_hashes(config: RunConfig) -> dict[str, str]:
    """Return path below the model's folder, or its whole path elsewhere -> SHA-256 of what is evaluated."""
    folder = Path(config.ckpt_dir)
    paths = sorted(folder.glob("*/*.safetensors"))
    if config.checkpoint_path:
        paths.append(Path(config.checkpoint_path))
    paths += [Path(lora.path) for lora in config.loras]
    hashes = {}
    for path in dict.fromkeys(paths):
        name = path
        if path.is_relative_to(folder):
            name = path.relative_to(folder)
        hashes[name.as_posix()] = checkpoint.file_sha256(path).result()
    return hashes


def hashes() -> dict[str, str]:
    """Return SHA-256 of each set's first 96 scenes with their captions, and of what the tracker sees.

    The tracker's is of its answers to one rendered scene of each set and of a centre for every second, to
    the hundredth of a side: the same on every CPU, whatever the code looks like.
    """
    of_scenes, answers = {}, []
    for name, kinds in moving_shapes.SETS.items():
        scenes = moving_shapes.held_out_scenes(kinds, FROZEN_SCENES)
        text = "\n".join(f"{scene.caption}: {scene}" for scene in scenes)
        of_scenes[f"scenes, {name}"] = sha256(text.encode()).hexdigest()
        [video] = moving_shapes.render_videos(scenes[:1], moving_shapes.FRAMES)
        centres = tracking.track(video, tracking.in_sight(scenes[0], moving_shapes.SIDE)).centre[
            :: moving_shapes.FPS
        ]
        rounded = [[round(x, 2) for x in centre] for centre in centres.tolist()]
        answers.append([tracking.judge(video, scenes[0]), rounded])
    return {"tracker": sha256(json.dumps(answers).encode()).hexdigest()} | of_scenes


def shares(answers: Answers) -> dict[str, float]:
    """Return the share of videos that answer yes, of those asked, by question."""
    of_questions = {}
    for question in dict.fromkeys(chain(*answers)):
        values = [of_video[question] for of_video in answers if question in of_video]
        of_questions[question] = round(sum(values) / len(values), 3)
    return of_questions


def intervals(answers: Answers, captions: Sequence[str]) -> dict[str, list[float]]:
    """Return the 95 % interval of each share, by question, from resampling captions with all their videos."""
    of_questions = {}
    row_of_caption = {caption: row for row, caption in enumerate(dict.fromkeys(captions))}
    for question in shares(answers):
        # 1. For each caption, how many videos say yes, and how many are asked.
        counts = np.zeros((len(row_of_caption), 2))
        for caption, of_video in zip(captions, answers, strict=True):
            if question in of_video:
                counts[row_of_caption[caption]] += of_video[question], 1
        counts = counts[counts[:, 1] > 0]
        # 2. Captions are resampled with all their videos: videos of one caption are no independent draws.
        rows = np.random.default_rng(0).integers(len(counts), size=(DRAWS, len(counts)))
        drawn = counts[rows].sum(1)
        quantiles = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
        of_questions[question] = quantiles.round(3).tolist()
    return of_questions


def caption_set(mini: Miniature, name: str, count: int, parts: Parts, pool: judges.EvalPool) -> dict:
    """Return the shares of one set: rendered, through the VAE, causal, base."""
    chosen = moving_shapes.held_out_scenes(moving_shapes.SETS[name], count)
    prompts = [scene.caption for scene in chosen]
    sources: dict[str, Callable[[], Answers]] = {
        "rendered": lambda: pool.judge_all(moving_shapes.render_videos(chosen, moving_shapes.FRAMES), chosen),
        "vae": lambda: pool.judge_all(
            mini.reconstructed(moving_shapes.render_videos(chosen, moving_shapes.FRAMES)), chosen
        ),
        "causal": lambda: pool.judge_all(mini.causal(prompts), chosen),
        "base": lambda: pool.judge_all(mini.base(prompts), chosen),
    }
    answers = {source: parts.get(f"{name}, {source}", make) for source, make in sources.items()}
    # Answers of single videos, for the models alone: the other sources have no seed
    return {
        "count": count,
        "shares": {source: shares(of_videos) for source, of_videos in answers.items()},
        "intervals": {source: intervals(of_videos, prompts) for source, of_videos in answers.items()},
        "each": [
            {"caption": prompt, "seed": i} | {model: answers[model][i] for model in ("causal", "base")}
            for i, prompt in enumerate(prompts)
        ],
    }


def pasts(mini: Miniature, count: int, parts: Parts, pool: judges.EvalPool) -> list[dict]:
    """Return what comes back from behind a wall, a row for each window of the past."""
    chosen = moving_shapes.held_out_scenes(moving_shapes.SETS["behind a wall"], count)
    prompts, rows = [scene.caption for scene in chosen], []
    for size, sink in PASTS:
        done = parts.done["behind a wall, causal"]  # the whole past is that of caption_set()
        if size > 0:
            videos = mini.causal(prompts, size, sink)
            done = parts.get(f"past {size} {sink}", partial(pool.judge_all, videos, chosen))
        window = {"local_attn_size": size, "sink_size": sink, "count": count}
        rows.append(window | shares(done) | {"intervals": intervals(done, prompts)})
    return rows


def measure_vae(mini: Miniature, clips: int) -> dict[str, float]:
    """Return PSNR on held-out clips, and how many frames the decoder sees back."""
    vae = mini.vae.vae
    sizes = {"clips": clips, "receptive_field": receptive_field(vae.config)}
    return sizes | training.vae_quality(vae, mini.device, clips)


def receptive_field(config: Mapping) -> int:
    """Return how many video frames the decoder's last frame depends on, its own latent included.

    Read off the gradient of a decoder of the same layers with as few channels as it can have.
    """
    # 1. A decoder of the same layers, of one channel multiple.
    names = ("num_res_blocks", "temperal_downsample", "dim_mult")
    sizes = {name: config[name] for name in names if name in config}
    sizes["dim_mult"] = [1] * len(sizes["dim_mult"])
    small = AutoencoderKLWan(base_dim=4, decoder_base_dim=4, z_dim=2, **sizes).double()
    # 2. Which of 64 latent frames change the last frame of the video.
    latents = torch.linspace(-1, 1, 128, dtype=torch.float64).sin().view(1, 2, 64, 1, 1).requires_grad_()
    last_frame = training.decode(small, latents)[:, :, -1]
    [gradient] = torch.autograd.grad(last_frame.square().sum(), latents)
    latent_frames = int((gradient.abs().sum((0, 1, 3, 4)) > 0).sum())
    return 1 + 4 * (latent_frames - 1)

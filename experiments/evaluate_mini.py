"""Measure the miniature: its VAE, what its videos show of their captions, and what its past is good for.

    python experiments/evaluate_mini.py --output_path checkpoints/wan-mini/evaluation.json

Captions are of the held-out side of experiments/miniature/moving_shapes.py; tracking.py beside it judges. Every video is
the one that the extraction scripts make of that prompt and seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.caches.atomic_files import replacing, require_writable
from experiments.extraction import devices
from experiments.extraction.bidirectional import as_one_block
from experiments.extraction.causal import draw_noise, load_pipeline
from experiments.extraction.provenance import environment
from experiments.miniature.moving_shapes import Scene, render, sample_scenes
from experiments.miniature.tracking import judge
from experiments.running.cli import Parser, main
from experiments.train_mini import FRAMES, HELD_OUT_SEED, SIDE, vae_quality
from wan import checkpoint
from wan.config import RunConfig, load_config
from wan.modules.model import WanModel
from wan.modules.text_encoder import TextEncoder
from wan.modules.vae import VAE
from wan.text2video import TextToVideoPipeline

SETS = {"one shape": ("single", "landmark"), "two that cross": ("crossing",), "behind a wall": ("wall",)}
PASTS = (
    (-1, 0),
    (9, 0),
    (6, 3),
    (6, 0),
    (3, 0),
)  # frames of local_attn_size and sink_size; 3 is the own block alone
BATCH = 16


class Miniature:
    """The miniature's parts, loaded once, and its videos [frames, 3, H, W] in 0..1; the i-th caption is given seed i."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.device = devices.choose_device(config.device)
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

    def reconstructed(self, videos: Iterable[Tensor]) -> Iterator[Tensor]:
        """Videos through the VAE: as good as the model can be."""
        for video in videos:
            yield self.vae.decode(self.vae.encode(video[None].to(self.device)))[0].cpu()

    def _batches(self, config: RunConfig, captions: list[str]) -> Iterator[tuple[list[str], Tensor, Tensor]]:
        """Captions with the noise that a script would draw for each."""
        for i in range(0, len(captions), BATCH):
            prompts = captions[i : i + BATCH]
            seeded = (replace(config, seed=i + n) for n in range(len(prompts)))
            drawn = (draw_noise(one, self.sizes, torch.float32, self.device) for one in seeded)
            noise, renoise = zip(*drawn, strict=True)
            with devices.threads_for(noise[0], self.sizes):
                yield prompts, torch.cat(noise), torch.cat(renoise, 1)


def scenes(kinds: Iterable[str], count: int) -> list[Scene]:
    """Held-out scenes, the same for every model."""
    return list(itertools.islice(sample_scenes(HELD_OUT_SEED + 1, True, kinds), count))


def shares(judgements: list[dict[str, bool]]) -> dict[str, float]:
    """For each question, the share of the videos it was asked of that answer yes."""
    questions = dict.fromkeys(q for j in judgements for q in j)
    asked = {q: [j[q] for j in judgements if q in j] for q in questions}
    return {q: round(sum(answers) / len(answers), 3) for q, answers in asked.items()}


def evaluate(config: RunConfig, captions: int, others: int, clips: int, base: bool = True) -> dict:
    """All of it, as plain numbers: captions with one moving shape, and others of each of the other sets."""
    mini = Miniature(config)
    files = sorted(
        path for path in Path(config.ckpt_dir).rglob("*") if path.suffix in (".safetensors", ".pt")
    )
    report = {
        "weights": {str(path.relative_to(config.ckpt_dir)): checkpoint.file_sha256(path) for path in files}
    }
    report |= {
        "vae": {"clips": clips} | vae_quality(mini.vae.vae, mini.device, clips),
        "captions": {},
        "past": [],
    }
    for name, kinds in SETS.items():
        chosen = scenes(kinds, captions if name == "one shape" else others)
        prompts, real = [s.caption for s in chosen], [render(s, FRAMES, SIDE) / 2 + 0.5 for s in chosen]
        videos = {"rendered": real, "vae": mini.reconstructed(real), "causal": mini.causal(prompts)}
        if base:
            videos["base"] = mini.base(prompts)
        answers = {source: judged(each, chosen) for source, each in videos.items()}
        report["captions"][name] = {
            "count": len(chosen),
            "shares": {source: shares(each) for source, each in answers.items()},
            "each": [
                {"caption": prompt, "seed": i}
                | {s: answers[s][i] for s in answers if s in ("causal", "base")}
                for i, prompt in enumerate(prompts)
            ],
        }
    for local_attn_size, sink_size in PASTS:  # of the last set, behind a wall
        answers = judged(mini.causal(prompts, local_attn_size, sink_size), chosen)
        window = {"local_attn_size": local_attn_size, "sink_size": sink_size, "count": len(chosen)}
        report["past"].append(window | shares(answers))
    return report


def judged(videos: Iterable[Tensor], of: list[Scene]) -> list[dict[str, bool]]:
    """What each video shows of its scene."""
    return [judge(video, scene) for video, scene in zip(videos, of, strict=True)]


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--config_path", default="configs/wan_mini.yaml")
    parser.add_argument("--ckpt_dir", help="directory of another miniature, with self_forcing_mini.pt in it")
    parser.add_argument("--captions", type=int, default=64, help="held-out captions with one moving shape")
    parser.add_argument("--others", type=int, default=24, help="captions of each of the other sets")
    parser.add_argument("--clips", type=int, default=32, help="held-out clips that the VAE is measured on")
    parser.add_argument(
        "--base", action=argparse.BooleanOptionalAction, default=True, help="the base weights too"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output_path", type=Path, default=Path("checkpoints/wan-mini/evaluation.json"))
    args = parser.parse_args(argv)
    paths = (
        {"ckpt_dir": args.ckpt_dir, "checkpoint_path": f"{args.ckpt_dir}/self_forcing_mini.pt"}
        if args.ckpt_dir
        else {}
    )
    config = load_config(args.config_path, paths | {"device": args.device})
    require_writable(args.output_path)
    device = devices.choose_device(args.device)
    report = {"environment": environment(device)} | evaluate(
        config, args.captions, args.others, args.clips, args.base
    )
    with replacing(args.output_path) as file:
        file.write(json.dumps(report, indent=1).encode() + b"\n")
    print("VAE:", report["vae"])
    for name, part in report["captions"].items():
        for source, result in part["shares"].items():
            print(f"{name}, {source}:", result)
    for row in report["past"]:
        print("past:", row)


if __name__ == "__main__":
    main(run)

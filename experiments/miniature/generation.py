"""Videos of the miniature in batches: causal rollouts, guided sampling of the base weights, the round trip
of its VAE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from experiments.extraction import devices
from experiments.extraction.bidirectional import as_one_block
from experiments.extraction.causal import draw_noise, load_pipeline
from experiments.miniature.recipe import FRAMES
from wan import checkpoint
from wan.config import RunConfig
from wan.modules.model import WanModel
from wan.modules.text_encoder import TextEncoder
from wan.modules.vae import VAE
from wan.text2video import TextToVideoPipeline

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

"""Data of the transformer stages: latents of rendered clips, tokens of their captions, noise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from hashlib import sha256

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from experiments.miniature.moving_shapes import Scene, sample_scenes
from experiments.miniature.recipe import CAPTION_DROPOUT, SHIPPED, StageRun
from experiments.miniature.vae_training import encode_scenes, set_layout


def shipped_tokenizer() -> PreTrainedTokenizerFast:
    """Read the miniature's tokenizer, a unigram model laid out like umT5's: pad 0, </s> 1, byte fallback."""
    return PreTrainedTokenizerFast.from_pretrained(SHIPPED / "tokenizer")


class LatentClips:
    """Normalised latents [N, C, F, h, w] of random scenes on the device, and their captions."""

    def __init__(self, run: StageRun):
        device, seed = run.device, run.rank_seed + 2
        scenes = list(itertools.islice(sample_scenes(seed, kinds=run.recipe.kinds), run.clips))
        weights = (run.output_dir / "vae/diffusion_pytorch_model.safetensors").read_bytes()
        made_of = [seed, run.clips, list(run.recipe.kinds), sha256(weights).hexdigest()]
        saved = {}
        if run.latents_file.is_file():  # an earlier stage's
            saved = torch.load(run.latents_file, weights_only=True, map_location="cpu")
        if saved.get("made_of") != made_of:
            saved = {"made_of": made_of, "latents": _encoded(run, scenes)}
            torch.save(saved, run.latents_file)
        self.latents = saved["latents"].to(device)
        captions = ["", *(scene.caption for scene in scenes)]  # row 0 is the empty one
        tokens = shipped_tokenizer()(captions, padding=True, return_tensors="pt")
        self.ids, self.mask = tokens.input_ids.to(device), tokens.attention_mask.to(device)

    def batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw latents with token ids and mask [B, n]; some captions are empty, for guidance."""
        chosen = self.draw(size)
        row = torch.where(torch.rand(size, device=chosen.device) < CAPTION_DROPOUT, 0, chosen + 1)
        return self.latents[chosen], self.ids[row], self.mask[row]

    def draw(self, size: int) -> Tensor:
        """Draw numbers of clips; clip i has the caption in row i + 1 of ids and mask."""
        return torch.randint(len(self.latents), (size,), device=self.latents.device)


def _encoded(run: StageRun, scenes: Sequence[Scene]) -> Tensor:
    vae = AutoencoderKLWan.from_pretrained(run.output_dir / "vae").to(run.device, run.dtype)
    if run.device.type == "cuda":
        set_layout(vae, torch.channels_last, torch.channels_last_3d)
    mean, std = (
        torch.tensor(statistic, device=run.device).view(1, -1, 1, 1, 1)
        for statistic in (vae.config.latents_mean, vae.config.latents_std)
    )
    return ((encode_scenes(vae, scenes, run.device) - mean) / std).to(run.dtype)


def encode_text(encoder: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Return umT5 states [B, n, text_dim], zero beyond each caption's end."""
    return encoder(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None].to(encoder.dtype)


def draw(timesteps: Tensor, *shape: int) -> Tensor:
    """Draw entries of a table of timesteps."""
    return timesteps[torch.randint(len(timesteps), shape, device=timesteps.device)]


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return x_t of the flow path, in the dtype of x0; sigma broadcasts from the left."""
    sigma = sigma.view(*sigma.shape, *[1] * (x0.ndim - sigma.ndim))
    return ((1 - sigma) * x0 + sigma * noise).to(x0.dtype)

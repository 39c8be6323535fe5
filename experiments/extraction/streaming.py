"""Blocks of latents -> pixels, while the rollout goes on: memory is that of a few frames."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from experiments.extraction.video import to_pixels
from wan.modules.vae import POSITIONS_AT_ONCE, VAE, StreamedDecoder


def decoded_blocks(vae: VAE, blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Pixels uint8 [B, frames, H, W, 3] on the CPU of blocks of latents [B, n, C, h, w], in order.

    Blocks of small frames wait until there are as many as the decoder takes in one call. What comes out is
    what decoding at once gives, up to rounding.
    """
    decoder, waiting, count = StreamedDecoder(vae), list[Tensor](), 0
    for latents in blocks:
        if waiting and count + latents.shape[1] > frames_at_once(*latents.shape[-2:]):
            yield to_pixels(decoder(torch.cat(waiting, 1))).cpu()
            waiting, count = [], 0
        waiting.append(latents)
        count += latents.shape[1]
    if waiting:
        yield to_pixels(decoder(torch.cat(waiting, 1))).cpu()


def frames_at_once(height: int, width: int) -> int:
    """Latent frames of this size that wait for each other at most: as many as one call decodes."""
    return max(1, POSITIONS_AT_ONCE // (height * width))

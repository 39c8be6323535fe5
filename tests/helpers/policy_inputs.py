"""What rollouts of the golden model are given where policies are compared: of two denoising steps a block."""

from typing import Any

import torch


def policy_inputs(
    seed: int, height: int, num_frames: int = 15, batch: int = 1, given: int = 0, item: int | None = None
) -> dict[str, Any]:
    """Arguments of pipeline.inference, the first frames as initial_latent where some are given. item: of the
    batch, that one on its own."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, num_frames, 16, height, 6, generator=generator)
    renoise = torch.randn(1, *noise[:, given:].shape, generator=generator)
    embeds = torch.randn(batch, 32, 64, generator=generator)
    if item is not None:
        noise, renoise, embeds = noise[item, None], renoise[:, item, None], embeds[item, None]
    first = {"initial_latent": noise[:, :given]} if given else {}
    return {"noise": noise[:, given:], "renoise": renoise, "prompt_embeds": embeds, **first}

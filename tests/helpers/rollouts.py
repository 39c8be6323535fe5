"""A tiny causal model with random weights, one short rollout of it, and inputs of the golden model."""

from typing import Any

import torch

from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline

MODEL_LAYERS = 4
TWO_STEPS = {"denoising_step_list": [1000, 500]}  # and the clean pass, where a test is not of steps
TINY = {
    "dim": 48,
    "ffn_dim": 64,
    "freq_dim": 32,
    "text_dim": 24,
    "text_len": 7,
    "num_heads": 3,
    "num_layers": MODEL_LAYERS,
}


def tiny_pipeline(dtype=torch.float32, device="cpu", seed=0, **kwargs) -> CausalInferencePipeline:
    torch.manual_seed(seed)
    return CausalInferencePipeline(CausalWanModel(**TINY, **kwargs).to(device, dtype).requires_grad_(False))


def rollout(pipeline: CausalInferencePipeline, num_frames: int = 6, seed: int = 1, **kwargs) -> torch.Tensor:
    model, generator = pipeline.model, torch.Generator().manual_seed(seed)
    noise = torch.randn(1, num_frames, 16, 2, 10, generator=generator)  # 5 tokens a frame
    renoise = torch.randn(3, *noise.shape, generator=generator)
    embeds = torch.randn(1, 4, TINY["text_dim"], generator=generator)
    noise, renoise, embeds = (x.to(model.device, model.dtype) for x in (noise, renoise, embeds))
    return pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise, **kwargs)[1]


def golden_inputs(
    num_frames: int = 15, batch: int = 1, given: int = 0, item: int | None = None
) -> dict[str, Any]:
    """Arguments of pipeline.inference for two steps of the golden model, 3 tokens a frame.

    The first frames are an initial_latent where some are given. item: of the batch, that one on its own.
    """
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(batch, num_frames, 16, 2, 6, generator=generator)
    renoise = torch.randn(1, *noise[:, given:].shape, generator=generator)
    embeds = torch.randn(batch, 32, 64, generator=generator)
    if item is not None:
        noise, renoise, embeds = noise[item, None], renoise[:, item, None], embeds[item, None]
    first = {"initial_latent": noise[:, :given]} if given else {}
    return {"noise": noise[:, given:], "renoise": renoise, "prompt_embeds": embeds, **first}

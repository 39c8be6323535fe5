"""Random numbers, a tiny causal model, one short rollout of it, and rollouts of the golden model."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN, golden_model

from wan.cache import PromptSwitch
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline

MODEL_LAYERS = 4
TWO_STEPS = {"denoising_step_list": [1000, 500]}  # and the clean pass, where a test is not of steps
TINY = {"dim": 48, "ffn_dim": 64, "freq_dim": 32, "text_dim": 24, "text_len": 7}
TINY |= {"num_heads": 3, "num_layers": MODEL_LAYERS}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def require_triton() -> None:
    """Skip a module where kernels cannot run: 3.6 interprets no loop over an argument, with NumPy 2.4."""
    pytest.importorskip("triton", "3.7", reason="no Triton here: bash tests/run.sh --full installs it")


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


# --- Runs of public releases under cache policies (tests/golden/README.md)
@cache
def golden_runs(name: str) -> dict[str, np.ndarray]:
    """The arrays of a file of tests/golden/policies."""
    with np.load(GOLDEN / "policies" / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def golden_run(name: str, case: str) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """The arrays of one run, and its latents [F, 16, 8, 12], stored byte by byte of float32."""
    stored = golden_runs(name)
    values = np.ascontiguousarray(stored["latents_bytes"].T).view(np.float32)
    latents = values.reshape(len(stored["cases"]), -1, 16, 8, 12)[stored["cases"].tolist().index(case)]
    arrays = {key.partition("/")[2]: x for key, x in stored.items() if key.startswith(f"{case}/")}
    return arrays, torch.from_numpy(latents)


@cache
def shared_golden_model() -> CausalWanModel:
    """It keeps nothing of a rollout."""
    return golden_model()


def release_rollout(
    policy, frames, switches=(), how="recache", rows=(0,), steps=(1000, 750, 500, 250), size=(8, 12)
):
    """Latents from those runs' noise and prompts; rows: 0 their video, 1 that noise upside down, prompt 2."""
    given = {key: torch.from_numpy(x).float() for key, x in golden_runs("inputs").items()}
    first, between = (given[name][..., : size[0], : size[1]] for name in ("noise", "renoise"))
    noise = torch.cat([first, first.flip(1)])[list(rows), :frames]
    renoise = torch.stack([between, between.flip(1)], 1)[: len(steps) - 1, list(rows), :frames]
    texts = given["prompt_embeds"]
    schedule = [PromptSwitch(f, how=how, prompt_embeds=texts[[1] * len(rows)]) for f in switches]
    pipeline = CausalInferencePipeline(shared_golden_model(), cache_policy=policy, denoising_step_list=steps)
    options = {"prompt_embeds": texts[[2 * row for row in rows]], "prompt_schedule": schedule}
    return pipeline.inference(noise, renoise=renoise, **options)[1]

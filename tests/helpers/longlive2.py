"""Repeat runs of LongLive 2.0's own inference by our classes, and make such runs by a naive second way.

A run is an .npz as ../shared/longlive2/README.md describes it, or a folder of its parts (tests/golden).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wan.cache import KVCache, PromptSwitch
from wan.config import ModelConfig
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy

SIZES = ("dim", "ffn_dim", "num_heads", "num_layers", "freq_dim", "text_dim", "text_len", "in_dim", "out_dim")


def read_arrays(path: str | Path) -> dict[str, Tensor]:
    """Return the arrays of an .npz, or of all in a folder, by name."""
    files = [Path(path)]
    if Path(path).is_dir():
        files = sorted(Path(path).glob("*.npz"))
    arrays: dict[str, Tensor] = {}
    for file in files:
        with np.load(file) as stored:
            arrays |= {name: torch.from_numpy(stored[name]) for name in stored.files}
    return arrays


def read_run(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config of a run and its arrays by name."""
    arrays = read_arrays(path)
    return json.loads(arrays["config"].numpy().tobytes()), arrays


def replay(path: str | Path) -> Tensor:
    """Return the latents [B, F, 48, h, w] of a run's noise, prompts and weights, by our public classes."""
    return replay_with_cache(*read_run(path))[0]


def replay_with_cache(config: dict[str, Any], arrays: dict[str, Tensor]) -> tuple[Tensor, KVCache]:
    """Return the latents, and the cache as the last block left it."""
    # 1. The model, its rollout and its policy.
    case, num_steps = config["case"], config["sampling_steps"]
    sizes = {name: config["model"][name] for name in SIZES}
    model = CausalWanModel(**vars(ModelConfig(**sizes)))
    model.load_state_dict({name[2:]: x for name, x in arrays.items() if name.startswith("w.")})
    model.eval().requires_grad_(False)
    policy = make_policy("multi_shot", window=case["window"], sink=case["sink"], rope_offset=case["phi"])
    pipeline = CausalInferencePipeline(
        model,
        num_frame_per_block=case["nfpb"],
        denoising_step_list=[1000 - 1000 * step // num_steps for step in range(num_steps)],
        timestep_shift=config["timestep_shift"],
        cache_policy=policy,
        solver="unipc",
        held_first_frame=config["independent_first_frame"],
    )
    # 2. A prompt for each block; the first video's texts say where shots begin.
    texts, embeds = config["prompts"][0], arrays["prompt_embeds"]
    schedule = [
        PromptSwitch(frame=case["nfpb"] * block, prompt=texts[block], prompt_embeds=embeds[:, block])
        for block in range(1, len(texts))
    ]
    # 3. A given first frame takes the place of the first noise.
    noise, image = arrays["noise"], arrays.get("initial_latent")
    if image is not None:
        noise = noise[:, 1:]
    caches: list[KVCache] = []
    new_kv_cache = model.new_kv_cache

    def noted_cache(*args: Any, **kwargs: Any) -> KVCache:
        caches.append(new_kv_cache(*args, **kwargs))
        return caches[-1]

    model.new_kv_cache = noted_cache
    latents = pipeline.inference(
        noise, prompt_embeds=embeds[:, 0], initial_latent=image, prompt_schedule=schedule
    )[1]
    return latents, caches[-1]

"""Self-Forcing's public transformer, imported from a checkout, rolled out beside ours by the same weights."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from experiments.dev.measure_capture import MIB, Rollout
from experiments.dev.process_memory import gpu_peak
from experiments.dev.tables import median_interval
from wan.blocks import block_ranges, block_sizes
from wan.config import ModelConfig
from wan.errors import ConfigError, reason_of
from wan.pipeline import add_noise, flow_to_x0

URL, TRANSFORMER = "https://github.com/guandeh17/Self-Forcing", "wan/model.py"
MOST_TOKENS = 32760  # its max_attention_size, keys that a query sees: older ones are left out without a word
SIZES = ("text_len", "in_dim", "dim", "ffn_dim", "freq_dim", "text_dim", "out_dim", "num_heads", "num_layers")


def import_public(checkout: Path) -> tuple[type, str]:
    """The class of its transformer and what computes its attention. ConfigError where it cannot be had.

    Its package is named wan like ours, which is out of the way meanwhile. The package's own __init__ is left
    out: it loads every model of the release.
    """
    if not (checkout / TRANSFORMER).is_file():
        raise ConfigError(f"{checkout} has no {TRANSFORMER}; run: git clone {URL} {checkout}")
    ours = _take_wan()
    try:
        for name in ("wan", "wan.modules"):
            package = ModuleType(name)
            package.__path__ = [str(checkout / name.replace(".", "/"))]
            sys.modules[name] = package
        names = ("attention", "model", "causal_model")
        attention, *users = (import_module(f"wan.modules.{name}") for name in names)
        found = users[-1].CausalWanModel
    except Exception as error:  # of its code or of a package that it needs
        raise ConfigError(
            f"the transformer of {checkout} cannot be imported: {reason_of(error)}; install what its "
            "requirements.txt names"
        ) from error
    finally:
        _take_wan()
        sys.modules.update(ours)
    return found, _choose_attention(attention, *users)


def _take_wan() -> dict[str, ModuleType]:
    """Remove the package wan from the imported modules, and return what it was."""
    names = [name for name in sys.modules if name.partition(".")[0] == "wan"]
    return {name: sys.modules.pop(name) for name in names}


def _choose_attention(attention: ModuleType, model: ModuleType, causal_model: ModuleType) -> str:
    """The public code's own choice; without FlashAttention cross-attention takes its own fallback too."""
    if attention.FLASH_ATTN_3_AVAILABLE:
        return "FlashAttention-3"
    if hasattr(getattr(attention, "flash_attn", None), "flash_attn_varlen_func"):
        return "FlashAttention-2"
    vars(attention)["FLASH_ATTN_2_AVAILABLE"] = False  # flash-attn-4 alone is a package flash_attn too
    fallback = attention.attention

    def in_its_own_dtype(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """The fallback, which returns bfloat16 unless told otherwise: weights of other dtypes refuse it."""
        return fallback(q, k, v, **{"dtype": q.dtype} | options)

    vars(model)["flash_attention"] = vars(causal_model)["attention"] = in_its_own_dtype
    return "PyTorch's scaled_dot_product_attention"


def build_public(model_class: type, ours: torch.nn.Module, sizes: ModelConfig) -> torch.nn.Module:
    """The public transformer with our model's weights, device and dtype. ConfigError where names differ."""
    weight = next(ours.parameters())
    with torch.device(weight.device):
        model = model_class(**{name: getattr(sizes, name) for name in SIZES}, eps=sizes.eps)
    torch.nn.Module.to(model, weight.dtype).eval().requires_grad_(False)  # diffusers' own warns of nothing
    try:
        model.load_state_dict(ours.state_dict())
    except RuntimeError as error:
        raise ConfigError(f"the checkout's transformer has other parameters: {reason_of(error)}") from error
    return model


@torch.no_grad()
def roll_out_public(model: Any, rollout: Rollout, sizes: ModelConfig) -> Tensor:
    """Latents [B, F, C, h, w] of the public transformer, by the passes, noise and formulas of ours."""
    pipeline, noise = rollout.pipeline, rollout.noise
    batch, num_frames, _, height, width = noise.shape
    S = sizes.tokens_per_frame(height, width)

    def buffers(length: int) -> dict[str, Tensor]:
        shape = (batch, length, sizes.num_heads, sizes.head_dim)
        return {"k": noise.new_zeros(shape), "v": noise.new_zeros(shape)}

    def index() -> Tensor:
        return torch.zeros(1, dtype=torch.long, device=noise.device)

    layers = range(sizes.num_layers)
    ends = ("global_end_index", "local_end_index")
    past = [buffers(num_frames * S) | {name: index() for name in ends} for _ in layers]
    text = [buffers(sizes.text_len) | {"is_init": index().bool()} for _ in layers]

    def predict_flow(x: Tensor, frames: range, step: int) -> Tensor:
        t = torch.full((batch, len(frames)), pipeline.pass_timesteps[step], device=noise.device)
        flow = model(
            x.transpose(1, 2),
            t=t,
            context=rollout.prompt_embeds,
            seq_len=num_frames * S,
            kv_cache=past,
            crossattn_cache=text,
            current_start=frames.start * S,
        )
        return flow.transpose(1, 2)

    finished, sigmas = [], pipeline.sigmas
    for block, frames in enumerate(block_ranges(block_sizes(num_frames, pipeline.num_frame_per_block))):
        own, steps = slice(frames.start, frames.stop), pipeline.steps_of(block)
        x = noise[:, own]
        for number, step in enumerate(steps):
            x0 = flow_to_x0(predict_flow(x, frames, step), x, sigmas[step])
            if number + 1 < len(steps):
                x = add_noise(x0, rollout.renoise[number][:, own], sigmas[steps[number + 1]])
        predict_flow(x0, frames, len(pipeline.timesteps))
        finished.append(x0)
    return torch.cat(finished, 1)


def in_float32(rollout: Rollout) -> Tensor:
    """Latents of our transformer with the same weights and inputs in float32; the model becomes float32."""
    inputs = rollout.noise, rollout.renoise, rollout.prompt_embeds
    rollout.pipeline.model.float()
    return Rollout(rollout.pipeline, *(x.float() for x in inputs)).latents([])


def measure(
    rows: Mapping[str, Callable[[], Tensor]],
    device: torch.device,
    repeats: int,
    exact: Callable[[], Tensor] | None = None,
) -> dict[str, dict]:
    """Seconds and GPU peak of every row, in turn after a round that does not count; latents beside row 1's.

    relative_difference is that of the latents: norm of the difference over the norm of the first row's. error
    is the same, from the latents that exact() gives at the end, in their norm.
    """
    names, latents = list(rows), {name: run() for name, run in rows.items()}
    reference = latents[names[0]].double()
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in names}
    for _ in range(repeats):
        for name, run in rows.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            run()
            peak = gpu_peak(device).get("gpu_peak_bytes", 0)  # waits for the device
            found[name]["seconds"].append(round(time.perf_counter() - start, 6))
            found[name]["gpu_peak_mib"] = round(peak / MIB)
    base = found[names[0]]["seconds"]
    for name, row in found.items():
        ratios = [own / first for own, first in zip(row["seconds"], base, strict=True)]
        difference = (latents[name].double() - reference).norm() / reference.norm()
        row |= {"median_seconds": statistics.median(row["seconds"])}
        row |= {"times_public": round(statistics.median(ratios), 3)}
        row |= {"times_public_interval": [round(bound, 3) for bound in median_interval(ratios)]}
        row |= {"relative_difference": float(f"{difference.item():.3g}")}
    if exact:
        right = exact().double()
        for name, row in found.items():
            error = (latents[name].double() - right).norm() / right.norm()
            row |= {"error": float(f"{error.item():.3g}")}
    return found

"""Time Self-Forcing's public transformer and ours in one process: the same weights, noise and passes.

    git clone https://github.com/guandeh17/Self-Forcing ../Self-Forcing
    python experiments/benchmarks/public.py ../Self-Forcing --random_weights --device cuda

The public transformer is imported from the checkout and called as its own pipeline calls it; prompt states
are random, nothing is decoded. Rows run in turn; all are compared with ours in float32 at the end. Beyond
21 frames of 480 x 832 the public code leaves older keys out.
"""

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.harness import (
    Rollout,
    benchmark_parser,
    capture_requests,
    capturing,
    in_turn,
    new_report,
    print_rows,
    save_report,
    seconds_of,
)
from experiments.running.cli import config_from, main
from wan.blocks import block_ranges, block_sizes
from wan.errors import ConfigError, reason_of
from wan.pipeline import add_noise, flow_to_x0

URL, TRANSFORMER = "https://github.com/guandeh17/Self-Forcing", "wan/modules/causal_model.py"
SIZES = ("text_len", "in_dim", "dim", "ffn_dim", "freq_dim", "text_dim", "out_dim", "num_heads", "num_layers")
PUBLIC = "public code"


def run(argv=None):
    parser = benchmark_parser(__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of Self-Forcing's public repository")
    args = parser.parse_args(argv)
    config = config_from(args)
    report = new_report(config, args)
    if config.policy.name != "full" or config.sampler != "blocks" or config.independent_first_frame:
        raise ConfigError("the public code has equal blocks that see the whole past: leave the rest out")
    model_class, attention = import_public(args.checkout)
    rollout = Rollout(config, args.random_weights)
    public = build_public(model_class, rollout)

    def public_seconds() -> float:
        def rolled() -> None:
            rollout.latents = roll_out_public(public, rollout)

        return seconds_of(rolled)

    requests = capture_requests(config, rollout.sizes.num_layers)
    rows = {PUBLIC: public_seconds}
    for name in ("plain", "logits", "mass"):
        rows[f"ours, {name}"] = partial(rollout.seconds, capturing(requests[name]))
    latents = {}
    for name, timed in rows.items():  # the round that is not counted
        timed()
        latents[name] = rollout.latents.double()
    found = in_turn(rows, args.repeats)
    rollout.model.float()  # the same weights and inputs in float32
    rollout.noise, rollout.renoise, rollout.text = (
        x.float() for x in (rollout.noise, rollout.renoise, rollout.text)
    )
    exact = rollout.generate().double()
    for name, row in found.items():
        for beside, other in (("difference", latents[PUBLIC]), ("error", exact)):
            row[beside] = float(f"{((latents[name] - other).norm() / other.norm()).item():.3g}")
    print_rows(found)
    save_report(report | {"public_attention": attention, "rows": found}, args.output_path)


def import_public(checkout: Path) -> tuple[type, str]:
    """Return the class of its transformer and the name of what computes its attention.

    Its package is named wan like ours, which is out of the way meanwhile. The package's own __init__ is left
    out: it loads every model of the release. Raises ConfigError where it cannot be had.
    """
    if not (checkout / TRANSFORMER).is_file():
        raise ConfigError(f"{checkout} has no {TRANSFORMER}; run: git clone {URL} {checkout}")
    ours = take_wan()
    try:
        for name in ("wan", "wan.modules"):
            package = ModuleType(name)
            package.__path__ = [str(checkout / name.replace(".", "/"))]
            sys.modules[name] = package
        names = ("attention", "model", "causal_model")
        attention, *users = (import_module(f"wan.modules.{name}") for name in names)
        return users[-1].CausalWanModel, choose_attention(attention, *users)
    except Exception as error:  # of its code, or of a package that it needs
        raise ConfigError(
            f"the transformer of {checkout} cannot be imported: {reason_of(error)}; install what its "
            "requirements.txt names"
        ) from error
    finally:
        take_wan()
        sys.modules.update(ours)


def take_wan() -> dict[str, ModuleType]:
    """Remove the package wan from the imported modules, and return it."""
    names = [name for name in sys.modules if name.partition(".")[0] == "wan"]
    return {name: sys.modules.pop(name) for name in names}


def choose_attention(attention: ModuleType, model: ModuleType, causal_model: ModuleType) -> str:
    """Leave the public code its own choice; without FlashAttention cross-attention takes its fallback too."""
    if attention.FLASH_ATTN_3_AVAILABLE:
        return "FlashAttention-3"
    if hasattr(getattr(attention, "flash_attn", None), "flash_attn_varlen_func"):
        return "FlashAttention-2"
    vars(attention)["FLASH_ATTN_2_AVAILABLE"] = False  # flash-attn-4 alone is a package flash_attn too
    fallback = attention.attention

    def in_its_own_dtype(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Call the fallback, which returns bfloat16 unless told otherwise."""
        return fallback(q, k, v, **{"dtype": q.dtype} | options)

    vars(model)["flash_attention"] = vars(causal_model)["attention"] = in_its_own_dtype
    return "PyTorch's scaled_dot_product_attention"


def build_public(model_class: type, rollout: Rollout) -> torch.nn.Module:
    """Return the public transformer with our model's weights. ConfigError where names differ."""
    with torch.device(rollout.device):
        model = model_class(**{name: getattr(rollout.sizes, name) for name in SIZES}, eps=rollout.sizes.eps)
    torch.nn.Module.to(model, rollout.dtype).eval().requires_grad_(False)  # diffusers' own warns of nothing
    try:
        model.load_state_dict(rollout.model.state_dict())
    except RuntimeError as error:
        raise ConfigError(f"the checkout's transformer has other parameters: {reason_of(error)}") from error
    return model


def roll_out_public(model: Any, rollout: Rollout) -> Tensor:
    """Return latents [B, F, C, h, w] of the public transformer, by the passes, noise and formulas of ours."""
    pipeline, noise, sizes = rollout.pipeline, rollout.noise, rollout.sizes
    batch, num_frames, _, height, width = noise.shape
    S = sizes.tokens_per_frame(height, width)

    def buffers(length: int) -> dict[str, Tensor]:
        shape = (batch, length, sizes.num_heads, sizes.head_dim)
        return {"k": noise.new_zeros(shape), "v": noise.new_zeros(shape)}

    def index() -> Tensor:
        return torch.zeros(1, dtype=torch.long, device=noise.device)

    layers, ends = range(sizes.num_layers), ("global_end_index", "local_end_index")
    past = [buffers(num_frames * S) | {name: index() for name in ends} for _ in layers]
    text = [buffers(sizes.text_len) | {"is_init": index().bool()} for _ in layers]

    def predict_flow(x: Tensor, frames: range, step: int) -> Tensor:
        t = torch.full((batch, len(frames)), pipeline.pass_timesteps[step], device=noise.device)
        flow = model(
            x.transpose(1, 2),
            t=t,
            context=rollout.text,
            seq_len=num_frames * S,
            kv_cache=past,
            crossattn_cache=text,
            current_start=frames.start * S,
        )
        return flow.transpose(1, 2)

    finished, sigmas = [], pipeline.sigmas
    with torch.no_grad():
        for block, frames in enumerate(block_ranges(block_sizes(num_frames, pipeline.num_frame_per_block))):
            own, steps = slice(frames.start, frames.stop), rollout.config.passes_of_block(block)[:-1]
            x = noise[:, own]
            for number, step in enumerate(steps):
                x0 = flow_to_x0(predict_flow(x, frames, step), x, sigmas[step])
                if number + 1 < len(steps):
                    x = add_noise(x0, rollout.renoise[number][:, own], sigmas[steps[number + 1]])
            predict_flow(x0, frames, len(pipeline.timesteps))
            finished.append(x0)
    return torch.cat(finished, 1)


if __name__ == "__main__":
    main(run)

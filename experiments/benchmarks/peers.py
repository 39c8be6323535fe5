"""Time Self-Forcing's public transformer beside ours: the same weights, noise and passes.

    git clone https://github.com/guandeh17/Self-Forcing ../Self-Forcing
    python experiments/benchmarks/peers.py --config_path configs/wan_mini.yaml --checkout ../Self-Forcing
    python experiments/benchmarks/peers.py --random_weights --device cuda --checkout ../Self-Forcing

The public transformer is imported from a checkout (git clone URL ../Self-Forcing) and called as its own
pipeline calls it; prompt states are random, nothing is decoded. Beyond 21 frames of 480 x 832 the public code
leaves older keys out.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.rollouts import (
    Part,
    Rollout,
    Timed,
    capture_requests,
    capturing,
    seconds_of,
    time_rows,
    warmed_up,
)
from experiments.running.cli import config_from, count, main, run_parser
from wan.blocks import block_ranges, block_sizes
from wan.config import RunConfig
from wan.errors import ConfigError, reason_of
from wan.pipeline import add_noise, flow_to_x0
from wan.wings import parallel

URL, TRANSFORMER = "https://github.com/guandeh17/Self-Forcing", "wan/modules/causal_model.py"
SIZES = ("text_len", "in_dim", "dim", "ffn_dim", "freq_dim", "text_dim", "out_dim", "num_heads", "num_layers")
PUBLIC = "public code"


def run(argv=None):
    parser = run_parser(__doc__, None)
    flag = parser.add_argument
    flag("--checkout", type=Path, default=Path("../Self-Forcing"), help="of Self-Forcing's repository")
    flag("--random_weights", action="store_true", help="the shapes of the config's model, without any file")
    flag("--repeats", type=count, default=5, help="timed rounds, of all rows in turn")
    parser.set_defaults(graphs=False)
    args = parser.parse_args(argv)
    config = parallel.on_own_device(config_from(args))
    time_rows(args, config, public_and_ours(args, config))


def public_and_ours(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield the public rollout and ours, each with its latents' difference to ours in float32."""
    if config.policy.name != "full" or config.sampler != "blocks" or config.independent_first_frame:
        raise ConfigError("the public code has equal blocks that see the whole past: leave the rest out")
    model_class, attention = import_public(args.checkout)
    rollout = Rollout(config, args.random_weights)
    sizes = {name: getattr(rollout.sizes, name) for name in (*SIZES, "eps")}
    # 1. The public model with our weights
    with torch.device(rollout.device):
        public = model_class(**sizes)
    torch.nn.Module.to(public, rollout.dtype).eval().requires_grad_(False)  # diffusers' own warns of nothing
    public.load_state_dict(rollout.model.state_dict())
    latents = list[Tensor]()

    def roll_out() -> None:
        rollout.latents = roll_out_public(public, rollout)

    def more() -> dict[str, Any]:
        latents.append(rollout.latents.double())
        return {"public_attention": attention}

    # 2. Rows, each called once
    requests = capture_requests(config, rollout.sizes.num_layers)
    timed: Timed = {PUBLIC: partial(seconds_of, roll_out)}
    for name in ("plain", "logits", "mass"):
        timed[f"ours, {name}"] = partial(rollout.seconds, capturing(requests[name]))
    about = warmed_up(timed, more)
    # 3. Differences of latents: to the public code's, and of both to ours in float32
    given = rollout.noise, rollout.renoise, rollout.text
    rollout.model.float()  # the same weights and inputs, exactly
    rollout.noise, rollout.renoise, rollout.text = (x.float() for x in given)
    exact = rollout.generate().double()
    rollout.model.to(rollout.dtype)
    rollout.noise, rollout.renoise, rollout.text = given
    for row, own in zip(about.values(), latents, strict=True):
        for beside, other in (("difference", latents[0]), ("error", exact)):
            row[beside] = float(f"{((own - other).norm() / other.norm()).item():.3g}")
    yield timed, about


def import_public(checkout: Path) -> tuple[type, str]:
    """Return the class of its transformer and the name of what computes its attention.

    Its package is named wan like ours, which is out of the way meanwhile. The package's own __init__ is left
    out: it loads every model of the release. Raises ConfigError where it cannot be had.
    """
    # Its files import each other as wan.modules.X, so that name must be theirs while they load.
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
            f"the transformer of {checkout} cannot be imported: {reason_of(error)}; run: git clone {URL} "
            f"{checkout}, and install what its requirements.txt names"
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

    # Its KV cache: buffers of the whole video and of the text, and where each ends
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
    for block, frames in enumerate(block_ranges(block_sizes(num_frames, pipeline.num_frame_per_block))):
        own, steps = slice(frames.start, frames.stop), rollout.config.passes_of_block(block)[:-1]
        x = noise[:, own]
        for number, step in enumerate(steps):
            x0 = flow_to_x0(predict_flow(x, frames, step), x, sigmas[step])
            if number + 1 < len(steps):
                x = add_noise(x0, rollout.renoise[number][:, own], sigmas[steps[number + 1]])
        # The clean pass writes the keys and values that later blocks see.
        predict_flow(x0, frames, len(pipeline.timesteps))
        finished.append(x0)
    return torch.cat(finished, 1)


if __name__ == "__main__":
    main(run)

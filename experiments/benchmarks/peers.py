"""Time others beside ours in one process: Self-Forcing's public code, diffusers and its tools.

    git clone https://github.com/guandeh17/Self-Forcing ../Self-Forcing
    python experiments/benchmarks/peers.py --config_path configs/wan_mini.yaml --checkout ../Self-Forcing
    python experiments/benchmarks/peers.py --random_weights --device cuda --checkout ../Self-Forcing

What is not installed is absent, with the reason. Beyond 21 frames of 480 x 832 the public code leaves older
keys out. attention-map-diffusers is 1.0.0 of PyPI.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from experiments.analysis.stats import psnr
from experiments.benchmarks import rows
from experiments.provenance import choose_device
from experiments.running.cli import main
from wan.cache import CachePolicy
from wan.config import RunConfig
from wan.vae import VAE


def run(argv=None):
    groups: dict[str, rows.Group] = {"rollouts": rollouts, "decoder": decoder, "maps": maps}
    parser = rows.row_parser(__doc__, groups, default=[*groups])
    parser.add_argument("--checkout", type=Path, default=Path("../Self-Forcing"), help="its repository")
    args = parser.parse_args(argv)
    rows.time_groups(args, [groups[name] for name in args.what])


# --- Rollouts
def rollouts(args: argparse.Namespace, config: RunConfig) -> Iterator[list[rows.Row]]:
    """Yield the public rollout and ours, with the latents' error to ours in float32."""
    rollout = rows.Rollout(args, config)
    # 1. Our latents in float32, of the same weights and inputs exactly
    inputs = rollout.noise, rollout.renoise, rollout.text
    rollout.model.float()
    rollout.noise, rollout.renoise, rollout.text = (x.float() for x in inputs)
    rollout.generate()
    exact = rollout.latents.double()
    rollout.model.to(rollout.dtype)
    rollout.noise, rollout.renoise, rollout.text = inputs

    def error() -> dict[str, float]:
        distance = (rollout.latents.double() - exact).norm() / exact.norm()
        return {"error": float(f"{distance.item():.3g}")}

    # 2. The public transformer takes the place of ours in our pipeline; noise and formulas are the same.
    in_place = partial(mock.patch.object, rollout.pipeline, "model", PublicCode(rollout, args.checkout))
    public = replace(rollout.row("public code", "noise to latents", in_place), optional=True)
    group = [public, *rows.rollout_rows(rollout, ("logits", "mass"))]
    group = [replace(row, facts=error) for row in group]
    if args.graphs:
        (replayed,) = rows.rollout_rows(rows.Rollout(args, config, graphs=True), ())
        group.append(replace(replayed, name="plain, CUDA graphs"))
    yield group


class PublicCode:
    """Self-Forcing's public transformer with our weights, behind the calls of our model and KV cache."""

    head_shard, local_attn_size, nbytes = None, -1, 0

    def __init__(self, rollout: rows.Rollout, checkout: Path):
        self.rollout, self.config, self.checkout = rollout, rollout.sizes, checkout

    @cached_property
    def model(self) -> Any:
        """The model, whose package is named wan like ours, which is out of the way while it is imported."""
        names = ("attention", "model", "causal_model")
        ours = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "wan"}
        try:
            # Without the package's own __init__, which loads every model of the release
            for name in ("wan", "wan.modules"):
                package = ModuleType(name)
                package.__path__ = [str(self.checkout / name.replace(".", "/"))]
                sys.modules[name] = package
            attention, model, causal_model = (import_module(f"wan.modules.{name}") for name in names)
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "wan"]:
                del sys.modules[name]
            sys.modules.update(ours)
        # Without FlashAttention its cross-attention takes the fallback too; flash-attn-4 alone is none.
        flash = getattr(attention, "flash_attn", None)
        if not attention.FLASH_ATTN_3_AVAILABLE and not hasattr(flash, "flash_attn_varlen_func"):
            vars(attention)["FLASH_ATTN_2_AVAILABLE"] = False
            fallback = partial(attention.attention, dtype=self.rollout.dtype)
            vars(model)["flash_attention"] = vars(causal_model)["attention"] = fallback
        with torch.device(self.rollout.device):
            public = causal_model.CausalWanModel(**vars(self.config))
        public.load_state_dict(self.rollout.model.state_dict())
        return nn.Module.to(public, self.rollout.dtype).eval().requires_grad_(False)

    def text_keys_values(self, text: Tensor) -> Tensor:
        return text  # it projects the text itself

    def new_kv_cache(
        self, batch: int, num_frames: int, height: int, width: int, policy: CachePolicy, block_size: int
    ) -> "PublicCode":
        """Make buffers of the whole video and of the text, and where each ends."""
        self.tokens_per_frame = self.config.tokens_per_frame(height, width)
        self.length, noise = num_frames * self.tokens_per_frame, self.rollout.noise

        def buffers(length: int, ends: dict[str, torch.dtype]) -> dict[str, Tensor]:
            shape = (batch, length, self.config.num_heads, self.config.head_dim)
            tensors = {"k": noise.new_zeros(shape), "v": noise.new_zeros(shape)}
            return tensors | {name: noise.new_zeros(1, dtype=dtype) for name, dtype in ends.items()}

        ends, layers = {"global_end_index": torch.long, "local_end_index": torch.long}, self.config.num_layers
        self.past = [buffers(self.length, ends) for _ in range(layers)]
        self.text = [buffers(self.config.text_len, {"is_init": torch.bool}) for _ in range(layers)]
        return self

    def advance(self, frames: range, text: Tensor, cut: bool) -> None:
        self.start = frames.start * self.tokens_per_frame

    def begin_pass(self, is_clean: bool) -> None:
        pass

    def __call__(self, x: Tensor, timestep: Tensor, text: Tensor, cache: "PublicCode") -> Tensor:
        """Return the flow of a block x [B, n, C, h, w]."""
        flow = self.model(
            x.transpose(1, 2),
            t=timestep.expand(*x.shape[:2]),
            context=text,
            seq_len=self.length,
            kv_cache=self.past,
            crossattn_cache=self.text,
            current_start=self.start,
        )
        return flow.transpose(1, 2)


# --- The decoder alone
def decoder(args: argparse.Namespace, config: RunConfig) -> Iterator[list[rows.Row]]:
    """Yield diffusers' decoder and ours, whole and in blocks, with dB to diffusers' in float32, no TF32."""
    device, channels = choose_device(config.device), rows.sizes_of(config).in_dim
    vae = rows.vae_of(config, args.random_weights, device)
    half = VAE(deepcopy(vae.vae).to(torch.bfloat16)).to(device)
    torch.manual_seed(config.seed)
    latents = torch.randn(1, config.num_frames, channels, config.height, config.width).to(device)

    def by_diffusers(vae: VAE) -> Tensor:
        z = latents.transpose(1, 2) * vae.latents_std + vae.latents_mean
        return (vae.vae.decode(z.to(vae.vae.dtype)).sample.float().transpose(1, 2) / 2 + 0.5).clamp(0, 1)

    def in_blocks() -> Tensor:
        stream = half.stream()
        return torch.cat([stream(block).cpu() for block in latents.split(config.block_sizes, 1)], 1)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = by_diffusers(vae).cpu().numpy()  # [1, frames, 3, H, W]

    def row(name: str, call: Callable[[], Tensor]) -> rows.Row:
        def facts() -> dict[str, float]:
            return {"psnr": round(psnr(call().float().cpu().numpy(), exact).item(), 2)}

        return rows.Row(name, "latents to pictures", partial(rows.seconds_of, call), facts)

    yield [
        row("diffusers, float32", partial(by_diffusers, vae)),
        row("diffusers, bfloat16", partial(by_diffusers, half)),
        row("ours, bfloat16", partial(half.decode, latents)),
        row("ours, bfloat16, block by block to the host", in_blocks),
    ]


# --- Maps of a pipeline
def maps(args: argparse.Namespace, config: RunConfig) -> Iterator[list[rows.Row]]:
    """Yield WanPipeline, plain and while attention-map-diffusers keeps a layer's self-attention."""
    sampler = rows.RandomPipeline(args, config)

    def kept(**options: Any) -> None:
        package = import_module("attention_map_diffusers")
        layer = {"relations": ("video->video",), "layers": ["blocks.1.attn1"]}
        with package.AttentionCapture(sampler.pipe, **layer, **options) as capture:
            sampler.sample()
        capture.compute(compute_device=str(sampler.device))

    name, measured = "attention-map-diffusers 1.0.0", "2 steps, the mean over heads of layer 1's last step"
    raised = partial(kept, allow_large_maps=True, max_capture_bytes=None)  # of 128,000,000 values, 8 GB
    yield [
        sampler.row("WanPipeline", "2 steps", sampler.sample),
        sampler.row(name, measured, kept, optional=True),
        sampler.row(f"{name}, limits raised", measured, raised, optional=True),
    ]


if __name__ == "__main__":
    main(run)

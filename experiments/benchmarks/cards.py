"""Run figure4, an atlas, 72 frames and a video in the memory of smaller cards, by the flags of --fit.

    python experiments/benchmarks/cards.py --output_path docs/benchmarks/cards.json

1.3B with random weights; torch.cuda.set_per_process_memory_fraction caps the allocator, 1 GiB below the
card's size for what else lies on it. Each phase (umT5, rollout, decoder) runs alone; seconds are of this GPU.
"""

import gc
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from transformers import UMT5Config, UMT5EncoderModel

from experiments.benchmarks.harness import fill_, save_report, seconds_of
from experiments.extraction import causal
from experiments.extraction.cache_builders import atlas_requests, figure4_requests
from experiments.extraction.memory import GB, SAVE_VIDEO, Memory
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, main
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.checkpoint import VAE_FILE, build_model
from wan.config import MODELS, load_config
from wan.errors import ConfigError
from wan.model import CausalWanModel
from wan.text_encoder import UMT5_XXL
from wan.vae import VAE

CARDS, GIB = {"16 GB": 16, "24 GB": 24, "80 GB": None}, 2**30
VAE_BYTES = 507_609_880  # the estimate takes the size of its file
DEVICE = torch.device("cuda", 0)


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--frames", type=int, default=72, help="of the long video")
    parser.add_argument("--output_path", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ConfigError("cards.py measures the memory of a GPU, and none is here")
    config = replace(load_config("configs/self_forcing_dmd.yaml"), device="cuda", embeds_dir=None)
    sizes, total = MODELS[config.model], torch.cuda.get_device_properties(DEVICE).total_memory
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    state = {
        name: fill_(torch.empty(p.shape, device=DEVICE), name).bfloat16().cpu()
        for name, p in model.named_parameters()
    }
    atlas = partial(atlas_requests, mass=True, key_curve=False, cross=False)
    report: dict[str, Any] = {"environment": environment(DEVICE), "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(vars(sizes)))
        with Path(folder, VAE_FILE).open("wb") as file:
            file.truncate(VAE_BYTES)
        config = replace(config, ckpt_dir=folder)
        long = replace(config, num_frames=args.frames)
        runs: dict[str, tuple] = {  # configuration, requests, the flag that decodes a video
            "figure4": (config, figure4_requests(config, "token", True), ""),
            "atlas": (config, atlas(config), ""),
            f"{args.frames} frames, atlas": (long, atlas(long), ""),
            "video": (config, [], SAVE_VIDEO),
        }
        for card in args.cards:
            size = CARDS[card]
            torch.cuda.set_per_process_memory_fraction(min(1.0, (size - 1) * GIB / total) if size else 1.0)
            for name, (own, requests, decodes) in runs.items():
                memory = Memory(own, sizes, requests, torch.bfloat16, DEVICE, True, decodes=decodes)
                gc.collect()
                torch.cuda.empty_cache()  # of the row before
                flags, fitting = memory.fitting(memory.free())
                row: dict[str, Any] = {"flags": flags, "fits": fitting is not None}
                if fitting is not None:
                    needs = {n.phase: round(n.total / GB, 1) for n in fitting.needs() if n.where == "GPU"}
                    row |= {"frames": fitting.config.num_frames, "estimate, GB": needs}
                    phases = {"rolling out": partial(roll_out, fitting, state)}
                    if name == "figure4" and not fitting.config.t5_cpu:
                        phases["encoding the prompt"] = encode
                    if decodes:
                        phases["decoding the video"] = partial(decode, fitting)
                    row["phases"] = {phase: measured(call) for phase, call in phases.items()}
                report["rows"][f"{card}: {name}"] = row
                print(card, name, row, flush=True)
                save_report(report, args.output_path)


def measured(phase: Callable[[], float]) -> dict[str, Any]:
    """Run a phase; return peak GB that the allocator reserved and used, and seconds."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        seconds = phase()
    except torch.OutOfMemoryError as error:
        return {"out of memory": str(error).split(". ")[0]}
    reserved, used = torch.cuda.max_memory_reserved() / GB, torch.cuda.max_memory_allocated() / GB
    return {"reserved, GB": round(reserved, 1), "used, GB": round(used, 1), "seconds": round(seconds, 1)}


def encode() -> float:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE), torch.no_grad():
        encoder = UMT5EncoderModel(UMT5Config(**UMT5_XXL)).eval()
    torch.set_default_dtype(torch.float32)
    tokens = torch.ones(1, 512, dtype=torch.long, device=DEVICE)
    with torch.no_grad():
        return seconds_of(lambda: encoder(tokens, attention_mask=torch.ones_like(tokens)))


def roll_out(memory: Memory, state: dict[str, torch.Tensor]) -> float:
    c, sizes = memory.config, memory.model_config
    model = build_model(CausalWanModel, sizes, state, "random", memory.dtype, DEVICE, c.offload)
    pipeline = causal.pipeline_of(model, c)
    noise, renoise = causal.draw_noise(c, sizes, memory.dtype, DEVICE)
    text = torch.randn(1, sizes.text_len, sizes.text_dim, device=DEVICE, dtype=memory.dtype)

    def generate() -> None:
        requests = memory.requests
        with ATTENTION_WEIGHT_CAPTURE.capture(*requests) if requests else nullcontext():
            pipeline.inference(noise, prompt_embeds=text, renoise=renoise)

    return seconds_of(generate)


def decode(memory: Memory) -> float:
    c, vae = memory.config, VAE(AutoencoderKLWan().to(DEVICE, torch.bfloat16)).to(DEVICE)
    latents = torch.randn(1, c.num_frames, 16, c.height, c.width, device=DEVICE)
    return seconds_of(lambda: vae.decode(latents))


if __name__ == "__main__":
    main(run)

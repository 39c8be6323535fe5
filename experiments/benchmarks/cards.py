"""Run figure4, an atlas, 72 frames and a video in the memory of smaller cards, by the flags of --fit.

    python experiments/benchmarks/cards.py --output_path docs/benchmarks/cards.json

1.3B with random weights; torch.cuda.set_per_process_memory_fraction caps the allocator, 1 GiB below the
card's size for what else lies on it. Each phase (umT5, rollout, decoder) runs alone; seconds are of this GPU.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.harness import save_report
from experiments.benchmarks.worker import fill_
from experiments.extraction import cache_builders, causal
from experiments.extraction.memory import GB, SAVE_VIDEO, Memory
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, main
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.checkpoint import VAE_FILE, build_model
from wan.config import MODELS, RunConfig, load_config
from wan.model import CausalWanModel
from wan.text_encoder import UMT5_XXL
from wan.vae import VAE

CARDS, GIB = {"16 GB": 16, "24 GB": 24, "80 GB": None}, 2**30
VAE_BYTES = 507_609_880
DEVICE = torch.device("cuda", 0)


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--frames", type=int, default=72, help="of the long video")
    parser.add_argument("--output_path", type=Path)
    args = parser.parse_args(argv)
    config = replace(load_config("configs/self_forcing_dmd.yaml"), device="cuda", embeds_dir=None)
    sizes, total = MODELS[config.model], torch.cuda.get_device_properties(DEVICE).total_memory
    with torch.device("meta"):
        model = CausalWanModel(**vars(sizes))
    state = {name: fill_(torch.empty(p.shape, device=DEVICE), name).bfloat16().cpu()
             for name, p in model.named_parameters()}  # fmt: skip
    report: dict[str, Any] = {"environment": environment(DEVICE), "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(vars(sizes)))
        with Path(folder, VAE_FILE).open("wb") as file:
            file.truncate(VAE_BYTES)  # the estimate takes its size
        config = replace(config, ckpt_dir=folder)
        for card in args.cards:
            size = CARDS[card]
            torch.cuda.set_per_process_memory_fraction(min(1.0, (size - 1) * GIB / total) if size else 1.0)
            for name, (own, requests, decodes) in runs(config, args.frames).items():
                memory = Memory(
                    own, sizes, requests, torch.bfloat16, DEVICE, True, decodes=SAVE_VIDEO if decodes else ""
                )
                gc.collect()
                torch.cuda.empty_cache()  # of the row before
                flags, fitting = memory.fitting(memory.free())
                row: dict[str, Any] = {"flags": flags, "fits": fitting is not None}
                if fitting is not None:
                    row["frames"] = fitting.config.num_frames
                    row["estimate, GB"] = {n.phase: round(n.total / GB, 1) for n in fitting.needs()
                                           if n.where == "GPU"}  # fmt: skip
                    row |= measured(fitting, state, decodes, encodes=name == "figure4")
                report["rows"][f"{card}: {name}"] = row
                print(card, name, row, flush=True)
                save_report(report, args.output_path)


def runs(config: RunConfig, frames: int) -> dict[str, tuple[RunConfig, list, bool]]:
    """Return configuration, requests and whether a video is decoded, of each thing that users do."""
    atlas = partial(cache_builders.atlas_requests, mass=True, key_curve=False, cross=False)
    long = replace(config, num_frames=frames)
    return {
        "figure4": (config, cache_builders.figure4_requests(config, "token", True), False),
        "atlas": (config, atlas(config), False),
        f"{frames} frames, atlas": (long, atlas(long), False),
        "video": (config, [], True),
    }


def measured(memory: Memory, state: dict[str, torch.Tensor], decodes: bool, encodes: bool) -> dict[str, Any]:
    """Run the phases of a run one by one; return peak GB that the allocator reserved, and seconds."""
    c, found = memory.config, dict[str, Any]()
    phases: dict[str, Callable[[], float]] = {"rolling out": partial(roll_out, memory, state)}
    if encodes and not c.t5_cpu:
        phases["encoding the prompt"] = encode
    if decodes:
        phases["decoding the video"] = partial(decode, c)
    for name, phase in phases.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            seconds = phase()
        except torch.OutOfMemoryError as error:
            found[name] = {"out of memory": str(error).split(". ")[0]}
            continue
        reserved, used = torch.cuda.max_memory_reserved() / GB, torch.cuda.max_memory_allocated() / GB
        found[name] = {"reserved, GB": round(reserved, 1), "used, GB": round(used, 1)}
        found[name]["seconds"] = round(seconds, 1)
    return {"phases": found}


def timed(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def encode() -> float:
    from transformers import UMT5Config, UMT5EncoderModel

    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE), torch.no_grad():
        encoder = UMT5EncoderModel(UMT5Config(**UMT5_XXL)).eval()
    torch.set_default_dtype(torch.float32)
    tokens = torch.ones(1, 512, dtype=torch.long, device=DEVICE)
    with torch.no_grad():
        return timed(lambda: encoder(tokens, attention_mask=torch.ones_like(tokens)))


def roll_out(memory: Memory, state: dict[str, torch.Tensor]) -> float:
    c, sizes = memory.config, memory.model_config
    model = build_model(CausalWanModel, sizes, state, "random", memory.dtype, DEVICE, c.offload)
    pipeline = causal.pipeline_of(model, c)
    noise, renoise = causal.draw_noise(c, sizes, memory.dtype, DEVICE)
    text = torch.randn(1, sizes.text_len, sizes.text_dim, device=DEVICE, dtype=memory.dtype)

    def generate() -> None:
        with ATTENTION_WEIGHT_CAPTURE.capture(*memory.requests) as calls:
            pipeline.inference(noise, prompt_embeds=text, renoise=renoise)
        del calls

    if not memory.requests:
        return timed(lambda: pipeline.inference(noise, prompt_embeds=text, renoise=renoise))
    return timed(generate)


def decode(config: RunConfig) -> float:
    from diffusers import AutoencoderKLWan

    vae = VAE(AutoencoderKLWan().to(DEVICE, torch.bfloat16)).to(DEVICE)
    latents = torch.randn(1, config.num_frames, 16, config.height, config.width, device=DEVICE)
    return timed(lambda: vae.decode(latents))


if __name__ == "__main__":
    main(run)

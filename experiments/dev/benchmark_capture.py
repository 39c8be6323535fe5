"""Time and memory of a rollout, plain and while being captured, side by side in one process.

    python experiments/dev/benchmark_capture.py --config_path configs/wan_mini.yaml
    python experiments/dev/benchmark_capture.py --random_weights --device cuda --output_path docs/benchmarks/capture_h200.json

Rows are run in turn, repeat after repeat, and reported as medians. Every row's latents are compared with the plain ones.
"""

import argparse
import gc
import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.caches.atomic_files import require_writable
from experiments.extraction import causal, devices
from experiments.extraction.prompt_embeds import encode_prompts
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, config_from, main, run_parser
from wan.checkpoint import read_model_config
from wan.config import MODELS, ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.capture import CaptureRequest
from wan.modules.causal_model import CausalWanModel
from wan.pipeline import CausalInferencePipeline

MIB = 2**20


def rows(config: RunConfig, num_layers: int) -> dict[str, list[CaptureRequest]]:
    """What is captured, by the name of its row."""
    last, layer = len(config.block_sizes) - 1, num_layers // 2
    everything = CaptureRequest(granularity="frame")
    return {
        "plain": [],
        "mean logits": [CaptureRequest(granularity="frame", mass=False)],
        "mean logits + mass": [everything],
        "mean logits + mass + key curve": [everything, CaptureRequest(granularity="key", blocks=[last])],
        f"tokens of layer {layer}, last block, pass 0": [
            CaptureRequest(layers=[layer], blocks=[last], steps=[0], token_dtype=torch.float16)
        ],
    }


@dataclass
class Rollout:
    """One model with its inputs, run again and again."""

    pipeline: CausalInferencePipeline
    noise: torch.Tensor
    renoise: torch.Tensor
    prompt_embeds: torch.Tensor

    def run(self, requests: list[CaptureRequest]) -> dict:
        """Seconds, peak MiB on the GPU and of the process above where it started, and the latents."""
        cuda = self.noise.device.type == "cuda"
        gc.collect()
        before = memory(reset=True, cuda=cuda)
        start = time.perf_counter()
        capture = ATTENTION_WEIGHT_CAPTURE.capture(*requests) if requests else nullcontext([])
        with capture as calls, devices.threads_for(self.noise, self.pipeline.model.config):
            latents = self.pipeline.inference(
                self.noise, prompt_embeds=self.prompt_embeds, renoise=self.renoise
            )[1]
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        after = memory(cuda=cuda)
        return {
            "seconds": seconds,
            "calls": len(calls),
            "latents": latents,
            "gpu_mib": after["gpu"] - before["gpu"],
            "host_mib": after["host"] - before["host"],
        }


def memory(cuda: bool, reset: bool = False) -> dict[str, float]:
    """Peak MiB so far of this process and of the GPU; with reset, both now, and peaks start anew."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again at VmRSS
    if cuda and reset:
        torch.cuda.reset_peak_memory_stats()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "host": int(status["VmHWM"].split()[0]) / 1024,
        "gpu": torch.cuda.max_memory_allocated() / MIB if cuda else 0.0,
    }


def random_pipeline(
    config: RunConfig, sizes: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CausalInferencePipeline:
    """The model's shapes with random weights, made on the device."""
    with torch.device("meta"):
        model = CausalWanModel(
            **vars(sizes), local_attn_size=config.local_attn_size, sink_size=config.sink_size
        )
    model = model.to_empty(device=device).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, value in model.named_parameters():
        value.normal_(0, 0.02, generator=generator).add_(
            1.0 if "norm" in name and name.endswith("weight") else 0.0
        )
    return CausalInferencePipeline(
        model,
        config.num_frame_per_block,
        config.independent_first_frame,
        config.denoising_step_list,
        config.warp_denoising_step,
        config.timestep_shift,
        config.context_noise,
    )


def make_rollout(config: RunConfig, random_weights: bool) -> tuple[Rollout, ModelConfig]:
    device = devices.choose_device(config.device, config.offload)
    dtype = devices.choose_dtype(config.dtype, device)
    if random_weights:
        if config.model not in MODELS:
            raise ConfigError(
                f"--random_weights knows the sizes of {', '.join(MODELS)}, not of {config.model}"
            )
        sizes = MODELS[config.model]
        pipeline = random_pipeline(config, sizes, dtype, device)
        embeds = torch.randn(1, sizes.text_len, sizes.text_dim, device=device, dtype=dtype)
    else:
        sizes = read_model_config(config.ckpt_dir)
        pipeline = causal.load_pipeline(config, sizes, dtype, device)
        embeds, _ = encode_prompts(config, [config.prompt], sizes, dtype, device)[config.prompt]
    noise, renoise = causal.draw_noise(config, sizes, dtype, device)
    return Rollout(pipeline, noise, renoise, embeds), sizes


def measure(rollout: Rollout, table: dict[str, list[CaptureRequest]], repeats: int) -> dict[str, dict]:
    """Medians over repeats, rows in turn; memory from the first, untimed round. bit_identical: latents equal plain ones."""
    plain = rollout.run([])["latents"]
    results = {name: {"seconds": []} for name in table}
    for repeat in range(repeats + 1):
        for name, requests in table.items():
            ran = rollout.run(requests)
            row = results[name]
            row["bit_identical"] = row.get("bit_identical", True) and torch.equal(ran["latents"], plain)
            if repeat == 0:
                row |= {key: round(ran[key], 1) for key in ("calls", "gpu_mib", "host_mib")}
            else:
                row["seconds"].append(round(ran["seconds"], 4))
    base = results["plain"]
    for row in results.values():
        row["median_seconds"] = statistics.median(row["seconds"])
        row["times_plain"] = round(row["median_seconds"] / statistics.median(base["seconds"]), 3)
        row["gpu_mib_over_plain"] = round(row["gpu_mib"] - base["gpu_mib"], 1)
        row["host_mib_over_plain"] = round(row["host_mib"] - base["host_mib"], 1)
    return results


def as_table(results: dict[str, dict]) -> str:
    lines = [
        "| captured | seconds | x plain | GPU over plain | host over plain | calls | same bits |",
        "|---" * 7 + "|",
    ]
    lines += [
        f"| {name} | {row['median_seconds']:.3f} | {row['times_plain']:.3f} | {row['gpu_mib_over_plain']:.0f} MiB | "
        f"{row['host_mib_over_plain']:.0f} MiB | {row['calls']:.0f} | {'yes' if row['bit_identical'] else 'NO'} |"
        for name, row in results.items()
    ]
    return "\n".join(lines)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--random_weights",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="the config's model with random weights: no files needed",
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of every row")


def run(argv=None):
    parser = run_parser(__doc__, None)
    add_arguments(parser)
    args = parser.parse_args(argv)
    config = config_from(args)
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, not {args.repeats}")
    if args.output_path:
        require_writable(args.output_path)
    rollout, sizes = make_rollout(config, args.random_weights)
    results = measure(rollout, rows(config, sizes.num_layers), args.repeats)
    print(as_table(results))
    if args.output_path:
        report = {
            "model": config.model,
            "random_weights": args.random_weights,
            "num_frames": config.num_frames,
            "passes": config.num_passes,
            "layers": sizes.num_layers,
            "dtype": str(rollout.noise.dtype).removeprefix("torch."),
            "environment": environment(rollout.noise.device),
            "rows": results,
        }
        Path(args.output_path).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output_path).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(run)

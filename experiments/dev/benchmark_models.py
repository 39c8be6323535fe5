"""Every model's configuration at its full shapes with random weights: seconds, captured too, and peak memory.

    python experiments/dev/benchmark_models.py --output_path docs/benchmarks/models_h100.json
    python experiments/dev/benchmark_models.py --rehearse --device cpu      # tiny shapes, in seconds

The configurations are those of configs/ that name a release, with their own frames, steps, sampler and cache
policy. Each is run once to warm up, once plain and once captured (mean logits and mass of every call); the
transformer alone, prompts are random states. A LoRA is part of the weights.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.dev.tables import gb, markdown, measured_on
from experiments.running.cli import Parser, main

if TYPE_CHECKING:
    import torch

    from experiments.dev.measure_capture import Rollout
    from wan.config import ModelConfig, RunConfig

CONFIGS = Path("configs")
TINY: dict[str, Any] = {
    "dim": 48,
    "ffn_dim": 64,
    "num_heads": 3,
    "num_layers": 2,
    "freq_dim": 32,
    "text_dim": 24,
}
TINY_SIDE = 4  # of a latent frame, and of a rehearsal alone


def table(report: dict) -> str:
    """A row for each configuration, and under it what was measured."""
    header = ("configuration", "model", "frames × steps", "policy", "plain", "captured", "peak", "plan")
    rows = [
        (
            f"`{row['name']}`",
            row["model"].removeprefix("Wan2.1-T2V-"),
            f"{row['num_frames']} in blocks of {row['block']} × {row['steps']}",
            row["policy"],
            f"{row['seconds']:.2f} s",
            f"{row['captured_seconds']:.2f} s",
            "" if row["peak_bytes"] is None else gb(row["peak_bytes"]),
            gb(row["plan_bytes"]),
        )
        for row in report["rows"]
    ]
    shapes = "tiny shapes (a rehearsal)" if report["rehearsal"] else "full shapes"
    about = f"{shapes}, random weights, one run each after one to warm up; transformer alone"
    return f"{markdown(header, rows)}\n\n{about}; {measured_on(report['environment'], report['dtype'])}"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", metavar="NAME", help="configurations of configs/; all that name a release")
    add("--device", default="auto")
    add("--num_frames", type=int, help="latent frames of every configuration, in place of its own")
    add("--rehearse", action="store_true", help="tiny shapes, to see that it runs")
    add("--output_path", help="where the report goes")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    from experiments.caches.files import require_writable
    from experiments.dev.tables import save_report
    from experiments.extraction.devices import choose_device, choose_dtype
    from experiments.extraction.provenance import environment

    if args.output_path:
        require_writable(args.output_path)
    device = choose_device(args.device)
    dtype = choose_dtype("auto", device)
    rows, model = [], None
    for name in args.models or released():
        config, sizes = settings(name, args)
        if model is None or model.config != sizes:
            model = None  # the one before goes first
            model = random_model(config, sizes, dtype, device)
        rows.append({"name": name, **one_row(config, sizes, model, dtype, device)})
        print(
            f"{name}: {rows[-1]['seconds']:.2f} s, captured {rows[-1]['captured_seconds']:.2f} s", flush=True
        )
    report = {
        "rehearsal": args.rehearse,
        "dtype": str(dtype).removeprefix("torch."),
        "environment": environment(device),
        "rows": rows,
    }
    print(table(report))
    save_report(report, args.output_path)


def released() -> list[str]:
    """Names of the configurations that name a release, models of one size together."""
    from wan.config import load_config

    found = {path.stem: load_config(path) for path in sorted(CONFIGS.glob("*.yaml")) if is_config(path)}
    return sorted((name for name, c in found.items() if c.release), key=lambda name: found[name].model)


def is_config(path: Path) -> bool:
    """Whether a YAML file of configs/ is a model's."""
    return "\nckpt_dir:" in path.read_text(encoding="utf-8")


def settings(name: str, args: argparse.Namespace) -> "tuple[RunConfig, ModelConfig]":
    """A configuration and the sizes of its model. ConfigError for what is not there."""
    from dataclasses import replace

    from wan.config import MODELS, load_config
    from wan.errors import ConfigError

    config = load_config(CONFIGS / f"{name}.yaml", {"num_frames": args.num_frames})
    if config.model not in MODELS:
        raise ConfigError(f"{name} is of {config.model}, not of {', '.join(MODELS)}")
    if not args.rehearse:
        return config, MODELS[config.model]
    return replace(config, height=TINY_SIDE, width=TINY_SIDE), replace(MODELS[config.model], **TINY)


def random_model(config: "RunConfig", sizes: "ModelConfig", dtype: "torch.dtype", device: "torch.device"):
    """A model of random weights for several configurations."""
    from experiments.dev.measure_capture import random_pipeline

    return random_pipeline(config, sizes, dtype, device).model


def one_row(
    config: "RunConfig", sizes: "ModelConfig", model, dtype: "torch.dtype", device: "torch.device"
) -> dict:
    """Seconds of a plain and of a captured rollout, their peak memory, and the planned one."""
    import gc

    import torch

    from experiments.extraction.memory import Memory
    from wan.capture import CaptureRequest

    rollout = make_rollout(config, sizes, model, dtype, device)
    everything = [CaptureRequest(granularity="frame")]
    switches = random_switches(config, sizes, dtype, device)
    run_once(rollout, [], switches)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    plain = run_once(rollout, [], switches)
    captured = run_once(rollout, everything, switches)
    needs = Memory(config, sizes, everything, dtype, device, encodes=False).needs()
    plan = max(n.total for n in needs if n.where == ("GPU" if device.type == "cuda" else "host"))
    steps = config.denoising_step_list
    return {
        "model": config.model,
        "num_frames": config.num_frames,
        "block": config.num_frame_per_block,
        "steps": f"{len(steps)}"
        + (f" ({len(config.first_block_steps)} first)" if config.first_block_steps else ""),
        "passes": config.num_passes,
        "policy": "rolling window" if config.sampler == "rolling_forcing" else config.policy.name,
        "seconds": round(plain, 4),
        "captured_seconds": round(captured, 4),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "plan_bytes": plan,
    }


def make_rollout(
    config: "RunConfig", sizes: "ModelConfig", model, dtype: "torch.dtype", device: "torch.device"
) -> "Rollout":
    """A pipeline around a model that is there, with noise and random prompt states."""
    import torch

    from experiments.dev.measure_capture import Rollout
    from experiments.extraction import causal

    model.local_attn_size, model.sink_size = config.local_attn_size, config.sink_size
    noise, renoise = causal.draw_noise(config, sizes, dtype, device)
    embeds = torch.randn(1, sizes.text_len, sizes.text_dim, device=device, dtype=dtype)
    return Rollout(causal.pipeline_of(model, config), noise, renoise, embeds)


def random_switches(config: "RunConfig", sizes: "ModelConfig", dtype: "torch.dtype", device: "torch.device"):
    """The config's later prompts, as random states."""
    from dataclasses import replace

    import torch

    shape = (1, sizes.text_len, sizes.text_dim)
    return [
        replace(switch, prompt_embeds=torch.randn(shape, device=device, dtype=dtype))
        for switch in config.switches
    ]


def run_once(rollout: "Rollout", requests: list, switches: list) -> float:
    """Seconds of one rollout."""
    import time
    from contextlib import nullcontext

    import torch

    from experiments.extraction.devices import threads_for
    from wan.attention import ATTENTION_WEIGHT_CAPTURE

    device = rollout.noise.device
    capture = ATTENTION_WEIGHT_CAPTURE.capture(*requests) if requests else nullcontext()
    start = time.perf_counter()
    with capture, threads_for(rollout.noise, rollout.pipeline.model.config):
        rollout.pipeline.inference(
            rollout.noise,
            prompt_embeds=rollout.prompt_embeds,
            renoise=rollout.renoise,
            prompt_schedule=switches,
        )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main(run)

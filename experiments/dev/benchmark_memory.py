"""The real models' shapes from files: seconds and memory of loading and of rollouts, and what was predicted.

    python experiments/dev/benchmark_memory.py --device cuda --output_path docs/benchmarks/memory_h200.json

Files of random weights are made on the spot, with the names, shapes and dtypes of the released ones. Each
measurement runs in a process of its own. Host memory is private (anonymous and shared pages, page-locked
memory included) or resident (the pages of mapped files too).
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from experiments.dev.tables import gb, markdown, measured_on
from experiments.running.cli import Parser, main

SMALL, LARGE = "Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B"


def table(report: dict) -> str:
    """Memory and times of rollouts, and under them disk space and loading."""
    small, large = report[SMALL], report[LARGE]
    measured = {
        "21 frames": small["extract"]["resident"],
        "21 frames, `--offload`": small["extract"]["--offload"],
        "21 frames, `--prompt_embeds`": small["extract"]["resident, --prompt_embeds"],
        "72 frames, `--prompt_embeds`": small["extract"]["72 frames"],
        "14B, 3 frames": large["extract"]["one block"],
        "14B, 3 frames, `--offload`": large["extract"]["one block, --offload"],
    }
    header = (
        "every layer at 480 x 832, random weights of the same shapes",
        *("GPU: text, loading", "GPU: rollout", "/ predicted", "host", "text, loading", "rollout"),
    )
    rows = [
        (
            name,
            gb(row["prepare"]["gpu_peak_bytes"]),
            gb(row["rollout"]["gpu_peak_bytes"]),
            f"{row['measured_of_predicted']:.3f} x",
            gb(row["host_private_bytes"]),
            f"{row['prepare_seconds']:.1f} s",
            f"{row['rollout_seconds']:.1f} s",
        )
        for name, row in measured.items()
    ]
    return f"{markdown(header, rows)}\n\n{below(small)} {measured_on(report['environment'], 'bfloat16')}"


def below(small: dict) -> str:
    """Disk space, loading, and whether streaming gives the same bits."""
    sizes, cold = small["files"], small["load"]["shards, from disk"]
    shards = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    encoder, tuned = (sizes[name] for name in ("models_t5_umt5-xxl-enc-bf16.pth", "self_forcing_dmd.pt"))
    same = "the same bits" if small["offload_gives_the_same_bits"] else "OTHER BITS"
    return (
        f"Disk: {gb(shards + encoder + tuned + small['vae_bytes'])}: transformer {gb(shards)}, "
        f"umT5 {gb(encoder)}, VAE {gb(small['vae_bytes'])}, checkpoint {gb(tuned)}. "
        f"The transformer's shards load from disk in {cold['seconds']:.1f} s, "
        f"with {gb(cold['host_private_bytes'])} of private host memory; with mapped file pages "
        f"{cold['resident_of_file']:.2f} x the files. `--offload` gives {same}, latents and capture. "
        "GPU memory is that of tensors, without CUDA's context; host memory is private."
    )


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="the GPU to measure")
    parser.add_argument(
        "--folder", help="where the files go, 55 GB at a time; a temporary folder where not given"
    )
    parser.add_argument("--output_path", help="write the numbers as JSON")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    """Print the report, and write it after each model: the files of the second take long."""
    from experiments.caches.files import require_writable
    from experiments.dev.measure_memory import large_model, small_model
    from experiments.dev.tables import save_report
    from experiments.extraction.devices import choose_device
    from experiments.extraction.provenance import environment
    from wan.errors import ConfigError

    device = choose_device(args.device)
    if device.type != "cuda":
        raise ConfigError(f"these are the sizes of a GPU, not of {device}; give --device cuda or cuda:N")
    if args.output_path:
        require_writable(args.output_path)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report = {"environment": environment(device), SMALL: small_model(Path(folder) / "1.3B", device)}
        embeds = next((Path(folder) / "1.3B/prompt_embeds").iterdir()).rename(Path(folder) / "embeds.pt")
        save_report(report, args.output_path)
        shutil.rmtree(Path(folder) / "1.3B")
        report[LARGE] = large_model(Path(folder) / "14B", device, embeds)
    save_report(report, args.output_path)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(run)

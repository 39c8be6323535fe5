"""Memory of a rollout by its length, and time per block by position: both are those of the window.

    python experiments/dev/benchmark_long_rollouts.py --output_path docs/benchmarks/long_memory.json

Every row is one run_rollout.py in a process of its own, with the video written as it goes. Memory is the
process's peak, with libraries, weights and decoder. A block's time is what the lower quartile of the blocks
around it took: other processes were at work.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import Parser, count, main

SCRIPT = Path(__file__).parents[1] / "run_rollout.py"
MIB = 1 << 20
AROUND = 20  # blocks of which a quartile is taken


def table(report: dict) -> str:
    """A row a run, and under them what was measured."""
    header = (
        "policy",
        "latent frames",
        "peak memory",
        "ms a block, early",
        "in the middle",
        "at the end",
        "latents",
        "mp4",
    )
    rows = [
        (
            row["policy"],
            str(row["num_frames"]),
            f"{row['peak_bytes'] / MIB:.0f} MiB",
            *(f"{1000 * row['block_seconds'][where]:.0f}" for where in ("early", "middle", "end")),
            f"{row['latent_bytes'] / 1e6:.1f} MB",
            f"{row['video_bytes'] / 1e6:.1f} MB",
        )
        for row in report["rows"]
    ]
    return f"{markdown(header, rows)}\n\n{measured_on(report['environment'], report['dtype'])}"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml", help="the model")
    flag("--num_frames", type=count, nargs="+", default=[240, 2400], help="lengths, in latent frames")
    flag("--cache_policy", default="self_forcing_window", help="the policy whose memory is measured")
    flag("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    flag("--output_path", help="where the report goes")
    args = parser.parse_args(argv)

    from experiments.caches.files import require_writable
    from experiments.dev.tables import save_report
    from experiments.extraction.devices import choose_device, choose_dtype
    from experiments.extraction.provenance import environment
    from experiments.running.cli import policy_settings
    from wan.config import load_config

    config = load_config(args.config_path, {"device": args.device})
    policy_settings(args.cache_policy)
    device = choose_device(config.device)
    if args.output_path:
        require_writable(args.output_path)
    rows = [measure(args.config_path, str(device), args.cache_policy, n) for n in args.num_frames]
    rows.append(measure(args.config_path, str(device), "full", args.num_frames[0]))
    report = {
        "model": config.model,
        "dtype": str(choose_dtype(config.dtype, device)).removeprefix("torch."),
        "environment": environment(device),
        "rows": rows,
    }
    print(table(report))
    save_report(report, args.output_path)


def measure(config_path: str, device: str, policy: str, num_frames: int) -> dict[str, Any]:
    """One long video -> its peak memory, seconds of a block at three places, bytes on disk."""
    with tempfile.TemporaryDirectory() as folder:
        video, log = Path(folder) / "long.mp4", Path(folder) / "log.jsonl"
        flags = ["--config_path", config_path, "--device", device, "--cache_policy", policy, "--quiet"]
        flags += ["--num_frames", str(num_frames), "--output_path", str(video), "--log_file", str(log)]
        subprocess.run([sys.executable, str(SCRIPT), *flags], check=True)
        events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        blocks = [event for event in events if event["event"] == "block"]
        return {
            "policy": policy,
            "num_frames": num_frames,
            "peak_bytes": max(event.get("gpu_bytes", event["host_bytes"]) for event in blocks),
            "block_seconds": places([event["seconds"] for event in blocks]),
            "latent_bytes": video.with_suffix(".latents.safetensors").stat().st_size,
            "video_bytes": video.stat().st_size,
        }


def places(seconds: Sequence[float]) -> dict[str, float]:
    """Lower quartile of the time of some blocks after the fifth, in the middle and at the end."""
    import numpy as np

    taken = np.diff(seconds)
    if not len(taken):
        return dict.fromkeys(("early", "middle", "end"), float("nan"))
    half = max(0, len(taken) // 2 - AROUND // 2)
    parts = {"early": taken[5:][:AROUND], "middle": taken[half:][:AROUND], "end": taken[-AROUND:]}
    return {where: round(float(np.quantile(x if len(x) else taken, 0.25)), 5) for where, x in parts.items()}


if __name__ == "__main__":
    main(run)

"""Frame reduction of a large token cache: by memory map, a few rows at a time, against converting it to float32 and averaging.

    python experiments/dev/benchmark_reading.py --output_path docs/benchmarks/reading.json

Makes a figure4 cache of one layer with random logits, then opens it, which compares its checksums, and reduces it both ways
in turn, each time in a process of its own and with the file in the page cache. Private memory is the peak of RssAnon over
its value before opening.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from experiments.caches import frames, load_cache, save_cache
from experiments.caches.atomic_files import require_writable
from experiments.caches.schema import SCHEMA_VERSION
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, main
from wan.config import MODELS, RunConfig
from wan.errors import ConfigError


def make_cache(path: Path, heads: int, query_frames: int, key_frames: int, tokens: int) -> None:
    """A figure4 cache of random logits, shaped like the last block of one layer."""
    logits = torch.empty(1, heads, query_frames * tokens, key_frames * tokens, dtype=torch.float16)
    for head in logits[0]:
        head.copy_(torch.randn(head.shape[0], head.shape[1]))
    queries = list(range(key_frames - query_frames, key_frames))
    sizes = {"num_frames": key_frames, "frame_seq_length": tokens, "num_heads": heads}
    entry = sizes | {
        "layer_idx": 1,
        "is_logits": True,
        "attn_logits": logits,
        "num_query_frames": query_frames,
        "num_key_frames": key_frames,
        "last_block_start_frame": queries[0],
    }
    save_cache(
        path,
        sizes
        | {
            "format": "figure4",
            "schema_version": SCHEMA_VERSION,
            "prompt": "random",
            "seed": None,
            "model": "random",
            "weights": "unknown",
            "weights_file": None,
            "weights_sha256": None,
            "is_logits": True,
            "block_sizes": [*[query_frames] * (key_frames // query_frames)],
            "num_frame_per_block": query_frames,
            "step": None,
            "timestep": None,
            "is_clean_pass": None,
            "attention_weights": [entry],
            "layer_indices": [1],
            "capture_method": "benchmark",
            "query_frames": queries,
            "key_frames": list(range(key_frames)),
        },
    )


def streamed(logits: torch.Tensor, tokens: int) -> torch.Tensor:
    return frames.token_matrix_to_frames(logits, tokens)


def converted(logits: torch.Tensor, tokens: int) -> torch.Tensor:
    return logits.float().unflatten(1, (-1, tokens)).unflatten(3, (-1, tokens)).mean((2, 4))


def private_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def timed(how: str, path: Path, tokens: int, connection) -> None:
    """Read once and send seconds of opening and of reducing, peak private MiB and the result."""
    torch.zeros(1).float().mean()  # the library is warm
    base = peak = private_mib()
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, private_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    logits = load_cache(path)["attention_weights"][0]["attn_logits"][0]  # checksums are compared
    opened = time.perf_counter()
    result = {"streamed": streamed, "converted": converted}[how](logits, tokens)
    seconds = opened - start, time.perf_counter() - opened
    done.set()
    watcher.join()
    connection.send((seconds, peak - base, result.numpy()))


def measure(path: Path, tokens: int, repeats: int) -> dict:
    """Medians of both ways, in turn."""
    context = multiprocessing.get_context("spawn")
    runs: dict[str, list] = {"streamed": [], "converted": []}
    for _ in range(repeats):
        for how, found in runs.items():
            with path.open("rb") as file:  # warm page cache
                while file.read(1 << 24):
                    pass
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=timed, args=(how, path, tokens, sender))
            process.start()
            found.append(receiver.recv())
            process.join()
    rows = {
        how: {
            "open_seconds": statistics.median(r[0][0] for r in found),
            "seconds": [round(r[0][1], 3) for r in found],
            "median_seconds": statistics.median(r[0][1] for r in found),
            "private_mib": round(max(r[1] for r in found), 1),
        }
        for how, found in runs.items()
    }
    difference = abs(runs["streamed"][0][2] - runs["converted"][0][2]).max()
    return rows | {
        "times_faster": rows["converted"]["median_seconds"] / rows["streamed"]["median_seconds"],
        "largest_difference": float(difference),
    }


def run(argv=None):
    parser = Parser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    real = RunConfig()
    sizes = MODELS[real.model]
    for name, default in (
        ("heads", sizes.num_heads),
        ("query_frames", real.num_frame_per_block),
        ("repeats", 3),
        ("key_frames", real.num_frames),
        ("tokens", sizes.tokens_per_frame(real.height, real.width)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output_path", help="write the numbers as JSON")
    args = parser.parse_args(argv)
    for name in ("heads", "query_frames", "key_frames", "tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.output_path:
        require_writable(args.output_path)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.pt"
        make_cache(path, args.heads, args.query_frames, args.key_frames, args.tokens)
        size = path.stat().st_size
        results = measure(path, args.tokens, args.repeats)
    for how in ("streamed", "converted"):
        row = results[how]
        print(
            f"{how:10s} opened {row['open_seconds']:.3f} s, reduced {row['median_seconds']:.3f} s, "
            f"{row['private_mib']} MiB private"
        )
    print(f"{results['times_faster']:.1f} x faster; largest difference {results['largest_difference']:.1e}")
    if args.output_path:
        report = {"file_mib": round(size / 2**20), "environment": environment(torch.device("cpu")), **results}
        Path(args.output_path).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output_path).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(run)

"""Frame means of a large token cache: by memory map, a few rows at a time, or converted to float32."""

import multiprocessing
import statistics
import time
from pathlib import Path

import torch

from experiments.caches import frames, load_cache, save_cache
from experiments.dev.process_memory import host_peak


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
            "schema_version": 1,
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


def timed(how: str, path: Path, tokens: int, connection) -> None:
    """Read once and send seconds of opening and of reducing, peak private bytes and the result."""
    torch.zeros(1).float().mean()  # the library is warm
    with host_peak() as host:
        start = time.perf_counter()
        logits = load_cache(path)["attention_weights"][0]["attn_logits"][0]
        opened = time.perf_counter()
        result = {"streamed": streamed, "converted": converted}[how](logits, tokens)
        seconds = opened - start, time.perf_counter() - opened
    connection.send((seconds, host["host_private_bytes"] / 2**20, result.numpy()))


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

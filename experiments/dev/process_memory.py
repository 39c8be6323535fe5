"""Memory of this process and of its GPU, for the benchmarks. The one place that reads /proc (Linux)."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
INTERVAL = 0.003  # seconds between two readings


def host_memory() -> dict[str, int]:
    """Bytes of this process. private: anonymous and page-locked memory; resident: the pages of files too.

    psutil reports file pages and page-locked pages as one number, so the kernel's own table is read.
    """
    lines = dict(line.split(":", 1) for line in STATUS.read_text(encoding="utf-8").splitlines())
    anonymous, shared, resident = (
        int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "VmRSS")
    )
    return {"private": anonymous + shared, "resident": resident}


@contextmanager
def host_peak() -> Iterator[dict[str, int]]:
    """A dict that gets, at the end, the peaks of private and resident bytes above the start."""
    gc.collect()
    before, peak, done = host_memory(), host_memory(), threading.Event()

    def watch() -> None:
        while not done.wait(INTERVAL):
            for name, now in host_memory().items():
                peak[name] = max(peak[name], now)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    found: dict[str, int] = {}
    try:
        yield found
    finally:
        done.set()
        watcher.join()
    peak = {name: max(peak[name], now) for name, now in host_memory().items()}
    found |= {f"host_{name}_bytes": peak[name] - before[name] for name in peak}
    if torch.cuda.is_initialized() and hasattr(torch.cuda, "host_memory_stats"):
        found["page_locked_bytes"] = int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def gpu_peak(device: torch.device) -> dict[str, int]:
    """Peak bytes of tensors and of the allocator; CUDA's context is not in them. Empty on the CPU."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    return {
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(device),
        "gpu_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }

"""Seconds to decode the miniature's video on one thread: its earlier VAE, and the recipe's.

    python experiments/dev/benchmark_decoding.py --output_path docs/benchmarks/decoding_mini.json

Sizes decide the time, so the weights are random. The ways run in turn in one process; ratios are of one turn,
their median is reported with its 95 % interval.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.dev.tables import markdown, measured_on, median_interval, save_report
from experiments.miniature.recipe import SIDE, VAE
from experiments.running.cli import Parser, count, main

if TYPE_CHECKING:
    from torch import Tensor

EARLIER = {"base_dim": 16, "decoder_base_dim": 24, "z_dim": 16, "num_res_blocks": 1, "dim_mult": [1, 2, 4, 4]}
SIZES = {"earlier": EARLIER, "new": VAE}
WAYS = {"diffusers": "a latent frame a call, as diffusers", "streamed": "16 latent frames a call, as here"}
AGAINST = ("earlier", "diffusers")


def table(report: dict) -> str:
    """Milliseconds a latent frame of both VAEs, both ways."""
    rows = [
        (
            f"{row['vae']} VAE, {WAYS[row['way']]}",
            f"{1000 * row['seconds']:.1f} ms",
            "" if (row["vae"], row["way"]) == AGAINST else times(row["times_cheaper"]),
        )
        for row in report["rows"]
    ]
    below = (
        f"{report['frames']} latent frames of 8 x 8, {report['repeats']} repeats, one thread; random weights"
    )
    header = ("decoding", "a latent frame", "times cheaper than the first")
    return f"{markdown(header, rows)}\n\n{below}; {measured_on(report['environment'], 'float32')}"


def times(median_and_interval: list[float]) -> str:
    """A median and its 95 % interval."""
    median, low, high = median_and_interval
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=count, default=21, help="latent frames of a video")
    parser.add_argument("--repeats", type=count, default=15)
    parser.add_argument("--output_path", help="write the numbers as JSON")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    import numpy as np
    import torch

    from experiments.caches.files import require_writable
    from experiments.caches.frames import one_thread
    from experiments.extraction.provenance import environment

    if args.output_path:
        require_writable(args.output_path)
    torch.manual_seed(0)
    calls = ways(torch.randn(1, args.frames, 16, SIDE // 8, SIDE // 8))
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    with one_thread(), torch.inference_mode():
        for repeat in range(args.repeats + 1):
            for key, call in calls.items():
                begin = time.perf_counter()
                call()
                if repeat:  # the first turn warms up
                    seconds[key].append((time.perf_counter() - begin) / args.frames)
    rows = []
    for (vae, way), taken in seconds.items():
        ratios = np.array(seconds[AGAINST]) / np.array(taken)
        cheaper = [float(np.median(ratios)), *median_interval(list(ratios))]
        row = {"vae": vae, "way": way, "seconds": float(np.median(taken)), "times_cheaper": cheaper}
        print(f"{vae} VAE, {way}: {row['seconds']:.4f} s a latent frame, {times(cheaper)} times cheaper")
        rows.append(row)
    report = {"frames": args.frames, "repeats": args.repeats, "rows": rows}
    save_report(report | {"environment": environment(torch.device("cpu"))}, args.output_path)


def ways(latents: Tensor) -> dict[tuple[str, str], Callable[[], Any]]:
    """What decodes latents [B, F, C, h, w], by VAE and way."""
    from diffusers import AutoencoderKLWan

    from wan.vae import VAE as StreamedVAE
    from wan.vae import channels_last

    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, sizes in SIZES.items():
        vae = AutoencoderKLWan(**sizes).eval().requires_grad_(False)
        streamed = StreamedVAE(AutoencoderKLWan(**sizes).eval().requires_grad_(False))
        channels_last(streamed)
        calls[name, "diffusers"] = partial(vae.decode, latents.transpose(1, 2))
        calls[name, "streamed"] = partial(streamed.decode, latents)
    return calls


if __name__ == "__main__":
    main(run)

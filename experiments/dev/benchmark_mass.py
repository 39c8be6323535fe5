"""Softmax mass per key frame beside one attention call of the 1.3B, on a GPU, by key frames of a program.

    python experiments/dev/benchmark_mass.py --output_path docs/benchmarks/mass_h200.json

Queries are a block's, bfloat16. The ways run in turn in one process; times are medians of those turns with
95 % intervals, errors against float64 in two heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.dev.tables import markdown, measured_on, median_interval, save_report
from experiments.running.cli import Parser, count, main
from wan.config import MODELS, RunConfig
from wan.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

RUN, MODEL = RunConfig(), MODELS["Wan2.1-T2V-1.3B"]
TOKENS = MODEL.tokens_per_frame(RUN.height, RUN.width)
CALLS_A_TURN, CHUNK = 5, 256  # CHUNK: queries at once in float64
ATTENTION = "attention, with its log-sum-exp"


def table(report: dict) -> str:
    """Milliseconds of every way at every number of key frames, and its largest error."""
    frames = sorted({row["key_frames"] for row in report["rows"]})
    found = {(row["way"], row["key_frames"]): row for row in report["rows"]}
    rows = [
        (way, *(said(found.get((way, n))) for n in frames), error_said(found, way, frames))
        for way in dict.fromkeys(row["way"] for row in report["rows"])
    ]
    header = ("a call", *(f"{n} key frames" for n in frames), "largest error")
    below = f"{report['repeats']} turns of {CALLS_A_TURN} calls"
    return f"{markdown(header, rows)}\n\n{below}; {measured_on(report['environment'], 'bfloat16')}"


def said(row: dict | None) -> str:
    """A median and its 95 % interval, or nothing for a way that does not take that many frames."""
    return "" if row is None else "{:.3f} ms ({:.3f}-{:.3f})".format(*row["milliseconds"])


def error_said(found: dict, way: str, frames: list[int]) -> str:
    errors = [found[way, n]["largest_error"] for n in frames if (way, n) in found]
    return "" if None in errors else f"{max(errors):.1e}"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--key_frames", type=count, nargs="+", default=[3, 12, 21])
    parser.add_argument("--repeats", type=count, default=15, help="turns")
    parser.add_argument("--output_path", help="write the numbers as JSON")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    import torch

    from experiments.caches.atomic_files import require_writable
    from experiments.extraction.provenance import environment

    if not torch.cuda.is_available():
        raise ConfigError("benchmark_mass.py times kernels of a GPU; none is here")
    if args.output_path:
        require_writable(args.output_path)
    device = torch.device("cuda")
    rows = [row for frames in args.key_frames for row in rows_of(frames, args.repeats, device)]
    report = {"repeats": args.repeats, "rows": rows, "environment": environment(device)}
    save_report(report, args.output_path)
    print(table(report))


def rows_of(key_frames: int, repeats: int, device) -> Iterator[dict]:
    """Every way in turn, at one number of key frames."""
    import numpy as np
    import torch

    from wan.modules.attention import attention_with_lse

    generator = torch.Generator(device).manual_seed(0)
    q, k = (
        torch.randn(
            1, frames * TOKENS, MODEL.num_heads, MODEL.head_dim, generator=generator, device=device
        ).bfloat16()
        for frames in (RUN.num_frame_per_block, key_frames)
    )
    heads_first = [x.transpose(1, 2) for x in (q, k, k)]
    lse = attention_with_lse(*heads_first)[1].contiguous()
    calls: dict[str, Callable[[], Any]] = {ATTENTION: partial(attention_with_lse, *heads_first)}
    calls |= ways(q, k, lse, key_frames)
    errors = {
        way: None if way == ATTENTION else largest_error(call(), q, k, key_frames)
        for way, call in calls.items()
    }
    taken: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(repeats):
        for way, call in calls.items():
            taken[way].append(milliseconds(call))
    for way, turns in taken.items():
        shown = [round(float(x), 4) for x in (np.median(turns), *median_interval(turns))]
        yield {"way": way, "key_frames": key_frames, "milliseconds": shown, "largest_error": errors[way]}


def ways(q: Tensor, k: Tensor, lse: Tensor, key_frames: int) -> dict[str, Callable[[], Tensor]]:
    """What gives the mass [1, H, Fk, Lq], by the name of its row: capture's own call, then others."""
    from wan.modules.mass_kernel import query_frame_mass

    calls: dict[str, Callable[[], Tensor]] = {"mass": partial(query_frame_mass, q, k, lse, key_frames)}
    for each in (1, 3, 7):
        if each < key_frames:
            calls[f"mass, {each} frames a program"] = partial(query_frame_mass, q, k, lse, key_frames, each)
    calls["mass, all frames a program"] = partial(query_frame_mass, q, k, lse, key_frames, key_frames)
    return calls


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, on average over a few."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS_A_TURN):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS_A_TURN


def largest_error(mass: Tensor, q: Tensor, k: Tensor, key_frames: int) -> float:
    """Of the mass [1, H, Fk, Lq] in the first and the last head, against the softmax in float64."""
    largest = 0.0
    for head in (0, q.shape[2] - 1):
        keys = k[0, :, head].double()
        for start in range(0, q.shape[1], CHUNK):
            rows = q[0, start : start + CHUNK, head].double() @ keys.mT * q.shape[3] ** -0.5
            expected = rows.softmax(-1).unflatten(-1, (key_frames, -1)).sum(-1)
            found = mass[0, head, :, start : start + CHUNK].mT
            largest = max(largest, (found - expected).abs().max().item())
    return largest


if __name__ == "__main__":
    main(run)

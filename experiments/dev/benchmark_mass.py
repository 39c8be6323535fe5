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

from experiments.dev.tables import markdown, measured_on, milliseconds_said, save_report
from experiments.running.cli import Parser, count, main

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 3  # query frames
ATTENTION = "attention, with its log-sum-exp"
TAILS = "attention, with the mass of key frames"  # where its kernel can tell


def table(report: dict) -> str:
    """Milliseconds of every way at every number of key frames, and its largest error."""
    frames = sorted({row["key_frames"] for row in report["rows"]})
    found = {(row["way"], row["key_frames"]): row for row in report["rows"]}
    rows = [
        (way, *(milliseconds_said(found.get((way, n))) for n in frames), error_said(found, way, frames))
        for way in dict.fromkeys(row["way"] for row in report["rows"])
    ]
    header = ("a call", *(f"{n} key frames" for n in frames), "largest error")
    below = f"{report['repeats']} turns of {report['calls_a_turn']} calls"
    return f"{markdown(header, rows)}\n\n{below}; {measured_on(report['environment'], 'bfloat16')}"


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
    from experiments.caches.files import require_writable
    from experiments.dev.measure_kernels import CALLS_A_TURN, require_gpu
    from experiments.extraction.provenance import environment

    device = require_gpu("benchmark_mass.py")
    if args.output_path:
        require_writable(args.output_path)
    rows = [row for frames in args.key_frames for row in rows_of(frames, args.repeats, device)]
    about = {"repeats": args.repeats, "calls_a_turn": CALLS_A_TURN}
    report = about | {"rows": rows, "environment": environment(device)}
    save_report(report, args.output_path)
    print(table(report))


def rows_of(key_frames: int, repeats: int, device) -> Iterator[dict]:
    """Every way in turn, at one number of key frames."""
    from experiments.dev.measure_kernels import QUERIES, TOKENS, in_turn, random_inputs
    from wan import backends as attention_backend
    from wan.attention import attention_with_lse
    from wan.reductions import mass_of_tails

    q, k = random_inputs((QUERIES, key_frames * TOKENS), device)
    q_heads, k_heads = q.transpose(1, 2), k.transpose(1, 2)
    lse = attention_with_lse(q_heads, k_heads, k_heads)[1].contiguous()
    calls: dict[str, Callable[[], Any]] = {ATTENTION: partial(attention_with_lse, q_heads, k_heads, k_heads)}
    calls |= ways(q, k, lse, key_frames)
    masses = {way: call() for way, call in calls.items() if way != ATTENTION}
    if attention_backend.gives_tails(q_heads, k_heads, k_heads):

        def by_query_frames(count: int) -> Tensor:
            tails = attention_backend.fa4_with_tails(q_heads, k_heads, k_heads, key_frames)[2]
            return mass_of_tails(tails, count)

        calls[TAILS], masses[TAILS] = partial(by_query_frames, BLOCK), by_query_frames(QUERIES).mT
    errors = {way: largest_error(mass, q, k, key_frames) for way, mass in masses.items()}
    for way, shown in in_turn(calls, repeats).items():
        yield {"way": way, "key_frames": key_frames, "milliseconds": shown, "largest_error": errors.get(way)}


def ways(q: Tensor, k: Tensor, lse: Tensor, key_frames: int) -> dict[str, Callable[[], Tensor]]:
    """What gives the mass [1, H, Fk, Lq], by the name of its row: capture's own call, then others."""
    from wan.kernels.mass import query_frame_mass

    calls: dict[str, Callable[[], Tensor]] = {"mass": partial(query_frame_mass, q, k, lse, key_frames)}
    for each in (1, 3, 7):
        if each < key_frames:
            calls[f"mass, {each} frames a program"] = partial(query_frame_mass, q, k, lse, key_frames, each)
    calls["mass, all frames a program"] = partial(query_frame_mass, q, k, lse, key_frames, key_frames)
    return calls


def largest_error(mass: Tensor, q: Tensor, k: Tensor, key_frames: int) -> float:
    """Of the mass [1, H, Fk, Lq] in the first and the last head, against the softmax in float64."""
    from experiments.dev.measure_kernels import exact_logits

    largest = 0.0
    for head, rows, logits in exact_logits(q, k):
        expected = logits.softmax(-1).unflatten(-1, (key_frames, -1)).sum(-1)
        largest = max(largest, (mass[0, head, :, rows].mT - expected).abs().max().item())
    return largest


if __name__ == "__main__":
    main(run)

"""Time the GPU's attention and mass kernels at the shapes of the 1.3B; errors against float64.

    python experiments/benchmarks/kernels.py --output_path docs/benchmarks/kernels_h200.json

Queries are those of a block, in bfloat16. Kernels run in turn in one process; an error is the largest of the
first and the last head.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.harness import in_turn, print_rows, save_report
from experiments.caches.files import require_writable
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, count, main
from wan import backends
from wan.attention import attention_with_lse
from wan.config import MODELS, RunConfig
from wan.errors import ConfigError
from wan.reductions import mass_of_tails

RUN, MODEL = RunConfig(), MODELS["Wan2.1-T2V-1.3B"]
TOKENS = MODEL.tokens_per_frame(RUN.height, RUN.width)
QUERIES = RUN.num_frame_per_block * TOKENS
CALLS, CHUNK = 5, 256  # calls of a timed turn; queries at once in float64


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--frames", type=count, nargs="+", default=[1, 2, 3, 6, 12, 21], help="numbers of key frames")
    flag("--repeats", type=count, default=15, help=f"turns of {CALLS} calls")
    flag("--output_path", help="write the numbers as JSON")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ConfigError("kernels.py times kernels of a GPU, and none is here")
    if args.output_path:
        require_writable(args.output_path)
    rows: dict[str, Any] = {}
    report = {"queries": QUERIES, "environment": environment(torch.device("cuda")), "rows": rows}
    for frames in args.frames:
        calls, errors = measured(frames)
        timed = {name: partial(seconds_of, call) for name, call in calls.items()}
        found = in_turn(timed, args.repeats, {name: {"error": error} for name, error in errors.items()})
        print_rows(found)
        rows |= found
        save_report(report, args.output_path)


def measured(frames: int) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Return what is timed over so many key frames: attention by each kernel, mass, both; and the errors."""
    from wan.kernels.mass import query_frame_mass  # Triton, which is where GPUs are

    generator, sizes = torch.Generator("cuda").manual_seed(0), (MODEL.num_heads, MODEL.head_dim)
    q, k, v = (
        torch.randn(1, n, *sizes, generator=generator, device="cuda").bfloat16()
        for n in (QUERIES, frames * TOKENS, frames * TOKENS)
    )
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    lse = attention_with_lse(*heads)[1].contiguous()
    calls: dict[str, Callable[[], Any]] = {
        "cuDNN": lambda: torch.ops.aten._scaled_dot_product_cudnn_attention(*heads, None, True)[0]
    }
    masses: dict[str, Callable[[], Tensor]] = {"mass": partial(query_frame_mass, q, k, lse, frames)}
    if backends.has_fa4(q.device):
        calls["FlashAttention-4"] = lambda: backends.fa4_attention(*heads)[0]
    if backends.gives_tails(*heads):
        masses["FlashAttention-4 with mass"] = lambda: (
            mass_of_tails(backends.fa4_with_tails(*heads, frames)[2], QUERIES).mT
        )
    errors = {name: attention_error(call(), *heads) for name, call in calls.items()}
    errors |= {name: mass_error(call(), *heads[:2], frames) for name, call in masses.items()}
    everything = calls | masses
    return (
        {f"{name}, {frames} key frames": call for name, call in everything.items()},
        {f"{name}, {frames} key frames": errors[name] for name in everything},
    )


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of one call on the GPU, on average over a few."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / CALLS


def exact_softmax(q: Tensor, k: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield head, query rows and their float64 softmax [n, Lk] of the first and the last head, in chunks.

    q is [1, H, Lq, D], k [1, H, Lk, D].
    """
    for head in (0, q.shape[1] - 1):
        for start in range(0, q.shape[2], CHUNK):
            rows = slice(start, start + CHUNK)
            logits = q[0, head, rows].double() @ k[0, head].double().mT * q.shape[3] ** -0.5
            yield head, rows, logits.softmax(-1)


def attention_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the relative error of the output [1, H, Lq, D]."""
    square, norm = 0.0, 0.0
    for head, rows, weights in exact_softmax(q, k):
        expected = weights @ v[0, head].double()
        square += (out[0, head, rows] - expected).square().sum().item()
        norm += expected.square().sum().item()
    return (square / norm) ** 0.5


def mass_error(mass: Tensor, q: Tensor, k: Tensor, frames: int) -> float:
    """Return the largest error of the mass [1, H, Fk, Lq]."""
    largest = 0.0
    for head, rows, weights in exact_softmax(q, k):
        expected = weights.unflatten(-1, (frames, -1)).sum(-1)
        largest = max(largest, (mass[0, head, :, rows].mT - expected).abs().max().item())
    return largest


if __name__ == "__main__":
    main(run)

"""Time the GPU's attention and mass kernels at the shapes of the 1.3B; errors against float64.

    python experiments/benchmarks/kernels.py --output_path docs/benchmarks/kernels_h200.json

Queries are those of a block, in bfloat16. Kernels run in turn in one process; errors are
those of the first and the last head.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.harness import Rows, in_turn, print_rows, save_report
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
    flag("--what", nargs="+", choices=MEASURED, default=list(MEASURED), help="which kernels")
    flag("--keys", type=count, nargs="+", help="of attention; 256 to 2048 and 1 to 21 frames where not given")
    flag("--key_frames", type=count, nargs="+", default=[3, 12, 21], help="of mass")
    flag("--repeats", type=count, default=15, help=f"turns of {CALLS} calls")
    flag("--output_path", help="write the numbers as JSON")
    args = parser.parse_args(argv)

    if not torch.cuda.is_available():
        raise ConfigError("kernels.py times kernels of a GPU, and none is here")
    if args.output_path:
        require_writable(args.output_path)
    device, rows = torch.device("cuda"), {}
    report = {"queries": QUERIES, "calls_a_turn": CALLS, "environment": environment(device), "rows": rows}
    for what in args.what:
        for found in MEASURED[what](args, device):
            rows |= found
            print_rows(found)
            save_report(report, args.output_path)


def timed(calls: Mapping[str, Callable[[], object]], errors: Mapping[str, Any], repeats: int) -> Rows:
    """Return seconds of each call, in turn, and its error."""
    rows = {name: partial(seconds_of, call) for name, call in calls.items()}
    return in_turn(rows, repeats, {name: {"error": error} for name, error in errors.items()})


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of one call on the GPU, on average over a few."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / CALLS


def random_inputs(lengths: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Return bfloat16 [1, n, H, D] for each length, always the same."""
    generator, sizes = torch.Generator(device).manual_seed(0), (MODEL.num_heads, MODEL.head_dim)
    return [torch.randn(1, n, *sizes, generator=generator, device=device).bfloat16() for n in lengths]


def exact_logits(q: Tensor, k: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield head, query rows and float64 logits [n, Lk] of the first and the last head, some rows at a time.

    q is [1, H, Lq, D], k [1, H, Lk, D].
    """
    for head in (0, q.shape[1] - 1):
        for start in range(0, q.shape[2], CHUNK):
            rows = slice(start, start + CHUNK)
            yield head, rows, q[0, head, rows].double() @ k[0, head].double().mT * q.shape[3] ** -0.5


# --- Attention by every kernel that is installed, by number of keys
def attention(args: argparse.Namespace, device: torch.device) -> Iterator[Rows]:
    """Time each kernel with its log-sum-exp."""
    frames = [n * TOKENS for n in (1, 2, 3, 6, 12, 21)]
    kernels = attention_kernels(device)
    for keys in args.keys or sorted([256, 512, 1024, 2048, *frames]):
        q, k, v = (x.transpose(1, 2) for x in random_inputs((QUERIES, keys, keys), device))
        calls = {f"{name}, {keys} keys": partial(kernel, q, k, v) for name, kernel in kernels.items()}
        yield timed(calls, {name: attention_errors(*call(), q, k, v) for name, call in calls.items()},
                    args.repeats)  # fmt: skip


def attention_kernels(device: torch.device) -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """Return the kernels that this machine has, by name."""

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        return out, lse.reshape(q.shape[:3])

    found = {"cuDNN": cudnn}
    if backends.has_fa4(device):
        found["FlashAttention-4"] = backends.fa4_attention
    return found


def attention_errors(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[float]:
    """Return the relative error of the output [1, H, Lq, D] and the largest of the log-sum-exp [1, H, Lq]."""
    square, norm, largest = 0.0, 0.0, 0.0
    for head, rows, logits in exact_logits(q, k):
        expected = logits.softmax(-1) @ v[0, head].double()
        square += (out[0, head, rows] - expected).square().sum().item()
        norm += expected.square().sum().item()
        largest = max(largest, (lse[0, head, rows] - logits.logsumexp(-1)).abs().max().item())
    return [(square / norm) ** 0.5, largest]


# --- Softmax mass per key frame beside one attention call
def mass(args: argparse.Namespace, device: torch.device) -> Iterator[Rows]:
    """Time attention, the mass of its key frames, and both by FlashAttention-4 where its kernel can."""
    from wan.kernels.mass import query_frame_mass  # Triton, which is where GPUs are

    for frames in args.key_frames:
        q, k = random_inputs((QUERIES, frames * TOKENS), device)
        heads = q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2)
        lse = attention_with_lse(*heads)[1].contiguous()
        of_frames = f"{frames} key frames"
        calls: dict[str, Callable[[], Any]] = {
            f"attention, {of_frames}": partial(attention_with_lse, *heads),
            f"mass, {of_frames}": partial(query_frame_mass, q, k, lse, frames),
        }
        masses = {f"mass, {of_frames}": query_frame_mass(q, k, lse, frames)}
        if backends.gives_tails(*heads):
            name = f"attention with mass, {of_frames}"
            calls[name] = partial(attention_and_mass, *heads, frames, RUN.num_frame_per_block)
            masses[name] = attention_and_mass(*heads, frames, QUERIES).mT
        errors = {name: mass_error(found, *heads[:2], frames) for name, found in masses.items()}
        yield timed(calls, errors, args.repeats)


def attention_and_mass(q: Tensor, k: Tensor, v: Tensor, key_frames: int, query_frames: int) -> Tensor:
    """Return the mass [1, H, Fq, Fk] that FlashAttention-4's kernel keeps while it computes the output."""
    return mass_of_tails(backends.fa4_with_tails(q, k, v, key_frames)[2], query_frames)


def mass_error(mass: Tensor, q: Tensor, k: Tensor, key_frames: int) -> float:
    """Return the largest error of the mass [1, H, Fk, Lq]."""
    largest = 0.0
    for head, rows, logits in exact_logits(q, k):
        expected = logits.softmax(-1).unflatten(-1, (key_frames, -1)).sum(-1)
        largest = max(largest, (mass[0, head, :, rows].mT - expected).abs().max().item())
    return largest


MEASURED = {"attention": attention, "mass": mass}

if __name__ == "__main__":
    main(run)

"""One attention call of the 1.3B by each of the GPU's kernels, by number of keys: time, and error in float64.

    python experiments/dev/benchmark_attention.py --output_path docs/benchmarks/attention_h200.json

Queries are a block's, bfloat16; the kernels are those of wan/modules/attention_backend.py that are installed,
with their log-sum-exp. They run in turn in one process; times are medians of those turns with 95 % intervals,
errors are of the first and the last head.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from experiments.dev.benchmark_mass import CALLS_A_TURN, CHUNK, MODEL, RUN, TOKENS, milliseconds, said
from experiments.dev.tables import markdown, measured_on, median_interval, save_report
from experiments.running.cli import Parser, count, main
from wan.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

QUERIES = RUN.num_frame_per_block * TOKENS


def table(report: dict) -> str:
    """A row a number of keys: milliseconds of every kernel, and its errors."""
    kernels = report["kernels"]
    header = ["keys", *kernels, *(f"error of {x}, output; log-sum-exp" for x in kernels)]
    rows = [
        (
            str(row["keys"]),
            *(said(row["kernels"][x]) for x in kernels),
            *("{:.2%}; {:.1e}".format(*row["kernels"][x]["errors"]) for x in kernels),
        )
        for row in report["rows"]
    ]
    below = f"{QUERIES} queries, {MODEL.num_heads} heads of {MODEL.head_dim}; "
    below += f"{report['repeats']} turns of {CALLS_A_TURN} calls"
    return f"{markdown(header, rows)}\n\n{below}; {measured_on(report['environment'], 'bfloat16')}"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    keys = [256, 512, 1024, 1560, 2048, *(frames * TOKENS for frames in (2, 3, 6, 12, 21))]
    parser.add_argument("--keys", type=count, nargs="+", default=keys)
    parser.add_argument("--repeats", type=count, default=15, help="turns")
    parser.add_argument("--output_path", help="write the numbers as JSON")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    import torch

    from experiments.caches.atomic_files import require_writable
    from experiments.extraction.provenance import environment

    if not torch.cuda.is_available():
        raise ConfigError("benchmark_attention.py times kernels of a GPU; none is here")
    if args.output_path:
        require_writable(args.output_path)
    device = torch.device("cuda")
    found = kernels(device)
    report = {"repeats": args.repeats, "kernels": list(found), "rows": [], "environment": environment(device)}
    for keys in args.keys:
        report["rows"].append({"keys": keys, "kernels": row_of(found, keys, args.repeats, device)})
        save_report(report, args.output_path)
    print(table(report))


def kernels(device: torch.device) -> dict[str, Kernel]:
    """Those that this machine has, by name; FlashAttention-4 with its version."""
    import torch

    from wan.modules.attention_backend import fa4_attention, fa4_version, has_fa4

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        return out, lse.reshape(q.shape[:3])

    found: dict[str, Kernel] = {"cuDNN": cudnn}
    if has_fa4(device):
        found[f"FlashAttention {fa4_version()}"] = fa4_attention
    return found


def row_of(found: dict[str, Kernel], keys: int, repeats: int, device: torch.device) -> dict[str, dict]:
    """Every kernel in turn over this many keys."""
    import numpy as np
    import torch

    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, n, MODEL.num_heads, MODEL.head_dim, generator=generator, device=device).bfloat16()
        for n in (QUERIES, keys, keys)
    )
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    calls = {name: partial(kernel, *heads_first) for name, kernel in found.items()}
    errors = {name: errors_of(*call(), *heads_first) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            taken[name].append(milliseconds(call))
    return {
        name: {
            "milliseconds": [round(float(x), 4) for x in (np.median(turns), *median_interval(turns))],
            "errors": errors[name],
        }
        for name, turns in taken.items()
    }


def errors_of(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[float]:
    """Relative error of the output [B, H, Lq, D] and largest of the log-sum-exp [B, H, Lq], in two heads."""
    square, norm, largest = 0.0, 0.0, 0.0
    for head in (0, q.shape[1] - 1):
        keys, values = k[0, head].double(), v[0, head].double()
        for start in range(0, q.shape[2], CHUNK):
            rows = slice(start, start + CHUNK)
            logits = q[0, head, rows].double() @ keys.mT * q.shape[3] ** -0.5
            expected = logits.softmax(-1) @ values
            square += (out[0, head, rows] - expected).square().sum().item()
            norm += expected.square().sum().item()
            largest = max(largest, (lse[0, head, rows] - logits.logsumexp(-1)).abs().max().item())
    return [(square / norm) ** 0.5, largest]


if __name__ == "__main__":
    main(run)

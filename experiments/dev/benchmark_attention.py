"""One attention call of the 1.3B by each of the GPU's kernels, by number of keys: time, and error in float64.

    python experiments/dev/benchmark_attention.py --output_path docs/benchmarks/attention_h200.json

Queries are a block's, bfloat16; the kernels are those of wan/backends.py that are installed,
with their log-sum-exp. They run in turn in one process; times are medians of those turns with 95 % intervals,
errors are of the first and the last head. Then a block's products in the same way, by cuBLAS and by the
kernel of wan/kernels/gelu_linear.py with several tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from experiments.dev.tables import markdown, measured_on, milliseconds_said, save_report
from experiments.running.cli import Parser, count, main

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


# Rows, columns, whether in turns. A block has 37 x 128 rows, an H200 132 multiprocessors: of 1536 columns
# 128 x 224 makes two full waves.
TILES = ((128, 160, True), (128, 192, True), (128, 224, False), (128, 256, False), (256, 128, False))


def table(report: dict) -> str:
    """A row a number of keys: milliseconds of every kernel, and its errors."""
    kernels = report["kernels"]
    header = ["keys", *kernels, *(f"error of {x}, output; log-sum-exp" for x in kernels)]
    rows = [
        (
            str(row["keys"]),
            *(milliseconds_said(row["kernels"][x]) for x in kernels),
            *("{:.2%}; {:.1e}".format(*row["kernels"][x]["errors"]) for x in kernels),
        )
        for row in report["rows"]
    ]
    below = "{queries} queries, {heads} heads of {head_dim}; {repeats} turns of {calls_a_turn} calls"
    measured = measured_on(report["environment"], "bfloat16")
    tables = [markdown(header, rows)]
    if products := report.get("products"):
        tables.append(table_of_products(products))
    return "\n\n".join([*tables, f"{below.format(**report)}; {measured}"])


def table_of_products(products: list[dict]) -> str:
    """A row a product, a column a kernel."""
    names = list(dict.fromkeys(name for product in products for name in product["kernels"]))
    rows = [
        (
            product["product"],
            *(
                f"{milliseconds_said(x)}, error {x['errors'][0]:.2%}"
                if (x := product["kernels"].get(name))
                else ""
                for name in names
            ),
        )
        for product in products
    ]
    return markdown(["product", *names], rows)


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--keys", type=count, nargs="+", help="256 to 2048, and 1 to 21 frames where not given"
    )
    parser.add_argument("--repeats", type=count, default=15, help="turns")
    parser.add_argument("--output_path", help="write the numbers as JSON")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    from experiments.caches.files import require_writable
    from experiments.dev.measure_kernels import CALLS_A_TURN, MODEL, QUERIES, TOKENS, require_gpu
    from experiments.extraction.provenance import environment

    device = require_gpu("benchmark_attention.py")
    if args.output_path:
        require_writable(args.output_path)
    found = kernels(device)
    sizes = {"queries": QUERIES, "heads": MODEL.num_heads, "head_dim": MODEL.head_dim}
    turns = {"repeats": args.repeats, "calls_a_turn": CALLS_A_TURN}
    report = sizes | turns | {"kernels": list(found), "rows": [], "environment": environment(device)}
    frames = [n * TOKENS for n in (1, 2, 3, 6, 12, 21)]
    for keys in args.keys or sorted([256, 512, 1024, 2048, *frames]):
        report["rows"].append({"keys": keys, "kernels": row_of(found, keys, args.repeats, device)})
        save_report(report, args.output_path)
    report["products"] = products(args.repeats, device)
    save_report(report, args.output_path)
    print(table(report))


def kernels(device: torch.device) -> dict[str, Kernel]:
    """Those that this machine has, by name; FlashAttention-4 with its version."""
    import torch

    from experiments.dev.measure_kernels import MODEL
    from wan import backends as attention_backend

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        return out, lse.reshape(q.shape[:3])

    found: dict[str, Kernel] = {"cuDNN": cudnn}
    if attention_backend.has_fa4(device):
        name = f"FlashAttention {attention_backend.fa4_version()}"
        found[name] = attention_backend.fa4_attention
        if attention_backend.launches(torch.empty(1, 1, 1, MODEL.head_dim, device=device)):
            found[f"{name} by its own function"] = attention_backend.fa4_by_function
    return found


def row_of(found: dict[str, Kernel], keys: int, repeats: int, device: torch.device) -> dict[str, dict]:
    """Every kernel in turn over this many keys."""
    from experiments.dev.measure_kernels import QUERIES, in_turn, random_inputs

    heads_first = [x.transpose(1, 2) for x in random_inputs((QUERIES, keys, keys), device)]
    calls = {name: partial(kernel, *heads_first) for name, kernel in found.items()}
    errors = {name: errors_of(*call(), *heads_first) for name, call in calls.items()}
    return {
        name: {"milliseconds": shown, "errors": errors[name]}
        for name, shown in in_turn(calls, repeats).items()
    }


def products(repeats: int, device: torch.device) -> list[dict]:
    """A block's products by each kernel: the FFN's first with its GELU, its second, a projection."""
    from experiments.dev.measure_kernels import MODEL

    dim, wide = MODEL.dim, MODEL.ffn_dim
    return [
        product_of(*sizes, repeats, device)
        for sizes in ((dim, wide, True), (wide, dim, False), (dim, dim, False))
    ]


def product_of(inner: int, columns: int, has_gelu: bool, repeats: int, device: torch.device) -> dict:
    """One product in turn by cuBLAS and, where it is there, quack's kernel with several tiles."""
    import torch
    import torch.nn.functional as F

    from experiments.dev.measure_kernels import QUERIES, in_turn
    from wan.kernels import gelu_linear

    generator, kind = torch.Generator(device).manual_seed(0), torch.bfloat16
    x, weight, bias = (
        (torch.randn(shape, generator=generator, device=device) * size).to(kind)
        for shape, size in (((QUERIES, inner), 1.0), ((columns, inner), inner**-0.5), (columns, 1.0))
    )
    exact, activation = F.linear(x.double(), weight.double(), bias.double()), None
    calls: dict[str, Callable[[], Tensor]] = {"cuBLAS": lambda: F.linear(x, weight, bias)}
    if has_gelu:
        exact, activation = F.gelu(exact, approximate="tanh"), "gelu_tanh_approx"
        calls["cuBLAS"] = lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    if gelu_linear.takes(x, weight):
        for tile in map(gelu_linear.Tile._make, TILES):
            name = f"quack, {tile.rows} x {tile.columns}{' in turns' * tile.in_turns}"
            calls[name] = partial(gelu_linear.by_quack(activation, tile), x, weight, bias)
    errors = {name: [((call() - exact).norm() / exact.norm()).item()] for name, call in calls.items()}
    times = in_turn(calls, repeats)
    return {
        "product": f"{QUERIES} x {inner} by {columns}{', GELU' * has_gelu}",
        "kernels": {name: {"milliseconds": times[name], "errors": errors[name]} for name in calls},
    }


def errors_of(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[float]:
    """Relative error of the output [B, H, Lq, D] and largest of the log-sum-exp [B, H, Lq], in two heads."""
    from experiments.dev.measure_kernels import exact_logits

    square, norm, largest = 0.0, 0.0, 0.0
    for head, rows, logits in exact_logits(q.transpose(1, 2), k.transpose(1, 2)):
        expected = logits.softmax(-1) @ v[0, head].double()
        square += (out[0, head, rows] - expected).square().sum().item()
        norm += expected.square().sum().item()
        largest = max(largest, (lse[0, head, rows] - logits.logsumexp(-1)).abs().max().item())
    return [(square / norm) ** 0.5, largest]


if __name__ == "__main__":
    main(run)

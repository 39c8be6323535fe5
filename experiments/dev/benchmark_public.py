"""Self-Forcing's public code and ours side by side in one process: the same weights, noise and passes.

    git clone https://github.com/guandeh17/Self-Forcing ../Self-Forcing
    python experiments/dev/benchmark_public.py ../Self-Forcing --random_weights --device cuda

The transformer alone: prompt embeddings are given, nothing is decoded. The public transformer is imported
from the checkout and called as its own pipeline calls it. Rows are run in turn, round after round. In half
precision all are compared with our transformer in float32 at the end.
"""

import argparse
from functools import partial
from pathlib import Path

from experiments.dev.benchmark_flags import benchmark_parser
from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import config_from, main

PUBLIC = "public code"


def table(report: dict) -> str:
    """Seconds of the public rollout and of ours, plain and captured, and under them what was rolled out."""
    weights = " shapes, random weights" if report["random_weights"] else ""
    what = f"{report['model']}{weights}, {report['num_frames']} latent frames"
    attention = f"attention: {report['public_attention']} in the public code"
    attention += f", {kernel} in ours" if (kernel := report.get("attention")) else ""
    measured = measured_on(report["environment"], report["dtype"])
    return f"{rows_of(report['rows'])}\n\n{what}; {attention}; {measured}"


def rows_of(results: dict[str, dict]) -> str:
    header = ["transformer alone", "seconds", "x public", "peak GPU", "latents differ by"]
    has_error, rows = all("error" in row for row in results.values()), []
    for name, row in results.items():
        low, high = row["times_public_interval"]
        ratio = f"{row['times_public']:.3f}" + ("" if low == high else f" ({low:.3f}–{high:.3f})")
        apart = row["relative_difference"]
        differs = "" if name == PUBLIC else f"{apart:.1e}" if apart < 1e-4 else f"{100 * apart:.2f} %"
        error = [f"{100 * row['error']:.2f} %"] if has_error else []
        rows.append(
            [name, f"{row['median_seconds']:.3f}", ratio, f"{row['gpu_peak_mib']} MiB", differs, *error]
        )
    return markdown([*header, *(["error against float32"] if has_error else [])], rows)


def run(argv=None):
    parser = benchmark_parser(__doc__, repeats=5)
    parser.add_argument("checkout", type=Path, help="a checkout of Self-Forcing's public repository")
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    import torch

    from experiments.caches.files import require_writable
    from experiments.dev import measure_capture, measure_public
    from experiments.dev.tables import save_report
    from experiments.extraction.devices import threads_for
    from wan.errors import ConfigError

    config = config_from(args)
    if args.output_path:
        require_writable(args.output_path)
    if config.policy.name != "full" or config.sampler != "blocks" or config.independent_first_frame:
        raise ConfigError(
            "the public code is timed with equal blocks that see the whole past: leave the rest out"
        )
    model_class, public_attention = measure_public.import_public(args.checkout)
    rollout, sizes = measure_capture.make_rollout(config, args.random_weights)
    tokens = config.num_frames * sizes.tokens_per_frame(config.height, config.width)
    if tokens > measure_public.MOST_TOKENS:
        raise ConfigError(
            f"{config.num_frames} frames are {tokens} tokens, and the public code attends to the last "
            f"{measure_public.MOST_TOKENS}; take fewer frames"
        )
    public = measure_public.build_public(model_class, rollout.pipeline.model, sizes)
    captured = list(measure_capture.rows(config, sizes.num_layers).items())[:3]  # plain, logits, mass
    rows = {PUBLIC: partial(measure_public.roll_out_public, public, rollout, sizes)}
    rows |= {f"ours, {name}": partial(rollout.latents, requests) for name, requests in captured}
    exact = None if rollout.noise.dtype == torch.float32 else partial(measure_public.in_float32, rollout)
    with threads_for(rollout.noise, sizes):
        results = measure_public.measure(rows, rollout.noise.device, args.repeats, exact)
    print(rows_of(results))
    report = measure_capture.described(config, args.random_weights, rollout.noise)
    save_report(report | {"public_attention": public_attention, "rows": results}, args.output_path)


if __name__ == "__main__":
    main(run)

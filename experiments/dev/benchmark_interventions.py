"""What editing costs: rollouts with and without edits in turn, and a causal atlas of every head.

    python experiments/dev/benchmark_interventions.py --config_path configs/wan_mini.yaml
    python experiments/dev/benchmark_interventions.py --random_weights --device cuda --sweep_seconds 60

The atlas goes on where it stopped in --folder; what is not done in --sweep_seconds is extrapolated. The file
is written after every row: a run that is stopped leaves what it measured.
"""

import argparse
from pathlib import Path

from experiments.dev.benchmark_flags import benchmark_parser
from experiments.dev.tables import markdown, measured_on
from experiments.running.cli import config_from, count, main


def table(report: dict) -> str:
    """Edited rollouts beside the plain one, and under it the atlas."""
    rows = [
        (
            name,
            f"{row['median_seconds']:.3f}",
            f"{row['times_plain']:.3f}",
            f"{row['edited_calls']}",
            "yes" if row["bit_identical"] else "no",
        )
        for name, row in report["rows"].items()
    ]
    weights = " shapes, random weights" if report["random_weights"] else ""
    what = f"{report['model']}{weights}, {report['num_frames']} latent frames; edits are of every layer."
    lines = markdown(("edit", "seconds", "x plain", "edited calls", "bits of plain"), rows) + "\n\n"
    where = measured_on(report["environment"], report["dtype"])
    return f"{lines if rows else ''}{what} {_of_sweep(report['sweep'])}{where}"


def _of_sweep(sweep: dict | None) -> str:
    if sweep is None:
        return ""
    before = f" after {sweep['layers_done_before']} done before" if sweep["layers_done_before"] else ""
    done = f"{sweep['layers_done_now']} of {sweep['layers']} layers{before} took {sweep['seconds']:.0f} s"
    if not sweep["finished"]:
        done += f", from which all are extrapolated to {sweep['all_layers_seconds']:.0f} s"
    of = f"{sweep['heads']} heads, {sweep['prompts']} prompt{'s' * (sweep['prompts'] > 1)}"
    return f"Causal atlas of mean ablation, {of}: {done}. "


def run(argv=None):
    parser = benchmark_parser(__doc__, repeats=3)
    parser.add_argument("--sweep_seconds", type=count, help="also a causal atlas, for about so long")
    parser.add_argument("--sweep_only", action="store_true", help="nothing but that, with --sweep_seconds")
    parser.add_argument("--sweep_prompts", type=count, default=1, help="prompts of the atlas, in one batch")
    parser.add_argument("--folder", type=Path, default=Path("cache/benchmark_interventions"))
    measure(parser.parse_args(argv))


def measure(args: argparse.Namespace) -> None:
    from experiments.caches.files import require_writable
    from experiments.dev import measure_interventions
    from experiments.dev.measure_capture import described, make_rollout
    from experiments.dev.tables import line, save_report
    from wan.checkpoint import file_sha256, weights_file
    from wan.errors import ConfigError

    config = config_from(args)
    if args.sweep_prompts > len(config.reference_prompts):
        raise ConfigError(f"the config has {len(config.reference_prompts)} reference_prompts to sweep over")
    if args.sweep_only and not args.sweep_seconds:
        raise ConfigError("--sweep_only needs --sweep_seconds: how long to go on with the atlas")
    if args.output_path:
        require_writable(args.output_path)
    rollout, sizes = make_rollout(config, args.random_weights)
    report = described(config, args.random_weights, rollout.noise)

    def keep(rows: dict, sweep: dict | None = None) -> None:
        save_report(report | {"rows": rows, "sweep": sweep}, args.output_path)

    edits, rows, sweep = measure_interventions.rows(config, sizes), {}, None
    if not args.sweep_only:
        rows = measure_interventions.measure(rollout, edits, args.repeats, keep, line)
    if args.sweep_seconds:
        path = weights_file(config.ckpt_dir, config.checkpoint_path) if not args.random_weights else None
        weights = file_sha256(path) if path else f"random weights of {config.model}"
        session = measure_interventions.session_of(rollout, sizes, config, weights)
        sweep = measure_interventions.sweep(
            session, config, args.sweep_prompts, args.sweep_seconds, args.folder, line
        )
    keep(rows, sweep)
    print(table(report | {"rows": rows, "sweep": sweep}), end="")


if __name__ == "__main__":
    main(run)

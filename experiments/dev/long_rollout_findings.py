"""The findings about long rollouts, from the table that compare_policies.py wrote.

    python experiments/compare_policies.py --policies findings --held_out 18 --seeds 0 1 2 --output_dir OUT
    python experiments/dev/long_rollout_findings.py OUT/comparison.json

Writes docs/long_rollouts.json; docs/long_rollouts.md, the notebook and the README show it.
"""

import json

from experiments.caches.files import replacing
from experiments.dev.tables import markdown, measured_on, of_weights
from experiments.running.cli import Parser, main
from wan.files import read_json

HEADER = (
    "policy",
    "colour and shape right",
    "against full",
    "p (Holm)",
    "behind a wall",
    "hue kept",
    "motion",
    "keys and values",
)


def table(report: dict) -> str:
    """The family and the controls, the questions, and under them what was measured."""
    family = ["full", *report["against_full"]]
    controls = [name for name in ("frozen", "vae", "rendered") if name in report["policies"]]
    rows = [_row(report, label) for label in [*family, *controls]]
    asked = [
        (
            question,
            str(of["pairs"]),
            _said(of["right"]["difference"], sign=True),
            f"{of['right']['p']:.4f}",
            _said(of["motion"]["difference"], sign=True),
        )
        for question, of in report["questions"].items()
    ]
    header = ("paired difference", "pairs", "right", "p (not adjusted)", "motion")
    n, what = report["prompts"], f"{report['num_frames']} latent frames, {report['seeds']} seeds"
    under = f"{n} held-out prompts, {what}; 95 % intervals over prompts; motion in sides per second"
    under = f"{under}; {of_weights(report['weights_sha256'])}"
    return f"{markdown(HEADER, rows)}\n\n{markdown(header, asked)}\n\n{under}; {measured_on(report['made'])}"


def _row(report: dict, label: str) -> tuple[str, ...]:
    of = report["policies"][label]
    against = report["against_full"].get(label)
    measures = of["measures"]
    return (
        of["name"],
        _said(measures["right"]),
        _said(against["difference"], sign=True) if against else "",
        "" if not against or against["p_holm"] is None else f"{against['p_holm']:.4f}",
        _said(of["by_kind"]["wall"]) if "wall" in of["by_kind"] else "",
        _said(measures["hue_kept"]),
        _said(measures["motion"]),
        f"{of['cost']['cache_bytes'] / 1e6:.1f} MB" if "cost" in of else "",
    )


def _said(interval: list, sign: bool = False) -> str:
    """0.62 (0.55-0.70), or with signs."""
    if interval[0] is None:
        return ""
    estimate, low, high = (f"{x:+.2f}" if sign else f"{x:.2f}" for x in interval)
    return f"{estimate} ({low} to {high})"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", help="comparison.json of compare_policies.py")
    parser.add_argument("--output_path", default="docs/long_rollouts.json", help="where the findings go")
    args = parser.parse_args(argv)

    from experiments.studies.policy_findings import findings  # with NumPy: not for a --help

    found = findings(read_json(args.comparison))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    with replacing(args.output_path) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())
    print(f"{args.output_path}: {len(found['policies'])} policies, {found['prompts']} prompts")


if __name__ == "__main__":
    main(run)

"""The findings about long rollouts, from the table that compare_policies.py wrote.

    python experiments/compare_policies.py --policies findings --held_out 18 --seeds 0 1 2 --output_dir OUT
    python experiments/dev/long_rollout_findings.py OUT/comparison.json

Writes docs/long_rollouts.json; docs/long_rollouts.md, the notebook and the README show it.
"""

import json

from experiments.caches.atomic_files import replacing
from experiments.running.cli import Parser, main
from wan.text_files import read_json


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

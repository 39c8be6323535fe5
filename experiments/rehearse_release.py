"""Rehearse the real model on small files of its names: download, check, extraction, notebook.

    python experiments/rehearse_release.py                      # in outputs/rehearsal, minutes on a CPU
    python experiments/rehearse_release.py --output_dir /tmp/here

Writes the files of Self-Forcing's release and of Wan2.1-T2V-1.3B with random weights: every name, key and
layout of the release, narrower layers and 8 x 8 latents. Then it runs the commands of docs/real_model.md on
them, prints each with what it says, and ends with 1 where one of them does something else. The first check
has to refuse: the published heads are of another model. The second one compares with the atlas made here.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from experiments.running import cli

ROOT = Path(__file__).resolve().parents[1]


def run(argv=None):
    parser = cli.Parser(description=__doc__)
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/rehearsal"), help="a folder for all of it"
    )
    args = parser.parse_args(argv)
    folder = args.output_dir.resolve()

    from experiments.studies import rehearsal  # after the flags: a --help needs no torch

    rehearsal.write_release(folder / "hub")
    rehearsal.write_config(folder)
    failed = [command for command, expected in commands(folder) if not runs(command, expected)]
    if failed:
        print(f"error: {len(failed)} of the commands did not end as they should", file=sys.stderr)
        sys.exit(1)
    print("every command did what docs/real_model.md says; without --from the first one gets the real files")


def commands(folder: Path) -> list[tuple[list[str], int]]:
    """Return the commands of the real model's path, each with the exit code that it should have."""
    python, here = sys.executable, str(folder)
    config = ["--config_path", f"{here}/rehearsal.yaml"]
    figure4, atlas, check = f"{here}/cache/figure4.pt", f"{here}/cache/atlas.pt", f"{here}/check.svg"
    notebook = [python, "experiments/run_notebooks.py", "plt_fig4.ipynb", atlas, "1", "5"]
    check_model = [python, "experiments/check_model.py", *config, "--output_path", check]
    return [
        (["bash", "experiments/download_weights.sh", "--yes", "--from", f"{here}/hub", here], 0),
        (check_model, 2),  # the published heads are of another model
        ([python, "experiments/run_extraction_figure4.py", *config, "--output_path", figure4], 0),
        ([python, "experiments/run_extraction_all.py", *config, "--output_path", atlas], 0),
        ([*check_model, "--reference", atlas], 0),
        ([*notebook, "--output_dir", f"{here}/notebooks"], 0),
    ]


def runs(command: list[str], expected: int) -> bool:
    """Run a command and print it; return whether it ended as expected."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    if expected:
        print(f"(expected: an error line, and exit code {expected})", flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code != expected:
        print(f"it ended with {code}, not with {expected}", flush=True)
    return code == expected


if __name__ == "__main__":
    cli.main(run)

"""How long a new user waits: clone, install, quickstart, the README's own code, the page.

    python experiments/dev/benchmark_first_contact.py --output_path docs/benchmarks/first_contact.json

Each is run as the README has it, in a new folder. Packages come from where pip is told to look.
"""

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from experiments.dev.tables import gb, markdown, measured_on
from experiments.running.cli import Parser, main

ROOT = Path(__file__).parents[2]
OWN_CODE = re.compile(r"## In your own code\n.*?```python\n(.*?)```", re.DOTALL)

STEPS = {  # what the user does -> command, in the checkout
    "install": "source experiments/running/env.sh",
    "quickstart": "bash experiments/quickstart.sh",
    "own code": "source .venv/bin/activate; python own_code.py",
    "page": "source .venv/bin/activate; python experiments/layer_page.py cache/atlas.pt "
    "--video outputs/wan-mini.mp4 --output_path outputs/atlas.html",
}


def table(report: dict) -> str:
    """Seconds by step, and disk."""
    seconds, disk = report["seconds"], (report["clone_bytes"], report["venv_bytes"])
    header = ("", "clone", "install, once", "quickstart", "“In your own code”", "the page", "all of it")
    times = [f"{took:.0f} s" for took in seconds.values()]
    rows = [
        ("time", *times, f"{sum(seconds.values()) / 60:.1f} min"),
        ("disk", *map(gb, disk), "", "", "", gb(sum(disk))),
    ]
    busy = f"{report['cores']} cores with {report['load']:.0f} processes that wanted them"
    return f"{markdown(header, rows)}\n\nOn {busy}; {measured_on(report['environment'])}"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_path", help="write the numbers as JSON")
    args = parser.parse_args(argv)

    from experiments.caches.files import require_writable
    from experiments.dev.tables import save_report

    if args.output_path:
        require_writable(args.output_path)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder) / "wan-attention")
    save_report(report, args.output_path)


def measure(checkout: Path) -> dict:
    """Walk the path once, in a new checkout. RunError where a step fails or changes a tracked file."""
    import torch

    from experiments.caches.files import RunError
    from experiments.extraction.provenance import environment

    seconds = {"clone": timed(f"git clone -q {ROOT} {checkout}", ROOT)}
    cloned = size_of(checkout)
    block = own_code()
    own = checkout / "outputs" / "own_code.py"  # git ignores that folder
    own.parent.mkdir()
    own.write_text(block, encoding="utf-8")
    for name, command in STEPS.items():
        seconds[name] = timed(command.replace("own_code.py", "outputs/own_code.py"), checkout)
        print(f"{name}: {seconds[name]:.1f} s", flush=True)
    status = subprocess.run(["git", "status", "--porcelain"], cwd=checkout, capture_output=True, text=True)
    if status.stdout:
        raise RunError(f"the commands changed the checkout: {status.stdout.split()[1]}")
    return {
        "seconds": seconds,
        "clone_bytes": cloned,
        "venv_bytes": size_of(checkout / ".venv"),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[1],  # mean over five minutes
        "own_code_lines": len(block.strip().splitlines()),
        "environment": environment(torch.device("cpu")),
    }


def own_code() -> str:
    """The README's block."""
    (block,) = OWN_CODE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return block


def timed(command: str, folder: Path) -> float:
    """Seconds of a shell command. RunError with its last line where it fails."""
    from experiments.caches.files import RunError

    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    start = time.perf_counter()
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=clean, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{command}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return time.perf_counter() - start


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


if __name__ == "__main__":
    main(run)

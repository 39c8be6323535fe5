"""Run the tests of machines with a GPU, and write docs/benchmarks/gpu_tests.json: bash tests/run.sh --gpu

On N GPUs it is gpu_tests_N_gpus.json.
Each file has a process of its own: forks are lost to a process that has used CUDA, and an error of CUDA loses
the GPU to all that follows. Nothing is installed; what a test needs and is not here skips it, with a reason.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
OUTPUT = "docs/benchmarks/gpu_tests.json"
# Captures, edits, kernels, graphs, policies, sites, several GPUs: tests/wan. Then what runs beside a GPU.
FILES = ["tests/wan/test_*.py", "tests/running/test_run.py"]  # with runs that are equal to the byte
FILES += ["tests/test_memory.py", "tests/miniature/test_training.py"]
LONGEST = ("test_run", "test_on_gpus", "test_policies", "test_interventions", "test_parallel")  # begin first
AT_ONCE = 6
SECONDS = 290  # of all, after which those that still run are stopped and have failed


def run(file: Path, folder: str, deadline: float) -> tuple[str, ET.Element | None, float]:
    """The output, the results of one file's tests (None where it did not come to an end), and its seconds."""
    results, start = Path(folder) / f"{file.stem}.xml", time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3"]
    command += [f"--junitxml={results}", str(file.relative_to(ROOT))]
    try:
        left = max(1.0, deadline - start)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left)
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace") + "\nstopped: out of time"
    return text, ET.parse(results).getroot() if results.exists() else None, time.monotonic() - start


def commit() -> str:
    """The commit that the environment names, for copies whose history is another's, or that git knows."""
    if named := os.environ.get("COMMIT"):
        return named
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        found = ""
    return found or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bash tests/run.sh --gpu", description=__doc__)
    parser.add_argument("files", nargs="*", help="only these, and nothing is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU here; bash tests/run.sh runs what needs none", file=sys.stderr)
        return 2
    files = sorted(path for pattern in args.files or FILES for path in ROOT.glob(pattern))
    files.sort(key=lambda file: LONGEST.index(file.stem) if file.stem in LONGEST else len(LONGEST))
    counts, reasons, failures, start = Counter[str](), Counter[str](), list[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [(file, pool.submit(run, file, folder, start + SECONDS)) for file in files]
        for file, job in jobs:
            text, results, seconds = job.result()
            before, name = counts.copy(), str(file.relative_to(ROOT))
            if results is None:
                failures.append(f"{name}: did not end")
            for case in () if results is None else results.iter("testcase"):
                skipped = case.find("skipped")
                if case.find("failure") is not None or case.find("error") is not None:
                    failures.append(f"{name}::{case.get('name')}")
                elif skipped is not None:
                    counts["skipped"] += 1
                    # Of a whole file the reason stands in the text
                    said = [skipped.get("message", ""), *(skipped.text or "").split("Skipped: ")[1:]]
                    reasons[said[0] if said[0] != "collection skipped" else said[-1].strip("')\" ")] += 1
                else:
                    counts["passed"] += 1
            counts["failed"] = len(failures)
            ended = ", ".join(f"{n} {how}" for how, n in (counts - before).items())
            print(f"{seconds:6.1f} s  {name}: {ended}", flush=True)
            if counts["failed"] > before["failed"]:
                print(text[-6000:], flush=True)
    found = {
        "command": "bash tests/run.sh --gpu",
        "date": date.today().isoformat(),
        "commit": commit(),
        "card": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "failed": counts["failed"],
        "seconds": round(time.monotonic() - start),
        "failures": failures,
        "reasons": dict(reasons.most_common()),
    }
    print(json.dumps(found, indent=1))
    if not args.files:
        output = ROOT / OUTPUT
        if found["gpus"] > 1:  # beside the run of one GPU, which has other tests
            output = output.with_stem(f"{output.stem}_{found['gpus']}_gpus")
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

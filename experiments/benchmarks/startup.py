"""Say where the seconds of a command go: Python and imports, files, the model, the rollout, the cache.

    python experiments/benchmarks/startup.py run_extraction_all --config_path configs/wan_mini.yaml \
        --output_path outputs/startup.pt --overwrite

Starts the script again and again, each time in a new process, and prints the seconds of its phases. What
happens in the background, such as reading the VAE and hashing the weights, shows where it is waited for.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGAN, REPORT = "STARTUP_BEGAN", "STARTUP_REPORT"  # of the process, by environment
PHASES = {  # name -> functions, each where its caller finds it
    "reading the weights": ["experiments.extraction.causal.read_weights"],
    "the model on its device": ["wan.checkpoint.build_model"],
    "the prompt": ["experiments.extraction.causal.encode_prompts"],
    "waiting for the VAE": ["experiments.extraction.video.LiveVideo.ready"],
    "rollout": ["experiments.extraction.causal.roll_out"],
    "cache and video": ["experiments.running.run.save"],
}


def run(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", help="of experiments/, without .py; its flags follow")
    parser.add_argument("--times", type=int, default=3, help="processes, one after the other")
    parser.add_argument("--json", type=Path, help="write the numbers")
    args, flags = parser.parse_known_args(argv)
    if REPORT in os.environ:
        inside(args.script, flags)
        return
    from experiments.benchmarks.harness import save_report

    rows = []
    for _ in range(args.times):
        report = Path(f"startup.{os.getpid()}.json")
        environment = os.environ | {BEGAN: str(time.time()), REPORT: str(report)}
        subprocess.run([sys.executable, __file__, args.script, *flags], env=environment, check=True)
        rows.append(
            json.loads(report.read_text()) | {"process": round(time.time() - float(environment[BEGAN]), 2)}
        )
        report.unlink()
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        import torch

        from experiments.extraction.provenance import environment as described

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        save_report(
            {"script": args.script, "flags": flags, "environment": described(device), "rows": rows}, args.json
        )


def inside(script: str, flags: list[str]) -> None:
    """Run a script with its phases timed, and write the seconds of each."""
    began, seconds = float(os.environ[BEGAN]), dict[str, float]()
    module = importlib.import_module(f"experiments.{script}")
    importlib.import_module("experiments.running.run")  # which a script imports once its flags are read
    seconds["python and imports"] = time.time() - began
    for phase, functions in PHASES.items():
        for name in functions:
            time_calls(name, phase, seconds)
    start = time.time()
    module.run(flags)
    total = time.time() - start
    named = sum(value for name, value in seconds.items() if name != "python and imports")
    seconds["between"] = total - named
    seconds["total"] = time.time() - began
    seconds["CPU seconds"] = time.process_time()
    Path(os.environ[REPORT]).write_text(
        json.dumps({name: round(value, 2) for name, value in seconds.items()})
    )


def time_calls(name: str, phase: str, seconds: dict[str, float]) -> None:
    """Add the seconds of a function's calls to a phase; the GPU's work is waited for."""
    path, attribute = name.rsplit(".", 1)
    try:
        owner: Any = importlib.import_module(path)
    except ImportError:
        path, cls = path.rsplit(".", 1)
        owner = getattr(importlib.import_module(path), cls, None)
    if not hasattr(owner, attribute):
        return  # of another tree, where PYTHONPATH names one
    function: Callable[..., Any] = getattr(owner, attribute)

    def timed(*args: Any, **more: Any) -> Any:
        start = time.time()
        try:
            return function(*args, **more)
        finally:
            torch = sys.modules["torch"]
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds[phase] = seconds.get(phase, 0.0) + time.time() - start

    setattr(owner, attribute, timed)


if __name__ == "__main__":
    run()

"""Say where the seconds of a command go: Python and imports, files, the model, the rollout, the cache.

    python experiments/benchmarks/startup.py run_extraction_all --config_path configs/wan_mini.yaml \
        --output_path outputs/startup.pt --overwrite

Starts the script again and again, each time in a new process, and prints the seconds of its phases. What
happens in the background, such as reading the VAE and hashing the weights, shows where it is waited for.
"""

import argparse
import json
import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BEGAN, REPORT = "STARTUP_BEGAN", "STARTUP_REPORT"  # of the process, by environment
PHASES = {  # name -> its function, where the caller finds it
    "reading the weights": "experiments.extraction.causal:read_weights",
    "the model on its device": "wan.checkpoint:build_model",
    "the prompt": "experiments.extraction.causal:encode_prompts",
    "waiting for the VAE": "experiments.extraction.video:LiveVideo.ready",
    "rollout": "experiments.extraction.causal:roll_out",
    "cache and video": "experiments.running.run:save",
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
    rows = []
    for _ in range(args.times):
        report = Path(f"startup.{os.getpid()}.json")
        own = {BEGAN: str(time.time()), REPORT: str(report)}
        subprocess.run([sys.executable, __file__, args.script, *flags], env=os.environ | own, check=True)
        rows.append(json.loads(report.read_text()) | {"process": round(time.time() - float(own[BEGAN]), 2)})
        report.unlink()
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        from experiments.benchmarks.harness import choose_device, environment, save_report

        about = {"script": args.script, "flags": flags, "environment": environment(choose_device("auto"))}
        save_report(about | {"rows": rows}, args.json)


def inside(script: str, flags: list[str]) -> None:
    """Run a script with its phases timed, and write the seconds of each."""
    began, seconds = float(os.environ[BEGAN]), dict[str, float]()
    script_run = pkgutil.resolve_name(f"experiments.{script}:run")
    pkgutil.resolve_name("experiments.running.run")  # which a script imports once its flags are read
    imported = time.time() - began
    for phase, name in PHASES.items():
        time_calls(name, phase, seconds)
    start = time.time()
    script_run(flags)
    between = time.time() - start - sum(seconds.values())
    found = {"python and imports": imported} | seconds | {"between": between, "total": time.time() - began}
    found["CPU seconds"] = time.process_time()
    Path(os.environ[REPORT]).write_text(json.dumps({name: round(x, 2) for name, x in found.items()}))


def time_calls(name: str, phase: str, seconds: dict[str, float]) -> None:
    """Add the seconds of a function's calls to a phase; the GPU's work is waited for."""
    function, (owner, _, attribute) = pkgutil.resolve_name(name), name.replace(":", ".").rpartition(".")

    def timed(*args: Any, **more: Any) -> Any:
        start = time.time()
        try:
            return function(*args, **more)
        finally:
            if (torch := sys.modules["torch"]).cuda.is_initialized():
                torch.cuda.synchronize()
            seconds[phase] = seconds.get(phase, 0.0) + time.time() - start

    setattr(pkgutil.resolve_name(owner), attribute, timed)


if __name__ == "__main__":
    run()

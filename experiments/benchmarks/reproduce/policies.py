"""Draw what each cache policy keeps, and measure how far the public releases lie from their rules.

    python experiments/benchmarks/reproduce/policies.py

Writes docs/policies/*.svg, a picture for each policy in published settings, and docs/policies/released.json:
the RMS of the difference between a release's latents and those of the clean rule over the RMS of the latter,
with the same noise, over all frames of the miniature.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.analysis.axes import slots_of
from experiments.benchmarks.harness import save_report
from experiments.extraction.causal import extract, policy_atlas
from experiments.extraction.provenance import environment
from experiments.figures.heads import slot_map
from experiments.figures.style import save_svg
from experiments.running.cli import Parser, main
from wan.config import load_config
from wan.files import read_yaml

NUM_FRAMES = 30
PICTURES = (  # of configs/policies, one for each policy that keeps the same frames in all heads
    *("self_forcing_window", "infinity_rope", "deep_sink", "deep_forcing"),
    *("reward_forcing", "memrope", "rolling_sink", "memflow"),
)
RELEASED: list[dict[str, Any]] = [
    {"name": "window", "window": 12, "sink": 3, "released": "longlive"},
    {"name": "window", "window": 12, "sink": 6, "released": "longlive"},
    {"name": "relative", "window": 6, "sink": 0, "released": "infinity_rope"},
    {"name": "relative", "window": 6, "sink": 1, "released": "infinity_rope"},
    {"name": "deep_sink", "window": 12, "sink": 6, "released": "deep_forcing"},
    {"name": "participative", "window": 12, "sink": 4, "budget": 9, "recent": 3, "released": "deep_forcing"},
    {"name": "ema_sink", "window": 9, "sink": 3, "released": "reward_forcing"},
    {"name": "two_memories", "window": 12, "sink": 3, "released": "memrope"},
]


def run(argv=None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--config_path", default="configs/wan_mini.yaml")
    parser.add_argument("--output_dir", type=Path, default=Path("docs/policies"))
    args = parser.parse_args(argv)

    for name in PICTURES:
        settings = read_yaml(Path("configs/policies") / f"{name}.yaml")
        frames, positions = slots_of(policy_atlas(args.config_path, settings, NUM_FRAMES), layer=2)
        title = ", ".join([settings["name"], *(f"{k} {v}" for k, v in settings.items() if k != "name")])
        print(save_svg(slot_map(frames, positions, NUM_FRAMES, title), args.output_dir / f"{name}.svg"))

    rows = []
    for settings in RELEASED:
        clean = {name: value for name, value in settings.items() if name != "released"}
        configs = [load_config(args.config_path, {"cache_policy": each}) for each in (clean, settings)]
        runs = [extract(replace(config, num_frames=NUM_FRAMES), []) for config in configs]
        here, there = (run.latents for run in runs)
        distance = ((there - here).square().mean() / here.square().mean()).sqrt().item()
        rows.append({"policy": settings, "distance": round(distance, 3)})
        print(json.dumps(rows[-1]))
    report = {
        "model": "wan-mini",
        "num_frames": NUM_FRAMES,
        "weights_sha256": runs[0].common["weights_sha256"],
        "environment": environment(here.device),
        "rows": rows,
    }
    save_report(report, args.output_dir / "released.json")


if __name__ == "__main__":
    main(run)

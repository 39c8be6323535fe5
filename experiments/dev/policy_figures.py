"""Pictures and the table of docs/policies.md, from rollouts of the miniature.

    python experiments/dev/policy_figures.py

A picture for each policy, in published settings, and how far the latents of each release's variant are from
those of the clean rule: root mean square of the difference over that of the clean latents, same noise, all
frames."""

import json
from pathlib import Path
from typing import Any

from experiments.dev.tables import markdown, measured_on, of_weights
from experiments.running.cli import Parser, main

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


def table(report: dict[str, Any]) -> str:
    """A row for each release: its policy, sizes in frames, and how far it moves the latents."""
    rows = [(said(row["policy"]), f"{row['distance']:.3f}") for row in report["rows"]]
    shown = markdown(("policy, as released by", "distance"), rows)
    about = f"{report['model']}, {report['num_frames']} frames, {of_weights(report['weights_sha256'])}"
    return f"{shown}\n\n{about}; {measured_on(report['environment'])}"


def said(policy: dict[str, Any]) -> str:
    """A policy in a table: window 12/3, longlive."""
    more = [
        f"{letter} {policy[name]}" for letter, name in (("N", "budget"), ("R", "recent")) if name in policy
    ]
    sizes = f"{policy['name']} {policy['window']}/{policy['sink']}"
    return ", ".join([sizes, *more, policy["released"]])


def run(argv=None) -> None:
    parser = Parser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--config_path", default="configs/wan_mini.yaml")
    parser.add_argument("--output_dir", default="docs/policies", help="where the SVGs and released.json go")
    args = parser.parse_args(argv)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    draw(args.config_path, folder)
    compare(args.config_path, folder / "released.json")


def draw(config_path: str, folder: Path) -> None:
    from experiments.analysis.axes import slots_of
    from experiments.extraction.policy_atlas import policy_atlas
    from experiments.figures.layer import slot_map
    from experiments.figures.style import save_svg
    from wan.files import read_yaml

    for name in PICTURES:
        settings = read_yaml(Path("configs/policies") / f"{name}.yaml")
        frames, positions = slots_of(policy_atlas(config_path, settings, NUM_FRAMES), layer=2)
        title = ", ".join([settings["name"], *(f"{k} {v}" for k, v in settings.items() if k != "name")])
        print(save_svg(slot_map(frames, positions, NUM_FRAMES, title), folder / f"{name}.svg"))


def compare(config_path: str, path: Path) -> None:
    from experiments.dev.tables import save_report
    from experiments.extraction.policy_atlas import policy_run
    from experiments.extraction.provenance import environment

    rows = []
    for settings in RELEASED:
        clean = {name: value for name, value in settings.items() if name != "released"}
        runs = [policy_run(config_path, each, NUM_FRAMES) for each in (clean, settings)]
        here, there = (run.latents for run in runs)
        distance = ((there - here).square().mean() / here.square().mean()).sqrt().item()
        rows.append({"policy": settings, "distance": round(distance, 3)})
        print(json.dumps(rows[-1]))
    about = {
        "model": "wan-mini",
        "num_frames": NUM_FRAMES,
        "weights_sha256": runs[0].common["weights_sha256"],
    }
    save_report(about | {"environment": environment(here.device), "rows": rows}, path)


if __name__ == "__main__":
    main(run)

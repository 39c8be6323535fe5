"""Which heads of the miniature follow the moving shape, its old place, or the wall that it hid behind?

    python experiments/dev/shape_attention.py

Writes docs/shape_attention.json, from which readme_tables.py fills docs/on_the_video.md. --figure also draws
a map of all heads, which on_the_video.ipynb shows too.
"""

import json
from pathlib import Path

from experiments.dev.tables import markdown, measured_on, of_weights
from experiments.running.cli import Parser, count, main

OUTPUT = Path("docs/shape_attention.json")
STEPS = {0: "pass 0", 4: "clean pass"}
LISTED = 5  # heads in the table, by the lower end of moving minus the best control


def table(report: dict) -> str:
    """Means over heads of every mask, how many heads follow, and those that do it most surely."""
    rows = []
    for name, of_pass in report["passes"].items():
        rows += [
            (
                name,
                "mean of all heads",
                *(f"{x:.2f}" for x in of_pass["mean"]),
                f"{of_pass['follow']} of {report['heads']}, {of_pass['surely']} adjusted for all (Holm)",
            )
        ]
        rows += [
            (
                name,
                f"layer {head['layer']}, head {head['head']}",
                *(f"{x:.2f}" for x in head["lifts"]),
                "{:.2f}–{:.2f}".format(*head["interval"]),
            )
            for head in of_pass["top"]
        ]
    titles = [report["masks"][name] for name in report["masks"]]
    shown = markdown(("", "", *titles, "heads that follow; moving − best control, 95 %"), rows)
    said = f"{report['captions']} held-out captions, half of them behind a wall"
    under = (
        f"{report['model']}, {of_weights(report['weights_sha256'])}, {said}; intervals are of each head alone"
    )
    return f"{shown}\n\n{under}; {measured_on(report['environment'])}"


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--config_path", default="configs/wan_mini.yaml")
    parser.add_argument("--captions", type=count, default=48, help="captions, half of them behind a wall")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output_path", type=Path, default=OUTPUT)
    parser.add_argument("--figure", type=Path, help="an SVG of every head")
    args = parser.parse_args(argv)

    from experiments.caches.files import replacing, require_writable  # no torch for --help
    from experiments.figures import atlas, style
    from experiments.miniature.frozen import SETS, held_out_scenes
    from experiments.studies import shape_attention
    from wan.config import load_config

    require_writable(args.output_path)
    if args.figure:
        require_writable(args.figure)
    config = load_config(args.config_path, {"device": args.device})
    half = -(-args.captions // 2)
    scenes = held_out_scenes(SETS["one shape"], half) + held_out_scenes(
        SETS["behind a wall"], args.captions - half
    )
    found = shape_attention.measure(config, scenes, list(STEPS))
    report = report_of(found, config.model, config.device)
    with replacing(args.output_path) as file:
        file.write((json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
    subtitle = f"{config.model}, {STEPS[4]}, {args.captions} captions"
    layers = range(found.lifts.shape[2])
    figure = atlas.head_maps(
        found.maps(4), layers, subtitle=subtitle, title="What queries on the shape look at"
    )
    print(args.output_path)
    if args.figure:
        print(style.save_svg(figure, args.figure))


def report_of(found, model: str, device: str = "cpu") -> dict:
    """What the table shows, as plain numbers."""
    import numpy as np

    from experiments.extraction.devices import choose_device
    from experiments.extraction.provenance import environment
    from experiments.studies.shape_attention import MASKS, followers

    passes = {}
    for step, name in STEPS.items():
        mean, each = found.mean(step), followers(found, step)
        surely = np.where(each.follows, each.low, 0)
        top = [head for head in largest(surely, LISTED) if surely[head]]
        passes[name] = {
            "mean": [round(float(x), 3) for x in np.nanmean(mean, (0, 2))],
            "follow": int(each.follows.sum()),
            "surely": int(each.surely.sum()),
            "top": [
                {
                    "layer": layer,
                    "head": head,
                    "lifts": [round(float(x), 3) for x in mean[layer, :, head]],
                    "interval": [round(float(x[layer, head]), 3) for x in (each.low, each.high)],
                }
                for layer, head in top
            ],
        }
    heads = found.lifts.shape[2] * found.lifts.shape[4]
    common = {"model": model, "captions": len(found.captions), "heads": heads, "masks": MASKS}
    common |= {"weights_sha256": found.weights_sha256, "environment": environment(choose_device(device))}
    return common | {"passes": passes}


def largest(values, count: int) -> list[tuple[int, int]]:
    """Layer and head of the largest values [layers, H]."""
    layers, heads = (
        indices.tolist() for indices in divmod((-values).argsort(axis=None)[:count], values.shape[1])
    )
    return list(zip(layers, heads, strict=True))


if __name__ == "__main__":
    main(run)

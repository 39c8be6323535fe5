"""Draw what returns from behind a wall under edits of heads' past, and frame 0 removed (README.md).

    python experiments/findings/head_memory/draw.py

presence_and_identity.json and empty_past.json beside this file have the answer of every video, contrasts and
shares; results.json the effects of removing frame 0, and the budgets.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import figures
from experiments.analysis import results, stats
from experiments.running import cli
from wan.files import read_json

PANELS = {  # question -> captions by their colour, edit, answer
    "These heads lose their past:\ndoes the shape come back?": ("all captions", "knockout", "comes_back"),
    "Only these heads keep their past:\ndoes the shape come back?": ("all captions", "rescue", "comes_back"),
    "These heads see another seed's past:\ndoes the shape come back?": (
        *("all captions", "other seed", "comes_back"),
    ),
    "These heads see a past in another colour:\ndoes the shape come back in that colour?": (
        *("not named", "other color", "donor"),
    ),
}


WITHOUT = {
    "removed": "Their past is removed:\ndoes the shape come back?",
    "empty": "Their past has no shape in it:\ndoes the shape come back?",
}
SETS = {  # of empty_past.json -> in words
    "P, 8": "presence heads",
    "others of P, 8": "beside presence heads",
    "I, 8": "identity heads",
    "others of I, 8": "beside identity heads",
    "all, 96": "all 96 heads",
}


def run(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    parser.add_argument("--overwrite", action="store_true", help="replace figures that were changed since")
    args = parser.parse_args(argv)
    folder = args.figures
    presence = read_json(Path(__file__).with_name("presence_and_identity.json"))
    first_frame = read_json(Path(__file__).with_name("results.json"))["first_frame"]
    empty_past = read_json(Path(__file__).with_name("empty_past.json"))
    drawings = {
        "presence_and_identity": presence_and_identity(presence),
        "hidden_shapes": figures.knockout_shares(**results.hidden_shapes(presence)),
        "first_frame_removed": first_frame_removed(first_frame),
        "empty_past": emptied(empty_past),
    }
    for name, figure in drawings.items():
        print(figures.save_figure(figure, folder / f"{name}.svg", overwrite=args.overwrite))


def presence_and_identity(report: Mapping[str, Any]) -> Figure:
    """Draw what comes back under four edits of the past of sets of heads."""
    panels = results.presence_panels(report, PANELS, [*results.HEADS])
    donor = panels[[*PANELS][-1]]
    given_back, others = (donor[results.HEADS[of]][0] for of in ("I", "random of I"))
    title = f"Shown a past in another colour, 8 identity heads give {stats.percent(given_back)} of returning "
    title += f"shapes that colour, 8 others of their layers {stats.percent(others)}"
    # Another seed's past is judged where the unedited pair returns alike
    shares = report["shares"]["all captions"]
    pairs, videos = (shares[f"{edit}, nobody"]["videos"] for edit in ("other seed", "knockout"))
    note = f"{results.SETS_NOTE}; another seed: the {pairs} of {videos:,} videos whose unedited pair returns"
    note += " alike; another colour: captions that do not name the colour"
    about = results.presence_runs(report, "all captions")
    return figures.knockout_shares(panels, {}, about, title, y="Heads", note=note, chosen=results.CHOSEN)


def emptied(report: Mapping[str, Any]) -> Figure:
    """Draw what comes back without the past of heads, and with one that has no shape."""
    panels = {}
    for edit, question in WITHOUT.items():
        rows = {label: report["shares"][f"{edit}, {of}"]["comes back"] for of, label in SETS.items()}
        panels[question] = {label: (*row["all"], row["each"]) for label, row in rows.items()}
    removed, empty = (rows[SETS["I, 8"]][0] for rows in panels.values())
    title = f"Where identity heads see a past without the shape, {stats.percent(empty)} of shapes come back; "
    title += f"where they see no past, {stats.percent(removed)}"
    videos = sum(len(one["rows"]) for one in report["trainings"].values())
    about = (
        f"wan-mini, {videos} videos of {len(report['trainings'])} trainings, whose shape comes back unedited"
    )
    note = "6 to 8 heads a set, none in two sets; beside: others of the same layers"
    chosen = (SETS["P, 8"], SETS["I, 8"])
    return figures.knockout_shares(panels, {}, about, title, y="Heads", note=note, chosen=chosen)


UNITS = {  # of results.json -> in words
    "s": "Extra logit of frame 0",
    "mass on frame 0": "Mass on frame 0 (share)",
    "mass on the past": "Mass on the past (share)",
    "share of positive logits": "Logits of the past above 0 (share)",
}


def first_frame_removed(report: Mapping[str, Any]) -> Figure:
    """Draw the effect of removing frame 0 against four measures of attention, a dot a head."""
    measures, notes, rhos = {}, {}, {}
    for name, correlations in report["correlations"].items():
        measures[UNITS[name]] = np.array(report["heads"][name])
        rho, partial_rho = (stats.Interval(*correlations[key][:3]) for key in ("rho", "partial_rho"))
        notes[UNITS[name]] = f"ρ = {rho}\npartial ρ = {partial_rho}"
        rhos[name] = rho.estimate
    best = max(rhos, key=lambda name: abs(rhos[name]))
    title = (
        f"The effect of removing frame 0 from a head correlates best with its {best}: ρ = {rhos[best]:.2f}"
    )
    runs = f"{report['model']}, {report['prompts']} captions × {report['seeds']} seeds"
    about = f"frame 0 left out of one head at a time, in all denoising passes; attention of the first; {runs}"
    return figures.effect_against(
        np.array(report["heads"]["effect"]), measures, notes, title=title, subtitle=about
    )


if __name__ == "__main__":
    cli.main(run)

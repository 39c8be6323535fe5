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

from experiments.analysis import results
from experiments.analysis.stats import Interval
from experiments.figures import effect_against, knockout_shares, save_figure
from experiments.running import cli
from wan.files import read_json

PANELS = {  # title -> captions by their colour, edit, question
    "No past: comes back": ("all captions", "knockout", "comes_back"),
    "Another seed's past: comes back": ("all captions", "other seed", "comes_back"),
    "Only these keep it: comes back": ("all captions", "rescue", "comes_back"),
    "Other colour's past: its colour": ("not named", "other color", "donor"),
}


WITHOUT = {"removed": "No past: comes back", "empty": "A past without the shape: comes back"}
SETS = {  # of empty_past.json -> in words
    "all, 96": "all 96",
    "P, 8": "presence heads",
    "I, 8": "identity heads",
    "others of P, 8": "presence layers, others",
    "others of I, 8": "identity layers, others",
}


def run(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    parser.add_argument("--overwrite", action="store_true", help="replace figures that were changed since")
    args = parser.parse_args(argv)
    folder = args.figures
    presence = read_json(Path(__file__).with_name("presence_and_identity.json"))
    first_frame = read_json(Path(__file__).with_name("results.json"))["first_frame"]
    edits = knockout_shares(
        *results.presence_panels(presence, PANELS, [*results.HEADS]),
        title="Presence and identity",
        y="Heads",
        note=f"{pairs_of(presence)}; last panel: of captions that do not name the colour, what comes back",
    )
    empty_past = read_json(Path(__file__).with_name("empty_past.json"))
    figures = {
        "presence_and_identity": edits,
        "hidden_shapes": knockout_shares(*results.presence_panels(presence)),
        "first_frame_removed": first_frame_removed(first_frame),
        "empty_past": emptied(empty_past),
    }
    for name, figure in figures.items():
        print(save_figure(figure, folder / f"{name}.svg", overwrite=args.overwrite))


def pairs_of(presence: Mapping[str, Any]) -> str:
    """Say of how many videos another seed's past is judged."""
    shares = presence["shares"]["all captions"]
    pairs, videos = (shares[f"{edit}, nobody"]["videos"] for edit in ("other seed", "knockout"))
    return f"second panel: the {pairs} of {videos:,} videos whose unedited pair returns alike"


def emptied(report: Mapping[str, Any]) -> Figure:
    """Draw what comes back without the past of heads, and with one that has no shape."""
    panels = {}
    for edit, title in WITHOUT.items():
        rows = {label: report["shares"][f"{edit}, {of}"]["comes back"] for of, label in SETS.items()}
        panels[title] = {label: (*row["all"], row["each"]) for label, row in rows.items()}
    videos = sum(len(one["rows"]) for one in report["trainings"].values())
    return knockout_shares(
        panels,
        {},
        f"wan-mini, {videos} videos of {len(report['trainings'])} trainings, whose shape comes back unedited",
        title="Take heads' past away, or empty it",
        y="Heads",
        note="6 to 8 heads a set, none in two sets",
    )


def first_frame_removed(report: Mapping[str, Any]) -> Figure:
    """Draw the effect of removing frame 0 against four measures of attention, a dot a head."""
    measures, notes = {}, {}
    for name, correlations in report["correlations"].items():
        measures[name] = np.array(report["heads"][name])
        rho, partial_rho = (Interval(*correlations[key][:3]) for key in ("rho", "partial_rho"))
        notes[name] = f"ρ = {rho}\npartial ρ = {partial_rho}"
    runs = f"{report['model']}, {report['prompts']} captions × {report['seeds']} seeds"
    about = f"knock out the first frame: {runs}, first pass"
    return effect_against(np.array(report["heads"]["effect"]), measures, notes, subtitle=about)


if __name__ == "__main__":
    cli.main(run)

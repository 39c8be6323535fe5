"""Count what presence heads P and identity heads I share, and repeat the contrasts without it.

    python experiments/findings/head_memory/recount.py

Everything is computed of the answers in presence_and_identity.json, a letter a video, and written to its key
"disjoint" (README.md).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis import stats
from experiments.analysis.panels import table
from experiments.caches.files import save_report
from experiments.running import cli
from wan.files import read_json

PATH = Path(__file__).with_name("presence_and_identity.json")
SEEN = 4  # the first captions, whose answers were seen before the run, are left out
SELECTED = 72  # videos by which P was chosen: 24 captions with 3 seeds
CONTRASTS = {  # as in the report: edit, question, the set that should have more, the other one
    "1: comes_back, other seed, random of P less P": ("other seed", "comes_back", "random of P", "P"),
    "2: donor given back, other color, I less P": ("other color", "donor", "I", "P"),
    "3: comes_back, other seed, I less P": ("other seed", "comes_back", "I", "P"),
    "4: comes_back, rescue, P less random of P": ("rescue", "comes_back", "P", "random of P"),
}


def run(argv=None):
    cli.Parser(description=__doc__.splitlines()[0]).parse_args(argv)
    report = read_json(PATH)
    report["disjoint"] = disjoint_of(report)
    save_report(report, PATH)
    rows = report["disjoint"]["contrasts"]
    print(table([{"contrast": name} | row for name, row in rows.items()]))


def disjoint_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the sets share, and contrasts of draws and of trainings without it."""
    trainings = report["trainings"]
    # 1. Heads of both sets; random sets beside P that hold heads of I; how few videos chose a head
    shared, draws, moved = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name, one in trainings.items():
        heads = one["heads"]
        shared[name] = [head for head in heads["P"] if head in heads["I"]]
        drawn = [of for of in heads if of.startswith("random of P")]
        draws[name] = [of for of in drawn if not any(head in heads["I"] for head in heads[of])]
        moved[name] = [round(SELECTED * effect) for effect in one["effects of P"]]
    # 2. Contrasts 1 and 4 with the other draws alone; 2 and 3 where no head is in both sets
    contrasts = {}
    for label, (edit, question, *sets) in CONTRASTS.items():
        kept = [name for name in trainings if "random of P" in sets or not shared[name]]
        rows = []
        for name in kept:
            more, less = (
                values_of(trainings[name], edit, draws[name] if of == "random of P" else [of], question)
                for of in sets
            )
            rows.append(stats.mean_without_nan((more - less).T))  # [captions]
        if len(rows) > 1:
            numbers = stats.contrast_of_trainings(np.stack(rows))
        else:  # t needs several: an interval over captions
            numbers = {"bootstrap": stats.rounded(stats.bootstrap(rows[0][~np.isnan(rows[0])]))}
        contrasts[label] = {"trainings": kept} | numbers
    return {
        "heads of P and I": shared,
        "draws without heads of I": draws,
        f"videos of {SELECTED} that a head of P moves": moved,
        "contrasts": contrasts,
    }


def answers_of(letters: str) -> dict[str, np.ndarray]:
    """Return the answers to each question, a letter a video: 8 x state + 4 right + 2 donor's + outline."""
    numbers = np.array([ord(letter) - ord("A") for letter in letters])
    back = numbers // 8 == 2
    donor = np.where(back, numbers // 2 % 2, np.nan)  # of what comes back
    return {"hides": numbers // 8 > 0, "comes_back": back, "donor": donor}


def values_of(training: Mapping[str, Any], edit: str, sets: Sequence[str], question: str) -> np.ndarray:
    """Return answers [seeds, captions], a mean over sets; NaN of videos without a pair."""
    rows = training["pairs"].get(edit)
    values = np.full((len(sets), len(training["answers"]["unedited"])), np.nan)
    for number, of in enumerate(sets):
        answers = answers_of(training["answers"][f"{edit}, {of}"])[question]
        values[number, slice(None) if rows is None else rows] = answers
    return stats.mean_without_nan(values.T).reshape(training["seeds"], -1)[:, SEEN:]


if __name__ == "__main__":
    cli.main(run)

"""Compare rules that pick heads for a long cache, and draw frame 0 removed from heads (docs/head_memory.md).

    python experiments/findings/head_memory/run.py

results.json beside this file has the judge's answer for every caption and condition; all shares, intervals
and the figure are computed from these. It names the commits that made the answers; run.py --measure of commit
df9325f makes them anew, scores by path patching that of 01e1ad6. Of your own model:
measure_head_effects.py --budget, run_causal_atlas.py.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.analysis.results import ALL, BACK, CEILINGS, EACH
from experiments.analysis.stats import crossed_bootstrap, pearson, rounded, t_interval
from experiments.caches.files import save_report
from experiments.figures.atlas import effect_against
from experiments.figures.style import save_svg
from experiments.findings.report import finding_parser
from experiments.running.cli import main
from wan.files import read_json

BY_EDITS = "effect", "change of x0", "path patching", "interactions"
BY_ATTENTION = (
    *("mass on the past", "mass on the older past"),
    *("Pyramid Forcing", "Forcing-KV", "Dummy Forcing"),
)

Values = dict[str, np.ndarray]  # by claim, a number for each caption


def run(argv=None):
    args = finding_parser(__doc__, "head_memory").parse_args(argv)
    report = read_json(args.output_path)
    report["budgets"]["shares"] = shares = shares_of(report["budgets"])
    # Is a shape that is right more than one that comes back?
    both = [(x[BACK][ALL][0], x["comes_back"][ALL][0]) for x in shares.values() if "comes_back" in x]
    r = round(float(pearson(*np.transpose(both))), 3)
    report["budgets"]["r of right and comes_back"] = [r, len(both)]
    save_report(report, args.output_path)
    print(args.output_path)
    print(save_svg(figure_of(report), args.figures / "first_frame_removed.svg"))


# --- Shares from answers: of each miniature with intervals over captions, of all over miniatures and captions
def claims_of(answers: Mapping[str, str | Sequence[float]]) -> dict[str, Values]:
    """Return, by claim, its answers and their differences to the claims that it is compared with."""
    found: dict[str, Values] = {}
    for claim, values in answers.items():
        found[claim] = {BACK: np.array([float(x) for x in values])}  # a digit a caption, or a mean of draws
    for claim, shares in found.items():
        others = ["base"]
        if " with " in claim:  # "rule, budget, window with sink n"
            rule, budget, narrow = claim.split(", ")
            uniform = [other for other in found if other.startswith(f"uniform, {budget}, ")]
            others = [*uniform, f"random, {budget}, {narrow}"]
            rivals = [found.get(f"{one}, {budget}, {narrow}") for one in BY_ATTENTION]
            if rule in BY_EDITS and (judged := [one[BACK] for one in rivals if one]):
                # The best attention measure of this training, not of all.
                shares["less attention"] = shares[BACK] - max(judged, key=np.mean)
        for other in others:
            if other in found and claim not in (other, "base", *CEILINGS):
                shares[f"less {other}"] = shares[BACK] - found[other][BACK]
    return found


def shares_of(budgets: Mapping[str, Any]) -> dict[str, Any]:
    """Return claim -> number -> the mean, its interval and the count of captions; means of each miniature.

    Trainings are crossed with captions, and so is the bootstrap. t: Student's interval over trainings alone.
    """
    miniatures = budgets["miniatures"].values()
    claims = [claims_of(one["answers"]) for one in miniatures]
    found: dict[str, Any] = defaultdict(dict)
    names = dict.fromkeys((claim, name) for one in claims for claim, of in one.items() for name in of)
    for claim, name in names:
        rows = np.stack([one[claim][name] for one in claims if name in one.get(claim, {})])
        row = [*rounded(crossed_bootstrap(rows)), rows.size]
        found[claim][name] = {ALL: row, EACH: rounded(rows.mean(1))}
        if len(rows) > 1:
            found[claim][name]["t"] = rounded(t_interval(rows.mean(1))[1:])
    for claim, of in found.items():
        means = (one["means"]["comes_back"] for one in miniatures)
        if len(each := [of_one[claim] for of_one in means if claim in of_one]) > 1:
            of["comes_back"] = {ALL: rounded(t_interval(each)), EACH: each}
    return found


# --- The figure
def figure_of(report: Mapping[str, Any]) -> Figure:
    """Draw frame 0 removed against attention."""
    first = report["first_frame"]
    shown = {name: np.array(first["heads"][name]) for name in first["correlations"]}
    notes = {}
    for name, of in first["correlations"].items():
        both = (of[key][:3] for key in ("rho", "partial_rho"))
        notes[name] = "ρ = {}\npartial ρ = {}".format(*("{:.2f} [{:.2f}, {:.2f}]".format(*x) for x in both))
    runs = f"{first['model']}, {first['prompts']} captions × {first['seeds']} seeds"
    about = f"knock out the first frame: {runs}, first pass"
    return effect_against(np.array(first["heads"]["effect"]), shown, notes, subtitle=about)


if __name__ == "__main__":
    main(run)

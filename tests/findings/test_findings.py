"""What the findings draw is what is committed, and their articles have the numbers of the committed data."""

import ast
import json
import re
import subprocess

import numpy as np
import pytest
from conftest import ROOT

from experiments.analysis import results, stats
from experiments.analysis.results import attribution_rows
from experiments.findings.attribution import draw as attribution
from experiments.findings.first_frame import draw as first_frame
from experiments.findings.first_frame import sink_forecast
from experiments.findings.head_memory import draw as head_memory
from experiments.findings.head_memory import empty_past, recount
from experiments.findings.long_rollouts import draw as long_rollouts
from experiments.findings.long_rollouts import drift_losses

RESULTS = ROOT / "experiments/findings"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def words(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def article(finding):
    return (RESULTS / finding / "README.md").read_text(encoding="utf-8")


def numbers_of(name):
    return json.loads((RESULTS / name).read_text())


@pytest.mark.parametrize(
    ("finding", "names"),
    [
        (attribution, ["attribution_against"]),
        (first_frame, ["figure4_published", "first_frame_by_block", "sink_forecast"]),
        (head_memory, ["presence_and_identity", "hidden_shapes", "first_frame_removed", "empty_past"]),
        (long_rollouts, ["long_rollouts"]),
    ],
    ids=["attribution", "first_frame", "head_memory", "long_rollouts"],
)
def test_the_figures_of_a_finding_are_the_committed_ones(finding, names, tmp_path):
    finding.run(["--figures", str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.svg")} == {*names}
    for path in tmp_path.glob("*.svg"):
        committed = ROOT / "notebooks/figures" / path.name
        assert words(committed) == words(path) and committed.stat().st_size < 300_000, path.name
    if finding is first_frame:
        text = " ".join(words(tmp_path / "figure4_published.svg"))
        agreement = [float(r) for r in re.findall(r"r\s=\s(\d\.\d{3})", text)]
        assert len(agreement) == 2 and min(agreement) >= 0.98


def test_titles_have_the_numbers_of_the_results():
    report = numbers_of("head_memory/presence_and_identity.json")
    shares = report["shares"]["not named"]
    title = " ".join(words(ROOT / "notebooks/figures/presence_and_identity.svg"))
    for of in ("I", "random of I"):
        assert stats.percent(shares[f"other color, {of}"]["donor"]["all"][0]) in title
    hidden = results.hidden_shapes(report)
    assert "presence heads 2\u00a0% of hidden shapes come back" in hidden["title"]
    assert shares["knockout, P"]["comes_back"]["all"][0] == pytest.approx(0.02, abs=0.005)
    assert hidden["counts"]["8 presence heads"] == shares["knockout, P"]["returns"]
    long = results.LongRollouts.open(RESULTS / "long_rollouts/results.json")
    assert "relative 6/1 moves least (0.11)" in long.motion_title()
    assert "full needs 47 MB of keys and values and is right in 40\u00a0% of seconds" in long.cost_title()


def test_the_page_has_the_contrasts_of_presence_and_identity():
    page = article("head_memory").replace("−", "-")
    for one in numbers_of("head_memory/presence_and_identity.json")["contrasts"].values():
        estimate, low, high = one["t"]
        assert len(one["trainings"]) == 5
        assert f"| {estimate:.2f} | {low:.2f}, {high:.2f} | {one['p_holm']:.2g} |" in page


def test_the_sets_of_heads_are_recounted_of_the_answers_and_told():
    report = numbers_of("head_memory/presence_and_identity.json")
    counted = recount.disjoint_of(report)
    assert counted == report["disjoint"]
    page = article("head_memory").replace("−", "-")
    assert "share 1, 1, 0, 2 and 1 heads" in page
    assert [len(heads) for heads in counted["heads of P and I"].values()] == [1, 1, 0, 2, 1]
    assert "10 of 20 controls of presence heads hold identity heads" in page
    assert sum(map(len, counted["draws without heads of I"].values())) == 20 - 10
    intervals = {label[0]: contrast["t"][1:] for label, contrast in report["contrasts"].items()}
    for label, row in counted["contrasts"].items():  # "hardly change": into the interval of all draws
        estimate = row.get("t", row["bootstrap"])[0]
        low, high = intervals[label[0]]
        assert low <= estimate <= high
    # All draws and trainings give the contrasts of the report
    for label, (edit, question, more, less) in recount.CONTRASTS.items():
        sets = {"P": ["P"], "I": ["I"], "random of P": [f"random of P: {draw}" for draw in range(4)]}
        differences = []
        for one in report["trainings"].values():
            values = [recount.values_of(one, edit, sets[of], question) for of in (more, less)]
            differences.append(stats.mean_without_nan((values[0] - values[1]).T))
        contrast = stats.contrast_of_trainings(differences)
        assert {"t": contrast["t"], "bootstrap": contrast["bootstrap"]}.items() <= report["contrasts"][
            label
        ].items()


def test_the_page_has_the_shares_of_long_rollouts():
    page, results = article("long_rollouts"), numbers_of("long_rollouts/results.json")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    names = {policy["name"]: (label, policy) for label, policy in results["policies"].items()}
    tested = [row for row in rows if len(row) == 5 and re.match(r"0\.\d\d \(", row[2])]
    assert len(tested) >= 9
    for name, sizes, right, motion, _ in tested:
        label, policy = names[f"{name.strip('*')} {sizes.replace(', ', '/')}".strip()]
        measures = policy["measures"]
        estimate, low, high = measures["right"]
        assert right == f"{estimate:.2f} ({low:.2f} to {high:.2f})"
        assert motion == f"{measures['motion'][0]:.2f}", name
        p_holm = results["against_full"].get(label, {"p_holm": 1})["p_holm"]
        assert p_holm <= 0.0021 if name.startswith("*") else p_holm >= 0.19


def test_the_page_has_the_contrasts_of_an_empty_past():
    page, report = article("head_memory").replace("−", "-"), empty_past_of_answers()
    for one in report["contrasts"].values():
        estimate, low, high = one["t"]
        assert f"| {estimate:.2f} | {low:.2f}, {high:.2f} | {one['p_holm']:.2g} |" in page
    pairs = [len(one["rows"]) for one in report["trainings"].values()]
    assert f"{', '.join(map(str, pairs[:-1]))} and {pairs[-1]} pairs" in page


def test_both_sets_of_weights_give_the_unedited_shapes_the_same_states():
    trials = numbers_of("head_memory/presence_and_identity.json")["trainings"]
    same = []
    for name, one in empty_past_of_answers()["trainings"].items():
        # The same captions with their first seed: a letter is 8 x state and more, a digit the state, or 3
        letters = trials[name]["answers"]["unedited"][empty_past.SEEN : empty_past.CAPTIONS]
        pairs = zip(letters, one["unedited"], strict=True)
        same += [(ord(letter) - ord("A")) // 8 == min(int(digit), 2) for letter, digit in pairs]
    told = f"{sum(same)} of {len(same)} videos"
    assert told in article("head_memory")


def empty_past_of_answers():
    report = numbers_of("head_memory/empty_past.json")
    assert json.loads(json.dumps(empty_past.findings_of(report["trainings"]))).items() <= report.items()
    return report


NAMES_OF_POLICIES = {
    "full": "full cache",
    "9/0": "window of 9",
    "9/3": "window of 9, sink of 3",
    "21/0": "window of 21",
    "21/3": "window of 21, sink of 3",
    "rendered": "control: rendered scenes",
}


def test_the_page_has_what_drift_loses():
    page, report = article("long_rollouts"), numbers_of("long_rollouts/drift_losses.json")
    computed = drift_losses.findings_of(report["trainings"])
    assert json.loads(json.dumps(computed)).items() <= report.items()
    for name, row in report["policies"].items():
        measures = ("visible", "right | visible", "color | visible", "motion", "motion | visible")
        told = [row[measure]["all"][0] for measure in measures]
        assert f"| {NAMES_OF_POLICIES[name]} | {' | '.join(f'{value:.2f}' for value in told)} |" in page
    walls = (report["policies"][name]["visible, wall"] for name in ("9/0", "9/3"))
    assert "from {:.2f} to {:.2f} at 9 frames".format(*walls) in page
    for name, one in report["contrasts"].items():
        estimate, low, high = one["t"]
        if name[0] in "56":  # told as what is lost
            estimate, low, high = -estimate, -high, -low
        assert f"{estimate:.2f} [{low:.2f}, {high:.2f}]" in page.replace("−", "-"), name


def test_the_page_has_the_forecasts_of_the_sink():
    page, report = article("first_frame"), numbers_of("first_frame/sink_forecast.json")
    page = page.replace("−", "-").replace("*", "")
    assert json.loads(json.dumps(sink_forecast.findings_of(report["trainings"]))).items() <= report.items()
    row = report["r"]["full, from another caption"]
    cells = [f"{row[name]:.2f}" for name in ("waves and s", "s alone", "persistence", "Fourier and s")]
    null = "{:.2f}, {:.2f}".format(*row["jittered: median, best"])
    assert f"| {' | '.join([*cells, null])} |" in page
    policies = [report["r"][f"{name}, from another caption"] for name in list(sink_forecast.POLICIES)[1:]]
    fixed, moved, wide_fixed, wide_moved = (f"{row['waves and s']:.2f}" for row in policies)
    assert (
        f"r is {fixed} and {wide_fixed}; if the sink's positions move along, {moved} and {wide_moved}" in page
    )
    above = [row["waves and s"] > max(row["s alone"], row["persistence"]) for row in policies]
    assert above == [True, True, True, False]
    for one in report["contrasts"].values():
        assert "{:.2f} [{:.2f}, {:.2f}]".format(*one["t"]) in page
    for one in report["trainings"].values():  # none of the jittered draws is as good in any training
        videos = one["r"]["full, from another caption"]
        draws = np.mean([video["jittered"] for video in videos], 0)
        assert len(draws) == 30 and np.mean([np.mean(video["waves and s"]) for video in videos]) > draws.max()
    r = report["published"]["eagle from castle"]
    assert f"seen before) | {np.mean(r['waves and s']):.2f} | {np.mean(r['s alone']):.2f} |" in page


def test_the_page_has_the_heads_that_put_frame_0_first():
    page = article("first_frame").replace("*", "")
    for row in first_frame.steady_heads():
        assert f"| {row['eagle']} | {row['castle']} | {row['both']} |" in page


def test_the_page_has_the_correlations_of_attribution():
    rows = attribution_rows(numbers_of("attribution/results.json"))
    page = article("attribution")
    assert len(rows) == 5 and {row["pairs"] for row in rows} == {24}
    for row in rows:
        told = [row["ρ of a pair"], row["ρ of the 24 strongest"]]
        told += [row[name].replace("%", " %") for name in ("the first named", "of the first 5")]
        assert f"| {' | '.join(told)} |" in page
    assert rows[0]["ranks apart"].startswith("L3H3")


@pytest.mark.parametrize("finding", ["attribution", "first_frame", "head_memory", "long_rollouts"])
def test_an_article_names_the_commit_at_which_it_ran(finding):
    assert "37f7f1f3" in article(finding)


def test_the_plans_that_articles_name_are_in_the_history():
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a clone without its history")
    plans = [
        plan
        for path in RESULTS.glob("*/README.md")
        for plan in re.findall(r"git show (\S+)", path.read_text())
    ]
    assert len(plans) == 4 and not [plan for plan in plans if git("cat-file", "-e", plan).returncode]


PACKAGES = ("experiments.analysis", "experiments.caches")  # all of their modules are public
PUBLIC = {
    *("experiments", "experiments.figures", "experiments.miniature", "experiments.provenance"),
    *("experiments.running.cli", "wan.files", "wan.interventions", "wan.policies", "wan.sites"),
}


def test_findings_and_studies_are_short_and_import_public_names():
    for path in RESULTS.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 200, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in ("experiments", "wan"):
                modules = {node.module} & PUBLIC or {f"{node.module}.{alias.name}" for alias in node.names}
                assert modules <= PUBLIC or node.module.startswith(PACKAGES), f"{path}: {modules}"

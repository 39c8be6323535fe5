"""What the findings draw is what is committed, and their articles have the numbers of the committed data."""

import ast
import json
import re

import pytest
from conftest import ROOT

from experiments.analysis.results import attribution_rows
from experiments.findings.attribution import draw as attribution
from experiments.findings.first_frame import draw as first_frame
from experiments.findings.head_memory import draw as head_memory
from experiments.findings.long_rollouts import draw as long_rollouts

RESULTS = ROOT / "experiments/findings"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def words(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def numbers_of(name):
    return json.loads((RESULTS / name).read_text())


@pytest.mark.parametrize(
    ("finding", "names"),
    [
        (attribution, ["attribution_against"]),
        (first_frame, ["figure4_published", "first_frame_by_block"]),
        (head_memory, ["presence_and_identity", "hidden_shapes", "first_frame_removed"]),
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


def test_the_page_has_the_contrasts_of_presence_and_identity():
    page = (ROOT / "docs/head_memory.md").read_text().replace("−", "-")
    for one in numbers_of("head_memory/presence_and_identity.json")["contrasts"].values():
        estimate, low, high = one["t"]
        row = f"| {len(one['trainings'])} | {estimate:.2f} | {low:.2f}, {high:.2f} | {one['p_holm']:.2g} |"
        assert row in page


def test_the_page_has_the_shares_of_long_rollouts():
    page, results = (ROOT / "docs/long_rollouts.md").read_text(), numbers_of("long_rollouts/results.json")
    rows = [line.split("|") for line in page.splitlines() if re.match(r"\| \w+ \d+/\d+ \| 0\.\d\d \(", line)]
    names = {policy["name"]: policy for policy in results["policies"].values()}
    tested = [row for row in rows if row[1].strip() in names]
    assert len(tested) >= 9
    for row in tested[:9]:
        estimate, low, high = names[row[1].strip()]["measures"]["right"]
        assert row[2].strip() == f"{estimate:.2f} ({low:.2f} to {high:.2f})"


def test_the_page_has_the_correlations_of_attribution():
    rows = attribution_rows(numbers_of("attribution/results.json"))
    page = (ROOT / "docs/interventions.md").read_text()
    told = [f"| {row['pairs']} | {row['ρ of a pair']} | {row['least']:.2f} |" for row in rows]
    assert all(line in page for line in told)
    assert rows[0]["ranks apart"].startswith("L3H3")


@pytest.mark.parametrize("page", ["first_frame", "head_memory", "interventions", "long_rollouts"])
def test_an_article_names_the_commit_at_which_it_ran(page):
    assert "37f7f1f3" in (ROOT / f"docs/{page}.md").read_text()


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
                assert node.module in PUBLIC or node.module.startswith(PACKAGES), f"{path}: {node.module}"

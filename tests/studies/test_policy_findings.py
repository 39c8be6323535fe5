"""Findings from tables whose answers are known."""

import pytest
from helpers.long_findings import KINDS, comparison

from experiments.analysis.long_rollouts import LongRollouts
from experiments.studies import policy_findings


def test_findings_find_what_was_put_in():
    sink, plain = "window,window=9,sink=3", "window,window=9"
    found = policy_findings.findings(comparison({"full": 0.0, sink: 0.3, plain: 0.0, "frozen": 0.6}))
    gain = found["against_full"][sink]
    low, high = gain["difference"][1:]
    assert (
        0.2 < low < high < 0.4
        and gain["p_holm"] < 0.001
        and gain["p_holm"] == pytest.approx(2 * gain["p"], abs=1e-4)
    )
    assert (
        found["against_full"][plain]["difference"] == [0, 0, 0]
        and found["against_full"][plain]["p_holm"] == 1
    )
    assert set(found["against_full"]) == {sink, plain}  # a control is not compared
    [asked] = found["questions"].values()
    assert asked["pairs"] == 1 and asked["right"]["difference"] == gain["difference"]
    assert asked["motion"]["difference"] == [0, 0, 0]
    assert [(row["window"], row["sink"]) for row in found["sink_map"]["window"]] == [(9, 0), (9, 3)]
    full = found["policies"]["full"]
    assert full["cost"]["seconds"] == 1.0 and full["measures"]["non_repetition"] == [None, None, None]
    assert 0.3 < full["measures"]["right"][0] < 0.5 and set(full["by_kind"]) == set(KINDS)
    assert found["curves"]["frozen"]["motion"]["mean"] == [0.1] * 59


def test_policies_of_ones_own_stand_beside_the_family_outside_holm():
    sink, own, twin = "window,window=9,sink=3", "deep_sink", "window,window=9,sink=3,other=1"
    gains = {"full": 0.0, sink: 0.3, "window,window=9,sink=6": 0.1}
    plain = policy_findings.findings(comparison(gains))
    found = policy_findings.findings(comparison(gains | {own: 0.2, twin: 0.3, "frozen": 0.6}))
    assert list(found["against_full"]) == [sink, own, twin]  # what the map of sinks shows is no one's own
    assert found["against_full"][sink] == plain["against_full"][sink]
    assert found["against_full"][own]["p_holm"] is None and found["against_full"][own]["p"] < 0.05
    assert list(found["curves"]) == ["full", sink, own, twin, "frozen"]
    seen = LongRollouts(found)
    assert [*seen.intervals()] == ["full", sink, own, twin, "frozen"]  # two are window 9/3: said in full
    assert [*seen.costs()] == ["full", sink, own, twin]
    rows = {row["policy"]: row for row in seen.rows()}
    assert rows[own]["right"].startswith("0.6") and rows[own]["adjusted"] == "no"
    alone = policy_findings.findings(comparison({"full": 0.0, own: 0.2}))["against_full"]
    assert alone == {own: found["against_full"][own]}


def measures_of_full(table):
    return policy_findings.findings(table)["policies"]["full"]["measures"]


@pytest.mark.parametrize("second, counts", [(4, False), (5, True), (59, True), (60, False), (69, False)])
def test_the_seconds_from_5_to_60_count_and_no_others(second, counts):
    """Before them every policy sees all there is; what is longer is compared up to there."""
    table = comparison({"full": 0.0}, prompts=3, seconds=70)
    before = measures_of_full(table)
    for video in table["videos"]:
        video["tracker"]["right"][second] ^= 1
        video["seconds"]["motion"][second] = 9.0
    after = measures_of_full(table)
    assert {name for name in before if before[name] != after[name]} >= (
        {"right", "motion"} if counts else set()
    )
    assert counts or after == before


def test_more_seeds_that_say_the_same_narrow_no_interval():
    """Seeds of a prompt are averaged first, the unit is the prompt."""
    sink, plain = "window,window=9,sink=3", "window,window=9"
    table = comparison({"full": 0.0, sink: 0.1, plain: 0.05})
    one = table | {"videos": [video for video in table["videos"] if video["seed"] == 0]}
    thrice = table | {"videos": [video | {"seed": seed} for video in one["videos"] for seed in range(3)]}
    one, thrice = policy_findings.findings(one), policy_findings.findings(thrice)
    assert (one.pop("seeds"), thrice.pop("seeds")) == (1, 3) and thrice == one
    low, high = one["against_full"][sink]["difference"][1:]
    assert low < high and one["against_full"][sink]["p"] < 1

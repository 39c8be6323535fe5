"""Findings from tables whose answers are known."""

import pytest
from helpers.long_findings import KINDS, comparison

from experiments.studies import policy_findings
from wan.errors import ConfigError


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


@pytest.mark.parametrize("content", [{}, {"videos": 3}, {"prompts": [], "kinds": [], "videos": [{}]}])
def test_another_table_is_refused(content):
    with pytest.raises(ConfigError, match=r"no comparison|findings need"):
        policy_findings.findings(content)


def test_seconds_before_the_fifth_do_not_count():
    table = comparison({"full": 0.0})
    for video in table["videos"]:
        video["tracker"]["right"][: policy_findings.FROM] = [1] * policy_findings.FROM
    changed = policy_findings.findings(table)
    assert (
        changed["policies"]["full"]["measures"]["right"]
        == policy_findings.findings(comparison({"full": 0.0}))["policies"]["full"]["measures"]["right"]
    )

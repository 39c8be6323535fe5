"""Findings from tables whose answers are known."""

import numpy as np
import pytest

from experiments.studies import policy_findings
from wan.errors import ConfigError

KINDS = ["single", "crossing", "wall"] * 6


def synthetic(gain: dict[str, float], prompts: int = 18, seconds: int = 59) -> dict:
    """A comparison in which the share of right seconds of each label is its gain over 0.4."""
    videos = []
    for label, more in gain.items():
        for prompt in range(prompts):
            for seed in range(3):
                rng = np.random.default_rng([prompt, seed])  # the same draws for every policy
                right = (rng.random(seconds) < 0.4 + more).astype(int).tolist()
                tracker = dict.fromkeys(("right", "color", "shape", "visible", "background"), right)
                each = {
                    name: [0.1] * seconds
                    for name in ("hue_kept", "motion", "flicker", "distance", "sharpness")
                }
                whole = dict.fromkeys(
                    ("sharpness_change", "clipped_change", "flicker_change", "largest_drop"), 0.5
                ) | {"non_repetition": None}
                about = {"label": label, "prompt": f"p{prompt}", "seed": seed}
                videos.append(about | {"tracker": tracker, "seconds": each, "whole": whole})
    return {
        "prompts": [f"p{i}" for i in range(prompts)],
        "kinds": KINDS[:prompts],
        "unnamed": [i % 6 == 2 for i in range(prompts)],
        "num_frames": 240,
        "weights_sha256": "0",
        "costs": {"full": {"seconds": 1.0}},
        "videos": videos,
    }


def test_findings_find_what_was_put_in():
    sink, plain = "window,window=9,sink=3", "window,window=9"
    found = policy_findings.findings(synthetic({"full": 0.0, sink: 0.3, plain: 0.0, "frozen": 0.6}))
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
    assert full["cost"] == {"seconds": 1.0} and full["measures"]["non_repetition"] == [None, None, None]
    assert 0.3 < full["measures"]["right"][0] < 0.5 and set(full["by_kind"]) == set(KINDS)
    assert found["curves"]["frozen"]["motion"]["mean"] == [0.1] * 59


@pytest.mark.parametrize("content", [{}, {"videos": 3}, {"prompts": [], "kinds": [], "videos": [{}]}])
def test_another_table_is_refused(content):
    with pytest.raises(ConfigError, match=r"no comparison|findings need"):
        policy_findings.findings(content)


def test_seconds_before_the_fifth_do_not_count():
    table = synthetic({"full": 0.0})
    for video in table["videos"]:
        video["tracker"]["right"][: policy_findings.FROM] = [1] * policy_findings.FROM
    changed = policy_findings.findings(table)
    assert (
        changed["policies"]["full"]["measures"]["right"]
        == policy_findings.findings(synthetic({"full": 0.0}))["policies"]["full"]["measures"]["right"]
    )

"""configs/policies: every file is a policy, and says where its settings are from."""

from dataclasses import fields

import pytest
from conftest import ROOT

from wan.config import RunConfig
from wan.errors import ConfigError
from wan.files import read_yaml
from wan.policies import POLICIES, make_policy, read_policy

FILES = sorted((ROOT / "configs/policies").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_a_policy(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = read_yaml(path)
    policy = read_policy(settings)
    policy.check([3])
    assert path.read_text().startswith("# ") and read_policy(policy.describe()) == policy
    if policy.name == "per_head":
        assert [len(row) for row in policy.labels] == [12] * 30
    assert RunConfig(cache_policy=settings).policy == policy


def test_every_policy_but_full_has_a_file():
    assert {read_yaml(path)["name"] for path in FILES} == set(POLICIES) - {"full"}


def test_the_older_settings_say_which_policy_they_mean():
    with pytest.raises(ConfigError, match=r"mean cache_policy \{name: window, window: 9, sink: 3\}"):
        RunConfig(local_attn_size=9, sink_size=3, cache_policy={"name": "full"})
    policy = RunConfig(local_attn_size=9, sink_size=3).policy
    assert policy.describe() == {"name": "window", "window": 9, "sink": 3}


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ({"frame": 4, "prompt": "a"}, "frame 4 does not begin a block after the first; blocks begin at 3, 6"),
        ({"frame": 6, "prompt": "a", "how": "jump"}, "'jump' is not one of keep, recache, flush, cut"),
        ({"frame": 6, "prompt": "a", "how": "cut"}, "cannot cut"),
        ({"frame": 6}, "needs a frame .* and a prompt"),
        ({"frame": 6, "text": "a"}, "has no 'text'"),
        ({"frame": 6, "prompt": "a\0b"}, "prompt_schedule has a NUL character at 1"),
        ({"frame": 6, "prompt": "a\ud800"}, "prompt_schedule is not text"),
        ({"frame": 6, "prompt": "a" * 100_001}, "prompt_schedule has 100001 characters"),
        ({"frame": True, "prompt": "a"}, "needs a frame"),
        ({"frame": 6, "prompt": "a", "how": ["keep"] * 500}, "is not one of keep"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(switch, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(prompt_schedule=[switch])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recompute_context": -5}, "must be 0 or more frames, not -5"),
        (
            {"recompute_context": 6, "local_attn_size": 6},
            "do not fit the window of 6 frames; take a window of 9",
        ),
        ({"recompute_context": 30, "cache_policy": {"name": "window", "window": 9}}, "take a window of 33"),
        ({"recompute_context": 6, "cache_policy": {"name": "rolling_sink"}}, "take window or relative"),
    ],
)
def test_frames_that_cannot_be_computed_again_are_refused_before_weights_are_read(settings, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(**settings)


def test_a_cut_within_a_sink_without_raw_keys_is_refused():
    """As longlive_infinity is released, the clean pass writes nothing to the sink slots of a later block."""
    policy = {"name": "relative", "window": 12, "sink": 6, "released": "longlive_infinity"}
    switch = {"frame": 6, "prompt": "a", "how": "cut"}
    assert RunConfig(cache_policy=policy, prompt_schedule=[switch])
    with pytest.raises(
        ConfigError, match=r"a cut at frame 3 would rotate .*; cut after its 6 frames, or use flush"
    ):
        RunConfig(cache_policy=policy, prompt_schedule=[switch | {"frame": 3}])


FIELDS = {
    "full": {},
    "window": {"window": 9, "sink": 3},
    "relative": {"window": 9, "sink": 3},
    "deep_sink": {"window": 9, "sink": 3},
    "participative": {"window": 9, "sink": 1, "budget": 8, "recent": 4},
    "ema_sink": {"window": 9, "sink": 3},
    "two_memories": {"window": 9, "sink": 3},
    "rolling_sink": {"window": 9},
    "memory_bank": {"window": 9, "sink": 3, "bank": 2, "interval": 1},
    "per_head": {"file": "cache/published/none.csv", "policies": {"a": {"name": "full"}}},
}
HOSTILE = [
    None,
    True,
    -1,
    2.5,
    float("nan"),
    float("inf"),
    "x",
    "é" * 500,
    "x\0",
    [3],
    {"a": 1},
    10**30,
    -(10**30),
]
NOT_A_MISTAKE = [("participative", "reuse_limit", None), ("window", "global_sink", True)]


@pytest.mark.parametrize("name", POLICIES)
def test_any_wrong_value_of_any_field_is_one_line(name):
    """What is not refused is a policy that can be described; a field that nothing has is refused too."""
    read_policy({"name": "full"} if name == "per_head" else {"name": name, **FIELDS[name]})
    for field in [*(f.name for f in fields(POLICIES[name])), "nope", "name", 3]:
        for value in HOSTILE:
            settings = {"name": name, **FIELDS[name], field: value}
            if (name, field, value) in NOT_A_MISTAKE or (field == "released" and value is True):
                continue
            with pytest.raises(ConfigError) as refused:
                read_policy(settings)
            assert "\n" not in str(refused.value) and len(str(refused.value)) < 500, settings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no CSV of classes"),
        (b"layer,head\n0,0\n", "is no CSV of classes"),
        (b"layer,head,class\n0,0,a\n99999999999,0,a\n", "is no CSV of classes"),
        (b"layer,head,class\nx,0,a\n", "is no CSV of classes"),
        (b"a,b\nc\n", "different numbers of heads"),
        (b"\xff\xfea", "is not text in UTF-8"),
        (b'"' + b"a" * 200_000 + b'"', "is no CSV of classes"),
        (b"a," * 200_000, "is larger than"),
        (b"a,zz\n", "class 'zz' .* has no policy"),
    ],
)
def test_a_file_of_classes_that_is_none_is_one_line(content, message, tmp_path):
    (tmp_path / "labels.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        make_policy("per_head", file=str(tmp_path / "labels.csv"), policies={"a": {"name": "full"}})

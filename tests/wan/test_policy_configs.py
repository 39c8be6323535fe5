"""configs/policies: every file is a policy, and says where its settings are from."""

import pytest
from conftest import ROOT

from wan.config import RunConfig
from wan.errors import ConfigError
from wan.modules.cache_policies import POLICIES, read_policy
from wan.text_files import read_yaml

FILES = sorted((ROOT / "configs/policies").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_a_policy(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = read_yaml(path)
    policy = read_policy(settings)
    policy.check([3])
    assert path.read_text().startswith("# ") and read_policy(policy.describe()) == policy
    if policy.name == "per_head":
        policy.check_model(30, 12)
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
        ({"frame": 6, "prompt": "a", "how": "cut"}, "a cut needs a policy"),
        ({"frame": 6}, "needs a frame .* and a prompt"),
        ({"frame": 6, "text": "a"}, "has no 'text'"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(switch, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(prompt_schedule=[switch])

"""Videos of policies, made in pieces and measured."""

import itertools
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import compare_policies
from experiments.caches.blocks import read_blocks
from experiments.caches.files import CacheError
from experiments.studies import policy_comparison
from experiments.studies.policy_comparison import PolicyRuns
from wan.errors import ConfigError

POLICIES = ["full", "window,window=3"]


def compare(tiny, folder, **flags):
    given = {"policies": POLICIES, "output_dir": str(folder), "videos": 0, "judges": 0, "capture": "last:1"}
    given |= {"vae_dtype": "float32", "controls": list(policy_comparison.CONTROLS), "deterministic": False}
    given |= {"batch": 4, "quiet": True, "inputs": []}
    given |= {"held_out": 2, "seeds": [0, 1]}
    given |= dict.fromkeys(("workers", "scheduler", "slurm", "vbench_dir", "log_file"))
    given |= dict.fromkeys(("prompt", "prompts", "save_video"))
    policy_comparison.compare(Namespace(**(given | flags)), replace(tiny.config, num_frames=6))
    return json.loads((folder / "comparison.json").read_text())


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """Two prompts, two seeds."""
    folder = tmp_path_factory.mktemp("policies")
    return folder, compare(tiny, folder, videos=1)


def test_every_policy_and_control_has_every_video(made):
    folder, table = made
    labels = [*POLICIES, *policy_comparison.CONTROLS]
    rows = [(video["label"], video["prompt"], video["seed"]) for video in table["videos"]]
    assert rows == [*itertools.product(labels, table["prompts"], (0, 1))]
    of = {label: [video for video in table["videos"] if video["label"] == label] for label in labels}
    assert all(len(one["seconds"]["motion"]) == len(one["tracker"]["right"]) == 1 for one in table["videos"])
    assert all(one["seconds"]["motion"] == one["seconds"]["flicker"] == [0.0] for one in of["frozen"])
    rendered = of["rendered"]
    assert all(one["tracker"]["right"] == [1] and one["seconds"]["motion"][0] > 0.05 for one in rendered)
    full, window = (table["costs"][label] for label in POLICIES)
    assert full["cache_bytes"] == 2 * window["cache_bytes"] > 0 and full["batch"] == 4
    assert rendered[0]["seconds"] == rendered[1]["seconds"] and table["missing"] == 0
    for video in table["videos"]:  # attention is of policies
        assert (folder / "attention" / video["fingerprint"]).exists() == (video["label"] in POLICIES)
    one, other = (read_blocks(folder / "attention" / video["fingerprint"]) for video in of[POLICIES[1]][:2])
    assert [block["block"] for block in one] == [1] and one[0]["key_frames"][0].tolist() == [3, 4, 5]
    assert one[0]["logits"].shape == (2, 2, 3, 3) and not torch.equal(one[0]["logits"], other[0]["logits"])


def test_what_is_done_is_not_made_again_and_what_is_torn_is(made, tiny, monkeypatch):
    (folder, table), calls = made, []
    rolled_out = PolicyRuns._roll_out
    monkeypatch.setattr(PolicyRuns, "_roll_out", lambda *a, **k: calls.append(1) or rolled_out(*a, **k))
    assert compare(tiny, folder)["videos"] == table["videos"] and not calls
    torn = folder / "items" / f"{table['videos'][0]['fingerprint']}.json"
    torn.write_text(torn.read_text()[:100])
    assert compare(tiny, folder)["videos"] == table["videos"] and len(calls) == 1


def test_every_prompt_has_a_file_of_its_own_for_vbench(tiny):
    """Also prompts that begin alike, in letters of one byte and of three."""
    long = "a red ball " * 20
    prompts = ("short", "a/b", "a b", "红" * 120, long + "one", long + "two")
    runs = [replace(tiny.config, prompt=prompt, seed=seed) for prompt in prompts for seed in (7, 8)]
    items = PolicyRuns(Path("out"), {"full": {"name": "full"}}, runs, {}, vbench=Path("vbench")).items
    names = [path.name for item in items for path in item.mp4s]
    assert len(set(names)) == len(names) == 12 and max(len(name.encode()) for name in names) < 200
    assert {"short-0.mp4", "short-1.mp4", "a b-0.mp4"} < set(names)
    for item, name in zip(items, names, strict=True):
        assert name.startswith(item.config.prompt.replace("/", " ")[: 180 // 3].strip())


def test_an_item_is_known_by_its_policys_classes_and_the_first_seed_has_the_video(tiny, tmp_path):
    heads, runs = tmp_path / "heads.csv", [replace(tiny.config, seed=seed) for seed in (7, 8)]
    names = []
    for text in ("0,1\n", "1,0\n"):
        heads.write_text(text)
        policy = {"name": "per_head", "file": str(heads)}
        policies = {"mine": policy, "full": {"name": "full"}, "window": {"name": "window", "window": 3}}
        items = PolicyRuns(tmp_path, policies, runs, {}, videos=1).items
        names += [item.name for item in items]
        assert [len(item.mp4s) for item in items] == [1, 0] * 3
    assert len(set(names)) == 8  # the heads of the first policy alone are other ones


def test_policies_that_share_a_file_or_have_none_are_refused(tiny, tmp_path, monkeypatch):
    """Before a model is read."""
    monkeypatch.setattr(policy_comparison.Session, "prepare", lambda *given: pytest.fail("was loaded"))
    folder = tmp_path / ("x" * 200)
    paths = [folder / f"{name}.yaml" for name in ("a/b", "a_b", "c" * 60)]
    (folder / "a").mkdir(parents=True)
    for path in paths:
        path.write_text("name: full\n")
    with pytest.raises(ConfigError, match=r"two of --policies would write .*rename a file"):
        compare(tiny, tmp_path / "out", policies=[*map(str, paths[:2])], videos=1)
    with pytest.raises(CacheError, match="cannot be written: File name too long"):
        compare(tiny, tmp_path / "out", policies=[str(paths[2])], videos=1)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("window,window=9,snk=3", "unknown key 'snk'; did you mean sink"),
        ("window,9,3", "'window,9,3' has '9', no FIELD=VALUE"),
        ("window=9,snk=3", "begins with a field; the policy's name comes first, as in window,window=9"),
    ],
)
def test_a_policy_of_the_command_line_stays_whole(word, said):
    with pytest.raises(ConfigError, match=said):
        compare_policies.run(["--policies", "full", word, "--num_frames", "12"])

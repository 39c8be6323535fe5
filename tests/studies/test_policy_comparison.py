"""Videos of policies, made in pieces and measured."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.rollouts import TWO_STEPS

from experiments.caches.files import CacheError
from experiments.extraction.long_rollout import read_blocks
from experiments.studies import policy_comparison
from experiments.studies.policy_comparison import Comparison
from wan.config import load_config
from wan.errors import ConfigError

pytestmark = pytest.mark.slow
FRAMES = 6
POLICIES = ["full", "window,window=3"]


def compare(folder, prompts=2, **flags):
    defaults = {
        "policies": POLICIES,
        "output_dir": str(folder),
        "vbench_dir": None,
        "videos": 0,
        "vae_dtype": "float32",
        "controls": list(policy_comparison.CONTROLS),
        "capture": "last:1",
        "batch": 4,
        "judges": 0,
        **dict.fromkeys(("workers", "scheduler", "slurm")),
        "quiet": True,
        "log_file": None,
        "deterministic": False,
        "inputs": [],
    }
    config = load_config("configs/wan_mini.yaml", {"num_frames": FRAMES, "device": "cpu"} | TWO_STEPS)
    scenes = policy_comparison.held_out(prompts)
    runs = [replace(config, prompt=prompt, seed=seed) for prompt in scenes for seed in (0, 1)]
    policy_comparison.compare(Namespace(**(defaults | flags)), runs, scenes)
    return json.loads((folder / "comparison.json").read_text())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two prompts, two seeds."""
    folder = tmp_path_factory.mktemp("policies")
    return folder, compare(folder, vbench_dir=str(folder / "vbench"), videos=1)


def test_every_policy_and_control_has_every_video(made):
    _, table = made
    labels = [*POLICIES, *policy_comparison.CONTROLS]
    rows = [(video["label"], video["prompt"], video["seed"]) for video in table["videos"]]
    assert rows == [
        (label, prompt, seed) for label in labels for prompt in table["prompts"] for seed in (0, 1)
    ]
    assert all(
        len(video["seconds"]["motion"]) == len(video["tracker"]["right"]) == 1 for video in table["videos"]
    )
    frozen, rendered = (
        [video for video in table["videos"] if video["label"] == name] for name in ("frozen", "rendered")
    )
    assert all(video["seconds"]["motion"] == video["seconds"]["flicker"] == [0.0] for video in frozen)
    assert all(
        video["tracker"]["right"] == [1] and video["seconds"]["motion"][0] > 0.05 for video in rendered
    )
    full, window = (table["costs"][label] for label in POLICIES)
    assert full["cache_bytes"] == 2 * window["cache_bytes"] > 0 and full["batch"] == 4
    assert rendered[0]["seconds"] == rendered[1]["seconds"] and table["missing"] == 0


def test_attention_of_every_video(made):
    folder, table = made
    for video in table["videos"]:
        kept = folder / "attention" / video["name"]
        assert kept.exists() == (video["label"] in POLICIES)
    one, other, *_ = (video for video in table["videos"] if video["label"] == "window,window=3")
    one, other = (read_blocks(folder / "attention" / video["name"]) for video in (one, other))
    assert [block["block"] for block in one] == [1] and one[0]["key_frames"][0].tolist() == [3, 4, 5]
    assert one[0]["logits"].shape == (8, 12, 3, 3) and not torch.equal(one[0]["logits"], other[0]["logits"])


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_is_what_it_says(deterministic, tmp_path, monkeypatch):
    found = []

    def prepare(*given, **more):
        found.append(torch.are_deterministic_algorithms_enabled())
        raise ConfigError("this far")

    monkeypatch.setattr(policy_comparison.causal, "prepare", prepare)
    with pytest.raises(ConfigError, match="this far"):
        compare(tmp_path, deterministic=deterministic)
    assert found == [deterministic] and not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def alike():
    """A comparison of prompts that begin alike, in letters of one byte and of three."""
    config = load_config("configs/wan_mini.yaml", {"device": "cpu"})
    long, prompts = "a red ball " * 20, ("short", "a/b", "a b", "红" * 120)
    runs = [
        replace(config, prompt=prompt, seed=seed)
        for prompt in (*prompts, long + "one", long + "two")
        for seed in (7, 8)
    ]
    return Comparison(Path("out"), {"full": {"name": "full"}}, runs, {}, vbench=Path("vbench"))


def test_every_prompt_has_a_file_of_its_own_for_vbench(alike):
    names = [path.name for item in alike.items for path in item.mp4s]
    assert len(set(names)) == len(names) == 12 and max(len(name.encode()) for name in names) < 200
    assert {"short-0.mp4", "short-1.mp4", "a b-0.mp4"} < set(names)
    for item, name in zip(alike.items, names, strict=True):
        assert name.startswith(item.config.prompt.replace("/", " ")[: 180 // 3].strip())


def test_policies_that_share_a_file_or_have_none_are_refused_before_a_model_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_comparison.causal, "prepare", lambda *given: pytest.fail("was loaded"))
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    for name in ("a/b", "a_b", "c" * 60):
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text("name: full\n")
    twins = [str(folder / "a/b.yaml"), str(folder / "a_b.yaml")]
    with pytest.raises(ConfigError, match=r"two of --policies would write .*rename a file"):
        compare(tmp_path / "out", policies=twins, videos=1)
    with pytest.raises(CacheError, match="cannot be written: File name too long"):
        compare(tmp_path / "out", policies=[str(folder / f"{'c' * 60}.yaml")], videos=1)


def test_what_is_done_is_not_made_again_and_what_is_torn_is(made, monkeypatch):
    folder, table = made
    calls = []
    kept = policy_comparison.Comparison._rolled_out
    monkeypatch.setattr(
        policy_comparison.Comparison, "_rolled_out", lambda *a, **k: calls.append(1) or kept(*a, **k)
    )
    assert compare(folder)["videos"] == table["videos"] and not calls
    torn = folder / "items" / f"{table['videos'][0]['name']}.json"
    torn.write_text(torn.read_text()[:100])
    assert compare(folder)["videos"] == table["videos"] and len(calls) == 1

"""The shipped miniature: its size, its videos, its committed evaluation and training checkpoints."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers.rollouts import TWO_STEPS

from experiments import measure_checkpoints
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.miniature import evaluation
from experiments.miniature.evaluation import Miniature, read_report
from experiments.miniature.moving_shapes import sample_scenes
from experiments.miniature.recipe import MODEL
from experiments.miniature.tracking import SETS, EvalPool, held_out_scenes
from wan.checkpoint import read_model_config, read_self_forcing_state, read_transformer_state
from wan.config import RunConfig, load_config
from wan.text_encoder import clean_prompt

MINI = ROOT / "checkpoints" / "wan-mini"
HELD_OUT = list(itertools.islice(sample_scenes(5, held_out=True, kinds=["single"]), 3))
EVALUATION = json.loads((MINI / "evaluation.json").read_text())


def config(**overrides) -> RunConfig:
    relative = {"ckpt_dir": str(MINI), "checkpoint_path": str(MINI / "self_forcing_mini.pt")}
    return load_config(ROOT / "configs" / "wan_mini.yaml", relative | overrides)


def test_its_two_weight_sets_are_one_model():
    sizes = read_model_config(MINI)
    base, tuned = read_transformer_state(MINI), read_self_forcing_state(MINI / "self_forcing_mini.pt")
    assert sizes == MODEL  # whose config the training copies
    assert base.keys() == tuned.keys() and 4e6 < sum(t.numel() for t in base.values()) < 6e6
    assert all(t.dtype == torch.bfloat16 for t in (*base.values(), *tuned.values()))
    assert not torch.equal(base["blocks.0.self_attn.q.weight"], tuned["blocks.0.self_attn.q.weight"])


@pytest.mark.beside
def test_its_evaluation_is_of_these_weights():
    """Two captions, measured anew as evaluate_mini.py measures."""
    mini, scenes = Miniature(config(device="cpu")), held_out_scenes(SETS["one shape"], 2)
    assert EVALUATION["weights"] == evaluation.weight_hashes(mini.config)
    now = EvalPool(1).judge_all(mini.causal([scene.caption for scene in scenes]), scenes)
    then = EVALUATION["captions"]["one shape"]["each"][:2]
    assert [scene.caption for scene in scenes] == [one["caption"] for one in then]
    pairs = [
        (here[q], answer) for here, one in zip(now, then, strict=True) for q, answer in one["causal"].items()
    ]
    assert len(pairs) >= 8 and sum(a != b for a, b in pairs) <= 1  # one may be close on another CPU


@pytest.mark.beside
def test_a_video_has_its_own_noise_in_a_batch_of_any_size():
    mini = Miniature(config(device="cpu", num_frames=3, **TWO_STEPS))
    captions, videos = [scene.caption for scene in HELD_OUT], {}
    for mini.batch in (2, 3):
        videos[mini.batch] = torch.stack(list(mini.causal(captions)))
    torch.testing.assert_close(videos[2], videos[3], atol=1e-3, rtol=0)
    assert (videos[3][0] - videos[3][1]).abs().max() > 0.1
    through = [torch.stack(list(mini.reconstructed(list(videos[3])))) for mini.batch in (1, 3)]
    torch.testing.assert_close(*through, atol=1e-3, rtol=0)


def test_prompts_are_cleaned_as_wan_does():
    assert clean_prompt("a  red\n salt &amp;amp; schÃ¶n ") == "a red salt & schön"


# -- checkpoints that the training kept --

REPORT = read_report(ROOT / "cache/wan-mini-training/moments.json")
LAST = REPORT["training_checkpoints"][-1]["step"]


@pytest.mark.beside
def test_the_last_checkpoint_is_the_shipped_checkpoint_and_measures_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    shutil.copy("checkpoints/wan-mini/self_forcing_mini.pt", tmp_path / f"step_{LAST:05d}.pt")
    out = tmp_path / "out" / "checkpoints.json"
    flags = ["--captions", "1", "--device", "cpu", "--steps", "-1", "--output_path", str(out)]
    measure_checkpoints.run([str(tmp_path), *flags])
    report = json.loads(out.read_text())
    assert report["captions"] == REPORT["captions"][:1]
    assert report["training_checkpoints"][0].keys() == REPORT["training_checkpoints"][-1].keys() | {
        "environment"
    }
    ours, theirs = (
        load_cache(folder / f"step_{LAST:05d}.pt")
        for folder in (out.parent, ROOT / "cache/wan-mini-training")
    )
    assert theirs["prompt"] == REPORT["captions"][0] and theirs["weights"] == "checkpoint"
    np.testing.assert_allclose(
        ours["frame_logits"], theirs["frame_logits"], atol=5e-3, rtol=0
    )  # 1.3e-3 between CPU and GPU


def test_a_report_is_extended_by_other_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shutil.copy("cache/wan-mini-training/moments.json", tmp_path / "out.json")
    (tmp_path / "step_00007.pt").write_bytes(b"")
    made = {"step": 7, "first pass": {"equal_distance_excess": [[1.0]]}}
    monkeypatch.setattr(evaluation, "measure", lambda *_: iter([(made, {})]))
    flags = [str(tmp_path), "--device", "cpu", "--output_path", str(tmp_path / "out.json"), "--extend"]
    measure_checkpoints.run(flags)
    rows = read_report(tmp_path / "out.json")["training_checkpoints"]
    assert [row["step"] for row in rows] == sorted(
        [7, *(row["step"] for row in REPORT["training_checkpoints"])]
    )
    before = REPORT["training_checkpoints"][0].get("environment", REPORT["environment"])
    assert rows[0]["environment"] == before
    assert rows[1]["step"] == 7 and rows[1]["environment"]["device"].endswith("CPU threads")
    with pytest.raises(CacheError, match="is of other captions; leave --extend out"):
        measure_checkpoints.run([*flags, "--captions", "2"])

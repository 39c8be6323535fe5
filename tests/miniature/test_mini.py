"""The shipped miniature: its size, its videos, its committed evaluation and training checkpoints."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT

from experiments import measure_checkpoints
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.miniature import evaluation
from experiments.miniature.evaluation import Miniature, read_report
from experiments.miniature.recipe import MODEL
from experiments.miniature.tracking import SETS, EvalPool, held_out_scenes
from wan.checkpoint import read_model_config, read_self_forcing_state, read_transformer_state
from wan.config import load_config
from wan.text_encoder import clean_prompt

MINI = ROOT / "checkpoints" / "wan-mini"
EVALUATION = json.loads((MINI / "evaluation.json").read_text())


def test_its_two_weight_sets_are_one_model():
    sizes = read_model_config(MINI)
    base, tuned = read_transformer_state(MINI), read_self_forcing_state(MINI / "self_forcing_mini.pt")
    assert sizes == MODEL  # whose config the training copies
    assert base.keys() == tuned.keys() and 4e6 < sum(t.numel() for t in base.values()) < 6e6
    assert all(t.dtype == torch.bfloat16 for t in (*base.values(), *tuned.values()))
    assert not torch.equal(base["blocks.0.self_attn.q.weight"], tuned["blocks.0.self_attn.q.weight"])


@pytest.mark.beside
def test_its_evaluation_is_of_these_weights():
    """A caption, measured anew as evaluate_mini.py measures."""
    mini, scenes = (
        Miniature(load_config("configs/wan_mini.yaml", {"device": "cpu"})),
        held_out_scenes(SETS["one shape"], 1),
    )
    assert EVALUATION["weights"] == evaluation.weight_hashes(mini.config)
    (now,) = EvalPool(1).judge_all(mini.causal([scenes[0].caption]), scenes)
    then = EVALUATION["captions"]["one shape"]["each"][0]
    assert scenes[0].caption == then["caption"] and len(then["causal"]) >= 4
    assert sum(now[q] != answer for q, answer in then["causal"].items()) <= 1  # it may be close elsewhere


@pytest.mark.beside
def test_a_video_has_its_own_noise_in_a_batch_of_any_size(tiny):
    mini, videos = Miniature(replace(tiny.config, num_frames=3)), {}
    captions = [scene.caption for scene in held_out_scenes(SETS["one shape"], 2)]
    for mini.batch in (1, 2):
        videos[mini.batch] = torch.stack(list(mini.causal(captions)))
    torch.testing.assert_close(videos[1], videos[2], atol=1e-3, rtol=0)
    assert (videos[2][0] - videos[2][1]).abs().max() > 0.1
    through = [torch.stack(list(mini.reconstructed(list(videos[2])))) for mini.batch in (1, 2)]
    torch.testing.assert_close(*through, atol=1e-3, rtol=0)


def test_prompts_are_cleaned_as_wan_does():
    assert clean_prompt("a  red\n salt &amp;amp; schÃ¶n ") == "a red salt & schön"


# -- checkpoints that the training kept --

REPORT = read_report(ROOT / "cache/wan-mini-training/moments.json")
LAST = REPORT["training_checkpoints"][-1]["step"]


@pytest.mark.beside
def test_the_last_checkpoint_is_the_shipped_checkpoint_and_measures_the_same(tmp_path):
    name = f"step_{LAST:05d}.pt"
    shutil.copy("checkpoints/wan-mini/self_forcing_mini.pt", tmp_path / name)
    out = tmp_path / "out" / "checkpoints.json"
    flags = ["--captions", "1", "--device", "cpu", "--steps", "-1", "--output_path", str(out)]
    measure_checkpoints.run([str(tmp_path), *flags])
    report = json.loads(out.read_text())
    assert report["captions"] == REPORT["captions"][:1]
    fields = REPORT["training_checkpoints"][-1].keys() | {"environment"}
    assert report["training_checkpoints"][0].keys() == fields
    ours, theirs = (load_cache(folder / name) for folder in (out.parent, ROOT / "cache/wan-mini-training"))
    assert theirs["prompt"] == REPORT["captions"][0] and theirs["weights"] == "checkpoint"
    found = ours["frame_logits"], theirs["frame_logits"]
    np.testing.assert_allclose(*found, atol=5e-3, rtol=0)  # 1.3e-3 between CPU and GPU


def test_a_report_is_extended_by_other_steps(tmp_path, monkeypatch):
    shutil.copy("cache/wan-mini-training/moments.json", tmp_path / "out.json")
    (tmp_path / "step_00007.pt").write_bytes(b"")
    made = {"step": 7, "first pass": {"equal_distance_excess": [[1.0]]}}
    monkeypatch.setattr(evaluation, "measure", lambda *_: iter([(made, {})]))
    flags = [str(tmp_path), "--device", "cpu", "--output_path", str(tmp_path / "out.json"), "--extend"]
    measure_checkpoints.run(flags)
    rows, before = read_report(tmp_path / "out.json")["training_checkpoints"], REPORT["training_checkpoints"]
    assert [row["step"] for row in rows] == sorted([7, *(row["step"] for row in before)])
    assert rows[0]["environment"] == before[0].get("environment", REPORT["environment"])
    assert rows[1]["step"] == 7 and rows[1]["environment"]["device"].endswith("CPU threads")
    with pytest.raises(CacheError, match="has other captions; leave --extend out"):
        measure_checkpoints.run([*flags, "--captions", "2"])

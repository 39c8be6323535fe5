"""run_extraction.py on the miniature: which calls, what they hold, with and without a sliding window."""

import re

import pytest
import torch
from conftest import ROOT

from experiments import run_extraction, run_extraction_figure4
from experiments.analysis.tables import calls
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_call
from experiments.running import cli
from wan.blocks import visible_frames

MINI = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "6"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def extract(path, *flags, script=run_extraction):
    script.run([*flags, "--output_path", str(path)])
    return load_cache(path, mmap=False)


def tags(cache):
    return [(call["block"], call["step"], call["layer_idx"]) for call in cache["attention_weights"]]


def test_the_last_block_of_the_first_pass_in_probabilities(tmp_path):
    cache = extract(tmp_path / "a.pt", *MINI)
    assert (cache["format"], cache["layer_indices"], cache["num_transformer_blocks"]) == (
        "inference",
        [1, 5],
        8,
    )
    assert not cache["is_logits"] and tags(cache) == [(1, 0, 1), (1, 0, 5)]
    for call in cache["attention_weights"]:
        assert call["attn_weights"].shape == (1, 12, 48, 96) and call["attn_weights"].dtype == torch.float32
        assert (call["attn_weights"].sum(-1) - 1).abs().max() < 1e-5
        assert (call["timestep"], call["is_clean_pass"]) == (1000.0, False)
        assert (call["query_frames"], call["key_frames"]) == ([3, 4, 5], list(range(6)))
        assert (call["q_shape"], call["k_shape"]) == ([1, 48, 12, 16], [1, 96, 12, 16])
    again = extract(tmp_path / "b.pt", *MINI)
    assert tags(again) == tags(cache) and (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    other = extract(tmp_path / "f.pt", *MINI, "--capture", "probabilities", script=run_extraction_figure4)
    for call, entry in zip(cache["attention_weights"], other["attention_weights"], strict=True):
        assert torch.equal(call["attn_weights"], entry["attn_weights"])


def test_chosen_layers_blocks_and_passes_as_logits(tmp_path):
    cache = extract(
        tmp_path / "c.pt",
        *MINI,
        "--layer_indices",
        "7",
        "2",
        "--blocks",
        "0",
        "-1",
        "--steps",
        "4",
        "0",
        "--capture",
        "logits",
    )
    assert tags(cache) == [
        (b, s, layer) for b in (0, 1) for s in (0, 4) for layer in (2, 7)
    ]  # the rollout's order
    assert cache["is_logits"] and cache["layer_indices"] == [7, 2]
    logits = cache["attention_weights"][-1]["attn_logits"]
    assert (
        logits.dtype == torch.float16 and logits.min() < 0 and cache["attention_weights"][-1]["is_clean_pass"]
    )
    last = open_call(cache, 7, "mass")
    assert (last.layers, last.pass_label, last.matrix_rows) == ((7,), "clean pass (t = 0)", (3, 4, 5))
    torch.testing.assert_close(
        torch.from_numpy(last.frame_matrix(7)).sum(-1), torch.ones(12, 3), atol=1e-5, rtol=0
    )
    first = open_call(cache, 0)  # an earlier block has its own frames, own block and all
    assert (first.query_frames, first.own_block, first.context_frames) == ((0, 1, 2), (0, 1, 2), ())
    first_call = {"call": 0, "layer": 2, "pass": "0 (t = 1000)", "queries": "0–2", "keys": "0–2"}
    assert calls(cache)[0] == first_call
    with pytest.raises(CacheError, match=r"call 8 is not in 0\.\.7"):
        open_call(cache, 8)


def test_a_window_covers_its_frames_alone(tmp_path):
    cache = extract(
        tmp_path / "w.pt",
        "--config_path",
        "configs/wan_mini_window.yaml",
        "--num_frames",
        "15",
        "--step",
        "4",
        "--layer_indices",
        "3",
        "--blocks",
        "1",
        "4",
    )
    early, late = cache["attention_weights"]
    assert (early["key_frames"], late["key_frames"]) == (list(range(6)), [0, 1, 2, 9, 10, 11, 12, 13, 14])
    assert late["key_frames"] == visible_frames(cache["block_sizes"], 4, 9, 3)
    assert late["attn_weights"].shape[-1] == 9 * 16 and (late["attn_weights"].sum(-1) - 1).abs().max() < 1e-5
    view = open_call(cache, 1)
    assert view.captured == "window" and torch.from_numpy(view.frame_profile(3))[:, 3:9].isnan().all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--blocks", "2"], "block 2 is not in 0..1"),
        (["--blocks", "-3"], "block -3 is not in 0..1"),
        (["--steps", "0", "5"], "step 5 is not in 0..4"),
        (["--step", "1", "--steps", "2"], "--step and --steps exclude each other"),
        (["--layer_indices", "8"], "layer 8 is not in 0..7"),
    ],
)
def test_bad_input_is_one_line(flags, message, tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction.run, [*MINI, *flags, "--output_path", str(tmp_path / "out.pt")])
    said = capfd.readouterr().err.strip()
    assert ended.value.code == 2 and re.fullmatch(f"error: .*{message}", said), said
    assert not list(tmp_path.iterdir())

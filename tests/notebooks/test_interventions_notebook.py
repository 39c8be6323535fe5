"""interventions.ipynb from top to bottom, and the numbers that it shows of a causal atlas."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import executed

from experiments.analysis import effects
from experiments.analysis import reports as causal_reports
from experiments.caches import save_cache
from experiments.caches.formats import SCHEMA_VERSION

N, H, F = 3, 4, 6
COMMON = {
    "schema_version": SCHEMA_VERSION,
    "seed": 0,
    "prompt": "a",
    "num_frames": F,
    "num_frame_per_block": 3,
    "frame_seq_length": 2,
    "block_sizes": [3, 3],
    "num_heads": H,
    "model": "tiny",
    "weights": "base",
    "weights_file": None,
    "weights_sha256": "0",
    "is_logits": False,
    "interventions": {"edits": [], "words": "knock out the first frame", "hash": "0123456789abcdef"},
}


def causal_atlas(**changes):
    """Two prompts, the first with two seeds; effects count up over layers and heads; block 0 has none."""
    effect = torch.arange(N * H).view(1, N, H, 1).float().expand(3, N, H, F).clone()
    effect[..., :3] = torch.nan
    effect[2] *= 3
    runs = {"prompts": ["a", "a", "b"], "seeds": [0, 1, 0], "each": "head", "layers": [0, 1, 2]}
    tensors = {"effects": effect, "floor": torch.zeros(3, F), "between_seeds": torch.ones(3, F)}
    norms = {"head_norms": torch.rand(3, N, H, generator=torch.Generator().manual_seed(0))}
    return COMMON | {"format": "causal_atlas", "units": [*range(H)]} | runs | tensors | norms | changes


def effects_cache():
    latents = torch.zeros(F, 2, 4, 4)
    curves = {name: torch.arange(1.0, F + 1) for name in ("own_block", "total", "floor", "direct")}
    both = {"latents_base": latents, "latents_edited": latents, "between_seeds": torch.full((F,), 2.0)}
    return COMMON | {"format": "effects"} | both | curves


def test_seeds_of_a_prompt_are_averaged_before_prompts(tmp_path):
    save_cache(tmp_path / "causal.pt", causal_atlas())
    study = causal_reports.read_study(tmp_path / "causal.pt", tmp_path / "none.pt")
    assert study.effects.shape == (2, N, H) and not study.reason and not study.measures
    assert np.allclose(study.effect, 2 * np.arange(N * H).reshape(N, H))
    assert "with fewer than 16 prompts" in study.lines() and "knock out the first frame" in study.subtitle
    assert [one.name for one in study.maps()] == ["effect"]


def test_what_cannot_be_shown_says_why(tmp_path):
    said = causal_reports.read_study(tmp_path / "no.pt").reason
    make = "python experiments/run_causal_atlas.py (on a CPU add --config_path configs/wan_mini.yaml)"
    assert said.endswith(f"run: {make}")
    one = causal_atlas(each="layer", units=[0], head_norms=torch.ones(3, N, 1))
    save_cache(tmp_path / "layer.pt", one | {"effects": one["effects"][:, :, :1].contiguous()})
    assert "is of each layer" in causal_reports.read_study(tmp_path / "layer.pt").reason
    changes = causal_reports.changes_of(effects_cache())
    assert list(changes) == ["direct", "own block", "total", "floor"] and changes["total"][0] == 0.5


def test_a_measure_that_is_the_effect_correlates_with_it(tmp_path):
    save_cache(tmp_path / "causal.pt", causal_atlas())
    study = causal_reports.read_study(tmp_path / "causal.pt")
    study.measures["same"] = study.effect
    assert study.notes()["same"].startswith("ρ = 1.00 [1.00, 1.00]")
    assert effects.spearman(study.effect.ravel(), study.measures["same"].ravel()) == pytest.approx(1)


def test_the_notebook_runs_an_edit_and_shows_what_is_there(tmp_path):
    save_cache(tmp_path / "effects.pt", effects_cache())
    save_cache(tmp_path / "causal.pt", causal_atlas())
    config = (ROOT / "configs/wan_mini.yaml").read_text()
    (tmp_path / "short.yaml").write_text(config.replace("num_frames: 21", "num_frames: 9"))
    printed = executed.run(
        "interventions.ipynb",
        tmp_path,
        MODEL=str(tmp_path / "short.yaml"),
        CACHE_PATH=str(tmp_path / "effects.pt"),
        CAUSAL_ATLAS=str(tmp_path / "causal.pt"),
        ATLAS=str(tmp_path / "none.pt"),
        EDIT={"edit": "knockout", "frames": "first", "layers": 3, "passes": "denoise"},
    )
    assert "Knockout(layers=3" in printed and "direct: mean 1.8" in printed
    drawn = executed.figures(tmp_path)
    shown = {"strips.svg", "attention.svg", "effects.svg", "causal_atlas.svg", "hidden_shapes.svg"}
    assert set(drawn) == shown
    assert "edited: Knockout(layers=3" in executed.words(drawn["attention.svg"])

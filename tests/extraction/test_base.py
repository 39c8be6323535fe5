"""The base model's script on the miniature: layer caches and atlases of both branches, and bad input."""

import re

import pytest
import torch
from conftest import ROOT

from experiments import extract_attention_wan
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.extraction import project_files
from experiments.running import cli
from wan.config import MODELS, WAN_NEGATIVE_PROMPT, ModelConfig, load_config
from wan.errors import ConfigError

MINI = ["--ckpt_dir", "checkpoints/wan-mini"]
SHORT = [*MINI, "--num_frames", "9", "--num_steps", "4"]
FIELDS = {
    "format": "layer",
    "layer_index": 7,
    "weights": "base",
    "model": "wan-mini",
    "num_frames": 3,
    "orig_num_frames": 9,
    "vae_stride_t": 4,
    "block_sizes": [3],
    "step": 0,
    "timestep": 999.0,
    "is_clean_pass": False,
    "num_steps": 4,
    "guidance_scale": 1.5,
    "timestep_shift": 5.0,
    "config": {"height": 8, "width": 8},
    "weights_file": "diffusion_pytorch_model.safetensors",
    "last_block_query_frames": [0, 1, 2],
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
def test_the_layer_cache(tmp_path, capsys):
    extract_attention_wan.run([*SHORT, "--output_dir", str(tmp_path)])
    cache = load_cache(tmp_path / "layer7.pt")
    assert {name: cache[name] for name in FIELDS} == FIELDS
    names = {file["name"] for file in cache["files"]}
    assert {"diffusion_pytorch_model.safetensors", "tokenizer.json"} <= names
    full, uncond = cache["full_frame_attention"], cache["full_frame_attention_uncond"]
    assert full.shape == uncond.shape == (12, 3, 3) and full.isfinite().all() and uncond.isfinite().all()
    torch.testing.assert_close(cache["last_block_frame_attention"], full.mean(1))
    view = open_profiles(cache)
    assert view.query_frames == view.own_block == view.noise_frames == (0, 1, 2)
    assert view.context_frames == () and view.pass_label == "pass 0 (t = 999)"
    assert "next: open notebooks/extract_all_attention.ipynb" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_the_atlases_of_both_branches(tmp_path):
    ends = ["--all_layers", "--step", "first", "last", "--output_dir", str(tmp_path)]
    extract_attention_wan.run([*SHORT, *ends])
    cond, uncond = (load_cache(tmp_path / f"atlas_base{name}.pt") for name in ("", "_uncond"))
    assert (cond["branch"], uncond["branch"]) == ("cond", "uncond") and cond["layers"] == list(range(8))
    assert cond["pass_steps"] == [0, 3] and cond["pass_timesteps"][0] == 999
    assert (cond["frame_mass"].sum(-1) - 1).abs().max() < 1e-5
    one = ["--layer_index", "2", "--step", "3", "--output_dir", str(tmp_path)]
    extract_attention_wan.run([*SHORT, *one])
    layer = load_cache(tmp_path / "layer2.pt", mmap=False)
    assert torch.equal(layer["full_frame_attention"], cond["frame_logits"][2, 1])
    assert torch.equal(layer["full_frame_attention_uncond"], uncond["frame_logits"][2, 1])
    assert not torch.equal(cond["frame_logits"], uncond["frame_logits"])


def test_a_directory_chooses_its_settings(monkeypatch):
    sizes, mini = dict(MODELS), project_files.read_model_config
    monkeypatch.setattr(project_files, "read_model_config", lambda path: sizes.get(str(path)) or mini(path))
    for name, shift, guidance in (("Wan2.1-T2V-1.3B", 8, 6), ("Wan2.1-T2V-14B", 5, 5)):
        config = load_config(project_files.config_for(name))
        assert (config.model, config.base.shift, config.base.guidance_scale) == (name, shift, guidance)
        assert config.base.negative_prompt == WAN_NEGATIVE_PROMPT and config.base.num_steps == 50
    sizes["strange"] = ModelConfig(dim=96, ffn_dim=128, num_heads=6, num_layers=3)
    with pytest.raises(ConfigError, match=r"3 layers, 6 heads and dim 96 .* with --config_path"):
        project_files.config_for("strange")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_frames", "20"], r"20 video frames are not 4n \+ 1; try 17 or 21"),
        (["--layer_index", "8"], r"layer 8 is not in 0\.\.7"),
        (["--step", "50"], r"step '50' is not first, last, all or in 0\.\.49"),
        (["--step", "first", "last"], "a layer cache holds one step, not 2"),
        (["--all_layers", "--layer_index", "1"], "exclude each other"),
        (["--ckpt_dir", "nowhere"], "model directory nowhere not found; run: bash experiments/"),
        (["--config_path", "configs/wan_mini_lora.yaml"], "names a LoRA, .*lora_window.pt, and runs of the"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, message, tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(extract_attention_wan.run, [*MINI, "--output_dir", str(tmp_path / "out"), *flags])
    said = capfd.readouterr().err.strip()
    assert ended.value.code == 2 and "\n" not in said and re.search(message, said), said
    assert not list(tmp_path.rglob("*.pt"))

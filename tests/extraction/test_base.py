"""The base model's script on the miniature: layer caches and atlases of both branches, and bad input."""

import pytest
import torch
from helpers.refusals import refused

from experiments import extract_attention_wan
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.extraction import project_files
from wan.config import MODELS, WAN_NEGATIVE_PROMPT, ModelConfig, load_config
from wan.errors import ConfigError

MINI = ["--ckpt_dir", "checkpoints/wan-mini"]
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


@pytest.mark.slow
def test_a_layer_cache_and_the_atlases_of_both_branches(tmp_path, capsys):
    short = [*MINI, "--num_frames", "9", "--num_steps", "4", "--output_dir", str(tmp_path)]
    extract_attention_wan.run(short)
    assert "next: open notebooks/extract_all_attention.ipynb" in capsys.readouterr().out.splitlines()[-1]
    extract_attention_wan.run([*short, "--all_layers", "--step", "first", "last"])
    cache = load_cache(tmp_path / "layer7.pt")
    assert {name: cache[name] for name in FIELDS} == FIELDS
    names = {file["name"] for file in cache["files"]}
    assert {"diffusion_pytorch_model.safetensors", "tokenizer.json"} <= names
    full, uncond = cache["full_frame_attention"], cache["full_frame_attention_uncond"]
    assert full.shape == (12, 3, 3) and full.isfinite().all() and not torch.equal(full, uncond)
    torch.testing.assert_close(cache["last_block_frame_attention"], full.mean(1))
    view = open_profiles(cache)
    assert view.query_frames == view.own_block == view.noise_frames == (0, 1, 2)
    assert view.context_frames == () and view.pass_label == "pass 0 (t = 999)"
    for branch, name, of_layer in (("cond", "", full), ("uncond", "_uncond", uncond)):
        atlas = load_cache(tmp_path / f"atlas_base{name}.pt")
        assert atlas["branch"] == branch and atlas["layers"] == [*range(8)] and atlas["pass_steps"] == [0, 3]
        assert atlas["pass_timesteps"][0] == 999 and (atlas["frame_mass"].sum(-1) - 1).abs().max() < 1e-5
        assert torch.equal(of_layer, atlas["frame_logits"][7, 0])
        assert not torch.equal(atlas["frame_logits"][:, 0], atlas["frame_logits"][:, 1])


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
    refused(extract_attention_wan, [*MINI, "--output_dir", tmp_path / "out", *flags], capfd, message)
    assert not list(tmp_path.rglob("*.pt"))

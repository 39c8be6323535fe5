"""The base model's scripts, for real, on the miniature:
layer caches and atlases of both branches, and bad input.
"""

import contextlib
import io
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from experiments import extract_attention_wan
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.extraction import base as bidirectional
from experiments.extraction import project_files
from experiments.running import cli
from wan.blocks import latent_frames
from wan.config import MODELS, WAN_NEGATIVE_PROMPT, ModelConfig, load_config
from wan.errors import ConfigError

MINI = ["--ckpt_dir", "checkpoints/wan-mini"]
SHORT = [*MINI, "--num_frames", "9", "--num_steps", "4"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[dict, str, Path]:
    """The layer cache of a run without flags but the folders, what the run says, and its file."""
    path, said = tmp_path_factory.mktemp("base") / "layer7.pt", io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(said):
        extract_attention_wan.run([*MINI, "--output_dir", str(path.parent)])
    return load_cache(path), said.getvalue(), path


@pytest.mark.beside
def test_the_shell_script_makes_the_same_bytes(made, tmp_path):
    command = ["bash", "experiments/extract_attention.sh", "checkpoints/wan-mini", "", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "layer7.pt").read_bytes() == made[2].read_bytes()


def test_the_layer_cache(made):
    cache, said, _ = made
    assert (cache["format"], cache["layer_index"], cache["weights"], cache["model"]) == (
        "layer",
        7,
        "base",
        "wan-mini",
    )
    assert (cache["num_frames"], cache["orig_num_frames"], cache["vae_stride_t"], cache["block_sizes"]) == (
        6,
        21,
        4,
        [6],
    )
    assert (cache["step"], cache["timestep"], cache["is_clean_pass"]) == (0, 999.0, False)
    assert (cache["num_steps"], cache["guidance_scale"], cache["timestep_shift"]) == (50, 1.5, 5.0)
    assert (cache["config"], cache["device"], cache["dtype"]) == ({"height": 8, "width": 8}, "cpu", "float32")
    assert {"diffusion_pytorch_model.safetensors", "tokenizer.json"} <= {
        file["name"] for file in cache["files"]
    }
    assert cache["weights_file"] == "diffusion_pytorch_model.safetensors" and cache[
        "last_block_query_frames"
    ] == [3, 4, 5]
    full, uncond = cache["full_frame_attention"], cache["full_frame_attention_uncond"]
    assert full.shape == uncond.shape == (12, 6, 6) and full.isfinite().all() and uncond.isfinite().all()
    torch.testing.assert_close(cache["last_block_frame_attention"], full[:, 3:].mean(1))
    assert said.splitlines()[-1].startswith(
        "next: open notebooks/extract_all_attention.ipynb and set DATA_PATH = "
    )


def test_nothing_is_context_in_a_bidirectional_run(made):
    view = open_profiles(made[0])
    assert view.query_frames == (3, 4, 5) and view.own_block == view.noise_frames == tuple(range(6))
    assert view.context_frames == () and view.pass_label == "pass 0 (t = 999)"


def test_a_base_run_names_no_lora_and_no_policy():
    config = load_config("configs/wan_mini_lora.yaml")
    assert config.lora_path
    one = bidirectional.as_one_block(
        replace(config, local_attn_size=-1, sink_size=0, cache_policy={"name": "full"})
    )
    assert (one.lora_path, one.lora_rank, one.lora_alpha, one.cache_policy) == (None,) * 4


def test_the_atlases_of_both_branches(tmp_path):
    extract_attention_wan.run(
        [*SHORT, "--all_layers", "--step", "first", "last", "--output_dir", str(tmp_path)]
    )
    cond, uncond = (load_cache(tmp_path / f"atlas_base{name}.pt") for name in ("", "_uncond"))
    assert (cond["branch"], uncond["branch"]) == ("cond", "uncond") and cond["layers"] == list(range(8))
    assert cond["pass_steps"] == [0, 3] and cond["pass_timesteps"][0] == 999
    assert cond["frame_logits"].shape == cond["frame_mass"].shape == (8, 2, 12, 3, 3)
    assert (cond["frame_mass"].sum(-1) - 1).abs().max() < 1e-5
    extract_attention_wan.run([*SHORT, "--layer_index", "2", "--step", "3", "--output_dir", str(tmp_path)])
    layer = load_cache(tmp_path / "layer2.pt")
    assert torch.equal(layer["full_frame_attention"], cond["frame_logits"][2, 1])
    assert torch.equal(layer["full_frame_attention_uncond"], uncond["frame_logits"][2, 1])
    assert not torch.equal(cond["frame_logits"], uncond["frame_logits"])
    view = open_profiles(cond, step=3)
    assert view.pass_label == f"pass 3 (t = {cond['pass_timesteps'][1]:g})" and view.context_frames == ()


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    made = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        extract_attention_wan.run([*SHORT, "--seed", seed, "--output_dir", str(tmp_path / name)])
        made.append((tmp_path / name / "layer7.pt").read_bytes())
    assert made[0] == made[1] != made[2]


def test_a_directory_chooses_its_settings(monkeypatch):
    sizes = dict(MODELS)
    mini = bidirectional.checkpoint.read_model_config
    monkeypatch.setattr(
        bidirectional.checkpoint, "read_model_config", lambda path: sizes.get(str(path)) or mini(path)
    )
    for name, shift, guidance in (("Wan2.1-T2V-1.3B", 8, 6), ("Wan2.1-T2V-14B", 5, 5)):
        config = load_config(project_files.config_for(name))
        assert (config.model, config.base.shift, config.base.guidance_scale) == (name, shift, guidance)
        assert config.base.negative_prompt == WAN_NEGATIVE_PROMPT and config.base.num_steps == 50
        assert bidirectional.choose_layer(bidirectional.replace(config, ckpt_dir=name), None) == 20
    sizes["strange"] = ModelConfig(dim=96, ffn_dim=128, num_heads=6, num_layers=3)
    with pytest.raises(ConfigError, match=r"3 layers, 6 heads and dim 96 .* with --config_path"):
        project_files.config_for("strange")


def test_a_config_is_enough(tmp_path):
    extract_attention_wan.run(
        ["--config_path", "configs/wan_mini.yaml", *SHORT[2:], "--output_dir", str(tmp_path)]
    )
    assert load_cache(tmp_path / "layer7.pt")["model"] == "wan-mini"


@pytest.mark.parametrize(("video", "latent"), [(1, 1), (5, 2), (21, 6), (81, 21)])
def test_video_frames(video, latent):
    assert latent_frames(video) == latent


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_frames", "20"], r"20 video frames are not 4n \+ 1; try 17 or 21"),
        (["--num_frames", "0"], "num_frames is 0, not in 1..65533"),
        (["--layer_index", "8"], r"layer 8 is not in 0\.\.7"),
        (["--step", "50"], r"step '50' is not first, last, all or in 0\.\.49"),
        (["--step", "middle"], "step 'middle' is not first, last"),
        (["--step", "first", "last"], "a layer cache holds one step, not 2"),
        (["--all_layers", "--layer_index", "1"], "exclude each other"),
        (["--num_steps", "0"], "num_steps is 0, not in 1..10000"),
        (
            ["--ckpt_dir", "nowhere"],
            "model directory nowhere not found; run: bash experiments/download_weights.sh",
        ),
        (["--config_path", "no.yaml"], "config no.yaml not found"),
        (["--config_path", "configs/wan_mini_lora.yaml"], "names a LoRA, .*lora_window.pt, and runs of the"),
        (["--frames", "21"], "unrecognized arguments: --frames 21"),
        (["--device", "quantum"], "device 'quantum' is not one of auto, cpu"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, message, tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(extract_attention_wan.run, [*MINI, "--output_dir", str(tmp_path / "out"), *flags])
    said = capfd.readouterr().err.strip()
    assert ended.value.code == 2 and "\n" not in said and re.search(message, said), said
    assert not list(tmp_path.rglob("*.pt"))


def test_the_shell_script_without_a_directory():
    done = subprocess.run(
        ["bash", "experiments/extract_attention.sh"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: usage") and done.stderr.count("\n") == 1

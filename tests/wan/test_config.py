"""Block structure, settings, and the configurations of the family."""

import json
from dataclasses import replace

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from experiments.benchmarks import harness, rollout
from wan.blocks import block_ranges, block_sizes
from wan.config import MODELS, BaseSampling, ModelConfig, RunConfig, load_config
from wan.errors import ConfigError


@given(frames=st.integers(-5, 200), per_block=st.integers(1, 8), independent=st.booleans())
def test_block_sizes_add_up_or_say_what_would(frames, per_block, independent):
    try:
        sizes = block_sizes(frames, per_block, independent)
    except ConfigError as error:
        suggestions = [int(word) for word in str(error).split("try ")[1].split(" or ")]
        assert all(sum(block_sizes(n, per_block, independent)) == n for n in suggestions)
    else:
        assert sum(sizes) == frames
        assert [f for block in block_ranges(sizes) for f in block] == list(range(frames))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_frames": 0}, r"num_frames 0 is not int in 1..16384"),
        ({"gpus": 4097}, "gpus 4097 is not"),
        ({"height": 1025}, "height 1025 is not int in 1..1024"),
        ({"seed": 2**63}, "seed 9223372036854775808 is not int"),
        ({"device": "mps"}, "not one of auto, cpu, cuda, cuda:N"),
        ({"dtype": "float64"}, "dtype 'float64' is not one of"),
        ({"sampler": "x"}, "sampler 'x' is not one of blocks, rolling_forcing"),
        ({"sampler": "rolling_forcing", "gpus": 2}, "knows no gpus above 1"),
        ({"sampler": "rolling_forcing", "interventions": [1]}, "knows no interventions"),
        ({"lora_rank": 4}, "are of a file; give lora_path"),
        ({"lora_path": "a", "lora_alpha": 0.0}, "lora_alpha 0.0 is not float"),
        ({"layer_indices": []}, "are not 1..256 in 0..255"),
        ({"layer_indices": [0] * 257}, "are not 1..256"),
        ({"layer_index": 256}, "256. are not 1..256 in 0..255"),
        ({"denoising_step_list": [500, 750]}, "does not go down within 1000..1"),
        ({"denoising_step_list": [1001]}, "does not go down"),
        ({"first_block_steps": [1000, -1]}, "first_block_steps .* does not go down"),
        ({"timestep_shift": 0.0}, "timestep_shift 0.0 is not"),
        ({"timestep_shift": float("nan")}, "timestep_shift nan is not"),
        ({"context_noise": 1001}, "context_noise 1001 is not"),
        ({"step": 5}, "step 5 is not in 0..4; 4 is the clean pass"),
        ({"prompt": "a\0b"}, "prompt has a NUL character at 1"),
        ({"prompt": "x" * 100_001}, "prompt .* is not text in 0..100000 characters"),
        ({"prompt": "\ud800"}, "prompt is not text in UTF-8"),
        ({"ckpt_dir": " "}, "ckpt_dir . . is not text in 1..4096 characters"),
    ],
)
def test_values_that_no_run_has(settings, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(**settings)


def test_the_ends_of_what_a_run_may_have():
    steps = {"denoising_step_list": [1000, 1, 0], "first_block_steps": [1], "step": 3, "context_noise": 1000}
    config = RunConfig(**steps, seed=-(2**63), layer_indices=[0] * 256, layer_index=255, height=1024)
    assert (
        config.num_passes == 4
        and config.passes_of_block(0) == [1, 3]
        and config.passes_of_block(1) == [0, 1, 2, 3]
    )
    sampling = BaseSampling(shift=1000.0, num_steps=10_000, guidance_scale=-1000.0, num_video_frames=1)
    assert sampling.layer_index == 20
    for wrong in (
        {"num_steps": 0},
        {"guidance_scale": 1001.0},
        {"num_video_frames": 2},
        {"layer_index": 256},
    ):
        with pytest.raises(ConfigError):
            BaseSampling(**wrong)


def test_the_released_models():
    small, large = MODELS["Wan2.1-T2V-1.3B"], MODELS["Wan2.1-T2V-14B"]
    assert (small.head_dim, large.head_dim) == (128, 128)
    assert small.tokens_per_frame(60, 104) == 1560
    with pytest.raises(ConfigError, match="61 x 104"):
        small.tokens_per_frame(61, 104)


def test_flags_override_the_yaml_and_none_does_not(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_frames: 9\nseed: 7\n")
    config = load_config(path, {"seed": 1, "num_frames": None})
    assert (config.seed, config.num_frames, config.prompt) == (1, 9, RunConfig().prompt)
    path.write_text("independent_first_frame: true\nnum_frames: 9\n")
    with pytest.warns(UserWarning, match="9 frames become 7"):
        assert load_config(path).block_sizes == [1, 3, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_frame: 9\n", "unknown key 'num_frame'; did you mean num_frames"),
        ("num_frames: many\n", "num_frames"),
        ("- 1\n", "mapping"),
        ("a: [\n", "not a YAML"),
    ],
)
def test_bad_yaml_is_one_clear_line(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


# The family.

RELEASED = rollout.released()


@pytest.mark.parametrize("name", [*RELEASED, "wan_mini_lora", "wan_mini_framewise"])
def test_a_configuration_says_all_that_its_model_needs(name):
    path = ROOT / "configs" / f"{name}.yaml"
    text, config = path.read_text(encoding="utf-8"), load_config(path)
    assert config.checkpoint_path and config.num_passes == 1 + len(
        {*config.denoising_step_list, *(config.first_block_steps or ())}
    )
    for key in ("num_frame_per_block", "denoising_step_list", "warp_denoising_step", "timestep_shift"):
        assert f"\n{key}:" in text  # said, and not a default
    if config.lora_path:
        assert config.lora_rank and config.lora_alpha


@pytest.mark.beside
def test_every_one_runs_plain_and_captured(tmp_path, monkeypatch):
    """At tiny shapes."""
    output = tmp_path / "models.json"
    tiny = ModelConfig(dim=48, ffn_dim=64, num_heads=3, num_layers=2, text_dim=24)
    monkeypatch.setattr(harness, "MODELS", dict.fromkeys(MODELS, tiny))
    small = lambda *given: replace(load_config(*given), height=4, width=4)  # noqa: E731
    monkeypatch.setattr(rollout, "load_config", small)
    rollout.run(["--what", "models", "--device", "cpu", "--repeats", "1", "--output_path", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert list(rows) == [name for model in RELEASED for name in (model, f"{model}, mass")]
    assert all(row["same_bits"] for row in rows.values())

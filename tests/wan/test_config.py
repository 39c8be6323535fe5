"""Block structure, settings, and the configurations of the family."""

import pytest
import torch
from conftest import ROOT
from helpers.rollouts import TINY, drawn, tiny_pipeline

from experiments.session import pipeline_of
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.config import MODELS, BaseSampling, RunConfig, load_config
from wan.errors import ConfigError

REFUSED = {
    "num_frames 0 should be greater than or equal to 1": {"num_frames": 0},
    "seed 9223372036854775808 should be": {"seed": 2**63},
    "seed -1 should be greater than or equal to 0": {"seed": -1},
    "prompt '' should be a text; without one, prompt_embeds takes a file": {"prompt": ""},
    "prompt ' ' should be a text": {"prompt": " "},
    "should be one of auto, cpu, cuda, cuda:N": {"device": "mps"},
    "dtype 'float64' should be 'auto'": {"dtype": "float64"},
    "knows no gpus above 1": {"sampler": "rolling_forcing", "gpus": 2},
    "knows no interventions": {"sampler": "rolling_forcing", "interventions": [1]},
    "lora_alpha 0.0 should be greater": {"lora_path": "a", "lora_alpha": 0.0},
    r"layer_indices \[\] should have at least 1 item": {"layer_indices": []},
    "does not go down within 1000..1": {"denoising_step_list": [500, 750]},
    "first_block_steps .* does not go down": {"first_block_steps": [1000, -1]},
    "timestep_shift nan should be": {"timestep_shift": float("nan")},
    "step 5 is not in 0..4; 4 is the clean pass": {"step": 5},
    "prompt .* has a NUL character at 1": {"prompt": "a\0b"},
    "prompt .* should be": {"prompt": "\ud800"},
    "ckpt_dir . . should name a file or folder": {"ckpt_dir": " "},
}


def test_values_that_no_run_has_and_the_ends_of_what_one_may_have():
    for message, settings in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            RunConfig(**settings)
    for wrong in ({"num_steps": 0}, {"guidance_scale": 1001.0}, {"num_video_frames": 2}, {"layer_index": -1}):
        with pytest.raises(ConfigError):
            BaseSampling(**wrong)
    steps = {"denoising_step_list": [1000, 1, 0], "first_block_steps": [1], "step": 3, "context_noise": 1000}
    config = RunConfig(**steps, seed=2**63 - 1, layer_indices=range(256), layer_index=255, height=1024)
    assert [config.passes_of_block(block) for block in (0, 1)] == [[1, 3], [0, 1, 2, 3]]
    BaseSampling(shift=1000.0, num_steps=10_000, guidance_scale=-1000.0, num_video_frames=1)


def test_the_released_models():
    small, large = MODELS["Wan2.1-T2V-1.3B"], MODELS["Wan2.1-T2V-14B"]
    assert (small.head_dim, large.head_dim) == (128, 128)
    assert small.tokens_per_frame(60, 104) == 1560
    with pytest.raises(ConfigError, match="488x832"):
        small.tokens_per_frame(61, 104)


def test_flags_override_the_yaml_and_none_does_not_and_a_bad_one_is_one_clear_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_frames: 9\nseed: 7\n")
    config = load_config(path, {"seed": 1, "num_frames": None})
    assert (config.seed, config.num_frames, config.prompt) == (1, 9, RunConfig().prompt)
    path.write_text("independent_first_frame: true\nnum_frames: 9\n")
    with pytest.warns(UserWarning, match="9 frames become 7"):
        assert load_config(path).block_sizes == [1, 3, 3]
    unknown = "unknown key 'num_frame'; did you mean num_frames"
    far = "unknown key 'zzz'; the nearest of 46 known ones: .*, .*, [a-z_]*; wan/config.py has all of them$"
    bad = {
        "num_frame: 9": unknown,
        "zzz: 9": far,
        "num_frames: many": "num_frames",
        "- 1": "mapping",
        "a: [": "the YAML of settings cannot",
    }
    for text, message in bad.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_wrong_flag_is_not_blamed_on_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_frames: 9\nsize: 64x64\n")
    for flag, message in (
        ({"num_frames": 0}, "num_frames 0 should be"),
        ({"layer_indices": [-1]}, r"layer_indices \[-1\] "),
        ({"step": 9}, "step 9 is not in 0..4"),
        ({"num_frames": 5}, "5 frames do not fit blocks of 3"),
        ({"size": "65x64"}, "65x64 pixels are not"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            load_config(path, flag)
    for text in ("num_frames: 0", "size: 65x64"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"^{path}: "):
            load_config(path, {"seed": 1})


RELEASED = [p.stem for p in sorted((ROOT / "configs").glob("*.yaml")) if "\nrelease:" in p.read_text("utf-8")]


@pytest.mark.parametrize("name", [*RELEASED, "wan_mini_framewise"])
def test_a_configuration_says_all_that_its_model_needs_and_runs(name):
    """Plain and captured, with a tiny model; a published model says its steps and blocks itself."""
    path = ROOT / "configs" / f"{name}.yaml"
    config, text = load_config(path), path.read_text(encoding="utf-8")
    assert config.checkpoint_path and (not config.lora_path or (config.lora_rank and config.lora_alpha))
    for key in ("num_frame_per_block", "denoising_step_list", "warp_denoising_step", "timestep_shift"):
        assert f"\n{key}:" in text
    sizes = {"local_attn_size": config.local_attn_size, "sink_size": config.sink_size}
    pipeline = pipeline_of(tiny_pipeline(**sizes).model, config)
    noise, embeds = drawn(1, sum(config.block_sizes[:3]), 16, 2, 10), drawn(1, 4, TINY["text_dim"])

    def run() -> torch.Tensor:
        fresh = torch.Generator().manual_seed(1)
        return pipeline.inference(noise, prompt_embeds=embeds, generator=fresh)[1]

    plain = run()
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", layers=[1]) as calls:
        assert torch.equal(run(), plain)
    for call in calls:
        mass = call["frame_mass"].sum(-1)
        torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-5, rtol=0)


def test_sizes_are_given_in_pixels_and_refused_with_the_nearest_ones(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("size: 64x80\n")
    assert (load_config(path).height, load_config(path).width) == (8, 10)
    assert load_config(path, {"size": "480x832", "seed": None}).height == 60
    for size, message in (
        ("490x832", "490x832 pixels are not in whole patches of 16 x 16: take 480x832 or 496x832"),
        ("3x3", "take 16x16$"),
        ("480", "size '480' is not a height and a width in pixels, such as 480x832"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(path, {"size": size})
    with pytest.raises(ConfigError, match=r"488x832 pixels .* take 480x832 or 496x832"):
        MODELS["Wan2.1-T2V-1.3B"].tokens_per_frame(61, 104)

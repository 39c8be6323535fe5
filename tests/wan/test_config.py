"""Block structure and settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan.blocks import block_ranges, block_sizes
from wan.config import MODELS, ModelConfig, RunConfig, load_config
from wan.errors import ConfigError


@pytest.mark.parametrize(
    ("frames", "per_block", "independent", "expected"),
    [
        (21, 3, False, [3] * 7),
        (19, 3, True, [1] + [3] * 6),
        (1, 3, True, [1]),
        (3, 1, False, [1, 1, 1]),
        (72, 3, False, [3] * 24),
    ],
)
def test_block_sizes(frames, per_block, independent, expected):
    assert block_sizes(frames, per_block, independent) == expected


@pytest.mark.parametrize(
    ("frames", "independent", "message"),
    [
        (20, False, "try 18 or 21"),
        (21, True, "independent first frame; try 19 or 22"),
        (0, False, "try 3 or 6"),
        (2, False, "try 3 or 6"),
        (-4, True, "try 1 or 4"),
    ],
)
def test_frames_that_do_not_fit_name_those_that_do(frames, independent, message):
    with pytest.raises(ConfigError, match=message):
        block_sizes(frames, 3, independent)


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


def test_the_released_models():
    small, large = MODELS["Wan2.1-T2V-1.3B"], MODELS["Wan2.1-T2V-14B"]
    assert (small.head_dim, large.head_dim) == (128, 128)
    assert small.tokens_per_frame(60, 104) == 1560
    with pytest.raises(ConfigError, match="61 x 104"):
        small.tokens_per_frame(61, 104)


@pytest.mark.parametrize(
    "sizes",
    [
        {"dim": 100, "num_heads": 12},
        {"dim": 36, "num_heads": 12},
        {"dim": 192, "num_heads": 12, "patch_size": (2, 2, 2)},
    ],
)
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ConfigError):
        ModelConfig(ffn_dim=8, num_layers=1, **sizes)


@pytest.mark.parametrize("name", ["self_forcing_dmd.yaml", "wan_mini.yaml"])
def test_shipped_configs(name):
    config = load_config(f"configs/{name}")
    assert (
        config.num_frames == 21
        and config.block_sizes == [3] * 7
        and config.num_passes == 5
        and config.seed == 42
    )


def test_flags_override_the_yaml_and_none_does_not(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_frames: 9\nseed: 7\n")
    config = load_config(path, {"seed": 1, "num_frames": None})
    assert (config.seed, config.num_frames, config.prompt) == (1, 9, RunConfig().prompt)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_frame: 9\n", "unknown key 'num_frame'; known keys: .*num_frames"),
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


def test_a_config_that_is_not_there():
    with pytest.raises(ConfigError, match=r"nowhere.yaml not found; configs/ holds: .*wan_mini.yaml"):
        load_config("configs/nowhere.yaml")

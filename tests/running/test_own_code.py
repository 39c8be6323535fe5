"""The README's block and those of docs/own_code.md run as they stand, and say what the page says they say."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from diffusers import WanPipeline
from helpers.checkpoints import small_wan_pipeline
from matplotlib.figure import Figure

from experiments import capture, load, run_extraction_all
from experiments.caches import load_cache
from experiments.running import cli
from wan.errors import ConfigError
from wan.files import read_yaml

BLOCK = re.compile(r"```python\n(.*?)```", re.S)
SHOWN = re.compile(r"^(.+?)  # -> (.+)$")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Some folder that is not the project's."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def pipe():
    return load("wan_mini", num_frames=6)


def test_what_a_rollout_takes_anew_is_honoured(pipe, monkeypatch):
    plain = pipe.generate("a red circle", seed=3)
    schedule = [{"frame": 3, "prompt": "a blue square"}]
    monkeypatch.setattr(pipe, "config", replace(pipe.config, seed=3, prompt_schedule=schedule))
    switched = pipe.generate("a red circle")
    assert torch.equal(switched.latents[:, :3], plain.latents[:, :3])
    assert not torch.equal(switched.latents, plain.latents)
    loaded, config = pipe._session, switched.extraction.config
    assert torch.equal(loaded.rollout(config), switched.latents)
    pipe.config.prompt_schedule.clear()
    assert torch.equal(pipe.generate("a red circle").latents, plain.latents)
    pipe.config.denoising_step_list.append(0)  # in place
    with pytest.raises(ConfigError, match=r"denoising_step_list is .* load it again"):
        pipe.generate("a red circle")
    pipe.config.denoising_step_list.pop()


@pytest.mark.beside
def test_the_readmes_block_runs_from_any_folder(elsewhere):
    names: dict = {}
    for block in BLOCK.findall((ROOT / "README.md").read_text().partition("## Five lines")[2]):
        exec(block, names)
    assert (
        not torch.equal(names["run"].latents, names["edited"].latents)
        and Path("outputs/edited.mp4").is_file()
    )
    assert names["run"].latents.shape == (1, 21, 16, 8, 8) and names["run"].video.shape == (81, 64, 64, 3)
    cache = load_cache("cache/mine.pt", expect=("atlas",))
    assert cache["layers"] == [1, 5] and cache["prompt"].startswith("a red circle")
    assert isinstance(names["atlas"].plot(layer=5), Figure)


def test_the_pages_blocks_run_and_show_what_they_say(elsewhere, monkeypatch):
    monkeypatch.setattr(WanPipeline, "from_pretrained", lambda name: small_wan_pipeline())
    names: dict = {}
    shown = 0
    for block in BLOCK.findall((ROOT / "docs/own_code.md").read_text()):
        for part in re.split(r"(?m)^(.+  # -> .+)$", block):
            if found := SHOWN.match(part):
                shown += 1
                value, expected = eval(found[1], names), eval(found[2], names)
                assert value == expected, part
            else:
                exec(part, names)
    assert shown == 16


def test_the_atlas_has_the_bytes_that_the_script_writes(elsewhere, pipe):
    with capture(pipe, key_curve=True, cross=True, rope_bands=True) as seen:
        first = pipe.generate("a red circle", seed=7)
    seen.atlas().save("ours/deep/atlas.pt")
    assert "  key_curve [layers 8, passes 5, heads 12, key tokens 96]: q·k/√D of" in repr(seen.atlas())
    config = str(ROOT / "configs/wan_mini.yaml")
    flags = ["--ckpt_dir", str(ROOT / "checkpoints/wan-mini"), "--num_frames", "6", "--quiet", "--seed", "7"]
    flags += ["--checkpoint_path", str(ROOT / "checkpoints/wan-mini/self_forcing_mini.pt")]
    flags += ["--prompt", "a red circle", "--key_curve", "--cross", "--rope_bands"]
    cli.main(run_extraction_all.run, ["--config_path", config, *flags, "--output_path", "theirs.pt"])
    assert (elsewhere / "ours/deep/atlas.pt").read_bytes() == (elsewhere / "theirs.pt").read_bytes()
    assert torch.equal(pipe.generate("a red circle", seed=7).latents, first.latents)  # nobody looks now
    assert not torch.equal(pipe.generate("a red circle", seed=8).latents, first.latents)
    assert len(seen.runs) == 1


def test_models_and_policies_are_given_by_name_file_or_settings(elsewhere):
    sources = "wan_mini", ROOT / "configs/wan_mini.yaml", ROOT / "checkpoints/wan-mini"
    by_name, by_path, by_folder = (load(source, num_frames=6) for source in sources)
    assert by_name.config == by_path.config == by_folder.config
    published = ROOT / "configs/policies/deep_sink.yaml"
    relative = "configs/policies/deep_sink.yaml"  # below the project, as a config's paths are
    by_name, *others = (load("wan_mini", cache_policy=p) for p in ("deep_sink", relative, published))
    assert by_name.config.cache_policy == read_yaml(published)
    assert all(pipe.config == by_name.config for pipe in others)
    windowed = load("wan_mini_lora", cache_policy={"name": "full"}).config  # that config has a window
    assert windowed == load("wan_mini_lora", cache_policy="full").config
    assert windowed.policy.name == "full"
    with pytest.raises(ConfigError, match="leave them out where cache_policy is given"):
        load("wan_mini", cache_policy="full", local_attn_size=9)


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("wan_maxi", {}, "wan_maxi is no config, its path, or a directory of weights; did you mean wan_mini"),
        ("wan_mini", {"num_frame": 6}, r"^num_frame is no setting of a run; did you mean num_frames\?"),
        (
            "wan_mini",
            {"cache_policy": "deep"},
            "'deep' is no file and no policy; did you mean deep_sink",
        ),
        ("wan_mini", {"num_frames": "many"}, "Value .many. of type .str. could not be converted"),
    ],
)
def test_bad_input_is_refused_in_one_line(elsewhere, source, settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(source, **settings).generate()
    assert "\n" not in str(caught.value)


def test_a_capture_inside_a_capture_is_refused(pipe):
    said = "captured already; ask one capture for all"
    with capture(pipe, [0]), pytest.raises(ConfigError, match=said), capture(pipe, [1]):
        pass
    with capture(pipe, [1]) as seen, capture(load("wan_mini", num_frames=6), [0]):
        assert pipe._seen is seen  # one of another pipe is no matter; what was refused left nothing behind

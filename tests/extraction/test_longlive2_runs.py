"""A tiny LongLive 2.0 through everything: prompts of blocks and items, pictures, caches, notebook, files."""

from dataclasses import replace

import imageio.v3 as iio
import pytest
import torch
from conftest import ROOT
from diffusers import AutoencoderKLWan
from helpers.longlive2_oracle import MARK
from helpers.tiny_longlive2 import SMALL_VAE

from experiments import capture, load, x0_lens
from experiments.caches import load_cache
from experiments.caches.blocks import LatentBlocks
from experiments.caches.mp4 import count_frames
from experiments.extraction.long_rollout import rollout_from
from experiments.extraction.video import first_latents, load_vae
from experiments.run_extraction_figure4 import run as extract_figure4
from experiments.studies.model_check import check
from wan.checkpoint import VAE_FILE, WIDE_VAE_FILE, CheckpointError
from wan.config import load_config
from wan.errors import ConfigError
from wan.interventions import Knockout, intervene
from wan.names import wide_vae_names
from wan.vae import VAE, WIDE_SIZES

pytestmark = pytest.mark.slow
SHOTS = ["a dog", "a dog", MARK + "a cat", "a cat", "a bird"]
LATER = [{"frame": 8 * block, "prompt": SHOTS[block]} for block in (2, 3, 4)]


@pytest.fixture(scope="module")
def session(tiny_longlive2):
    return tiny_longlive2.session


@pytest.fixture(scope="module")
def shots(session):
    return session.generate([SHOTS], seed=1)[0]


@pytest.fixture
def picture(tmp_path):
    pixels = (torch.rand(64, 96, 3, generator=torch.Generator().manual_seed(0)) * 255).byte()
    iio.imwrite(tmp_path / "first.png", pixels.numpy())
    return tmp_path / "first.png"


def test_its_config_is_the_release_and_a_directory_of_its_sizes_finds_it():
    config = load_config(ROOT / "configs/longlive2.yaml")
    assert (config.height, config.width) == (44, 80) and config.block_sizes == [8] * 4
    sized = load_config(ROOT / "configs/longlive2.yaml", {"size": "704x1280"})
    assert (sized.height, sized.width) == (44, 80)
    with pytest.raises(
        ConfigError, match="700x1280 pixels are not in whole patches of 32 x 32: take 672x1280"
    ):
        load_config(ROOT / "configs/longlive2.yaml", {"size": "700x1280"})


def test_prompts_of_blocks_are_a_schedule(session, shots):
    config = replace(session.config, prompt="a dog", prompt_schedule=LATER)
    assert torch.equal(session.generate(config=config, seed=1).latents, shots.latents)
    keeps = [text.removeprefix(MARK) for text in SHOTS]
    no_cut = session.generate([keeps], seed=1)[0]
    assert torch.equal(no_cut.latents[:, :16], shots.latents[:, :16])
    assert not torch.equal(no_cut.latents[:, 16:], shots.latents[:, 16:])
    with pytest.raises(ConfigError, match="3 prompts for 5 blocks; give a prompt for each block"):
        session.generate([SHOTS[:3]])
    with pytest.raises(ConfigError, match="frame 12 does not begin a later block"):
        session.generate(config=replace(config, prompt_schedule=[{"frame": 12, "prompt": MARK}]))


def test_the_shots_of_a_batch_are_the_first_videos(session, shots):
    """Each video has its own prompts; the mark of a later one begins no shot, which its fingerprint tells."""
    others = ["a bird", MARK + "a dog", "a dog", "a dog", "a dog"]
    first, other = session.generate([SHOTS, others], seed=1)
    assert torch.equal(first.latents, shots.latents)
    alone = session.generate([others], seed=1)[0]
    assert torch.equal(other.latents[:, :8], alone.latents[:, :8])
    assert not torch.equal(other.latents[:, 8:16], alone.latents[:, 8:16])
    assert first.common["fingerprint"] == shots.common["fingerprint"]
    assert other.common["fingerprint"] != alone.common["fingerprint"]
    mixed = session.generate(["a dog", SHOTS], seed=1)
    assert torch.equal(mixed[1].latents[:, :16], shots.latents[:, :16])


def test_a_picture_is_the_first_frame_of_block_0(session, picture):
    expected = first_latents(picture, session.config, 48, lambda: session.vae)
    with capture(session, "x_t") as seen:
        run = session.generate(seed=1, first_frames=picture)
    assert run.latents.shape == (1, 40, 48, 4, 6) and torch.equal(run.latents[:, :1], expected)
    x_t = seen["x_t"].stack()  # [runs, blocks, steps, F, C, h, w]
    assert torch.equal(x_t[0, 0, 0, 0], expected[0, 0])
    plain = session.generate(seed=1)
    assert not torch.equal(run.latents[:, 1:], plain.latents[:, 1:])
    again = session.generate(seed=1, first_frames=run.latents[:, :8])  # a whole block, as everywhere
    assert torch.equal(again.latents, run.latents)
    with pytest.raises(ConfigError, match=r"has 3 latent frames; .* of 1, 8, 16, 24, 32 frames"):
        session.generate(first_frames=run.latents[:, :3])


def test_a_held_frame_is_clean_to_everyone_who_looks(session, picture):
    """The lens of the last layer is x0; calls tell the timestep of each frame."""
    config = replace(session.config, first_frames=str(picture), num_frames=16)
    begun = session.replaced(config=config)
    lens = x0_lens(begun, seed=1, layers=[1], blocks=[0])
    torch.testing.assert_close(lens.latents[1, 0, 3], lens.run.latents[:, :8], atol=1e-5, rtol=0)
    with capture(begun, granularity="key", layers=[1], blocks=[0], steps=[0]) as seen:
        begun.generate(seed=1)
    [call] = seen.calls
    assert call["frame_timesteps"] == {0: 0.0} | dict.fromkeys(range(1, 8), 999.0)


@pytest.mark.parametrize("first", [1, 3, 4])
def test_an_interrupted_video_goes_on_with_the_same_shots(session, shots, first, tmp_path):
    config = replace(session.config, prompt="a dog", prompt_schedule=LATER, seed=1)
    latents = LatentBlocks(tmp_path, "mine", config.block_sizes, (48, 4, 6), torch.float32)
    for block in range(first):
        latents.write(block, shots.latents[0, 8 * block : 8 * block + 8])
    parts = [x0 for _, x0 in rollout_from(first, session, config, latents)]
    assert torch.equal(torch.cat(parts, 1), shots.latents)


def test_captures_and_edits(session, shots):
    """Block 4 sees the sink, the first block of the shot, the block before and itself."""
    with capture(session) as seen:
        run = session.generate([SHOTS], seed=1)[0]
    assert torch.equal(run.latents, shots.latents)
    matrix = seen.atlas()["frame_mass"][-1, -1, 0, -1]  # of the last frame, in the clean pass
    frames = [frame for frame, mass in enumerate(matrix.tolist()) if mass > 0]
    assert frames == [*range(8), *range(16, 40)]
    with intervene(Knockout(frames="first", passes="all")):
        edited = session.generate([SHOTS], seed=1)[0]
    assert not torch.equal(edited.latents, shots.latents)


def test_a_figure_4_and_its_notebook(tiny_longlive2, tmp_path):
    from notebooks.test_notebooks import run

    cache, video = tmp_path / "figure4.pt", tmp_path / "a.mp4"
    flags = [
        "--config_path",
        tiny_longlive2.path,
        "--quiet",
        "--layer_indices",
        "0",
        "1",
        "--num_frames",
        "24",
    ]
    extract_figure4([*flags, "--output_path", str(cache), "--save_video", str(video)])
    assert load_cache(cache)["frame_seq_length"] == 6 and count_frames(video) == 93
    assert iio.immeta(video)["fps"] == 24
    _, drawn = run("plt_fig4", tmp_path, CACHE_PATH=str(cache))
    assert any("layer1" in name for name in drawn)


def test_the_lora_of_a_generator_without_it(tiny_longlive2, tmp_path):
    """Ten layers a block, in PEFT's names, scaled by alpha / rank = 1."""
    model, generator = tiny_longlive2.session.model, torch.Generator().manual_seed(0)
    linear = [f"{kind}.{part}" for kind in ("self_attn", "cross_attn") for part in "qkvo"]
    layers = [f"blocks.{n}.{name}" for n in range(2) for name in (*linear, "ffn.0", "ffn.2")]
    state = {}
    for layer in layers:
        outputs, inputs = model.get_submodule(layer).weight.shape
        state[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
        state[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator)
    torch.save({"generator_lora": state}, tmp_path / "lora.pt")
    lora = {"lora_path": str(tmp_path / "lora.pt"), "lora_rank": 4, "lora_alpha": 4.0}
    merged = load(replace(tiny_longlive2.config, **lora)).model
    for layer in layers:
        down, up = (state[f"base_model.model.{layer}.lora_{half}.weight"] for half in "AB")
        change = merged.get_submodule(layer).weight - model.get_submodule(layer).weight
        torch.testing.assert_close(change, up @ down, atol=1e-5, rtol=0)


# --- What is refused
def test_no_published_attention(tiny_longlive2):
    from argparse import Namespace

    with pytest.raises(ConfigError, match="no published curves exist for tiny-longlive2"):
        check(Namespace(reference=None, frames=21, config_path="a.yaml"), tiny_longlive2.config)


def test_another_vae_is_refused_by_shape(tiny_longlive2, tiny, tmp_path):
    """Wan2.1's VAE beside a model of 48 channels, Wan2.2's beside one of 16, and a wrong config."""
    for name, of_model, of_vae in (("wide", tiny_longlive2, tiny), ("narrow", tiny, tiny_longlive2)):
        folder = tmp_path / name
        folder.mkdir()
        for part in ("transformer", "text_encoder", "tokenizer"):
            (folder / part).symlink_to(f"{of_model.config.ckpt_dir}/{part}")
        (folder / "vae").symlink_to(f"{of_vae.config.ckpt_dir}/vae")
        with pytest.raises(
            CheckpointError, match=r"has latents of \d+ channels, .* give the model's VAE"
        ) as told:
            load_vae(replace(of_model.config, ckpt_dir=str(folder)))
        assert "\n" not in str(told.value)
    with pytest.raises(CheckpointError, match=r"48 channels, 16 pixels a side; .* pixels_per_latent 8"):
        load_vae(replace(tiny_longlive2.config, pixels_per_latent=8))


def test_other_weights_are_refused_by_shape(tiny_longlive2, tiny):
    swapped = replace(tiny_longlive2.config, checkpoint_path=f"{tiny.config.ckpt_dir}/narrow.pt")
    torch.save(tiny.session.model.state_dict(), swapped.checkpoint_path)
    with pytest.raises(
        CheckpointError, match=r"patch_embedding.weight \[32, 16, 1, 2, 2\] instead of \[32, 48"
    ):
        load(swapped).prepare()
    config = load_config(ROOT / "configs/longlive2.yaml", {"ckpt_dir": tiny.config.ckpt_dir})
    with pytest.raises(ConfigError, match=r"is not Wan2.2-TI2V-5B: num_layers 2 instead of 30"):
        load(config).prepare()


# --- The original release's VAE
LAST_DOWN, DOWN = "encoder.down_blocks.2.downsampler", "encoder.downsamples.2.downsamples.2"
NATIVE = {  # names of diffusers -> parts of the original ones (wan/modules/vae2_2.py)
    "encoder.conv_in.weight": "encoder.conv1.weight",
    "encoder.down_blocks.1.resnets.0.conv_shortcut.bias": "encoder.downsamples.1.downsamples.0.shortcut.bias",
    f"{LAST_DOWN}.time_conv.weight": f"{DOWN}.time_conv.weight",
    "encoder.mid_block.attentions.0.to_qkv.weight": "encoder.middle.1.to_qkv.weight",
    "encoder.norm_out.gamma": "encoder.head.0.gamma",
    "quant_conv.bias": "conv1.bias",
    "post_quant_conv.weight": "conv2.weight",
    "decoder.mid_block.resnets.1.norm2.gamma": "decoder.middle.2.residual.3.gamma",
    "decoder.up_blocks.0.resnets.2.conv2.weight": "decoder.upsamples.0.upsamples.2.residual.6.weight",
    "decoder.up_blocks.0.upsampler.resample.1.bias": "decoder.upsamples.0.upsamples.3.resample.1.bias",
    "decoder.conv_out.weight": "decoder.head.2.weight",
}


def test_names_of_the_original_vae():
    state = wide_vae_names({native: torch.zeros(1) for native in NATIVE.values()})
    assert [*state] == [*NATIVE]
    assert [*wide_vae_names(state)] == [*NATIVE]  # diffusers' own stay as they are


def test_the_original_directory_has_the_vae_of_its_channels(tmp_path):
    torch.manual_seed(0)
    theirs = AutoencoderKLWan(**WIDE_SIZES | SMALL_VAE)
    (tmp_path / "config.json").write_text('{"in_dim": 48}')
    torch.save(theirs.state_dict(), tmp_path / VAE_FILE)  # which a model of 48 channels does not read
    with pytest.raises(CheckpointError, match=rf"{WIDE_VAE_FILE} not found"):
        VAE.from_pretrained(tmp_path, **SMALL_VAE)
    (tmp_path / VAE_FILE).rename(tmp_path / WIDE_VAE_FILE)
    ours = VAE.from_pretrained(tmp_path, **SMALL_VAE)
    assert ours.pixels_per_latent == 16 and ours.latents_mean.shape == (48, 1, 1, 1)
    torch.save(AutoencoderKLWan(base_dim=4, num_res_blocks=1).state_dict(), tmp_path / WIDE_VAE_FILE)
    with pytest.raises(CheckpointError, match=r"does not fit the model: .* of another shape") as told:
        VAE.from_pretrained(tmp_path, **SMALL_VAE)
    assert "\n" not in str(told.value)

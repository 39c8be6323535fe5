"""Videos that begin with given latents, an mp4 or a picture."""

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from PIL import Image

from experiments import capture, load
from experiments.caches import load_cache
from experiments.extraction.video import read_pixels
from experiments.run_extraction_all import run
from wan.errors import ConfigError
from wan.interventions import Ablate

P = "a red circle moving right over a dark blue background"


@pytest.fixture(scope="module")
def session():
    return load("wan_mini", num_frames=9)


@pytest.fixture(scope="module")
def whole(session):
    return session.generate(P, seed=1)


@pytest.mark.parametrize("count", [3, 6])
def test_a_run_goes_on_from_its_own_first_blocks(session, whole, count, tmp_path):
    """Bit for bit; a file and a tensor are the same, and what was given is in the fingerprint."""
    path = tmp_path / "first.pt"
    torch.save({"latents": whole.latents[0, :count]}, path)
    runs = [session.generate(P, seed=1, first_frames=one) for one in (whole.latents[:, :count], path)]
    assert all(torch.equal(one.latents, whole.latents) for one in runs)
    assert len({one.common["fingerprint"] for one in (whole, *runs)}) == 3
    assert len({one.common["first_frames"] for one in runs}) == 1
    assert runs[0].common["first_frames"].startswith(f"{count} latent frames, sha256 ")
    other = session.generate(P, seed=1, first_frames=whole.latents[:, :count].flip(-1))
    assert not torch.equal(other.latents[:, count:], whole.latents[:, count:])
    assert torch.equal(other.latents[:, :count], whole.latents[:, :count].flip(-1))


def test_given_blocks_have_a_clean_pass_alone(session, whole, tmp_path):
    with capture(session) as seen:
        session.generate(P, seed=1, first_frames=whole.latents[:, :3])
    atlas = seen.atlas()
    matrix = atlas["frame_logits"]  # [layers, passes, heads, frames, frames]
    assert matrix[:, :-1, :, :3].isnan().all() and not matrix[:, -1, :, :3, :3].isnan().any()
    assert not matrix[:, :, :, 3:, :3].isnan().any()
    assert load_cache(atlas.save(tmp_path / "atlas.pt"))["first_frames"].startswith("3 latent frames")


def test_the_command_and_an_mp4(session, whole, tmp_path):
    """The VAE reads 9 pictures as 3 latent frames; their mean colours stay."""
    pixels = whole.video[:9].numpy()
    iio.imwrite(tmp_path / "first.mp4", pixels, fps=16, codec="libx264", macro_block_size=1)
    flags = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "6", "--quiet", "--prompt", P]
    run([*flags, "--first_frames", f"{tmp_path}/first.mp4", "--output_path", f"{tmp_path}/a.pt"])
    assert load_cache(tmp_path / "a.pt")["first_frames"].startswith("3 latent frames")
    made = load("wan_mini", num_frames=6).generate(P, seed=1, first_frames=tmp_path / "first.mp4")
    assert (made.video[:9].float() - whole.video[:9].float()).abs().mean() < 12
    iio.imwrite(tmp_path / "one.png", pixels[0])
    assert read_pixels(tmp_path / "one.png", 32, 32).shape == (1, 1, 3, 32, 32)


def test_pictures_of_every_kind_and_latents_in_a_file(session, tmp_path):
    """Grey, alpha and a palette are shown in colours; 16 bits a channel would be 257 times too bright."""
    for mode, colour, rgb in (("L", 128, (128,) * 3), ("LA", (200, 255), (200,) * 3), ("P", 0, None),
                              ("RGBA", (255, 0, 0, 255), (255, 0, 0))):  # fmt: skip
        picture = (
            Image.new("RGB", (8, 6), "red").quantize(4) if mode == "P" else Image.new(mode, (8, 6), colour)
        )
        picture.save(tmp_path / "p.png")
        found = read_pixels(tmp_path / "p.png", 6, 8)
        assert found.shape == (1, 1, 3, 6, 8) and (found[0, 0, :, 0, 0] * 255).tolist() == pytest.approx(
            rgb or (255, 0, 0)
        )
    Image.fromarray(np.full((6, 8), 65535, np.uint16)).save(tmp_path / "p.png")
    with pytest.raises(ConfigError, match="it has frames of uint16; give an mp4 or a picture"):
        read_pixels(tmp_path / "p.png", 6, 8)
    latents = torch.zeros(3, 16, 8, 8)
    torch.save(latents.half(), tmp_path / "l.pt")
    assert session.generate(P, first_frames=tmp_path / "l.pt").latents[:, :3].any().item() is False
    torch.save({"noise": latents, "x": latents}, tmp_path / "l.pt")  # which of them?
    with pytest.raises(ConfigError, match="holds None, no finite latents"):
        session.generate(P, first_frames=tmp_path / "l.pt")


REFUSED = {
    "has 4 latent frames; a video of 9 begins with whole blocks, of 3, 6 frames": torch.zeros(4, 16, 8, 8),
    "has 9 latent frames": torch.zeros(9, 16, 8, 8),
    r"holds \[3, 4, 8, 8\], no finite latents .* \[frames, 16, 8, 8\]": torch.zeros(3, 4, 8, 8),
    r"holds \[3, 16, 8, 8\], no finite latents": torch.full((3, 16, 8, 8), torch.nan),
    "first_frames /no.mp4 not found; give latents": "/no.mp4",
    "holds 5, no finite latents of floating point": 5,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_does_not_fit_is_refused(session, said):
    with pytest.raises(ConfigError, match=said):
        session.generate(P, first_frames=REFUSED[said])


def test_edits_that_need_other_runs_are_refused(session, whole):
    config = session.config
    edited = load(config, interventions=[Ablate("frame_mean", passes="denoise").to_dict()])
    with pytest.raises(ConfigError, match="videos of first_frames take no edit that needs means of outputs"):
        edited.generate(P, first_frames=whole.latents[:, :3])

"""The VAE around diffusers' network: pieces of a video give the video, and what diffusers gives."""

import copy

import pytest
import torch
from diffusers import AutoencoderKLWan

from wan.vae import VAE, StreamedDecoder, channels_last

SIZES = {"base_dim": 8, "decoder_base_dim": 4, "z_dim": 4, "num_res_blocks": 1, "dim_mult": [1, 2, 2, 2]}
PATCHES = {"dim_mult": [1, 2, 2], "temperal_downsample": [True, True], "patch_size": 2}
PATCHES |= {"in_channels": 12, "out_channels": 12}  # of 2 x 2 pixels
STATISTICS = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 2.0, 0.5, 1.5]}
ROUNDING = 1e-5  # measured 2.4e-6 for values in 0..1


@pytest.fixture(scope="module", params=[{}, PATCHES], ids=["pixels", "patches"])
def vae(request) -> VAE:
    torch.manual_seed(0)
    return VAE(AutoencoderKLWan(**SIZES | request.param, **STATISTICS).eval().requires_grad_(False))


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return torch.randn(2, 9, 4, 3, 5, generator=torch.Generator().manual_seed(1))


def diffusers_decode(vae: VAE, latents: torch.Tensor) -> torch.Tensor:
    """Frame by frame, as AutoencoderKLWan.decode does."""
    z = latents.transpose(1, 2) * vae.latents_std + vae.latents_mean
    return (vae.vae.decode(z).sample / 2 + 0.5).transpose(1, 2)


def test_decoding_is_diffusers_own(vae, latents):
    video = vae.decode(latents)
    assert video.shape == (2, 33, 3, 24, 40)
    torch.testing.assert_close(video, diffusers_decode(vae, latents), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("sizes", [[1, 8], [3, 3, 3], [1] * 9, [2, 6, 1], [9]])
def test_pieces_give_the_whole_video(vae, latents, sizes):
    decoder = StreamedDecoder(vae)
    pieces = [decoder(piece) for piece in latents.split(sizes, 1)]
    assert [piece.shape[1] for piece in pieces] == [4 * n - 3 * (i == 0) for i, n in enumerate(sizes)]
    torch.testing.assert_close(torch.cat(pieces, 1), vae.decode(latents), atol=ROUNDING, rtol=0)


def test_two_videos_do_not_see_each_other(vae, latents):
    one, other = StreamedDecoder(vae), StreamedDecoder(vae)
    one(latents[:1, :4])
    first = other(latents[1:, :4])
    torch.testing.assert_close(first, vae.decode(latents[1:, :4]), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("frames", [1, 5, 8, 33])
def test_encoding_is_diffusers_own(vae, frames):
    video = torch.rand(1, frames, 3, 24, 40, generator=torch.Generator().manual_seed(2))
    raw = vae.vae.encode(video.transpose(1, 2) * 2 - 1).latent_dist.mode()
    ours = vae.encode(video)
    assert ours.shape[1] == 1 + (frames - 1) // 4
    theirs = ((raw - vae.latents_mean) / vae.latents_std).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, atol=ROUNDING, rtol=1e-5)


def test_large_frames_go_alone_and_give_diffusers_bits(vae, monkeypatch):
    """The real model's: a latent frame of 60 x 104 is more than what goes at once."""
    monkeypatch.setattr("wan.vae.POSITIONS_AT_ONCE", 14)
    latents = torch.randn(1, 4, 4, 3, 5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(vae.decode(latents), diffusers_decode(vae, latents))


def test_the_layout_of_kernels_changes_rounding_alone(vae, latents):
    other = copy.deepcopy(vae)
    channels_last(other.vae)
    torch.testing.assert_close(other.decode(latents), vae.decode(latents), atol=ROUNDING, rtol=0)

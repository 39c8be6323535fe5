"""Our decoder and the encoder around diffusers' weights: pieces give the video, and what diffusers gives."""

import itertools

import pytest
import torch
from diffusers import AutoencoderKLWan
from helpers.kernels import drawn, require_triton

from wan import vae_decoder
from wan.checkpoint import CheckpointError
from wan.vae import VAE, VAE_FILE, StreamedDecoder, load_native_vae
from wan.vae_decoder import Sum, feed

SIZES = {"base_dim": 8, "decoder_base_dim": 4, "z_dim": 4, "num_res_blocks": 1, "dim_mult": [1, 2, 2, 2]}
PATCHES = {"dim_mult": [1, 2, 2], "temperal_downsample": [True, True], "patch_size": 2}
PATCHES |= {"in_channels": 12, "out_channels": 12}  # of 2 x 2 pixels
RESIDUAL = PATCHES | {
    "dim_mult": [1, 2, 2, 2],
    "is_residual": True,
    "temperal_downsample": [False, True, True],
}
STATISTICS = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 2.0, 0.5, 1.5]}
ROUNDING = 1e-5  # measured 2.4e-6 for values in 0..1


@pytest.fixture(scope="module", params=[{}, PATCHES, RESIDUAL], ids=["Wan2.1", "miniature", "Wan2.2"])
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
    torch.testing.assert_close(video, diffusers_decode(vae, latents), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("sizes", [[1] * 9, [2, 6, 1]])
def test_pieces_give_the_whole_video(vae, latents, sizes):
    decoder = StreamedDecoder(vae)
    pieces = [decoder(piece) for piece in latents.split(sizes, 1)]
    assert [piece.shape[1] for piece in pieces] == [4 * n - 3 * (i == 0) for i, n in enumerate(sizes)]
    torch.testing.assert_close(torch.cat(pieces, 1), vae.decode(latents), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("frames", [1, 8, 33])
def test_encoding_is_diffusers_own(vae, frames):
    pixels = vae.decode(torch.zeros(1, 1, 4, 1, 1)).shape[-1]  # of a latent
    video = torch.rand(1, frames, 3, 3 * pixels, 5 * pixels, generator=torch.Generator().manual_seed(2))
    raw = vae.vae.encode(video.transpose(1, 2) * 2 - 1).latent_dist.mode()
    ours = vae.encode(video)
    assert ours.shape[1] == 1 + (frames - 1) // 4
    theirs = ((raw - vae.latents_mean) / vae.latents_std).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, atol=ROUNDING, rtol=1e-5)


def test_few_frames_at_once_are_all_frames(vae, latents, monkeypatch):
    """The real model's: a stage takes a few of its frames, and puts them through all that is behind it."""
    monkeypatch.setattr(vae_decoder, "AT_ONCE", 50_000)
    found = vae.decode(latents)
    monkeypatch.undo()
    torch.testing.assert_close(found, vae.decode(latents), atol=ROUNDING, rtol=0)


def test_memory_is_that_of_a_piece(vae):
    """A decoder keeps two frames a convolution, however long the video is."""
    decoder, kept = StreamedDecoder(vae), set()
    for piece in torch.zeros(1, 13, 4, 3, 5).split(3, 1):
        decoder(piece)
        kept.add(sum(frames.untyped_storage().nbytes() for frames in decoder.past.values()))
    assert len(kept) <= 2  # the first frame passes no convolution over time


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where no GPU is")
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_the_kernel_feeds_as_pytorch_does(dtype):
    require_triton()
    from wan.kernels import vae as kernels

    B, H, W = 2, 4, 6
    for frames, shuffled, stack, C in itertools.product((1, 3), (False, True), (0, 1, 3), (6, 40)):
        size = (H // 2 + 1, W // 2 + 1, 2, 2) if shuffled else (H, W)
        y, bias, residual = drawn(B, frames, *size, C), drawn(C), drawn(B, frames, H, W, C) + 1
        y, bias, residual = (x.to(dtype) for x in (y, bias, residual))
        past = drawn(B, 2, H, W, C).to(dtype)
        gamma, pasts = (drawn(C) if stack else None), (past.clone(), past.clone()) if stack else (None, None)
        total, fed = feed(Sum(y, bias, residual, shuffled), gamma, pasts[0], stack)
        if stack == 3:
            fed = torch.cat([fed[:, :-2], fed[:, 1:-1], fed[:, 2:]], -1)
        found = kernels.feed(y, bias, residual, shuffled, gamma, pasts[1], stack, keep=True)
        tolerance = {"atol": 2e-6, "rtol": 0} if dtype == torch.float32 else {"atol": 0.04, "rtol": 2**-6}
        torch.testing.assert_close(found[0], total, **tolerance)
        if stack:
            torch.testing.assert_close(found[1], fed, **tolerance)
            torch.testing.assert_close(pasts[1], pasts[0], **tolerance)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where no GPU is")
def test_a_decoder_of_kernels(vae, monkeypatch):
    """As on a GPU: biases later, stacks of frames, padded channels."""
    require_triton()
    from wan.kernels import vae as kernels

    latents, expected = drawn(1, 3, 4, 1, 2), vae.decode(drawn(1, 3, 4, 1, 2))
    other = VAE(vae.vae)
    monkeypatch.setattr(kernels, "PIXELS", 1 << 15)  # fewer programs to interpret
    monkeypatch.setattr(vae_decoder, "has_kernel", lambda x: True)
    decoder = StreamedDecoder(other)
    found = torch.cat([decoder(piece) for piece in latents.split([2, 1], 1)], 1)
    assert any(conv.stack == 3 for conv in decoder.past)
    torch.testing.assert_close(found, expected, atol=ROUNDING, rtol=0)


def test_the_original_release_is_loaded(tmp_path):
    """diffusers' conversion leaves its own names as they are."""
    sizes = {"base_dim": 8, "num_res_blocks": 2}
    theirs = AutoencoderKLWan(**sizes).eval()
    with pytest.raises(CheckpointError, match=r"pth not found; run: bash experiments/download_weights.sh"):
        load_native_vae(tmp_path, torch.float32)
    torch.save(theirs.state_dict(), tmp_path / VAE_FILE)
    ours = load_native_vae(tmp_path, torch.float32, **sizes).state_dict()
    assert ours.keys() == theirs.state_dict().keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.state_dict().items())

"""Our decoder and the encoder around diffusers' weights: pieces give the video, and what diffusers gives."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from diffusers import AutoencoderKLWan
from helpers.rollouts import drawn, require_triton

from experiments import load
from experiments.caches.mp4 import write_mp4
from wan import vae as vae_module
from wan.checkpoint import VAE_FILE, CheckpointError
from wan.vae import VAE, Preview, StreamedDecoder, Sum, feed

SIZES = {"base_dim": 8, "decoder_base_dim": 4, "z_dim": 4, "num_res_blocks": 1, "dim_mult": [1, 2, 2, 2]}
PATCHES = {"dim_mult": [1, 2, 2], "temperal_downsample": [True, True], "patch_size": 2}
PATCHES |= {"in_channels": 12, "out_channels": 12}  # of 2 x 2 pixels
RESIDUAL = PATCHES | {"dim_mult": [1, 2, 2, 2], "temperal_downsample": [False, True, True]}
RESIDUAL |= {"is_residual": True}
STATISTICS = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.0, 2.0, 0.5, 1.5]}
ROUNDING = 1e-5  # measured 2.4e-6 for values in 0..1


@pytest.fixture(scope="module", params=[{}, PATCHES, RESIDUAL], ids=["Wan2.1", "miniature", "Wan2.2"])
def vae(request) -> VAE:
    torch.manual_seed(0)
    return VAE(AutoencoderKLWan(**SIZES | request.param, **STATISTICS).eval().requires_grad_(False))


def test_decoding_is_diffusers_own_whole_and_in_pieces(vae, monkeypatch):
    """A decoder keeps two frames a convolution, and may take a few frames of a stage at a time."""
    latents = drawn(2, 5, 4, 3, 4)
    z = latents.transpose(1, 2) * vae.latents_std + vae.latents_mean
    expected = (vae.vae.decode(z).sample / 2 + 0.5).transpose(1, 2)
    torch.testing.assert_close(vae.decode(latents), expected, atol=ROUNDING, rtol=0)
    for sizes in ([1] * 5, [2, 3]):
        decoder, pieces, kept = StreamedDecoder(vae), [], set()
        for piece in latents.split(sizes, 1):
            pieces.append(decoder(piece))
            kept.add(sum(frames.untyped_storage().nbytes() for frames in decoder.past.values()))
        assert [piece.shape[1] for piece in pieces] == [4 * n - 3 * (i == 0) for i, n in enumerate(sizes)]
        torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=ROUNDING, rtol=0)
        assert len(kept) <= 2  # the first frame passes no convolution over time
    monkeypatch.setattr(vae_module, "AT_ONCE", 50_000)  # as the real model's
    torch.testing.assert_close(vae.decode(latents), expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("frames", [1, 8, 13])
def test_encoding_is_diffusers_own(vae, frames):
    pixels = vae.decode(torch.zeros(1, 1, 4, 1, 1)).shape[-1]  # of a latent
    video = drawn(1, frames, 3, 2 * pixels, 3 * pixels).sigmoid()
    raw = vae.vae.encode(video.transpose(1, 2) * 2 - 1).latent_dist.mode()
    ours = vae.encode(video)
    assert ours.shape[1] == 1 + (frames - 1) // 4
    theirs = ((raw - vae.latents_mean) / vae.latents_std).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, atol=ROUNDING, rtol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where no GPU is")
def test_the_kernel_feeds_as_pytorch_does(dtype=torch.bfloat16):
    require_triton()
    from wan.kernels import vae as kernels

    B, H, W = 2, 4, 6
    cases = itertools.product((1, 3), (False, True), (0, 1, 3))
    for (frames, shuffled, stack), C in zip(cases, itertools.cycle((6, 40))):
        size = (H // 2 + 1, W // 2 + 1, 2, 2) if shuffled else (H, W)
        y, bias, residual = drawn(B, frames, *size, C), drawn(C), drawn(B, frames, H, W, C) + 1
        y, bias, residual = (x.to(dtype) for x in (y, bias, residual))
        past = drawn(B, 2, H, W, C).to(dtype)
        gamma, pasts = (drawn(C) if stack else None), (past.clone(), past.clone()) if stack else (None, None)
        total, fed = feed(Sum(y, bias, residual, shuffled), gamma, pasts[0], stack)
        if stack == 3:
            fed = torch.cat([fed[:, :-2], fed[:, 1:-1], fed[:, 2:]], -1)
        found = kernels.feed(y, bias, residual, shuffled, gamma, pasts[1], stack, keep=True)
        for ours, theirs in zip(
            (*found, pasts[1])[: 3 if stack else 1], (total, fed, pasts[0]), strict=False
        ):
            torch.testing.assert_close(ours, theirs, atol=0.04, rtol=2**-6)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where no GPU is")
@pytest.mark.parametrize("vae", [{}, RESIDUAL], ids=["Wan2.1", "Wan2.2"], indirect=True)
def test_a_decoder_of_kernels(vae, monkeypatch):
    """As on a GPU: biases later, stacks of frames, padded channels."""
    require_triton()
    from wan.kernels import vae as kernels

    latents = drawn(1, 2, 4, 1, 1)
    other, expected = VAE(vae.vae), vae.decode(latents)
    monkeypatch.setattr(kernels, "PIXELS", 1 << 15)  # fewer programs to interpret
    monkeypatch.setattr(vae_module, "vae_kernels", lambda x: kernels)
    decoder = StreamedDecoder(other)
    found = torch.cat([decoder(piece) for piece in latents.split(1, 1)], 1)
    assert any(conv.stack == 3 for conv in decoder.past)
    torch.testing.assert_close(found, expected, atol=ROUNDING, rtol=0)


def test_the_original_release_is_loaded(tmp_path):
    """diffusers' conversion leaves its own names as they are."""
    sizes = {"base_dim": 8, "num_res_blocks": 2}
    theirs = AutoencoderKLWan(**sizes).eval()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"pth not found; run: bash experiments/download_weights.sh"):
        VAE.from_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / VAE_FILE)
    ours = VAE.from_pretrained(tmp_path, **sizes).vae.state_dict()
    assert ours.keys() == theirs.state_dict().keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.state_dict().items())


# --- TAEHV's decoder: the keys and shapes of the public file, and frames as its definition makes them
# taew2_1.pth has these, and an encoder's that nobody reads.
SHAPES = {"1.weight": (256, 16, 3, 3), "1.bias": (256,), "22.weight": (3, 64, 3, 3), "22.bias": (3,)}
for first, width, grown, after in ((3, 256, 256, 128), (9, 128, 256, 64), (15, 64, 128, 64)):
    SHAPES |= {f"{first + 4}.conv.weight": (grown, width, 1, 1), f"{first + 5}.weight": (after, width, 3, 3)}
    for number in range(first, first + 3):
        for conv, inputs in ((0, 2 * width), (2, width), (4, width)):
            SHAPES[f"{number}.conv.{conv}.weight"] = (width, inputs, 3, 3)
            SHAPES[f"{number}.conv.{conv}.bias"] = (width,)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Random ones, of which no layer lets its input die out."""
    found = {f"decoder.{name}": drawn(*shape) * (shape[0] * 5) ** -0.5 for name, shape in SHAPES.items()}
    return found | {"encoder.0.weight": torch.ones(64, 3, 3, 3)}


@pytest.fixture
def preview(weights, tmp_path) -> Preview:
    torch.save(weights, tmp_path / "taew2_1.pth")
    return Preview.from_file(tmp_path / "taew2_1.pth", torch.float64, torch.device("cpu"))


def by_definition(w: dict[str, torch.Tensor], frames: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each list of frames [C, H, W] through one layer after the other."""

    def conv(name, x):
        weight = w[f"decoder.{name}.weight"]
        return F.conv2d(x[None], weight, w.get(f"decoder.{name}.bias"), padding=weight.shape[-1] // 2)[0]

    frames = [conv("1", torch.tanh(x / 3) * 3).relu() for x in frames]
    for first, times in ((3, 1), (9, 2), (15, 2)):
        for layer in range(first, first + 3):
            before = [torch.zeros_like(frames[0]), *frames]
            pairs = map(torch.cat, zip(frames, before, strict=False))
            seen = [conv(f"{layer}.conv.0", pair).relu() for pair in pairs]
            seen = [conv(f"{layer}.conv.4", conv(f"{layer}.conv.2", y).relu()) for y in seen]
            frames = [(y + x).relu() for x, y in zip(frames, seen, strict=True)]
        wide = [x.repeat_interleave(2, 1).repeat_interleave(2, 2) for x in frames]
        grown = [part for x in wide for part in conv(f"{first + 4}.conv", x).chunk(times)]
        frames = [conv(str(first + 5), x) for x in grown]
    return [conv("22", x.relu()).clamp(0, 1) for x in frames]


def test_a_video_knows_its_decoder_by_the_weights(weights, preview, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    bias = "decoder.22.bias"
    torch.save(weights | {bias: weights[bias] + 1}, other / "taew2_1.pth")  # the same name
    again = Preview.from_file(tmp_path / "taew2_1.pth", torch.float64, torch.device("cpu"))
    of_others = [
        Preview.from_file(other / "taew2_1.pth", dtype, torch.device("cpu"))
        for dtype in (torch.float64, torch.float32)
    ]
    assert again.identity == preview.identity and again.made_by == of_others[0].made_by
    assert len({one.identity for one in (preview, *of_others)}) == 3


def test_frames_are_those_of_the_definition(preview, weights):
    latents = drawn(1, 4, 16, 2, 3).double()
    exact = {name: x.double() for name, x in weights.items()}
    expected = torch.stack(by_definition(exact, list(latents[0])))[3:].float()
    stream = preview.stream()
    found = torch.cat([stream(piece) for piece in latents.split([1, 2, 1], 1)], 1)[0]
    assert found.shape == (13, 3, 16, 24) and found.std() > 0.05
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_other_files_are_refused(weights, tmp_path):
    wide = {"decoder.22.weight": torch.ones(12, 64, 3, 3)}
    for name, change in (("decoder.3.conv.0.bias", {}), ("decoder.22.weight", wide)):
        torch.save({key: x for key, x in weights.items() if key != name} | change, tmp_path / "t.pth")
        with pytest.raises(CheckpointError, match=f"t.pth does not fit the model: .*{name}"):
            Preview.from_file(tmp_path / "t.pth", torch.float32, torch.device("cpu"))


@pytest.mark.slow
def test_a_session_shows_it(weights, tmp_path):
    """And keeps the VAE for what is measured; a file that is not there is refused at once."""
    torch.save(weights, tmp_path / "taew2_1.pth")
    mini = str(ROOT / "configs/wan_mini.yaml")
    with pytest.raises(CheckpointError, match=r"no\.pth"):
        load(mini, preview=tmp_path / "no.pth")
    with contextlib.chdir(ROOT):
        run = load(mini, preview=tmp_path / "taew2_1.pth", num_frames=3, device="cpu").generate(seed=1)
        write_mp4(run.decoded(run.preview).numpy(), tmp_path / "seen.mp4")
        write_mp4(run.video.numpy(), tmp_path / "whole.mp4")
        seen, whole = ((tmp_path / f"{name}.mp4").read_bytes() for name in ("seen", "whole"))
        assert run.show().data == seen != whole

"""TAEHV's decoder: the keys and shapes of the public file, and frames as its definition makes them."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from helpers.rollouts import drawn

from experiments import load
from experiments.caches.files import encode_mp4
from experiments.extraction.video import SHORTEST_SIDE, decode, dtype_of
from wan.checkpoint import CheckpointError
from wan.vae import Preview

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
    assert dtype_of(again) == dtype_of(preview) and again.made_by == of_others[0].made_by
    assert len({dtype_of(one) for one in (preview, *of_others)}) == 3


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
        videos = decode(run.extraction, run.preview), run.video
        seen, whole = (encode_mp4(video.numpy(), shortest=SHORTEST_SIDE) for video in videos)
        assert run.show().data == seen != whole

"""Videos as mp4, and what is said where there is no ffmpeg to write them."""

import subprocess
import sys
from dataclasses import replace

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from helpers.forked import refused

from experiments import run_intervention
from experiments.caches.files import CacheError, encode_mp4, mp4_boxes, mp4_tag, require_ffmpeg, tag_in
from experiments.extraction import video
from experiments.provenance import video_tag
from wan.vae import StreamedDecoder


@pytest.fixture(params=["no package", "no program"])
def without_ffmpeg(request, monkeypatch):
    """A machine where imageio-ffmpeg is not installed, or was installed without its program."""

    def get_ffmpeg_exe():
        raise RuntimeError("No ffmpeg exe could be found. Install ffmpeg on your system, or ...")

    if request.param == "no package":
        monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    else:
        monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", get_ffmpeg_exe)


def test_a_missing_ffmpeg_is_named_with_its_remedy(without_ffmpeg):
    with pytest.raises(CacheError, match=r'run: pip install "imageio\[ffmpeg\]"; or draw nothing'):
        require_ffmpeg("draw nothing")
    with pytest.raises(CacheError, match="written by ffmpeg, which is not here"):
        encode_mp4(np.zeros((3, 16, 16, 3), np.uint8))


@pytest.mark.parametrize(("height", "said"), [(64, "smpte170m/smpte170m/bt709"), (720, "bt709")])
def test_a_video_names_the_matrix_that_its_colours_went_through(height, said, tmp_path):
    colour = np.array([200, 30, 0], np.uint8)
    (tmp_path / "a.mp4").write_bytes(encode_mp4(np.broadcast_to(colour, (2, height, 64, 3))))
    command = [require_ffmpeg(), "-i", str(tmp_path / "a.mp4"), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True)
    assert f"yuv420p(tv, {said}, progressive)" in done.stderr.decode()
    assert np.abs(np.frombuffer(done.stdout, np.uint8).reshape(-1, 3) - colour.astype(int)).max() <= 4


def test_a_comment_behind_the_box_is_not_its_own(tmp_path):
    comment = b"\xa9cmt" + (20).to_bytes(4, "big") + b"data" + b"mine" * 4
    (tmp_path / "a.mp4").write_bytes(b"12345678moov" + comment)
    assert tag_in(tmp_path / "a.mp4", 8, 12) is None
    assert tag_in(tmp_path / "a.mp4", 8, 40) == "mine"


def test_an_intervention_needs_ffmpeg_where_a_video_is_wanted(without_ffmpeg, tmp_path, monkeypatch, capfd):
    def prepare(*given, **more):
        raise CacheError("this far")

    monkeypatch.setattr("experiments.session.Session.prepare", prepare)
    (tmp_path / "edits.yaml").write_text("- {edit: knockout, frames: first, passes: denoise}")
    flags = ["--config_path", "configs/wan_mini.yaml", "--interventions", str(tmp_path / "edits.yaml")]
    flags += ["--output_path", str(tmp_path / "effects.pt"), "--quiet"]
    for more, said in (
        ([], "pip install .*--no_video"),
        (["--no_video"], "this far"),
        (["--dry_run"], "this far"),
    ):
        refused(run_intervention, [*flags, *more], capfd, said)


def test_what_a_video_is_of_is_read_back_from_a_whole_one(tmp_path):
    path, pixels = tmp_path / "a.mp4", np.zeros((9, 16, 16, 3), np.uint8)
    for options in ((), ("-movflags", "+faststart"), ("-metadata", "description=more")):
        content = encode_mp4(pixels, options=options, tag="run vae")
        path.write_bytes(content)
        assert mp4_tag(path) == "run vae"
        for size in range(0, len(content), 97):
            path.write_bytes(content[:size])
            assert mp4_tag(path) is None
    path.write_bytes(encode_mp4(pixels))
    assert mp4_tag(path) is None is mp4_tag(tmp_path / "none.mp4")


def test_boxes_of_every_size_are_walked_and_torn_ones_left_out(tmp_path):
    path, first = tmp_path / "a.mp4", (16).to_bytes(4, "big") + b"ftyp" + bytes(8)
    large = (1).to_bytes(4, "big") + b"mdat" + (40).to_bytes(8, "big") + bytes(24)
    path.write_bytes(first + large + first)
    assert list(mp4_boxes(path)) == [(b"ftyp", 0, 16), (b"mdat", 16, 56), (b"ftyp", 56, 72)]
    for size in (0, 2, 3, 7, 17):  # of no box, or of more than is there
        path.write_bytes(first + size.to_bytes(4, "big") + b"mdat" + bytes(8))
        assert list(mp4_boxes(path)) == [(b"ftyp", 0, 16)] and mp4_tag(path) is None
    path.write_bytes(first + (8).to_bytes(4, "big") + b"free" + first)
    assert [kind for kind, _, _ in mp4_boxes(path)] == [b"ftyp", b"free", b"ftyp"]


def test_pieces_that_are_not_as_they_were_written_are_made_again(tmp_path):
    path, pixels = tmp_path / "a.mp4", torch.zeros(9, 32, 32, 3, dtype=torch.uint8)
    grown = video.GrowingVideo(path, "mine")
    for first in (0, 9, 18):
        grown.append(pixels + first, first)
    ends, content = grown.ends(), path.read_bytes()
    assert len(iio.imread(path)) == 27 and video.GrowingVideo(path, "mine").pieces == 3
    for piece in range(3):
        changed = bytearray(content)
        changed[ends[piece + 1] - 100] ^= 1  # in the picture's data
        path.write_bytes(changed)
        assert video.GrowingVideo(path, "mine").pieces == piece and path.stat().st_size == ends[piece]
    path.write_bytes(content)
    video.GrowingVideo(path, "mine").finish()
    assert video.GrowingVideo(path, "mine").is_finished and len(iio.imread(path)) == 27
    whole = path.read_bytes()
    path.write_bytes(
        whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :]
    )
    assert mp4_tag(path) is None
    again = video.GrowingVideo(path, "mine")
    assert not again.is_finished and again.pieces == path.stat().st_size == 0


@pytest.mark.slow
def test_a_video_grows_while_its_rollout_goes_on_also_without_memory(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(video, "has_room", lambda latents: True)
    config = replace(tiny.config, ckpt_dir="checkpoints/wan-mini")
    latents = torch.randn(1, 6, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    with video.LiveVideo(config, tmp_path / "v.mp4") as live:
        live.ready()
        live.add(latents[:, :3])
        live.pieces[0].result().result()
        assert len(iio.imread(live.growing)) == 9  # the first block plays
        monkeypatch.setattr(live, "decoder", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError))
        live.add(latents[:, 3:])
        live.save(latents, "f")
    assert [path.name for path in tmp_path.iterdir()] == ["v.mp4"]
    assert mp4_tag(live.path) == video_tag("f", config) and b"VAE in float32" in live.path.read_bytes()
    pixels = video.to_pixels(StreamedDecoder(live.vae.result())(latents))[0].numpy().repeat(4, 1).repeat(4, 2)
    shown = iio.imread(live.path).astype(float)  # H.264 loses 5.7 of 255 of this noise
    assert shown.shape == pixels.shape
    assert np.abs(shown - pixels).mean() < 8 < np.abs(shown[1:] - pixels[:-1]).mean()

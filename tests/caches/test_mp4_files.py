"""Videos as mp4: one ffmpeg process, what its files say, and what is said where there is no ffmpeg."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import imageio.v3 as iio
import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT
from helpers.forked import refused

from experiments import run_intervention
from experiments.caches.files import CacheError, RunError
from experiments.caches.mp4 import VideoWriter, count_frames, mp4_tag, require_ffmpeg, write_mp4
from experiments.extraction import video
from experiments.provenance import video_tag

# A process that sends 80 frames to a growing video, says so, and does what it is told
WRITER = """
import signal, sys
import numpy as np
from experiments.caches.mp4 import VideoWriter
signal.signal(signal.SIGINT, lambda *_: None)
frames = np.random.default_rng(0).integers(0, 255, (80, 64, 64, 3), np.uint8)
with VideoWriter(sys.argv[1], growing=sys.argv[1]) as video:
    video.append(frames)
    print("sent", flush=True)
    sys.stdin.readline()
    video.append(frames)
    video.finish("whole")
"""


@pytest.fixture(params=["no package", "no program"])
def without_ffmpeg(request, monkeypatch):
    """A machine where imageio-ffmpeg is not installed, or was installed without its program."""

    def get_ffmpeg_exe():
        raise RuntimeError("No ffmpeg exe could be found. Install ffmpeg on your system, or ...")

    if request.param == "no package":
        monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    else:
        monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", get_ffmpeg_exe)


@pytest.fixture
def writer(tmp_path):
    """The process WRITER in a process group of its own, which has sent its first frames to a.mp4."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "a.mp4")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
    assert process.stdout.readline() == "sent\n"
    yield process
    process.kill()
    process.communicate()


def noise(frames: int, height: int = 64, width: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (frames, height, width, 3), np.uint8)


def test_a_missing_ffmpeg_is_named_with_its_remedy(without_ffmpeg, tmp_path):
    with pytest.raises(CacheError, match=r'run: pip install "imageio\[ffmpeg\]"; or draw nothing'):
        require_ffmpeg("draw nothing")
    with pytest.raises(CacheError, match="written by ffmpeg, which is not here"):
        write_mp4(noise(3), tmp_path / "a.mp4")


@pytest.mark.parametrize(("height", "matrix"), [(64, "smpte170m/smpte170m/bt709"), (720, "bt709")])
def test_a_video_names_the_matrix_that_its_colours_went_through(height, matrix, tmp_path):
    colour = np.array([200, 30, 0], np.uint8)
    write_mp4(np.broadcast_to(colour, (2, height, 64, 3)), tmp_path / "a.mp4", shortest=1)
    command = [require_ffmpeg(), "-i", str(tmp_path / "a.mp4"), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True)
    assert f"yuv420p(tv, {matrix}, progressive)" in done.stderr.decode()
    assert np.abs(np.frombuffer(done.stdout, np.uint8).reshape(-1, 3) - colour.astype(int)).max() <= 4


def test_an_intervention_needs_ffmpeg_where_a_video_is_wanted(without_ffmpeg, tmp_path, monkeypatch, capfd):
    def prepare(*given, **more):
        raise CacheError("this far")

    monkeypatch.setattr("experiments.session.Session.prepare", prepare)
    (tmp_path / "edits.yaml").write_text("- {edit: knockout, frames: first, passes: denoise}")
    flags = ["--config_path", "configs/wan_mini.yaml", "--interventions", str(tmp_path / "edits.yaml")]
    flags += ["--output_path", str(tmp_path / "effects.pt"), "--quiet"]
    for more, message in (
        ([], "pip install .*--no_video"),
        (["--no_video"], "this far"),
        (["--dry_run"], "this far"),
    ):
        refused(run_intervention, [*flags, *more], capfd, message)


def test_a_finished_video_is_an_ordinary_mp4_of_the_size_asked_for(tmp_path):
    path, pixels = tmp_path / "a.mp4", noise(40, 60, 90)
    with VideoWriter(path, about="VAE in float32", shortest=100, multiple=16) as writer:
        for part in (pixels[:1], pixels[1:30], pixels[30:]):
            writer.append(part)
        writer.finish("run vae")
    assert iio.imread(path).shape == (40, 128, 192, 3)  # twice as large, then a multiple of 16
    assert iio.immeta(path)["duration"] == pytest.approx(40 / 16) and iio.immeta(path)["fps"] == 16
    content = path.read_bytes()
    assert b"VAE in float32" in content and b"moof" not in content  # of fragments
    assert mp4_tag(path) == "run vae" and count_frames(path) == 40
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


def test_a_video_that_was_cut_off_names_no_run_and_has_no_frames(tmp_path):
    path = tmp_path / "a.mp4"
    write_mp4(noise(9), path, tag="run vae")
    content = path.read_bytes()
    for size in (0, 5, 40, 428, len(content) // 2, len(content) - 200):
        path.write_bytes(content[:size])
        assert mp4_tag(path) is None and count_frames(path) == 0
    write_mp4(noise(9), path, overwrite=True)
    assert mp4_tag(path) is None and mp4_tag(tmp_path / "none.mp4") is None


def test_a_growing_video_plays_before_it_is_finished(tmp_path):
    growing = tmp_path / "growing.mp4"
    with VideoWriter(tmp_path / "a.mp4", growing=growing, comment="unfinished") as writer:
        writer.append(noise(160))
        deadline = time.monotonic() + 60
        while not growing.exists() or count_frames(growing) < 40:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert mp4_tag(growing) == "unfinished" and not (tmp_path / "a.mp4").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_the_frames_that_it_sent(writer, tmp_path):
    encoders = psutil.Process(writer.pid).children()
    writer.kill()
    psutil.wait_procs(encoders, timeout=60)
    # Python may keep a part of the last frame
    assert count_frames(tmp_path / "a.mp4") in (79, 80)


def test_ctrl_c_does_not_reach_the_encoder(writer, tmp_path):
    os.killpg(writer.pid, signal.SIGINT)
    writer.communicate("go on\n", timeout=60)
    assert writer.returncode == 0
    assert count_frames(tmp_path / "a.mp4") == 160 and mp4_tag(tmp_path / "a.mp4") == "whole"


def test_a_video_whose_encoder_ended_replaces_nothing(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"an earlier one")
    with VideoWriter(path) as writer:
        writer.append(noise(80))
        for encoder in psutil.Process().children():
            if "ffmpeg" in encoder.name():
                encoder.kill()
        with pytest.raises(RunError, match=r"a\.mp4: \d+ of 80 frames were written"):
            writer.finish()
    with VideoWriter(path) as writer:
        writer.append(noise(2))
        for encoder in psutil.Process().children():
            if "ffmpeg" in encoder.name():
                encoder.kill()
                encoder.wait()
        with pytest.raises(RunError, match="ffmpeg has ended"):
            writer.append(noise(80))
    assert path.read_bytes() == b"an earlier one" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_a_video_grows_while_its_rollout_goes_on_also_without_memory(tiny, tmp_path, monkeypatch):
    config = replace(tiny.config, ckpt_dir="checkpoints/wan-mini", num_frames=6)
    latents = torch.randn(1, 6, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    blocks = latents.split(3, 1)
    monkeypatch.setattr(video, "frames_at_once", lambda *_: 3)
    with video.LiveVideo(config, tmp_path / "v.mp4") as live:
        live.ready()
        for block in blocks:
            live.add(block)
        assert live.file.frames == 21 and live.growing.exists()
        live.save([], "f")  # of the blocks that came
    whole = (tmp_path / "v.mp4").read_bytes()
    with video.LiveVideo(config, tmp_path / "v.mp4") as live:
        live.add(blocks[0])
        monkeypatch.setattr(live.decoder, "add", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError))
        live.add(blocks[1])
        assert live.file is None
        live.save(blocks, "f")  # decoded again
    assert [path.name for path in tmp_path.iterdir()] == ["v.mp4"]
    assert live.path.read_bytes() == whole and b"VAE in float32" in whole
    assert mp4_tag(live.path) == video_tag("f", config)
    pixels = video.decode(latents, live.vae).numpy().repeat(4, 1).repeat(4, 2)
    shown = iio.imread(live.path).astype(float)  # H.264 loses some of this noise
    assert shown.shape == pixels.shape
    assert np.abs(shown - pixels).mean() < 8 < np.abs(shown[1:] - pixels[:-1]).mean()

"""Long videos: stopped anywhere they go on with the same bits; files that grow; what is captured."""

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import imageio.v3 as iio
import numpy as np
import pytest
import torch
import yaml
from diffusers import AutoencoderKLWan
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from experiments import run_rollout
from experiments.caches.blocks import BlockCapture, path_of, read_blocks
from experiments.caches.files import CacheError, StoppedError, mp4_tag
from experiments.extraction import video
from experiments.extraction.rollout import Progress
from experiments.running import long_rollout
from experiments.running.long_rollout import GrowingVideo, LatentFile
from experiments.session import pipeline_of
from wan.blocks import block_ranges
from wan.errors import ConfigError
from wan.vae import VAE

pytestmark = pytest.mark.slow
FRAMES = 12
WINDOW = {"name": "window", "window": 9, "sink": 3}
CHOOSES = {"name": "participative", "window": 12, "sink": 3, "budget": 9, "recent": 3}
ROLLING = {"sampler": "rolling_forcing", "denoising_step_list": [1000, 200]}
POLICIES = [  # with every kind of memory: frames, averages, tokens that noisy queries chose, a release
    WINDOW,
    {"name": "ema_sink", "window": 9, "sink": 3},
    {"name": "memory_bank", "window": 9, "sink": 3},
    {"name": "triattention", "budget_tokens": 80, "sink": 1},
    CHOOSES,
    {"name": "window", "window": 12, "sink": 6, "released": "longlive"},
    ROLLING,  # of the sampler
]


class StopAfter(Progress):
    """Asks to stop after so many blocks."""

    def __init__(self, blocks: int = 10**9):
        super().__init__(quiet=True)
        self.left = blocks

    def advance(self, unit: str, index: int, count: int, what: str) -> None:
        self.left -= 1
        self.stopping = self.left == 0


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    """Pieces of two blocks, and videos as small as they are."""
    monkeypatch.setattr(long_rollout, "frames_at_once", lambda *_: 6)
    monkeypatch.setattr(video, "SHORTEST_SIDE", 64)


@pytest.fixture(scope="module")
def vae(tiny):
    return VAE.from_pretrained(tiny.config.ckpt_dir)


def make(folder, tiny, vae, stop_after=10**9, capture="none", policy=None, step=0):
    """One call of long_rollout.make_long_video -> its place. A policy that is none are other settings."""
    settings = {"cache_policy": policy} if policy is None or "name" in policy else policy
    config = replace(tiny.config, num_frames=FRAMES, **settings)
    session = tiny.session.replaced(pipeline=pipeline_of(tiny.session.model, config))
    place = long_rollout.LongVideo(folder / "a.mp4")
    latents = LatentFile(place.latents, (FRAMES, 16, 8, 8), session.dtype, str(policy))
    capture = BlockCapture.read(capture, step)
    long_rollout.make_long_video(session, config, place, latents, capture, vae, StopAfter(stop_after))
    return place


def stopped(*args, **kwargs):
    with pytest.raises(StoppedError, match="run it again"):
        make(*args, **kwargs)


def no_video(monkeypatch):
    """Nothing is decoded or encoded."""
    blank = lambda self, frames: torch.zeros(len(frames), 64, 64, 3).byte()  # noqa: E731
    monkeypatch.setattr(long_rollout.VideoWriter, "_decoded", blank)
    monkeypatch.setattr(GrowingVideo, "append", lambda self, *_: setattr(self, "pieces", self.pieces + 1))
    monkeypatch.setattr(GrowingVideo, "finish", lambda self: None)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "_".join(map(str, p.values())))
def test_stopped_anywhere_it_goes_on_with_the_same_bits(policy, tiny, vae, tmp_path, monkeypatch):
    no_video(monkeypatch)
    if policy.get("name") == "triattention":
        draw = np.random.default_rng(0).random
        means = {name: draw((2, 2, 8)) for name in ("q_mean_real", "q_mean_imag", "q_abs_mean")}
        np.savez(tmp_path / "means.npz", **means)
        policy = policy | {"statistics": str(tmp_path / "means.npz")}
    whole = make(tmp_path / "whole", tiny, vae, policy=policy)
    stopped(tmp_path / "parts", tiny, vae, stop_after=3, policy=policy)
    parts = make(tmp_path / "parts", tiny, vae, policy=policy)
    assert torch.equal(*(load_file(place.latents)["latents"] for place in (parts, whole)))


@pytest.mark.beside
def test_video_and_captures_of_parts_are_those_of_the_whole(tiny, vae, tmp_path):
    whole = make(tmp_path / "whole", tiny, vae, capture="all", policy=WINDOW)
    place = long_rollout.LongVideo(tmp_path / "parts/a.mp4")
    stopped(tmp_path / "parts", tiny, vae, stop_after=3, capture="all", policy=WINDOW)
    assert iio.imread(place.path).shape == (1 + 4 * 5, 64, 64, 3)  # two blocks are a piece: it is playable
    for path, more in ((place.latents, b"half a frame"), (place.path, b"\0\0\1\0moof and no more")):
        path.write_bytes(path.read_bytes() + more)
    path_of(place.attention, 2).unlink()  # of the block that was being made
    parts = make(tmp_path / "parts", tiny, vae, capture="all", policy=WINDOW)
    assert iio.imread(parts.path).shape == (1 + 4 * (FRAMES - 1), 64, 64, 3)
    assert parts.path.read_bytes() == whole.path.read_bytes()
    for one, other in zip(read_blocks(parts.attention), read_blocks(whole.attention), strict=True):
        assert all(torch.equal(one[k], other[k]) for k in ("logits", "mass", "key_frames", "key_positions"))
    assert make(tmp_path / "parts", tiny, vae, policy=WINDOW).path == parts.path  # is done
    assert video.frames_at_once(8, 8) == 16 and video.frames_at_once(60, 104) == 1


def test_what_is_captured(tiny, vae, tmp_path, monkeypatch):
    no_video(monkeypatch)
    policy = {"name": "deep_sink", "window": 9, "sink": 3}
    place = make(tmp_path / "all", tiny, vae, capture="all", policy=policy)
    blocks = read_blocks(place.attention)
    last = blocks[-1]
    assert [block["block"] for block in blocks] == list(range(4)) and last["query_frames"] == [9, 10, 11]
    assert last["logits"].shape == (2, 2, 3, 9)
    torch.testing.assert_close(last["mass"].sum(-1), torch.ones(2, 2, 3))
    assert last["key_frames"][0].tolist() == [0, 1, 2, *range(6, 12)]
    assert last["key_positions"][0].tolist() == list(range(3, 12))  # the sink has moved along
    size = sum(path.stat().st_size for path in place.attention.iterdir())
    config = replace(tiny.config, num_frames=FRAMES, cache_policy=policy)
    said = BlockCapture.read("all", 0).bytes(config, tiny.session.model_config)
    assert said < size < said + 4 * 16384
    assert BlockCapture.read("last:2", 0).blocks(6) == range(4, 6)
    place = make(tmp_path / "band", tiny, vae, capture="band:4", policy=policy)
    [*_, band] = read_blocks(place.attention)
    assert torch.equal(band["logits"], last["logits"][..., -4:])
    assert band["key_frames"][0].tolist() == [8, 9, 10, 11]


def test_what_is_captured_later_is_captured_as_if_at_once(tiny, vae, tmp_path, monkeypatch):
    """Also of a video that is finished, which stays as it is; other keys or passes are not mixed in."""
    no_video(monkeypatch)
    whole = make(tmp_path / "whole", tiny, vae, capture="all")
    place = make(tmp_path, tiny, vae)
    before = place.latents.read_bytes()
    make(tmp_path, tiny, vae, capture="last:1")
    assert [block["block"] for block in read_blocks(place.attention)] == [3]
    make(tmp_path, tiny, vae, capture="all")
    assert place.latents.read_bytes() == before
    for one, other in zip(read_blocks(place.attention), read_blocks(whole.attention), strict=True):
        assert torch.equal(one["logits"], other["logits"]) and one["block"] == other["block"]
    for other in ({"capture": "band:3"}, {"capture": "last:1", "step": 1}):
        with pytest.raises(CacheError, match="was captured in another pass or with other keys"):
            make(tmp_path, tiny, vae, **other)
    path_of(place.attention, 0).write_bytes(b"torn")
    make(tmp_path, tiny, vae, capture="all")
    assert read_blocks(place.attention)[0]["logits"].equal(read_blocks(whole.attention)[0]["logits"])


def test_damaged_latents_are_made_again(tiny, vae, tmp_path):
    """Their checksum tells: the video goes on from the last frame that is whole."""
    whole = make(tmp_path / "whole", tiny, vae, policy=CHOOSES)
    stopped(tmp_path, tiny, vae, stop_after=2, policy=CHOOSES)  # its blocks are made again
    place = long_rollout.LongVideo(tmp_path / "a.mp4")
    content = bytearray(place.latents.read_bytes())
    content[-1] ^= 1
    place.latents.write_bytes(content)
    assert make(tmp_path, tiny, vae, policy=CHOOSES).latents.read_bytes() == whole.latents.read_bytes()


def test_the_decoder_looks_back_far_enough_for_the_real_one(monkeypatch):
    """The real decoder's layers with few channels: what it says after looking back is what it says anyway."""
    monkeypatch.setattr(long_rollout, "frames_at_once", lambda *_: 1)  # as of large frames
    torch.manual_seed(0)
    scale = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = VAE(AutoencoderKLWan(base_dim=4, decoder_base_dim=4, z_dim=4, **scale))
    latents, blocks = torch.randn(66, 4, 1, 1), block_ranges([3] * 22)

    held = SimpleNamespace(shape=(66, 4, 1, 1), frames=66, read=lambda at: latents[at.start : at.stop])
    seen = {}

    class Video:
        pieces = 0
        is_finished = False

        def append(self, pixels, first):
            seen.setdefault(self.pieces, []).append(pixels)
            self.pieces += 1

    one, other = Video(), Video()
    long_rollout.VideoWriter(one, vae, held, blocks, torch.device("cpu")).catch_up()
    other.pieces = 20
    long_rollout.VideoWriter(other, vae, held, blocks, torch.device("cpu")).catch_up()
    assert long_rollout.LOOKS_BACK < 60 and sorted(seen) == [*range(22)]
    assert len(seen[20]) == len(seen[21]) == 2
    assert all(torch.equal(*seen[piece]) for piece in (20, 21))


def captured_block(number, run):
    ones, keys = torch.full((2, 3, 3, 3), 1 / 3), torch.zeros(2, 3)
    block = {"format": "block_attention", "step": 0, "band": 0, "query_frames": [0, 1, 2], "timestep": 1.0}
    block |= {"logits": ones, "mass": ones, "key_frames": keys, "key_positions": keys}
    return block | {"block": number, "fingerprint": run}


def test_files_of_others_are_left_alone(tmp_path):
    video, latents = tmp_path / "a.mp4", tmp_path / "a.latents.safetensors"
    video.write_bytes(b"not a video at all")
    with pytest.raises(CacheError, match="is no mp4"):
        GrowingVideo(video, "mine")
    assert video.read_bytes() == b"not a video at all"
    LatentFile(latents, (6, 16, 8, 8), torch.float32, "mine")
    with pytest.raises(CacheError, match="belongs to another run"):
        LatentFile(latents, (6, 16, 8, 8), torch.float32, "another")
    latents.write_bytes(bytes(range(256)) * 300)
    with pytest.raises(CacheError, match="no file of latents"):
        LatentFile(latents, (6, 16, 8, 8), torch.float32, "mine")
    with pytest.raises(CacheError, match="no captured blocks"):
        read_blocks(tmp_path)
    path_of(tmp_path, 0).write_bytes(b"torn")
    with pytest.raises(CacheError, match="is damaged or no captured block"):
        read_blocks(tmp_path)
    torch.save({"format": "atlas"}, path_of(tmp_path, 0))
    with pytest.raises(CacheError, match="no captured block"):
        read_blocks(tmp_path)
    # Whole blocks, each of its number, of one run and one after the other
    torch.save(captured_block(0, "f"), path_of(tmp_path, 0))
    assert len(read_blocks(tmp_path)) == 1 and BlockCapture.read("all", 0).missing(tmp_path, 2, "f") == [1]
    few = torch.zeros(1, 3)
    for change in ({"block": 4}, {"logits": "x"}, {"mass": few}, {"key_frames": few}):
        torch.save(captured_block(0, "f") | change, path_of(tmp_path, 0))
        with pytest.raises(CacheError, match="is damaged or no captured block"):
            read_blocks(tmp_path)
        assert BlockCapture.read("all", 0).missing(tmp_path, 2, "f") == [0, 1]  # it is made again
    torch.save(captured_block(0, "f"), path_of(tmp_path, 0))
    for number, run, said in ((1, "g", "belongs to another run"), (2, "f", "block_00001.pt is missing")):
        torch.save(captured_block(number, run), path_of(tmp_path, number))
        with pytest.raises(CacheError, match=said):
            read_blocks(tmp_path)
        path_of(tmp_path, number).unlink()


def test_a_file_of_latents_is_whole_at_every_block(tmp_path):
    path, latents = tmp_path / "a.safetensors", torch.randn(6, 16, 2, 3)
    for first in (0, 3):
        file = LatentFile(path, (6, 16, 2, 3), torch.float32, "mine")
        assert file.frames == first
        file.append(first, latents[first : first + 3])
    assert torch.equal(load_file(path)["latents"], latents)
    assert path.read_bytes()[0] % 8 == 0  # the header's length: numbers begin aligned
    assert torch.equal(file.read(range(2, 5)), latents[2:5])
    with pytest.raises(CacheError, match="belongs to another run"):
        LatentFile(path, (6, 16, 2, 3), torch.float32, "thine")


@settings(max_examples=25)
@given(st.integers(0, 6 * 16 * 2 * 3 * 4 * 8 - 1), st.integers(3, 6))
def test_frames_that_are_not_as_they_were_written_are_made_again(bit, count):
    latents = torch.randn(6, 16, 2, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        file = LatentFile(path, (6, 16, 2, 3), torch.float32, "mine")
        file.append(0, latents[:count])
        content = bytearray(path.read_bytes())
        place = bit // 8 % (count * file.frame_bytes)
        content[file.start + place] ^= 1 << bit % 8
        path.write_bytes(content)
        again = LatentFile(path, (6, 16, 2, 3), torch.float32, "mine")
        assert again.frames == place // file.frame_bytes and again.damaged == count - again.frames
        again.append(again.frames, latents[again.frames :])
        assert torch.equal(load_file(path)["latents"], latents) and not again.damaged
        assert LatentFile(path, (6, 16, 2, 3), torch.float32, "mine").frames == 6


def test_blocks_are_missing_unless_they_are_this_runs(tmp_path):
    for name, block in ((1, 0), (2, 2)):  # one under the name of another
        torch.save(captured_block(block, "mine"), path_of(tmp_path, name))
    assert BlockCapture("all").missing(tmp_path, 4, "mine") == [0, 1, 3]
    assert BlockCapture("none", step=1).missing(tmp_path, 4, "mine") == []
    with pytest.raises(CacheError, match="in another pass or with other keys"):
        BlockCapture("all", step=1).missing(tmp_path, 4, "mine")
    with pytest.raises(CacheError, match="belongs to another run"):
        BlockCapture("all").missing(tmp_path, 4, "another")


def test_only_what_a_run_wrote_is_gone_on_with_and_what_cannot_be_is_refused(tmp_path, tiny):
    path, rolling = tmp_path / "a.mp4", tmp_path / "rolling.yaml"
    flags = ["--num_frames", "3", "--quiet", "--output_path", str(path), "--config_path"]
    path.write_bytes(b"mine")
    with pytest.raises(CacheError, match="without its latents"):
        run_rollout.run([*flags, tiny.path])
    assert path.read_bytes() == b"mine" and not path.with_suffix(".latents.safetensors").exists()
    run_rollout.run([*flags, tiny.path, "--overwrite"])
    with pytest.raises(CacheError, match=r"belongs to another run.* or --overwrite"):
        run_rollout.run([*flags, tiny.path, "--seed", "3"])
    rolling.write_text(yaml.safe_dump(yaml.safe_load(Path(tiny.path).read_text()) | ROLLING))
    with pytest.raises(ConfigError, match=r"--capture knows no rolling_forcing.* run_extraction_all.py"):
        run_rollout.run([*flags, str(rolling), "--capture", "last:2"])


def test_a_torn_video_is_cut_to_its_whole_pieces(tmp_path):
    path, pixels = tmp_path / "a.mp4", torch.randint(0, 255, (24, 64, 64, 3), dtype=torch.uint8)
    video = GrowingVideo(path, "mine")
    video.append(pixels, 0)
    once = path.read_bytes()
    video.append(pixels, 24)
    twice = path.read_bytes()
    for cut in (len(once) + 5, len(once) + 200, len(twice) - 1):
        path.write_bytes(twice[:cut])
        video = GrowingVideo(path, "mine")
        assert (video.pieces, path.read_bytes()) == (1, once)
        video.append(pixels, 24)
        assert path.read_bytes() == twice
    path.write_bytes(once[:100])
    assert GrowingVideo(path, "mine").pieces == 0 and path.read_bytes() == b""
    path.write_bytes(twice)
    with pytest.raises(CacheError, match="belongs to another run"):
        GrowingVideo(path, "another")
    assert path.read_bytes() == twice and mp4_tag(path) == "mine"
    video = GrowingVideo(path, "mine")
    video.finish()
    assert GrowingVideo(path, "mine").is_finished and mp4_tag(path) == "mine" and len(iio.imread(path)) == 48
    assert iio.immeta(path)["duration"] == pytest.approx(48 / 16)

"""Long videos: stopped anywhere they go on with the same bits; files that grow; what is captured."""

from dataclasses import replace

import imageio.v3 as iio
import pytest
import torch
from conftest import ROOT
from diffusers import AutoencoderKLWan
from helpers.forked import forked
from helpers.rollouts import TWO_STEPS
from safetensors.torch import load_file

from experiments import run_rollout
from experiments.caches.files import CacheError, RunError, StoppedError, mp4_tag
from experiments.extraction import causal
from experiments.extraction.long_rollout import (
    LOOKS_BACK,
    BlockCapture,
    GrowingVideo,
    LatentFile,
    LongVideo,
    VideoWriter,
    make_long_video,
    path_of,
    read_blocks,
)
from experiments.extraction.rollout import RunObserver
from wan.blocks import block_ranges
from wan.config import load_config
from wan.vae import VAE

pytestmark = pytest.mark.slow
FRAMES = 18
HEADS = "checkpoints/wan-mini/heads"
POLICIES = [  # with every kind of memory: frames, averages, tokens that noisy queries chose, a release
    {"name": "window", "window": 9, "sink": 3},
    {"name": "ema_sink", "window": 9, "sink": 3},
    {"name": "memory_bank", "window": 9, "sink": 3},
    {"name": "triattention", "budget_tokens": 80, "sink": 1, "statistics": f"{HEADS}/query_means.npz"},
    {"name": "participative", "window": 12, "sink": 3, "budget": 9, "recent": 3},
    {"name": "window", "window": 12, "sink": 6, "released": "longlive"},
]


class StopAfter(RunObserver):
    """Asks to stop after so many blocks."""

    def __init__(self, blocks: int = 10**9):
        self.left = blocks

    def block(self, block: int, frames: range, num_blocks: int) -> None:
        self.left -= 1
        self.stopping = self.left == 0


@pytest.fixture(scope="module")
def config():
    return load_config("configs/wan_mini.yaml", {"num_frames": FRAMES, "device": "cpu"} | TWO_STEPS)


@pytest.fixture(scope="module")
def session(config):
    return causal.prepare(config, [])


@pytest.fixture(scope="module")
def vae(config):
    return VAE.from_pretrained(config.ckpt_dir)


def make(folder, session, config, vae, stop_after=10**9, capture="none", policy=None, frames=FRAMES):
    """One call of make_long_video -> its place."""
    config = replace(config, cache_policy=policy, num_frames=frames)
    session = replace(session, pipeline=causal.pipeline_of(session.pipeline.model, config))
    place = LongVideo(folder / "a.mp4")
    latents = LatentFile(place.latents, (frames, 16, 8, 8), session.dtype, str(policy))
    capture = BlockCapture.read(capture, 0)
    make_long_video(session, config, place, latents, capture, vae, StopAfter(stop_after))
    return place


def stopped(*args, **kwargs):
    with pytest.raises(StoppedError, match="run it again"):
        make(*args, **kwargs)


def no_video(monkeypatch):
    """Nothing is decoded or encoded."""
    monkeypatch.setattr(
        VideoWriter, "_decoded", lambda self, frames: torch.zeros(len(frames), 64, 64, 3).byte()
    )
    monkeypatch.setattr(GrowingVideo, "append", lambda self, *_: setattr(self, "pieces", self.pieces + 1))
    monkeypatch.setattr(GrowingVideo, "finish", lambda self: None)


def latents_of(place):
    return load_file(place.latents)["latents"]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p["name"] + "_" + str(p.get("released", "")))
def test_stopped_anywhere_it_goes_on_with_the_same_bits(policy, session, config, vae, tmp_path, monkeypatch):
    no_video(monkeypatch)
    whole = make(tmp_path / "whole", session, config, vae, policy=policy, frames=12)
    stopped(tmp_path / "parts", session, config, vae, stop_after=3, policy=policy, frames=12)
    parts = make(tmp_path / "parts", session, config, vae, policy=policy, frames=12)
    assert torch.equal(latents_of(parts), latents_of(whole))


@pytest.mark.beside
def test_video_and_captures_of_parts_are_those_of_the_whole(session, config, vae, tmp_path):
    whole = make(tmp_path / "whole", session, config, vae, capture="all", policy=POLICIES[0])
    place = LongVideo(tmp_path / "parts/a.mp4")
    stopped(tmp_path / "parts", session, config, vae, stop_after=5, capture="all", policy=POLICIES[0])
    playable = iio.imread(place.path)
    assert playable.shape == (1 + 4 * 14, 256, 256, 3)  # five blocks are a piece
    with open(place.latents, "ab") as file:
        file.write(b"half a frame")
    with open(place.path, "ab") as file:
        file.write(b"\0\0\1\0moof and no more")
    path_of(place.attention, 4).unlink()  # of the block that was being made
    parts = make(tmp_path / "parts", session, config, vae, capture="all", policy=POLICIES[0])
    assert iio.imread(parts.path).shape == (1 + 4 * (FRAMES - 1), 256, 256, 3)
    assert (iio.imread(parts.path) == iio.imread(whole.path)).all()
    assert parts.path.read_bytes() == whole.path.read_bytes()
    for one, other in zip(read_blocks(parts.attention), read_blocks(whole.attention), strict=True):
        assert all(torch.equal(one[k], other[k]) for k in ("logits", "mass", "key_frames", "key_positions"))
    assert make(tmp_path / "parts", session, config, vae, policy=POLICIES[0]).path == parts.path  # is done


def test_what_is_captured(session, config, vae, tmp_path, monkeypatch):
    no_video(monkeypatch)
    policy = {"name": "deep_sink", "window": 9, "sink": 3}
    place = make(tmp_path / "all", session, config, vae, capture="all", policy=policy)
    blocks = read_blocks(place.attention)
    last = blocks[-1]
    assert [block["block"] for block in blocks] == list(range(6)) and last["query_frames"] == [15, 16, 17]
    assert last["logits"].shape == (8, 12, 3, 9)
    torch.testing.assert_close(last["mass"].sum(-1), torch.ones(8, 12, 3))
    assert last["key_frames"][0].tolist() == [0, 1, 2, *range(12, 18)]
    assert last["key_positions"][0].tolist() == list(range(9, 18))  # the sink has moved along
    size = sum(path.stat().st_size for path in place.attention.iterdir())
    said = BlockCapture.read("all", 0).bytes(replace(config, cache_policy=policy), session.model_config)
    assert said < size < said + 6 * 16384
    assert BlockCapture.read("last:2", 0).blocks(6) == range(4, 6)
    place = make(tmp_path / "band", session, config, vae, capture="band:4", policy=policy)
    [*_, band] = read_blocks(place.attention)
    assert torch.equal(band["logits"], last["logits"][..., -4:])
    assert band["key_frames"][0].tolist() == [14, 15, 16, 17]


def test_blocks_that_come_out_otherwise_are_noticed(session, config, vae, tmp_path):
    policy = POLICIES[-2]  # its blocks are made again
    stopped(tmp_path, session, config, vae, stop_after=2, policy=policy)
    place = LongVideo(tmp_path / "a.mp4")
    content = bytearray(place.latents.read_bytes())
    content[-1] ^= 1
    place.latents.write_bytes(content)
    with pytest.raises(RunError, match="frames 3-5 come out differently"):
        make(tmp_path, session, config, vae, policy=policy)


def test_the_decoder_looks_back_far_enough_for_the_real_one():
    """The real decoder's layers with few channels: what it says after looking back is what it says anyway."""
    torch.manual_seed(0)
    scale = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = VAE(AutoencoderKLWan(base_dim=4, decoder_base_dim=4, z_dim=4, **scale))
    latents, blocks = torch.randn(66, 4, 1, 1), block_ranges([3] * 22)

    class Held:
        shape, frames = (66, 4, 32, 32), 66  # one block is a piece, as of large frames

        def read(self, frames):
            return latents[frames.start : frames.stop]

    seen = {}

    class Video:
        pieces = 0
        is_finished = False

        def append(self, pixels, first):
            seen.setdefault(self.pieces, []).append(pixels)
            self.pieces += 1

    one, other = Video(), Video()
    VideoWriter(one, vae, Held(), blocks, torch.device("cpu")).catch_up()
    other.pieces = 20
    VideoWriter(other, vae, Held(), blocks, torch.device("cpu")).catch_up()
    assert LOOKS_BACK < 60 and sorted(seen) == list(range(22)) and len(seen[20]) == len(seen[21]) == 2
    assert all(torch.equal(*seen[piece]) for piece in (20, 21))


def test_files_of_others_are_left_alone(tmp_path):
    video, latents = tmp_path / "a.mp4", tmp_path / "a.latents.safetensors"
    video.write_bytes(b"not a video at all")
    with pytest.raises(CacheError, match="is no mp4"):
        GrowingVideo(video, "mine")
    assert video.read_bytes() == b"not a video at all"
    LatentFile(latents, (6, 16, 8, 8), torch.float32, "mine")
    with pytest.raises(CacheError, match="is of another run"):
        LatentFile(latents, (6, 16, 8, 8), torch.float32, "another")
    latents.write_bytes(bytes(range(256)) * 300)
    with pytest.raises(CacheError, match="no file of latents"):
        LatentFile(latents, (6, 16, 8, 8), torch.float32, "mine")
    with pytest.raises(CacheError, match="no captured blocks"):
        read_blocks(tmp_path)
    path_of(tmp_path, 0).write_bytes(b"torn")
    with pytest.raises(CacheError, match="not readable"):
        read_blocks(tmp_path)
    torch.save({"format": "atlas"}, path_of(tmp_path, 0))
    with pytest.raises(CacheError, match="no captured block"):
        read_blocks(tmp_path)


def test_a_file_of_latents_is_whole_at_every_block(tmp_path):
    path, latents = tmp_path / "a.safetensors", torch.randn(6, 16, 2, 3)
    for first in (0, 3):
        file = LatentFile(path, (6, 16, 2, 3), torch.float32, "mine")
        assert file.frames == first
        file.append(first, latents[first : first + 3])
    assert torch.equal(load_file(path)["latents"], latents)
    assert path.read_bytes()[0] % 8 == 0  # the header's length: numbers begin aligned
    assert torch.equal(file.read(range(2, 5)), latents[2:5])


def test_blocks_are_missing_unless_they_are_this_runs(tmp_path):
    for name, block in ((0, 0), (1, 0), (2, 2)):  # one under the name of another
        torch.save({"fingerprint": "mine", "block": block, "step": 0, "band": 0}, path_of(tmp_path, name))
    assert BlockCapture("all").missing(tmp_path, 4, "mine") == [1, 3]
    assert BlockCapture("none", step=1).missing(tmp_path, 4, "mine") == []
    with pytest.raises(CacheError, match="in another pass or with other keys"):
        BlockCapture("all", step=1).missing(tmp_path, 4, "mine")
    with pytest.raises(CacheError, match="is of another run"):
        BlockCapture("all").missing(tmp_path, 4, "another")


def test_only_what_a_run_wrote_is_gone_on_with(tmp_path, monkeypatch, session, config, vae):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "a.mp4"
    flags = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "3", "--quiet"]
    flags += ["--output_path", str(path)]
    path.write_bytes(b"mine")
    with pytest.raises(CacheError, match="without its latents"):
        run_rollout.run(flags)
    assert path.read_bytes() == b"mine" and not path.with_suffix(".latents.safetensors").exists()
    run_rollout.run([*flags, "--overwrite"])
    made = path.read_bytes()
    run_rollout.run(flags)
    assert path.read_bytes() == made
    with pytest.raises(CacheError, match="is of another run"):
        run_rollout.run([*flags, "--seed", "3"])
    finished = tmp_path / "b/a.mp4"
    finished.parent.mkdir()
    finished.write_bytes(made)
    with pytest.raises(CacheError, match=r"is of another run .*choose another --output_path, or --overwrite"):
        make(finished.parent, session, config, vae)


def test_a_torn_video_is_cut_to_its_whole_pieces(tmp_path):
    path, pixels = tmp_path / "a.mp4", torch.randint(0, 255, (6, 64, 64, 3), dtype=torch.uint8)
    video = GrowingVideo(path, "mine")
    video.append(pixels, 0)
    once = path.read_bytes()
    video.append(pixels, 6)
    twice = path.read_bytes()
    for cut in (len(once) + 5, len(once) + 200, len(twice) - 1):
        path.write_bytes(twice[:cut])
        video = GrowingVideo(path, "mine")
        assert (video.pieces, path.read_bytes()) == (1, once)
        video.append(pixels, 6)
        assert path.read_bytes() == twice
    path.write_bytes(once[:100])
    assert GrowingVideo(path, "mine").pieces == 0 and path.read_bytes() == b""
    path.write_bytes(twice)
    with pytest.raises(CacheError, match="is of another run"):
        GrowingVideo(path, "another")
    assert path.read_bytes() == twice and mp4_tag(path) == "mine"
    video = GrowingVideo(path, "mine")
    video.finish()
    assert GrowingVideo(path, "mine").is_finished and mp4_tag(path) == "mine" and len(iio.imread(path)) == 12
    assert iio.immeta(path)["duration"] == pytest.approx(12 / 16)


@pytest.mark.beside
def test_killed_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "6", "--cache_policy", "longlive"]

    def rolling(name: str):
        output = ["--quiet", "--capture", "all", "--output_path", str(tmp_path / name)]
        return lambda: run_rollout.run([*flags, *output])

    whole = forked(rolling("whole.mp4"))
    assert whole.code == 0, whole
    killed = forked(rolling("parts.mp4"), kill_after=0.6 * whole.seconds)
    assert killed.code in (0, -9)
    (tmp_path / "parts.attention").mkdir(exist_ok=True)
    (tmp_path / "parts.attention/.block_00001.pt.9-0a.part").write_bytes(b"half")
    assert forked(rolling("parts.mp4")).code == 0
    for suffix in (".mp4", ".latents.safetensors"):
        one, other = (tmp_path / name for name in ("parts.mp4", "whole.mp4"))
        assert one.with_suffix(suffix).read_bytes() == other.with_suffix(suffix).read_bytes()
    assert len(list((tmp_path / "parts.attention").iterdir())) == 2

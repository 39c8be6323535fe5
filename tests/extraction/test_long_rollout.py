"""Long videos: stopped anywhere they go on with the same bits; files of blocks; what is captured."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from experiments import run_rollout
from experiments.caches.blocks import BlockCapture, LatentBlocks, path_of, read_blocks
from experiments.caches.files import CacheError, RunError, StoppedError
from experiments.caches.mp4 import count_frames, mp4_tag, write_mp4
from experiments.extraction import video
from experiments.extraction.long_rollout import LongVideo, make_long_video
from experiments.progress import Progress
from experiments.provenance import fingerprint
from experiments.session import Session, pipeline_of
from wan.errors import ConfigError
from wan.vae import VAE

pytestmark = pytest.mark.slow
FRAMES = 12
PICTURES = 1 + 4 * (FRAMES - 1)
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
    """Asks to stop after so many blocks; keeps what is printed."""

    def __init__(self, blocks: int = 10**9):
        super().__init__(quiet=True)
        self.left, self.made, self.lines = blocks, 0, []

    def advance(self, unit: str, index: int, count: int, what: str) -> None:
        self.made += 1
        self.stopping = self.made == self.left

    def print(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    """Pieces of two blocks, and videos as small as they are."""
    monkeypatch.setattr(video, "frames_at_once", lambda *_: 6)
    monkeypatch.setattr(video.mp4, "SHORTEST_SIDE", 64)


@pytest.fixture(autouse=True)
def one_vae(vae, monkeypatch):
    monkeypatch.setattr(video, "load_vae", lambda *_: vae)


@pytest.fixture(scope="module")
def vae(tiny):
    return VAE.from_pretrained(tiny.config.ckpt_dir)


def make(folder, tiny, stop_after=10**9, capture="none", policy=None, step=0, watch=None):
    """One call of make_long_video -> its place. A policy that is none are other settings."""
    settings = {"cache_policy": policy} if policy is None or "name" in policy else policy
    config = replace(tiny.config, num_frames=FRAMES, **settings)
    session = tiny.session.replaced(pipeline=pipeline_of(tiny.session.model, config))
    place, run = LongVideo(folder / "a.mp4"), fingerprint({"policy": policy})
    latents = latent_blocks(place.latents, run, session.dtype)
    capture = BlockCapture.read(capture, step)
    watch = watch or StopAfter(stop_after)
    with video.LiveVideo(config, place.path, growing=place.path) as live:
        live.comment = f"{run} unfinished"
        make_long_video(session, config, place, latents, capture, live, watch)
    return place


def latent_blocks(folder, run="mine", dtype=torch.float32):
    return LatentBlocks(folder, run, [3] * (FRAMES // 3), (16, 8, 8), dtype)


def latents_of(place):
    """Latents [F, C, h, w] of all blocks on disk."""
    return torch.cat([load_file(path)["latents"] for path in sorted(place.latents.iterdir())])


def stopped(*args, **kwargs):
    with pytest.raises(StoppedError, match="run it again"):
        make(*args, **kwargs)


def no_video(monkeypatch):
    """Nothing is decoded or encoded."""
    monkeypatch.setattr(video.LiveVideo, "add", lambda self, latents: None)
    monkeypatch.setattr(video.LiveVideo, "save", lambda self, blocks, run: None)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "_".join(map(str, p.values())))
def test_stopped_anywhere_it_goes_on_with_the_same_bits(policy, tiny, tmp_path, monkeypatch):
    no_video(monkeypatch)
    if policy.get("name") == "triattention":
        draw = np.random.default_rng(0).random
        means = {name: draw((2, 2, 8)) for name in ("q_mean_real", "q_mean_imag", "q_abs_mean")}
        np.savez(tmp_path / "means.npz", **means)
        policy = policy | {"statistics": str(tmp_path / "means.npz")}
    whole = make(tmp_path / "whole", tiny, policy=policy)
    stopped(tmp_path / "parts", tiny, stop_after=3, policy=policy)
    assert len(latents_of(LongVideo(tmp_path / "parts/a.mp4"))) == 9  # three blocks
    parts = make(tmp_path / "parts", tiny, policy=policy)
    assert torch.equal(latents_of(parts), latents_of(whole))


@pytest.mark.beside
def test_video_and_captures_of_parts_are_those_of_the_whole(tiny, tmp_path):
    whole = make(tmp_path / "whole", tiny, capture="all", policy=WINDOW)
    place = LongVideo(tmp_path / "parts/a.mp4")
    stopped(tmp_path / "parts", tiny, stop_after=3, capture="all", policy=WINDOW)
    assert iio.imread(place.path).shape == (1 + 4 * 8, 64, 64, 3)  # three blocks
    assert mp4_tag(place.path).endswith("unfinished")
    path_of(place.attention, 2).unlink()  # of the block that was being made
    parts = make(tmp_path / "parts", tiny, capture="all", policy=WINDOW)
    assert count_frames(parts.path) == PICTURES
    assert parts.path.read_bytes() == whole.path.read_bytes()
    for one, other in zip(read_blocks(parts.attention), read_blocks(whole.attention), strict=True):
        assert all(torch.equal(one[k], other[k]) for k in ("logits", "mass", "key_frames", "key_positions"))


def test_a_whole_video_is_left_alone_and_any_other_is_encoded_again(tiny, tmp_path):
    place = make(tmp_path, tiny, policy=WINDOW)
    content, tag = place.path.read_bytes(), mp4_tag(place.path)
    before = place.path.stat()
    make(tmp_path, tiny, policy=WINDOW)
    assert place.path.stat() == before
    # Cut anywhere, empty, removed, with too few frames, without its name
    for size in (428, len(content) // 2, 0):
        place.path.write_bytes(content[:size])
        watch = StopAfter()
        make(tmp_path, tiny, policy=WINDOW, watch=watch)
        assert place.path.read_bytes() == content and watch.made == 0  # from the latents alone
    place.path.unlink()
    make(tmp_path, tiny, policy=WINDOW)
    assert place.path.read_bytes() == content
    for frames, name in ((9, tag), (PICTURES, tag.partition(" ")[0])):
        write_mp4(np.zeros((frames, 64, 64, 3), np.uint8), place.path, tag=name, overwrite=True)
        make(tmp_path, tiny, policy=WINDOW)
        assert place.path.read_bytes() == content


def test_what_is_captured(tiny, tmp_path, monkeypatch):
    no_video(monkeypatch)
    policy = {"name": "deep_sink", "window": 9, "sink": 3}
    place = make(tmp_path / "all", tiny, capture="all", policy=policy)
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
    place = make(tmp_path / "band", tiny, capture="band:4", policy=policy)
    [*_, band] = read_blocks(place.attention)
    assert torch.equal(band["logits"], last["logits"][..., -4:])
    assert band["key_frames"][0].tolist() == [8, 9, 10, 11]


def test_what_is_captured_later_is_captured_as_if_at_once(tiny, tmp_path, monkeypatch):
    """Also of a video that is finished, which stays as it is; other keys or passes are not mixed in."""
    no_video(monkeypatch)
    whole = make(tmp_path / "whole", tiny, capture="all")
    place = make(tmp_path, tiny)
    before = latents_of(place)
    make(tmp_path, tiny, capture="last:1")
    assert [block["block"] for block in read_blocks(place.attention)] == [3]
    make(tmp_path, tiny, capture="all")
    assert torch.equal(latents_of(place), before)
    for one, other in zip(read_blocks(place.attention), read_blocks(whole.attention), strict=True):
        assert torch.equal(one["logits"], other["logits"]) and one["block"] == other["block"]
    for other in ({"capture": "band:3"}, {"capture": "last:1", "step": 1}):
        with pytest.raises(CacheError, match="was captured in another pass or with other keys"):
            make(tmp_path, tiny, **other)
    path_of(place.attention, 0).write_bytes(b"torn")
    make(tmp_path, tiny, capture="all")
    assert read_blocks(place.attention)[0]["logits"].equal(read_blocks(whole.attention)[0]["logits"])


def test_a_run_goes_on_at_the_first_block_that_is_missing_or_damaged(tiny, tmp_path):
    """Also behind whole ones, whose blocks are generated again under policies that choose."""
    whole = make(tmp_path / "whole", tiny, policy=CHOOSES)
    for number, change in enumerate((Path.unlink, flip_last_bit, cut_off, empty)):
        folder = tmp_path / str(number)
        place = LongVideo(folder / "a.mp4")
        shutil.copytree(tmp_path / "whole", folder)
        change(latent_blocks(place.latents).path(1))
        watch = StopAfter()
        make(folder, tiny, policy=CHOOSES, watch=watch)
        assert watch.made == 3 and torch.equal(latents_of(place), latents_of(whole))
        assert place.path.read_bytes() == whole.path.read_bytes()
        lines = (
            [] if number == 0 else [f"{place.latents}/block_00001.safetensors is damaged: blocks from 1 on"]
        )
        assert [line.partition(" are made")[0] for line in watch.lines] == lines
    other = latent_blocks(place.latents, fingerprint({"policy": CHOOSES}))
    other.write(0, torch.zeros(3, 16, 8, 8))
    other.path(3).unlink()
    with pytest.raises(RunError, match=r"block_00000\.safetensors comes out differently now"):
        make(folder, tiny, policy=CHOOSES)


def flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-5])


def empty(path):
    path.write_bytes(b"")


def captured_block(number, run):
    ones, keys = torch.full((2, 3, 3, 3), 1 / 3), torch.zeros(2, 3)
    block = {"format": "block_attention", "step": 0, "band": 0, "query_frames": [0, 1, 2], "timestep": 1.0}
    block |= {"logits": ones, "mass": ones, "key_frames": keys, "key_positions": keys}
    return block | {"block": number, "fingerprint": run}


ZEROS = torch.zeros(3, 16, 8, 8)


def another_run(folder, path):
    latent_blocks(folder, "another").write(3, ZEROS)


def no_metadata(folder, path):
    save_file({"latents": ZEROS}, path)


def another_tensor(folder, path):
    save_file({"x": ZEROS}, path, {"fingerprint": "another"})


def fewer_frames(folder, path):
    latent_blocks(folder).write(3, ZEROS[:2])


def another_dtype(folder, path):
    latent_blocks(folder, dtype=torch.bfloat16).write(3, ZEROS)


@pytest.mark.parametrize("write", [another_run, no_metadata, another_tensor, fewer_frames, another_dtype])
def test_a_block_of_others_is_refused_and_stays(tmp_path, write):
    mine = latent_blocks(tmp_path)
    write(tmp_path, mine.path(3))
    content = mine.path(3).read_bytes()
    with pytest.raises(CacheError, match=r"choose another --output_path, or move .* away"):
        mine.finished()
    assert mine.path(3).read_bytes() == content


def test_a_block_under_the_name_of_another_is_none(tmp_path):
    mine = latent_blocks(tmp_path)
    mine.write(0, ZEROS)
    mine.path(0).rename(mine.path(3))
    assert mine.read(3) is None


def test_attention_of_others_is_refused(tmp_path):
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


@settings(max_examples=50)
@given(st.integers(0, 2**20), st.integers(0, 7))
def test_a_changed_bit_is_seen(place, bit):
    """A block whose numbers changed is none; one whose name changed is another run's."""
    latents = torch.randn(3, 16, 8, 8)
    with tempfile.TemporaryDirectory() as folder:
        blocks = latent_blocks(Path(folder))
        blocks.write(1, latents)
        content = bytearray(blocks.path(1).read_bytes())
        content[place % len(content)] ^= 1 << bit
        blocks.path(1).write_bytes(content)
        try:
            found = blocks.read(1)
        except CacheError:
            return
        assert found is None or torch.equal(found, latents)
        in_numbers = place % len(content) >= len(content) - latents.nbytes
        assert not in_numbers or found is None


def test_blocks_are_missing_unless_they_are_this_runs(tmp_path):
    for name, block in ((1, 0), (2, 2)):  # one under the name of another
        torch.save(captured_block(block, "mine"), path_of(tmp_path, name))
    assert BlockCapture("all").missing(tmp_path, 4, "mine") == [0, 1, 3]
    assert BlockCapture("none", step=1).missing(tmp_path, 4, "mine") == []
    with pytest.raises(CacheError, match="in another pass or with other keys"):
        BlockCapture("all", step=1).missing(tmp_path, 4, "mine")
    with pytest.raises(CacheError, match="belongs to another run"):
        BlockCapture("all").missing(tmp_path, 4, "another")


def test_only_what_a_run_wrote_is_gone_on_with_and_what_cannot_be_is_refused(tmp_path, tiny, monkeypatch):
    path, rolling = tmp_path / "a.mp4", tmp_path / "rolling.yaml"
    flags = ["--num_frames", "3", "--quiet", "--output_path", str(path), "--config_path"]
    path.write_bytes(b"mine")
    with pytest.raises(CacheError, match="without its latents; choose another --output_path"):
        run_rollout.run([*flags, tiny.path])
    assert path.read_bytes() == b"mine"
    run_rollout.run([*flags, tiny.path, "--overwrite"])
    assert count_frames(path) == 9
    other = f"it has seed {tiny.config.seed}, this command has seed 3; choose another --output_path"
    with monkeypatch.context() as patch, pytest.raises(CacheError, match=f"belongs to another run: {other}"):
        patch.setattr(Session, "prepare", lambda *_, **__: pytest.fail("loaded"))
        run_rollout.run([*flags, tiny.path, "--seed", "3"])
    with pytest.raises(CacheError, match=r"this command has cache_policy \{'name': 'window', 'window': 3\}"):
        run_rollout.run([*flags, tiny.path, "--cache_policy", "window,window=3"])

    def refused(message):
        before = path.read_bytes()
        with pytest.raises(CacheError, match=message):
            run_rollout.run([*flags, tiny.path])
        assert path.read_bytes() == before

    pictures = np.zeros((9, 64, 64, 3), np.uint8)
    path.write_bytes(b"not a video at all")
    refused("is no mp4 of this run")
    write_mp4(pictures, path, overwrite=True)
    refused("is no mp4 of this run")
    write_mp4(pictures, path, tag="another decoder", overwrite=True)
    refused("belongs to another run")
    older = path.with_suffix(".latents.safetensors")
    older.write_bytes(b"of version 1")
    with pytest.raises(CacheError, match=r"is of version 1, and is not continued; choose another"):
        run_rollout.run([*flags, tiny.path])
    assert older.exists()
    run_rollout.run([*flags, tiny.path, "--overwrite"])
    assert count_frames(path) == 9 and not older.exists()
    rolling.write_text(yaml.safe_dump(yaml.safe_load(Path(tiny.path).read_text()) | ROLLING))
    with pytest.raises(ConfigError, match=r"--capture knows no rolling_forcing.* run_extraction_all.py"):
        run_rollout.run([*flags, str(rolling), "--capture", "last:2"])

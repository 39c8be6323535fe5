"""Ctrl-C: what is complete is kept, what is missing is said; and what else a run says."""

import json
import os
import re

import pytest
import torch
from conftest import ROOT
from helpers.stopping import stopping_after

from experiments import run_extraction, run_extraction_all, run_extraction_each, run_extraction_figure4
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from experiments.running import cli
from wan.blocks import block_frames

CONFIG = ["--config_path", str(ROOT / "configs/wan_mini.yaml")]
MINI = [*CONFIG, "--num_frames", "12"]  # four blocks
SHORT = [*CONFIG, "--num_frames", "6", "--quiet"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def stopped(script, flags, capfd) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(script.run, [*MINI, "--quiet", *flags])
    assert ended.value.code == 130
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    note, said = lines
    assert note == "stopping after this block; Ctrl-C again stops at once"
    return said


def test_an_atlas_stopped_after_three_blocks(tmp_path, monkeypatch, capfd):
    run_extraction_all.run(
        [*MINI, "--quiet", "--cross", "--key_curve", "--output_path", str(tmp_path / "whole.pt")]
    )
    stopping_after(monkeypatch, 2)
    said = stopped(
        run_extraction_all, ["--cross", "--key_curve", "--output_path", str(tmp_path / "part.pt")], capfd
    )
    assert (
        f"stopped after 3 of 4 blocks; saved as partial: {tmp_path / 'part.pt'}; "
        "to make the rest, run the same" in said
    )
    part, whole = (load_cache(tmp_path / name) for name in ("part.pt", "whole.pt"))
    assert (
        part["partial"] is True
        and part["blocks_done"] == 3
        and "partial" not in whole
        and "key_curve" not in part
    )
    for name in ("frame_logits", "frame_mass", "cross_mass"):
        assert part[name].shape == whole[name].shape
        torch.testing.assert_close(
            part[name][:, :, :, :9], whole[name][:, :, :, :9], rtol=0, atol=0, equal_nan=True
        )
        assert part[name][:, :, :, 9:].isnan().all()
    view = open_profiles(part)
    assert view.query_frames == (6, 7, 8) == tuple(
        block_frames(part["block_sizes"], 2)
    ) and view.key_frames == tuple(range(9))
    assert any("stopped after 3 of 4 blocks; what comes later is absent" in note for note in view.notes)


def test_a_layer_stopped_after_two_blocks(tmp_path, monkeypatch, capfd):
    stopping_after(monkeypatch, 1)
    stopped(run_extraction_each, ["--output_path", str(tmp_path / "part.pt")], capfd)
    part = load_cache(tmp_path / "part.pt")
    assert part["last_block_query_frames"] == [3, 4, 5] and part["full_frame_attention"][:, 6:].isnan().all()
    profile = open_profiles(part).frame_profile(3)
    assert profile.shape == (12, 12) and not torch.from_numpy(profile)[:, :6].isnan().any()


def test_a_call_captured_before_the_stop_is_kept(tmp_path, monkeypatch, capfd):
    stopping_after(monkeypatch, 1)
    stopped(run_extraction, ["--blocks", "0", "-1", "--output_path", str(tmp_path / "part.pt")], capfd)
    assert {call["block"] for call in load_cache(tmp_path / "part.pt")["attention_weights"]} == {0}


def test_what_needs_the_last_block_leaves_nothing(tmp_path, monkeypatch, capfd):
    stopping_after(monkeypatch, 1)
    said = stopped(run_extraction_figure4, ["--output_path", str(tmp_path / "part.pt")], capfd)
    assert "none of what was asked for was captured yet" in said and os.listdir(tmp_path) == []


def test_a_partial_cache_does_not_replace_a_whole_one(tmp_path, monkeypatch, capfd):
    path = tmp_path / "out.pt"
    run_extraction_each.run([*MINI, "--quiet", "--output_path", str(path)])
    before = path.read_bytes()
    stopping_after(monkeypatch, 1)
    stopped(run_extraction_each, ["--output_path", str(path), "--seed", "7"], capfd)
    assert path.read_bytes() == before and load_cache(tmp_path / "out.partial.pt")["seed"] == 7


def test_after_the_last_block_nothing_is_partial(tmp_path, monkeypatch):
    stopping_after(monkeypatch, 3)
    run_extraction_each.run([*MINI, "--quiet", "--output_path", str(tmp_path / "out.pt")])
    assert "partial" not in load_cache(tmp_path / "out.pt")


def test_a_line_per_block_and_a_log(tmp_path, capfd):
    log = tmp_path / "logs/log.jsonl"
    flags = [*MINI, "--output_path", str(tmp_path / "out.pt"), "--log_file", str(log), "--deterministic"]
    capfd.readouterr()
    run_extraction_each.run(flags)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("block", "4 blocks"))]
    assert [line.split(":")[0] for line in lines[:2]] == ["block 1/4 (frames 0-2)", "block 2/4 (frames 3-5)"]
    assert (
        len(lines) == 5 and "s left, " in lines[0] and lines[-1].startswith("4 blocks of 12 frames, 1 file: ")
    )
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events] == ["rollout", *["block"] * 4, "saved", "end"] and events[-1][
        "ok"
    ]
    assert not torch.are_deterministic_algorithms_enabled()
    run_extraction_each.run([*flags, "--quiet", "--seed", "42"])
    assert capfd.readouterr() == ("", "")
    with pytest.raises(CacheError, match="cannot be written"):
        run_extraction_each.run(
            [*SHORT, "--output_path", str(tmp_path / "out.pt"), "--log_file", "/proc/log"]
        )


@pytest.mark.parametrize(
    ("error", "flags", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB.\nmore"),
            [],
            r"out of GPU memory while rolling out block 0 of 2: CUDA out of memory. "
            r"Tried 9 GiB.; --granularity frame keeps no",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            ["--granularity", "frame"],
            "rolling out block 0 of 2.*fewer --num_f",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            [],
            "out of host memory while",
        ),
    ],
)
def test_out_of_memory_says_what_helps(error, flags, message, tmp_path, monkeypatch, capfd):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr("wan.pipeline.CausalInferencePipeline.inference", full)
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_figure4.run, [*SHORT, *flags, "--output_path", str(tmp_path / "out.pt")])
    said = capfd.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1 and not os.listdir(tmp_path)
    assert re.search(message, said), said

"""The base model's sampler under the same watch:
guarded at every step, stopped between steps, room asked for before.
"""

import json
import os
import re
import signal
import time

import pytest
from conftest import ROOT

from experiments import extract_attention_wan
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from experiments.extraction import rollout
from experiments.running import cli
from experiments.running import run as jobs
from experiments.running.progress import Progress

SHORT = ["--ckpt_dir", "checkpoints/wan-mini", "--num_frames", "9", "--num_steps", "4"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def said_by(flags, code, capfd) -> list[str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(extract_attention_wan.run, [*SHORT, *flags])
    lines = capfd.readouterr().err.splitlines()
    assert ended.value.code == code, lines
    return lines


def stopping_after(monkeypatch, step: int, number=signal.SIGINT) -> None:
    original = Progress.step

    def on_step(self, at, timestep, num_steps):
        original(self, at, timestep, num_steps)
        if at == step:
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    monkeypatch.setattr(Progress, "step", on_step)


def test_a_line_for_a_tenth_of_the_steps_and_a_log(tmp_path, capfd):
    log = tmp_path / "log.jsonl"
    flags = ["--num_steps", "30", "--num_frames", "1", "--output_dir", str(tmp_path), "--log_file", str(log)]
    extract_attention_wan.run([*SHORT, *flags])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("step", "30 steps"))]
    assert re.fullmatch(r"step 3/30 \(t = \d+\): \d+\.\d s, \d+\.\d s left, \d+\.\d GiB memory", lines[0]), (
        lines
    )
    assert len(lines) == 11 and lines[-1].startswith("30 steps of 1 frames, 1 file: ")
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events == ["rollout", *["step"] * 30, "saved", "end"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_after_the_captured_step_the_capture_is_whole(number, tmp_path, monkeypatch, capfd):
    extract_attention_wan.run([*SHORT, "--step", "1", "--quiet", "--output_dir", str(tmp_path / "whole")])
    stopping_after(monkeypatch, 2, number)
    path = tmp_path / "part/layer7.pt"
    note, said = said_by(["--quiet", "--step", "1", "--output_dir", str(tmp_path / "part")], 130, capfd)
    assert note == "stopping after this step; Ctrl-C again stops at once"
    assert said == (
        f"error: stopped after 3 of 4 steps; saved whole: {path}; "
        "to make the rest, run the same command again"
    )
    assert path.read_bytes() == (tmp_path / "whole/layer7.pt").read_bytes() and os.listdir(
        tmp_path / "part"
    ) == ["layer7.pt"]


def test_stopped_before_the_captured_step_nothing_is_complete(tmp_path, monkeypatch, capfd):
    stopping_after(monkeypatch, 2)
    said = said_by(["--quiet", "--step", "last", "--output_dir", str(tmp_path)], 130, capfd)
    assert said[-1] == (
        "error: stopped after 3 of 4 steps; none of what was asked for was captured yet; "
        "to make the rest, run the same command again"
    )
    assert os.listdir(tmp_path) == []


def test_an_atlas_has_the_steps_that_were_reached(tmp_path, monkeypatch, capfd):
    flags = ["--quiet", "--all_layers", "--step", "first", "last", "--output_dir"]
    extract_attention_wan.run([*SHORT, *flags, str(tmp_path / "whole")])
    stopping_after(monkeypatch, 1)
    said = said_by([*flags, str(tmp_path / "part")], 130, capfd)
    assert "stopped after 2 of 4 steps; saved as partial: " in said[-1]
    for name in ("atlas_base.pt", "atlas_base_uncond.pt"):
        part, whole = (load_cache(tmp_path / folder / name) for folder in ("part", "whole"))
        assert (
            part["partial"]
            and part["pass_steps"] == [0]
            and len(whole["pass_steps"]) == 2
            and "partial" not in whole
        )
        assert part["frame_mass"].equal(whole["frame_mass"][:, :1]) and part["frame_logits"].equal(
            whole["frame_logits"][:, :1]
        )
        assert open_profiles(part).notes == (
            "partial: the run was stopped after 2 of 4 steps; of what was asked for, steps 3 are absent",
        )


def test_numbers_are_guarded_at_the_step_where_they_go_wrong(tmp_path, monkeypatch, capfd):
    """NaN enters at layer 3 in the unconditional branch of step 2, of which nothing is captured;
    step 3 is never made.
    """
    steps, original = [], rollout.capture_guarded

    def capture_guarded(model, *more):
        def spoil(module, inputs, output):
            at = rollout.ATTENTION_WEIGHT_CAPTURE.now
            steps.append(at.step)
            return output / 0 if (at.step, at.branch) == (2, "uncond") else output

        model.blocks[3].register_forward_hook(spoil)
        return original(model, *more)

    monkeypatch.setattr(rollout, "capture_guarded", capture_guarded)
    (said,) = said_by(["--quiet", "--output_dir", str(tmp_path)], 1, capfd)
    assert re.match(
        r"error: layer 3, block 0, step 2 \(t = \d+\), unconditional branch: its output is not finite; try",
        said,
    )
    assert max(steps) == 2 and os.listdir(tmp_path) == []


def test_room_on_the_disk_is_asked_for_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "experiments.running.locks.shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000})
    )
    monkeypatch.setattr("wan.checkpoint.build_model", lambda *args: pytest.fail("the model was loaded"))
    for flags in ([], ["--all_layers", "--step", "all"]):
        with pytest.raises(CacheError, match=r"cannot be written: it needs \d{5,7} bytes, 1000 are free in "):
            extract_attention_wan.run([*SHORT, *flags, "--output_dir", str(tmp_path)])


@pytest.mark.parametrize("flags", [[], ["--all_layers", "--step", "all"]])
def test_the_estimate_is_close_and_never_too_small(flags, tmp_path, monkeypatch):
    asked, original = {}, jobs.make_outputs
    monkeypatch.setattr(
        jobs,
        "make_outputs",
        lambda args, config, outputs, each, *more: (
            asked.update(dict.fromkeys(outputs, each)) or original(args, config, outputs, each, *more)
        ),
    )
    extract_attention_wan.run([*SHORT, *flags, "--quiet", "--output_dir", str(tmp_path)])
    for path, each in asked.items():
        assert os.path.getsize(path) <= each <= os.path.getsize(path) * 1.1 + 2**17

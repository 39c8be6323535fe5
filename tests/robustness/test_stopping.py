"""Ctrl-C and sweeps: what is complete is kept, what is missing is said, and the same command goes on."""

import hashlib
import json
import os
import re
import signal
import time

import pytest
import torch
from conftest import ROOT
from helpers.forked import FULL, exit_code, forked, tell

from experiments import run_extraction, run_extraction_all, run_extraction_each, run_extraction_figure4
from experiments.caches import load_cache, save_cache
from experiments.caches.errors import CacheError, RunError
from experiments.caches.view import open_profiles
from experiments.extraction import causal
from experiments.running import cli, sweep_plan, sweep_state
from experiments.running.progress import Progress
from wan.blocks import block_frames
from wan.errors import ConfigError

MINI = ["--config_path", str(ROOT / "configs/wan_mini.yaml")]
SHORT = [*MINI, "--num_frames", "6", "--quiet"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def stopping_after(monkeypatch, block: int) -> None:
    """A Ctrl-C while a block is generated."""
    original = Progress.block

    def on_block(self, number, frames, num_blocks):
        original(self, number, frames, num_blocks)
        if number == block:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    monkeypatch.setattr(Progress, "block", on_block)


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
        f"stopped after 3 of 7 blocks; saved as partial: {tmp_path / 'part.pt'}; "
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
    assert any("stopped after 3 of 7 blocks; what comes later is absent" in note for note in view.notes)


def test_a_layer_stopped_after_two_blocks(tmp_path, monkeypatch, capfd):
    stopping_after(monkeypatch, 1)
    stopped(run_extraction_each, ["--output_path", str(tmp_path / "part.pt")], capfd)
    part = load_cache(tmp_path / "part.pt")
    assert part["last_block_query_frames"] == [3, 4, 5] and part["full_frame_attention"][:, 6:].isnan().all()
    profile = open_profiles(part).frame_profile(3)
    assert profile.shape == (12, 21) and not torch.from_numpy(profile)[:, :6].isnan().any()


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
    stopping_after(monkeypatch, 6)
    run_extraction_each.run([*MINI, "--quiet", "--output_path", str(tmp_path / "out.pt")])
    assert "partial" not in load_cache(tmp_path / "out.pt")


# -- sweeps
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(
        "# shapes\na red circle moving right\n\nA blue square!\na red circle moving right\n", encoding="utf-8"
    )
    return path


def sweeping(prompts, folder, *flags, seeds=("0", "1")):
    return lambda: run_extraction_all.run(
        [*SHORT, "--prompts", str(prompts), "--seeds", *seeds, "--output_dir", str(folder), *flags]
    )


def files_below(folder) -> dict[str, bytes]:
    """Every file below a folder by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


NAMES = [f"{slug}_s{seed}.pt" for slug in ("a-blue-square", "a-red-circle-moving-right") for seed in (0, 1)]


def test_a_sweep_goes_on_after_a_kill(tmp_path, prompts, monkeypatch, capfd):
    loads, original = [], causal.load_pipeline
    monkeypatch.setattr(causal, "load_pipeline", lambda *args: loads.append(1) or original(*args))
    sweeping(prompts, tmp_path / "whole")()
    whole = files_below(tmp_path / "whole")
    records = [name for name in whole if name.startswith("items/")]
    assert sorted(whole) == [*NAMES, *sorted(records), "manifest.json"] and len(loads) == 1
    assert len(records) == 4 and all(name.endswith(".json") for name in records)
    kills = 0
    for attempt in range(1, 40):  # each time killed a little later
        done = forked(
            sweeping(prompts, tmp_path / "killed"), kill_after=0.1 + (0.05 if FULL else 0.2) * attempt
        )
        kills += done.code < 0
        for path in (tmp_path / "killed").glob("*.pt"):
            assert path.read_bytes() == whole[path.name]
        if done.code == 0:
            break
    assert files_below(tmp_path / "killed") == whole
    tell(capfd, f"a sweep of 4 runs killed {kills} times, then whole and equal to an undisturbed one")
    states = [run["state"] for run in json.loads(whole["manifest.json"])["runs"]]
    assert states == ["done"] * 4
    sweeping(prompts, tmp_path / "whole")()
    assert len(loads) == 1  # nothing to do: nothing is loaded


def test_a_stopped_sweep_says_how_to_go_on(tmp_path, prompts, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        stopping_after(patch, 0)
        with pytest.raises(SystemExit) as ended:
            cli.main(lambda argv: sweeping(prompts, tmp_path / "out")(), [])
    said = capfd.readouterr().err
    assert ended.value.code == 130 and "0 of 4 runs are done and will not be made again" in said, said
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert [run["state"] for run in manifest["runs"]] == ["partial", "waiting", "waiting", "waiting"]
    sweeping(prompts, tmp_path / "out")()
    assert all("partial" not in load_cache(tmp_path / "out" / name) for name in NAMES)


def test_other_settings_are_not_mixed_in(tmp_path, prompts):
    sweeping(prompts, tmp_path / "out", seeds=("0",))()
    path = tmp_path / "out" / NAMES[0]
    for flags, name in (
        (["--num_frames", "9"], "num_frames 6, this one has 9"),
        (["--cross"], "cross_mass False"),
        (["--no_checkpoint"], "weights 'checkpoint', this one has 'base'"),
    ):
        with pytest.raises(
            CacheError, match=f"manifest.json is of a sweep with {name}.*choose another --output_dir"
        ):
            sweeping(prompts, tmp_path / "out", *flags)()
    (tmp_path / "out/manifest.json").unlink()  # then the caches themselves speak
    before = load_cache(path, mmap=False)["fingerprint"]
    save_cache(path, load_cache(path, mmap=False) | {"fingerprint": "0" * 32})
    with pytest.raises(CacheError, match=r"fingerprint '0000.*make everything again with --overwrite"):
        sweeping(prompts, tmp_path / "out", seeds=("0",))()
    sweeping(prompts, tmp_path / "out", "--overwrite", seeds=("0",))()
    assert load_cache(path)["fingerprint"] == before


def test_one_failure_does_not_end_a_sweep(tmp_path, prompts, monkeypatch):
    original = causal.extract_next

    def failing(session, config, *more):
        if (config.prompt, config.seed) == ("A blue square!", 0):
            raise RunError("block 0: not finite")
        return original(session, config, *more)

    monkeypatch.setattr(causal, "extract_next", failing)
    with pytest.raises(
        RunError, match=r"1 of 4 runs failed; first .*a-blue-square_s0.pt: block 0: not finite"
    ):
        sweeping(prompts, tmp_path / "out")()
    assert sorted(path.name for path in (tmp_path / "out").glob("*.pt")) == NAMES[1:]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seeds", "1"], "need --output_dir"),
        (["--prompts", "no.txt", "--output_dir", "x"], "no.txt cannot be read"),
        (["--prompts", "/dev/null", "--output_dir", "x"], "holds no prompt"),
        (["--seeds", "1", "--seed", "2", "--output_dir", "x"], "--seed and --seeds exclude"),
        (["--seeds", "1", "--output_dir", "x", "--output_path", "a.pt"], "a sweep takes --output_dir"),
    ],
)
def test_flags_of_a_sweep_that_do_not_fit(flags, message):
    with pytest.raises(ConfigError, match=message):
        run_extraction_all.run([*SHORT, *flags])


def test_slugs_tell_prompts_apart():
    prompts = ["A cat.", "a cat", "一只猫在海边", "x" * 100, "x" * 99, "!!"]
    slugs = sweep_plan.slugs_of(prompts)
    assert (
        slugs["A cat."] == "a-cat"
        and slugs["a cat"].startswith("a-cat-")
        and slugs["一只猫在海边"] == "一只猫在海边"
    )
    assert len(set(slugs.values())) == 6 and slugs["!!"] == "prompt"
    assert all(len(slug.encode()) < 80 and "/" not in slug for slug in slugs.values())


def test_a_slug_that_somebody_else_has_is_not_taken_twice():
    digits = hashlib.sha256(b"a cat").hexdigest()
    prompts = [f"a cat {digits[:8]}", "A cat", "a cat", f"a cat {digits[:9]}"]
    slugs = sweep_plan.slugs_of(prompts)
    assert len(set(slugs.values())) == 4 and slugs["a cat"] == f"a-cat-{digits[:9]}"


def test_prompts_from_an_editor_that_marks_utf_8(tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat\r\na dog\r\n", encoding="utf-8-sig", newline="")
    assert sweep_plan.read_prompts(tmp_path / "prompts.txt") == ["a cat", "a dog"]


def test_a_cache_that_is_being_made_by_another_script(tmp_path, prompts):
    from experiments.running.output_locks import claimed

    with claimed({str(tmp_path / "out" / NAMES[0]): 0}):
        other = forked(exit_code(lambda: cli.main(lambda argv: sweeping(prompts, tmp_path / "out")(), [])))
    assert other.value == 2 and "is being made by another run" in other.said


def test_what_is_recorded_is_not_opened_again(tmp_path, prompts, monkeypatch):
    sweeping(prompts, tmp_path / "out", seeds=("0",))()
    opened = []
    original = sweep_state.load_cache
    monkeypatch.setattr(
        sweep_state, "load_cache", lambda path, **k: opened.append(path) or original(path, **k)
    )
    sweeping(prompts, tmp_path / "out", seeds=("0",))()
    assert not opened
    path = tmp_path / "out" / NAMES[0]
    before = path.read_bytes()
    path.write_bytes(before[:-100])  # damaged: another size
    os.utime(
        tmp_path / "out" / NAMES[2], ns=(time.time_ns(), time.time_ns())
    )  # touched since it was recorded
    sweeping(prompts, tmp_path / "out", seeds=("0",))()
    assert sorted(opened) == [str(path), str(tmp_path / "out" / NAMES[2])] and path.read_bytes() == before


def test_several_checkpoints(tmp_path, prompts, monkeypatch):
    loads, original = [], causal.load_pipeline
    monkeypatch.setattr(causal, "load_pipeline", lambda *args: loads.append(1) or original(*args))
    weights = ["base", "checkpoints/wan-mini/self_forcing_mini.pt"]
    both = sweeping(prompts, tmp_path / "out", "--checkpoints", *weights, seeds=("0",))
    both()
    files = files_below(tmp_path / "out")
    manifest = json.loads(files["manifest.json"])
    assert [run["checkpoint"] for run in manifest["runs"]] == ["base"] * 2 + ["self_forcing_mini"] * 2
    weights_of = [load_cache(tmp_path / "out" / run["file"])["weights"] for run in manifest["runs"]]
    assert len(loads) == 2 and weights_of == ["base"] * 2 + ["checkpoint"] * 2
    sweeping(prompts, tmp_path / "one", seeds=("0",))()
    alone = files_below(tmp_path / "one")
    assert all(files[f"self_forcing_mini/{name}"] == alone[name] for name in (NAMES[0], NAMES[2]))
    both()
    assert len(loads) == 3
    for flags, message in (
        (["--checkpoint_path", weights[1]], "--checkpoints excludes --checkpoint_path"),
        (["--no_checkpoint"], "--checkpoints excludes --checkpoint_path and --no_checkpoint"),
    ):
        with pytest.raises(ConfigError, match=message):
            sweeping(prompts, tmp_path / "out", "--checkpoints", *weights, *flags)()
    with pytest.raises(
        ConfigError, match=r"none.pt not found; --checkpoints names files of weights, or base"
    ):
        sweeping(prompts, tmp_path / "out", "--checkpoints", "none.pt")()
    twin = tmp_path / "self_forcing_mini.pt"
    twin.write_bytes(b"")
    with pytest.raises(ConfigError, match="would share the folder self_forcing_mini; rename one"):
        sweeping(prompts, tmp_path / "out", "--checkpoints", weights[1], str(twin))()


# -- what a run says
# ------------------------------------------------------------------------------------------------------------


def test_a_line_per_block_and_a_log(tmp_path, capfd):
    log = tmp_path / "logs/log.jsonl"
    flags = [*MINI, "--output_path", str(tmp_path / "out.pt"), "--log_file", str(log), "--deterministic"]
    capfd.readouterr()
    run_extraction_each.run(flags)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("block", "7 blocks"))]
    assert [line.split(":")[0] for line in lines[:2]] == ["block 1/7 (frames 0-2)", "block 2/7 (frames 3-5)"]
    assert (
        len(lines) == 8 and "s left, " in lines[0] and lines[-1].startswith("7 blocks of 21 frames, 1 file: ")
    )
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events] == ["rollout", *["block"] * 7, "saved", "end"] and events[-1][
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

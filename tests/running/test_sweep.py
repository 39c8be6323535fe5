"""Sweeps go on after a stop or a kill, share the work of several processes, and mix in nothing else."""

import json
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ROOT
from helpers.forked import exit_code, forked
from helpers.stopping import stopping_after

from experiments import run_extraction_all
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError
from experiments.extraction import causal
from experiments.extraction.prompt_embeds import PROMPTS_AT_ONCE, PromptTexts
from experiments.running import cli, sweep
from experiments.running.locks import claimed
from wan.errors import ConfigError

SHORT = ["--config_path", str(ROOT / "configs/wan_mini.yaml"), "--num_frames", "6", "--quiet"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(1)


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
    """Every file below a folder by its path there, but logs, which have the time, and locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".jsonl", ".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


NAMES = [f"{slug}_s{seed}.pt" for slug in ("a-blue-square", "a-red-circle-moving-right") for seed in (0, 1)]


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_kill(tmp_path, prompts, monkeypatch):
    loads, original = [], causal.load_pipeline
    monkeypatch.setattr(causal, "load_pipeline", lambda *args: loads.append(1) or original(*args))
    sweeping(prompts, tmp_path / "whole")()
    whole = files_below(tmp_path / "whole")
    records = [name for name in whole if name.startswith("items/")]
    assert sorted(whole) == [*NAMES, *sorted(records), "manifest.json"] and len(loads) == 1
    assert len(records) == 4 and all(name.endswith(".json") for name in records)
    for attempt in range(1, 40):  # each time killed a little later
        done = forked(sweeping(prompts, tmp_path / "killed"), kill_after=0.1 + 0.2 * attempt)
        for path in (tmp_path / "killed").glob("*.pt"):
            assert path.read_bytes() == whole[path.name]
        if done.code == 0:
            break
    assert files_below(tmp_path / "killed") == whole
    states = [run["state"] for run in json.loads(whole["manifest.json"])["runs"]]
    assert states == ["done"] * 4
    sweeping(prompts, tmp_path / "whole")()
    assert len(loads) == 1  # nothing to do: nothing is loaded


@pytest.mark.slow
def test_a_stopped_sweep_says_how_to_go_on(tmp_path, prompts, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        stopping_after(patch, 0)
        with pytest.raises(SystemExit) as ended:
            cli.main(lambda argv: sweeping(prompts, tmp_path / "out")(), [])
    said = capfd.readouterr().err
    assert ended.value.code == 130 and "0 of 4 are done and will not be made again" in said, said
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert [run["state"] for run in manifest["runs"]] == ["partial", "waiting", "waiting", "waiting"]
    sweeping(prompts, tmp_path / "out")()
    assert all("partial" not in load_cache(tmp_path / "out" / name) for name in NAMES)


@pytest.mark.slow
def test_other_settings_are_not_mixed_in(tmp_path, prompts):
    sweeping(prompts, tmp_path / "out", seeds=("0",))()
    path = tmp_path / "out" / NAMES[0]
    for flags, name in (
        (["--num_frames", "9"], "num_frames 6, this one has 9"),
        (["--cross"], "cross_mass False"),
        (["--no_checkpoint"], "weights_sha256 '.*', this one has '"),
    ):
        with pytest.raises(
            CacheError, match=f"manifest.json is of a sweep with {name}.*choose another --output_dir"
        ):
            sweeping(prompts, tmp_path / "out", *flags)()
    (tmp_path / "out/manifest.json").write_text('{"name": "of another program"}')
    with pytest.raises(CacheError, match="is of no sweep, and this one would replace it"):
        sweeping(prompts, tmp_path / "out", seeds=("0",))()
    (tmp_path / "out/manifest.json").unlink()  # then the caches themselves speak
    before = load_cache(path, mmap=False)["fingerprint"]
    with pytest.raises(CacheError, match="other quantities; choose another --output_dir"):
        sweeping(prompts, tmp_path / "out", "--cross", seeds=("0",))()
    save_cache(path, load_cache(path, mmap=False) | {"fingerprint": "0" * 32})
    with pytest.raises(CacheError, match=r"fingerprint '0000.*make everything again with --overwrite"):
        sweeping(prompts, tmp_path / "out", seeds=("0",))()
    sweeping(prompts, tmp_path / "out", "--overwrite", seeds=("0",))()
    assert load_cache(path)["fingerprint"] == before


@pytest.mark.slow
def test_videos_are_made_where_a_sweep_has_none(tmp_path, prompts, monkeypatch):
    loads, original = [], causal.load_pipeline
    monkeypatch.setattr(causal, "load_pipeline", lambda *args: loads.append(1) or original(*args))
    for flags, count in (([], 1), (["--save_video"], 2), (["--save_video"], 2), ([], 2)):
        sweeping(prompts, tmp_path, *flags, seeds=("0",))()
        assert len(loads) == count
        assert [run["state"] for run in json.loads((tmp_path / "manifest.json").read_text())["runs"]] == [
            "done"
        ] * 2
    one, other = sorted(tmp_path.glob("*.mp4"))
    whole, torn = one.read_bytes(), other.read_bytes()
    one.write_bytes(torn)  # of another prompt
    other.write_bytes(torn[:-9])
    sweeping(prompts, tmp_path, "--save_video", seeds=("0",))()
    assert len(loads) == 3 and (one.read_bytes(), other.read_bytes()) == (whole, torn)


@pytest.mark.slow
def test_one_failure_does_not_end_a_sweep(tmp_path, prompts, monkeypatch):
    original = causal.extract_next

    def failing(session, config, *more):
        if (config.prompt, config.seed) == ("A blue square!", 0):
            raise RunError("block 0: not finite")
        return original(session, config, *more)

    monkeypatch.setattr(causal, "extract_next", failing)
    with pytest.raises(
        RunError, match=r"1 of 4 failed; first .*a-blue-square_s0.pt: RunError: block 0: not finite"
    ):
        sweeping(prompts, tmp_path / "out")()
    assert sorted(path.name for path in (tmp_path / "out").glob("*.pt")) == NAMES[1:]
    [record] = (tmp_path / "out/failed").iterdir()
    assert "in failing" in json.loads(record.read_text())["traceback"]
    states = [run["state"] for run in json.loads((tmp_path / "out/manifest.json").read_text())["runs"]]
    assert sorted(states) == ["done", "done", "done", "failed"]
    monkeypatch.setattr(causal, "extract_next", original)
    sweeping(prompts, tmp_path / "out")()
    assert not record.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seeds", "1"], "need --output_dir"),
        (["--prompts", "no.txt", "--output_dir", "x"], "no.txt cannot be read"),
        (["--seeds", "1", "--seed", "2", "--output_dir", "x"], "--seed and --seeds exclude"),
        (["--seeds", "1", "--output_dir", "x", "--output_path", "a.pt"], "a sweep takes --output_dir"),
    ],
)
def test_flags_of_a_sweep_that_do_not_fit(flags, message):
    with pytest.raises(ConfigError, match=message):
        run_extraction_all.run([*SHORT, *flags])


@pytest.mark.slow
def test_a_sweep_that_is_being_made_by_another_command(tmp_path, prompts):

    with claimed({str(tmp_path / "out/manifest.json"): 0}):
        other = forked(exit_code(lambda: cli.main(lambda argv: sweeping(prompts, tmp_path / "out")(), [])))
    assert other.value == 2 and "is being made by another run" in other.said


@pytest.mark.slow
def test_what_is_recorded_is_not_opened_again(tmp_path, prompts, monkeypatch):
    sweeping(prompts, tmp_path / "out", seeds=("0",))()
    opened = []
    original = sweep.load_cache
    monkeypatch.setattr(sweep, "load_cache", lambda path, **k: opened.append(path) or original(path, **k))
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
    shutil.copy2(tmp_path / "out" / NAMES[2], path)  # another run's, of the same size and age
    with pytest.raises(CacheError, match=r"is of another run .*choose another --output_dir"):
        sweeping(prompts, tmp_path / "out", seeds=("0",))()


@pytest.mark.slow
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


# -- several workers


@pytest.mark.beside
@pytest.mark.parametrize("gpus", [1, 2])
def test_workers_make_the_same_files_also_where_one_is_killed(tmp_path, prompts, gpus):
    sweeping(prompts, tmp_path / "one")()
    command = [sys.executable, "experiments/run_extraction_all.py", *SHORT[:-1], "--device", "cpu"]
    command += ["--prompts", str(prompts), "--seeds", "0", "1", "--output_dir", str(tmp_path / "two")]
    command += ["--workers", "2" if gpus == 1 else "1", "--gpus", str(gpus)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    first = next(line for line in running.stderr if line.startswith(("1 of", "2 of")))
    workers = [p for p in psutil.Process(running.pid).children(True) if "spawn_main" in " ".join(p.cmdline())]
    if gpus == 1:
        workers[-1].kill()
    said = first + running.stderr.read()
    assert running.wait(60) == 0 and "4 of 4 done" in said, said
    one, two = files_below(tmp_path / "one"), files_below(tmp_path / "two")
    if gpus == 1:
        assert one == two
    else:
        made = [load_cache(tmp_path / "two" / name)["frame_logits"] for name in NAMES]
        alone = [load_cache(tmp_path / "one" / name)["frame_logits"] for name in NAMES]
        torch.testing.assert_close(made, alone, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--workers", "1", "--scheduler", "tcp://x:1"], {}, "--workers and --scheduler exclude each other"),
        (["--workers", "1", "--device", "cuda:0"], {}, "device cuda:0 was asked for"),
        (["--slurm", "none.yaml"], {"PATH": ""}, "needs SLURM's sbatch"),
        (["--gpus", "2"], {}, "give --workers N too"),
        ([], {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "torchrun is for one rollout"),
    ],
)
def test_workers_that_do_not_fit(flags, environment, message, tmp_path, prompts, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        sweeping(prompts, tmp_path / "out", *flags)()
    assert not files_below(tmp_path / "out")


# -- many prompts


def test_prompts_are_encoded_as_they_are_asked_for():
    asked = []

    def encode(prompts):
        asked.append(list(prompts))
        return {prompt: (torch.zeros(1), [prompt]) for prompt in prompts}

    prompts = [str(i) for i in range(PROMPTS_AT_ONCE + 3)]
    texts = PromptTexts(prompts, encode)
    assert not asked
    assert [texts[prompt][1] for prompt in prompts] == [[prompt] for prompt in prompts]
    assert asked == [prompts[:PROMPTS_AT_ONCE], prompts[PROMPTS_AT_ONCE:]]
    assert texts["another"][1] == ["another"]

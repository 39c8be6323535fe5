"""Sweeps that are stopped, killed or spoiled: the same command goes on, nothing is mixed or made twice."""

import hashlib
import json
import os
import time

import pytest
from conftest import ROOT
from helpers.forked import FULL, exit_code, forked, tell
from helpers.stopping import stopping_after

from experiments import run_extraction_all
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError
from experiments.extraction import causal
from experiments.running import cli
from experiments.running import sweep as sweep_plan
from wan.errors import ConfigError

SHORT = ["--config_path", str(ROOT / "configs/wan_mini.yaml"), "--num_frames", "6", "--quiet"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


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


def test_videos_are_made_where_a_sweep_has_none(tmp_path, prompts, monkeypatch):
    loads, original = [], causal.load_pipeline
    monkeypatch.setattr(causal, "load_pipeline", lambda *args: loads.append(1) or original(*args))
    for flags, count in (([], 1), (["--save_video"], 2), (["--save_video"], 2), ([], 2)):
        sweeping(prompts, tmp_path, *flags, seeds=("0",))()
        assert len(loads) == count
        assert [run["state"] for run in json.loads((tmp_path / "manifest.json").read_text())["runs"]] == [
            "done"
        ] * 2
    assert len(list(tmp_path.glob("*.mp4"))) == 2


@pytest.mark.parametrize("content", ['{"name": "of another program"}', "[1, 2]", "no JSON"])
def test_a_manifest_of_another_program_is_kept(tmp_path, prompts, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(CacheError, match=r"manifest.json"):
        sweeping(prompts, tmp_path, "--no-overwrite")()
    assert (tmp_path / "manifest.json").read_text() == content


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
    from experiments.running.locks import claimed

    with claimed({str(tmp_path / "out" / NAMES[0]): 0}):
        other = forked(exit_code(lambda: cli.main(lambda argv: sweeping(prompts, tmp_path / "out")(), [])))
    assert other.value == 2 and "is being made by another run" in other.said


def test_what_is_recorded_is_not_opened_again(tmp_path, prompts, monkeypatch):
    sweeping(prompts, tmp_path / "out", seeds=("0",))()
    opened = []
    original = sweep_plan.load_cache
    monkeypatch.setattr(
        sweep_plan, "load_cache", lambda path, **k: opened.append(path) or original(path, **k)
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

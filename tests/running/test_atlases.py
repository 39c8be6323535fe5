"""Sweeps go on after a stop or a kill, share the work of several processes, and mix in nothing else."""

import os
from pathlib import Path

import pytest
import torch
from helpers.forked import stopping_after

from experiments import run_extraction_all
from experiments import session as sessions
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError
from experiments.running import cli
from wan.errors import ConfigError

SHORT = ["--config_path", "sweep.yaml", "--num_frames", "6", "--quiet"]


@pytest.fixture(autouse=True)
def beside_the_tiny_model(monkeypatch, tiny):
    """With a checkpoint of its own."""
    monkeypatch.chdir(Path(tiny.path).parent)
    if not Path("weights").exists():
        Path("weights").mkdir()
        weights = {name: 1.1 * x for name, x in tiny.session.pipeline.model.state_dict().items()}
        torch.save({"generator_ema": weights}, "weights/other.pt")
        text = Path(tiny.path).read_text()
        Path("sweep.yaml").write_text(text.replace("path: null", "path: weights/other.pt"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("# shapes\na red circle moving right\n\nA blue square!\na red circle moving right\n")
    return path


def sweeping(prompts, folder, *flags, seeds=("0", "1")):
    words = [*SHORT, "--prompts", str(prompts), "--seeds", *seeds, "--output_dir", str(folder), *flags]
    return lambda: run_extraction_all.run(words)


def files_below(folder) -> dict[str, bytes]:
    """Every file below a folder by its path there, but logs, which have the time, and locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".jsonl", ".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


NAMES = [f"{slug}_s{seed}.pt" for slug in ("a-blue-square", "a-red-circle-moving-right") for seed in (0, 1)]


@pytest.fixture
def loads(monkeypatch):
    """One entry a time that weights are loaded."""
    found, original = [], sessions.load_pipeline
    monkeypatch.setattr(sessions, "load_pipeline", lambda *args: found.append(1) or original(*args))
    return found


@pytest.mark.slow
def test_a_stopped_sweep_says_how_to_go_on_and_makes_what_is_missing(
    tmp_path, prompts, loads, monkeypatch, capfd
):
    sweep, out = sweeping(prompts, tmp_path / "out"), tmp_path / "out"
    with monkeypatch.context() as patch:
        stopping_after(patch, 0)
        with pytest.raises(SystemExit) as ended:
            cli.main(lambda argv: sweep(), [])
    said = capfd.readouterr().err
    assert ended.value.code == 130 and "0 of 4 are done and will not be made again" in said, said
    [first] = files_below(out)
    assert load_cache(out / first)["partial"]
    for _ in range(2):  # the second time there is nothing to do: nothing is loaded
        sweep()
        assert len(loads) == 2
    whole = files_below(out)
    assert sorted(whole) == NAMES
    assert all("partial" not in load_cache(out / name) for name in NAMES)
    save_cache(out / NAMES[0], load_cache(out / NAMES[0]) | {"partial": True})
    sweep()
    assert (out / NAMES[0]).read_bytes() == whole[NAMES[0]] and len(loads) == 3
    flipped = bytearray(whole[NAMES[0]])
    flipped[flipped.index(load_cache(out / NAMES[0])["frame_logits"].numpy().tobytes()) + 5] ^= 1
    (out / NAMES[0]).write_bytes(flipped)
    sweep()
    assert files_below(out) == whole and len(loads) == 4


@pytest.mark.slow
def test_other_settings_are_not_mixed_in(tmp_path, prompts):
    sweeping(prompts, tmp_path / "out", seeds=("0",))()
    before = files_below(tmp_path / "out")
    for flags, message in (
        (["--num_frames", "9"], "belongs to another run"),
        (["--no_checkpoint"], "belongs to another run"),
        (["--cross"], "belongs to a sweep that did not capture cross_mass"),
    ):
        with pytest.raises(CacheError, match=f"{message}.*; choose another --output_dir$"):
            sweeping(prompts, tmp_path / "out", *flags)()
    sweeping(prompts, tmp_path / "out", "--no-mass", seeds=("0",))()  # they hold more than it asks for
    assert files_below(tmp_path / "out") == before
    one, other = (tmp_path / "out" / name for name in NAMES[::2])
    one.write_bytes(other.read_bytes())  # of another prompt
    with pytest.raises(CacheError, match="belongs to another run"):
        sweeping(prompts, tmp_path / "out", seeds=("0",))()


@pytest.mark.slow
def test_overwriting_keeps_each_cache_until_its_run_is_made_again(tmp_path, prompts, monkeypatch):
    out = tmp_path / "out"
    sweeping(prompts, out)()
    before, written = files_below(out), [(out / name).stat().st_mtime_ns for name in NAMES]
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "load_pipeline", lambda *args: (_ for _ in ()).throw(RuntimeError("no GPU")))
        with pytest.raises(RunError):
            sweeping(prompts, out, "--overwrite")()
    after = files_below(out)
    assert {name: after[name] for name in NAMES} == {name: before[name] for name in NAMES}
    sweeping(prompts, out, "--overwrite")()
    again = [(out / name).stat().st_mtime_ns for name in NAMES]
    assert all(new > old for new, old in zip(again, written, strict=True))


@pytest.mark.slow
def test_videos_are_made_where_a_sweep_has_none(tmp_path, prompts, loads):
    for flags, count in (([], 1), (["--save_video"], 2), (["--save_video"], 2), ([], 2)):
        sweeping(prompts, tmp_path, *flags, seeds=("0",))()
        assert len(loads) == count
    one, other = sorted(tmp_path.glob("*.mp4"))
    whole, torn = one.read_bytes(), other.read_bytes()
    one.write_bytes(torn)  # of another prompt
    other.write_bytes(torn[: len(torn) // 2])
    sweeping(prompts, tmp_path, "--save_video", seeds=("0",))()
    assert len(loads) == 3 and (one.read_bytes(), other.read_bytes()) == (whole, torn)


@pytest.mark.slow
def test_several_checkpoints(tmp_path, prompts, loads):
    weights = ["base", "weights/other.pt"]
    both = sweeping(prompts, tmp_path / "out", "--checkpoints", *weights, seeds=("0",))
    both()
    files = files_below(tmp_path / "out")
    weights_of = {name: load_cache(tmp_path / "out" / name)["weights"] for name in files}
    weights = {"base": "base", "other": "checkpoint"}
    assert len(loads) == 2
    assert weights_of == {f"{folder}/{name}": weights[folder] for folder in weights for name in NAMES[::2]}
    sweeping(prompts, tmp_path / "one", seeds=("0",))()
    alone = files_below(tmp_path / "one")
    assert all(files[f"other/{name}"] == alone[name] for name in (NAMES[0], NAMES[2]))
    both()
    assert len(loads) == 3
    with pytest.raises(SystemExit):
        sweeping(prompts, tmp_path / "out", "--checkpoints", "base", "--no_checkpoint")()


# -- several workers


def test_workers_that_do_not_fit(tmp_path, prompts):
    for flags, path, message in (
        (["--slurm", "none.yaml"], "", "needs SLURM's sbatch"),
        (["--gpus", "2"], os.environ["PATH"], "a sweep takes --workers N"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match=message):
            patch.setenv("PATH", path)
            sweeping(prompts, tmp_path / "out", *flags)()
    assert not files_below(tmp_path / "out")

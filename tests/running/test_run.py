"""One run: what it writes and where, room, locks, kills, Ctrl-C, and what it says."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches
from helpers.forked import exit_code, forked
from helpers.stopping import stopping_after

from experiments import (
    compare_policies,
    contact_sheet,
    extract_attention_wan,
    layer_page,
    layers_from_atlas,
    run_causal_atlas,
    run_extraction,
    run_extraction_all,
    run_extraction_each,
    run_extraction_figure4,
    run_intervention,
    run_rollout,
)
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError
from experiments.caches.view import open_profiles
from experiments.extraction import cache_builders, causal, rollout
from experiments.extraction.memory import estimate_bytes
from experiments.running import cli
from experiments.running.locks import claimed
from experiments.running.progress import Progress
from wan.blocks import block_frames
from wan.config import load_config
from wan.errors import ConfigError

pytestmark = pytest.mark.slow
CONFIG = ["--config_path", "configs/wan_mini.yaml"]
SHORT = [*CONFIG, "--num_frames", "3", "--quiet"]
MINI = [*CONFIG, "--num_frames", "12"]  # four blocks
BASE = ["--ckpt_dir", "checkpoints/wan-mini", "--num_frames", "9", "--num_steps", "4"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def not_loading(monkeypatch):
    for name in ("load_pipeline", "encode_prompts"):
        monkeypatch.setattr(causal, name, lambda *args: pytest.fail("it began"))


def extract(path, *flags):
    run_extraction_each.run([*SHORT, "--output_path", str(path), *flags])


# -- no output is an input


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    """A file for every flag that names one."""
    shutil.copy("configs/wan_mini.yaml", tmp_path / "config.yaml")
    shutil.copy("checkpoints/wan-mini/self_forcing_mini.pt", tmp_path / "checkpoint.pt")
    (tmp_path / "prompts.txt").write_text("a red circle\n", encoding="utf-8")
    save_cache(tmp_path / "states.pt", synthetic_caches.layer())
    names = ("config.yaml", "checkpoint.pt", "prompts.txt", "states.pt")
    flags = ("--config_path", "--checkpoint_path", "--prompts", "--prompt_embeds")
    return dict(zip(flags, (tmp_path / name for name in names), strict=True))


def refused(script, argv) -> str:
    said = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(said):
        cli.main(script.run, [str(word) for word in argv])
    line = said.getvalue()
    assert ended.value.code == 2 and line.count("\n") == 1 and "is the same file as" in line, (argv, line)
    return line


def test_no_output_is_an_input_by_any_name(inputs, tmp_path, not_loading):
    """Every file that is read, under its own name, a symbolic and a hard link,
    as every file that is written.
    """
    for flag, path in inputs.items():
        (tmp_path / "soft").unlink(missing_ok=True)
        (tmp_path / "hard").unlink(missing_ok=True)
        (tmp_path / "soft").symlink_to(path)
        os.link(path, tmp_path / "hard")
        before = path.read_bytes()
        for name in (path, tmp_path / "soft", tmp_path / "hard", tmp_path / "x" / ".." / path.name):
            for output in ("--output_path", "--log_file"):
                config = [] if flag == "--config_path" else CONFIG
                refused(run_extraction_all, [*config, *SHORT[2:], flag, path, output, name])
        assert path.read_bytes() == before
    for path in ("transformer/config.json", "self_forcing_mini.pt"):  # a file of the model's folder
        refused(run_extraction, [*SHORT, "--output_path", f"checkpoints/wan-mini/{path}"])


def test_what_a_config_names_is_read_by_every_script(inputs, tmp_path):
    """The LoRA, the classes of heads, what edits take from: no output, of no script."""
    named = [tmp_path / name for name in ("lora.pt", "heads.csv", "means.pt", "checkpoint.pt")]
    shutil.copy("checkpoints/wan-mini/lora_window.pt", named[0])
    named[1].write_text("\n".join([",".join(["a"] * 12)] * 8), encoding="utf-8")
    named[2].write_bytes(b"means")
    policy = f"{{name: per_head, file: {named[1]}, policies: {{a: {{name: full}}}}}}"
    text = inputs["--config_path"].read_text().replace("checkpoints/wan-mini/self_forcing", "NONE")
    text += f"lora_path: {named[0]}\nlora_rank: 16\nlora_alpha: 16\ncache_policy: {policy}\n"
    inputs["--config_path"].write_text(text, encoding="utf-8")
    (tmp_path / "policy.yaml").write_text(policy, encoding="utf-8")
    edit = f"- {{edit: ablate, how: mean, source: {named[2]}, passes: denoise}}\n"
    (tmp_path / "edit.yaml").write_text(edit, encoding="utf-8")
    before = [path.read_bytes() for path in named]
    base = ["--config_path", inputs["--config_path"], "--checkpoint_path", named[3], *SHORT[2:]]
    edited = ["--interventions", tmp_path / "edit.yaml"]
    for path in named:
        for script in (run_extraction_all, run_intervention):
            refused(script, [*base, *edited, "--output_path", path])
        edits = ["--edit", tmp_path / "edit.yaml", "--output_dir", tmp_path / "o"]
        refused(run_rollout, [*base, *edited, "--output_path", tmp_path / "o.mp4", "--log_file", hard(path)])
        refused(run_causal_atlas, [*base, *edits, "--log_file", hard(path)])
        if path != named[2]:  # policies are compared without edits
            policies = ["--policies", tmp_path / "policy.yaml", "--output_dir", tmp_path / "o"]
            refused(compare_policies, [*base, *policies, "--videos", "0", "--log_file", hard(path)])
    vae = next(Path("checkpoints/wan-mini/vae").glob("*.json"))
    refused(run_rollout, [*SHORT, "--log_file", vae])
    assert [path.read_bytes() for path in named] == before and not (tmp_path / "o.mp4").exists()


def hard(path: Path) -> Path:
    """A name that a log may have; the file is the same."""
    link = path.with_name(f"{path.name}.log")
    if not link.exists():
        os.link(path, link)
    return link


def test_no_file_is_written_twice(tmp_path):
    out, mini = tmp_path / "o.mp4", SHORT
    for script in (run_extraction, run_extraction_each):
        refused(script, [*mini, "--output_path", out, "--save_video"])
        refused(script, [*mini, "--output_path", out, "--save_video", out])
        refused(script, [*mini, "--output_path", out, "--log_file", out])
    sweeping = [*mini, "--seeds", "1", "--output_dir", tmp_path / "s"]
    refused(run_extraction_all, [*sweeping, "--log_file", tmp_path / "s/manifest.json"])
    slug = "a-red-circle-moving-right-over-a-dark-blue-background_s1"
    refused(run_extraction_all, [*sweeping, "--log_file", tmp_path / f"s/{slug}.pt"])
    mini = ["--ckpt_dir", "checkpoints/wan-mini", "--num_frames", "5", "--quiet", "--output_dir", tmp_path]
    refused(
        extract_attention_wan, [*mini, "--save_video", tmp_path / "v.mp4", "--log_file", tmp_path / "v.mp4"]
    )
    assert not os.listdir(tmp_path)


def test_what_is_converted_is_kept(tmp_path):
    save_cache(tmp_path / "layer1.pt", synthetic_caches.atlas())
    (tmp_path / "a.svg").write_text("<svg/>", encoding="utf-8")
    before = (tmp_path / "layer1.pt").read_bytes()
    refused(layer_page, [tmp_path / "layer1.pt", "--output_path", tmp_path / "layer1.pt"])
    refused(layer_page, [tmp_path, "--output_path", tmp_path / "layer1.pt"])
    refused(layers_from_atlas, [tmp_path / "layer1.pt", "--output_dir", tmp_path])
    refused(contact_sheet, [tmp_path / "a.svg", f"A={tmp_path / 'a.svg'}"])
    assert (tmp_path / "layer1.pt").read_bytes() == before and load_cache(tmp_path / "layer1.pt")
    assert sorted(os.listdir(tmp_path)) == ["a.svg", "layer1.pt"]


# -- where files go


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "out.pt").symlink_to("large_disk/real.pt")
    extract(tmp_path / "out.pt")
    assert (tmp_path / "out.pt").is_symlink() and load_cache(tmp_path / "large_disk/real.pt")[
        "format"
    ] == "layer"
    assert os.listdir(tmp_path / "large_disk") == ["real.pt"]
    with (
        claimed({str(tmp_path / "large_disk/real.pt"): 0}),  # by whatever name it is called
        pytest.raises(CacheError, match="is being made by another run"),
        claimed({str(tmp_path / "out.pt"): 0}),
    ):
        pass


@pytest.mark.parametrize("length", [245, 300])
def test_a_name_too_long_for_the_file_beside_it_is_refused_before_the_rollout(length, tmp_path, not_loading):
    with pytest.raises(CacheError, match="cannot be written: File name too long"):
        extract(tmp_path / ("n" * length))
    assert not os.listdir(tmp_path)


def test_a_video_is_claimed_and_written_as_a_cache_is(tmp_path, monkeypatch):
    video = tmp_path / "v.mp4"
    extract(tmp_path / "a.pt", "--save_video", str(video))
    before = video.read_bytes()
    assert before[4:8] == b"ftyp" and sorted(os.listdir(tmp_path)) == ["a.pt", "v.mp4"]
    with pytest.raises(CacheError, match=r"v.mp4 is there already, and --no-overwrite keeps it"):
        extract(tmp_path / "b.pt", "--save_video", str(video), "--no-overwrite")
    with pytest.raises(ConfigError, match=r"v.txt does not end in .mp4"):
        extract(tmp_path / "b.pt", "--save_video", str(tmp_path / "v.txt"))
    monkeypatch.setattr(
        "imageio.v3.imwrite", lambda *args, **more: (_ for _ in ()).throw(OSError(5, "broken"))
    )
    with pytest.raises(RunError, match="broken"):
        extract(tmp_path / "c.pt", "--save_video", str(video))
    assert video.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["a.pt", "c.pt", "v.mp4"]


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, capfd):
    full = lambda path: open("/dev/full", "a", buffering=1, encoding="utf-8")  # noqa: E731, SIM115
    monkeypatch.setattr("experiments.running.progress.open_log", full)
    flags = ["--output_path", str(tmp_path / "a.pt"), "--log_file", str(tmp_path / "log")]
    run_extraction_each.run([*SHORT[:-1], *flags])
    assert "the log ends here: No space left on device" in capfd.readouterr().err and load_cache(
        tmp_path / "a.pt"
    )


def test_a_prompt_is_text(tmp_path):
    prompt = "\N{CLAPPER BOARD} a\ncircle"
    flags = ["--output_path", str(tmp_path / "a.pt"), "--log_file", str(tmp_path / "log")]
    run_extraction_all.run([*SHORT, "--prompt", prompt, *flags])
    assert load_cache(tmp_path / "a.pt")["prompt"] == prompt
    assert json.loads((tmp_path / "log").read_text(encoding="utf-8").splitlines()[0])["prompt"] == prompt
    with pytest.raises(ConfigError, match="prompt is not text"):
        run_extraction_all.run([*SHORT, "--prompt", "a \udcff", *flags])


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_known_before_the_rollout(small_disk, not_loading):
    with pytest.raises(
        CacheError, match=r"out.pt cannot be written: it needs \d{7} bytes, \d{6,7} are free in "
    ):
        run_extraction_all.run([*CONFIG, "--quiet", "--output_path", str(small_disk / "out.pt")])
    assert os.listdir(small_disk) == []


def test_found_while_writing(small_disk):
    save_cache(small_disk / "out.pt", synthetic_caches.layer())
    before = (small_disk / "out.pt").read_bytes()
    with pytest.raises(
        CacheError, match=r"cannot be written: .*; it needs \d{7} bytes, \d+ are free"
    ) as caught:
        save_cache(small_disk / "out.pt", synthetic_caches.layer() | {"more": torch.zeros(1 << 19)})
    assert "\n" not in str(caught.value)
    assert (small_disk / "out.pt").read_bytes() == before and os.listdir(small_disk) == ["out.pt"]


@pytest.mark.parametrize(
    ("script", "flags", "requests"),
    [
        (run_extraction_figure4, [], lambda c: cache_builders.figure4_requests(c, "token")),
        (
            run_extraction_all,
            ["--rope_bands"],
            lambda c: cache_builders.atlas_requests(c, True, False, False, True),
        ),
    ],
)
def test_the_estimate_is_close_and_never_too_small(script, flags, requests, tmp_path):
    script.run([*CONFIG, "--quiet", *flags, "--output_path", str(tmp_path / "out.pt")])
    config = load_config("configs/wan_mini.yaml")
    estimated, real = estimate_bytes(config, requests(config)), (tmp_path / "out.pt").stat().st_size
    assert real <= estimated <= real * 1.1 + 2**16
    assert load_cache(tmp_path / "out.pt")["read_by"] == "0.1.0"


# -- kills and locks


def extracting(path, *flags):
    six = ["--num_frames", "6", "--quiet", "--output_path", str(path)]
    return lambda: run_extraction_all.run([*CONFIG, *six, *flags])


@pytest.fixture(scope="module")
def old_and_new(tmp_path_factory) -> tuple[bytes, bytes, float]:
    """The bytes of two undisturbed runs, and the seconds that the second one takes in a fork."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with contextlib.chdir(ROOT):
        torch.set_num_threads(1)
        extracting(folder / "old.pt", "--seed", "1")()
        done = forked(extracting(folder / "new.pt"))
    assert done.code == 0, done
    return (folder / "old.pt").read_bytes(), (folder / "new.pt").read_bytes(), done.seconds


@pytest.mark.beside
def test_sigkill_at_any_moment(tmp_path, old_and_new):
    old, new, seconds = old_and_new
    path, dice, wanted = tmp_path / "out.pt", random.Random(0), 4
    found = {"old": 0, "new": 0, "finished": 0}
    while found["old"] + found["new"] < wanted:
        path.write_bytes(old)
        # half of the kills fall on the last tenth, where the file is written
        when = seconds * (dice.random() if sum(found.values()) % 2 else 0.9 + 0.15 * dice.random())
        killed = forked(extracting(path), kill_after=when)
        content = path.read_bytes()
        assert content in (old, new)
        found["finished" if killed.code == 0 else "new" if content == new else "old"] += 1
        load_cache(path)
        again = forked(extracting(path))
        assert again.code == 0 and path.read_bytes() == new and os.listdir(tmp_path) == ["out.pt"], again


def test_two_runs_to_one_path(tmp_path):
    path = str(tmp_path / "out.pt")
    with claimed({path: 0}):
        other = forked(exit_code(lambda: cli.main(run_extraction_all.run, [*SHORT, "--output_path", path])))
    assert other.value == 2
    assert other.said == (
        f"error: {path} is being made by another run; wait for it, or choose another --output_path\n"
    )
    assert os.listdir(tmp_path) == []


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    dead = forked(lambda: os.getpid()).value
    for name in (f".out.pt.{dead}.part", ".out.pt.lock"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / f".other.pt.{dead}.part").write_bytes(b"not ours")
    with claimed({str(tmp_path / "out.pt"): 0}):
        assert sorted(os.listdir(tmp_path)) == [f".other.pt.{dead}.part", ".out.pt.lock"]


def test_no_overwrite(tmp_path):
    (tmp_path / "out.pt").write_bytes(b"precious")
    with pytest.raises(CacheError, match="is there already, and --no-overwrite keeps it"):
        extracting(tmp_path / "out.pt", "--no-overwrite")()
    assert (tmp_path / "out.pt").read_bytes() == b"precious"


# -- asked to stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_loading_it_ends_at_once(number, tmp_path, monkeypatch, capfd):
    generated = []
    monkeypatch.setattr(causal, "load_pipeline", lambda *args: os.kill(os.getpid(), number))
    monkeypatch.setattr(causal, "roll_out", lambda *args: generated.append(1))
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_each.run, [*SHORT, "--output_path", str(tmp_path / "a.pt")])
    assert ended.value.code == 130 and not generated and not os.listdir(tmp_path)
    assert capfd.readouterr().err.splitlines()[-1] == "error: stopped"


def test_a_second_ctrl_c_stops_in_the_middle_of_a_block(tmp_path, monkeypatch, capfd):
    def twice(*args, **more):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")

    monkeypatch.setattr("wan.pipeline.flow_to_x0", twice)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_each.run, [*SHORT, "--output_path", str(tmp_path / "a.pt")])
    said = capfd.readouterr().err.splitlines()[-2:]
    assert ended.value.code == 130 and said == [
        "stopping after this block; Ctrl-C again stops at once",
        "error: stopped",
    ]
    assert not os.listdir(tmp_path) and signal.getsignal(signal.SIGINT) is before


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
            r"out of GPU memory while rolling out block 0 of 1: CUDA out of memory. "
            r"Tried 9 GiB.; --granularity frame keeps no",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            ["--granularity", "frame"],
            "rolling out block 0 of 1.*fewer --num_f",
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


# -- the base model


def said_by(flags, code, capfd) -> list[str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(extract_attention_wan.run, [*BASE, *flags])
    lines = capfd.readouterr().err.splitlines()
    assert ended.value.code == code, lines
    return lines


def stopping_after_step(monkeypatch, step: int, number=signal.SIGINT) -> None:
    original = Progress.step

    def on_step(self, at, timestep, num_steps):
        original(self, at, timestep, num_steps)
        if at == step:
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    monkeypatch.setattr(Progress, "step", on_step)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_after_the_captured_step_the_capture_is_whole(number, tmp_path, monkeypatch, capfd):
    extract_attention_wan.run([*BASE, "--step", "1", "--quiet", "--output_dir", str(tmp_path / "whole")])
    stopping_after_step(monkeypatch, 2, number)
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


def test_an_atlas_has_the_steps_that_were_reached(tmp_path, monkeypatch, capfd):
    flags = ["--quiet", "--all_layers", "--step", "first", "last", "--output_dir"]
    extract_attention_wan.run([*BASE, *flags, str(tmp_path / "whole")])
    stopping_after_step(monkeypatch, 1)
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
    steps, original = [], rollout.sample

    def sample(pipeline, *more):
        def spoil(module, inputs, output):
            at = rollout.ATTENTION_WEIGHT_CAPTURE.now
            steps.append(at.step)
            return output / 0 if (at.step, at.branch) == (2, "uncond") else output

        pipeline.model.blocks[3].register_forward_hook(spoil)
        return original(pipeline, *more)

    monkeypatch.setattr(rollout, "sample", sample)
    (said,) = said_by(["--quiet", "--output_dir", str(tmp_path)], 1, capfd)
    assert said.startswith("error: step 2: the latents are not finite, try")
    assert max(steps) == 2 and os.listdir(tmp_path) == []

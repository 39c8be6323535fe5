"""One run: what it writes and where, room, locks, kills, Ctrl-C, what it says; in several processes, too."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, require_forks
from helpers import synthetic_caches
from helpers.forked import exit_code, forked, refused, stopping_after

from experiments import (
    check_model,
    extract_attention_wan,
    make_head_classes,
    run_attribution,
    run_extraction,
    run_extraction_all,
    run_extraction_each,
    run_extraction_figure4,
    run_intervention,
    run_rollout,
)
from experiments import session as sessions
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError, claimed
from experiments.caches.view import open_profiles
from experiments.running import cli
from experiments.running.run import place_of
from experiments.running.torchrun import Rank, this_rank
from wan.errors import ConfigError

pytestmark = pytest.mark.slow
SHORT = ["--config_path", "tiny.yaml", "--num_frames", "3", "--quiet"]
BLOCKS = ["--config_path", "tiny.yaml", "--num_frames", "12"]  # four blocks


@pytest.fixture(autouse=True)
def beside_the_tiny_model(monkeypatch, tiny):
    monkeypatch.chdir(Path(tiny.path).parent)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def not_loading(monkeypatch):
    for name in ("session.load_pipeline", "session.encode_prompts"):
        monkeypatch.setattr(f"experiments.{name}", lambda *args: pytest.fail("it began"))


def extract(path, *flags):
    run_extraction_each.run([*SHORT, "--output_path", str(path), *flags])


# --- No output is an input
SAME = "is the same file as"


def test_no_output_is_an_input_by_any_name(tmp_path, not_loading, capfd):
    """Every file that a flag names, under its own name and a symbolic link, as what is written."""
    flags = ("--config_path", "--checkpoint_path", "--prompts", "--prompt_embeds")
    for flag in flags:
        path, link = (tmp_path / f"{name}{flag}.pt" for name in ("file", "link"))
        shutil.copy("tiny.yaml", path)
        link.symlink_to(path)
        before, config = path.read_bytes(), [] if flag == "--config_path" else SHORT[:2]
        for name in (path, link, tmp_path / "x" / ".." / path.name):
            for output in ("--output_path", "--log_file"):
                refused(run_extraction_all, [*config, *SHORT[2:], flag, path, output, name], capfd, SAME)
        assert path.read_bytes() == before
    refused(run_extraction, [*SHORT, "--log_file", "transformer/config.json"], capfd, SAME)


def test_what_a_config_names_is_read_too(tmp_path, capfd):
    """The LoRA, and what edits take from: no output, of no script."""
    lora, means = named = [tmp_path / name for name in ("lora.pt", "means.pt")]
    lora.write_bytes(b"a LoRA")
    means.write_bytes(b"means")
    text = Path("tiny.yaml").read_text(encoding="utf-8")
    text += f"lora_path: {lora}\nlora_rank: 16\nlora_alpha: 16\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    edit = tmp_path / "edit.yaml"
    edit.write_text(f"- {{edit: ablate, how: mean, source: {means}, passes: denoise}}\n", encoding="utf-8")
    base = ["--config_path", tmp_path / "config.yaml", *SHORT[2:], "--interventions", edit]
    for path in named:
        for script in (run_extraction_all, run_intervention):
            refused(script, [*base, "--output_path", path], capfd, SAME)
    assert means.read_bytes() == b"means"


# --- Where files go, and what is known before the rollout
def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out.pt").symlink_to("disk/real.pt")
    extract(tmp_path / "out.pt")
    assert (tmp_path / "out.pt").is_symlink() and os.listdir(tmp_path / "disk") == ["real.pt"]
    assert load_cache(tmp_path / "disk/real.pt")["format"] == "layer"
    with (
        claimed({str(tmp_path / "disk/real.pt"): 0}),  # by whatever name it is called
        pytest.raises(CacheError, match="is being made by another run"),
        claimed({str(tmp_path / "out.pt"): 0}),
    ):
        pass


def test_what_cannot_be_written_is_refused_before_the_rollout(tmp_path, not_loading, monkeypatch):
    with pytest.raises(CacheError, match="cannot be written: File name too long"):
        extract(tmp_path / f"{'n' * 242}.pt")  # too long for the file beside it
    (tmp_path / "out.pt").write_bytes(b"precious")
    with pytest.raises(CacheError, match=r"exists, and this program did not write it, or.*--overwrite"):
        extract(tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == b"precious"
    disk = namedtuple("disk", "free")(1 << 12)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: disk)
    with pytest.raises(CacheError, match=r"new.pt cannot be written: it needs \d+ bytes, 4096 are free in "):
        extract(tmp_path / "new.pt")
    assert os.listdir(tmp_path) == ["out.pt"]


@pytest.mark.parametrize(
    "script, name, ending",
    [
        (run_extraction_all, "x.png", ".pt"),
        (run_extraction, "x.json", ".pt"),
        (run_intervention, "x.mp4", ".pt"),
        (run_attribution, "x", ".pt"),
        (run_rollout, "x.pt", ".mp4"),
        (check_model, "x.pt", ".svg or .pdf or .png"),
        (make_head_classes, "x.pt", ".csv or .npz"),
    ],
)
def test_an_output_ends_as_what_is_written_there(script, name, ending, tmp_path, capfd):
    message = f"{name} does not end in {ending}, which is written there"
    refused(script, ["--output_path", tmp_path / name], capfd, message)
    assert not os.listdir(tmp_path)


def test_a_missing_lora_is_named_before_what_a_file_there_has(tmp_path, not_loading, capfd):
    path = tmp_path / "out.pt"
    save_cache(path, synthetic_caches.layer())
    flags = [*SHORT, "--output_path", path, "--lora", tmp_path / "nofile.safetensors"]
    refused(run_extraction_each, flags, capfd, "the LoRA .*nofile.safetensors not found")


def test_missing_first_frames_are_no_missing_weights(tmp_path, not_loading, capfd):
    flags = [*SHORT, "--output_path", tmp_path / "out.pt", "--first_frames", "nofile"]
    refused(run_extraction_all, flags, capfd, "first_frames: nofile not found; give latents .* or a picture$")


# --- Kills and locks
@pytest.mark.beside
def test_sigkill_at_any_moment(tmp_path):
    """Whatever a kill leaves is the old or the new file, whole, and the same command makes the new one."""
    path, dice = tmp_path / "out.pt", random.Random(0)

    def extracting(*flags):
        return lambda: run_extraction_all.run([*SHORT, "--output_path", str(path), *flags])

    extracting("--seed", "1")()
    old, done = path.read_bytes(), forked(extracting())
    new, found = path.read_bytes(), []
    while len(found) - found.count("finished") < 4:
        path.write_bytes(old)
        # half of the kills fall on the last tenth, where the file is written
        when = done.seconds * (dice.random() if len(found) % 2 else 0.9 + 0.15 * dice.random())
        killed = forked(extracting(), kill_after=when)
        assert path.read_bytes() in (old, new)
        found.append("finished" if killed.code == 0 else "killed")
        again = forked(extracting())
        assert again.code == 0 and path.read_bytes() == new and os.listdir(tmp_path) == ["out.pt"], again


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    for name in (".out.pt.7-0a.part", ".out.pt.8-0b.part", ".other.pt.7-0a.part"):
        (tmp_path / name).write_bytes(b"half")
    with claimed({str(tmp_path / "out.pt"): 0}):
        assert sorted(os.listdir(tmp_path)) == [".other.pt.7-0a.part", ".out.pt.lock"]


# --- Asked to stop
def test_a_partial_cache_goes_beside_a_whole_one_under_the_next_free_name(tmp_path):
    path, whole = tmp_path / "a.pt", synthetic_caches.atlas()
    part = whole | {"partial": True, "blocks_done": 1}
    assert place_of(str(path), part, overwrite=False)[0] == str(path)
    save_cache(path, whole)
    for name in ("a.partial.pt", "a.partial.2.pt", "a.partial.3.pt"):
        assert place_of(str(path), part, overwrite=True)[0] == str(tmp_path / name)
        (tmp_path / name).write_bytes(b"mine")


def test_a_second_ctrl_c_stops_in_the_middle_of_a_block(tmp_path, monkeypatch, capfd):
    def twice(*args, **more):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")

    monkeypatch.setattr("wan.pipeline.flow_to_x0", twice)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        cli.main(run_extraction_each.run, [*SHORT, "--output_path", str(tmp_path / "a.pt")])
    note, said = capfd.readouterr().err.splitlines()[-2:]
    assert note == "stopping after this block; Ctrl-C again stops at once" and said == "error: stopped"
    assert ended.value.code == 130 and not os.listdir(tmp_path)
    assert signal.getsignal(signal.SIGINT) is before


def stopped(script, flags, capfd) -> str:
    """Run a script that is asked to stop; return its last line."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(script.run, [*flags, "--quiet"])
    note, said = capfd.readouterr().err.splitlines()
    assert ended.value.code == 130 and re.match(r"stopping after this (block|step); Ctrl-C again", note)
    return said


def test_an_atlas_stopped_after_three_blocks(tmp_path, monkeypatch, capfd):
    everything = [*BLOCKS, "--cross", "--key_curve", "--quiet", "--output_path"]
    run_extraction_all.run([*everything, str(tmp_path / "whole.pt")])
    stopping_after(monkeypatch, 2)
    said = stopped(run_extraction_all, [*everything, str(tmp_path / "part.pt")], capfd)
    assert f"stopped after 3 of 4 blocks; saved as partial: {tmp_path / 'part.pt'}; to make the rest" in said
    part, whole = (load_cache(tmp_path / name) for name in ("part.pt", "whole.pt"))
    assert part["partial"] and part["blocks_done"] == 3 and not {"partial"} & set(whole)
    assert "key_curve" not in part
    for name in ("frame_logits", "frame_mass", "cross_mass"):
        done, later = part[name][:, :, :, :9], part[name][:, :, :, 9:]
        torch.testing.assert_close(done, whole[name][:, :, :, :9], rtol=0, atol=0, equal_nan=True)
        assert later.isnan().all() and part[name].shape == whole[name].shape


def test_of_a_stopped_run_what_was_captured_is_kept(tmp_path, monkeypatch, capfd):
    """No whole cache is replaced."""
    path = tmp_path / "out.pt"
    run_extraction_each.run([*BLOCKS, "--quiet", "--output_path", str(path)])
    before = path.read_bytes()
    stopping_after(monkeypatch, 1)
    flags = [*BLOCKS, "--output_path", str(path), "--seed", "7"]
    stopped(run_extraction_each, flags, capfd)
    assert path.read_bytes() == before and load_cache(tmp_path / "out.partial.pt")["seed"] == 7
    said = stopped(run_extraction_figure4, [*BLOCKS, "--output_path", str(tmp_path / "last.pt")], capfd)
    assert "none of what was asked for was captured yet" in said and not (tmp_path / "last.pt").exists()


def test_a_bar_of_blocks_and_a_log(tmp_path, capfd, monkeypatch):
    log = tmp_path / "logs/log.jsonl"
    flags = [*BLOCKS, "--output_path", str(tmp_path / "out.pt"), "--log_file", str(log), "--deterministic"]
    capfd.readouterr()
    run_extraction_each.run(flags)
    *_, bar, last = capfd.readouterr().err.splitlines()
    assert "| 4/4 [" in bar and "frames 9-11" in bar and last.startswith("4 blocks of 12 frames, 1 file: ")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events] == ["rollout", *["block"] * 4, "saved", "end"]
    assert events[-1]["ok"] and not torch.are_deterministic_algorithms_enabled()
    extract(tmp_path / "out.pt", "--overwrite")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(CacheError, match="cannot be written"):
        extract(tmp_path / "out.pt", "--log_file", "/proc/log")
    full = open("/dev/full", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr("experiments.progress.open_log", lambda path: full)
    run_extraction_each.run([*SHORT[:-1], "--output_path", str(tmp_path / "b.pt"), "--log_file", str(log)])
    assert "the log ends here: No space left on device" in capfd.readouterr().err
    assert load_cache(tmp_path / "b.pt")["format"] == "layer"


def test_out_of_memory_says_what_helps(tmp_path, monkeypatch, capfd):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB.\nmore")

    monkeypatch.setattr("wan.pipeline.CausalInferencePipeline.blocks", full)
    flags = [*SHORT, "--output_path", tmp_path / "out.pt"]
    said = "rolling out block 0 of 1.*--granularity frame"
    refused(run_extraction_figure4, flags, capfd, said, code=1)
    assert not os.listdir(tmp_path)


# --- The base model
def test_an_atlas_has_the_steps_that_were_reached(tmp_path, monkeypatch, capfd):
    flags = [*BLOCKS[:2], "--num_frames", "9", "--num_steps", "4", "--quiet", "--all_layers"]
    flags += ["--step", "first", "last", "--output_dir"]
    extract_attention_wan.run([*flags, str(tmp_path / "whole")])
    stopping_after(monkeypatch, 1, "step", signal.SIGTERM)
    said = stopped(extract_attention_wan, [*flags, str(tmp_path / "part")], capfd)
    assert "stopped after 2 of 4 steps; saved as partial: " in said
    for name in ("atlas_base.pt", "atlas_base_uncond.pt"):
        part, whole = (load_cache(tmp_path / folder / name) for folder in ("part", "whole"))
        assert part["partial"] and part["pass_steps"] == [0]
        assert len(whole["pass_steps"]) == 2 and "partial" not in whole
        for quantity in ("frame_mass", "frame_logits"):
            assert part[quantity].equal(whole[quantity][:, :1])
        assert "steps 3 are absent" in open_profiles(part).notes[0]


# --- Equal bits
EVERYTHING = """
import sys
from experiments import extract_attention_wan, run_extraction, run_extraction_all, run_extraction_figure4
flags, folder = sys.argv[2:], sys.argv[1]
rollout = ["--deterministic", "--quiet", *flags]
everything = ["--key_curve", "--cross", "--rope_bands"]
run_extraction_all.run([*rollout, *everything, "--output_path", f"{folder}/atlas.pt"])
run_extraction_figure4.run([*rollout, "--output_path", f"{folder}/figure4.pt"])
run_extraction.run([*rollout, "--output_path", f"{folder}/inference.pt"])
short = ["--num_frames", "21", "--num_steps", "6"]
extract_attention_wan.run([*rollout, *short, "--all_layers", "--output_dir", folder])
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_runs_are_equal_to_the_byte(dtype, tmp_path):
    """In processes of their own: what one has warmed up or tuned is not there for the other."""
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        flags = ["--config_path", "configs/wan_mini.yaml", "--device", "cuda", "--dtype", dtype]
        command = [sys.executable, "-c", EVERYTHING, str(tmp_path / name), *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert len(made[0]) == 5 and made[0].keys() == made[1].keys()
    assert [name for name in made[0] if made[0][name] != made[1][name]] == []


# --- Several processes: the numbers of one, and whatever goes wrong is said once and ends all
RANKED = ["--config_path", "tiny.yaml", "--num_frames", "6", "--device", "cpu"]


def ranks(count: int, run, folder, prepare=lambda rank: None) -> tuple[list[int], str]:
    """Exit codes of count processes of one group, and what they said together.

    As torchrun's agent does, the process that starts them keeps their store: it outlives each of them.
    """
    require_forks()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.dup2(os.open(folder / f"said{rank}", os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            code = 71
            try:
                prepare(rank)
                code = exit_code(run)()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = "".join((folder / f"said{rank}").read_text() for rank in range(count))
    return codes, said


def test_ranks_of_torchrun(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert this_rank() == Rank()
    for number, count in ((1, 4), (0, 1)):
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("WORLD_SIZE", str(count))
        assert this_rank() == Rank(number, count)


def extracting(path, *flags):
    return lambda: cli.main(run_extraction_all.run, [*RANKED, "--quiet", "--output_path", str(path), *flags])


def test_the_numbers_of_one_process(tmp_path):
    codes, said = ranks(2, extracting(tmp_path / "two.pt", "--cross"), tmp_path)
    assert codes == [0, 0] and not said, said
    extracting(tmp_path / "one.pt", "--cross")()
    two, one = load_cache(tmp_path / "two.pt"), load_cache(tmp_path / "one.pt")
    assert two["gpus"] == 2 and set(two) - set(one) == {"gpus"}
    for name in ("frame_logits", "frame_mass", "cross_mass"):
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5, equal_nan=True)


def test_one_process_fails(tmp_path):
    def spoil(rank):
        if rank == 1:
            sessions.load_pipeline = broken

    def broken(*args):
        raise RunError("block 0: not finite")

    codes, said = ranks(2, extracting(tmp_path / "out.pt"), tmp_path, spoil)
    assert codes[1] == 1 and codes[0] in (1, 70) and said == "error: block 0: not finite\n"
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.beside
def test_ctrl_c_saves_what_is_there(tmp_path):
    """torchrun's agent passes it on, and both processes stop after the same block."""
    states = tmp_path / "states.pt"  # umT5's import would take half of the time, twice
    torch.save({"prompt": "a", "prompt_embeds": torch.ones(1, 4, 64)}, states)
    command = [sys.executable, str(ROOT / "experiments/run_extraction_each.py"), *RANKED, "--gpus", "2"]
    command += ["--num_frames", "300", "--prompt_embeds", str(states)]
    command += ["--output_path", str(tmp_path / "out.pt")]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    first = next(line for line in process.stderr if line.startswith("blocks: "))
    process.send_signal(signal.SIGINT)
    said = first + process.stderr.read()
    assert process.wait(60) == 130
    errors = [line for line in said.splitlines() if line.strip() and not line.startswith("blocks: ")]
    *stopping, error = errors  # none where the other process's signal came first, and they agreed to stop
    assert [line[:25] for line in stopping] in ([], ["stopping after this block"]), said
    assert error.startswith("error: stopped after") and load_cache(tmp_path / "out.pt")["partial"]


def test_what_does_not_split(monkeypatch):
    with pytest.raises(ConfigError, match="does not split tiny: its 2 heads and blocks of 48 tokens"):
        run_extraction_all.run([*RANKED, "--gpus", "5"])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--gpus 3 under 2 ranks"):
        run_extraction_all.run([*RANKED, "--gpus", "3"])

"""Where caches, videos and logs go: links, devices, long names, a process id used twice,
pipes that are closed, a full log.
"""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from experiments import run_extraction_all, run_extraction_each
from experiments.caches import load_cache
from experiments.caches.files import CacheError, RunError, part_of, replacing
from experiments.extraction import causal
from experiments.running import cli
from experiments.running.locks import claimed
from wan.errors import ConfigError

SHORT = ["--config_path", "configs/wan_mini.yaml", "--num_frames", "3", "--quiet"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def extract(path, *flags):
    run_extraction_each.run([*SHORT, "--output_path", str(path), *flags])


def not_loading(monkeypatch):
    monkeypatch.setattr(causal, "load_pipeline", lambda *args: pytest.fail("the model was loaded"))


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


def test_a_pipe_or_device_is_not_replaced(tmp_path, monkeypatch):
    """os.replace would put a file in the place of /dev/null where root runs it."""
    not_loading(monkeypatch)
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CacheError, match=r"pipe.pt cannot be written: Is a device or pipe"):
        extract(tmp_path / "pipe.pt")
    with pytest.raises(OSError, match="Is a device or pipe"), replacing(tmp_path / "pipe.pt"):
        pass
    assert (tmp_path / "pipe.pt").is_fifo()


@pytest.mark.parametrize("length", [245, 300])
def test_a_name_too_long_for_the_file_beside_it_is_refused_before_the_rollout(length, tmp_path, monkeypatch):
    not_loading(monkeypatch)
    with pytest.raises(CacheError, match="cannot be written: File name too long"):
        extract(tmp_path / ("n" * length))
    assert not os.listdir(tmp_path)


def test_what_a_killed_run_with_this_process_id_left(tmp_path):
    """In a container every run may have the same id."""
    part_of(tmp_path / "out.pt").write_bytes(b"half")
    extract(tmp_path / "out.pt")
    assert load_cache(tmp_path / "out.pt")["format"] == "layer" and os.listdir(tmp_path) == ["out.pt"]


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


def test_a_log_with_the_name_of_a_cache_is_refused(tmp_path, monkeypatch):
    not_loading(monkeypatch)
    with pytest.raises(CacheError, match=r"--log_file .*b.pt has the name of a cache"):
        extract(tmp_path / "a.pt", "--log_file", str(tmp_path / "b.pt"))


def started(*flags, **more):
    command = [
        sys.executable,
        "experiments/run_extraction_each.py",
        "--config_path",
        "configs/wan_mini.yaml",
        *flags,
    ]
    return subprocess.Popen(
        command,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **more,
    )


@pytest.mark.beside
def test_terminals_that_are_gone_do_not_end_a_run(tmp_path):
    """From the first block on nobody reads stdout or stderr any more; every layer is written all the same."""
    run = started("--num_frames", "60", "--output_dir", str(tmp_path / "layers"))
    next(line for line in run.stderr if line.startswith("block 1/"))
    run.stdout.close()
    run.stderr.close()
    run.wait(timeout=60)
    assert len(list((tmp_path / "layers").glob("layer?.pt"))) == 8


def test_a_prompt_is_text(tmp_path, monkeypatch):
    prompt = "\N{CLAPPER BOARD} a\ncircle"
    flags = ["--output_path", str(tmp_path / "a.pt"), "--log_file", str(tmp_path / "log")]
    run_extraction_all.run([*SHORT, "--prompt", prompt, *flags])
    assert load_cache(tmp_path / "a.pt")["prompt"] == prompt
    assert json.loads((tmp_path / "log").read_text(encoding="utf-8").splitlines()[0])["prompt"] == prompt
    not_loading(monkeypatch)
    with pytest.raises(ConfigError, match=r"prompt is not text: '.udcff' at 2 is no character"):
        run_extraction_all.run([*SHORT, "--prompt", "a \udcff", *flags])


def test_a_layer_asked_for_twice_is_kept_once(tmp_path):
    from experiments import run_extraction_figure4

    run_extraction_figure4.run([*SHORT, "--layer_indices", "1", "1", "--output_path", str(tmp_path / "a.pt")])
    assert load_cache(tmp_path / "a.pt")["layer_indices"] == [1]


# -- asked to stop
# ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.beside
def test_sigterm_in_a_real_process_keeps_the_finished_blocks(tmp_path):
    run = started("--num_frames", "240", "--output_path", str(tmp_path / "a.pt"))
    for line in run.stderr:
        if line.startswith("block 2/"):
            run.send_signal(signal.SIGTERM)
            break
    said = run.stderr.read()
    assert run.wait(timeout=60) == 130 and re.search(
        r"error: stopped after \d+ of 80 blocks; saved as partial: ", said
    ), said
    part = load_cache(tmp_path / "a.pt")
    assert part["partial"] and 2 <= part["blocks_done"] < 80 and os.listdir(tmp_path) == ["a.pt"]

"""Ctrl-C and SIGTERM at any moment: one line, 130, whole files."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, handle_ignored_signals
from helpers.forked import forked
from helpers.sleeping import STOPPED

from experiments.caches import load_cache
from experiments.caches.mp4 import mp4_tag
from experiments.running import cli

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def started(command, **options):
    """A process group of its own, as a terminal starts one, whose stdout and stderr are read."""
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    options |= {"env": os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}, "start_new_session": True}
    return subprocess.Popen([sys.executable, *map(str, command)], **options)


def wait_for_handler(pid):
    """Wait until main() has installed its handler of SIGTERM: before, a signal is Python's own matter."""
    caught = 0
    while not caught & (1 << (signal.SIGTERM - 1)):
        time.sleep(0.02)
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)


def flags(folder):
    given = "--config_path configs/wan_mini.yaml --num_frames 6 --quiet --output_path"
    return [*given.split(), folder / "a.pt", "--save_video", folder / "a.mp4"]


@pytest.mark.beside
@pytest.mark.parametrize("number", range(5))
def test_a_video_that_is_stopped_at_any_moment(number, tmp_path):
    chance = random.Random(number)
    by = chance.choice(STOPS)
    running = started(["experiments/run_extraction_figure4.py", *flags(tmp_path)])
    wait_for_handler(running.pid)
    time.sleep(chance.uniform(0, 6.0))
    os.killpg(running.pid, by)
    asked, busy = time.monotonic(), max(1.0, os.getloadavg()[0] / os.cpu_count())
    said = running.communicate(timeout=120)[1]
    if running.returncode != 0:  # it had ended
        assert running.returncode == 130 and said.count("error: ") == 1, said
        assert said.splitlines()[-1].startswith("error: stopped") and "Traceback" not in said
        assert time.monotonic() - asked < 5 * busy
    files = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")}
    assert files <= {"a.pt", "a.mp4"}
    assert "a.pt" not in files or load_cache(tmp_path / "a.pt", mmap=False)["format"] == "figure4"
    assert "a.mp4" not in files or mp4_tag(tmp_path / "a.mp4")


@pytest.mark.beside
def test_workers_that_are_still_starting_end_quietly(tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED)
    running = started([tmp_path / "stopped.py", tmp_path])
    workers = []
    while not workers and running.poll() is None:
        time.sleep(0.05)
        workers = psutil.Process(running.pid).children()
    time.sleep(0.5)  # they import
    os.killpg(running.pid, signal.SIGINT)
    said = "".join(running.communicate(timeout=120))
    assert running.returncode == 130 and "Traceback" not in said and said.count("error: ") == 1, said


def test_a_signal_within_an_import_ends_the_process_at_once(tmp_path):
    """KeyboardInterrupt would go through the C++ that imports, as torch's does."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    script = "from experiments.running.cli import main\n"
    script += "def run(argv):\n    print(flush=True)\n    import slow\nmain(run)"
    for by in (signal.SIGINT, signal.SIGTERM):
        running = started(["-c", f"import sys; sys.path.append({str(tmp_path)!r})\n{script}"])
        running.stdout.readline()
        time.sleep(0.3)
        os.killpg(running.pid, by)
        assert running.communicate(timeout=60)[1] == "error: stopped\n" and running.returncode == 130


def test_children_of_tests_ignore_no_signal_that_the_shell_had_these_ignore():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    try:
        handle_ignored_signals()
        script = "import signal; print(*(signal.getsignal(n) is signal.SIG_IGN for n in (2, 15, 1)))"
        assert started(["-c", script]).communicate(timeout=60)[0].split() == ["False"] * 3
        os.kill(os.getpid(), signal.SIGHUP)  # as before, it does not end this process
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_import_installs_no_handler():
    """In a fork that forgets our modules, and imports them as a script does."""

    def handlers():
        return [signal.getsignal(number) for number in STOPS]

    def call():
        for name in [name for name in sys.modules if name.partition(".")[0] in ("wan", "experiments")]:
            del sys.modules[name]
        sys.argv[0] = "experiments/run_rollout.py"
        before = handlers()
        for name in ("running.cli", "session", "run_rollout"):
            import_module(f"experiments.{name}")
        return before == handlers()

    assert forked(call).value is True


@pytest.mark.parametrize("by", STOPS)
def test_a_signal_ends_a_script_with_one_line(by, capsys):
    before = [signal.getsignal(number) for number in STOPS]

    def run(argv):
        os.kill(os.getpid(), by)
        time.sleep(10)

    with pytest.raises(SystemExit) as ended:
        cli.main(run, [])
    assert ended.value.code == 130 and capsys.readouterr().err == "error: stopped\n"
    assert before == [signal.getsignal(number) for number in STOPS]
    assert threading.current_thread() is threading.main_thread()

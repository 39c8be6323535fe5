"""A `python` that is a fork of one process with the libraries loaded, for whatever starts one: shells, Dask,
torchrun, Jupyter. Our own code is imported anew in each. Start-up took three of four seconds of such tests.

Run as a script this file is that process: python warmed.py SOCKET
"""

import atexit
import fcntl
import gc
import importlib
import marshal
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace

import pytest

OURS = ("wan", "experiments", "helpers")
# No matplotlib: it looks once, when it is loaded, where to draw
MODULES = ("tqdm.auto", "experiments.running.sweep", "experiments.extraction.video", "distributed", "pandas")
MODULES += ("transformers.models.umt5.modeling_umt5", "diffusers.models.autoencoders.autoencoder_kl_wan")
MODULES += ("ipykernel.kernelapp", "nbclient", "papermill.cli")
END = b"\0end"
# It hands over its words and open files, passes signals on (to the group where it leads one), and ends alike.
PYTHON = """#!{python} -IS
import marshal, os, signal, socket, sys
files = []
for number in map(int, os.listdir("/dev/fd")):
    try:
        files += [number] * os.get_inheritable(number)
    except OSError:
        pass
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = [{first!r} + sys.argv[1:], {executable!r}, os.getcwd(), dict(os.environ), files]
socket.send_fds(server, [marshal.dumps(asked) + {end!r}], files)
process = int(server.recv(20))
send = os.killpg if os.getpgrp() == os.getpid() else os.kill
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: send(process, number))
code = int(server.recv(20) or 70)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
COMMANDS = {"python": [], "papermill": ["-m", "papermill"], "hf": ["-m", "huggingface_hub.cli.hf"]}


@pytest.fixture(scope="session")
def warm() -> Iterator[SimpleNamespace]:
    """Commands, an `activate` beside them, and the hub that they know: a port where nobody listens yet."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        bin, address, hub = Path(folder, "bin"), Path(folder, "socket"), free.getsockname()
        free.close()
        bin.mkdir()
        names = {"python": sys.executable, "address": str(address), "executable": str(bin / "python")}
        for name, first in COMMANDS.items():
            (bin / name).write_text(PYTHON.format(first=first, end=END, **names))
            (bin / name).chmod(0o755)
        (bin / "activate").write_text(f"export PATH={bin}:$PATH\n")
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        environment |= {"HF_ENDPOINT": "http://{}:{}".format(*hub), "HF_HOME": f"{folder}/home"}
        environment["DASK_LOGGING__DISTRIBUTED"] = "error"
        server = subprocess.Popen([sys.executable, __file__, str(address)], env=environment)
        while not address.exists():
            assert server.poll() is None, "the process to fork from has ended"
            time.sleep(0.02)
        yield SimpleNamespace(bin=bin, python=str(bin / "python"), hub=hub)
        server.kill()
        server.wait()


@pytest.fixture
def warm_executable(warm, monkeypatch) -> str:
    """Make it the one that this process starts others with, too."""
    monkeypatch.setattr(sys, "executable", warm.python)
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(warm.python))
    return warm.python


@pytest.fixture(scope="session")
def clone(warm, tmp_path_factory, request) -> Path:
    """A clone of what is committed, whose environment is the warmed one, with six frames of the miniature."""
    folder = tmp_path_factory.mktemp("clone") / "clone"
    subprocess.run(["git", "clone", "-q", request.config.rootpath, folder], check=True)
    (folder / ".venv").mkdir()
    (folder / ".venv/bin").symlink_to(warm.bin)
    files = [(folder / name).read_bytes() for name in ("requirements.txt", "pyproject.toml")]
    sum = subprocess.run(["cksum"], input=b"".join(files), capture_output=True)
    (folder / ".venv/installed").write_bytes(sum.stdout)  # as after the first start
    config = folder / "configs/wan_mini.yaml"
    config.write_text(config.read_text().replace("num_frames: 21", "num_frames: 6"))
    commit = ["-c", "user.name=t", "-c", "user.email=t", "commit", "-qam", "few frames"]
    subprocess.run(["git", *commit], cwd=folder, check=True)
    return folder


def serve(address: str) -> list[str]:
    """Fork for everyone who connects; return in the fork, with its words."""
    del sys.path[0]  # where this file is
    for name in MODULES:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    assert threading.active_count() == 1
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}_")
    listening.listen(100)
    os.rename(f"{address}_", address)  # there when it answers

    def reap(*given: object) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    signal.signal(signal.SIGCHLD, reap)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            return answer(connection)
        connection.close()


def answer(connection: socket.socket) -> list[str]:
    """Tell who connected how the process ended that this returns in; end it where that one is gone."""
    data, files, *_ = socket.recv_fds(connection, 1 << 20, 250)
    while not data.endswith(END):
        data += connection.recv(1 << 20)
    words, executable, cwd, environment, numbers = marshal.loads(data[: -len(END)])
    if (child := os.fork()) == 0:
        connection.detach()  # what is closed here is closed by its number
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        kept = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]
        os.closerange(3, 500)
        for file, number in zip(kept, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:1] = [part for part in environment.get("PYTHONPATH", "").split(":") if part]
        sys.executable = executable
        spawn.set_executable(executable)
        return words

    def end_it() -> None:
        with suppress(OSError):  # both are gone
            if not connection.recv(1):
                os.kill(child, signal.SIGKILL)

    try:
        for file in files:
            os.close(file)
        connection.sendall(b"%d" % child)
        threading.Thread(target=end_it, daemon=True).start()
        connection.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        os._exit(0)


def run(words: list[str]) -> None:
    """Do what `python WORDS` does."""
    while words[0].startswith("-") and words[0] not in ("-", "-c", "-m"):
        words = words[2 if words[0] in ("-X", "-W") else 1 :]
    sys.argv = words[1:] if words[0] == "-m" else words[:1] + words[2:] if words[0] == "-c" else words
    sys.path.insert(0, os.getcwd() if words[0].startswith("-") else str(Path(words[0]).resolve().parent))
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0].startswith("-"):
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1] if words[0] == "-c" else sys.stdin.read(), "<string>", "exec"), vars(main))
    else:
        runpy.run_path(words[0], run_name="__main__")


def end(code: object) -> None:
    """End this process without taking apart what it shares with the one it is a fork of."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(ValueError):  # it is closed
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    words = serve(sys.argv[1])
    try:
        run(words)
        end(0)
    except SystemExit as ended:
        end(ended.code)

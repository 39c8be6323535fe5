"""on_gpus.sh, with stand-ins for the GPUs and for Python: no flag of it may be found wrong on a GPU."""

import importlib
import os
import re
import subprocess

import pytest
from conftest import ROOT

SCRIPT = ROOT / "experiments/benchmarks/on_gpus.sh"
FUNCTIONS = re.findall(r"^(\w+)\(\) \{", SCRIPT.read_text(), re.MULTILINE)
PARTS = FUNCTIONS[FUNCTIONS.index("shared") + 1 :]


def start(folder, *parts):
    environment = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
    return subprocess.run(
        ["bash", SCRIPT, "out", *parts], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def host(tmp_path):
    """A folder with an nvidia-smi that sees two GPUs, and launchers that write down what they are given."""
    (tmp_path / "bin").mkdir()
    for name, does in {
        "nvidia-smi": "printf 'NVIDIA H200\\nNVIDIA H200\\n'",
        "python3": 'echo "$*" >> "$CALLS"',
        "torchrun": 'echo "$*" >> "$CALLS"',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def test_every_command_has_flags_that_its_script_knows(host, capsys):
    for folder in ("vae", "transformer", "text_encoder", "tokenizer"):
        (host / "outputs/gpu-miniature" / folder).mkdir(parents=True)
    ended = start(host, *PARTS)
    assert ended.returncode == 0, ended.stderr
    calls = (host / "calls").read_text().splitlines()
    assert len(calls) == ended.stdout.count("status 0") == len(PARTS) + 3 > 20  # three parts have two
    for words in map(str.split, calls):
        if words[:2] == ["-m", "pytest"]:
            continue
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        module = importlib.import_module(words[script].removesuffix(".py").replace("/", "."))
        with pytest.raises(SystemExit) as refused:  # its own parser: nothing but that flag is wrong
            module.run([*words[script + 1 :], "--unknown"])
        assert refused.value.code == 2
        assert re.search(r"error: unrecognized arguments: --unknown;", capsys.readouterr().err), words


def test_a_host_without_gpus_and_an_unknown_part_are_refused(host):
    for part in ("everything", "on"):
        ended = start(host, "vae", part)
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and f"no part '{part}'" in ended.stderr
    (host / "bin/nvidia-smi").write_text("#!/usr/bin/env bash\nexit 9\n")
    ended = start(host, "vae")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and "no NVIDIA GPU found" in ended.stderr
    assert not (host / "calls").exists()

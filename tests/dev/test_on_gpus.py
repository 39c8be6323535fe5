"""on_gpus.sh, with stand-ins for the GPUs and for Python: no flag of it may be found wrong on a GPU."""

import importlib
import os
import subprocess

import pytest
from conftest import ROOT

SCRIPT = ROOT / "experiments/dev/on_gpus.sh"
# Commands of each part.
PARTS = {
    "vae": 1,
    "base": 1,
    "causal": 1,
    "causal_again": 1,
    "few_step": 1,
    "evaluation": 2,
    "seeds": 4,
    "numbers": 6,
    "findings": 3,
    "siblings": 3,
    "parallel": 1,
    "parallel_long": 1,
    "attention": 1,
    "limit": 5,
    "sweep": 2,
}


def start(folder, programs, *parts):
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
    return subprocess.run(
        ["bash", SCRIPT, "out", *parts], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def programs(tmp_path):
    """A folder with an nvidia-smi that has seen a GPU, and launchers that write down what they are given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, does in {
        "nvidia-smi": "printf '0, NVIDIA H200\\n1, NVIDIA H200\\n'",
        "python3": 'echo "$*" >> "$CALLS"',
        "torchrun": 'echo "$*" >> "$CALLS"',
    }.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (folder / name).chmod(0o755)
    return folder


def refusal(module, flags, capsys):
    """What the script's own parser says of the flags and of one that it cannot know."""
    with pytest.raises(SystemExit) as ended:
        module.run([*flags, "--unknown"])
    assert ended.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("part", PARTS)
def test_every_command_has_flags_that_its_script_knows(part, tmp_path, programs, capsys):
    ended = start(tmp_path, programs, part)
    assert ended.returncode == 0, ended.stderr
    calls = dict.fromkeys((tmp_path / "calls").read_text().splitlines())  # ranks of a sweep share one
    assert len(calls) == PARTS[part] == ended.stdout.count("status 0")
    for words in map(str.split, calls):
        script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        assert script is not None
        if words[:2] == ["-m", "pytest"]:
            assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
            continue
        module = importlib.import_module(words[script].removesuffix(".py").replace("/", "."))
        said = refusal(module, words[script + 1 :], capsys)
        assert said.startswith("error: unrecognized arguments: --unknown;")


def test_jobs_take_the_gpu_that_is_free(tmp_path, programs):
    (programs / "python3").write_text(
        '#!/usr/bin/env bash\nsleep 0.2; echo $CUDA_VISIBLE_DEVICES >> "$CALLS"\n'
    )
    assert start(tmp_path, programs, "numbers").returncode == 0
    gpus = (tmp_path / "calls").read_text().split()
    assert set(gpus) == {"0", "1"} and min(gpus.count("0"), gpus.count("1")) >= 3


def test_findings_take_all_gpus_one_after_the_other(tmp_path, programs):
    """Three ranks on each, which share the cores and keep no mp4; they begin when the jobs before them have
    ended."""
    (programs / "python3").write_text(
        "#!/usr/bin/env bash\n"
        'echo "begins $CUDA_VISIBLE_DEVICES rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS: $*" >> "$CALLS"\n'
        'sleep 0.2; echo ends >> "$CALLS"\n'
    )
    assert start(tmp_path, programs, "models", "findings").returncode == 0
    lines = (tmp_path / "calls").read_text().splitlines()
    assert len(lines) == 28
    jobs = [lines[:2], lines[2:14], lines[14:16], lines[16:]]  # each begins when the one before has ended
    begun = [
        sorted((line for line in job if line != "ends"), key=lambda line: line.split()[3]) for job in jobs
    ]
    assert [len(job) for job in begun] == [1, 6, 1, 6] and lines.count("ends") == 14
    for ranks, script in ((begun[1], "compare_policies.py"), (begun[3], "hidden_shapes.py")):
        for number, line in enumerate(ranks):
            assert line.startswith(f"begins {number % 2} rank {number} of 6: experiments/")
            assert script in line and "--workers" not in line
            assert "--videos 0 " in line or script == "hidden_shapes.py"


def test_as_many_ranks_on_a_gpu_as_are_asked_for(tmp_path, programs, monkeypatch):
    monkeypatch.setenv("RANKS", "1")
    assert start(tmp_path, programs, "hidden_shapes").returncode == 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_a_host_without_gpus_is_refused(tmp_path, programs):
    (programs / "nvidia-smi").write_text("#!/usr/bin/env bash\nexit 9\n")
    ended = start(tmp_path, programs, "vae")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and "no NVIDIA GPU found" in ended.stderr


def test_an_unknown_part_is_refused(tmp_path, programs):
    ended = start(tmp_path, programs, "vae", "everything")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and "no part 'everything'" in ended.stderr
    assert not (tmp_path / "calls").exists()

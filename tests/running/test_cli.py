"""Command lines and the end of a script: bad input, closed streams, signals, what nobody foresaw."""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from helpers.forked import exit_code, forked, stopping_after
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments import rehearse_release, run_extraction_each, run_notebooks
from experiments.analysis import published
from experiments.caches import load_cache
from experiments.running import cli
from experiments.studies.rehearsal import vae_names
from wan.config import load_config

PUBLISHED = "cache/published/self_forcing_dmd_castle_72f.pt"
EXTRACTIONS = [f"run_extraction{of}" for of in ("", "_all", "_each", "_figure4", "_maps")]
FUZZED = {name: ["--config_path", "configs/wan_mini.yaml"] for name in EXTRACTIONS}  # what makes a line whole
FUZZED |= {"layer_page": [PUBLISHED], "extract_attention_wan": ["--ckpt_dir", "checkpoints/wan-mini"]}
LINKED = ("configs", "checkpoints", "cache", "README.md", "docs", "notebooks")


# -- bad command lines
class BeganError(Exception):
    """The work would begin here, or its command line would be read."""


def begins(*args, **more):
    raise BeganError


@cache
def arguments(name: str) -> list[argparse.Action]:
    """What a script of experiments/ takes, flags or not; one of the workshop is benchmarks.NAME."""
    found: list[argparse.Action] = []

    def parse_args(self, args=None, namespace=None):
        found.extend(self._actions)
        raise BeganError

    before, cli.Parser.parse_args = cli.Parser.parse_args, parse_args
    try:
        with contextlib.suppress(BeganError):
            import_module(f"experiments.{name}").run([])
    finally:
        cli.Parser.parse_args = before
    return [action for action in found if action.dest != "help"]


def scripts() -> list[str]:
    """Every script that users or the workshop start, by the names that arguments() takes."""
    found = []
    for folder, prefix in (("experiments", ""), ("experiments/benchmarks", "benchmarks.")):
        for path in sorted((ROOT / folder).glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if '__name__ == "__main__"' in text:
                found.append(prefix + path.stem)
    return found


NUMBERS = st.sampled_from(["0", "-1", "1", "5", "99", "1e9", "nan", "-inf", "1_0", "٣", " 7", "0x10", ""])
NUMBERS |= st.integers(-(10**40), 10**40).map(str)
WORDS = st.text(max_size=12) | st.sampled_from(
    [
        *("/dev/null", "/proc/self/mem", ".", "/", "configs/wan_mini.yaml", "a\nb", "\x1b[31m", "a" * 300),
        *("README.md", PUBLISHED, "checkpoints/wan-mini", "cuda:99"),
    ]
)


@st.composite
def command_line(draw, name: str) -> list[str]:
    words = list(FUZZED[name])
    flags = [action for action in arguments(name) if action.option_strings]
    for action in draw(st.lists(st.sampled_from(flags), min_size=1, max_size=4)):
        words.append(draw(st.sampled_from(action.option_strings)))
        if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
            continue
        choices = st.sampled_from([str(choice) for choice in action.choices]) if action.choices else NUMBERS
        count = draw(st.integers(0, 3)) if action.nargs in ("+", "*", "?") else 1
        words += [draw(choices | NUMBERS | WORDS) for _ in range(count)]
    return words


@pytest.mark.parametrize("name", FUZZED)
def test_whatever_is_given_a_script_begins_or_says_in_one_line_why_not(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for linked in LINKED:
        (tmp_path / linked).symlink_to(ROOT / linked)
    places = ("running.run.claimed", "running.atlases.make_atlases", "caches.files.claimed")
    for place in (*places, "caches.store.save_cache", "figures.html_page.save_page"):
        monkeypatch.setattr(f"experiments.{place}", begins)
    explained = cli.explained
    ended = lambda e: ("began", 0) if isinstance(e, BeganError) else explained(e)  # noqa: E731
    monkeypatch.setattr(cli, "explained", ended)
    script = import_module(f"experiments.{name}")

    @settings(max_examples=8, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(command_line(name))
    def try_one(words):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                cli.main(script.run, words)
                code = 0
            except SystemExit as ended:
                code = ended.code or 0
        lines = [line for line in said.getvalue().splitlines() if not line.startswith("warning: ")]
        assert code in (0, 2), (words, code, lines)
        if code and "--debug" not in words:
            assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 1500, (words, lines)
            assert "unexpected " not in lines[0], (words, lines)

    try_one()
    assert {path.name for path in tmp_path.iterdir()} == set(LINKED)


def test_every_output_is_known():
    writes = {"output", "save", "log", "sheet", "figure"}  # words of the names of what is written
    found = {a.dest for name in scripts() for a in arguments(name) if writes & set(a.dest.split("_"))}
    assert found - {"output_dir"} <= set(cli.OUTPUT_FLAGS), found


def test_no_help_waits_for_torch():
    """Every script prints its flags without torch, in one process: an import of it fails there."""
    names = [name for name in scripts() if "." not in name]
    code = (
        "import importlib, sys\n"
        "for name in ('torch', 'transformers', 'diffusers', 'matplotlib', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        f"for name in {names!r}:\n"
        "    try: importlib.import_module('experiments.' + name).run(['--help'])\n"
        "    except SystemExit as ended: assert not ended.code, name\n"
        "    print('took', name)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.count("took ") == len(names) >= 10


# -- what --help says
COMMANDS = [name for name in scripts() if "." not in name]


def help_of(name: str, flag: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        import_module(f"experiments.{name}").run([flag])
    assert not ended.value.code
    return capsys.readouterr().out


def test_help_says_what_a_script_writes_and_reads(capsys):
    for name, what in (("run_rollout", "video"), ("check_model", "figure"), ("make_head_classes", "table")):
        assert f"where the {what} goes" in help_of(name, "--help", capsys)
    page = help_of("layer_page", "--help", capsys)
    assert "what to capture" not in page and page.index("--compare") < page.index("where it goes")
    example = help_of("run_intervention", "--help", capsys).splitlines()[-1]
    assert (ROOT / example.split()[-1]).is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_grouped_and_has_an_example(name, capsys):
    text = help_of(name, "--help", capsys)
    assert len(text.splitlines()) <= 60
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [title for title in cli.GROUPS if title in titles] and len(titles) >= 2
    assert re.search(r"^example: .*experiments/\w+\.(py|sh)", text, re.MULTILINE)
    for action in arguments(name):
        if action.help is not argparse.SUPPRESS:
            assert (action.option_strings or [action.dest])[0] in text  # named, if only at the end


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_has_every_flag_with_its_default(name, capsys):
    text = help_of(name, "--help-all", capsys)
    assert "see --help-all" not in text
    for action in arguments(name):
        if action.help is argparse.SUPPRESS or not action.option_strings:
            continue
        entry = re.search(rf"^  (-\w, )?{action.option_strings[0]}[ ,\n](.*\n(   .*\n)*)", text, re.MULTILINE)
        assert entry, action.option_strings
        assert action.required or "default" in entry[0], entry[0]


def list_parser():
    parser = cli.Parser(description="x")
    parser.add_argument("--steps", type=int, nargs="+")
    parser.add_argument("--sites", nargs="+", choices=("first", "last"))
    parser.add_argument("--files", nargs="+", metavar="FILE")
    parser.add_argument("--frames", type=cli.count)
    return parser


def test_lists_take_spaces_or_commas_and_paths_keep_theirs():
    words = ["--steps", "0,4", "7", "--sites=first,last", "--files", "a,b", "c"]
    args = list_parser().parse_args(words)
    assert (args.steps, args.sites, args.files) == ([0, 4, 7], ["first", "last"], ["a,b", "c"])
    assert args.words == words
    assert list_parser().parse_args(["--steps", "-1,", "2"]).steps == [-1, 2]
    assert run_notebooks.layers("0,5-7") == [0, 5, 6, 7]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--frames", "0"], "'0' is not a whole number from 1 to 131072"),
        (["--steps", "0,x"], "'x' is not a whole number"),
        (["--sites", "last,frist"], "'frist'; did you mean first?"),
        (["--sites", "w"], "'w'; known ones: first, last"),
        (["--sitse", "first"], "did you mean --sites"),
    ],
)
def test_wrong_numbers_and_names_are_told_what_is_right(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        list_parser().parse_args(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "script, flags, message",
    [
        ("train_mini", ["--stage", "vae", "--minutes", "-1"], "'-1' is not a number from 0.001 to 1000000"),
        ("train_mini", ["--stage", "vae", "--seed", "-1"], "'-1' is not a whole number from 0"),
        ("evaluate_mini", ["--workers", "-1"], "'-1' is not a whole number from 1"),
        ("evaluate_mini", ["--output_path", "x.pt"], "x.pt does not end in .json"),
    ],
)
def test_flags_of_the_miniature_have_limits(script, flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        import_module(f"experiments.{script}").run(flags)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and said.count("\n") == 1


def test_names_and_files_of_the_project_are_known_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(argparse.ArgumentTypeError, match="none of configs/; known ones: ") as caught:
        cli.config_file("qqq")
    assert "wan_mini" in str(caught.value) and "taxonomy" not in str(caught.value)
    assert published.path_of(published.FIGURE4_CSV).is_file()


# -- signals, and what nobody foresaw
def test_nohup_outlives_its_terminal(tmp_path, tiny, monkeypatch):
    """SIGHUP comes during the first block."""
    stopping_after(monkeypatch, 0, by=signal.SIGHUP)
    argv = ["--config_path", tiny.path, "--output_path", str(tmp_path / "a.pt")]

    def call():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        cli.main(run_extraction_each.run, argv)

    assert forked(exit_code(call)).value == 0 and "partial" not in load_cache(tmp_path / "a.pt")


def test_what_nobody_foresaw_is_one_line_and_a_traceback_in_the_log(tmp_path, monkeypatch, tiny):
    def surprise(*args, **kwargs):
        raise ZeroDivisionError("first\nsecond \x1b[31m")

    monkeypatch.setattr("experiments.session.Session.generate", surprise)
    log = tmp_path / "log"
    argv = ["--config_path", tiny.path, "--output_path", str(tmp_path / "a.pt"), "--log_file", str(log)]
    done = forked(exit_code(lambda: cli.main(run_extraction_each.run, argv)))
    assert done.value == 1 and done.said.count("\n") == 1
    assert done.said.startswith("error: unexpected ZeroDivisionError: first: please report")
    assert "in surprise" in json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["traceback"]
    done = forked(exit_code(lambda: cli.main(run_extraction_each.run, [*argv, "--debug"])))
    assert done.said.startswith("Traceback") and done.said.count("\nerror: ") == 1


# -- shell scripts: exit code 2 and one line, or 0 and --help, before anything is installed
SHELL = {  # too few or too many words, and flags that no script has
    "download_weights": [["a", "b", "c"]],
    "extract_attention": [[], ["a", "1", "b", "c"], ["a", "--layr", "1"]],
    "extract_all_layers": [["a"], ["a", "b", "c"], ["a", "b", "--no-cros"]],
    "extract_figure4": [["wan_mini", "1", "--layer=3"], ["--seed", "1", "--promt", "a"]],
    "quickstart": [["1"]],
    "run_notebooks": [[], ["a", "b"], ["a", "b", "0", "--paramter", "STEP=1"]],
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The scripts on a machine without an environment, whose Python ends at once."""
    root = tmp_path_factory.mktemp("bare")
    (root / "experiments").mkdir()
    shutil.copytree(ROOT / "experiments/running", root / "experiments/running")
    for path in (ROOT / "experiments").glob("*.*"):
        shutil.copy(path, root / "experiments")
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("python", "python3"):
        (root / "bin").mkdir(exist_ok=True)
        (root / "bin" / name).symlink_to("/bin/false")
    return SimpleNamespace(root=root, env=os.environ | {"PATH": f"{root}/bin:{os.environ['PATH']}"})


@pytest.mark.slow
@pytest.mark.parametrize("name", SHELL)
def test_every_shell_script(name, bare):
    script, options = ["bash", f"experiments/{name}.sh"], {"cwd": bare.root, "env": bare.env}
    usage = subprocess.run([*script, "--help"], **options, capture_output=True, text=True)
    assert usage.returncode == 0 and " ".join(script) in usage.stdout and not usage.stderr, usage
    for case in (["--no_such_flag"], *SHELL[name]):
        done = subprocess.run([*script, *case], **options, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: "), (case, done)
        assert done.stderr.count("\n") == 1 and "python3 must be" not in done.stderr, done


def test_flags_that_a_python_script_knows_come_to_it(bare):
    known = ["--seed", "1", "--no-offload", "--step=1", "--granularity", "key", "--help-all"]
    command = ["bash", "experiments/extract_figure4.sh", "wan_mini", "1", *known]
    done = subprocess.run(command, cwd=bare.root, env=bare.env, capture_output=True, text=True)
    assert done.stderr == "error: python3 must be 3.11 or newer\n"


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["torch>=2", "torch>=99", "no-such-package"])
def test_an_active_environment_with_the_packages_is_used_and_nothing_installed(wanted, bare, tmp_path):
    """Its Python runs this code; without the packages a .venv is made."""
    shutil.copytree(bare.root / "experiments", tmp_path / "experiments")
    extras = "[project.optional-dependencies]\nnotebooks = []\n"
    (tmp_path / "pyproject.toml").write_text(f'[project]\ndependencies = ["{wanted}"]\n{extras}')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    (tmp_path / "experiments/run_extraction_figure4.py").write_text('"--seed"\nimport experiments, sys\n')
    with (tmp_path / "experiments/run_extraction_figure4.py").open("a") as file:
        file.write("print(experiments.__file__, sys.argv[1:])\n")
    (tmp_path / "experiments/__init__.py").write_text("")
    env = bare.env | {"VIRTUAL_ENV": str(tmp_path), "PATH": f"{tmp_path}/bin:{bare.env['PATH']}"}
    command = ["bash", "experiments/extract_figure4.sh", "wan_mini", "--seed", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    if wanted == "torch>=2":
        said = f"{tmp_path}/experiments/__init__.py ['--config_path', 'wan_mini', '--seed', '1']\n"
        assert (done.returncode, done.stdout) == (0, said), done
    else:
        assert done.stderr == "error: python3 must be 3.11 or newer\n"
    assert not (tmp_path / ".venv").exists()


@pytest.mark.slow
def test_a_venv_of_another_checkout_is_refused_before_anything_is_installed(tmp_path):
    (tmp_path / "ours/experiments/running").mkdir(parents=True)
    script = shutil.copy(ROOT / "experiments/running/env.sh", tmp_path / "ours/experiments/running")
    (tmp_path / "theirs/.venv/bin").mkdir(parents=True)
    (tmp_path / "theirs/.venv/bin/python").write_text("#!/bin/sh\ntouch called\n")
    (tmp_path / "theirs/.venv/bin/python").chmod(0o755)
    (tmp_path / "theirs/.venv/bin/activate").write_text("exit 7\n")  # as far as a .venv of its own comes
    (tmp_path / "ours/.venv").symlink_to(tmp_path / "theirs/.venv")
    done = subprocess.run(["bash", "-eu", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: .venv leads out of this checkout, to ")
    (tmp_path / "ours/.venv").unlink()
    (tmp_path / "theirs/.venv").rename(tmp_path / "ours/.venv")
    assert subprocess.run(["bash", "-eu", script], capture_output=True).returncode == 7
    shutil.rmtree(tmp_path / "ours/.venv")
    (tmp_path / "python3").symlink_to("/bin/false")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-eu", script], capture_output=True, text=True, env=os.environ | path)
    assert done.stderr == "error: python3 must be 3.11 or newer\n"  # one is made where there is none


# -- download_weights.sh against a small server that answers as the hub does
MODEL, TUNED = "Wan-AI/Wan2.1-T2V-1.3B", "gdhe17/Self-Forcing"
WEIGHTS, COMMIT = "diffusion_pytorch_model.safetensors", "0" * 40
FILES = {
    MODEL: {
        "config.json": b"{}",
        WEIGHTS: os.urandom(3 << 20),
        "models_t5_umt5-xxl-enc-bf16.pth": os.urandom(2 << 20),
        "Wan2.1_VAE.pth": os.urandom(1 << 20),
    },
    TUNED: {"checkpoints/self_forcing_dmd.pt": os.urandom(1 << 20), "checkpoints/other.pt": b"not asked for"},
    "tianweiy/CausVid": {"autoregressive_checkpoint/model.pt": b"few bytes"},
}
WHOLE = {f"wan_models/Wan2.1-T2V-1.3B/{name}": data for name, data in FILES[MODEL].items()}
WHOLE["checkpoints/self_forcing_dmd.pt"] = FILES[TUNED]["checkpoints/self_forcing_dmd.pt"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """What `hf download` uses of the hub: a repository's files, and their bytes from an offset."""

    protocol_version = "HTTP/1.1"
    sent: list[str]
    port: int
    spoiled: str

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.partition("?")[0]
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/\w+", path)
        wanted = re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path)
        if listing:
            files = FILES[listing[1]]
            tree = []
            for name, data in files.items():
                tree.append({"type": "file", "path": name, "size": len(data), "oid": "0"})
                if len(data) > 100:
                    oid = "0" * 64 if name == self.spoiled else sha256(data)
                    tree[-1]["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 130}
            about = {"id": listing[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.send(json.dumps(tree if listing[2] == "tree" else about).encode())
        else:
            data = FILES[wanted[1]][wanted[2]]
            self.sent.extend([wanted[2]] * (self.command == "GET"))
            self.send(data, {"ETag": f'"{sha256(data)}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def send(self, body: bytes, headers: dict[str, str] | None = None):
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub():
    Hub.sent, Hub.spoiled = [], ""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Hub.port = server.server_port
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


def download(port, clone, *flags, answer=""):
    environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}
    environment["HF_HOME"] = str(clone.parent / "home")
    command = ["bash", str(clone / "experiments/download_weights.sh"), *flags]
    options = {"capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(command, input=answer, env=environment | {"PYTHONPATH": str(clone)}, **options)


def fetched(folder) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_without_a_network_and_with_a_wrong_name_it_says_so_in_one_line(clone, tmp_path):
    done = download(1, clone, "--yes", str(tmp_path / "here"))  # where nobody listens
    wrong = download(1, clone, "no_such", "x")
    assert (done.returncode, wrong.returncode) == (1, 2) and "does not answer" in done.stderr
    assert "HF_ENDPOINT" in done.stderr and "--from DIR" in done.stderr
    typo = download(1, clone, "--yes", "causvd")  # a new folder has a slash
    assert typo.returncode == 2 and "did you mean causvid?" in typo.stderr and not Path("causvd").exists()
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == wrong.stderr.count("\n") == 1


def test_weights_are_copied_from_a_folder_and_replace_no_other_file(clone, tmp_path):
    for repository, files in FILES.items():
        for name, data in files.items():
            path = tmp_path / "hub" / repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    here, copies = tmp_path / "a folder", ["--yes", "--from", str(tmp_path / "hub")]
    done = download(1, clone, *copies, str(here))  # where no hub listens
    assert done.returncode == 0 and "every file is that of" in done.stdout, done
    assert fetched(here) == WHOLE
    (here / "checkpoints/self_forcing_dmd.pt").write_bytes(b"mine")
    done = download(1, clone, *copies, str(here))
    assert done.returncode == 1 and "is not the file that" in done.stderr
    assert (here / "checkpoints/self_forcing_dmd.pt").read_bytes() == b"mine"
    done = download(1, clone, "--yes", "--from", str(tmp_path / "none"), str(here))
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_the_rehearsal_marks_an_error_that_it_expects(capfd):
    assert rehearse_release.runs([sys.executable, "-c", "raise SystemExit(2)"], 2)
    assert "(expected: an error line, and exit code 2)" in capfd.readouterr().out
    assert rehearse_release.runs([sys.executable, "-c", ""], 0)
    assert "expected" not in capfd.readouterr().out


def test_the_rehearsal_names_the_weights_of_the_vae_as_the_release_does():
    """diffusers' own conversion gives its names back."""
    with torch.device("meta"):
        state = AutoencoderKLWan().state_dict()
    assert convert_wan_vae_to_diffusers(vae_names(state)).keys() == state.keys()


def test_nothing_is_fetched_without_a_yes_or_twice_and_what_arrived_is_compared(hub, clone, tmp_path):
    here = tmp_path / "here"
    for flags, said in (
        ([], "nothing was downloaded; --yes"),
        (["--yes", "causvid"], "nothing was downloaded; --accept_licence"),  # to which that yes is none
    ):
        done = download(hub.port, clone, *flags, str(here))
        assert done.returncode == 2 and said in done.stderr and "licence" in done.stdout
        assert "3.1M" in done.stdout and not hub.sent and not fetched(here)
    done = download(hub.port, clone, str(here), answer="y\n")
    assert done.returncode == 0, done.stderr
    assert fetched(here) == WHOLE and "next: python experiments/check_model.py" in done.stdout
    assert "the sizes of 5 files are the hub's, and so are the SHA-256 of 4" in done.stdout
    assert len(hub.sent) == len(set(hub.sent)) == 5
    hub.spoiled = WEIGHTS  # the hub says another hash than that of the file that it sent
    done = download(hub.port, clone, "--yes", str(here))
    assert done.returncode == 1 and len(hub.sent) == 5
    assert f"{WEIGHTS} is not the file that the hub has; remove it" in done.stderr


RELEASED = [path.stem for path in (ROOT / "configs").glob("*.yaml") if "\nrelease:" in path.read_text()]


def test_every_release_is_complete_and_its_files_are_those_of_the_config():
    assert len(RELEASED) > 5
    for name in RELEASED:
        config = load_config(ROOT / f"configs/{name}.yaml")
        said = config.release
        paths = [str(Path(said["folder"]) / file) for file in said["files"]]
        assert paths == [path for path in (config.checkpoint_path, config.lora_path) if path], name
        assert said["ask"] == ("non-commercial" in said["licence"] or "its own" in said["licence"]), name
        assert said["source"].startswith("https://github.com/"), name


def test_loras_of_the_command_line(tmp_path):
    """FILE, FILE:STRENGTH, and a file whose name has a colon."""
    odd = tmp_path / "a:2"
    odd.write_bytes(b"")
    words = [
        "--config_path",
        "configs/wan_mini.yaml",
        "--lora",
        "x.safetensors:0.8",
        "y.pt",
        str(odd),
        "z.pt:-1",
    ]
    config = cli.config_from(cli.run_parser("-").parse_args(words))
    assert [*map(str, config.loras)] == ["x.safetensors:0.8", "y.pt", "a:2", "z.pt:-1"]

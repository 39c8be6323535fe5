"""What is installed: the wheel, the libraries of requirements.txt and pyproject.toml, the extra dev."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from conftest import ROOT
from test_layout import tracked

COMMANDS = """
import sys
from importlib.metadata import entry_points
for command in entry_points(group="console_scripts"):
    if command.name.startswith("wan-"):
        sys.argv = [command.name, "--help"]
        try:
            command.load()()
        except SystemExit as ended:
            assert not ended.code, (command.name, ended.code)
        print("ran", command.name)
import experiments.figures.html_page, wan
print("from", experiments.__file__, wan.__file__)
"""


@pytest.mark.beside
def test_the_wheel_ships_what_the_packages_read_and_its_commands_say_what_they_do(tmp_path):
    files = "wan", "experiments", "pyproject.toml", "README.md", "LICENSE"
    for name in tracked(*files):  # building leaves files
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(tmp_path), str(tmp_path / "source")], check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    needed = [name for name in tracked("wan", "experiments") if not name.endswith((".md", ".sh"))]
    assert len(needed) > 80 and not [name for name in needed if not (site / name).is_file()]
    run = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(site)}, "check": True, "text": True}
    said = subprocess.run([sys.executable, "-c", COMMANDS], stdout=subprocess.PIPE, **run).stdout
    names = {line for line in said.splitlines() if line.startswith("ran ")}
    assert len(names) == 5 and said.count(str(site)) == 2


PROPERTY = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=3)
@given(st.lists(st.integers()).map(len) | st.none())
def test_of_a_property(n):
    raise AssertionError

def test_of_a_number():
    pass
"""


def test_without_hypothesis_only_tests_of_properties_are_skipped(tmp_path):
    (tmp_path / "test_it.py").write_text(PROPERTY)
    code = "import sys, pytest; from helpers import without_hypothesis; "
    code += "sys.modules['hypothesis'] = without_hypothesis; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-rs", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "-c", os.devnull, tmp_path]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    process = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, env=env)
    assert process.returncode == 0 and "1 passed, 1 skipped" in process.stdout, process.stdout
    assert 'hypothesis is not installed: pip install -e ".[dev]"' in process.stdout


# What libraries call themselves where they are imported
DISTRIBUTIONS = {"yaml": "pyyaml", "dask_jobqueue": "dask-jobqueue", "imageio_ffmpeg": "imageio-ffmpeg"}
DISTRIBUTIONS |= {"distributed": "dask", "flash_attn": "flash-attn-4", "quack": "quack-kernels"}
BROUGHT_ALONG = {
    "PIL": "matplotlib",
    "pandas": "seaborn",
    "triton": "torch",
    "cutlass": "flash-attn-4",
    "IPython": "jupyterlab",
    "nbformat": "papermill",
    "nbclient": "papermill",
}


def named_in(lines: list[str]) -> set[str]:
    """Return the libraries that lines of requirements name."""
    return {re.match(r"[\w.-]+", line)[0].lower() for line in lines if line[0].isalpha()}


def test_every_library_that_is_imported_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = named_in([*project["dependencies"], *(line for lines in extras.values() for line in lines)])
    imported = set()
    for name in tracked("wan", "experiments"):
        if name.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported.add(node.module.partition(".")[0])
    libraries = imported - set(sys.stdlib_module_names) - {"wan", "experiments"}
    needed = {BROUGHT_ALONG.get(name, DISTRIBUTIONS.get(name, name)) for name in libraries}
    assert {"torch", "numpy", "matplotlib"} <= needed and not needed - declared
    # requirements.txt pins what users, notebooks and pytest need; of the extras, cluster and notebooks
    pinned = named_in((ROOT / "requirements.txt").read_text().splitlines())
    assert not named_in(project["dependencies"]) - pinned
    assert not {"dask", "dask-jobqueue", *named_in(extras["notebooks"]), "pytest"} - pinned
    assert not named_in(extras["dev"]) & pinned

"""A wheel where no checkout is: it holds what the packages read, and its commands are the scripts."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT

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


def tracked(*names):
    """Files below these names that git knows."""
    command = ["git", "ls-files", *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel holds. It is built in a copy: building leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked("wan", "experiments", "pyproject.toml", "README.md", "LICENSE"):
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*build, str(folder / "source")], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.beside
def test_the_wheel_ships_every_file_that_the_packages_read(installed):
    needed = [name for name in tracked("wan", "experiments") if not name.endswith((".md", ".sh"))]
    assert len(needed) > 80 and not [name for name in needed if not (installed / name).is_file()]


@pytest.mark.beside
def test_its_commands_say_what_they_do(installed, tmp_path):
    env = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    names = {line.removeprefix("ran ") for line in done.stdout.splitlines() if line.startswith("ran ")}
    assert len(names) == 8 and done.stdout.count(str(installed)) == 2

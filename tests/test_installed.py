"""A wheel where no checkout is: it holds what the packages read, and its commands are the scripts."""

import os
import shutil
import subprocess
import sys
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

"""A notebook for every layer: one kernel, what is made again, what Ctrl-C leaves, what is replaced."""

import json
import re
import time
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from pathlib import Path

import nbclient
import nbformat
import papermill
import pytest
from conftest import ROOT
from helpers import synthetic_caches
from helpers.forked import exit_code, forked

from experiments import run_notebooks
from experiments.caches import save_cache
from experiments.caches.files import CacheError
from experiments.caches.outputs import NO_CHECKSUM, with_checksum
from experiments.figures.folder import save_contact_sheet
from experiments.running import cli, notebooks
from wan.errors import ConfigError

PARAMETERS = """CACHE_PATH = ""
LAYER: int | None = None
SAVE_DIR = ""
STEP: int | None = None
HEADS: list[tuple[int, int, str]] | str = "auto"
STOP = ""
"""
# Draws without matplotlib, whose import takes seconds: the field of the checksum as it is documented
CODE = """import hashlib, os, pathlib, signal, time
if STOP and LAYER == 3 and not pathlib.Path(STOP).exists():
    pathlib.Path(STOP).touch()
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
if STEP == 9:
    raise ValueError("no pass 9\\nand more")
words = f"{pathlib.Path(CACHE_PATH).name} {LAYER} {STEP} process {os.getpid()} {'left' in globals()}"
left, empty = True, "urn:sha256:" + 64 * "0"
svg = f'<svg viewBox="0 0 20 10" width="20pt"><metadata>{empty}</metadata><text>{words}</text></svg>'
folder = pathlib.Path(SAVE_DIR)
folder.mkdir(parents=True, exist_ok=True)
svg = svg.replace(empty, "urn:sha256:" + hashlib.sha256(svg.encode()).hexdigest())
(folder / f"figure4_layer{LAYER}_per_head_grid.svg").write_text(svg)"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The words of a command that runs a small notebook under the name of a real one, over two layers."""
    parameters = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    about = {"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[parameters, nbformat.v4.new_code_cell(CODE)], metadata=about)
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook, tmp_path / "notebooks" / "plt_fig4.ipynb")
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path / "notebooks")
    for N in (0, 3):
        save_cache(tmp_path / "layers" / f"layer{N}.pt", synthetic_caches.layer(N))
    return ["plt_fig4.ipynb", str(tmp_path / "layers"), "all", "--output_dir", str(tmp_path / "out")]


def drawn(folder, layer):
    return (folder / "out" / f"layer{layer}" / f"figure4_layer{layer}_per_head_grid.svg").read_text()


def executed(folder):
    """The content of each executed notebook."""
    return [(folder / "out" / "notebooks" / f"layer{layer}.ipynb").read_bytes() for layer in (0, 3)]


def test_layers_share_a_kernel_but_no_names_and_are_done_once(command, tmp_path, monkeypatch):
    run_notebooks.run(command)
    process = re.search(r"process \d+", drawn(tmp_path, 0))[0]
    for N in (0, 3):
        assert f"layer{N}.pt {N} None {process} False" in drawn(tmp_path, N)
    assert "Layer 3" in (tmp_path / "out/contact_sheet.svg").read_text()
    assert (tmp_path / "out/index.html").is_file()
    # 1. The same command runs nothing
    before = executed(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(notebooks, "NotebookClient", None)
        run_notebooks.run(command)
    # 2. A cache that changed, a figure that is gone, and parameters
    save_cache(tmp_path / "layers/layer0.pt", synthetic_caches.layer(0) | {"notes": ["another"]})
    run_notebooks.run(command)
    after = executed(tmp_path)
    assert after[0] != before[0] and after[1] == before[1]
    (tmp_path / "out/layer3/figure4_layer3_per_head_grid.svg").unlink()
    run_notebooks.run([*command, "--parameter", "STEP=4"])
    assert all(f"{N} 4 process" in drawn(tmp_path, N) for N in (0, 3))


def test_ctrl_c_keeps_finished_layers_and_the_same_command_continues(command, tmp_path):
    command += ["--parameter", f"STOP={tmp_path / 'stopped'}"]
    start = time.monotonic()
    stopped = forked(exit_code(lambda: cli.main(run_notebooks.run, command)))
    assert time.monotonic() - start < 60
    assert stopped.value == 130 and stopped.said.splitlines()[-1] == "error: stopped"
    first = (tmp_path / "out/notebooks/layer0.ipynb").read_bytes()
    assert not (tmp_path / "out/contact_sheet.svg").exists()
    continued = forked(exit_code(lambda: cli.main(run_notebooks.run, command)))
    assert continued.value == 0 and executed(tmp_path)[0] == first
    assert "layer3.pt 3" in drawn(tmp_path, 3) and (tmp_path / "out/contact_sheet.svg").is_file()


def test_a_notebook_that_fails_is_named(command, tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(run_notebooks.run, [*command, "--parameter", "STEP=9"])
    path = tmp_path / "out/notebooks/layer0.ipynb"
    assert ended.value.code == 1
    assert capfd.readouterr().err.splitlines()[-1] == f"error: ValueError: no pass 9; see {path}"
    assert "no pass 9" in path.read_text() and not (tmp_path / "out/notebooks/layer3.ipynb").exists()
    run_notebooks.run(command)  # what failed may be replaced
    assert "0 None" in drawn(tmp_path, 0)


# --- Without a kernel: parameters, and whose files are replaced
@pytest.fixture
def parameters_given(monkeypatch):
    """Stand in for papermill: the parameters of each call, each with a figure that has a checksum."""
    calls = []

    def execute(source, output, parameters, record, **options):
        calls.append(parameters)
        folder = Path(parameters["SAVE_DIR"])
        if Path(source).name == "extract_all_attention.ipynb":
            folder /= f"layer{parameters['LAYER']}"
        name = notebooks.SHEET[Path(source).name].format(parameters["LAYER"])
        folder.mkdir(parents=True, exist_ok=True)
        svg = f'<svg viewBox="0 0 20 10" width="2pt"><!--{NO_CHECKSUM}-->{parameters["CACHE_PATH"]}</svg>'
        (folder / name).write_bytes(with_checksum(svg.encode()))
        notebook = nbformat.v4.new_notebook(metadata={"papermill": {"run": record}})
        nbformat.write(notebook, output)
        return notebook

    monkeypatch.setattr(papermill, "execute_notebook", execute)
    monkeypatch.setattr(nbclient.NotebookClient, "setup_kernel", lambda self, env: nullcontext())
    return calls


def test_the_parameters_of_each_notebook(parameters_given, command, tmp_path, monkeypatch):
    save_cache(tmp_path / "atlas.pt", synthetic_caches.atlas())
    save_cache(tmp_path / "inference.pt", synthetic_caches.inference())
    folder = ["--output_dir", str(tmp_path / "a")]
    monkeypatch.setattr(notebooks, "FOLDER", ROOT / "notebooks")
    run_notebooks.run(["layer_atlas.ipynb", str(tmp_path / "atlas.pt"), "1", "5", *folder])
    atlas = {"CACHE_PATH": str(tmp_path / "atlas.pt")}
    assert parameters_given == [
        atlas | {"LAYER": 1, "SAVE_DIR": str(tmp_path / "a/layer1")},
        atlas | {"LAYER": 5, "SAVE_DIR": str(tmp_path / "a/layer5")},
    ]
    parameters_given.clear()
    folder = ["--output_dir", str(tmp_path / "b"), "--parameter", "STEP=0", "PDF=yes"]
    run_notebooks.run(["extract_all_attention.ipynb", command[1], "0-0", "3", *folder])
    layer = {"CACHE_PATH": f"{command[1]}/layer3.pt", "LAYER": 3, "SAVE_DIR": str(tmp_path / "b")}
    assert parameters_given[1] == layer | {"STEP": 0, "PDF": True}
    for name in ("plt_fig4", "plot_figure4"):
        folder = ["--output_dir", str(tmp_path / name)]
        run_notebooks.run([f"{name}.ipynb", str(tmp_path / "inference.pt"), "5", *folder])
        assert parameters_given[-1]["LAYER"] == 5


def test_the_runner_refuses_parameters_and_layers(command, tmp_path):
    with pytest.raises(ConfigError, match="no parameter 'STEPS'; did you mean STEP"):
        run_notebooks.run([*command, "--parameter", "STEPS=[1]"])
    with pytest.raises(ConfigError, match="LAYER follows from the cache"):
        run_notebooks.run([*command, "--parameter", "LAYER=1"])
    with pytest.raises(ConfigError, match=r"STEP = 'a' is not int \| None"):
        run_notebooks.run([*command, "--parameter", "STEP=a"])
    with pytest.raises(CacheError, match=r"layer 1 is not in .*layers; it has 0, 3"):
        run_notebooks.run([*command[:2], "0-1", *command[3:]])
    save_cache(tmp_path / "effects.pt", synthetic_caches.effects(6))
    with pytest.raises(CacheError, match="a cache of format effects, which names no layers"):
        run_notebooks.run([command[0], str(tmp_path / "effects.pt"), *command[2:]])
    assert not (tmp_path / "out").exists()


def test_two_caches_of_one_name_share_no_folder(parameters_given, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        save_cache(tmp_path / folder / "layer3.pt", synthetic_caches.layer(3))
    run_notebooks.run([command[0], "a/layer3.pt", "all"])
    assert "outputs/plt_fig4/layer3/index.html" in capsys.readouterr().out
    with pytest.raises(CacheError, match=r"layer3.ipynb is of .*a/layer3\.pt, not .*b/layer3\.pt; move it"):
        run_notebooks.run([command[0], "b/layer3.pt", "all"])
    assert (
        "a/layer3.pt" in Path("outputs/plt_fig4/layer3/layer3/figure4_layer3_per_head_grid.svg").read_text()
    )


def test_files_of_others_stay(parameters_given, command, tmp_path):
    """A figure that was changed by hand is somebody's work, and so is one that was there before."""
    out, figure = tmp_path / "out", tmp_path / "out/layer3/figure4_layer3_per_head_grid.svg"
    mine = [out / "layer3/notes.txt", out / "more.svg"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    run_notebooks.run(command)
    for number, path in enumerate((figure, out / "notebooks/layer3.ipynb", out / "contact_sheet.svg")):
        content = path.read_text()
        path.write_text(content.replace("3", "4", 1))
        save_cache(tmp_path / "layers/layer3.pt", synthetic_caches.layer(3) | {"notes": [str(number)]})
        with pytest.raises(CacheError, match=f"{path.name} was changed since this program wrote it; move it"):
            run_notebooks.run(command)
        path.write_text(content)
        run_notebooks.run(command)
    (out / "layer3/own.svg").write_text("mine")
    save_cache(tmp_path / "layers/layer3.pt", synthetic_caches.layer(3) | {"notes": ["more"]})
    with pytest.raises(CacheError, match=r"own\.svg was not written by this program; move it away"):
        run_notebooks.run(command)
    assert all(path.read_text() == "mine" for path in mine)


def test_a_notebook_that_was_changed_is_run_again(parameters_given, command, tmp_path):
    command += ["--parameter", "HEADS=[[1, 1, L1H1]]"]  # pairs come back from a file as lists
    run_notebooks.run(command)
    path = tmp_path / "notebooks/plt_fig4.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][1]["outputs"] = []
    path.write_text(json.dumps(notebook))  # what it shows is no part of it
    run_notebooks.run(command)
    assert len(parameters_given) == 2
    notebook["cells"][1]["source"] = "print(1)"
    path.write_text(json.dumps(notebook))
    run_notebooks.run(command)
    assert len(parameters_given) == 4


def test_the_contact_sheet(tmp_path):
    start = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    size = 'width="200pt" height="100pt" viewBox="0 0 200 100">'
    ids = '<metadata>x</metadata><defs><clipPath id="p1"/></defs><g clip-path="url(#p1)">'
    for i in range(5):
        text = f'{start}{size}{ids}<use xlink:href="#m2"/><text>words</text></g></svg>'
        (tmp_path / f"{i}.svg").write_text(text)
    figures = {f"Layer {i} & co": tmp_path / f"{i}.svg" for i in range(5)}
    path = save_contact_sheet(tmp_path / "sheet.svg", figures, "title")
    found = [element.get("id") for element in ET.parse(path).getroot().iter() if element.get("id")]
    assert found == [f"c{i}_p1" for i in range(5)]
    text = path.read_text()
    assert all(f"url(#c{i}_p1)" in text and f'href="#c{i}_m2"' in text for i in range(5))
    assert "metadata" not in text and "Layer 4 &amp; co" in text

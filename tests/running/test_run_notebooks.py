"""A notebook per layer: what is collected, what Ctrl-C leaves, what is made again, and bad input."""

import json
import os
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as ET

import nbformat
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches
from helpers.synthetic_caches import same

from experiments import contact_sheet, run_notebooks
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.figures.folder import save_contact_sheet
from experiments.running import cli
from experiments.running.notebooks import LayerCaches, NotebookRuns

LAYERS = (0, 3)
NOTEBOOK = ROOT / "notebooks/extract_all_attention.ipynb"


@pytest.fixture
def layer_folder(tmp_path):
    for N in LAYERS:
        save_cache(tmp_path / "layers" / f"layer{N}.pt", synthetic_caches.layer(N))
    return tmp_path / "layers"


def printed(path):
    outputs = [o for cell in nbformat.read(path, 4).cells for o in cell.get("outputs", [])]
    return "".join(o["text"] for o in outputs if o["output_type"] == "stream")


@pytest.mark.beside
def test_stopped_and_continued(layer_folder, tmp_path, capsys, warm_executable):
    out = tmp_path / "out"
    command = [NOTEBOOK.name, str(layer_folder), "all", "--output_dir", str(out), "--jobs", "1"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    options["env"] = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen([warm_executable, "experiments/run_notebooks.py", *command], **options)
    first = out / "notebooks" / "layer0.ipynb"
    while not first.exists() and running.poll() is None:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal's job
    said, errors = running.communicate(timeout=120)
    assert running.returncode == 130 and errors.splitlines()[-1] == "error: stopped", errors
    assert "Traceback" not in errors and "the same command continues" in said
    assert not (out / "index.html").exists()
    done = first.stat().st_mtime_ns

    run_notebooks.run(command)
    said = capsys.readouterr()
    assert first.stat().st_mtime_ns == done and "2/2" in said.err
    for N in LAYERS:
        text = printed(out / "notebooks" / f"layer{N}.ipynb")
        assert f"Layer {N}, mean_logit, pass 0" in text
        figures = {f"layer{N}_{name}.svg" for name in ("2d_heatmap_all_heads", "perhead_grid")}
        assert {path.name for path in (out / f"layer{N}").iterdir()} == figures
    sheet = (out / "contact_sheet.svg").read_text()
    assert re.findall(r">Layer (\d+)</text>", sheet) == ["0", "3"]
    page = (out / "index.html").read_text()
    assert json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["layers"] == [0, 3]
    runs = NotebookRuns(NOTEBOOK, LayerCaches(NOTEBOOK.name, layer_folder, out / "caches"), out)
    save_cache(layer_folder / "layer0.pt", synthetic_caches.layer(0) | {"prompt": "another"})
    assert [runs.is_done(N) for N in LAYERS] == [False, True]


def test_a_notebook_that_fails_is_named(tmp_path, capfd, monkeypatch, warm_executable):
    """A cache that is damaged after the layers were chosen."""
    save_cache(tmp_path / "a.pt", synthetic_caches.atlas())
    monkeypatch.setattr(LayerCaches, "parameters", lambda self, layer: {"CACHE_PATH": "../cache/none.pt"})
    flags = ["plt_fig4.ipynb", tmp_path / "a.pt", "1", "--output_dir", tmp_path / "out"]
    with pytest.raises(SystemExit) as ended:
        cli.main(run_notebooks.run, [*map(str, flags)])
    said = capfd.readouterr().err
    assert ended.value.code == 1 and "error: layer 1: CacheError: ../cache/none.pt not found" in said
    assert (tmp_path / "out" / "notebooks" / "layer1.failed.ipynb").is_file()


def test_the_parameters_of_each_notebook(tmp_path, layer_folder):
    save_cache(tmp_path / "atlas.pt", synthetic_caches.atlas())
    save_cache(tmp_path / "inference.pt", synthetic_caches.inference())
    folder = tmp_path / "slices"
    of_folder = LayerCaches("extract_all_attention.ipynb", layer_folder, folder)
    given = of_folder.parameters(3)
    assert of_folder.layers == [0, 3] and given == {"DATA_PATH": str(layer_folder / "layer3.pt")}
    assert not folder.exists()
    whole = load_cache(tmp_path / "atlas.pt")
    given = LayerCaches("extract_all_attention.ipynb", tmp_path / "atlas.pt", folder).parameters(5)
    matrix = load_cache(given["DATA_PATH"])["full_frame_attention"]
    assert torch.equal(matrix[:, 6:], whole["frame_logits"][2, 0, :, 6:])
    figure4 = LayerCaches("plt_fig4.ipynb", tmp_path / "atlas.pt", folder).parameters(5)
    assert figure4["HEADS"] == [[5, 0, "L5H0"], [5, 1, "L5H1"], [5, 2, "L5H2"]]
    one = load_cache(figure4["CACHE_PATH"])
    assert one["layers"] == [5] and same(one["frame_mass"], whole["frame_mass"][2:])
    atlas = LayerCaches("layer_atlas.ipynb", tmp_path / "atlas.pt", folder).parameters(1)
    assert atlas == {"CACHE_PATH": str(tmp_path / "atlas.pt"), "LAYER": 1}
    calls = LayerCaches("plot_figure4.ipynb", tmp_path / "inference.pt", folder).parameters(5)
    assert calls == {"CACHE_PATH": str(tmp_path / "inference.pt"), "WEIGHT_INDEX": 1}


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
    (tmp_path / "no.svg").write_text("<p/>")
    with pytest.raises(CacheError, match=r"no.svg is not an SVG figure"):
        save_contact_sheet(path, {"a": tmp_path / "no.svg"}, "t")
    contact_sheet.run([str(path), f"A={tmp_path / '0.svg'}", f"B={tmp_path / '1.svg'}", "--title", "two"])
    assert path.read_text().count("words") == 2
    with pytest.raises(CacheError, match=r"none.svg not found; figures are given as LABEL=SVG"):
        contact_sheet.run([str(path), "A=none.svg"])

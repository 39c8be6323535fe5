"""A notebook executed for layer after layer; finished layers are not executed again."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tqdm import tqdm

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError, replacing
from experiments.caches.store import one_layer, open_layers
from wan.checkpoint import sampled_sha256

Cache = Mapping[str, Any]
ROOT = Path(__file__).parents[2]
DRAWN_WITH = ("experiments/**/*.py", "wan/**/*.py", "configs/taxonomy.yaml", "cache/published/*.*")


class Notebook(NamedTuple):
    """The parameters of a notebook, the formats it opens, and its figure for the contact sheet."""

    cache: str  # the parameter that takes the cache
    formats: tuple[str, ...]
    sheet: str  # SVG shown on the contact sheet
    layer: str = ""  # the parameter that picks a layer, where the cache does not
    value: Callable[[Cache, int], Any] = lambda cache, layer: layer  # what to set it to


NOTEBOOKS = {
    "extract_all_attention.ipynb": Notebook(
        *("CACHE_PATH", ("layer", "atlas"), "layer{}_perhead_grid.svg", "LAYER")
    ),
    "plt_fig4.ipynb": Notebook(
        *("CACHE_PATH", ("figure4", "inference", "atlas"), "figure4_layer{}_per_head_grid.svg", "HEADS"),
        lambda cache, layer: [[layer, head, f"L{layer}H{head}"] for head in range(cache["num_heads"])],
    ),
    "plot_figure4.ipynb": Notebook(
        *("CACHE_PATH", ("inference", "figure4"), "figure4_multihead.svg", "WEIGHT_INDEX"),
        lambda cache, layer: [call["layer_idx"] for call in cache["attention_weights"]].index(layer),
    ),
    "layer_atlas.ipynb": Notebook("CACHE_PATH", ("atlas",), "measures.svg", "LAYER"),
}


class LayerCaches:
    """The layers of a cache file, or of a folder of layerN.pt, as a notebook takes them.

    plt_fig4 gets an atlas of one layer, written to a folder of its own: its figures of all layers would be
    the same every time.
    """

    def __init__(self, notebook: str, source: str | Path, folder: str | Path):
        """Raises CacheError for a notebook that is not in the table and for a cache that it does not open."""
        if notebook not in NOTEBOOKS:
            raise CacheError(f"{notebook} is not one of {', '.join(NOTEBOOKS)}")
        self.notebook, self.source, self.folder = NOTEBOOKS[notebook], Path(source), Path(folder)
        self.cache: Cache | None = None
        self.files: dict[int, Path] = {}
        if self.source.is_dir():
            opened = open_layers(self.source, self.notebook.formats[:1])
            self.files = {cache["layer_index"]: path for path, cache in opened.items()}
            self.layers = sorted(self.files)
        else:
            self.cache = load_cache(self.source, expect=self.notebook.formats)
            found = self.cache.get("layers") or self.cache.get("layer_indices") or [self.cache["layer_index"]]
            self.layers = sorted(set(found))

    def choose(self, words: list[str]) -> list[int]:
        """Return the layers that numbers, ranges such as 0-29, and "all" name. CacheError for others."""
        chosen: set[int] = set()
        for word in words:
            first, _, last = word.partition("-")
            if word == "all":
                chosen.update(self.layers)
            elif re.fullmatch("[0-9]{1,4}(-[0-9]{1,4})?", word) and int(first) <= int(last or first):
                chosen.update(range(int(first), int(last or first) + 1))
            else:
                raise CacheError(f"layer {word!r} is not a number from 0, a range such as 0-29, or all")
        if absent := sorted(chosen - set(self.layers)):
            there = ", ".join(map(str, self.layers))
            raise CacheError(f"layer {absent[0]} is not in {self.source}; it has {there}")
        return sorted(chosen)

    def parameters(self, layer: int) -> dict[str, Any]:
        """Return the parameters for one layer, without the save folder. Paths are absolute."""
        path, notebook, chosen = self.file_of(layer), self.notebook, {}
        if self.cache is not None:
            if notebook.layer:
                chosen[notebook.layer] = notebook.value(self.cache, layer)
            if self.cache["format"] == "atlas" and notebook.layer != "LAYER":
                path = self.folder / f"layer{layer}.pt"
                save_cache(path, one_layer(self.cache, layer))
        return {notebook.cache: str(path.resolve())} | chosen

    def file_of(self, layer: int) -> Path:
        """Return the file that holds a layer."""
        return self.files.get(layer, self.source)


class NotebookRuns:
    """One notebook, the layers of a cache, and a folder for the results.

    folder/layerN/*.svg are the figures of a layer. folder/notebooks/layerN.ipynb is its executed notebook: it
    is written last and names the figures.
    """

    def __init__(self, notebook: Path, caches: LayerCaches, folder: Path):
        self.notebook, self.caches, self.folder = notebook, caches, folder
        drawn_with = sorted(path for pattern in DRAWN_WITH for path in ROOT.glob(pattern))
        self.code = [_sha256(path) for path in (notebook, *drawn_with)]
        logging.getLogger("papermill").setLevel(logging.ERROR)

    def figures(self, layer: int) -> Path:
        return self.folder / f"layer{layer}"

    def executed(self, layer: int) -> Path:
        return self.folder / "notebooks" / f"layer{layer}.ipynb"

    def mark(self, layer: int) -> dict[str, Any]:
        """Return what the executed notebook of a finished layer says: its inputs, its figures' checksums.

        The inputs are the notebook, its cache, and the code and the published numbers that it draws by.
        """
        cache = self.caches.file_of(layer)
        inputs = [layer, self.code, str(cache.resolve()), sampled_sha256(cache)]
        figures = {path.name: _sha256(path) for path in sorted(self.figures(layer).glob("*.svg"))}
        return {"fingerprint": hashlib.sha256(json.dumps(inputs).encode()).hexdigest(), "figures": figures}

    def is_done(self, layer: int) -> bool:
        """Check that the executed notebook is of today's inputs, and its figures are as it left them."""
        try:
            done = json.loads(self.executed(layer).read_text(encoding="utf-8"))["metadata"]["done"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return done == self.mark(layer)

    def run(self, layers: Sequence[int], jobs: int) -> None:
        """Execute the layers that are not done, jobs at a time. RunError where one fails; others stay."""
        waiting = [layer for layer in layers if not self.is_done(layer)]
        done = {"initial": len(layers) - len(waiting), "total": len(layers)}
        with tqdm(desc=self.notebook.stem, unit="layer", **done) as bar, ThreadPoolExecutor(jobs) as threads:
            runs = [threads.submit(self._run_layer, layer) for layer in waiting]
            try:
                for one in as_completed(runs):
                    one.result()
                    bar.update()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)  # layers that have begun are finished

    def _run_layer(self, layer: int) -> None:
        figures, executed = self.figures(layer), self.executed(layer)
        failed = executed.with_suffix(".failed.ipynb")
        for old in (executed, failed, *figures.glob("**/*.svg")):
            old.unlink(missing_ok=True)
        parameters = self.caches.parameters(layer) | {"SAVE_DIR": str(figures.resolve())}
        notebook = parameterize_notebook(load_notebook_node(str(self.notebook)), parameters)
        for cell in notebook.cells:
            if cell.cell_type == "code":  # those behind a cell that fails would keep stored outputs
                cell.outputs, cell.execution_count = [], None
        client = NotebookClient(notebook, kernel_name="python3", timeout=None, record_timing=False)
        client.resources = {"metadata": {"path": str(self.notebook.parent)}}
        try:
            client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})
        except CellExecutionError as error:
            _write(notebook, failed)
            reason = f"{error.ename}: {error.evalue.partition(chr(10))[0]}"
            raise RunError(f"layer {layer}: {reason}; see {failed}") from None
        except DeadKernelError:
            raise RunError("a kernel died, perhaps for want of memory; try --jobs 1") from None
        for svg in figures.glob("*/*.svg"):  # a notebook may make a folder for its layer
            svg.replace(figures / svg.name)
        for made in filter(Path.is_dir, list(figures.iterdir())):
            made.rmdir()
        notebook.metadata["done"] = self.mark(layer)
        _write(notebook, executed)


def _write(notebook: nbformat.NotebookNode, path: Path) -> None:
    with replacing(path) as file:
        file.write(nbformat.writes(notebook).encode())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

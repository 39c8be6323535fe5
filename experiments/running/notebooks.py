"""A notebook executed for layer after layer: done is done, what is missing or damaged is made again."""

import hashlib
import json
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tqdm import tqdm

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError, replacing
from experiments.caches.store import layer_from_atlas, one_layer, open_layers

# --- Which parameter of each notebook takes what, so that it can be rerun for a layer without opening it
Cache = Mapping[str, Any]


@dataclass(frozen=True)
class Notebook:
    """A notebook's parameters, the formats it opens, and its figure for the contact sheet."""

    cache: str  # the parameter that takes the cache
    formats: tuple[str, ...]
    layer: str  # the parameter that picks a layer, or "" where the cache does
    value: Callable[[Cache, int], Any]  # what to set it to
    sheet: str  # SVG shown on the contact sheet


def heads_of(cache: Cache, layer: int) -> list[list]:
    return [[layer, head, f"L{layer}H{head}"] for head in range(cache["num_heads"])]


def first_call_of(cache: Cache, layer: int) -> int:
    return [call["layer_idx"] for call in cache["attention_weights"]].index(layer)


NOTEBOOKS = {
    "extract_all_attention.ipynb": Notebook(
        "DATA_PATH", ("layer",), "", lambda cache, layer: None, "layer{}_perhead_grid.svg"
    ),
    "plt_fig4.ipynb": Notebook(
        "CACHE_PATH",
        ("figure4", "inference", "atlas"),
        "HEADS",
        heads_of,
        "figure4_layer{}_per_head_grid.svg",
    ),
    "plot_figure4.ipynb": Notebook(
        "CACHE_PATH", ("inference", "figure4"), "WEIGHT_INDEX", first_call_of, "figure4_multihead.svg"
    ),
    "layer_atlas.ipynb": Notebook(
        "CACHE_PATH", ("atlas",), "LAYER", lambda cache, layer: layer, "measures.svg"
    ),
}


# --- The layers of a cache, as each notebook takes them
MOST_DIGITS = 4  # of a layer's number


class LayerCaches:
    """The layers of a cache file, or of a folder of layerN.pt, as a notebook takes them.

    A notebook of single layers gets a layer cache taken out of an atlas. plt_fig4 gets an atlas of one layer:
    its figures of all layers would be the same every time. These caches are written to a folder of their own.
    """

    def __init__(self, notebook: str, source: str | Path, folder: str | Path):
        """Raises CacheError for a notebook that is not in the table and for a cache that it does not open."""
        if notebook not in NOTEBOOKS:
            raise CacheError(f"{notebook} is not one of {', '.join(NOTEBOOKS)}")
        self.notebook, self.source, self.folder = NOTEBOOKS[notebook], Path(source), Path(folder)
        self.cache: Cache | None = None
        self.files: dict[int, Path] = {}
        if self.source.is_dir():
            opened = open_layers(self.source, self.notebook.formats)
            self.files = {cache["layer_index"]: path for path, cache in opened.items()}
            self.layers = sorted(self.files)
        else:
            atlas = ("atlas",) if "layer" in self.notebook.formats else ()
            self.cache = load_cache(self.source, expect=(*self.notebook.formats, *atlas))
            found = self.cache.get("layers") or self.cache.get("layer_indices") or [self.cache["layer_index"]]
            self.layers = sorted(set(found))

    def choose(self, words: list[str]) -> list[int]:
        """ "all", numbers and ranges such as 0-29 -> layers of this cache."""
        chosen: set[int] = set()
        for word in words:
            chosen.update(self.layers if word == "all" else layer_range(word))
        if absent := sorted(chosen - set(self.layers)):
            there = ", ".join(map(str, self.layers))
            raise CacheError(f"layer {absent[0]} is not in {self.source}; it has {there}")
        return sorted(chosen)

    def parameters(self, layer: int) -> dict[str, Any]:
        """What to set for one layer, the save folder left out. Paths are absolute."""
        path = self.files.get(layer, self.source)
        if self.cache is None:
            return {self.notebook.cache: str(path.resolve())}
        chosen = {self.notebook.layer: self.notebook.value(self.cache, layer)} if self.notebook.layer else {}
        if self.cache["format"] == "atlas" and self.notebook.layer != "LAYER":
            take = one_layer if self.notebook.layer else layer_from_atlas
            path = self.folder / f"layer{layer}.pt"
            save_cache(path, take(self.cache, layer))
        return {self.notebook.cache: str(path.resolve())} | chosen

    def files_of(self, layer: int) -> list[Path]:
        return [self.files.get(layer, self.source)]


def layer_range(word: str) -> range:
    """ "3" or "0-29" -> layers. Raises CacheError for other words, empty ranges and long numbers."""
    first, dash, last = word.partition("-")
    if not (is_number(first) and (is_number(last) if dash else True)):
        raise CacheError(f"layer {word!r} is not a number from 0, a range such as 0-29, or all")
    layers = range(int(first), int(last or first) + 1)
    if not layers:
        raise CacheError(f"layers {word!r} are none: a range goes from its lower number to its higher")
    return layers


def is_number(word: str) -> bool:
    """Up to MOST_DIGITS ASCII digits: no model has a billion layers."""
    return word.isascii() and word.isdecimal() and len(word) <= MOST_DIGITS


# --- A Jupyter kernel for notebook after notebook: starting one takes as long as drawing a layer
EMPTY_NAMESPACE = "get_ipython().reset(new_session=True); get_ipython().execution_count = 0"


class WarmKernel:
    """with WarmKernel(folder) as kernel: kernel.execute(notebook). It works in folder, on one thread."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manager = AsyncKernelManager(kernel_name="python3")
        self.client: AsyncKernelClient | None = None

    def __enter__(self) -> "WarmKernel":
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        quiet = ["--log-level=ERROR"]
        run_sync(self.manager.start_kernel)(cwd=str(self.folder), env=env, extra_arguments=quiet)
        return self

    def execute(self, notebook: NotebookNode) -> None:
        """Run all cells in an empty namespace, as restart-and-run-all does. Outputs replace those stored.

        Raises CellExecutionError where a cell fails, and DeadKernelError.
        """
        for cell in notebook.cells:
            if cell.cell_type == "code":  # else those behind a cell that fails would stay
                cell.outputs, cell.execution_count = [], None
        if self.client:
            self._run(new_notebook(cells=[new_code_cell(EMPTY_NAMESPACE)]))
        self._run(notebook)

    def _run(self, notebook: NotebookNode) -> None:
        runner = NotebookClient(notebook, km=self.manager, timeout=None, record_timing=False)
        runner.kc = self.client
        try:
            runner.execute()
        finally:
            self.client = runner.kc

    def kill(self) -> None:
        """End the kernel from another thread: execute() raises DeadKernelError there."""
        with suppress(RuntimeError, OSError):  # it has not started, or it has ended
            run_sync(self.manager.signal_kernel)(signal.SIGKILL)

    def __exit__(self, *error: object) -> None:
        if self.client:
            self.client.stop_channels()
        if self.manager.has_kernel:
            run_sync(self.manager.shutdown_kernel)(now=True)


# --- A notebook executed for layer after layer: done is done, what is missing or damaged is made again
ROOT = Path(__file__).parents[2]
DRAWN_WITH = ("experiments/**/*.py", "wan/**/*.py", "configs/taxonomy.yaml", "cache/published/*.*")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fingerprint(notebook: Path, files: Sequence[Path], layer: int) -> str:
    """Changes with the notebook, with its caches, and with the code and the published numbers it draws by."""
    drawn_with = sorted(path for pattern in DRAWN_WITH for path in ROOT.glob(pattern))
    state = [sha256(path) for path in (notebook, *drawn_with)]
    state += [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256(json.dumps([layer, state]).encode()).hexdigest()


class NotebookRuns:
    """One notebook, the layers of a cache, and a folder for what comes out.

    folder/layerN/*.svg are the figures of a layer. folder/notebooks/layerN.ipynb is its executed notebook: it
    is written last and names the figures.
    """

    def __init__(self, notebook: Path, caches: LayerCaches, folder: Path):
        self.notebook, self.caches, self.folder = notebook, caches, folder
        self.source = load_notebook_node(str(notebook))
        logging.getLogger("papermill").setLevel(logging.ERROR)

    def figures(self, layer: int) -> Path:
        return self.folder / f"layer{layer}"

    def executed(self, layer: int) -> Path:
        return self.folder / "notebooks" / f"layer{layer}.ipynb"

    def mark(self, layer: int) -> dict[str, Any]:
        """What the executed notebook of a finished layer says: its inputs, and its figures' checksums."""
        figures = {path.name: sha256(path) for path in sorted(self.figures(layer).glob("*.svg"))}
        made_from = fingerprint(self.notebook, self.caches.files_of(layer), layer)
        return {"fingerprint": made_from, "figures": figures}

    def is_done(self, layer: int) -> bool:
        """Whether the executed notebook is whole, of today's inputs, and its figures are as it left them."""
        try:
            done = json.loads(self.executed(layer).read_text(encoding="utf-8"))["metadata"]["done"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False
        return done == self.mark(layer)

    def run(self, layers: Sequence[int], jobs: int) -> None:
        """Execute the layers that are not done, jobs at a time. What is done stays where one fails.

        Raises RunError.
        """
        waiting = deque(layer for layer in layers if not self.is_done(layer))
        done = len(layers) - len(waiting)
        bar = tqdm(total=len(layers), initial=done, unit="layer", desc=self.notebook.stem)
        kernels = [WarmKernel(self.notebook.parent) for _ in range(min(jobs, len(waiting)))]
        stopped = threading.Event()
        with bar as progress, ThreadPoolExecutor(max(1, len(kernels))) as threads:
            workers = [threads.submit(self._work, kernel, waiting, stopped, progress) for kernel in kernels]
            try:
                for worker in wait(workers, return_when=FIRST_EXCEPTION).done:
                    worker.result()
            finally:
                stopped.set()
                for kernel in kernels:
                    kernel.kill()

    def _work(
        self, kernel: WarmKernel, waiting: deque[int], stopped: threading.Event, progress: tqdm
    ) -> None:
        """Take layers until none waits."""
        try:
            with kernel:
                while waiting and not stopped.is_set():
                    self._run_layer(waiting.popleft(), kernel)
                    progress.update()
        except DeadKernelError:
            if not stopped.is_set():
                raise RunError("a kernel died, perhaps for want of memory; try --jobs 1") from None

    def _run_layer(self, layer: int, kernel: WarmKernel) -> None:
        figures, executed = self.figures(layer), self.executed(layer)
        failed = executed.with_suffix(".failed.ipynb")
        for old in (executed, failed, *figures.glob("**/*.svg")):
            old.unlink(missing_ok=True)
        parameters = self.caches.parameters(layer) | {"SAVE_DIR": str(figures.resolve())}
        filled = parameterize_notebook(deepcopy(self.source), parameters)  # it works on the cells it is given
        try:
            kernel.execute(filled)
        except CellExecutionError as error:
            write_notebook(filled, failed)
            reason = f"{error.ename}: {error.evalue.partition(chr(10))[0]}"
            raise RunError(f"layer {layer}: {reason}; see {failed}") from None
        collect(figures)
        filled.metadata["done"] = self.mark(layer)
        write_notebook(filled, executed)


def collect(figures: Path) -> None:
    """Move the figures up from the folder that a notebook makes for its layer, if it does."""
    for svg in figures.glob("*/*.svg"):
        svg.replace(figures / svg.name)
    for made in filter(Path.is_dir, list(figures.iterdir())):
        made.rmdir()


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    with replacing(path) as file:
        file.write(nbformat.writes(notebook).encode())

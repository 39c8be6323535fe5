"""A notebook executed for layer after layer: done is done, what is missing or damaged is made again."""

import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tqdm import tqdm

from experiments.caches.atomic_files import replacing
from experiments.caches.errors import RunError
from experiments.running.layer_caches import LayerCaches
from experiments.running.warm_kernel import WarmKernel

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

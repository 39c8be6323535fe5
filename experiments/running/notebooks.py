"""A notebook executed for layer after layer by papermill; finished layers are not executed again."""

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError, claimed, replacing
from experiments.caches.store import one_layer, open_layers
from experiments.figures.folder import save_contact_sheet
from experiments.figures.html_page import save_page
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


class NotebookRuns:
    """A notebook of notebooks/, layers of a cache file or of a folder of layerN.pt, and a folder for results.

    folder/layerN/*.svg are the figures of a layer. folder/notebooks/layerN.ipynb is its executed notebook,
    which is written last. plt_fig4 gets an atlas of one layer, in folder/caches: its figures of all layers
    would be the same every time.
    """

    def __init__(self, name: str, source: str | Path, folder: str | Path):
        """Raises CacheError for a cache that the notebook does not open."""
        self.path, self.notebook = ROOT / "notebooks" / name, NOTEBOOKS[name]
        self.source, self.folder = Path(source), Path(folder)
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

    def choose(self, ranges: Sequence[Sequence[int]]) -> list[int]:
        """Return the layers of ranges, of an empty one all. CacheError for one that is not there."""
        chosen = {layer for some in ranges for layer in some or self.layers}
        if absent := sorted(chosen - set(self.layers)):
            there = ", ".join(map(str, self.layers))
            raise CacheError(f"layer {absent[0]} is not in {self.source}; it has {there}")
        return sorted(chosen)

    def parameters(self, layer: int) -> dict[str, Any]:
        """Return the parameters for one layer, without the save folder. Paths are absolute."""
        path, notebook, chosen = self.files.get(layer, self.source), self.notebook, {}
        if self.cache is not None:
            if notebook.layer:
                chosen[notebook.layer] = notebook.value(self.cache, layer)
            if self.cache["format"] == "atlas" and notebook.layer != "LAYER":
                path = self.folder / "caches" / f"layer{layer}.pt"
                save_cache(path, one_layer(self.cache, layer))
        return {notebook.cache: str(path.resolve())} | chosen

    def figures(self, layer: int) -> Path:
        return self.folder / f"layer{layer}"

    def executed(self, layer: int) -> Path:
        return self.folder / "notebooks" / f"layer{layer}.ipynb"

    @cached_property
    def code(self) -> list[str]:
        """Hash the notebook, and the code and the published numbers that it draws by."""
        drawn_with = sorted(path for pattern in DRAWN_WITH for path in ROOT.glob(pattern))
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in (self.path, *drawn_with)]

    def fingerprint(self, layer: int) -> str:
        """Return a hash of all that the figures of a layer depend on."""
        cache = self.files.get(layer, self.source)
        # The code is part of it: figures are drawn again where what draws them has changed
        inputs = [layer, self.code, str(cache.resolve()), sampled_sha256(cache)]
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()

    def is_done(self, layer: int) -> bool:
        """Check that the executed notebook is of today's inputs, and that its figures are there."""
        try:
            done = json.loads(self.executed(layer).read_text(encoding="utf-8"))["metadata"]["done"]
        except (OSError, ValueError, KeyError):
            return False
        there = all((self.figures(layer) / name).is_file() for name in done["figures"])
        return there and done["fingerprint"] == self.fingerprint(layer)

    def run(self, layers: Sequence[int], jobs: int) -> None:
        """Execute the layers that are not done, jobs at a time. RunError where one fails; others stay."""
        logging.getLogger("papermill").setLevel(logging.ERROR)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each kernel
        waiting = [layer for layer in layers if not self.is_done(layer)]
        done = {"initial": len(layers) - len(waiting), "total": len(layers)}
        with tqdm(desc=self.path.stem, unit="layer", **done) as bar, ThreadPoolExecutor(jobs) as threads:
            runs = [threads.submit(self._run_layer, layer) for layer in waiting]
            try:
                for one in as_completed(runs):
                    one.result()
                    bar.update()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)  # layers that have begun are finished

    def _run_layer(self, layer: int) -> None:
        figures, executed = self.figures(layer), self.executed(layer)
        # 1. Leave nothing of an earlier execution: the page would show old figures beside new ones
        unfinished = executed.with_suffix(".failed.ipynb")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        for old in (executed, *figures.glob("**/*.svg")):
            old.unlink(missing_ok=True)
        parameters = self.parameters(layer) | {"SAVE_DIR": str(figures.resolve())}
        # 2. Execute. papermill's cwd would change this process's folder, which its threads share
        in_folder = {"metadata": {"path": str(self.path.parent)}}
        options = {"kernel_name": "python3", "progress_bar": False, "resources": in_folder}
        try:
            notebook = papermill.execute_notebook(self.path, unfinished, parameters, **options)
        except PapermillExecutionError as error:
            reason = f"{error.ename}: {error.evalue.partition(chr(10))[0]}"
            raise RunError(f"layer {layer}: {reason}; see {unfinished}") from None
        except DeadKernelError:
            raise RunError("a kernel died, perhaps for want of memory; try --jobs 1") from None
        # 3. Gather the figures, for which a notebook may have made a folder, and mark the layer as done
        for svg in figures.glob("*/*.svg"):
            svg.replace(figures / svg.name)
        for made in filter(Path.is_dir, list(figures.iterdir())):
            made.rmdir()
        names = sorted(path.name for path in figures.glob("*.svg"))
        notebook.metadata["done"] = {"fingerprint": self.fingerprint(layer), "figures": names}
        with replacing(executed) as file:
            file.write(nbformat.writes(notebook).encode())
        unfinished.unlink()


# --- The command: from flags to figures
def run_notebooks(args: argparse.Namespace) -> None:
    """Execute a notebook for the layers of run_notebooks.py's flags; draw the contact sheet and the page."""
    name = args.notebook
    folder = args.output_dir or Path("outputs") / Path(name).stem / args.cache.stem
    runs = NotebookRuns(name, args.cache, folder)
    layers = runs.choose(args.layers)
    with claimed({str(folder / "index.html"): 0}):
        try:
            runs.run(layers, args.jobs)
        except KeyboardInterrupt:
            print(f"\nthe layers that are done stay in {folder}; the same command continues there")
            raise
        svg = runs.notebook.sheet
        figures = {f"Layer {layer}": runs.figures(layer) / svg.format(layer) for layer in layers}
        sheet = save_contact_sheet(folder / "contact_sheet.svg", figures, f"{name}, {args.cache.name}")
        page = save_page(folder / "index.html", args.cache, layers=layers)
    print(f"{len(layers)} layers:      {folder}/notebooks/layerN.ipynb, {folder}/layerN/*.svg")
    print(f"contact sheet:  {sheet}")
    print(f"page:           {page}")

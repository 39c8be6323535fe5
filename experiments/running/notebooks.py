"""Execute a notebook layer by layer with papermill; finished layers are skipped.

The folder's manifest.json names the notebook, the cache, and every file written there with a hash of its
content. Only such files are ever replaced or removed.
"""

import argparse
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError, claimed, replacing, require_held
from experiments.caches.store import from_root, one_layer, open_layers
from experiments.figures.folder import save_contact_sheet
from experiments.figures.html_page import save_page
from experiments.running.parameters import check_given
from wan.checkpoint import sampled_sha256
from wan.files import read_json

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


class Manifest:
    """FOLDER/manifest.json: the notebook and cache of a folder's results, and the files written there."""

    def __init__(self, folder: Path, notebook: str, cache: Path):
        self.folder, self.lock = folder, Lock()  # layers are made in threads
        self.owner = {"notebook": notebook, "cache": str(from_root(cache))}
        found = self.of(folder)
        self.written: dict[str, list[str]] = found.get("written", {})  # file, from the folder -> sha256
        self.found = {name: found[name] for name in self.owner if name in found}

    def require_owner(self) -> None:
        """Raise CacheError for a folder with results of another notebook or cache."""
        if self.found not in ({}, self.owner):
            of = " and ".join(map(str, self.found.values()))
            raise CacheError(f"{self.folder} has figures of {of}; choose another --output_dir")

    @staticmethod
    def of(folder: Path) -> dict[str, Any]:
        """Return a folder's manifest; nothing where it has none. CacheError for a damaged one."""
        path = folder / "manifest.json"
        if not path.is_file():
            return {}
        found = read_json(path, CacheError)
        written = found.get("written")
        if not isinstance(written, dict) or not all(isinstance(one, list) for one in written.values()):
            raise CacheError(f"{path} is no manifest of this program; choose another --output_dir")
        return found

    def require_ours(self, *paths: Path) -> None:
        """Raise CacheError for an existing file that was not written here or was changed since."""
        for path in paths:
            known = self.written.get(str(path.relative_to(self.folder)))
            if path.exists() and sha256_of(path) not in (known or ()):
                how = (
                    "was changed since this program wrote it" if known else "was not written by this program"
                )
                raise CacheError(f"{path} {how}; move it away, or choose another --output_dir")

    def remove(self, paths: Sequence[Path]) -> None:
        """Remove files that were written here; others are not touched."""
        for path in paths:
            known = self.written.get(str(path.relative_to(self.folder)), ())
            if path.is_file() and sha256_of(path) in known:
                path.unlink()

    def put(self, files: Mapping[Path, Path]) -> None:
        """Move files to their places. CacheError, before any is moved, where one is not ours to replace."""
        self.require_ours(*files)
        with self.lock:
            for path, made in files.items():
                # Its new and its old content: a run that is killed in between may leave either
                name = str(path.relative_to(self.folder))
                self.written[name] = [*self.written.get(name, [])[-1:], sha256_of(made)]
            with replacing(self.folder / "manifest.json") as file:
                file.write(json.dumps(self.owner | {"written": self.written}, indent=1).encode() + b"\n")
        for path, made in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            made.replace(path)


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def default_folder(notebook: str, cache: Path) -> Path:
    """Return outputs/NOTEBOOK/CACHE, plus a hash if another cache of the same name uses it."""
    folder, at = Path("outputs") / Path(notebook).stem / cache.stem, str(from_root(cache))
    if Manifest.of(folder).get("cache", at) == at:
        return folder
    return folder.with_name(f"{folder.name}-{hashlib.sha256(at.encode()).hexdigest()[:8]}")


class NotebookRuns:
    """A notebook of notebooks/, layers of a cache file or of a folder of layerN.pt, and a folder for results.

    folder/layerN/*.svg are the figures of a layer. folder/notebooks/layerN.ipynb is its executed notebook,
    which is written last. plt_fig4 gets an atlas of one layer, in folder/caches: its figures of all layers
    would be the same every time.
    """

    def __init__(
        self, name: str, source: str | Path, folder: str | Path, given: Mapping[str, Any] | None = None
    ):
        """given are further parameters. CacheError for a cache that the notebook does not open."""
        self.path, self.notebook, self.given = ROOT / "notebooks" / name, NOTEBOOKS[name], dict(given or {})
        own = (self.notebook.cache, self.notebook.layer, "SAVE_DIR")
        check_given(Path(name).stem, self.given, own)
        self.source, self.folder = Path(source), Path(folder)
        self.manifest = Manifest(self.folder, name, self.source)
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
        chosen = sorted({layer for some in ranges for layer in some or self.layers})
        for layer in chosen:
            require_held("layer", layer, self.layers, self.source)
        return chosen

    def parameters(self, layer: int) -> dict[str, Any]:
        """Return the parameters for one layer, without the save folder. Paths are absolute."""
        path, notebook, chosen = self.files.get(layer, self.source), self.notebook, {}
        if self.cache is not None:
            if notebook.layer:
                chosen[notebook.layer] = notebook.value(self.cache, layer)
            if self.cache["format"] == "atlas" and notebook.layer != "LAYER":
                path = self.folder / "caches" / f"layer{layer}.pt"
                save_cache(made := path.with_suffix(".new.pt"), one_layer(self.cache, layer))
                self.manifest.put({path: made})
        return {notebook.cache: str(path.resolve())} | chosen | self.given

    def figures(self, layer: int) -> Path:
        return self.folder / f"layer{layer}"

    def executed(self, layer: int) -> Path:
        return self.folder / "notebooks" / f"layer{layer}.ipynb"

    @cached_property
    def code(self) -> list[str]:
        """Hash the notebook, the code that draws, and the published numbers."""
        drawn_with = sorted(path for pattern in DRAWN_WITH for path in ROOT.glob(pattern))
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in (self.path, *drawn_with)]

    def fingerprint(self, layer: int) -> str:
        """Return a hash of all that the figures of a layer depend on."""
        cache = self.files.get(layer, self.source)
        # The code is part of it: figures are drawn again where what draws them has changed
        inputs = [layer, self.code, str(cache.resolve()), sampled_sha256(cache), self.given]
        return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()

    def is_done(self, layer: int) -> bool:
        """Check that the executed notebook has the current inputs and that its figures exist."""
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
        self.manifest.require_owner()
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
        # 1. A folder of its own for what the notebook draws: nothing that lies in figures/ is touched yet
        unfinished, drawing = executed.with_suffix(".failed.ipynb"), self.folder / f".layer{layer}.drawing"
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        self.manifest.require_ours(executed)
        shutil.rmtree(drawing, ignore_errors=True)  # of a killed run
        parameters = self.parameters(layer) | {"SAVE_DIR": str(drawing.resolve())}
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
        # 3. Put the figures, for which a notebook may have made a folder, in the place of the earlier ones
        new = {figures / path.name: path for path in sorted(drawing.rglob("*")) if path.is_file()}
        names = sorted(path.name for path in new if path.suffix == ".svg")
        notebook.metadata["done"] = {"fingerprint": self.fingerprint(layer), "figures": names}
        said = nbformat.writes(notebook).replace(str(drawing.resolve()), str(figures.resolve()))
        unfinished.write_text(said, encoding="utf-8")
        earlier = [self.folder / name for name in self.manifest.written]
        self.manifest.put(new | {executed: unfinished})  # the notebook last: it says that the layer is done
        self.manifest.remove([path for path in earlier if path.parent == figures and path not in new])
        shutil.rmtree(drawing)


# --- The command: from flags to figures
def run_notebooks(args: argparse.Namespace) -> None:
    """Execute a notebook for the layers of run_notebooks.py's flags; draw the contact sheet and the page."""
    name = args.notebook
    folder = args.output_dir or default_folder(name, args.cache)
    runs = NotebookRuns(name, args.cache, folder, dict(args.parameter or ()))
    layers = runs.choose(args.layers)
    sheet, page = folder / "contact_sheet.svg", folder / "index.html"
    runs.manifest.require_ours(sheet, page)
    with claimed({str(folder / "index.html"): 0}):
        try:
            runs.run(layers, args.jobs)
        except KeyboardInterrupt:
            print(f"\nthe layers that are done stay in {folder}; the same command continues there")
            raise
        svg = runs.notebook.sheet
        figures = {f"Layer {layer}": runs.figures(layer) / svg.format(layer) for layer in layers}
        made = {path: path.with_name(f".new.{path.name}") for path in (sheet, page)}
        save_contact_sheet(made[sheet], figures, f"{name}, {args.cache.name}")
        save_page(made[page], args.cache, layers=layers)
        runs.manifest.put(made)
    print(f"{len(layers)} layers:      {folder}/notebooks/layerN.ipynb, {folder}/layerN/*.svg")
    print(f"contact sheet:  {sheet}")
    print(f"page:           {page}")

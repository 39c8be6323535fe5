"""Execute a notebook layer by layer in one kernel, by papermill; finished layers are skipped.

    OUTPUT_DIR/notebooks/layerN.ipynb      the executed notebook; its metadata says of what
    OUTPUT_DIR/layerN/*.svg                its figures
    OUTPUT_DIR/contact_sheet.svg           a figure of every layer
    OUTPUT_DIR/index.html                  the page of the cache

Nothing is deleted. A file is replaced only if this program wrote it and nobody changed it since.
"""

import argparse
import hashlib
import json
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from experiments.caches import load_cache, outputs, store
from experiments.caches.files import CacheError, Record, RunError, claimed, replacing, require_held
from experiments.figures.folder import save_contact_sheet
from experiments.figures.html_page import save_page
from experiments.figures.style import REMEMBER
from experiments.running.parameters import FOLDER, parameter_types, typed
from wan import errors
from wan.checkpoint import sampled_sha256

MAKES_FOLDER = ("extract_all_attention.ipynb",)  # whose figures go to layerN in SAVE_DIR
REMEDY = "move it away, or choose another --output_dir"
SHEET = {  # of a notebook, the figure that the contact sheet shows
    "extract_all_attention.ipynb": "layer{}_perhead_grid.svg",
    "plt_fig4.ipynb": "figure4_layer{}_per_head_grid.svg",
    "plot_figure4.ipynb": "figure4_multihead.svg",
    "layer_atlas.ipynb": "layer{}_per_head_grid.svg",
}
# What the kernel does besides running notebooks. %reset also looks for garbage, among all objects of torch
# and of the first layer's figures unless these are set aside: a fifth of a layer's time.
FORGET_NAMES = "%reset -f"
SET_ASIDE = "__import__('gc').get_freeze_count() or __import__('gc').freeze()"  # once


class OneKernelEngine(Engine):
    """Execute notebooks in the kernel of one client, which forgets the names of the notebook before."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, client: NotebookClient, record, **options) -> None:
        assert client.kc is not None  # the client is within setup_kernel()
        nb_man.nb.metadata.papermill["run"] = record
        notebook_client = PapermillNotebookClient(nb_man, km=client.km)
        notebook_client.kc = client.kc
        client.kc.execute(FORGET_NAMES, silent=True)  # the kernel runs what it is sent in order
        notebook_client.execute()
        client.kc.execute(SET_ASIDE, silent=True)


papermill_engines.register("one_kernel", OneKernelEngine)


@dataclass(frozen=True)
class LayerRun:
    """A notebook's run for one layer: all that its figures depend on, and where they go."""

    notebook: Path
    inputs: Record  # notebook, cache, their hashes, parameters; not the code of the library
    executed: Path
    figures: Path

    def record(self) -> dict[str, Any]:
        """Return what the executed notebook says of its run; nothing where there is none."""
        try:
            return dict(json.loads(self.executed.read_text("utf-8"))["metadata"]["papermill"]["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def is_done(self) -> bool:
        """Check that the executed notebook ended with the same inputs, and that its figures are there."""
        record = self.record()
        if not record or record["content"] == outputs.NO_CHECKSUM or record["inputs"] != self.inputs:
            return False
        return all((self.figures / name).is_file() for name in record["figures"])

    def require_free(self) -> None:
        """Raise CacheError where a file is of another notebook or cache, or somebody's own work."""
        earlier = self.record().get("inputs", self.inputs)
        for name in ("notebook", "cache"):
            if earlier[name] != self.inputs[name]:
                raise CacheError(f"{self.executed} is of {earlier[name]}, not {self.inputs[name]}; {REMEDY}")
        figures = [path for path in self.figures.rglob("*") if path.suffix in (".svg", ".pdf")]
        for path in (self.executed, *sorted(figures)):
            outputs.require_unchanged(path, REMEDY)

    def execute(self, client: NotebookClient) -> None:
        """Run the notebook in the client's kernel. RunError where it fails."""
        self.executed.parent.mkdir(parents=True, exist_ok=True)
        save_dir = self.figures.resolve()
        if self.notebook.name in MAKES_FOLDER:
            save_dir = save_dir.parent
        parameters = self.inputs["parameters"] | {"SAVE_DIR": str(save_dir)}
        # 1. papermill writes the notebook, also one that failed; without a checksum it is not done
        record = {"inputs": self.inputs, "figures": [], "content": outputs.NO_CHECKSUM}
        try:
            notebook = papermill.execute_notebook(
                self.notebook,
                self.executed,
                parameters,
                engine_name="one_kernel",
                client=client,
                record=record,
                progress_bar=False,
                request_save_on_cell_execute=False,  # 80 times a notebook, a fifth of a layer's time
            )
        except PapermillExecutionError as error:
            reason = error.evalue.partition("\n")[0]
            raise RunError(f"{error.ename}: {reason}; see {self.executed}") from None
        except DeadKernelError:
            raise RunError(f"the kernel of {self.executed} died, perhaps for want of memory") from None
        # 2. Its figures and the checksum say that it is done
        record["figures"] = sorted(path.name for path in self.figures.glob("*.svg"))
        notebook.metadata.papermill["run"] = record
        with replacing(self.executed) as file:
            file.write(outputs.with_checksum(nbformat.writes(notebook).encode()))


def layer_files(source: Path) -> dict[int, Path]:
    """Return layer -> file of a cache or a folder of layerN.pt. CacheError where it names no layers."""
    if source.is_dir():
        return {cache["layer_index"]: path for path, cache in store.open_layers(source, ("layer",)).items()}
    cache = load_cache(source)
    layers = cache.get("layers") or cache.get("layer_indices")
    if layers is None and "layer_index" not in cache:
        raise CacheError(f"{source} is a cache of format {cache['format']}, which names no layers")
    return dict.fromkeys(sorted(layers or [cache["layer_index"]]), source)


def run_notebooks(args: argparse.Namespace) -> None:
    """Execute a notebook for the layers of run_notebooks.py's flags; draw the contact sheet and the page."""
    # 1. The notebook and its parameters
    path, parameters = FOLDER / args.notebook, dict(args.parameter or ())
    types = parameter_types(path)
    for name in parameters:
        if name in ("CACHE_PATH", "LAYER", "SAVE_DIR"):
            raise errors.ConfigError(
                f"{name} follows from the cache and the layers; leave it out of --parameter"
            )
        errors.require_known(name, types, f"{path.name} has no parameter {{}}")
    parameters = json.loads(json.dumps(typed(parameters, types)))  # as an executed notebook keeps them
    # 2. The layers
    files = layer_files(args.cache)
    layers = sorted({layer for layers in args.layers for layer in layers or files})
    for layer in layers:
        require_held("layer", layer, sorted(files), args.cache)
    # 3. What the figures of each layer depend on. Paths are absolute: a notebook runs in its own folder
    folder = args.output_dir or Path("outputs") / path.stem / args.cache.stem
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    origin = {"notebook": path.name, "cache": str(store.from_root(args.cache))}
    origin["notebook_sha256"] = hashlib.sha256(json.dumps(cells).encode()).hexdigest()
    runs = []
    for layer in layers:
        of_layer = parameters | {"CACHE_PATH": str(files[layer].resolve()), "LAYER": layer}
        inputs = origin | {"cache_sha256": sampled_sha256(files[layer]), "parameters": of_layer}
        executed, figures = folder / "notebooks" / f"layer{layer}.ipynb", folder / f"layer{layer}"
        runs.append(LayerRun(notebook=path, inputs=inputs, executed=executed, figures=figures))
    # 4. Execute what is not done, in one kernel that imports torch and matplotlib once
    sheet, page = folder / "contact_sheet.svg", folder / "index.html"
    logging.getLogger("papermill").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # of nbclient, stopped between cells
    with claimed({str(page): 0}):
        waiting = [run for run in runs if not run.is_done()]
        for run in waiting:
            run.require_free()
        for result in (sheet, page):
            outputs.require_unchanged(result, REMEDY)
        if waiting:
            client = NotebookClient(
                nbformat.v4.new_notebook(),
                kernel_name="python3",
                resources={"metadata": {"path": str(path.parent)}},
                extra_arguments=["--log-level=CRITICAL"],  # a stopped kernel logs a traceback as an error
            )
            with client.setup_kernel(env=os.environ | {REMEMBER: "1"}):
                for run in tqdm(waiting, desc=path.stem, unit="layer"):
                    run.execute(client)
        # 5. A figure of each layer on one sheet, and the page of the cache
        name = SHEET[path.name]
        shown = {f"Layer {layer}": folder / f"layer{layer}" / name.format(layer) for layer in layers}
        save_contact_sheet(sheet, shown, f"{path.name}, {args.cache.name}")
        save_page(page, args.cache, layers=layers)
    print(f"{len(layers)} layers:      {folder}/notebooks/layerN.ipynb, {folder}/layerN/*.svg")
    print(f"contact sheet:  {sheet}")
    print(f"page:           {page}")

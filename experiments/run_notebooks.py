"""Execute a notebook once per layer and collect its figures: executed notebooks, SVGs, a contact sheet, an HTML page.

    python experiments/run_notebooks.py extract_all_attention.ipynb cache/published/self_forcing_dmd_eagle_21f.pt 0-29

A layer that was done by the same notebook, cache and code is not done again.
"""

import argparse
import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelClient, AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from tqdm import tqdm

from experiments.caches.atomic_files import replacing, require_writable
from experiments.caches.errors import RunError
from experiments.figures.contact_sheet import save_contact_sheet
from experiments.figures.html_page import save_page
from experiments.running.cli import Parser, main
from experiments.running.notebook_table import NOTEBOOKS, LayerCaches

FOLDER = Path("notebooks")


@asynccontextmanager
async def kernel() -> AsyncIterator[tuple[AsyncKernelManager, AsyncKernelClient]]:
    """A kernel for layer after layer: starting one takes as long as drawing a layer. It ends with the context."""
    manager = AsyncKernelManager(kernel_name="python3")
    client = None
    try:
        await manager.start_kernel(
            cwd=str(FOLDER), env=os.environ | {"OMP_NUM_THREADS": "1"}, extra_arguments=["--log-level=ERROR"]
        )
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=120)
        yield manager, client
    finally:
        if client:
            client.stop_channels()
        if manager.has_kernel:
            await manager.shutdown_kernel(now=True)


async def execute(notebook: NotebookNode, manager: AsyncKernelManager, client: AsyncKernelClient) -> None:
    """Run all cells in order, in an empty namespace, as restart-and-run-all does; outputs go into the notebook."""
    await client.execute("get_ipython().reset(new_session=True)", silent=True, reply=True)
    runner = NotebookClient(notebook, km=manager, timeout=None, record_timing=False)
    runner.kc = client
    runner.reset_execution_trackers()
    try:
        for i, cell in enumerate(notebook.cells):
            await runner.async_execute_cell(cell, i)
    except DeadKernelError:
        if asyncio.current_task().cancelling():  # Ctrl-C looks like a dead kernel to nbclient
            raise asyncio.CancelledError from None
        raise


def fingerprint(notebook: Path, files: Sequence[Path], layer: int) -> str:
    """Changes with the notebook, with its caches and with the code that draws."""
    code = [notebook, *sorted(Path(__file__).parent.rglob("*.py"))]
    state = [hashlib.sha256(path.read_bytes()).hexdigest() for path in code]
    state += [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256(json.dumps([layer, state]).encode()).hexdigest()


def is_done(executed: Path, mark: str) -> bool:
    return executed.is_file() and nbformat.read(executed, 4).metadata.get("done") == mark


def collect(figures: Path) -> None:
    """Move the figures up from the folder that a notebook makes for its layer, if it does."""
    for svg in figures.glob("*/*.svg"):
        svg.replace(figures / svg.name)
    for made in filter(Path.is_dir, list(figures.iterdir())):
        made.rmdir()


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    with replacing(path) as file:
        file.write(nbformat.writes(notebook).encode())


async def run_layers(
    notebook: Path, caches: LayerCaches, to_do: list[int], marks: dict[int, str], folder: Path, progress: tqdm
) -> None:
    """Take layers from to_do until none is left: figures to folder/layerN, the executed notebook to folder/notebooks, the
    latter last and whole. RunError where a notebook fails."""
    source = load_notebook_node(str(notebook))
    async with kernel() as (manager, client):
        while to_do:
            layer = to_do.pop(0)
            figures, executed = folder / f"layer{layer}", folder / "notebooks" / f"layer{layer}.ipynb"
            failed = executed.with_name(f"layer{layer}.failed.ipynb")
            for old in (executed, failed, *figures.glob("**/*.svg")):
                old.unlink(missing_ok=True)
            parameters = caches.parameters(layer) | {"SAVE_DIR": str(figures.resolve())}
            filled = parameterize_notebook(source, parameters)
            try:
                await execute(filled, manager, client)
            except CellExecutionError as error:
                write_notebook(filled, failed)
                raise RunError(
                    f"layer {layer}: {error.ename}: {error.evalue.partition(chr(10))[0]}; see {failed}"
                ) from None
            except DeadKernelError:
                raise RunError(
                    f"layer {layer}: its kernel died, perhaps for want of memory; try --jobs 1"
                ) from None
            collect(figures)
            filled.metadata["done"] = marks[layer]
            write_notebook(filled, executed)
            progress.update()


async def run_all(
    notebook: Path, caches: LayerCaches, layers: Sequence[int], folder: Path, jobs: int
) -> None:
    """The layers that are not done yet, a few at a time. Where one fails, or at Ctrl-C, those that are done stay."""
    marks = {layer: fingerprint(notebook, caches.files_of(layer), layer) for layer in layers}
    to_do = [
        layer for layer in layers if not is_done(folder / "notebooks" / f"layer{layer}.ipynb", marks[layer])
    ]
    with tqdm(
        total=len(layers), initial=len(layers) - len(to_do), unit="layer", desc=notebook.stem
    ) as progress:
        workers = [
            asyncio.create_task(run_layers(notebook, caches, to_do, marks, folder, progress))
            for _ in range(min(jobs, len(to_do)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


def run(argv=None):
    parser = Parser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("notebook", help=f"one of {', '.join(NOTEBOOKS)}")
    parser.add_argument("cache", type=Path, help="a cache of many layers, or a folder of layerN.pt")
    parser.add_argument("layers", nargs="+", help="numbers from 0, ranges such as 0-29, or all")
    parser.add_argument(
        "--output_dir", type=Path, help="where everything goes; outputs/NOTEBOOK/CACHE where not given"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="notebooks executed at once"
    )
    args = parser.parse_args(argv)
    name = Path(args.notebook).name
    folder = args.output_dir or Path("outputs") / Path(name).stem / args.cache.stem
    caches = LayerCaches(name, args.cache, folder / "caches")
    layers = caches.choose(args.layers)
    require_writable(folder / "index.html")
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {args.jobs}")
    for logger in ("papermill", "traitlets"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        asyncio.run(run_all(FOLDER / name, caches, layers, folder, args.jobs))
    except KeyboardInterrupt:
        print(f"\nthe layers that are done stay in {folder}; the same command continues there")
        raise
    sheet = NOTEBOOKS[name].sheet
    figures = {f"Layer {layer}": folder / f"layer{layer}" / sheet.format(layer) for layer in layers}
    print(f"{len(layers)} layers:      {folder}/notebooks/layerN.ipynb, {folder}/layerN/*.svg")
    print(
        f"contact sheet:  {save_contact_sheet(folder / 'contact_sheet.svg', figures, f'{name}, {args.cache.name}')}"
    )
    print(f"page:           {save_page(folder / 'index.html', args.cache, layers)}")


if __name__ == "__main__":
    main(run)

"""A Jupyter kernel for notebook after notebook: starting one takes as long as drawing a layer."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

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

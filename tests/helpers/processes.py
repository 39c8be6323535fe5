"""Run a function in several processes that share a gloo group, on this machine."""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


def together(count: int, function: Callable[[dist.ProcessGroup], Any], seconds: float = 20) -> list[Any]:
    """What function(group) returns in each of count forks. Raises RuntimeError with what they raised."""
    if torch.cuda.is_initialized():
        pytest.skip("this process has used a GPU, which its forks then cannot: run this test alone")
    with tempfile.TemporaryDirectory() as folder:
        children = [
            os.fork() or _child(Path(folder), rank, count, function, seconds) for rank in range(count)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        found = [(Path(folder) / f"{rank}.pkl") for rank in range(count)]
        results = [pickle.loads(path.read_bytes()) if path.exists() else None for path in found]
    if any(codes):
        raise RuntimeError(
            "\n".join(str(result) for result, code in zip(results, codes, strict=True) if code)
        )
    return results


def _child(folder: Path, rank: int, count: int, function: Callable, seconds: float) -> None:
    """Never returns: pytest must not go on in a fork."""
    code = 0
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), count)
        options = {"rank": rank, "world_size": count, "timeout": timedelta(seconds=seconds)}
        dist.init_process_group("gloo", store=store, **options)
        result = function(dist.group.WORLD)
        dist.barrier()
    except BaseException:
        code, result = 1, traceback.format_exc()
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    os._exit(code)

"""Processes that judge videos while the next ones are made."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from experiments.caches.frames import one_thread
from experiments.miniature.moving_shapes import Scene
from experiments.miniature.tracking import judge

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
PARENT_SECONDS = 0.5  # between two looks whether the parent process is alive


def workers_of(count: int | None) -> int:
    """Return the number of processes that judge: the given one, or this process's share of the cores."""
    if count is not None:
        return count
    if not hasattr(os, "sched_getaffinity"):  # macOS, where forking threads is unsafe
        return 1
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes of this host
    return max(1, len(os.sched_getaffinity(0)) // sharing)


class EvalPool(ProcessPoolExecutor):
    """A pool of judges; with one worker, this process judges.

    Workers are forked where the platform forks: make them before a GPU is touched, or spawn them.
    """

    def __init__(self, workers: int, method: str | None = None):
        super().__init__(max(workers, 1), get_context(method), _start_worker, (os.getpid(),))
        self.workers = workers
        self.submit(os.getpid).result()  # all are forked here and now

    def submit(
        self, function: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        if self.workers > 1:
            return super().submit(function, *args, **kwargs)
        future = Future[Result]()
        with one_thread():
            future.set_result(function(*args, **kwargs))
        return future

    def judge_all(self, videos: Iterable[Tensor], scenes: Sequence[Scene]) -> list[dict[str, bool]]:
        """Judge videos [frames, 3, H, W] in 0..1; they travel as arrays."""
        pairs = zip(videos, scenes, strict=True)
        judged = [self.submit(_judge_array, video.numpy(), scene) for video, scene in pairs]
        return [future.result() for future in judged]

    def __exit__(self, *error: object) -> None:
        self.shutdown(cancel_futures=True)


def exit_with_parent(parent: int) -> None:
    """End this worker when its parent process is gone; a pool's workers would outlive a killed parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _start_worker(parent: int) -> None:
    exit_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the process that asked
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _judge_array(video: np.ndarray, scene: Scene) -> dict[str, bool]:
    return judge(torch.from_numpy(video), scene)

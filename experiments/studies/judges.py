"""Processes that judge videos of moving shapes while the next ones are made."""

import mmap
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from experiments.miniature.moving_shapes import Scene
from experiments.miniature.tracking import judge

PLACES = 3  # batches that wait or are judged at a time
DTYPE = torch.float16  # of videos on their way: an eighth of the steps of 8 bits

Answers = list[dict[str, bool]]


class Judges:
    """Workers that share memory with this process: videos are copied once, and nothing is pickled.

    Workers are forked, so make them before a GPU is touched. With one, this process judges by itself.
    """

    def __init__(self, workers: int, batch: int, shape: Sequence[int]):
        """batch: most videos at a time; shape: of each, [frames, 3, H, W]."""
        self.workers = workers
        size = (PLACES, batch, *shape)
        self._places = torch.frombuffer(
            mmap.mmap(-1, torch.Size(size).numel() * DTYPE.itemsize), dtype=DTYPE
        ).view(size)
        self._waiting: list[list[Future[Answers]]] = [[] for _ in range(PLACES)]
        self._next = 0
        self._pool = None
        if workers > 1:
            self._pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, (self._places,))
            self._pool.submit(os.getpid).result()  # all are forked here and now

    def submit(self, videos: Tensor, scenes: Sequence[Scene]) -> list[Future[Answers]]:
        """Have videos [B, frames, 3, H, W] in 0..1 judged -> parts of their answers, in order."""
        place, count = self._next, len(videos)
        self._next = (place + 1) % PLACES
        for future in self._waiting[place]:
            future.result()
        self._places[place, :count].copy_(videos)
        size = -(-count // self.workers)
        parts = [(place, start, scenes[start : start + size]) for start in range(0, count, size)]
        if self._pool is None:
            self._waiting[place] = [_done(_judge_part(self._places, *part)) for part in parts]
        else:
            self._waiting[place] = [self._pool.submit(_judge_shared, *part) for part in parts]
        return self._waiting[place]

    def __enter__(self) -> "Judges":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(wait=error is None, cancel_futures=True)


_shared: dict[str, Tensor] = {}  # in a worker: the videos


def _begin(places: Tensor) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked
    torch.set_num_threads(1)
    _shared["places"] = places


def _judge_shared(place: int, start: int, scenes: Sequence[Scene]) -> Answers:
    return _judge_part(_shared["places"], place, start, scenes)


def _judge_part(places: Tensor, place: int, start: int, scenes: Sequence[Scene]) -> Answers:
    videos = places[place, start : start + len(scenes)].float()
    return [judge(video, scene) for video, scene in zip(videos, scenes, strict=True)]


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future

"""Processes that judge videos of moving shapes while the next ones are made."""

import mmap
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from experiments.caches.frames import one_thread
from experiments.miniature.moving_shapes import Scene
from experiments.miniature.tracking import judge
from experiments.running.workers import end_with

DTYPE = torch.float32  # what a decoder gives: the tracker sees every bit of it

Answers = list[dict[str, bool]]


class Judges:
    """Workers that share memory with this process: videos are copied once, and nothing is pickled.

    Workers are forked, so make them before a GPU is touched. With one, this process judges by itself.
    """

    def __init__(self, workers: int, slots: int, shape: Sequence[int]):
        """slots: videos that are judged or wait at a time; shape: of each at most, [frames, 3, H, W]."""
        size = (1 if workers <= 1 else slots, *shape)
        memory = mmap.mmap(-1, torch.Size(size).numel() * DTYPE.itemsize)
        self._slots = torch.frombuffer(memory, dtype=DTYPE).view(size)
        self._waiting: list[Future[Any] | None] = [None] * len(self._slots)
        self._next, self._pool = 0, None
        if workers > 1:
            self._pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, (self._slots, os.getpid()))
            self._pool.submit(os.getpid).result()  # all are forked here and now

    def submit(self, video: Tensor, scene: Scene) -> "Future[dict[str, bool]]":
        """Have a video [frames, 3, H, W] in 0..1 judged; waits for a slot where all are taken."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        if (earlier := self._waiting[slot]) is not None:
            earlier.result()
        self._slots[slot, : len(video)].copy_(video)
        if self._pool is None:
            return _done(_judged(self._slots[slot, : len(video)], scene))
        future = self._waiting[slot] = self._pool.submit(_judge_slot, slot, len(video), scene)
        return future

    def call(self, function: Callable[..., Any], *given: Any) -> "Future[Any]":
        """Have function(*given) computed; both are pickled, so arrays are numpy's."""
        if self._pool is None:
            with one_thread():
                return _done(function(*given))
        return self._pool.submit(function, *given)

    def __enter__(self) -> "Judges":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


_shared: dict[str, Tensor] = {}  # in a worker: the videos


def _begin(slots: Tensor, parent: int) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked
    torch.set_num_threads(1)
    _shared["slots"] = slots


def _judge_slot(slot: int, frames: int, scene: Scene) -> dict[str, bool]:
    return judge(_shared["slots"][slot, :frames], scene)


def _judged(video: Tensor, scene: Scene) -> dict[str, bool]:
    with one_thread():
        return judge(video, scene)


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future

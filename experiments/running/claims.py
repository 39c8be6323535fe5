"""Work items that any number of processes make together, on one host or on many that share a disk.

A claim is a file, FOLDER/NAME.claim, made with O_EXCL, which NFS keeps atomic, and held by filelock's
SoftFileLease: its owner sets the file's time every few seconds. Whoever wants the item watches that file on a
clock of its own, and takes it once nothing has moved for LEASE_SECONDS. So neither the clocks of two hosts
nor the process ids of another one matter, and no lock daemon is needed, which many shared disks lack. An
owner that was only asleep may make the item as well: files are replaced whole, and their bytes are equal.
"""

import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.caches.files import CacheError
from experiments.extraction.observer import RunObserver
from experiments.running.locks import remove_leftovers
from experiments.running.ranks import Rank
from wan.errors import ConfigError

# --- Work items that any number of processes make together, on one host or on many that share a disk
LEASE_SECONDS = 90.0  # NFS may show a file's time up to 60 s late
LOOK_SECONDS = 1.0  # between two looks at what others are making
SAY_SECONDS = 2.0  # between two counts of what is done


def item_name(*settings: Any) -> str:
    """A short name of a work item that differs where its settings do."""
    said = json.dumps(settings, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:16]


class Claims:
    """Claims on items by their names, in a folder that all processes share; leaving lets go of all."""

    def __init__(self, folder: str | Path, rank: Rank | None = None, lease: float = LEASE_SECONDS):
        self.folder, self.rank, self.lease_seconds = Path(folder), rank or Rank(), lease
        self._leases: dict[str, Any] = {}  # a lease remembers how long it has watched another's claim
        self._given = deque[str]()  # items that the caller has and may not have finished

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, *error: object) -> None:
        for lease in self._leases.values():
            lease.release()

    def to_make(
        self,
        names: Sequence[str],
        is_done: Callable[[str], bool],
        watch: RunObserver | None = None,
        behind: int = 0,
    ) -> Iterator[str]:
        """Yield the items that this process is to make, each claimed until the next one is asked for.

        Of a caller that finishes an item while it makes the next ones, as many as `behind` stay claimed, the
        last ones until the context is left. Ends when every item is done, or was tried here, or watch is
        asked to stop: before that it waits for those that others are making, and makes those of others that
        died. No item is yielded twice.
        """
        progress = _Progress(names, is_done, self, watch or RunObserver())
        left, given = list(_rotated(names, self.rank)), self._given
        while left := [name for name in left if not is_done(name)]:
            tried = set()
            for name in left:
                if not self._take(name):
                    continue
                tried.add(name)
                if is_done(name):  # it may have been finished just before the claim
                    self._let_go(name)
                else:
                    remove_leftovers(self.folder / name)
                    given.append(name)
                    yield name
                    if len(given) > behind:
                        self._let_go(given.popleft())
                progress.say()
            left = [name for name in left if name not in tried]
            if watch is not None and watch.stopping:
                return
            if left and not tried:  # the rest is being made by others
                progress.say(waiting=True)
                time.sleep(min(LOOK_SECONDS, self.lease_seconds / 4))
        self.let_go_of(set(names))
        progress.say(at_end=True)

    def let_go_of(self, done: set[str]) -> None:
        """Remove claims that dead processes left on items that are done: they were killed between the two."""
        for file in sorted(self.folder.glob("*.claim")):
            if file.stem in done and file.stem not in self._given:
                with self._held(file.stem):  # where its owner lives, it stays
                    pass

    def at_work(self) -> int:
        """How many items are claimed."""
        return sum(1 for _ in self.folder.glob("*.claim"))

    @contextmanager
    def _held(self, name: str) -> Iterator[bool]:
        """Whether the claim on an item could be had; it is held while the context lasts."""
        held = self._take(name)
        try:
            yield held
        finally:
            if held:
                self._let_go(name)

    def _take(self, name: str) -> bool:
        """Whether the claim on an item could be had."""
        from filelock import SoftFileLease, Timeout  # here: a --help needs no locks

        if name not in self._leases:
            file = self.folder / f"{name}.claim"
            self._leases[name] = SoftFileLease(
                file, lease_duration=self.lease_seconds, timeout=0, thread_local=False
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._leases[name].acquire(timeout=0)
        except Timeout:
            return False
        except OSError as error:
            reason = error.strerror or error
            raise CacheError(f"{self.folder} cannot hold the claims of a sweep: {reason}") from error
        return True

    def _let_go(self, name: str) -> None:
        self._leases.pop(name).release()


def _rotated(names: Sequence[str], rank: Rank) -> list[str]:
    """Names from the rank's share on: ranks that start together do not all ask for the same items."""
    start = len(names) * rank.number // rank.count
    return [*names[start:], *names[:start]]


class _Progress:
    """One line for all ranks, said by the first of them where there are several."""

    def __init__(
        self, names: Sequence[str], is_done: Callable[[str], bool], claims: Claims, watch: RunObserver
    ):
        self.names, self.is_done, self.claims, self.watch = names, is_done, claims, watch
        self.start, self.at_first, self.said = time.monotonic(), -1, (-1, False)
        self.next = self.start

    def say(self, waiting: bool = False, at_end: bool = False) -> None:
        """Count what is done, now and then, and say it where that is news."""
        now, rank = time.monotonic(), self.claims.rank
        if rank.count == 1 or not rank.is_first or (now < self.next and not at_end):
            return
        done, total = sum(map(self.is_done, self.names)), len(self.names)
        after = time.monotonic()
        self.next = after + max(SAY_SECONDS, 20 * (after - now))  # to count thousands of files takes its time
        self.at_first = done if self.at_first < 0 else self.at_first
        if (done, waiting) == self.said:
            return
        self.said, made = (done, waiting), done - self.at_first
        rest = f", {(now - self.start) / made * (total - done):.0f} s left" if made and done < total else ""
        at_work = f"{self.claims.at_work()} in work by {rank.count} ranks"
        self.watch.print(f"{done} of {total} done, {at_work}{rest}{'; waiting for them' * waiting}")


# --- Processes that measure on the CPU beside the one that makes videos: how many, and when they end
MOST = 1024
WORKER_LOOK_SECONDS = 0.5
OF_HOST = "LOCAL_WORLD_SIZE"  # torchrun's number of ranks on this host


def cores() -> int:
    """Cores that this process may run on; 1 on macOS, where forks of a process with threads are not safe."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def end_with(parent: int) -> None:
    """In a worker: end when the process that asked for it is gone. A pool's workers outlive one that was
    killed: each holds the pipe that the others read from."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WORKER_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def workers_of(asked: int | None, rank: Rank, environment: Mapping[str, str] = os.environ) -> int:
    """So many as were asked for, or this rank's share of its host's cores, at least one.

    Raises ConfigError for a number that cannot be.
    """
    if asked is not None:
        if not 0 <= asked <= MOST:
            raise ConfigError(f"--workers must be in 0..{MOST}, not {asked}")
        return asked
    said = environment.get(OF_HOST, "")
    ranks = int(said) if rank.count > 1 and said.isdecimal() and int(said) else rank.count
    return max(1, cores() // ranks)

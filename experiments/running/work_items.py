"""Work items that any number of processes finish together, on one host or on several that share a disk.

    with WorkItems(folder / "items", rank) as items:
        for name in items.claim(names):
            items.write(name, make(name))

FOLDER/NAME.json holds the result of a finished item; it appears whole or not at all, so a killed run goes on
where it was. FOLDER/NAME.claim belongs to the process that works on an item: a filelock.SoftFileLease, whose
owner touches the file every few seconds. Another process takes the claim once the file has not changed for
LEASE_SECONDS of its own clock: no synchronised clocks and no lock daemon are needed. An owner that was only
asleep may finish the item as well: files are replaced whole, and the bytes are the same.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.caches.files import CacheError, replacing
from experiments.extraction.observer import RunObserver
from experiments.running.locks import remove_leftovers
from experiments.running.ranks import Rank

LEASE_SECONDS = 90.0  # NFS may show a file's time up to 60 s late
POLL_SECONDS = 1.0  # between two looks at items that other processes are making
REPORT_SECONDS = 2.0  # between two lines about how many are done


class WorkItems:
    """Results and claims in one folder. Leaving the context releases all claims of this process."""

    def __init__(self, folder: str | Path, rank: Rank | None = None, lease: float = LEASE_SECONDS):
        self.folder, self.rank, self.lease_seconds = Path(folder), rank or Rank(), lease
        self._leases: dict[str, Any] = {}  # a lease remembers how long it has watched another's claim
        self._yielded = deque[str]()  # items that the caller has and may not have finished
        self._next_report = 0.0

    def __enter__(self) -> "WorkItems":
        return self

    def __exit__(self, *error: object) -> None:
        for lease in self._leases.values():
            lease.release()

    def path(self, name: str) -> Path:
        """Return the file of an item's result."""
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the result of an item; None where it is missing, torn or another's: to be made again."""
        try:
            result = json.loads(self.path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) and result.get("name") == name else None

    def write(self, name: str, result: Mapping[str, Any]) -> None:
        """Write the result of an item atomically, with its name: a fingerprint of all that it depends on."""
        with replacing(self.path(name)) as file:
            file.write(json.dumps({**result, "name": name}, ensure_ascii=False).encode() + b"\n")

    def claim(
        self,
        names: Sequence[str],
        is_done: Callable[[str], bool] | None = None,
        watch: RunObserver | None = None,
        behind: int = 0,
    ) -> Iterator[str]:
        """Yield the items that this process has to make, each at most once and claimed while it is made.

        An item is claimed until the next one is asked for. Callers that finish items later, in a pool, name
        how many stay claimed: the last `behind` ones, until the context ends. is_done (default: the result
        can be read) decides which are left. Ends when every item is done or was tried here, or when
        watch.stopping is set. Before that it waits for items of other processes and takes those of dead ones.
        """
        watch, finished = watch or RunObserver(), set[str]()

        def done(name: str) -> bool:
            if name not in finished and (is_done(name) if is_done else self.read(name) is not None):
                finished.add(name)
            return name in finished

        start = len(names) * self.rank.number // self.rank.count  # ranks begin at different items
        left = [*names[start:], *names[:start]]
        while left := [name for name in left if not done(name)]:
            tried = set()
            for name in left:
                if not self._acquire(name):
                    continue
                tried.add(name)
                if done(name):  # another process finished it just before the claim
                    self._release(name)
                    continue
                self._yielded.append(name)
                yield name
                if len(self._yielded) > behind:
                    self._release(self._yielded.popleft())
                self._report(sum(map(done, names)), len(names), watch)
            if watch.stopping:
                return
            left = [name for name in left if name not in tried]
            if left and not tried:
                self._report(sum(map(done, names)), len(names), watch)
                time.sleep(min(POLL_SECONDS, self.lease_seconds / 4))
        self.release_dead(names)
        self._report(len(names), len(names), watch, at_end=True)

    def release_dead(self, names: Sequence[str]) -> None:
        """Remove the claims on finished items whose owners were killed right after they finished."""
        claimed = {file.stem for file in self.folder.glob("*.claim")}
        for name in claimed.intersection(names).difference(self._yielded):
            if self._acquire(name):
                self._release(name)

    def _acquire(self, name: str) -> bool:
        """Try to claim an item. Raises CacheError where the folder cannot hold claims."""
        from filelock import SoftFileLease, Timeout  # slow to import, and --help needs no locks

        if name not in self._leases:
            path, seconds = self.folder / f"{name}.claim", self.lease_seconds
            self._leases[name] = SoftFileLease(path, lease_duration=seconds, thread_local=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._leases[name].acquire(timeout=0)
        except Timeout:
            return False
        except OSError as error:
            raise CacheError(f"{self.folder} cannot hold the claims: {error.strerror or error}") from error
        remove_leftovers(self.path(name))  # of an owner that was killed while it wrote
        return True

    def _release(self, name: str) -> None:
        self._leases.pop(name).release()

    def _report(self, count: int, total: int, watch: RunObserver, at_end: bool = False) -> None:
        """Print how many items are done, now and then and by the first of several ranks."""
        if self.rank.count > 1 and self.rank.is_first and (at_end or time.monotonic() >= self._next_report):
            self._next_report = time.monotonic() + REPORT_SECONDS
            claims = sum(1 for _ in self.folder.glob("*.claim"))
            watch.print(f"{count} of {total} done, {claims} in work by {self.rank.count} ranks")

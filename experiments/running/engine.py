"""Work through a list of items: in this process, or by Dask's workers on this machine or a cluster.

    with crew_of(args) as crew:            # of --workers, --scheduler or --slurm; without them None
        work_through(work, items, folder, watch, crew)

The results of an item are files, written whole. `is_done` looks at them, so the same
command goes on after anything. Dask gives a lost worker's item to another one. An item that fails TRIES times
is recorded in FOLDER/failed, and the others go on. FOLDER/logs has a log of every item.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from experiments.caches.files import RunError, StoppedError, replacing
from experiments.extraction.rollout import memory_bytes
from experiments.running.progress import Progress
from experiments.running.ranks import cores, this_rank
from wan.errors import ConfigError, one_line
from wan.files import read_yaml

TRIES = 3
REPORT_SECONDS = 5.0  # between two lines about how many are done
LOST_SECONDS = 600.0  # to wait for a scheduler that is gone
Loaded = TypeVar("Loaded")


class Work(Protocol):
    """Makes items, and says which are done. It is pickled for the workers: small, and without a model."""

    def is_done(self, name: str, item: Any) -> bool:
        """Check the files of an item."""

    def make(self, name: str, item: Any, watch: Progress) -> None:
        """Make an item and write its files. Raises StoppedError where watch.stopping ended it early."""


class Results:
    """Numbers of items, FOLDER/NAME.json each, with the name in it."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """Return an item's numbers; None where they are missing, unreadable or another item's."""
        try:
            result = json.loads(self.path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) and result.get("name") == name else None

    def write(self, name: str, result: Mapping[str, Any]) -> None:
        with replacing(self.path(name)) as file:
            file.write(json.dumps({**result, "name": name}, ensure_ascii=False).encode() + b"\n")


# --- Where an item is made
_kept: dict[str, tuple[str, Any]] = {}  # of this process: what the last items have loaded, by kind
_stopped: set[str] = set()  # the runs of work_through whose items end after their block, or step


def kept(what: str, fingerprint: str, load: Callable[[], Loaded]) -> Loaded:
    """Return what load() returned for this fingerprint. One of a kind is kept: the one before leaves."""
    if _kept.get(what, ("",))[0] != fingerprint:
        _kept.pop(what, None)
        _kept[what] = fingerprint, load()
    return _kept[what][1]


def stop_items(run: str) -> None:
    """Let the items of a run that this worker makes, or will be given, end early."""
    _stopped.add(run)


class _ItemLog(Progress):
    """The log of an item, and at a worker its progress."""

    run = ""

    @property
    def stopping(self) -> bool:  # type: ignore[override]
        return self.run in _stopped


def attempt(work: Work, folder: Path, run: str, name: str, item: Any, watch: Progress | None = None) -> None:
    """Make an item that is not done, here, in at most TRIES tries, and keep its log.

    Raises StoppedError where it was stopped, ConfigError for bad input, and what the last try raised.
    """
    for left in reversed(range(TRIES)):
        if run in _stopped:
            raise StoppedError("stopped")
        try:
            with _ItemLog(quiet=True, log_file=folder / "logs" / f"{name}.jsonl") as log:
                log.run = run
                if watch:
                    watch.item = log
                if not work.is_done(name, item):
                    work.make(name, item, watch or log)
            return
        except Exception as error:
            if not left or isinstance(error, (StoppedError, ConfigError)):
                raise
        finally:
            if watch:
                watch.item = None


Makes = Iterator[tuple[str, Exception | None]]  # names of items as they end, and what went wrong


def make_here(work: Work, items: Mapping[str, Any], folder: Path, watch: Progress) -> Makes:
    """Make items one by one in this process."""
    for number, (name, item) in enumerate(items.items(), 1):
        watch.print(f"item {number} of {len(items)}: {item}")
        try:
            attempt(work, folder, "", name, item, watch)
            yield name, None
        except Exception as error:
            yield name, error
        if watch.stopping:
            return


# --- Who makes them
class Crew:
    """Workers of a Dask cluster: processes of one thread, which have the GPUs that an item needs."""

    def __init__(self, connect: Callable[[], Any], gpus: int = 1):
        self.connect, self.client = connect, connect()
        self.resources = {"GPU": gpus} if gpus > 1 else None
        self.own: Any = None  # the cluster of this machine, where there is one

    def make(self, work: Work, items: Mapping[str, Any], folder: Path, watch: Progress) -> Makes:
        """Give items to the workers; Dask gives those of lost workers away again."""
        from distributed import as_completed

        run, told = f"{os.getpid()} {time.monotonic()}", False
        make, keys = partial(attempt, work, folder, run), [(run, name) for name in items]
        more = {"key": keys, "pure": False, "resources": self.resources}  # pure: Dask hashes all it is given
        futures = self.client.map(make, list(items), list(items.values()), **more)
        ending = as_completed(futures, loop=self.client.loop)
        del futures  # Dask forgets results whose future is gone
        while ending.count():
            if watch.stopping and not told:
                told = True
                with suppress(Exception):  # workers that are gone have stopped
                    self.client.run(stop_items, run)
            for future in (batch := ending.next_batch(block=False)):
                error: Exception | None = None  # a result is not asked for: that takes a message
                if future.status == "error":
                    error = future.exception().with_traceback(future.traceback())
                elif future.status != "finished":
                    error = CancelledError("its scheduler is gone")
                yield future.key[1], error
            if not batch:
                time.sleep(0.02)
            self._revive()

    def _revive(self) -> None:
        """Start workers of this machine anew whose process died while Dask started it again."""
        if (cluster := self.own) is not None:
            for name in [n for n, one in cluster.workers.items() if one.status.name in ("closed", "failed")]:
                del cluster.workers[name]
            if len(cluster.workers) < len(cluster.worker_spec):
                cluster.sync(cluster._correct_state)

    def come_back(self) -> None:
        """Wait for a scheduler that was gone. RunError where it does not come back."""
        end = time.monotonic() + LOST_SECONDS
        while self.client.status != "running":
            if time.monotonic() > end:
                raise RunError("the scheduler does not answer; run the same command")
            time.sleep(0.5)
            if self.client.status == "closed":
                with suppress(OSError):
                    self.client = self.connect()

    def said(self) -> str:
        """Return how many workers there are, with their memory, in words."""
        found = []
        with suppress(Exception):  # it is for people
            for worker in self.client.scheduler_info(n_workers=-1)["workers"].values():
                host, gpu = (worker["metrics"].get(name, 0) / 2**30 for name in ("memory", "gpu_bytes"))
                found.append(f"{host:.1f}" + (f"+{gpu:.1f} GPU" if gpu else ""))
        return f"{len(found)} workers, GiB of each: {', '.join(found[:8])}"


def called(crew: Crew | None, function: Callable[..., Any], *given: Any) -> Any:
    """Return function(*given), of a worker where there are workers: its device and its files count."""
    return crew.client.submit(function, *given, pure=False).result() if crew else function(*given)


def work_through(
    work: Work,
    items: Mapping[str, Any],
    folder: Path,
    watch: Progress,
    crew: Crew | None = None,
    after: Callable[[str, str], None] = lambda name, state: None,
) -> None:
    """Make the items that are not done; after(name, "done", "failed" or "stopped") is called as they end.

    Raises RunError at the end where items failed TRIES times, StoppedError where watch.stopping is set before
    all are done, and ConfigError for bad input.
    """
    todo = {name: item for name, item in items.items() if not work.is_done(name, item)}
    count, failed, why = len(todo), dict[str, str](), "stopped"
    start, said = time.monotonic(), time.monotonic()
    watch.generating |= crew is not None  # from here on Ctrl-C is for the workers
    if count < len(items):
        watch.print(f"{len(items) - count} of {len(items)} are done already")
    while todo and not watch.stopping:
        if crew:
            crew.come_back()
        for name, error in (crew.make if crew else make_here)(work, dict(todo), folder, watch):
            if isinstance(error, ConfigError):
                raise error
            if isinstance(error, CancelledError):
                continue
            state, record = "done", Results(folder / "failed")
            if isinstance(error, StoppedError):
                state, why = "stopped", str(error)
            elif error:
                state, failed[name] = "failed", f"{type(error).__name__}: {one_line(error)}"
                lines = "".join(traceback.format_exception(error))
                record.write(name, {"item": str(items[name]), "error": failed[name], "traceback": lines})
            else:
                record.path(name).unlink(missing_ok=True)
            if state != "stopped":
                del todo[name]
            watch.log("item", name=name, state=state, error=failed.get(name, ""))
            after(name, state)
            if crew and (time.monotonic() > said + REPORT_SECONDS or not todo):
                passed, said = time.monotonic() - start, time.monotonic()
                left = passed / max(1, count - len(todo)) * len(todo)
                done = f"{count - len(todo) - len(failed)} of {count} done, {len(failed)} failed"
                watch.print(f"{done}: {passed:.1f} s, {left:.1f} s left, {crew.said()}")
    if crew is None:
        _kept.clear()
    for name, reason in failed.items():
        watch.print(f"failed {TRIES} times  {items[name]}  {reason}")
    if failed:
        first = next(iter(failed))
        raise RunError(
            f"{len(failed)} of {len(items)} failed; first {items[first]}: {failed[first]}; "
            f"tracebacks are in {folder / 'failed'}, and the same command tries again"
        )
    if todo:
        made = f"{len(items) - len(todo)} of {len(items)} are done and will not be made again"
        raise StoppedError(f"{why}; {made}: run the same command to go on")


# --- Clusters
def _at_start(dask_worker: Any) -> None:
    """Prepare a worker: Ctrl-C is for the process that asked, and it says how much GPU memory it takes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dask_worker.metrics["gpu_bytes"] = lambda worker: memory_bytes().get("gpu_bytes", 0)


@contextmanager
def crew_of(args: argparse.Namespace, device: str = "auto", gpus: int = 1) -> Iterator[Crew | None]:
    """Start the workers that flags ask for, or join them; None where items are made here, one by one.

    Raises ConfigError for flags that do not fit, missing GPUs, and a missing Dask.
    """
    if this_rank().count > 1:
        raise ConfigError("torchrun is for one rollout; a list of items is shared by --workers N")
    if not (args.workers or args.scheduler or args.slurm):
        yield None
        return
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device} was asked for, and every worker has its own GPU; leave it out")
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "error")  # of this process and of its workers
    try:
        import dask
        from distributed import Client
    except ImportError:
        raise ConfigError('workers need Dask; run: pip install ".[cluster]"') from None
    dask.config.set({"distributed.scheduler.allowed-failures": TRIES})
    dask.config.set({"distributed.worker.daemon": False})  # items may start processes
    dask.config.set({"distributed.worker.profile.enabled": False})
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 h"})  # a busy machine starts them slowly
    dask.config.set({"distributed.comm.timeouts.connect": "120 s"})
    with ExitStack() as stack:
        target = args.scheduler
        if args.workers:
            target = stack.enter_context(_on_this_machine(args.workers, device, gpus))
        elif args.slurm:
            target = stack.enter_context(_by_slurm(args.slurm, gpus))

        def connect() -> Client:
            client = Client(target, set_as_default=False)
            client.register_worker_callbacks(_at_start)
            return client

        try:
            crew = Crew(connect, gpus)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no scheduler answers at {args.scheduler}: {one_line(error)}") from None
        crew.own = target if args.workers else None
        stack.callback(lambda: crew.client.close())
        if busy := next((name for name, threads in crew.client.nthreads().items() if threads > 1), None):
            raise ConfigError(f"worker {busy} makes several items at once; start it with --nthreads 1")
        if not args.quiet:
            print(f"dashboard: {crew.client.dashboard_link}", file=sys.stderr)
        yield crew


def _on_this_machine(count: int, device: str, gpus: int) -> Any:
    """Start a scheduler here with `count` workers, each with `gpus` GPUs of its own."""
    from distributed import Nanny, Scheduler, SpecCluster

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    there = named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]
    there = [] if device == "cpu" or not torch.cuda.is_available() else there
    if there and count * gpus > len(there):
        raise ConfigError(f"--workers {count} of {gpus} GPU(s) each, and {len(there)} GPU(s) are here")
    workers = {}
    for n in range(count):
        environment = {"OMP_NUM_THREADS": str(max(1, cores() // count)), "LOCAL_WORLD_SIZE": str(count)}
        if there:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(there[n * gpus : (n + 1) * gpus])
        options = {"nthreads": 1, "memory_limit": 0, "env": environment, "resources": {"GPU": gpus}}
        workers[n] = {"cls": Nanny, "options": {**options, "dashboard": False}}
    own = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:8787"}  # who may connect runs code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another port is taken where that one is in use
        return SpecCluster(workers=workers, scheduler={"cls": Scheduler, "options": own})


def _by_slurm(path: str, gpus: int) -> Any:
    """Submit jobs as a YAML of dask-jobqueue's SLURMCluster says, `jobs` of them, each with one worker."""
    if not shutil.which("sbatch"):
        raise ConfigError("--slurm needs SLURM's sbatch, which is not here")
    from dask_jobqueue.slurm import SLURMCluster

    settings = {"cores": 1, "processes": 1, **{str(key): value for key, value in read_yaml(path).items()}}
    jobs, own = settings.pop("jobs", 1), settings.pop("job_script_prologue", [])
    env = {"PYTHONPATH": os.getcwd(), "DASK_DISTRIBUTED__WORKER__DAEMON": "False"}
    env |= {f"DASK_DISTRIBUTED__WORKER__MEMORY__{name}": "False" for name in ("PAUSE", "SPILL", "TERMINATE")}
    settings["job_script_prologue"] = [*(f"export {name}={value}" for name, value in env.items()), *own]
    settings["worker_extra_args"] = ["--resources", f"GPU={gpus}", *settings.pop("worker_extra_args", [])]
    try:
        cluster = SLURMCluster(**settings)
        cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)  # a job that ends is followed by another
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--slurm {path}: {one_line(error)}") from None
    return cluster

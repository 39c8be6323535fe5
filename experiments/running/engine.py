"""Work through a list of items: one after the other here, or by Dask's workers on this machine or a cluster.

    with dask_client(args) as client:  # of --workers, --scheduler or --slurm; None without them
        work_through(work, items, folder, watch, client)

An item's results are files that are written whole, and `is_done` checks them: the same command continues
after a kill, a full disk or a lost node without repeating finished items. An item that fails TRIES times is
recorded in FOLDER/failed, and the others continue.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from tqdm import tqdm

from experiments.caches.files import RunError, StoppedError, replacing
from experiments.progress import Progress
from wan.errors import ConfigError, one_line
from wan.files import read_yaml
from wan.seals import sealed, unsealed

if TYPE_CHECKING:
    from distributed import Client

TRIES = 3
POLL_SECONDS = 0.05  # between two questions to Dask: meanwhile Ctrl-C is noticed
Loaded = TypeVar("Loaded")


class Work(Protocol):
    """Make items and check which are done. It is pickled for the workers: keep it small, without a model."""

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
        """Return an item's numbers; None where they are missing, damaged or another item's."""
        try:
            result = unsealed(self.path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return result if result.get("name") == name else None

    def write(self, name: str, result: Mapping[str, Any]) -> None:
        with replacing(self.path(name)) as file:
            file.write(sealed({**result, "name": name}))


# --- One item, in this process or at a worker
_cached: dict[str, tuple[str, Any]] = {}  # kind -> fingerprint and object; a process holds one model
_stopped: set[str] = set()  # runs of work_through that were asked to stop; workers may outlive a run


def cached(kind: str, fingerprint: str, load: Callable[[], Loaded]) -> Loaded:
    """Cache one object per kind; loading one with another fingerprint evicts it."""
    if _cached.get(kind, ("",))[0] != fingerprint:
        _cached.pop(kind, None)  # first: two models may not fit into memory
        _cached[kind] = fingerprint, load()
    return _cached[kind][1]


def _stop(run: str) -> None:
    """Stop a run at this worker: finish the current block, start no more items."""
    _stopped.add(run)


class _AtWorker(Progress):
    """The progress of an item at a worker, which nobody watches there."""

    run = ""

    @property
    def stopping(self) -> bool:  # type: ignore[override]
        return self.run in _stopped


def _make_at_worker(work: Work, run: str, name: str, item: Any) -> Exception | None:
    """Make an item unless it is done. Return an error that a retry cannot change; raise any other."""
    watch = _AtWorker(quiet=True)
    watch.run = run
    try:
        if watch.stopping:
            return StoppedError("stopped")
        if not work.is_done(name, item):  # by a worker that was lost just after
            work.make(name, item, watch)
    except (StoppedError, ConfigError) as error:
        return error
    return None


# --- Many items
Ends = Iterator[tuple[str, Exception | None]]  # names of items as they end, and what went wrong


def _make_here(work: Work, items: Mapping[str, Any], watch: Progress) -> Ends:
    for number, (name, item) in enumerate(items.items(), 1):
        if watch.stopping:
            return
        watch.print(f"item {number} of {len(items)}: {item}")
        error: Exception | None = None
        for _ in range(TRIES):
            try:
                work.make(name, item, watch)
                error = None
            except Exception as failure:
                error = failure
            if error is None or isinstance(error, (StoppedError, ConfigError)):
                break
        yield name, error


def _make_by_workers(work: Work, items: Mapping[str, Any], watch: Progress, client: "Client") -> Ends:
    # 1. Give Dask all items at once: it spreads them, retries them, and gives a lost worker's items to others
    run, told = uuid.uuid4().hex, False
    make, names = partial(_make_at_worker, work, run), list(items)
    # pure: Dask would hash all that it is given
    futures = client.map(make, names, list(items.values()), pure=False, retries=TRIES - 1)
    name_of = {future.key: name for future, name in zip(futures, names, strict=True)}
    ending = dask().distributed.as_completed(futures, loop=client.loop, with_results=True)
    del futures  # Dask forgets the results whose futures are gone
    # 2. Take them as they end. Blocking would keep Ctrl-C from the workers until the next item ends
    while ending.count():
        if watch.stopping and not told:
            told = True
            client.run(_stop, run, on_error="ignore")  # a worker that is gone has stopped
        ended = ending.next_batch(block=False)
        if client.status != "running" or any(future.cancelled() for future, _ in ended):
            raise RunError("the scheduler is gone; what is done stays, run the same command to go on")
        for future, result in ended:
            if future.status == "error":  # (class, exception, traceback)
                result = result[1].with_traceback(result[2])
            yield name_of[future.key], result
        time.sleep(POLL_SECONDS)


def work_through(
    work: Work,
    items: Mapping[str, Any],
    folder: Path,
    watch: Progress,
    client: "Client | None" = None,
    after: Callable[[str, str], None] = lambda name, state: None,
) -> None:
    """Make the items that are not done; after(name, "done", "failed" or "stopped") is called as they end.

    Raises RunError at the end where items failed TRIES times, StoppedError where watch.stopping is set before
    all are done, and ConfigError for bad input.
    """
    # 1. What is there already
    todo = {name: item for name, item in items.items() if not work.is_done(name, item)}
    count, done, why = len(items), len(items) - len(todo), "stopped"
    failed, record = dict[str, str](), Results(folder / "failed")
    if done:
        watch.print(f"{done} of {count} are done already")
    # 2. Make the others; those that fail are recorded and stop nobody
    watch.generating |= client is not None  # from here on Ctrl-C is for the workers
    made = _make_by_workers(work, todo, watch, client) if client else _make_here(work, todo, watch)
    hidden = watch.quiet or client is None  # here each item has a line, and blocks a bar
    with tqdm(initial=done, total=count, unit="item", disable=hidden) as bar:
        for name, error in made:
            if isinstance(error, ConfigError):
                raise error
            if isinstance(error, StoppedError):
                state, why = "stopped", str(error)
            elif error:
                state, failed[name] = "failed", f"{type(error).__name__}: {one_line(error)}"
                trace = "".join(traceback.format_exception(error))
                about = {"item": str(items[name]), "error": failed[name], "traceback": trace}
                record.write(name, about)
                watch.print(f"failed {TRIES} times  {items[name]}  {failed[name]}")
            else:
                state, done = "done", done + 1
                record.path(name).unlink(missing_ok=True)
            if state != "stopped":
                bar.update()
            watch.log("item", name=name, state=state, error=failed.get(name, ""))
            after(name, state)
    # 3. Say what is left, with the exit code of a failed run or of a stopped one
    if client is None:
        _cached.clear()  # the model's memory is free for what follows
    if failed:
        first = next(iter(failed))
        raise RunError(
            f"{len(failed)} of {count} failed; first {items[first]}: {failed[first]}; "
            f"tracebacks are in {record.folder}, and the same command tries again"
        )
    if done < count:
        made_so_far = f"{done} of {count} are done and will not be made again"
        raise StoppedError(f"{why}; {made_so_far}: run the same command to go on")


# --- Dask's workers: processes of one thread, each with its own GPU
def dask() -> Any:
    """Import Dask, which is optional. ConfigError where it is missing."""
    try:
        import dask.distributed
    except ImportError:
        raise ConfigError('workers need Dask; run: pip install ".[cluster]"') from None
    return dask


def called(client: "Client | None", function: Callable[..., Any], *given: Any) -> Any:
    """Return function(*given), called at a worker if there are workers, with its device and files."""
    return client.submit(function, *given, pure=False).result() if client else function(*given)


@contextmanager
def dask_client(args: argparse.Namespace, device: str = "auto") -> Iterator["Client | None"]:
    """Start the workers that flags ask for, or join them; None where items are made here.

    Raises ConfigError for flags that do not fit, missing GPUs, and a missing Dask.
    """
    if not (args.workers or args.scheduler or args.slurm):
        yield None
        return
    # Workers inherit it; at the usual level a killed worker fills the screen
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "error")
    settings: dict[str, Any] = {
        "distributed.scheduler.allowed-failures": TRIES,  # workers that an item may lose
        "distributed.worker.daemon": False,  # items may start processes
        "distributed.deploy.lost-worker-timeout": "1 h",  # a busy machine starts them slowly
        "distributed.comm.timeouts.connect": "120 s",
    }
    dask().config.set(settings)
    cluster: Any
    if args.workers:
        cluster = _local_cluster(args.workers, device)
    else:
        cluster = _slurm_cluster(args.slurm) if args.slurm else nullcontext(args.scheduler)
    with cluster as target, dask().distributed.Client(target, set_as_default=False) as client:
        # A terminal sends Ctrl-C to workers too, and it is for the process that asked
        client.register_worker_callbacks(partial(signal.signal, signal.SIGINT, signal.SIG_IGN))
        # Two items in one process would share its capture and its cached model
        if busy := next((name for name, threads in client.nthreads().items() if threads > 1), None):
            raise ConfigError(f"worker {busy} makes several items at once; start it with --nthreads 1")
        if not args.quiet:
            print(f"dashboard: {client.dashboard_link}", file=sys.stderr)
        yield client


@contextmanager
def _local_cluster(count: int, device: str) -> Iterator[Any]:
    """Start a scheduler here with `count` workers, each with a GPU of its own."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    there = named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]
    there = [] if device == "cpu" or not torch.cuda.is_available() else there
    if there and count > len(there):
        raise ConfigError(f"--workers {count}, and the number of GPUs here is {len(there)}")
    workers = {}
    for n in range(count):
        environment = {
            "OMP_NUM_THREADS": str(max(1, dask().system.CPU_COUNT // count)),
            "LOCAL_WORLD_SIZE": str(count),
        }
        if there:
            environment["CUDA_VISIBLE_DEVICES"] = there[n]
        # memory_limit 0: Dask would end a worker whose model takes most of the memory
        options = {"nthreads": 1, "memory_limit": 0, "env": environment, "dashboard": False}
        options["preload"] = ["experiments.session"]  # all import torch at once, not when they get an item
        workers[n] = {"cls": dask().distributed.Nanny, "options": options}
    own = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:8787"}  # who may connect runs code
    scheduler = {"cls": dask().distributed.Scheduler, "options": own}
    # Workers inherit the signals of the thread that starts them, Dask's loop
    loop = dask().distributed.utils.LoopRunner()
    with without_ctrl_c():
        loop.start()
    try:
        with warnings.catch_warnings(), ending_at_once():
            warnings.simplefilter("ignore")  # another port is taken where that one is in use
            cluster = dask().distributed.SpecCluster(workers=workers, scheduler=scheduler, loop=loop.loop)
        with cluster:
            yield cluster
    finally:
        loop.stop()


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C in threads that start here, and in their processes; this thread receives it afterwards.

    A terminal sends it to every process of the command, and a worker that is importing torch would print a
    traceback.
    """
    # Python's resource tracker, when it starts, lets its thread have SIGINT again; it warns of what a process
    # that ended at once left, and removes it
    earlier = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    resource_tracker.ensure_running()
    os.environ["PYTHONWARNINGS"] = earlier
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End this process and its workers at once on Ctrl-C and SIGTERM, while the workers start.

    An exception would leave Dask's cluster half started, with a traceback for each worker.
    """

    def end(number: int, frame: object) -> None:
        for worker in multiprocessing.active_children():
            worker.kill()
        os.write(2, b"error: stopped\n")
        os._exit(130)

    earlier = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _slurm_cluster(path: str) -> Any:
    """Submit jobs as a YAML of dask-jobqueue's SLURMCluster says, `jobs` of them, each with one worker."""
    if not shutil.which("sbatch"):
        raise ConfigError("--slurm needs SLURM's sbatch, which is not here")
    from dask_jobqueue.slurm import SLURMCluster

    settings = {"cores": 1, "processes": 1, **{str(key): value for key, value in read_yaml(path).items()}}
    jobs, own = settings.pop("jobs", 1), settings.pop("job_script_prologue", [])
    # The workers' Dask reads its settings from the environment
    env = {"PYTHONPATH": os.getcwd(), "DASK_DISTRIBUTED__WORKER__DAEMON": "False"}
    env |= {f"DASK_DISTRIBUTED__WORKER__MEMORY__{name}": "False" for name in ("PAUSE", "SPILL", "TERMINATE")}
    settings["job_script_prologue"] = [*(f"export {name}={value}" for name, value in env.items()), *own]
    try:
        cluster = SLURMCluster(**settings)
        cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)  # a job that ends is followed by another
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--slurm {path}: {one_line(error)}") from None
    return cluster

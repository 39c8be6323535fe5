"""Make a list of items: one after the other here, or by the workers of a Dask cluster.

    with dask_client(args, config.device) as client:  # None without --workers, --scheduler and --slurm
        work_through(work, items, watch, client)

The results of an item are files that are written whole and carry a fingerprint. `finished` is the one test of
what is done: the same command goes on after Ctrl-C, a kill or a lost node, and makes nothing twice.
"""

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from tqdm import tqdm

from experiments.caches import files
from experiments.progress import Progress
from wan import errors
from wan.files import read_yaml

if TYPE_CHECKING:
    from distributed import Client

Loaded = TypeVar("Loaded")
Ends = Iterator[tuple[Any, Exception | None]]  # items as they end, and what went wrong


class Results:
    """Numbers of items, FOLDER/NAME.json each; NAME is the fingerprint of all that they depend on."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the numbers of an item; None where they are missing or damaged."""
        return files.finished(self.path(name), name)

    def write(self, name: str, numbers: Mapping[str, Any]) -> None:
        files.save_report({**numbers, "fingerprint": name}, self.path(name))


class Work(Protocol):
    """Make items and check which are done. It is pickled for the workers: keep it small, without a model."""

    def is_done(self, item: Any) -> bool:
        """Check the files of an item, by `finished`."""

    def make(self, item: Any, watch: Progress) -> None:
        """Make an item and write its files. Raises StoppedError where watch.stopping ended it early."""


# --- One item, in this process or at a worker
_cached: dict[str, tuple[str, Any]] = {}  # kind -> fingerprint and object; a process holds one model


def cached(kind: str, fingerprint: str, load: Callable[[], Loaded]) -> Loaded:
    """Cache one object per kind; loading one with another fingerprint evicts it."""
    if _cached.get(kind, ("",))[0] != fingerprint:
        _cached.pop(kind, None)  # first: two models may not fit into memory
        _cached[kind] = fingerprint, load()
    return _cached[kind][1]


def call_on_worker(client: "Client | None", function: Callable[..., Loaded], *arguments: Any) -> Loaded:
    """Return function(*arguments), called at a worker if there are workers, with its device and files."""
    if client is None:
        return function(*arguments)
    return client.submit(function, *arguments, pure=False).result()


def _make_at_worker(work: Work, item: Any) -> None:
    if not work.is_done(item):  # by a worker that was lost just after
        work.make(item, Progress(quiet=True))


# --- Many items
def work_through(work: Work, items: Sequence[Any], watch: Progress, client: "Client | None" = None) -> None:
    """Make the items that are not done. One that fails stops no other.

    Raises RunError at the end where items failed, ConfigError at once for bad input, and after Ctrl-C
    StoppedError with the number of finished items.
    """
    # 1. What is there already
    waiting = [item for item in items if not work.is_done(item)]
    done, failed = len(items) - len(waiting), list[tuple[Any, Exception]]()
    if done:
        watch.print(f"{done} of {len(items)} are done already")

    # 2. Make the others. Items that are made here have a line each, and a bar of blocks
    make = _make_here if client is None else partial(_make_by_workers, client)
    hidden = watch.quiet or client is None
    try:
        with tqdm(initial=done, total=len(items), unit="item", disable=hidden) as bar:
            for item, error in make(work, waiting, watch):
                bar.update()
                if error is None:
                    done += 1
                    watch.log("item", item=str(item))
                    continue
                if isinstance(error, errors.ConfigError):
                    raise error
                failed.append((item, error))
                trace = "".join(traceback.format_exception(error))
                watch.log("item", item=str(item), error=str(error), traceback=trace)
                watch.print(f"failed  {item}  {type(error).__name__}: {errors.one_line(error)}")
    except (KeyboardInterrupt, files.StoppedError) as stop:
        kept = f"{done} of {len(items)} are done and will not be made again"
        reason = str(stop) or "stopped"
        raise files.StoppedError(f"{reason}; {kept}: run the same command to go on") from None
    finally:
        if client is None:
            _cached.clear()  # the model's memory is free for what follows

    # 3. Report the first failure; --debug prints its traceback
    if failed:
        item, error = failed[0]
        raise files.RunError(
            f"{len(failed)} of {len(items)} failed; first {item}: {type(error).__name__}: "
            f"{errors.one_line(error)}; "
            "the same command tries again"
        ) from error


def _make_here(work: Work, items: Sequence[Any], watch: Progress) -> Ends:
    for number, item in enumerate(items, 1):
        if watch.stopping:
            raise files.StoppedError("stopped")
        watch.print(f"item {number} of {len(items)}: {item}")
        try:
            work.make(item, watch)
        except files.StoppedError:
            raise
        except Exception as error:
            yield item, error
        else:
            yield item, None


def _make_by_workers(client: "Client", work: Work, items: Sequence[Any], watch: Progress) -> Ends:
    from distributed import as_completed

    # Dask has all items at once: it spreads them, and gives those of a lost worker to others. pure=False: it
    # would hash all arguments
    futures = client.map(partial(_make_at_worker, work), items, pure=False)
    item_of = {future.key: item for future, item in zip(futures, items, strict=True)}
    for future in as_completed(futures, loop=client.loop):
        if future.status == "finished":
            yield item_of[future.key], None
        elif future.status == "error":
            yield item_of[future.key], future.exception().with_traceback(future.traceback())
        else:
            raise files.RunError("the scheduler is gone; what is done stays, run the same command to go on")


# --- Dask's workers: processes of one thread, each with its own GPU
WORKER_ENVIRONMENT = {
    # At the usual level a killed worker fills the screen, and a scheduler that goes leaves tracebacks
    "DASK_LOGGING__DISTRIBUTED": "critical",
    "DASK_DISTRIBUTED__WORKER__DAEMON": "False",  # items may start processes
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "120 s",  # a busy machine starts them slowly
}


@contextmanager
def dask_client(args: argparse.Namespace, device: str = "auto") -> Iterator["Client | None"]:
    """Start the workers that flags ask for, or join them; None where items are made here.

    Raises ConfigError for flags that do not fit, missing GPUs, and a missing Dask.
    """
    if not (args.workers or args.scheduler or args.slurm):
        yield None
        return
    os.environ.update(WORKER_ENVIRONMENT)  # Dask reads it when it is imported
    try:
        import distributed  # noqa: F401
    except ImportError:
        raise errors.ConfigError('workers need Dask; run: pip install ".[cluster]"') from None
    for name in ("distributed.client", "asyncio", "tornado"):  # and what it runs on
        logging.getLogger(name).setLevel(logging.CRITICAL)
    cluster: AbstractContextManager[str] = nullcontext(args.scheduler)
    if args.workers:
        cluster = local_cluster(args.workers, device)
    elif args.slurm:
        cluster = slurm_cluster(args.slurm)
    with cluster as target, connected(target) as client:
        # Two items in one process would share its capture and its cached model
        for name, threads in client.nthreads().items():
            if threads > 1:
                raise errors.ConfigError(
                    f"worker {name} makes several items at once; start it with --nthreads 1"
                )
        if not args.quiet:
            print(f"dashboard: {client.dashboard_link}", file=sys.stderr)
        yield client


def connected(target: Any) -> "Client":
    """Return a client of a cluster, or of the scheduler at an address. ConfigError for what is no address."""
    from distributed import Client

    try:
        return Client(target, set_as_default=False)
    except ValueError as error:
        message = f"--scheduler {errors.short_repr(target)}: {errors.one_line(error)}; write tcp://HOST:PORT"
        raise errors.ConfigError(message) from None


@contextmanager
def local_cluster(count: int, device: str) -> Iterator[str]:
    """Start a scheduler in this process and `count` workers, each with a GPU or a share of the cores.

    Yields the address of the scheduler at once: the workers import torch meanwhile.
    """
    import dask
    from dask.system import CPU_COUNT
    from distributed import LocalCluster

    # 1. The GPUs that may be seen here, by their names in CUDA_VISIBLE_DEVICES
    gpus = list[str]()
    if device != "cpu" and torch.cuda.is_available():
        gpus = [str(n) for n in range(torch.cuda.device_count())]
        if os.environ.get("CUDA_VISIBLE_DEVICES"):
            gpus = os.environ["CUDA_VISIBLE_DEVICES"].replace(" ", "").split(",")
        if count > len(gpus):
            raise errors.ConfigError(f"--workers {count}, and the number of GPUs here is {len(gpus)}")

    # 2. Workers. Dask starts a lost one again, and ends each when the scheduler is gone for a minute. It must
    # not end those whose model takes most of the memory
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": str(max(1, CPU_COUNT // count)),
        "LOCAL_WORLD_SIZE": str(count),
    }
    options = ["--nthreads=1", "--memory-limit=0", "--death-timeout=60", "--no-dashboard"]
    options.append("--preload=experiments.session")
    workers = []
    # Where no worker starts, or all are lost, items fail instead of waiting for ever
    dask.config.set({"distributed.scheduler.no-workers-timeout": "10 minutes"})
    # Local addresses: who may connect runs code
    with LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:8787") as cluster:
        command = [sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address, *options]
        try:
            for number in range(count):
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[number]
                # A session of its own: Ctrl-C in a terminal is for the process that asked
                workers.append(subprocess.Popen(command, env=environment, start_new_session=True))
            yield cluster.scheduler_address
        finally:
            for worker in workers:
                os.killpg(worker.pid, signal.SIGKILL)  # files are written whole: nothing is lost
                worker.wait()


def slurm_cluster(path: str) -> Any:
    """Submit jobs as a YAML of dask-jobqueue's SLURMCluster says, `jobs` of them, each with one worker."""
    if not shutil.which("sbatch"):
        raise errors.ConfigError("--slurm needs SLURM's sbatch, which is not here")
    from dask_jobqueue.slurm import SLURMCluster

    settings = {"cores": 1, "processes": 1, **read_yaml(path)}
    jobs = settings.pop("jobs", 1)
    environment = {"PYTHONPATH": os.getcwd(), **WORKER_ENVIRONMENT}
    for name in ("PAUSE", "SPILL", "TERMINATE"):
        environment[f"DASK_DISTRIBUTED__WORKER__MEMORY__{name}"] = "False"
    exports = [f"export {name}='{value}'" for name, value in environment.items()]
    settings["job_script_prologue"] = [*exports, *settings.get("job_script_prologue", [])]
    try:
        cluster = SLURMCluster(**settings)
        cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)  # a job that ends is followed by another
    except (TypeError, ValueError) as error:
        raise errors.ConfigError(f"--slurm {path}: {errors.one_line(error)}") from None
    return cluster

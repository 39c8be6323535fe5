"""Work through a list of items: in this process, or by Dask's workers on this machine or a cluster.

    with crew_of(args) as crew:            # of --workers, --scheduler or --slurm; without them None
        work_through(work, items, folder, watch, crew)

The results of an item are files, written whole by whoever makes it. `is_done` looks at them, so the same
command goes on after anything. A lost worker's item is given to another one. An item that fails TRIES times
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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from experiments.caches.files import RunError, StoppedError, replacing
from experiments.extraction.causal import LoadedModel, prepare
from experiments.extraction.provenance import fingerprint
from experiments.running.progress import Progress, memory_bytes
from experiments.running.ranks import cores, this_rank
from wan.errors import ConfigError, one_line
from wan.files import read_yaml

TRIES = 3
REPORT_SECONDS = 5.0  # between two lines about how many are done
LOST_SECONDS = 600.0  # to wait for a scheduler that is gone
Loaded = TypeVar("Loaded")


class Work(Protocol):
    """Makes items, and says which are done. It is pickled for each item: small, and without a model."""

    def is_done(self, name: str, item: Any) -> bool:
        """Check the files of an item."""

    def make(self, name: str, item: Any, watch: Progress) -> None:
        """Make an item and write its files. Raises StoppedError where watch.stopping ended it early."""


@dataclass(frozen=True)
class Failure:
    """Why an item is not made: bad input, which ends the work, a wish to stop, or an error."""

    error: str
    traceback: str = ""
    kind: str = "error"  # bad input, stopped, lost


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
_asked_to_stop: set[str] = set()  # the runs of work_through that have been stopped


def kept(what: str, fingerprint: str, load: Callable[[], Loaded]) -> Loaded:
    """Return what load() returned for this fingerprint. One of a kind is kept: the one before leaves."""
    if _kept.get(what, ("",))[0] != fingerprint:
        _kept.pop(what, None)
        _kept[what] = fingerprint, load()
    return _kept[what][1]


def loaded_here(session: LoadedModel) -> LoadedModel:
    """Return a session with its model: itself, or where it came from another process, one that is kept."""
    if vars(session)["pipeline"]:
        return session
    return kept("model", fingerprint(session.identity(session.config)), lambda: prepare(session.config, []))


class _AtAWorker(Progress):
    """The progress of an item that a worker makes: its log, and the wish to stop."""

    run = ""

    @property
    def stopping(self) -> bool:  # type: ignore[override]
        return self.run in _asked_to_stop


def attempt(
    work: Work, name: str, item: Any, folder: Path, run: str, watch: Progress | None = None
) -> Failure | None:
    """Make an item that is not done, here, and keep its log."""
    if run in _asked_to_stop:
        return Failure("stopped", kind="stopped")
    try:
        with _AtAWorker(quiet=True, log_file=folder / "logs" / f"{name}.jsonl") as log:
            log.run = run
            if watch:
                watch.item = log
            if not work.is_done(name, item):
                work.make(name, item, watch or log)
    except StoppedError as error:
        return Failure(str(error), kind="stopped")
    except ConfigError as error:
        return Failure(str(error), kind="bad input")
    except Exception as error:
        return Failure(f"{type(error).__name__}: {one_line(error)}", traceback.format_exc())
    finally:
        if watch:
            watch.item = None
    return None


# --- Who makes them
class Crew:
    """Workers of a Dask cluster: processes of one thread, which have the GPUs that an item needs."""

    per_worker = 2  # items that each has: the next one is there when one is done

    def __init__(self, connect: Callable[[], Any], gpus: int = 1):
        self.connect, self.client = connect, connect()
        self.resources = {"GPU": gpus} if gpus > 1 else None
        self.client.register_worker_callbacks(_at_start)
        self.futures: dict[str, Any] = {}
        self.looked, self.workers = 0.0, 0
        self.own: Any = None  # the cluster of this machine, where there is one

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Return function(*given) of a worker, whose device and files count."""
        return self.client.submit(function, *given, pure=False).result()

    def room(self) -> int:
        """Return how many items may be given away at a time."""
        if self.client.status != "running":
            return 0
        if time.monotonic() > self.looked + 1:
            self._revive()
            self.looked, threads = time.monotonic(), self.client.nthreads()
            self.workers = len(threads)
            if busy := next((name for name, count in threads.items() if count > 1), None):
                raise ConfigError(f"worker {busy} makes several items at once; start it with --nthreads 1")
        return max(1, self.per_worker * self.workers)

    def _revive(self) -> None:
        """Start workers of this machine anew whose process died while Dask started it again."""
        if (cluster := self.own) is not None:
            for name in [n for n, one in cluster.workers.items() if one.status.name in ("closed", "failed")]:
                del cluster.workers[name]
            if len(cluster.workers) < len(cluster.worker_spec):
                cluster.sync(cluster._correct_state)

    def start(self, ended: SimpleQueue, name: str, *given: Any) -> None:
        future = self.client.submit(attempt, *given, pure=False, resources=self.resources)
        self.futures[name] = future  # Dask forgets tasks whose future is gone

        def end(future: Any) -> None:
            failure = Failure("its scheduler is gone", kind="lost")
            with suppress(Exception):  # cancelled by a scheduler that is gone
                error = future.exception() if future.status == "error" else None
                text = f"{type(error).__name__}: {one_line(error)}"
                failure = Failure(text, text) if error else future.result()
            ended.put((name, future, failure))

        future.add_done_callback(end)

    def stop(self, run: str) -> None:
        """Let items that are being made end after their block, or step."""
        with suppress(Exception):  # workers that are gone have stopped
            self.client.run(_asked_to_stop.add, run)

    def come_back(self) -> None:
        """Connect again where the scheduler was gone for too long. RunError where it does not come back."""
        if self.client.status != "closed":
            return
        end = time.monotonic() + LOST_SECONDS
        while True:
            try:
                self.client = self.connect()
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise RunError(f"the scheduler does not answer: {error}; run the same command") from error

    def said(self) -> str:
        """Return how many workers there are, with their memory, in words."""
        found = []
        with suppress(Exception):  # it is for people
            for worker in self.client.scheduler_info(n_workers=-1)["workers"].values():
                host, gpu = (worker["metrics"].get(name, 0) / 2**30 for name in ("memory", "gpu_bytes"))
                found.append(f"{host:.1f}" + (f"+{gpu:.1f} GPU" if gpu else ""))
        shown = ", ".join(found if len(found) < 9 else (min(found), "...", max(found)))
        return f"{self.workers} worker{'s' * (self.workers != 1)}, GiB of each: {shown}"


class _Here:
    """This process in place of a crew."""

    def __init__(self, watch: Progress):
        self.watch = watch

    def room(self) -> int:
        return 1

    def start(self, ended: SimpleQueue, name: str, *given: Any) -> None:
        ended.put((name, None, partial(attempt, watch=self.watch)(*given)))


def called(crew: Crew | None, function: Callable[..., Any], *given: Any) -> Any:
    """Return function(*given), of a worker where there are workers: its device and its files count."""
    return crew.call(function, *given) if crew else function(*given)


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
    todo = deque(name for name in items if not work.is_done(name, items[name]))
    ended, busy, failures = SimpleQueue[Any](), set[str](), dict[str, Failure]()
    tries, count, done, why = Counter[str](), len(todo), 0, "stopped"
    start = said = time.monotonic()
    run, by, told = f"{os.getpid()} {start}", crew or _Here(watch), False
    watch.generating |= crew is not None  # from here on Ctrl-C is for the workers
    if count < len(items):
        watch.print(f"{len(items) - count} of {len(items)} are done already")
    while todo or busy:
        if watch.stopping:
            todo.clear()
            if crew and not told:
                crew.stop(run)
            told = True
        while todo and len(busy) < by.room():
            name = todo.popleft()
            busy.add(name)
            if crew is None:
                watch.print(f"item {count - len(todo)} of {count}: {items[name]}")
            by.start(ended, name, work, name, items[name], folder, run)
        try:
            name, future, failure = ended.get(timeout=0.5)
        except Empty:
            if crew:
                crew.come_back()
            continue
        if crew and crew.futures.pop(name, None) is not future:
            continue
        busy.remove(name)
        state = failure.kind if failure else "done"
        watch.log("item", name=name, state=state, **(asdict(failure) if failure else {}))
        if failure is None:
            done += 1
            (folder / "failed" / f"{name}.json").unlink(missing_ok=True)
            after(name, "done")
        elif state == "bad input":
            raise ConfigError(failure.error)
        elif state == "stopped":
            why = failure.error
            after(name, "stopped")
        elif state == "lost":
            todo.appendleft(name)
        else:
            tries[name] += 1
            if tries[name] < TRIES:
                todo.append(name)
            else:
                failures[name] = failure
                Results(folder / "failed").write(name, {"item": str(items[name]), **asdict(failure)})
                after(name, "failed")
        if crew and (time.monotonic() > said + REPORT_SECONDS or not (todo or busy)):
            passed, said = time.monotonic() - start, time.monotonic()
            left = passed / max(1, done) * (len(todo) + len(busy))
            failed = f", {len(failures)} failed" if failures else ""
            watch.print(f"{done} of {count} done{failed}: {passed:.1f} s, {left:.1f} s left, {crew.said()}")
    if crew is None:
        _kept.clear()
    for name, failure in failures.items():
        watch.print(f"failed {TRIES} times  {items[name]}  {failure.error}")
    if failures:
        first = next(iter(failures))
        raise RunError(
            f"{len(failures)} of {len(items)} failed; first {items[first]}: {failures[first].error}; "
            f"tracebacks are in {folder / 'failed'}, and the same command tries again"
        )
    if done < count:
        made = f"{len(items) - count + done} of {len(items)} are done and will not be made again"
        raise StoppedError(f"{why}; {made}: run the same command to go on")


# --- Clusters
def _at_start(dask_worker: Any) -> None:
    """Prepare a worker: Ctrl-C is for the process that asked, and it says how much GPU memory it takes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dask_worker.metrics["gpu_bytes"] = lambda worker: memory_bytes().get("gpu_bytes", 0)


@contextmanager
def crew_of(args: argparse.Namespace, device: str = "auto", gpus: int = 1) -> Iterator[Crew | None]:
    """Start the workers that flags ask for, or join them; None where items are made here, one by one.

    Raises ConfigError for flags that do not fit, GPUs that are not there, and where Dask is not.
    """
    given = [name for name in ("workers", "scheduler", "slurm") if getattr(args, name)]
    if this_rank().count > 1:
        raise ConfigError("torchrun is for one rollout; a list of items is shared by --workers N")
    if not given:
        yield None
        return
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} exclude each other")
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device} was asked for, and every worker has its own GPU; leave it out")
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "error")  # of this process and of its workers
    try:
        import dask
    except ImportError:
        raise ConfigError(f'--{given[0]} needs Dask; run: pip install ".[cluster]"') from None
    dask.config.set({"distributed.scheduler.allowed-failures": TRIES})
    dask.config.set({"distributed.worker.daemon": False})  # items may start processes
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 h"})  # a busy machine starts them slowly
    from distributed import Client

    with ExitStack() as stack:
        target = args.scheduler
        if args.workers:
            target = stack.enter_context(_on_this_machine(args.workers, device, gpus))
        elif args.slurm:
            target = stack.enter_context(_by_slurm(args.slurm, gpus))
        try:
            crew = Crew(lambda: Client(target, set_as_default=False), gpus)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--{given[0]}: no scheduler answers: {one_line(error)}") from None
        stack.callback(lambda: crew.client.close())
        crew.own = target if args.workers else None
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
    # nobody else may connect: who does runs code
    own = {
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:8787",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another port is taken where that one is in use
        return SpecCluster(workers=workers, scheduler={"cls": Scheduler, "options": own})


def _by_slurm(path: str, gpus: int) -> Any:
    """Submit jobs as a YAML of dask-jobqueue's SLURMCluster says, `jobs` of them, each with one worker."""
    if not shutil.which("sbatch"):
        raise ConfigError("--slurm needs SLURM's sbatch, which is not here")
    from dask_jobqueue.slurm import SLURMCluster

    settings: dict[str, Any] = {str(key): value for key, value in read_yaml(path).items()}
    jobs, own = settings.pop("jobs", 1), settings.pop("job_script_prologue", [])
    env = {"PYTHONPATH": os.getcwd(), "DASK_DISTRIBUTED__WORKER__DAEMON": "False"}
    env |= {f"DASK_DISTRIBUTED__WORKER__MEMORY__{name}": "False" for name in ("PAUSE", "SPILL", "TERMINATE")}
    settings["job_script_prologue"] = [*(f"export {name}={value}" for name, value in env.items()), *own]
    more = ["--resources", f"GPU={gpus}", *settings.pop("worker_extra_args", [])]
    try:
        options: dict[str, Any] = {"cores": 1, "processes": 1, "worker_extra_args": more} | settings
        cluster = SLURMCluster(**options)
        cluster.adapt(minimum_jobs=jobs, maximum_jobs=jobs)  # a job that ends is followed by another
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--slurm {path}: {one_line(error)}") from None
    return cluster

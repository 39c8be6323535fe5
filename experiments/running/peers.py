"""One rollout by several GPUs, again and again: a worker and the processes that it starts keep the model."""

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

from experiments.caches.files import RunError
from experiments.extraction.cache_builders import Run
from experiments.extraction.devices import choose_device
from experiments.extraction.rollout import RunObserver
from experiments.running.ranks import exit_with_parent, on_own_device, this_rank
from experiments.session import Session, load
from wan.capture import CaptureRequest
from wan.config import RunConfig
from wan.wings import parallel


class Group:
    """This process and the others of a rollout, a GPU each; it ends when one of them does."""

    def __init__(self, config: RunConfig, requests: Sequence[CaptureRequest], observer: RunObserver):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        own["WORLD_SIZE"] = str(config.gpus)
        spawn, self.requests, self.others, ends = get_context("spawn"), requests, list[Connection](), []
        for n in range(1, config.gpus):
            mine, theirs = spawn.Pipe()
            other = spawn.Process(target=follow, args=(theirs, own, n, config, requests), daemon=True)
            other.start()
            self.others.append(mine)
            ends.append(other.sentinel)
        # this process may wait for the other one in NCCL; the engine gives the item to another worker
        threading.Thread(target=lambda: wait(ends) and os._exit(1), daemon=True).start()
        self.session = _load(own, 0, config, requests, observer)

    def extract(self, config: RunConfig, observer: RunObserver) -> Run:
        """Roll out a config of the same model, all together."""
        for other in self.others:
            other.send(config)
        return self.session.generate(
            config=on_own_device(config, this_rank()), requests=self.requests, observer=observer
        )


def _load(
    own: Mapping[str, str],
    number: int,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    observer: RunObserver,
) -> Session:
    os.environ.update(own, RANK=str(number), LOCAL_RANK=str(number))
    config = on_own_device(config, this_rank())
    if parallel.joined() is None:
        parallel.join(choose_device(config.device))
    return load(config).prepare(requests, observer=observer, replays=True)


def follow(
    pipe: Connection,
    own: Mapping[str, str],
    number: int,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
) -> None:
    """Roll out what the first process sends, until it ends."""
    exit_with_parent(os.getppid())
    session = _load(own, number, config, requests, RunObserver())
    with suppress(EOFError):
        while True:
            config = on_own_device(pipe.recv(), this_rank())
            with suppress(RunError):  # the first process says it
                session.generate(config=config, requests=requests)

"""One rollout by several GPUs, again and again: a worker and the processes that it starts keep the model."""

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from experiments.caches.files import RunError
from experiments.extraction import causal
from experiments.extraction.cache_builders import Extraction
from experiments.extraction.devices import choose_device
from experiments.extraction.rollout import RunObserver
from experiments.running.ranks import exit_with_parent, on_own_device, this_rank
from wan import parallel
from wan.capture import CaptureRequest
from wan.config import RunConfig

COMMAND = [sys.executable, "-m", "experiments.running.peers"]


class Group:
    """This process and the others of a rollout, a GPU each; it ends when one of them does."""

    def __init__(self, config: RunConfig, requests: Sequence[CaptureRequest], observer: RunObserver):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        own["WORLD_SIZE"] = str(config.gpus)
        self.peers = [
            subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                env={**os.environ, **own, "RANK": str(n), "LOCAL_RANK": str(n)},
            )
            for n in range(1, config.gpus)
        ]
        os.environ.update(own, RANK="0", LOCAL_RANK="0")
        threading.Thread(target=self._end_together, daemon=True).start()
        self.requests = requests
        self._send((config, requests))
        self.loaded = _loaded(config, requests, observer)

    def extract(self, config: RunConfig, observer: RunObserver) -> Extraction:
        """Roll out a config of the same model, all together."""
        self._send(config)
        return causal.extract_next(self.loaded, config, self.requests, observer)

    def _send(self, what: object) -> None:
        for peer in self.peers:
            assert peer.stdin is not None
            pickle.dump(what, peer.stdin)
            peer.stdin.flush()

    def _end_together(self) -> None:
        while all(peer.poll() is None for peer in self.peers):
            time.sleep(0.5)
        os._exit(1)  # it may wait for the other one in NCCL; the engine gives the item to another worker


def _loaded(
    config: RunConfig, requests: Sequence[CaptureRequest], observer: RunObserver
) -> causal.LoadedModel:
    config = on_own_device(config, this_rank())
    if parallel.joined() is None:
        parallel.join(choose_device(config.device))
    return causal.prepare(config, requests, observer=observer, replays=True)


def follow() -> None:
    """Roll out what the first process sends, until it ends."""
    exit_with_parent(os.getppid())
    config, requests = pickle.load(sys.stdin.buffer)
    loaded = _loaded(config, requests, RunObserver())
    while True:
        try:
            config = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        with suppress(RunError):  # the first process says it
            causal.extract_next(loaded, config, requests, RunObserver())


if __name__ == "__main__":
    follow()

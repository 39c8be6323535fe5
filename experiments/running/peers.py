"""Run one rollout on several GPUs of a host, with a process for each; the first one prints and writes.

Processes of a script are started by torchrun and end with the rollout (join_processes). A worker of a sweep
starts its own, which keep the model (Group).
"""

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from experiments.caches.files import RunError
from experiments.extraction.cache_builders import Run
from experiments.extraction.provenance import choose_device
from experiments.extraction.rollout import Progress
from experiments.running.cli import EXPLAINED
from experiments.running.ranks import exit_with_parent, this_rank
from experiments.session import Session, load
from wan.capture import CaptureRequest
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.wings import parallel
from wan.wings.parallel import leave as leave


# --- A script: torchrun's agent starts a process for each GPU
def join_processes(args: argparse.Namespace, config: RunConfig) -> RunConfig:
    """Join the processes of a rollout, and return the config of this one.

    If --gpus asks for more processes than there are, start them and do not return. Raises ConfigError for
    missing GPUs, and for a number of GPUs that does not divide the rollout.
    """
    rank = this_rank()
    if rank.count > 1:  # torchrun's own number
        if config.gpus not in (1, rank.count):
            raise ConfigError(f"--gpus {config.gpus} under {rank.count} ranks of torchrun; leave it out")
        config = replace(config, gpus=rank.count)
    there = torch.cuda.device_count()
    # The launcher checks; torchrun's processes may see one GPU each
    if config.device != "cpu" and there < config.gpus and not os.environ.get("LOCAL_RANK"):
        raise ConfigError(f"--gpus {config.gpus}, and the number of GPUs here is {there}; try --device cpu")
    sizes = read_model_config(config.ckpt_dir)
    per_frame = sizes.tokens_per_frame(config.height, config.width)
    tokens = [frames * per_frame for frames in config.block_sizes]
    parallel.check_size(config.gpus, config.model, sizes.num_heads, tokens)
    if rank.count == 1:
        _start_processes(args, config.gpus)
    config = parallel.on_own_device(config)
    if not rank.is_first:
        args.quiet, args.log_file = True, None
    parallel.join(choose_device(config.device))
    return config


def _start_processes(args: argparse.Namespace, count: int) -> NoReturn:
    """Run this command in count processes; exit like the first one that fails."""
    logging.disable(logging.CRITICAL)  # the agent's own report of what the processes printed already
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # of a process whose partner is gone
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Never restarted: the same input would fail again; a second is long where a rollout takes a few
    launch = LaunchConfig(1, 1, count, run_id=uuid.uuid4().hex, max_restarts=0, monitor_interval=0.1)
    launch.rdzv_backend, launch.rdzv_endpoint = "c10d", "localhost:0"
    codes = {0: 0}
    try:
        elastic_launch(launch, sys.executable)(sys.argv[0], *args.words)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except (SignalException, KeyboardInterrupt):
        codes = {0: 130}
    # 1. Processes that ended themselves have said why
    if said := [code for code in codes.values() if code in (0, *EXPLAINED)]:
        raise SystemExit(said[0])
    # 2. One that was killed says nothing itself; the agent ended the others by SIGTERM
    message = f"one of {count} processes was lost, and the others with it"
    for rank, code in codes.items():
        if code < 0 and -code != signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = "; there may have been too little host memory" if name == "SIGKILL" else ""
            message = f"process {rank} of {count} was ended by {name}, and the others with it{hint}"
            break
    raise RunError(message)


# --- A worker: it makes many rollouts with the processes that it started
class Group:
    """The processes of a rollout, this one included, with a GPU each; all end when one does."""

    def __init__(self, config: RunConfig, requests: Sequence[CaptureRequest], observer: Progress):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        own["WORLD_SIZE"] = str(config.gpus)
        spawn, self.requests, self.others, ends = get_context("spawn"), requests, list[Connection](), []
        # Spawned: CUDA does not survive a fork
        for n in range(1, config.gpus):
            mine, theirs = spawn.Pipe()
            other = spawn.Process(target=follow, args=(theirs, own, n, config, requests), daemon=True)
            other.start()
            self.others.append(mine)
            ends.append(other.sentinel)
        # this process may wait for the other one in NCCL; the engine gives the item to another worker
        threading.Thread(target=lambda: wait(ends) and os._exit(1), daemon=True).start()
        self.session = _load(own, 0, config, requests, observer)

    def extract(self, config: RunConfig, observer: Progress) -> Run:
        """Roll out a config of the same model in all processes."""
        for other in self.others:
            other.send(config)
        return self.session.generate(
            config=parallel.on_own_device(config), requests=self.requests, observer=observer
        )


def _load(
    own: Mapping[str, str],
    number: int,
    config: RunConfig,
    requests: Sequence[CaptureRequest],
    observer: Progress,
) -> Session:
    os.environ.update(own, RANK=str(number), LOCAL_RANK=str(number))
    config = parallel.on_own_device(config)
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
    """Roll out every config that the first process sends, until that process ends."""
    exit_with_parent(os.getppid())
    session = _load(own, number, config, requests, Progress(quiet=True))
    with suppress(EOFError):
        while True:
            config = parallel.on_own_device(pipe.recv())
            with suppress(RunError):  # the first process says it
                session.generate(config=config, requests=requests)

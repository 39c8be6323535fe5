"""Run one rollout on several GPUs of a host: --gpus N starts torchrun, a process for each GPU.

All processes roll out together; the first one prints and writes.
"""

import argparse
import logging
import os
import signal
import sys
import uuid
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from experiments.caches.files import RunError
from experiments.provenance import choose_device
from experiments.running.cli import EXPLAINED
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.wings import parallel
from wan.wings.parallel import leave as leave


@dataclass(frozen=True)
class Rank:
    """The number of this process among `count` that torchrun started together."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0


def this_rank() -> Rank:
    """Return the rank that torchrun gave this process, or that of a single process."""
    if not os.environ.get("RANK"):
        return Rank()
    return Rank(int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE") or 1))


def join_processes(args: argparse.Namespace, config: RunConfig) -> RunConfig:
    """Join the processes of a rollout, and return the config of this one.

    If --gpus asks for more processes than there are, start them and do not return. Raises ConfigError for
    missing GPUs, and for a number of GPUs that does not divide the rollout.
    """
    # 1. torchrun's own number of processes is the number of GPUs
    rank = this_rank()
    if rank.count > 1:
        if config.gpus not in (1, rank.count):
            raise ConfigError(f"--gpus {config.gpus} under {rank.count} ranks of torchrun; leave it out")
        config = replace(config, gpus=rank.count)

    # 2. The launcher checks: processes of torchrun may see one GPU each
    available = torch.cuda.device_count()
    if config.device != "cpu" and available < config.gpus and not os.environ.get("LOCAL_RANK"):
        raise ConfigError(
            f"--gpus {config.gpus}, and the number of GPUs here is {available}; try --device cpu"
        )
    sizes = read_model_config(config.ckpt_dir)
    per_frame = sizes.tokens_per_frame(config.height, config.width)
    tokens = [frames * per_frame for frames in config.block_sizes]
    parallel.check_size(config.gpus, config.model, sizes.num_heads, tokens)

    # 3. Start the processes, or join them
    if rank.count == 1:
        start_processes(args, config.gpus)
    if not rank.is_first:
        args.quiet, args.log_file = True, None
    config = parallel.on_own_device(config)
    parallel.join(choose_device(config.device))
    return config


def start_processes(args: argparse.Namespace, count: int) -> NoReturn:
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
    # 1. Processes that ended themselves have printed the reason
    for code in codes.values():
        if code in (0, *EXPLAINED):
            raise SystemExit(code)
    # 2. One that was killed prints nothing; the agent ended the others by SIGTERM
    message = f"one of {count} processes was lost, and the others with it"
    for rank, code in codes.items():
        if code < 0 and -code != signal.SIGTERM:
            name = signal.Signals(-code).name
            message = f"process {rank} of {count} was ended by {name}, and the others with it"
            if name == "SIGKILL":
                message += "; there may have been too little host memory"
            break
    raise RunError(message)


def end_at_once() -> NoReturn:
    """Exit one of several processes without Python's shutdown, in which gloo's threads may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

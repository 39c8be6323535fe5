"""One rollout by several GPUs: torchrun's own agent starts a process for each, and one of them speaks.

--gpus P starts P processes of the same command; under torchrun they are there already. When one fails, the
agent ends the others, and what went wrong is said once.
"""

import argparse
import logging
import os
import signal
import sys
import uuid
from dataclasses import replace
from typing import NoReturn

from experiments.extraction import devices
from experiments.running.cli import EXPLAINED, fail
from experiments.running.ranks import Rank, on_own_device, this_rank
from wan import process_group
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.parallel import check_size


def together(args: argparse.Namespace, config: RunConfig) -> tuple[RunConfig, Rank]:
    """The config and rank of one rollout by all processes that were started; one process needs none of this.

    Starts them where --gpus asks for more than there are, and then does not return. Raises ConfigError for
    a number of GPUs that are not there, or over which the rollout does not split.
    """
    rank = this_rank()
    if rank.count == config.gpus == 1:
        return config, rank
    if rank.count > 1 and config.gpus not in (1, rank.count):
        raise ConfigError(
            f"--gpus {config.gpus} under {rank.count} ranks: start as many, or leave --gpus out"
        )
    config = replace(config, gpus=max(config.gpus, rank.count))
    _check(config)
    if rank.count == 1:
        _start(args, config.gpus)
    config = on_own_device(config, rank)
    if not rank.is_first:
        args.quiet, args.log_file = True, None
    process_group.join(devices.choose_device(config.device))
    return config, rank


def _check(config: RunConfig) -> None:
    """Raise ConfigError where GPUs, heads or tokens are too few for config.gpus."""
    if config.device != "cpu":
        import torch

        count = torch.cuda.device_count()
        if count < config.gpus and not os.environ.get("LOCAL_RANK"):  # else each rank looks for its own
            there = f"{count} GPU{'s are' if count != 1 else ' is'} here"
            raise ConfigError(
                f"--gpus {config.gpus}, and {there}; --device cpu takes as many processes instead"
            )
    sizes = read_model_config(config.ckpt_dir)
    per_frame = sizes.tokens_per_frame(config.height, config.width)
    check_size(config.gpus, config.model, sizes.num_heads, [n * per_frame for n in config.block_sizes])


def _start(args: argparse.Namespace, count: int) -> NoReturn:
    """Run this command in count processes, and end as they do."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the agent's own report of what the processes said already
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # of a process whose partner is gone
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(launch, sys.executable)(sys.argv[0], *args.words)
    except ChildFailedError as error:
        _explain({rank: failure.exitcode for rank, failure in error.failures.items()}, count)
    except (SignalException, KeyboardInterrupt):
        raise SystemExit(130) from None
    raise SystemExit(0)


def _explain(codes: dict[int, int], count: int) -> NoReturn:
    """End as the first process that failed; say it where that process could not."""
    if said := [code for code in codes.values() if code in EXPLAINED]:
        raise SystemExit(said[0])
    for rank, code in codes.items():
        if code < 0 and -code != signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = "; there may have been too little host memory" if name == "SIGKILL" else ""
            fail(f"process {rank} of {count} was ended by {name}, and the others with it{hint}", 1)
    fail(f"one of {count} processes was lost, and the others with it", 1)

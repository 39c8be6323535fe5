"""Where a loaded model runs and how its layers are launched: on several GPUs, from graphs, aside for now."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from experiments.extraction.prompt_embeds import encoding_device
from wan import process_group
from wan.config import RunConfig
from wan.cuda_graphs import apply_cuda_graphs, forget_cuda_graphs
from wan.errors import ConfigError
from wan.modules.causal_model import CausalWanModel
from wan.modules.offload import StreamedBlocks
from wan.parallel import apply_head_parallel
from wan.pipeline import CausalInferencePipeline

FORWARDS = 35  # that one GPU makes without graphs, those of 21 frames: a single short video records none


def share(model: CausalWanModel, gpus: int) -> None:
    """Let the processes that were started for it make each call of a model together, where gpus says so."""
    if gpus == 1:
        return
    group = process_group.joined()
    if group is None or group.size() != gpus:
        raise ConfigError(
            f"gpus is {gpus}, which the scripts run_extraction*.py know; elsewhere start {gpus} processes by "
            "torchrun, and let each call wan.process_group.join()"
        )
    apply_head_parallel(model, group)
    replay_layers(model, after=1)


def replay_layers(model: CausalWanModel, after: int) -> None:
    """Replay the layers of a model on a GPU from graphs, when they were called so often without.

    Streamed layers are not replayed: they wait for weights, not for Python.
    """
    if model.device.type == "cuda" and not isinstance(model.blocks, StreamedBlocks):
        apply_cuda_graphs(model, after)


@contextmanager
def model_aside(
    loaded: Sequence[CausalInferencePipeline], device: torch.device, config: RunConfig
) -> Iterator[None]:
    """Move a model that is loaded to the host while the encoder takes its place on the GPU."""
    if not loaded or device.type == "cpu" or encoding_device(config, device).type == "cpu":
        yield
        return
    model = loaded[0].model
    forget_cuda_graphs(model)  # they have the weights' addresses, and memory that the encoder may need
    model.to("cpu")
    try:
        yield
    finally:
        model.to(device)

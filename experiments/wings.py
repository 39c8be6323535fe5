"""Apply what a config asks for of wan/wings/: streamed layers, several GPUs, graphs, a window of blocks.

experiments/session.py asks for this where a config or a GPU does; a rollout on a CPU never imports it.
"""

from wan.config import RunConfig
from wan.errors import ConfigError
from wan.model import CausalWanModel
from wan.wings import parallel
from wan.wings.graphs import apply_cuda_graphs as apply_cuda_graphs
from wan.wings.offload import apply_offload as apply_offload
from wan.wings.rolling_forcing import RollingForcingPipeline as RollingForcingPipeline


def share_heads(model: CausalWanModel, config: RunConfig) -> None:
    """Share a model's heads among the processes of config.gpus GPUs. ConfigError: they are not joined."""
    group = parallel.joined()
    if group is None or group.size() != config.gpus:
        raise ConfigError(
            f"gpus is {config.gpus}, which the scripts run_extraction*.py know; elsewhere start "
            f"{config.gpus} processes by torchrun, and let each call wan.wings.parallel.join()"
        )
    parallel.apply_head_parallel(model, group)

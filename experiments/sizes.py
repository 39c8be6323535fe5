"""How many bytes a run's caches will take, known before the rollout: from what is asked for and the sizes of the model."""

from collections.abc import Sequence

from experiments.files import MARGIN
from wan import checkpoint
from wan.config import ConfigError, ModelConfig, RunConfig
from wan.modules.capture import CaptureRequest
from wan.modules.rope import RotaryTable


def estimate_bytes(
    config: RunConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> int:
    """Upper bound of what is kept in a cache; exact for frames and tokens. num_passes is the rollout's where not given.

    Raises ConfigError for a request that does not fit the model or the rollout.
    """
    model = checkpoint.read_model_config(config.ckpt_dir)
    check_requests(config, model, requests, num_passes)
    return MARGIN + captured_bytes(config, model, requests, num_passes)


def captured_bytes(
    config: RunConfig, model: ModelConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> int:
    """What requests that fit keep of a rollout, in memory and in a cache alike."""
    S, H, F = model.tokens_per_frame(config.height, config.width), model.num_heads, config.num_frames
    blocks = config.block_sizes
    window = config.local_attn_size if config.local_attn_size > 0 else F
    passes, total = num_passes or config.num_passes, 0
    for request in requests:
        calls = len(list(request.layers or range(model.num_layers))) * len(
            list(request.steps or range(passes))
        )
        for block in range(len(blocks)) if request.blocks is None else request.blocks:
            queries, seen = blocks[block], min(sum(blocks[: block + 1]), window)
            for kind in request.kinds:
                keys = seen * S if kind == "self" else model.text_len
                if request.granularity == "token":
                    values = queries * S * keys * request.token_dtype.itemsize
                elif request.granularity == "key":
                    values = F * S * 4
                elif kind == "cross":
                    values = queries * keys * 4
                else:
                    bands = len(RotaryTable(model.head_dim).bands) if request.rope_bands else 0
                    values = queries * F * 4 * (1 + request.mass + bands)
                total += calls * H * values
    return total


def check_requests(
    config: RunConfig,
    model_config: ModelConfig,
    requests: Sequence[CaptureRequest],
    num_passes: int | None = None,
) -> None:
    """Raise ConfigError for a layer, block or pass that the model or the rollout does not have."""
    for request in requests:
        try:
            request.check(model_config.num_layers, len(config.block_sizes), num_passes or config.num_passes)
        except ValueError as error:
            raise ConfigError(f"{config.model}: {error}") from None

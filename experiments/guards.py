"""Numbers are looked at before they are kept: finite, complete, masses that sum to 1, a model that is what it is called."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor, nn

from wan.config import MODELS, ConfigError, ModelConfig, RunConfig
from wan.modules.capture import CaptureRequest

MASS_TOLERANCE = 1e-3      # float32 rows are good to 1e-5; a lost or doubled key frame is at least 1e-2
FIELD = {"token": "attn_weights", "key": "key_curve", "frame": "frame_logits"}     # what a granularity keeps at least


class RunError(RuntimeError):
    """A run that started but cannot give a result, such as NaN in the latents."""


class StoppedError(Exception):
    """A run that was asked to stop, and has saved what it could; the message says how to go on."""


@contextmanager
def watched_flow(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that gets, for every forward of the model, whether its result was finite: a bool on the device.

    Nothing waits for the device here; check_block reads them, once a block.
    """
    flags: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, inputs, flow: flags.append(flow.isfinite().all()))
    try:
        yield flags
    finally:
        hook.remove()


def check_block(block: int, frames: range, latents: Tensor, flags: list[Tensor], timesteps: Sequence[float],
                records: Sequence[dict]) -> None:
    """Raise RunError where a block's passes or latents are not finite, naming pass and layer as far as they are known.

    flags are those of watched_flow for this block, and are taken out of the list.
    """
    finite = torch.stack([*flags, latents.isfinite().all()]).tolist()             # the block's one wait for the device
    flags.clear()
    if all(finite):
        return
    step = finite.index(False)
    where = f"block {block} (frames {frames.start}-{frames[-1]})"
    where += f", step {step} (t = {timesteps[step]:g}): the model's flow is" if step < len(timesteps) else ": its latents are"
    seen = next((f"; captured first in {_call(r)}: {name}" for r in records for name in _tensors(r)
                 if not is_finite(r[name])), "")
    raise RunError(f"{where} not finite{seen}; try --device cpu or another dtype in the config")


def check_records(records: Sequence[dict], requests: Sequence[CaptureRequest], num_layers: int, num_blocks: int,
                  num_passes: int) -> None:
    """Raise RunError for a call that was asked for but never reported, and for captured numbers that cannot be right.

    num_blocks counts the blocks that were finished.
    """
    for request in requests:
        _check_complete(records, request, num_layers, num_blocks, num_passes)
    for record in records:
        for name in _tensors(record):
            if not is_finite(record[name]):
                raise RunError(f"{_call(record)}: {name} is not finite"
                               + (" in float16; --capture probabilities keeps float32" if record[name].dtype == torch.float16
                                  else "; try --device cpu or another dtype in the config"))
            is_mass = name.endswith("_mass") or (name == "attn_weights" and not record["is_logits"])
            if is_mass and (off := (record[name].sum(-1, dtype=torch.float32) - 1).abs().max().item()) > MASS_TOLERANCE:
                raise RunError(f"{_call(record)}: rows of {name} sum to 1 ± {off:.2g}, not to 1")


def _check_complete(records: Sequence[dict], request: CaptureRequest, num_layers: int, num_blocks: int,
                    num_passes: int) -> None:
    blocks = [b for b in (range(num_blocks) if request.blocks is None else request.blocks) if b < num_blocks]
    layers = range(num_layers) if request.layers is None else request.layers
    steps = range(num_passes) if request.steps is None else request.steps
    for kind in request.kinds:
        name = "cross_mass" if (kind, request.granularity) == ("cross", "frame") else FIELD[request.granularity]
        names = {name} | ({"frame_mass"} if name == "frame_logits" and request.mass else set())
        fired = {(r["layer"], r["block"], r["step"]) for r in records if r["kind"] == kind and names <= r.keys()}
        wanted = list(product(layers, blocks, steps))
        missing = [call for call in wanted if call not in fired]
        if missing:
            layer, block, step = missing[0]
            raise RunError(f"layer {layer}, block {block}, step {step}: its {kind}-attention never reported {name}; "
                           f"{len(missing)} of {len(wanted)} calls are missing")


def check_model(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError where a directory holds another model than the one the config, and so the cache, names."""
    named = MODELS.get(config.model)
    if named and (different := [f"{name} {getattr(model_config, name)} instead of {getattr(named, name)}"
                                for name in ("num_layers", "num_heads", "dim", "ffn_dim")
                                if getattr(model_config, name) != getattr(named, name)]):
        raise ConfigError(f"{config.ckpt_dir} is not {config.model}: {', '.join(different)}; "
                          "name a config with its settings by --config_path")


def is_finite(x: Tensor) -> bool:
    """Whether all values are finite; token matrices are asked head by head, without a copy."""
    return all(bool(end.isfinite()) for part in (x.flatten(0, 1) if x.ndim > 2 else [x]) for end in part.aminmax())


def _tensors(record: dict) -> list[str]:
    return [name for name, value in record.items() if isinstance(value, Tensor)]


def _call(record: dict) -> str:
    branch = "" if record["branch"] in (None, "cond") else f", {record['branch']} branch"
    return f"layer {record['layer']}, block {record['block']}, step {record['step']} (t = {record['timestep']:g}){branch}"

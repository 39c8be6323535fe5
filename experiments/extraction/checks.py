"""Numbers are looked at before they are kept: finite, complete, masses that sum to 1, a model that is what it is called."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor, nn

from experiments.caches.errors import RunError
from experiments.caches.value_checks import MASS_TOLERANCE
from wan.config import MODELS, ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.capture import CaptureRequest, Pass

FIELD = {
    "token": "attn_weights",
    "key": "key_curve",
    "frame": "frame_logits",
}  # what a granularity keeps at least

REMEDY = "try --device cpu or another dtype in the config"


@contextmanager
def record_layer_ranges(model: nn.Module) -> Iterator[list[tuple]]:
    """Yield a list that gets, for every layer and the head in every forward: pass, name, module, least and largest value.

    The values stay on the device: nothing waits for it until check_outputs reads them, once a block.
    """
    outputs: list[tuple] = []

    def looking_at(name: str):
        return lambda module, inputs, output: outputs.append(
            (ATTENTION_WEIGHT_CAPTURE.now, name, module, *output.aminmax())
        )

    parts = [*((f"layer {layer}", block) for layer, block in enumerate(model.blocks)), ("head", model.head)]
    hooks = [part.register_forward_hook(looking_at(name)) for name, part in parts]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def check_outputs(outputs: list[tuple], latents: Tensor) -> None:
    """Raise RunError where a layer's output or the latents are not finite, naming the first layer, its block and pass.

    outputs are those of record_layer_ranges since the last check, and are taken out of the list.
    """
    edges = torch.stack(
        [edge.float() for *_, low, high in outputs for edge in (low, high)] + [*latents.float().aminmax()]
    )
    finite = edges.isfinite().view(-1, 2).all(1).tolist()  # the block's one wait for the device
    seen = list(outputs)
    outputs.clear()
    if all(finite):
        return
    if all(finite[:-1]):
        raise RunError(f"{_pass(seen[-1][0])}: the latents are not finite; {REMEDY}")
    at, name, module, *_ = seen[finite.index(False)]
    spoilt = next(
        (weight for weight, values in module.named_parameters() if not values.isfinite().all()), None
    )
    raise RunError(
        f"{name}, {_pass(at)}: its output is not finite"
        + (f", nor is its weight {spoilt}: get the file of the weights again" if spoilt else f"; {REMEDY}")
    )


def check_values(records: Sequence[dict]) -> None:
    """Raise RunError for captured numbers that cannot be right, naming layer, block and pass."""
    for record in records:
        for name in _tensors(record):
            heads_differ = name.startswith("frame_") and _heads_differ(record[name])
            if not heads_differ and not is_finite(record[name]):
                in_half = record[name].dtype == torch.float16
                raise RunError(
                    f"{_call(record)}: {name} is not finite"
                    f"{' in float16; --capture probabilities keeps float32' if in_half else f'; {REMEDY}'}"
                )
            is_mass = name.endswith("_mass") or (name == "attn_weights" and not record["is_logits"])
            if name == "frame_mass" and ("slot_mass" in record or heads_differ):
                continue  # averages of frames are of no frame
            off = (record[name].sum(-1, dtype=torch.float32) - 1).abs().max().item() if is_mass else 0
            if off > MASS_TOLERANCE:
                raise RunError(f"{_call(record)}: rows of {name} sum to 1 ± {off:.2g}, not to 1")


def _heads_differ(values: Tensor) -> bool:
    """Whether some heads see frames that others do not: values [B, H, Fq, Fk] are NaN for all their queries."""
    missing = values.isnan()
    whole = missing.all(2) if values.ndim == 4 else missing
    return (
        bool(missing.any()) and values.ndim == 4 and torch.equal(missing.any(2), whole) and not missing.all()
    )


def check_complete(
    records: Sequence[dict],
    requests: Sequence[CaptureRequest],
    num_layers: int,
    num_blocks: int,
    num_passes: int,
) -> None:
    """Raise RunError for a call that was asked for but never reported. num_blocks and num_passes were finished."""
    for request in requests:
        _check_complete(records, request, num_layers, num_blocks, num_passes)


def _check_complete(
    records: Sequence[dict], request: CaptureRequest, num_layers: int, num_blocks: int, num_passes: int
) -> None:
    blocks = [b for b in (range(num_blocks) if request.blocks is None else request.blocks) if b < num_blocks]
    layers = range(num_layers) if request.layers is None else request.layers
    steps = [s for s in (range(num_passes) if request.steps is None else request.steps) if s < num_passes]
    for kind in request.kinds:
        name = (
            "cross_mass" if (kind, request.granularity) == ("cross", "frame") else FIELD[request.granularity]
        )
        names = {name} | ({"frame_mass"} if name == "frame_logits" and request.mass else set())
        fired = {
            (r["layer"], r["block"], r["step"]) for r in records if r["kind"] == kind and names <= r.keys()
        }
        wanted = list(product(layers, blocks, steps))
        missing = [call for call in wanted if call not in fired]
        if missing:
            layer, block, step = missing[0]
            raise RunError(
                f"layer {layer}, block {block}, step {step}: its {kind}-attention never reported {name}; "
                f"{len(missing)} of {len(wanted)} calls are missing"
            )


def check_model(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError where a directory holds another model than the one the config, and so the cache, names."""
    named = MODELS.get(config.model)
    if named and (
        different := [
            f"{name} {getattr(model_config, name)} instead of {getattr(named, name)}"
            for name in ("num_layers", "num_heads", "dim", "ffn_dim")
            if getattr(model_config, name) != getattr(named, name)
        ]
    ):
        raise ConfigError(
            f"{config.ckpt_dir} is not {config.model}: {', '.join(different)}; "
            "name a config with its settings by --config_path"
        )


def is_finite(x: Tensor) -> bool:
    """Whether all values are finite, without a copy of the size of x."""
    return all(bool(end.isfinite()) for end in x.aminmax())


def _tensors(record: dict) -> list[str]:
    return [name for name, value in record.items() if isinstance(value, Tensor)]


def _call(record: dict) -> str:
    return f"layer {record['layer']}, {_where(record['block'], record['step'], record['timestep'], record['branch'])}"


def _pass(at: Pass | None) -> str:
    return "an unannounced pass" if at is None else _where(at.block, at.step, at.timestep, at.branch)


def _where(block: int, step: int, timestep: float, branch: str | None) -> str:
    return f"block {block}, step {step} (t = {timestep:g})" + (
        ", unconditional branch" if branch == "uncond" else ""
    )

"""Numbers are checked before they are kept: finite, complete, masses that sum to 1, the model named."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from experiments.caches.files import RunError
from experiments.caches.formats import MASS_TOLERANCE
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CapturedCall, CaptureRequest, Pass
from wan.config import MODELS, ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.model import WanModel

REMEDY = "try --device cpu or another dtype in the config"


@dataclass(frozen=True)
class Forward:
    """One forward of the model: which pass it was, its least and largest value, and how to do it again."""

    at: Pass | None
    low: Tensor
    high: Tensor
    again: Callable[[], Tensor]


@contextmanager
def record_forwards(model: WanModel) -> Iterator[list[Forward]]:
    """Yield a list that gets every forward of the model while the context lasts.

    What is not finite in a layer is not finite in the flow, which alone is looked at. The values stay on the
    device: nothing waits for it until check_forwards reads them, once a block.
    """
    flow, forwards = model.flow, []

    def recorded(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = flow(x, *args, **kwargs)
        again = partial(flow, x.clone(), *args, **kwargs)  # the sampler writes over its latents
        forwards.append(Forward(ATTENTION_WEIGHT_CAPTURE.now, *out.aminmax(), again))
        return out

    model.__dict__["flow"] = recorded
    try:
        yield forwards
    finally:
        del model.__dict__["flow"]


def check_forwards(model: WanModel, forwards: list[Forward], latents: Tensor) -> None:
    """Raise RunError where a flow or the latents are not finite, naming the first layer, block and pass.

    forwards are those of record_forwards since the last check, and are taken out of the list. A pass that
    went wrong is done again to find the layer: until the next block begins, the KV cache is what it was for
    all of them.
    """
    seen = list(forwards)
    forwards.clear()
    edges = [edge.float() for forward in seen for edge in (forward.low, forward.high)]
    finite = torch.stack([*edges, *latents.float().aminmax()]).isfinite().view(-1, 2).all(1).tolist()
    if all(finite):  # read above: the block's one wait for the device
        return
    if all(finite[:-1]):
        raise RunError(f"{_pass(seen[-1].at)}: the latents are not finite; {REMEDY}")
    wrong = seen[finite.index(False)]
    parts = {f"layer {layer}": block for layer, block in enumerate(model.blocks)} | {"head": model.head}
    found: list[tuple[str, nn.Module]] = []

    def look(name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if not found and not output.isfinite().all():
            found.append((name, module))

    hooks = [part.register_forward_hook(partial(look, name)) for name, part in parts.items()]
    try:
        with nullcontext() if wrong.at is None else ATTENTION_WEIGHT_CAPTURE.during(wrong.at):
            wrong.again()
    finally:
        for hook in hooks:
            hook.remove()
    name, module = found[0] if found else ("the model", model)
    spoilt = next((w for w, values in module.named_parameters() if not values.isfinite().all()), None)
    raise RunError(
        f"{name}, {_pass(wrong.at)}: its output is not finite"
        + (f", nor is its weight {spoilt}: get the file of the weights again" if spoilt else f"; {REMEDY}")
    )


def check_values(calls: Sequence[CapturedCall]) -> None:
    """Raise RunError for captured numbers that cannot be right, naming layer, block and pass."""
    for call in calls:
        where = f"layer {call.site.layer}, {_pass(call.at)}"
        for name, values in call.values.items():
            if name in ("attended", "map_queries"):
                continue
            heads_differ = name.startswith("frame_") and _heads_differ(values)
            left_out = "attended" in call.values and not name.endswith("_mass")  # by an intervention: NaN
            wrong = values.isinf().any() if left_out else not all(x.isfinite() for x in values.aminmax())
            if wrong and not heads_differ:
                half = " in float16; --capture probabilities keeps float32"
                remedy = half if values.dtype == torch.float16 else f"; {REMEDY}"
                raise RunError(f"{where}: {name} is not finite{remedy}")
            if name == "frame_mass" and ("slot_mass" in call.values or heads_differ):
                continue  # averages of frames are of no frame
            if name.endswith("_mass") or name == "token_probabilities":
                # maps keep mass times the tokens of a frame
                unit = call.layout.tokens_per_slot if name == "map_mass" and call.layout else 1
                off = (values.sum(-1, dtype=torch.float32) / unit - 1).abs().max().item()
                if off > MASS_TOLERANCE:
                    raise RunError(f"{where}: rows of {name} sum to 1 ± {off:.2g}, not to 1")


def _heads_differ(values: Tensor) -> bool:
    """Whether heads see different frames: values [B, H, Fq, Fk] are NaN for all queries of some of them."""
    missing = values.isnan()
    if values.ndim != 4 or not missing.any() or missing.all():
        return False
    return torch.equal(missing.any(2), missing.all(2))


def check_complete(
    calls: Sequence[CapturedCall],
    requests: Sequence[CaptureRequest],
    num_layers: int,
    num_blocks: int,
    num_passes: int,
    has_pass: Callable[[int, int], bool] = lambda block, step: True,
) -> None:
    """Raise RunError for a call that was asked for, in what was done, but never reported.

    has_pass(block, step) says which passes a block has, where blocks differ.
    """
    for request in requests:
        layers = range(num_layers) if request.layers is None else request.layers
        blocks = range(num_blocks) if request.blocks is None else request.blocks
        steps = range(num_passes) if request.steps is None else request.steps
        wanted = [
            (layer, block, step)
            for layer, block, step in product(layers, blocks, steps)
            if block < num_blocks and step < num_passes and has_pass(block, step)
        ]
        for kind in request.kinds:
            names = _asked_for(request, kind)
            fired = {
                (call.site.layer, call["block"], call["step"])
                for call in calls
                if call.site.kind == kind and names <= call.values.keys()
            }
            if missing := [call for call in wanted if call not in fired]:
                layer, block, step = missing[0]
                raise RunError(
                    f"layer {layer}, block {block}, step {step}: its {kind}-attention never reported "
                    f"{min(names)}; {len(missing)} of {len(wanted)} calls are missing"
                )


def _asked_for(request: CaptureRequest, kind: str) -> set[str]:
    """Return the names of the values that a call must have."""
    if request.granularity == "token":
        return {"token_logits" if request.is_logits else "token_probabilities"}
    if request.granularity == "key":
        return {"key_curve"}
    if request.granularity == "map":
        return {"word_map"} if kind == "cross" else {"map_mass"}
    if kind == "cross":
        return {"cross_mass"}
    return {"frame_logits", "frame_mass"} if request.mass else {"frame_logits"}


def check_model(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError where a directory holds another model than the config, and so the cache, names."""
    named = MODELS.get(config.model)
    different = [
        f"{name} {getattr(model_config, name)} instead of {getattr(named, name)}"
        for name in ("num_layers", "num_heads", "dim", "ffn_dim")
        if named and getattr(model_config, name) != getattr(named, name)
    ]
    if different:
        raise ConfigError(
            f"{config.ckpt_dir} is not {config.model}: {', '.join(different)}; "
            "name a config with its settings by --config_path"
        )


def _pass(at: Pass | None) -> str:
    if at is None:
        return "an unannounced pass"
    branch = ", unconditional branch" if at.branch == "uncond" else ""
    return f"block {at.block}, step {at.step} (t = {at.timestep:g}){branch}"

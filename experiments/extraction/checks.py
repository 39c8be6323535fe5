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
    name, module = _first_not_finite(model, wrong)
    spoilt = next((w for w, values in module.named_parameters() if not values.isfinite().all()), None)
    raise RunError(
        f"{name}, {_pass(wrong.at)}: its output is not finite"
        + (f", nor is its weight {spoilt}: get the file of the weights again" if spoilt else f"; {REMEDY}")
    )


def _first_not_finite(model: WanModel, forward: Forward) -> tuple[str, nn.Module]:
    """The first layer, or the head, whose output is not finite when a forward is done again."""
    parts = {f"layer {layer}": block for layer, block in enumerate(model.blocks)} | {"head": model.head}
    found: list[tuple[str, nn.Module]] = []

    def look(name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if not found and not is_finite(output):
            found.append((name, module))

    hooks = [part.register_forward_hook(partial(look, name)) for name, part in parts.items()]
    announced = nullcontext() if forward.at is None else ATTENTION_WEIGHT_CAPTURE.during(forward.at)
    try:
        with announced:
            forward.again()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ("the model", model)


def check_values(calls: Sequence[CapturedCall]) -> None:
    """Raise RunError for captured numbers that cannot be right, naming layer, block and pass."""
    for call in calls:
        for name, values in call.values.items():
            if name in ("attended", "map_queries"):
                continue
            heads_differ = name.startswith("frame_") and _heads_differ(values)
            left_out = "attended" in call.values and not name.endswith("_mass")  # by an intervention: NaN
            if not heads_differ and not (no_infinity if left_out else is_finite)(values):
                in_half = values.dtype == torch.float16
                raise RunError(
                    f"{_call(call)}: {name} is not finite"
                    f"{' in float16; --capture probabilities keeps float32' if in_half else f'; {REMEDY}'}"
                )
            if name == "frame_mass" and ("slot_mass" in call.values or heads_differ):
                continue  # averages of frames are of no frame
            if name.endswith("_mass") or name == "token_probabilities":
                unit = _tokens_of_a_frame(call) if name == "map_mass" else 1
                off = (values.sum(-1, dtype=torch.float32) / unit - 1).abs().max().item()
                if off > MASS_TOLERANCE:
                    raise RunError(f"{_call(call)}: rows of {name} sum to 1 ± {off:.2g}, not to 1")


def _tokens_of_a_frame(call: CapturedCall) -> int:
    """S: maps keep mass times it."""
    assert call.layout is not None
    return call.layout.tokens_per_slot


def _heads_differ(values: Tensor) -> bool:
    """Whether heads see different frames: values [B, H, Fq, Fk] are NaN for all queries of some of them."""
    missing = values.isnan()
    whole = missing.all(2) if values.ndim == 4 else missing
    return (
        bool(missing.any()) and values.ndim == 4 and torch.equal(missing.any(2), whole) and not missing.all()
    )


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
        done = _DoneCalls(num_layers, num_blocks, num_passes, has_pass)
        _check_complete(calls, request, done)


@dataclass(frozen=True)
class _DoneCalls:
    """What a rollout has done: its layers, its finished blocks, and their passes."""

    num_layers: int
    num_blocks: int
    num_passes: int
    has_pass: Callable[[int, int], bool]

    def wanted(self, request: CaptureRequest) -> list[tuple[int, int, int]]:
        """Layer, block and step of every call that a request asks for."""
        layers = range(self.num_layers) if request.layers is None else request.layers
        blocks = range(self.num_blocks) if request.blocks is None else request.blocks
        steps = range(self.num_passes) if request.steps is None else request.steps
        return [
            (layer, block, step)
            for layer, block, step in product(layers, blocks, steps)
            if block < self.num_blocks and step < self.num_passes and self.has_pass(block, step)
        ]


def _check_complete(calls: Sequence[CapturedCall], request: CaptureRequest, done: _DoneCalls) -> None:
    for kind in request.kinds:
        names = _asked_for(request, kind)
        fired = {
            (call.site.layer, call["block"], call["step"])
            for call in calls
            if call.site.kind == kind and names <= call.values.keys()
        }
        wanted = done.wanted(request)
        missing = [call for call in wanted if call not in fired]
        if missing:
            layer, block, step = missing[0]
            raise RunError(
                f"layer {layer}, block {block}, step {step}: its {kind}-attention never reported "
                f"{min(names)}; {len(missing)} of {len(wanted)} calls are missing"
            )


def _asked_for(request: CaptureRequest, kind: str) -> set[str]:
    """The values that a call must have."""
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


def no_infinity(x: Tensor) -> bool:
    """Whether all values but NaN are finite."""
    return not bool(x.isinf().any())


def is_finite(x: Tensor) -> bool:
    """Whether all values are finite, without a copy of the size of x."""
    return all(bool(end.isfinite()) for end in x.aminmax())


def _call(call: CapturedCall) -> str:
    return f"layer {call.site.layer}, {_pass(call.at)}"


def _pass(at: Pass | None) -> str:
    if at is None:
        return "an unannounced pass"
    branch = ", unconditional branch" if at.branch == "uncond" else ""
    return f"block {at.block}, step {at.step} (t = {at.timestep:g}){branch}"

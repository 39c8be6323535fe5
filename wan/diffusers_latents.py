"""Latents at the border of diffusers' transformers: what goes in (x_t), what comes out (flow), and x0.

Sites x_t, flow and x0 have axes [B, F, C, h, w] for every family, of the video's frames alone. x0 is that of
a forward's own output, before guidance: x0 = a·x_t + b·output, by the prediction type of the scheduler.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wan import sites
from wan.diffusers_frames import VideoTokens, family_of
from wan.diffusers_passes import Parts, Told

TRAIN_TIMESTEPS = 1000  # of the families whose scheduler is not known


def frames_at(model: nn.Module) -> int:
    """Return the axis of frames in a transformer's latents, 1 or 2."""
    family = family_of(model)
    if family is None or family.frame_axis is None:
        return 2
    return family.frame_axis


def latents_by_frame(model: nn.Module, x: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Return latents as [B, F, C, h, w]; shape is that of a forward's, which packed ones [B, L, C] need."""
    if x.ndim == 5 and frames_at(model) == 2:
        return x.transpose(1, 2)
    if x.ndim != 3:
        return x
    frames, rows, columns = 1, x.shape[1], 1
    if len(shape) == 5 and x.shape[1] >= shape[1] * shape[3] * shape[4]:
        _, frames, _, rows, columns = shape
    x = x[:, : frames * rows * columns]
    return x.unflatten(1, (frames, rows, columns)).permute(0, 1, 4, 2, 3)


def unpacked(latents: Tensor, variables: Mapping[str, Any]) -> Tensor:
    """Return a sampler's packed latents [B, L, C] as [B, C, F, h, w], by its pipeline's variables.

    LTX's pipelines say sizes and how many tokens of conditions lie in front; others stay as they are.
    """
    sizes: list[Any] = [variables.get(f"latent_{name}") for name in ("num_frames", "height", "width")]
    if latents.ndim != 3 or None in sizes:
        return latents
    first = variables.get("extra_conditioning_num_latents") or 0
    tokens = latents[:, first : first + math.prod(sizes)]
    if tokens.shape[1] < math.prod(sizes):  # of patches
        return latents
    return tokens.unflatten(1, sizes).permute(0, 4, 1, 2, 3)


class Window:
    """The video's frames in a transformer's input or output, [B, F, C, h, w]; others come before them."""

    def __init__(self, model: nn.Module, x: Tensor, video: VideoTokens, arguments: Mapping[str, Any]):
        self.x, self.axis, self.first = x, frames_at(model), 0
        if x.ndim == 3:
            if x.shape[1] >= video.before + video.total:
                self.first = video.before
            grid = arguments.get("height") or 0, arguments.get("width") or 0
            if grid[0] * grid[1] != video.tokens:
                grid = video.tokens, 1
            tokens = x[:, self.first : self.first + video.total]
            self.frames = tokens.unflatten(1, (video.frames, *grid)).permute(0, 1, 4, 2, 3)
        else:
            by_frame = x.movedim(self.axis, 1)
            self.first = max(0, by_frame.shape[1] - video.frames)
            self.frames = by_frame[:, self.first :]

    def replaced(self, frames: Tensor) -> Tensor:
        """Return the input or output with other frames."""
        if self.x.ndim == 3:
            tokens = frames.permute(0, 1, 3, 4, 2).flatten(1, 3)
            behind = self.x[:, self.first + tokens.shape[1] :]
            return torch.cat([self.x[:, : self.first], tokens, behind], 1)
        before = self.x.movedim(self.axis, 1)[:, : self.first]
        return torch.cat([before, frames], 1).movedim(1, self.axis)


def run(
    model: nn.Module,
    told: Told,
    parts: Parts,
    video: VideoTokens,
    arguments: Mapping[str, Any],
    original: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Run a forward, and show what goes in, what comes out, and its x0; what watchers return replaces it.

    Who records gradients turns autograd on at x_t and off at x0; the output is then detached, as the pipeline
    that called has it.
    """
    if not sites.is_shown("x_t", "flow", "x0"):
        return original(*args, **kwargs)
    has_grad = torch.is_grad_enabled()
    try:
        # 1. What goes in.
        given = Window(model, arguments["hidden_states"], video, arguments)
        x_t = show("x_t", parts, given.frames)
        if x_t is not given.frames:
            args, kwargs = _with_input(args, kwargs, given.replaced(x_t))
        # 2. What comes out, and the clean latents that it points to.
        out = original(*args, **kwargs)
        if not sites.is_shown("flow", "x0"):
            return out
        made = Window(model, out[0], video, arguments)
        flow = show("flow", parts, made.frames)
        result = flow
        if sites.is_shown("x0"):
            noisy = x_t[:, :, : flow.shape[2]]  # channels of conditions stand behind those of the latents
            result = show_x0(model, told, parts, noisy, flow)
    finally:
        torch.set_grad_enabled(has_grad)
    # 3. The output goes on as the pipeline has it: without a graph where it had none.
    sample = out[0]
    if result is not made.frames:
        sample = made.replaced(result)
    if not has_grad:
        sample = sample.detach()
    return _with_output(out, sample)


def show_x0(model: nn.Module, told: Told, parts: Parts, noisy: Tensor, flow: Tensor) -> Tensor:
    """Show x0 [B, F, C, h, w] pass by pass -> the output, or the one that leads to what takes x0's place."""
    pieces, is_changed = [], False
    for at, items in parts:
        piece = flow[items]
        a, b = coefficients(model, told, at, piece)
        x0 = a * noisy[items] + b * piece
        with sites.during(at):
            new = sites.hook_point("x0", None, x0)
        if new.data_ptr() != x0.data_ptr():  # not the same numbers without their graph
            is_changed = True
            piece = torch.where(b == 0, piece, (new - a * noisy[items]) / b)  # 0: of frames that are given
        pieces.append(piece)
    if not is_changed:
        return flow
    return torch.cat(pieces)


def show(site: str, parts: Parts, x: Tensor) -> Tensor:
    """Show latents [B, F, C, h, w] to watchers, pass by pass -> x, or what takes its place."""
    pieces, is_changed = [], False
    for at, items in parts:
        piece = x[items]
        with sites.during(at):
            new = sites.hook_point(site, None, piece)
        is_changed = is_changed or new is not piece
        pieces.append(new)
    if not is_changed:
        return x
    return torch.cat(pieces)


def coefficients(model: nn.Module, told: Told, at: sites.Pass, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and b of x0 = a·x_t + b·output, [1, F or 1, 1, 1, 1], by the scheduler's prediction type."""
    scheduler: Any = getattr(told.pipeline, "scheduler", None)
    config = getattr(scheduler, "config", {})
    one = x.new_ones(1, 1, 1, 1, 1)
    # 1. Noise levels of frames, or of a model whose time is its noise level.
    is_level = type(model).__name__.startswith("Cosmos") and not hasattr(scheduler, "precondition_outputs")
    if at.levels or is_level:
        times = [level for _, level in at.levels] or [at.timestep]
        sigma = x.new_tensor(times).view(1, -1, 1, 1, 1)
        if sigma.max() > 1:
            sigma = sigma / config.get("num_train_timesteps", TRAIN_TIMESTEPS)
        return one, -sigma
    # 2. Schedulers of cumulative products, of epsilon or v.
    kind = config.get("prediction_type", "flow_prediction")
    products = getattr(scheduler, "alphas_cumprod", None)
    sigmas = getattr(scheduler, "sigmas", None)
    is_flow = kind == "flow_prediction" or type(scheduler).__name__.startswith("FlowM")
    if products is not None and not is_flow:
        product = products[int(at.timestep)].to(x)
        alpha, sigma = product.sqrt() * one, (1 - product).sqrt() * one
        if kind == "v_prediction":
            return alpha, -sigma
        if kind == "sample":
            return torch.zeros_like(one), one
        return 1 / alpha, -sigma / alpha
    # 3. A noise level of the scheduler's list, or by the timestep.
    if told.is_in_loop and at.step is not None and sigmas is not None and at.step < len(sigmas):
        sigma = sigmas[at.step].to(x) * one
    else:
        sigma = at.timestep / config.get("num_train_timesteps", TRAIN_TIMESTEPS) * one
    if hasattr(scheduler, "precondition_outputs"):  # EDM (Karras et al. 2022), whose input is scaled
        data = config["sigma_data"]
        c_in = 1 / (sigma.square() + data**2).sqrt()
        zero = torch.zeros_like(sigma)
        skip = scheduler.precondition_outputs(one, zero, sigma)
        return skip / c_in, scheduler.precondition_outputs(zero, one, sigma)
    return one, -sigma


def _with_input(args: tuple, kwargs: dict[str, Any], x: Tensor) -> tuple[tuple, dict[str, Any]]:
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": x}
    return (x, *args[1:]), kwargs


def _with_output(out: Any, sample: Tensor) -> Any:
    """Return a forward's output with another sample."""
    if isinstance(out, tuple):
        return sample, *out[1:]
    first = next(iter(out.keys()))
    out[first] = sample
    return out

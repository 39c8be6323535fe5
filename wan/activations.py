"""Capture activations at any site; experiments.capture installs this watcher, and so may code on wan/ alone.

capture = SiteCapture(("resid_post",), layers=[3])
with watched(capture):
    pipeline.inference(...)
capture.flush()
capture.kept[0].where, capture.kept[0].value  # [B, L, dim]
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wan import errors, keys
from wan.sites import (
    BESIDE_GRAPHS,
    SITES,
    ActivationSite,
    Pass,
    RolloutSizes,
    Watcher,
    asks_for,
    call_hook,
    check_indices,
    check_sites,
)


@dataclass(frozen=True, eq=False)
class Activation:
    """A captured activation and its place."""

    where: ActivationSite
    value: Tensor
    item: int = 0  # of the batch, where its items are kept on their own
    frames: tuple[int, ...] | None = None  # that it has, of a call of which some were chosen; None: all


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Reduce = Callable[..., Tensor]  # fn(x, where), or fn(x)


def check_device(to: Any) -> None:
    """Raise ConfigError for a missing device; None leaves values where they are."""
    if to is None:
        return
    try:
        kind = torch.device(to).type
    except (RuntimeError, TypeError):
        kind = "none"
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
        raise errors.ConfigError(
            f"to {errors.short_repr(to)} is not cpu, cuda or cuda:N here, or None, to stay"
        )


@dataclass(eq=False)
class SiteCapture(Watcher):
    """Keep activations of some sites; None selects all, but no recache (Pass).

    frames applies to sites with tokens, heads to sites with heads. reduce(x, where) maps the selected values
    to those to keep. to: a device, None to leave values where they are. on_block is called with a block's
    activations when the next block begins, and they are dropped here. items: the number of videos of a batch,
    each kept and reduced as if alone; None keeps the batch [B, ...] together.
    """

    sites: tuple[str, ...]
    layers: Collection[int] | None = None
    blocks: Collection[int] | None = None
    steps: Collection[int] | None = None
    frames: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    to: str | None = "cpu"
    dtype: torch.dtype | None = None
    reduce: Reduce | None = None
    on_block: Callable[[list[Activation]], None] | None = None
    items: int | None = None  # 0: as many as the batch has
    by_step: bool = False  # on_block is called once a step, where all frames are one block
    newest: int = field(default=-1, init=False)  # block
    step: tuple[int, int | None, float] | None = field(default=None, init=False)  # the newest, with its block
    kept: list[Activation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sees = frozenset(self.sites)
        # Other types would keep other numbers than those that were there
        if self.dtype is not None and self.dtype not in FLOATS:
            shown = errors.short_repr(self.dtype)
            raise errors.ConfigError(f"dtype {shown} is none of floating point, such as float32 or bfloat16")
        if self.reduce is not None and not callable(self.reduce):
            raise errors.ConfigError(f"reduce {errors.short_repr(self.reduce)} is no function of x and where")
        check_device(self.to)

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        if at is None or site not in self.sites or not asks_for(self, layer, at):
            return False
        return self.frames is None or not {*self.frames}.isdisjoint(at.query_frames)

    def hides(self, layer: int, at: Pass | None) -> bool:
        return any(self.wants(site, layer, at) for site in self.sites if site not in BESIDE_GRAPHS)

    def check(self, sizes: RolloutSizes) -> None:
        check_sites(self.sites, sizes)
        check_indices("layer", self.layers, sizes.num_layers)
        check_indices("block", self.blocks, sizes.num_blocks)
        check_indices("step", self.steps, sizes.num_passes)
        check_indices("head", self.heads, sizes.num_heads)
        self.newest = -1  # a rollout begins

    def on_activation(self, x: Tensor, where: ActivationSite) -> None:
        if not self.wants(where.site, where.layer, where.at):
            return
        # 1. The blocks before are complete when the first activation of a later one comes.
        is_later = where.block > self.newest
        if self.by_step:
            is_later = (where.block, where.step, where.timestep) != self.step
            self.step = (where.block, where.step, where.timestep)
        if is_later:
            if self.on_block:
                self.flush()
            self.newest = where.block
        # 2. Videos that are made together are apart here; what all of them share is each one's.
        parts: Sequence[Tensor] = [x]
        if self.items is not None and self.items != 1:
            parts = x.split(1)
        if self.items and len(parts) != self.items:
            assert len(parts) == 1, f"{where}: a batch of {len(parts)}, not of {self.items}"
            parts = list(parts) * self.items
        frames = None
        if self.frames is not None and self.frame_axis(x, where) is not None:
            frames = tuple(frame for frame in self.frames if frame in where.frames)
        for item, part in enumerate(parts):
            value = self.taken(part.detach(), where)
            self.kept.append(Activation(where=where, value=value, item=item, frames=frames))

    def taken(self, x: Tensor, where: ActivationSite) -> Tensor:
        """Return the values to keep of an activation, perhaps still being copied to the host."""
        # 1. Choose, reduce and round on the device: less has to be copied.
        value = self.chosen(x, where)
        if self.reduce:
            value = call_hook(self.reduce, value.clone(), where)
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
                shown = errors.short_repr(value)
                raise errors.ConfigError(
                    f"reduce at {where}: it returned {shown}, not a tensor with its numbers"
                )
        if self.dtype and value.is_floating_point():  # counts and indices of reduce stay what they are
            value = value.to(self.dtype)
        # 2. Copy to the host while the next layers compute.
        to = value.device
        if self.to is not None:
            to = torch.device(self.to)
        if to.type == value.device.type and to.index in (None, value.device.index):
            return value.clone()  # what stays must not be overwritten by the layers to come
        if to.type == "cpu":
            return keys.to_host(value.contiguous())
        return value.to(to)

    def frame_axis(self, x: Tensor, where: ActivationSite) -> int | None:
        """Return the axis of an activation on which the frames of its call lie; None where none has them."""
        for axis, name in enumerate(SITES[where.site].split()):
            if name == "L" or (name == "F" and x.shape[axis] == len(where.frames)):
                return axis
        return None

    def chosen(self, x: Tensor, where: ActivationSite) -> Tensor:
        """Return the selected frames and heads of an activation, in the order in which they were named."""
        axes, axis = SITES[where.site].split(), self.frame_axis(x, where)
        if self.heads is not None and "H" in axes:
            x = x.index_select(axes.index("H"), torch.tensor(self.heads, device=x.device))
        if self.frames is None or axis is None:
            return x
        rows = [where.frames.index(frame) for frame in self.frames if frame in where.frames]
        by_frame = x.unflatten(axis, (len(where.frames), -1))
        return by_frame.index_select(axis, torch.tensor(rows, device=x.device)).flatten(axis, axis + 1)

    def flush(self) -> None:
        """Wait for copies to the host; pass the last block to on_block."""
        on_host = [item.value for item in self.kept if item.value.device.type == "cpu"]
        if any(value.is_pinned() for value in on_host):
            keys.wait_for_host()
        if self.on_block and self.kept:
            self.on_block(self.kept)
            self.kept = []

"""Keep activations of any site: what experiments.capture, and who wants them on wan/ alone, installs.

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

from wan.sites import (
    BESIDE_GRAPHS,
    SITES,
    ActivationSite,
    Pass,
    Watcher,
    asks_for,
    check_indices,
    check_sites,
)


@dataclass(frozen=True, eq=False)
class Activation:
    """An activation that was kept, and where it was."""

    where: ActivationSite
    value: Tensor


Reduce = Callable[[Tensor, ActivationSite], Tensor]


@dataclass(eq=False)
class SiteCapture(Watcher):
    """Keep activations of some sites; None selects all, step -1 excepted.

    frames are kept of sites with tokens, heads of sites with heads. reduce(x, where) makes what is kept of
    what was chosen. to: a device, or None to stay. on_block is called with what a block gave, when the next
    begins, and takes it away.
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
    kept: list[Activation] = field(default_factory=list)

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        if at is None or site not in self.sites or not asks_for(self, layer, at):
            return False
        return self.frames is None or not {*self.frames}.isdisjoint(at.query_frames)

    def hides(self, layer: int, at: Pass | None) -> bool:
        return any(self.wants(site, layer, at) for site in self.sites if site not in BESIDE_GRAPHS)

    def check(self, plan: Any) -> None:
        check_sites(self.sites, plan)
        check_indices("layer", self.layers, plan.num_layers)
        check_indices("block", self.blocks, len(plan.blocks))
        check_indices("step", self.steps, plan.num_passes)
        check_indices("head", self.heads, plan.num_heads)

    def on_activation(self, x: Tensor, where: ActivationSite) -> None:
        if not self.wants(where.site, where.layer, where.at):
            return
        # 1. The block before is complete when the first activation of the next one comes.
        if self.on_block and self.kept and self.kept[-1].where.block != where.block:
            self.flush()
        # 2. Choose, reduce and round on the device: less has to be copied.
        value = self.chosen(x.detach(), where)
        if self.reduce:
            value = self.reduce(value.clone(), where)
        if self.dtype:
            value = value.to(self.dtype)
        # 3. Copy to the host while the next layers compute.
        is_copy = self.to is not None and torch.device(self.to).type != value.device.type
        # a value that stays must not be overwritten by the layers to come
        value = value.contiguous().to(self.to, non_blocking=True) if is_copy else value.clone()
        self.kept.append(Activation(where, value))

    def chosen(self, x: Tensor, where: ActivationSite) -> Tensor:
        """Return the frames and heads of an activation that were asked for."""
        axes, F = SITES[where.site].split(), len(where.frames)
        for axis, name in enumerate(axes):
            if name == "H" and self.heads is not None:
                x = x.index_select(axis, torch.tensor(self.heads, device=x.device))
            of_frames = name == "L" or (name == "F" and x.shape[axis] == F)
            if of_frames and self.frames is not None:
                rows = [n for n, frame in enumerate(where.frames) if frame in self.frames]
                by_frame = x.unflatten(axis, (F, -1))
                x = by_frame.index_select(axis, torch.tensor(rows, device=x.device)).flatten(axis, axis + 1)
        return x

    def flush(self) -> None:
        """Wait for what is on its way to the host, and hand it on where somebody takes it."""
        if any(one.value.is_pinned() for one in self.kept if one.value.device.type == "cpu"):
            torch.cuda.synchronize()
        if self.on_block and self.kept:
            self.on_block(self.kept)
            self.kept = []

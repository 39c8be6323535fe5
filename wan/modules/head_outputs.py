"""What heads put out in an unedited run: the mean of z per frame, and its size."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wan.modules.captured_call import Pass, Site
from wan.modules.edit_fields import InterventionError
from wan.modules.edited_call import EditedCall
from wan.modules.edits import ACTIVE_EDITS
from wan.modules.head_shard import HeadShard
from wan.modules.rollout_plan import RolloutPlan

Key = tuple[str, int, int, str]  # kind, layer, step, branch


def key_of(site: Site, at: Pass) -> Key:
    return site.kind, site.layer, at.step, at.branch


@dataclass(eq=False)
class HeadOutputs:
    """Means and sizes of z by call, float32 on the CPU; what Ablate("frame_mean") of the same run takes.

    means [B, Fq, H, D] over the tokens of each query frame; norms [B, Fq, H], of ‖z‖ over its tokens.
    """

    means: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    norms: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    shard: HeadShard | None = None  # where heads are in several processes

    def touch(self, call: EditedCall) -> None:
        self.shard = call.site.shard
        call.after.append(lambda z: self._keep(call, z))

    def gather(self) -> None:
        """Bring together what other processes recorded of their heads."""
        if self.shard is not None:
            for recorded in (self.means, self.norms):
                for key, values in recorded.items():
                    recorded[key] = self.shard.gather(values, dim=2)

    def check(self, plan: RolloutPlan) -> None:
        """Every rollout will do."""

    def of(self, site: Site, at: Pass) -> Tensor:
        """[B, Fq, H, D] of the same call; InterventionError where it was not recorded."""
        try:
            return self.means[key_of(site, at), at.block]
        except KeyError:
            raise InterventionError(
                f"layer {site.layer}, block {at.block}, step {at.step}: no output was recorded; "
                "record_head_outputs() must have seen a run of the same blocks and steps"
            ) from None

    def _keep(self, call: EditedCall, z: Tensor) -> Tensor:
        frames = z.unflatten(1, (len(call.at.query_frames), -1))  # [B, Fq, S, H, D]
        where = key_of(call.site, call.at), call.at.block
        found = (
            (self.means, frames.mean(2, dtype=torch.float32).cpu()),
            (self.norms, frames.float().norm(dim=-1).mean(2).cpu()),
        )
        for kept, values in found:
            if call.of_heads is None:
                kept[where] = values
                continue
            if where not in kept or len(kept[where]) != len(values):  # the first of a layer's groups
                kept[where] = values.new_full(
                    (*values.shape[:2], call.layer_heads, *values.shape[3:]), torch.nan
                )
            kept[where][:, :, list(call.of_heads)] = values
        return z


@contextmanager
def record_head_outputs() -> Iterator[HeadOutputs]:
    """Record the outputs of all heads while the context lasts; no bit of the run changes."""
    outputs = HeadOutputs()
    with ACTIVE_EDITS.with_hand(outputs):
        yield outputs
    outputs.gather()


@dataclass(frozen=True, eq=False)
class ReferenceMeans:
    """Mean z over a reference set, per place of a frame in its block: float32 [offsets, H, D] by call."""

    values: Mapping[Key, Tensor]

    @classmethod
    def over(cls, runs: Sequence[HeadOutputs]) -> "ReferenceMeans":
        """The mean over runs, batch items and blocks. A place that few blocks have is a mean of these."""
        sums: dict[Key, Tensor] = {}
        counts: dict[Key, Tensor] = {}
        for run in runs:
            for (key, _), means in run.means.items():
                batch, offsets, *rest = means.shape
                if key not in sums or len(sums[key]) < offsets:
                    wider = torch.zeros(offsets, *rest), torch.zeros(offsets, 1, 1)
                    for mine, total in zip(wider, (sums.get(key), counts.get(key)), strict=True):
                        if total is not None:
                            mine[: len(total)] = total
                    sums[key], counts[key] = wider
                sums[key][:offsets] += means.sum(0)
                counts[key][:offsets] += batch
        return cls({key: sums[key] / counts[key] for key in sums})

    def of(self, site: Site, at: Pass) -> Tensor:
        """[1, Fq, H, D] of a call; InterventionError where the set has no such layer, pass or place."""
        means = self.values.get(key_of(site, at))
        if means is None or len(means) < len(at.query_frames):
            raise InterventionError(
                f"the means have no layer {site.layer}, step {at.step} with {len(at.query_frames)} frames "
                "a block: they must be of the same model and steps"
            )
        return means[None, : len(at.query_frames)]

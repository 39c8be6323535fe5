"""What one rollout left: its captured calls, its latents and the fields that every cache carries."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from experiments.caches import frames
from experiments.caches.files import RunError
from experiments.caches.formats import PassTag
from wan.blocks import block_frames
from wan.capture import CapturedCall
from wan.config import RunConfig


@dataclass(frozen=True)
class Extraction:
    """One rollout, finished or stopped: what was captured and generated, and the fields that caches share."""

    config: RunConfig
    num_layers: int
    records: list[CapturedCall]
    latents: Tensor  # [1, F, C, h, w]; fewer frames where the run was stopped
    pass_timesteps: list[float]  # of a block's passes, the clean pass last
    prompt_tokens: list[str]  # text of each prompt token, without padding
    common: dict[str, Any]
    stopped: str = ""  # where, of a run that was stopped: "3 of 7 blocks"

    @property
    def last_block(self) -> list[int]:
        """Frames of the last finished block."""
        return block_frames(self.config.block_sizes, self.blocks_done - 1)

    @property
    def blocks_done(self) -> int:
        return self.common.get("blocks_done", len(self.config.block_sizes))

    def pass_tag(self, step: int) -> PassTag:
        """A pass of the causal rollout, whose last one is the clean pass."""
        return PassTag(step, self.pass_timesteps[step], step == len(self.pass_timesteps) - 1)

    @cached_property
    def _calls(self) -> dict[tuple[str, int, int], list[CapturedCall]]:
        """The calls of every quantity, layer and step, in block order."""
        calls = defaultdict(list)
        for call in self.records:
            for name in call.values:
                calls[name, call.site.layer, call["step"]].append(call)
        return dict(calls)

    @property
    def layers(self) -> list[int]:
        """Layers of which anything was captured."""
        return sorted({layer for _, layer, _ in self._calls})

    @property
    def quantities(self) -> set[str]:
        """Names of what was captured: frame_logits, key_curve, token_logits and so on."""
        return {name for name, _, _ in self._calls}

    def captured(self, name: str, layer: int, step: int) -> list[CapturedCall]:
        """The calls of one layer and pass that hold a quantity. Raises RunError where there is none."""
        if (name, layer, step) not in self._calls:
            raise RunError(f"layer {layer}, step {step}: no {name} was captured")
        return self._calls[name, layer, step]

    def frame_matrix(self, name: str, layer: int, step: int) -> Tensor:
        """frame_logits or frame_mass of all blocks as one matrix [H, F, F], NaN where nothing was attended.

        Where token logits were captured, the mean logits are those of their frame pairs.
        """
        from_tokens = name == "frame_logits" and "token_logits" in self.quantities
        calls = self.captured("token_logits" if from_tokens else name, layer, step)
        pieces = [self._mean_logits(call) if from_tokens else call.values[name][0] for call in calls]
        where = ((call["query_frames"], call["key_frames"]) for call in calls)
        return frames.assemble(
            [(queries, keys, piece) for (queries, keys), piece in zip(where, pieces, strict=True)],
            self.config.num_frames,
        )

    def _mean_logits(self, call: CapturedCall) -> Tensor:
        """Token logits of a call as those of its query and key frames [H, Fq, Fk], whatever its keys are."""
        tokens, S = call.values["token_logits"][0], self.common["frame_seq_length"]
        if "key_frame" not in call.values:
            return frames.token_matrix_to_frames(tokens, S)
        curves, of = frames.query_frame_curves(tokens, S), call.values["key_frame"][0]
        return frames.by_key_frame(curves, of, self.config.num_frames, mean=True)[..., call["key_frames"]]

    def stack(
        self, value: Callable[[int, int], Tensor], layers: Sequence[int], steps: Sequence[int]
    ) -> Tensor:
        """value(layer, step) of some layers and steps -> [layers, steps, ...]."""
        return torch.stack([torch.stack([value(layer, step) for step in steps]) for layer in layers])

    def frame_matrices(self, name: str, layers: Sequence[int], steps: Sequence[int]) -> Tensor:
        """frame_matrix of some layers and steps -> [layers, steps, H, F, F]."""
        return self.stack(lambda layer, step: self.frame_matrix(name, layer, step), layers, steps)

"""What one rollout left: its captured calls, its latents and the fields that every cache carries."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from experiments.caches import frames
from experiments.caches.errors import RunError
from wan.blocks import block_frames
from wan.config import RunConfig


@dataclass(frozen=True)
class Extraction:
    """One rollout, finished or stopped: what was captured, what was generated, and the fields that every cache carries."""

    config: RunConfig
    num_layers: int
    records: list[dict]
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

    def pass_fields(self, step: int) -> dict[str, Any]:
        last = len(self.pass_timesteps) - 1
        return {"step": step, "timestep": self.pass_timesteps[step], "is_clean_pass": step == last}

    def kept(self, name: str, layer: int, step: int) -> list[dict]:
        """The captured calls of one layer and pass that hold a quantity, in block order."""
        found = [r for r in self.records if name in r and (r["layer"], r["step"]) == (layer, step)]
        if not found:
            raise RunError(f"layer {layer}, step {step}: no {name} was captured")
        return found

    def frame_matrix(self, name: str, layer: int, step: int) -> Tensor:
        """frame_logits or frame_mass of all blocks as one matrix [H, F, F], NaN where nothing was attended.

        Where tokens were captured, they are reduced to it.
        """
        if any("attn_weights" in r for r in self.records):
            S = self.common["frame_seq_length"]
            pieces = [
                (r["query_frames"], r["key_frames"], frames.frame_means(r["attn_weights"][0], S))
                for r in self.kept("attn_weights", layer, step)
            ]
        else:
            pieces = [(r["query_frames"], r["key_frames"], r[name][0]) for r in self.kept(name, layer, step)]
        return frames.assemble(pieces, self.config.num_frames)

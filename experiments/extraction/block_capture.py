"""Attention of a long rollout, a small file for each block as it is finished: memory is that of one block.

Which blocks, and which of their keys, a BlockCapture says: the last n blocks, a band of the newest keys of
every block, or all. Layouts are kept with the numbers: slot by slot the frame, and the temporal position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.caches.files import CacheError, replacing
from wan.capture import CapturedCall, CaptureRequest
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError, short_repr
from wan.files import MAX_COUNT, UnreadableError, load_tensors

KINDS = ("none", "last", "band", "all")
FORMAT = "block_attention"


@dataclass(frozen=True)
class BlockCapture:
    """none, last:N blocks, band:D frames of keys, or all; of one pass, in all layers."""

    kind: str = "none"
    count: int = 0
    step: int = 0

    @classmethod
    def read(cls, text: str, step: int) -> "BlockCapture":
        """From a flag: none, last:3, band:12 or all. Raises ConfigError for anything else."""
        kind, colon, number = text.partition(":")
        counted = kind in ("last", "band")
        fits = kind in KINDS and bool(colon) == counted and (not counted or number.isascii())
        if not fits or (counted and not (number.isdigit() and 0 < len(number) < 8)):
            raise ConfigError(f"--capture {short_repr(text)} is not none, all, last:N or band:D")
        count = int(number) if counted else 0
        if counted and not 1 <= count <= MAX_COUNT:
            raise ConfigError(f"--capture {text}: {count} is not in 1..{MAX_COUNT}")
        return cls(kind, count, step)

    def blocks(self, num_blocks: int) -> range:
        """The blocks whose calls are kept."""
        if self.kind == "none":
            return range(0)
        return range(max(0, num_blocks - self.count) if self.kind == "last" else 0, num_blocks)

    def requests(self, blocks: Sequence[int]) -> list[CaptureRequest]:
        """What the rollout is asked for."""
        return [CaptureRequest(blocks=list(blocks), steps=[self.step], granularity="frame")] if blocks else []

    def bytes(self, config: RunConfig, model: ModelConfig) -> int:
        """What the files take, but for a few kB each."""
        sizes, window = config.block_sizes, config.policy.num_frames or config.num_frames
        total = 0
        for block in self.blocks(len(sizes)):
            keys = min(sum(sizes[: block + 1]), window, self.count if self.kind == "band" else window)
            total += 2 * 4 * model.num_layers * model.num_heads * sizes[block] * keys
        return total

    @property
    def band(self) -> int:
        """How many frames of keys are kept; 0 where all are."""
        return self.count if self.kind == "band" else 0

    def missing(self, folder: Path, num_blocks: int) -> list[int]:
        """The wanted blocks that a folder does not have; what cannot be read is made again.

        Raises CacheError where it has blocks of another pass, or with other keys.
        """
        wanted, kept = self.blocks(num_blocks), set()
        for path in sorted(folder.glob("block_*.pt")) if wanted else ():
            try:
                block = load_tensors(path)
                kept.add(block["block"])
                fits = (block["step"], block["band"]) == (self.step, self.band)
            except (UnreadableError, OSError):
                continue
            except (KeyError, TypeError):
                fits = False
            if not fits:
                raise CacheError(
                    f"{path} was captured in another pass or with other keys than --capture and --step say; "
                    f"move {folder} away, or say what they said then"
                )
        return [block for block in wanted if block not in kept]

    def save(self, folder: Path, block: int, calls: Sequence[CapturedCall], row: int = 0) -> None:
        """Write a block's calls: logits and mass [layers, H, n, keys], frame and position of each key.

        Of one video of a batch, by its row.
        """
        values: dict[str, Any] = {"format": FORMAT, "block": block, "step": self.step, "band": self.band}
        values["query_frames"] = list(calls[0].at.query_frames) if calls[0].at else []
        values["timestep"] = calls[0].at.timestep if calls[0].at else 0.0
        start = -self.band or None
        for name in ("logits", "mass"):
            of_slots = [call.values.get(f"slot_{name}", call.values[f"frame_{name}"]) for call in calls]
            values[name] = torch.stack([x[row, ..., start:].float().cpu() for x in of_slots])
        layouts = [call.layout for call in calls if call.layout is not None]
        for name in ("frames", "positions"):
            values[f"key_{name}"] = torch.tensor([getattr(layout, name)[start:] for layout in layouts])
        with replacing(path_of(folder, block)) as file:
            torch.save({key: x.clone() if torch.is_tensor(x) else x for key, x in values.items()}, file)


def path_of(folder: Path, block: int) -> Path:
    return folder / f"block_{block:05d}.pt"


def read_blocks(folder: str | Path) -> list[dict[str, Any]]:
    """The blocks of a folder in order. Raises CacheError for a folder without, and for other files."""
    paths = sorted(Path(folder).glob("block_*.pt"))
    if not paths:
        raise CacheError(f"{folder} holds no captured blocks; run_rollout.py --capture all writes them")
    found = []
    for path in paths:
        try:
            block = load_tensors(path, mmap=False)
        except (UnreadableError, OSError) as error:
            raise CacheError(f"{path} is not readable: {error}; run the same command again") from None
        if not isinstance(block, dict) or block.get("format") != FORMAT or block["logits"].ndim != 4:
            raise CacheError(f"{path} is no captured block; give the folder that run_rollout.py wrote")
        found.append(block)
    return found

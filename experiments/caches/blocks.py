"""Attention of chosen blocks of a long rollout, a file each.

folder = Path("outputs/long.attention")
BlockCapture.read("last:3", step=0).missing(folder, num_blocks, run)   # what a run has yet to make
[block["logits"] for block in read_blocks(folder)]                     # [layers, H, n, keys] each
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.caches.files import CacheError, replacing, require_same
from experiments.caches.formats import NO_KEY
from wan.capture import CapturedCall, CaptureRequest
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError, short_repr
from wan.files import MAX_COUNT, UnreadableError, load_tensors
from wan.policies import policy_of


@dataclass(frozen=True)
class BlockCapture:
    """Blocks to capture: none, last:N blocks, band:D frames of keys, or all; one pass, all layers."""

    kind: str = "none"
    count: int = 0
    step: int = 0

    @classmethod
    def read(cls, text: str, step: int) -> "BlockCapture":
        """Parse a flag: none, last:3, band:12 or all. Raises ConfigError for anything else."""
        kind, _, number = text.partition(":")
        if text in ("none", "all"):
            return cls(kind, 0, step)
        count = int(number) if number.isascii() and number.isdigit() and len(number) < 8 else 0
        if kind not in ("last", "band") or not 1 <= count <= MAX_COUNT:
            raise ConfigError(
                f"--capture {short_repr(text)} is not none, all, last:N or band:D, N and D in 1..{MAX_COUNT}"
            )
        return cls(kind, count, step)

    @property
    def band(self) -> int:
        """Number of frames of keys that are kept; 0 where all are."""
        return self.count if self.kind == "band" else 0

    def blocks(self, num_blocks: int) -> range:
        """Return the blocks whose calls are kept."""
        first = {"none": num_blocks, "last": num_blocks - self.count}.get(self.kind, 0)
        return range(max(0, first), num_blocks)

    def requests(self, blocks: Sequence[int]) -> list[CaptureRequest]:
        """Return the capture requests of the rollout."""
        return [CaptureRequest(blocks=list(blocks), steps=[self.step], granularity="frame")] if blocks else []

    def bytes(self, config: RunConfig, model: ModelConfig) -> int:
        """Return what the files take, but for a few kB each."""
        sizes, window, total = config.block_sizes, policy_of(config).num_frames or config.num_frames, 0
        for block in self.blocks(len(sizes)):
            keys = min(sum(sizes[: block + 1]), window, self.band or window)
            total += 2 * 4 * model.num_layers * model.num_heads * sizes[block] * keys
        return total

    def missing(self, folder: Path, num_blocks: int, run: str) -> list[int]:
        """List wanted blocks that a folder lacks. CacheError for blocks of another run, pass or band."""
        wanted, kept = self.blocks(num_blocks), set()
        for path in sorted(folder.glob("block_*.pt")):
            if (block := read_block(path)) is None:
                continue
            require_same(path, block.get("fingerprint"), run, f"move {folder} away, or --overwrite")
            if wanted and (block["step"], block["band"]) != (self.step, self.band):
                said = "was captured in another pass or with other keys than --capture and --step say"
                raise CacheError(f"{path} {said}; move {folder} away, or say what they said then")
            kept.add(block["block"])
        return [block for block in wanted if block not in kept]

    def save(self, folder: Path, block: int, calls: Sequence[CapturedCall], run: str, row: int = 0) -> None:
        """Write a block's calls of one video: logits and mass [layers, H, n, keys], and the keys.

        Where heads keep keys of their own, layers see more or fewer frames: NaN, and frame -9, come before.
        """
        start = -self.band or None
        values: dict[str, Any] = {"format": "block_attention", "block": block, "step": self.step}
        values |= {"band": self.band, "query_frames": list(calls[0]["query_frames"])}
        values |= {"timestep": calls[0]["timestep"], "fingerprint": run}
        for name in ("logits", "mass"):
            of_slots = [call.values.get(f"slot_{name}", call.values[f"frame_{name}"]) for call in calls]
            most = max(x.shape[-1] for x in of_slots)
            of_slots = [F.pad(x, (most - x.shape[-1], 0), value=torch.nan) for x in of_slots]
            values[name] = torch.stack([x[row, ..., start:].float().cpu() for x in of_slots])
        layouts = [call.layout for call in calls if call.layout is not None]
        for name in ("frames", "positions"):
            rows = [getattr(layout, name) for layout in layouts]
            rows = [[NO_KEY] * (most - len(row)) + list(row) for row in rows]
            values[f"key_{name}"] = torch.tensor(rows)[:, start:]
        with replacing(path_of(folder, block)) as file:
            torch.save(values, file)


def path_of(folder: Path, block: int) -> Path:
    return folder / f"block_{block:05d}.pt"


FIELDS = {"block": int, "step": int, "band": int, "query_frames": list, "timestep": float}
FIELDS |= {
    "fingerprint": str,
    "logits": Tensor,
    "mass": Tensor,
    "key_frames": Tensor,
    "key_positions": Tensor,
}


def read_block(path: Path) -> dict[str, Any] | None:
    """Read a block's file; None where it is torn, or no block of its number."""
    try:
        block = load_tensors(path, mmap=False)
        if block["format"] != "block_attention" or path != path_of(path.parent, block["block"]):
            return None
        if not all(isinstance(block[name], kind) for name, kind in FIELDS.items()):
            return None
        logits, (layers, keys) = block["logits"], block["key_frames"].shape
        of_keys = logits.shape[0] == layers and logits.shape[-1] == keys
        fits = logits.ndim == 4 and of_keys and logits.shape[2] == len(block["query_frames"])
        same = logits.shape == block["mass"].shape and block["key_positions"].shape == (layers, keys)
    except (UnreadableError, OSError, TypeError, KeyError, ValueError):
        return None
    return block if fits and same else None


def read_blocks(folder: str | Path) -> list[dict[str, Any]]:
    """Read the blocks of a folder in order.

    Raises CacheError for a folder without, for other files, several runs, and a hole among the blocks.
    """
    found = list[dict[str, Any]]()
    for path in sorted(Path(folder).glob("block_*.pt")):
        if (block := read_block(path)) is None:
            raise CacheError(f"{path} is damaged or no captured block; run run_rollout.py again")
        if found:
            require_same(path, block["fingerprint"], found[0]["fingerprint"], f"move {path} away")
            if block["block"] != found[-1]["block"] + 1:
                missing = path_of(Path(folder), found[-1]["block"] + 1)
                raise CacheError(f"{missing} is missing between others; run run_rollout.py again")
        found.append(block)
    if not found:
        raise CacheError(f"{folder} holds no captured blocks; run_rollout.py --capture all writes them")
    return found

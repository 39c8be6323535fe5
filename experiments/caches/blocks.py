"""Files of a long rollout, one for each block: its latents, and the attention of chosen blocks.

latents = LatentBlocks(Path("outputs/long.latents"), run, config.block_sizes, (16, 60, 104), torch.bfloat16)
latents.write(0, x0)                                                   # [n, C, h, w]
BlockCapture.read("last:3", step=0).missing(Path("outputs/long.attention"), num_blocks, run)
[block["logits"] for block in read_blocks("outputs/long.attention")]   # [layers, H, n, keys] each
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from experiments.caches import files
from experiments.caches.formats import NO_KEY
from wan import capture, errors
from wan.config import ModelConfig, RunConfig
from wan.files import MAX_COUNT, UnreadableError, load_tensors
from wan.policies import policy_of


# --- Latents
@dataclass(frozen=True)
class LatentBlocks:
    """Latents of a long rollout: FOLDER/block_00000.safetensors and so on.

    Each holds "latents" [n, C, h, w] and, as metadata, the fingerprint of its run, its number, the SHA-256
    of the numbers and the settings of its run.
    """

    folder: Path
    fingerprint: str
    sizes: Sequence[int]  # frames of each block
    frame_shape: tuple[int, int, int]  # C, h, w
    dtype: torch.dtype
    settings: Mapping[str, Any] = field(default_factory=dict)  # that change numbers, by name

    def path(self, block: int) -> Path:
        return latents_path(self.folder, block)

    def write(self, block: int, latents: Tensor) -> None:
        """Write a block [n, C, h, w], and wait until the disk has it."""
        latents = latents.to("cpu", self.dtype).contiguous()
        metadata = {"fingerprint": self.fingerprint, "block": str(block), "sha256": sha256_of(latents)}
        metadata["settings"] = json.dumps(self.settings, default=str)
        with files.replacing(self.path(block)) as file:
            file.write(safetensors_bytes({"latents": latents}, metadata))

    def read(self, block: int) -> Tensor | None:
        """Read a block [n, C, h, w]; None where it is missing or damaged. CacheError for another run's."""
        path = self.path(block)
        if not path.is_file():
            return None
        remedy = f"choose another --output_path, or move {self.folder} away"
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                files.require_same(path, metadata.get("fingerprint"), self.fingerprint, remedy)
                latents = file.get_tensor("latents")
        except (SafetensorError, OSError):
            return None
        shape = (self.sizes[block], *self.frame_shape)
        if latents.shape != shape or latents.dtype != self.dtype:
            held = f"{list(latents.shape)} of {latents.dtype}"
            raise files.CacheError(f"{path} holds {held}, not {list(shape)} of {self.dtype}; {remedy}")
        if metadata.get("block") != str(block) or metadata.get("sha256") != sha256_of(latents):
            return None
        return latents

    def take(self, block: int) -> Tensor:
        """Read a block that is known to be there. CacheError where it is not."""
        latents = self.read(block)
        if latents is None:
            raise files.CacheError(f"{self.path(block)} was damaged or removed meanwhile; run it again")
        return latents

    def finished(self) -> int:
        """Count the blocks before the first one that is missing or damaged.

        Raises CacheError where any block is another run's.
        """
        is_whole = [self.read(block) is not None for block in range(len(self.sizes))]
        return [*is_whole, False].index(False)


def require_same_settings(folder: Path, settings: Mapping[str, Any], remedy: str) -> None:
    """Raise CacheError where the first block in a folder was made with other settings, before any load."""
    wanted = json.loads(json.dumps(settings, default=str))
    for path in sorted(folder.glob("block_*.safetensors"))[:1]:
        held = dict[str, Any]()  # of a damaged block, or of an older version
        with suppress(SafetensorError, OSError, ValueError), safe_open(path, "pt") as file:
            held = dict(json.loads((file.metadata() or {}).get("settings", "{}")))
        others = [name for name, value in held.items() if name in wanted and wanted[name] != value]
        if others:
            theirs = ", ".join(f"{name} {errors.short_repr(held[name])}" for name in others)
            ours = ", ".join(f"{name} {errors.short_repr(wanted[name])}" for name in others)
            message = f"it has {theirs}, this command has {ours}"
            raise files.CacheError(f"{folder} belongs to another run: {message}; {remedy}")


def latents_path(folder: Path, block: int) -> Path:
    return folder / f"block_{block:05d}.safetensors"


def sha256_of(latents: Tensor) -> str:
    """Return the SHA-256 of a tensor's numbers."""
    numbers = latents.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(numbers.tobytes()).hexdigest()


# --- Attention
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
            raise errors.ConfigError(
                f"--capture {errors.short_repr(text)} is not none, all, last:N or band:D, N "
                f"and D in 1..{MAX_COUNT}"
            )
        return cls(kind, count, step)

    @property
    def band(self) -> int:
        """Number of frames of keys that are kept; 0 where all are."""
        return self.count if self.kind == "band" else 0

    def blocks(self, num_blocks: int) -> range:
        """Return the blocks whose calls are kept."""
        if self.kind == "none":
            return range(0)
        if self.kind == "last":
            return range(max(0, num_blocks - self.count), num_blocks)
        return range(num_blocks)

    def requests(self, blocks: Sequence[int]) -> list[capture.CaptureRequest]:
        """Return the capture requests of the rollout."""
        if not blocks:
            return []
        return [capture.CaptureRequest(blocks=list(blocks), steps=[self.step], granularity="frame")]

    def bytes(self, config: RunConfig, model: ModelConfig) -> int:
        """Return what the files take, but for a few kB each."""
        sizes, window = config.block_sizes, policy_of(config).num_frames or config.num_frames
        total = 0
        for block in self.blocks(len(sizes)):
            keys = min(sum(sizes[: block + 1]), window, self.band or window)
            total += 2 * 4 * model.num_layers * model.num_heads * sizes[block] * keys
        return total

    def missing(self, folder: Path, num_blocks: int, run: str) -> list[int]:
        """List wanted blocks that a folder lacks. CacheError for blocks of another run, pass or band."""
        wanted, finished = self.blocks(num_blocks), set()
        for path in sorted(folder.glob("block_*.pt")):
            block = read_block(path)
            if block is None:
                continue
            files.require_same(path, block["fingerprint"], run, f"move {folder} away, or --overwrite")
            if wanted and (block["step"], block["band"]) != (self.step, self.band):
                raise files.CacheError(
                    f"{path} was captured in another pass or with other keys than --capture and --step say; "
                    f"move {folder} away, or say what they said then"
                )
            finished.add(block["block"])
        return [block for block in wanted if block not in finished]

    def save(
        self, folder: Path, block: int, calls: Sequence[capture.CapturedCall], run: str, row: int = 0
    ) -> None:
        """Write a block's calls of one video: logits and mass [layers, H, n, keys], and the keys.

        Where heads keep keys of their own, layers see more or fewer frames: NaN, and frame -9, come before.
        """
        newest = slice(-self.band if self.band else None, None)  # of the keys
        matrices = {}
        for name in ("logits", "mass"):
            slots = [call.values.get(f"slot_{name}", call.values[f"frame_{name}"]) for call in calls]
            most = max(values.shape[-1] for values in slots)
            padded = [F.pad(values, (most - values.shape[-1], 0), value=torch.nan) for values in slots]
            matrices[name] = torch.stack([values[row, ..., newest].float().cpu() for values in padded])
        layouts = [call.layout for call in calls if call.layout is not None]
        keys = {}
        for name in ("frames", "positions"):
            rows = [list(getattr(layout, name)) for layout in layouts]
            padded_rows = [[NO_KEY] * (most - len(numbers)) + numbers for numbers in rows]
            keys[f"key_{name}"] = torch.tensor(padded_rows)[:, newest]
        values = {
            "format": "block_attention",
            "block": block,
            "step": self.step,
            "band": self.band,
            "query_frames": list(calls[0]["query_frames"]),
            "timestep": calls[0]["timestep"],
            "fingerprint": run,
            **matrices,
            **keys,
        }
        with files.replacing(path_of(folder, block)) as file:
            torch.save(values, file)


def path_of(folder: Path, block: int) -> Path:
    return folder / f"block_{block:05d}.pt"


FIELDS = {
    "block": int,
    "step": int,
    "band": int,
    "query_frames": list,
    "timestep": float,
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
    blocks = list[dict[str, Any]]()
    for path in sorted(Path(folder).glob("block_*.pt")):
        block = read_block(path)
        if block is None:
            raise files.CacheError(f"{path} is damaged or no captured block; run run_rollout.py again")
        if blocks:
            files.require_same(path, block["fingerprint"], blocks[0]["fingerprint"], f"move {path} away")
            following = blocks[-1]["block"] + 1
            if block["block"] != following:
                missing = path_of(Path(folder), following)
                raise files.CacheError(f"{missing} is missing between others; run run_rollout.py again")
        blocks.append(block)
    if not blocks:
        raise files.CacheError(f"{folder} holds no captured blocks; run_rollout.py --capture all writes them")
    return blocks

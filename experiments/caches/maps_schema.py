"""The format of maps over video frames: what chosen queries see of every key token, block by block."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from experiments.caches.common import Cache, PassTag
from experiments.caches.errors import CacheError
from experiments.caches.fields import Fields
from experiments.caches.value_checks import MASS_TOLERANCE, check_any_of, check_numbers, check_once
from wan.blocks import block_frames
from wan.safe_load import is_verified

ANY = -1  # of a query's frame: all queries of the block; of its row and column: all of the frame
NO_KEY = -9  # in key_frame, where another layer or pass has more keys; its values are NaN


@dataclass(frozen=True, kw_only=True)
class BlockMaps(Fields):
    """The maps of one block. N layers, P passes, h heads, n queries, Lk keys."""

    block: int
    query_frames: Annotated[list[int], "int [Fq]"]
    queries: Annotated[Tensor | None, "i32 [n, 3]"] = None  # frame, row, column; -1: all
    key_frame: Annotated[Tensor | None, "i32 [N, P, Lk]"] = None  # -1 average, -2 zeros, -9 no key
    key_token: Annotated[Tensor | None, "i32 [N, P, Lk]"] = None  # index in its frame, row by row
    key_position: Annotated[Tensor | None, "i32 [N, P, Lk]"] = None  # temporal RoPE index
    map_logits: Annotated[Tensor | None, "f16 [N, P, h, n, Lk]"] = None
    map_mass: Annotated[Tensor | None, "f16 [N, P, h, n, Lk]"] = None  # times S
    attended: Annotated[Tensor | None, "mask [N, P, h, Lk]"] = None  # False: an intervention left it out
    word_map: Annotated[Tensor | None, "f16 [N, P, h, Lq, words]"] = None

    def check(self, cache: "MapsCache", where: str) -> None:
        """Raise CacheError where a block's numbers are not those of its cache."""
        check_numbers({"block": self.block}, where)
        check_any_of(self.to_dict(), ("map_mass", "word_map"), where)
        if self.block >= cache.done or self.query_frames != block_frames(cache.block_sizes, self.block):
            raise CacheError(f"{where}query_frames {self.query_frames} are not those of block {self.block}")
        for values in (self.map_mass, self.word_map):
            if values is not None and values.shape[2] != len(cache.heads):
                raise CacheError(f"{where}maps of {values.shape[2]} heads, and the cache has {cache.heads}")
        if self.word_map is not None and self.word_map.shape[-1] != len(cache.words or ()):
            raise CacheError(f"{where}word_map has {self.word_map.shape[-1]} words, not {cache.words}")
        if self.map_mass is not None:
            self._check_maps(cache, where)

    def _check_maps(self, cache: "MapsCache", where: str) -> None:
        needed = ("queries", "key_frame", "key_token", "key_position", "map_logits")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise CacheError(f"{where}{missing[0]} is missing")
        assert self.queries is not None and self.map_mass is not None and self.key_token is not None
        assert self.key_frame is not None
        for frame, row, column in self.queries.tolist():
            whole = row == column == ANY
            if not (
                (frame == ANY and whole)
                or (frame in self.query_frames and (whole or cache.has_patch(row, column)))
            ):
                raise CacheError(f"{where}query {[frame, row, column]} is none of this block's")
        S = cache.frame_seq_length
        if not ((self.key_token >= 0) & (self.key_token < S)).all():
            raise CacheError(f"{where}key_token is not in 0..{S - 1}")
        if not ((self.key_frame >= NO_KEY) & (self.key_frame < cache.num_frames)).all():
            raise CacheError(f"{where}key_frame is not in 0..{cache.num_frames - 1}")
        if is_verified(self.map_mass):
            rows = self.map_mass.float().nansum(-1) / S
            if (self.map_mass < 0).any() or ((rows - 1).abs() > MASS_TOLERANCE).any():
                raise CacheError(f"{where}rows of map_mass do not sum to {S}, the tokens of a frame")


@dataclass(frozen=True, kw_only=True)
class MapsCache(Cache):
    """Maps over video frames: of each block that was asked for, layers x passes x heads x queries x keys."""

    layers: Annotated[list[int], "int [N]"]
    heads: Annotated[list[int], "int [h]"]
    rows: int  # of the tokens of a frame
    columns: int
    pass_timesteps: Annotated[list[float], "float [P]"]
    pass_steps: Annotated[list[int], "int [P]"]
    pass_is_clean: Annotated[list[bool], "bool [P]"]
    words: Annotated[list[str] | None, "str [words]"] = None  # text of each prompt token
    blocks: list[BlockMaps]

    def passes(self) -> list[PassTag]:
        tags = zip(self.pass_steps, self.pass_timesteps, self.pass_is_clean, strict=True)
        return [PassTag(*tag) for tag in tags]

    def has_patch(self, row: int, column: int) -> bool:
        """Whether a token of a frame is at this place."""
        return 0 <= row < self.rows and 0 <= column < self.columns

    def _check(self) -> None:
        super()._check()
        numbers = {"layers": self.layers, "heads": self.heads, "pass_steps": self.pass_steps}
        check_numbers(numbers | {"pass_timesteps": self.pass_timesteps})
        check_once(numbers)
        if self.rows * self.columns != self.frame_seq_length:
            raise CacheError(
                f"rows {self.rows} x columns {self.columns} are not {self.frame_seq_length} tokens"
            )
        if max(self.heads) >= self.num_heads:
            raise CacheError(f"head {max(self.heads)} is not in 0..{self.num_heads - 1}")
        if not self.blocks:
            raise CacheError("blocks is empty: no map is there")
        check_once({"blocks": [entry.block for entry in self.blocks]})
        for i, entry in enumerate(self.blocks):
            entry.check(self, f"blocks[{i}].")

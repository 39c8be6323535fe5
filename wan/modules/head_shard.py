"""Which of a model's heads one process attends with: all of them, unless wan/parallel.py gives it a share."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeadShard:
    """The heads of a range out of total. Others' heads are in other processes; here there are none."""

    heads: range
    total: int

    @classmethod
    def whole(cls, num_heads: int) -> "HeadShard":
        return cls(range(num_heads), num_heads)

    @property
    def is_whole(self) -> bool:
        return len(self.heads) == self.total

    def of(self, x: Tensor) -> Tensor:
        """The shard's heads of all heads [B, n, H, D]."""
        return x if self.is_whole else x[:, :, self.heads.start : self.heads.stop]

    def of_text(self, text: Sequence[tuple[Tensor, Tensor]]) -> Sequence[tuple[Tensor, Tensor]]:
        """The shard's heads of the prompt's keys and values per layer."""
        return text if self.is_whole else [(self.of(k), self.of(v)) for k, v in text]

    def local(self, heads: range | list[int]) -> list[int]:
        """Those of some heads of the model that are here, by their indices here."""
        return [head - self.heads.start for head in heads if head in self.heads]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all processes, each of which has summed over its own heads."""
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All heads, in order, from what each process has of its own along dim; on the CPU."""
        return x

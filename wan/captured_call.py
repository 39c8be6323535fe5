"""Who calls attention, in which forward, and what was kept of the call."""

from collections.abc import Callable, Collection, Iterator, KeysView, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wan import keys as host_copies
from wan.keys import KeyLayout, Slot, places, segments_of


# --- Which of a model's heads one process attends with: all of them, unless wan/parallel.py gives it a share
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


# --- Who calls attention, in which forward, and what was kept of the call
Kind = Literal["self", "cross"]


@dataclass(frozen=True)
class Site:
    """An attention module of the model: its transformer layer, counted from 0, and what it attends to."""

    layer: int
    kind: Kind
    shard: HeadShard | None = field(default=None, compare=False, repr=False)  # where not all heads are here


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One forward of the model as the sampler announces it. Frames are global latent frame indices."""

    query_frames: tuple[int, ...]
    block: int = 0
    step: int = 0  # index of the pass within its block; -1 where a switch of prompts computes the cache again
    timestep: float = 0.0
    is_clean_pass: bool = False
    branch: str = "cond"  # classifier-free guidance runs a second branch, "uncond"
    parts: tuple["Pass", ...] = ()  # of blocks at several noise levels: each block's own pass
    levels: tuple[tuple[int, float], ...] = ()  # there: every frame that is denoised, and its timestep


def parts_of(at: Pass, num_tokens: int) -> Iterator[tuple[Pass, slice]]:
    """The passes of a forward's blocks, with the queries of each among num_tokens."""
    tokens, start = num_tokens // len(at.query_frames), 0
    for part in at.parts:
        stop = start + tokens * len(part.query_frames)
        yield replace(part, levels=at.levels), slice(start, stop)
        start = stop


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """One attention call and what was kept of it: values by name, on the CPU once the capture has ended.

    call["layer"], call["frame_logits"], ...: the fields of DOCUMENTED and the values are also there by their
    names.
    """

    site: Site
    at: Pass | None  # None where nobody announced the forward
    values: dict[str, Tensor]
    q_shape: tuple[int, ...]  # [B, Lq, H, D]
    k_shape: tuple[int, ...]  # [B, Lk, H, D]
    layout: KeyLayout | None = None  # None for cross-attention

    @property
    def is_logits(self) -> bool:
        """Whether the values hold logits q·k/√D; probabilities and masses otherwise."""
        return not {"token_probabilities", "cross_mass", "word_map"} & self.values.keys()

    def __getitem__(self, name: str) -> Any:
        return self.values[name] if name in self.values else DOCUMENTED[name](self)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> KeysView[str]:
        return dict.fromkeys([*DOCUMENTED, *self.values]).keys()

    def items(self) -> Iterator[tuple[str, Any]]:
        return ((name, self[name]) for name in self.keys())

    def get(self, name: str, default: Any = None) -> Any:
        return default if name not in self.keys() else self[name]


def _of_pass(name: str) -> Callable[[CapturedCall], Any]:
    return lambda call: None if call.at is None else getattr(call.at, name)


def _key_frames(call: CapturedCall) -> list[int] | None:
    if call.layout is None:
        return None
    if call.layout.is_plain:
        return list(call.layout.frames)
    return list(segments_of(call.layout).columns)


def _frame_timesteps(at: Pass) -> dict[int, float]:
    """The noise level of every frame of a forward; a frame that is not there is clean."""
    return dict(at.levels) or dict.fromkeys(at.query_frames, at.timestep)


def _of_slots(value: Callable[[KeyLayout], list[int]]) -> Callable[[CapturedCall], list[int] | None]:
    return lambda call: None if call.layout is None else value(call.layout)


DOCUMENTED: dict[str, Callable[[CapturedCall], Any]] = {
    "layer": lambda call: call.site.layer,
    "kind": lambda call: call.site.kind,
    "q_shape": lambda call: list(call.q_shape),
    "k_shape": lambda call: list(call.k_shape),
    "is_logits": lambda call: call.is_logits,
    **{name: _of_pass(name) for name in ("block", "step", "timestep", "is_clean_pass", "branch")},
    "query_frames": lambda call: None if call.at is None else list(call.at.query_frames),
    "frame_timesteps": lambda call: {} if call.at is None else _frame_timesteps(call.at),
    "key_frames": _key_frames,  # of the columns of frame_logits
    "slot_frame": _of_slots(lambda layout: list(layout.frames)),
    "slot_position": _of_slots(lambda layout: list(layout.positions)),
    "slot_tokens": _of_slots(lambda layout: [layout.tokens_per_slot] * len(layout.slots)),
}


def move_to_cpu(calls: Collection[CapturedCall]) -> None:
    """Bring captured tensors to the CPU, small ones in one copy per dtype: each would wait for the device."""
    host_copies.wait()
    waiting = [
        (call.values, name)
        for call in calls
        for name, value in call.values.items()
        if value.device.type != "cpu"
    ]
    for values, name in waiting:
        if values[name].numel() > host_copies.SMALL:
            values[name] = values[name].contiguous().cpu()
    small = [(values, name) for values, name in waiting if values[name].device.type != "cpu"]
    for dtype in {values[name].dtype for values, name in small}:
        group = [(values, name) for values, name in small if values[name].dtype == dtype]
        flat = torch.cat([values[name].flatten() for values, name in group]).cpu()
        parts = flat.split([values[name].numel() for values, name in group])
        for (values, name), part in zip(group, parts, strict=True):
            values[name] = part.view(
                values[name].shape
            ).clone()  # a view would be saved with its whole storage


# --- Heads of one layer that see keys of their own, and what is kept of them as of one call
BY_FRAME = ("frame_logits", "frame_mass")  # what is kept of calls whose heads see different frames


class HeadGroup(NamedTuple):
    """Heads (indices, also on the device) with their queries [B, Lq, h, D], keys and values [B, Lk, h, D],
    and what the keys are.
    """

    numbers: tuple[int, ...]
    heads: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    layout: KeyLayout


def joint_layout(columns: Sequence[Sequence[int]], like: KeyLayout) -> KeyLayout:
    """A layout of all frames that some head sees."""
    frames = sorted({frame for frames in columns for frame in frames})
    slots = tuple(Slot(frame, frame) for frame in frames)
    return KeyLayout(slots, like.tokens_per_slot, query_positions=like.query_positions)


def joined(
    parts: Sequence[dict[str, Tensor]], columns: Sequence[Sequence[int]], groups: Sequence[HeadGroup]
) -> dict[str, Tensor]:
    """Values by frame of groups of heads as those of one call [B, H, Fq, Fk];
    NaN where a head does not see a frame.
    """
    frames = [slot.frame for slot in joint_layout(columns, groups[0].layout).slots]
    num_heads = sum(len(group.heads) for group in groups)
    values: dict[str, Tensor] = {}
    for name in BY_FRAME:
        if name not in parts[0]:
            continue
        batch, _, queries, _ = parts[0][name].shape
        whole = parts[0][name].new_full((batch, num_heads, queries, len(frames)), torch.nan)
        for part, seen, group in zip(parts, columns, groups, strict=True):
            whole[:, group.heads] = spread(part[name], seen, frames)
        values[name] = whole
    if any("attended" in part for part in parts):  # of an edited call
        values["attended"] = ~values["frame_logits"].isnan()
    return values


def spread(values: Tensor, seen: Sequence[int], frames: Sequence[int]) -> Tensor:
    """Values [..., seen] by some frames as values [..., frames], NaN for those that are not among them."""
    whole = values.new_full((*values.shape[:-1], len(frames)), torch.nan)
    whole[..., places([frames.index(frame) for frame in seen], values.device)] = values
    return whole

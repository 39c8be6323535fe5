"""The KV cache of a rollout, and the policies of Self-Forcing that fill and empty it: all frames, a window.

A KVCache holds slots of one frame each; caches whose heads differ are in wan/policies/headwise.py. A
CachePolicy decides what is kept; those of other publications are in wan/policies/. The model calls write() in
every attention layer; the rollout calls advance() before a block, begin_pass() before a pass, and flush() or
recache() where the prompt changes.
Letters: B batch, L tokens of a block, S tokens per frame, H heads, D head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from pydantic import Field
from torch import Tensor

from wan import errors, files
from wan.kernels import fused_kernels
from wan.keys import EMPTY, HeadGroup, HeadShard, KeyLayout, Slot, rotate, send

CUT_POSITION = 45  # where Infinity-RoPE's cut puts a block
FLUSH_KEEPS = 2  # the newest frames that a flush leaves
NEEDS_ROTATION = -97  # Slot.position of keys that were moved and are about to be rotated

How = Literal["keep", "recache", "flush", "cut"]  # what a change of prompts does to the cache
Text = Sequence[tuple[Tensor, Tensor]]  # the prompt's cross-attention keys and values of every layer
Keys = tuple[Tensor, Tensor] | list[HeadGroup]  # keys and values [B, Lk, H, D], or those of groups of heads
Tables = Callable[[Sequence[int]], tuple[Tensor, Tensor]]  # positions -> RoPE's cos and sin [n·S, 1, D]


def rotate_into(target: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write rotate(x, cos, sin), [B, L, H, D], into target; one kernel where both have a cache's strides."""
    rows = (x.shape[2] * x.shape[3], x.shape[3], 1)
    kernels = None
    if x.numel() and x.stride()[1:] == target.stride()[1:] == rows:
        kernels = fused_kernels(x)
    if kernels is None:
        target.copy_(rotate(x, cos, sin))
    else:
        kernels.rotate_into(target, x, cos, sin)


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of the cache of one video."""

    num_heads: Sequence[int]  # per layer, of those that are here
    head_dim: int
    tokens_per_frame: int
    num_frames: int
    batch: int = 1
    block_size: int = 3  # the largest
    rope: Tables | None = None  # for policies that move keys
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    head_shard: HeadShard | None = None  # where other heads are in other processes


class AnyCache(ABC):
    """Hold the past of one video for all layers: the base of caches, as the model sees them."""

    def __init__(self, sizes: CacheSizes, policy: "CachePolicy"):
        """Raise ConfigError where the policy is of another model."""
        self.policy = copy(policy)  # its state belongs to one video
        self.sizes, self.rope = sizes, cast(Tables, sizes.rope)
        self.num_layers, self.tokens_per_frame = len(sizes.num_heads), sizes.tokens_per_frame
        problem = policy.misfit(self.num_layers, self.shard.total, sizes.tokens_per_frame)
        if problem:
            raise errors.ConfigError(f"cache_policy {policy.name}: {problem}")
        self.newest = self.coming = range(0)  # frames of the newest block, and of the one that is admitted
        self.query_positions: Sequence[int] = ()
        self.key_positions: Sequence[int] = ()
        self.layouts: list[KeyLayout] = []  # per layer, where write() returns no groups
        self.stores_raw = False  # whether the pass that runs has to bring its un-rotated keys
        self.has_switches = False  # whether the video's prompt changes

    @cached_property
    def shard(self) -> HeadShard:
        """Which of the model's heads are here: all of them, unless several processes share them."""
        return self.sizes.head_shard or HeadShard.whole(max(self.sizes.num_heads, default=0))

    def announce_prompt(self, prompt: str | None) -> None:
        """Tell the policy the prompt with which the next block begins; of a batch, the first video's."""
        self.policy.see_prompt(prompt or "")

    @abstractmethod
    def advance(self, block: range, text: Text = (), cut: bool = False) -> None:
        """Make room for a block. text: for policies that choose by the prompt; cut: place it far away."""

    @abstractmethod
    def begin_pass(self, is_clean: bool) -> None:
        """Announce the next pass over the block."""

    @abstractmethod
    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None) -> Keys:
        """Store the block's keys and values [B, L, H, D]; return what its queries attend to.

        They take the place of those of earlier passes. q [B, L, H, D] are the queries, for policies that
        choose by them.
        """

    def flush(self) -> None:
        """Drop the past except for the policy's sink and the last two frames."""
        raise NotImplementedError  # the policy's switch_from() knows no flush

    def recache(self, frames: range, text: Text, lasts: bool = True) -> None:
        """Make room for a forward over clean frames of the past, whose keys become the cache.

        Where it lasts for one block alone, none of them becomes the sink.
        """
        raise NotImplementedError  # the policy's can_recache is False

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all keys and values."""


class KVCache(AnyCache):
    """One buffer of keys and one of values per layer, [B, capacity·S, H, D], written in place.

    slots describe them, in order; own are the newest block's, which its passes overwrite.
    Policies whose keys change their position keep them un-rotated as well, in raw_keys.
    """

    def __init__(self, sizes: CacheSizes, policy: "CachePolicy"):
        super().__init__(sizes, policy)
        size = self.policy.capacity(sizes.num_frames, sizes.block_size)
        self.capacity, self.raw_slots = size.slots, min(size.raw_slots, size.slots)
        self.sink: int = policy.sink  # the first slots, which are never dropped
        self.slots: list[Slot] = []
        self.own = range(0)
        self.text: Text = ()
        self.passes = 0  # over the newest block, the one that runs included

        def buffers(slots: int) -> list[Tensor]:  # per layer [B, slots·S, H, D]
            tokens, dtype, device = slots * self.tokens_per_frame, sizes.dtype, sizes.device
            return [
                torch.empty(sizes.batch, tokens, n, sizes.head_dim, dtype=dtype, device=device)
                for n in sizes.num_heads
            ]

        self.keys, self.values = buffers(self.capacity), buffers(self.capacity)
        self.raw_keys: list[Tensor] = []
        if self.raw_slots:
            self.raw_keys = buffers(self.raw_slots)
        self.layouts = [KeyLayout((), self.tokens_per_frame)] * self.num_layers
        self.policy.start(self)

    def advance(self, block: range, text: Text = (), cut: bool = False) -> None:
        self.text = text or self.text
        self._drop_empty()
        self.coming = block
        self.policy.admit(self, block)
        # What a policy of one's own gets wrong fails later, in tensors, without its name
        if self.newest != block:
            raise self.misuse("admit() gave it no slots; call cache.append(block)")
        if len(self.slots) > self.capacity:
            raise self.misuse(
                f"slot {len(self.slots) - 1} is not there; capacity() says {self.capacity} slots"
            )
        self._publish(cut)

    def misuse(self, problem: str) -> errors.ConfigError:
        """Return the error of a policy that uses the cache wrongly, with the block it was about to admit."""
        frames = f"{self.coming.start} to {self.coming.stop - 1}"
        return errors.ConfigError(f"cache_policy {self.policy.name}, block of frames {frames}: {problem}")

    def flush(self) -> None:
        self._drop_empty()
        self.policy.flush(self)

    def recache(self, frames: range, text: Text, lasts: bool = True) -> None:
        self.text = text
        if not lasts:
            self.sink = self.policy.lasting_sink
        self._drop_empty()
        sink = min(self.policy.lasting_sink, len(self.slots))
        self.policy.start(self)
        del self.slots[sink:]
        self.append(frames, last=len(frames) - sink)
        self._publish(cut=False)

    def begin_pass(self, is_clean: bool) -> None:
        """Announce the next pass; only clean ones store un-rotated keys."""
        self.passes += 1
        self.stores_raw = False
        if is_clean and self.raw_slots:  # else no key of this policy ever moves
            self.stores_raw = self._raw_rows(self.policy.own_slots(self)).start < self.raw_slots

    def write(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        slots, S = self.policy.own_slots(self), self.tokens_per_frame
        # 1. Keys and values go into the block's slots, without gradients: autograd takes no writes in place.
        #    Its first frames may have none.
        first = k.shape[1] - len(slots) * S
        self.keys[layer][:, self.tokens(slots)] = k[:, first:].detach()
        self.values[layer][:, self.tokens(slots)] = v[:, first:].detach()
        # 2. Clean passes bring keys without RoPE too, for slots whose keys will move.
        if raw_k is not None:
            rows = self._raw_rows(slots)
            rows = range(rows.start, min(rows.stop, self.raw_slots))
            self.raw_keys[layer][:, self.tokens(rows)] = raw_k[:, first : first + len(rows) * S].detach()
        # 3. The policy says what the call sees. Under autograd that is a copy: the past as a constant, the
        #    block's own keys and values, which come last, with their gradients.
        seen = self.policy.written(self, layer, q.detach())
        if torch.is_grad_enabled():
            keys, values = seen
            past = keys.shape[1] - (k.shape[1] - first)
            keys = torch.cat([keys[:, :past], k[:, first:]], 1)
            values = torch.cat([values[:, :past], v[:, first:]], 1)
            return keys, values
        return seen

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of all slots [B, Lk, H, D]."""
        seen = self.tokens(range(len(self.slots)))
        return self.keys[layer][:, seen], self.values[layer][:, seen]

    def parts(self, layer: int, num_heads: int) -> list[tuple[list[int], KeyLayout]]:
        """Return the layout of all heads of a layer, as HeadGroup wants it."""
        return [(list(range(num_heads)), self.layouts[layer])]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, with and without RoPE."""
        return sum(x.nbytes for x in (*self.keys, *self.values, *self.raw_keys))

    # -- for policies ----------------------------------------------------------------------------------------

    def tokens(self, slots: range | int) -> slice:
        """Return the tokens of consecutive slots, or of one, in a buffer."""
        if isinstance(slots, int):
            slots = range(slots, slots + 1)
        return slice(slots.start * self.tokens_per_frame, slots.stop * self.tokens_per_frame)

    def append(self, block: range, last: int | None = None) -> None:
        """Give the frames of the next block, or its last ones, the slots after the present ones."""
        frames = block
        if last is not None:
            frames = block[len(block) - last :]
        self.own = range(len(self.slots), len(self.slots) + len(frames))
        self.slots.extend(Slot(frame, frame) for frame in frames)
        self.newest = block

    def append_empty(self, count: int) -> None:
        """Append slots of zeros, which are dropped before the next block."""
        zeros = self.tokens(range(len(self.slots), len(self.slots) + count))
        for buffer in (*self.keys, *self.values):
            buffer[:, zeros] = 0
        self.slots.extend(Slot(EMPTY, EMPTY) for _ in range(count))

    def drop(self, start: int, count: int) -> None:
        """Delete count slots from start on; shift the rest left."""
        if count > 0:
            self.keep([*range(start), *range(start + count, len(self.slots))])

    def keep(self, slots: Sequence[int]) -> None:
        """Keep these slots, in this order, and drop all others; a slot may appear twice.

        Raises ConfigError for a slot that is not there.
        """
        for slot in slots:
            # A negative one would be of the buffer, not of the slots
            if type(slot) is not int or not 0 <= slot < len(self.slots):
                raise self.misuse(f"slot {errors.short_repr(slot)} is not in 0..{len(self.slots) - 1}")
        moved = [index for index, slot in enumerate(slots) if index != slot]
        remaining = [self.slots[slot] for slot in slots]
        if moved:
            # 1. Values move, and keys: rotated ones, or those without RoPE if they will be rotated anew.
            buffers = [*self.values]
            if self.raw_slots == self.capacity:
                buffers += self.raw_keys
            if not self.policy.positions_follow_slots:
                buffers += self.keys
            else:
                for index in moved:
                    remaining[index] = Slot(remaining[index].frame, NEEDS_ROTATION)
            # 2. One gather per buffer, from the first slot that changes on.
            target = self.tokens(range(moved[0], len(slots)))
            source = send(torch.tensor(slots[moved[0] :]), self.keys[0].device)
            for buffer in buffers:
                frames = buffer.unflatten(1, (self.capacity, -1))  # [B, slots, S, H, D]
                buffer[:, target] = frames[:, source].flatten(1, 2)
        self.slots = remaining  # what lies behind them in the buffers is overwritten by the next block

    def _raw_rows(self, slots: range) -> range:
        """Return where the un-rotated keys of the block's slots lie."""
        if self.policy.raw_by_frame:
            return self.newest
        return slots

    def _drop_empty(self) -> None:
        self.slots = [slot for slot in self.slots if slot.frame != EMPTY]

    def _publish(self, cut: bool) -> None:
        """Rotate keys to their temporal positions, and make the layouts of the next calls."""
        # 1. Which slots stand elsewhere. The block's own keys come rotated with its passes.
        positions = self.policy.positions(self, cut)
        moved = [index for index, position in enumerate(positions) if self.slots[index].position != position]
        for index in moved:
            self.slots[index] = Slot(self.slots[index].frame, positions[index])
        moved = [index for index in moved if index not in self.own]
        # 2. Rotate consecutive slots together, [B, n·S, H, D].
        for _, run in groupby(enumerate(moved), lambda pair: pair[1] - pair[0]):
            indices = [index for _, index in run]
            slots = range(indices[0], indices[-1] + 1)
            cos, sin = self.rope(positions[slots.start : slots.stop])
            for keys, raw in zip(self.keys, self.raw_keys, strict=True):
                rotate_into(keys[:, self.tokens(slots)], raw[:, self.tokens(slots)], cos, sin)
        # 3. Where the block's own keys and its queries stand.
        self.key_positions = self.newest  # of a recomputed cache, where some frames get no slot
        if len(self.own) == len(self.newest):
            first = self.slots[self.own.start].position
            self.key_positions = range(first, first + len(self.own))
        self.query_positions = self.policy.query_positions(self)
        # 4. Until a pass is announced, one that computes the cache again counts as clean.
        self.begin_pass(is_clean=True)
        self.passes = 0
        # 5. What captures and edits are told about the slots.
        shared = KeyLayout(
            slots=tuple(self.slots),
            tokens_per_slot=self.tokens_per_frame,
            own=self.own,
            query_positions=tuple(self.query_positions),
            sink=range(min(self.sink, self.own.start)),
        )
        self.layouts = [self.policy.layout(self, layer, shared) for layer in range(self.num_layers)]


class Capacity(NamedTuple):
    """Memory of a policy, in slots of one frame."""

    slots: int
    raw_slots: int = 0  # the first slots that keep un-rotated keys as well
    state_frames: int = 0  # keys and values in float32 that the policy holds beside the cache


@dataclass
class CachePolicy:
    """Decide what a block may attend to: which slots are kept, and at which temporal positions.

    A policy is a subclass with its settings as fields (CONTRIBUTING.md has an example). Every KV cache works
    with a copy, so state set in start() lives as long as one video. A public release whose numbers differ,
    quirks included, is a subclass of its policy that names it in `release` (wan/policies/).
    """

    name: ClassVar[str]
    release: ClassVar[str] = ""
    blocks_of_three: ClassVar[bool] = False  # a release that knows blocks of 3 frames alone
    cache_type: ClassVar[type[AnyCache]] = KVCache
    positions_follow_slots: ClassVar[bool] = False  # keys stand at 0..n-1, whatever their frames
    keeps_whole_frames: ClassVar[bool] = False  # every slot is a frame of its own
    chooses_by_layer: ClassVar[bool] = False  # layers, and batch items, may keep different frames
    can_recache: ClassVar[bool] = True
    sink = 0  # the first frames, which stay; a field of most policies
    reserved: ClassVar[int] = 0  # slots of the window that are neither sink nor recent frames
    least_blocks: ClassVar[int] = 1  # that a window holds
    by_heads: ClassVar[bool] = False  # heads of a layer may keep different keys
    raw_by_frame: ClassVar[bool] = False  # un-rotated keys lie at their frame's number, not at its slot

    def __post_init__(self) -> None:
        errors.check_fields(self, f"cache_policy {self.name}: ")
        self.check()

    @property
    def num_frames(self) -> int | None:
        """Frames that a call sees at most; None without a limit."""
        return getattr(self, "window", None)

    @property
    def recomputed_frames(self) -> int | None:
        """Frames that a change of prompts computes again at most; None for all of the past."""
        return getattr(self, "num_recomputed", self.num_frames)

    @property
    def lasting_sink(self) -> int:
        """Frames of the sink that outlive a recache."""
        if getattr(self, "global_sink", False):
            return self.sink
        return 0

    def describe(self) -> dict[str, Any]:
        """Return the policy as a config has it: its name, release, and fields that differ from defaults."""
        settings = {"name": self.name}
        if self.release:
            settings["released"] = self.release
        for setting in fields(self):
            value = getattr(self, setting.name)
            if type(value) is not type(setting.default) or value != setting.default:
                settings[setting.name] = value
        return settings

    def check(self, block_sizes: Sequence[int] = ()) -> None:
        """Raise ConfigError where fields contradict each other, or blocks of these sizes do not fit."""
        problem = self.conflict(block_sizes)
        if not problem:  # of a policy of one's own: a cache would fail without its name
            size = self.capacity(21, max(block_sizes, default=3))
            if not isinstance(size, Capacity) or size.slots < 1:
                problem = f"capacity() returned {errors.short_repr(size)}, not Capacity(slots), of 1 or more"
        if problem:
            raise errors.ConfigError(f"cache_policy {self.name}: {problem}")

    def conflict(self, block_sizes: Sequence[int] = ()) -> str:
        """Say which fields contradict each other or, where given, the sizes of blocks; "" for none."""
        if self.blocks_of_three and not set(block_sizes) <= {3}:
            return f"released by {self.release} has blocks of 3 frames; leave released out"
        least = self.sink + self.reserved + self.least_blocks * max(block_sizes, default=1)
        window = getattr(self, "window", least)
        if window < least:
            return f"window {window} is too small; it must be at least {least}"
        return ""

    def misfit(self, num_layers: int, num_heads: int, tokens_per_frame: int) -> str:
        """Say what does not fit a model of these sizes; "" for nothing."""
        # A file of head classes for another model would give every head a wrong class.
        model = num_layers, num_heads
        of_file = getattr(self, "of_model", model)
        if of_file != model:
            return f"its file has {of_file} layers and heads, the model {model}"
        return ""

    def check_schedule(self, schedule: Sequence[Any], blocks: Sequence[range]) -> None:
        """Raise ConfigError where a PromptSwitch begins no later block, is a second one, or cannot be."""
        starts, frames = [block.start for block in blocks[1:]], [switch.frame for switch in schedule]
        possible = {how: self.switch_from(how) for how in get_args(How)}
        possible = {how: first for how, first in possible.items() if first is not None}
        for switch in schedule:
            first, problem = possible.get(switch.how), ""
            if switch.frame not in starts or frames.count(switch.frame) > 1:
                begins = ", ".join(map(str, starts)) or "no later frame"
                problem = f"does not begin a later block, or has two prompts; blocks begin at {begins}"
            elif first is None or switch.frame < first:
                can = ", ".join(f"{how} from frame {n} on" for how, n in possible.items())
                problem = f"cannot {switch.how} under cache_policy {self.name}; it can {can}"
            if problem:
                raise errors.ConfigError(f"prompt_schedule: frame {switch.frame} {problem}")

    def check_recompute(self, context: int, block_size: int) -> None:
        """Raise ConfigError where keys of the last context frames cannot be computed again."""
        least = context + block_size
        if not self.can_recache or (self.num_frames or least) < least:
            raise errors.ConfigError(
                f"cache_policy {self.name} cannot compute {context} frames (recompute_context) again beside "
                f"a block; take window or relative, with a window of {least}"
            )

    def cuts(self, schedule: Sequence[Any]) -> list[int]:
        """Return the frames at which a schedule of prompts begins shots, where the policy knows shots."""
        return []

    def switch_from(self, how: How) -> int | None:
        """Return the first frame at which a change of prompts can change the cache in this way, or None."""
        if how == "recache" and not self.can_recache:
            return None
        if how == "cut" and not self.positions_follow_slots:
            return None
        return 0

    def capacity(self, num_frames: int, block_size: int) -> Capacity:
        """Return the memory for a video of num_frames frames in blocks of at most block_size."""
        slots = min(num_frames, self.num_frames or num_frames)
        if self.positions_follow_slots:
            return Capacity(slots, raw_slots=slots)
        return Capacity(slots)

    # -- called by a KVCache: what a policy overrides --------------------------------------------------------

    def start(self, cache: Any) -> None:
        """Set the policy's state for a new video, or after the cache was recomputed."""

    def see_prompt(self, prompt: str) -> None:
        """Take notice of the prompt with which the next block begins."""

    def admit(self, cache: Any, block: range) -> None:
        """Make room for the frames of a block, and append them."""
        cache.append(block)

    def positions(self, cache: KVCache, cut: bool) -> Sequence[int]:
        """Return the temporal positions of all slots up to the block's own, which come last."""
        if not self.positions_follow_slots:
            return [slot.position for slot in cache.slots[: cache.own.stop]]
        first = cache.own.start
        if cut:
            first = CUT_POSITION
        return [*range(cache.own.start), *range(first, first + len(cache.own))]

    def query_positions(self, cache: KVCache) -> Sequence[int]:
        """Return the temporal positions of the block's queries."""
        return cache.key_positions

    def own_slots(self, cache: KVCache) -> range:
        """Return the slots that the present pass writes: of the block's frames the last ones."""
        return cache.own

    def written(self, cache: KVCache, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the call sees, after a write by queries q [B, L, H, D]."""
        return cache.view(layer)

    def layout(self, cache: KVCache, layer: int, shared: KeyLayout) -> KeyLayout:
        """Return the layout of the keys of one layer, where chooses_by_layer."""
        return shared

    def flush(self, cache: KVCache) -> None:
        """Drop the past except for the sink and the last two frames."""
        sink = min(self.sink, len(cache.slots))
        cache.drop(sink, len(cache.slots) - sink - FLUSH_KEEPS)
        newest = min(len(cache.slots), len(cache.newest), FLUSH_KEEPS)
        cache.own = range(len(cache.slots) - newest, len(cache.slots))
        cache.newest = range(cache.newest.stop - newest, cache.newest.stop)


@dataclass
class Full(CachePolicy):
    """Keep the whole past, each key at its own position. Self-Forcing, arXiv 2506.08009."""

    name = "full"
    keeps_whole_frames = True


@dataclass
class WindowedPolicy(CachePolicy):
    """Keep a window of W frames, the first S of them a sink; evict the oldest after the sink.

    This is the base of most policies. Your own can override evict(), which drops frames:

        @dataclass
        class Earliest(WindowedPolicy):  # keeps the first frames instead of the newest
            name = "earliest"

            def evict(self, cache, count):
                cache.drop(len(cache.slots) - count, count)
    """

    window: files.Count = 21
    sink: files.Frames = 0

    def admit(self, cache: KVCache, block: range) -> None:
        excess = len(cache.slots) + len(block) - self.window
        if excess > 0:
            self.evict(cache, excess)
        cache.append(block)

    def evict(self, cache: KVCache, count: int) -> None:
        """Drop as many frames as the next block needs room for."""
        cache.drop(self.sink, count)


@dataclass
class Window(WindowedPolicy):
    """Keep the first S and the newest W - S frames, at their own positions.

    The rolling KV cache of Self-Forcing (arXiv 2506.08009), with S = 0, and the frame sink of LongLive (arXiv
    2509.22622). With global_sink the sink outlives a recache. With a stride only every stride-th frame of the
    past stays (wave heads in configs/policies/pyramid_heads.yaml).
    """

    global_sink: bool = False
    stride: files.Count = 1

    name = "window"
    keeps_whole_frames = True

    def admit(self, cache: KVCache, block: range) -> None:
        if self.stride > 1:
            for index in reversed(cache.own):  # of the block before; from behind, so that indices hold
                if index >= self.sink and cache.slots[index].frame % self.stride:
                    cache.drop(index, 1)
        super().admit(cache, block)


def of_window(local_attn_size: int, sink_size: int) -> CachePolicy:
    """Return the policy of the older settings: the whole past (-1), or a window with a sink."""
    if local_attn_size == -1:
        return Full()
    return Window(window=local_attn_size, sink=sink_size)


# --- Prompts that change, and keys that are computed again
@dataclass(frozen=True, eq=False)
class PromptSwitch:
    """Change the prompt from a frame on, which must begin a block: a text, or its states [B, n, text_dim].

    how: keep leaves the cache. recache (KV-recache of LongLive, arXiv 2509.22622) computes the newest frames
    again under the new prompt. flush (KV flush of Infinity-RoPE, arXiv 2511.20649) keeps the sink and the
    last two frames. cut (its RoPE cut) flushes and puts the next block at a far position.
    """

    frame: int
    prompt: Annotated[str, Field(min_length=1, max_length=files.MAX_TEXT)] | None = None
    how: How = "keep"
    prompt_embeds: Tensor | None = None

    def __post_init__(self) -> None:
        errors.check_fields(self, "prompt_schedule: ")


def read_switch(settings: Mapping[str, Any]) -> PromptSwitch:
    """Return a switch from its settings: {"frame": 18, "prompt": "a red circle", "how": "flush"}."""
    switch = errors.from_values(PromptSwitch, settings, "prompt_schedule: ")
    if switch.prompt is None:
        raise errors.ConfigError(f"prompt_schedule: frame {switch.frame} has no prompt")
    return switch


def read_switches(schedule: Sequence[Mapping[str, Any]] | None) -> list[PromptSwitch]:
    """Return the prompts that follow the first one, from a config's prompt_schedule."""
    return [read_switch(settings) for settings in schedule or []]


def apply_switch(cache: AnyCache, how: How, past: int, context: int) -> tuple[int, int]:
    """Flush the cache where a switch of prompts says so; return two counts of past frames.

    past is the number of frames before the block whose latents are remembered, context is recompute_context.
    The first count is how many of them are remembered still, the second how many, the newest, are to be
    computed again now.
    """
    if how in ("flush", "cut"):
        cache.flush()
        past = min(past, cache.policy.lasting_sink + FLUSH_KEEPS)  # what is forgotten is not computed again
    if how == "recache":
        return past, past
    return past, min(past, context)

"""What a cache policy is: which slots stay, where their keys stand, and what a prompt switch does to them."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os.path import isfile
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from wan.errors import ConfigError, short_repr
from wan.files import CONFIG_BYTES, MAX_FRAMES, read_text
from wan.keys import AVERAGE, CHOSEN, MIXED, STALE, ChosenTokens, Slot
from wan.rope import rotate_into

# --- What a cache policy is: which slots stay, where their keys stand, and what a prompt switch does to them
if TYPE_CHECKING:
    from wan.cache import KVCache

CUT_POSITION = 45  # where Infinity-RoPE's cut puts a block
FLUSH_KEEPS = 2  # the newest frames that a flush leaves


@dataclass
class CachePolicy:
    """A policy with its fields. Every KV cache takes a copy, so that state in it lives as long as one video.

    released says that the numbers of a public release are wanted, quirks included: by its name, or True for
    the first of releases.
    """

    released: bool | str = False

    name: ClassVar[str]
    releases: ClassVar[tuple[str, ...]] = ()
    block_bound: ClassVar[tuple[str, ...]] = ()  # releases that only know blocks of 3 frames
    stands_by_slot: ClassVar[bool] = False  # keys stand at 0..n-1, whatever their frames
    can_recache: ClassVar[bool] = True
    keeps_whole_frames: ClassVar[bool] = False  # every slot is a frame of its own, so that frames say it all

    def __post_init__(self) -> None:
        if self.released is True and not self.releases:
            raise ConfigError(f"cache_policy {self.name} has no released variant; leave released out")
        if isinstance(self.released, str) and self.released not in self.releases:
            known = ", ".join(self.releases) or "none"
            raise ConfigError(
                f"cache_policy {self.name}: released {short_repr(self.released)} is not one of {known}"
            )
        self.validate()

    @property
    def source(self) -> str:
        """The release whose numbers are wanted, or nothing."""
        return self.releases[0] if self.released is True else str(self.released or "")

    @property
    def chooses_by_layer(self) -> bool:
        """Whether layers, and batch items, may keep different frames."""
        return False

    @property
    def num_frames(self) -> int | None:
        """Frames that a call sees at most; None without a limit."""
        return None

    @property
    def lasting_sink(self) -> int:
        """Frames of the sink that stay where the rest of the cache is computed again."""
        return 0

    # -- checks ----------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise ConfigError for fields that contradict each other."""

    def check(self, block_sizes: Sequence[int]) -> None:
        """Raise ConfigError where blocks of these sizes do not fit."""
        if self.source in self.block_bound and set(block_sizes) - {3}:
            raise ConfigError(
                f"cache_policy {self.name} released by {self.source} has blocks of 3 frames; leave "
                "released out"
            )

    def describe(self) -> dict[str, Any]:
        """The policy as it is written in a config:
        its name and the fields that differ from their defaults.
        """
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {"name": self.name, **chosen}

    def check_flush(self) -> None:
        """Raise ConfigError where a flush would leave what cannot go on."""

    # -- memory ----------------------------------------------------------------------------------------------

    def capacity(self, num_frames: int, block_size: int) -> int:
        """Slots of a cache for num_frames frames in blocks of at most block_size."""
        return num_frames

    def most_slots(self, frames: int) -> int:
        """Slots that a block sees at most once there were frames, its own among them."""
        return min(frames, self.num_frames or frames)

    def raw_slots(self, capacity: int) -> int:
        """How many of the first slots keep un-rotated keys as well;
        all of them where keys move between slots.
        """
        return capacity if self.stands_by_slot else 0

    def state_frames(self) -> int:
        """Frames of keys and values that the policy holds beside the cache."""
        return 0

    # -- a block ---------------------------------------------------------------------------------------------

    def start(self, cache: "KVCache") -> None:
        """Begin a video."""

    def admit(self, cache: "KVCache", block: range, cut: bool) -> None:
        """Make room for a block, append it, and say where keys stand."""
        self.make_room(cache, len(block))
        cache.append(block)
        self.place(cache, cut)

    def make_room(self, cache: "KVCache", new: int) -> None:
        """Let slots leave so that new ones fit."""

    def place(self, cache: "KVCache", cut: bool) -> None:
        """Say where keys stand: at their frames, unless said otherwise."""
        if self.stands_by_slot:
            own = len(cache.own)
            past = range(len(cache.slots) - own)
            first = CUT_POSITION if cut else len(past)
            cache.stand([*past, *range(first, first + own)])

    def query_positions(self, cache: "KVCache") -> Sequence[int]:
        return self.key_positions(cache)

    def key_positions(self, cache: "KVCache") -> Sequence[int]:
        if len(cache.own) < len(
            cache.newest
        ):  # a recomputed cache: frames that get no slot stand at their own
            return cache.newest
        first = cache.slots[cache.own.start].position
        return range(first, first + len(cache.own))

    def own_slots(self, cache: "KVCache", layer: int) -> range:
        """The slots that a layer's present pass writes."""
        return cache.own

    def raw_places(self, cache: "KVCache", layer: int) -> range:
        """Where a layer's present pass puts its un-rotated keys, as far as there is room for them."""
        return self.own_slots(cache, layer)

    def unwritten(self, cache: "KVCache", layer: int) -> int:
        """How many of the own slots, from the first one on, the present pass leaves as they are."""
        return 0

    def written(self, cache: "KVCache", layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """After a write: the keys and values that the call sees."""
        return cache.view(layer)

    def layer_slots(self, cache: "KVCache", layer: int) -> Sequence[Slot]:
        """The slots as one layer has them."""
        return cache.slots

    def layer_tokens(self, layer: int) -> ChosenTokens | None:
        """The tokens that one layer has chosen."""
        return None

    # -- prompt switches -------------------------------------------------------------------------------------

    def flush(self, cache: "KVCache") -> None:
        """Forget the past but for the sink and the last two frames."""
        sink = min(getattr(self, "sink", 0), len(cache.slots))
        cache.remove(sink, len(cache.slots) - sink - FLUSH_KEEPS)
        kept = min(len(cache.slots), len(cache.newest), FLUSH_KEEPS)
        cache.own = range(len(cache.slots) - kept, len(cache.slots))
        cache.newest = range(cache.newest.stop - kept, cache.newest.stop)

    def recache(self, cache: "KVCache", frames: range) -> None:
        """Make the slots of frames, whose keys one forward is about to compute, the whole cache."""
        kept = min(self.lasting_sink, len(cache.slots))
        self.start(cache)
        del cache.slots[kept:]
        cache.append(frames, own=len(frames) - kept)
        self.place(cache, cut=False)


@dataclass
class WindowedPolicy(CachePolicy):
    """A policy of a window of W frames, the first S of them a sink. Fields without a default stand first."""

    window: int = 21
    sink: int = 0

    @property
    def num_frames(self) -> int | None:
        return self.window

    def validate(self) -> None:
        if self.sink < 0:
            raise ConfigError(f"cache_policy {self.name}: sink must be 0 or more frames, not {self.sink}")
        if self.window < self.sink + self.reserved() + 1:
            raise ConfigError(
                f"cache_policy {self.name}: window {self.window} cannot hold {self.sink} sink frames"
                f"{self.reserved_name()} and a frame; it must be at least {self.sink + self.reserved() + 1}"
            )

    def reserved(self) -> int:
        """Slots of the window that are neither sink nor recent frames."""
        return 0

    def reserved_name(self) -> str:
        return f", {self.reserved()} memories" if self.reserved() else ""

    def check(self, block_sizes: Sequence[int]) -> None:
        super().check(block_sizes)
        least = self.sink + self.reserved() + max(block_sizes)
        if self.window < least:
            raise ConfigError(
                f"cache_policy {self.name}: window {self.window} cannot hold {self.sink} sink frames"
                f"{self.reserved_name()} and a block of {max(block_sizes)}; it must be at least {least}"
            )

    def capacity(self, num_frames: int, block_size: int) -> int:
        return min(self.window, num_frames)

    def make_room(self, cache: "KVCache", new: int) -> None:
        excess = len(cache.slots) + new - self.window
        if excess > 0 and cache.capacity >= self.window:
            self.evict(cache, excess)

    def evict(self, cache: "KVCache", excess: int) -> None:
        """The oldest frames after the sink leave."""
        cache.remove(self.sink, excess)


# --- Policies that keep whole frames as they are:
if TYPE_CHECKING:
    from wan.cache import KVCache

LONGLIVE = ("longlive", "longlive_infinity")


@dataclass
class Full(CachePolicy):
    """Everything stays. Self-Forcing, arXiv 2506.08009."""

    name = "full"
    keeps_whole_frames = True


class LongLiveSink:
    """LongLive's release: only the first pass of a block writes sink slots,
    and block 0 sees unwritten ones as zeros.

    Passes 1-4 of a later block leave its frames in the sink as pass 0 wrote them, at t = 1000.
    """

    source: str
    sink: int
    _written: list[bool]

    def start(self, cache: "KVCache") -> None:
        self._written = [False] * cache.num_layers

    def admit(self, cache: "KVCache", block: range, cut: bool) -> None:
        self._written = [False] * cache.num_layers
        super().admit(cache, block, cut)  # type: ignore[misc]
        if self.source in LONGLIVE and block.start == 0 and len(cache.slots) < self.sink:
            cache.append_empty(self.sink - len(cache.slots))

    def unwritten(self, cache: "KVCache", layer: int) -> int:
        if not self._written[layer] or self.source not in LONGLIVE or cache.newest.start == 0:
            return 0
        return min(max(0, self.sink - cache.own.start), len(cache.own))

    def written(self, cache: "KVCache", layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        self._written[layer] = True
        return super().written(cache, layer, q)  # type: ignore[misc]


@dataclass
class Window(LongLiveSink, WindowedPolicy):
    """The first S and the newest W - S frames stay, at their own positions.

    Self-Forcing; LongLive, arXiv 2509.22622.

    With global_sink the sink outlives a recache. With a stride (in a class of per_head) only every stride-th
    frame of the past stays.
    """

    global_sink: bool = False
    stride: int = 1

    name = "window"
    keeps_whole_frames = True
    releases = ("self_forcing", "longlive")
    block_bound = ("longlive",)

    @property
    def lasting_sink(self) -> int:
        return self.sink if self.global_sink else 0

    def validate(self) -> None:
        super().validate()
        if self.stride < 1:
            raise ConfigError(f"cache_policy window: stride must be at least 1, not {self.stride}")

    def capacity(self, num_frames: int, block_size: int) -> int:
        slots = min(self.window, num_frames)
        return max(slots, self.sink) if self.source == "longlive" else slots

    def make_room(self, cache: "KVCache", new: int) -> None:
        if self.stride > 1:
            for index in reversed(cache.own):
                if index >= self.sink and cache.slots[index].frame % self.stride:
                    cache.remove(index, 1)
        super().make_room(cache, new)


@dataclass
class Relative(LongLiveSink, WindowedPolicy):
    """The frames of a window, their keys at 0..n-1 and the queries at the last of them.

    Infinity-RoPE, LongLive.

    As Infinity-RoPE releases it, queries stand at their frames until those reach W, and slot 0 is never
    rotated: frame 0's key was stored rotated, and without a sink another one stands there without RoPE.
    """

    name = "relative"
    keeps_whole_frames = True
    releases = ("infinity_rope", "longlive_infinity")
    block_bound = ("infinity_rope", "longlive_infinity")
    stands_by_slot = True

    def capacity(self, num_frames: int, block_size: int) -> int:
        slots = min(self.window, num_frames)
        return max(slots, self.sink) if self.source == "longlive_infinity" else slots

    def place(self, cache: "KVCache", cut: bool) -> None:
        super().place(cache, cut)
        first = cache.slots[0]
        if self.source == "infinity_rope" and self.sink == 0 and first.frame != 0 and 0 not in cache.own:
            cache.slots[0] = Slot(first.frame, 0, is_rotated=False)
            tokens = cache.tokens(0, 1)
            for keys, raw in zip(cache.keys, cache.raw_keys, strict=True):
                keys[:, tokens] = raw[:, tokens]

    def query_positions(self, cache: "KVCache") -> Sequence[int]:
        at = self.key_positions(cache)
        is_cut = at[0] > len(cache.slots)
        late = cache.newest.start >= self.window
        return at if self.source != "infinity_rope" or late or is_cut else cache.newest


@dataclass
class DeepSink(WindowedPolicy):
    """A window whose sink stands right before the tail. Deep Forcing, arXiv 2512.05081.

    As released, the first roll does not rotate the sink and later ones turn it by as much as the window moves
    on, so that it trails at the distance of the first eviction.
    """

    name = "deep_sink"
    keeps_whole_frames = True
    releases = ("deep_forcing",)
    block_bound = ("deep_forcing",)

    def raw_slots(self, capacity: int) -> int:
        return min(self.sink, capacity)

    def start(self, cache: "KVCache") -> None:
        self._first_roll: int | None = None
        self._rolled = False

    def make_room(self, cache: "KVCache", new: int) -> None:
        self._rolled = False
        super().make_room(cache, new)

    def evict(self, cache: "KVCache", excess: int) -> None:
        super().evict(cache, excess)
        self._rolled = True

    def place(self, cache: "KVCache", cut: bool) -> None:
        sink = min(self.sink, len(cache.slots))
        if self.source:
            if not self._rolled:
                return
            if self._first_roll is None:
                self._first_roll = cache.newest.start
            first = cache.newest.start - self._first_roll
        elif len(cache.slots) <= sink:
            return
        else:
            first = cache.slots[sink].frame - sink
        cache.stand(range(first, first + sink))


# --- Policies that keep running means of frames that are gone, un-rotated, in float32
if TYPE_CHECKING:
    from wan.cache import KVCache

Pair = tuple[Tensor, Tensor]  # keys and values


def blend(old: Pair, new: Pair, weight: float) -> None:
    """old = weight old + (1 - weight) new, in place."""
    for x, y in zip(old, new, strict=True):
        x.mul_(weight).add_(y.float(), alpha=1 - weight)


def check_weight(policy: str, name: str, weight: float) -> None:
    if not 0 <= weight <= 1:
        raise ConfigError(f"cache_policy {policy}: {name} must be in 0..1, not {weight:g}")


@dataclass
class EmaSink(WindowedPolicy):
    """A sink that takes in what leaves: sink = alpha sink + (1 - alpha) evicted, slot by slot.

    Reward Forcing.

    The i-th frame that leaves goes to sink slot i modulo S. As released, the first slots are overwritten
    where the frames that leave are not as many as the sink, and block 0 sees unwritten sink slots as zeros.
    """

    window: int = 9
    sink: int = 3
    alpha: float = 0.999

    name = "ema_sink"
    releases = ("reward_forcing",)
    block_bound = ("reward_forcing",)
    stands_by_slot = True

    def validate(self) -> None:
        super().validate()
        check_weight(self.name, "alpha", self.alpha)
        if self.sink < 1:
            raise ConfigError("cache_policy ema_sink: sink must be at least 1 frame; a window has none")

    def capacity(self, num_frames: int, block_size: int) -> int:
        slots = min(self.window, num_frames)
        return max(slots, self.sink) if self.source else slots

    def state_frames(self) -> int:
        return self.sink

    def start(self, cache: "KVCache") -> None:
        self._sinks: list[Pair] = []  # per layer, float32 [B, sink·S, H, D]

    def admit(self, cache: "KVCache", block: range, cut: bool) -> None:
        super().admit(cache, block, cut)
        if self.source and block.start == 0 and len(cache.slots) < self.sink:
            cache.append_empty(self.sink - len(cache.slots))

    def evict(self, cache: "KVCache", excess: int) -> None:
        at = cache.tokens(0, self.sink)
        buffers = list(zip(cache.raw_keys, cache.values, strict=True))
        if not self._sinks:
            self._sinks = [(raw[:, at].float(), values[:, at].float()) for raw, values in buffers]
        overwritten = self.source and excess != self.sink
        count = min(excess, self.sink) if overwritten else excess
        for (raw, values), sink in zip(buffers, self._sinks, strict=True):
            for index in range(count):
                leaving = cache.tokens(self.sink + index, self.sink + index + 1)
                target = cache.tokens(index % self.sink, index % self.sink + 1)
                there = (sink[0][:, target], sink[1][:, target])
                blend(there, (raw[:, leaving], values[:, leaving]), 0.0 if overwritten else self.alpha)
            raw[:, at], values[:, at] = sink
        for index in range(count):
            frame = cache.slots[self.sink + index].frame if overwritten else AVERAGE
            cache.slots[index % self.sink] = Slot(frame, STALE)
        super().evict(cache, excess)


@dataclass
class TwoMemories(WindowedPolicy):
    """After the sink a long and a short running mean of the frames that left, one token all over. MemRoPE.

    The first roll puts the mean of what leaves into both, and the frames that stood there are lost.
    """

    window: int = 12
    sink: int = 3
    alpha_long: float = 0.01
    alpha_short: float = 0.1

    name = "two_memories"
    releases = ("memrope",)
    stands_by_slot = True

    def validate(self) -> None:
        super().validate()
        check_weight(self.name, "alpha_long", self.alpha_long)
        check_weight(self.name, "alpha_short", self.alpha_short)

    def reserved(self) -> int:
        return 2

    def start(self, cache: "KVCache") -> None:
        self._memories: list[tuple[Pair, Pair]] = []  # per layer long and short, float32 [B, 1, H, D]

    def flush(self, cache: "KVCache") -> None:
        if self._memories:
            cache.remove(self.sink, 2)
            self._memories = []
        super().flush(cache)

    def evict(self, cache: "KVCache", excess: int) -> None:
        first = self.sink + 2
        leaving = cache.tokens(first, first + excess)
        buffers = list(zip(cache.raw_keys, cache.values, strict=True))
        means = [tuple(x[:, leaving].float().mean(1, keepdim=True) for x in pair) for pair in buffers]
        if not self._memories:
            self._memories = [((k.clone(), v.clone()), (k.clone(), v.clone())) for k, v in means]
        else:
            for memories, (k, v) in zip(self._memories, means, strict=True):
                for memory, alpha in zip(memories, (self.alpha_long, self.alpha_short), strict=True):
                    blend(memory, (k, v), 1 - alpha)
        for pair, memories in zip(buffers, self._memories, strict=True):
            for index, memory in enumerate(memories, self.sink):
                for buffer, mean in zip(pair, memory, strict=True):
                    buffer[:, cache.tokens(index, index + 1)] = mean.to(buffer.dtype)
        cache.slots[self.sink : first] = [Slot(AVERAGE, STALE), Slot(AVERAGE, STALE)]
        cache.remove(first, excess)


# --- MemFlow: between sink and window a bank of first frames of blocks, kept by their score under the prompt
if TYPE_CHECKING:
    from wan.cache import KVCache


@dataclass
class MemoryBank(WindowedPolicy):
    """[sink, bank, local], at their frames' positions. W counts sink and local, the bank comes on top.

    Before block b the first frame of block b - 1 is the candidate. The bank grows by one slot every interval
    blocks, and the candidate overwrites its newest. Once it is full the best of its frames stay, best first,
    then the candidate. The score is the mean over heads, text tokens and the frame's tokens of
    cross-attention key · key.
    """

    window: int = 12
    sink: int = 3
    bank: int = 3
    interval: int = 3

    name = "memory_bank"
    releases = ("memflow",)
    block_bound = ("memflow",)
    chooses_by_layer = True
    can_recache = False

    @property
    def num_frames(self) -> int | None:
        return self.window + self.bank

    def validate(self) -> None:
        super().validate()
        for name in ("bank", "interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cache_policy memory_bank: {name} must be at least 1")

    def capacity(self, num_frames: int, block_size: int) -> int:
        return min(self.window, num_frames) + self.bank

    def most_slots(self, frames: int) -> int:
        return min(frames, self.window) + self.bank  # a banked frame may lie in the window, too

    def start(self, cache: "KVCache") -> None:
        self._block = 0
        self._at = 0  # the bank's first slot
        self._frames: list[list[list[int]]] = [[] for _ in cache.keys]  # per layer and batch item

    @property
    def banked(self) -> int:
        """Slots of the bank so far."""
        return len(self._frames[0][0]) if self._frames[0] else 0

    def admit(self, cache: "KVCache", block: range, cut: bool) -> None:
        if self._block:
            self._remember(cache)
        self._block += 1
        excess = len(cache.slots) - self.banked + len(block) - self.window
        if excess > 0:
            cache.remove(self._at + self.banked, excess)
        cache.append(block)

    def flush(self, cache: "KVCache") -> None:
        cache.remove(self._at, self.banked)
        self.start(cache)
        super().flush(cache)
        self._at = min(self.sink, len(cache.slots))

    # -- the bank --------------------------------------------------------------------------------------------

    def _remember(self, cache: "KVCache") -> None:
        """Take the first frame of the last block into the bank."""
        candidate, frame = cache.slots[cache.own.start], cache.newest.start
        wanted = (self._block - 1) // self.interval + 1
        grows = max(0, min(wanted, self.bank) - self.banked)
        self._settle(cache, grows)
        if wanted > self.bank:
            self._keep_best(cache)
        last = self.banked + grows - 1  # its place in the bank
        source, target = (cache.tokens(i, i + 1) for i in (cache.slots.index(candidate), self._at + last))
        for buffer in (*cache.keys, *cache.values):
            buffer[:, target] = buffer[:, source]
        for layer, items in enumerate(self._frames):
            items = items or [[] for _ in range(len(cache.keys[layer]))]
            self._frames[layer] = [[*frames[:last], frame] for frames in items]
        cache.slots[self._at + last] = Slot(frame, frame)

    def _settle(self, cache: "KVCache", grows: int) -> None:
        """Put the bank right after the sink, with room for as many slots as it grows."""
        at, held = min(self.sink, len(cache.slots) - self.banked), self.banked
        if at != self._at and held:  # frames that came after the bank belong to the sink
            order = [*range(self._at + held, at + held), *range(self._at, self._at + held)]
            places = [cache.tokens(i, i + 1) for i in order]
            tokens = torch.cat([torch.arange(place.start, place.stop) for place in places])
            for buffer in (*cache.keys, *cache.values):
                buffer[:, cache.tokens(self._at, at + held)] = buffer[:, tokens.to(buffer.device)]
            cache.slots[self._at : at + held] = [cache.slots[i] for i in order]
        self._at = at
        if grows:
            first = at + held
            cache.move(first, len(cache.slots), first + grows)
            cache.slots[first:first] = [Slot(AVERAGE, AVERAGE)] * grows

    def _keep_best(self, cache: "KVCache") -> None:
        """Order the bank by score, best first, but for its last slot, which is about to be overwritten."""
        held = self.banked
        where, kept = (cache.tokens(self._at, self._at + n) for n in (held, held - 1))
        orders = []
        found = [self.scores(cache, layer, keys[:, where]) for layer, keys in enumerate(cache.keys)]
        scores = cache.shard.sum(torch.stack(found))  # [layers, B, bank]
        for keys, values, of_layer in zip(cache.keys, cache.values, scores, strict=True):
            best = of_layer.argsort(dim=1, descending=True, stable=True)[:, : held - 1]  # ties: lower index
            for buffer in (keys, values):
                slots = buffer[:, where].unflatten(1, (held, -1))  # [B, bank, S, H, D]
                buffer[:, kept] = torch.take_along_dim(slots, best[:, :, None, None, None], 1).flatten(1, 2)
            orders.append(best)
        for layer, items in enumerate(torch.stack(orders).tolist()):  # one wait for the device
            pairs = zip(self._frames[layer], items, strict=True)
            self._frames[layer] = [[*(frames[i] for i in order), AVERAGE] for frames, order in pairs]

    def scores(self, cache: "KVCache", layer: int, keys: Tensor) -> Tensor:
        """Score of each frame of bank keys [B, bank·S, H, D] under the prompt -> float32 [B, bank]."""
        text = cache.text[layer][0].float().mean(1)  # [B, H, D]
        frames = keys.unflatten(1, (self.banked, -1)).mean(2, dtype=torch.float32)  # [B, bank, H, D]
        return torch.einsum("bhd,bfhd->bf", text, frames)

    def layer_slots(self, cache: "KVCache", layer: int) -> Sequence[Slot]:
        slots = list(cache.slots)
        for index in range(self.banked):
            chosen = tuple(frames[index] for frames in self._frames[layer])
            slots[self._at + index] = Slot(chosen[0], chosen[0], items=chosen)
        return slots


# --- Deep Forcing's participative compression: of the past those tokens stay that recent queries look at
if TYPE_CHECKING:
    from wan.cache import KVCache


@dataclass
class Participative(WindowedPolicy):
    """When a block would make more than W frames, its first pass compresses them to N,
    in every layer on its own.

    The sink (S) and the last R frames stay. Of the tokens between them those with the highest score stay, in
    order of time: the sum over the queries of the last R frames and all heads of q·k, where they stand,
    without softmax. The sink then stands right before the positions of the chosen tokens, and those right
    before the recent frames. A token that was chosen reuse_limit times comes after all others.

    As released (arXiv 2512.05081), chosen tokens keep their positions, and the sink is turned first by
    first_turn - N frames, later by as much as the window moved on.
    """

    sink: int = 10
    budget: int = 16
    recent: int = 4
    reuse_limit: int | None = None  # 7 as released
    first_turn: int = 21

    name = "participative"
    releases = ("deep_forcing",)
    block_bound = ("deep_forcing",)
    chooses_by_layer = True
    can_recache = False

    @property
    def places(self) -> int:
        """Frames' worth of tokens that are chosen."""
        return self.budget - self.recent - self.sink

    def validate(self) -> None:
        super().validate()
        if self.source and self.reuse_limit is None:
            self.reuse_limit = 7
        if self.recent < 1:
            raise ConfigError("cache_policy participative: recent must be at least 1 frame")
        if self.places < 0:
            raise ConfigError(
                f"cache_policy participative: budget {self.budget} cannot hold {self.sink} sink frames and "
                f"{self.recent} recent ones; it must be at least {self.sink + self.recent}"
            )
        if self.budget > self.window:
            raise ConfigError(
                f"cache_policy participative: budget {self.budget} is more than window {self.window} and "
                "cannot "
                f"roll; it may be at most {self.window}"
            )
        if self.reuse_limit is not None and self.reuse_limit < 1:
            raise ConfigError("cache_policy participative: reuse_limit must be at least 1")
        if self.first_turn < 0:
            raise ConfigError("cache_policy participative: first_turn must be 0 or more frames")

    def check(self, block_sizes: Sequence[int]) -> None:
        super().check(block_sizes)
        if self.recent < max(block_sizes):
            raise ConfigError(
                f"cache_policy participative: recent {self.recent} cannot hold a block of "
                f"{max(block_sizes)}, "
                f"which its later passes overwrite; it must be at least {max(block_sizes)}"
            )

    def capacity(self, num_frames: int, block_size: int) -> int:
        return min(self.window + block_size, num_frames)

    def raw_slots(self, capacity: int) -> int:
        return min(self.sink, capacity) if self.source else capacity

    # -- a block ---------------------------------------------------------------------------------------------

    def start(self, cache: "KVCache") -> None:
        self._chosen: list[ChosenTokens | None] = [None] * cache.num_layers
        self._queries = [_QuerySums() for _ in cache.keys]
        self._wide: list[Slot] = []  # the slots of a first pass that compresses; empty where none does
        self._pending = [False] * cache.num_layers  # whether a layer's first pass is still to come
        self._sink_at, self._turned_at = self.first_turn - self.budget, -1  # as released

    def admit(self, cache: "KVCache", block: range, cut: bool) -> None:
        cache.append(block)
        self._pending = [True] * cache.num_layers
        self._wide = list(cache.slots) if len(cache.slots) > self.window else []
        if not self._wide:
            return
        recent = self._wide[-self.recent :]
        first = recent[0].frame - self.places  # where the chosen tokens stand
        positions = [MIXED] * self.places if self.source else range(first, first + self.places)
        cache.slots[self.sink :] = [*(Slot(CHOSEN, position) for position in positions), *recent]
        cache.own = range(len(cache.slots) - len(block), len(cache.slots))
        cache.stand(self._sink_positions(first, block.start))

    def _sink_positions(self, chosen: int, start: int) -> range:
        """Where the sink stands when the block at start compresses,
        and chosen tokens stand from a position on.
        """
        if not self.source:
            return range(chosen - self.sink, chosen)
        if self._turned_at >= 0:
            self._sink_at += start - self._turned_at
        self._turned_at = start
        return range(self._sink_at, self._sink_at + self.sink)

    def own_slots(self, cache: "KVCache", layer: int) -> range:
        wide = len(self._wide)
        return range(wide - len(cache.own), wide) if wide and self._pending[layer] else cache.own

    def written(self, cache: "KVCache", layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        compresses = bool(self._wide) and self._pending[layer]
        if compresses or self.recent > len(cache.newest):
            sums = q.unflatten(1, (len(cache.newest), -1)).sum(2, dtype=torch.float32)  # [B, frames, H, D]
            keeps = self._pending[layer] or bool(self.source)  # the release counts every pass
            self._queries[layer].add(sums, keeps, self.recent)
        self._pending[layer] = False
        if compresses:
            self._compress(cache, layer)
        return cache.view(layer)

    def flush(self, cache: "KVCache") -> None:
        super().flush(cache)
        self._chosen = [None] * cache.num_layers

    def layer_tokens(self, layer: int) -> ChosenTokens | None:
        return self._chosen[layer]

    # -- the choice ------------------------------------------------------------------------------------------

    def _compress(self, cache: "KVCache", layer: int) -> None:
        """Choose tokens and close up: sink, chosen, recent."""
        S, total = cache.tokens_per_frame, len(self._wide)
        known = self._candidates(cache, layer)
        between = cache.tokens(self.sink, total - self.recent)
        queries = self._queries[layer].total(self.recent)
        scores = cache.shard.sum(self.scores(cache.keys[layer][:, between], queries))
        if self.reuse_limit is not None:
            scores = scores.masked_fill(known.uses >= self.reuse_limit, -torch.inf)
        best = scores.argsort(dim=1, descending=True, stable=True)[
            :, : self.places * S
        ]  # ties: the lower index
        order = best.sort(1).values  # [B, places·S], in order of time
        self._chosen[layer] = chosen = known.take(order, range(self.sink, self.sink + self.places))
        recent = cache.tokens(total - self.recent, total)
        target = cache.tokens(self.sink + self.places, self.budget)
        place = cache.tokens(self.sink, self.sink + self.places)
        moved = [cache.keys[layer], cache.values[layer]]
        moved += [] if self.source else [cache.raw_keys[layer]]
        for buffer in moved:
            kept, tail = (
                buffer[:, between].take_along_dim(order[:, :, None, None], 1),
                buffer[:, recent].clone(),
            )
            buffer[:, place], buffer[:, target] = kept, tail
        if not self.source and self.places:
            self._stand(cache, layer, chosen, place)
        cache.layouts[layer] = replace(cache.layouts[layer], chosen=self._chosen[layer])

    @staticmethod
    def scores(keys: Tensor, queries: Tensor) -> Tensor:
        """Sum over heads of summed queries [B, H, D] · keys [B, n, H, D] -> float32 [B, n]."""
        return torch.einsum("bhd,bnhd->bn", queries, keys.float())

    def _candidates(self, cache: "KVCache", layer: int) -> ChosenTokens:
        """What is known of the tokens between the sink and the recent frames."""
        S, before = cache.tokens_per_frame, self._chosen[layer]
        first = self.sink + (0 if before is None else self.places)
        frames = [slot.frame for slot in self._wide[first : len(self._wide) - self.recent]]
        keys = cache.keys[layer]
        whole = ChosenTokens.of_frames(frames, S, keys.shape[0], keys.device)
        return whole if before is None else before.followed_by(whole)

    def _stand(self, cache: "KVCache", layer: int, chosen: ChosenTokens, place: slice) -> None:
        """Rotate the chosen keys to the positions of their slots; each keeps its row and column."""
        S = cache.tokens_per_frame
        positions = [slot.position for slot in cache.slots[self.sink : self.sink + self.places]]
        assert cache.rope is not None
        slot = torch.arange(place.stop - place.start, device=chosen.indices.device) // S
        row = slot * S + chosen.indices  # [B, places·S] into tables [places·S, 1, D]
        cos, sin = (table[row] for table in cache.rope(range(positions[0], positions[-1] + 1)))
        rotate_into(cache.keys[layer][:, place], cache.raw_keys[layer][:, place], cos, sin)
        chosen.positions.copy_((slot + positions[0]).expand_as(chosen.positions))


class _QuerySums:
    """Summed queries of the newest frames of one layer, [B, frames, H, D] in float32."""

    def __init__(self) -> None:
        self._past: Tensor | None = None
        self._last: Tensor | None = None

    def add(self, sums: Tensor, keeps: bool, frames: int) -> None:
        """Take those of one pass.

        keeps: the pass before it is not the same block's, or counts all the same.
        """
        if keeps and self._last is not None:
            past = [self._last] if self._past is None else [self._past, self._last]
            self._past = torch.cat(past, 1)[:, -frames:]
        self._last = sums

    def total(self, frames: int) -> Tensor:
        """Sum over the newest frames -> [B, H, D]."""
        assert self._last is not None
        known = [self._last] if self._past is None else [self._past, self._last]
        return torch.cat(known, 1)[:, -frames:].sum(1)


# --- Rolling Sink: late blocks see the first frames of the video again, forwards and backwards,
if TYPE_CHECKING:
    from wan.cache import KVCache


@dataclass
class RollingSink(WindowedPolicy):
    """A window without a sink, in which the block before a finished one gives way to frames of the first W
    - n.

    n is the size of a block. The slot at position p takes the clean keys and values of frame p modulo (W -
    n), counted backwards in every second round, the keys turned to p.
    """

    name = "rolling_sink"
    releases = ("rolling_sink",)
    block_bound = ("rolling_sink",)
    can_recache = False

    def validate(self) -> None:
        super().validate()
        if self.sink:
            raise ConfigError("cache_policy rolling_sink has no sink; leave it out or set it to 0")

    def check(self, block_sizes: Sequence[int]) -> None:
        super().check(block_sizes)
        self._kept = self.window - max(block_sizes)
        if self.window < 2 * max(block_sizes):
            raise ConfigError(
                f"cache_policy rolling_sink: window {self.window} cannot hold two blocks of "
                f"{max(block_sizes)}; "
                f"it must be at least {2 * max(block_sizes)}"
            )

    def capacity(self, num_frames: int, block_size: int) -> int:
        self._kept = self.window - block_size
        return super().capacity(num_frames, block_size)

    def raw_slots(self, capacity: int) -> int:
        return min(self._kept, capacity)  # they are filled once, by the first frames, and never move

    def raw_places(self, cache: "KVCache", layer: int) -> range:
        return cache.newest  # the first frames keep their places where a flush moves slots

    def state_frames(self) -> int:
        return self.window  # values of the first frames; their raw keys are counted by the cache

    def start(self, cache: "KVCache") -> None:
        self._values: list[Tensor] = [x.new_empty(x.shape) for x in cache.values] if cache.raw_keys else []
        self._values = [x[:, : cache.raw_slots * cache.tokens_per_frame] for x in self._values]

    def make_room(self, cache: "KVCache", new: int) -> None:
        self._finish(cache)
        super().make_room(cache, new)

    def flush(self, cache: "KVCache") -> None:
        self._finish(cache)
        super().flush(cache)

    def archived(self, position: int) -> int:
        """The frame whose keys and values stand at a late position."""
        turn, place = divmod(position, self._kept)
        return self._kept - 1 - place if turn % 2 else place

    def _finish(self, cache: "KVCache") -> None:
        """After the clean pass of a block: remember the first frames, or replace the block before it."""
        for index, frame in zip(cache.own, cache.newest, strict=True):
            if frame < self._kept:
                for kept, values in zip(self._values, cache.values, strict=True):
                    kept[:, cache.tokens(frame, frame + 1)] = values[:, cache.tokens(index, index + 1)]
        if cache.newest.start < self.window:
            return
        for index in range(max(0, cache.own.start - len(cache.own)), cache.own.start):
            self._replace(cache, index)

    def _replace(self, cache: "KVCache", index: int) -> None:
        position = cache.slots[index].position
        frame = self.archived(position)
        source, target = cache.tokens(frame, frame + 1), cache.tokens(index, index + 1)
        assert cache.rope is not None
        cos, sin = cache.rope(range(position, position + 1))
        for layer, kept in enumerate(self._values):
            rotate_into(cache.keys[layer][:, target], cache.raw_keys[layer][:, source], cos, sin)
            cache.values[layer][:, target] = kept[:, source]
        cache.slots[index] = Slot(frame, position)


# --- A policy for each class of heads: heads of one class share a cache of their own
Labels = tuple[tuple[str, ...], ...]  # of every layer and head


@dataclass
class PerHead(CachePolicy):
    """file: a CSV of classes, layers x heads. policies: a policy for each class.

    All have the same query positions. Pyramid Forcing, Forcing-KV, Dummy Forcing.
    """

    file: str = ""
    policies: dict[str, CachePolicy] = field(default_factory=dict)

    name: ClassVar[str] = "per_head"
    can_recache: ClassVar[bool] = False

    def validate(self) -> None:
        if self.released:
            raise ConfigError("cache_policy per_head has no released variant; leave released out")
        if not self.file or not self.policies:
            raise ConfigError("cache_policy per_head needs a file of head classes and policies for them")
        self.labels = read_labels(self.file)
        self.classes = self.policies
        missing = sorted({label for row in self.labels for label in row} - set(self.classes))
        if missing:
            known = ", ".join(self.classes)
            raise ConfigError(
                f"cache_policy per_head: class {short_repr(missing[0])} of {self.file} has no policy: {known}"
            )
        self._check_positions()

    def _check_positions(self) -> None:
        """All classes put the queries at the same positions."""
        by_slot = {
            label: policy.num_frames for label, policy in self.classes.items() if policy.stands_by_slot
        }
        if by_slot and (len(by_slot) < len(self.classes) or len(set(by_slot.values())) > 1):
            raise ConfigError(
                "cache_policy per_head: the classes put queries at different positions; policies whose "
                "keys stand "
                f"at 0..n-1 ({', '.join(by_slot)}) go together only, and with one window"
            )
        for label, policy in self.classes.items():
            if policy.source:
                raise ConfigError(
                    f"cache_policy per_head: class {label!r} is released; only clean rules go here"
                )

    def describe(self) -> dict[str, Any]:
        classes = {label: policy.describe() for label, policy in self.policies.items()}
        return {"name": self.name, "file": self.file, "policies": classes}

    def check(self, block_sizes: Sequence[int]) -> None:
        for policy in self.classes.values():
            policy.check(block_sizes)

    def check_flush(self) -> None:
        sinks = {getattr(one, "sink", 0) for one in self.classes.values() if one.stands_by_slot}
        if len(sinks) > 1:
            raise ConfigError(
                "cache_policy per_head: a flush leaves the sink and two frames, and queries behind sinks of "
                f"{', '.join(map(str, sorted(sinks)))} frames would stand at different positions; use keep, "
                "or one sink"
            )

    def check_model(self, num_layers: int, num_heads: int) -> None:
        """Raise ConfigError where the labels are not of this model."""
        shape = (len(self.labels), len(self.labels[0]))
        if shape != (num_layers, num_heads):
            raise ConfigError(
                f"cache_policy per_head: {self.file} has {shape[0]} layers x {shape[1]} heads, "
                f"the model {num_layers} x {num_heads}"
            )

    def heads(self, label: str) -> list[list[int]]:
        """The heads of a class in every layer."""
        return [[head for head, other in enumerate(row) if other == label] for row in self.labels]

    @property
    def chooses_by_layer(self) -> bool:
        return any(policy.chooses_by_layer for policy in self.classes.values())

    @property
    def num_frames(self) -> int | None:
        seen = [policy.num_frames for policy in self.classes.values()]
        return None if None in seen else max(size for size in seen if size is not None)

    def capacity(self, num_frames: int, block_size: int) -> int:
        """Of the mean head, rounded up."""
        return self._mean([policy.capacity(num_frames, block_size) for policy in self.classes.values()])

    def raw_slots(self, capacity: int) -> int:
        return capacity if any(policy.raw_slots(capacity) for policy in self.classes.values()) else 0

    def state_frames(self) -> int:
        return max(policy.state_frames() for policy in self.classes.values())

    def _mean(self, sizes: Sequence[int]) -> int:
        counts = [sum(row.count(label) for row in self.labels) for label in self.classes]
        total = sum(len(row) for row in self.labels)
        return -(-sum(n * size for n, size in zip(counts, sizes, strict=True)) // total)


def read_labels(file: str) -> Labels:
    """Classes of layers x heads from a CSV: one row a layer, or rows of layer, head,
    class under such a header.
    """
    if not isfile(file):
        said = f"cache_policy per_head: {short_repr(file)} not found"
        raise ConfigError(f"{said}; it is a CSV of classes, layers x heads")
    lines = (line for line in read_text(file, CONFIG_BYTES).splitlines() if not line.startswith("#"))
    try:
        rows = [row for row in csv.reader(lines) if row]
    except csv.Error as error:
        raise ConfigError(f"cache_policy per_head: {file} is not a CSV of classes: {error}") from None
    if not rows:
        raise ConfigError(f"cache_policy per_head: {file} is empty")
    if "layer" in rows[0] and "head" in rows[0]:
        rows = _from_columns(rows, file)
    if len({len(row) for row in rows}) != 1:
        raise ConfigError(f"cache_policy per_head: the rows of {file} have different numbers of heads")
    return tuple(tuple(label.strip() for label in row) for row in rows)


def _from_columns(rows: list[list[str]], file: str) -> list[list[str]]:
    layer, head = rows[0].index("layer"), rows[0].index("head")
    label = next((i for i in range(len(rows[0])) if i not in (layer, head)), None)
    if label is None:
        raise ConfigError(f"cache_policy per_head: {file} has no column of classes beside layer and head")
    try:
        found = {(int(row[layer]), int(row[head])): row[label] for row in rows[1:]}
        layers, heads = (max(index) + 1 for index in zip(*found, strict=True))
        return [[found[i, j] for j in range(heads)] for i in range(layers)]
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            f"cache_policy per_head: {file} does not name every layer and head: {short_repr(error)}"
        ) from None


# --- Cache policies: what a block may look at
POLICIES: dict[str, type[CachePolicy]] = {
    policy.name: policy
    for policy in (
        Full,
        Window,
        Relative,
        DeepSink,
        Participative,
        EmaSink,
        TwoMemories,
        RollingSink,
        MemoryBank,
        PerHead,
    )
}

__all__ = ["POLICIES", "CachePolicy", "WindowedPolicy", "make_policy", "of_window", "read_policy"]


def make_policy(name: str, **chosen: Any) -> CachePolicy:
    """A policy by its name in configs, with its fields.

    Raises ConfigError for what it does not have or cannot do.
    """
    if name not in POLICIES:
        raise ConfigError(f"cache_policy {short_repr(name)} is not one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    known = {f.name: f for f in fields(policy)}
    for key, value in chosen.items():
        if key not in known:
            said = short_repr(key)
            raise ConfigError(f"cache_policy {name} has no field {said}; it has {', '.join(known)}")
        _check_type(name, key, value, known[key].default)
    if name == PerHead.name:
        chosen["policies"] = _of_classes(chosen.get("policies"))
    return policy(**chosen)


def _of_classes(policies: Any) -> dict[str, CachePolicy]:
    """The policies of classes of heads, from policies or their settings."""
    if not isinstance(policies, Mapping):
        raise ConfigError("cache_policy per_head needs policies: the settings of one for each class of heads")
    found = {}
    for label, settings in policies.items():
        if not isinstance(settings, (Mapping, CachePolicy)):
            said = short_repr(label)
            raise ConfigError(f"cache_policy per_head: class {said} needs the settings of a policy")
        found[str(label)] = settings if isinstance(settings, CachePolicy) else read_policy(settings)
        if isinstance(found[str(label)], PerHead):
            raise ConfigError(f"cache_policy per_head: class {short_repr(label)} cannot be per_head again")
    return found


def _check_type(name: str, field: str, value: Any, default: Any) -> None:
    """Raise ConfigError for a value that is not of the kind that the field's default is."""
    if field == "released":
        fits, kind = isinstance(value, (bool, str)), "true, false or the name of a release"
    elif isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        fits, kind = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
    elif isinstance(default, str):
        fits, kind = isinstance(value, str), "the name of a file"
    elif isinstance(default, int) or default is None:
        fits, kind = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        return
    if not fits and not (value is None and default is None):
        raise ConfigError(f"cache_policy {name}: {field} must be {kind}, not {short_repr(value)}")
    if type(value) is int and value > MAX_FRAMES:
        said = short_repr(value)
        raise ConfigError(f"cache_policy {name}: {field} may be at most {MAX_FRAMES}, not {said}")


def read_policy(settings: Mapping[str, Any]) -> CachePolicy:
    """A policy from its settings in a config: {"name": "deep_sink", "window": 21, "sink": 10}."""
    if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
        raise ConfigError(f"cache_policy needs a name, one of {', '.join(POLICIES)}")
    return make_policy(**{str(key): value for key, value in settings.items()})


def of_window(local_attn_size: int, sink_size: int) -> CachePolicy:
    """The policy that the older settings mean: the whole past (-1), or a window with a sink."""
    if local_attn_size == -1:
        return make_policy("full")
    return make_policy("window", window=local_attn_size, sink=sink_size)

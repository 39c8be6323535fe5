"""What a cache policy is: which slots stay, where their keys stand, and what a prompt switch does to them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from wan.errors import ConfigError, quoted
from wan.modules.key_layout import ChosenTokens, Slot

if TYPE_CHECKING:
    from wan.modules.kv_cache import KVCache

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
                f"cache_policy {self.name}: released {quoted(self.released)} is not one of {known}"
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

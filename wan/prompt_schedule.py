"""Prompts that change during a video, and what a change does to the cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from wan.errors import ConfigError, require_text, short_repr
from wan.files import MAX_TEXT
from wan.policies import FLUSH_KEEPS, CachePolicy

if TYPE_CHECKING:
    from wan.cache import KVCache, PerHeadCache

How = Literal["keep", "recache", "flush", "cut"]


@dataclass(frozen=True, eq=False)
class PromptSwitch:
    """From frame on, which must begin a block, another prompt: a text, or its states [B, n, text_dim].

    keep: the cache stays as it is. recache (LongLive): the newest frames are computed again under the new
    prompt. flush (Infinity-RoPE): only the sink and the last two frames stay. cut: flush, and the next block
    stands far away.
    """

    frame: int
    prompt: str | None = None
    how: How = "keep"
    prompt_embeds: Tensor | None = None

    def __post_init__(self) -> None:
        if self.how not in get_args(How):
            known = ", ".join(get_args(How))
            raise ConfigError(f"prompt_schedule: {short_repr(self.how)} is not one of {known}")


def read_switch(settings: Mapping[str, Any]) -> PromptSwitch:
    """A switch from its settings in a config or file: {"frame": 18, "prompt": "a red circle", "how":
    "flush"}.
    """
    known = ("frame", "prompt", "how")
    for name in settings:
        if name not in known:
            raise ConfigError(f"prompt_schedule has no {short_repr(name)}; a switch has {', '.join(known)}")
    frame, prompt = settings.get("frame"), settings.get("prompt")
    if type(frame) is not int or not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(
            "prompt_schedule: a switch needs a frame (a whole number) and a prompt, not "
            f"{short_repr(dict(settings))}"
        )
    require_text(prompt, "prompt_schedule", MAX_TEXT)
    return PromptSwitch(frame, prompt, settings.get("how", "keep"))


def check_schedule(schedule: Sequence[PromptSwitch], blocks: Sequence[range], policy: CachePolicy) -> None:
    """Raise ConfigError for a switch within a block, before the first one, twice at one place,
    or past the policy.
    """
    starts = [frames.start for frames in blocks[1:]]
    for switch in schedule:
        if switch.frame not in starts:
            raise ConfigError(
                f"prompt_schedule: frame {switch.frame} does not begin a block after the first; "
                f"blocks begin at {', '.join(map(str, starts)) or 'no later frame'}"
            )
        if switch.how == "recache" and not policy.can_recache:
            raise ConfigError(
                f"prompt_schedule: cache_policy {policy.name} cannot compute its cache again; use keep or "
                "flush"
            )
        if switch.how in ("flush", "cut"):
            policy.check_flush()
        if switch.how == "cut" and not policy.stands_by_slot:
            raise ConfigError(
                f"prompt_schedule: a cut needs a policy whose keys stand at 0..n-1, such as relative, "
                f"not {policy.name}; use flush"
            )
        sink = getattr(policy, "sink", 0)
        if switch.how == "cut" and policy.source == "longlive_infinity" and switch.frame < sink:
            raise ConfigError(
                f"prompt_schedule: longlive_infinity keeps no un-rotated keys of a sink deeper than a block, "
                f"which a cut at frame {switch.frame} would turn; cut after its {sink} frames, or use flush"
            )
    frames = [switch.frame for switch in schedule]
    if len(set(frames)) < len(frames):
        raise ConfigError(f"prompt_schedule: two prompts begin at frame {max(frames, key=frames.count)}")


def forget(cache: "KVCache | PerHeadCache", how: How, past: int, context: int) -> tuple[int, int]:
    """Let a cache forget what a switch wants before a block, of past frames whose latents are remembered.

    context is recompute_context. Returns how many of them are remembered still, and how many, the newest, are
    now to be computed again.
    """
    if how in ("flush", "cut"):
        cache.flush()
        past = min(past, cache.policy.lasting_sink + FLUSH_KEEPS)  # what is forgotten is not computed again
    return past, past if how == "recache" else min(past, context)


def check_recompute(context: int, policy: CachePolicy, block_size: int) -> None:
    """Raise ConfigError where keys of the last context frames cannot be computed again (0: they are not)."""
    if context < 0:
        raise ConfigError(f"recompute_context must be 0 or more frames, not {context}")
    if context and not policy.can_recache:
        raise ConfigError(
            f"recompute_context: cache_policy {policy.name} cannot compute its cache again; take window or "
            "relative"
        )
    if context and policy.num_frames is not None and context + block_size > policy.num_frames:
        raise ConfigError(
            f"recompute_context {context} and a block of {block_size} do not fit the window of "
            f"{policy.num_frames} frames; take a window of {context + block_size}"
        )

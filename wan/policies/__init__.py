"""Cache policies by name: what a block may look at, and what a change of prompts does to the cache.

    policy = read_policy({"name": "deep_sink", "window": 21, "sink": 10})
    CausalInferencePipeline(model, cache_policy=policy)

frames.py has the policies of all heads alike, headwise.py those of single heads. A new policy is a subclass
of CachePolicy, or of WindowedPolicy, and a row of POLICIES (CONTRIBUTING.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from wan.cache import FLUSH_KEEPS, CachePolicy, How
from wan.errors import ConfigError, check_fields, from_values, library_reads, short_repr
from wan.files import MAX_TEXT
from wan.policies.frames import (
    DeepSink,
    EmaSink,
    Full,
    MemoryBank,
    Participative,
    Relative,
    RollingSink,
    TwoMemories,
    Window,
)
from wan.policies.frames import (
    WindowedPolicy as WindowedPolicy,
)
from wan.policies.headwise import (
    DummyForcing,
    ForcingKV,
    HeadBudget,
    PerHead,
    TriAttention,
)
from wan.policies.headwise import (
    HeadwisePolicy as HeadwisePolicy,
)

# --- Policies by name, and from settings
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
        DummyForcing,
        ForcingKV,
        TriAttention,
        HeadBudget,
    )
}


def read_policy(settings: Mapping[str, Any] | CachePolicy) -> CachePolicy:
    """Return a policy from its settings in a config: {"name": "deep_sink", "window": 21, "sink": 10}.

    Raises ConfigError for a name that is none, a field that the policy does not have, or a wrong value.
    """
    if isinstance(settings, CachePolicy):
        return settings
    given = {str(key): value for key, value in settings.items()} if isinstance(settings, Mapping) else {}
    name = given.pop("name", settings)
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"cache_policy {short_repr(name)} is not one of {', '.join(POLICIES)}")
    if "policies" in given:  # of classes of heads
        with library_reads(f"cache_policy {name}: policies", remedy="give a policy for each class of heads"):
            given["policies"] = {str(label): read_policy(one) for label, one in given["policies"].items()}
    return from_values(POLICIES[name], given, f"cache_policy {name}: ")


def make_policy(name: str, **chosen: Any) -> CachePolicy:
    """Return a policy by its name in configs, with its fields: make_policy("window", window=9, sink=3)."""
    return read_policy({"name": name, **chosen})


def of_window(local_attn_size: int, sink_size: int) -> CachePolicy:
    """Return the policy that the older settings mean: the whole past (-1), or a window with a sink."""
    return Full() if local_attn_size == -1 else Window(window=local_attn_size, sink=sink_size)


# --- Prompts that change, and keys that are computed again
@dataclass(frozen=True, eq=False)
class PromptSwitch:
    """Change the prompt from a frame on, which must begin a block: a text, or its states [B, n, text_dim].

    how: keep leaves the cache. recache (KV-recache of LongLive, arXiv 2509.22622) computes the newest frames
    again under the new prompt. flush (KV flush of Infinity-RoPE, arXiv 2511.20649) keeps the sink and the
    last two frames. cut (its RoPE cut) flushes and puts the next block at a far position.
    """

    frame: int
    prompt: Annotated[str, 1, MAX_TEXT] | None = None
    how: How = "keep"
    prompt_embeds: Tensor | None = None

    def __post_init__(self) -> None:
        check_fields(self, "prompt_schedule: ")


def read_switch(settings: Mapping[str, Any]) -> PromptSwitch:
    """Return a switch from its settings: {"frame": 18, "prompt": "a red circle", "how": "flush"}."""
    switch = from_values(PromptSwitch, settings, "prompt_schedule: ")
    if switch.prompt is None:
        raise ConfigError(f"prompt_schedule: frame {switch.frame} has no prompt")
    return switch


def apply_switch(cache: Any, how: How, past: int, context: int) -> tuple[int, int]:
    """Flush the cache where a switch of prompts says so; return two counts of past frames.

    past is the number of frames before the block whose latents are remembered, context is recompute_context.
    The first count is how many of them are remembered still, the second how many, the newest, are to be
    computed again now.
    """
    if how in ("flush", "cut"):
        cache.flush()
        past = min(past, cache.policy.lasting_sink + FLUSH_KEEPS)  # what is forgotten is not computed again
    return past, past if how == "recache" else min(past, context)

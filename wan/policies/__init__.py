"""Cache policies by name: they decide what a block may attend to.

    policy = read_policy({"name": "deep_sink", "window": 21, "sink": 10})
    CausalInferencePipeline(model, cache_policy=policy)

frames.py has the policies of all heads alike, headwise.py those of single heads. A new policy is a subclass
of CachePolicy, or of WindowedPolicy, and a row of POLICIES (CONTRIBUTING.md).
"""

from collections.abc import Mapping
from typing import Any

from wan.blocks import block_ranges
from wan.cache import CachePolicy, Full, read_switches
from wan.config import RunConfig
from wan.errors import ConfigError, from_values, library_reads, require_known
from wan.policies.frames import (
    DeepSink,
    EmaSink,
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


def register(own: type[CachePolicy]) -> None:
    """Register a user's policy for configs; a notebook cell may define it again.

    Raises ConfigError for the name of another policy.
    """
    if POLICIES.get(own.name, own).__qualname__ != own.__qualname__:
        raise ConfigError(f"cache_policy {own.name} is the name of another policy; give yours another")
    POLICIES[own.name] = own


def read_policy(settings: Mapping[str, Any] | CachePolicy) -> CachePolicy:
    """Return a policy from its settings in a config: {"name": "deep_sink", "window": 21, "sink": 10}.

    Raises ConfigError for a name that is none, a field that the policy does not have, or a wrong value.
    """
    if isinstance(settings, CachePolicy):
        return settings
    given = {str(key): value for key, value in settings.items()} if isinstance(settings, Mapping) else {}
    name = given.pop("name", settings)
    require_known(name, POLICIES, "there is no cache_policy {}")
    if "policies" in given:  # of classes of heads
        with library_reads(f"cache_policy {name}: policies", remedy="give a policy for each class of heads"):
            given["policies"] = {str(label): read_policy(one) for label, one in given["policies"].items()}
    return from_values(POLICIES[name], given, f"cache_policy {name}: ")


def policy_of(config: RunConfig) -> CachePolicy:
    """Return the policy of a run: cache_policy, or what local_attn_size and sink_size mean.

    Raises ConfigError where it does not fit the run's blocks and prompts.
    """
    # 1. A window has two spellings, of which only one may be used.
    has_window = config.local_attn_size != -1 or config.sink_size > 0
    if config.cache_policy is not None and has_window:
        spelling = f"{{name: window, window: {config.local_attn_size}, sink: {config.sink_size}}}"
        remedy = "leave them out where cache_policy is given"
        raise ConfigError(f"local_attn_size and sink_size mean cache_policy {spelling}; {remedy}")
    if config.cache_policy is not None:
        policy = read_policy(config.cache_policy)
    else:
        policy = of_window(config.local_attn_size, config.sink_size)
    # 2. It fits the blocks, the prompts that follow, and keys that are computed again.
    policy.check(config.block_sizes)
    policy.check_schedule(read_switches(config.prompt_schedule), block_ranges(config.block_sizes))
    if config.recompute_context:
        policy.check_recompute(config.recompute_context, config.num_frame_per_block)
    return policy


def policy_classes(config: RunConfig) -> list[type[CachePolicy]]:
    """Return the classes of cache_policy, and of its policies for classes of heads; no file is read."""
    classes = list[type[CachePolicy]]()
    remaining = [config.cache_policy] if config.cache_policy else []
    for settings in remaining:
        remaining += (settings.get("policies") or {}).values()
        classes.append(POLICIES[settings["name"]])
    return classes


def make_policy(name: str, **chosen: Any) -> CachePolicy:
    """Return a policy by its name in configs, with its fields: make_policy("window", window=9, sink=3)."""
    return read_policy({"name": name, **chosen})


def of_window(local_attn_size: int, sink_size: int) -> CachePolicy:
    """Return the policy of the older settings: the whole past (-1), or a window with a sink."""
    return Full() if local_attn_size == -1 else Window(window=local_attn_size, sink=sink_size)

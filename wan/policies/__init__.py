"""Cache policies by name: they decide what a block may attend to.

    policy = read_policy({"name": "deep_sink", "window": 21, "sink": 10})
    CausalInferencePipeline(model, cache_policy=policy)

frames.py has the policies of all heads alike, headwise.py those of single heads. A new policy is a subclass
of CachePolicy, or of WindowedPolicy, and a row of POLICIES (CONTRIBUTING.md).
"""

from collections.abc import Mapping
from typing import Any

from wan.cache import CachePolicy, Full
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


def make_policy(name: str, **chosen: Any) -> CachePolicy:
    """Return a policy by its name in configs, with its fields: make_policy("window", window=9, sink=3)."""
    return read_policy({"name": name, **chosen})


def of_window(local_attn_size: int, sink_size: int) -> CachePolicy:
    """Return the policy of the older settings: the whole past (-1), or a window with a sink."""
    return Full() if local_attn_size == -1 else Window(window=local_attn_size, sink=sink_size)

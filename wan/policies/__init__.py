"""Cache policies by name: they decide what a block may attend to.

    policy = read_policy({"name": "deep_sink", "window": 21, "sink": 10})
    CausalInferencePipeline(model, cache_policy=policy)

frames.py has the policies of all heads and of classes of heads, headwise.py those of single heads. A new
policy is a subclass of CachePolicy, or of WindowedPolicy, and a row of POLICIES (CONTRIBUTING.md).
"""

from collections.abc import Mapping
from typing import Any

from wan import cache, errors
from wan.blocks import block_ranges
from wan.cache import Window as Window
from wan.cache import WindowedPolicy as WindowedPolicy
from wan.config import RunConfig
from wan.policies import frames, headwise
from wan.policies.headwise import HeadwisePolicy as HeadwisePolicy

POLICIES: dict[str, type[cache.CachePolicy]] = {
    "full": cache.Full,
    "window": cache.Window,
    "relative": frames.Relative,
    "deep_sink": frames.DeepSink,
    "participative": frames.Participative,
    "ema_sink": frames.EmaSink,
    "two_memories": frames.TwoMemories,
    "rolling_sink": frames.RollingSink,
    "memory_bank": frames.MemoryBank,
    "multi_shot": frames.MultiShot,
    "per_head": frames.PerHead,
    "dummy_forcing": headwise.DummyForcing,
    "forcing_kv": headwise.ForcingKV,
    "triattention": headwise.TriAttention,
    "head_budget": frames.HeadBudget,
}
# What `released` chooses: the class that has the numbers of a public release, the policy itself where its
# clean rule has them. The first one is meant by `released: true`.
RELEASES: dict[str, dict[str, type[cache.CachePolicy]]] = {
    "window": {"self_forcing": cache.Window, "longlive": frames.LongLiveWindow},
    "relative": {"infinity_rope": frames.InfinityRope, "longlive_infinity": frames.LongLiveInfinity},
    "deep_sink": {"deep_forcing": frames.DeepForcingSink},
    "participative": {"deep_forcing": frames.DeepForcing},
    "ema_sink": {"reward_forcing": frames.RewardForcing},
    "two_memories": {"memrope": frames.TwoMemories},
    "rolling_sink": {"rolling_sink": frames.RollingSink},
    "memory_bank": {"memflow": frames.MemoryBank},
    "multi_shot": {"longlive2": frames.MultiShot},
    "dummy_forcing": {"dummy_forcing": headwise.DummyForcingRelease},
    "forcing_kv": {"forcing_kv": headwise.ForcingKVRelease},
    "triattention": {"triattention": headwise.TriAttentionRelease},
}


def register(policy: type[cache.CachePolicy]) -> None:
    """Register a user's policy for configs; a notebook cell may define it again.

    Raises ConfigError for the name of another policy.
    """
    if POLICIES.get(policy.name, policy).__qualname__ != policy.__qualname__:
        raise errors.ConfigError(
            f"cache_policy {policy.name} is the name of another policy; give yours another"
        )
    POLICIES[policy.name] = policy


def read_policy(settings: Mapping[str, Any] | cache.CachePolicy) -> cache.CachePolicy:
    """Return a policy from its settings in a config: {"name": "deep_sink", "window": 21, "sink": 10}.

    `released` asks for the numbers of a public release, quirks included: by its name, or true for the first
    of RELEASES. Raises ConfigError for a name that is none, a field that the policy does not have, or a wrong
    value.
    """
    if isinstance(settings, cache.CachePolicy):
        return settings
    # 1. The class: of the policy, or of its release.
    name, values = settings, dict[str, Any]()
    if isinstance(settings, Mapping):
        values = {str(key): value for key, value in settings.items()}
        name = values.pop("name", settings)
    errors.require_known(name, POLICIES, "there is no cache_policy {}")
    kind = _released(str(name), values.pop("released", False))
    # 2. Its fields, and the policies of classes of heads.
    if "policies" in values:
        with errors.library_reads(
            f"cache_policy {name}: policies", remedy="give a policy for each class of heads"
        ):
            of_classes = values["policies"].items()
            values["policies"] = {str(label): read_policy(policy) for label, policy in of_classes}
    return errors.from_values(kind, values, f"cache_policy {name}: ")


def _released(name: str, released: Any) -> type[cache.CachePolicy]:
    """Return the class of a policy, or of one of its releases."""
    releases = RELEASES.get(name, {})
    if released is False:
        return POLICIES[name]
    if released is True and releases:
        return next(iter(releases.values()))
    if not isinstance(released, str) or released not in releases:
        names = ", ".join(releases) or "none"
        problem = f"released {errors.short_repr(released)} is not one of {names}; leave it out"
        raise errors.ConfigError(f"cache_policy {name}: {problem}")
    return releases[released]


def policy_of(config: RunConfig) -> cache.CachePolicy:
    """Return the policy of a run: cache_policy, or what local_attn_size and sink_size mean.

    Raises ConfigError where it does not fit the run's blocks and prompts.
    """
    # 1. By name and fields, or by the two settings of a window.
    if config.cache_policy is not None:
        policy = read_policy(config.cache_policy)
    else:
        policy = cache.of_window(config.local_attn_size, config.sink_size)
    # 2. It fits the blocks, the prompts that follow, and keys that are computed again.
    policy.check(config.block_sizes)
    policy.check_schedule(cache.read_switches(config.prompt_schedule), block_ranges(config.block_sizes))
    if config.recompute_context:
        policy.check_recompute(config.recompute_context, config.num_frame_per_block)
    return policy


def policy_classes(config: RunConfig) -> list[type[cache.CachePolicy]]:
    """Return the classes of cache_policy, and of its policies for classes of heads; no file is read."""
    classes = list[type[cache.CachePolicy]]()
    remaining = []
    if config.cache_policy:
        remaining.append(config.cache_policy)
    for settings in remaining:
        of_heads = settings.get("policies")
        if isinstance(of_heads, Mapping):
            remaining += of_heads.values()
        classes.append(POLICIES[str(settings["name"])])
    return classes


def make_policy(name: str, **fields: Any) -> cache.CachePolicy:
    """Return a policy by its name in configs, with its fields: make_policy("window", window=9, sink=3)."""
    return read_policy({"name": name, **fields})

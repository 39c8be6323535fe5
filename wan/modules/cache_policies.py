"""Cache policies: what a block may look at.

Which keys and values stay, where they stand, what changes after a block.

Frame: global latent index. Slot: place in the cache. Position: temporal RoPE index of a slot's keys. A policy
is one class of wan/modules/policies; CONTRIBUTING.md shows one being added. Rules and sources:
docs/policies.md.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from wan.errors import ConfigError, quoted
from wan.limits import MAX_FRAMES
from wan.modules.policies.averages import EmaSink, TwoMemories
from wan.modules.policies.base import CachePolicy, WindowedPolicy
from wan.modules.policies.memory_bank import MemoryBank
from wan.modules.policies.participative import Participative
from wan.modules.policies.per_head import PerHead
from wan.modules.policies.rolling_sink import RollingSink
from wan.modules.policies.windows import DeepSink, Full, Relative, Window

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
        raise ConfigError(f"cache_policy {quoted(name)} is not one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    known = {f.name: f for f in fields(policy)}
    for field, value in chosen.items():
        if field not in known:
            raise ConfigError(f"cache_policy {name} has no field {quoted(field)}; it has {', '.join(known)}")
        _check_type(name, field, value, known[field].default)
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
            raise ConfigError(f"cache_policy per_head: class {quoted(label)} needs the settings of a policy")
        found[str(label)] = settings if isinstance(settings, CachePolicy) else read_policy(settings)
        if isinstance(found[str(label)], PerHead):
            raise ConfigError(f"cache_policy per_head: class {quoted(label)} cannot be per_head again")
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
        raise ConfigError(f"cache_policy {name}: {field} must be {kind}, not {quoted(value)}")
    if type(value) is int and value > MAX_FRAMES:
        raise ConfigError(f"cache_policy {name}: {field} may be at most {MAX_FRAMES}, not {quoted(value)}")


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

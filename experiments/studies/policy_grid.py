"""Which cache policies are compared, and how one is written on the command line."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.running.policy_flags import policy_settings
from wan.errors import ConfigError, quoted

FULL = "full"
CONTROLS = {
    "frozen": "the first frame of the rollout, over and over",
    "vae": "the rendered scene through the VAE: the ceiling of any policy",
    "rendered": "the rendered scene itself",
}

DEEP_SINK = "deep_sink,window=21,sink=10"  # Deep Forcing's, and the same with compression
PARTICIPATIVE = "participative,window=21,sink=10,budget=16,recent=4"

# Compared with full, and Holm-adjusted together: published settings, and the plain window they came from.
FAMILY = (
    "window,window=9",
    "window,window=9,sink=3",
    "window,window=12,sink=3",
    "relative,window=6,sink=1",
    "relative,window=12,sink=3",
    DEEP_SINK,
    PARTICIPATIVE,
    "ema_sink,window=9,sink=3",
    "two_memories,window=12,sink=3",
    "rolling_sink,window=21",
    "memory_bank,window=12,sink=3,bank=3,interval=3",
)

WINDOWS, SINKS = (6, 9, 12, 21), (0, 3, 6, 9, 12, 15)  # frames; a block has three


def sink_map(policy: str) -> Iterator[str]:
    """The policy with every window and sink of the map that leave room for a block."""
    for window in WINDOWS:
        for sink in SINKS:
            if sink + 3 <= window and (sink or policy == "window"):
                yield spec(policy, window, sink)


def spec(policy: str, window: int, sink: int) -> str:
    """How a policy of a window and a sink is written."""
    return f"{policy},window={window}" + (f",sink={sink}" if sink else "")


NAMED = {
    "family": (FULL, *FAMILY),
    "findings": tuple(dict.fromkeys((FULL, *FAMILY, *sink_map("window"), *sink_map("deep_sink")))),
}


def read_policies(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Label -> settings of every policy that is named: NAME,FIELD=VALUE,..., a file, or one of NAMED.

    Raises ConfigError for what is no policy, and for two of one name.
    """
    from wan.modules.cache_policies import read_policy

    found: dict[str, dict[str, Any]] = {}
    for word in (each for name in words for each in NAMED.get(name, (name,))):
        settings = _read(word)
        read_policy(settings)
        if found.setdefault(word, settings) != settings:
            raise ConfigError(f"--policies names {quoted(word)} twice")
    return found


def _read(word: str) -> dict[str, Any]:
    name, *pairs = word.split(",")
    settings = {str(key): value for key, value in policy_settings(name).items()}
    for pair in pairs:
        field, equals, text = pair.partition("=")
        if not (field and equals and text):
            raise ConfigError(f"--policies: {quoted(pair)} in {quoted(word)} is not FIELD=VALUE")
        settings[field] = _value(text)
    return settings


def _value(text: str) -> Any:
    """true, false, a number or a word."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def short_label(label: str) -> str:
    """How figures name a policy: deep_sink 21/10."""
    name, *pairs = label.split(",")
    fields = dict(pair.partition("=")[::2] for pair in pairs)
    if "window" not in fields:
        return name
    return f"{name} {fields['window']}/{fields.get('sink', 0)}"

"""One row a cache policy, which every test of policies goes through, and settings that fit any block size."""

from typing import Any

from hypothesis import strategies as st

POLICIES: list[dict[str, Any]] = [  # all of them forget within 8 frames, in blocks of two or three
    {"name": "full"},
    {"name": "window", "window": 7, "sink": 2},
    {"name": "relative", "window": 7, "sink": 1},
    {"name": "deep_sink", "window": 7, "sink": 3},
    {"name": "participative", "window": 7, "sink": 1, "budget": 6, "recent": 4},
    {"name": "ema_sink", "window": 7, "sink": 2, "alpha": 0.5},
    {"name": "two_memories", "window": 7, "sink": 1, "alpha_long": 0.1, "alpha_short": 0.6},
    {"name": "rolling_sink", "window": 6},
    {"name": "memory_bank", "window": 7, "sink": 2, "bank": 2, "interval": 1},
    {"name": "multi_shot", "window": 7, "sink": 2, "rope_offset": 3},
]


@st.composite
def settings_of_any_size(draw, block_size: int, rows: list[dict[str, Any]] = POLICIES) -> dict[str, Any]:
    """Draw the settings of a policy that fit blocks of a size."""
    row = draw(st.sampled_from(rows))
    name = row["name"]
    sink, extra = draw(st.integers(1 if name == "ema_sink" else 0, 4)), draw(st.integers(0, 4))
    sizes = {"window": sink + block_size + extra, "sink": sink}
    if "window" not in row:
        return row
    if name == "rolling_sink":
        return {"name": name, "window": 2 * block_size + extra}
    if name == "participative":
        recent = block_size + draw(st.integers(0, 3))
        budget = sink + recent + draw(st.integers(0, 2))
        limit = draw(st.sampled_from([None, 1, 2]))
        sizes |= {"recent": recent, "budget": budget, "window": budget + extra, "reuse_limit": limit}
    if name == "memory_bank":
        sizes |= {"bank": draw(st.integers(1, 3)), "interval": draw(st.integers(1, 3))}
    if name == "window":
        sizes |= {"global_sink": draw(st.booleans())}
    if name == "ema_sink":
        sizes |= {"alpha": draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))}
    if name == "two_memories":
        sizes |= {"window": sizes["window"] + 2}
    return row | sizes

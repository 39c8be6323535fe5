"""Small tables as text: a list of rows, each a mapping or a named tuple, one line a row."""

from collections.abc import Mapping, Sequence
from math import floor, isfinite, log10
from numbers import Integral, Real
from typing import Any

from experiments.caches.formats import as_cache
from experiments.caches.view import Profiles, open_profiles, ranges

UNITS = {
    "mean_logit": "logits q·k/√D before the softmax, mean over two frames' token pairs; 0 is not special",
    "mass": "attention mass, the share of 1 that a key frame's tokens get together",
    "mean_prob": "mean probability per key token, mass / tokens per frame",
}
SEEN = {"full": "all frames so far", "window": "a sliding window", "within block": "their own block only"}


def table(rows: Sequence[Any] | Mapping[str, Any], empty: str = "nothing to show") -> str:
    """Format rows (mappings, named tuples) or one mapping as aligned columns; floats have 4 digits."""
    if isinstance(rows, Mapping):
        width = max(map(len, rows), default=0)
        return "\n".join(f"{name:{width}}  {_cells([value])[0]}" for name, value in rows.items())
    mappings = [row._asdict() if hasattr(row, "_asdict") else row for row in rows]
    if not mappings:
        return empty
    names = list(dict.fromkeys(name for row in mappings for name in row))
    lines = [""] * (len(mappings) + 1)
    for name in names:
        values = [row.get(name) for row in mappings]
        cells = [name, *_cells(values)]
        width = max(map(len, cells))
        left = any(isinstance(value, str) for value in values)
        for i, cell in enumerate(cells):
            lines[i] += (f"{cell:<{width}}" if left else f"{cell:>{width}}") + "  "
    return "\n".join(line.rstrip() for line in lines)


def _cells(values: Sequence[Any]) -> list[str]:
    floats = [abs(float(v)) for v in values if isinstance(v, Real) and not isinstance(v, Integral)]
    largest = max((v for v in floats if isfinite(v) and v > 0), default=1.0)
    decimals = min(max(3, 3 - floor(log10(largest))), 12)

    def cell(value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, Real) and not isinstance(value, Integral):
            return f"{float(value):.{decimals}f}" if isfinite(value) else "N/A"
        return str(value)

    return [cell(value) for value in values]


def describe(view: Profiles) -> dict[str, str]:
    """Return what a view holds: source, layers, frames, pass, quantity, and what its queries could see."""
    gone = view.num_averages
    averages = f" and {gone} average{'s' * (gone > 1)} of frames that are gone" if gone else ""
    facts = {
        "Source": view.source,
        "Layers": f"{ranges(view.layers)}; {view.num_heads} heads; {view.frame_seq_length} tokens per frame",
        "Frames": f"{view.num_frames} in blocks of {', '.join(map(str, view.block_sizes))}",
        "Pass": view.pass_label,
        "Queries": f"frames {ranges(view.query_frames)}",
        "Keys": f"frames {ranges(view.key_frames)}{averages}: {SEEN[view.captured]}",
        "Quantity": f"{view.quantity}: {UNITS[view.quantity]}",
    }
    if view.noise_frames:
        facts["Noise"] = f"frames {ranges(view.noise_frames)} are noise in this pass, not context"
    by_level: dict[float | None, list[int]] = {}
    for frame, level in view.noise_levels.items():
        by_level.setdefault(level, []).append(frame)
    if len(by_level) > 1:
        levels = [f"{ranges(frames)} at t = {level:.4g}" for level, frames in by_level.items()]
        facts["Window"] = f"frames {', '.join(levels)}"
    if view.notes:
        facts["Notes"] = "; ".join(view.notes)
    return facts


def calls(cache: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List what was captured, a row per call; of an atlas, a row per pass."""
    if cache["format"] == "atlas":
        layers, rows = cache["layers"], []
        for p, at in enumerate(as_cache(cache).passes()):
            numbers = ranges(range(p * len(layers), (p + 1) * len(layers)))
            label = open_profiles(cache, at.step).pass_label
            rows.append({"call": numbers, "layers": ranges(layers), "pass": label})
        return rows
    rows = []
    for number, call in enumerate(cache["attention_weights"]):
        at = cache | call  # a figure4 cache has the tags of its calls at the top
        step = "not recorded" if at["step"] is None else "clean" if at["is_clean_pass"] else str(at["step"])
        timestep = "" if at["timestep"] is None else f" (t = {at['timestep']:g})"
        frames = {"queries": ranges(at["query_frames"]), "keys": ranges(at["key_frames"])}
        rows.append({"call": number, "layer": at["layer_idx"], "pass": step + timestep} | frames)
    return rows

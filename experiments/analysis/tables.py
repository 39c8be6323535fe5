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
    lines = [""] * (len(mappings) + 1)
    for name in dict.fromkeys(name for row in mappings for name in row):
        values = [row.get(name) for row in mappings]
        cells = [name, *_cells(values)]
        width, side = max(map(len, cells)), "<" if any(isinstance(value, str) for value in values) else ">"
        lines = [f"{line}{cell:{side}{width}}  " for line, cell in zip(lines, cells, strict=True)]
    return "\n".join(line.rstrip() for line in lines) or empty


def _cells(values: Sequence[Any]) -> list[str]:
    """Values of a column as text: numbers with as many decimals as give the largest 4 digits."""
    # Integers stay as they are; the decimals of a column are those of its largest float
    numbers = [isinstance(value, Real) and not isinstance(value, Integral) for value in values]
    sizes = [abs(v) for v, is_number in zip(values, numbers, strict=True) if is_number and isfinite(v) and v]
    decimals = min(max(3, 3 - floor(log10(max(sizes, default=1)))), 12)
    shown = [f"{v:.{decimals}f}" if n and isfinite(v) else v for v, n in zip(values, numbers, strict=True)]
    return ["" if v is None else "N/A" if v != v else str(v) for v in shown]


def describe(view: Profiles) -> dict[str, str]:
    """Return what a view holds: source, layers, frames, pass, quantity, and what its queries could see."""
    averages = f" and {view.num_averages} averages of evicted frames" if view.num_averages else ""
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
    levels: dict[float | None, list[int]] = {}
    for frame, level in view.noise_levels.items():
        levels.setdefault(level, []).append(frame)
    if len(levels) > 1:
        of_level = [f"{ranges(frames)} at t = {level:.4g}" for level, frames in levels.items()]
        facts["Window"] = f"frames {', '.join(of_level)}"
    return facts | ({"Notes": "; ".join(view.notes)} if view.notes else {})


def calls(cache: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List what was captured, a row per call; of an atlas, a row per pass."""
    if cache["format"] == "atlas":
        # Layers of a pass lie together: calls p n .. (p + 1) n - 1
        n, layers = len(cache["layers"]), ranges(cache["layers"])
        labels = [open_profiles(cache, at.step).pass_label for at in as_cache(cache).passes()]
        numbers = [ranges(range(p * n, (p + 1) * n)) for p in range(len(labels))]
        return [{"call": c, "layers": layers, "pass": p} for c, p in zip(numbers, labels, strict=True)]
    rows = []
    for number, call in enumerate(cache["attention_weights"]):
        at = cache | call  # a figure4 cache has the tags of its calls at the top
        step = "not recorded" if at["step"] is None else "clean" if at["is_clean_pass"] else str(at["step"])
        timestep = "" if at["timestep"] is None else f" (t = {at['timestep']:g})"
        frames = {"queries": ranges(at["query_frames"]), "keys": ranges(at["key_frames"])}
        rows.append({"call": number, "layer": at["layer_idx"], "pass": step + timestep} | frames)
    return rows

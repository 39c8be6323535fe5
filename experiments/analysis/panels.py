"""What figures and tables show of a view: panels as plain arrays, and rows as aligned text."""

from collections.abc import Iterable, Mapping, Sequence
from math import floor, isfinite, log10
from numbers import Integral, Real
from textwrap import fill, wrap
from typing import Any, NamedTuple

import numpy as np

from experiments.caches.files import CacheError
from experiments.caches.formats import as_cache
from experiments.caches.titles import ranges
from experiments.caches.view import Profiles, open_profiles

ALL_QUERIES = "all query frames"  # queries of a panel that are more than the last block's
UNITS = {
    "mean_logit": "logits q·k/√D before the softmax, mean over two frames' token pairs; 0 is not special",
    "mass": "attention mass, the share of 1 that a key frame's tokens get together",
    "mean_prob": "mean probability per key token, mass / tokens per frame",
}
WIDEST = 100  # letters of a table's lines, as many as a notebook shows
SEEN = {"full": "all frames so far", "window": "a sliding window", "within block": "their own block only"}

# --- Panels, as drawing functions take them


class HeadPanel(NamedTuple):
    """One head for head_curves and one_head, and what it is compared with."""

    label: str
    layer: int
    head: int
    profile: np.ndarray  # [F]
    curve: np.ndarray | None  # [F*S] per key token
    reference: np.ndarray | None = None  # [F] read off another figure
    clipped: np.ndarray | None = None  # [F] bool: where that figure cuts it off
    agreement: str = ""  # how well the two agree, in words
    no_preference: float | None = None  # value of every frame if all tokens were alike; None for logits
    averages: np.ndarray | None = None  # [averages] of evicted frames, beside the frames
    group: int = 1  # tokens of which each value of the curve is the mean


class HeadMap(NamedTuple):
    """One number per head [N, H], or None and a line that says why it is absent."""

    name: str
    title: str
    unit: str
    scale: str  # "diverging" around 0, "ratio" around 1, "share" of 0..1, or "sequential"
    values: np.ndarray | None
    missing_reason: str = ""
    queries: str = ""  # queries of the panel, if others than the title's


class LabelMap(NamedTuple):
    """One label per head [N, H], or None and a line that says why they are absent."""

    title: str
    names: Mapping[int, str]
    labels: np.ndarray | None
    missing_reason: str = ""
    differs: np.ndarray | None = None  # [N, H] bool: not the label it is compared with
    queries: str = ""  # queries of the panel, if others than the title's


class ProfileMap(NamedTuple):
    """Profiles [H, F + averages] of a layer in one pass, or None and the reason why."""

    title: str
    quantity: str
    values: np.ndarray | None
    missing_reason: str = ""
    averages: int = 0  # columns after the frames: averages of evicted frames


class BlockPanel(NamedTuple):
    """One head's frame 0 by block of queries: its excess over the other context frames, in logits."""

    starts: np.ndarray  # [blocks] first query frame of each block
    measured: np.ndarray  # [blocks]
    predicted: np.ndarray  # [blocks] by waves and s


class PartsPanel(NamedTuple):
    """One head's mean context curve at a block of queries, beside its waves."""

    measured: np.ndarray  # [n]
    waves: np.ndarray  # [n], with the row's constant
    s: float  # what frame 0 has beside them


# --- Panels of a view


def choose_heads(
    view: Profiles, heads: Iterable[tuple[int, int, str]]
) -> tuple[list[HeadPanel], list[tuple[int, int, str]]]:
    """Return panels of (layer, head, label), and those that the view lacks: heads 0 replace them."""
    panels, missing = [], []
    substitutes = list(view.layers)
    for layer, head, label in heads:
        if layer in view.layers and 0 <= head < view.num_heads:
            panels.append(head_panel(view, layer, head, label))
            continue
        missing.append((layer, head, label))
        if substitutes:
            substitute = substitutes.pop(0)
            panels.append(head_panel(view, substitute, 0, f"L{substitute}H0"))
    return panels, missing


def head_panel(view: Profiles, layer: int, head: int, label: str) -> HeadPanel:
    """Return a head's profile, and its curve per key token where one axis can hold both."""
    S = view.frame_seq_length
    profile, averages = np.split(view.key_profile(layer)[head], [view.num_frames])
    # 1. Key tokens of a window at their places among all frames
    window = view.key_curve(layer)  # [H, Fk S]
    curve = None
    if window is not None and view.quantity != "mass":  # a mass is a sum: not one axis with its tokens
        tokens = np.full((view.num_frames, S), np.nan, np.float32)
        tokens[list(view.key_frames)] = window[head].reshape(-1, S)
        curve = tokens.reshape(-1)
    # 2. Without a preference each of so many frames, or of their S tokens, would get the same
    frames = len(view.key_frames) + view.num_averages
    no_preference = {"mass": 1 / frames, "mean_prob": 1 / (frames * S)}.get(view.quantity)
    return HeadPanel(
        label=label,
        layer=layer,
        head=head,
        profile=profile,
        curve=curve,
        no_preference=no_preference,
        averages=averages if averages.size else None,
    )


def grouped(panels: Iterable[HeadPanel], tokens: int | None) -> list[HeadPanel]:
    """Average each curve over windows of so many tokens, a divisor of a frame's; None: single tokens."""
    averaged = []
    for panel in panels:
        if tokens and panel.curve is not None:
            S = len(panel.curve) // len(panel.profile)
            if not 0 < tokens <= S or S % tokens:
                raise CacheError(f"windows of {tokens} tokens do not divide a frame's {S}; choose a divisor")
            panel = panel._replace(curve=panel.curve.reshape(-1, tokens).mean(1), group=tokens)
        averaged.append(panel)
    return averaged


def profile_maps(view: Profiles, titles: Mapping[int, str] | None = None) -> list[ProfileMap]:
    """A panel for every layer of a view, or for those that titles names."""
    if titles is None:
        titles = {layer: f"Layer {layer}" for layer in view.layers}
    averages = view.num_averages
    return [
        ProfileMap(title, view.quantity, view.key_profile(layer), averages=averages)
        for layer, title in titles.items()
    ]


# --- Tables


def rows_of(columns: Mapping[str, Sequence]) -> list[dict]:
    """Turn columns of equal length into rows for table()."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def table(rows: Sequence[Any] | Mapping[str, Any], empty: str = "nothing to show") -> str:
    """Format rows (mappings, named tuples) or one mapping as aligned columns; floats have 4 digits.

    Where lines would be longer than WIDEST letters, names of columns stand in several lines, broken between
    words: a notebook would break the rows within theirs.
    """
    if isinstance(rows, Mapping):
        return _facts(rows)
    # 1. Cells of every column, in the order in which rows name them
    mappings = [row._asdict() if hasattr(row, "_asdict") else row for row in rows]
    names = list(dict.fromkeys(name for row in mappings for name in row))
    columns = {name: _cells([row.get(name) for row in mappings]) for name in names}
    # 2. Names of columns, in several lines where the table would be too wide
    widths = {name: max(map(len, cells)) for name, cells in columns.items()}
    headers = {name: [name] for name in names}
    if sum(max(len(name), width) + 2 for name, width in widths.items()) > WIDEST:
        for name, width in widths.items():
            longest = max(map(len, name.split()), default=1)
            headers[name] = wrap(name, max(width, longest, 8), break_long_words=False, break_on_hyphens=False)
    # 3. Column by column: text to the left, numbers to the right
    high = max(map(len, headers.values()), default=0)
    lines = [""] * (high + len(mappings))
    for name in names:
        cells = [""] * (high - len(headers[name])) + headers[name] + columns[name]
        width = max(map(len, cells))
        is_text = any(isinstance(row.get(name), str) for row in mappings)
        for n, cell in enumerate(cells):
            lines[n] += cell.ljust(width) if is_text else cell.rjust(width)
            lines[n] += "  "
    return "\n".join(line.rstrip() for line in lines) or empty


def _facts(values: Mapping[str, Any]) -> str:
    """Format one mapping, a line for each name; much longer lines are broken between words."""
    width = max(map(len, values), default=0)
    lines = []
    for name, value in values.items():
        line = f"{name:{width}}  {_cells([value])[0]}"
        if len(line) > 1.6 * WIDEST:
            line = fill(line, WIDEST, subsequent_indent=" " * (width + 2), break_long_words=False)
        lines.append(line)
    return "\n".join(lines)


def _cells(values: Sequence[Any]) -> list[str]:
    """Values of a column as text: numbers with as many decimals as give the largest 4 digits."""
    # Integers stay as they are; the decimals of a column are those of its largest float
    floats = [float(v) for v in values if isinstance(v, Real) and not isinstance(v, Integral)]
    largest = max((abs(v) for v in floats if isfinite(v) and v), default=1)
    decimals = min(max(3, 3 - floor(log10(largest))), 12)
    cells = []
    for value in values:
        if value is None:
            cells.append("")
        elif value != value:
            cells.append("N/A")
        elif isinstance(value, Real) and not isinstance(value, Integral) and isfinite(value):
            cells.append(f"{value:.{decimals}f}")
        else:
            cells.append(str(value))
    return cells


def describe(view: Profiles) -> dict[str, str]:
    """Return what a view holds: source, layers, frames, pass, quantity, and what its queries could see."""
    keys = f"frames {ranges(view.key_frames)}"
    if view.num_averages:
        keys += f" and {view.num_averages} averages of evicted frames"
    facts = {
        "Source": view.source,
        "Layers": f"{ranges(view.layers)}; {view.num_heads} heads; {view.frame_seq_length} tokens per frame",
        "Frames": f"{view.num_frames} in blocks of {', '.join(map(str, view.block_sizes))}",
        "Pass": view.pass_label,
        "Queries": f"frames {ranges(view.query_frames)}",
        "Keys": f"{keys}: {SEEN[view.captured]}",
        "Quantity": f"{view.quantity}: {UNITS[view.quantity]}",
    }
    if view.noise_frames:
        facts["Noise"] = f"frames {ranges(view.noise_frames)} are noise in this pass, not context"
    levels: dict[float | None, list[int]] = {}
    for frame, level in view.noise_levels.items():
        levels.setdefault(level, []).append(frame)
    if len(levels) > 1:
        parts = [f"{ranges(frames)} at t = {level:.4g}" for level, frames in levels.items()]
        facts["Window"] = f"frames {', '.join(parts)}"
    if view.notes:
        facts["Notes"] = "; ".join(view.notes)
    return facts


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
        tags = cache | call  # a figure4 cache has the tags of its calls at the top
        label = str(tags["step"])
        if tags["step"] is None:
            label = "not recorded"
        elif tags["is_clean_pass"]:
            label = "clean"
        if tags["timestep"] is not None:
            label += f" (t = {tags['timestep']:.4g})"
        frames = {"queries": ranges(tags["query_frames"]), "keys": ranges(tags["key_frames"])}
        rows.append({"call": number, "layer": tags["layer_idx"], "pass": label} | frames)
    return rows

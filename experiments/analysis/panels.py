"""What figures and tables show of a view: panels as plain arrays, and rows as aligned text."""

from collections.abc import Iterable, Mapping, Sequence
from math import floor, isfinite, log10
from numbers import Integral, Real
from textwrap import fill, wrap
from typing import Any, NamedTuple

import numpy as np

from experiments.caches.files import CacheError
from experiments.caches.formats import as_cache
from experiments.caches.view import Profiles, open_profiles, ranges

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
    panels, missing, first_layers = [], [], iter(view.layers)
    for layer, head, label in heads:
        if layer in view.layers and 0 <= head < view.num_heads:
            panels.append(head_panel(view, layer, head, label))
            continue
        missing.append((layer, head, label))
        if (substitute := next(first_layers, None)) is not None:
            panels.append(head_panel(view, substitute, 0, f"L{substitute}H0"))
    return panels, missing


def head_panel(view: Profiles, layer: int, head: int, label: str) -> HeadPanel:
    """Return a head's profile, and its curve per key token where one axis can hold both."""
    # [H, Lk]
    curve, S = view.key_curve(layer), view.frame_seq_length
    if view.quantity == "mass":
        curve = None  # a frame's mass is the sum of its tokens' probabilities: not one axis
    if curve is not None:  # key tokens of a window -> their places among all frames
        # [H, Fk S] -> [F S] of this head
        spread = np.full((view.num_frames, S), np.nan, np.float32)
        spread[list(view.key_frames)] = curve[head].reshape(-1, S)
        curve = spread.reshape(-1)
    profile, gone = np.split(view.key_profile(layer)[head], [view.num_frames])
    averages = gone if gone.size else None
    # Without a preference each of so many frames, or of their S tokens, would get the same
    frames = len(view.key_frames) + view.num_averages
    alike = {"mass": 1 / frames, "mean_prob": 1 / (frames * S)}.get(view.quantity)
    return HeadPanel(label, layer, head, profile, curve, no_preference=alike, averages=averages)


def grouped(panels: Iterable[HeadPanel], tokens: int | None) -> list[HeadPanel]:
    """Average each curve over windows of so many tokens, a divisor of a frame's; None: single tokens."""
    shown = []
    for panel in panels:
        if tokens and panel.curve is not None:
            S = len(panel.curve) // len(panel.profile)
            if not 0 < tokens <= S or S % tokens:
                raise CacheError(f"windows of {tokens} tokens do not divide a frame's {S}; choose a divisor")
            panel = panel._replace(curve=panel.curve.reshape(-1, tokens).mean(1), group=tokens)
        shown.append(panel)
    return shown


def profile_maps(view: Profiles, titles: Mapping[int, str] | None = None) -> list[ProfileMap]:
    """A panel for every layer of a view, or for those that titles names."""
    titles = {layer: f"Layer {layer}" for layer in view.layers} if titles is None else titles
    gone = view.num_averages
    return [ProfileMap(t, view.quantity, view.key_profile(n), averages=gone) for n, t in titles.items()]


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
        width = max(map(len, rows), default=0)
        lines = [f"{name:{width}}  {_cells([value])[0]}" for name, value in rows.items()]
        indent: dict[str, Any] = {"subsequent_indent": " " * (width + 2), "break_long_words": False}
        return "\n".join(x if len(x) <= 1.6 * WIDEST else fill(x, WIDEST, **indent) for x in lines)
    mappings = [row._asdict() if hasattr(row, "_asdict") else row for row in rows]
    names = list(dict.fromkeys(name for row in mappings for name in row))
    columns = {name: _cells([row.get(name) for row in mappings]) for name in names}
    widths = {name: max(map(len, cells)) for name, cells in columns.items()}
    heads = {name: [name] for name in names}
    if sum(max(len(name), width) + 2 for name, width in widths.items()) > WIDEST:
        for name, width in widths.items():
            longest = max(map(len, name.split()), default=1)
            heads[name] = wrap(name, max(width, longest, 8), break_long_words=False, break_on_hyphens=False)
    high = max(map(len, heads.values()), default=0)
    lines = [""] * (len(mappings) + high)
    for name in names:
        cells = [""] * (high - len(heads[name])) + heads[name] + columns[name]
        is_text = any(isinstance(row.get(name), str) for row in mappings)
        width, side = max(map(len, cells)), "<" if is_text else ">"
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
        timestep = "" if at["timestep"] is None else f" (t = {at['timestep']:.4g})"
        frames = {"queries": ranges(at["query_frames"]), "keys": ranges(at["key_frames"])}
        rows.append({"call": number, "layer": at["layer_idx"], "pass": step + timestep} | frames)
    return rows

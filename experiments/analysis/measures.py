"""What a head does with its past, in numbers, and all of them as maps layers × heads.

Profiles A[f] are [..., F], the mean over the last block's queries; matrices A[query, key] are [..., F, F];
NaN was not attended. Context is what lies in blocks before the query's: the query's own block is noise at a
noisy pass.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis import first_frame, stats
from experiments.analysis.panels import ALL_QUERIES, HeadMap, HeadPanel, rows_of
from experiments.caches import files
from experiments.caches.formats import as_cache
from experiments.caches.view import Profiles, open_profiles

DELTA_THRESHOLD = 2.0  # first - middle, in logits, above which earlier work called a head a sink
RATIO_THRESHOLD = 1.2  # first / middle, likewise
SMALL_MIDDLE = 0.02  # of max - min: a smaller middle of signed values makes a ratio of its noise
PERIOD_R2 = 0.5  # of the best-fitting sinusoid, below which its period is not told


# --- Older scores of a profile


class HeadStatistics(NamedTuple):
    """Per-head statistics, each of the profile's shape without the frame axis; NaN without an answer."""

    first: np.ndarray  # A[0]
    middle: np.ndarray  # mean of A[1 .. F-2]
    last: np.ndarray  # A[F-1]
    delta: np.ndarray  # first - middle
    ratio: np.ndarray  # first / middle; NaN where either is not above 0, or middle is near 0 in logits
    first_minus_last: np.ndarray
    max_frame: np.ndarray  # int, -1 where nothing was attended
    spread: np.ndarray  # (max - min) / |mean|

    @property
    def called_sinks(self) -> np.ndarray:
        """Heads that pass either threshold of earlier work. A wave of temporal RoPE can pass too."""
        return (self.delta > DELTA_THRESHOLD) | (self.ratio > RATIO_THRESHOLD)

    def rows(self) -> list[dict[str, Any]]:
        """A row per head of statistics [H]; the last column marks those that earlier work called sinks."""
        names = ("first", "middle", "last", "first − middle", "first / middle", "first − last", "max at")
        columns: files.Record = {"head": range(len(self.first)), **dict(zip(names, self, strict=False))}
        columns |= {"(max − min) / |mean|": self.spread}
        columns["called a sink"] = ["×" * int(is_sink) for is_sink in self.called_sinks]
        return rows_of(columns)


def head_statistics(profile: np.ndarray) -> HeadStatistics:
    """Compute older scores of profiles A [..., F] without NaN; middle holds frames of the own block too."""
    A = np.asarray(profile, np.float64)
    first, last, middle = A[..., 0], A[..., -1], stats.mean_without_nan(A[..., 1:-1])
    attended = ~np.isnan(A)
    highest = np.where(attended, A, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = highest.max(-1) - np.where(attended, A, np.inf).min(-1)
        # Logits have no natural 0; a ratio means something only well above it
        near_zero = (A < 0).any(-1) & (middle < SMALL_MIDDLE * spread)  # a ratio to it would be noise
        return HeadStatistics(
            first=first,
            middle=middle,
            last=last,
            delta=first - middle,
            ratio=np.where((first > 0) & (middle > 0) & ~near_zero, first / middle, np.nan),
            first_minus_last=first - last,
            max_frame=np.where(attended.any(-1), highest.argmax(-1), -1),
            spread=np.where(attended.any(-1), spread, np.nan) / np.abs(stats.mean_without_nan(A)),
        )


def layer_rows(view: Profiles) -> list[dict[str, Any]]:
    """A row per layer: statistics of the mean over heads, and the standard deviation over heads."""
    rows = []
    for layer, values in zip(view.layers, view.profiles(), strict=True):
        mean, over_heads = values.mean(0), values.std(0)
        row = {"layer": layer} | head_statistics(mean[None]).rows()[0]
        row |= {"max": np.nanmax(mean), "min": np.nanmin(mean)}
        row |= {"least std over heads": np.nanmin(over_heads), "largest": np.nanmax(over_heads)}
        rows.append({name: value for name, value in row.items() if name not in ("head", "called a sink")})
    return rows


# --- Scores of context alone


def first_minus_context(profile: np.ndarray, context: Sequence[int]) -> np.ndarray:
    """A[0] - mean of A[f] over the context frames f > 0 of profiles [..., F] -> [...]."""
    A = np.asarray(profile, np.float64)
    return A[..., 0] - stats.mean_without_nan(A[..., [f for f in context if f > 0]])


def first_frame_mass(mass: np.ndarray, context: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Mass on frame 0 (arXiv 2309.17453) of profiles [..., F]: shares of all and of context [...].

    NaN where the context has no mass, or not frame 0.
    """
    A = np.asarray(mass, np.float64)
    of_context = np.nansum(A[..., list(context)], -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return A[..., 0], A[..., 0] / np.where((of_context > 0) & (0 in context), of_context, np.nan)


def wave(
    profile: np.ndarray, context: Sequence[int], frequency: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Least squares of a + b f + c cos(w f) + s sin(w f) to the context frames f of profiles [..., F].

    Returns the amplitude sqrt(c^2 + s^2), and r2 = 1 - RSS / RSS of the line a + b f alone; NaN where fewer
    than 6 frames show a wave, and r2 of a line. The default w = 1 rad/frame is Wan's fastest temporal RoPE.
    """
    amplitude, r2 = _waves(profile, context, np.array([frequency]))
    return amplitude[0], r2[0]


def _waves(
    profile: np.ndarray, context: Sequence[int], frequencies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return amplitude and r2 of wave() at each of W frequencies, [W, ...] each."""
    y, f = np.asarray(profile, np.float64)[..., list(context)], np.asarray(context, np.float64)
    if len(f) < 6 or np.ptp(f) < 6:
        return (np.full((len(frequencies), *y.shape[:-1]), np.nan),) * 2
    # [W, n, 4]: level, trend, and both phases of the wave
    turns = frequencies[:, None] * f
    bases = np.stack(np.broadcast_arrays(1.0, f, np.cos(turns), np.sin(turns)), -1)
    line = bases[0, :, :2]
    of_line = stats.varying(y - y @ np.linalg.pinv(line).T @ line.T, y, stats.RESOLUTION)
    amplitude, rss = [], []
    for basis, inverse in zip(bases, np.linalg.pinv(bases), strict=True):
        coefficients = y @ inverse.T
        rss.append(((y - coefficients @ basis.T) ** 2).sum(-1))
        amplitude.append(np.hypot(coefficients[..., 2], coefficients[..., 3]))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.stack(amplitude), 1 - np.stack(rss) / of_line


def best_period(profile: np.ndarray, context: Sequence[int]) -> np.ndarray:
    """Find the period of the highest r2 of wave(), of profiles [..., F], 2.5 frames to half the context.

    NaN where it explains less than half of the variance, as of a constant or a line, or is an end of the
    periods that were searched.
    """
    # From 2.5 frames, near the shortest that samples can show, to half the context
    span = max(np.ptp(context), 6) if len(context) else 6
    frequencies = np.linspace(4 * np.pi / span, 2 * np.pi / 2.5, 400)
    r2 = np.nan_to_num(_waves(profile, context, frequencies)[1], nan=-np.inf)
    best = r2.argmax(0)
    reliable = (r2.max(0) >= PERIOD_R2) & (best > 0) & (best < len(frequencies) - 1)
    return np.where(reliable, 2 * np.pi / frequencies[best], np.nan)


# --- Every measure of every head: a row of MEASURES is computed, drawn by head_maps and shown by the page


class Measure(NamedTuple):
    """A number of every head of a view."""

    name: str
    title: str
    unit: str
    scale: str  # see HeadMap
    quantity: str  # of the view: mean_logit or mass
    needs: str  # of the view: its profile, its context, or its matrices of all queries
    meaning: str  # in words, for who does not know the name
    of: Callable[[Profiles], np.ndarray]  # -> [N, H]


def effect_of(
    view: Profiles, scale: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> first_frame.FirstFrameEffect:
    """Fit the first-frame effect to the matrices of a view, on a scale such as np.log."""
    with np.errstate(divide="ignore"):
        return first_frame.first_frame_effect(scale(first_frame.matrices(view)), view.block_sizes)


LOGIT, ROW = "mean_logit", Measure
MEASURES = (
    ROW("first_minus_middle", "first − middle", "logits", "diverging", LOGIT, "profile",
        "mean logit of frame 0 less that of the frames between the first and the last",
        lambda view: head_statistics(view.profiles()).delta),
    ROW("first_minus_context", "first − context", "logits", "diverging", LOGIT, "context",
        "mean logit of frame 0 less that of the other frames of earlier blocks",
        lambda view: first_minus_context(view.profiles(), view.context_frames)),
    ROW("equal_distance_excess", "excess at equal distance", "logits", "diverging", LOGIT, "matrices",
        "mean logit of frame 0 less that of other frames as far from their queries",
        lambda view: first_frame.equal_distance_excess(first_frame.matrices(view), view.block_sizes)),
    ROW("first_frame_effect", "first-frame effect s", "logits", "diverging", LOGIT, "matrices",
        "how much higher the mean logits of frame 0 are than query frame and distance explain",
        lambda view: effect_of(view).effect),
    ROW("first_frame_r2", "partial R² of s", "share of variance", "sequential", LOGIT, "matrices",
        "query frame and distance explain a part of the mean logits; s explains this share of the rest",
        lambda view: effect_of(view).partial_r_squared),
    ROW("sign_rate", "positive context logits", "share of cells", "share", LOGIT, "context",
        "share of the frames of earlier blocks, over all queries, whose mean logit is positive",
        first_frame.context_sign_rate),
    ROW("wave_amplitude", "amplitude, 1 rad/frame", "logits", "sequential", LOGIT, "context",
        "half the height of the sine of RoPE's fastest temporal frequency that fits earlier frames best",
        lambda view: wave(view.profiles(), view.context_frames)[0]),
    ROW("wave_r2", "wave R², 1 rad/frame", "share of variance", "share", LOGIT, "context",
        "share of the variance around a straight line that this sine explains",
        lambda view: wave(view.profiles(), view.context_frames)[1]),
    ROW("wave_period", "best-fit period, R² ≥ 0.5", "frames", "sequential", LOGIT, "context",
        "period of the sine that fits earlier frames best, where it explains at least half",
        lambda view: best_period(view.profiles(), view.context_frames)),
    ROW("first_mass", "mass on first, of all", "share of all", "sequential", "mass", "profile",
        "share of the attention that goes to frame 0",
        lambda view: first_frame_mass(view.profiles(), view.context_frames)[0]),
    ROW("first_context_mass", "mass on first, of context", "share of context", "sequential", "mass",
        "context", "share of the attention to earlier blocks that goes to frame 0",
        lambda view: first_frame_mass(view.profiles(), view.context_frames)[1]),
    # Unlike s it depends on the spread within a frame:
    ROW("log_mass_effect", "first-frame effect on mass", "ln", "diverging", "mass", "matrices",
        "natural logarithm of a factor, by which the mass on frame 0 differs from what query frame and "
        "distance explain; 0 is no effect, 0.69 is twice the mass, −0.69 is half",
        lambda view: effect_of(view, np.log).effect),
)  # fmt: skip
FIRST_FRAME = ("first_minus_middle", "equal_distance_excess", "first_frame_effect", "log_mass_effect")
IDENTIFIED = ("first_frame_effect", "first_frame_r2", "log_mass_effect")  # NaN where cells do not tell them


def open_quantity(cache: Mapping, step: int | None, quantity: str) -> Profiles | None:
    """Open a view, or None where the cache does not hold the quantity."""
    try:
        view = open_profiles(cache, step, quantity)
        view.frame_profile(view.layers[0])
        return view
    except files.CacheError:
        return None


def measure_heads(logits: Profiles | None, mass: Profiles | None) -> list[HeadMap]:
    """Compute every measure [N, H]; those that a cache does not hold are None and say why."""
    maps = []
    views = {LOGIT: (logits, first_frame.NO_LOGITS), "mass": (mass, first_frame.NO_MASS)}
    whole = {q: view is not None and view.frame_matrices() is not None for q, (view, _) in views.items()}
    for m in MEASURES:
        (view, reason), values = views[m.quantity], None
        if view is not None:
            has_context = m.needs == "profile" or view.context_frames
            reason = "" if has_context else first_frame.NO_CONTEXT
            if has_context and m.needs == "matrices" and not whole[m.quantity]:
                reason = first_frame.NO_MATRIX
            values = None if reason else m.of(view)
        # The first-frame effect of a cache whose cells do not tell it is NaN for every head
        if values is not None and m.name in IDENTIFIED and not np.isfinite(values).any():
            values, reason = None, first_frame.NOT_IDENTIFIED
        of_all_queries = whole[m.quantity] and (m.needs == "matrices" or m.name == "sign_rate")
        queries = ALL_QUERIES if of_all_queries else ""
        maps.append(HeadMap(m.name, m.title, m.unit, m.scale, values, reason, queries))
    return maps


MAIN = {  # what a figure of all heads shows, as questions; the table and the page have the other measures
    "first_frame_effect": "How much more it gives frame 0 than distance explains: s",
    "sign_rate": "Share of the past logits that is above 0",
    "wave_r2": "How much of its curve is RoPE's fastest wave: R²",
    "first_context_mass": "How much of the mass on the past is on frame 0",
}
MOSTLY = 0.5  # R² above which a curve is mostly a wave


def main_maps(maps: Sequence[HeadMap]) -> list[HeadMap]:
    """Return the maps that a figure of all heads shows, with questions as titles."""
    by_name = {panel.name: panel for panel in maps}
    return [by_name[name]._replace(title=title) for name, title in MAIN.items()]


def headline(maps: Sequence[HeadMap]) -> str:
    """Say how many heads prefer frame 0, and how many are mostly a wave, as far as a cache tells."""
    values = {panel.name: panel.values for panel in maps if panel.values is not None}
    effect, waves = values.get("first_frame_effect"), values.get("wave_r2")
    parts = []
    if effect is not None:
        count = int((effect > DELTA_THRESHOLD).sum())
        parts.append(f"{count} give frame 0 over {DELTA_THRESHOLD:g} logits more than distance explains")
    if waves is not None:
        parts.append(f"{int((waves > MOSTLY).sum())} are mostly a wave of RoPE")
    if not parts:
        return "Measures of every head"
    size = next(array.size for array in values.values())
    return f"Of {size} heads {' and '.join(parts)}"


def preference_title(older: HeadMap, newer: HeadMap) -> str:
    """Say how many heads prefer frame 0 by an older measure, and by a newer one."""
    counts = []
    for panel in (older, newer):
        if panel.values is not None:
            counts.append(f"{int((panel.values > DELTA_THRESHOLD).sum())} by {panel.title}")
    return f"Heads that prefer frame 0 by over {DELTA_THRESHOLD:g} logits: {', '.join(counts) or 'not told'}"


def peak_title(view: Profiles) -> str:
    """Say how many heads of a view are highest in frame 0, and in the queries' own block."""
    highest = head_statistics(view.profiles()).max_frame
    own = np.isin(highest, view.query_frames)
    first = (highest == 0) & ~own
    return (
        f"Of {highest.size} heads {first.sum()} are highest in frame 0, {own.sum()} in the queries' own block"
    )


def measure_rows(maps: Sequence[HeadMap]) -> list[dict[str, Any]]:
    """A row per map: mean, median, range, heads that have it and heads above 2; or why it is absent."""
    rows = []
    for m in maps:
        row: files.Record = {"measure": m.name, "unit": m.unit}
        v = np.empty(0) if m.values is None else m.values[np.isfinite(m.values)]
        if v.size:
            row |= {"mean": v.mean(), "median": np.median(v), "min": v.min(), "max": v.max(), "heads": v.size}
            if m.scale == "diverging":
                row[f"above {DELTA_THRESHOLD:g}"] = int((v > DELTA_THRESHOLD).sum())
        else:
            row["absent"] = m.missing_reason or "N/A for all heads"
        rows.append(row)
    return rows


def finding_rows(view: Profiles, panels: Sequence[HeadPanel]) -> list[dict[str, Any]]:
    """List every measure of some heads, the mean of all heads, and how many heads are above 2."""
    if view.quantity != LOGIT or not view.context_frames:
        return []
    measures = {m.title: m.values for m in measure_heads(view, None) if m.values is not None}
    rows: list[files.Record] = []
    # 1. The heads that are shown.
    for panel in panels:
        layer = view.layers.index(panel.layer)
        row = {"heads": f"{panel.label}: layer {panel.layer}, head {panel.head}"}
        rows.append(row | {title: values[layer, panel.head] for title, values in measures.items()})
    # 2. All heads: means, and how many are above the border of measures that have a sign.
    count = len(view.layers) * view.num_heads
    mean = {title: stats.mean_without_nan(values.reshape(-1)) for title, values in measures.items()}
    rows.append({"heads": f"mean of all {count}"} | mean)
    above = {}
    for measure in MEASURES:
        if measure.scale == "diverging" and measure.title in measures:
            above[measure.title] = int((measures[measure.title] > DELTA_THRESHOLD).sum())
    rows.append({"heads": f"above {DELTA_THRESHOLD:g}, of all {count}"} | above)
    return rows


def band_profile(
    cache: Mapping, view: Profiles, layer: int, head: int
) -> tuple[np.ndarray, list[str]] | None:
    """Return what each RoPE band adds to a head's mean logits [F, bands], and their names; None if absent."""
    if "frame_logits_by_band" not in cache or layer not in view.layers or not 0 <= head < view.num_heads:
        return None
    passes = [at.step for at in as_cache(cache).passes()]
    # [N, P, H, F, F, bands] -> [F, F, bands]
    of_head = cache["frame_logits_by_band"][view.layers.index(layer), passes.index(view.step), head]
    values = of_head[list(view.query_frames)].float().mean(0).numpy()
    return values, cache.get("rope_bands", [f"band {i}" for i in range(values.shape[-1])])

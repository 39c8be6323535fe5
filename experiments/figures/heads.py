"""Heads and layers: profiles, frame matrices, keys of a cache policy, words of the prompt, RoPE bands."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

import experiments.figures.style as st
from experiments.analysis.axes import NO_SLOT, SPECIAL, KeyColumns
from experiments.analysis.panels import BlockPanel, HeadPanel, PartsPanel, ProfileMap
from experiments.analysis.stats import percent
from experiments.caches import view
from experiments.caches.titles import ranges

BARS_UP_TO = 60  # frames: gaps between more bars would be thinner than a pixel
MARKERS_UP_TO = 25
BARS_OF_LAYER = 0.3  # inches of a layer, for three bars with their deviations
LAYERS_NAMED = 6  # in a legend; more have a scale
SHOWN = 18  # first query frame of the block to point out: the paper's figure shows 18–20 alone
MIXED = -98  # position of a slot whose tokens stand at several ones
MARKS = {
    "sink": st.FIRST,
    "average": st.AVERAGED,
    "memory": st.PAST,
    "chosen tokens": st.CHOSEN,
    "zeros": st.EMPTY,
}
PALE = "#a3cbe2"  # of what is measured, where some of it stands out
FITTED = "waves of RoPE + extra logit of frame 0"
DASHED: st.Style = {"color": st.OWN, "linestyle": "--"}

# --- Profiles over key frames


@st.styled
def head_curves(
    panels: Sequence[HeadPanel],
    caption: view.Caption,
    pictures: Sequence[np.ndarray] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw Figure 4: a panel per head, tokens where known, a reference, pictures [h, w, 3] below."""
    if title is None:
        title = _highest_frames(panels)
    if not st.has_room(len(panels)):
        bands = {panel.label: panel.profile[None] for panel in panels}
        return _curves_as_map(bands, caption, title, "Head", "means of key frames alone, for want of room")
    figure, axes = st.panels(len(panels), columns=2, size=(4.5, 2.6))
    wide = figure.get_figwidth() / st.rows_and_columns(figure)[1] - 0.7  # inches, of an axis of frames
    legend: dict[str, Artist] = {}
    for axis, panel in zip(axes, panels, strict=True):
        # 1. The profile over its tokens
        F = len(panel.profile)
        tops = panel.profile  # highest point in each frame
        if panel.curve is not None:
            tops = panel.curve.reshape(F, -1).max(1)
        name = panel.label
        if name != f"L{panel.layer}H{panel.head}":
            name += f": layer {panel.layer}, head {panel.head}"
        if panel.reference is not None:
            name += f"\n{panel.agreement}"
        marks = _draw_profile(axis, panel, caption, name)
        # 2. What it is compared with: equal attention to all keys, and the published curve
        if panel.no_preference is not None:
            label = f"no preference: {panel.no_preference:.3g}"
            axis.axhline(panel.no_preference, label=label, color=st.COMPARED, linewidth=1, linestyle=":")
        if panel.reference is not None and panel.clipped is not None:
            _draw_reference(axis, panel.reference, panel.clipped)
            tops = np.fmax(tops, panel.reference)
        # 3. The highest frame, by its number, and by its value where there is room
        if np.isfinite(panel.profile).any():
            highest = int(np.nanargmax(panel.profile))
            label = f"frame {highest}"
            if len(panels) == 1:
                label += f": {panel.profile[highest]:.3g}"
            _mark_highest(axis, panel.profile, tops, label)
        axis.margins(y=0.18)
        legend |= st.handles(axis) | marks
        if pictures and axis.xaxis.get_tick_params()["labelbottom"]:
            st.picture_strip(axis, pictures, wide)
    y = st.LABELS[caption.quantity]
    if any(panel.curve is not None for panel in panels):
        y = st.TOKEN_LABELS[caption.quantity]
    st.label_figure(figure, axes, title, caption.about, y, legend)
    return figure


def listed(parts: Sequence[str]) -> str:
    """Join the first three of some parts of a title, and count the others."""
    text = ", ".join(parts[:3])
    if len(parts) > 3:
        text += f" and {len(parts) - 3} more"
    return text


def _highest_frames(panels: Sequence[HeadPanel]) -> str:
    """Say on which key frame each head is highest."""
    known = [panel for panel in panels if np.isfinite(panel.profile).any()]
    if not known:
        return "No key frame was attended"
    first, *others = [f"{panel.label}{{}} on frame {np.nanargmax(panel.profile)}" for panel in known]
    return listed([first.format(" is highest"), *(text.format("") for text in others)])


def peaks(maps: Sequence[ProfileMap], highlighted_frames: Mapping[str, Sequence[int]] = view.NOTHING) -> str:
    """Say how many heads are highest in frame 0 and in highlighted frames; of several maps, in two of them.

    The two are the first and the last.
    """
    shown = [(panel, panel.values) for panel in maps if panel.values is not None]
    profiles = [values[:, : values.shape[1] - panel.averages] for panel, values in shown]
    text = _peaks(profiles[0], highlighted_frames)
    if len(shown) > 1:
        counts = " and ".join(map(str, _peak_counts(profiles[-1], highlighted_frames).values()))
        text += f" ({shown[0][0].title}); {counts} ({shown[-1][0].title})"
    return text


def _peaks(profiles: np.ndarray, highlighted_frames: Mapping[str, Sequence[int]]) -> str:
    """Say how many profiles [n, F] are highest in frame 0, and in highlighted frames."""
    counts = _peak_counts(profiles, highlighted_frames)
    text = f"{counts.pop('frame 0')} of {len(profiles)} heads are highest in frame 0"
    return ", ".join([text, *(f"{count} in {name}" for name, count in counts.items())])


def _peak_counts(profiles: np.ndarray, highlighted_frames: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Count the profiles [n, F] that are highest in frame 0, and in highlighted frames."""
    known = profiles[np.isfinite(profiles).any(-1)]
    highest = np.where(np.isnan(known), -np.inf, known).argmax(-1)
    counts = {"frame 0": int((highest == 0).sum())}
    for text, frames in highlighted_frames.items():
        counts[f"the {text.partition(' (')[0]}"] = int(np.isin(highest, list(frames)).sum())
    return counts


def _curves_as_map(
    bands: Mapping[str, np.ndarray], caption: view.Caption, title: str, y: str, note: str = ""
) -> Figure:
    """Draw curves that are too many for panels as one heat map: a row [1, F + averages] for each name."""
    values = np.concatenate(list(bands.values()))
    colors = st.color_scale(values, caption.quantity, st.PERCENTILE)
    figure, (axis,) = st.maps_of_bands({"": st.Bands(bands, st.LABELS[caption.quantity], colors)})
    legend = _mark_frames(axis, values.shape[1], caption)
    x = f"Key frame ({caption.unit})"
    st.label_figure(figure, [axis], title, caption.about, y, st.grey_legend(values) | legend, x, note)
    return figure


def _mark_frames(axis: Axes, columns: int, caption: view.Caption) -> dict[str, Artist]:
    """Mark where highlighted frames and averages begin on a heat map; return their legend."""
    F = columns - caption.averages
    st.label_places(axis.xaxis, [*range(F), *["μ"] * caption.averages])
    legend = _mark_beginnings(axis, caption.highlighted_frames)
    return legend | st.mark_averages(axis, F, caption.averages)


def _mark_beginnings(axis: Axes, highlighted_frames: Mapping[str, Sequence[int]]) -> dict[str, Artist]:
    """Draw a line on a heat map where highlighted frames begin; return the legend."""
    legend: dict[str, Artist] = {}
    for text, frames in highlighted_frames.items():
        axis.axvline(min(frames) - 0.5, linewidth=1, **DASHED)
        legend[text] = Line2D([], [], label=f"from here: {text}", linewidth=1, **DASHED)
    return legend


def _draw_profile(axis: Axes, panel: HeadPanel, caption: view.Caption, title="") -> dict[str, Artist]:
    """Draw a profile per key frame, over its tokens where they are known; return the legend of its marks."""
    F = len(panel.profile)
    if panel.curve is None:
        label = "per key frame"
        axis.bar(np.arange(F), panel.profile, width=0.8, color=st.MEASURED, alpha=0.75, linewidth=0)
    else:
        label = "mean per key frame"
        edges = np.linspace(-0.5, F - 0.5, len(panel.curve) + 1)  # frame k covers k - 1/2 .. k + 1/2
        tokens = "per key token"
        if panel.group > 1:
            tokens = f"mean of {panel.group} key tokens"
        axis.stairs(panel.curve, edges, fill=True, color=st.MEASURED, alpha=0.55, linewidth=0, label=tokens)
    # The mean of a frame stands in its middle, over tokens of k - 1/2 .. k + 1/2
    axis.plot(np.arange(F), panel.profile, color=st.DARK, marker="o", markersize=3, label=label)
    averages = np.empty(0) if panel.averages is None else panel.averages
    return _finish_profile(axis, panel.profile, averages, caption, title)


def _draw_reference(axis: Axes, reference: np.ndarray, clipped: np.ndarray) -> None:
    """Draw a curve [F] read off another figure; arrows stand where that figure cuts it off."""
    (line,) = axis.plot(reference, "--", color=st.COMPARED, label="read off the paper")
    line.set(marker="D", markersize=3, markevery=np.flatnonzero(~clipped).tolist())
    if clipped.any():
        keys, label = np.flatnonzero(clipped), "cut off by the paper's plot"
        axis.plot(keys, reference[clipped], "^", color=st.COMPARED, markersize=7, label=label)


def _mark_highest(axis: Axes, profile: np.ndarray, tops: np.ndarray, label: str) -> None:
    """Mark the highest frame of a profile [F], with a label above the highest points [F] around it."""
    F, highest = len(profile), int(np.nanargmax(profile))
    around = max(2, F // 8)
    top = np.nanmax(tops[max(0, highest - around) : highest + around + 1])
    side = "center"
    if highest < 0.1 * F:  # the label stays inside the axes
        side = "left"
    elif highest > 0.9 * F:
        side = "right"
    text = axis.annotate(label, (highest, top), (0, 5), textcoords="offset points")
    text.set(weight="bold", color=st.DARK, ha=side)
    axis.plot(highest, profile[highest], "o", color=st.DARK, markersize=5, markerfacecolor="white")


def _finish_profile(
    axis: Axes, profile: np.ndarray, averages: np.ndarray, caption: view.Caption, title=""
) -> dict[str, Artist]:
    """Finish a panel of a profile [F] and of averages of gone frames; return the legend of its marks."""
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set_title(title)
    axis.set_xlim(-0.6, len(profile) - 0.4)
    st.label_places(axis.xaxis, [*range(len(profile)), *["μ"] * len(averages)])
    legend: dict[str, Artist] = {}
    for text, frames in caption.highlighted_frames.items():
        axis.axvspan(min(frames) - 0.5, max(frames) + 0.5, zorder=0, **st.SHADE)
        legend[text] = Patch(**st.SHADE, label=text)
    # Runs of frames that were not attended: one hatched area each
    missing = np.flatnonzero(np.isnan(profile))
    if len(missing):
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            axis.axvspan(run[0] - 0.5, run[-1] + 0.5, zorder=0, **st.HATCH)
        legend[st.NOT_ATTENDED] = Patch(**st.HATCH, label=st.NOT_ATTENDED)
    return legend | st.mark_averages(axis, len(profile), len(averages), averages)


def head_titles(values: np.ndarray, text: str = "H{head}, Δ = {value:+.2f}") -> list[str]:
    """Return panel titles with a value [H] of each head; N/A for NaN."""
    if np.nanmax(np.abs(values), initial=0) < 0.01:  # probabilities of single tokens
        text = text.replace(":+.2f}", ":+.0e}").replace(":.2f}", ":.0e}")
    titles = [text.format(head=head, value=value).replace("e-0", "e-") for head, value in enumerate(values)]
    return [title.replace("+nan", "N/A").replace("nan", "N/A").replace("-", "−") for title in titles]


@st.styled
def head_grid(
    profiles: np.ndarray, titles: Sequence[str], caption: view.Caption, *, layer: int, note=""
) -> Figure:
    """Draw a small panel per row of profiles [n, F + averages], each on its own scale."""
    n, F = profiles.shape[0], profiles.shape[1] - caption.averages
    parts = [f"Layer {layer}: {_peaks(profiles[:, :F], caption.highlighted_frames)}", note]
    if not st.has_room(n):
        bands = dict(zip(titles, profiles[:, None], strict=True))
        return _curves_as_map(bands, caption, "; ".join(filter(None, parts)), "Head")
    figure, axes = st.panels(n, columns=4 if n <= 16 else 6, size=(2.5, 1.4))
    legend: dict[str, Artist] = {}
    for axis, values, title in zip(axes, profiles, titles, strict=True):
        # [F + averages]
        if F <= BARS_UP_TO:
            st.bars(axis, values[:F], st.MEASURED, width=0.85)
        else:
            axis.stairs(values[:F], np.arange(F + 1) - 0.5, fill=True, color=st.MEASURED, linewidth=0)
        axis.yaxis.set_major_locator(MaxNLocator(3))
        legend |= _finish_profile(axis, values[:F], values[F:], caption, title)
    title = "; ".join(filter(None, [*parts, "scales differ"]))
    x, y = f"Key frame ({caption.unit})", st.LABELS[caption.quantity]
    st.label_figure(figure, axes, title, caption.about, y, legend, x)
    return figure


@st.styled
def sweep_curves(profiles: Mapping[str, np.ndarray], caption: view.Caption, names: Sequence[str]) -> Figure:
    """Draw a panel per head of profiles [atlases, F + averages]: mean, deviation (n − 1), each atlas."""
    title = f"{st.NAMES[caption.quantity].capitalize()} over {len(names)} atlases"
    if len(names) > 1:
        agreements = [
            f"{_least_correlation(values):.2f} ({head.partition(':')[0]})"
            for head, values in profiles.items()
        ]
        title = f"Over {len(names)} atlases, curves of a head correlate by at least r = {listed(agreements)}"
    if not st.has_room(len(profiles)):
        bands = {head: values.mean(0, keepdims=True) for head, values in profiles.items()}
        return _curves_as_map(bands, caption, f"{title}, their mean", "Head")
    columns, size = 4, (2.5, 1.4)
    if len(profiles) <= 4:
        columns, size = 2, (4.5, 2.4)
    figure, axes = st.panels(len(profiles), columns, size)
    legend: dict[str, Artist] = {}
    for axis, (head, values) in zip(axes, profiles.items(), strict=True):
        # [atlases, F + averages]
        F = values.shape[1] - caption.averages
        mean = values.mean(0)
        st.mean_bars(axis, values.T[:, None], [st.MEASURED], ddof=1, width=0.8, alpha=0.6)
        axis.plot(values[:, :F].T, color="0.35", linewidth=0.5)
        legend |= _finish_profile(axis, mean[:F], mean[F:], caption, head)
    label = f"mean ± standard deviation over {len(names)} atlases"
    legend["mean"] = Patch(color=st.MEASURED, alpha=0.6, label=label)
    note = "grey lines: each atlas"
    if len(names) <= 4:
        note = f"grey lines: {', '.join(names)}"
    st.label_figure(figure, axes, title, caption.about, st.LABELS[caption.quantity], legend, note=note)
    return figure


def _least_correlation(values: np.ndarray) -> float:
    """Return the least correlation of two rows of values [atlases, F + averages]; NaN of constant rows."""
    attended = values[:, np.isfinite(values).all(0)]
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.corrcoef(attended).min())


@st.styled
def layer_comparison(profiles: np.ndarray, layers: Sequence[int], caption: view.Caption) -> Figure:
    """Draw a middle over heads of profiles [N, H, F + averages] in a band, a panel a layer.

    Of logits mean and standard deviation; masses are skewed: their median, and the middle 80 % of heads.
    """
    N, H, F = *profiles.shape[:2], profiles.shape[2] - caption.averages
    if not st.has_room(N):
        return _layers_as_maps(profiles, layers, caption)
    columns, size, ticks = 6, (1.7, 1.2), 3
    if N <= 4:
        columns, size, ticks = 2, (4.5, 2.2), 6
    elif N <= 12:
        columns, size = 4, (2.2, 1.4)
    figure, axes = st.panels(N, columns, size)
    legend: dict[str, Artist] = {}
    frames, marker = np.arange(F), "o" if F <= MARKERS_UP_TO else ""
    for axis, layer, values in zip(axes, layers, profiles, strict=True):
        # [H, F + averages] -> [F + averages]
        if caption.quantity == "mean_logit":
            middle, deviation = values.mean(0), values.std(0)
            bottom = (middle - deviation)[:F]
            axis.bar(frames, 2 * deviation[:F], 0.8, bottom, color=st.MEASURED, alpha=0.3, linewidth=0)
            axis.use_sticky_edges = False  # else the lowest bar touches the frame, as if it were cut off
        else:
            middle = np.median(values, 0)
            low, high = np.quantile(values[:, :F], [0.1, 0.9], axis=0)
            axis.fill_between(frames, low, high, color=st.MEASURED, alpha=0.3, linewidth=0)
        axis.plot(frames, middle[:F], color=st.MEASURED, marker=marker, markersize=2)
        axis.yaxis.set_major_locator(MaxNLocator(ticks))
        legend |= _finish_profile(axis, middle[:F], middle[F:], caption, f"Layer {layer}")
    note = f"line and band: median and middle 80 % of {H} heads"
    if caption.quantity == "mean_logit":
        note = f"line and band: mean ± standard deviation over {H} heads"
    if N > 1:
        note += "; scales differ"
    title = _highest_layer(profiles[..., :F], layers, caption)
    st.label_figure(figure, axes, title, caption.about, st.LABELS[caption.quantity], legend, note=note)
    return figure


def _highest_layer(profiles: np.ndarray, layers: Sequence[int], caption: view.Caption) -> str:
    """Say where the middle over heads of profiles [N, H, F], a mean or a median, is highest."""
    middle, name = profiles.mean(1), "mean"
    if caption.quantity != "mean_logit":
        middle, name = np.median(profiles, 1), "median"
    if not np.isfinite(middle).any():
        return "No key frame was attended"
    layer, frame = divmod(int(np.nanargmax(middle)), middle.shape[1])
    where = f"in layer {layers[layer]}, on key frame {frame}"
    return f"The {name} over {profiles.shape[1]} heads is highest {where}"


def _layers_as_maps(profiles: np.ndarray, layers: Sequence[int], caption: view.Caption) -> Figure:
    """Draw profiles [N, H, F + averages], a row a layer: their middle and their spread over heads."""
    if caption.quantity == "mean_logit":
        values = {"Mean over heads": profiles.mean(1), "Standard deviation": profiles.std(1)}
    else:
        low, high = np.quantile(profiles, [0.1, 0.9], axis=1)
        values = {"Median over heads": np.median(profiles, 1), "Width of middle 80 %": high - low}
    parts = {}
    quantities = (caption.quantity, "spread")  # colours of a spread begin at 0
    for (name, rows), quantity in zip(values.items(), quantities, strict=True):
        colors = st.color_scale(rows, quantity, st.PERCENTILE)
        bands = {str(layer): row[None] for layer, row in zip(layers, rows, strict=True)}
        parts[name] = st.Bands(bands, st.LABELS[caption.quantity], colors)
    figure, axes = st.maps_of_bands(parts)
    legend = st.grey_legend(profiles)
    for axis in axes:
        legend |= _mark_frames(axis, profiles.shape[2], caption)
    F = profiles.shape[2] - caption.averages
    title = _highest_layer(profiles[..., :F], layers, caption)
    x = f"Key frame ({caption.unit})"
    st.label_figure(figure, axes, title, caption.about, "Layer", legend, x)
    return figure


@st.styled
def layers_together(profiles: np.ndarray, layers: Sequence[int], caption: view.Caption) -> Figure:
    """Draw the mean over heads of profiles [N, H, F + averages], every layer in one axes."""
    N, H, F = *profiles.shape[:2], profiles.shape[2] - caption.averages
    figure, (axis,) = st.panels(1, 1, (7.0, 3.2))
    colors = ListedColormap(st.series(N))
    # A line per layer, averages of gone frames as single dots
    mean = profiles.mean(1)
    lines: dict[str, Artist] = {}
    for i, (layer, values) in enumerate(zip(layers, mean, strict=True)):
        marker = "os^Dv"[i % 5] if F <= MARKERS_UP_TO else ""
        (line,) = axis.plot(values[:F], marker=marker, markersize=2.5, linewidth=1, color=colors(i))
        line.set_label(f"layer {layer}")
        lines[str(layer)] = line
        axis.plot(np.arange(F, len(values)), values[F:], "o", markersize=2.5, color=colors(i))
    legend = _finish_profile(axis, mean[0, :F], np.full(caption.averages, np.nan), caption)
    if N <= LAYERS_NAMED:
        legend = lines | legend
    else:
        bar = st.color_bar(figure, ScalarMappable(Normalize(-0.5, N - 0.5), colors), axis, "Layer")
        shown = np.unique(np.linspace(0, N - 1, 8).round().astype(int))
        bar.set_ticks(shown.tolist(), labels=[str(layers[i]) for i in shown])
    title = "No key frame was attended"
    if np.isfinite(mean[:, :F]).any():
        order = np.argsort(np.nanmean(mean[:, :F], 1))
        title = f"Layer {layers[order[-1]]} is highest, averaged over {H} heads and all key frames"
        if N > 1:
            title += f"; layer {layers[order[0]]} is lowest"
    st.label_figure(figure, [axis], title, caption.about, st.LABELS[caption.quantity], legend)
    return figure


@st.styled
def layer_statistics(
    first: np.ndarray, middle: np.ndarray, last: np.ndarray, layers: Sequence[int], caption: view.Caption
) -> Figure:
    """Draw the first, middle and last frame by layer: mean and deviation over heads of [N, H].

    Three bars a layer, or lines in bands where bars would be too slim.
    """
    N, H = first.shape
    figure, (axis,) = st.panels(1, 1, (7.0, 2.6))
    values = np.stack([first, middle, last], 1)  # [N, 3, H]
    colors = {"first key frame": st.FIRST, "middle (all between)": st.PAST, "last key frame": st.OWN}
    marks = f"lines: mean over {H} heads; bands: ± standard deviation"
    if figure.panel_width / N >= BARS_OF_LAYER:
        marks = f"bars: mean over {H} heads; lines: ± standard deviation"
        st.mean_bars(axis, values, list(colors.values()), width=0.8)
    else:
        mean, deviation = values.mean(2), values.std(2)  # [N, 3]
        for color, of_frame, spread in zip(colors.values(), mean.T, deviation.T, strict=True):
            axis.fill_between(
                range(N), of_frame - spread, of_frame + spread, color=color, alpha=0.12, linewidth=0
            )
            axis.plot(of_frame, "o-", color=color, markersize=3)
    axis.axhline(0, color="0.4", linewidth=0.8)
    st.label_places(axis.xaxis, layers)
    axis.set(ylabel=st.LABELS[caption.quantity], xlim=(-0.6, N - 0.4))
    axis.grid(False, axis="x")
    legend = {name: Patch(color=color, label=name) for name, color in colors.items()}
    above = [int((other.mean(1) > middle.mean(1)).sum()) for other in (first, last)]
    title = (
        f"The first key frame is above the middle ones in {above[0]} of {N} layers, the last in {above[1]}"
    )
    st.label_figure(figure, [axis], title, caption.about, legend=legend, x="Layer", note=marks)
    return figure


# --- Frame 0 by block of queries, waves of temporal RoPE, and published curves beside ours


@st.styled
def first_by_block(blocks: Mapping[str, BlockPanel], title="", subtitle="", *, of_paper=True) -> Figure:
    """Draw frame 0's excess over the other context frames against the block of queries, a panel a head.

    The title counts the blocks in which frame 0 is above the others, unless one is given.
    """
    if not title:
        count = max(len(block.starts) for block in blocks.values())
        above = [f"{(block.measured > 0).sum()} of {count} ({head})" for head, block in blocks.items()]
        title = f"Blocks of queries in which frame 0 is above the other past frames: {listed(above)}"
    x, y = "Middle query frame of the block (latent)", "Frame 0 − other context (logits)"
    if not st.has_room(len(blocks), same_scale=True):
        starts = next(iter(blocks.values())).starts
        values = np.stack(
            [[block.measured, block.predicted] for block in blocks.values()], 1
        )  # [2, heads, n]
        colors = st.color_scale(values, "mean_logit", st.PERCENTILE)
        parts = {
            name: st.Bands(dict(zip(blocks, of_part[:, None], strict=True)), "logits", colors)
            for name, of_part in zip(("measured", FITTED), values, strict=True)
        }
        figure, axes = st.maps_of_bands(parts)
        for axis in axes:
            st.label_places(axis.xaxis, starts + 1)
        st.label_figure(figure, axes, f"{title}: {y}", subtitle, "Head", x=x)
        return figure
    figure, axes = st.panels(len(blocks), columns=1, size=(7.0, 1.6), same_scale=True)
    for axis, (name, (starts, measured, predicted)) in zip(axes, blocks.items(), strict=True):
        middles = starts + 1
        of_block = [st.MEASURED if start == SHOWN else PALE for start in starts]
        st.bars(axis, measured, of_block, width=2.2, places=middles)
        axis.plot(middles, predicted, "o-", color=st.COMPARED, markersize=3)
        axis.axhline(0, color="0.3", linewidth=0.8)
        axis.set(xlim=(starts[0] - 1, starts[-1] + 3), title=name)
        st.label_places(axis.xaxis, middles, places=middles)
    queries = f"queries {SHOWN}–{SHOWN + 2}"
    if of_paper:
        queries += ", those of the paper"
    legend: dict[str, Artist] = {
        "measured": Patch(color=PALE, label="measured"),
        "shown": Patch(color=st.MEASURED, label=f"measured, {queries}"),
        "predicted": Line2D([], [], color=st.COMPARED, marker="o", markersize=3, label=FITTED),
    }
    st.label_figure(figure, axes, title, subtitle, y, legend, x)
    return figure


@st.styled
def curves_in_parts(parts: Mapping[str, PartsPanel], title="", subtitle="") -> Figure:
    """Draw context curves beside their waves, a panel a head, with its blocks of queries side by side.

    Names are "HEAD, queries A–B". A line shows what s adds to frame 0, and the rest follows.
    """
    heads: dict[str, dict[str, PartsPanel]] = {}
    for name, block in parts.items():
        head, _, queries = name.rpartition(", ")
        heads.setdefault(head, {})[queries] = block
    if not title:
        shares = [f"{percent(_explained(list(blocks.values())))} ({head})" for head, blocks in heads.items()]
        title = f"Variance of the past's curves that RoPE's waves and s explain: {listed(shares)}"
    if not st.has_room(len(heads), same_scale=True, columns=1):
        return _parts_as_maps(heads, title, subtitle)
    figure, axes = st.panels(len(heads), columns=1, size=(7.0, 1.7), keep=True, same_scale=True)
    inch = (sum(len(part.measured) + 2 for part in next(iter(heads.values())).values())) / figure.panel_width
    values = np.concatenate([[b.waves[0] + b.s, *b.measured, *b.waves, 0] for b in parts.values()])
    bottom, top = values.min() - 0.5, values.max() + 0.5
    height = top - bottom
    for axis, (head, blocks) in zip(axes, heads.items(), strict=True):
        axis.set(ylim=(bottom, top + 0.35 * height), title=head)  # above: which queries
        ticks: dict[float, str] = {}
        left = 0
        for queries, block in blocks.items():
            frames = left + np.arange(len(block.measured))
            colors = [st.FIRST, *[st.PAST] * (len(frames) - 1)]
            st.bars(axis, block.measured, colors, places=frames)
            axis.plot(frames, block.waves, "o-", color=st.COMPARED, markersize=2.5)
            axis.plot([left, left], [block.waves[0], block.waves[0] + block.s], color=st.DARK, linewidth=2.5)
            words = st.wrapped(queries, st.SMALL, len(frames) / inch)
            label = axis.text(left - 0.4, top + 0.17 * height, words, va="center", fontsize=st.SMALL)
            label.set_in_layout(False)  # it is inside the panel
            ticks |= {left + frame: str(frame) for frame in range(0, len(frames), 3)}
            left += len(frames) + 2
        axis.axhline(0, color=st.DARK, linewidth=0.6)
        axis.set_xlim(-1, left - 2)
        st.label_places(axis.xaxis, ticks.values(), places=ticks)
    legend: dict[str, Artist] = {
        "first": Patch(color=st.FIRST, label="measured, frame 0"),
        "others": Patch(color=st.PAST, label="measured, other context"),
        "waves": Line2D([], [], color=st.COMPARED, marker="o", markersize=3, label="waves of RoPE"),
        "s": Line2D([], [], color=st.DARK, linewidth=2.5, label="s, at frame 0"),
    }
    st.label_figure(figure, axes, title, subtitle, "Mean logit", legend)
    return figure


def _explained(blocks: Sequence[PartsPanel]) -> float:
    """Return the share of the variance of curves that waves and s explain."""
    measured = np.concatenate([block.measured for block in blocks])
    forecast = np.concatenate([[block.waves[0] + block.s, *block.waves[1:]] for block in blocks])
    total = ((measured - measured.mean()) ** 2).sum()
    return float(1 - ((measured - forecast) ** 2).sum() / max(total, 1e-12))


def _parts_as_maps(heads: Mapping[str, Mapping[str, PartsPanel]], title: str, subtitle: str) -> Figure:
    """Draw context curves beside their waves, a band a head, with a row for each block of queries."""
    measured, forecast = {}, {}
    for head, blocks in heads.items():
        F = max(len(block.measured) for block in blocks.values())
        measured[head], forecast[head] = np.full((2, len(blocks), F), np.nan)
        for row, block in enumerate(blocks.values()):
            measured[head][row, : len(block.measured)] = block.measured
            forecast[head][row, : len(block.waves)] = block.waves
            forecast[head][row, 0] += block.s
    values = np.concatenate([*measured.values(), *forecast.values()])
    colors = st.color_scale(values, "mean_logit", st.PERCENTILE)
    parts = {"measured": measured, FITTED: forecast}
    bands = {name: st.Bands(part, "Mean logit", colors) for name, part in parts.items()}
    figure, axes = st.maps_of_bands(bands)
    note = f"rows of a head, from above: {', '.join(next(iter(heads.values())))}"
    st.label_figure(figure, axes, title, subtitle, "Head", st.grey_legend(values), note=note)
    return figure


class HeadPair(NamedTuple):
    """Context curves [n] of one head."""

    name: str
    ours: np.ndarray
    published: np.ndarray
    r: float


@st.styled
def heads_by_agreement(r: Mapping[str, np.ndarray], worst: Sequence[HeadPair], title: str) -> Figure:
    """Draw the sorted r of all heads, a line for each name, and some heads' curves beside the published."""
    if not st.has_room(1 + len(worst)):
        values = np.stack([[pair.published, pair.ours] for pair in worst], 1)  # [2, heads, n]
        colors = st.color_scale(values, "mean_logit", st.PERCENTILE)
        names = [f"{pair.name}, r = {pair.r:.2f}" for pair in worst]
        parts = {
            name: st.Bands(dict(zip(names, of_part[:, None], strict=True)), "Mean logit", colors)
            for name, of_part in zip(("published", "here"), values, strict=True)
        }
        figure, axes = st.maps_of_bands(parts)
        st.label_figure(figure, axes, title, y="Head")
        return figure
    figure, axes = st.panels(1 + len(worst), 3, (3.0, 2.0))
    for (name, values), color in zip(r.items(), st.series(len(r)), strict=True):
        ordered = np.sort(values[np.isfinite(values)])
        axes[0].plot(np.linspace(0, 1, len(ordered)), ordered, color=color, label=name)
    axes[0].set(title="All heads, ordered", xlabel="Share of heads", ylabel="r of curves", ylim=(-1, 1.02))
    for axis, pair in zip(axes[1:], worst, strict=True):
        _bars_and_line(axis, pair.published, pair.ours, st.GREY)
        axis.set(title=f"{pair.name}, r = {pair.r:.2f}", xlabel="Key frame (latent)", ylabel="Mean logit")
    legend = st.handles(axes[0])
    legend["published"] = Patch(color=st.GREY, label="published curve")
    legend["here"] = Line2D([], [], color=st.MEASURED, marker="o", markersize=3, label="here")
    st.label_figure(figure, [], title, legend=legend)
    return figure


def _bars_and_line(axis: Axes, bars: np.ndarray, line: np.ndarray, color: str | list[str]) -> None:
    st.bars(axis, bars, color)
    axis.plot(line, "o-", color=st.MEASURED, markersize=2.5)
    axis.axhline(0, color=st.DARK, linewidth=0.6)
    st.label_places(axis.xaxis, range(len(bars)))


# --- Maps: query frames, heads or slots over keys


@st.styled
def frame_maps(
    matrices: np.ndarray,
    query_frames: Sequence[int],
    caption: view.Caption,
    *,
    layer: int | str,
    heads: Sequence[int | str] | None = None,
    keys: Sequence[str] | None = None,
    key_axis="frame",
    title="",
) -> Figure:
    """Draw query × key frames of every head on one colour scale: matrices [H, rows, F + averages].

    A row per entry of query_frames. layer is a number, or what the title says in its place. heads are their
    numbers or names, 0, 1, ... by default; more than 16 are thumbnails, six in a row. keys are labels
    of columns that are not the frames 0, 1, ...; key_axis says whether they are frames or positions.
    """
    # 1. How many of the last columns are averages; what the heads are called
    averages = caption.averages
    if keys is not None:
        averages = sum(key.startswith("μ") for key in keys)
    H, rows, F = matrices.shape[0], matrices.shape[1], matrices.shape[2] - averages
    if heads is None:
        heads = range(H)
    name = layer if isinstance(layer, str) else f"Layer {layer}"
    if not isinstance(heads[0], str):
        name += f", {H} heads" if H > 1 else f", head {heads[0]}"
    if not title:
        title = f"{name}: {st.NAMES[caption.quantity]} of every query frame on every key frame"
        if keys is None and np.isfinite(matrices).any():
            title = f"{name}: {_highest_keys(matrices[..., :F], query_frames)}"
    # 2. A cache of profiles alone: an empty panel says so
    if not np.isfinite(matrices).any():
        figure, (axis,) = st.panels(1, 1, size=(7.0, 1.0))
        axis.grid(False)
        axis.set(xticks=[], yticks=[])
        axis.add_patch(Rectangle((0, 0), 1, 1, transform=axis.transAxes, zorder=0, **st.HATCH))
        st.label_figure(figure, [], title, caption.about, note="absent: no frame matrix in this cache")
        return figure
    x = f"Key frame ({caption.unit})"
    columns_of_keys = [*map(str, range(F)), *["μ"] * averages]
    if keys is not None:
        x, columns_of_keys = _keys_label(key_axis, keys), list(keys)
    colors = st.color_scale(matrices, caption.quantity)
    legend = st.grey_legend(matrices)
    # 3. More heads than a page has room for: one map
    if not st.has_room(H, same_scale=True):
        names = [head if isinstance(head, str) else f"H{head}" for head in heads]
        bands = dict(zip(names, matrices, strict=True))
        figure, (axis,) = st.maps_of_bands({"": st.Bands(bands, st.LABELS[caption.quantity], colors)})
        st.label_places(axis.xaxis, columns_of_keys)
        legend |= st.mark_averages(axis, F, averages)
        note = f"rows of a head, from above: query frames {query_frames[0]} to {query_frames[-1]}"
        st.label_figure(figure, [axis], title, caption.about, "Head", legend, x, note)
        return figure
    # 4. A panel a head; square cells where queries are about as many as keys
    is_square = rows > F / 2
    columns, size = 6, (1.6, 1.5 if is_square else 1.1)
    if H == 1:
        columns, size = 1, (5.0, 2.4)
    elif H <= 16:
        columns, size = 4, (2.2, 1.9 if is_square else 1.4)
    figure, axes = st.panels(H, columns, size, same_scale=True)
    if is_square and H > 1:
        st.shape_square(figure)
    for head, axis, values in zip(heads, axes, matrices, strict=True):
        image = st.heat_map(axis, values, equal=is_square, **colors)
        if isinstance(head, str):
            axis.set_title(head)
        elif H > 1:
            axis.set_title(f"H{head}")
        st.label_places(axis.xaxis, columns_of_keys)
        legend |= st.mark_averages(axis, F, averages)
        st.label_places(axis.yaxis, query_frames)
    st.color_bar(figure, image, axes, st.LABELS[caption.quantity])
    st.label_figure(figure, axes, title, caption.about, f"Query frame ({caption.unit})", legend, x)
    return figure


def _highest_keys(matrices: np.ndarray, query_frames: Sequence[int]) -> str:
    """Say how many rows of matrices [H, rows, F] are highest in the query's own frame, and in frame 0."""
    is_known = np.isfinite(matrices).any(-1)
    highest = np.where(np.isnan(matrices), -np.inf, matrices).argmax(-1)  # [H, rows]
    queries = np.broadcast_to(query_frames, highest.shape)
    is_later = is_known & (queries > 0)  # frame 0 is its own
    if not is_later.any():
        return "frame 0 alone looks"
    own, first = (highest == queries)[is_later].mean(), (highest == 0)[is_later].mean()
    return f"{percent(own)} of query frames look most at themselves, {percent(first)} at frame 0"


@st.styled
def profile_heat_maps(
    panels: Sequence[ProfileMap],
    title: str,
    subtitle="",
    *,
    columns: int | None = None,
    highlighted_frames: Mapping[str, Sequence[int]] = view.NOTHING,
) -> Figure:
    """Draw a panel per map, a row per head; panels of one quantity share one colour scale."""
    shown = [(panel, panel.values) for panel in panels if panel.values is not None]
    note = st.missing_note((panel.title, panel.missing_reason) for panel in panels if panel.values is None)
    y, places = "Head", [panel for panel, _ in shown]
    if st.has_room(len(shown), same_scale=True):
        figure, axes = _heat_panels([(panel.quantity, values) for panel, values in shown], columns)
        for axis, (panel, _) in zip(axes, shown, strict=True):
            axis.set_title(panel.title)
    else:
        bands: dict[str, dict[str, np.ndarray]] = {}
        for panel, values in shown:
            bands.setdefault(panel.quantity, {})[panel.title] = values
        figure, axes = _maps_by_quantity(bands)
        y, places = "A row a head", [places[0]] * len(axes)
    legend: dict[str, Artist] = {}
    for axis, panel in zip(axes, places, strict=True):
        assert panel.values is not None  # such as have no values are not shown
        F = panel.values.shape[1] - panel.averages
        st.label_places(axis.xaxis, [*range(F), *["μ"] * panel.averages])
        legend |= _mark_beginnings(axis, highlighted_frames) | st.mark_averages(axis, F, panel.averages)
    for _, values in shown:
        legend |= st.grey_legend(values)
    st.label_figure(figure, axes, title, subtitle, y, legend, note=note)
    return figure


def _maps_by_quantity(
    bands: Mapping[str, Mapping[str, np.ndarray]],
) -> tuple[st.StyledFigure, list[Axes]]:
    """Draw bands [H, F] of each quantity in one heat map, with a colour scale of its own."""
    parts = {}
    for quantity, of_quantity in bands.items():
        cells = np.concatenate([band.ravel() for band in of_quantity.values()])
        colors = st.color_scale(cells, quantity, st.PERCENTILE)
        title = st.NAMES[quantity] if len(bands) > 1 else ""
        parts[title] = st.Bands(of_quantity, st.LABELS[quantity], colors)
    return st.maps_of_bands(parts)


@st.styled
def key_maps(panels: Mapping[str, KeyColumns], quantity: str, title: str, subtitle="") -> Figure:
    """Draw a panel per layer, a row per head; the strip above marks sinks, memories and choices."""
    # The strip of marks lies above row 0 of a layer, whose upper edge is at -0.5
    H = max((len(panel.values) for panel in panels.values()), default=1)
    tall = max(1, math.ceil(0.12 * H))
    y, is_by_panel = "Head", st.has_room(len(panels), same_scale=True)
    if is_by_panel:
        figure, axes = _heat_panels([(quantity, panel.values) for panel in panels.values()], None)
        tops = np.full(len(axes), -0.5)
        for axis, name in zip(axes, panels, strict=True):
            axis.set_title(name)
            axis.set_ylim(H - 0.5, -0.7 - tall)
    else:
        strip = ((tall, 0), (0, 0))  # empty rows above each layer, for its marks
        bands = {name: np.pad(panel.values, strip, constant_values=np.nan) for name, panel in panels.items()}
        figure, axes = _maps_by_quantity({quantity: bands})
        axes = axes * len(panels)
        tops = np.arange(len(panels)) * (H + tall) + tall - 0.5
        y = "A row a head"
    legend: dict[str, Artist] = {}
    for axis, top, panel in zip(axes, tops, panels.values(), strict=True):
        for column, mark in enumerate(panel.marks):
            corner, color = (column - 0.5, top - tall), MARKS.get(mark, "white")
            axis.add_patch(Rectangle(corner, 1, tall, facecolor=color, linewidth=0))
        legend |= st.grey_legend(panel.values)
        legend |= {mark: Patch(facecolor=MARKS[mark], label=mark) for mark in MARKS if mark in panel.marks}
        st.label_places(axis.xaxis, panel.labels)
    x = _keys_label(panel.axis, panel.labels)
    st.label_figure(figure, axes, title, subtitle, y, legend, x)
    return figure


def _heat_panels(
    maps: Sequence[tuple[str, np.ndarray]], columns: int | None
) -> tuple[st.StyledFigure, list[Axes]]:
    """Draw a panel for each (quantity, [H, F]); those of one quantity share a colour scale and its bar."""
    # 1. The grid: a panel is at least 2 inches wide, and as high as its heads need.
    num_heads = 1
    if maps:
        num_heads = len(maps[0][1])
    if columns is None:
        columns = 4
        if len(maps) > 12:
            columns = 6
    width = max(2.0, min(4.0, 7.0 / max(1, min(columns, len(maps)))))
    least_height = 1.7
    if len(maps) > columns:
        least_height = 1.0
    size = (width, max(least_height, 0.5 + 0.06 * num_heads))
    is_same = len({values.shape for _, values in maps}) == 1
    figure, axes = st.panels(len(maps), columns, size, same_scale=is_same)
    # 2. Logits and masses have scales and bars of their own.
    for quantity in dict.fromkeys(quantity for quantity, _ in maps):
        of_quantity = [number for number, (name, _) in enumerate(maps) if name == quantity]
        values = np.concatenate([maps[number][1].ravel() for number in of_quantity])
        colors = st.color_scale(values, quantity, st.PERCENTILE)
        for number in of_quantity:
            image = st.heat_map(axes[number], maps[number][1], **colors)
            st.label_places(axes[number].yaxis, range(len(maps[number][1])))
        st.color_bar(figure, image, [axes[number] for number in of_quantity], st.LABELS[quantity], values)
    return figure, axes


def _keys_label(key_axis: str, labels: Sequence[str]) -> str:
    """Name the columns, for their axis."""
    if key_axis == "position":
        return "Temporal position"
    if labels and labels[-1].startswith("μ"):
        return "Key frame, μ averages"
    return "Key frame (latent)"


@st.styled
def prompt_words(mass: np.ndarray, words: Sequence[str], *, layer: int, subtitle: str) -> Figure:
    """Draw the cross-attention mass [H, words] of every head on each word, and on the whole prompt."""
    H, n = mass.shape
    size = (3.8, max(2.4, 1.2 + 0.16 * H))
    figure, (left, right) = st.panels(2, 2, size, keep=True, sharey=True, width_ratios=[2, 1])
    image = st.heat_map(left, mass, **st.color_scale(mass, "mass", st.PERCENTILE))
    # A word takes 0.13 inches; the left panel has 0.45 of the width
    step = max(1, round(n * 0.13 / (0.45 * figure.get_figwidth())))
    shown = [st.plain(word) for word in words[::step]]
    left.set_xticks(np.arange(n)[::step], shown, fontsize=st.TINY, rotation=90)
    left.set(xlabel="Word of the prompt", ylabel="Head")
    st.label_places(left.yaxis, range(H))
    st.color_bar(figure, image, [left, right], st.LABELS["mass"], mass)
    right.barh(np.arange(H), mass.sum(1), color=st.PROMPT, height=0.8, linewidth=0)
    right.set(xlabel="Whole prompt (share of 1)", xlim=(0, 1), ylim=(H - 0.5, -0.5), xticks=[0, 1])
    right.grid(False, axis="y")
    mean = mass.mean(0)
    title = (
        f"Layer {layer}: heads read “{words[mean.argmax()]}” most, with {percent(mean.max())} of their mass; "
    )
    title += f"the whole prompt gets {percent(mean.sum())}"
    st.label_figure(figure, [], title, subtitle)
    return figure


@st.styled
def rope_bands(
    values: np.ndarray, names: Sequence[str], caption: view.Caption, *, layer: int, head: int
) -> Figure:
    """Draw what each RoPE band adds to a head's mean logits: values [F, bands]; and their sum."""
    F, bands = values.shape
    ratios = [1, max(1.2, bands / 9)]
    figure, (above, below) = st.panels(2, 1, (7.0, 1.2 + 0.1 * bands), sharex=True, height_ratios=ratios)
    above.bar(np.arange(F), values.sum(-1), width=0.8, color=st.MEASURED, alpha=0.75, linewidth=0)
    above.set_ylabel("Sum (logits)")
    legend = _finish_profile(above, values.sum(-1), np.empty(0), caption)
    image = st.heat_map(below, values.T, **st.color_scale(values, "mean_logit"))
    st.label_places(below.yaxis, names, points=st.TINY)
    st.color_bar(figure, image, below, st.LABELS["mean_logit"])
    for marked in caption.highlighted_frames.values():
        below.axvline(min(marked) - 0.5, linewidth=1.2, **DASHED)
    below.set_xlim(-0.5, F - 0.5)
    above.tick_params(labelbottom=False)
    most = names[int(np.nanstd(values, 0).argmax())]
    title = f"Layer {layer}, head {head}: of RoPE's bands, “{most}” varies most over key frames"
    st.label_figure(figure, [below], title, caption.about, legend=legend)
    return figure


@st.styled
def slot_map(frames: np.ndarray, positions: np.ndarray, num_frames: int, title: str, subtitle="") -> Figure:
    """Draw frames and positions [blocks, slots]: a cell a slot, coloured by frame, with its position."""
    blocks, slots = frames.shape
    figure, (axis,) = st.panels(1, 1, (1.4 + 0.26 * slots, 0.6 + 0.17 * blocks))
    colors = ScalarMappable(Normalize(0, max(1, num_frames - 1)), matplotlib.colormaps["viridis"])
    # 1. Special slots have colours of their own, which no frame has
    cells = colors.to_rgba(frames)
    for code, name in SPECIAL.items():
        cells[frames == code] = to_rgba(MARKS[name])
    cells[frames == NO_SLOT] = to_rgba("white")
    axis.imshow(cells, interpolation="nearest", aspect="auto")
    # 2. Numbers where cells are wide enough
    last = sorted({frame for frame in frames[-1].tolist() if frame >= 0})
    title += f": the last block sees {len(last)} of {num_frames} frames"
    if last:
        title += f", {ranges(last)}"
    note = ""
    if figure.get_figwidth() - 1.2 >= 0.15 * slots:
        note = "numbers: temporal positions of RoPE"
        for block, slot in np.argwhere((frames != NO_SLOT) & (positions >= 0)).tolist():
            is_light = frames[block, slot] < 0 or frames[block, slot] > 0.6 * num_frames
            number = axis.text(slot, block, str(positions[block, slot]), gid="cell", fontsize=st.TINY)
            number.set(ha="center", va="center", color="black" if is_light else "white")
    st.label_places(axis.xaxis, range(slots))
    st.label_places(axis.yaxis, range(blocks))
    axis.set_ylabel("Block of queries")
    axis.grid(False)
    st.color_bar(figure, colors, axis, "Latent frame")
    special = [name for code, name in SPECIAL.items() if code in frames]
    legend: dict[str, Artist] = {name: Patch(color=MARKS[name], label=name) for name in special}
    st.label_figure(figure, [axis], title, subtitle, legend=legend, x="Slot of the cache", note=note)
    return figure


@st.styled
def last_block_attention(
    mass: np.ndarray, frames: np.ndarray, positions: np.ndarray, title: str, subtitle=""
) -> Figure:
    """Draw mass [H, slots] of the last block: heads over slots, named by frame and position."""
    # Codes of slot_frame beside frames, see experiments/caches/formats.py
    codes = {-1: "avg", -2: "0", -3: "tok"}
    labels = []
    for frame, position in zip(frames.tolist(), positions.tolist(), strict=True):
        label = codes.get(frame, f"f{frame}")
        if position not in (MIXED, NO_SLOT):
            label += f"\n@{position}"
        labels.append(label)
    mean = np.nan_to_num(mass).mean(0)
    most = int(frames[mean.argmax()])
    slot = f"frame {most}" if most >= 0 else f"slot {mean.argmax()}"
    title += f": heads read {slot} most, with {percent(mean.max())} of their mass"
    names = ("Head", "Slot: f frame, tok chosen tokens, avg average, @ temporal position", st.LABELS["mass"])
    return st.one_heat_map(mass, title, subtitle, names, columns=labels, **st.color_scale(mass, "mass"))


@st.styled
def survival_map(kept: np.ndarray, title: str, subtitle="") -> Figure:
    """Draw kept [layers, F]: how much of each frame the last block still sees, layer by layer."""
    whole, some = (kept == 1).all(0).sum(), (kept > 0).any(0).sum()
    title += f": the last block sees {whole} of {kept.shape[1]} frames whole"
    if some > whole:
        title += f", {some - whole} in part"
    names = ("Layer", "Latent frame", "Share of its tokens kept")
    return st.one_heat_map(kept, title, subtitle, names, cmap="viridis", vmin=0, vmax=1)

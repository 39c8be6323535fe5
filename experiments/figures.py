"""Arrays in, matplotlib Figure out, in one style. Nothing here reads a file or prints; save_svg writes one.

Every drawing function takes, beside its arrays, what was measured: quantity (mean_logit, mass, mean_prob), taken (pass
and queries, for titles) and shaded (legend text -> key frames to mark, such as those that are noise in that pass).
NaN was not attended. Titles are single lines: an SVG's own font is centred right only then.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from experiments.files import replacing

STYLE = seaborn.axes_style("whitegrid") | {
    "font.sans-serif": ["Arial", "DejaVu Sans", "Helvetica"],
    "font.size": 9,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "savefig.bbox": "tight",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "wan-attention",  # ids inside the file do not depend on the run
    "figure.constrained_layout.use": True,
}
LABELS = {
    "mean_logit": "Mean logit q·k/√D",
    "mass": "Attention mass (share of 1)",
    "mean_prob": "Mean probability per key token",
}
TOKEN_LABELS = LABELS | {"mean_logit": "Logit q·k/√D, query mean", "mean_prob": "Probability, query mean"}
NAMES = {"mean_logit": "mean logit", "mass": "attention mass", "mean_prob": "mean probability"}
BLUE, DARK, ORANGE, GREEN, PURPLE, RED, GREY = (
    "#4C72B0",
    "#1F3552",
    "#DD8452",
    "#55A868",
    "#8172B3",
    "#C44E52",
    "0.85",
)
ABSENT = {"facecolor": "0.92", "edgecolor": "0.7", "hatch": "////", "linewidth": 0}
SHADE = {"facecolor": ORANGE, "alpha": 0.2, "linewidth": 0}
THIN_ABOVE = 25  # frames: up to here every frame has a tick, where there is room


Shaded = Mapping[str, Sequence[int]]
NONE: Mapping = MappingProxyType({})


class HeadPanel(NamedTuple):
    """One head for head_curves; profile [F], curve [F*S] per key token or None; and what it is compared with."""

    label: str
    layer: int
    head: int
    profile: np.ndarray
    curve: np.ndarray | None
    reference: np.ndarray | None = None  # [F] read off another figure
    clipped: np.ndarray | None = None  # [F] bool: where that figure cuts it off
    agreement: str = ""  # how well the two agree, in words


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in the style of this module, and keep the figure out of pyplot's list of open ones."""

    @wraps(draw)
    def wrapper(*args, **kwargs) -> Figure:
        with plt.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            for _ in range(
                2
            ):  # the layout settles in two rounds; then fixed, so showing a figure cannot change it
                figure.draw_without_rendering()
            figure.set_layout_engine("none")
            plt.close(figure)
            return figure

    return wrapper


def save_svg(figure: Figure, path: str | Path) -> Path:
    """Write a figure as SVG, whole or not at all; the same figure gives the same bytes."""
    with plt.rc_context(STYLE), replacing(path) as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
    return Path(path)


@styled
def head_curves(panels: Sequence[HeadPanel], *, quantity: str, taken: str, shaded: Shaded = NONE) -> Figure:
    """Figure 4: one panel per head. Filled per key token where the curve is known, as in the paper, and the mean of
    each key frame on it; else a bar per key frame. The highest frame is annotated. A reference is drawn over it, with an
    arrow where its own figure cut it off."""
    figure, axes = panel_grid(len(panels), columns=2, size=(6.6, 3.5))
    legend = {}
    for axis, panel in zip(axes, panels, strict=True):
        F = len(panel.profile)
        frames = np.arange(F)
        if panel.curve is not None:
            edges = np.linspace(-0.5, F - 0.5, len(panel.curve) + 1)  # frame k covers k - 1/2 .. k + 1/2
            axis.stairs(
                panel.curve, edges, fill=True, color=BLUE, alpha=0.55, linewidth=0, label="per key token"
            )
        else:
            axis.bar(frames, panel.profile, width=0.8, color=BLUE, alpha=0.75, linewidth=0)
        axis.plot(
            frames,
            panel.profile,
            color=DARK,
            linewidth=1.2,
            marker="o",
            markersize=3,
            label="per key frame" if panel.curve is None else "mean per key frame",
        )
        axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set_title(f"{panel.label}: layer {panel.layer}, head {panel.head}, {NAMES[quantity]}, {taken}")
        axis.set_ylabel((LABELS if panel.curve is None else TOKEN_LABELS)[quantity])
        axis.margins(y=0.12)
        _overlay(axis, panel)
        if np.isfinite(panel.profile).any():
            k = int(np.nanargmax(panel.profile))
            top = panel.profile[k] if panel.curve is None else np.split(panel.curve, F)[k].max()
            top = top if panel.reference is None else np.fmax(top, panel.reference[k])
            side = "left" if k < 0.06 * F else "right" if k > 0.94 * F else "center"
            axis.annotate(
                f"max@{k}", (k, top), (0, 5), textcoords="offset points", ha=side, weight="bold", color=DARK
            )
        frame_axis(axis, F, room=25)
        legend |= {h.get_label(): h for h in axis.get_legend_handles_labels()[0]} | mark_frames(
            axis, panel.profile, shaded
        )
    label_figure(figure, axes, "", legend=legend)
    return figure


def _overlay(axis: Axes, panel: HeadPanel) -> None:
    """The reference of a panel and the words about it, in room made for them at the top."""
    if panel.reference is None:
        return
    frames, cut = np.arange(len(panel.reference)), panel.clipped
    axis.plot(
        frames,
        panel.reference,
        color=RED,
        linewidth=1.2,
        linestyle="--",
        marker="D",
        markersize=3,
        markevery=list(np.flatnonzero(~cut)),
        label="read off the paper",
    )
    if cut.any():
        axis.plot(
            frames[cut],
            panel.reference[cut],
            color=RED,
            linestyle="",
            marker="^",
            markersize=7,
            label="cut off by the paper's plot",
        )
    axis.margins(y=0.18)
    axis.text(
        0.5,
        0.98,
        panel.agreement,
        transform=axis.transAxes,
        ha="center",
        va="top",
        color=RED,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
    )


@styled
def per_head_grid(
    profiles: np.ndarray, delta: np.ndarray, *, layer: int, quantity: str, taken: str, shaded: Shaded = NONE
) -> Figure:
    """One small panel per head of profiles [H, F], each on its own scale; delta [H] = first - middle in the titles."""
    H, F = profiles.shape
    figure, axes = panel_grid(H, columns=4 if H <= 16 else 8, size=(2.9, 1.9) if H <= 16 else (2.2, 1.5))
    legend = {}
    for head, axis in enumerate(axes):
        axis.bar(np.arange(F), profiles[head], width=0.85, color=BLUE, linewidth=0)
        axis.axhline(0, color="0.4", linewidth=0.6)
        number = f"{delta[head]:+.2f}".replace("-", "−") if np.isfinite(delta[head]) else "N/A"
        axis.set_title(f"H{head}, Δ = {number}", fontsize=9)
        axis.yaxis.set_major_locator(MaxNLocator(4))
        frame_axis(axis, F, room=8)
        legend |= mark_frames(axis, profiles[head], shaded)
    label_figure(
        figure,
        axes,
        f"Layer {layer}, {H} heads: {NAMES[quantity]}, {taken}; Δ = first − middle; scales differ",
        LABELS[quantity],
        legend,
    )
    return figure


@styled
def all_heads(
    profiles: np.ndarray, *, layer: int, quantity: str, taken: str, shaded: Shaded = NONE
) -> Figure:
    """Heat map heads x key frames of profiles [H, F]; grey was not attended."""
    H, F = profiles.shape
    figure, axis = plt.subplots(figsize=(max(7.0, min(12.0, 2.5 + 0.32 * F)), max(2.6, 1.4 + 0.24 * H)))
    axis.grid(False)
    axis.set_facecolor(GREY)
    mesh = axis.pcolormesh(
        np.arange(F + 1) - 0.5,
        np.arange(H + 1) - 0.5,
        np.ma.masked_invalid(profiles),
        cmap="viridis",
        edgecolors="face",
        linewidth=0.2,
    )
    frame_axis(axis, F, room=25)
    axis.set(ylabel="Head", xlim=(-0.5, F - 0.5), ylim=(H - 0.5, -0.5), yticks=ticks(H, room=20))
    figure.colorbar(mesh, ax=axis, label=LABELS[quantity], pad=0.02, aspect=30)
    legend = {"not attended": Patch(facecolor=GREY, label="not attended")} if np.isnan(profiles).any() else {}
    edge = offset_copy(
        axis.get_xaxis_transform(), figure, y=4, units="points"
    )  # a shade would change the colours
    for text, frames in shaded.items():
        span = [min(frames) - 0.5, max(frames) + 0.5]
        axis.axvline(span[0], color=ORANGE, linewidth=1.2, linestyle="--")
        legend[text] = axis.plot(
            span,
            [1, 1],
            color=ORANGE,
            linewidth=4,
            solid_capstyle="butt",
            clip_on=False,
            transform=edge,
            label=text,
        )[0]
    label_figure(figure, [axis], f"Layer {layer}, {H} heads: {NAMES[quantity]}, {taken}", legend=legend)
    return figure


@styled
def layer_comparison(
    profiles: np.ndarray, layers: Sequence[int], *, quantity: str, taken: str, shaded: Shaded = NONE
) -> Figure:
    """Mean over heads and one standard deviation either side of profiles [N, H, F], a panel per layer on its own scale:
    the logits of the real model's last layers would flatten all others."""
    N, H, F = profiles.shape
    columns, size = (2, (5.0, 3.2)) if N <= 4 else (4, (2.9, 1.9)) if N <= 12 else (6, (2.3, 1.7))
    figure, axes = panel_grid(N, columns, size)
    legend = {}
    for axis, layer, values in zip(axes, layers, profiles, strict=True):
        mean, std = values.mean(0), values.std(0)
        axis.bar(
            np.arange(F), 2 * std, 0.8, mean - std, color=BLUE, alpha=0.3, linewidth=0
        )  # a frame alone shows too
        axis.plot(
            np.arange(F), mean, color=BLUE, linewidth=1.5, marker="o" if F <= THIN_ABOVE else "", markersize=2
        )
        axis.axhline(0, color="0.4", linewidth=0.6)
        axis.set_title(f"Layer {layer}")
        axis.yaxis.set_major_locator(MaxNLocator(6 if N <= 4 else 4))
        frame_axis(axis, F, room=25 if N <= 4 else 8)
        legend |= mark_frames(axis, mean, shaded)
    scales = "; scales differ" if N > 1 else ""
    label_figure(
        figure,
        axes,
        f"{_capital(NAMES[quantity])}, mean ± std over {H} heads, {taken}{scales}",
        LABELS[quantity],
        legend,
    )
    return figure


@styled
def layer_statistics(
    first: np.ndarray,
    middle: np.ndarray,
    last: np.ndarray,
    layers: Sequence[int],
    *,
    quantity: str,
    taken: str,
) -> Figure:
    """Bars of the first, middle and last frame per layer: mean over heads of [N, H], whisker one standard deviation."""
    N, H = first.shape
    figure, axis = plt.subplots(figsize=(max(7.0, min(13.0, 2.5 + 0.45 * N)), 3.8))
    bars = [
        ("first key frame", first, BLUE),
        ("middle (all between)", middle, GREEN),
        ("last key frame", last, PURPLE),
    ]
    for i, (text, values, color) in enumerate(bars):
        axis.bar(
            np.arange(N) + (i - 1) * 0.27,
            values.mean(1),
            0.25,
            yerr=values.std(1),
            label=text,
            color=color,
            linewidth=0,
            error_kw={"elinewidth": 0.8, "ecolor": "0.3"},
            capsize=2 if N <= 12 else 0,
        )
    axis.axhline(0, color="0.4", linewidth=0.8)
    axis.set_xticks(np.arange(N), [str(layer) for layer in layers])
    axis.set(ylabel=LABELS[quantity], xlim=(-0.6, N - 0.4))
    axis.grid(False, axis="x")
    legend = {h.get_label(): h for h in axis.get_legend_handles_labels()[0]}
    label_figure(
        figure,
        [axis],
        f"{_capital(NAMES[quantity])}, mean ± std over {H} heads, {taken}",
        legend=legend,
        x="Layer",
    )
    return figure


def panel_grid(n: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """n axes in rows of at most columns, each of size inches; cells left over are empty."""
    columns = min(n, columns)
    rows = -(-n // columns)
    figure, axes = plt.subplots(
        rows, columns, squeeze=False, sharex=True, figsize=(max(7.0, size[0] * columns), 0.8 + size[1] * rows)
    )
    axes = list(axes.flat)
    for axis in axes[n:]:
        axis.remove()
    for axis in axes[max(0, n - columns) : n]:  # the lowest of each column keeps its tick labels
        axis.tick_params(labelbottom=True)
    return figure, axes[:n]


def label_figure(
    figure: Figure,
    axes: Sequence[Axes],
    title: str,
    y: str = "",
    legend: Mapping = NONE,
    x: str = "Key frame (latent)",
) -> None:
    """Title, x label under the lowest axes, one y label for all, and a legend below everything."""
    figure.suptitle(title)
    for axis in axes:
        if axis.xaxis.get_tick_params()["labelbottom"]:
            axis.set_xlabel(x)
    if y:
        figure.supylabel(y, fontsize=9)
    if legend:
        figure.legend(
            handles=list(legend.values()), loc="outside lower center", ncols=len(legend), frameon=False
        )


def ticks(n: int, room: int) -> np.ndarray:
    """0, step, 2 step, ... below n: every one where there is room for that many, else a round step."""
    step = next(s for s in (1, 2, 3, 5, 6, 10, 12, 20, 25, 50, 100, 200, 500, n) if n / s <= room or s >= n)
    return np.arange(0, n, step)


def frame_axis(axis: Axes, F: int, room: int) -> None:
    axis.set_xlim(-0.6, F - 0.4)
    axis.set_xticks(ticks(F, room if F <= THIN_ABOVE else min(room, 15)))


def mark_frames(axis: Axes, profile: np.ndarray, shaded: Shaded) -> dict[str, Patch]:
    """Shade the frames of shaded, hatch those that were not attended; legend entries by their text."""
    legend = {}
    for text, frames in shaded.items():
        axis.axvspan(min(frames) - 0.5, max(frames) + 0.5, zorder=0, **SHADE)
        legend[text] = Patch(**SHADE, label=text)
    absent = np.flatnonzero(np.isnan(profile))
    for run in np.split(absent, np.flatnonzero(np.diff(absent) > 1) + 1) if len(absent) else []:
        axis.axvspan(run[0] - 0.5, run[-1] + 0.5, zorder=0, **ABSENT)
        legend["not attended"] = Patch(**ABSENT, label="not attended")
    return legend


def say_absent(axis: Axes, why: str, width: int = 22) -> None:
    """An axis for what a cache does not hold, with the reason in lines of at most width letters. Its limits are left as
    they are: axes may share them."""
    axis.grid(False)
    axis.tick_params(bottom=False, labelbottom=False, left=False, labelleft=False)
    axis.add_patch(Rectangle((0, 0), 1, 1, transform=axis.transAxes, zorder=0, **ABSENT))
    axis.text(
        0.5,
        0.5,
        "absent:\n" + fill(why, width),
        transform=axis.transAxes,
        ha="center",
        va="center",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 3},
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]

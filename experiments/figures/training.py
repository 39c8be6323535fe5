"""The miniature: losses of its training, its attention meanwhile, strips of its videos."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure

import experiments.figures.style as st
from experiments.figures.style import BLUE, DARK, GREEN, ORANGE, PURPLE, RED, YELLOW, styled

STRIP_FRAMES = 7  # shown of 81, evenly
SMOOTHED = 7  # values of a loss that are averaged
HEAD_COLORS = (RED, ORANGE, PURPLE, BLUE, YELLOW, GREEN)  # of heads that a figure names


@styled
def training_curves(
    losses: Mapping[str, Sequence[Sequence]],
    psnr: Sequence[Sequence[float]],
    resumed: int | None,
    subtitle="",
) -> Figure:
    """Draw the losses of each stage, and the PSNR of the VAE on held-out clips.

    losses are runs of [step, seconds, loss] by the stage's name, dashed but for the last run; psnr is
    [step, all, first second, last second]. resumed is the step at which the VAE's second run begins.
    """
    figure, (left, right) = st.panels(2, 2, (3.8, 2.4))
    half = SMOOTHED // 2
    for (name, runs), color in zip(losses.items(), (BLUE, ORANGE, GREEN, PURPLE), strict=False):
        for n, curve in enumerate(runs, 1 - len(runs)):  # the last run is 0
            _, seconds, loss = np.array(curve).T
            share = seconds / seconds[-1]
            smooth = np.exp(np.convolve(np.log(loss), np.ones(SMOOTHED) / SMOOTHED, "valid"))
            label = None if n else f"{name}, mean of {SMOOTHED}"
            left.plot(share[half:-half], smooth, "--" if n else "-", color=color, label=label)
            left.plot(share, loss, color=color, linewidth=0.7, alpha=0.0 if n else 0.35)
    left.set(yscale="log", xlabel="Share of the run's time", ylabel="Loss", title="Loss of each stage")
    steps, *curves = np.array(psnr).T
    names = ("81 frames", "first second", "last second")
    for values, color, name, marker in zip(curves, (DARK, BLUE, ORANGE), names, "os^", strict=True):
        right.plot(steps, values, marker=marker, markersize=3, color=color, label=name)
    if resumed is not None:
        right.axvline(resumed, color=DARK, linestyle=":", linewidth=1, label="resumed")
    right.set(xlabel="Step", ylabel="PSNR (dB)", title="VAE, held-out clips")
    legend = st.handles(left) | st.handles(right)
    note = "dashed: earlier run of a stage; pale: single values"
    st.label_figure(figure, [], "Training of the miniature", subtitle, legend=legend, note=note)
    return figure


@styled
def training_checkpoints(
    steps: Sequence[int],
    measures: Mapping[str, tuple[str, float, np.ndarray]],
    shown: Sequence[int],
    subtitle: str,
    few_step: int | None = None,
) -> Figure:
    """Draw measures (unit, neutral, [checkpoints, layers, heads]) over steps, and maps of those shown."""
    named: dict[int, str] = {}  # head -> colour
    rows, columns = len(measures), 1 + len(shown)
    figure, axes = st.panels(rows * columns, columns, (2.3, 2.2))
    legend: dict[str, Artist] = {}
    for i, (title, (unit, neutral, values)) in enumerate(measures.items()):
        line, *maps = axes[i * columns : (i + 1) * columns]
        flat, heads = values.reshape(len(steps), -1), values.shape[2]
        line.plot(steps, flat, color="0.6", linewidth=0.5)
        line.plot(steps, flat.mean(1), color=DARK, linewidth=1.8, label="mean of all heads")
        for head in np.argsort(-flat[-1])[:3].tolist():
            color = named.setdefault(head, HEAD_COLORS[len(named) % len(HEAD_COLORS)])
            name = f"L{head // heads}H{head % heads}"
            line.plot(steps, flat[:, head], "o-", markersize=2.5, color=color, label=name)
        line.axhline(neutral, color="black", linestyle=":", linewidth=1, label="no preference")
        if few_step is not None and few_step < steps[-1]:
            label = f"few-step stages from step {few_step} on"
            line.axvline(few_step, color=GREEN, linestyle="--", linewidth=1, label=label)
        line.set_xscale("symlog", linthresh=100)  # even up to 100, then by size
        line.set_xticks([0, 100, 1000, 10000], ["0", "100", "1k", "10k"])
        line.set(xlabel="Training step", ylabel=unit, title=title, xlim=(-10, 1.2 * steps[-1]))
        legend |= st.handles(line)
        chosen = values[[steps.index(step) for step in shown]]
        limit = np.abs(chosen).max()
        low, cmap = (-limit, "RdBu_r") if values.min() < 0 else (0, "viridis")
        for axis, step, map_of_step in zip(maps, shown, chosen, strict=True):
            image = st.heat_map(axis, map_of_step, cmap=cmap, vmin=low, vmax=limit)
            axis.set(title=f"step {step}", xlabel="Head", xticks=range(heads), yticks=range(values.shape[1]))
        maps[0].set_ylabel("Layer")
        st.color_bar(figure, image, maps, unit)
    st.label_figure(figure, [], "Preference for the first frame in training", subtitle, legend=legend)
    return figure


@styled
def video_strips(
    captions: Sequence[str], rows: Mapping[str, Sequence[np.ndarray]], title="Videos", subtitle=""
) -> Figure:
    """Draw under each caption a strip of frames a source: source -> videos [F, H, W, 3] in 0..1."""
    room = len(st.columns_with_room(2 * STRIP_FRAMES, 0.55, beside=1.2))
    count = min(STRIP_FRAMES, room)
    chosen = np.linspace(0, len(next(iter(rows.values()))[0]) - 1, count).round().astype(int)
    size = (0.6 * count + 0.6, 0.62 * len(rows) + 0.4)
    figure, axes = st.panels(len(captions), room // STRIP_FRAMES or 1, size)
    edge = ((0, 0), (1, 1), (1, 1), (0, 0))
    for axis, (i, caption) in zip(axes, enumerate(captions), strict=True):
        shown = [np.pad(videos[i][chosen], edge, constant_values=1) for videos in rows.values()]
        picture = np.concatenate([np.concatenate([*strip], 1) for strip in shown])
        height, width = picture.shape[0] / len(rows), picture.shape[1] / len(chosen)
        # Six bits of a colour are enough, and an SVG packs them twice as well.
        st.show_picture(axis, np.round(63 * picture) / 63)
        axis.set_yticks([(n + 0.5) * height for n in range(len(rows))], list(rows))
        if i >= len(captions) - 2:  # frame numbers under the lowest strip of each column
            axis.set_xticks([(n + 0.5) * width for n in range(len(chosen))], [str(f) for f in chosen])
            axis.set_xlabel("Video frame", fontsize=st.SMALL, labelpad=1)
        axis.set_title(caption, fontsize=st.SMALL)
    st.label_figure(figure, [], title, subtitle)
    return figure

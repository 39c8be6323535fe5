"""What a cache policy keeps: slot over block, coloured by frame; the last block's attention to it."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.figures.style import GREY, ORANGE, PURPLE, in_style

SPECIAL = {-1: ("average", ORANGE), -2: ("zeros", GREY), -3: ("chosen tokens", PURPLE)}
NO_SLOT, MIXED = -9, -98


def slot_map(frames: np.ndarray, positions: np.ndarray, num_frames: int, title: str) -> Figure:
    """frames and positions [blocks, slots] -> a cell a slot, coloured by frame, its position written in.

    Averages, zeros and chosen tokens, which are of no single frame, have colours of their own.
    """
    blocks, slots = frames.shape
    with in_style():
        figure, ax = plt.subplots(figsize=(1.6 + 0.3 * slots, 1.1 + 0.26 * blocks))
        colours = plt.get_cmap("viridis")
        shade = Normalize(0, max(1, num_frames - 1))
        for block in range(blocks):
            for slot in range(slots):
                _cell(ax, slot, block, int(frames[block, slot]), int(positions[block, slot]), colours, shade)
        ax.set(xlim=(0, slots), ylim=(blocks, 0), xlabel="Slot of the cache", ylabel="Block", title=title)
        ax.set_xticks(np.arange(slots) + 0.5, [str(slot) for slot in range(slots)], fontsize=7)
        ax.set_yticks(np.arange(blocks) + 0.5, [str(block) for block in range(blocks)], fontsize=7)
        ax.grid(False)
        bar = plt.cm.ScalarMappable(shade, colours)
        figure.colorbar(bar, ax=ax, label="Latent frame in the slot")
        _legend(figure, frames)
    return figure


def _cell(ax: Axes, slot: int, block: int, frame: int, position: int, colours, shade) -> None:
    if frame == NO_SLOT:
        return
    colour = SPECIAL[frame][1] if frame < 0 else colours(shade(frame))
    ax.add_patch(Rectangle((slot, block), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.5))
    if position >= 0:
        bright = frame >= 0 and shade(frame) > 0.6
        ax.text(
            slot + 0.5, block + 0.5, str(position), ha="center", va="center", fontsize=6,
            color="black" if bright or frame < 0 else "white",
        )  # fmt: skip


def _legend(figure: Figure, frames: np.ndarray) -> None:
    shown = [
        Rectangle((0, 0), 1, 1, color=c, label=name) for code, (name, c) in SPECIAL.items() if code in frames
    ]
    if shown:
        figure.legend(handles=shown, loc="outside lower center", ncols=len(shown), fontsize=7)


def last_block_attention(mass: np.ndarray, frames: np.ndarray, positions: np.ndarray, title: str) -> Figure:
    """mass [H, slots] of the last block -> heads over slots, named by frame and position."""
    codes = {-1: "avg", -2: "0", -3: "tok"}
    labels = [
        codes.get(int(f), f"f{f}") + ("" if p in (MIXED, NO_SLOT) else f"\n@{p}")
        for f, p in zip(frames, positions, strict=True)
    ]
    with in_style():
        figure, ax = plt.subplots(figsize=(1.8 + 0.34 * mass.shape[1], 1.3 + 0.18 * mass.shape[0]))
        image = ax.imshow(mass, aspect="auto", cmap="magma", vmin=0)
        ax.set(xlabel="Slot: frame @ temporal position", ylabel="Head", title=title)
        ax.set_xticks(range(mass.shape[1]), labels, fontsize=6)
        ax.set_yticks(range(mass.shape[0]), [str(head) for head in range(mass.shape[0])], fontsize=7)
        ax.grid(False)
        figure.colorbar(image, ax=ax, label="Attention mass (share of 1)")
    return figure


def survival_map(kept: np.ndarray, title: str) -> Figure:
    """kept [layers, F] -> how much of each frame the last block still sees, layer by layer."""
    with in_style():
        figure, ax = plt.subplots(figsize=(1.8 + 0.2 * kept.shape[1], 1.2 + 0.2 * kept.shape[0]))
        image = ax.imshow(kept, aspect="auto", cmap="viridis", vmin=0, vmax=1)
        ax.set(xlabel="Latent frame", ylabel="Layer", title=title)
        ax.set_yticks(range(len(kept)))
        ax.grid(False)
        figure.colorbar(image, ax=ax, label="Share of its tokens kept")
    return figure

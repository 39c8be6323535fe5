"""What is left when more and more heads lose their past."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from experiments.figures.style import BLUE, DARK, GREEN, ORANGE, PURPLE, RED, label_figure, styled

COLORS = (ORANGE, RED, BLUE, GREEN, PURPLE)


@styled
def knockout_curves(
    counts: Sequence[int],
    orders: Mapping[str, np.ndarray],
    random: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    *,
    subtitle: str,
    what: str = "Share back in colour and shape",
) -> Figure:
    """A line an order [counts, 3] (share, low, high) over the number of heads; ends are none and all.

    random [counts, 5] has the lowest and highest draw too: the grey band.
    """
    figure, axis = plt.subplots(figsize=(7.4, 4.0))
    places = np.arange(len(counts) + 2)

    def whole(values: np.ndarray) -> np.ndarray:
        return np.concatenate([ends[0][None, :3], values[:, :3], ends[1][None, :3]])

    axis.fill_between(
        places[1:-1], random[:, 3], random[:, 4], color="0.88", linewidth=0, label="range of random orders"
    )
    lines = {"random order, mean": (random, DARK)}
    lines |= {name: (values, color) for (name, values), color in zip(orders.items(), COLORS, strict=False)}
    for n, (name, (values, color)) in enumerate(lines.items()):
        share, low, high = whole(values).T
        shifted = places + 0.06 * (n - (len(lines) - 1) / 2) * ((places > 0) & (places < places[-1]))
        axis.errorbar(
            shifted,
            share,
            [share - low, high - share],
            fmt="o-",
            color=color,
            markersize=3.5,
            linewidth=1.4,
            elinewidth=0.8,
            capsize=1.5,
            label=name,
        )
    axis.set_xticks(places, ["none", *map(str, counts), "all"])
    axis.set(xlabel="Heads that do not see the past", ylabel=what, ylim=(-0.02, 1.02))
    axis.legend(fontsize=8, loc="upper right")
    label_figure(figure, [], subtitle)
    return figure

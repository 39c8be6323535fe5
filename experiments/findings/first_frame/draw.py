"""Draw Figure 4 over the paper's curves, frame 0 by block of queries, and its forecast (README.md).

    python experiments/findings/first_frame/draw.py

All are of the published atlases in cache/published/; so are the heads that it counts. results.json and
sink_forecast.json beside this file have the numbers of the article.
"""

from pathlib import Path

import numpy as np

from experiments import figures
from experiments.analysis import published, rope_waves
from experiments.analysis.first_frame import matrices
from experiments.analysis.panels import BlockPanel, choose_heads, table
from experiments.caches import load_cache
from experiments.caches.view import Profiles, open_profiles
from experiments.running import cli

PROMPTS = "eagle", "castle"
RIDGE = 0.001  # of the forecast (README.md)


def run(argv=None):
    parser = cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    parser.add_argument("--overwrite", action="store_true", help="replace figures that were changed since")
    args = parser.parse_args(argv)
    folder = args.figures
    # 1. The paper's two heads over its digitised curves
    view = atlas("eagle", 21)
    curves, _ = published.curves_for(view, published.path_of(published.FIGURE4_CSV), published.FIGURE4_MODEL)
    panels, _ = choose_heads(view, published.FIGURE4_HEADS)
    compared = published.add_reference(panels, view, curves)
    by_head = [panel.agreement.partition(",")[0].removeprefix("r = ") for panel in compared]
    title = f"The curves of the paper's heads correlate with its Figure 4 by {' and '.join(by_head)}"
    figure4 = figures.head_curves(compared, view.caption, title=title)
    print(figures.save_figure(figure4, folder / "figure4_published.svg", overwrite=args.overwrite))
    # 2. The same heads at every block of 72 frames
    view = atlas("eagle", 72)
    panels, _ = choose_heads(view, published.FIGURE4_HEADS)
    blocks, _ = rope_waves.panels_of_view(view, panels)
    about = "Wan2.1-T2V-1.3B, Self-Forcing, eagle, t = 1000"
    by_block = figures.first_by_block(blocks, subtitle=about)
    print(figures.save_figure(by_block, folder / "first_frame_by_block.svg", overwrite=args.overwrite))
    # 3. What 21 frames of the other prompt say of them
    predicted = forecasts()
    agreement = [
        f"r = {np.corrcoef(panel.measured, panel.predicted)[0, 1]:.2f} ({head})"
        for head, panel in predicted.items()
    ]
    title = (
        f"21 frames of another prompt predict the excess of frame 0 at every block: {', '.join(agreement)}"
    )
    forecast = figures.first_by_block(predicted, title, f"{about}; the line is fitted to castle")
    print(figures.save_figure(forecast, folder / "sink_forecast.svg", overwrite=args.overwrite))
    # 4. Heads of both prompts that put frame 0 first at four blocks in a row
    print(table(steady_heads()))


def atlas(prompt: str, length: int) -> Profiles:
    """Open the published atlas of one prompt, of 21 or 72 latent frames."""
    return open_profiles(load_cache(published.path_of(f"self_forcing_dmd_{prompt}_{length}f.pt")))


def forecasts() -> dict[str, BlockPanel]:
    """Predict frame 0 at every block of eagle's 72 frames, for the paper's heads, from 21 of castle."""
    short, matrix = atlas("castle", 21), matrices(atlas("eagle", 72))
    fit = rope_waves.fit_matrix(
        matrices(short), short.block_sizes, rope_waves.fastest_frequencies(rope_waves.WAN_HEAD_DIM), RIDGE
    )
    starts = np.arange(6, matrix.shape[-1], 3)
    # [blocks, layers, H]
    measured = np.stack([rope_waves.first_excess(matrix[..., n : n + 3, :n]) for n in starts])
    predicted = np.stack([rope_waves.predict_first(fit, range(n, n + 3), range(n)) for n in starts])
    heads = {label: (layer, head) for layer, head, label in published.FIGURE4_HEADS}
    return {
        label: BlockPanel(starts, measured[:, layer, head], predicted[:, layer, head])
        for label, (layer, head) in heads.items()
    }


def steady_heads() -> list[dict[str, str | int]]:
    """Count heads whose highest context frame is 0 at every block from 9-11 to 18-20, and what waves make."""
    steady = dict[tuple[str, str], np.ndarray]()
    for prompt in PROMPTS:
        view = atlas(prompt, 21)
        matrix = matrices(view)
        fit = rope_waves.fit_matrix(
            matrix, view.block_sizes, rope_waves.fitted_frequencies(view, 3 * view.num_frames)
        )
        frames = np.arange(view.num_frames)
        waves = fit.waves.at((frames[:, None] - frames).ravel()).reshape(matrix.shape)
        with_s = waves.copy()
        with_s[..., 0] += fit.s[..., None]
        for name, values in {"waves": waves, "waves and s": with_s, "measured": matrix}.items():
            # [layers, H, blocks, frames]: a block's mean over its queries, of the frames before it
            rows = [values[..., first : first + 3, :first].mean(-2) for first in range(9, 19, 3)]
            leads = [row[..., 0] - row[..., 1:].max(-1) for row in rows]
            steady[name, prompt] = np.min(leads, 0) >= 0
    found: list[dict[str, str | int]] = []
    for name in ("waves", "waves and s", "measured"):
        row: dict[str, str | int] = {"frame 0 is highest": name}
        row |= {prompt: int(steady[name, prompt].sum()) for prompt in PROMPTS}
        both = np.logical_and(*(steady[name, prompt] for prompt in PROMPTS))
        found.append(row | {"both": int(both.sum())})
    return found


if __name__ == "__main__":
    cli.main(run)

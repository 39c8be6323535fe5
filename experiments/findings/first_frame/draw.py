"""Draw the README's Figure 4 over the paper's curves, and frame 0 by block of queries (docs/first_frame.md).

    python experiments/findings/first_frame/draw.py

Both are of the published atlases in cache/published/. results.json beside this file has the numbers of the
article.
"""

from pathlib import Path

from experiments.analysis import published
from experiments.analysis.panels import choose_heads
from experiments.analysis.rope_waves import panels_of_view
from experiments.caches import load_cache
from experiments.caches.view import Profiles, open_profiles
from experiments.figures import first_by_block, head_curves, save_svg
from experiments.running.cli import Parser, main


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", type=Path, default=Path("notebooks/figures"), help="folder of the SVGs")
    folder = parser.parse_args(argv).figures
    # 1. The paper's two heads over its digitised curves
    view = eagle(21)
    curves, _ = published.curves_for(view, published.FOLDER / published.FIGURE4_CSV, published.FIGURE4_MODEL)
    panels, _ = choose_heads(view, published.FIGURE4_HEADS)
    figure4 = head_curves(published.add_reference(panels, view, curves), view.caption)
    print(save_svg(figure4, folder / "figure4_published.svg"))
    # 2. The same heads at every block of 72 frames
    view = eagle(72)
    panels, _ = choose_heads(view, published.FIGURE4_HEADS)
    blocks, _ = panels_of_view(view, panels)
    about = "Wan2.1-T2V-1.3B, Self-Forcing, eagle, t = 1000"
    by_block = first_by_block(blocks, "Frame 0 by block of queries", about)
    print(save_svg(by_block, folder / "first_frame_by_block.svg"))


def eagle(length: int) -> Profiles:
    """Open the published atlas of one prompt, of 21 or 72 latent frames."""
    return open_profiles(load_cache(published.FOLDER / f"self_forcing_dmd_eagle_{length}f.pt"))


if __name__ == "__main__":
    main(run)

"""Arrays -> SVG, PDF, HTML: every drawing function by one name, such as `figures.head_curves(...)`."""

from experiments.figures.atlas import agreement_matrix, head_maps, label_maps, rope_bands
from experiments.figures.heads import (
    all_heads,
    head_curves,
    layer_comparison,
    layer_statistics,
    per_head_grid,
)
from experiments.figures.layer import frame_maps, head_grid, one_head, sink_grid
from experiments.figures.profile_maps import prompt_words, strips
from experiments.figures.style import LABELS, NAMES, save_svg

__all__ = [
    "LABELS",
    "NAMES",
    "agreement_matrix",
    "all_heads",
    "frame_maps",
    "head_curves",
    "head_grid",
    "head_maps",
    "label_maps",
    "layer_comparison",
    "layer_statistics",
    "one_head",
    "per_head_grid",
    "prompt_words",
    "rope_bands",
    "save_svg",
    "sink_grid",
    "strips",
]

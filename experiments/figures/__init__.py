"""Arrays -> SVG, PDF, HTML: every drawing function by one name, such as `figures.head_curves(...)`."""

from experiments.figures.atlas import agreement_matrix, head_maps, label_agreement, label_maps
from experiments.figures.effects import effect_against, effects_by_frame, knockout_curves, video_strips
from experiments.figures.first_frame import (
    contrasts_by_frame,
    distances_and_contrasts,
    effect_by_pass,
    placebo_strips,
    score_against_effect,
)
from experiments.figures.folder import FigureFolder, about
from experiments.figures.heads import head_curves, head_grid, one_head, sweep_curves
from experiments.figures.layer import (
    all_heads,
    frame_maps,
    key_maps,
    layer_comparison,
    layer_statistics,
    layers_together,
    survival_map,
)
from experiments.figures.long_rollouts import (
    against_motion,
    cost_and_quality,
    drift_over_time,
    effect_by_length,
    long_strips,
    policy_dots,
    rope_against_distance,
    sink_maps,
)
from experiments.figures.profile_maps import profile_heat_maps, prompt_words, rope_bands
from experiments.figures.style import LABELS, NAMES, save_svg
from experiments.figures.video_maps import (
    map_strip,
    pictures_for,
    required_pictures,
    save_map_movie,
    video_frames,
    video_map,
    video_of,
    word_strip,
)

__all__ = [
    "LABELS",
    "NAMES",
    "FigureFolder",
    "about",
    "against_motion",
    "agreement_matrix",
    "all_heads",
    "contrasts_by_frame",
    "cost_and_quality",
    "distances_and_contrasts",
    "drift_over_time",
    "effect_against",
    "effect_by_length",
    "effect_by_pass",
    "effects_by_frame",
    "frame_maps",
    "head_curves",
    "head_grid",
    "head_maps",
    "key_maps",
    "knockout_curves",
    "label_agreement",
    "label_maps",
    "layer_comparison",
    "layer_statistics",
    "layers_together",
    "long_strips",
    "map_strip",
    "one_head",
    "pictures_for",
    "placebo_strips",
    "policy_dots",
    "profile_heat_maps",
    "prompt_words",
    "required_pictures",
    "rope_against_distance",
    "rope_bands",
    "save_map_movie",
    "save_svg",
    "score_against_effect",
    "sink_maps",
    "survival_map",
    "sweep_curves",
    "video_frames",
    "video_map",
    "video_of",
    "video_strips",
    "word_strip",
]

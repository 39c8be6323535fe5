"""Arrays -> SVG, PDF, HTML: every drawing function by one name, such as `figures.head_curves(...)`."""

# ruff: noqa: F401
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
from experiments.figures.heads import head_curves, head_grid, head_titles, one_head, sweep_curves
from experiments.figures.layer import (
    all_heads,
    frame_maps,
    key_maps,
    last_block_attention,
    layer_comparison,
    layer_statistics,
    layers_together,
    profile_heat_maps,
    prompt_words,
    rope_bands,
    slot_map,
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
from experiments.figures.rope_waves import curves_in_parts, first_by_block
from experiments.figures.style import LABELS, NAMES, save_svg
from experiments.figures.video_maps import (
    map_strip,
    pictures,
    pictures_for,
    save_map_movie,
    video_frames,
    video_map,
    video_of,
    word_strip,
)

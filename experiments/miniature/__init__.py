"""The miniature: a small Wan that is trained on moving shapes, their captions, and a tracker of its videos.

    from experiments.miniature import held_out_scenes, judge, render_videos

    for scene in held_out_scenes(["wall"], 16):         # captions that no training has seen
        video = session.generate(scene.caption).video   # uint8 [F, H, W, 3]
        print(judge(video.permute(0, 3, 1, 2) / 255, scene))

docs/miniature.md lists the names. Training and evaluation are in training.py and evaluation.py.
"""

from pathlib import Path

from experiments.miniature.moving_shapes import (
    BACKGROUNDS,
    COLORS,
    CORNERS,
    DIRECTIONS,
    FPS,
    KINDS,
    SETS,
    SHAPES,
    Landmark,
    Mover,
    Scene,
    held_out_scenes,
    hidden_share,
    positions,
    render_videos,
    sample_scenes,
    scene_of,
)
from experiments.miniature.tracking import (
    Seconds,
    Track,
    background,
    in_sight,
    judge,
    judge_by_caption,
    judge_seconds,
    nearest,
    track,
    track_colors,
)

__all__ = [
    "BACKGROUNDS",
    "COLORS",
    "CORNERS",
    "DIRECTIONS",
    "FPS",
    "KINDS",
    "SETS",
    "SHAPES",
    "SHIPPED",
    "Landmark",
    "Mover",
    "Scene",
    "Seconds",
    "Track",
    "background",
    "held_out_scenes",
    "hidden_share",
    "in_sight",
    "judge",
    "judge_by_caption",
    "judge_seconds",
    "nearest",
    "positions",
    "render_videos",
    "sample_scenes",
    "scene_of",
    "track",
    "track_colors",
]

SHIPPED = Path(__file__).parents[2] / "checkpoints/wan-mini"

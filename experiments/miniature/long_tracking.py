"""What a long video of moving shapes shows in each of its seconds: shapes bounce for ever and hide more
than once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.miniature.moving_shapes import BACKGROUNDS, FPS, Scene
from experiments.miniature.tracking import Track, background, in_sight, nearest, track, track_colors

WHOLE = 0.85  # of its area in the first second; what is smaller is cut off, by a wall or another shape


@dataclass(frozen=True)
class Seconds:
    """Answers [T] for each second of a video, of all movers of its scene."""

    visible: Tensor  # bool: every mover is wholly in sight in some frame
    color: (
        Tensor  # bool: visible, each in the colour of the caption; one that is not said, of the first second
    )
    shape: Tensor  # bool: visible, each with the outline of the caption
    background: Tensor  # bool

    @property
    def right(self) -> Tensor:
        """Seconds [T] with colour and shape as they should be."""
        return self.color & self.shape

    def shares(self, first: int = 0) -> dict[str, float]:
        """Means over the seconds from `first` on; colour and shape of the visible ones (0 where there are
        none)."""
        seen = self.visible[first:]
        count = max(1, int(seen.sum()))
        return {
            "visible": seen.float().mean().item(),
            "background": self.background[first:].float().mean().item(),
            "color": int(self.color[first:].sum()) / count,
            "shape": int(self.shape[first:].sum()) / count,
            "right": int(self.right[first:].sum()) / count,
        }


def judge_seconds(video: Tensor, scene: Scene) -> Seconds:
    """Answers for a video [frames, 3, H, W] in 0..1; frames after its last whole second are left out."""
    seconds = video[: len(video) // FPS * FPS].split(FPS)
    tracks = [_tracks(second, scene) for second in seconds]
    sight, firsts = in_sight(scene, video.shape[-1]), tracks[0]
    sizes = [_area(first) for first in firsts]
    named = [
        first.color_name() if scene.unnamed_color else mover.color
        for first, mover in zip(firsts, scene.movers, strict=True)
    ]
    answers = []
    for second, shown in zip(seconds, tracks, strict=True):
        whole = [_whole_frames(t, size) for t, size in zip(shown, sizes, strict=True)]
        visible = all(bool(frames.any()) for frames in whole)
        movers = list(zip(shown, whole, scene.movers, named, strict=True))
        answers.append(
            (
                visible,
                visible and all(t.color_name(frames) == name for t, frames, _, name in movers),
                visible and all(t.shape_name(frames) == mover.shape for t, frames, mover, _ in movers),
                nearest(background(second, sight), BACKGROUNDS) == scene.background,
            )
        )
    return Seconds(*torch.tensor(answers, dtype=torch.bool).T)


def _tracks(second: Tensor, scene: Scene) -> list[Track]:
    """Of every mover; two are told apart by their colours."""
    if len(scene.movers) > 1:
        return track_colors(second, [mover.color for mover in scene.movers])
    return [track(second, in_sight(scene, second.shape[-1]))]


def _area(shape: Track) -> Tensor:
    """Share of the picture, median of the frames that show it; 0 where none does."""
    return shape.area[shape.seen].median() if shape.seen.any() else torch.tensor(0.0)


def _whole_frames(shape: Track, size: Tensor) -> Tensor:
    """Frames [F] that show a mover uncut: about as large as at first."""
    return shape.seen & (shape.area > WHOLE * size)

"""The tracker that judges videos of the miniature: background, colour, outline and direction.

Nothing is taken from a caption but where a wall and a landmark would be, which are left out of sight; with
two movers, also their colours, to tell them apart. Videos are [F, 3, H, W] in 0..1, places in frame sides.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import experiments.miniature.moving_shapes as moving_shapes
from wan.errors import ConfigError

DIFFERS = 0.25  # RGB distance from the background at which a pixel belongs to something
SMALLEST = 0.008  # share of the picture; less is nothing, or the rest of something hidden
SLOWEST = 0.03  # sides per second; slower does not move
WHOLE = 0.85  # of its area in the first second; what is smaller is cut off, by a wall or another shape


@dataclass(frozen=True)
class Track:
    """One shape through a video: where and how large it is, its colour and coverage in each frame."""

    centre: Tensor  # [F, 2] (x, y)
    area: Tensor  # [F], share of the picture
    color: Tensor  # [F, 3], NaN where nothing is seen
    alpha: Tensor  # [F, H, W], share of each pixel

    @property
    def seen(self) -> Tensor:
        """Return the frames [F] that show it."""
        return self.area > SMALLEST

    def color_name(self, frames: slice | Tensor = slice(None)) -> str | None:
        """Return the nearest colour over these frames; None where they do not show it."""
        colors = self.color[frames][self.seen[frames]]
        if not len(colors):
            return None
        return nearest(colors.median(0).values, moving_shapes.COLORS)

    def shape_name(self, frames: slice | Tensor = slice(None)) -> str | None:
        """Return the outline that fits best over these frames, at the shape's place and area: soft IoU.

        None where they do not show it.
        """
        shown = self.seen[frames]
        if not shown.any():
            return None
        alpha, centre, area = (x[frames][shown] for x in (self.alpha, self.centre, self.area))
        likeness = []
        for number in range(len(moving_shapes.SHAPES)):
            unit_area, drop = outline_size(number)
            # A template [F, H, W] of the same area and centre of mass
            radius = (area / unit_area).sqrt()
            place = centre - torch.stack([torch.zeros_like(radius), drop * radius], 1)
            template = moving_shapes.coverage(place, radius, number, alpha.shape[-1])
            union = torch.maximum(alpha, template).sum((1, 2)).clamp(min=1e-6)
            likeness.append((torch.minimum(alpha, template).sum((1, 2)) / union).mean())
        return moving_shapes.SHAPES[int(torch.stack(likeness).argmax())]

    @property
    def direction(self) -> str | None:
        """Return the nearest direction of its path before anything bounces; None where it does not move."""
        seconds = torch.arange(len(self.area)) / moving_shapes.FPS
        early = self.seen & (seconds <= moving_shapes.STRAIGHT)
        if early.sum() < 4:
            return None
        # The slope of a straight line through its places, by least squares
        t = seconds[early] - seconds[early].mean()
        velocity = (t[:, None] * self.centre[early]).sum(0) / t.square().sum()
        if velocity.norm() < SLOWEST:
            return None
        ways = F.normalize(torch.tensor([*moving_shapes.DIRECTIONS.values()], dtype=torch.float32))
        return [*moving_shapes.DIRECTIONS][int((ways @ velocity).argmax())]


def nearest(rgb: Tensor, names: Mapping[str, tuple[float, ...]]) -> str:
    return min(names, key=lambda name: math.dist(rgb.tolist(), names[name]))


def in_sight(scene: moving_shapes.Scene, size: int) -> Tensor:
    """Return the pixels [H, W] that neither a wall nor a landmark of this scene covers."""
    axis = (torch.arange(size) + 0.5) / size
    x, y = axis.expand(size, size), axis[:, None].expand(size, size)
    sight = torch.ones(size, size, dtype=torch.bool)
    if scene.wall:
        dx, dy = moving_shapes.DIRECTIONS[scene.movers[0].direction]
        sight &= (x - 0.5) * dx + (y - 0.5) * dy < 0.5 - moving_shapes.WALL - 1 / size
    if scene.landmark:
        cx, cy = moving_shapes.CORNERS[scene.landmark.corner]
        sight &= torch.hypot(x - cx, y - cy) > moving_shapes.LANDMARK_RADIUS + 2 / size
    return sight


def background(video: Tensor, sight: Tensor) -> Tensor:
    """Return the median colour [3] of the pixels in sight."""
    return video.transpose(0, 1)[:, :, sight].flatten(1).median(1).values


def track(video: Tensor, sight: Tensor, ground: Tensor | None = None) -> Track:
    """Track the one shape that differs from the background, or from another colour `ground` [3]."""
    if ground is None:
        ground = background(video, sight)
    # 1. The core of the shape: what differs from the background, without edges and specks
    difference = video - ground[:, None, None]
    red, green, blue = difference.unbind(1)  # a norm over a dimension that is not the last is slow
    core = shrunk(((red * red + green * green + blue * blue).sqrt() > DIFFERS) & sight)  # [F, H, W]
    # 2. Its colour in each frame [F, 3]
    color = video.new_full((len(video), 3), torch.nan)
    for number, mask in enumerate(core):
        if mask.any():
            color[number] = video[number][:, mask].median(1).values
    # 3. How far each pixel is on the way from the background's colour to the shape's [F, H, W]
    axis = color.nanmedian(0).values - ground
    alpha = ((difference * axis[:, None, None]).sum(1) / axis.square().sum()).clamp(0, 1)
    return _measure((alpha * grown(core) * sight).nan_to_num(), color)


def track_colors(video: Tensor, names: list[str]) -> list[Track]:
    """Track a shape of each colour: a pixel belongs to the nearest of them and the background."""
    everywhere = torch.ones(video.shape[2:], dtype=torch.bool)
    palette = torch.stack(
        [background(video, everywhere), *(torch.tensor(moving_shapes.COLORS[name]) for name in names)]
    )
    owner = (video[:, None] - palette[:, :, None, None]).norm(dim=2).argmin(1)  # [F, H, W]
    owned = (owner == i for i in range(1, len(palette)))
    return [
        _measure((mask & grown(shrunk(mask))).float(), palette[i].expand(len(video), 3))
        for i, mask in enumerate(owned, 1)
    ]


def shrunk(mask: Tensor) -> Tensor:
    """Return the pixels whose eight neighbours belong too: no edges, no specks."""
    return ~grown(~mask, 1)


def grown(mask: Tensor, pixels: int = 2) -> Tensor:
    return F.max_pool2d(mask.float(), 2 * pixels + 1, 1, pixels) > 0


def _measure(alpha: Tensor, color: Tensor) -> Track:
    """Measure place and area of coverage alpha [F, H, W]."""
    axis = (torch.arange(alpha.shape[-1]) + 0.5) / alpha.shape[-1]
    weight = alpha.sum((1, 2)).clamp(min=1e-6)
    centre = (
        torch.stack([(alpha * axis).sum((1, 2)), (alpha * axis[:, None]).sum((1, 2))], 1) / weight[:, None]
    )
    return Track(centre, alpha.mean((1, 2)), color, alpha)


@cache
def outline_size(number: int) -> tuple[float, float]:
    """Return the area of a shape of radius 1, and how far its centre of mass is below its centre."""
    radius = 0.4
    alpha = moving_shapes.coverage(torch.tensor([0.5, 0.5]), torch.tensor(radius), number, 512)
    rows = (torch.arange(512) + 0.5) / 512 - 0.5
    return alpha.mean().item() / radius**2, ((alpha * rows[:, None]).sum() / alpha.sum()).item() / radius


def judge(video: Tensor, scene: moving_shapes.Scene) -> dict[str, bool]:
    """Judge whether a video [F, 3, H, W] in 0..1 shows what the caption of a scene says, by question.

    Raises ConfigError for a video of another form.
    """
    _require_video(video)
    if scene.kind == "crossing":
        return _judge_crossing(video, scene)
    # 1. The background, and the one shape in front of it
    sight = in_sight(scene, video.shape[-1])
    ground = background(video, sight)
    mover, shape = scene.movers[0], track(video, sight, ground)
    # 2. Colour, outline and direction; behind a wall of the first second, for later the wall cuts its outline
    before = slice(None)
    if scene.wall:
        before = slice(moving_shapes.FPS)
    result = {
        "background": nearest(ground, moving_shapes.BACKGROUNDS) == scene.background,
        "shape": shape.shape_name(before) == mover.shape,
        "direction": shape.direction == mover.direction,
    }
    if not scene.unnamed_color:
        result["color"] = shape.color_name(before) == mover.color
    # 3. What else the caption names
    mark = scene.landmark
    if mark is not None:
        x, y = moving_shapes.CORNERS[mark.corner]
        spot = video[:, :, int(y * video.shape[-1]), int(x * video.shape[-1])]  # [F, 3]
        result["landmark"] = (
            nearest(spot.median(0).values, moving_shapes.COLORS | moving_shapes.BACKGROUNDS) == mark.color
        )
    if scene.wall:
        result |= _judge_return(shape)
    return result


def _require_video(video: Tensor) -> None:
    if not video.is_floating_point() or video.ndim != 4 or video.shape[1] != 3:
        raise ConfigError(
            f"the tracker takes a video of floats [F, 3, H, W] in 0..1, not {video.dtype} {[*video.shape]}; "
            "of a run give run.video.permute(0, 3, 1, 2) / 255"
        )


def _judge_return(shape: Track) -> dict[str, bool]:
    """Compare the first second with the last half: does a shape that hid come back as what it was?"""
    first, last = slice(0, moving_shapes.FPS), slice(-moving_shapes.FPS // 2, None)
    start = shape.area[first].median()
    back = bool((shape.area[last] > 0.5 * start).float().mean() > 0.5)
    hid = bool((shape.area < 0.15 * start).any())
    same_color = back and shape.color_name(first) == shape.color_name(last)
    same_shape = back and shape.shape_name(first) == shape.shape_name(last)
    same = {"same_color": same_color, "same_shape": same_shape, "same": hid and same_color and same_shape}
    return {"hides": hid, "comes_back": hid and back} | same


def _judge_crossing(video: Tensor, scene: moving_shapes.Scene) -> dict[str, bool]:
    everywhere = torch.ones(video.shape[2:], dtype=torch.bool)
    tracks = track_colors(video, [m.color for m in scene.movers])
    gap = (tracks[0].centre - tracks[1].centre).norm(dim=-1)
    apart = gap > 0.8 * (tracks[0].area.sqrt() + tracks[1].area.sqrt())
    both = list(zip(tracks, scene.movers, strict=True))
    return {
        "background": nearest(background(video, everywhere), moving_shapes.BACKGROUNDS) == scene.background,
        "color": all(shape.seen.float().mean() > 0.6 for shape in tracks),
        "shape": all(shape.shape_name(apart) == mover.shape for shape, mover in both),
        "direction": all(shape.direction == mover.direction for shape, mover in both),
        "crossing": bool(gap.min() < 0.5 * gap.max()),
    }


class Seconds(NamedTuple):
    """Answers [T] for each second of a video, of all movers of its scene."""

    visible: Tensor  # bool: every mover is wholly in sight in some frame
    color: Tensor  # bool: visible, each in the caption's colour; one that is not said, of the first second
    shape: Tensor  # bool: visible, each with the outline of the caption
    background: Tensor  # bool

    @property
    def right(self) -> Tensor:
        """Seconds [T] with colour and shape as they should be."""
        return self.color & self.shape


def judge_seconds(video: Tensor, scene: moving_shapes.Scene) -> Seconds:
    """Judge each second of a video [F, 3, H, W] in 0..1; a last second that is not whole is left out.

    Raises ConfigError for a video of another form.
    """
    _require_video(video)
    sight, movers = in_sight(scene, video.shape[-1]), scene.movers
    areas, colors, answers = list[Tensor](), list[str | None](), []
    for second in video[: len(video) // moving_shapes.FPS * moving_shapes.FPS].split(
        moving_shapes.FPS
    ):  # [FPS, 3, H, W]
        # 1. Where the movers are
        if len(movers) > 1:
            tracks = track_colors(second, [mover.color for mover in movers])
        else:
            tracks = [track(second, sight)]
        # 2. Of the first second: the whole areas, and the colour that the caption does not say
        if not areas:
            areas = [t.area[t.seen].median().nan_to_num(0) for t in tracks]  # 0 where nothing is seen
            colors = [mover.color for mover in movers]
            if scene.unnamed_color:
                colors = [t.color_name() for t in tracks]
        # 3. Answers from the frames that show a mover whole; one that is hidden is neither right nor wrong
        whole = [t.seen & (t.area > WHOLE * area) for t, area in zip(tracks, areas, strict=True)]
        visible = all(bool(frames.any()) for frames in whole)
        shown = list(zip(tracks, whole, movers, colors, strict=True))
        answers.append(
            (
                visible,
                visible and all(t.color_name(frames) == color for t, frames, _, color in shown),
                visible and all(t.shape_name(frames) == mover.shape for t, frames, mover, _ in shown),
                nearest(background(second, sight), moving_shapes.BACKGROUNDS) == scene.background,
            )
        )
    return Seconds(*torch.tensor(answers, dtype=torch.bool).T)


def judge_by_caption(video: Tensor, caption: str) -> dict[str, bool]:
    """Judge a video [F, 3, 64, 64] in 0..1 by its caption, by question.

    Empty for a text that is no caption of the miniature, and for a video of another size.
    """
    scene = moving_shapes.scene_of(caption)
    if scene is None or video.shape[-2:] != (moving_shapes.SIDE, moving_shapes.SIDE):
        return {}
    return {question: bool(answer) for question, answer in judge(video, scene).items()}

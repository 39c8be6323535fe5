"""Synthetic captioned videos: shapes that move at constant speed over a background and bounce off the borders.

Lengths are in frame sides (0 is left or top, 1 is right or bottom), speeds in sides per second.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

import torch

FPS = 16
COLORS = {
    "red": (0.90, 0.12, 0.12), "green": (0.10, 0.75, 0.20), "blue": (0.15, 0.30, 0.95), "yellow": (0.95, 0.88, 0.15),
    "orange": (0.98, 0.55, 0.10), "purple": (0.60, 0.15, 0.80), "cyan": (0.10, 0.85, 0.90), "white": (0.97, 0.97, 0.97),
}  # fmt: skip
BACKGROUNDS = {
    "dark blue": (0.04, 0.06, 0.30), "dark green": (0.03, 0.25, 0.07), "dark red": (0.30, 0.03, 0.05),
    "dark gray": (0.18, 0.18, 0.18), "light blue": (0.62, 0.78, 0.98), "light green": (0.68, 0.93, 0.68),
    "light yellow": (0.98, 0.95, 0.70), "light gray": (0.78, 0.78, 0.78),
}  # fmt: skip
DIRECTIONS = {  # unit steps (x right, y down)
    "right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1),
    "up and right": (1, -1), "up and left": (-1, -1), "down and right": (1, 1), "down and left": (-1, 1),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "diamond", "cross")
MIN_CONTRAST = 0.60  # RGB distance below which a shape would be lost in its background
RADII, SPEEDS = (0.16, 0.22), (0.10, 0.25)


@dataclass(frozen=True)
class Mover:
    """One moving shape: where it starts, how large it is and how fast it goes."""

    shape: str
    color: str
    direction: str
    x: float
    y: float
    radius: float
    speed: float

    @property
    def velocity(self) -> tuple[float, float]:
        """Sides per second along x and y; diagonal movers are as fast as straight ones."""
        dx, dy = DIRECTIONS[self.direction]
        scale = self.speed / math.hypot(dx, dy)
        return dx * scale, dy * scale


@dataclass(frozen=True)
class Scene:
    """Movers, the later ones in front, over a background of one colour."""

    movers: tuple[Mover, ...]
    background: str

    @property
    def caption(self) -> str:
        phrases = (f"{m.color} {m.shape} moving {m.direction}" for m in self.movers)
        movers = " and ".join(("an " if p[0] in "aeiou" else "a ") + p for p in phrases)
        return f"{movers} over a {self.background} background"


def combinations(held_out: bool) -> list[tuple[str, str, str, str]]:
    """(shape, color, direction, background) of one side of the fixed split: a tenth of all captions is held out."""
    grid = itertools.product(SHAPES, COLORS, DIRECTIONS, BACKGROUNDS)
    visible = (c for c in grid if math.dist(COLORS[c[1]], BACKGROUNDS[c[3]]) >= MIN_CONTRAST)
    return [c for c in visible if (crc32(" ".join(c).encode()) % 10 == 0) == held_out]


def sample_scenes(seed: int, held_out: bool = False) -> Iterator[Scene]:
    """Endless random scenes; the same seed gives the same ones."""
    rng, grid = random.Random(seed), combinations(held_out)
    while True:
        shape, color, direction, background = rng.choice(grid)
        radius, speed = rng.uniform(*RADII), rng.uniform(*SPEEDS)
        x, y = (rng.uniform(radius, 1 - radius) for _ in range(2))
        yield Scene((Mover(shape, color, direction, x, y, radius, speed),), background)


def positions(scene: Scene, frames: int) -> torch.Tensor:
    """Centres of the movers [F, N, 2] (x, y), reflected where the shape would leave the frame."""
    start = torch.tensor([(m.x, m.y) for m in scene.movers])
    velocity = torch.tensor([m.velocity for m in scene.movers])
    margin = torch.tensor([m.radius for m in scene.movers])[:, None]
    return _reflect(start, velocity, margin, torch.arange(frames) / FPS)


def render(scene: Scene, frames: int, size: int) -> torch.Tensor:
    """One scene as video [F, 3, H, W] in [-1, 1]."""
    return render_batch([scene], frames, size)[0].transpose(0, 1)


def render_batch(scenes: list[Scene], frames: int, size: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Scenes with equally many movers as video [B, 3, F, H, W] in [-1, 1], anti-aliased over one pixel."""
    table = torch.tensor([[_numbers(m) for m in s.movers] for s in scenes], device=device)  # [B, N, 9]
    start, velocity, margin, color, kind = table.split((2, 2, 1, 3, 1), -1)
    centre = _reflect(start, velocity, margin, torch.arange(frames, device=device) / FPS)  # [B, F, N, 2]
    video = torch.tensor([BACKGROUNDS[s.background] for s in scenes], device=device)[:, :, None, None, None]
    video = video.expand(-1, -1, frames, size, size)  # [B, 3, F, H, W]
    axis = (torch.arange(size, device=device) + 0.5) / size
    for n in range(table.shape[1]):
        x = axis - centre[:, :, n, 0, None, None]  # [B, F, 1, W]
        y = axis[:, None] - centre[:, :, n, 1, None, None]  # [B, F, H, 1]
        distance = _signed_distance(x, y, margin[:, n, :, None, None], kind[:, n, :, None, None])
        alpha = (0.5 - distance * size).clamp(0, 1)[:, None]  # [B, 1, F, H, W]
        video = video + alpha * (color[:, n, :, None, None, None] - video)
    return 2 * video - 1


def _numbers(mover: Mover) -> tuple[float, ...]:
    return (mover.x, mover.y, *mover.velocity, mover.radius, *COLORS[mover.color], SHAPES.index(mover.shape))


def _reflect(start: torch.Tensor, velocity: torch.Tensor, margin: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
    """Straight paths [..., N, 2] folded into [margin, 1 - margin]; [..., F, N, 2]."""
    start, velocity, margin = (a.unsqueeze(-3) for a in (start, velocity, margin))
    room = 1 - 2 * margin
    path = start - margin + velocity * seconds[:, None, None]
    return margin + room - (path % (2 * room) - room).abs()


def _signed_distance(x: torch.Tensor, y: torch.Tensor, radius: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
    """Distance to the outline of the shape numbered `kind`, negative inside; [B, F, H, W]."""
    ax, ay = x.abs(), y.abs()
    long, short = torch.maximum(ax, ay), torch.minimum(ax, ay)
    outlines = (
        torch.hypot(x, y) - 0.95 * radius,
        long - 0.82 * radius,
        torch.maximum(0.87 * ax - 0.5 * y, y) - 0.55 * radius,
        (ax + ay - 1.1 * radius) / math.sqrt(2),
        torch.maximum(long - radius, short - 0.36 * radius),
    )
    distance = outlines[0].expand_as(outlines[1])
    for k, outline in enumerate(outlines[1:], 1):
        distance = torch.where(kind == k, outline, distance)
    return distance

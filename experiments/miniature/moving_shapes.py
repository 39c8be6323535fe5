"""Synthetic captioned videos of shapes that move at constant speed and bounce off the borders.

Four kinds of scenes: one shape; one shape past a small landmark that stays where it is; two shapes whose
paths cross; a shape that goes behind a wall and comes back. Lengths are in frame sides (0 is left or top,
1 is right or bottom), speeds in sides per second.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from experiments.caches.frames import one_thread
from experiments.caches.titles import with_article

FPS = 16
SIDE, FRAMES = 64, 81  # pixels and video frames of a clip
HELD_OUT_SEED = 1_000_003  # no training's; the split of combinations keeps scenes apart anyway
COLORS = {
    "red": (0.90, 0.12, 0.12),
    "green": (0.10, 0.75, 0.20),
    "blue": (0.15, 0.30, 0.95),
    "yellow": (0.95, 0.88, 0.15),
    "orange": (0.98, 0.55, 0.10),
    "purple": (0.60, 0.15, 0.80),
    "cyan": (0.10, 0.85, 0.90),
    "white": (0.97, 0.97, 0.97),
}
BACKGROUNDS = {
    "dark blue": (0.04, 0.06, 0.30),
    "dark green": (0.03, 0.25, 0.07),
    "dark red": (0.30, 0.03, 0.05),
    "dark gray": (0.18, 0.18, 0.18),
    "light blue": (0.62, 0.78, 0.98),
    "light green": (0.68, 0.93, 0.68),
    "light yellow": (0.98, 0.95, 0.70),
    "light gray": (0.78, 0.78, 0.78),
}
DIRECTIONS = {  # unit steps (x right, y down)
    "right": (1, 0),
    "left": (-1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "up and right": (1, -1),
    "up and left": (-1, -1),
    "down and right": (1, 1),
    "down and left": (-1, 1),
}
SHAPES = ("circle", "square", "triangle", "diamond", "cross")
CORNERS = {
    "top left": (0.13, 0.13),
    "top right": (0.87, 0.13),
    "bottom left": (0.13, 0.87),
    "bottom right": (0.87, 0.87),
}
KINDS = ("single", "landmark", "crossing", "wall")
SETS = {"one shape": ("single", "landmark"), "two that cross": ("crossing",), "behind a wall": ("wall",)}
MIN_CONTRAST = 0.60  # RGB distance below which a shape would be lost in its background
RADII, SPEEDS = (0.16, 0.22), (0.10, 0.25)  # of a shape that moves alone
SMALL_RADII = (0.11, 0.15)  # of shapes that cross or hide
WALL_SPEEDS = (0.22, 0.30)
LANDMARK_RADIUS = 0.07
WALL = 0.42  # its thickness; it stands at the border that the shape moves to
STRAIGHT = 1.25  # seconds at the start in which no shape bounces: its direction is the caption's
CROSS_BETWEEN = (1.0, 3.0)  # seconds; two paths meet in this time
BACK_BY = 4.2  # seconds; what went behind a wall is wholly visible again


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
class Landmark:
    """A small shape in a corner that does not move."""

    shape: str
    color: str
    corner: str


@dataclass(frozen=True)
class Scene:
    """Movers, the later ones in front, over a background of one colour.

    A landmark is behind the movers. A wall (its colour) is in front of them and covers the side that the
    first mover goes to. With `unnamed_color` the caption does not say the first mover's colour: only the
    past of the video does.
    """

    movers: tuple[Mover, ...]
    background: str
    landmark: Landmark | None = None
    wall: str | None = None
    unnamed_color: bool = False

    @property
    def kind(self) -> str:
        if self.wall:
            return "wall"
        if self.landmark:
            return "landmark"
        if len(self.movers) > 1:
            return "crossing"
        return "single"

    @property
    def caption(self) -> str:
        movers = []
        for mover in self.movers:
            name = mover.shape
            if not self.unnamed_color:
                name = f"{mover.color} {mover.shape}"
            movers.append(f"{with_article(name)} moving {mover.direction}")
        text = " and ".join(movers)
        if self.wall:
            text += f" behind {with_article(self.wall)} wall"
        text += f" over a {self.background} background"
        if self.landmark:
            text += f" with a small {self.landmark.color} {self.landmark.shape} at the {self.landmark.corner}"
        return text


def combinations(held_out: bool) -> list[tuple[str, str, str, str]]:
    """Return (shape, color, direction, background) of one side of the fixed split; a tenth is held out."""
    grid = itertools.product(SHAPES, COLORS, DIRECTIONS, BACKGROUNDS)
    visible = (c for c in grid if math.dist(COLORS[c[1]], BACKGROUNDS[c[3]]) >= MIN_CONTRAST)
    return [c for c in visible if (crc32(" ".join(c).encode()) % 10 == 0) == held_out]


def sample_scenes(seed: int, held_out: bool = False, kinds: Iterable[str] = KINDS) -> Iterator[Scene]:
    """Yield random scenes of these kinds for ever, of one side of the split; a seed gives the same ones."""
    rng, grid, kinds = random.Random(seed), combinations(held_out), tuple(kinds)
    samplers = {"single": _single, "landmark": _with_landmark, "crossing": _crossing, "wall": _behind_wall}
    while True:
        sampler, scene = samplers[rng.choice(kinds)], None
        while scene is None:
            scene = sampler(rng, grid)
        yield scene


def held_out_scenes(kinds: Iterable[str], count: int) -> list[Scene]:
    """Return the first held-out scenes of these kinds, the same for every model."""
    return list(itertools.islice(sample_scenes(HELD_OUT_SEED + 1, True, kinds), count))


def _mover(rng: random.Random, combination: tuple[str, ...], radii=RADII, speeds=SPEEDS) -> Mover:
    """Place a mover where it will not bounce for a while."""
    shape, color, direction, _ = combination
    mover = Mover(shape, color, direction, 0, 0, rng.uniform(*radii), rng.uniform(*speeds))
    x, y = (
        rng.uniform(mover.radius + max(0, -v * STRAIGHT), 1 - mover.radius - max(0, v * STRAIGHT))
        for v in mover.velocity
    )
    return replace(mover, x=x, y=y)


def _other_color(rng: random.Random, *seen: tuple[float, ...]) -> str:
    """Choose a colour that stands out against these."""
    far = [c for c, rgb in COLORS.items() if all(math.dist(rgb, other) >= MIN_CONTRAST for other in seen)]
    return rng.choice(far)


def _single(rng: random.Random, grid: list) -> Scene:
    combination = rng.choice(grid)
    return Scene((_mover(rng, combination),), combination[-1])


def _with_landmark(rng: random.Random, grid: list) -> Scene:
    scene = _single(rng, grid)
    color = _other_color(rng, BACKGROUNDS[scene.background], COLORS[scene.movers[0].color])
    return replace(scene, landmark=Landmark(rng.choice(SHAPES), color, rng.choice(list(CORNERS))))


def _crossing(rng: random.Random, grid: list) -> Scene | None:
    """Sample two movers, or None where they do not meet in time."""
    first = rng.choice(grid)
    others = [c for c in rng.sample(grid, 200) if c[3] == first[3] and c[2] != first[2]]
    second = rng.choice(others or [first])
    if math.dist(COLORS[first[1]], COLORS[second[1]]) < MIN_CONTRAST:
        return None
    # Paths are drawn blindly, and kept where they meet.
    scene = Scene(tuple(_mover(rng, c, SMALL_RADII) for c in (first, second)), first[-1])
    gap = positions(scene, round(CROSS_BETWEEN[1] * FPS)).diff(dim=1).norm(dim=-1)[:, 0]
    closest = int(gap.argmin())
    if gap[closest] >= 0.08 or closest < CROSS_BETWEEN[0] * FPS:
        return None
    return scene


def _behind_wall(rng: random.Random, grid: list) -> Scene | None:
    """Sample a mover, or None where it would start behind the wall or come back late."""
    combination = rng.choice([c for c in grid if 0 in DIRECTIONS[c[2]]])
    mover = _mover(rng, combination, SMALL_RADII, WALL_SPEEDS)
    color = _other_color(rng, BACKGROUNDS[combination[-1]], COLORS[mover.color])
    scene = Scene((mover,), combination[-1], wall=color, unnamed_color=rng.random() < 0.5)
    # It starts in sight, is wholly hidden once, and wholly visible from BACK_BY on.
    hidden = hidden_share(scene, FRAMES)
    back = hidden[round(BACK_BY * FPS) :]
    if hidden[0] > 0 or hidden.max() < 1 or back.max() > 0:
        return None
    return scene


# --- From a caption to its scene
def _one_of(name: str, words: Iterable[str]) -> str:
    return f"(?P<{name}>{'|'.join(words)})"


SHAPE_WORDS = _one_of("shape", SHAPES)
COLOR_WORDS = _one_of("color", COLORS)
MOVER_WORDS = rf"an? (?:{COLOR_WORDS} )?{SHAPE_WORDS} moving {_one_of('direction', DIRECTIONS)}"
SCENE_WORDS = (
    rf"(?: behind an? {_one_of('wall', COLORS)} wall)?"
    rf" over a {_one_of('background', BACKGROUNDS)} background"
    rf"(?: with a small {COLOR_WORDS} {SHAPE_WORDS} at the {_one_of('corner', CORNERS)})?"
)


def scene_of(caption: str) -> Scene | None:
    """Return the scene of a caption, without places and sizes; None for another text."""
    matches = list(re.finditer(rf"{MOVER_WORDS}(?= and an? | behind | over )", caption))
    if not 1 <= len(matches) <= 2:
        return None
    rest = re.fullmatch(SCENE_WORDS, caption[matches[-1].end() :])
    if rest is None:
        return None
    movers = tuple(
        Mover(mover["shape"], mover["color"] or "", mover["direction"], x=0, y=0, radius=0, speed=0)
        for mover in matches
    )
    landmark = None
    if rest["corner"]:
        landmark = Landmark(rest["shape"], rest["color"], rest["corner"])
    unnamed_color = not movers[0].color
    scene = Scene(movers, rest["background"], landmark, rest["wall"], unnamed_color)
    if scene.caption != caption:  # such as "an red circle"
        return None
    return scene


# --- From a scene to its video
def positions(scene: Scene, frames: int) -> Tensor:
    """Return centres of the movers [F, N, 2] (x, y), reflected where the shape would leave the frame."""
    start = torch.tensor([(m.x, m.y) for m in scene.movers])
    velocity = torch.tensor([m.velocity for m in scene.movers])
    margin = torch.tensor([m.radius for m in scene.movers])[:, None]
    return _reflect(start, velocity, margin, torch.arange(frames) / FPS)


def hidden_share(scene: Scene, frames: int) -> Tensor:
    """Return the share of the first mover's width that is behind the wall [F]."""
    mover, toward = scene.movers[0], torch.tensor(DIRECTIONS[scene.movers[0].direction], dtype=torch.float32)
    ahead = ((positions(scene, frames)[:, 0] - 0.5) * toward).sum(-1) + 0.5  # 1: the border it goes to first
    return ((ahead + mover.radius - (1 - WALL)) / (2 * mover.radius)).clamp(0, 1)


def render(scene: Scene, frames: int, size: int) -> Tensor:
    """Render one scene as video [F, 3, H, W] in [-1, 1]."""
    return render_batch([scene], frames, size)[0].transpose(0, 1)


def render_videos(scenes: Sequence[Scene], frames: int) -> list[Tensor]:
    """Render videos [frames, 3, H, W] in 0..1."""
    with one_thread():
        return [render(scene, frames, SIDE) / 2 + 0.5 for scene in scenes]


def render_batch(scenes: list[Scene], frames: int, size: int, device: str | torch.device = "cpu") -> Tensor:
    """Render scenes as video [B, 3, F, H, W] in [-1, 1], anti-aliased over one pixel."""
    return render_table(scene_table(scenes).to(device), frames, size)


def scene_table(scenes: list[Scene]) -> Tensor:
    """Return scenes as numbers [B, 1 + layers, 9]: the background, then layers from back to front.

    Columns: x, y, speed along x and y, radius, r, g, b, number of the outline.
    """
    # A table, not objects: a training renders its clips on the GPU, inside a CUDA graph.
    tables = []
    for scene in scenes:
        rows: list[tuple[float, ...]] = [(0, 0, 0, 0, 0, *BACKGROUNDS[scene.background], 0)]
        mark = scene.landmark
        if mark is not None:
            outline = SHAPES.index(mark.shape)
            rows.append((*CORNERS[mark.corner], 0, 0, LANDMARK_RADIUS, *COLORS[mark.color], outline))
        for m in scene.movers:
            rows.append((m.x, m.y, *m.velocity, m.radius, *COLORS[m.color], SHAPES.index(m.shape)))
        if scene.wall:
            dx, dy = DIRECTIONS[scene.movers[0].direction]
            centre = (0.5 + dx * (1 - WALL) / 2, 0.5 + dy * (1 - WALL) / 2)
            rows.append((*centre, 0, 0, WALL / 2, *COLORS[scene.wall], len(SHAPES) + (dx == 0)))
        tables.append(torch.tensor(rows, dtype=torch.float32))
    # Scenes with fewer layers get invisible ones: outline 0, a circle, of a negative radius.
    nothing = torch.tensor((0.5, 0.5, 0, 0, -1, 0, 0, 0, 0))
    most = max(map(len, tables))
    padded = [torch.cat([rows, nothing.expand(most - len(rows), -1)]) for rows in tables]
    return torch.stack(padded)


def render_table(table: Tensor, frames: int, size: int) -> Tensor:
    """Render rows of `scene_table` [B, layers, 9] as video [B, 3, F, H, W] in [-1, 1]."""
    start, velocity, margin, color, kind = table.split((2, 2, 1, 3, 1), -1)
    seconds = torch.arange(frames, device=table.device) / FPS
    centre = _reflect(start, velocity, margin, seconds)  # [B, F, layers, 2]
    # The background first, then each layer over what is there
    video = color[:, 0, :, None, None, None].expand(-1, -1, frames, size, size)  # [B, 3, F, H, W]
    for n in range(1, table.shape[1]):
        alpha = coverage(centre[:, :, n], margin[:, n], kind[:, n], size)[:, None]  # [B, 1, F, H, W]
        video = video + alpha * (color[:, n, :, None, None, None] - video)
    return 2 * video - 1


def coverage(centre: Tensor, radius: Tensor, kind: Tensor | int, size: int) -> Tensor:
    """Return pixels' shares that outlines cover: centre [..., 2], radius [...] -> [..., H, W].

    kind: the number of the outline, of all or [...].
    """
    axis = (torch.arange(size, device=centre.device) + 0.5) / size
    x = axis - centre[..., 0, None, None]  # [..., 1, W]
    y = axis[:, None] - centre[..., 1, None, None]  # [..., H, 1]
    kinds = kind if isinstance(kind, int) else kind[..., None, None]
    return (0.5 - _signed_distance(x, y, radius[..., None, None], kinds) * size).clamp(0, 1)


def _reflect(start: Tensor, velocity: Tensor, margin: Tensor, seconds: Tensor) -> Tensor:
    """Fold straight paths [..., N, 2] into [margin, 1 - margin]; [..., F, N, 2]."""
    start, velocity, margin = (a.unsqueeze(-3) for a in (start, velocity, margin))
    # A triangle wave of period 2 room: there and back
    room = 1 - 2 * margin
    path = start - margin + velocity * seconds[:, None, None]
    return margin + room - (path % (2 * room) - room).abs()


def _signed_distance(x: Tensor, y: Tensor, radius: Tensor, kind: Tensor | int) -> Tensor:
    """Return the distance to outlines by number, negative inside; [..., H, W]. The last two are walls."""
    # Factors make the five shapes about equally large.
    ax, ay = x.abs(), y.abs()
    long, short = torch.maximum(ax, ay), torch.minimum(ax, ay)
    outlines: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.hypot(x, y) - 0.95 * radius,
        lambda: long - 0.82 * radius,
        lambda: torch.maximum(0.87 * ax - 0.5 * y, y) - 0.55 * radius,
        lambda: (ax + ay - 1.1 * radius) / math.sqrt(2),
        lambda: torch.maximum(long - radius, short - 0.36 * radius),
        lambda: ax - radius,
        lambda: ay - radius,
    )
    if isinstance(kind, int):
        return outlines[kind]()
    distance = outlines[0]().expand(torch.broadcast_shapes(long.shape, radius.shape))
    for k, outline in enumerate(outlines[1:], 1):
        distance = torch.where(kind == k, outline(), distance)
    return distance

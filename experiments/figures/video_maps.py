"""Pictures: what a query sees, laid over the frames of the video, strips of videos and words, an mp4."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import imageio.v3 as iio
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image

import experiments.figures.style as st
from experiments.analysis.stats import percent
from experiments.analysis.video_maps import Place, VideoMap
from experiments.caches import files, mp4
from experiments.caches.formats import FORMATS
from experiments.caches.outputs import require_replaceable
from experiments.caches.store import remedy
from wan import blocks
from wan.errors import library_reads

ALPHA = 0.65  # of the map over the picture
LEAST = 0.2  # share of it where a value is neutral
LIGHT = 0.4  # share of white in every picture: maps would not be seen on dark ones
FADED = 0.65  # share of white in pictures of frames that the query does not see
NOISE: st.Style = {"fill": False, "hatch": "////", "edgecolor": "white", "linewidth": 0, "alpha": 0.8}
QUERY: st.Style = {"fill": False, "edgecolor": st.OWN, "linewidth": 2}
LINE, STRIPE = 3, 16  # pixels of the query's frame, and from stripe to stripe
OVER_VIDEO = "maps over a video"  # in place of a model, in the mp4
HEIGHT = 60  # pixels of a thumbnail
MOVIE_DPI = 120  # of panels with names
COPIED = 1.0  # seconds by which a video that was copied with its cache may be the older file


def blend(picture: np.ndarray, values: np.ndarray, scale: ScalarMappable, alpha: float = ALPHA) -> np.ndarray:
    """Lay values [rows, columns] over a picture [h, w, 3] uint8 -> uint8; NaN leaves it pale."""
    # Interpolate values and their cover alike: absent cells do not pull their neighbours to 0
    is_seen = np.isfinite(values)
    cover = bilinear(is_seen.astype(float), picture.shape[:2])
    heat = bilinear(np.where(is_seen, values, 0), picture.shape[:2]) / np.maximum(cover, 1e-9)
    level = np.clip(scale.norm(heat), 0, 1)
    # Neutral is 0 for a mass and the middle of the scale for a logit
    strength = level
    if not isinstance(scale.norm, PowerNorm):
        strength = np.abs(2 * level - 1)
    opacity = (alpha * (LEAST + (1 - LEAST) * strength))[..., None]
    cover = cover[..., None]
    light = LIGHT + (1 - LIGHT) * picture / 255
    painted = opacity * scale.cmap(level)[..., :3] + (1 - opacity) * light
    pale = FADED + (1 - FADED) * light
    return np.round(255 * (cover * painted + (1 - cover) * pale)).astype(np.uint8)


def bilinear(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Interpolate values [rows, columns] between the centres of their cells, flat beyond them -> [h, w]."""
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR))


def scale_of(maps: Sequence[VideoMap], frames: Sequence[int] | None = None) -> ScalarMappable:
    """Make one scale: from 0 for masses, in steps of their square root; around 0 for logits.

    It ends at the largest value of earlier blocks in the frames: an own token would leave the past pale.
    """
    if not frames:
        frames = range(len(maps[0].values))
    values = []
    for seen in maps:
        earlier = [frame for frame in frames if frame < seen.query_frames[0]]
        values.append(seen.values[earlier].ravel())
    cells = np.concatenate(values)
    if not np.isfinite(cells).any():
        cells = np.concatenate([seen.values.ravel() for seen in maps])
    return _scale(cells, maps[0].quantity)


def _scale(values: np.ndarray, quantity: str) -> ScalarMappable:
    colors = st.color_scale(values, quantity)
    top = colors["vmax"]
    if quantity == "mean_logit":
        return ScalarMappable(Normalize(-top, top), colors["cmap"])
    return ScalarMappable(PowerNorm(0.5, 0, top), colors["cmap"])


@st.styled
def video_map(seen: VideoMap, pictures: Sequence[np.ndarray], *, alpha=ALPHA) -> Figure:
    """Draw one map over every frame that the query sees, and its own; one scale for all."""
    key_frames = np.flatnonzero(np.isfinite(seen.values).any((1, 2))).tolist()
    frames, (height, width) = sorted({*key_frames, *seen.query_frames}), pictures[0].shape[:2]
    room = len(st.columns_with_room(7, 0.05 + st.picture_width(height, width)))
    columns = min(len(frames), room)
    figure, axes = st.panels(len(frames), columns, (1.2, 1.2 * height / width + 0.2), keep=True)
    figure.set_layout_engine("compressed", w_pad=0.02, h_pad=0.02)
    rows, _ = st.rows_and_columns(figure)
    figure.set_figheight(0.2 + rows * (0.22 + height / width * (figure.get_figwidth() - 0.2) / columns))
    scale = scale_of([seen])
    queried = [seen.query[0]]
    if seen.query[0] < 0:  # the whole block
        queried += seen.query_frames
    for axis, frame in zip(axes, frames, strict=True):
        st.show_picture(axis, blend(pictures[frame], seen.values[frame], scale, alpha))
        _mark(axis, seen, frame, (height, width))
        title = str(frame)
        if frame in queried:
            title += "\u00a0(query)"
        axis.set_title(title, fontsize=st.SMALL, pad=3)
    _finish(figure, axes, seen.title, seen.about, scale, [seen])
    return figure


@st.styled
def map_strip(
    maps: Sequence[VideoMap],
    pictures: Sequence[np.ndarray],
    frames: Sequence[int],
    *,
    alpha=ALPHA,
) -> Figure:
    """Draw a row for each map, the chosen frames side by side, the first the query's own; one scale."""
    # The query is shown in its own frame, which comes first
    first = maps[0]
    query_frame = first.query[0]
    if query_frame < 0 and query_frame not in frames:
        query_frame = first.query_frames[0]
    columns = [query_frame, *(frame for frame in frames if frame != query_frame)]
    scale = scale_of(maps, columns)
    rows = {
        f"L{seen.layer} H{seen.head}": [blend(pictures[f], seen.values[f], scale, alpha) for f in columns]
        for seen in maps
    }
    names = ["query", *(f"frame {frame}" for frame in columns[1:])]
    figure, axes, shown = st.picture_grid(rows, names)
    for n, axis in enumerate(axes):
        frame = columns[shown[n % len(shown)]]
        _mark(axis, maps[n // len(shown)], frame, pictures[0].shape[:2])
    title = f"L{first.layer} H{first.head} {first.reading}"
    if len(maps) > 1:
        title += "; below, other heads"
    _finish(figure, axes, title, first.about, scale, maps)
    return figure


@st.styled
def map_rows(
    rows: Mapping[str, np.ndarray],
    frames: Sequence[int],
    pictures: Sequence[np.ndarray] | Mapping[int, np.ndarray],
    *,
    title: str,
    subtitle: str = "",
    queries: Mapping[str, Place] | None = None,
    alpha: float = ALPHA,
) -> Figure:
    """Draw a row for each map [frames, rows, columns], such as of a word, from 0 to its own largest value.

    queries name the token (frame, row, column) that looks, of rows that have one: its own frame does not
    count for the scale, and it is framed.
    """
    queries = queries or {}
    if not queries:
        title += f": {_half_covers(rows)}"
    scales = {name: own_scale(values, queries.get(name), frames) for name, values in rows.items()}
    painted = {}
    for name, values in rows.items():
        blended = [
            blend(pictures[frame], grid, scales[name], alpha)
            for frame, grid in zip(frames, values, strict=True)
        ]
        # Six bits of a colour are enough, and an SVG packs them almost twice as well.
        painted[name] = [picture & 0xFC for picture in blended]
    figure, axes, shown = st.picture_grid(painted, [f"frame {frame}" for frame in frames])
    size = pictures[frames[0]].shape[:2]
    for n, axis in enumerate(axes):
        name, frame = list(rows)[n // len(shown)], frames[shown[n % len(shown)]]
        query = queries.get(name)
        if query is not None and query[0] == frame:
            axis.add_patch(Rectangle(*_query_box(query, rows[name].shape[1:], size), **QUERY))
    colors = ScalarMappable(PowerNorm(0.5, 0, 1), next(iter(scales.values())).cmap)
    st.color_bar(figure, colors, axes, "attention, share of the row's largest")
    legend = {}
    if queries:
        legend["query"] = Patch(label="the patch that looks", **QUERY)
    st.label_figure(figure, [], title, subtitle, legend=legend)
    return figure


def _half_covers(rows: Mapping[str, np.ndarray]) -> str:
    """Say on how many patches, the brightest, half of the attention to each word is."""
    text = "half of the attention"
    for name, values in rows.items():
        ordered = np.sort(values[np.isfinite(values)])[::-1]
        patches = 1 + int(np.searchsorted(ordered.cumsum(), 0.5 * ordered.sum()))
        share = percent(patches / max(1, len(ordered)))
        if text.endswith("attention"):
            text += f" to {name} is on {share} of the patches"
        else:
            text += f", to {name} on {share}"
    return text


word_strip = map_rows  # its older name


def own_scale(values: np.ndarray, query: Place | None, frames: Sequence[int]) -> ScalarMappable:
    """Make the scale of one map [frames, rows, columns]: up to its largest value but in the query's frame."""
    counted = [n for n, frame in enumerate(frames) if query is None or frame != query[0]]
    return _scale(values[counted], "mass")


@st.styled
def panels_beside(picture: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw one picture [h, w, 3] under each name, side by side."""
    figure, *_ = st.picture_grid({"": [picture] * len(names)}, names)
    return figure


def save_rows_movie(
    path: str | Path, video: np.ndarray, rows: Mapping[str, np.ndarray], overwrite: bool = False
) -> Path:
    """Write an mp4: the video [4 F - 3, h, w, 3] uint8, and beside it under each map [F, rows, columns]."""
    frames = range(len(next(iter(rows.values()))))
    scales = {name: own_scale(values, None, frames) for name, values in rows.items()}
    figure = panels_beside(video[0], ["the video", *rows])
    figure.set_dpi(MOVIE_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")  # panels stay where they are
    require_replaceable(path, mp4.contents_of_video(len(video), OVER_VIDEO), mp4.video_contents, overwrite)
    with mp4.VideoWriter(path, multiple=2) as movie:
        for n, pixels in enumerate(video):
            frame = blocks.video_to_latent_frame(n, blocks.VIDEO_FRAMES_PER_LATENT)
            panels = [pixels, *(blend(pixels, rows[name][frame], scale) for name, scale in scales.items())]
            for axis, panel in zip(figure.axes, panels, strict=True):
                axis.images[0].set_data(panel)
            canvas.draw()
            movie.append(np.asarray(canvas.buffer_rgba())[None, ..., :3])
        movie.finish(model=OVER_VIDEO)
    return Path(path)


@st.styled
def video_strips(
    videos: Mapping[str, np.ndarray],
    frames: Sequence[int],
    *,
    title: str,
    subtitle: str,
    names: Sequence[str] | None = None,
) -> Figure:
    """Draw a row per video [frames, height, width, 3], uint8, of these video frames.

    names stand on top of the columns, by default the numbers of the frames.
    """
    if names is None:
        names = [f"frame {frame}" for frame in frames]
    figure, *_ = st.picture_grid({name: video[list(frames)] for name, video in videos.items()}, names)
    st.label_figure(figure, [], title, subtitle)
    return figure


def _mark(axis: Axes, seen: VideoMap, frame: int, size: tuple[int, int]) -> None:
    """Hatch a frame of noise, and frame the query where it is in this frame."""
    if frame in seen.noise_frames:
        axis.add_patch(Rectangle((0, 0), size[1], size[0], **NOISE))
    if frame == seen.query[0]:
        axis.add_patch(Rectangle(*_query_box(seen.query, seen.values.shape[1:], size), **QUERY))


def _query_box(
    query: Place, grid: Sequence[int], size: tuple[int, int]
) -> tuple[tuple[float, float], float, float]:
    """Corner (x, y), width and height of a token of a grid in a picture of so many rows and columns."""
    (height, width), (_, row, column) = size, query
    if row < 0:
        return (0, 0), width, height
    high, wide = height / grid[0], width / grid[1]
    return (column * wide, row * high), wide, high


def _finish(
    figure: st.StyledFigure,
    axes: Sequence[Axes],
    title: str,
    subtitle: str,
    scale: ScalarMappable,
    maps: Sequence[VideoMap],
) -> None:
    """Add colour bar, legend and title; what the maps do not show is said."""
    st.color_bar(figure, scale, axes, maps[0].unit, np.concatenate([seen.values.ravel() for seen in maps]))
    legend = {}
    if any(seen.noise_frames for seen in maps):
        label = "own block, noise in this pass"
        legend["noise"] = Patch(label=label, facecolor="0.6", hatch="////", edgecolor="white")
    if any(seen.query[0] >= 0 for seen in maps):
        legend["query"] = Patch(label="the query", **QUERY)
    lost, note = max(seen.elsewhere for seen in maps), ""
    if lost > 0.005:
        note = f"Not shown: {lost:.0%} of the mass, on keys of no frame."
    st.label_figure(figure, [], title, subtitle, legend=legend, note=note)


def save_word_movie(
    path: str | Path, video: np.ndarray, words: Mapping[str, np.ndarray], overwrite: bool = False
) -> Path:
    """Write an mp4 of a video [n, h, w, 3] uint8 under the map of each word [frames, rows, columns].

    Words stand side by side, each from 0 to its largest value. The first latent frame is one frame of the
    video, all others are equally many.
    """
    scales = {word: _scale(values, "mass") for word, values in words.items()}
    num_frames = len(next(iter(words.values())))
    stride = max(1, (len(video) - 1) // max(1, num_frames - 1))
    require_replaceable(path, mp4.contents_of_video(len(video), OVER_VIDEO), mp4.video_contents, overwrite)
    with mp4.VideoWriter(path, multiple=2) as movie:
        for n, pixels in enumerate(video):
            frame = blocks.video_to_latent_frame(n, stride)
            panels = [blend(pixels, words[word][frame], scale) for word, scale in scales.items()]
            movie.append(np.concatenate(panels, 1)[None])
        movie.finish(model=OVER_VIDEO)
    return Path(path)


def save_map_movie(
    path: str | Path, frames: Sequence[np.ndarray], seen: VideoMap, *, alpha=ALPHA, overwrite: bool = False
) -> Path:
    """Write an mp4 of frames [h, w, 3] uint8 with a map over them; unseen frames pale, noise striped."""
    scale, color = scale_of([seen]), np.round(255 * np.array(to_rgb(st.OWN))).astype(np.uint8)
    require_replaceable(path, mp4.contents_of_video(len(frames), OVER_VIDEO), mp4.video_contents, overwrite)
    with mp4.VideoWriter(path, multiple=2) as movie:
        for n, pixels in enumerate(frames):
            # Video frame n shows the map of its latent frame
            frame, size = blocks.video_to_latent_frame(n, blocks.VIDEO_FRAMES_PER_LATENT), pixels.shape[:2]
            picture = blend(pixels, seen.values[frame], scale, alpha)
            if frame in seen.noise_frames:
                stripes = np.add.outer(np.arange(size[0]), np.arange(size[1])) % STRIPE < 2
                picture[stripes] = picture[stripes] // 2 + 127
            if frame == seen.query[0]:
                (x, y), wide, high = _query_box(seen.query, seen.values.shape[1:], size)
                left, top, right, bottom = (round(edge) for edge in (x, y, x + wide, y + high))
                edge = np.zeros(size, bool)
                edge[top:bottom, left:right] = True
                edge[top + LINE : bottom - LINE, left + LINE : right - LINE] = False
                picture[edge] = color
            movie.append(picture[None])
        movie.finish(model=OVER_VIDEO)
    return Path(path)


# --- Pictures of a video


def pictures(path: str | Path, num_frames: int, height: int = HEIGHT, which: int = 2) -> list[np.ndarray]:
    """Return one picture [height, W, 3] uint8 per latent frame, its video frame number which of four."""
    stride = blocks.VIDEO_FRAMES_PER_LATENT
    return video_frames(path, num_frames, height, {0, *range(1 + which, stride * num_frames, stride)})


def video_frames(
    path: str | Path, num_frames: int, height: int, wanted: Container[int] | None = None
) -> list[np.ndarray]:
    """Return the wanted frames of the video of num_frames latent frames, [height, W, 3] uint8; None: all."""
    frames, count = [], 0
    with library_reads(f"{path}: a video", files.CacheError):
        for count, pixels in enumerate(iio.imiter(path, plugin="FFMPEG"), 1):
            if wanted is None or count - 1 in wanted:
                image = Image.fromarray(pixels)
                width = max(1, round(image.width * height / image.height))
                frames.append(np.asarray(image.resize((width, height))))
    # Latent frame 0 is one video frame, every other one four
    expected = 1 + blocks.VIDEO_FRAMES_PER_LATENT * (num_frames - 1)
    if count != expected:
        raise files.CacheError(f"{path} has {count} frames; {num_frames} latent frames are {expected}")
    return frames


def video_of(cache_path: str | Path, video: str | Path | None) -> Path:
    """Return the video given, or the mp4 beside a cache, or the only one in a folder of layerN.pt.

    CacheError where there is none, or another run's: fingerprints count, not names.
    """
    source = Path(cache_path)
    layers, inside = sorted(source.glob("layer*.pt")), list(source.glob("*.mp4"))  # none of a file
    path = source.with_suffix(".mp4")
    if video is not None:
        path = Path(video)
        if not path.is_file():
            raise files.CacheError(f"{path} is not there: leave the video out (--video), or name an mp4")
    elif len(inside) == 1:
        path = inside[0]
    if not path.is_file():
        kind = files.peek(source).get("format")
        command = "the script that made the cache writes it"
        if kind in FORMATS:
            command = remedy(source, (kind,))
        if "--save_video" not in command:
            command += " --save_video"
        raise files.CacheError(f"{path} not found; to make it with its cache, {command}")
    other = "make the cache again with --save_video, or name a video of the same rollout"
    # A fingerprint decides; without one a video must not be older than its cache
    cache = files.peek(layers[0] if layers else source)
    fingerprint, tag = cache.get("fingerprint"), mp4.mp4_tag(path) or ""
    if fingerprint and (tag or video is None):
        files.require_same(path, tag.partition(" ")[0], fingerprint, other)
    elif video is None and not layers and path.stat().st_mtime < source.stat().st_mtime - COPIED:
        raise files.CacheError(f"{path} is older than {cache_path}, so of an earlier run; {other}")
    return path


def pictures_for(
    cache_path: str | Path, video: str | Path | None, num_frames: int
) -> tuple[list[np.ndarray] | None, str]:
    """Return pictures of the video given or beside a cache or in a folder of caches, and a note.

    A bad video beside the cache is left out, with a note; one that was named is a CacheError.
    """
    source = Path(cache_path)
    if video is not None:
        return pictures(video_of(source, video), num_frames), ""
    if not source.with_suffix(".mp4").is_file() and len([*source.glob("*.mp4")]) != 1:
        return None, ""
    try:
        return pictures(video_of(source, None), num_frames), ""
    except files.CacheError as error:
        return None, f"The video beside the cache is left out: {error}"

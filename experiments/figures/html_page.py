"""All layers, heads and passes of a cache as one HTML file that opens from disk: no server, no network.

    python experiments/layer_page.py cache/published/self_forcing_dmd_eagle_21f.pt

page_data.py makes the numbers, the files of page/ draw them, and this module puts both into one file.
docs/page.md describes what the page does.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from experiments.analysis import head_measures
from experiments.caches import load_cache
from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError
from experiments.caches.layer_folder import open_layers
from experiments.caches.view import Profiles, open_passes
from experiments.figures.page_data import QUANTITIES, Passes, fit, size_of, to_json
from experiments.figures.page_keys import keys_of
from experiments.figures.page_maps import maps_of
from experiments.figures.thumbnails import ThumbnailError, require_as_new, thumbnails

PARTS = Path(__file__).with_name("page")

STYLES = ("theme.css", "page.css", "drawing.css")

SCRIPTS = (
    "data.js",
    "draw.js",
    "heads.js",
    "detail.js",
    "keys.js",
    "compare.js",
    "on_video.js",
    "export.js",
    "controls.js",
)

MAX_MB = 16.0  # both quantities of five passes of 30 x 12 heads x 72 frames are 14 MB


def open_passes_of(path: str | Path) -> tuple[Passes, list[int]]:
    """The passes and layers of a cache file, or of a folder of layerN.pt that belong together.

    Raises CacheError where there are none, and where the files are not of one rollout.
    """
    path = Path(path)
    caches = list(open_layers(path).values()) if path.is_dir() else [load_cache(path)]
    passes: Passes = []
    for quantity in QUANTITIES:
        for cache in caches:
            view = head_measures.open_quantity(cache, None, quantity)
            for p, one in enumerate(open_passes(cache, view) if view else []):
                if p == len(passes):
                    passes.append({})
                passes[p].setdefault(quantity, {}).update(dict.fromkeys(one.layers, one))
    if not passes:
        raise CacheError(f"{path} holds neither mean logits nor mass per frame")
    return passes, sorted(next(iter(passes[0].values())))


def save_page(
    path: str | Path,
    source: str | Path,
    layers: Sequence[int] | None = None,
    max_mb: float = MAX_MB,
    video: str | Path | None = None,
    maps: str | Path | None = None,
) -> Path:
    """Write the page of a cache or folder, whole or not at all.

    layers None: all of them. max_mb bounds the file, in 10^6 bytes (see page_data.fit). video is an mp4 of
    the same rollout; None takes the one beside the cache, unless it is older. maps is a maps cache of the
    rollout, which takes at most half of the page. Raises CacheError where the profiles alone do not fit, for
    a video that cannot be shown, and for maps of another rollout.
    """
    passes, there = open_passes_of(source)
    view = next(iter(next(iter(passes[0].values())).values()))
    frames, notes = _video_frames(Path(source), video, view)
    page = _template()
    room = int(max_mb * 1e6) - len(page.encode()) - size_of(frames)
    seen = None if maps is None else maps_of(maps, view, room // 2)
    shown = there if layers is None else layers
    keys = keys_of(Path(source), passes, shown)
    data = fit(passes, shown, room - size_of(seen) - size_of(keys), notes)
    data |= {"thumbnails": frames, "maps": seen, "keys": keys}
    with replacing(path) as file:
        file.write(page.replace("DATA_GOES_HERE", to_json(data), 1).encode())
    return Path(path)


def _video_frames(source: Path, video: str | Path | None, view: Profiles) -> tuple[list[str], list[str]]:
    """Thumbnails of the video, one per latent frame, and notes: a bad video beside the cache is left out."""
    if video is not None:
        try:
            return thumbnails(video, view.num_frames), []
        except ThumbnailError as error:
            raise CacheError(str(error)) from None
    beside = sorted(source.glob("*.mp4")) if source.is_dir() else [source.with_suffix(".mp4")]
    if len(beside) != 1 or not beside[0].is_file():
        return [], []
    try:
        if not source.is_dir():
            require_as_new(beside[0], source)
        return thumbnails(beside[0], view.num_frames), []
    except ThumbnailError as error:
        return [], [f"The video beside the cache is left out: {error}"]


def _template() -> str:
    """The page without its data. Its policy allows its own script alone: no code from a cache, no request."""
    style = "\n".join(_part(name) for name in STYLES)
    script = "\n".join(_part(name) for name in SCRIPTS)
    script = script.replace("DRAWING_STYLE", to_json(_drawing_style()), 1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _part("page.html")
    for name, content in (("STYLE", style), ("SCRIPT", script), ("DIGEST", digest)):
        page = page.replace(f"{name}_GOES_HERE", content, 1)
    return page


def _drawing_style() -> str:
    """drawing.css with the colours of the light theme in it: programs that draw SVG know no variables."""
    light = dict(re.findall(r"--(\w+): (#\w+);", _part("theme.css").partition("}")[0]))
    return re.sub(r"var\(--(\w+)\)", lambda found: light[found[1]], _part("drawing.css"))


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")

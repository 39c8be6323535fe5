"""Where a word lies in a video: the attention of the video's tokens to the tokens of a word.

    with capture(session, words=["circle", "wall"]) as captured:
        session.generate("a red circle moving right behind a wall", seed=42)
    maps = captured.words()
    maps["circle"]            # [frames, rows, columns], mean over layers, heads and passes
    maps.save("circle.mp4")   # laid over the video

As DAAM does for pictures (arXiv 2210.04885). What is computed of a call: wan/reductions.py, word_mass.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from experiments.analysis import prompt_words
from experiments.caches import files
from wan import capture, errors
from wan.sites import check_indices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.runs import Run

TO_TEXT, FROM_TEXT = "word_share", "text_share"  # names of captured values, by direction
DIRECTIONS = {"video_to_text": TO_TEXT, "text_to_video": FROM_TEXT}
PANELS = 6  # frames that plot() shows


# --- What is asked for
@dataclass(frozen=True)
class WordsAsked:
    """Words of a prompt whose mass is captured, in which layers, heads, steps and kind of attention."""

    words: list[str]
    by_head: bool
    layers: list[int] | None
    heads: tuple[int, ...] | None
    steps: list[int] | None
    kind: Any  # of attention: "cross", or "self" where text and video attend together

    @classmethod
    def of(
        cls, words: Any, by_head: bool, session: Any, sites: Sequence[Any], chosen: Mapping[str, Any]
    ) -> "WordsAsked":
        """Check what is asked for. ConfigError beside sites or other fields, and for a model without text."""
        if sites:
            raise errors.ConfigError(
                "words are captured alone: leave the sites out, or open a capture of their own"
            )
        for name in chosen:
            errors.require_known(name, ("layers", "heads", "steps"), "capture of words knows no {}")
        kind = session.text_kind()
        if kind is None:
            raise errors.ConfigError(
                f"which keys of {session.config.model} are of text is not known: leave words out"
            )
        heads = chosen.get("heads")
        if heads is not None:
            check_indices("head", heads, session.model_config.num_heads)
            heads = tuple(heads)
        return cls(check_words(words), by_head, chosen.get("layers"), heads, chosen.get("steps"), kind)

    def request(self, numbers: prompt_words.Numbers) -> capture.CaptureRequest:
        """Return the request for prompts in which the words have tokens of these numbers."""
        return capture.CaptureRequest(
            layers=self.layers,
            heads=self.heads,
            kinds=(self.kind,),
            steps=self.steps,
            granularity="words",
            words=numbers,
            by_head=self.by_head,
        )


def check_words(words: Any) -> list[str]:
    """Return the words that were asked for as a list; ConfigError for anything else."""
    if isinstance(words, str):
        words = [words]
    is_list = isinstance(words, Sequence) and len(words) > 0
    if not is_list or not all(isinstance(word, str) and word.strip() for word in words):
        raise errors.ConfigError(
            f'words= takes words of the prompt, such as ["circle"], not {errors.short_repr(words)}'
        )
    if len({word.lower() for word in words}) < len(words):
        raise errors.ConfigError(f"words= names a word twice: {errors.short_repr(words)}")
    return list(words)


# --- Maps
class WordMaps(Mapping[str, Tensor]):
    """The map of each word of a run: [frames, rows, columns], float32.

    With each=True maps are [layers, heads, passes, frames, rows, columns], heads as they were asked for. A
    value is the share of a token's attention that goes to the word.

    >>> maps = captured.words()
    >>> maps["circle"].shape
    [21, 30, 52]
    >>> maps.plot()
    """

    def __init__(self, maps: Mapping[str, Tensor], run: "Run", layers: Sequence[int], passes: Sequence[int]):
        self.maps, self.run = dict(maps), run
        self.layers, self.passes = list(layers), list(passes)

    def __getitem__(self, word: str) -> Tensor:
        if word not in self.maps:
            raise KeyError(f"no map of {word!r}, only of {', '.join(self.maps)}; name it in words=[...]")
        return self.maps[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self.maps)

    def __len__(self) -> int:
        return len(self.maps)

    def mean(self, word: str) -> Tensor:
        """Return the mean map of a word over layers, heads and passes [frames, rows, columns]."""
        values = self[word]
        if values.ndim == 3:
            return values
        return values.nanmean((0, 1, 2))

    def plot(self, frames: Sequence[int] | None = None) -> "Figure":
        """Draw a row for each word over frames of the video, by default six from first to last."""
        count = len(self.mean(next(iter(self))))
        chosen = errors.as_numbers("frames", frames)
        if chosen is None:
            chosen = sorted({round(n * (count - 1) / max(1, PANELS - 1)) for n in range(PANELS)})
        check_indices("frame", chosen, count)
        pixels = self.run.video.numpy()
        pictures = {frame: pixels[_last_video_frame(frame, len(pixels), count)] for frame in chosen}
        maps = {word: self.mean(word)[chosen].numpy() for word in self}
        figures = import_module("experiments.figures.video_maps")  # loads matplotlib
        return figures.map_rows(
            maps,
            chosen,
            pictures,
            title="Where the video reads each word",
            subtitle=f'"{self.run.config.prompt}", mean over {len(self.layers)} layers',
        )

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write an mp4 of the video with the map of each word over it, words side by side.

        Raises CacheError for a name that does not end in .mp4, and for a file there that must stay.
        """
        files.require_suffix(path, ".mp4")
        figures = import_module("experiments.figures.video_maps")
        pixels = self.run.video.numpy()
        maps = {word: self.mean(word).numpy() for word in self}
        figures.save_word_movie(path, pixels, maps, overwrite)
        return Path(path)

    def __repr__(self) -> str:
        shape = list(next(iter(self.maps.values())).shape)
        words = ", ".join(self)
        return f"WordMaps: {words}, {shape}, of {len(self.layers)} layers and {len(self.passes)} passes"


def _last_video_frame(frame: int, video_frames: int, latent_frames: int) -> int:
    """Return the last video frame of a latent frame: the first latent frame is one, the others are equal."""
    if latent_frames == 1:
        return 0
    return frame * ((video_frames - 1) // (latent_frames - 1))


def maps_of_run(
    run: "Run", words: Sequence[str], *, each: bool = False, direction: str = "video_to_text"
) -> WordMaps:
    """Put the captured mass of all calls of a run together, as maps over the video's frames.

    direction "text_to_video" is what the word's own tokens see, which joint attention alone has. Calls of one
    layer, pass and frame are averaged. Raises RunError where nothing was captured.
    """
    # 1. The calls that have it.
    name = DIRECTIONS.get(direction)
    if name is None:
        raise errors.ConfigError(f"direction is {direction!r}; known ones: {', '.join(DIRECTIONS)}")
    calls = [call for call in run.records if name in call.values]
    if not calls and any(TO_TEXT in call.values for call in run.records):
        raise files.RunError(
            f"text of {run.config.model} does not attend to the video: its words have video_to_text alone"
        )
    if not calls:
        raise files.RunError(
            f"no {name} of words was captured: capture(session, words=[...]), and generate inside, with "
            "layers and steps that the run has"
        )
    rows, columns = token_grid_of(run, calls[0])
    layers = sorted({call.site.layer for call in calls})
    passes = sorted({_pass_of(call) for call in calls})
    num_frames = 1 + max(max(_frames_of(call)) for call in calls)
    # 2. Every call has its place [layer, head, pass, frame]; the mean needs no axis of all of them.
    sizes = (1, 1, 1)
    if each:
        heads = max(call.values[name].shape[1] for call in calls)
        sizes = (len(layers), heads, len(passes))
    maps = torch.zeros(len(words), *sizes, num_frames, rows, columns)
    counts = torch.zeros(sizes[0], 1, sizes[2], num_frames, 1, 1)
    for call in calls:
        layer, step = 0, 0
        if each:
            layer, step = layers.index(call.site.layer), passes.index(_pass_of(call))
        frames = _frames_of(call)
        values = call.values[name][0].float()  # [heads, Lq, words]
        grid = values.permute(2, 0, 1).unflatten(2, (len(frames), rows, columns))
        if not each:
            grid = grid.mean(1, keepdim=True)
        maps[:, layer, :, step, frames] += grid
        counts[layer, :, step, frames] += 1
    maps /= counts  # NaN where nobody captured
    if not each:
        maps = maps[:, 0, 0, 0]
    steps = [step for step, _ in passes]
    return WordMaps(dict(zip(words, maps, strict=True)), run, layers, steps)


def _pass_of(call: capture.CapturedCall) -> tuple[int, int]:
    """Return step and evaluation of a call; a solver may evaluate a step twice."""
    if call.at is None:
        return 0, 0
    return call.at.step or 0, call.at.evaluation


def _frames_of(call: capture.CapturedCall) -> list[int]:
    if call.at is None:
        return [0]
    return list(call.at.query_frames)


def token_grid_of(run: "Run", call: capture.CapturedCall) -> tuple[int, int]:
    """Return rows and columns of a frame's tokens: as many as the call has, in the shape of the latents."""
    name = TO_TEXT if TO_TEXT in call.values else FROM_TEXT
    tokens = call.values[name].shape[2] // len(_frames_of(call))
    height, width = run.latents.shape[-2:]
    rows = round(float(np.sqrt(tokens * height / width)))
    if rows < 1 or rows * round(tokens / rows) != tokens:
        raise files.RunError(f"{tokens} tokens of a frame are no grid of a latent of {height} x {width}")
    return rows, tokens // rows

"""Where a word lies in a video: the attention of the video's tokens to the tokens of a word.

    with capture(session, words=["circle", "wall"]) as captured:
        session.generate("a red circle moving right behind a wall", seed=42)
    maps = captured.words()
    maps["circle"]            # [frames, rows, columns], mean over layers, heads and passes
    maps.save("circle.mp4")   # laid over the video

As DAAM does for pictures (arXiv 2210.04885). What is computed of a call: wan/reductions.py, word_mass.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from experiments.caches.files import RunError, require_suffix
from wan.capture import CapturedCall, CaptureRequest
from wan.errors import ConfigError, short_repr

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.runs import Run

TO_TEXT, FROM_TEXT = "word_share", "text_share"  # names of captured values, by direction
DIRECTIONS = {"video_to_text": TO_TEXT, "text_to_video": FROM_TEXT}
PANELS = 6  # frames that plot() shows


# --- Words of a prompt
def tokens_of_words(tokens: Sequence[str], words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the tokens of each word, at every place where it stands in the prompt.

    tokens are those of a prompt as a tokenizer names them: "▁cine", "matic" of sentencepiece, "Ġcine" of
    byte-level BPE, "matic</w>" of CLIP. Case does not count. Raises ConfigError for a word that is absent,
    and for special tokens, which are no words.
    """
    # 1. The text in bytes, as a token may hold a part of a character, with the token of each byte.
    is_byte_level = any(token.startswith("Ġ") for token in tokens)
    content, token_of_byte = b"", list[int]()
    for number, token in enumerate(tokens):
        piece = _bytes_of(token, is_byte_level)
        content += piece
        token_of_byte += [number] * len(piece)
    text = content.decode("utf-8", errors="surrogateescape")
    token_of_character = list[int]()
    place = 0
    for character in text:
        token_of_character.append(token_of_byte[place])
        place += len(character.encode("utf-8", errors="surrogateescape"))
    # 2. Every place of every word.
    numbers = []
    for word in words:
        places = [match.span() for match in re.finditer(_pattern(word), text, re.IGNORECASE)]
        if not places:
            known = ", ".join(dict.fromkeys(re.findall(r"\w+", text)))
            raise ConfigError(f"the word {short_repr(word)} is not in the prompt; its words are {known}")
        numbers.append(tuple(sorted({n for start, stop in places for n in token_of_character[start:stop]})))
    return tuple(numbers)


def _bytes_of(token: str, is_byte_level: bool) -> bytes:
    """Return the text of a token, a space in front where a word begins; nothing for a special token."""
    if re.fullmatch(r"<[^<>]*>|\[[A-Z]+\]", token):
        return b""
    if is_byte_level:
        return bytes(BYTES[character] for character in token if character in BYTES)
    if token.endswith("</w>"):
        token = token.removesuffix("</w>") + " "
    return token.replace("▁", " ").encode("utf-8")


def _byte_of_character() -> dict[str, int]:
    """Return which byte each character of byte-level BPE stands for, as GPT-2's tokenizer numbers them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTES = _byte_of_character()


def _pattern(word: str) -> str:
    """Return the regular expression of a word: whole, but in scripts that write words without spaces."""
    parts = word.split()
    pattern = r"\s+".join(re.escape(part) for part in parts)
    is_spaced = all(ord(character) < 0x2E80 for character in word)  # below CJK
    if is_spaced:
        return rf"(?<!\w){pattern}(?!\w)"
    return pattern


def check_words(words: Any) -> list[str]:
    """Return the words that were asked for as a list; ConfigError for anything else."""
    if isinstance(words, str):
        words = [words]
    is_list = isinstance(words, Sequence) and len(words) > 0
    if not is_list or not all(isinstance(word, str) and word.strip() for word in words):
        raise ConfigError(f'words= takes words of the prompt, such as ["circle"], not {short_repr(words)}')
    if len({word.lower() for word in words}) < len(words):
        raise ConfigError(f"words= names a word twice: {short_repr(words)}")
    return list(words)


def word_request(
    words: Sequence[str],
    tokens_of_prompts: Sequence[Sequence[str]],
    by_head: bool = False,
    layers: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    kind: Any = "cross",
) -> CaptureRequest:
    """Ask for the mass on words of prompts that are given by their tokens; kind "self" is joint attention.

    Raises ConfigError as tokens_of_words() does, and for a model without text.
    """
    for tokens in tokens_of_prompts:
        if not tokens:
            raise ConfigError("words= needs the tokens of the prompt, which are not known here")
    return CaptureRequest(
        layers=layers,
        kinds=(kind,),
        steps=steps,
        granularity="words",
        words=tuple(tokens_of_words(tokens, words) for tokens in tokens_of_prompts),
        by_head=by_head,
    )


# --- Maps
class WordMaps(Mapping[str, Tensor]):
    """The map of each word of a run: [frames, rows, columns], float32.

    With each=True maps are [layers, heads, passes, frames, rows, columns]. A value is the share of a
    token's attention that goes to the word.

    >>> maps = captured.words()
    >>> maps["circle"].shape
    [21, 30, 52]
    >>> maps.plot()
    """

    def __init__(self, maps: Mapping[str, Tensor], run: "Run", layers: Sequence[int], passes: Sequence[int]):
        self.maps, self.run = dict(maps), run
        self.layers, self.passes = list(layers), list(passes)

    def __getitem__(self, word: str) -> Tensor:
        return self.maps[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self.maps)

    def __len__(self) -> int:
        return len(self.maps)

    def mean(self, word: str) -> Tensor:
        """Return the mean map of a word over layers, heads and passes [frames, rows, columns]."""
        values = self.maps[word]
        if values.ndim == 3:
            return values
        return values.nanmean((0, 1, 2))

    def plot(self, frames: Sequence[int] | None = None) -> "Figure":
        """Draw a row for each word over frames of the video, by default six from first to last."""
        count = len(self.mean(next(iter(self))))
        if frames is None:
            frames = sorted({round(n * (count - 1) / max(1, PANELS - 1)) for n in range(PANELS)})
        pixels = self.run.video.numpy()
        pictures = {frame: pixels[_last_video_frame(frame, len(pixels), count)] for frame in frames}
        maps = {word: self.mean(word)[list(frames)].numpy() for word in self}
        figures = import_module("experiments.figures.video_maps")  # loads matplotlib
        return figures.word_strip(
            maps,
            frames,
            pictures,
            title="Where the video reads each word",
            subtitle=f'"{self.run.config.prompt}", mean over {len(self.layers)} layers',
        )

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write an mp4 of the video with the map of each word over it, words side by side.

        Raises CacheError for a name that does not end in .mp4, and for a file there that must stay.
        """
        require_suffix(path, ".mp4")
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

    direction "text_to_video" is what the word's own tokens see, which joint attention alone has. Raises
    RunError where nothing was captured.
    """
    # 1. The calls that have it.
    name = DIRECTIONS.get(direction)
    if name is None:
        raise ConfigError(f"direction is {direction!r}; known ones: {', '.join(DIRECTIONS)}")
    calls = [call for call in run.records if name in call.values]
    if not calls:
        raise RunError(f"no {name} of words was captured: capture(session, words=[...]), and generate inside")
    rows, columns = token_grid_of(run, calls[0])
    layers = sorted({call.site.layer for call in calls})
    passes = sorted({_pass_of(call) for call in calls})
    num_frames = 1 + max(max(_frames_of(call)) for call in calls)
    heads = max(call.values[name].shape[1] for call in calls)
    # 2. Every call has its place [layer, head, pass, frame]; the mean needs no axis of all of them.
    if each:
        shape = (len(words), len(layers), heads, len(passes), num_frames, rows, columns)
        maps = torch.full(shape, torch.nan)
    else:
        maps = torch.zeros(len(words), num_frames, rows, columns)
    counts = torch.zeros(num_frames)
    for call in calls:
        frames = _frames_of(call)
        values = call.values[name][0].float()  # [heads, Lq, words]
        grid = values.permute(2, 0, 1).unflatten(2, (len(frames), rows, columns))
        if each:
            layer, step = layers.index(call.site.layer), passes.index(_pass_of(call))
            maps[:, layer, :, step, frames] = grid
        else:
            maps[:, frames] += grid.mean(1)
            counts[frames] += 1
    if not each:
        maps /= counts[:, None, None]
    return WordMaps(dict(zip(words, maps, strict=True)), run, layers, passes)


def _pass_of(call: CapturedCall) -> int:
    if call.at is None or call.at.step is None:
        return 0
    return call.at.step


def _frames_of(call: CapturedCall) -> list[int]:
    if call.at is None:
        return [0]
    return list(call.at.query_frames)


def token_grid_of(run: "Run", call: CapturedCall) -> tuple[int, int]:
    """Return rows and columns of a frame's tokens: as many as the call has, in the shape of the latents."""
    name = TO_TEXT if TO_TEXT in call.values else FROM_TEXT
    tokens = call.values[name].shape[2] // len(_frames_of(call))
    height, width = run.latents.shape[-2:]
    rows = round(float(np.sqrt(tokens * height / width)))
    if rows < 1 or rows * round(tokens / rows) != tokens:
        raise RunError(f"{tokens} tokens of a frame are no grid of a latent of {height} x {width}")
    return rows, tokens // rows

"""Maps of a maps cache in the places of the video: what a query sees of every patch of every frame."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.reports import read_study
from experiments.caches.files import CacheError
from experiments.caches.formats import ANY, NO_KEY, BlockMaps, MapsCache
from experiments.caches.view import Profiles, edits_in_words, pass_name, source_of

# --- Cross-attention mass per word of the prompt: tokens of a sentencepiece tokenizer put together to words
NO_CROSS = (
    "Mass per prompt word: absent in this cache; capture it with: "
    "python experiments/run_extraction_all.py --cross"
)


def words_of(tokens: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Tokens -> words, and which word each token belongs to: ["▁cine", "matic", "▁light"] -> ["cinematic",
    "light"], [0, 0, 1].

    "▁" begins a word; a control token such as </s> is a word of its own.
    """
    words: list[str] = []
    place = []
    for token in tokens:
        control = token.startswith("<") and token.endswith(">")
        if control or token.startswith("▁") or not words or words[-1].startswith("<"):
            words.append("")
        words[-1] += token.removeprefix("▁")
        place.append(len(words) - 1)
    return words, np.array(place)


def word_mass(cache: Mapping[str, Any], view: Profiles, layer: int) -> tuple[list[str], np.ndarray] | None:
    """Words of the prompt and their mass [H, words] in a layer, mean over the view's query frames in its
    pass; None where the atlas has none. A row sums to the share of all mass that is on the prompt: the rest
    is on the padding after it."""
    if "cross_mass" not in cache:
        return None
    p = list(cache.get("pass_steps", range(len(cache["pass_timesteps"])))).index(view.step)
    tokens = (
        cache["cross_mass"][view.layers.index(layer), p][:, list(view.query_frames)].float().mean(1).numpy()
    )
    words, place = words_of(cache.get("cross_tokens", [str(i) for i in range(tokens.shape[-1])]))
    mass = np.zeros((len(tokens), len(words)), np.float32)
    np.add.at(mass.T, place, tokens.T)
    return words, mass


# --- Maps of a maps cache in the places of the video: what a query sees of every patch of every frame
QUANTITIES = ("mass", "mean_logit")
UNITS = {"mass": "attention mass per token, 1 is even", "mean_logit": "logit q·k/√D"}

Place = tuple[int, int, int]  # frame, row, column; -1: all of them


@dataclass(frozen=True)
class VideoMap:
    """One map over the frames of a video, as plain arrays."""

    values: np.ndarray  # float32 [F, rows, columns], NaN where the query sees no key of that place
    quantity: str
    layer: int
    head: int
    pass_label: str
    query: Place
    query_frames: tuple[int, ...]  # of the block: noise in this pass unless it is the clean one
    is_clean_pass: bool
    keys: int  # how many the query sees
    elsewhere: float  # share of its mass on keys of no frame, such as averages
    model: str
    source: str
    edits: str = ""
    kind: str = "maps"

    @property
    def unit(self) -> str:
        return UNITS[self.quantity]

    @property
    def noise_frames(self) -> tuple[int, ...]:
        """Frames of the own block, where they are noise in this pass."""
        return () if self.is_clean_pass else self.query_frames

    @property
    def query_label(self) -> str:
        frame, row, column = self.query
        if frame == ANY:
            return f"mean over frames {self.query_frames[0]}–{self.query_frames[-1]}"
        return f"frame {frame}" if row == ANY else f"patch ({row}, {column}) of frame {frame}"

    @property
    def title(self) -> str:
        edited = f"; edited: {self.edits}" if self.edits else ""
        return f"Layer {self.layer}, head {self.head}, {self.pass_label}; query: {self.query_label}{edited}"


def places_of(cache: Mapping[str, Any]) -> list[Place]:
    """Every query of a cache, in its order; one that several blocks have is named once."""
    return list(dict.fromkeys(place for place, _, _ in _entries(_typed(cache))))


def open_map(
    cache: Mapping[str, Any],
    layer: int,
    head: int,
    step: int | None = None,
    query: Sequence[int] | None = None,
    quantity: str = "mass",
) -> VideoMap:
    """One map of a cache that load_cache returned; step and query None are the first that it holds.

    Mass is times the number of keys that the query sees: 1 is even. Logits of a place that lies in several
    keys are their mean, masses their sum. Raises CacheError for what the cache does not hold.
    """
    typed = _typed(cache)
    if quantity not in QUANTITIES:
        raise CacheError(f"quantity {quantity!r} is not one of {', '.join(QUANTITIES)}")
    block, row = _find_query(typed, query)
    n = _index("layer", layer, typed.layers)
    p = 0 if step is None else _index("pass", step, typed.pass_steps)
    h = _index("head", head, typed.heads)
    assert block.map_mass is not None and block.map_logits is not None
    mass = block.map_mass[n, p, h, row].float().numpy() / typed.frame_seq_length  # sums to 1
    stored = mass if quantity == "mass" else block.map_logits[n, p, h, row].float().numpy()
    frames, tokens = _keys(block, n, p)
    seen = ~np.isnan(stored) & (frames != NO_KEY)
    if block.attended is not None:
        seen &= block.attended[n, p, h].numpy()
    placed = seen & (frames >= 0)
    shape = typed.num_frames, typed.rows, typed.columns
    count, total = (np.zeros((shape[0], typed.frame_seq_length)) for _ in range(2))
    np.add.at(count, (frames[placed], tokens[placed]), 1)
    np.add.at(total, (frames[placed], tokens[placed]), stored[placed])
    values = total * seen.sum() if quantity == "mass" else total / np.maximum(count, 1)
    return VideoMap(
        np.where(count > 0, values, np.nan).astype(np.float32).reshape(shape),
        quantity,
        layer,
        head,
        pass_name(*typed.passes()[p]),
        _queries(block)[row],
        tuple(block.query_frames),
        bool(typed.passes()[p].is_clean_pass),
        int(seen.sum()),
        float(1 - mass[placed].sum()),
        typed.model,
        source_of(typed),
        edits_in_words(typed.interventions),
    )


def word_maps(
    cache: Mapping[str, Any], layer: int, head: int, step: int | None = None
) -> tuple[list[int], dict[str, np.ndarray]] | None:
    """Query frames, and where in them each word of the prompt is read: mass [frames, rows, columns] by word.

    Tokens of a word are summed (DAAM, arXiv 2210.04885); what is missing from 1 is on other words and on the
    padding. None where the cache has no words.
    """
    typed = _typed(cache)
    blocks = [block for block in typed.blocks if block.word_map is not None]
    if not blocks or typed.words is None:
        return None
    n, h = _index("layer", layer, typed.layers), _index("head", head, typed.heads)
    p = 0 if step is None else _index("pass", step, typed.pass_steps)
    words, place = words_of(typed.words)
    names = [f"{word} ({n})" if words.index(word) < n else word for n, word in enumerate(words)]
    frames = [frame for block in blocks for frame in block.query_frames]
    rows = [block.word_map[n, p, h].float().numpy() for block in blocks if block.word_map is not None]
    grids = np.concatenate(rows).reshape(-1, typed.rows, typed.columns, len(place))
    return frames, {name: grids[..., place == number].sum(-1) for number, name in enumerate(names)}


def _typed(cache: Mapping[str, Any]) -> MapsCache:
    if cache.get("format") != "maps":
        raise CacheError(f"a cache of format {cache.get('format')} has no maps; run: {MAKE}")
    return MapsCache.from_dict(cache)


MAKE = "python experiments/run_extraction_maps.py --query_patch 18,2,1"


def _queries(block: BlockMaps) -> list[Place]:
    return [] if block.queries is None else [(f, r, c) for f, r, c in block.queries.tolist()]


def _entries(cache: MapsCache) -> Iterator[tuple[Place, BlockMaps, int]]:
    for block in cache.blocks:
        for row, place in enumerate(_queries(block)):
            yield place, block, row


def _find_query(cache: MapsCache, query: Sequence[int] | None) -> tuple[BlockMaps, int]:
    """The block of a query, and its row there. A frame alone is that frame's mean."""
    there = list(_entries(cache))
    if not there:
        raise CacheError("this cache has word maps alone")
    wanted = there[0][0] if query is None else (*query, ANY, ANY)[:3]
    for place, block, row in reversed(there):  # the mean of a block: of the last one, which sees most
        if place == wanted:
            return block, row
    names = ", ".join(str(place) for place, _, _ in there[:8]) + (", ..." if len(there) > 8 else "")
    raise CacheError(f"query {tuple(wanted)} is not in this cache; it has {names}")


def _keys(block: BlockMaps, layer: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Frame and token of every key [Lk]."""
    assert block.key_frame is not None and block.key_token is not None
    return block.key_frame[layer, step].numpy(), block.key_token[layer, step].numpy()


def _index(name: str, wanted: int, there: Sequence[int]) -> int:
    if wanted not in there:
        raise CacheError(f"{name} {wanted} is not in this cache; it has {', '.join(map(str, there))}")
    return list(there).index(wanted)


# --- Which heads to show over a video: those whose edit changes most, or those whose map has the top peak
Head = tuple[int, int]  # layer, head


def heads_to_show(
    cache: Mapping[str, Any],
    wanted: Sequence[Sequence[int]] | str,
    causal_atlas: str | Path = "",
    step: int | None = None,
    query: Sequence[int] | None = None,
    count: int = 4,
) -> tuple[list[Head], str]:
    """Heads (layer, head) of a maps cache, and how they were chosen.

    wanted names them, or is "effect": those of the causal atlas with the largest direct effect. Where there
    is none, those that read a patch of the past most. Raises CacheError for heads that the cache lacks.
    """
    if not isinstance(wanted, str):
        chosen = [(int(layer), int(head)) for layer, head in wanted]
        for layer, head in chosen:
            open_map(cache, layer, head, step, query)
        return chosen, "heads as asked for"
    if wanted != "effect":
        raise CacheError(f'HEADS is "effect" or [[layer, head], ...], not {wanted!r}')
    there = [(layer, head) for layer in cache["layers"] for head in cache["heads"]]
    study = read_study(causal_atlas) if causal_atlas else None
    if study is not None and not study.reason:
        found = {
            (layer, head): study.effect[n, head]
            for n, layer in enumerate(study.layers)
            for head in range(study.effect.shape[1])
        }
        scores = [found.get(head, -np.inf) for head in there]
        said = "heads with the largest direct effect"
    else:
        scores = [_peak(cache, layer, head, step, query) for layer, head in there]
        said = "no causal atlas is there: heads that read one patch of the past most"
    order = sorted(range(len(there)), key=lambda n: -scores[n])
    return [there[n] for n in order[:count]], said


def _peak(
    cache: Mapping[str, Any], layer: int, head: int, step: int | None, query: Sequence[int] | None
) -> float:
    """The most that any patch of an earlier block gets."""
    seen = open_map(cache, layer, head, step, query)
    past = seen.values[: seen.query_frames[0]]
    return float(np.nanmax(past)) if np.isfinite(past).any() else -np.inf

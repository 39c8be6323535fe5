"""Attention at the places of the video: maps of what a query sees, and mass per prompt word."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.analysis import prompt_words
from experiments.analysis.stats import mean_without_nan, percent, signed
from experiments.caches import files, formats
from experiments.caches.titles import edits_in_words
from experiments.caches.view import Profiles, pass_name, short_source, source_of
from wan.errors import short_repr

UNITS = {"mass": "attention mass per token, 1 is even", "mean_logit": "logit q·k/√D"}

Place = tuple[int, int, int]  # frame, row, column; -1: all of them

# --- Cross-attention mass per word of the prompt


def word_mass(cache: Mapping, view: Profiles, layer: int) -> tuple[list[str], np.ndarray] | None:
    """Return words of the prompt and their mass [H, words] in a layer; None where there are none."""
    if "cross_mass" not in cache:
        return None
    p = list(cache.get("pass_steps", range(len(cache["pass_timesteps"])))).index(view.step)
    of_layer = cache["cross_mass"][view.layers.index(layer), p]
    tokens = of_layer[:, list(view.query_frames)].float().mean(1).numpy()
    names = cache.get("cross_tokens", [str(i) for i in range(tokens.shape[-1])])
    return prompt_words.mass_of_words(tokens, names)


@dataclass(frozen=True)
class VideoMap:
    """One map over the frames of a video, as plain arrays."""

    values: np.ndarray  # float32 [F, rows, columns], NaN where the query sees no key of that place
    quantity: str
    layer: int
    head: int
    pass_label: str
    query: Place
    query_frames: tuple[int, ...]  # of the block
    noise_frames: tuple[int, ...]  # of the block, unless the pass is the clean one
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
    def title(self) -> str:
        return f"Layer {self.layer}, head {self.head} {self.reading}"

    @property
    def reading(self) -> str:
        """Say which frame of earlier blocks the query reads, or prefers, most."""
        earlier = self.values[: self.query_frames[0]]
        if not np.isfinite(earlier).any():
            return "sees no earlier frame"
        if self.quantity == "mass":
            by_frame = np.nansum(earlier, (1, 2))
            frame = int(by_frame.argmax())
            return f"reads frame {frame} most of the past: {percent(by_frame[frame] / self.keys)} of its mass"
        means = mean_without_nan(earlier.reshape(len(earlier), -1))
        frame = int(np.nanargmax(means))
        return f"prefers frame {frame} of the past most, by a mean logit of {signed(means[frame])}"

    @property
    def about(self) -> str:
        """Return the line under a figure's title: pass, query, model, prompt and seed."""
        frame, row, column = self.query
        query = f"frame {frame}" if row == formats.ANY else f"patch ({row}, {column}) of frame {frame}"
        if frame == formats.ANY:
            query = f"mean over frames {self.query_frames[0]}–{self.query_frames[-1]}"
        edited = f"; edited: {self.edits}" if self.edits else ""
        return f"{self.pass_label}; query: {query}{edited}; {short_source(self.source)}"


def places_of(cache: Mapping) -> list[Place]:
    """List every query of a cache, in its order; one that several blocks have is named once."""
    return list(_queries(formats.MapsCache.from_dict(cache)))


def open_map(
    cache: Mapping,
    layer: int,
    head: int,
    step: int | None = None,
    query: Sequence[int] | None = None,
    quantity="mass",
) -> VideoMap:
    """Open one map; mass is times the keys that the query sees: 1 is even. CacheError for an absent one."""
    typed = formats.MapsCache.from_dict(cache)
    queries = _queries(typed)
    place: tuple[int, ...] | None = next(iter(queries), None)
    if query is not None:
        if len(query) > 3:
            raise files.CacheError(
                f"query {short_repr(query)} is not a frame, row and column, or a frame alone"
            )
        place = (*query, formats.ANY, formats.ANY)[:3]  # a frame alone is its mean
    # 1. The query's row of the block that holds it: [Lk] of a layer, pass and head
    number, n, p, h = _indices(typed, layer, step, head, ("query", place, queries))
    patch, (block, row) = list(queries.items())[number]
    assert block.map_mass is not None and block.map_logits is not None
    assert block.key_frame is not None and block.key_token is not None
    mass = block.map_mass[n, p, h, row].float().numpy() / typed.frame_seq_length  # sums to 1
    stored = mass if quantity == "mass" else block.map_logits[n, p, h, row].float().numpy()
    # 2. Which keys it saw, and which of them have a place in the video
    frames, tokens = block.key_frame[n, p].numpy(), block.key_token[n, p].numpy()  # [Lk]
    seen = ~np.isnan(stored) & (frames != formats.NO_KEY)
    if block.attended is not None:
        seen &= block.attended[n, p, h].numpy()
    placed = seen & (frames >= 0)
    # 3. Keys to places [F, S]: two slots may hold one token; times the keys seen, an even mass is 1
    count, total = (np.zeros((typed.num_frames, typed.frame_seq_length)) for _ in range(2))
    np.add.at(count, (frames[placed], tokens[placed]), 1)
    np.add.at(total, (frames[placed], tokens[placed]), stored[placed])
    values = total * seen.sum() if quantity == "mass" else total / np.maximum(count, 1)
    grid = np.where(count > 0, values, np.nan).astype(np.float32).reshape(-1, typed.rows, typed.columns)
    # 4. Its pass and block, for titles
    at, queries_of_block = typed.passes()[p], tuple(block.query_frames)
    return VideoMap(
        grid,
        quantity,
        layer,
        head,
        pass_name(*at),
        patch,
        queries_of_block,
        () if at.is_clean_pass else queries_of_block,
        int(seen.sum()),
        float(1 - mass[placed].sum()),
        typed.model,
        source_of(typed),
        edits_in_words(typed.interventions),
    )


def word_maps(
    cache: Mapping, layer: int, head: int, step: int | None = None
) -> tuple[list[int], dict[str, np.ndarray]] | None:
    """Return query frames and mass [frames, rows, columns] by word (arXiv 2210.04885); None without."""
    typed = formats.MapsCache.from_dict(cache)
    blocks = [block for block in typed.blocks if block.word_map is not None]
    if not blocks or typed.words is None:
        return None
    n, p, h = _indices(typed, layer, step, head)
    # 1. Maps of tokens, [frames, rows, columns, tokens].
    frames, rows = [], []
    for block in blocks:
        assert block.word_map is not None
        frames += block.query_frames
        rows.append(block.word_map[n, p, h].float().numpy())
    grids = np.concatenate(rows)
    grids = grids.reshape(-1, typed.rows, typed.columns, grids.shape[-1])
    # 2. The tokens of a word are summed; a word that comes twice has its number.
    words, word_of_token = prompt_words.words_of(typed.words)
    maps = {}
    for number, word in enumerate(words):
        name = word
        if words.index(word) < number:
            name = f"{word} ({number})"
        maps[name] = grids[..., word_of_token == number].sum(-1)
    return frames, maps


def _queries(cache: formats.MapsCache) -> dict[Place, tuple[formats.BlockMaps, int]]:
    """Return every query's block and its row there; a mean that several blocks have is the last one's."""
    return {
        (frame, row, column): (block, number)
        for block in cache.blocks
        for number, (frame, row, column) in enumerate(() if block.queries is None else block.queries.tolist())
    }


def _indices(
    cache: formats.MapsCache,
    layer: int,
    step: int | None,
    head: int,
    *axes_before: tuple[str, object, Collection],
) -> list[int]:
    """Return where more things, a layer, a pass and a head are; CacheError for one that is absent."""
    if step is None:
        step = cache.pass_steps[0]
    axes = [("layer", layer, cache.layers), ("pass", step, cache.pass_steps), ("head", head, cache.heads)]
    indices = []
    for name, number, numbers in (*axes_before, *axes):
        files.require_held(name, number, numbers)
        indices.append(list(numbers).index(number))
    return indices


def heads_to_show(
    cache: Mapping,
    wanted: Sequence[Sequence[int]] | str,
    effects: Mapping[int, np.ndarray] | None = None,
    step: int | None = None,
    query: Sequence[int] | None = None,
    count=4,
) -> tuple[list[tuple[int, int]], str]:
    """Choose heads (layer, head) as given, or of "effect" those of largest effect, layer -> [H], or past."""
    if not isinstance(wanted, str):
        return [(int(layer), int(head)) for layer, head in wanted], "heads as asked for"
    if wanted != "effect":
        raise files.CacheError(f'HEADS must be "effect" or a list of (layer, head), not {short_repr(wanted)}')
    heads = [(layer, head) for layer in cache["layers"] for head in cache["heads"]]
    scores = []
    if effects is not None:
        why = "heads with the largest direct effect"
        for layer, head in heads:
            score = -np.inf
            if layer in effects:
                score = float(effects[layer][head])
            scores.append(score)
    else:
        why = "no causal atlas is there: heads that read one patch of the past most"
        for layer, head in heads:
            seen = open_map(cache, layer, head, step, query)
            past = np.nan_to_num(seen.values[: seen.query_frames[0]])
            scores.append(float(past.max(initial=0)))
    order = sorted(range(len(heads)), key=lambda n: -scores[n])
    return [heads[n] for n in order[:count]], why

"""Which heads to show over a video: those whose edit changes most, or those whose map has the top peak."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.causal_reports import read_study
from experiments.analysis.video_maps import open_map
from experiments.caches.errors import CacheError

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

"""Which head is a published curve? Every head and pass of a cache against a digitised one. Pure functions.

Compared are context frames only, those of blocks before the queries': at a noisy pass the own block is noise,
in the cache as in the figure. Points that the figure cut off are left out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.analysis.panels import Agreement, HeadPanel
from experiments.analysis.published import Curve
from experiments.caches.view import Profiles


class Candidate(NamedTuple):
    """A head in a pass and how well it agrees with a curve."""

    r: float  # Pearson correlation over the compared frames; NaN for a head without any variation
    rms: float  # root mean square difference, in the unit of the curve
    step: int | None
    layer: int
    head: int


def pearson(profiles: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Correlation of each of profiles [..., n] with values [n]: cov / (std std), in float64; NaN where one is
    constant."""
    a, b = (
        x - x.mean(-1, keepdims=True)
        for x in (np.asarray(profiles, np.float64), np.asarray(values, np.float64))
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def rms_difference(profiles: np.ndarray, values: np.ndarray) -> np.ndarray:
    """sqrt(mean((profile - value)^2)) over the last axis of profiles [..., n] and values [n]."""
    return np.sqrt(((np.asarray(profiles, np.float64) - np.asarray(values, np.float64)) ** 2).mean(-1))


def compared_frames(view: Profiles, curve: Curve) -> list[int]:
    """Context frames of a view where the curve has a point that is not cut off."""
    return [f for f in view.context_frames if np.isfinite(curve.values[f]) and not curve.clipped[f]]


def rank_heads(views: Iterable[Profiles], curve: Curve) -> list[Candidate]:
    """All heads of all views (passes of a cache, with the curve's number of frames), the best correlated
    first."""
    found = []
    for view in views:
        frames = compared_frames(view, curve)
        profiles, values = view.profiles()[..., frames], curve.values[frames]  # [N, H, n], [n]
        r, rms = pearson(profiles, values), rms_difference(profiles, values)
        found += [
            Candidate(float(r[i, h]), float(rms[i, h]), view.step, layer, h)
            for i, layer in enumerate(view.layers)
            for h in range(view.num_heads)
        ]
    return sorted(found, key=lambda c: (np.isnan(c.r), -c.r))


def place(
    ranking: Sequence[Candidate], step: int | None, layer: int, head: int
) -> tuple[int, Candidate] | None:
    """Rank of a head, 1 the best, and what was found for it; None where it is not among them. Ties share a
    rank."""
    for candidate in ranking:
        if (candidate.step, candidate.layer, candidate.head) == (step, layer, head):
            better = sum(other.r > candidate.r for other in ranking)
            return (1 + better if np.isfinite(candidate.r) else len(ranking)), candidate
    return None


def add_reference(
    panels: Iterable[HeadPanel], view: Profiles, curves: Mapping[str, Curve]
) -> list[HeadPanel]:
    """Panels with the published curve of their label, and how well the two agree over the context frames."""
    compared = []
    for panel in panels:
        if (curve := curves.get(panel.label)) is not None:
            frames = compared_frames(view, curve)
            pair = panel.profile[frames], curve.values[frames]
            agreement = Agreement(float(pearson(*pair)), float(rms_difference(*pair)), tuple(frames))
            panel = panel._replace(reference=curve.values, clipped=curve.clipped, agreement=agreement)
        compared.append(panel)
    return compared


class Placed(NamedTuple):
    """A head, and where it is in a ranking: None where the views do not have it."""

    layer: int
    head: int
    rank: int | None
    found: Candidate | None


class CurveMatch(NamedTuple):
    """What a ranking says about one curve."""

    label: str
    num_frames: int  # compared
    num_heads: int  # over all passes
    num_passes: int
    shown: list[Placed]  # the heads of the curve's name
    one_based: list[
        Placed | None
    ]  # what each of them would be if its name counted from 1; None for a 0 in it
    best: list[Placed]  # the first three


def match_curves(
    views: Sequence[Profiles],
    heads: Iterable[tuple[int, int, str]],
    curves: Mapping[str, Curve],
    step: int | None,
) -> list[CurveMatch]:
    """For every curve: where the heads (layer, head, label) of its name rank in a pass among all heads of all
    views."""
    matches = []
    for label, curve in curves.items():
        ranking = rank_heads(views, curve)
        named = [(layer, head) for layer, head, name in heads if name == label]
        matches.append(
            CurveMatch(
                label,
                len(compared_frames(views[0], curve)),
                len(ranking),
                len(views),
                [_placed(ranking, step, layer, head) for layer, head in named],
                [_placed(ranking, step, n - 1, h - 1) if min(n, h) > 0 else None for n, h in named],
                [_placed(ranking, best.step, best.layer, best.head) for best in ranking[:3]],
            )
        )
    return matches


def _placed(ranking: Sequence[Candidate], step: int | None, layer: int, head: int) -> Placed:
    return Placed(layer, head, *(place(ranking, step, layer, head) or (None, None)))

"""Rank every head and pass of a cache by its agreement with a digitised curve.

Compared are context frames only: the own block is noise. Points that the figure cut off are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
    """Correlate each of profiles [..., n] with values [n] in float64; NaN where one is constant."""
    arrays = (np.asarray(profiles, np.float64), np.asarray(values, np.float64))
    a, b = (x - x.mean(-1, keepdims=True) for x in arrays)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def rms_difference(profiles: np.ndarray, values: np.ndarray) -> np.ndarray:
    """sqrt(mean((profile - value)^2)) over the last axis of profiles [..., n] and values [n]."""
    return np.sqrt(((np.asarray(profiles, np.float64) - np.asarray(values, np.float64)) ** 2).mean(-1))


def compared_frames(view: Profiles, curve: Curve) -> list[int]:
    """Context frames of a view where the curve has a point that is not cut off."""
    return [f for f in view.context_frames if np.isfinite(curve.values[f]) and not curve.clipped[f]]


def rank_heads(views: Iterable[Profiles], curve: Curve) -> list[Candidate]:
    """Rank all heads of all views (passes of a cache, with the curve's frames), the best r first."""
    found = []
    for view in views:
        frames = compared_frames(view, curve)
        profiles, values = view.profiles()[..., frames], curve.values[frames]  # [N, H, n], [n]
        r, rms = pearson(profiles, values), rms_difference(profiles, values)
        for (i, head), each in np.ndenumerate(r):
            found.append(Candidate(float(each), float(rms[i, head]), view.step, view.layers[i], head))
    return sorted(found, key=lambda c: (np.isnan(c.r), -c.r))


def rank_of(
    ranking: Sequence[Candidate], step: int | None, layer: int, head: int
) -> tuple[int, Candidate] | None:
    """Return a head's rank, 1 the best, ties alike, and its agreement; None where it is not there."""
    for candidate in ranking:
        if (candidate.step, candidate.layer, candidate.head) == (step, layer, head):
            better = sum(other.r > candidate.r for other in ranking)
            return (1 + better if np.isfinite(candidate.r) else len(ranking)), candidate
    return None


def add_reference(
    panels: Iterable[HeadPanel], view: Profiles, curves: Mapping[str, Curve]
) -> list[HeadPanel]:
    """Return panels with the published curve of their label, and how well the two agree."""
    compared = []
    for panel in panels:
        if (curve := curves.get(panel.label)) is not None:
            frames = compared_frames(view, curve)
            pair = panel.profile[frames], curve.values[frames]
            agreement = Agreement(float(pearson(*pair)), float(rms_difference(*pair)), tuple(frames))
            panel = panel._replace(reference=curve.values, clipped=curve.clipped, agreement=agreement)
        compared.append(panel)
    return compared


def match_rows(
    views: Sequence[Profiles], heads: Iterable[tuple], curves: Mapping[str, Curve], step: int | None
) -> list[dict[str, Any]]:
    """Rank all heads of all views for every curve: a row for the heads of its name, and for the first three.

    heads are (layer, head, label). A third kind of row is the head that a name would be if it counted from 1.
    r and rank are absent for a head that the views lack.
    """
    rows = []
    for label, curve in curves.items():
        ranking = rank_heads(views, curve)
        looked_up = [("shown", step, layer, head) for layer, head, name in heads if name == label]
        looked_up += [("if counted from 1", step, n - 1, h - 1) for _, _, n, h in looked_up if min(n, h) > 0]
        best = enumerate(ranking[:3], 1)
        looked_up += [(f"best {i}", one.step, one.layer, one.head) for i, one in best]
        for what, at, layer, head in looked_up:
            row = {"curve": label, "head": what, "layer": layer, "number": head, "pass": at}
            if (found := rank_of(ranking, at, layer, head)) is not None:
                row |= {"r": found[1].r, "RMS": found[1].rms, "rank": found[0]}
            frames = len(compared_frames(views[0], curve))
            rows.append(row | {"of heads": len(ranking), "context frames": frames})
    return rows

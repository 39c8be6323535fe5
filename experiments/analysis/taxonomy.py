"""Kinds of heads by two published rules: anchor, wave or veil by signs, static or dynamic by mass.

Labels are coded as in the published tables (Pyramid Forcing, Forcing-KV); ABSENT where a cache does not
hold what the rule needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis import first_frame, panels, stats
from experiments.caches.files import Record
from experiments.caches.view import Profiles
from wan import errors, files

ANCHOR, WAVE, VEIL, STATIC, DYNAMIC, ABSENT = 1, -1, 2, 1, 0, -9
KINDS: Mapping[int, str] = {ANCHOR: "anchor", WAVE: "wave", VEIL: "veil"}
LOCALITY: Mapping[int, str] = {STATIC: "static", DYNAMIC: "dynamic"}


@dataclass(frozen=True)
class Thresholds:
    """The defaults agree with the published labels on the published data; see configs/taxonomy.yaml."""

    anchor_min: files.Share = 0.84
    veil_max: files.Share = 0.12
    static_min: files.Share = 0.80
    skip_frames: files.Frames = 3
    near_frames: files.Count = 4

    def __post_init__(self):
        errors.check_fields(self)
        if not 0 <= self.veil_max < self.anchor_min <= 1:
            problem = f"veil_max {self.veil_max} must be below anchor_min {self.anchor_min}"
            raise errors.ConfigError(f"{problem}, both shares of 1")


def load_thresholds(path: str | Path) -> Thresholds:
    """Read thresholds from a YAML file. ConfigError for a missing file, unknown key or wrong value."""
    with errors.in_context(path):
        return errors.from_values(Thresholds, files.read_yaml(path))


def kinds(rate: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Label ANCHOR, WAVE or VEIL by rates of positive context logits (Pyramid Forcing); ABSENT for NaN."""
    veil_or_wave = np.where(rate <= thresholds.veil_max, VEIL, WAVE)
    return np.where(np.isnan(rate), ABSENT, np.where(rate >= thresholds.anchor_min, ANCHOR, veil_or_wave))


def head_kinds(logits: Profiles | None, thresholds: Thresholds) -> np.ndarray | None:
    """Label every head of a view [N, H]; None where it does not say."""
    if logits is None or not logits.context_frames:
        return None
    return kinds(first_frame.context_sign_rate(logits), thresholds)


def local_mass_share(mass: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Share of mass on frames [skip_frames:] on the last near_frames (Forcing-KV), [..., F] -> [...]."""
    # The first frames are a sink of their own (Forcing-KV), so they count neither way
    skip, near = thresholds.skip_frames, thresholds.near_frames
    A = np.asarray(mass, np.float64)
    if A.shape[-1] <= skip + near:
        return np.full(A.shape[:-1], np.nan)
    return A[..., -near:].sum(-1) / A[..., skip:].sum(-1)


def locality(share: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Label STATIC or DYNAMIC by local_mass_share; ABSENT for NaN."""
    return np.where(np.isnan(share), ABSENT, np.where(share >= thresholds.static_min, STATIC, DYNAMIC))


# --- Our labels beside published ones


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Share of heads with the same label in both; NaN where no head has a label in both."""
    both = (a != ABSENT) & (b != ABSENT)
    return float((a == b)[both].mean()) if both.any() else float("nan")


def label_maps(
    logits: Profiles | None,
    mass: Profiles | None,
    thresholds: Thresholds,
    published: tuple[np.ndarray, np.ndarray] | None,
) -> list[panels.LabelMap]:
    """Return our labels, each beside the published ones of the same model; differing heads are marked."""
    published_kinds, published_locality = published or (None, None)
    # 1. Anchor, wave or veil, by the signs of logits
    reason, queries = first_frame.NO_LOGITS, ""
    if logits is not None:
        reason = first_frame.NO_CONTEXT
        if logits.context_frames and logits.frame_matrices() is not None:
            queries = panels.ALL_QUERIES
    labels, title = head_kinds(logits, thresholds), " / ".join(KINDS.values())
    by_signs = panels.LabelMap(title, KINDS, labels, reason, queries=queries)
    # 2. Static or dynamic, by where the mass lies
    labels, reason = None, first_frame.NO_MASS
    if mass is not None:
        labels, reason = locality(local_mass_share(mass.profiles(), thresholds), thresholds), "too few frames"
        if (labels == ABSENT).all():
            labels = None
    by_mass = panels.LabelMap(" / ".join(LOCALITY.values()), LOCALITY, labels, reason)
    return [
        *_beside_published(by_signs, published_kinds, "Pyramid Forcing"),
        *_beside_published(by_mass, published_locality, "Forcing-KV"),
    ]


def _beside_published(
    ours: panels.LabelMap, labels: np.ndarray | None, source: str
) -> tuple[panels.LabelMap, panels.LabelMap]:
    """Return our map with the heads that differ marked, and the map of published labels."""
    other_model = "" if labels is not None else "published for another model"
    published = panels.LabelMap(f"published, {source}", ours.names, labels, other_model)
    our_labels = ours.labels
    if our_labels is None:
        return ours, published
    ours = ours._replace(missing_reason="")
    if labels is not None:
        title = f"{ours.title}: {stats.percent(agreement(our_labels, labels))} as published"
        ours = ours._replace(title=title, differs=our_labels != labels)
    return ours, published


def label_rows(maps: Sequence[panels.LabelMap]) -> list[dict[str, Any]]:
    """A row per label of label_maps: how many heads have it, and how many of them are published as which."""
    rows = []
    for ours, published in zip(maps[::2], maps[1::2], strict=True):
        reasons = [reason for reason in (ours.missing_reason, published.missing_reason) if reason]
        for label, name in ours.names.items():
            row: Record = {"label": name, "heads": None}
            if ours.labels is not None:
                heads = ours.labels == label
                row["heads"] = heads.sum()
                if published.labels is not None:
                    for other, other_name in ours.names.items():
                        row[f"published {other_name}"] = (heads & (published.labels == other)).sum()
            rows.append(row | {"absent": "; ".join(reasons)})
    return rows

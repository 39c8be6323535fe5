"""Kinds of heads: rules by hand, thresholds by brute force, and the published labels."""

import numpy as np
import pytest
from conftest import ROOT
from helpers import synthetic_caches

from experiments.analysis import published, taxonomy
from experiments.analysis.taxonomy import ABSENT, ANCHOR, DYNAMIC, STATIC, VEIL, WAVE, Thresholds
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from wan.errors import ConfigError

RULE = taxonomy.load_thresholds(ROOT / "configs/taxonomy.yaml")


def test_labels_by_hand():
    rate = np.array([1, 0.84, 0.839, 0.5, 0.121, 0.12, 0, np.nan])
    assert taxonomy.kinds(rate, RULE).tolist() == [ANCHOR, ANCHOR, WAVE, WAVE, WAVE, VEIL, VEIL, ABSENT]
    mass = np.full((3, 10), np.nan)
    mass[0], mass[1, 3:] = [0.3, 0, 0] + [0.1] * 7, [0, 1, 0, 1, 1, 1, 1]
    share = taxonomy.local_mass_share(mass, RULE)
    np.testing.assert_allclose(share, [4 / 7, 0.8, np.nan])
    assert taxonomy.locality(share, RULE).tolist() == [DYNAMIC, STATIC, ABSENT]
    assert np.isnan(taxonomy.local_mass_share(mass[:, :7], RULE)).all()  # frames [3:] are the last 4


def test_thresholds_that_are_chosen_on_labels_give_them_back():
    labels = np.random.default_rng(0).choice([ANCHOR, WAVE, VEIL], (8, 5))
    rate = np.where(labels == ANCHOR, 0.7, np.where(labels == WAVE, 0.5, 0.2))
    (row,) = taxonomy.threshold_transfer({"a": rate}, labels)
    assert 0.5 < row["anchor from"] <= 0.7 and 0.2 <= row["veil to"] < 0.5 and row["on a"] == 1
    (found,) = taxonomy.label_agreements({"a": rate}, Thresholds(0.6, 0.3), labels)
    assert found[:4] == ("a", 1, 1, 1) and 1 / 3 < found.majority < found.single < 1


def test_thresholds_are_checked(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("anchor_min: 0.9\n")
    assert Thresholds() == RULE and taxonomy.load_thresholds(path) == Thresholds(anchor_min=0.9)
    for text in ("anchor: 1\n", "veil_max: 0.9\n", "veil_max: much\n"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            taxonomy.load_thresholds(path)
    with pytest.raises(ConfigError, match="not found"):
        taxonomy.load_thresholds(tmp_path / "none.yaml")


def test_our_labels_beside_the_published_ones():
    view = open_profiles(load_cache(ROOT / published.FOLDER / "self_forcing_dmd_castle_21f.pt"))
    labels = published.labels_for(view, ROOT / published.FOLDER)
    maps = ours, theirs, reach, static = taxonomy.label_maps(view, None, RULE, labels)
    assert reach.labels is None and reach.missing_reason == "no mass in this cache"
    assert static.labels.sum() == labels[1].sum() and ours.queries == "all query frames"
    assert ours.differs.sum() == (ours.labels != theirs.labels).sum() and 0 < ours.differs.sum() <= 43
    rows = taxonomy.label_rows(maps)
    counts = [rows[0][f"published {name}"] for name in ("anchor", "wave", "veil")]
    assert sum(counts) == rows[0]["heads"] == (ours.labels == ANCHOR).sum()
    assert published.labels_for(open_profiles(synthetic_caches.atlas()), ROOT / published.FOLDER) is None
    assert len(published.views_like(view, ROOT / published.FOLDER)) == 3
    assert taxonomy.agreements([ours.labels, theirs.labels])[0, 1] >= 0.88

"""Kinds of heads: rules by hand, thresholds by brute force, and the published labels."""

import numpy as np
import pytest
from conftest import ROOT
from helpers import synthetic_caches

from experiments.analysis import published
from experiments.analysis import taxonomy as head_taxonomy
from experiments.analysis.taxonomy import ABSENT, ANCHOR, DYNAMIC, STATIC, VEIL, WAVE, Thresholds
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from wan.errors import ConfigError

LABELS = published.read_labels(ROOT / published.FOLDER / published.HEAD_LABELS_CSV)
RULE = head_taxonomy.load_thresholds(ROOT / "configs/taxonomy.yaml")


def rates(name, F):
    return head_taxonomy.context_sign_rate(
        open_profiles(load_cache(ROOT / published.FOLDER / f"self_forcing_dmd_{name}_{F}f.pt"))
    )


def test_labels_by_hand():
    rate = np.array([1, 0.84, 0.839, 0.5, 0.121, 0.12, 0, np.nan])
    assert head_taxonomy.kinds(rate, RULE).tolist() == [ANCHOR, ANCHOR, WAVE, WAVE, WAVE, VEIL, VEIL, ABSENT]
    mass = np.array(
        [
            [0.3, 0, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
            [0, 0.5, 0, 0, 1 / 16, 0, 1 / 16, 1 / 16, 1 / 16, 1 / 16],
            [np.nan] * 10,
        ]
    )
    share = head_taxonomy.local_mass_share(mass, RULE)
    np.testing.assert_allclose(share, [4 / 7, 0.8, np.nan])
    assert head_taxonomy.locality(share, RULE).tolist() == [DYNAMIC, STATIC, ABSENT]
    assert np.isnan(
        head_taxonomy.local_mass_share(mass[:, :7], RULE)
    ).all()  # frames [3:] are the last 4: nothing to compare


@pytest.mark.parametrize("blocks", [[3, 3, 3], [1, 3, 3], [2, 2, 2, 2]])
def test_sign_rate_counts_context_cells(blocks):
    F = sum(blocks)
    cache = synthetic_caches.atlas(F=F, blocks=blocks, curve=False)
    block = np.repeat(np.arange(len(blocks)), blocks)
    rate = head_taxonomy.context_sign_rate(open_profiles(cache, step=4))
    for i in range(3):
        for h in range(3):
            cells = [
                float(cache["frame_logits"][i, 1, h, q, k]) > 0
                for q in range(F)
                for k in range(F)
                if block[k] < block[q]
            ]
            assert rate[i, h] == pytest.approx(sum(cells) / len(cells))


def test_sign_rate_without_a_matrix_or_logits():
    cache = synthetic_caches.figure4(granularity="key")
    view = open_profiles(cache)
    expected = (view.profiles()[..., :18] > 0).mean(-1)
    np.testing.assert_allclose(head_taxonomy.context_sign_rate(view), expected)
    assert np.isnan(head_taxonomy.context_sign_rate(open_profiles(cache, quantity="mass"))).all()


def test_choosing_thresholds_is_the_best_there_is():
    rng = np.random.default_rng(0)
    for _ in range(5):
        labels = rng.choice([ANCHOR, WAVE, VEIL], 40)
        centre = np.where(labels == ANCHOR, 0.8, np.where(labels == WAVE, 0.5, 0.2))
        rate = np.round(np.clip(centre + rng.normal(0, 0.2, 40), 0, 1), 2)
        chosen = head_taxonomy.choose_thresholds(rate, labels)
        found = head_taxonomy.agreement(head_taxonomy.kinds(rate, chosen), labels)
        grid = np.linspace(-0.005, 1.005, 102)
        best = max(
            (np.where(rate >= a, ANCHOR, np.where(rate <= v, VEIL, WAVE)) == labels).mean()
            for a in grid
            for v in grid
            if v < a
        )
        assert found == pytest.approx(best)


@pytest.mark.parametrize(("chosen_on", "reported_on"), [("eagle", "castle"), ("castle", "eagle")])
def test_published_labels_by_thresholds_from_the_other_prompt(chosen_on, reported_on):
    chosen = head_taxonomy.choose_thresholds(rates(chosen_on, 21), LABELS)
    assert head_taxonomy.agreement(head_taxonomy.kinds(rates(reported_on, 21), chosen), LABELS) >= 0.88


@pytest.mark.parametrize("name", ["eagle", "castle"])
@pytest.mark.parametrize("F", [21, 72])
def test_published_labels_by_the_config(name, F):
    ours = head_taxonomy.kinds(rates(name, F), RULE)
    assert head_taxonomy.agreement(ours, LABELS) >= 0.88
    table = head_taxonomy.confusion(ours, LABELS, list(head_taxonomy.KINDS))
    assert table.sum() == 360 and table.trace() / 360 == pytest.approx(head_taxonomy.agreement(ours, LABELS))
    assert table.sum(0).tolist() == [172, 156, 32]  # theirs, by columns


def test_agreement_leaves_absent_heads_out():
    a, b = np.array([[1, 2, ABSENT, -1]]), np.array([[1, -1, 1, ABSENT]])
    assert head_taxonomy.agreement(a, b) == 0.5
    assert np.isnan(head_taxonomy.agreement(a, np.full((1, 4), ABSENT)))


def test_thresholds_are_checked(tmp_path):
    assert Thresholds() == RULE  # the defaults are the config's
    (tmp_path / "t.yaml").write_text("anchor_min: 0.9\n")
    assert head_taxonomy.load_thresholds(tmp_path / "t.yaml") == Thresholds(anchor_min=0.9)
    for text, message in (
        ("anchor: 1\n", "known keys: anchor_min"),
        ("veil_max: 0.9\n", "below anchor_min"),
        ("veil_max: much\n", "known keys"),
    ):
        (tmp_path / "t.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            head_taxonomy.load_thresholds(tmp_path / "t.yaml")
    with pytest.raises(ConfigError, match="not found"):
        head_taxonomy.load_thresholds(tmp_path / "none.yaml")

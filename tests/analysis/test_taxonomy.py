"""Kinds of heads, heads over sweeps, and published data and curves beside ours."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches

from experiments.analysis import published, results, sweeps, taxonomy
from experiments.analysis.first_frame import effects_of, first_frame_effect
from experiments.analysis.measures import head_statistics
from experiments.analysis.panels import HeadMap
from experiments.analysis.published import Curve, compared_frames, match_rows, rank_heads
from experiments.analysis.taxonomy import ABSENT, ANCHOR, DYNAMIC, STATIC, VEIL, WAVE, Thresholds
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_passes, open_profiles
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


def test_thresholds_are_checked(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("anchor_min: 0.9\n")
    assert Thresholds() == RULE and taxonomy.load_thresholds(path) == Thresholds(anchor_min=0.9)
    wrong = (
        "near_frames: 0",
        "near_frames: yes",
        "skip_frames: 1e9",
        "static_min: .nan",
        "anchor_min: '0.9'",
    )
    for text in ("anchor: 1\n", "veil_max: 0.9\n", "veil_max: much\n", *wrong):
        path.write_text(text)
        with pytest.raises(ConfigError):
            taxonomy.load_thresholds(path)
    with pytest.raises(ConfigError, match="No such file"):
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
    assert taxonomy.agreement(ours.labels, theirs.labels) >= 0.88


def test_mean_spread_and_order():
    values = np.array([[[1.0, 2.0], [3.0, -4.0]], [[3.0, 2.0], [5.0, -8.0]]])  # two atlases, 2 x 2 heads
    mean, spread, ratio = (one.values for one in sweeps.sweep_maps({"effect": values}))
    np.testing.assert_allclose(mean, [[2, 2], [4, -6]])
    np.testing.assert_allclose(spread, np.sqrt(2) * np.array([[1, 0], [1, 2]]))
    np.testing.assert_allclose(ratio, np.log10([[2**0.5, np.nan], [8**0.5, 3 / 2**0.5]]))
    (row,) = sweeps.sweep_rows({"effect": np.stack([values[0], -values[0]])})
    assert (row["|mean| above spread"], row["pairs"]) == (0, 1) and row["least"] == pytest.approx(-1)


def test_the_published_atlases_keep_the_order_of_heads_and_others_are_no_sweep(tmp_path):
    views, note = sweeps.open_sweep(tmp_path / "none", ROOT / "cache/published")
    effect = sweeps.measures_of(views)["effect"]
    assert "published" in note and sweeps.rank_correlations(effect)[0, 1] > 0.8
    save_cache(tmp_path / "a.pt", synthetic_caches.atlas(), overwrite=True)
    with pytest.raises(CacheError, match="sweep"):
        sweeps.open_sweep(tmp_path, tmp_path)
    edits = {"interventions": {"edits": [], "words": "x", "hash": "0" * 16}}
    others = ({"weights_sha256": "1" * 64}, {"pass_timesteps": [1000.0, 3.0]}, edits)
    for other in (*others, {"config": {"cache_policy": {"name": "window"}}}):
        save_cache(tmp_path / "b.pt", synthetic_caches.atlas() | other, overwrite=True)
        with pytest.raises(CacheError, match="a sweep takes atlases of one model and schedule"):
            sweeps.open_sweep(tmp_path, tmp_path)
    for name in ("a.pt", "b.pt"):  # a copy is no second run
        save_cache(tmp_path / name, synthetic_caches.atlas() | {"fingerprint": "f" * 32}, overwrite=True)
    with pytest.raises(CacheError, match="a sweep takes every run once"):
        sweeps.open_sweep(tmp_path, tmp_path)
    save_cache(tmp_path / "b.pt", synthetic_caches.atlas(H=2), overwrite=True)
    with pytest.raises(CacheError, match="sweep"):
        sweeps.open_sweep(tmp_path, tmp_path)


def view(change=None):
    cache = synthetic_caches.atlas(F=9, blocks=[3, 3, 3], curve=False)
    if change is not None:
        cache["frame_logits"] = change(cache["frame_logits"].clone())
    return open_profiles(cache, 0, "mean_logit")


def test_a_move_is_its_root_mean_square_and_other_kinds_are_marked():
    """One context cell of a row of three moves by 3: without the row's mean it is 2, −1, −1."""

    def change(logits):
        logits[0, 0, 1, 3:6, 1] += 3.0  # the second block's rows, key frame 1
        return logits

    expected = np.zeros((3, 3))
    expected[0, 1] = np.sqrt(3 * (4 + 1 + 1) / (3 * 3 + 3 * 6))  # over the 27 context cells
    np.testing.assert_allclose(sweeps.moved(view(), view(change)), expected, atol=1e-6)
    views = {"causal": view(), "flipped": view(lambda logits: -logits)}
    effects = effects_of(views)
    np.testing.assert_allclose(effects["causal"], -effects["flipped"])
    kinds = sweeps.kind_maps(views, Thresholds(anchor_min=0.6, veil_max=0.4), "causal")
    assert kinds[0].differs is None and kinds[1].differs.any()
    far = sweeps.moved(views["causal"], views["flipped"])
    distances = [HeadMap("flipped", "flipped", "logits", "sequential", far)]
    rows = sweeps.model_rows(effects, kinds, distances)
    assert "moved by" not in rows[0] and rows[1]["moved by"] == pytest.approx(distances[0].values.mean())
    assert sum(rows[0][kind] for kind in ("anchor", "wave", "veil")) == rows[0]["heads"] == 9


CSV = ROOT / published.FOLDER / published.FIGURE4_CSV
REAL = {"model": published.FIGURE4_MODEL}


def test_a_planted_head_is_found_whatever_noise_and_clipped_points_are():
    """A three-layer atlas of noise with a curve in one head of one pass, rescaled: r is 1, the RMS is not."""
    cache, values = synthetic_caches.atlas(layers=(0, 2, 5), curve=False), np.sin(np.arange(9.0))
    cache["frame_logits"][1, 1, 1, 6:] = torch.from_numpy(2 * values + 1).float()
    views, spoiled, clipped = open_passes(cache, open_profiles(cache)), values.copy(), np.arange(9) == 2
    spoiled[[2, 4, 6, 7, 8]] = 50, np.nan, -50, 70, 30  # cut off, absent, and the own block
    curve = Curve(spoiled, clipped)
    assert compared_frames(views[0], curve) == [0, 1, 3, 5]
    ranking = rank_heads(views, curve)
    best = {"layer": 2, "number": 1, "pass": 4, "rank": 1, "r": pytest.approx(1)}
    best["RMS"] = pytest.approx(np.sqrt(((values[[0, 1, 3, 5]] + 1) ** 2).mean()), rel=1e-6)
    assert len(ranking) == 2 * 3 * 3 and ranking[0] == best
    rows = match_rows(views, [(2, 1, "c"), (3, 1, "c")], {"c": curve}, 4)
    assert rows[0]["rank"] == 1 and "rank" not in rows[1] and rows[-1]["rank"] == 3
    assert rank_heads(views, Curve(spoiled, clipped & False))[0]["r"] < 0.99


def test_what_cannot_be_compared_says_why():
    for cache, quantity, path in (
        (synthetic_caches.atlas(F=21), None, CSV),  # of another model
        (synthetic_caches.atlas() | REAL, None, CSV),  # of other frames
        (synthetic_caches.atlas(F=21) | REAL, "mass", CSV),
        (synthetic_caches.atlas(F=21, blocks=[21]) | REAL, None, CSV),  # its queries see no earlier block
        (synthetic_caches.atlas(), None, None),
        (synthetic_caches.atlas(), None, "nowhere.csv"),
    ):
        view = open_profiles(cache, quantity=quantity)
        curves, why = published.curves_for(view, path, published.FIGURE4_MODEL)
        assert not curves and why.startswith("Not compared")


def test_other_curves(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("key_frame,mine\n9,0.4\n0,5.1\n3,\n")  # some frames, as in the README
    (curve,) = published.read_curves(path, 21).values()
    assert len(curve.values) == 21 and np.flatnonzero(np.isfinite(curve.values)).tolist() == [0, 9]
    wrong = ("frame,m\n0,1\n", "key_frame,m\n1,2\n1,1\n", "key_frame,m\n21,1\n", "", "key_frame,m\n0,x")
    wrong += ("key_frame,m\n0,inf", "key_frame,m\n0,1_0", "key_frame,m,m\n0,1,2", "key_frame\n0")
    wrong += ("key_frame,m,clipped\n0,1,n", "key_frame,m\n0,1,2", "key_frame,m,n\n0,1")
    for text in wrong:
        path.write_text(text)
        with pytest.raises(CacheError, match=r"a\.csv: a table of curves with a column key_frame cannot"):
            published.read_curves(path, 21)
    with pytest.raises(CacheError, match=r"c\.csv"):
        published.read_curves(tmp_path / "c.csv")
    for text in ("1,2\n-1\n", "1,x\n", "", "1,5\n"):
        path.write_text(text)
        with pytest.raises(CacheError, match=r"a\.csv: labels of heads cannot be read"):
            published.read_labels(path, (1, -1, 2))
    for text in ("{}", '{"policies": 3}', '{"a": 1, "a": 2}'):
        path.write_text(text)
        with pytest.raises(CacheError, match=r"a\.csv.* cannot be read: "):
            results.LongRollouts.open(path)


def test_heads_worth_a_look():
    own = open_profiles(synthetic_caches.atlas(F=12))
    effect = first_frame_effect(own.frame_matrices(), own.block_sizes).effect
    layer, head = np.unravel_index(effect.argmax(), effect.shape)
    assert published.heads_of(own, "auto")[0] == (own.layers[layer], head, f"L{own.layers[layer]}H{head}")
    assert published.heads_of(own, [[1, 2, "x"]]) == ((1, 2, "x"),)
    masses = open_profiles(synthetic_caches.atlas(F=12), quantity="mass")  # without matrices of logits
    layer, head = np.unravel_index(head_statistics(masses.profiles()).delta.argmax(), effect.shape)
    assert published.heads_of(masses, "auto")[0][:2] == (own.layers[layer], head)
    with pytest.raises(CacheError, match='HEADS must be "auto"'):
        published.heads_of(own, "all")

"""Statistics against pandas and textbook formulas; drift of videos that were made to drift in one way."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from helpers import synthetic_caches
from hypothesis import given, settings, strategies

from experiments.analysis import drift, effects, first_frame, measures, rope_waves, stats, sweeps, video_maps
from experiments.caches.files import CacheError
from wan.errors import ConfigError


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@settings(deadline=None)  # the first call imports scipy.stats
@given(strategies.integers(0, 1000), strategies.sampled_from([9, 0]))
def test_spearman_is_pandas_own(seed, decimals):
    x, y = draw(40, seed=seed).round(decimals), draw(40, seed=seed + 1).round(decimals)
    expected = pd.DataFrame({"x": x, "y": y}).corr(method="spearman").loc["x", "y"]
    assert stats.spearman(np.append(x, np.nan), np.append(y, 9.0)) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(stats.spearman(x, np.ones(40))) and np.isnan(stats.spearman(x[:2], y[:2]))
    assert np.isnan(stats.partial_spearman(x, y, (x,)))


def test_partial_spearman_is_that_of_the_inverse_of_the_rank_correlations_and_pearson_is_by_rows():
    a, b = draw(2, 3, 12)
    np.testing.assert_allclose(stats.pearson(a, b), np.diag(np.corrcoef(a, b)[:3, 3:]), atol=1e-9)
    np.testing.assert_allclose(stats.rms_difference(a, b), np.linalg.norm(a - b, axis=1) / np.sqrt(12))
    assert np.isnan(stats.pearson(np.ones(12), b)).all()
    z, w = draw(60), draw(60, seed=1)
    x, y = z + 0.3 * draw(60, seed=2), -z + w + 0.5 * draw(60, seed=3)
    precision = np.linalg.inv(np.corrcoef([pd.Series(v).rank() for v in (x, y, z, w)]))
    expected = -precision[0, 1] / np.sqrt(precision[0, 0] * precision[1, 1])
    assert stats.partial_spearman(x, y, (z, w)) == pytest.approx(expected, abs=1e-10)


# What is not known, or does not vary, and the numbers that rounding and scipy made of it.
MISSING = strategies.lists(strategies.floats(-9, 9), min_size=2, max_size=9).flatmap(
    lambda some: strategies.tuples(
        strategies.just(some), strategies.integers(0, len(some)), strategies.sampled_from([np.nan, np.inf])
    )
)


@settings(deadline=None, max_examples=40)
@given(MISSING)
def test_missing_is_never_a_number(case):
    some, place, missing = case
    values = np.insert(some, place, missing)
    intervals = [
        stats.bootstrap(values),
        stats.bootstrap([]),
    ]
    hidden = np.ma.masked_array([*some, 99.0], [0] * len(some) + [1])  # or null in a JSON
    intervals += [stats.bootstrap(hidden), stats.bootstrap([*some, None])]
    assert np.isnan([stats.sign_flip_p(values), stats.pearson(values, np.arange(len(values)))]).all()
    assert np.isnan(intervals).all()
    adjusted = stats.holm([0.01, np.nan, 0.2])  # of two comparisons
    assert adjusted[[0, 2]] == pytest.approx([0.02, 0.2]) and np.isnan(adjusted[1])


def test_what_is_not_known_has_no_interval_share_or_rank():
    nan = np.nan
    assert stats.sign_flip_p(np.ones((5, 2))) == stats.sign_flip_p(np.ones(5))
    for of_videos in (stats.psnr, stats.ssim):  # NumPy would repeat the one frame
        with pytest.raises(ConfigError, match=r"videos of \[3, 3, 8, 8\] and \[1, 3, 8, 8\]"):
            of_videos(np.zeros((3, 3, 8, 8)), np.zeros((1, 3, 8, 8)))
    even = sweeps.sweep_maps({"effect": np.array([[[1.0]], [[-1.0]]])})[-1]
    assert np.isnan(even.values).all()
    assert np.isnan(measures.first_frame_mass(np.array([0.5, 0, 0, 0.5]), [1, 2])[1])
    assert np.isnan(measures.first_frame_mass(np.array([0.5, 0.1, 0, 0.4]), [1, 2])[1])
    # Placebos that are not frame 0, and placebos that nobody knows
    for frames, placebos in (([30, 31], [1.0, 1.0]), ([1, 2], [nan, nan])):
        fit = first_frame.FirstFrameEffect(*[np.array([[2.0]])] * 4)
        found = first_frame.FirstFrame(fit, frames, np.array([[placebos]]), np.zeros((1, 1, 12)))
        assert not found.above_placebos.any() and np.isnan(found.rank).all() == np.isnan(placebos).all()
    frame = moving()[:1]
    assert np.isnan([*drift.ends(drift.flicker(frame)), drift.non_repetition(frame)]).all()
    assert not any(map(len, drift.per_second(frame).values())) and "flicker_change" in drift.summaries(frame)
    for measure in (drift.per_second, drift.summaries):
        with pytest.raises(ConfigError, match=r"a video is uint8 \[T, H, W, 3\], 0 to 255, not float32 "):
            measure(frame.astype(np.float32) / 255)
    changes = effects.changes_of({"total": torch.ones(2), "between_seeds": torch.tensor([0.0, 2.0])})
    assert np.isnan(changes["total"][0]) and changes["total"][1] == 0.5
    with pytest.raises(CacheError, match="is not a frame, row and column"):
        video_maps.open_map(synthetic_caches.maps(), 2, 1, query=(1, 1, 0, 0))


SLOPES = strategies.floats(-10, 10, width=32, allow_subnormal=False)  # float32, too, must tell them from 0


@settings(deadline=None, max_examples=40)
@given(strategies.floats(-1e6, 1e6), SLOPES, strategies.integers(9, 40))
def test_constants_have_no_correlation_and_lines_no_period(level, slope, length):
    line, constant, noise = level + slope * np.arange(length), np.full(length, level), draw(length)
    assert np.isnan([stats.pearson(constant, noise), stats.pearson(noise, constant)]).all()
    assert np.isnan(stats.pearson(constant, np.full(length, 0.1)))
    expected = scipy.stats.pearsonr(noise + line, noise).statistic
    assert stats.pearson(noise + line, noise) == pytest.approx(expected, abs=1e-6)
    for curve in (line, constant, line.astype(np.float32)):
        assert np.isnan(measures.best_period(curve, range(length)))
        assert np.isnan(measures.wave(curve, range(length))[1])
    flat = np.broadcast_to(line[:6, None], (6, 6))  # rows that do not vary
    assert np.isnan(rope_waves.r_squared(constant, constant))
    assert np.isnan(first_frame.first_frame_effect(flat, [1] * 6).r_squared_within_rows)
    assert np.isnan(sweeps.stability(np.full((3, 1, 1), 0.1))).all()


@settings(deadline=None, max_examples=40)
@given(strategies.lists(strategies.floats(0, 1), min_size=1, max_size=45))
def test_the_largest_drop_is_that_of_all_pairs_within_a_second(distances):
    pairs = [d - later for n, d in enumerate(distances) for later in distances[n : n + drift.FPS + 1]]
    assert drift.largest_drop(np.array(distances)) == max(pairs)


def test_contrasts_of_trainings_are_t_of_their_means_and_know_what_was_not_measured():
    # Means of the trainings 0.1, 0.2, 0.6: mean 0.3, standard error 0.1528, t(2) = 4.303
    differences = np.array([[0.0, 0.2, np.nan], [0.2, 0.2, 0.2], [0.6, np.nan, 0.6]])
    found = stats.contrast_of_trainings(differences)
    assert found["t"] == pytest.approx([0.3, 0.3 - 0.657, 0.3 + 0.657], abs=1e-3)
    assert found["each"] == [0.1, 0.2, 0.6] and found["p"] == 0.19
    estimate, low, high = found["bootstrap"]
    assert estimate == 0.3 and 0 <= low < 0.3 < high <= 0.6


def test_intervals_over_heads_resample_prompts_and_whole_layers():
    predictor = draw(8, 12)
    related = predictor + draw(8, 12, seed=5) + 0.2 * draw(20, 8, 12, seed=1)
    one = stats.head_correlation(related, predictor, draws=100)
    assert one.estimate == pytest.approx(stats.spearman(related.mean(0).ravel(), predictor.ravel()))
    assert one.low < one.estimate < one.high and one.low > 0.4
    # A predictor that only tells layers apart: with layers resampled as wholes its interval is far wider.
    by_layer = np.broadcast_to(draw(8, 1, seed=2), (8, 12))
    layered = np.broadcast_to(by_layer + 0.01 * draw(8, 12), (20, 8, 12))
    wide = stats.head_correlation(layered, draw(8, 1, seed=3) + by_layer, draws=100)
    assert wide.high - wide.low > 0.25
    assert np.isnan(stats.head_correlation(layered, by_layer, given=[by_layer], draws=5).estimate)


def test_p_values_and_pictures_by_the_textbook():
    assert np.allclose(stats.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert stats.sign_flip_p(np.ones(5)) == pytest.approx(2 / 32)  # exact: of 32 ways, two are as far
    assert stats.sign_flip_p(np.ones(20)) < 1e-3 and stats.sign_flip_p(np.ones(1)) == 1
    values = 3 + draw(200, 4)
    low, high = values.mean() + 1.96 * values.mean(1).std(ddof=1) / 200**0.5 * np.array([-1, 1])
    assert stats.bootstrap(values) == pytest.approx((values.mean(), low, high), abs=0.01)
    assert stats.bootstrap([2.0]) == (2, 2, 2)
    missing = np.array([np.nan, 1, 2])  # is never a number
    assert np.isnan([stats.sign_flip_p(missing), *stats.bootstrap(missing)]).all()
    video = np.clip(0.5 + 0.2 * draw(3, 3, 16, 16), 0, 1)
    assert np.allclose(stats.psnr(video, video + 0.1), 20) and np.isinf(stats.psnr(video, video)).all()
    assert np.allclose(stats.psnr(255 * video, 255 * video + 25.5, peak=255), 20)
    pixels = np.array([[[0, 255]], [[10, 10]]], np.uint8)  # [frames, H, W]: no difference wraps around
    assert np.allclose(stats.psnr(pixels, pixels[:, :, ::-1], peak=255), [0, np.inf])
    p, q = (np.lib.stride_tricks.sliding_window_view(x, (8, 8), (-2, -1)) for x in (video, 1 - video))
    (a, b), (v, w) = ((x.mean((-2, -1)) for x in (p, q)), (x.var((-2, -1)) for x in (p, q)))
    top = (2 * a * b + 1e-4) * (2 * ((p * q).mean((-2, -1)) - a * b) + 9e-4)
    by_hand = top / ((a**2 + b**2 + 1e-4) * (v + w + 9e-4))
    assert np.allclose(stats.ssim(video, 1 - video), by_hand.mean((1, 2, 3)))


SIDE, T = 48, 4 * drift.FPS


def moving(speed: float = 0.0, color=(230, 40, 40)) -> np.ndarray:
    """A soft disc that moves right by speed pixels a frame, and stops at no border: it wraps around."""
    y, x = np.mgrid[:SIDE, :SIDE]
    frames = []
    for t in range(T):
        dx = (x - 12 - speed * t + SIDE / 2) % SIDE - SIDE / 2
        alpha = np.clip(9.5 - np.hypot(dx, y - SIDE / 2), 0, 1)[..., None]
        frames.append(alpha * np.array(color) + (1 - alpha) * np.array((20, 30, 120)))
    return np.rint(frames).astype(np.uint8)


FROZEN = moving(0.0)


def of_grey(levels) -> np.ndarray:
    """A video whose frames are each of one grey level."""
    return np.tile(np.array(levels, np.uint8)[:, None, None, None], (1, 8, 8, 3))


def test_a_frozen_video_is_perfect_by_all_but_motion_and_repetition():
    seconds, whole = drift.per_second(FROZEN), drift.summaries(FROZEN)
    assert set(seconds) == set(drift.MEASURES) and set(whole) == set(drift.SUMMARIES)
    assert (seconds["hue_kept"] == 1).all() and not any(whole.values())
    assert np.ptp(seconds["sharpness"]) == np.ptp(seconds["clipped"]) == 0
    assert not np.any([seconds[name] for name in ("flicker", "motion", "distance")])


def test_hue_that_turns_is_lost():
    video = np.concatenate([FROZEN[: T // 2], moving(color=(40, 230, 40))[T // 2 :]])
    kept = drift.per_second(video)["hue_kept"]
    assert kept[:2] == pytest.approx(1) and (kept[2:] < 0.95).all()
    assert drift.hue_histogram(np.full((5, 3), 7, np.uint8))[-1] == 1  # no colour is a colour of its own
    both = drift.hue_histogram(np.array([(200, 0, 0), (150, 200, 150)], np.uint8))
    assert both[[0, 60]] == pytest.approx([0.8, 0.2])  # saturations 1 and 1/4


def test_numbers_that_can_be_counted():
    board = np.indices((8, 8)).sum(0) % 2 * 255
    video = np.repeat(board[None, :, :, None], 3, 3).astype(np.uint8)
    assert drift.sharpness(video) == pytest.approx(16, rel=1e-4)  # ±4 at every pixel of a checkerboard
    assert drift.clipped(video) == 1
    # the ends are 15 %: 10 of 64 frames, of which the last 6 are white
    assert drift.summaries(of_grey([100] * 58 + [255] * 6))["clipped_change"] == pytest.approx(0.6)
    # a ramp of 3 levels a frame: from frame 20 it is 12 to 20 frames to the first nine, 16 on average
    assert drift.distance(of_grey(3 * np.arange(64)))[20] == pytest.approx(48 / 255)
    falling = np.concatenate([np.full(10, 1.0), np.linspace(1, 0.2, 33), np.full(20, 0.2)])
    assert drift.largest_drop(falling) == pytest.approx(0.4)  # within a second
    once, twice = moving(SIDE / T), np.concatenate([moving(SIDE / 32)[:32]] * 2)
    assert drift.non_repetition(twice) < 1e-3 < drift.non_repetition(once) - 0.01


def test_motion_is_the_speed_of_what_moves_in_its_direction():
    assert drift.motion(moving(1.5)[: drift.FPS + 1]) == pytest.approx(1.5 * drift.FPS / SIDE, rel=0.25)
    texture = np.random.default_rng(0).random((60, 60))
    for _ in range(6):
        texture = (texture + np.roll(texture, 1, 0) + np.roll(texture, 1, 1) + np.roll(texture, -1, 1)) / 4
    texture = (texture - texture.min()) / np.ptp(texture)
    for dx, dy in ((0, -1), (2, 3)):
        found = drift.flow(texture, np.roll(texture, (dy, dx), (0, 1)))[12:-12, 12:-12]
        assert np.median(found, (0, 1)) == pytest.approx([dx, dy], abs=0.15)


def videos_of(gains: dict[str, float], seeds: int = 3) -> list[dict]:
    """Videos of 18 prompts in which the share of right seconds of each policy is its gain over 0.4."""
    videos = []
    for label, gain in gains.items():
        for prompt in range(18):
            right = (np.random.default_rng(prompt).random(60) < 0.4 + gain).astype(int).tolist()
            seconds = {"hue_kept": [0.5] * 60, "motion": [0.1] * 60, "distance": [None] * 60}
            about = {"label": label, "prompt": f"p{prompt}", "tracker": {"right": right}, "seconds": seconds}
            videos += [about | {"seed": seed} for seed in range(seeds)]
    return videos


def test_policies_are_compared_on_the_same_prompts_whatever_their_seeds_say():
    gains = {"full": 0.0, "sink": 0.3, "same": 0.0}
    full, sink, same = drift.policy_rows(videos_of(gains))
    shares = [float(text.split()[0]) for text in (full["right"], sink["right"], sink["less full"])]
    assert shares == pytest.approx([0.4, 0.7, 0.3], abs=0.05) and sink["p"] < 0.001 and "p" not in full
    assert same["less full"] == "0.00 [0.00, 0.00]" and same["p"] == 1
    assert full["motion"] == "0.10 [0.10, 0.10]" and full["distance"] == "nan [nan, nan]"
    assert drift.policy_rows(videos_of(gains, seeds=1)) == [full, sink, same]  # no prompt is counted twice


def test_the_first_seconds_of_a_video_count_only_where_it_has_no_others():
    videos = videos_of({"full": 0.0, "sink": 0.3})
    before = drift.policy_rows(videos)
    for video in videos:
        video["tracker"] = {"right": [1] * 5 + video["tracker"]["right"][5:]}
    assert drift.policy_rows(videos) == before
    for video in videos:
        video["tracker"] = {"right": [1] * 5}
    assert drift.policy_rows(videos)[0]["right"] == "1.00 [1.00, 1.00]"
    for video in videos:
        del video["tracker"]
    assert drift.policy_rows(videos)[1]["less full"] == "0.00 [0.00, 0.00]"

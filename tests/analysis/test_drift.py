"""Drift measures of videos that were made to drift in one way, and of a frozen one."""

import numpy as np
import pytest

from experiments.analysis import drift

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
    with pytest.raises(ValueError, match="a video is uint8"):
        drift.per_second(FROZEN / 255.0)


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

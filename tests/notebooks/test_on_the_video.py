"""on_the_video.ipynb from top to bottom, its figures and the mp4, and what it says of wrong input."""

import imageio.v3 as iio
import numpy as np
import pytest
from conftest import ROOT
from helpers import executed

from experiments import run_extraction_maps
from experiments.analysis.video_maps import heads_to_show, open_map
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.figures.video_maps import (
    bilinear,
    blend,
    latent_frame,
    pictures,
    scale_of,
    seen_frames,
    video_frames,
)

MINI = "--config_path configs/wan_mini.yaml --num_frames 9 --quiet"
FLAGS = f"{MINI} --layer_indices 2 5 --query_patch 7,1,2 --words"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("maps")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        run_extraction_maps.run([*FLAGS.split(), "--save_video", "--output_path", str(folder / "maps.pt")])
    return folder / "maps.pt"


def test_the_notebook_runs_and_writes_its_figures(made, tmp_path):
    said = executed.run("on_the_video.ipynb", tmp_path, CACHE_PATH=str(made), CAPTIONS=0)
    figures = executed.figures(tmp_path)
    assert figures.keys() == {"video_map.svg", "video_map_other.svg", "strip.svg", "words.svg"}
    assert all(b"data:image/png" in svg and len(svg) < 400_000 for svg in figures.values())
    assert "no causal atlas is there" in said and "patch (1, 2) of frame 7" in executed.words(
        figures["strip.svg"]
    )
    assert "own block, noise in this pass" in executed.words(figures["video_map.svg"])
    assert all((tmp_path / "figures" / name).with_suffix(".pdf").is_file() for name in figures)
    (movie,) = (tmp_path / "figures").glob("*.mp4")
    assert len([*iio.imiter(movie, plugin="FFMPEG")]) == 33


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"CACHE_PATH": "none.pt"}, "run: python experiments/run_extraction_maps.py"),
        ({"QUERY": [0, 0, 0]}, "query (0, 0, 0) is not in this cache; it has (7, 1, 2)"),
        ({"HEADS": [[1, 1]]}, "layer 1 is not in this cache; it has 2, 5"),
        ({"HEADS": "x"}, "HEADS is"),
        ({"QUANTITY": "x"}, "quantity 'x' is not one of mass, mean_logit"),
        ({"VIDEO": "none.mp4"}, "none.mp4 not found"),
        ({"PICTURE": 4}, "picture 4 of a latent frame is not in 0..3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_parameters_are_one_line(made, tmp_path, parameters, message):
    wrong = {"CACHE_PATH": str(made), "CAPTIONS": 0} | parameters
    assert message in executed.run("on_the_video.ipynb", tmp_path, **wrong)


def test_pictures_of_a_latent_frame(made):
    """Frame 0 alone, then groups of four, of which one is shown."""
    video = made.with_suffix(".mp4")
    frames = video_frames(video, 9, 64)
    assert len(frames) == 33 and [latent_frame(n) for n in (0, 1, 4, 5, 32)] == [0, 1, 1, 2, 8]
    for which in range(4):
        shown = pictures(video, 9, 64, which)
        assert all(np.array_equal(shown[f], frames[4 * f - 3 + which]) for f in range(1, 9))
        assert np.array_equal(shown[0], frames[0])


def test_colours_follow_values_and_pale_is_not_seen(made):
    seen = open_map(load_cache(made), 2, 0)
    assert seen_frames(seen) == [*range(9)] and seen.noise_frames == (6, 7, 8)
    grey, scale = np.full((16, 16, 3), 128, np.uint8), scale_of([seen])
    values = np.zeros((4, 4))
    values[1, 2] = scale.norm.vmax
    out = blend(grey, values, scale).astype(int)
    far = np.abs(out - out[15, 0]).sum(-1)
    assert np.unravel_index(far.argmax(), far.shape) in {(r, c) for r in (5, 6) for c in (9, 10)}
    assert (blend(grey, np.full((4, 4), np.nan), scale) > 200).all()
    ramp = bilinear(np.array([[0.0, 1.0]]), (2, 8))
    assert np.allclose(ramp, [[0, 0, 0.125, 0.375, 0.625, 0.875, 1, 1]] * 2)


def test_heads_are_those_asked_for_or_the_highest_peaks(made):
    cache = load_cache(made)
    assert heads_to_show(cache, [[5, 1]])[0] == [(5, 1)]
    chosen, said = heads_to_show(cache, "effect", "none.pt", count=3)
    peaks = [np.nanmax(open_map(cache, *head).values[:6]) for head in chosen]
    assert len(chosen) == 3 and peaks == sorted(peaks, reverse=True) and "no causal atlas" in said
    with pytest.raises(CacheError, match="head 12"):
        heads_to_show(cache, [[5, 12]])

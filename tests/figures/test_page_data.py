"""The page's numbers against the cache they were made from, its size, and hostile caches."""

import base64
import hashlib
import json
import os
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches

from experiments.analysis.first_frame import equal_distance_excess
from experiments.analysis.measures import head_statistics
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.mp4 import write_mp4
from experiments.caches.view import open_profiles
from experiments.figures import html_page as page_data
from experiments.figures.html_page import MAX_MB, PARTS, SCRIPTS, STYLES, open_passes_of, save_page
from experiments.figures.video_maps import pictures, pictures_for, video_of

PUBLISHED = ROOT / "cache" / "published"
EAGLE = PUBLISHED / "self_forcing_dmd_eagle_21f.pt"


def read_page(path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def data_of(path, layers=None, max_mb=MAX_MB):
    return page_data.fit(open_passes_of(path, layers), int(max_mb * 1e6))


def decode(coded: dict, N: int, H: int) -> np.ndarray:
    """Rows [N, H, n], NaN where absent, as the page decodes them."""
    top = 256 ** coded["bytes"] - 2
    codes = np.frombuffer(base64.b64decode(coded["codes"]), f"<u{coded['bytes']}").reshape(N, H, -1) / top
    low, high = (np.array(coded[name])[..., None] for name in ("low", "high"))
    return np.where(codes > 1, np.nan, low + (high - low) * codes ** coded["power"])


def decode_matrices(coded: dict, N: int, H: int, F: int) -> np.ndarray:
    """Frame matrices [N, H, F, F]; the cells that no head has are NaN."""
    out = np.full((N, H, F * F), np.nan)
    out[..., coded["cells"]] = decode(coded, N, H)
    return out.reshape(N, H, F, F)


def test_the_published_data():
    data, cache = data_of(EAGLE), load_cache(EAGLE)
    assert (data["layers"], data["num_heads"], data["num_frames"]) == (list(range(30)), 12, 21)
    (one,) = data["passes"]
    assert one["label"] == "pass 0 (t = 1000)" and one["noise"] == [18, 19, 20]
    (quantity,) = one["quantities"].values()
    profiles = cache["last_block_frame_logits"][:, 0].float().numpy()
    span = np.ptp(profiles, -1).max()
    np.testing.assert_allclose(decode(quantity["profiles"], 30, 12), profiles, atol=span / 65000)
    np.testing.assert_allclose(quantity["statistics"]["delta"], head_statistics(profiles).delta, rtol=1e-3)
    matrices = decode_matrices(one["matrices"]["mean_logit"], 30, 12, 21)
    expected = cache["frame_logits"][:, 0].float().numpy()
    span = np.nanmax(expected, (2, 3)) - np.nanmin(expected, (2, 3))
    assert (np.isnan(matrices) == np.isnan(expected)).all()
    assert (np.nanmax(np.abs(matrices - expected), (2, 3)) <= span / 65000 + 2e-5).all()
    named = {m["name"]: m for m in one["measures"]}
    found, excess = named["equal_distance_excess"]["values"], equal_distance_excess(expected, [3] * 7)
    np.testing.assert_allclose(found, excess, rtol=1e-3, atol=1e-6)
    # No head that turns from frame 0 is called an anchor; by signs alone one of castle would be
    castle = EAGLE.with_name("self_forcing_dmd_castle_21f.pt")
    kinds = np.array(data_of(castle)["passes"][0]["kinds"])
    first = load_cache(castle)["last_block_frame_logits"][:, 0, :, 0].float().numpy()
    assert (first[kinds == "anchor"] >= 0).all() and (first[kinds == "positive"] < 0).sum() == 1


def test_a_folder_of_layers(tmp_path):
    for N in (10, 2):
        save_cache(tmp_path / f"layer{N}.pt", synthetic_caches.layer(N))
    data = data_of(tmp_path)
    assert data["layers"] == [2, 10]
    found = decode(data["passes"][0]["quantities"]["mean_logit"]["profiles"], 2, 3)
    for i, N in enumerate((2, 10)):
        profile = open_profiles(load_cache(tmp_path / f"layer{N}.pt")).frame_profile(N)
        np.testing.assert_allclose(found[i], profile, atol=2e-4)


def test_the_video_in_a_folder_of_layers_is_known_by_its_run(tmp_path):
    film = np.zeros((33, 64, 96, 3), np.uint8)
    save_cache(tmp_path / "layer2.pt", synthetic_caches.layer(2) | {"fingerprint": "run"})
    for run, count in (("run", 9), ("another", 0)):
        write_mp4(film, tmp_path / "layer2.mp4", tag=f"{run} vae", shortest=1)
        shown, note = pictures_for(tmp_path, None, 9)
        assert len(shown or []) == count and ("belongs to another run" in note) == (not count)
    with pytest.raises(CacheError, match="belongs to another run"):
        pictures_for(tmp_path, tmp_path / "layer2.mp4", 9)
    write_mp4(film, tmp_path / "layer2.mp4", shortest=1)  # says of no run: taken where it is named
    assert pictures_for(tmp_path, None, 9)[0] is None
    assert video_of(tmp_path, tmp_path / "layer2.mp4") == tmp_path / "layer2.mp4"


def test_a_second_cache_is_compared(tmp_path):
    first, second = synthetic_caches.atlas(), synthetic_caches.atlas() | {"seed": 7}
    second["frame_logits"] = 2 * second["frame_logits"]
    for name, cache in (("a", first), ("b", second), ("c", synthetic_caches.atlas(F=12))):
        save_cache(tmp_path / f"{name}.pt", cache)
    data = read_page(save_page(tmp_path / "p.html", tmp_path / "a.pt", compare=tmp_path / "b.pt"))
    assert data["name"] == "a" and data["other"]["name"] == "b" and "seed 7" in data["other"]["source"]
    for one, other in zip(data["passes"], data["other"]["passes"], strict=True):
        named = {m["name"]: np.array(m["values"], float) for m in one["measures"]}
        theirs = {m["name"]: np.array(m["values"], float) for m in other["measures"]}
        difference = named["first_frame_effect"] - theirs["first_frame_effect"]
        np.testing.assert_allclose(named["first_frame_effect_difference"], difference, atol=2e-3)
    own = {"pass_timesteps": [1000.0, 3.0]}
    for other, said in (
        (synthetic_caches.atlas(blocks=[1, 4, 4]), "block_sizes .1, 4, 4. and"),
        (synthetic_caches.atlas() | own, "t = 3 where"),
        (synthetic_caches.atlas() | {"model": "another"}, "model another and"),
    ):
        save_cache(tmp_path / "d.pt", other, overwrite=True)
        with pytest.raises(CacheError, match=said):
            save_page(tmp_path / "p.html", tmp_path / "a.pt", compare=tmp_path / "d.pt")
    with pytest.raises(CacheError, match=r"c\.pt cannot be compared with the page's cache: frames 12 and 9"):
        save_page(tmp_path / "p.html", tmp_path / "a.pt", compare=tmp_path / "c.pt")


def test_what_a_cache_lacks(tmp_path):
    """No matrix at 72 frames, only the last block in a figure4 cache, nothing but NaN in a head."""
    castle = data_of(PUBLISHED / "self_forcing_dmd_castle_72f.pt")
    assert castle["passes"][0]["matrices"] == {"mean_logit": None} and not castle["passes"][0]["left_out"]
    assert "equal_distance_excess" not in [m["name"] for m in castle["passes"][0]["measures"]]
    save_cache(tmp_path / "f.pt", synthetic_caches.figure4(layers=(1, 5), H=3, S=4))
    assert data_of(tmp_path / "f.pt")["layers"] == [1, 5]
    atlas = synthetic_caches.atlas()
    atlas["frame_logits"][0, 0, 1] = torch.nan
    save_cache(tmp_path / "n.pt", atlas)
    one = data_of(tmp_path / "n.pt")["passes"][0]
    quantity = one["quantities"]["mean_logit"]
    assert np.isnan(decode(quantity["profiles"], 3, 3)[0, 1]).all()
    assert quantity["statistics"]["max_frame"][0][1] == -1
    assert np.isnan(decode_matrices(one["matrices"]["mean_logit"], 3, 3, 9)[0, 1]).all()


@pytest.mark.parametrize(("cell_bytes", "power"), [(1, 2), (2, 1)])
def test_codes(cell_bytes, power):
    """A value comes back within half a step, whatever its neighbours are; what is not finite is absent."""
    values = np.random.default_rng(0).normal(size=(4, 3, 50))
    values[0, 1, 7], values[2, 2], values[3, 0] = np.inf, np.nan, 5.0
    found = decode(page_data.code(values, cell_bytes, power), 4, 3)
    assert (np.isfinite(found) == np.isfinite(values)).all() and (found[3, 0] == 5.0).all()
    top = 256**cell_bytes - 2
    there = np.where(np.isfinite(values), values, np.nan)
    for row, back in zip(there.reshape(12, 50), found.reshape(12, 50), strict=True):
        if np.isfinite(row).any() and np.nanmax(row) > np.nanmin(row):
            span = np.nanmax(row) - np.nanmin(row)
            share = np.sqrt((row - np.nanmin(row)) / span) if power == 2 else 0.5
            step = span * (share + 0.25 / top) / top if power == 2 else span * share / top
            assert np.nanmax(np.abs(back - row) - step) <= 2e-5  # low and high have six digits


@pytest.mark.slow
def test_what_does_not_fit_says_so(tmp_path):
    """Profiles of all passes stay, matrices go evenly; without room for profiles it is an error."""
    atlas = synthetic_caches.atlas(layers=list(range(10)), steps=range(5), F=21, H=12, S=1)
    save_cache(tmp_path / "a.pt", atlas)
    sizes = {}
    for max_mb in (16.0, 0.89, 0.45):
        path = save_page(tmp_path / "p.html", tmp_path / "a.pt", max_mb=max_mb)
        sizes[max_mb] = path.stat().st_size / 1e6
        assert sizes[max_mb] <= max_mb
    data = read_page(path)
    assert [p for p, one in enumerate(data["passes"]) if not one["left_out"]] == [0, 4]
    assert all(one["quantities"]["mass"]["profiles"]["codes"] for one in data["passes"])
    (note,) = data["notes"]
    assert note.startswith("Frame matrices of 2 of 5 passes are shown: more would not fit")
    assert sizes[16.0] > 0.89  # two bytes a cell
    with pytest.raises(CacheError, match=r"of 5 passes take 0\.\d MB, .* allow more with --max_mb"):
        data_of(tmp_path / "a.pt", max_mb=0.13)


def test_the_page_is_one_file(tmp_path):
    save_cache(tmp_path / "a.pt", synthetic_caches.atlas())
    path = save_page(tmp_path / "p.html", tmp_path / "a.pt")
    page = path.read_text()
    outside = r"(src|href)=[\"']?\w|url\(|@import|fetch\(|XMLHttp|WebSocket|eval\(|https?://(?!www\.w3\.org)"
    assert not re.search(outside, page.split('id="data"')[0])
    (script,) = re.findall(r"<script>(.*)</script>", page, re.DOTALL)
    assert not re.search(outside.replace("(src|href)=", "(?!)"), script) and "GOES_HERE" not in page
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page and "default-src 'none'" in page
    assert save_page(tmp_path / "q.html", tmp_path / "a.pt").read_bytes() == path.read_bytes()
    parts = [f"{n}.css" for n in STYLES] + [f"{n}.js" for n in SCRIPTS]
    assert {file.name for file in PARTS.iterdir()} == {"page.html", *parts}


def test_hostile_words(tmp_path):
    """Markup, control letters, halves of letters and megabytes in what a cache says in words."""
    save_cache(tmp_path / "plain.pt", synthetic_caches.atlas())
    plain = save_page(tmp_path / "plain.html", tmp_path / "plain.pt").stat().st_size
    cache = synthetic_caches.atlas()
    cache["prompt"] = 'quotes " and </script><script>alert(1)</script><!-- \u202e \x00 DATA_GOES_HERE'
    cache["model"] = "<img src=x onerror=alert(1)>" + 90_000 * "m"
    cache["notes"] = ["<b>bold</b>" + 90_000 * "n"] * 1000
    save_cache(tmp_path / "a.pt", cache)
    path = save_page(tmp_path / "p.html", tmp_path / "a.pt")
    page, data = path.read_text(), read_page(path)
    assert len(page) < plain + 40_000
    assert page.count("<script") == 2 and "<img" not in page and "<b>" not in page
    assert data["model"].startswith("<img src=x") and len(data["model"]) == 120
    assert len(data["notes"]) == page_data.MOST_NOTES and len(data["source"]) <= 600
    assert page_data.words("a\u202eb\ud800c\x07", 10) == "a\ufffdb\ufffdc\ufffd"
    page.encode("utf-8")
    assert page_data.to_json({"a": "</script>é"}) == '{"a":"\\u003c/script>é"}'
    assert page_data.size_of("<é") == 10


def test_thumbnails(tmp_path):
    """A picture for each latent frame, from the video beside the cache or the one that is named."""
    import imageio.v3 as iio

    shades = np.arange(33, dtype=np.uint8)[:, None, None, None] * 7
    film = np.broadcast_to(shades, (33, 64, 96, 3)).copy()
    save_cache(tmp_path / "a.pt", synthetic_caches.atlas())  # 9 latent frames are 33
    iio.imwrite(tmp_path / "a.mp4", film, fps=16, codec="libx264", macro_block_size=8)
    data = read_page(save_page(tmp_path / "p.html", tmp_path / "a.pt"))
    assert len(data["thumbnails"]) == 9
    for f, shown in zip((0, 3, 7, 31), [data["thumbnails"][k] for k in (0, 1, 2, 8)], strict=True):
        assert shown.startswith("data:image/jpeg;base64,")
        picture = iio.imread(base64.b64decode(shown.partition(",")[2]), extension=".jpg")
        assert picture.shape == (60, 90, 3) and abs(picture.mean() - 7 * f) < 8
    with pytest.raises(CacheError, match=r"a\.mp4 has 33 frames; 10 latent frames are 37"):
        pictures(tmp_path / "a.mp4", 10)
    written = int((tmp_path / "a.pt").stat().st_mtime)
    for age, name in ((0, "a.pt"), (1, "a.mp4")):  # copied with its cache, a second before it
        os.utime(tmp_path / name, (written - age, written - age))
    assert video_of(tmp_path / "a.pt", None) == tmp_path / "a.mp4"
    os.utime(tmp_path / "a.mp4", (written - 5, written - 5))  # of the run before this one
    data = read_page(save_page(tmp_path / "p.html", tmp_path / "a.pt"))
    assert data["thumbnails"] == [] and "a.mp4 is older than" in data["notes"][0]
    assert pictures_for(tmp_path / "a.pt", None, 9)[0] is None
    with pytest.raises(CacheError, match=r"a\.pt, so of an earlier run; make the cache again with"):
        video_of(tmp_path / "a.pt", None)
    named = read_page(save_page(tmp_path / "p.html", tmp_path / "a.pt", video=tmp_path / "a.mp4"))
    assert len(named["thumbnails"]) == 9
    write_mp4(film, tmp_path / "of a.mp4", tag="run vae", shortest=1)
    for run, count in (("run", 9), ("another", 0)):  # of the cache, whatever it is called and how old it is
        save_cache(tmp_path / "of a.pt", synthetic_caches.atlas() | {"fingerprint": run})
        data = read_page(save_page(tmp_path / "p.html", tmp_path / "of a.pt"))
        assert len(data["thumbnails"]) == count
    assert "of a.mp4 belongs to another run" in data["notes"][0]
    (tmp_path / "a.mp4").write_bytes(b"no video")
    data = read_page(save_page(tmp_path / "p.html", tmp_path / "a.pt"))
    assert data["thumbnails"] == [] and data["notes"][0].startswith("The video beside the cache is left out")
    with pytest.raises(CacheError, match="a video cannot be read"):
        save_page(tmp_path / "p.html", tmp_path / "a.pt", video=tmp_path / "a.mp4")

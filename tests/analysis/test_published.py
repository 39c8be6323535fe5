"""The published data: what is stored, how exact it is, what is not there, and that the reader says what is
wrong."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches

from experiments import match_curve
from experiments.analysis import published
from experiments.analysis.first_frame import first_frame_effect
from experiments.benchmarks.reproduce import published as build
from experiments.caches import load_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from experiments.running import cli

FOLDER = ROOT / published.FOLDER
FILES = {f"self_forcing_dmd_{name}_{F}f.pt": (name, F) for name in ("eagle", "castle") for F in (21, 72)}


def test_other_curves(tmp_path):
    (tmp_path / "a.csv").write_text("key_frame,mine\n0,1.5\n1,\n2,-2\n")
    (curve,) = published.read_curves(tmp_path / "a.csv").values()
    np.testing.assert_array_equal(curve.values, [1.5, np.nan, -2])
    (tmp_path / "a.csv").write_text("key_frame,mine\n9,0.4\n0,5.1\n3,-3.8\n")  # some frames, as in the README
    (curve,) = published.read_curves(tmp_path / "a.csv", 21).values()
    assert len(curve.values) == 21 and np.flatnonzero(np.isfinite(curve.values)).tolist() == [0, 3, 9]
    for text, why in {
        "frame,mine\n0,1\n": "it has frame, mine",
        "key_frame,mine\n1,2\n1,1\n": r"frames of 0\.\.20, each once",
        "key_frame,mine\n0,1\n21,1\n": r"frames of 0\.\.20, each once",
        "": "it has no row",
        "key_frame,mine\n0,high\n": "high",
    }.items():
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(CacheError, match=rf"b\.csv is not a table of curves .*{why}"):
            published.read_curves(tmp_path / "b.csv", 21)
    with pytest.raises(CacheError, match="not found"):
        published.read_curves(tmp_path / "c.csv")
    (tmp_path / "b.csv").write_text("1,2\n3,x\n")
    with pytest.raises(CacheError, match="not a table of whole numbers"):
        published.read_labels(tmp_path / "b.csv")


def made_up(folder, F_of_matrices=(2, 1)):
    """Published files of 2 layers and 3 heads whose matrices are known, with the 72-frame one of the second
    prompt."""
    rng = np.random.default_rng(0)
    prompts = np.array(["a castle", "an eagle"])
    logits, matrices, truth = {"prompts": prompts}, {"prompts": prompts}, {}
    for F, count in zip((21, 72), F_of_matrices, strict=True):
        values = rng.normal(size=(2, 2, 3, F, F)) * np.array([1, 40])[:, None, None, None]
        truth[F] = values
        logits[f"frames{F}"] = values[..., -3:, :].mean(-2).astype(np.float16)
        vmax = np.abs(values).max((2, 3, 4))  # [prompt, layer]
        index = np.floor((values / vmax[..., None, None, None] + 1) / 2 * 256).clip(0, 255).astype(np.uint8)
        matrices[f"index_{F}"], matrices[f"vmax_{F}"] = index[-count:], vmax[-count:].astype(np.float32)
    np.savez(folder / build.LOGITS, **logits)
    np.savez(folder / build.MATRICES, **matrices)
    for name in (published.HEAD_LABELS_CSV, published.STATIC_HEADS_CSV):
        (folder / name).write_text("# rows: layers\n1,2\n")
    (folder / published.FIGURE4_CSV).write_text("key_frame,L1H1,L5H10\n18,1,2\n19,3,4\n")
    return truth


def test_building_from_a_folder(tmp_path):
    (tmp_path / "in").mkdir()
    truth = made_up(tmp_path / "in")
    build.run([str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")])
    for p, name in enumerate(("castle", "eagle")):
        for F in (21, 72):
            cache = load_cache(tmp_path / "out" / f"self_forcing_dmd_{name}_{F}f.pt")
            if (name, F) == ("castle", 72):
                assert "frame_logits" not in cache
                continue
            error = (cache["frame_logits"][:, 0].double() - torch.from_numpy(truth[F][p])).abs()
            assert (error.nan_to_num() <= 1.0001 * cache["frame_logits_error"][:, None, None, None]).all()
    assert (
        tmp_path / "out" / published.FIGURE4_CSV
    ).read_text() == "key_frame,L1H1,L5H10,clipped\n18,1,2,\n19,3,4,L1H1\n"


def test_the_matching_script(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    match_curve.run(["--cache_path", "cache/published/self_forcing_dmd_castle_21f.pt"])
    said = capsys.readouterr().out
    for name, layer, head in (("L1H1", "1", "1"), ("L5H10", "5", "10")):
        (row,) = [row for row in map(str.split, said.splitlines()) if row[:2] == [name, "shown"]]
        assert row[2:4] == [layer, head] and float(row[5]) >= 0.98 and row[7:9] == ["1", "360"]
    with pytest.raises(SystemExit) as ended:
        cli.main(match_curve.run, ["--cache_path", "cache/published/self_forcing_dmd_eagle_72f.pt"])
    assert ended.value.code == 2 and "they have 21 frames, this cache has 72" in capsys.readouterr().err


def test_heads_worth_a_look():
    real = open_profiles(load_cache(FOLDER / "self_forcing_dmd_eagle_21f.pt"))
    assert published.heads_of(real, "auto") == published.FIGURE4_HEADS
    own = open_profiles(synthetic_caches.atlas(F=12))
    effect = first_frame_effect(own.frame_matrices(), own.block_sizes).effect
    layer, head = np.unravel_index(effect.argmax(), effect.shape)
    assert published.heads_of(own, "auto")[0] == (own.layers[layer], head, f"L{own.layers[layer]}H{head}")
    assert published.heads_of(own, [[1, 2, "x"]]) == ((1, 2, "x"),)
    with pytest.raises(CacheError, match='HEADS must be "auto"'):
        published.heads_of(own, "all")

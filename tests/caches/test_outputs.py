"""No file is lost: what is replaced without --overwrite, and what is refused, for every kind of file."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches
from helpers.forked import refused
from matplotlib.figure import Figure

from experiments import (
    check_model,
    evaluate_mini,
    layer_page,
    make_head_classes,
    run_extraction_all,
    run_extraction_each,
    run_extraction_figure4,
    train_mini,
)
from experiments.caches import load_cache, save_cache
from experiments.caches.activations import Activations, Place, save_activations
from experiments.caches.files import CacheError
from experiments.caches.mp4 import require_ffmpeg, write_mp4
from experiments.captured import Atlas
from experiments.figures import FigureFolder, save_figure, style
from experiments.figures.html_page import save_page

PUBLISHED = ROOT / "cache/published/self_forcing_dmd_eagle_21f.pt"
FILM = np.zeros((9, 64, 64, 3), np.uint8)
ATLAS, FIGURE4 = synthetic_caches.atlas, synthetic_caches.figure4


def figure():
    drawn = style.StyledFigure(figsize=(2, 2))
    drawn.subplots().plot([1, 2])
    return drawn


def activations(path, overwrite=False, site="z"):
    table = Activations(site, (Place(0, 0, 0, (0,), False, 1000.0),), (torch.zeros(1, 2),))
    return save_activations(path, {site: table}, {"model": "m"}, overwrite)


def cache(path, overwrite=False):
    return save_cache(path, ATLAS(), overwrite=overwrite)


def film(path, overwrite=False):
    return write_mp4(FILM, path, overwrite=overwrite)


def drawing(path, overwrite=False):
    return save_figure(figure(), path, overwrite=overwrite)


def page(path, overwrite=False):
    return save_page(path, PUBLISHED, layers=[1], overwrite=overwrite)


WRITERS = {".pt": cache, ".mp4": film, ".svg": drawing, ".pdf": drawing, ".png": drawing, ".html": page}
WRITERS[".safetensors"] = activations


@pytest.mark.parametrize("suffix", WRITERS)
def test_only_a_file_of_this_program_is_replaced_unless_it_is_asked_for(suffix, tmp_path):
    path, write = tmp_path / f"mine{suffix}", WRITERS[suffix]
    (tmp_path / f"empty{suffix}").touch()
    write(tmp_path / f"empty{suffix}")  # holds nothing
    for content in (b"precious", b"\x89PNG\r\n\x1a\n", b"<svg></svg>", b"%PDF-1.4", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(CacheError, match=r"exists, and this program did not write it.*--overwrite"):
            write(path)
        assert path.read_bytes() == content
    write(path, overwrite=True)
    size = path.stat().st_size
    write(path)  # our own
    assert path.stat().st_size == size


def test_somebody_elses_video_figure_and_weights_are_not_ours(tmp_path):
    plain = Figure()
    for kind in ("svg", "pdf", "png"):
        plain.savefig(tmp_path / f"a.{kind}")
        with pytest.raises(CacheError, match="exists, and this program did not write it"):
            figure().savefig(tmp_path / f"a.{kind}")
        figure().savefig(tmp_path / f"a.{kind}", overwrite=True)
        figure().savefig(tmp_path / f"a.{kind}")
    command = [require_ffmpeg(), "-v", "error", "-f", "lavfi", "-i", "color=size=64x64:duration=1"]
    subprocess.run([*command, "-metadata", "comment=a holiday", str(tmp_path / "a.mp4")], check=True)
    with pytest.raises(CacheError, match="exists, and this program did not write it"):
        write_mp4(FILM, tmp_path / "a.mp4")
    torch.save({"generator_ema": {"a": torch.ones(2)}}, tmp_path / "weights.pt")
    with pytest.raises(CacheError, match="exists, and this program did not write it"):
        save_cache(tmp_path / "weights.pt", ATLAS())


@pytest.mark.parametrize("kind", ["svg", "pdf", "html"])
def test_a_figure_or_page_that_was_changed_by_hand_stays(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    WRITERS[f".{kind}"](path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"</svg>", b"<!-- mine --></svg>") + b"\n<!-- mine -->")
    with pytest.raises(CacheError, match="or it changed since"):
        WRITERS[f".{kind}"](path)
    if kind == "svg":  # as version 2.0 wrote it: a checksum, and no mark
        older = FigureFolder(tmp_path / "older", {})
        older.save(figure(), "a.svg")
        older.save(figure(), "a.svg")


LOST = {
    "layers 5": (ATLAS(), ATLAS(layers=(0, 1))),
    "steps 4": (ATLAS(), ATLAS(steps=(0,))),
    "frames 6..8": (ATLAS(), ATLAS(F=6)),
    "fields key_curve": (ATLAS(), ATLAS(curve=False)),
    "fields frame_mass": (ATLAS(), {name: x for name, x in ATLAS().items() if name != "frame_mass"}),
    "model wan-mini, not other": (ATLAS(), ATLAS() | {"model": "other"}),
    "SHA-256 of weights 0+, not 1+": (ATLAS(), ATLAS() | {"weights_sha256": "1" * 64}),
    "weights checkpoint, not base": (ATLAS(), ATLAS() | {"weights": "base", "weights_sha256": None}),
    "LoRA none, not a.pt:1": (ATLAS(), ATLAS() | {"weights_file": "self_forcing.pt + a.pt:1"}),
    "is an atlas cache, not a layer cache": (ATLAS(), synthetic_caches.layer()),
    "layers 5 ": (FIGURE4(), FIGURE4(layers=(1,))),
    "fields attn_logits": (FIGURE4(), FIGURE4(granularity="key")),
    "fields key_curve ": (FIGURE4(granularity="key"), FIGURE4(granularity="frame")),
    "heads 2": (synthetic_caches.maps(), synthetic_caches.maps(heads=(1,))),
    "layers 3": (synthetic_caches.older_layer(), synthetic_caches.layer(N=4, F=9)),
}


@pytest.mark.parametrize("loss", LOST)
def test_a_cache_that_has_more_is_not_replaced(loss, tmp_path):
    old, new = LOST[loss]
    path = tmp_path / "a.pt"
    torch.save(old, path)
    before = path.read_bytes()
    with pytest.raises(CacheError, match=rf"a\.pt .*{loss.strip()}.*--overwrite"):
        save_cache(path, new)
    assert path.read_bytes() == before
    save_cache(path, new, overwrite=True)
    assert load_cache(path)["format"] == new["format"]


def test_another_prompt_or_seed_and_a_cache_of_more_take_the_place(tmp_path):
    path = tmp_path / "a.pt"
    for cache in (
        synthetic_caches.older_layer(),
        synthetic_caches.layer(F=9),
        synthetic_caches.layer(F=9) | {"prompt": "another", "seed": 7},
        synthetic_caches.layer(F=12),
    ):
        if "format" in cache:
            save_cache(path, cache)
        else:
            torch.save(cache, path)
    assert load_cache(path)["num_frames"] == 12
    save_cache(tmp_path / "b.pt", FIGURE4(granularity="frame"))
    save_cache(tmp_path / "b.pt", FIGURE4())  # tokens have the frames' means
    atlas = Atlas(ATLAS())
    atlas.save(tmp_path / "c.pt")
    with pytest.raises(CacheError, match="layers"):
        Atlas(ATLAS(layers=(0,))).save(tmp_path / "c.pt")


def test_a_video_of_more_frames_or_another_model_stays(tmp_path):
    path = tmp_path / "a.mp4"
    write_mp4(FILM, path, model="one")
    write_mp4(FILM, path, model="one", tag="another prompt")
    with pytest.raises(CacheError, match=r"frames 5\.\.8"):
        write_mp4(FILM[:5], path, model="one")
    with pytest.raises(CacheError, match="model one, not other"):
        write_mp4(FILM, path, model="other")


# --- Scripts
@pytest.fixture
def short(tiny, monkeypatch):
    """Flags of a run of one block, which no test here may begin."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("experiments.session.load_pipeline", lambda *args: pytest.fail("it began"))
    return ["--config_path", tiny.path, "--num_frames", "3", "--output_path"]


def test_a_script_refuses_before_the_rollout(short, tiny, tmp_path, capfd):
    notes = tmp_path / "README.md"
    notes.write_text("mine")
    (tmp_path / "notes.pt").write_text("mine")
    for script in (run_extraction_each, run_extraction_figure4):
        refused(script, [*short, tmp_path / "notes.pt"], capfd, "notes.pt exists, and this program did not")
    video = tmp_path / "mine.mp4"
    video.write_text("mine")
    flags = [*short, tmp_path / "a.pt", "--save_video", video]
    refused(run_extraction_all, flags, capfd, "mine.mp4 exists, and this program did not write it")
    log = [*short, tmp_path / "a.pt", "--log_file", notes]
    refused(run_extraction_all, log, capfd, "README.md cannot be written: .*no log of this program")
    growing = tmp_path / "a.growing.mp4"
    growing.write_text("mine")
    flags = [*short, tmp_path / "a.pt", "--save_video", tmp_path / "a.mp4"]
    refused(run_extraction_all, flags, capfd, "a.growing.mp4 exists, and this program did not write it")
    assert {path.read_text() for path in tmp_path.iterdir() if path.suffix != ".lock"} == {"mine"}


@pytest.mark.slow
def test_a_script_names_what_would_be_lost_and_says_what_it_replaced(tiny, tmp_path, capfd, monkeypatch):
    path = tmp_path / "atlas.pt"
    short = ["--config_path", tiny.path, "--output_path", str(path), "--num_frames"]
    run_extraction_all.run([*short, "6", "--key_curve", "--cross"])
    before = path.read_bytes()
    capfd.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("experiments.session.load_pipeline", lambda *args: pytest.fail("it began"))
        refused(run_extraction_all, [*short, "6", "--cross"], capfd, "has fields key_curve, which the new")
        refused(
            run_extraction_all, [*short, "3", "--cross", "--key_curve"], capfd, r"has frames 3\.\.5, which"
        )
        refused(run_extraction_each, [*short, "6"], capfd, "is an atlas cache, not a layer cache")
    assert path.read_bytes() == before
    run_extraction_all.run([*short, "6", "--key_curve", "--cross", "--seed", "7"])
    assert "it replaced the atlas cache of 'a red circle moving right" in capfd.readouterr().out
    run_extraction_all.run([*short, "3", "--overwrite"])
    assert load_cache(path)["num_frames"] == 3


def test_tables_reports_and_trained_weights_need_overwrite(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    csv = tmp_path / "heads.csv"
    csv.write_text("my,heads")
    save_cache(tmp_path / "atlas.pt", ATLAS())
    command = [tmp_path / "atlas.pt", "--rule", "forcing_kv", "--output_path", csv]
    refused(make_head_classes, command, capfd, "heads.csv exists, and this program did not write it")
    make_head_classes.run([*map(str, command), "--overwrite"])
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"mine": 1}))
    refused(
        evaluate_mini,
        ["--output_path", report],
        capfd,
        "report.json exists, and this program did not write it",
    )
    drawing = tmp_path / "mine.svg"
    drawing.write_text("<svg/>")
    flags = ["--config_path", "configs/wan_mini.yaml", "--reference", PUBLISHED, "--output_path", drawing]
    refused(check_model, flags, capfd, "mine.svg exists, and this program did not write it|holds mean_logit")
    page = tmp_path / "page.html"
    page.write_text("mine")
    refused(
        layer_page,
        [PUBLISHED, "--output_path", page],
        capfd,
        "page.html exists, and this program did not write it",
    )
    refused(layer_page, [PUBLISHED, "--output_path", tmp_path / "page.png"], capfd, "does not end in .html")
    shutil.copytree(ROOT / "checkpoints/wan-mini/vae", tmp_path / "vae")
    refused(train_mini, ["--stage", "vae", "--output_dir", tmp_path], capfd, "vae is there; .*--overwrite")
    assert csv.read_text() != "my,heads" and json.loads(report.read_text()) == {"mine": 1}
    assert drawing.read_text() == "<svg/>" and page.read_text() == "mine"

"""Commands that messages print as their remedy: each is run, as it stands, where its message comes from."""

import re
import shlex
from importlib import import_module

import pytest
import torch
from conftest import ROOT
from helpers import synthetic_caches

from experiments.analysis.sweeps import open_sweep
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.store import open_layers, remedy
from experiments.configs import download_command
from experiments.figures.html_page import save_page
from experiments.figures.video_maps import video_of


# What misses a file: each function opens it in a folder, and says the command that makes it
def figure4(folder):
    return load_cache(folder / "attention_cache_figure4.pt", expect=("figure4", "atlas"))


def inference(folder):
    return load_cache(folder / "b.pt", expect=("inference", "figure4"))


def a_layer(folder):
    return load_cache(folder / "layer5.pt", expect=("layer", "atlas"))


def maps_and_their_video(folder):
    load_cache(folder / "maps.pt", expect=("maps",))
    return video_of(folder / "maps.pt", None)


def effects(folder):
    return load_cache(folder / "effects.pt", expect=("effects",))


def attribution(folder):
    return load_cache(folder / "attribution.pt", expect=("attribution",))


def a_folder_of_layers(folder):
    return open_layers(folder)


def a_folder_of_atlases(folder):
    return open_sweep(folder, ROOT / "cache/none")


def the_atlas_of_a_page(folder):
    return save_page(folder / "page.html", folder / "mine.pt")


def the_video_of_a_cache(folder):
    if not (folder / "a.pt").exists():
        save_cache(folder / "a.pt", synthetic_caches.figure4())
    return video_of(folder / "a.pt", None)


def run(command):
    """Run a script as its command names it, in this process; a shorter video, unless a frame is named."""
    program, script, *flags = shlex.split(command)
    assert program == "python" and (ROOT / script).is_file(), command
    flags += ["--quiet"] if "--query_patch" in flags else ["--quiet", "--num_frames", "6"]
    import_module(script.removesuffix(".py").replace("/", ".")).run(flags)


def command_of(message):
    (command,) = re.findall(r"run: (python [^;]*)", message)
    return command


@pytest.mark.beside
@pytest.mark.parametrize(
    "opened",
    [
        figure4,
        inference,
        a_layer,
        maps_and_their_video,
        effects,
        attribution,
        a_folder_of_layers,
        a_folder_of_atlases,
        the_atlas_of_a_page,
        the_video_of_a_cache,
    ],
)
def test_the_remedy_of_a_message_makes_what_is_missing(opened, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(CacheError) as problem:
        opened(tmp_path)
    run(command_of(str(problem.value)))
    assert opened(tmp_path)  # nothing is missing any more


def test_a_damaged_cache_is_made_again(tmp_path):
    path = tmp_path / "mine.pt"
    save_cache(path, synthetic_caches.maps())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CacheError) as problem:
        load_cache(path, expect=("maps",))
    assert command_of(str(problem.value)).endswith(f"--save_video --output_path {path} --overwrite")


@pytest.mark.parametrize("name", ["README.md", "mine.pt", "checkpoints/self_forcing_dmd.pt"])
def test_no_command_names_a_file_that_is_no_cache(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("of a user")
    if name.startswith("checkpoints"):
        torch.save({"generator_ema": {"a": torch.ones(2)}}, path)
    with pytest.raises(CacheError) as problem:
        load_cache(path)
    assert name not in command_of(str(problem.value))


def test_a_command_names_paths_from_the_root(tmp_path, monkeypatch):
    """A notebook runs in its own folder, and its reader types the command in the root."""
    monkeypatch.chdir(ROOT / "notebooks")
    command = remedy("../cache/atlas.pt", ("atlas",)).removesuffix(" --overwrite")  # behind the quickstart
    assert command.endswith("--key_curve --cross --rope_bands")
    assert remedy("../cache/mine.pt", ("atlas",)).endswith("--output_path cache/mine.pt")
    assert remedy("mine.pt").endswith("--output_path notebooks/mine.pt")
    causal = remedy("../cache/causal_atlas/causal_atlas.pt", ("causal_atlas",))
    assert causal.endswith(
        "run_causal_atlas.py --config_path configs/wan_mini.yaml --output_dir cache/causal_atlas"
    )
    assert remedy(tmp_path / "a b.pt").endswith(f"--output_path '{tmp_path}/a b.pt'")


def test_a_config_of_an_own_folder_is_downloaded_into_it(tmp_path):
    """As the rehearsal's, which has no release of its own."""
    command = download_command("rehearsal", tmp_path / "wan_models/Wan2.1-T2V-1.3B", None)
    assert command == f"bash experiments/download_weights.sh {tmp_path}"


def test_a_video_that_is_not_there_has_no_command_that_replaces_the_cache(tmp_path):
    save_cache(tmp_path / "a.pt", synthetic_caches.figure4())
    said = r"^none.mp4 is not there: leave the video out \(--video\), or name an mp4$"
    with pytest.raises(CacheError, match=said):
        save_page(tmp_path / "page.html", tmp_path / "a.pt", video="none.mp4")


# Where messages have such a command: remedy() and the situations above; the others install or download
KNOWN = {
    "experiments/caches/store.py": 2,  # remedy, open_layers
    "experiments/analysis/sweeps.py": 1,
    "experiments/caches/mp4.py": 1,  # pip
    "experiments/extraction/sweep.py": 1,  # pip
    "experiments/benchmarks/rows.py": 1,  # the quickstart
    "wan/backends.py": 1,  # pip
    "wan/files.py": 1,  # downloads
}


def test_no_command_is_printed_that_is_not_run():
    found = {}
    for path in [*(ROOT / "wan").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        count = len(re.findall(r"(?:; |\"|')run: (?=pip|git|python|bash|\{)", path.read_text()))
        if count:
            found[str(path.relative_to(ROOT))] = count
    assert found == KNOWN

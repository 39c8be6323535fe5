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
from experiments.figures.html_page import save_page
from experiments.figures.video_maps import video_of


def opened(folder, name, *formats):
    return load_cache(folder / name, expect=formats)


def load_path(folder, name, *formats):
    opened(folder, name, *formats)
    return folder / name


def page_of(folder):
    return save_page(folder / "page.html", folder / "mine.pt")


def video_beside(folder):
    if not (folder / "a.pt").exists():
        save_cache(folder / "a.pt", synthetic_caches.figure4())
    return video_of(folder / "a.pt", None)


SITUATIONS = {
    "figure4 is missing": lambda folder: opened(folder, "attention_cache_figure4.pt", "figure4", "atlas"),
    "inference is missing": lambda folder: opened(folder, "b.pt", "inference", "figure4"),
    "a layer is missing": lambda folder: opened(folder, "layer5.pt", "layer", "atlas"),
    "maps are missing": lambda folder: video_of(load_path(folder, "maps.pt", "maps"), None),
    "effects are missing": lambda folder: opened(folder, "effects.pt", "effects"),
    "attribution is missing": lambda folder: opened(folder, "attribution.pt", "attribution"),
    "a folder has no layers": lambda folder: open_layers(folder),
    "a folder has no atlases": lambda folder: open_sweep(folder, ROOT / "cache/none"),
    "the page has no atlas": page_of,
    "a cache has no video": video_beside,
}


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
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_remedy_of_a_message_works(situation, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(CacheError) as problem:
        SITUATIONS[situation](tmp_path)
    run(command_of(str(problem.value)))
    assert SITUATIONS[situation](tmp_path)  # nothing is missing any more


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

"""Damaged and hostile files: read as they were, or refused in one line; no code runs, nothing hangs.

Files are read in forks of this warmed process, each in at most 2 s and 500 MB.
"""

import gc
import os
import pickle
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, golden_arrays
from helpers.checkpoints import GOLDEN_MODEL, write_transformer
from helpers.forked import FULL, forked, tell
from helpers.older_caches import MAKERS, older_figure4, older_inference, older_layer, same
from helpers.spoilt import LINES, RunsCode, spoilt

from experiments.analysis.published import FIGURE4_CSV, FOLDER, read_curves
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from experiments.extraction.memory import Memory
from experiments.extraction.prompt_embeds import read_states
from experiments.running.cli import read_prompts, slugs_of
from wan import checkpoint
from wan.checkpoint import CheckpointError, read_self_forcing_state
from wan.config import load_config
from wan.errors import UserError
from wan.model import CausalWanModel
from wan.text_encoder import TextEncoder, encoder_config
from wan.vae import VAE

MINI = ROOT / "checkpoints/wan-mini"
SECONDS, HUNG, BYTES = 2.0, 10.0, 500 << 20  # that a reader may take of a small file
AT_ONCE = 8  # files read in one fork
OLDER = {"older figure4": older_figure4, "older layer": older_layer}
OLDER |= {"older inference": lambda: older_inference([3, 3], passes=2)}


# --- Whole files, and what reads them, as a notebook or a run does
def write_caches(folder: Path) -> None:
    for name, maker in MAKERS.items():
        save_cache(folder / f"{name}.pt", maker())
    for name, maker in OLDER.items():
        torch.save(maker(), folder / f"{name}.pt")


def read_cache(path: Path) -> Any:
    cache = load_cache(path)
    if cache["format"] in ("figure4", "layer", "inference", "atlas"):
        view = open_profiles(cache)
        view.frame_profile(view.layers[0])
    return cache


def write_checkpoint(folder: Path) -> None:
    torch.save({"generator_ema": dict(golden_arrays("weights"))}, folder / "sf.pt")


def read_checkpoint(path: Path) -> Any:
    if path.suffix == ".pt":
        config, state = GOLDEN_MODEL, read_self_forcing_state(path)
    else:
        folder = path.parents[1]
        config, state = checkpoint.read_model_config(folder), checkpoint.read_transformer_state(folder)
    return checkpoint.build_model(CausalWanModel, config, state, path, torch.float32)


def write_shards(folder: Path) -> None:
    write_transformer(folder, dict(golden_arrays("weights")), shards=2)


def link_mini(folder: Path) -> None:
    shutil.copytree(MINI, folder, copy_function=os.symlink, dirs_exist_ok=True)


@cache
def sizes():
    return checkpoint.read_model_config(MINI)


def encode(path: Path) -> Any:
    encoder = TextEncoder.from_pretrained(path.parents[1], sizes().text_len, torch.float32)
    return encoder(["a red circle moving right"]).shape, encoder.words("a red circle")


def estimate(path: Path) -> Any:
    """What is computed from configs before anything is loaded."""
    config = replace(load_config(ROOT / "configs/wan_mini.yaml"), ckpt_dir=str(path.parents[1]))
    found = checkpoint.read_model_config(config.ckpt_dir)
    encoder_config(config.ckpt_dir)
    return Memory(config, found, [], torch.float32, torch.device("cpu"), True).needs()


def names_of(path: Path) -> Any:
    names = list(slugs_of(read_prompts(path)).values())
    assert all("/" not in name and not name.startswith(".") and len(name) < 100 for name in names)
    return names


def write_states(folder: Path) -> None:
    values = {"prompt": "a", "tokens": ["a"], "prompt_embeds": torch.randn(1, 4, sizes().text_dim)}
    torch.save(values, folder / "states.pt")


def copied(path: Path) -> Callable[[Path], Any]:
    return lambda folder: shutil.copy(path, folder)


FILES: dict[str, tuple[Callable, Callable, str, int]] = {  # how they are written and read, which, mutants
    "caches": (write_caches, read_cache, "*.pt", 80),
    "checkpoint": (write_checkpoint, read_checkpoint, "*.pt", 16),
    "shards": (write_shards, read_checkpoint, "transformer/*", 16),
    "tokenizer": (link_mini, encode, "tokenizer/tokenizer*.json", 16),
    "text encoder": (link_mini, encode, "text_encoder/*", 16),
    "config of a model": (link_mini, estimate, "transformer/config.json", 8),
    "VAE": (link_mini, lambda path: VAE.from_pretrained(path.parents[1]).latents_mean, "vae/*", 16),
    "config": (copied(ROOT / "configs/wan_mini.yaml"), load_config, "*.yaml", 16),
    "released config": (copied(ROOT / "configs/self_forcing_dmd.yaml"), load_config, "*.yaml", 16),
    "prompts": (lambda folder: (folder / "p.txt").write_text("\n".join(LINES)), names_of, "*.txt", 16),
    "curves": (copied(ROOT / FOLDER / FIGURE4_CSV), read_curves, "*.csv", 16),
    "states": (write_states, lambda path: read_states(path, sizes()), "*.pt", 16),
}


# --- The judge
def outcome(read: Callable, path: Path) -> tuple[str, Any]:
    """Return read or refused, with its line; else what must not be."""
    gc.disable()  # a collection would walk all that the tests before it left, and be timed
    start, cpu = time.monotonic(), time.process_time()
    try:
        kind, value = "read", read(path)
    except UserError as error:
        kind, value = "refused", str(error)
        if not value.isprintable() or len(value) > 1100:
            kind = "unreadable"
    except BaseException as error:
        kind, value = "escaped", f"{type(error).__name__}: {error}"[:500]
    if time.process_time() - cpu > SECONDS or time.monotonic() - start > HUNG:  # of a busy machine: the work
        kind = "slow"
    if os.path.exists("ran-code"):
        kind = "ran code"
    return kind, value


def judged(read: Callable, paths: list[Path]) -> list[tuple[str, Any]]:
    """Return the outcomes of reading files, in one fork; where something is odd, in a fork each."""
    done = forked(lambda: [outcome(read, path) for path in paths], timeout=2 * HUNG)
    well = done.code == 0 and isinstance(done.value, list) and done.more_bytes <= BYTES
    if well and all(kind in ("read", "refused") for kind, _ in done.value):
        return done.value
    found = []
    for path in paths:
        one = forked(lambda path=path: outcome(read, path), timeout=HUNG)
        ended = one.code or not one.value
        found.append(("ended", one.code) if ended else ("large", "") if one.more_bytes > BYTES else one.value)
    return found


@pytest.mark.parametrize("kind", FILES)
def test_spoilt_files(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write, read, pattern, count = FILES[kind]
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole")
    files, dice, found, wrong = sorted((tmp_path / "whole").glob(pattern)), random.Random(1), Counter(), []
    whole = {path: read(path) for path in (files if kind == "caches" else files[:1])}
    for start in range(0, count * (12 if FULL else 1), AT_ONCE):
        mutants = []
        for number in range(start, start + AT_ONCE):
            folder, original = tmp_path / str(number), dice.choice(files)
            shutil.copytree(tmp_path / "whole", folder, copy_function=os.symlink)
            path = folder / original.relative_to(tmp_path / "whole")
            content, how, inside = spoilt(original, dice)
            path.unlink()
            path.write_bytes(content)
            mutants.append((path, original, content, f"{number}: {path.name} {how} {content[:60]!r}", inside))
        for (path, original, content, how, inside), (state, value) in zip(
            mutants, judged(read, [mutant[0] for mutant in mutants]), strict=True
        ):
            found[state] += 1
            if path.read_bytes() != content:
                state = "lost"
            if kind == "caches" and state == "read" and not inside and not same(value, whole[original]):
                state = "wrong"  # a flipped bit that passes is a flipped bit in a figure
            if state not in ("read", "refused"):
                wrong.append(f"{how}: {state} {str(value)[:300]}")
            shutil.rmtree(path.parents[len(path.relative_to(tmp_path).parts) - 2])
    assert not wrong, f"{len(wrong)} of {kind}\n" + "\n".join(wrong[:20])
    tell(capfd, f"{kind}: {dict(found)}")


def test_a_bare_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.pt").write_bytes(pickle.dumps(RunsCode()))
    for read, error in ((load_cache, CacheError), (read_self_forcing_state, CheckpointError)):
        with pytest.raises(error, match="cannot be read"):
            read(tmp_path / "c.pt")
    assert os.listdir(tmp_path) == ["c.pt"]

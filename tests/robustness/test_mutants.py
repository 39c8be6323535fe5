"""Damaged and hostile caches and checkpoints: read as they were, or refused in one line; no code runs,
nothing hangs.

Files are read in forks of this warmed process, each in at most 2 s and 500 MB (helpers/judged.py).
"""

import os
import pickle
import random

import pytest
import torch
from conftest import GOLDEN, golden_arrays
from helpers.checkpoints import GOLDEN_MODEL, write_transformer
from helpers.forked import FULL, tell
from helpers.judged import AT_ONCE, Judge
from helpers.mutations import (
    BYTEWISE,
    RunsCode,
    flipped,
    larger_numbers,
    lying_archive,
    respelled,
    spoil_safetensors,
    spoil_state,
    spoilt_json,
)
from helpers.older_caches import MAKERS, older_figure4, older_inference, older_layer, same

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from wan import checkpoint
from wan.checkpoint import CheckpointError, read_self_forcing_state
from wan.model import CausalWanModel

CACHES, CHECKPOINTS = (900, 500) if FULL else (80, 32)


def read_cache(path):
    """What a notebook does with a cache."""
    cache = load_cache(path)
    view = open_profiles(cache)
    view.frame_profile(view.layers[0])
    return cache


def read_checkpoint(path):
    """What a run does with weights: a .pt, or a directory of either layout."""
    if path.is_dir():
        config, state = checkpoint.read_model_config(path), checkpoint.read_transformer_state(path)
    else:
        config, state = GOLDEN_MODEL, read_self_forcing_state(path)
    checkpoint.build_model(CausalWanModel, config, state, path, torch.float32)


def whole_caches() -> dict:
    older = {
        "older figure4": older_figure4,
        "older layer": older_layer,
        "older inference": lambda: older_inference([3, 3], passes=2),
    }
    return MAKERS | older


def spoilt_cache(originals, name, number, target, dice) -> tuple[str, bool]:
    """Write a mutant -> how it was made, and whether inside valid structure."""
    way = number % 3
    if way == 0:
        spoil = dice.choice(BYTEWISE)
        target.write_bytes(spoil(originals[name][0], dice))
        return f"{name} {spoil.__name__}", False
    if way == 1:
        values = whole_caches()[name]()
        how = respelled(values, dice)
        torch.save(values, target, _use_new_zipfile_serialization=dice.random() < 0.9)
        return f"{name} {how}", True
    lying_archive(target.parent / f"{name}.pt", target, dice)
    return f"{name} lying archive", True


def test_caches(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    dice, originals, judge = random.Random(0), {}, Judge("caches", 0)
    for name, maker in whole_caches().items():
        path = tmp_path / f"{name}.pt"
        torch.save(maker(), path) if name.startswith("older") else save_cache(path, maker())
        originals[name] = path.read_bytes(), load_cache(path, mmap=False)
    for start in range(0, CACHES, AT_ONCE):
        names = [dice.choice(list(originals)) for _ in range(AT_ONCE)]
        mutants = []
        for number, name in enumerate(names, start):
            target = tmp_path / f"mutant{number - start}.pt"
            mutants.append((target, *spoilt_cache(originals, name, number, target, dice)))
        for (_, how, inside), name, value in zip(
            mutants, names, judge.read_all(read_cache, mutants), strict=True
        ):
            if not inside and value is not None:  # a flipped bit that passes is a flipped bit in a figure
                assert same(value, originals[name][1]), how
    tell(capfd, judge.close())


def test_checkpoints(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert (GOLDEN / "golden_weights.npz").is_file()
    native, dice, judge = dict(golden_arrays("weights")), random.Random(1), Judge("checkpoints", 1)
    torch.save({"generator_ema": native}, tmp_path / "sf.pt")
    content = (tmp_path / "sf.pt").read_bytes()
    read_checkpoint(tmp_path / "sf.pt")
    for start in range(0, CHECKPOINTS // 2, AT_ONCE):
        mutants = []
        for number in range(AT_ONCE):
            target = tmp_path / f"mutant{number}.pt"
            how = dice.choice(("bytes", "bytes", "archive", "state", "legacy"))
            if how == "bytes":
                target.write_bytes(dice.choice(BYTEWISE)(content, dice))
            elif how == "archive":
                lying_archive(tmp_path / "sf.pt", target, dice)
            else:
                state = dict(native)
                spoil_state(state, dice)
                torch.save({"generator_ema": state}, target, _use_new_zipfile_serialization=how == "state")
                if how == "legacy" and dice.random() < 0.5:
                    target.write_bytes(dice.choice((flipped, larger_numbers))(target.read_bytes(), dice))
            mutants.append((target, f"{start + number}: {how}", how != "bytes"))
        judge.read_all(read_checkpoint, mutants)
    tell(capfd, judge.close())


def test_sharded_weights(tmp_path, monkeypatch, capfd):
    """A directory of two shards, their index and a config: one of the four is spoilt at a time."""
    monkeypatch.chdir(tmp_path)
    dice, judge, folder = random.Random(2), Judge("sharded weights", 2), tmp_path / "model"
    folder.mkdir()
    write_transformer(folder, dict(golden_arrays("weights")), shards=2)
    whole = {path: path.read_bytes() for path in (folder / "transformer").iterdir()}
    read_checkpoint(folder)
    for number in range(CHECKPOINTS // 2):
        path = dice.choice(list(whole))
        inside = dice.random() < 0.6
        if not inside:
            path.write_bytes(dice.choice(BYTEWISE)(whole[path], dice))
        elif path.suffix == ".safetensors":
            path.write_bytes(spoil_safetensors(whole[path], dice))
        else:
            path.write_bytes(spoilt_json(whole[path], dice)[0])
        judge.read_all(read_checkpoint, [(folder, f"{number}: {path.name}", inside)])
        path.write_bytes(whole[path])
    tell(capfd, judge.close())


def test_a_bare_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.pt").write_bytes(pickle.dumps(RunsCode()))
    for read, error in ((load_cache, CacheError), (read_self_forcing_state, CheckpointError)):
        with pytest.raises(error, match="cannot be read"):
            read(tmp_path / "c.pt")
    assert os.listdir(tmp_path) == ["c.pt"]

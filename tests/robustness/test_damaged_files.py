"""Damaged files: read as they were, or refused in one line; a flipped bit is never a number in a figure."""

import io
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import ROOT, golden_arrays
from helpers.checkpoints import GOLDEN_MODEL, write_transformer
from helpers.synthetic_caches import MAKERS, older_figure4, older_inference, older_layer, same

from experiments.analysis.published import FIGURE4_CSV, FOLDER, read_curves
from experiments.caches import load_cache, save_cache
from experiments.caches.view import open_profiles
from experiments.prompts import read_states
from wan import checkpoint
from wan.checkpoint import read_self_forcing_state
from wan.config import load_config
from wan.errors import UserError
from wan.model import CausalWanModel
from wan.text_encoder import TextEncoder
from wan.vae import VAE

MINI = ROOT / "checkpoints/wan-mini"
OLDER = {"older figure4": older_figure4, "older layer": older_layer}
OLDER |= {"older inference": lambda: older_inference([3, 3], passes=2)}
OTHER_TYPES = [None, True, -1, 0, 2**70, 1.5, float("nan"), "x", b"x", [], [[1]], {}, {"a": 1}, (1, 2)]
OTHER_TYPES += [torch.zeros(0), torch.zeros(3), torch.zeros(1, 2, 3).double()]


# --- How a file is damaged
def other_bytes(content: bytes, dice: Random) -> bytes:
    """Cut the bytes, put others over them or behind them, or flip some bits."""
    start, noise = dice.randrange(len(content)), dice.randbytes(dice.randrange(1, 200))
    flipped = bytearray(content)
    for _ in range(dice.choice((1, 8, 64))):
        flipped[dice.randrange(len(flipped))] ^= 1 << dice.randrange(8)
    over = content[:start] + noise + content[start + len(noise) :]
    return dice.choice((content[:start], over, content + noise, bytes(flipped)))


def other_field(content: bytes, dice: Random) -> bytes:
    """Drop or rename one field of a cache, or of a table inside it, or give it a value of another type."""
    whole = torch.load(io.BytesIO(content), weights_only=True)
    inside = [x for x in whole.values() if isinstance(x, dict)] + (whole.get("attention_weights") or [])
    table = dice.choice([whole, *(x for x in inside if x)])
    name, how = dice.choice(list(table)), dice.choice(("dropped", "renamed", "type"))
    value = table.pop(name)
    if how == "renamed":
        table[dice.choice((str(name)[::-1], 3, ""))] = value
    elif how == "type":
        table[name] = dice.choice(OTHER_TYPES)
    file = io.BytesIO()
    torch.save(whole, file)
    return file.getvalue()


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


def read_model(path: Path) -> Any:
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


def write_states(folder: Path) -> None:
    values = {"prompt": "a", "tokens": ["a"], "prompt_embeds": torch.randn(1, 4, sizes().text_dim)}
    torch.save(values, folder / "states.pt")


def copied(path: Path) -> Callable[[Path], Any]:
    return lambda folder: shutil.copy(path, folder)


FILES: dict[str, tuple[Callable, Callable, str, int]] = {  # how they are written and read, which, how many
    "caches": (write_caches, read_cache, "*.pt", 60),
    "checkpoint": (write_checkpoint, read_model, "*.pt", 12),
    "shards": (write_shards, read_model, "transformer/*", 12),
    "tokenizer": (link_mini, encode, "tokenizer/tokenizer*.json", 12),
    "text encoder": (link_mini, encode, "text_encoder/*", 12),
    "VAE": (link_mini, lambda path: VAE.from_pretrained(path.parents[1]).latents_mean, "vae/*", 12),
    "config": (copied(ROOT / "configs/self_forcing_dmd.yaml"), load_config, "*.yaml", 12),
    "curves": (copied(ROOT / FOLDER / FIGURE4_CSV), read_curves, "*.csv", 12),
    "states": (write_states, lambda path: read_states(path, sizes()), "*.pt", 12),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_read_as_it_was_or_refused_in_one_line(kind, tmp_path):
    write, read, pattern, count = FILES[kind]
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole")
    files, dice, refused = sorted((tmp_path / "whole").glob(pattern)), Random(1), 0
    whole = {path: read(path) for path in (files if kind == "caches" else files[:1])}
    for number in range(count):
        # 1. A folder where one file is damaged; what is beside it is read, too
        folder, original = tmp_path / str(number), dice.choice(files)
        shutil.copytree(tmp_path / "whole", folder, copy_function=os.symlink)
        path = folder / original.relative_to(tmp_path / "whole")
        path.unlink()
        in_bytes = kind != "caches" or original.stem in OLDER or dice.random() < 0.5
        content = (other_bytes if in_bytes else other_field)(original.read_bytes(), dice)
        path.write_bytes(content)
        # 2. It is read, or one line says why not
        try:
            value = read(path)
        except UserError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) < 1100, (number, path)
        else:  # with no other values
            assert kind != "caches" or not in_bytes or same(value, whole[original]), (number, path)
        assert path.read_bytes() == content
    assert refused

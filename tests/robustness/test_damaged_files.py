"""Damaged and hostile files: read as they were, or refused in one line; no code runs, nothing hangs.

Files are read in forks of this warmed process, each in at most 2 s and 500 MB.
"""

import copy
import gc
import io
import json
import os
import pickle
import shutil
import struct
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, golden_arrays
from helpers.checkpoints import GOLDEN_MODEL, write_transformer
from helpers.forked import forked
from helpers.synthetic_caches import MAKERS, older_figure4, older_inference, older_layer, same

from experiments.analysis.published import FIGURE4_CSV, FOLDER, read_curves
from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError
from experiments.caches.view import open_profiles
from experiments.extraction.memory import Memory
from experiments.running.cli import read_prompts, slugs_of
from experiments.session import read_states
from wan import checkpoint
from wan.checkpoint import CheckpointError, read_self_forcing_state
from wan.config import load_config
from wan.errors import UserError
from wan.model import CausalWanModel
from wan.text_encoder import TextEncoder
from wan.vae import VAE

MINI = ROOT / "checkpoints/wan-mini"
SECONDS, HUNG, BYTES = 2.0, 10.0, 500 << 20  # that a reader may take of a small file
AT_ONCE = 8  # files read in one fork
OLDER = {"older figure4": older_figure4, "older layer": older_layer}
OLDER |= {"older inference": lambda: older_inference([3, 3], passes=2)}


TYPES: list[Any] = [None, True, -1, 0, 3, 10**12, 2**70, 1.5, float("nan"), float("inf"), "x", "", b"x"]
TYPES += [[], [1], [[1]], {}, {"a": 1}, (1, 2)]


class RunsCode:
    """An object whose pickle would make a file when it is read."""

    def __reduce__(self):
        return os.system, ("touch ran-code",)


def spoilt(path: Path, dice: Random) -> tuple[bytes, str, bool]:
    """Return spoilt content of a whole file, how it was made, and whether inside valid structure."""
    inside = dice.random() < 0.6 and path.suffix in INSIDE
    way = dice.choice(INSIDE[path.suffix]) if inside else other_bytes
    return way(path.read_bytes(), dice), way.__name__, inside


# --- Bytes
def other_bytes(content: bytes, dice: Random) -> bytes:
    """Cut them, put others over them or behind them, or flip some bits."""
    start, noise = dice.randrange(len(content)), dice.randbytes(dice.randrange(1, 200))
    over = content[:start] + noise + content[start + len(noise) :]
    return dice.choice((content[:start], over, content + noise, flipped(content, dice)))


def flipped(content: bytes, dice: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 8, 64))):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


# --- Tables of tensors, and archives that lie about them
def other_tensor(old: torch.Tensor, dice: Random) -> Any:
    """Return what a tensor should not be: of another dtype, shape or layout, or larger than its file."""
    ways = [torch.Tensor.double, torch.Tensor.bfloat16, torch.Tensor.flatten, torch.Tensor.to_sparse]
    ways += [torch.Tensor.char, torch.Tensor.cfloat, lambda x: x[..., :-1], lambda x: x[None]]
    ways += [lambda x: torch.zeros(0), lambda x: torch.zeros(1).expand(10**6, 10**6)]  # one value on disk
    return dice.choice(ways)(old)


def respelled(content: bytes, dice: Random) -> bytes:
    """Change one field, of a table or of one inside it: dropped, renamed, or of another value."""
    try:
        whole = torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError:  # of the oldest caches
        return lying_archive(content, dice)
    inside = [x for x in whole.values() if isinstance(x, dict)] + (whole.get("attention_weights") or [])
    table = dice.choice([whole, *(x for x in inside if x)])
    name = dice.choice(list(table))
    how, value = dice.choice(("dropped", "renamed", "type", "tensor", "nested", "code")), table.pop(name)
    if how == "renamed":
        table[dice.choice((str(name)[::-1], 3, "", f"blocks.99.{name}"))] = value
    elif how == "type":
        table[name] = dice.choice(TYPES)
    elif how == "tensor":
        is_one = isinstance(value, torch.Tensor) and value.dim()
        table[name] = other_tensor(value if is_one else torch.zeros(3), dice)
    elif how == "nested":
        value = [0]
        for _ in range(dice.choice((30, 60, 400))):
            value = [value] * dice.choice((1, 10))
        table[name] = value
    elif how == "code":
        table[name] = dice.choice((RunsCode(), np.array([RunsCode()], dtype=object), [{"a": RunsCode()}]))
    file = io.BytesIO()
    torch.save(whole, file, _use_new_zipfile_serialization=dice.random() < 0.9)
    return file.getvalue()


def lying_archive(content: bytes, dice: Random) -> bytes:
    """Return a zip with right checksums whose records are not what its pickle says."""
    how = dice.choice(("shorter", "longer", "missing", "pickle", "compressed", "declared"))
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        chosen = dice.choice([name for name in old.namelist() if "/data/" in name])
        for name in old.namelist():
            content, method = old.read(name), zipfile.ZIP_STORED
            if name == chosen and how == "missing":
                continue
            if name == chosen and how == "compressed":
                content, method = bytes(1 << 23), zipfile.ZIP_DEFLATED
            elif name == chosen and how in ("shorter", "longer"):
                content = content[:-4] if how == "shorter" else content + bytes(400)
            elif name.endswith("data.pkl") and how in ("pickle", "declared"):
                content = flipped(content, dice) if how == "pickle" else larger_number(content, dice)
            new.writestr(name, content, method)
    return file.getvalue()


def larger_number(content: bytes, dice: Random) -> bytes:
    """Make one of a pickle's numbers huge: BININT1 or BININT2 -> BININT, or LONG1."""
    at = dice.choice([i for i, byte in enumerate(content[:-3]) if byte in b"KM"])
    new = dice.choice((b"J" + struct.pack("<i", 2**31 - 1), b"\x8a\x08" + struct.pack("<q", 2**60)))
    return content[:at] + new + content[at + (2 if content[at] == ord("K") else 3) :]


def lying_header(content: bytes, dice: Random) -> bytes:
    """Return a safetensors file whose header lies: its length, offsets, shapes, types, or its JSON."""
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    entry = header[dice.choice([name for name in header if name != "__metadata__"])]
    how = dice.choice(("length", "data_offsets", "shape", "dtype", "json", "deep"))
    if how == "length":
        return struct.pack("<Q", dice.choice((0, 7, length + 8, 2**31, 2**63, 2**64 - 1))) + content[8:]
    if how in ("json", "deep"):
        lie = flipped(content[8 : 8 + length], dice) if how == "json" else b"[" * length
        return content[:8] + lie + data
    lies = {
        "data_offsets": ([0, 2**62], [8, 4], [-4, 0], [0, len(data) + 4]),
        "shape": ([2**40, 2**40], [0], [-1], [*entry["shape"][::-1], 2], ["a"]),
        "dtype": ("F64", "BF16", "I8", "F4", "C64", "X", 3),
    }
    entry[how] = dice.choice(lies[how])
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + data


# --- Trees of plain values
HUGE_NUMBER = "HUGE NUMBER"  # written as a number of 5000 digits
VALUES = [
    *(value for value in TYPES if not isinstance(value, (bytes, tuple))),
    -(10**30), 10**6, 10**9, "\ud800", "\x1b[31m\n", "x" * 100_000, "../../etc/passwd", ".", "/", "a\nb",
    [[]] * 50, [1] * 5000, {"a": {"b": {"c": [None]}}}, "${oc.env:HOME}", "???",
    HUGE_NUMBER, "cuda:0", "auto", {"name": "window", "window": 9, "sink": 3},
]  # fmt: skip
HOSTILE_YAML = [
    b"a: &a [x]\nprompt: *a\n", b"prompt: !!python/object/apply:os.system ['touch ran-code']\n",
    b"height: 8\nheight: 9\n", b"prompt: ${oc.env:HOME}\n", b"height: 0x_\n", b"? {a: b}\n: c\n",
    b"prompt: 2020-02-30\n", b'prompt: "\\ud800"\n', b"---\na: 1\n---\nb: 2\n",
]  # fmt: skip
LINES = ["a red circle", "一只猫", "# a comment", "x" * 5000, "a\0b", "../../etc/passwd", "a\x1b[31m", ""]


def places(tree: Any, at: tuple = ()) -> list[tuple]:
    """Return the keys and indices that lead to each value of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:50] if isinstance(tree, list) else ())
    return [at] * bool(at) + [place for key, value in items for place in places(value, (*at, key))]


def other_tree(content: bytes, dice: Random) -> bytes:
    """Return JSON, which is YAML too, with one value replaced, dropped, renamed, or put into another."""
    tree = copy.deepcopy(yaml.safe_load(content))
    at = dice.choice([place for place in places(tree) if len(place) < 3] or places(tree))
    holder, key = tree, at[-1]
    for step in at[:-1]:
        holder = holder[step]
    how = dice.choice(("value", "value", "value", "dropped", "renamed", "nested", "moved"))
    if how in ("value", "moved"):
        holder[key] = copy.deepcopy(dice.choice(VALUES) if how == "value" else tree)
    elif how == "nested":
        holder[key] = dice.choice(([holder[key]], {"a": holder[key]}))
    else:
        value = holder.pop(key)
        if how == "renamed" and isinstance(holder, dict):
            holder[str(key)[::-1] + dice.choice(("", "\n", "x"))] = value
    return json.dumps(tree).replace(json.dumps(HUGE_NUMBER), "9" * 5000).encode()


def hostile_yaml(content: bytes, dice: Random) -> bytes:
    return dice.choice(HOSTILE_YAML)


INSIDE = {
    ".pt": (respelled, lying_archive),
    ".safetensors": (lying_header,),
    ".json": (other_tree,),
    ".yaml": (other_tree, other_tree, hostile_yaml),
}


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
    files, dice, found, wrong = sorted((tmp_path / "whole").glob(pattern)), Random(1), Counter(), []
    whole = {path: read(path) for path in (files if kind == "caches" else files[:1])}
    for start in range(0, count, AT_ONCE):
        mutants = []
        for number in range(start, start + AT_ONCE):
            folder, original = tmp_path / str(number), dice.choice(files)
            path = folder / original.relative_to(tmp_path / "whole")
            if path.parent == folder:
                folder.mkdir()
            else:  # what is beside it is read, too
                shutil.copytree(tmp_path / "whole", folder, copy_function=os.symlink)
                path.unlink()
            content, how, inside = spoilt(original, dice)
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
    assert not wrong, f"{len(wrong)} of {kind}\n" + "\n".join(wrong[:20])
    with capfd.disabled():
        print(f"\n  {kind}: {dict(found)}")


def test_a_bare_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.pt").write_bytes(pickle.dumps(RunsCode()))
    for read, error in ((load_cache, CacheError), (read_self_forcing_state, CheckpointError)):
        with pytest.raises(error, match="cannot be read"):
            read(tmp_path / "c.pt")
    assert os.listdir(tmp_path) == ["c.pt"]

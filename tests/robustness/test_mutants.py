"""Damaged and hostile caches and checkpoints: read as they were, or refused in one line;
no code runs, nothing hangs.

Every file is read in a fork of this warmed process, in at most 2 s and 500 MB.
"""

import json
import os
import pickle
import random
import struct
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import GOLDEN, golden_arrays
from helpers import synthetic_caches
from helpers.checkpoints import GOLDEN_MODEL, write_transformer
from helpers.forked import FULL, forked, tell
from helpers.older_caches import MAKERS, older_figure4, older_inference, older_layer, same

from experiments.caches import load_cache, save_cache
from experiments.caches.errors import CacheError
from experiments.caches.view import open_profiles
from wan import checkpoint, weight_names
from wan.checkpoint import CheckpointError
from wan.errors import ConfigError
from wan.modules.causal_model import CausalWanModel
from wan.safe_load import EAGER_BYTES, UnreadableError, is_verified, load_tensors, verify

SECONDS, BYTES = 2.0, 500 << 20
CACHES, CHECKPOINTS = (900, 500) if FULL else (150, 50)
TYPES = [
    None,
    True,
    -1,
    0,
    3,
    10**12,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    "",
    b"x",
    [],
    [1],
    [[1]],
    {},
    {"a": 1},
    (1, 2),
]


class RunsCode:
    def __reduce__(self):
        return os.system, ("touch ran-code",)


def read_cache(path):
    """What a notebook does with a cache."""
    try:
        cache = load_cache(path)
        open_profiles(cache).frame_profile(open_profiles(cache).layers[0])
    except (CacheError, ConfigError) as error:
        return "refused", str(error)
    return "read", cache


def read_checkpoint(path):
    """What a run does with weights: a .pt, or a directory of either layout."""
    try:
        if path.is_dir():
            config, state = checkpoint.read_model_config(path), checkpoint.read_transformer_state(path)
        else:
            config, state = GOLDEN_MODEL, checkpoint.read_self_forcing_state(path)
        checkpoint.build_model(CausalWanModel, config, state, path, torch.float32)
    except ConfigError as error:
        return "refused", str(error)
    return "read", None


def judge(read, path, found: Counter, what: str):
    """Read a file in a fork, and hold it to the rules. Returns the cache where one was read."""
    done = forked(lambda: summary(read, path), timeout=10)
    assert done.code == 0 and done.value, (what, done)
    kind, value = done.value
    assert kind in ("read", "refused"), (what, value)
    assert done.seconds < SECONDS and done.more_bytes < BYTES, (what, done.seconds, done.more_bytes >> 20)
    assert not os.path.exists("ran-code"), what
    if kind == "refused":
        assert "\n" not in value and len(value) < 1500, (what, value)
    found[kind] += 1
    return value


def summary(read, path):
    try:
        return read(path)
    except Exception as error:
        return "escaped", f"{type(error).__name__}: {error}"[:500]


# -- ways to spoil a file
# ----------------------------------------------------------------------------------------------


def truncated(content: bytes, dice) -> bytes:
    return content[: dice.randrange(len(content))]


def flipped(content: bytes, dice) -> bytes:
    spoilt = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 8, 64))):
        spoilt[dice.randrange(len(spoilt))] ^= 1 << dice.randrange(8)
    return bytes(spoilt)


def overwritten(content: bytes, dice) -> bytes:
    start, length = dice.randrange(len(content)), dice.randrange(1, 200)
    return content[:start] + dice.randbytes(length) + content[start + length :]


def lengthened(content: bytes, dice) -> bytes:
    return content + dice.randbytes(dice.randrange(1, 500))


BYTEWISE = (truncated, flipped, overwritten, lengthened)


def table_of(values, dice):
    """A table inside a cache: itself, or one of its entries."""
    entries = values.get("attention_weights")
    return dice.choice(entries) if isinstance(entries, list) and entries and dice.random() < 0.4 else values


def respelled(values: dict, dice) -> str:
    """Change one field in place: dropped, renamed, of another type, dtype or shape,
    or larger than the file.
    """
    table = table_of(values, dice)
    name = dice.choice(list(table))
    how = dice.choice(("dropped", "renamed", "type", "tensor", "huge", "nested", "code"))
    if how in ("dropped", "renamed"):
        value = table.pop(name)
        if how == "renamed":
            table[name[::-1]] = value
    elif how == "type":
        table[name] = dice.choice(TYPES)
    elif how == "tensor":
        old = table[name] if isinstance(table[name], torch.Tensor) else torch.zeros(3)
        table[name] = dice.choice(
            (
                lambda: old.double(),
                lambda: old.to(torch.int8),
                lambda: old.to(torch.complex64),
                lambda: old[..., :-1],
                lambda: old[None],
                lambda: old.to_sparse(),
                lambda: torch.zeros(0),
                lambda: old.flatten(),
                lambda: old.bfloat16(),
                lambda: torch.quantize_per_tensor(old.float().nan_to_num(), 0.1, 0, torch.quint8),
            )
        )()
    elif how == "huge":
        shape = dice.choice(((10**6, 10**6), (1 << 40,), (12, 10**5, 10**5)))
        table[name] = torch.zeros(1).expand(shape)  # one value on disk
    elif how == "nested":
        value = [0]
        for _ in range(dice.choice((30, 60, 400))):
            value = [value] * dice.choice((1, 10))
        table[name] = value
    else:
        table[name] = dice.choice((RunsCode(), np.array([RunsCode()], dtype=object), [{"a": RunsCode()}]))
    return f"{how} {name}"


def lying_archive(content_path, target, dice) -> None:
    """A zip with right checksums whose records are not what its pickle says:
    other lengths, names, numbers in the pickle.
    """
    how = dice.choice(("shorter", "longer", "missing", "pickle", "compressed", "declared"))
    with zipfile.ZipFile(content_path) as old, zipfile.ZipFile(target, "w") as new:
        data = [info.filename for info in old.infolist() if "/data/" in info.filename]
        chosen = dice.choice(data)
        for info in old.infolist():
            content = old.read(info.filename)
            method = zipfile.ZIP_STORED
            if info.filename == chosen:
                if how == "missing":
                    continue
                content = (
                    content[:-4] if how == "shorter" else content + bytes(400) if how == "longer" else content
                )
                if how == "compressed":
                    content, method = bytes(1 << 26), zipfile.ZIP_DEFLATED
            if info.filename.endswith("data.pkl") and how in ("pickle", "declared"):
                content = flipped(content, dice) if how == "pickle" else larger_numbers(content, dice)
            new.writestr(info.filename, content, method)


def larger_numbers(content: bytes, dice) -> bytes:
    """One of a pickle's numbers made huge: BININT1 or BININT2 -> BININT, or LONG1."""
    places = [i for i, byte in enumerate(content[:-3]) if byte in b"KM"]
    at = dice.choice(places)
    new = dice.choice((b"J" + struct.pack("<i", 2**31 - 1), b"\x8a\x08" + struct.pack("<q", 2**60)))
    return content[:at] + new + content[at + (2 if content[at] == ord("K") else 3) :]


# -- caches
# ------------------------------------------------------------------------------------------------------------


def whole_caches() -> dict:
    older = {
        "older figure4": older_figure4,
        "older layer": older_layer,
        "older inference": lambda: older_inference([3, 3], passes=2),
    }
    return MAKERS | older


def test_caches(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    dice, found, originals = random.Random(0), Counter(), {}
    for name, maker in whole_caches().items():
        path = tmp_path / f"{name}.pt"
        torch.save(maker(), path) if name.startswith("older") else save_cache(path, maker())
        originals[name] = path.read_bytes(), load_cache(path, mmap=False)
    target, ways = tmp_path / "mutant.pt", Counter()
    for number in range(CACHES):
        name = dice.choice(list(originals))
        content, cache = originals[name]
        way = number % 3
        if way == 0:
            spoil = dice.choice(BYTEWISE)
            target.write_bytes(spoil(content, dice))
            what = spoil.__name__
        elif way == 1:
            values = whole_caches()[name]()
            what = respelled(values, dice)
            torch.save(values, target, _use_new_zipfile_serialization=dice.random() < 0.9)
        else:
            lying_archive(tmp_path / f"{name}.pt", target, dice)
            what = "lying archive"
        ways[what.split()[0]] += 1
        value = judge(read_cache, target, found, f"{number}: {name} {what}")
        if way == 0 and isinstance(value, dict):  # a flipped bit that passes is a flipped bit in a figure
            assert same(value, cache), (number, name, what)
    tell(capfd, f"{sum(found.values())} mutated caches: {dict(found)}; {dict(ways)}")
    assert sum(found.values()) == CACHES


# -- checkpoints
# ------------------------------------------------------------------------------------------------------------


def spoil_safetensors(content: bytes, dice) -> bytes:
    """A header that lies: its length, offsets, shapes, types, or its JSON."""
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    entry = header[dice.choice([name for name in header if name != "__metadata__"])]
    how = dice.choice(("length", "offsets", "shape", "dtype", "json", "deep"))
    if how == "length":
        return struct.pack("<Q", dice.choice((0, 7, length + 8, 2**31, 2**63, 2**64 - 1))) + content[8:]
    if how == "json":
        return struct.pack("<Q", length) + flipped(content[8 : 8 + length], dice) + data
    if how == "deep":
        deep = b"[" * length
        return struct.pack("<Q", length) + deep + data
    entry |= {
        "offsets": {"data_offsets": dice.choice(([0, 2**62], [8, 4], [-4, 0], [0, len(data) + 4]))},
        "shape": {"shape": dice.choice(([2**40, 2**40], [0], [-1], [*entry["shape"][::-1], 2], ["a"]))},
        "dtype": {"dtype": dice.choice(("F64", "BF16", "I8", "F4", "C64", "X", 3))},
    }[how]
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + data


def spoil_config(content: bytes, dice) -> bytes:
    config = json.loads(content)
    name = dice.choice(list(config))
    how = dice.choice(("value", "dropped", "bytes", "list"))
    if how == "bytes":
        return flipped(content, dice)
    if how == "list":
        return dice.choice((b"[]", b"3", b"null", b"[" * 100_000, b"\xff\xfe", b""))
    if how == "dropped":
        del config[name]
    else:
        config[name] = dice.choice([value for value in TYPES if not isinstance(value, bytes)])
    return json.dumps(config).encode()


def spoil_state(state: dict, dice) -> None:
    name = dice.choice(list(state))
    old = state[name]
    how = dice.choice(("dropped", "renamed", "value"))
    if how != "value":
        value = state.pop(name)
        if how == "renamed":
            state[dice.choice((name + "x", 3, "", "blocks.99." + name))] = value
        return
    state[name] = dice.choice(
        (
            old.to(torch.int8),
            old[..., :-1],
            torch.zeros(1).expand(10**6, 10**6),
            RunsCode(),
            "x",
            None,
            old.to_sparse(),
            old.to(torch.complex64),
            old[None],
            {"a": old},
        )
    )


def test_checkpoints(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert (GOLDEN / "golden_weights.npz").is_file()
    native, dice, found, ways = dict(golden_arrays("weights")), random.Random(1), Counter(), Counter()
    folder, checkpoint_file = tmp_path / "model", tmp_path / "sf.pt"
    folder.mkdir()
    write_transformer(folder, weight_names.to_diffusers_names(native), shards=2)
    whole = {path: path.read_bytes() for path in (folder / "transformer").iterdir()}
    torch.save({"generator_ema": native}, checkpoint_file)
    content = checkpoint_file.read_bytes()
    for path in (folder, checkpoint_file):
        assert read_checkpoint(path)[0] == "read"
    for number in range(CHECKPOINTS):
        if number % 2:
            path = dice.choice(list(whole))
            spoil = dice.choice(
                (*BYTEWISE, spoil_safetensors, spoil_safetensors)
                if path.suffix == ".safetensors"
                else (spoil_config, spoil_config, truncated, overwritten)
            )
            path.write_bytes(spoil(whole[path], dice))
            judge(read_checkpoint, folder, found, f"{number}: {path.name} {spoil.__name__}")
            path.write_bytes(whole[path])
            ways[spoil.__name__] += 1
            continue
        target, how = tmp_path / "mutant.pt", dice.choice(("bytes", "archive", "state", "state", "legacy"))
        if how == "bytes":
            target.write_bytes(dice.choice(BYTEWISE)(content, dice))
        elif how == "archive":
            lying_archive(checkpoint_file, target, dice)
        else:
            state = dict(native)
            spoil_state(state, dice)
            torch.save({"generator_ema": state}, target, _use_new_zipfile_serialization=how == "state")
            if how == "legacy" and dice.random() < 0.5:
                target.write_bytes(dice.choice((flipped, larger_numbers))(target.read_bytes(), dice))
        judge(read_checkpoint, target, found, f"{number}: .pt {how}")
        ways[how] += 1
    tell(capfd, f"{sum(found.values())} mutated checkpoints: {dict(found)}; {dict(ways)}")
    assert sum(found.values()) == CHECKPOINTS


def test_one_bit_of_a_large_record(tmp_path):
    """A token matrix stays on disk; it is compared with its checksum when it is used,
    or when that is asked for.
    """
    path = tmp_path / "c.pt"
    torch.save({"large": torch.zeros(EAGER_BYTES // 4 + 1000), "small": torch.zeros(3)}, path)
    content = load_tensors(path)
    assert not is_verified(content) and is_verified(content["small"])
    verify(content["large"][5:])  # any view of it
    assert is_verified(content) and is_verified(load_tensors(path, verify_all=True))
    for place in (EAGER_BYTES // 50, EAGER_BYTES // 2, EAGER_BYTES):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        content = load_tensors(path)
        with pytest.raises(UnreadableError, match=r"record c/data/0 is damaged .checksum"):
            verify(content["large"])
        for more in ({"verify_all": True}, {"mmap": False}):
            with pytest.raises(UnreadableError, match=r"record c/data/0 is damaged .checksum"):
                load_tensors(path, **more)
    os.truncate(path, 1000)  # to read it now would end the process
    with pytest.raises(UnreadableError, match="was cut off after it was opened"):
        verify(content["large"])


def test_a_bare_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.pt").write_bytes(pickle.dumps(RunsCode()))
    for read, error in ((load_cache, CacheError), (checkpoint.read_self_forcing_state, CheckpointError)):
        with pytest.raises(error, match="cannot be read"):
            read(tmp_path / "c.pt")
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_later_version_says_what_reads_it(tmp_path):
    cache = synthetic_caches.layer() | {"schema_version": 7, "read_by": "3.1.0"}
    torch.save(cache, tmp_path / "c.pt")
    with pytest.raises(
        CacheError, match=r"7 is newer than this code's 1; version 3.1.0 of this project reads it"
    ):
        load_cache(tmp_path / "c.pt")

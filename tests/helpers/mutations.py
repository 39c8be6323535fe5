"""Ways to spoil a file: its bytes, or what an archive, a header, a table or a tree inside it says."""

import copy
import json
import os
import struct
import zipfile
from typing import Any

import numpy as np
import torch

TYPES: list[Any] = [None, True, -1, 0, 3, 10**12, 2**70, 1.5, float("nan"), float("inf"), "x", "", b"x"]
TYPES += [[], [1], [[1]], {}, {"a": 1}, (1, 2)]


class RunsCode:
    """An object whose pickle would make a file when it is read."""

    def __reduce__(self):
        return os.system, ("touch ran-code",)


# --- Bytes
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


# --- Tables of tensors
def other_tensors(old: torch.Tensor) -> list[Any]:
    """Return what a tensor should not be: of another dtype, shape or layout, or larger than its file."""
    return [
        old.double(),
        old.to(torch.int8),
        old.to(torch.complex64),
        old.bfloat16(),
        old[..., :-1],
        old[None],
        old.flatten(),
        old.to_sparse(),
        torch.zeros(0),
        torch.quantize_per_tensor(old.float().nan_to_num(), 0.1, 0, torch.quint8),
        torch.zeros(1).expand(10**6, 10**6),  # one value on disk
    ]


def respelled(values: dict, dice) -> str:
    """Change one field in place, of a cache or of an entry: dropped, renamed, or of another value."""
    entries = values.get("attention_weights")
    inside = isinstance(entries, list) and entries and dice.random() < 0.4
    table = dice.choice(entries) if inside else values
    name = dice.choice(list(table))
    how = dice.choice(("dropped", "renamed", "type", "tensor", "nested", "code"))
    value = table.pop(name)
    if how == "renamed":
        table[name[::-1]] = value
    elif how == "type":
        table[name] = dice.choice(TYPES)
    elif how == "tensor":
        table[name] = dice.choice(other_tensors(value if isinstance(value, torch.Tensor) else torch.zeros(3)))
    elif how == "nested":
        value = [0]
        for _ in range(dice.choice((30, 60, 400))):
            value = [value] * dice.choice((1, 10))
        table[name] = value
    elif how == "code":
        table[name] = dice.choice((RunsCode(), np.array([RunsCode()], dtype=object), [{"a": RunsCode()}]))
    return f"{how} {name}"


def spoil_state(state: dict, dice) -> None:
    """Change one tensor of a state dict in place."""
    name = dice.choice(list(state))
    old, how = state.pop(name), dice.choice(("dropped", "renamed", "value"))
    if how == "renamed":
        state[dice.choice((name + "x", 3, "", "blocks.99." + name))] = old
    elif how == "value":
        state[name] = dice.choice([*other_tensors(old)[1:], RunsCode(), "x", None, {"a": old}])


# --- Archives and headers
def lying_archive(content_path, target, dice) -> None:
    """Write a zip with right checksums whose records are not what its pickle says, or with another pickle."""
    how = dice.choice(("shorter", "longer", "missing", "pickle", "compressed", "declared"))
    with zipfile.ZipFile(content_path) as old, zipfile.ZipFile(target, "w") as new:
        chosen = dice.choice([name for name in old.namelist() if "/data/" in name])
        for name in old.namelist():
            content, method = old.read(name), zipfile.ZIP_STORED
            if name == chosen and how == "missing":
                continue
            if name == chosen and how == "compressed":
                content, method = bytes(1 << 26), zipfile.ZIP_DEFLATED
            elif name == chosen and how in ("shorter", "longer"):
                content = content[:-4] if how == "shorter" else content + bytes(400)
            elif name.endswith("data.pkl") and how in ("pickle", "declared"):
                content = flipped(content, dice) if how == "pickle" else larger_numbers(content, dice)
            new.writestr(name, content, method)


def larger_numbers(content: bytes, dice) -> bytes:
    """Make one of a pickle's numbers huge: BININT1 or BININT2 -> BININT, or LONG1."""
    at = dice.choice([i for i, byte in enumerate(content[:-3]) if byte in b"KM"])
    new = dice.choice((b"J" + struct.pack("<i", 2**31 - 1), b"\x8a\x08" + struct.pack("<q", 2**60)))
    return content[:at] + new + content[at + (2 if content[at] == ord("K") else 3) :]


def spoil_safetensors(content: bytes, dice) -> bytes:
    """Return a file whose header lies: its length, offsets, shapes, types, or its JSON."""
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    entry = header[dice.choice([name for name in header if name != "__metadata__"])]
    how = dice.choice(("length", "data_offsets", "shape", "dtype", "json", "deep"))
    if how == "length":
        return struct.pack("<Q", dice.choice((0, 7, length + 8, 2**31, 2**63, 2**64 - 1))) + content[8:]
    if how in ("json", "deep"):
        return (
            content[:8] + (flipped(content[8 : 8 + length], dice) if how == "json" else b"[" * length) + data
        )
    lies = {
        "data_offsets": ([0, 2**62], [8, 4], [-4, 0], [0, len(data) + 4]),
        "shape": ([2**40, 2**40], [0], [-1], [*entry["shape"][::-1], 2], ["a"]),
        "dtype": ("F64", "BF16", "I8", "F4", "C64", "X", 3),
    }
    entry[how] = dice.choice(lies[how])
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + data


# --- Trees of plain values: JSON and YAML
HUGE_NUMBER = "HUGE NUMBER"  # written as a number of 5000 digits
VALUES = [
    *(value for value in TYPES if not isinstance(value, (bytes, tuple))),
    -(10**30), 10**6, 10**9, "\ud800", "\x1b[31m\n", "x" * 100_000, "../../etc/passwd", ".", "/", "a\nb",
    [[]] * 50, [1] * 5000, {"a": {"b": {"c": [None]}}}, "${oc.env:HOME}", "???",
    HUGE_NUMBER, "cuda:0", "auto",
]  # fmt: skip


def places(tree: Any, at: tuple = ()) -> list[tuple]:
    """Return the keys and indices that lead to each value of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:50] if isinstance(tree, list) else ())
    return [at] * bool(at) + [place for key, value in items for place in places(value, (*at, key))]


def value_at(tree: Any, at: tuple) -> Any:
    for key in at:
        tree = tree[key]
    return tree


def changed(tree: Any, dice) -> tuple[Any, str]:
    """Return a tree with one value replaced, dropped, renamed, given twice, or put into another."""
    tree = copy.deepcopy(tree)
    at = dice.choice([place for place in places(tree) if len(place) < 3] or places(tree))
    holder, key = value_at(tree, at[:-1]), at[-1]
    how = dice.choice(("value", "value", "value", "dropped", "renamed", "nested", "moved"))
    if how == "value":
        holder[key] = copy.deepcopy(dice.choice(VALUES))
    elif how == "nested":
        holder[key] = dice.choice(([holder[key]], {"a": holder[key]}))
    elif how == "moved":
        holder[key] = copy.deepcopy(value_at(tree, dice.choice(places(tree))))
    else:
        value = holder.pop(key)
        if how == "renamed" and isinstance(holder, dict):
            holder[str(key)[::-1] + dice.choice(("", "\n", "x"))] = value
    return tree, how


def as_json(tree: Any) -> bytes:
    """Return JSON, which is YAML too, with halves of characters and numbers of any length."""
    return json.dumps(tree).replace(json.dumps(HUGE_NUMBER), "9" * 5000).encode()


def spoilt_json(content: bytes, dice) -> tuple[bytes, str]:
    """Change a JSON file inside its structure."""
    tree, how = changed(json.loads(content), dice)
    return as_json(tree), how

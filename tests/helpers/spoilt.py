"""Ways to spoil a file: its bytes, or what an archive, a header, a table or a tree inside it says."""

import copy
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import yaml

TYPES: list[Any] = [None, True, -1, 0, 3, 10**12, 2**70, 1.5, float("nan"), float("inf"), "x", "", b"x"]
TYPES += [[], [1], [[1]], {}, {"a": 1}, (1, 2)]


class RunsCode:
    """An object whose pickle would make a file when it is read."""

    def __reduce__(self):
        return os.system, ("touch ran-code",)


def spoilt(path: Path, dice: Random) -> tuple[bytes, str, bool]:
    """Return spoilt content of a whole file, how it was made, and whether inside valid structure."""
    content, inside = path.read_bytes(), INSIDE[path.suffix]
    if dice.random() < 0.4:
        way = dice.choice(BYTEWISE)
        return way(content, dice), way.__name__, False
    way = dice.choice(inside)
    return way(content, dice), way.__name__, True


# --- Bytes
def truncated(content: bytes, dice: Random) -> bytes:
    return content[: dice.randrange(len(content))]


def flipped(content: bytes, dice: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 8, 64))):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def overwritten(content: bytes, dice: Random) -> bytes:
    start, length = dice.randrange(len(content)), dice.randrange(1, 200)
    return content[:start] + dice.randbytes(length) + content[start + length :]


def lengthened(content: bytes, dice: Random) -> bytes:
    return content + dice.randbytes(dice.randrange(1, 500))


BYTEWISE = (truncated, flipped, overwritten, lengthened)


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
                content, method = bytes(1 << 26), zipfile.ZIP_DEFLATED
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


# --- Trees of plain values, lines and cells
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
LINES = [
    "a red circle",
    "一只猫",
    "# a comment",
    "x" * 5000,
    "a\0b",
    "../../etc/passwd",
    "a\x1b[31m",
    "",
    ".",
]
CELLS = [b"nan", b"inf", b"1e999", b"x", b"", b"-1", b"9" * 5000, b'"', b"\xff", b"0.5,0.5"]


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


def other_lines(content: bytes, dice: Random) -> bytes:
    return "\n".join(dice.choices(LINES, k=dice.randrange(1, 30))).encode()


def other_cell(content: bytes, dice: Random) -> bytes:
    rows = [line.split(b",") for line in content.splitlines()]
    row = dice.choice(rows)
    row[dice.randrange(len(row))] = dice.choice(CELLS)
    return b"\n".join(b",".join(row) for row in rows)


INSIDE = {
    ".pt": (respelled, lying_archive),
    ".safetensors": (lying_header,),
    ".json": (other_tree,),
    ".yaml": (other_tree, other_tree, hostile_yaml),
    ".txt": (other_lines,),
    ".csv": (other_cell,),
}

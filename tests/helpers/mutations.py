"""Ways to spoil a file: its bytes, and inside its structure: what an archive, a header, a table or a tree of
values says.
"""

import copy
import json
import os
import struct
import zipfile
from typing import Any

import numpy as np
import torch

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
    """An object whose pickle would make a file when it is read."""

    def __reduce__(self):
        return os.system, ("touch ran-code",)


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
    """Change one field in place: dropped, renamed, of another type, dtype or shape, or larger than a file."""
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
    """A zip with right checksums whose records are not what its pickle says: other lengths, names, numbers in
    the pickle.
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


# -- trees of plain values: JSON and YAML
# ----------------------------------------------------------------------------------

HUGE_NUMBER = "HUGE NUMBER"  # written as a number of 5000 digits
VALUES = [
    *(value for value in TYPES if not isinstance(value, (bytes, tuple))),
    -(10**30), 10**6, 10**9, "\ud800", "\x1b[31m\n", "x" * 100_000, "../../etc/passwd", ".", "/", "a\nb",
    [[]] * 50, [1] * 5000, {"a": {"b": {"c": [None]}}}, "${oc.env:HOME}", "???",
    HUGE_NUMBER, "cuda:0", "auto",
]  # fmt: skip


def places(tree: Any, at: tuple = ()) -> list[tuple]:
    """Where a tree can be changed: the keys and indices that lead to each of its values."""
    found = [at] if at else []
    if isinstance(tree, dict):
        items = list(tree.items())
    else:
        items = list(enumerate(tree[:50])) if isinstance(tree, list) else []
    for key, value in items:
        found += places(value, (*at, key))
    return found


def changed(tree: Any, dice) -> tuple[Any, str]:
    """A tree with one value replaced, dropped, renamed, given twice, or put into another."""
    tree = copy.deepcopy(tree)
    at = dice.choice([place for place in places(tree) if len(place) < 3] or places(tree))
    holder = tree
    for key in at[:-1]:
        holder = holder[key]
    key, how = at[-1], dice.choice(("value", "value", "value", "dropped", "renamed", "nested", "moved"))
    if how == "value":
        holder[key] = copy.deepcopy(dice.choice(VALUES))
    elif how == "nested":
        holder[key] = dice.choice(([holder[key]], {"a": holder[key]}))
    elif how == "moved":
        other = dice.choice(places(tree))
        value = tree
        for step in other:
            value = value[step]
        holder[key] = copy.deepcopy(value)
    else:
        value = holder.pop(key)
        if how == "renamed" and isinstance(holder, dict):
            holder[str(key)[::-1] + dice.choice(("", "\n", "x"))] = value
    return tree, how


def as_json(tree: Any) -> bytes:
    """JSON with what a file may hold beyond Python's: halves of characters, numbers of any length."""
    text = json.dumps(tree, ensure_ascii=True)
    return text.replace(json.dumps(HUGE_NUMBER), "9" * 5000).encode()


def as_yaml(tree: Any) -> bytes:
    """YAML in the flow style, which JSON is."""
    return as_json(tree)


def spoilt_json(content: bytes, dice) -> tuple[bytes, str]:
    """A JSON file changed inside its structure."""
    tree, how = changed(json.loads(content), dice)
    return as_json(tree), how

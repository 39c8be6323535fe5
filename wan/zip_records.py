"""What lies where in a .pt: a strict reader of the zip archives that torch.save writes, and their checksums.

Two readers of one archive must not see different files. So nothing is searched for: the end of the directory
is the end of the file, its entries fill the directory, records are stored as they are and do not overlap.
"""

import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, reduce
from operator import xor
from typing import BinaryIO

from wan.errors import OneLineError, named

MAGIC = b"PK\x03\x04"  # by which torch tells an archive from the older format
CHUNK = 1 << 20  # bytes whose checksum is computed at a time

END, END64, LOCATOR64 = (struct.Struct(f"<4s{rest}") for rest in ("4H2LH", "Q2H2L4Q", "LQL"))
ENTRY, LOCAL = (struct.Struct(f"<4s{rest}") for rest in ("6H3L5H2L", "5H3L2H"))
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF  # the number stands in the 64-bit fields


class UnreadableError(OneLineError, ValueError):
    """Why a file was not read, in one line without its name."""


@dataclass(frozen=True)
class Record:
    """One stored file of an archive: its bytes start at start, of which crc is the checksum."""

    name: str
    start: int
    size: int
    crc: int

    @property
    def is_storage(self) -> bool:
        return "/data/" in self.name


def read_records(file: BinaryIO) -> list[Record]:
    """The records of an archive, in order of their places. Raises UnreadableError for any irregularity."""
    size = file.seek(0, os.SEEK_END)
    try:
        count, start, length = _directory(file, size)
        file.seek(start)
        content, place, records = file.read(length), 0, []
        for _ in range(count):
            record, place = _entry(content, place, file, start)
            records.append(record)
    except (struct.error, UnicodeDecodeError, OSError, OverflowError):
        raise UnreadableError("damaged: its directory cannot be read") from None
    if place != len(content):
        raise UnreadableError("damaged: its directory holds more than its records")
    records.sort(key=lambda record: record.start)
    ends = [0, *(record.start + record.size for record in records)]
    if any(record.start < end for record, end in zip(records, ends, strict=False)) or ends[-1] > start:
        raise UnreadableError("its records overlap, as no cache's or checkpoint's do")
    names = [record.name for record in records]
    if len(set(names)) < len(names) or len({name.partition("/")[0] for name in names}) != 1:
        raise UnreadableError("its records have names of more than one archive, or a name twice")
    return records


def _directory(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """How many entries the directory has, where it starts, how many bytes it takes."""
    file.seek(max(0, size - END.size))
    sign, disk, disk_too, here, count, length, start, comment = END.unpack(file.read(END.size))
    if sign != b"PK\5\6" or comment or disk or disk_too or here != count:
        raise UnreadableError("its end is missing: it was cut off, or something was appended")
    end = size - END.size
    if end >= LOCATOR64.size + END64.size:
        file.seek(end - LOCATOR64.size - END64.size)
        content = file.read(END64.size + LOCATOR64.size)
        if content[END64.size :].startswith(b"PK\6\7"):
            end -= LOCATOR64.size + END64.size
            sign, own, *_, here, count, length, start = END64.unpack(content[: END64.size])
            _, _, place, disks = LOCATOR64.unpack(content[END64.size :])
            if (sign, own, place, disks, here) != (b"PK\6\6", END64.size - 12, end, 1, count):
                raise UnreadableError("damaged: the end of its directory contradicts itself")
    if start + length != end or count * ENTRY.size > length:
        raise UnreadableError("its directory is not at its end: it was cut off, or something was appended")
    return count, start, length


def _entry(content: bytes, place: int, file: BinaryIO, limit: int) -> tuple[Record, int]:
    """The record of the directory's entry at place, and the place of the next."""
    sign, _, _, flags, method, _, _, crc, packed, size, name_length, extra_length, comment, *_, local = (
        ENTRY.unpack_from(content, place)
    )
    names = place + ENTRY.size
    name = content[names : names + name_length].decode("utf-8")
    extra = content[names + name_length : names + name_length + extra_length]
    wide = _wide_numbers(extra)
    size, packed, local = (next(wide, value) if value == FULL32 else value for value in (size, packed, local))
    if sign != b"PK\1\2" or comment or flags & 1 or not name.isprintable():
        raise UnreadableError("damaged: an entry of its directory")
    if method or packed != size:
        raise UnreadableError(f"its record {named(name)} is compressed, as no cache's or checkpoint's is")
    file.seek(local)
    sign, *_, name_length, extra_length = LOCAL.unpack(file.read(LOCAL.size))
    start = local + LOCAL.size + name_length + extra_length
    if sign != MAGIC or file.read(name_length) != name.encode() or start + size > limit:
        raise UnreadableError(f"its record {named(name)} is not where its directory says")
    return Record(name, start, size, crc), names + len(name.encode()) + len(extra) + comment


def _wide_numbers(extra: bytes):
    """The 64-bit numbers of an entry, in the order in which they take the place of others."""
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, place)
        if kind == 1:
            yield from struct.unpack_from(f"<{length // 8}Q", extra, place + 4)
            return
        place += 4 + length


def crc32(data: memoryview) -> int:
    """zlib.crc32 in threads: the checksum of AB is that of B and that of A, carried over the bytes of B.

    Carrying over is linear in the bits: what becomes of each of the 32 says what becomes of any.
    """
    even = len(data) - len(data) % CHUNK
    if not even:
        return zlib.crc32(data)
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda start: zlib.crc32(data[start : start + CHUNK]), range(0, even, CHUNK))
        total = 0
        for part in parts:
            total = reduce(xor, (_carried()[bit] for bit in range(32) if total >> bit & 1), part)
    return zlib.crc32(data[even:], total)


@cache
def _carried() -> list[int]:
    """What becomes of each bit of a checksum over CHUNK more bytes."""
    zeros = bytes(CHUNK)
    return [zlib.crc32(zeros, 1 << bit) ^ zlib.crc32(zeros) for bit in range(32)]

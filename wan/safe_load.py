"""torch.load for files that may be damaged or hostile: nothing runs, and no size is believed unchecked.

A .pt is a zip of a pickle and one record per storage. weights_only keeps the pickle from running code. Here
the records are compared with their checksums, and every storage and tensor with the record it claims to be.
"""

import mmap
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import xor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

LARGE_BYTES = 1 << 24  # the checksums of larger records are computed in threads, 3 GB/s each
CHUNK = 1 << 20  # by so many bytes at a time
MAX_DEPTH = 32  # containers in containers; a cache has 3


class UnreadableError(ValueError):
    """Why a file was not read, in one line without its name."""


def load_tensors(path: str | Path, mmap: bool = True) -> Any:
    """What torch.save wrote: tensors in plain containers, and what torch.serialization.safe_globals allows.

    Tensors stay on disk while mmap is true and the file's format (that of torch 1.6 and later) allows. Raises
    UnreadableError for any other file, one that is damaged, or one that declares more than it holds.
    """
    with warnings.catch_warnings(action="ignore"):  # of pickle protocols: an error says all there is to say
        return _load(path, mmap)


def _load(path: str | Path, mmap: bool) -> Any:
    try:
        if not zipfile.is_zipfile(
            path
        ):  # the format before torch 1.6: read with a copy, its lengths checked by torch
            content = torch.load(path, map_location="cpu", weights_only=True)
            _check_content(content, Path(path).stat().st_size, None)
            return content
        records = _check_records(path)
        # Mapped first, whatever was asked: a storage that claims too much then ends with the file.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_content(content, Path(path).stat().st_size, records)
        return content if mmap else torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except UnreadableError:
        raise
    except Exception as error:  # a damaged pickle can raise anything; whatever it was, the file was not read
        raise UnreadableError(_reason(error)) from error


def _check_records(path: str | Path) -> Counter[int]:
    """The lengths of a .pt's storages; UnreadableError where records are not what the archive says."""
    size, lengths = Path(path).stat().st_size, Counter()
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if sum(record.file_size for record in records) > size:
            raise UnreadableError(f"its records declare more than its {size} bytes")
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise UnreadableError(
                    f"its record {record.filename!r} is compressed, as no cache or checkpoint is"
                )
            if "/data/" in record.filename:
                lengths[record.file_size] += 1
            _check_crc(path, archive, record)
    return lengths


def _check_crc(path: str | Path, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Compare a record with its checksum; zipfile does so for a small one when its end is reached."""
    try:
        with archive.open(record) as file:
            if record.file_size <= LARGE_BYTES:
                while file.read(CHUNK):
                    pass
            elif _crc32_of_record(path, record) != record.CRC:
                raise zipfile.BadZipFile
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise UnreadableError(f"its record {record.filename!r} is damaged (checksum)") from None


def _crc32_of_record(path: str | Path, record: zipfile.ZipInfo) -> int:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        name_length, extra_length = struct.unpack_from("<HH", content, record.header_offset + 26)
        start = record.header_offset + 30 + name_length + extra_length
        with memoryview(content) as view, view[start : start + record.file_size] as data:
            return crc32(data)


def crc32(data: memoryview) -> int:
    """zlib.crc32 in threads: the checksum of AB is that of B and that of A, carried over the bytes of B.

    Carrying over is linear in the bits: what becomes of each of the 32 says what becomes of any.
    """
    zeros = bytes(CHUNK)
    carried = [zlib.crc32(zeros, 1 << bit) ^ zlib.crc32(zeros) for bit in range(32)]
    even = len(data) - len(data) % CHUNK
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda start: zlib.crc32(data[start : start + CHUNK]), range(0, even, CHUNK))
        total = 0
        for part in parts:
            total = reduce(xor, (carried[bit] for bit in range(32) if total >> bit & 1), part)
    return zlib.crc32(data[even:], total)


def _check_content(content: Any, size: int, records: Counter[int] | None) -> None:
    """Tensors no larger than the file, storages that are its records, no more values than it has bytes."""
    storages: dict[int, int] = {}
    for count, value in enumerate(_values(content)):
        if count > size:
            raise UnreadableError(f"it unfolds to more values than its {size} bytes")
        if not isinstance(value, Tensor):
            continue
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise UnreadableError(
                f"it holds a tensor of layout {value.layout} on {value.device}, not a plain one"
            )
        if value.numel() * value.element_size() > size:
            raise UnreadableError(f"it declares a tensor of {list(value.shape)}, more than its {size} bytes")
        storage = value.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    if records is not None and Counter(storages.values()) - records:
        raise UnreadableError("it declares a tensor of another length than its record")


def _values(content: Any, depth: int = 0) -> Iterator[Any]:
    """All values of nested containers, shared ones each time: what a reader that walks them would meet."""
    if depth > MAX_DEPTH:
        raise UnreadableError(f"its containers lie more than {MAX_DEPTH} deep")
    yield content
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield key
            yield from _values(value, depth + 1)
    elif isinstance(content, (list, tuple, set, frozenset)):
        for value in content:
            yield from _values(value, depth + 1)


def _reason(error: Exception) -> str:
    if isinstance(error, UnpicklingError) and "GLOBAL" in str(error):
        name = (str(error).partition("GLOBAL ")[2].split() or ["an unnamed object"])[0]
        return f"it holds a {name}, which is neither tensor nor plain value, and is not opened for safety"
    lines = str(error).strip().splitlines()
    return (
        f"{lines[0][:300]}"
        if lines and not isinstance(error, KeyError)
        else f"damaged ({type(error).__name__})"
    )

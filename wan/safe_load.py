"""torch.load for files that may be damaged or hostile: nothing runs, and no size is believed unchecked.

A .pt is a zip of a pickle and one record per storage (wan/zip_records.py). weights_only keeps the pickle from
running code. Here the archive's structure is checked always, records up to EAGER_BYTES are compared with
their checksums on opening, and larger ones, which stay on disk until they are used, by verify().
"""

import mmap as mapping
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from wan.errors import named, reason_of
from wan.zip_records import MAGIC, Record, UnreadableError, crc32, read_records

__all__ = ["EAGER_BYTES", "UnreadableError", "is_verified", "load_tensors", "verify"]

EAGER_BYTES = 1 << 26  # records up to 64 MiB are compared with their checksums when a file is opened
MAX_DEPTH = 32  # containers in containers; a cache has 3


class _Waiting(NamedTuple):
    """A mapped storage that was not compared with its checksum yet."""

    storage: StorageWeakRef
    record: Record
    path: Path
    state: tuple[int, ...]  # of the file when it was mapped


_waiting: dict[int, _Waiting] = {}  # by the storage's address


def load_tensors(path: str | Path, mmap: bool = True, verify_all: bool = False) -> Any:
    """What torch.save wrote: tensors in plain containers, and what torch.serialization.safe_globals allows.

    Tensors stay on disk while mmap is true and the file's format (that of torch 1.6 and later) allows. Where
    they do, those of more than EAGER_BYTES are not compared with their checksums unless verify_all is true;
    verify() does so. Raises UnreadableError for any other file, one that is damaged, or one that declares
    more than it holds.
    """
    path = Path(path)
    with warnings.catch_warnings(action="ignore"):  # of pickle protocols: an error says all there is to say
        try:
            before = _state_of(path)
            content = _load(path, mmap, verify_all)
            if _state_of(path) != before:
                raise UnreadableError("it was replaced or changed while it was read; read it again")
            return content
        except (UnreadableError, MemoryError):
            raise
        except (
            Exception
        ) as error:  # a damaged pickle can raise anything; whatever it was, the file was not read
            raise UnreadableError(_reason(error)) from error


def verify(*tensors: Tensor) -> None:
    """Compare mapped tensors with their checksums, once; others are verified. Raises UnreadableError."""
    for tensor in tensors:
        if waiting := _waiting_of(tensor):
            _check_mapped(waiting, tensor.untyped_storage())
            _waiting.pop(tensor.untyped_storage().data_ptr(), None)


def is_verified(values: Any) -> bool:
    """Whether all tensors in nested containers were compared with their checksums, or are not of a file."""
    return not any(isinstance(value, Tensor) and _waiting_of(value) for value in _values(values))


def _waiting_of(tensor: Tensor) -> _Waiting | None:
    address = tensor.untyped_storage().data_ptr()
    waiting = _waiting.get(address)
    if waiting and waiting.storage.expired():  # the address is another storage's by now
        del _waiting[address]
        return None
    return waiting


def _check_mapped(waiting: _Waiting, storage: torch.UntypedStorage) -> None:
    """Compare a mapped storage with its checksum. Reading past the end of a file that was cut off would end
    the process.
    """
    _, record, path, before = waiting
    with suppress(OSError):  # a file that was replaced or removed stays whole where it is mapped
        device, inode, size, _ = _state_of(path)
        if (device, inode) == before[:2] and size < record.start + record.size:
            raise UnreadableError(f"{path} was cut off after it was opened; make or get it again")
    content = torch.empty(0, dtype=torch.uint8).set_(storage)
    if crc32(content.numpy().data) != record.crc:
        raise UnreadableError(f"{path}: its record {named(record.name)} is damaged (checksum)")


def _state_of(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    state = path.stat()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _load(path: Path, mmap: bool, verify_all: bool) -> Any:
    state = _state_of(path)
    size = state[2]
    with path.open("rb") as file:
        if (
            file.read(len(MAGIC)) != MAGIC
        ):  # the format before torch 1.6: torch copies it and checks its lengths
            content = torch.load(path, map_location="cpu", weights_only=True)
            _check_content(content, size)
            return content
        records = read_records(file)
        mmap = mmap and size > EAGER_BYTES  # a smaller file is copied: it may be cut off while it is in use
        _check_crcs(file, records, EAGER_BYTES if mmap and not verify_all else size)
    # Mapped first, whatever was asked: a storage that claims too much then ends with the file.
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    mapped = _records_of(_check_content(content, size), records)
    if not mmap:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
        _check_content(content, size)
        return content
    for storage, record in mapped if not verify_all else ():
        if record.size > EAGER_BYTES:
            _waiting[storage.data_ptr()] = _Waiting(StorageWeakRef(storage), record, path, state)
    return content


def _check_crcs(file: BinaryIO, records: Iterable[Record], limit: int) -> None:
    """Compare records of at most limit bytes with their checksums."""
    with mapping.mmap(file.fileno(), 0, access=mapping.ACCESS_READ) as content, memoryview(content) as view:
        for record in records:
            if record.size <= limit:
                with view[record.start : record.start + record.size] as data:
                    damaged = crc32(data) != record.crc
                if damaged:
                    raise UnreadableError(f"its record {named(record.name)} is damaged (checksum)")


def _check_content(content: Any, size: int) -> list[torch.UntypedStorage]:
    """Tensors no larger than the file, no more values than it has bytes -> the storages, by address.

    A tensor that requires a gradient is one no more: nothing here trains what it read.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for count, value in enumerate(_values(content)):
        if count > size:
            raise UnreadableError(f"it unfolds to more values than its {size} bytes")
        if not isinstance(value, Tensor):
            continue
        plain = type(value) in (Tensor, torch.nn.Parameter) and not value.is_nested
        if not plain or value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise UnreadableError(
                f"it holds a tensor of layout {value.layout} on {value.device}, not a plain one"
            )
        value.requires_grad_(False)
        if value.numel() * value.element_size() > size:
            raise UnreadableError(f"it declares a tensor of {list(value.shape)}, more than its {size} bytes")
        storage = value.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return [storages[address] for address in sorted(storages)]


def _records_of(
    storages: Sequence[torch.UntypedStorage], records: Sequence[Record]
) -> list[tuple[torch.UntypedStorage, Record]]:
    """The record that each storage of a mapped file is. Raises UnreadableError where one is none of them."""
    by_start = {record.start: record for record in records if record.is_storage and record.size}
    for first in by_start.values() if storages else ():
        base = storages[0].data_ptr() - first.start
        found = [(storage, by_start.get(storage.data_ptr() - base)) for storage in storages]
        pairs = [(s, record) for s, record in found if record and record.size == s.nbytes()]
        if len(pairs) == len(storages):
            return pairs
    if storages:
        raise UnreadableError("it declares a tensor of another length than its record")
    return []


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
        return (
            f"it holds a {named(name)}, which is neither tensor nor plain value, and is not opened for safety"
        )
    return reason_of(error)

"""Text, JSON and YAML of bounded size, UTF-8 by name whatever the locale; any other file is refused in one
line.
"""

import json
import mmap as mapping
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from operator import xor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from wan.errors import ConfigError, UserError, reason_of, short_repr

# --- What lies where in a .pt: a strict reader of the zip archives that torch.save writes, and their
MAGIC = b"PK\x03\x04"  # by which torch tells an archive from the older format
CHUNK = 1 << 20  # bytes whose checksum is computed at a time

END, END64, LOCATOR64 = (struct.Struct(f"<4s{rest}") for rest in ("4H2LH", "Q2H2L4Q", "LQL"))
ENTRY, LOCAL = (struct.Struct(f"<4s{rest}") for rest in ("6H3L5H2L", "5H3L2H"))
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF  # the number stands in the 64-bit fields


class UnreadableError(UserError, ValueError):
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
        raise UnreadableError(
            f"its record {short_repr(name)} is compressed, as no cache's or checkpoint's is"
        )
    file.seek(local)
    sign, *_, name_length, extra_length = LOCAL.unpack(file.read(LOCAL.size))
    start = local + LOCAL.size + name_length + extra_length
    if sign != MAGIC or file.read(name_length) != name.encode() or start + size > limit:
        raise UnreadableError(f"its record {short_repr(name)} is not where its directory says")
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


# --- torch.load for files that may be damaged or hostile: nothing runs, and no size is believed unchecked
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
        raise UnreadableError(f"{path}: its record {short_repr(record.name)} is damaged (checksum)")


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
                    raise UnreadableError(f"its record {short_repr(record.name)} is damaged (checksum)")


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
        return f"it holds a {short_repr(name)}, which is neither tensor nor plain value, and is not opened for safety"  # noqa: E501
    return reason_of(error)


# --- The most of everything that can be counted: checked before anything is made from the number
MAX_LAYERS = 256  # of a transformer or an encoder; Wan2.1 14B has 40
MAX_SIZE = 1 << 18  # width, heads, vocabulary: any other number in a model's config
MAX_RES_BLOCKS = 16  # of each width of a VAE; Wan's has 2
MAX_LIST = 64  # numbers in a list of a model's config
MAX_COUNT = 1 << 17  # frames, tokens per frame or heads in a cache
MAX_FRAMES = 1 << 14  # latent frames of one rollout: 68 minutes of video
MAX_SIDE = 1 << 10  # of a latent frame: videos of 8192 pixels
MAX_STEPS = 10_000  # of the base model's sampler
MAX_DENOISING_STEPS = 100  # of a block
MAX_SCALE = 1000.0  # shift of noise levels, guidance
MAX_GPUS = 4096  # of one rollout
MAX_PROMPTS = 100_000  # of a sweep
MAX_NAME = 200  # characters of a model's name, which titles carry
MAX_PATH = 4096  # characters
MAX_TEXT = 100_000  # characters of a prompt; the encoder reads 512 tokens

CONFIG_BYTES = 1 << 18  # of a YAML file
JSON_BYTES = 1 << 26  # of a JSON file: a large tokenizer has 20 MB
TEXT_BYTES = 1 << 26  # of any other text: prompts, curves

SEED_BITS = 64  # signed


# --- Text, JSON and YAML of bounded size, UTF-8 by name whatever the locale; any other file is refused in one
def read_text(path: str | Path, limit: int = TEXT_BYTES, error: type[UserError] = ConfigError) -> str:
    """A file of UTF-8, with or without its mark, of at most limit bytes. Raises error for any other file."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            kind = os.fstat(file.fileno()).st_mode
            content = b"" if stat.S_ISFIFO(kind) else file.read(limit + 1)
    except (OSError, ValueError) as problem:
        raise error(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}") from problem
    if stat.S_ISFIFO(kind):
        raise error(f"{path} cannot be read: it is a pipe; write its content to a file")
    if len(content) > limit:
        raise error(f"{path} is larger than {limit} bytes, as no such file is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not text in UTF-8: {problem.reason} at byte {problem.start}") from None


def _without_waiting(path: str, flags: int) -> int:
    """Open a pipe as if somebody wrote to it: a name must not make a run wait for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))


def read_json(path: str | Path, error: type[UserError] = ConfigError) -> dict[str, Any]:
    """A JSON file that holds a table of settings. Raises error for any other."""
    text = read_text(path, JSON_BYTES, error)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as problem:  # ValueError: also numbers of 5000 digits
        raise error(f"{path} is not JSON: {reason_of(problem)}") from problem
    if not isinstance(content, dict):
        raise error(f"{path} holds a {type(content).__name__}, not a table of settings")
    return content


@cache
def _yaml_loader() -> type:
    """PyYAML's safe loader without aliases, which can unfold without end, and without keys given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(
                    problem="an alias (*name), which settings do not need; write its value out",
                    problem_mark=self.peek_event().start_mark,
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [name for name in names if names.count(name) > 1]:
                problem = f"the key {short_repr(twice[0])} twice; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            return super().construct_mapping(node, deep)

    return Loader


def read_yaml(path: str | Path) -> dict[Any, Any]:
    """A YAML file that holds a mapping of settings; texts stay as they are written, with nothing filled in.

    Raises ConfigError for any other.
    """
    content = load_yaml(path, "settings", CONFIG_BYTES)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a mapping of settings")
    return content


def load_yaml(path: str | Path, what: str, limit: int) -> Any:
    """What a YAML file of at most limit bytes holds; what says what it is of. ConfigError for any other."""
    import yaml

    text = read_text(path, limit)
    try:
        return yaml.load(text, Loader=_yaml_loader())
    except Exception as error:  # PyYAML's own error classes, and those of the values that it builds
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}: not a YAML file of {what}: {problem or reason_of(error)}{place}"
        ) from error

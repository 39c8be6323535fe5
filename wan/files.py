"""Text, YAML, JSON and tensors from files that may be damaged or hostile: read, or refused in one line."""

import copy
import io
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import yaml
from pydantic import Field

from wan.errors import ConfigError, UserError, did_you_mean, library_reads, reason_of

MAX_LAYERS = 256  # of a transformer or an encoder; Wan2.1 14B has 40
MAX_SIZE = 1 << 18  # width, heads, vocabulary: any other number in a model's config
MAX_COUNT = 1 << 17  # frames, tokens per frame or heads in a cache
MAX_FRAMES = 1 << 14  # latent frames of one rollout: 68 minutes of video
MAX_TEXT = 100_000  # characters of a prompt; the encoder reads 512 tokens
MAX_PROMPTS = 100_000  # of a sweep

Frames = Annotated[int, Field(ge=0, le=MAX_FRAMES)]  # of settings, whose fields errors.check_fields checks
Count = Annotated[int, Field(ge=1, le=MAX_FRAMES)]
Share = Annotated[float, Field(ge=0, le=1)]

CONFIG_BYTES = 1 << 18  # of a YAML file
TEXT_BYTES = 1 << 26  # of any other text: prompts, curves, JSON (a large tokenizer has 20 MB)
END_BYTES = 22  # of the record that ends an archive (APPNOTE.TXT of PKWARE, 4.3.16), without a comment
MAPPED_BYTES = 1 << 26  # a smaller file is copied: it may be overwritten while it is in use


class UnreadableError(ValueError):
    """Why a file was not read, without its name."""


def read_text(
    path: str | Path, limit: int = TEXT_BYTES, error: type[UserError] = ConfigError, form: str = ""
) -> str:
    """Read a plain file of at most limit bytes as UTF-8, with or without its mark. Raise error otherwise.

    form says what such a file looks like, to somebody who has none.
    """
    path = Path(path)
    with library_reads(path, error, form):
        if not path.exists() and path.parent.is_dir():
            others = [each.name for each in path.parent.glob(f"*{path.suffix}")]
            hint = did_you_mean(path.name, others) if get_close_matches(path.name, others, 1) else ""
            raise FileNotFoundError(f"No such file or directory{hint}")
        # A device or a pipe may never end.
        if path.exists() and not (path.is_file() and path.stat().st_size <= limit):
            raise ValueError(f"it is no plain file of at most {limit} bytes")
        return path.read_bytes().decode("utf-8-sig")


def read_json(path: str | Path, error: type[UserError] = ConfigError, form: str = "") -> dict[str, Any]:
    """Read a JSON file that holds a table of settings. Raise error for any other, which says form."""
    text = read_text(path, error=error, form=form)
    with library_reads(path, error, form):
        return dict(json.loads(text))


def read_yaml(
    path: str | Path,
    what: str = "settings",
    kind: type = dict,
    limit: int = CONFIG_BYTES,
    form: str = "",
) -> Any:
    """Read YAML that holds a mapping, or another kind, of what; ConfigError for any other file.

    A key given twice is an error, ${...} stays text.
    """
    from omegaconf import OmegaConf  # here: a --help needs no OmegaConf

    text = read_text(path, limit, form=form)
    with library_reads(f"{path}: the YAML of {what}"):
        for one in yaml.scan(text):  # YAML 1.1 reads 010 as 8, and 1:30 as 90
            is_plain = isinstance(one, yaml.ScalarToken) and one.plain
            if is_plain and re.fullmatch(r"[-+]?(0[0-7_]+|[1-9][\d_]*(:[0-5]?\d)+(\.[\d_]*)?)", one.value):
                remedy = "write a number without a leading 0 or colons, or a text in quotes"
                raise ConfigError(f"{path}, line {one.start_mark.line + 1}: {one.value} is unclear; {remedy}")
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    if not isinstance(content, kind):
        raise ConfigError(f"{path}: not a mapping of {what}")
    return content


def load_tensors(path: str | Path, mmap: bool = True) -> Any:
    """Read tensors in plain containers from what torch.save wrote. Nothing is executed.

    Every record is compared with its checksum first. With mmap, tensors of a file of more than MAPPED_BYTES
    stay on disk. torch.serialization.safe_globals allows more classes. Raise UnreadableError for any other
    file, and for one that declares more than it holds. A file that is replaced meanwhile is read again.
    """
    import torch  # here: a --help needs no torch

    path, before, problem = Path(path), None, None
    try:
        with warnings.catch_warnings(action="ignore"):  # of pickle protocols
            # 1. An archive: every record has the checksum that it says. A pipe or a device may never end.
            before = path.stat()
            if not path.is_file():
                raise UnreadableError("it is no plain file")
            zipped, size = is_archive(path), before.st_size
            if zipped:
                with ZipFile(path) as archive, TemporaryDirectory() as folder:
                    records = archive.infolist()
                    packed = sum(r.file_size for r in records if r.compress_type != ZIP_STORED)
                    # Where something stands before an archive, zipfile and torch would read two
                    start = min((r.header_offset for r in records), default=0)
                    if packed > MAPPED_BYTES or archive.comment or start:
                        raise UnreadableError("its records are not as torch.save writes them")
                    threads = os.cpu_count() or 1  # zlib computes without Python's lock
                    with ThreadPoolExecutor(threads) as pool:
                        list(pool.map(partial(_compare_checksums, path, step=threads), range(threads)))
                    if packed:  # write it again as torch.save writes it
                        with ZipFile(Path(folder) / path.name, "w") as stored:
                            for record in records:
                                stored.writestr(record.filename, archive.read(record))
                        return load_tensors(Path(folder) / path.name, mmap=False)
            # 2. Mapped first, whatever was asked: a storage that claims too much then ends with the file.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
            # 3. Plain strided tensors in host memory, none larger than the file: those of torch.save.
            for count, value in enumerate(_values(content)):
                if count > size:
                    raise UnreadableError(f"it unfolds to more values than its {size} bytes")
                if not isinstance(value, torch.Tensor):
                    continue
                plain = (
                    value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu"
                )
                if not plain or value.numel() * value.element_size() > size:
                    held = f"{list(value.shape)} of {value.dtype}, {value.layout}, on {value.device}"
                    raise UnreadableError(f"it declares a tensor {held} in its {size} bytes")
                value.requires_grad_(False)
            # 4. A small file is copied, so that it may be written again while its tensors are in use.
            stays = not zipped or (mmap and size > MAPPED_BYTES)
            found = content if stays else copy.deepcopy(content)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        problem = error
    # 5. A writer that replaced the file meanwhile would leave parts of two: read the new one.
    # (a number of a removed file may be the next one's, so its time and size count too)
    if before and path.exists():
        now = path.stat()
        same = [(x.st_dev, x.st_ino, x.st_mtime_ns, x.st_size) for x in (before, now)]
        if same[0] != same[1]:
            return load_tensors(path, mmap)
    if problem:
        raise problem if isinstance(problem, UnreadableError) else UnreadableError(reason_of(problem))
    return found


def is_archive(path: Path) -> bool:
    """Return True for a file that is one archive from its first to its last byte.

    UnreadableError where something is missing or was added: zipfile and torch would read two archives.
    """
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, path.stat().st_size - END_BYTES))
        end = file.read()
    known = is_zipfile(path), start == b"PK\x03\x04", end[:4] == b"PK\x05\x06" and end[-2:] == b"\0\0"
    if any(known[:2]) and not all(known):
        raise UnreadableError("it is no whole archive: its end is missing, or something was added")
    return known[0]


def _compare_checksums(path: Path, first: int, step: int) -> None:
    """Read each step-th record of an archive from the first on. Raises BadZipFile for one that is damaged."""
    with ZipFile(path) as archive:  # each thread its own: sharing one is a race before 3.12.4
        for record in archive.infolist()[first::step]:
            with archive.open(record) as file:
                while file.read(1 << 24):
                    pass


def _values(content: Any) -> Iterator[Any]:
    """Yield all values of nested containers, shared ones each time; RecursionError where it has no end."""
    yield content
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield key
            yield from _values(value)
    elif isinstance(content, (list, tuple, set, frozenset)):
        for value in content:
            yield from _values(value)

"""Text, YAML, JSON and tensors from files that may be damaged or hostile: read, or refused in one line.

Whatever holds tensors is read by read_tensors(): weights, LoRAs, latents, states of prompts. It tells a file
by its first bytes, not by its name.
"""

import copy
import functools
import io
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import yaml
from pydantic import Field

from wan import errors

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
UNCLEAR_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[1-9][\d_]*(:[0-5]?\d)+(\.[\d_]*)?)")

DOWNLOAD_HINT = "bash experiments/download_weights.sh"
DOWNLOADS: dict[str, str] = {}  # a path of a config's weights -> the command that downloads them
MINIATURE = "configs/wan_mini.yaml"


class UnreadableError(ValueError):
    """Why a file was not read, without its name."""


class OtherKindError(errors.CheckpointError, UnreadableError):
    """A file, what it is in place of plain tensors, and what to take."""


def read_text(
    path: str | Path,
    limit: int = TEXT_BYTES,
    error: type[errors.UserError] = errors.ConfigError,
    form: str = "",
) -> str:
    """Read a plain file of at most limit bytes as UTF-8, with or without its mark. Raise error otherwise.

    form says what such a file looks like, to somebody who has none.
    """
    path = Path(path)
    with errors.library_reads(path, error, form):
        if not path.exists() and path.parent.is_dir():
            neighbours = [file.name for file in path.parent.glob(f"*{path.suffix}")]
            hint = ""
            if get_close_matches(path.name, neighbours, 1):
                hint = errors.did_you_mean(path.name, neighbours)
            raise FileNotFoundError(f"No such file or directory{hint}")
        # A device or a pipe may never end.
        if path.exists() and not (path.is_file() and path.stat().st_size <= limit):
            raise ValueError(f"it is no plain file of at most {limit} bytes")
        return path.read_bytes().decode("utf-8-sig")


def read_json(
    path: str | Path, error: type[errors.UserError] = errors.ConfigError, form: str = ""
) -> dict[str, Any]:
    """Read a JSON file that holds a table of settings. Raise error for any other, which says form."""
    text = read_text(path, error=error, form=form)
    with errors.library_reads(path, error, form):
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
    with errors.library_reads(f"{path}: the YAML of {what}"):
        for token in yaml.scan(text):  # YAML 1.1 reads 010 as 8, and 1:30 as 90
            is_plain = isinstance(token, yaml.ScalarToken) and token.plain
            if is_plain and UNCLEAR_NUMBER.fullmatch(token.value):
                place = f"{path}, line {token.start_mark.line + 1}"
                remedy = "write a number without a leading 0 or colons, or a text in quotes"
                raise errors.ConfigError(f"{place}: {token.value} is unclear; {remedy}")
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    if not isinstance(content, kind):
        raise errors.ConfigError(f"{path}: not a mapping of {what}")
    return content


# --- Files of tensors, told by their first bytes
HEAD_BYTES = 512
PLAIN = "take the weights in bfloat16, or in FP8 with a scale a weight, such as fp8_e4m3fn_scaled"
DOWNLOAD_AGAIN = "download the file itself"
PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<error", b"<!--")
PACKED = {  # first bytes -> the program that unpacks them
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!": "rar",
}
OTHER_DATA = {
    b"\x93NUMPY": "an array of numpy",
    b"\x89HDF": "an HDF5",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
}
QUANTISERS = {  # parts of the names of weights -> who wrote them
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".quant_state.": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_scale_inv": "blocks of FP8, as DeepSeek's",
    ".weight_scale_2": "NVFP4",
    ".weight_packed": "compressed-tensors",
    ".qweight": "GPTQ, AWQ or SVDQuant",
    ".qzeros": "GPTQ or AWQ",
    ".wscales": "SVDQuant",
    "._weight_qdata": "torchao",
    ".weight_qdata": "torchao",
    ".weight._data": "quanto",
    ".weight._scale": "quanto",
}


def read_tensors(path: str | Path) -> Any:
    """Read what torch.save or safetensors wrote, whatever the file's name. Nothing is executed.

    Tensors are memory-mapped where possible. Raise OtherKindError for a file of another kind and for
    quantised weights, UnreadableError for a damaged one.
    """
    from safetensors.torch import load_file  # here: a --help needs no torch

    path = Path(path)
    if is_safetensors(path):
        content = load_file(path)
    else:
        content = load_tensors(path)
    mark = quantised_mark(content)
    if mark:
        raise OtherKindError(f"{path} is quantised ({mark}); {PLAIN}")
    return content


def is_safetensors(path: Path) -> bool:
    """Return True for a file that begins as a .safetensors does, or is called so and is not torch.save's.

    The first eight bytes are the length of its header, which is JSON. Raise OtherKindError for other kinds.
    """
    require_tensors(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return True
    of_torch = head.startswith((b"PK", b"\x80"))  # an archive, or a pickle
    return path.suffix == ".safetensors" and not of_torch


def require_tensors(path: Path) -> None:
    """Raise OtherKindError for a folder, and for a file whose first bytes are of no tensors."""
    kind = ""
    if os.path.isdir(path):
        kind = folder_kind(path)
    elif path.suffix == ".distcp" or path.name == ".metadata":
        kind = folder_kind(path.parent)
    elif os.path.isfile(path):
        with path.open("rb") as file:
            kind = first_bytes_kind(file.read(HEAD_BYTES))
    if kind:
        raise OtherKindError(f"{path} is {kind}")


def folder_kind(path: Path) -> str:
    """Return what a folder is that was given in place of a file of tensors, and what to do."""
    names = sorted(file.name for file in path.iterdir())
    # torch.distributed.checkpoint.save() writes .metadata, a pickle, and __0_0.distcp, __1_0.distcp ...
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        command = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        return f"a torch.distributed checkpoint; make one file of it: {command} {path} FILE.pt"
    below = sorted(file.parent for file in path.glob("*/.metadata"))
    if below:
        return f"a folder; {below[0].name} in it is {folder_kind(below[0])}"
    if "adapter_config.json" in names:
        return "the folder of a LoRA of PEFT; give it as lora_path"
    files = [name for name in names if name.endswith((".index.json", ".safetensors", ".pt", ".pth", ".bin"))]
    files.sort(key=lambda name: not name.endswith(".index.json"))
    if not files:
        return "a folder without weights; give a file of weights"
    return f"a folder; give a file in it: {', '.join(files[:3])}"


def first_bytes_kind(head: bytes) -> str:
    """Return what a file is that begins with no tensors, and what to do; "" for all others."""
    if not head:
        return f"empty; {DOWNLOAD_AGAIN}"
    if not any(head):
        return f"a file of zeros, whose download has not ended; {DOWNLOAD_AGAIN}"
    if head.startswith(b"GGUF"):
        return "a GGUF; take the model's .safetensors, such as fp8_e4m3fn_scaled"
    if head.startswith(b"version https://git-lfs"):
        return f"a git-lfs pointer in place of the file; fetch it by git lfs pull, or {DOWNLOAD_AGAIN}"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.lower().startswith(PAGES):
        return f"a web page; log in or look for another address, and {DOWNLOAD_AGAIN}"
    for start, name in OTHER_DATA.items():
        if head.startswith(start):
            return f"{name}; give a .pt or a .safetensors"
    packers = [name for start, name in PACKED.items() if head.startswith(start)]
    if head[257:262] == b"ustar":
        packers.append("tar")
    if packers:
        return f"packed by {packers[0]}; unpack it first"
    if all(32 <= byte < 127 or byte in b"\r\n\t" for byte in head):
        return f"text, which begins {errors.short_repr(text[:60].decode('ascii'))}; {DOWNLOAD_AGAIN}"
    return ""


def quantised_mark(content: Any) -> str:
    """Return what shows that a state dict, or one within another, is of quantised weights; "" otherwise.

    FP8 with a scale a weight, or none, is what wan/checkpoint.py dequantises.
    """
    import torch

    if not isinstance(content, Mapping):
        return ""
    # 1. What libraries put beside a weight, by its name
    marks = []
    for name in content:
        marks += [f"{writer}: {name}" for part, writer in QUANTISERS.items() if part in f".{name}"]
    # 2. Weights of another kind than floating point
    packed = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
    for name, value in content.items():
        is_weight = isinstance(value, torch.Tensor) and value.ndim > 1 and f".{name}".endswith(".weight")
        if is_weight and (value.dtype in packed or not value.is_floating_point()):
            marks.append(f"{value.dtype}: {name}")
    # 3. A state dict within this one
    marks += filter(None, map(quantised_mark, content.values()))
    return next(iter(marks), "")


def library_of(tensor: Any) -> str:
    """Return of which other library a tensor is, and what to take; "" for torch's own."""
    import torch

    kind = type(tensor)
    if kind.__module__.startswith("torch.distributed"):
        return f"holds a {kind.__name__}, a part of a tensor of several processes; save its full_tensor()"
    if tensor.is_quantized or kind not in (torch.Tensor, torch.nn.Parameter):
        return f"is quantised ({kind.__module__}.{kind.__name__} of {tensor.dtype}); {PLAIN}"
    return ""


def load_tensors(path: str | Path, mmap: bool = True) -> Any:
    """Read tensors in plain containers from what torch.save wrote. Nothing is executed.

    Every record is compared with its checksum first. With mmap, tensors of a file of more than MAPPED_BYTES
    stay on disk. torch.serialization.safe_globals allows more classes. Raise UnreadableError for any other
    file, and for one that declares more than it holds. A file that is replaced meanwhile is read again.
    """
    path, before = Path(path), None
    try:
        before = path.stat()
        with warnings.catch_warnings(action="ignore"):  # of pickle protocols
            content, problem = _load(path, mmap), None
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        problem = error
    # A writer that replaced the file meanwhile would leave parts of two: read the new one.
    # (a number of a removed file may be the next one's, so its time and size count too)
    if before is not None and path.exists():
        now = path.stat()
        states = [(stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in (before, now)]
        if states[0] != states[1]:
            return load_tensors(path, mmap)
    if problem is None:
        return content
    reason = errors.reason_of(problem)
    quantiser = re.search(r"it holds a ((?:torchao|bitsandbytes|optimum\.quanto|gptqmodel)\S*),", reason)
    if quantiser:  # a class of a library that is not imported
        raise OtherKindError(f"{path} is quantised ({quantiser[1]}); {PLAIN}")
    if isinstance(problem, UnreadableError):
        raise problem
    raise UnreadableError(reason)


def _load(path: Path, mmap: bool) -> Any:
    """Read a file of torch.save, with whatever error that is damaged."""
    import torch  # here: a --help needs no torch

    # 1. An archive: every record has the checksum that it says. A pipe or a device may never end.
    require_tensors(path)
    if not path.is_file():
        raise UnreadableError("it is no plain file")
    size, is_packed, zipped = path.stat().st_size, False, is_archive(path)
    with TemporaryDirectory() as folder:
        place = path
        if path.suffix == ".safetensors":  # which torch.load would not open itself
            place = Path(folder) / "weights.pt"
            place.symlink_to(path.resolve())
        if zipped:
            with ZipFile(path) as archive:
                records = archive.infolist()
                is_packed = _check_archive(path, archive)
                if is_packed:  # write it again as torch.save writes it
                    place = Path(folder) / "stored.pt"
                    with ZipFile(place, "w") as stored:
                        for record in records:
                            stored.writestr(record.filename, archive.read(record))
                    size = place.stat().st_size
        # 2. Mapped first, whatever was asked: a storage that claims too much then ends with the file.
        content = torch.load(place, map_location="cpu", weights_only=True, mmap=zipped)
    # 3. Plain strided tensors in host memory, none larger than the file: those of torch.save.
    for count, value in enumerate(_values(content)):
        if count > size:
            raise UnreadableError(f"it unfolds to more values than its {size} bytes")
        if not isinstance(value, torch.Tensor):
            continue
        library = library_of(value)
        if library:
            raise OtherKindError(f"{path} {library}")
        plain = value.layout == torch.strided and value.device.type == "cpu"
        if not plain or value.numel() * value.element_size() > size:
            tensor = f"{list(value.shape)} of {value.dtype}, {value.layout}, on {value.device}"
            raise UnreadableError(f"it declares a tensor {tensor} in its {size} bytes")
        value.requires_grad_(False)
    # 4. A small file is copied, so that it may be written again while its tensors are in use.
    stays = not zipped or (mmap and size > MAPPED_BYTES and not is_packed)
    if stays:
        return content
    return copy.deepcopy(content)


def _check_archive(path: Path, archive: ZipFile) -> bool:
    """Compare the records of an archive with their checksums; return True where they are compressed.

    Raise UnreadableError for an archive that torch.save did not write, and BadZipFile for a damaged one.
    """
    records = archive.infolist()
    packed = sum(record.file_size for record in records if record.compress_type != ZIP_STORED)
    # Where something stands before an archive, zipfile and torch would read two
    start = min((record.header_offset for record in records), default=0)
    if packed > MAPPED_BYTES or archive.comment or start:
        raise UnreadableError("its records are not as torch.save writes them")
    names = {record.filename.rpartition("/")[2] for record in records}
    if "data.pkl" not in names or "constants.pkl" in names:  # the second is a program's
        raise OtherKindError(f"{path} is no archive of torch.save; unpack it first")
    threads = os.cpu_count() or 1  # zlib computes without Python's lock
    compare = functools.partial(_compare_checksums, path, step=threads)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(compare, range(threads)))
    return packed > 0


def is_archive(path: Path) -> bool:
    """Return True for a file that is one archive from its first to its last byte.

    UnreadableError where something is missing or was added: zipfile and torch would read two archives.
    """
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, path.stat().st_size - END_BYTES))
        end = file.read()
    has_directory, begins = is_zipfile(path), start == b"PK\x03\x04"
    ends = end[:4] == b"PK\x05\x06" and end[-2:] == b"\0\0"
    if (has_directory or begins) and not (has_directory and begins and ends):
        raise UnreadableError("it is no whole archive: its end is missing, or something was added")
    return has_directory


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


# --- Files of weights
@functools.cache
def numpy_numbers() -> list[Any]:
    """Return what a pickle names for numbers of numpy: step counts and losses beside the weights."""
    import numpy as np  # here: a --help needs no numpy

    scalar = np.float64(0).__reduce__()[0]
    kinds = {type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}
    names = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return [np.dtype, *kinds, *names]


def require_file(path: str | Path, hint: str = DOWNLOAD_HINT, is_folder: bool = False) -> Path:
    """Return the path of a file, or of a model directory. Raise CheckpointError where there is none."""
    path, name = Path(path), str(path)
    exists = os.path.isfile(path)  # False for a name that is too long
    if is_folder:
        exists, name = os.path.isdir(path), f"model directory {path}"
    elif os.path.isdir(path):
        raise OtherKindError(f"{path} is {folder_kind(path)}")
    if not exists:
        if hint.startswith(DOWNLOAD_HINT):
            hint += f"; or --config_path {MINIATURE}, whose weights are here"
        commands = [DOWNLOADS[str(place)] for place in (path, *path.parents) if str(place) in DOWNLOADS]
        if commands:
            hint = hint.replace(DOWNLOAD_HINT, commands[0])
        if hint.partition(" ")[0] in ("bash", "python", "hf"):
            hint = f"run: {hint}"
        raise errors.CheckpointError(f"{name} not found; {hint}")
    return path


def shards(path: Path) -> list[Path]:
    """Return the files of weights: those that a shard index names, those in a folder, or the one itself."""
    if os.path.isdir(path):
        return sorted(filter(Path.is_file, path.iterdir()))
    if not path.name.endswith(".index.json"):
        return [path]
    with errors.library_reads(f"the shard index {path}", errors.CheckpointError, "get it again"):
        names = read_json(require_file(path), errors.CheckpointError)["weight_map"].values()
        return [path.with_name(name) for name in sorted({Path(name).name for name in names})]


def read_weights_file(path: str | Path) -> dict[Any, Any]:
    """Read a dict of tensors from a .pt or .pth, a .safetensors, or an index of .safetensors shards.

    Tensors are memory-mapped where possible, and nothing is executed. Raise CheckpointError for other files.
    """
    import torch

    path = Path(path)
    files = [path]
    if not os.path.isdir(path):  # which read_tensors names
        files = shards(path)
    content: dict[str, object] = {}
    for file in files:
        numpys = torch.serialization.safe_globals(numpy_numbers())
        with errors.library_reads(file, errors.CheckpointError, "get it again"), numpys:
            tensors = read_tensors(require_file(file))
            problem = ""
            if not isinstance(tensors, dict):
                problem = f"it holds a {type(tensors).__name__}, and no tensors by name"
            elif not content.keys().isdisjoint(tensors):
                problem = f"another shard holds {min(content.keys() & tensors.keys())}, too"
            if problem:
                raise UnreadableError(problem)
        content |= tensors
    return content

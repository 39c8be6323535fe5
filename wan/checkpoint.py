"""Weights from their files: a model directory, a Self-Forcing style .pt, and one report of what does not fit.

A directory is laid out as Wan-AI/Wan2.1-T2V-1.3B-Diffusers (transformer/, text_encoder/, tokenizer/, vae/,
each with its config; names are converted to the native ones of https://github.com/Wan-Video/Wan2.1 on
loading) or as the original Wan-AI/Wan2.1-T2V-1.3B (wan/native.py).
"""

import hashlib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from wan.config import ModelConfig
from wan.errors import ConfigError, library_reads, named, quoted
from wan.limits import MAX_LAYERS, MAX_LIST, MAX_RES_BLOCKS, MAX_SIZE
from wan.modules.model import WanModel
from wan.modules.offload import StreamedBlocks
from wan.safe_load import UnreadableError, load_tensors
from wan.text_files import read_json
from wan.weight_names import StateDict, to_native_names

DOWNLOAD_HINT = "bash experiments/download_weights.sh"


EDGE, SAMPLES, SAMPLE = 1 << 20, 64, 1 << 16  # bytes and places that sampled_sha256 reads


class CheckpointError(ConfigError):
    """Weights that are not there or do not fit; the message is one line with the remedy."""


def is_native(ckpt_dir: str | Path) -> bool:
    """Whether a directory has the layout of the original release (wan/native.py), not that of diffusers."""
    return not (require_dir(ckpt_dir) / "transformer").is_dir() and (Path(ckpt_dir) / "config.json").is_file()


def read_model_config(ckpt_dir: str | Path) -> ModelConfig:
    """Sizes of the transformer in a directory of either layout.

    text_len is not diffusers' to say, nor text_dim the original's: 512 and 4096 unless the file has them.
    """
    if is_native(ckpt_dir):
        config = _read_json(Path(ckpt_dir) / "config.json")
        try:
            sizes = [f for f in fields(ModelConfig) if f.default is MISSING or f.name in config]
            return _plausible(ckpt_dir, {f.name: config[f.name] for f in sizes})
        except KeyError as error:
            raise CheckpointError(
                f"{ckpt_dir}/config.json has no {error.args[0]!r}: not a WanModel of Wan2.1"
            ) from None
    config = _read_json(Path(ckpt_dir) / "transformer" / "config.json")
    try:
        return _plausible(
            ckpt_dir,
            {
                "dim": _product(config["num_attention_heads"], config["attention_head_dim"]),
                "ffn_dim": config["ffn_dim"],
                "num_heads": config["num_attention_heads"],
                "num_layers": config["num_layers"],
                "freq_dim": config["freq_dim"],
                "text_dim": config["text_dim"],
                "text_len": config.get("text_len", 512),
                "in_dim": config["in_channels"],
                "out_dim": config["out_channels"],
                "patch_size": config["patch_size"],
                "eps": config["eps"],
            },
        )
    except KeyError as error:
        raise CheckpointError(
            f"{ckpt_dir}/transformer/config.json has no {error.args[0]!r}: "
            "not a WanTransformer3DModel of diffusers"
        ) from None


def _product(a: object, b: object) -> object:
    return (
        a * b if type(a) is type(b) is int else a if type(a) is not int else b
    )  # what is no number is told later


def _plausible(ckpt_dir: str | Path, sizes: dict) -> ModelConfig:
    """Sizes that a model can have; CheckpointError where a damaged config asks for a billion layers."""
    patch = sizes.get("patch_size", (1, 2, 2))
    numbers = {name: value for name, value in sizes.items() if name not in ("eps", "patch_size")}
    if not isinstance(patch, (list, tuple)) or len(patch) != 3:
        raise CheckpointError(f"{ckpt_dir}: patch_size is {quoted(patch, 40)}, not three numbers")
    for name, value in [*numbers.items(), *(("patch_size", n) for n in patch)]:
        limit = MAX_LAYERS if name == "num_layers" else MAX_SIZE
        if type(value) is not int or not 1 <= value <= limit:
            raise CheckpointError(f"{ckpt_dir}: {name} is {quoted(value, 40)}, not a number of 1..{limit}")
    if "eps" in sizes and not (type(sizes["eps"]) in (int, float) and 0 <= sizes["eps"] < 1):
        raise CheckpointError(f"{ckpt_dir}: eps is {quoted(sizes['eps'], 40)}, not a small number")
    return ModelConfig(**sizes)


def transformer_file(ckpt_dir: str | Path) -> Path:
    """The base weights of a directory: one .safetensors file, or the index of its shards."""
    folder = Path(ckpt_dir) if is_native(ckpt_dir) else Path(ckpt_dir) / "transformer"
    name = folder / "diffusion_pytorch_model.safetensors"
    index = name.with_name(name.name + ".index.json")
    return index if index.is_file() else require_file(name, DOWNLOAD_HINT)


def weights_file(ckpt_dir: str | Path, checkpoint_path: str | Path | None) -> Path:
    """The file whose weights a run uses: the Self-Forcing checkpoint, or else the base transformer."""
    if checkpoint_path is None:
        return transformer_file(ckpt_dir)
    return require_file(checkpoint_path, DOWNLOAD_HINT, "or run the base weights with --no_checkpoint")


def read_transformer_state(ckpt_dir: str | Path) -> StateDict:
    """Base weights under native names."""
    state = read_safetensors(transformer_file(ckpt_dir))
    return state if is_native(ckpt_dir) else to_native_names(state)


def shards(path: Path) -> list[Path]:
    """The files of weights: those that a shard index names, or the one file itself."""
    if not path.name.endswith(".index.json"):
        return [path]
    names = _read_json(path).get("weight_map")
    files = list(names.values()) if isinstance(names, dict) else []
    if not files or not all(isinstance(name, str) and Path(name).name.isprintable() for name in files):
        raise CheckpointError(f"{path} has no weight_map of file names: not an index of shards")
    if no_names := [name for name in files if Path(name).name in ("", "..")]:
        raise CheckpointError(f"{path}: its weight_map names {quoted(no_names[0])}, which is no file")
    return [path.with_name(Path(name).name) for name in sorted(set(files))]  # beside the index alone


def read_torch_file(path: str | Path) -> dict:
    """A .pt or .pth file of tensors in a dict, memory-mapped where possible; nothing is executed."""
    try:
        content = load_tensors(path)
    except UnreadableError as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint of tensors: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a state dict")
    return content


Model = TypeVar("Model", bound=WanModel)


def build_model(
    model_class: type[Model],
    config: ModelConfig,
    state: StateDict,
    source: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    offload: bool = False,
    **kwargs,
) -> Model:
    """A model of the given sizes with the given weights, for inference. Its parameters are never held twice.

    offload keeps the layers' weights on the host and streams them (wan/modules/offload.py). Raises
    CheckpointError naming source and the first few keys that are missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        model = model_class(**vars(config), **kwargs)
    report_keys(source, state, model.state_dict())
    model.load_state_dict(
        {
            name: tensor if offload and name.startswith("blocks.") else tensor.to(device, dtype)
            for name, tensor in state.items()
        },
        assign=True,
    )
    model.eval().requires_grad_(False)
    if offload:
        model.blocks = StreamedBlocks(model.blocks, dtype, device)
    return model


def report_keys(source: str | Path, state: StateDict, wanted: StateDict) -> None:
    """Raise CheckpointError for missing, unexpected or misshapen keys, naming the first few."""
    both = [name for name in wanted if name in state]
    problems = {
        "missing": [name for name in wanted if name not in state],
        "unexpected": [name for name in state if name not in wanted],
        "not of floating point": [name for name in both if not state[name].is_floating_point()],
        "of another shape": [
            f"{named(name)} {list(state[name].shape)} instead of {list(wanted[name].shape)}"
            for name in both
            if state[name].shape != wanted[name].shape
        ],
    }
    found = [
        f"{len(names)} of {len(wanted)} keys {what}: {', '.join(map(named, names[:3]))}"
        + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in problems.items()
        if names
    ]
    if found:
        raise CheckpointError(f"{source} does not fit the model: {'; '.join(found)}")


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a weights file; of a shard index, of its shards one after the other."""
    digest = hashlib.sha256()
    for file in shards(Path(path)):
        with file.open("rb") as f:
            while chunk := f.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def sampled_sha256(path: str | Path) -> str:
    """SHA-256 of a file's size, its first MiB, 64 KiB at each of 64 evenly spaced places, and its last MiB.

    The first MiB holds the header of a .safetensors, the last the directory of a .pt. 6 MB of any file,
    however large.
    """
    size = Path(path).stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with Path(path).open("rb") as file:
        between = ((size * i // SAMPLES, SAMPLE) for i in range(SAMPLES))
        for start, length in ((0, EDGE), *between, (max(0, size - EDGE), EDGE)):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def describe_files(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Name, bytes and sampled_sha256 of the files that a run read, ordered by name; of an index its shards.

    Raises CheckpointError for one that is not there.
    """
    files = {require_file(file, DOWNLOAD_HINT) for path in paths for file in shards(Path(path))}
    return [
        {"name": file.name, "size": file.stat().st_size, "sampled_sha256": sampled_sha256(file)}
        for file in sorted(files, key=lambda file: (file.name, str(file)))
    ]


def require_dir(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"model directory {path} not found; run: {DOWNLOAD_HINT}")
    return path


def require_file(path: str | Path, hint: str, otherwise: str = "") -> Path:
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} not found; run: {hint}{'; ' + otherwise if otherwise else ''}")
    return path


def _read_json(path: Path) -> dict:
    return read_json(require_file(path, DOWNLOAD_HINT), CheckpointError)


def read_component_config(folder: str | Path) -> dict:
    """config.json of a text encoder or VAE, with numbers that one can have. Raises CheckpointError."""
    path = Path(folder) / "config.json"
    config = _read_json(path)
    for name, value in config.items():
        limit = MAX_LAYERS if "layers" in name else MAX_RES_BLOCKS if "blocks" in name else MAX_SIZE
        values = value if isinstance(value, list) else [value]
        if len(values) > MAX_LIST:
            raise CheckpointError(f"{path}: {named(name)} has {len(values)} values, at most {MAX_LIST}")
        for number in values:
            if type(number) in (int, float) and not -limit <= number <= limit:
                raise CheckpointError(f"{path}: {named(name)} is {quoted(number, 40)}, not within {limit}")
    return config


def read_safetensors(path: Path) -> StateDict:
    """All tensors of a .safetensors, or of the shards of an index; memory-mapped."""
    state: StateDict = {}
    for file in shards(path):
        with library_reads(require_file(file, DOWNLOAD_HINT), CheckpointError, "get it again"):
            state |= load_file(file)
    return state

"""Read weights: model directories, checkpoints of the Self-Forcing family, and LoRAs.

A directory is laid out as Wan-AI/Wan2.1-T2V-1.3B-Diffusers (transformer/, text_encoder/, tokenizer/, vae/,
each with its config) or as the original Wan-AI/Wan2.1-T2V-1.3B. Weights have the native names of
https://github.com/Wan-Video/Wan2.1; others are renamed on loading.
"""

import hashlib
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from mmap import ACCESS_READ, mmap
from numbers import Number
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from wan import errors, files, lora, names
from wan.config import ModelConfig, RunConfig

if TYPE_CHECKING:
    from wan.model import WanModel

# Names that moved, for those who import them from here
CheckpointError = errors.CheckpointError
read_weights_file, require_file = files.read_weights_file, files.require_file
LoRA, lora_of, read_lora, merge_lora = lora.LoRA, lora.lora_of, lora.read_lora, lora.merge_lora
to_diffusers_names, to_native_names = names.to_diffusers_names, names.to_native_names

StateDict = dict[str, Tensor]
Model = TypeVar("Model", bound="WanModel")

VAE_FILE, UMT5_FILE, WIDE_VAE_FILE = names.VAE_FILE, names.UMT5_FILE, names.WIDE_VAE_FILE
WIDE_CHANNELS = 48  # of the model whose VAE is that of WIDE_VAE_FILE
EDGE, SAMPLES, SAMPLE = 1 << 20, 64, 1 << 16  # bytes and places that sampled_sha256 reads
HASHED_AT_ONCE = 1 << 28  # bytes, which bound what is resident
MOVES_AT_ONCE = 8  # weights on their way to a GPU
TOKENIZER_DIR = "google/umt5-xxl"  # in a directory of the original release


# --- A model directory
# Its parts -> their weights in the original release, and in diffusers' layout.
PARTS = {
    "transformer": (
        "diffusion_pytorch_model.safetensors",
        "transformer/diffusion_pytorch_model.safetensors",
    ),
    "text_encoder": (UMT5_FILE, "text_encoder/model.safetensors"),
    "vae": (VAE_FILE, "vae/diffusion_pytorch_model.safetensors"),
}


def is_native(ckpt_dir: str | Path) -> bool:
    """Return True for a directory in the layout of the original release, not that of diffusers."""
    folder = require_file(ckpt_dir, is_folder=True)
    return not (folder / "transformer").is_dir() and (folder / "config.json").is_file()


def read_model_config(ckpt_dir: str | Path) -> ModelConfig:
    """Read the sizes of the transformer in a directory of either layout.

    text_len is not diffusers' to say, nor text_dim the original's: 512 and 4096 unless the file has them.
    """
    native = is_native(ckpt_dir)
    path, kind = Path(ckpt_dir) / "transformer/config.json", "WanTransformer3DModel of diffusers"
    if native:
        path, kind = Path(ckpt_dir) / "config.json", "WanModel of Wan2.1"
    config = files.read_json(require_file(path), CheckpointError)
    with errors.in_context(f"{path} is not the config of a {kind}", CheckpointError):
        if not native:
            table = {"num_heads": "num_attention_heads", "in_dim": "in_channels", "out_dim": "out_channels"}
            config |= {name: config[other] for name, other in table.items() if other in config}
            heads, dim = config.get("num_heads"), config.get("attention_head_dim")
            config["dim"] = dim
            if type(heads) is type(dim) is int:
                config["dim"] = heads * dim
        sizes = [item.name for item in fields(ModelConfig)]
        return errors.from_values(ModelConfig, {name: config[name] for name in sizes if name in config})


def part_file(ckpt_dir: str | Path, part: str) -> Path:
    """Return the weights of a part of a model directory: one file, or the index of its shards."""
    native, of_diffusers = PARTS[part]
    path = Path(ckpt_dir) / of_diffusers
    if is_native(ckpt_dir):
        path = Path(ckpt_dir) / native
        if part == "vae" and has_wide_vae(ckpt_dir):
            path = path.with_name(WIDE_VAE_FILE)
    index = path.with_name(f"{path.name}.index.json")
    if index.is_file():
        return index
    return require_file(path)


def has_wide_vae(ckpt_dir: str | Path) -> bool:
    """Return whether a directory of the original release is of a model of Wan2.2's VAE."""
    return files.read_json(Path(ckpt_dir) / "config.json", CheckpointError).get("in_dim") == WIDE_CHANNELS


def encoder_files(ckpt_dir: str | Path) -> tuple[Path, Path]:
    """Return all that prompt embeddings depend on: umT5's weights, and the folder of the tokenizer."""
    tokenizer = Path(ckpt_dir) / "tokenizer"
    if is_native(ckpt_dir):
        tokenizer = Path(ckpt_dir) / TOKENIZER_DIR
    return part_file(ckpt_dir, "text_encoder"), require_file(tokenizer, is_folder=True)


# umT5, which the original release has no config of.
UMT5_XXL = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "dropout_rate": 0.0,
}
USUAL_SIZES = {  # transformers' own, where a config does not say
    "vocab_size": 250112,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "relative_attention_num_buckets": 32,
}


def encoder_config(ckpt_dir: str | Path) -> dict[str, Any]:
    """Return umT5's settings as transformers names them, without its import, which takes seconds."""
    if is_native(ckpt_dir):
        beside = Path(ckpt_dir) / TOKENIZER_DIR / "config.json"  # of an encoder of other sizes
        if beside.is_file():
            return USUAL_SIZES | UMT5_XXL | files.read_json(beside, CheckpointError)
        return USUAL_SIZES | UMT5_XXL
    path = part_file(ckpt_dir, "text_encoder").with_name("config.json")
    return USUAL_SIZES | files.read_json(path, CheckpointError)


def weights_file(ckpt_dir: str | Path, checkpoint_path: str | Path | None) -> Path:
    """Return the file whose weights a run uses: its checkpoint, or else the base transformer."""
    if checkpoint_path is None:
        return part_file(ckpt_dir, "transformer")
    return require_file(
        checkpoint_path, f"{files.DOWNLOAD_HINT}; or run the base weights with --no_checkpoint"
    )


def read_part(ckpt_dir: str | Path, part: str) -> StateDict:
    """Read the weights of a part under the names of the class that runs.

    Those are native for the transformer, transformers' for umT5 and diffusers' for the VAE, as diffusers'
    layout holds umT5 and the VAE. FP8 is dequantised, but for the transformer, whose reader reports it.
    """
    # 1. The tensors; ComfyUI's umT5 comes in FP8 and with its tokenizer.
    native, path = is_native(ckpt_dir), part_file(ckpt_dir, part)
    state = state_dict_of(path, read_weights_file(path))[0]
    if part != "transformer":
        state = dequantise(state, path)
    if part == "text_encoder":
        state.pop("spiece_model", None)
    # 2. Their names.
    is_wide = part == "vae" and native and has_wide_vae(ckpt_dir)
    with errors.in_context(path, CheckpointError):
        if part == "transformer" and not native:
            return to_native_names(state)
        if part == "text_encoder" and native:
            return names.renamed(state, names.UMT5_TO_TRANSFORMERS)
        if is_wide:
            return names.wide_vae_names(state)
    if part == "vae" and native:
        from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

        return convert_wan_vae_to_diffusers(state)
    return state


def read_transformer_state(ckpt_dir: str | Path) -> StateDict:
    """Read the base weights of the transformer under native names."""
    return read_part(ckpt_dir, "transformer")


# --- Hashes of files


def file_sha256(path: str | Path, memory: Path | None = None) -> Future[str]:
    """Return a future of the SHA-256 of a weights file; for a shard index, of its shards in order.

    A daemon thread computes it, so the process may end without it. memory is a JSON file of hashes by path,
    size and time of change, which are not computed again.
    """
    sha256: Future[str] = Future()
    stats = [(str(file.resolve()), file.stat()) for file in files.shards(Path(path))]
    key = " ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    hashes: dict[str, str] = {}
    if memory is not None:
        with suppress(OSError, ValueError):
            hashes = dict(json.loads(memory.read_text(encoding="utf-8")))
    if key in hashes:
        sha256.set_result(hashes[key])
        return sha256

    def hash_file() -> None:
        try:
            digest = hashlib.sha256()
            for file in files.shards(Path(path)):
                size = file.stat().st_size
                with file.open("rb") as f:
                    for start in range(0, size, HASHED_AT_ONCE):
                        # Mapped: nothing is copied, and Python's lock is asked for once a part
                        length = min(HASHED_AT_ONCE, size - start)
                        with mmap(f.fileno(), length, access=ACCESS_READ, offset=start) as part:
                            digest.update(part)
            if memory is not None:
                remember(key, digest.hexdigest(), memory)
            sha256.set_result(digest.hexdigest())
        except BaseException as error:  # raised again by result()
            sha256.set_exception(error)

    Thread(target=hash_file, daemon=True).start()
    return sha256


def remember(key: str, sha256: str, memory: Path) -> None:
    """Add a hash to a JSON file of hashes; a file that cannot be written costs the next run some seconds."""
    with suppress(OSError, ValueError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        hashes: dict[str, str] = {}
        if memory.exists():
            hashes = dict(json.loads(memory.read_text(encoding="utf-8")))
        part = memory.with_name(f".{memory.name}.{os.getpid()}.part")
        part.write_text(json.dumps(hashes | {key: sha256}, indent=1), encoding="utf-8")
        part.replace(memory)


def sampled_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's size, first MiB, 64 KiB at each of 64 even places, and last MiB.

    The first MiB holds the header of a .safetensors, the last the directory of a .pt.
    """
    size = Path(path).stat().st_size
    # A whole hash of 28 GB takes a minute; files that differ do so in some of these places.
    digest = hashlib.sha256(str(size).encode())
    with Path(path).open("rb") as file:
        between = ((size * i // SAMPLES, SAMPLE) for i in range(SAMPLES))
        for start, length in ((0, EDGE), *between, (max(0, size - EDGE), EDGE)):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


class FileRecord(TypedDict):
    """What caches and identities say of a file that was read."""

    name: str
    size: int  # bytes
    sampled_sha256: str


def describe_files(paths: Iterable[str | Path]) -> list[FileRecord]:
    """Return name, bytes and sampled_sha256 of files, ordered by name.

    An index stands for its shards, a folder for its files. Raise CheckpointError for a missing file.
    """
    plain_files = {require_file(file) for path in paths for file in files.shards(Path(path))}
    return [
        {"name": file.name, "size": file.stat().st_size, "sampled_sha256": sampled_sha256(file)}
        for file in sorted(plain_files, key=lambda file: (file.name, str(file)))
    ]


# --- Checkpoints of the family, whatever their layout

# What training scripts put a state dict into, one within another perhaps: {"ema": {"shadow": {...}}}
EMA, CONTAINERS = ("generator_ema", "ema"), ("generator", "model", "state_dict", "shadow")
LEAD = re.compile(
    r"(?:(?:module|model|generator|diffusion_model|transformer|dit|ema|shadow)\.)*"
)  # at its beginning


@dataclass
class LoadReport:
    """What a file contained, which part of it is used, and what was merged into it or ignored."""

    file: str
    container: str = "the file itself"
    prefixes: Counter[str] = field(default_factory=Counter)  # taken off, with the number of keys
    names: str = "native"  # or diffusers'
    loaded: int = 0  # tensors
    quantised: str = ""  # how its weights were stored, where they were dequantised
    merged: str = ""  # LoRAs
    ignored: str = ""

    def __str__(self) -> str:
        parts = [f"{self.file}: {self.loaded} tensors of {self.container}", f"{self.names} names"]
        if self.prefixes:
            prefixes = ", ".join(f"{lead}* of {count}" for lead, count in self.prefixes.items())
            parts.append(f"without the prefix {prefixes}")
        parts += filter(None, (self.quantised, self.merged))
        if self.ignored:
            parts.append(f"ignored: {self.ignored}")
        else:
            parts.append("nothing ignored")
        return errors.one_line("; ".join(parts))


def state_dict_of(
    path: str | Path, content: Mapping[Any, Any], order: Sequence[str] = CONTAINERS
) -> tuple[StateDict, list[str], list[str]]:
    """Return the tensors by name that a file holds, the entries that lead to them, and those left aside.

    The state dict is the file itself, or one of its entries, the first of order, which may hold one in turn.
    Counters of training, numpy's too, are left aside. Raise CheckpointError for any other content.
    """
    state, containers, ignored = dict(content), list[str](), list[str]()
    while any(isinstance(state.get(name), dict) for name in order):
        chosen = next(name for name in order if isinstance(state.get(name), dict))
        for name, value in state.items():
            if name != chosen and isinstance(value, dict):
                ignored.append(f"{name} ({len(value)})")
            elif name != chosen:
                ignored.append(str(name))
        state = dict(state[chosen])
        containers.append(chosen)
    numbers = [name for name, value in state.items() if isinstance(value, Number | str | None)]
    strange = [name for name, value in state.items() if name not in numbers and not isinstance(value, Tensor)]
    if strange or len(numbers) == len(state):
        shown = ", ".join(map(str, [*strange, *numbers][:3])) or "nothing"
        expected = f"expected weights by name, perhaps within {', '.join((*EMA, *CONTAINERS))}"
        raise CheckpointError(f"{path} holds no state dict of tensors, but: {shown}; {expected}")
    for name in numbers:
        del state[name]
    return {str(name): tensor for name, tensor in state.items()}, containers, [*ignored, *map(str, numbers)]


def read_checkpoint(path: str | Path, use_ema: bool = True) -> tuple[StateDict, LoadReport]:
    """Read the generator of a checkpoint under native names, and report what was found.

    The file holds a state dict, or one of CONTAINERS with one (a warning says so where it is not the one
    that use_ema asks for). Raise CheckpointError for any other file.
    """
    # 1. The state dict, in the file itself or in one of its entries.
    order, wanted = (*CONTAINERS, *EMA), "generator"
    if use_ema:
        order, wanted = (*EMA, *CONTAINERS), EMA[0]
    state, containers, ignored = state_dict_of(path, read_weights_file(path), order)
    report = LoadReport(Path(path).name, ignored=", ".join(ignored))
    if containers:
        report.container = ".".join(containers)
        if containers[0] in {*EMA, "generator"} and (containers[0] in EMA) != use_ema:
            warnings.warn(f"{path} holds no {wanted}; its {containers[0]} is used", stacklevel=3)
    halves = [name for name in state if ".lora_" in name]
    if halves:
        raise CheckpointError(f"{path} holds a LoRA ({halves[0]}); give it as lora_path, or by --lora")

    # 2. Names without what training wrappers put before or into them.
    weights: StateDict = {}
    for name, tensor in state.items():
        if name.endswith("scaled_fp8"):  # marks ComfyUI's files
            continue
        inner = names.WRAPPERS.sub("", name)
        report.prefixes.update(list(dict.fromkeys(names.WRAPPERS.findall(name))))
        lead = LEAD.match(inner)[0]  # type: ignore[index]  # which matches nothing, too
        if lead:
            report.prefixes[lead] += 1
        bare = inner.removeprefix(lead)
        if bare in weights:
            raise CheckpointError(f"{path} has two keys for {bare}, such as {name}")
        weights[bare] = tensor
    # 3. Native names, and weights of floating point.
    if any(name.startswith(("condition_embedder.", "proj_out.")) for name in weights):
        report.names = "diffusers'"
        with errors.in_context(path, CheckpointError):
            weights = to_native_names(weights)
    weights = dequantise(weights, path, report)
    report.loaded = len(weights)
    return weights, report


# --- FP8 as ComfyUI stores it: W = q · scale, one scale a weight, or none where values were only rounded

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SCALES = (".scale_weight", ".weight_scale")  # of layer.weight
# Of products in FP8, which are not made here
NOT_WEIGHTS = (".scale_input", ".input_scale", ".comfy_quant", "scaled_fp8")


def dequantise(state: StateDict, source: str | Path, report: LoadReport | None = None) -> StateDict:
    """Return a state dict with its FP8 weights in bfloat16 times their scales; a report says so.

    One weight after the other is read. Raise CheckpointError for a scale that is not one number, nor one a
    row, or of no weight.
    """
    if not any(tensor.dtype in FP8 for tensor in state.values()):
        return state
    # 1. The scale of each weight
    scales: StateDict = {}
    problems = list[str]()
    for name, tensor in state.items():
        if name.endswith(SCALES):
            weight = f"{name.rpartition('.')[0]}.weight"
            if weight in scales or weight not in state:
                problems.append(f"{name} is of no weight, or of one with two scales")
            scales[weight] = tensor.float()
    for name, scale in scales.items():
        rows = state.get(name, scale).shape[:1]
        is_of_rows = scale.shape[:1] == rows and scale.numel() == rows.numel()
        if not (scale.numel() == 1 or is_of_rows) or not scale.isfinite().all():
            problems.append(f"the scale of {name} is {list(scale.shape)}, or not finite")
    if problems:
        remedy = "take FP8 with one scale a weight or a row, such as fp8_e4m3fn_scaled, or bfloat16"
        raise CheckpointError(f"{source}: {problems[0]}; {remedy}")
    # 2. The weights
    weights: StateDict = {}
    stored: Counter[str] = Counter()
    for name, tensor in state.items():
        if name.endswith(SCALES + NOT_WEIGHTS):
            continue
        if tensor.dtype in FP8:
            stored[str(tensor.dtype).removeprefix("torch.")] += 1
        if tensor.dtype in FP8 or name in scales:
            scale = scales.get(name, torch.ones(()))
            per_row = scale.reshape(-1, *[1] * (tensor.ndim - 1))  # one of all, or one a row
            tensor = (tensor.float() * per_row).to(torch.bfloat16)
        weights[name] = tensor
    parts = ", ".join(f"{count} tensors of {dtype}" for dtype, count in stored.items())
    if report is not None:
        report.quantised = f"{parts} dequantised to bfloat16"
    return weights


def read_self_forcing_state(path: str | Path, use_ema: bool = True) -> StateDict:
    """Read the generator of a checkpoint under native names: read_checkpoint() without its report."""
    return read_checkpoint(path, use_ema)[0]


# --- The weights that a run uses, from all of its files, and the model with them


def read_weights(config: RunConfig, model_config: ModelConfig) -> tuple[StateDict, LoadReport]:
    """Read the weights of a config's checkpoint, or of its base, under native names, with its LoRA merged.

    Raise CheckpointError where a file does not hold what the config says.
    """
    if config.checkpoint_path:
        source = config.checkpoint_path
        state, report = read_checkpoint(source, config.use_ema)
    else:
        source, state = config.ckpt_dir, read_transformer_state(config.ckpt_dir)
        report = LoadReport(part_file(source, "transformer").name, loaded=len(state))
        state = dequantise(state, source, report)
    for item in config.loras:
        adapter = read_lora(item.path, rank=item.rank, alpha=item.alpha, strength=item.strength)
        state = merge_lora(state, adapter, Path(source).name)
        report.merged = "; ".join(filter(None, [report.merged, str(adapter)]))
    return state, report


def build_model(
    model_class: type[Model],
    config: ModelConfig,
    state: StateDict,
    source: str | Path,
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Model:
    """Build a model of the given sizes and weights for inference. Its parameters are never held twice.

    With dtype None weights keep the dtype of the file. Raise CheckpointError naming source and the first few
    keys that are missing, unexpected or of another shape.
    """
    # On meta nothing is allocated or drawn: parameters become the tensors of the file.
    with torch.device("meta"):
        model = model_class(**vars(config), **kwargs)
    assign(model, state, source, dtype, device)
    return model


def assign(
    model: nn.Module,
    state: StateDict,
    source: str | Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> None:
    """Give a model its weights, by reference where dtype and device allow.

    Raise CheckpointError for missing, unexpected or misshapen keys, naming the first few.
    """
    # 1. Strictly the model's names and shapes: one line says all that does not fit.
    wanted = model.state_dict()
    common = [name for name in wanted if name in state]
    problems = {
        "missing": [name for name in wanted if name not in state],
        "unexpected": [name for name in state if name not in wanted],
        "not of floating point": [name for name in common if not state[name].is_floating_point()],
        "of another shape": [
            f"{name} {list(state[name].shape)} instead of {list(wanted[name].shape)}"
            for name in common
            if state[name].shape != wanted[name].shape
        ],
    }
    lines = []
    for problem, keys in problems.items():
        shown = ", ".join(keys[:3])
        if len(keys) > 3:
            shown += " ..."
        if keys:
            lines.append(f"{len(keys)} of {len(wanted)} keys {problem}: {shown}")
    if lines:
        raise CheckpointError(f"{source} does not fit the model: {'; '.join(lines)}")
    # 2. Several weights move at a time: one is read from disk while another is copied to the GPU.
    device = torch.empty(0, device=device).device  # with the number that other threads do not know
    moving = {id(tensor): tensor for tensor in state.values()}  # one with two names moves once
    becomes = {x.dtype: dtype or x.dtype for x in moving.values()}
    travels = {x: min(x, to, key=lambda dtype: dtype.itemsize) for x, to in becomes.items()}  # fewer bytes
    at_once = MOVES_AT_ONCE
    if device.type == "cpu":
        at_once = 1
    with ThreadPoolExecutor(at_once) as pool:
        moves = pool.map(lambda x: x.to(travels[x.dtype]).to(device).to(becomes[x.dtype]), moving.values())
        moved = dict(zip(moving, moves, strict=True))
    model.load_state_dict({name: moved[id(x)] for name, x in state.items()}, assign=True)
    model.eval().requires_grad_(False)

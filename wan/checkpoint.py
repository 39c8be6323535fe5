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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from mmap import ACCESS_READ, mmap
from numbers import Number
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError, from_values, in_context, library_reads, one_line
from wan.files import load_tensors, read_json

if TYPE_CHECKING:
    from wan.model import WanModel

StateDict = dict[str, Tensor]
Model = TypeVar("Model", bound="WanModel")

DOWNLOAD_HINT = "bash experiments/download_weights.sh"
MINIATURE = "configs/wan_mini.yaml"
VAE_FILE, UMT5_FILE = "Wan2.1_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth"  # of the original release
EDGE, SAMPLES, SAMPLE = 1 << 20, 64, 1 << 16  # bytes and places that sampled_sha256 reads
HASHED_AT_ONCE = 1 << 28  # bytes, which bound what is resident
MOVES_AT_ONCE = 8  # weights on their way to a GPU
TOKENIZER_DIR = "google/umt5-xxl"  # in a directory of the original release


class CheckpointError(ConfigError):
    """Weights that are missing or do not fit."""


# --- Names of weights: native, and those of diffusers and transformers

# native prefix -> diffusers prefix
TOP_NAMES = {
    "patch_embedding.": "patch_embedding.",
    "text_embedding.0.": "condition_embedder.text_embedder.linear_1.",
    "text_embedding.2.": "condition_embedder.text_embedder.linear_2.",
    "time_embedding.0.": "condition_embedder.time_embedder.linear_1.",
    "time_embedding.2.": "condition_embedder.time_embedder.linear_2.",
    "time_projection.1.": "condition_embedder.time_proj.",
    "head.modulation": "scale_shift_table",
    "head.head.": "proj_out.",
}
PROJECTIONS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
BLOCK_NAMES = {
    "modulation": "scale_shift_table",
    "norm3.": "norm2.",
    "ffn.0.": "ffn.net.0.proj.",
    "ffn.2.": "ffn.net.2.",
    **{f"self_attn.{ours}.": f"attn1.{theirs}." for ours, theirs in PROJECTIONS.items()},
    **{f"cross_attn.{ours}.": f"attn2.{theirs}." for ours, theirs in PROJECTIONS.items()},
}


NATIVE_TO_DIFFUSERS = TOP_NAMES | {f"blocks.N.{a}": f"blocks.N.{b}" for a, b in BLOCK_NAMES.items()}
DIFFUSERS_TO_NATIVE = {theirs: ours for ours, theirs in NATIVE_TO_DIFFUSERS.items()}
UMT5_TO_TRANSFORMERS = {
    "token_embedding.": "shared.",
    "norm.": "encoder.final_layer_norm.",
    "blocks.N.norm1.": "encoder.block.N.layer.0.layer_norm.",
    "blocks.N.norm2.": "encoder.block.N.layer.1.layer_norm.",
    **{f"blocks.N.attn.{n}.": f"encoder.block.N.layer.0.SelfAttention.{n}." for n in "qkvo"},
    "blocks.N.pos_embedding.embedding.": "encoder.block.N.layer.0.SelfAttention.relative_attention_bias.",
    "blocks.N.ffn.gate.0.": "encoder.block.N.layer.1.DenseReluDense.wi_0.",
    "blocks.N.ffn.fc1.": "encoder.block.N.layer.1.DenseReluDense.wi_1.",
    "blocks.N.ffn.fc2.": "encoder.block.N.layer.1.DenseReluDense.wo.",
}


def renamed(state: StateDict, table: Mapping[str, str]) -> StateDict:
    """Replace prefixes of names by a table, in which N stands for a block's number; keep other names."""
    new_state: StateDict = {}
    for name, tensor in state.items():
        general, number = name, "N"
        in_block = re.match(r"((?:encoder\.)?blocks?)\.(\d+)\.", name)
        if in_block:
            general, number = f"{in_block[1]}.N.{name[in_block.end() :]}", in_block[2]
        old = next((old for old in table if general.startswith(old)), None)
        if old is not None:
            name = (table[old] + general[len(old) :]).replace(".N.", f".{number}.")
        new_state[name] = tensor
    return new_state


def to_diffusers_names(state: StateDict) -> StateDict:
    """Rename a native state dict to the names of diffusers' WanTransformer3DModel."""
    return renamed(state, NATIVE_TO_DIFFUSERS)


def to_native_names(state: StateDict) -> StateDict:
    """Rename a state dict of diffusers' WanTransformer3DModel to native names."""
    return renamed(state, DIFFUSERS_TO_NATIVE)


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


def require_file(path: str | Path, hint: str = DOWNLOAD_HINT, is_folder: bool = False) -> Path:
    """Return the path of a file, or of a model directory. Raise CheckpointError where there is none."""
    path, name = Path(path), str(path)
    exists = path.is_file()
    if is_folder:
        exists, name = path.is_dir(), f"model directory {path}"
    if not exists:
        if hint.startswith(DOWNLOAD_HINT):
            hint += f"; or --config_path {MINIATURE}, whose weights are here"
        raise CheckpointError(f"{name} not found; run: {hint}")
    return path


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
    config = read_json(require_file(path), CheckpointError)
    with in_context(f"{path} is not the config of a {kind}", CheckpointError):
        if not native:
            table = {"num_heads": "num_attention_heads", "in_dim": "in_channels", "out_dim": "out_channels"}
            config |= {ours: config[theirs] for ours, theirs in table.items() if theirs in config}
            heads, dim = config.get("num_heads"), config.get("attention_head_dim")
            config["dim"] = dim
            if type(heads) is type(dim) is int:
                config["dim"] = heads * dim
        names = [field.name for field in fields(ModelConfig)]
        return from_values(ModelConfig, {name: config[name] for name in names if name in config})


def part_file(ckpt_dir: str | Path, part: str) -> Path:
    """Return the weights of a part of a model directory: one file, or the index of its shards."""
    native, of_diffusers = PARTS[part]
    path = Path(ckpt_dir) / of_diffusers
    if is_native(ckpt_dir):
        path = Path(ckpt_dir) / native
    index = path.with_name(f"{path.name}.index.json")
    if index.is_file():
        return index
    return require_file(path)


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
        return USUAL_SIZES | UMT5_XXL
    path = part_file(ckpt_dir, "text_encoder").with_name("config.json")
    return USUAL_SIZES | read_json(path, CheckpointError)


def weights_file(ckpt_dir: str | Path, checkpoint_path: str | Path | None) -> Path:
    """Return the file whose weights a run uses: its checkpoint, or else the base transformer."""
    if checkpoint_path is None:
        return part_file(ckpt_dir, "transformer")
    return require_file(checkpoint_path, f"{DOWNLOAD_HINT}; or run the base weights with --no_checkpoint")


def read_part(ckpt_dir: str | Path, part: str) -> StateDict:
    """Read the weights of a part under the names of the class that runs.

    Those are native for the transformer, transformers' for umT5 and diffusers' for the VAE.
    """
    # diffusers' layout holds umT5 and the VAE under the names of the classes that run.
    native, state = is_native(ckpt_dir), read_weights_file(part_file(ckpt_dir, part))
    if part == "transformer" and not native:
        return to_native_names(state)
    if part == "text_encoder":
        state = dequantise(state)  # ComfyUI's umT5 comes in scaled FP8
        if native:
            return renamed(state, UMT5_TO_TRANSFORMERS)
    if part != "vae" or not native:
        return state
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    return convert_wan_vae_to_diffusers(state)


def read_transformer_state(ckpt_dir: str | Path) -> StateDict:
    """Read the base weights of the transformer under native names."""
    return read_part(ckpt_dir, "transformer")


# --- Files of tensors


def shards(path: Path) -> list[Path]:
    """Return the files of weights: those that a shard index names, those in a folder, or the one itself."""
    if path.is_dir():
        return sorted(filter(Path.is_file, path.iterdir()))
    if not path.name.endswith(".index.json"):
        return [path]
    with library_reads(f"the shard index {path}", CheckpointError, "get it again"):
        names = read_json(require_file(path), CheckpointError)["weight_map"].values()
        return [path.with_name(name) for name in sorted({Path(name).name for name in names})]


# Step counts and losses beside the weights, as training scripts save them: numbers of numpy, and no more
SCALAR = np.float64(0).__reduce__()[0]
NUMPY_NUMBERS: list[Any] = [np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}]
NUMPY_NUMBERS += [(SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]


def read_weights_file(path: str | Path) -> dict[Any, Any]:
    """Read a dict of tensors from a .pt or .pth, a .safetensors, or an index of .safetensors shards.

    Tensors are memory-mapped where possible, and nothing is executed. Raise CheckpointError for other files.
    """
    if str(path).endswith(".gguf"):
        raise CheckpointError(f"{path} is a GGUF; take the model's .safetensors, such as fp8_e4m3fn_scaled")
    state: dict[Any, Any] = {}
    for file in shards(Path(path)):
        numpys = torch.serialization.safe_globals(NUMPY_NUMBERS)
        with library_reads(require_file(file), CheckpointError, "get it again"), numpys:
            if file.suffix == ".safetensors":
                state |= load_file(file)
            else:
                state |= load_tensors(file)
    return state


def file_sha256(path: str | Path, memory: Path | None = None) -> Future[str]:
    """Return a future of the SHA-256 of a weights file; for a shard index, of its shards in order.

    A daemon thread computes it, so the process may end without it. memory is a JSON file of hashes by path,
    size and time of change, which are not computed again.
    """
    sha256: Future[str] = Future()
    stats = [(str(file.resolve()), file.stat()) for file in shards(Path(path))]
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
            for file in shards(Path(path)):
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
        hashes = dict(json.loads(memory.read_text(encoding="utf-8"))) if memory.exists() else {}
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


def describe_files(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Return name, bytes and sampled_sha256 of files, ordered by name.

    An index stands for its shards, a folder for its files. Raise CheckpointError for a missing file.
    """
    files = {require_file(file) for path in paths for file in shards(Path(path))}
    return [
        {"name": file.name, "size": file.stat().st_size, "sampled_sha256": sampled_sha256(file)}
        for file in sorted(files, key=lambda file: (file.name, str(file)))
    ]


# --- Checkpoints of the family, whatever their layout

# What training scripts put a state dict into, one within another perhaps: {"ema": {"shadow": {...}}}
EMA, CONTAINERS = ("generator_ema", "ema"), ("generator", "model", "state_dict", "shadow")
WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")  # anywhere
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
        return one_line("; ".join(parts))


def read_checkpoint(path: str | Path, use_ema: bool = True) -> tuple[StateDict, LoadReport]:
    """Read the generator of a checkpoint under native names, and report what was found.

    The file holds a state dict, or one of CONTAINERS with one (a warning says so where it is not the one
    that use_ema asks for). Raise CheckpointError for any other file.
    """
    # 1. The state dict, in the file itself or in one of its entries, which may hold one in turn.
    report, state = LoadReport(Path(path).name), read_weights_file(path)
    where, ignored = list[str](), list[str]()
    order, wanted = (*CONTAINERS, *EMA), "generator"
    if use_ema:
        order, wanted = (*EMA, *CONTAINERS), EMA[0]
    while any(isinstance(state.get(name), dict) for name in order):
        chosen = next(name for name in order if isinstance(state.get(name), dict))
        for name, value in state.items():
            if name != chosen and isinstance(value, dict):
                ignored.append(f"{name} ({len(value)})")
            elif name != chosen:
                ignored.append(str(name))
        state = state[chosen]
        where.append(chosen)
    if where:
        report.container = ".".join(where)
        if where[0] in {*EMA, "generator"} and (where[0] in EMA) != use_ema:
            warnings.warn(f"{path} holds no {wanted}; its {where[0]} is used", stacklevel=3)
    # Counters of training beside the weights, numpy's too, are left aside
    numbers = [name for name, value in state.items() if isinstance(value, Number | str | None)]
    strange = [name for name, value in state.items() if name not in numbers and not isinstance(value, Tensor)]
    if strange or len(numbers) == len(state):
        names = ", ".join(map(str, [*strange, *numbers][:3])) or "nothing"
        raise CheckpointError(
            f"{path} holds no state dict of tensors, but: {names}; expected weights by name, perhaps within "
            f"{', '.join((*EMA, *CONTAINERS))}"
        )
    report.ignored = ", ".join([*ignored, *map(str, numbers)])
    state = {name: value for name, value in state.items() if name not in numbers}

    # 2. Names without what training wrappers put before or into them.
    weights: StateDict = {}
    for name, tensor in state.items():
        if str(name).endswith("scaled_fp8"):  # marks ComfyUI's files
            continue
        inner = WRAPPERS.sub("", str(name))
        report.prefixes.update(list(dict.fromkeys(WRAPPERS.findall(str(name)))))
        lead = LEAD.match(inner)[0]  # type: ignore[index]  # which matches nothing, too
        if lead:
            report.prefixes[lead] += 1
        bare = inner.removeprefix(lead)
        if bare in weights:
            raise CheckpointError(f"{path} has two keys for {bare}, such as {name}")
        weights[bare] = tensor
    # 3. Native names, and weights of floating point.
    if any(name.startswith(("condition_embedder.", "proj_out.")) for name in weights):
        report.names, weights = "diffusers'", to_native_names(weights)
    weights = dequantise(weights, report)
    report.loaded = len(weights)
    return weights, report


# --- FP8 as ComfyUI stores it: W = q · scale, one scale a weight, or none where values were only rounded

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (".scale_weight", ".weight_scale")  # of layer.weight
NOT_WEIGHTS = (
    ".scale_input",
    ".input_scale",
    ".comfy_quant",
    "scaled_fp8",
)  # of products in FP8, which are not made here


def dequantise(state: StateDict, report: LoadReport | None = None) -> StateDict:
    """Return a state dict with its FP8 weights in bfloat16 times their scales; a report says so.

    One weight after the other is read.
    """
    if not any(tensor.dtype in FP8 for tensor in state.values()):
        return state
    weights: StateDict = {}
    stored: Counter[str] = Counter()
    for name, tensor in state.items():
        if name.endswith(SCALES + NOT_WEIGHTS):
            continue
        if tensor.dtype in FP8:
            stored[str(tensor.dtype).removeprefix("torch.")] += 1
            names = [name.removesuffix(".weight") + end for end in SCALES]
            scales = [state[key].float() for key in names if key in state] or [torch.ones(())]
            scale = scales[0].reshape(-1, *[1] * (tensor.ndim - 1))  # one of all, or one a row
            tensor = (tensor.float() * scale).to(torch.bfloat16)
        weights[name] = tensor
    parts = ", ".join(f"{count} tensors of {dtype}" for dtype, count in stored.items())
    if report is not None:
        report.quantised = f"{parts} dequantised to bfloat16"
    return weights


def read_self_forcing_state(path: str | Path, use_ema: bool = True) -> StateDict:
    """Read the generator of a checkpoint under native names: read_checkpoint() without its report."""
    return read_checkpoint(path, use_ema)[0]


# --- LoRA (arXiv 2106.09685), merged into weights on loading: W + strength · alpha / rank · B A, in float32

LORA_CONTAINERS = ("generator_lora", "lora")
PEFT = re.compile(r"^(?:base_model\.model\.|(?:module|model|generator|diffusion_model|transformer)\.)*")
KOHYA = re.compile(r"lora_unet_(?:(blocks)_(\d+)_)?([^.]+)\.(.+)")  # kohya's scripts: _ in place of .
KOHYA_LAYERS = {
    name.rstrip(".").replace(".", "_"): name.rstrip(".")
    for table in (TOP_NAMES, BLOCK_NAMES)
    for names in table.items()
    for name in names
}
LORA_KEY = re.compile(r"(.+)\.(lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight")
# Whole changes beside low-rank ones, as LightX2V's distilled LoRAs have them -> the parameter of the layer
DIFFS = {".diff": ".weight", ".diff_b": ".bias", ".diff_m": ".modulation"}
OTHER_KINDS = {  # parts of names -> adapters that are no LoRA
    "DoRA": (".dora_scale", "lora_magnitude_vector"),
    "LoKr": (".lokr_w", ".lokr_t"),
    "LoHa": (".hada_w", ".hada_t"),
}


@dataclass(frozen=True)
class LoRA:
    """Changes of some layers: A [rank, in] and B [out, rank] with an alpha each, and whole changes."""

    file: str
    pairs: Mapping[str, tuple[Tensor, Tensor]]  # layer -> A, B
    alphas: Mapping[str, float]  # layer -> alpha
    diffs: Mapping[str, Tensor] = field(default_factory=dict)  # parameter -> its change
    strength: float = 1.0

    def changes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each parameter that changes, and its change in float32."""
        for layer, (down, up) in self.pairs.items():
            scale = self.strength * self.alphas[layer] / len(down)
            yield f"{layer}.weight", scale * (up.float() @ down.float())  # [out, in]
        for name, change in self.diffs.items():
            yield name, self.strength * change.float()

    def __str__(self) -> str:
        ranks = sorted({len(down) for down, _ in self.pairs.values()})
        alphas = sorted({*self.alphas.values()})
        parts = []
        for name, numbers in (("rank", ranks), ("alpha", alphas)):
            if numbers:
                ends = dict.fromkeys((numbers[0], numbers[-1]))
                parts.append(f"{name} {' to '.join(f'{number:g}' for number in ends)}")
        if self.diffs:
            parts.append(f"{len(self.diffs)} whole changes")
        if self.strength != 1:
            parts.append(f"strength {self.strength:g}")
        return f"{self.file} merged into {len(self.pairs)} layers ({', '.join(parts)})"


def read_lora(
    path: str | Path, rank: int | None = None, alpha: float | None = None, strength: float = 1.0
) -> LoRA:
    """Read a LoRA. rank, where given, must be the file's; alpha too, where the file has one.

    Raise CheckpointError for keys that are not of a LoRA, a half without the other, another rank, and an
    alpha that nobody gives. Files in ComfyUI's and kohya's names without an alpha mean that of their rank.
    """
    content = read_weights_file(path)
    inner = next((content[name] for name in LORA_CONTAINERS if isinstance(content.get(name), dict)), content)
    return lora_of(path, inner, rank, alpha, strength)


def lora_of(
    path: str | Path, state: Mapping[str, Any], rank: int | None, alpha: float | None, strength: float = 1.0
) -> LoRA:
    """Make a LoRA from a state dict."""
    # 1. Sort the keys: A and B by layer, alphas, and whole changes.
    halves: tuple[StateDict, StateDict] = {}, {}
    alphas, diffs, strange, in_comfy = dict[str, float](), dict[str, Tensor](), list[str](), False
    for name, value in state.items():
        for kind, parts in OTHER_KINDS.items():
            if any(part in str(name) for part in parts):
                remedy = "merge it into the weights first"
                raise CheckpointError(f"{path} holds a {kind} ({name}), not a LoRA; {remedy}")
        bare = PEFT.sub("", WRAPPERS.sub("", str(name)), count=1)
        of_kohya = KOHYA.fullmatch(bare)
        if of_kohya:
            layer = KOHYA_LAYERS.get(of_kohya[3], of_kohya[3])
            bare = ".".join(filter(None, (of_kohya[1], of_kohya[2], layer, of_kohya[4])))
        stem, dot, end = bare.rpartition(".")
        half = LORA_KEY.fullmatch(bare)
        if half:
            halves[half[2] in ("lora_B", "lora_up")][native_layer(half[1])] = value
            in_comfy |= half[2] in ("lora_down", "lora_up")
        elif end == "alpha":
            alphas[native_layer(stem)] = float(value)
        elif dot + end in DIFFS:
            diffs[f"{native_layer(stem)}{DIFFS[dot + end]}"] = value
        else:
            strange.append(str(name))
    if strange:
        raise CheckpointError(
            f"{path}: {', '.join(strange[:3])} is no half of a LoRA; expected LAYER.lora_A.weight, "
            f"lora_down, alpha or {', '.join(DIFFS)}; give a LoRA of a Wan transformer"
        )
    # 2. Every layer has both halves, and one alpha: its own, the config's, or by convention its rank.
    down, up = halves
    pairs = {layer: (down[layer], up[layer]) for layer in sorted(down.keys() & up.keys())}
    if not (pairs or diffs) or len(pairs) < len(down.keys() | up.keys()):
        raise CheckpointError(
            f"{path} holds no whole LoRA: {len(down)} layers with lora_A, {len(up)} with lora_B; get it again"
        )
    ranks = {len(a) for a, _ in pairs.values()}
    if rank is not None and ranks != {rank}:
        raise CheckpointError(f"{path} has rank {ranks}, and lora_rank is {rank}; leave lora_rank out")
    others = {value for value in alphas.values() if alpha not in (None, value)}
    lacking = [layer for layer in pairs if layer not in alphas]
    if others or (lacking and alpha is None and not in_comfy):
        if alpha:
            others.add(alpha)
        values = " and ".join(f"{value:g}" for value in sorted(others)) or "none"
        raise CheckpointError(f"{path} and lora_alpha say alpha {values}; give one lora_alpha in the config")
    for layer in lacking:
        alphas[layer] = float(len(pairs[layer][0]))
        if alpha is not None:
            alphas[layer] = float(alpha)
    return LoRA(Path(path).name, pairs, {layer: alphas[layer] for layer in pairs}, diffs, strength)


def native_layer(name: str) -> str:
    """Return the native name of a layer, or of a block, that may have diffusers'."""
    return next(iter(to_native_names({f"{name}.": torch.empty(0)}))).removesuffix(".")


def merge_lora(state: StateDict, lora: LoRA, source: str | Path) -> StateDict:
    """Return a state dict with a LoRA merged into its weights, float32 where they are changed.

    Raise CheckpointError for a parameter that the state dict does not have, or of another shape, and where it
    holds the LoRA already: W·D / D·D over all weights W and changes D estimates how many times D is in W. Its
    standard error is √(Σ mean(W²) D·D) / D·D; where that is large, nothing can be said.
    """
    # along = W·D, size = D·D, noise = Σ mean(W²) D·D, over all layers.
    merged, along, size, noise = dict(state), 0.0, 0.0, 0.0
    for name, change in lora.changes():
        layer = name.removesuffix(".weight")
        shape = "nothing"
        if name in state:
            shape = str(list(state[name].shape))
        if shape != str(list(change.shape)):
            problem = f"{lora.file} changes {layer} by {list(change.shape)}, {source} has {shape} there"
            raise CheckpointError(f"{problem}; give a LoRA of this model")
        weight, square = state[name].float(), float(change.square().sum())
        merged[name] = weight + change
        along, size = along + float((weight * change).sum()), size + square
        noise += float(weight.square().mean()) * square
    # A LoRA that is in W already makes W·D / D·D about 1; one that is not, about 0.
    if size > 0 and along / size > 0.5 and noise**0.5 / size < 0.1:
        raise CheckpointError(f"{source} holds {lora.file} already; leave it out")
    return merged


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
        state = dequantise(state, report)
    for settings in config.loras:
        lora = read_lora(settings.path, settings.rank, settings.alpha, settings.strength)
        state = merge_lora(state, lora, Path(source).name)
        report.merged = "; ".join(filter(None, [report.merged, str(lora)]))
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
    both = [name for name in wanted if name in state]
    problems = {
        "missing": [name for name in wanted if name not in state],
        "unexpected": [name for name in state if name not in wanted],
        "not of floating point": [name for name in both if not state[name].is_floating_point()],
        "of another shape": [
            f"{name} {list(state[name].shape)} instead of {list(wanted[name].shape)}"
            for name in both
            if state[name].shape != wanted[name].shape
        ],
    }
    lines = []
    for problem, names in problems.items():
        shown = ", ".join(names[:3])
        if len(names) > 3:
            shown += " ..."
        if names:
            lines.append(f"{len(names)} of {len(wanted)} keys {problem}: {shown}")
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

"""Weights from their files: a model directory, a Self-Forcing style .pt, and one report of what does not fit.

A directory is laid out as Wan-AI/Wan2.1-T2V-1.3B-Diffusers (transformer/, text_encoder/, tokenizer/, vae/,
each with its config; names are converted to the native ones of https://github.com/Wan-Video/Wan2.1 on
loading) or as the original Wan-AI/Wan2.1-T2V-1.3B (wan/checkpoint.py).
"""

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from wan.config import MODELS, ModelConfig, RunConfig
from wan.errors import ConfigError, library_reads, short_repr
from wan.files import MAX_LAYERS, MAX_LIST, MAX_RES_BLOCKS, MAX_SIZE, UnreadableError, load_tensors, read_json
from wan.model import WanModel
from wan.offload import StreamedBlocks

# --- Names of the transformer's weights: native (https://github.com/Wan-Video/Wan2.1) and diffusers'
StateDict = dict[str, Tensor]

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
BLOCK_NAMES = {
    "modulation": "scale_shift_table",
    "norm3.": "norm2.",
    "ffn.0.": "ffn.net.0.proj.",
    "ffn.2.": "ffn.net.2.",
} | {
    f"{ours}.{part}.": f"{theirs}.{name}."
    for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
    for part, name in (
        ("q", "to_q"),
        ("k", "to_k"),
        ("v", "to_v"),
        ("o", "to_out.0"),
        ("norm_q", "norm_q"),
        ("norm_k", "norm_k"),
    )
}


NATIVE_ROOTS = {"blocks", *(name.partition(".")[0] for name in TOP_NAMES)}  # of native names
DIFFUSERS_ROOTS = ("condition_embedder.", "proj_out.")  # that native names do not have


def is_diffusers(state: StateDict) -> bool:
    """Whether a state dict has the names of diffusers' WanTransformer3DModel."""
    return any(name.startswith(DIFFUSERS_ROOTS) for name in state)


def to_diffusers_names(state: StateDict) -> StateDict:
    """Native state dict -> the names of diffusers' WanTransformer3DModel."""
    return {_rename(name, TOP_NAMES, BLOCK_NAMES): tensor for name, tensor in state.items()}


def to_native_names(state: StateDict) -> StateDict:
    """State dict of diffusers' WanTransformer3DModel -> native names. Unknown names stay as they are."""
    top, block = ({theirs: ours for ours, theirs in table.items()} for table in (TOP_NAMES, BLOCK_NAMES))
    return {_rename(name, top, block): tensor for name, tensor in state.items()}


def _rename(name: str, top: dict[str, str], block: dict[str, str]) -> str:
    in_block = re.match(r"blocks\.\d+\.", name)
    start, table = (in_block[0], block) if in_block else ("", top)
    rest = name[len(start) :]
    for old, new in table.items():
        if rest.startswith(old):
            return start + new + rest[len(old) :]
    return name


# --- Weights from their files: a model directory, a Self-Forcing style .pt, and one report of what does
DOWNLOAD_HINT = "bash experiments/download_weights.sh"


EDGE, SAMPLES, SAMPLE = 1 << 20, 64, 1 << 16  # bytes and places that sampled_sha256 reads


class CheckpointError(ConfigError):
    """Weights that are not there or do not fit; the message is one line with the remedy."""


def is_native(ckpt_dir: str | Path) -> bool:
    """Return True for a directory in the layout of the original release, not that of diffusers."""
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
        raise CheckpointError(f"{ckpt_dir}: patch_size is {short_repr(patch, 40)}, not three numbers")
    for name, value in [*numbers.items(), *(("patch_size", n) for n in patch)]:
        limit = MAX_LAYERS if name == "num_layers" else MAX_SIZE
        if type(value) is not int or not 1 <= value <= limit:
            raise CheckpointError(
                f"{ckpt_dir}: {name} is {short_repr(value, 40)}, not a number of 1..{limit}"
            )
    if "eps" in sizes and not (type(sizes["eps"]) in (int, float) and 0 <= sizes["eps"] < 1):
        raise CheckpointError(f"{ckpt_dir}: eps is {short_repr(sizes['eps'], 40)}, not a small number")
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
        raise CheckpointError(f"{path}: its weight_map names {short_repr(no_names[0])}, which is no file")
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

    offload keeps the layers' weights on the host and streams them (wan/offload.py). Raises
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
            f"{short_repr(name)} {list(state[name].shape)} instead of {list(wanted[name].shape)}"
            for name in both
            if state[name].shape != wanted[name].shape
        ],
    }
    found = [
        f"{len(names)} of {len(wanted)} keys {what}: {', '.join(map(short_repr, names[:3]))}"
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
            raise CheckpointError(f"{path}: {short_repr(name)} has {len(values)} values, at most {MAX_LIST}")
        for number in values:
            if type(number) in (int, float) and not -limit <= number <= limit:
                raise CheckpointError(
                    f"{path}: {short_repr(name)} is {short_repr(number, 40)}, not within {limit}"
                )
    return config


def read_safetensors(path: Path) -> StateDict:
    """All tensors of a .safetensors, or of the shards of an index; memory-mapped."""
    state: StateDict = {}
    for file in shards(path):
        with library_reads(require_file(file, DOWNLOAD_HINT), CheckpointError, "get it again"):
            state |= load_file(file)
    return state


# --- Checkpoints of the family, whatever their layout, under native names; and a report of what was found
CONTAINERS = ("generator_ema", "generator", "model")  # what training scripts put a state dict into
WITHOUT_EMA = ("generator", "model", "generator_ema")
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")  # anywhere in a name
LEADS = ("module.", "model.", "generator.", "diffusion_model.")  # at its beginning, one after another
SHOWN = 5  # prefixes that a message names


@dataclass
class LoadReport:
    """What a file held, what of it was taken, and what was merged into it or left aside."""

    file: str
    container: str = "the file itself"
    prefixes: dict[str, int] = field(default_factory=dict)  # taken off, with the number of keys
    names: str = "native"  # or diffusers
    loaded: int = 0  # tensors
    sizes: str = ""
    merged: str = ""  # the LoRA
    ignored: tuple[str, ...] = ()

    def __str__(self) -> str:
        prefixes = ", ".join(f"{lead}* of {count}" for lead, count in self.prefixes.items())
        parts = [
            f"{self.file}: {self.loaded} tensors of {self.container}",
            self.sizes,
            f"{self.names} names",
            f"without the prefix {prefixes}" if prefixes else "",
            self.merged,
            f"ignored: {', '.join(self.ignored)}" if self.ignored else "nothing ignored",
        ]
        return "; ".join(filter(None, parts))


def read_self_forcing_state(path: str | Path, use_ema: bool = True) -> StateDict:
    """The generator of a checkpoint under native names: read_checkpoint() without its report."""
    return read_checkpoint(path, use_ema)[0]


def read_checkpoint(path: str | Path, use_ema: bool = True) -> tuple[StateDict, LoadReport]:
    """The generator of a checkpoint under native names, and what was found.

    The file holds a state dict, or one of CONTAINERS with one (a warning says so where it is not the one
    that use_ema asks for). Raises CheckpointError for any other file, naming the prefixes of its keys.
    """
    report = LoadReport(Path(path).name)
    state = _pick(path, read_weights_file(path), use_ema, report)
    state = without_prefixes(path, state, report)
    if not any(name.partition(".")[0] in NATIVE_ROOTS for name in state):
        raise CheckpointError(
            f"{path} has no known layout of a Wan transformer; its keys begin with {prefixes_of(state)}"
        )
    report.loaded = len(state)
    return state, report


def read_weights_file(path: str | Path) -> dict[str, Any]:
    """What a .pt, a .safetensors, or an index of .safetensors shards holds."""
    if str(path).endswith((".safetensors", ".safetensors.index.json")):
        return read_safetensors(Path(path))
    return read_torch_file(path)


def _pick(path: str | Path, content: dict[str, Any], use_ema: bool, report: LoadReport) -> StateDict:
    """The state dict that is wanted; the others are ignored."""
    order = CONTAINERS if use_ema else WITHOUT_EMA
    there = [name for name in order if isinstance(content.get(name), dict)]
    if there:
        chosen, state = there[0], content[there[0]]
        if "generator" in order[0] and chosen in ("generator", "generator_ema") and chosen != order[0]:
            warnings.warn(f"{path} holds no {order[0]}; its {chosen} is used", stacklevel=4)
        report.container = chosen
        report.ignored = tuple(_described(name, content[name]) for name in content if name != chosen)
    else:
        state = content
    if not state or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(
            f"{path} holds no state dict of tensors, but: {', '.join(map(short_repr, list(content)[:SHOWN]))}"
        )
    return {str(name): tensor for name, tensor in state.items()}


def _described(name: Any, value: Any) -> str:
    return f"{short_repr(name)} ({len(value)})" if isinstance(value, dict) else short_repr(name)


def without_prefixes(path: str | Path, state: StateDict, report: LoadReport | None = None) -> StateDict:
    """Native names: without what training wrappers put before them. Raises CheckpointError for mixed ones."""
    leads: Counter[str] = Counter()
    found: StateDict = {}
    for name, tensor in state.items():
        bare, wrapped = name, [w for w in WRAPPERS if w in name]
        for wrapper in wrapped:
            bare = bare.replace(wrapper, "")
        lead = lead_of(bare)
        leads[lead] += 1
        if bare[len(lead) :] in found:
            raise CheckpointError(
                f"{path} has two keys for {short_repr(bare[len(lead) :])}, such as {short_repr(name)}"
            )
        found[bare[len(lead) :]] = tensor
        if report:
            for wrapper in wrapped:
                report.prefixes[wrapper] = report.prefixes.get(wrapper, 0) + 1
    if len(leads) > 1:
        parts = ", ".join(f"{n} with {lead or 'none'}" for lead, n in leads.most_common(SHOWN))
        raise CheckpointError(f"{path} mixes prefixes of keys: {parts}; it was put together from two files")
    if report:
        report.prefixes |= {lead: n for lead, n in leads.items() if lead}
    if is_diffusers(found):
        if report:
            report.names = "diffusers'"
        return to_native_names(found)
    return found


def lead_of(name: str) -> str:
    """What a training script put before a name: "model.diffusion_model." or nothing."""
    rest, more = name, True
    while more:
        lead = next((lead for lead in LEADS if rest.startswith(lead)), "")
        rest, more = rest[len(lead) :], bool(lead)
    return name[: len(name) - len(rest)]


def prefixes_of(names: Iterable[str]) -> str:
    """The beginnings of names with their numbers, the most frequent first: "encoder.blocks. (40), ..."."""
    starts = Counter(re.sub(r"\d+", "N", ".".join(name.split(".")[:2])) for name in names)
    shown = ", ".join(f"{short_repr(start)} ({count})" for start, count in starts.most_common(SHOWN))
    return shown + (f" and {len(starts) - SHOWN} more" if len(starts) > SHOWN else "")


# --- The directory layout of the original release, https://huggingface.co/Wan-AI/Wan2.1-T2V-1.3B
if TYPE_CHECKING:  # each takes a second to import, and is imported where it is made
    from diffusers import AutoencoderKLWan
    from transformers import UMT5Config, UMT5EncoderModel

UMT5_FILE, VAE_FILE, TOKENIZER_DIR = "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth", "google/umt5-xxl"

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

# native -> transformers, inside blocks.N. of the one and encoder.block.N.layer. of the other
UMT5_BLOCK_NAMES = {
    "norm1.": "0.layer_norm.",
    "norm2.": "1.layer_norm.",
    "attn.q.": "0.SelfAttention.q.",
    "attn.k.": "0.SelfAttention.k.",
    "attn.v.": "0.SelfAttention.v.",
    "attn.o.": "0.SelfAttention.o.",
    "pos_embedding.embedding.": "0.SelfAttention.relative_attention_bias.",
    "ffn.gate.0.": "1.DenseReluDense.wi_0.",
    "ffn.fc1.": "1.DenseReluDense.wi_1.",
    "ffn.fc2.": "1.DenseReluDense.wo.",
}


def umt5_to_transformers(native: StateDict) -> StateDict:
    """Native umT5 encoder names -> those of UMT5EncoderModel, which names the token embedding twice."""
    state: StateDict = {}
    for name, tensor in native.items():
        in_block = re.match(r"blocks\.(\d+)\.", name)
        if name == "token_embedding.weight":
            state["shared.weight"] = state["encoder.embed_tokens.weight"] = tensor
        elif in_block:
            rest = name[in_block.end() :]
            old = next((old for old in UMT5_BLOCK_NAMES if rest.startswith(old)), None)
            new = rest if old is None else UMT5_BLOCK_NAMES[old] + rest[len(old) :]
            state[f"encoder.block.{in_block[1]}.layer.{new}"] = tensor
        else:
            state[name.replace("norm.", "encoder.final_layer_norm.", 1)] = tensor
    return state


def load_umt5(
    ckpt_dir: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    config: "UMT5Config | None" = None,
) -> "UMT5EncoderModel":
    """The text encoder of a native directory; its weights are mapped, not read twice."""
    from transformers import UMT5Config

    path = require_file(Path(ckpt_dir) / UMT5_FILE, DOWNLOAD_HINT)
    state = umt5_to_transformers(read_torch_file(path))
    return build_umt5(state, config or UMT5Config(**UMT5_XXL), path, dtype, device)


def build_umt5(
    state: StateDict, config: "UMT5Config", path: Path, dtype: torch.dtype, device: torch.device | str
) -> "UMT5EncoderModel":
    """umT5 of the given sizes with weights under transformers' names; the embedding may lack one."""
    from transformers import UMT5EncoderModel

    with torch.device("meta"):
        model = UMT5EncoderModel(config)
    embedding = ("shared.weight", "encoder.embed_tokens.weight")
    tokens = next((state[name] for name in embedding if name in state), None)
    assign(model, state if tokens is None else state | dict.fromkeys(embedding, tokens), path, dtype, device)
    model.tie_weights()
    return model


def load_vae(ckpt_dir: str | Path, dtype: torch.dtype, **sizes) -> "AutoencoderKLWan":
    """The VAE of a native directory. sizes differ from the real model's in tests alone."""
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    path = require_file(Path(ckpt_dir) / VAE_FILE, DOWNLOAD_HINT)
    vae = AutoencoderKLWan(**sizes)
    assign(vae, convert_wan_vae_to_diffusers(read_torch_file(path)), path, dtype, "cpu")
    return vae


def assign(
    model: torch.nn.Module, state: StateDict, path: Path, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Strict loading with a report, by reference where it can be; a tensor of two names is moved once."""
    report_keys(path, state, model.state_dict())
    moved = {id(tensor): tensor.to(device, dtype) for tensor in {id(t): t for t in state.values()}.values()}
    model.load_state_dict({name: moved[id(tensor)] for name, tensor in state.items()}, assign=True)
    model.eval().requires_grad_(False)


# --- LoRA (arXiv 2106.09685) merged into weights on loading: W + alpha / rank · B A, in float32
LORA_CONTAINERS = ("generator_lora", "lora")
PEFT = "base_model.model."
KEY = re.compile(r"(.+)\.(lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight")
HALVES = {"lora_A": "A", "lora_down": "A", "lora_B": "B", "lora_up": "B"}
MERGED, SURE = 0.5, 0.1  # of already_merged: at least so much of the LoRA, known to within so much


@dataclass(frozen=True)
class LoRA:
    """Low-rank changes of some linear layers: layer -> A [rank, in], B [out, rank]."""

    file: str
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    alpha: float

    def __str__(self) -> str:
        return f"{self.file} merged into {len(self.pairs)} layers (rank {self.rank}, alpha {self.alpha:g})"

    def changes(self) -> Iterator[tuple[str, Tensor]]:
        """What is added to the weight of every layer, float32 [out, in]."""
        for layer, (down, up) in self.pairs.items():
            yield layer, self.alpha / self.rank * (up.float() @ down.float())


def read_lora(path: str | Path, rank: int | None = None, alpha: float | None = None) -> LoRA:
    """A LoRA from its file. rank, where given, must be the file's; alpha too, where the file has one.

    Raises CheckpointError for a half without the other, ranks that differ, values that are not finite, and
    an alpha that nobody gives.
    """
    content = read_weights_file(path)
    inner = next((content[name] for name in LORA_CONTAINERS if isinstance(content.get(name), dict)), content)
    return lora_of(path, {str(name): value for name, value in inner.items()}, rank, alpha)


def lora_of(path: str | Path, state: Mapping[str, Any], rank: int | None, alpha: float | None) -> LoRA:
    """read_lora() for keys that are read already."""
    halves: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    alphas: dict[str, float] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {short_repr(name)} is no tensor; not a LoRA")
        bare = _bare(name)
        if match := KEY.fullmatch(bare):
            half, layer = halves[HALVES[match[2]]], _native(match[1])
            if layer in half:
                raise CheckpointError(
                    f"{path} has two keys for one half of {short_repr(layer)}: {short_repr(name)}"
                )
            half[layer] = value
        elif bare.endswith(".alpha") and value.numel() == 1:
            alphas[_native(bare.removesuffix(".alpha"))] = float(value)
        else:
            raise CheckpointError(
                f"{path}: {short_repr(name)} is not of a LoRA's names; its keys begin with {prefixes_of(state)}"  # noqa: E501
            )
    pairs = _paired(path, halves)
    found = _rank(path, pairs, rank)
    return LoRA(Path(path).name, pairs, found, _alpha(path, alphas, alpha))


def _bare(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    while (short := name.removeprefix(PEFT)) != name or lead_of(name):
        name = short[len(lead_of(short)) :]
    return name


def _native(layer: str) -> str:
    return next(iter(to_native_names({f"{layer}.": torch.empty(0)}))).removesuffix(".")


def _paired(path: str | Path, halves: dict[str, dict[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Both halves of every layer, of shapes that go together."""
    A, B = halves["A"], halves["B"]
    if not A and not B:
        raise CheckpointError(f"{path} holds no LoRA: neither lora_A nor lora_B")
    if half := sorted(A.keys() ^ B.keys()):
        missing = "lora_B" if half[0] in A else "lora_A"
        raise CheckpointError(
            f"{path} holds half a LoRA: {len(half)} of {len(A.keys() | B.keys())} layers have one half, "
            f"such as {short_repr(half[0])} without {missing}; get the file again"
        )
    for layer, down in A.items():
        up = B[layer]
        shapes = f"lora_A {list(down.shape)} and lora_B {list(up.shape)}"
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
            raise CheckpointError(f"{path}: {short_repr(layer)} has {shapes}, which do not multiply")
        if not (down.is_floating_point() and up.is_floating_point()):
            raise CheckpointError(f"{path}: {short_repr(layer)} is not of floating point, but {down.dtype}")
        if not (down.float().isfinite().all() and up.float().isfinite().all()):
            raise CheckpointError(f"{path}: {short_repr(layer)} has values that are not finite; get it again")
    return {layer: (A[layer], B[layer]) for layer in A}


def _rank(path: str | Path, pairs: Mapping[str, tuple[Tensor, Tensor]], wanted: int | None) -> int:
    ranks = {down.shape[0]: layer for layer, (down, _) in pairs.items()}
    if len(ranks) > 1:
        parts = ", ".join(f"{rank} of {short_repr(layer)}" for rank, layer in list(ranks.items())[:SHOWN])
        raise CheckpointError(f"{path} has layers of different ranks: {parts}")
    rank = next(iter(ranks))
    if wanted is not None and rank != wanted:
        raise CheckpointError(f"{path} has rank {rank}, not {wanted} as lora_rank says; name the right file")
    return rank


def _alpha(path: str | Path, found: Mapping[str, float], given: float | None) -> float:
    alphas = set(found.values()) | (set() if given is None else {float(given)})
    if not alphas:
        raise CheckpointError(f"{path} does not say its alpha; give lora_alpha in the config")
    if len(alphas) > 1:
        said = "lora_alpha and the file say" if given is not None else "its layers say"
        raise CheckpointError(
            f"{path}: {said} different alphas: {', '.join(f'{a:g}' for a in sorted(alphas))}"
        )
    alpha = alphas.pop()
    if not 0 < alpha < float("inf"):
        raise CheckpointError(f"{path} has alpha {alpha:g}, not a number above 0")
    return alpha


def merge_lora(state: StateDict, lora: LoRA, source: str | Path) -> StateDict:
    """The state dict with a LoRA merged into its weights, float32 where they are changed.

    Raises CheckpointError for a layer that the state dict does not have, or of another shape, and where it
    holds the LoRA already.
    """
    merged, along, size, noise = dict(state), 0.0, 0.0, 0.0
    for layer, change in lora.changes():
        name = f"{layer}.weight"
        if name not in state:
            raise CheckpointError(f"{lora.file} changes {short_repr(layer)}, which {source} does not have")
        weight = state[name].float()
        if weight.shape != change.shape:
            raise CheckpointError(
                f"{lora.file} changes {short_repr(layer)} {list(weight.shape)} by {list(change.shape)}: "
                "it is of another model"
            )
        merged[name] = weight + change
        square = float(change.square().sum())
        along, size = along + float((weight * change).sum()), size + square
        noise += float(weight.square().mean()) * square
    if already_merged(along, size, noise):
        raise CheckpointError(
            f"{source} holds {lora.file} already: {along / size:.2f} times its changes lie in its weights; "
            "leave lora_path out"
        )
    return merged


def already_merged(along: float, size: float, noise: float) -> bool:
    """Whether weights W hold changes D: along = Σ W·D and size = Σ D·D over all layers.

    along / size estimates how many times D is in W: about 1 if it was merged, 0 if not. Its standard error
    for a W that has nothing to do with D is √noise / size, noise = Σ mean(W²) D·D. Where the changes are so
    small that this is large, nothing can be said.
    """
    return size > 0 and along / size > MERGED and noise**0.5 / size < SURE


# --- The weights that a run uses, from all of its files: base or checkpoint, sizes checked, LoRA merged
# size -> the tensor that has it, and which of its axes
SHAPES = {
    "dim": ("patch_embedding.weight", 0),
    "in_dim": ("patch_embedding.weight", 1),
    "ffn_dim": ("blocks.0.ffn.0.weight", 0),
    "freq_dim": ("time_embedding.0.weight", 1),
    "text_dim": ("text_embedding.0.weight", 1),
}


def read_weights(config: RunConfig, model_config: ModelConfig) -> tuple[StateDict, LoadReport]:
    """State dict under native names of a config's checkpoint, or of its base, with its LoRA merged.

    Raises CheckpointError where a file does not hold what the config says, or a model of other sizes than
    model_config's.
    """
    if config.checkpoint_path:
        source = config.checkpoint_path
        state, report = read_checkpoint(source, config.use_ema)
    else:
        source, state = config.ckpt_dir, read_transformer_state(config.ckpt_dir)
        report = LoadReport(transformer_file(source).name, loaded=len(state))
    check_sizes(source, state, model_config)
    report.sizes = describe_sizes(sizes_of(state))
    if config.lora_path:
        lora = read_lora(config.lora_path, config.lora_rank, config.lora_alpha)
        state = merge_lora(state, lora, Path(source).name)
        report.merged = str(lora)
    return state, report


def sizes_of(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Sizes that a state dict under native names shows: those of SHAPES, num_layers, and num_heads where the
    dim is a released model's (shapes do not show it).
    """
    found = {
        size: state[name].shape[axis]
        for size, (name, axis) in SHAPES.items()
        if name in state and state[name].ndim > axis
    }
    layers = {int(match[1]) for name in state if (match := re.match(r"blocks\.(\d{1,6})\.", name))}
    if layers:
        found["num_layers"] = max(layers) + 1
    heads = {model.dim: model.num_heads for model in MODELS.values()}
    if found.get("dim") in heads:
        found["num_heads"] = heads[found["dim"]]
    return found


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """Sizes in words, with the released model that has them: "dim 1536, 30 layers (Wan2.1-T2V-1.3B)"."""
    wanted = ("dim", "ffn_dim", "num_layers", "in_dim")
    words = ", ".join(
        f"{sizes[n]} layers" if n == "num_layers" else f"{n} {sizes[n]}" for n in wanted if n in sizes
    )
    known = [name for name, model in MODELS.items() if all(getattr(model, n) == sizes.get(n) for n in wanted)]
    return f"{words} ({known[0]})" if known else words


def check_sizes(source: str | Path, state: Mapping[str, Tensor], model_config: ModelConfig) -> None:
    """Raise CheckpointError where a state dict is of a model of other sizes."""
    found = sizes_of(state)
    other = [size for size, value in found.items() if getattr(model_config, size) != value]
    if not other:
        return
    hint = " (an image-to-video model)" if found.get("in_dim", 16) > 16 else ""
    wanted = describe_sizes({size: getattr(model_config, size) for size in found})
    raise CheckpointError(
        f"{source} holds a model of {describe_sizes(found)}{hint}, and ckpt_dir one of {wanted}: it has "
        f"{', '.join(f'{size} {found[size]}' for size in other[:3])}; take the config of this file"
    )

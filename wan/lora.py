"""LoRAs (arXiv 2106.09685), merged into weights on loading: W + strength · alpha / rank · B A, in float32.

Files are those of PEFT (a folder with adapter_config.json, or its weights), diffusers, kohya's scripts and
musubi-tuner, LyCORIS, diffusion-pipe, ComfyUI and LightX2V. All that a file says of one parameter is summed.
Without an alpha, in the file or beside it, alpha is the rank, as these programs take it.
"""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Number
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from safetensors import safe_open
from torch import Tensor

from wan import errors, files, names

# --- Names in files
CONTAINERS = ("generator_lora", "lora", "state_dict", "model")
LEAD = re.compile(r"^(?:(?:base_model|module|model|generator|diffusion_model|transformer|unet|dit|pipe)\.)*")
UNDERSCORED = re.compile(
    r"(?:lora_unet|lora_transformer|lycoris)_(.+)"
)  # kohya's and LyCORIS': _ in place of .
UNDERSCORED_LAYERS = {
    name.rstrip(".").replace(".", "_"): name.rstrip(".")
    for table in (names.TOP_NAMES, names.BLOCK_NAMES)
    for pair in table.items()
    for name in pair
}
HALF = re.compile(
    r"(?P<layer>.+?)(?:\.lora_|[._]lora\.|\.lora_linear_layer\.)(?P<half>A|B|down|up)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<kind>weight|bias))?"
)
PARTS = {"A": ("down", "A"), "B": ("up", "A"), "down": ("down", "down"), "up": ("up", "down")}
# Whole changes beside low-rank ones (LightX2V; LyCORIS of norms) -> the parameter of the layer
DIFFS = {"diff": "weight", "diff_b": "bias", "diff_m": "modulation", "w_norm": "weight", "b_norm": "bias"}
OTHER_KINDS = {  # parts of names -> adapters that are no LoRA
    "DoRA": (".dora_scale", "lora_magnitude_vector"),
    "LoKr": (".lokr_",),
    "LoHa": (".hada_",),
    "OFT": (".oft_", ".boft_"),
    "AdaLoRA": (".lora_E", ".ranknum"),
    "VeRA": (".vera_",),
    "(IA)³": (".ia3_", ".on_input"),
    "LoRA in Tucker form": (".lora_mid",),
}
PEFT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "pytorch_lora_weights.safetensors")
WEIGHTS = {".safetensors", ".pt", ".pth", ".bin", ".ckpt"}
ONE_ALPHA = "leave alpha out of the config, or the wrong one out of the file"
GIVE_ONE = "give the file of a LoRA, or PEFT's folder of one"


@dataclass(frozen=True)
class Key:
    """A name in a file: the layer that it is of, and what its value is to the layer."""

    part: str  # down, up, bias, alpha, or one of DIFFS
    layer: str  # native
    own_layer: str  # as the file calls it, without the names of wrappers
    stem: str  # as the file calls it, with them
    pair: str = ""  # the same for A, B and bias of one product
    adapter: str = ""  # PEFT's name

    @classmethod
    def of(cls, name: str) -> "Key | None":
        """Read a name; None where it is of no LoRA."""
        bare = LEAD.sub("", names.WRAPPERS.sub("", name))
        half = HALF.fullmatch(bare)
        if half is None:
            layer, _, part = bare.rpartition(".")
            if not layer or part not in ("alpha", *DIFFS):
                return None
            stem = name.removesuffix(f".{part}")
            return cls(part, layer=native_layer(layer), own_layer=layer, stem=stem)
        layer, adapter = half["layer"], half["adapter"] or ""
        part, style = PARTS[half["half"]]
        if half["kind"] == "bias":
            if part == "down":
                return None
            part = "bias"
        stem = name.removesuffix(bare[len(layer) :])
        return cls(
            part,
            layer=native_layer(layer),
            own_layer=layer,
            stem=stem,
            pair=f"{stem} {style} {adapter}",
            adapter=adapter,
        )


def native_layer(name: str) -> str:
    """Return the native name of a layer that has diffusers' or kohya's, or a mixture of both."""
    underscored = UNDERSCORED.fullmatch(name)
    if underscored is None:
        return names.native_layer(name)
    layer = underscored[1].replace(".", "_")
    in_block = re.fullmatch(r"blocks_(\d+)(?:_(.+))?", layer)
    if in_block is None:
        return names.native_layer(UNDERSCORED_LAYERS.get(layer, layer))
    rest = in_block[2] or ""
    return names.native_layer(f"blocks.{in_block[1]}.{UNDERSCORED_LAYERS.get(rest, rest)}".rstrip("."))


# --- What PEFT says beside the weights
UNSUPPORTED = (  # settings of PEFT's LoraConfig that change more than a product of two matrices says
    "use_dora",
    "modules_to_save",
    "target_parameters",
    "layer_replication",
    "fan_in_fan_out",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "loftq_config",
    "lora_ga_config",
)
ALLOWED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Those that leave the base weights as they were; PiSSA, OLoRA, CorDA and LoftQ do not
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
Rank = Annotated[int, Field(ge=1, le=files.MAX_SIZE)]
Alpha = Annotated[float, Field(gt=0, le=files.MAX_SIZE)]


@dataclass(frozen=True)
class AdapterSettings:
    """Rank, alpha and their exceptions, of adapter_config.json or of the header of a .safetensors."""

    r: Rank | None = None
    lora_alpha: Alpha | None = None
    rank_pattern: dict[str, Rank] = field(default_factory=dict)
    alpha_pattern: dict[str, Alpha] = field(default_factory=dict)
    use_rslora: bool = False

    def __post_init__(self) -> None:
        errors.check_fields(self)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "AdapterSettings":
        """Check what a file says. Raise ConfigError for what is not merged here."""
        # 1. Null is what is not said; then types
        values = {name: value for name, value in content.items() if value is not None}
        read = {item.name for item in fields(cls)}
        settings = errors.from_values(cls, {name: values[name] for name in values if name in read})
        # 2. What a product of two matrices does not say
        refused = {name: values[name] for name in UNSUPPORTED if values.get(name)}
        for name, allowed in ALLOWED.items():
            if name in values and values[name] not in allowed:
                refused[name] = values[name]
        # 3. Patterns are regular expressions, of which only those that end soon are tried
        for name in ("rank_pattern", "alpha_pattern"):
            patterns = getattr(settings, name)
            if not all(map(is_simple, patterns)):
                refused[name] = patterns
        if refused:
            problems = ", ".join(f"{name} {errors.short_repr(value)}" for name, value in refused.items())
            remedy = "merge it into the weights by PEFT's merge_and_unload() first"
            raise errors.ConfigError(f"{problems} cannot be merged here; {remedy}")
        return settings

    def rank_of(self, layers: Sequence[str]) -> int | None:
        """Return the rank of a layer with these names."""
        return next(matching(self.rank_pattern, layers), self.r)

    def alpha_of(self, layers: Sequence[str]) -> float | None:
        """Return the alpha of a layer with these names."""
        return next(matching(self.alpha_pattern, layers), self.lora_alpha)


def is_simple(pattern: str) -> bool:
    """Return True for a regular expression that is tried in a time without surprises."""
    repeated = len(re.findall(r"[*+{]", pattern))
    if len(pattern) > 300 or repeated > 3 or re.search(r"\)[*+{]", pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError):
        return False
    return True


def matching(patterns: Mapping[str, Any], layers: Sequence[str]) -> Iterator[Any]:
    """Yield the values of patterns that fit the end of a layer's name, in order, as PEFT compares them."""
    for pattern, value in patterns.items():
        if any(re.match(rf"(.*\.)?({pattern})$", layer) for layer in layers):
            yield value


def lora_files(path: str | Path) -> list[Path]:
    """Return the files that a LoRA is read from: its weights, and adapter_config.json where that is of them.

    In a folder of several files it is of PEFT's names alone. Raise CheckpointError where there is no LoRA.
    """
    path = Path(path)
    folder = path.parent
    if path.is_dir():
        folder = path
    weights = []
    if folder.is_dir():
        weights = sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS and file.is_file())
    if path.is_dir():
        of_peft = [file for file in weights if file.name in PEFT_FILES] or weights
        if len(of_peft) != 1:
            problem = f"{path} holds {len(of_peft)} files of weights"
            raise errors.CheckpointError(f"{problem}; {GIVE_ONE}")
        path = of_peft[0]
    if not path.exists():
        raise errors.CheckpointError(f"the LoRA {path} not found; {GIVE_ONE}")
    settings = folder / "adapter_config.json"
    if settings.is_file() and (path.name in PEFT_FILES or len(weights) == 1):
        return [path, settings]
    return [path]


def adapter_settings(weights: Path, beside: Sequence[Path]) -> AdapterSettings | None:
    """Read what the header of a .safetensors, or adapter_config.json beside it, says of a LoRA."""
    sources: dict[str, AdapterSettings] = {}
    # 1. diffusers packs PEFT's settings as JSON into the header, with the name of the model before each
    if weights.suffix != ".json" and files.is_safetensors(weights):  # no index of shards
        with errors.library_reads(weights, errors.CheckpointError, "get it again"):
            with safe_open(weights, "pt") as file:
                header = file.metadata() or {}
            content = dict(json.loads(header.get("lora_adapter_metadata", "{}")))
        of_model = {name.removeprefix("transformer."): value for name, value in content.items()}
        with errors.in_context(f"{weights}: lora_adapter_metadata in its header", errors.CheckpointError):
            settings = AdapterSettings.of(of_model)
        if settings != AdapterSettings():
            sources["its header"] = settings
    # 2. PEFT's own file
    for path in beside:
        content = files.read_json(path, errors.CheckpointError)
        with errors.in_context(path, errors.CheckpointError):
            sources[path.name] = AdapterSettings.of(content)
    different = [settings for settings in sources.values() if settings != next(iter(sources.values()))]
    if different:
        raise errors.CheckpointError(
            f"{weights}: its header and adapter_config.json differ; remove the wrong one"
        )
    return next(iter(sources.values()), None)


# --- Changes of parameters
@dataclass(frozen=True)
class LowRank:
    """A change of a weight: alpha / rank · B A, or alpha / √rank · B A (rsLoRA, arXiv 2312.03732)."""

    parameter: str
    down: Tensor  # A [rank, in], of a convolution [rank, in, ...]
    up: Tensor  # B [out, rank], of a convolution [out, rank, 1, ...]
    alpha: float
    is_rank_stabilised: bool = False

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def shape(self) -> list[int]:
        return without_ones([len(self.up), *self.down.shape[1:]])

    @property
    def divisor(self) -> float:
        """What alpha is divided by."""
        if self.is_rank_stabilised:
            return math.sqrt(self.rank)
        return self.rank

    def times(self, strength: float) -> Tensor:
        scale = strength * self.alpha / self.divisor
        product = self.up.float().flatten(1) @ self.down.float().flatten(1)  # [out, in ...]
        return (scale * product).reshape(self.shape)


@dataclass(frozen=True)
class Whole:
    """A change of a parameter that is stored as it is, times a scale."""

    parameter: str
    values: Tensor
    scale: float = 1.0

    @property
    def shape(self) -> list[int]:
        return without_ones(list(self.values.shape))

    def times(self, strength: float) -> Tensor:
        return (strength * self.scale * self.values.float()).reshape(self.shape)


def without_ones(shape: Sequence[int]) -> list[int]:
    """Drop ones behind the second dimension: [r, in, 1, 1] is a matrix."""
    plain = list(shape)
    while len(plain) > 2 and plain[-1] == 1:
        plain.pop()
    return plain


@dataclass(frozen=True)
class LoRA:
    """Changes of parameters, perhaps several of one; changes() sums them."""

    file: str
    terms: Sequence[LowRank | Whole]
    strength: float = 1.0
    without_alpha: int = 0  # layers whose alpha is their rank, as nothing says another
    adapters: Sequence[str] = ()  # PEFT's names, where there are several

    def changes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each parameter that changes, and the sum of its changes in float32."""
        terms_of: dict[str, list[LowRank | Whole]] = {}
        for term in self.terms:
            terms_of.setdefault(term.parameter, []).append(term)
        for parameter, terms in terms_of.items():
            change = terms[0].times(self.strength)
            for term in terms[1:]:
                change = change + term.times(self.strength)
            yield parameter, change

    def __str__(self) -> str:
        pairs = [term for term in self.terms if isinstance(term, LowRank)]
        whole = len(self.terms) - len(pairs)
        numbers: dict[str, list[float]] = {
            "rank": [pair.rank for pair in pairs],
            "alpha": [pair.alpha for pair in pairs],
        }
        parts = []
        for name, values in numbers.items():
            if values:
                ends = dict.fromkeys((min(values), max(values)))
                parts.append(f"{name} {' to '.join(f'{value:g}' for value in ends)}")
        if self.without_alpha:
            parts.append(f"the rank where none is given: {self.without_alpha} of {len(pairs)}")
        if any(pair.is_rank_stabilised for pair in pairs):
            parts.append("over the root of the rank")
        if self.adapters:
            parts.append(f"the sum of {' and '.join(self.adapters)}")
        if whole:
            parts.append(f"{whole} whole changes")
        if self.strength != 1:
            parts.append(f"strength {self.strength:g}")
        layers = {pair.parameter for pair in pairs}
        return f"{self.file} merged into {len(layers)} layers ({', '.join(parts)})"


# --- A file of them
def read_lora(
    path: str | Path, rank: int | None = None, alpha: float | None = None, strength: float = 1.0
) -> LoRA:
    """Read a LoRA, or PEFT's folder of one. rank and alpha, where given, must be the file's, if it has them.

    Raise CheckpointError for keys that are not of a LoRA, a half without the other, another rank, and alphas
    that contradict each other.
    """
    weights, *beside = lora_files(path)
    content = files.read_weights_file(weights)
    settings = adapter_settings(weights, beside)
    state = content
    containers = [name for name in CONTAINERS if isinstance(state.get(name), dict)]
    while containers:
        tensors = [name for name, value in state.items() if isinstance(value, Tensor) and value.ndim]
        if tensors:
            problem = f"{path} holds {tensors[0]} beside {containers[0]}"
            raise errors.CheckpointError(f"{problem}: which of them is the LoRA? Give a file of it alone")
        state = state[containers[0]]
        containers = [name for name in CONTAINERS if isinstance(state.get(name), dict)]
    return lora_of(path, state, rank=rank, alpha=alpha, strength=strength, settings=settings)


def lora_of(
    path: str | Path,
    state: Mapping[str, Any],
    rank: int | None = None,
    alpha: float | None = None,
    strength: float = 1.0,
    settings: AdapterSettings | None = None,
) -> LoRA:
    """Make a LoRA from a state dict, and from PEFT's settings. CheckpointError names the first fault."""
    # 1. Sort the values by what they are: halves and biases by pair, alphas, and whole changes.
    pairs: dict[str, dict[str, Tensor]] = {}
    keys: dict[str, Key] = {}  # of pairs
    alphas: list[tuple[Key, float]] = []
    terms: list[LowRank | Whole] = []
    problems, strange = list[str](), list[str]()
    for name, value in state.items():
        kinds = [kind for kind, parts in OTHER_KINDS.items() if any(part in f".{name}" for part in parts)]
        key = Key.of(str(name))
        if kinds:
            problems.append(f"holds a {kinds[0]} ({name}), not a LoRA; merge it into the weights first")
        elif key is None:
            if not isinstance(value, Number | str | None):  # counters of training beside the weights
                strange.append(str(name))
        elif key.part == "alpha":
            number = positive_number(value)
            if number is None:
                problems.append(f"has no number above 0 as {name}, but {described(value)}; get it again")
            else:
                alphas.append((key, number))
        elif not isinstance(value, Tensor) or not value.is_floating_point() or not value.ndim:
            problems.append(f"holds no tensor of floating point as {name}, but {described(value)}")
        elif key.part in DIFFS:
            terms.append(Whole(f"{key.layer}.{DIFFS[key.part]}", value))
        else:
            keys[key.pair] = key
            pairs.setdefault(key.pair, {})[key.part] = value
    if strange:
        wanted = f"expected LAYER.lora_A.weight, lora_down, alpha or .{', .'.join(DIFFS)}"
        problems.append(f"has more than a LoRA: {', '.join(strange[:3])} is no part of one; {wanted}")

    # 2. Both halves of each pair, of one rank, and a pair for each alpha.
    products = {pair: halves for pair, halves in pairs.items() if halves.keys() >= {"down", "up"}}
    stems, layers = {keys[pair].stem for pair in products}, {keys[pair].layer for pair in products}
    alone = [key.layer for key, _ in alphas if key.layer not in layers]
    if not (products or terms) or len(products) < len(pairs) or alone:
        downs, ups = (sum(part in halves for halves in pairs.values()) for part in ("down", "up"))
        counts = f"{downs} layers with lora_A, {ups} with lora_B, {len(alone)} with an alpha alone"
        problems.append(f"holds no whole LoRA: {counts}; get it again")
    for pair, halves in products.items():
        down, up = halves["down"], halves["up"]
        shapes = f"A {list(down.shape)} and B {list(up.shape)} for {keys[pair].layer}"
        if min(down.ndim, up.ndim) < 2 or not 0 < len(down) == up.shape[1] or math.prod(up.shape[2:]) != 1:
            problems.append(f"has {shapes}, which are no pair of one rank above 0; get it again")
    ranks = {len(halves["down"]) for halves in products.values()}
    if rank is not None and ranks != {rank}:
        own_ranks = " and ".join(map(str, sorted(ranks))) or "none"
        problems.append(f"has rank {own_ranks}, and lora_rank is {rank}; leave lora_rank out")
    if problems:
        raise errors.CheckpointError(f"{path} {problems[0]}")

    # 3. The alpha of each pair: whatever says one, says the same; else it is the rank.
    own_alphas = {key.stem: number for key, number in alphas}
    shared_alphas = [(key.layer, number) for key, number in alphas if key.stem not in stems]
    without_alpha = 0
    for pair, halves in sorted(products.items()):
        key, own_rank = keys[pair], len(halves["down"])
        choices = {number for layer, number in shared_alphas if layer == key.layer}
        if key.stem in own_alphas:
            choices.add(own_alphas[key.stem])
        if alpha is not None:
            choices.add(float(alpha))
        if settings is not None:
            of_settings = settings.alpha_of((key.own_layer, key.layer))
            wanted_rank = settings.rank_of((key.own_layer, key.layer))
            if of_settings is not None:
                choices.add(of_settings)
            if wanted_rank not in (None, own_rank):
                problems.append(f"has rank {own_rank} for {key.layer}, and its settings say {wanted_rank}")
            if not choices:
                problems.append("has settings of PEFT without lora_alpha; give lora_alpha")
        if len(choices) > 1:
            values = " and ".join(f"{value:g}" for value in sorted(choices))
            problems.append(f"and what is beside it say alpha {values} for {key.layer}; {ONE_ALPHA}")
        if not choices:
            without_alpha += 1
            choices = {float(own_rank)}
        is_rank_stabilised = settings is not None and settings.use_rslora
        product = LowRank(
            parameter=f"{key.layer}.weight",
            down=halves["down"],
            up=halves["up"],
            alpha=max(choices),
            is_rank_stabilised=is_rank_stabilised,
        )
        terms.append(product)
        if "bias" in halves:
            terms.append(Whole(f"{key.layer}.bias", halves["bias"], product.alpha / product.divisor))

    # 4. Changes of one parameter have one shape.
    shapes_of: dict[str, list[int]] = {}
    for term in terms:
        if shapes_of.setdefault(term.parameter, term.shape) != term.shape:
            shapes = f"{shapes_of[term.parameter]} and by {term.shape}"
            problems.append(f"changes {term.parameter} by {shapes}; get it again")
    if problems:
        raise errors.CheckpointError(f"{path} {problems[0]}")
    adapters = sorted({keys[pair].adapter for pair in products})
    if len(adapters) == 1:
        adapters = []
    return LoRA(
        file=Path(path).name,
        terms=terms,
        strength=strength,
        without_alpha=without_alpha,
        adapters=adapters,
    )


def positive_number(value: Any) -> float | None:
    """Return a number, or the only one of a tensor, where it is above 0 and of a usual size."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    if not 0 < value <= files.MAX_SIZE:
        return None
    return float(value)


def described(value: Any) -> str:
    """Return what a value is, in words."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return errors.short_repr(value)


def merge_lora(state: Mapping[str, Tensor], lora: LoRA, source: str | Path) -> dict[str, Tensor]:
    """Return a state dict with a LoRA merged into its weights, float32 where they are changed.

    Raise CheckpointError for a parameter that the state dict does not have, or of another shape, for numbers
    that are not finite, and where it holds the LoRA already: W·D / D·D over all weights W and changes D
    estimates how many times D is in W. Its standard error is √(Σ mean(W²) D·D) / D·D; where that is large,
    nothing can be said.
    """
    # along = W·D, size = D·D, noise = Σ mean(W²) D·D, over all layers.
    merged, along, size, noise = dict(state), 0.0, 0.0, 0.0
    problem, remedy = "", "give a LoRA of this model"
    for name, change in lora.changes():
        layer = name.removesuffix(".weight")
        square = float(change.square().sum())
        if name not in state:
            problem = f"changes {layer} by {list(change.shape)}, {source} has nothing there"
        elif without_ones(state[name].shape) != list(change.shape):
            shape = list(state[name].shape)
            problem = f"changes {layer} by {list(change.shape)}, {source} has {shape} there"
        elif not math.isfinite(square):
            problem, remedy = f"changes {layer} by numbers that are not finite", "get it again"
        if problem:
            raise errors.CheckpointError(f"{lora.file} {problem}; {remedy}")
        weight = state[name].float()
        change = change.reshape(weight.shape)
        merged[name] = weight + change
        along, size = along + float((weight * change).sum()), size + square
        noise += float(weight.square().mean()) * square
    # A LoRA that is in W already makes W·D / D·D about 1; one that is not, about 0.
    if size > 0 and along / size > 0.5 and noise**0.5 / size < 0.1:
        raise errors.CheckpointError(f"{source} holds {lora.file} already; leave it out")
    if size == 0 and lora.strength != 0:
        warnings.warn(f"{lora.file} changes nothing: all its changes are 0", stacklevel=2)
    return merged

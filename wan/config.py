"""Sizes of the models, the settings of a run, and the block structure that follows from them."""

import re
import warnings
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.blocks import (
    block_ranges,
    block_sizes,
    check_window,
    latent_frames,
    rolling_attention_size,
    steps_of_blocks,
)
from wan.errors import ConfigError, reason_of, short_repr
from wan.files import (
    MAX_FRAMES,
    MAX_GPUS,
    MAX_LAYERS,
    MAX_NAME,
    MAX_SCALE,
    MAX_SIDE,
    MAX_TEXT,
    read_yaml,
)
from wan.validation import (
    NUM_TRAIN_TIMESTEPS,
    check_device,
    check_lora,
    check_number,
    check_sampler,
    check_sampling,
    check_seed,
    check_shift,
    check_steps,
    check_texts,
    check_types,
)

# --- The fields of a dataclass from several dicts of settings, each value of the type that its field has
if TYPE_CHECKING:
    from omegaconf import DictConfig


def merged(settings: type, path: str | Path, *sources: dict[str, Any]) -> dict[str, Any]:
    """Plain values of all fields of a dataclass; later sources win. Raises ConfigError, which names path."""
    from omegaconf import OmegaConf  # here: a --help needs no OmegaConf

    try:
        found = OmegaConf.merge(
            _schema(settings), *(OmegaConf.create(_literal(source)) for source in sources)
        )
        return OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
    except ConfigError:
        raise
    except Exception as error:  # OmegaConf's own error classes, and whatever a value of a wrong type raises
        key = getattr(error, "full_key", None)
        raise ConfigError(
            f"{path}: {reason_of(error)}{f' (key {short_repr(key)})' if key else ''}"
        ) from error


@cache
def _schema(settings: type) -> "DictConfig":
    """A dataclass as OmegaConf knows it; a merge copies it, so one is enough."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(settings)


def _literal(value: Any) -> Any:
    """A value in which OmegaConf fills nothing in, as it would for ${...}."""
    if value == "???":
        raise ConfigError("??? stands for a value that is missing; give it, or leave its key out")
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {name: _literal(inner) for name, inner in value.items()}
    if isinstance(value, list) and len(value) > MAX_LAYERS:
        raise ConfigError(
            f"a list of {len(value)} values, such as {short_repr(value[:3])}; at most {MAX_LAYERS} are read"
        )
    return [_literal(inner) for inner in value] if isinstance(value, list) else value


# --- The default reference set of mean ablation: subjects, cameras and styles that lie apart
REFERENCE_PROMPTS = (
    "A majestic eagle soaring through a cloudy sky, cinematic lighting",
    "An old fisherman repairs a net on a pier at dawn",
    "A busy street market at night, neon signs, handheld camera",
    "Close-up of rain drops running down a window, a city out of focus behind it",
    "A white cat jumps from a kitchen table to a chair",
    "Aerial view of a river delta in autumn, slow forward flight",
    "A watercolour animation of a paper boat drifting under a bridge",
    "Two dancers turn in an empty hall, long shadows on the floor",
)


# --- Sizes of the models, the settings of a run, and the block structure that follows from them
if TYPE_CHECKING:
    from wan.policies import CachePolicy
    from wan.prompt_schedule import PromptSwitch

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Wan2.1 transformer; the defaults are shared by the released 1.3B and 14B models."""

    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    freq_dim: int = 256
    text_dim: int = 4096
    text_len: int = 512
    in_dim: int = 16
    out_dim: int = 16
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6

    def __post_init__(self):
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ConfigError(f"dim {self.dim} does not split into {self.num_heads} heads of even size")
        if self.patch_size[0] != 1:
            raise ConfigError(
                f"patch_size {self.patch_size}: patches over time would mix frames; the first entry must be 1"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens S of one latent frame of height x width."""
        _, patch_h, patch_w = self.patch_size
        if height % patch_h or width % patch_w:
            raise ConfigError(
                f"latent frames of {height} x {width} do not split into patches of {patch_h} x {patch_w}"
            )
        return (height // patch_h) * (width // patch_w)


MODELS = {
    "Wan2.1-T2V-1.3B": ModelConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30),
    "Wan2.1-T2V-14B": ModelConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
}


# Of https://github.com/Wan-Video/Wan2.1, wan/configs/shared_config.py: what a video should not look like.
WAN_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass
class BaseSampling:
    """Bidirectional sampling of the base weights with classifier-free guidance (wan/text2video.py)."""

    shift: float = 8.0  # these two are Wan's own for 1.3B; 5 and 5 for 14B
    guidance_scale: float = 6.0
    num_steps: int = 50
    negative_prompt: str = WAN_NEGATIVE_PROMPT
    num_video_frames: int = 21  # 4n + 1
    layer_index: int = 20  # the last one where the model has fewer

    def __post_init__(self) -> None:
        """Raise ConfigError for values that no sampling can have."""
        check_types(self)
        check_sampling(self.shift, self.num_steps)
        check_number("guidance_scale", self.guidance_scale, -MAX_SCALE, MAX_SCALE)
        check_texts(negative_prompt=(self.negative_prompt, MAX_TEXT))
        check_number("num_frames", self.num_video_frames, 1, 4 * MAX_FRAMES - 3)
        latent_frames(self.num_video_frames)
        check_number("base.layer_index", self.layer_index, 0, MAX_LAYERS - 1)


@dataclass
class RunConfig:
    """All that one extraction needs. A YAML file fills it, flags override it, an unknown key is an error."""

    model: str = "Wan2.1-T2V-1.3B"  # the name caches and figures carry
    ckpt_dir: str = "wan_models/Wan2.1-T2V-1.3B"
    checkpoint_path: str | None = None  # .pt or .safetensors (docs/models.md); None runs the base weights
    use_ema: bool = True
    lora_path: str | None = None  # merged into the weights on loading
    lora_rank: int | None = None  # what the file must have; lora_alpha is rarely in it
    lora_alpha: float | None = None
    release: dict[str, Any] | None = None  # who published the weights, and how (docs/models.md)

    prompt: str = "A majestic eagle soaring through a cloudy sky, cinematic lighting"
    num_frames: int = 21  # latent frames
    height: int = 60  # of a latent frame, 1/8 of the video's
    width: int = 104
    seed: int = 42

    num_frame_per_block: int = 3
    independent_first_frame: bool = False
    local_attn_size: int = -1  # frames; -1: attend to the whole past
    sink_size: int = 0  # frames
    cache_policy: dict[str, Any] | None = None  # name and fields (wan/policies.py)
    prompt_schedule: list[dict[str, Any]] | None = None  # later prompts: frame, prompt, how

    denoising_step_list: list[int] = field(default_factory=lambda: [1000, 750, 500, 250])
    first_block_steps: list[int] | None = None  # of block 0, where they differ
    warp_denoising_step: bool = True
    timestep_shift: float = 5.0
    context_noise: int = 0  # timestep of the clean pass
    recompute_context: int = 0  # frames whose keys are computed again before each block (Krea)
    sampler: str = "blocks"  # or rolling_forcing: a window of blocks at rising noise levels

    layer_indices: list[int] = field(default_factory=lambda: [1, 5])
    layer_index: int = 3
    step: int = 0  # which pass is extracted; 0 is t = 1000

    interventions: list[Any] = field(default_factory=list)  # docs/interventions.md; none
    reference_prompts: list[str] = field(default_factory=lambda: list(REFERENCE_PROMPTS))  # of mean ablation

    base: BaseSampling = field(default_factory=BaseSampling)

    device: str = "auto"
    dtype: str = "auto"  # bfloat16 on a GPU, float32 on a CPU
    gpus: int = 1  # how many make one rollout together, by heads (wan/parallel.py)
    offload: bool = False  # the layers' weights stay on the host and are streamed; umT5 runs there
    t5_cpu: bool = False  # umT5 runs on the CPU
    prompt_embeds: str | None = None  # a file of prompt embeddings, in place of umT5
    embeds_dir: str | None = "cache/prompt_embeds"  # where prompt embeddings are remembered; None: nowhere

    def __post_init__(self) -> None:
        """Raise ConfigError for values that no run can have, before anything is loaded for one."""
        check_types(self)
        paths = ("ckpt_dir", "checkpoint_path", "lora_path", "prompt_embeds", "embeds_dir")
        check_texts(model=(self.model, MAX_NAME), prompt=(self.prompt, MAX_TEXT))
        check_texts(**{name: (getattr(self, name), None) for name in paths})
        check_number("num_frames", self.num_frames, 1, MAX_FRAMES)
        check_number("gpus", self.gpus, 1, MAX_GPUS)
        for name in ("height", "width"):
            check_number(name, getattr(self, name), 1, MAX_SIDE)
        check_seed(self.seed)
        block_sizes(self.num_frames, self.num_frame_per_block, self.independent_first_frame)
        check_window(self.local_attn_size, self.sink_size, self.num_frame_per_block)
        check_sampler(self.sampler)
        check_lora(self.lora_path, self.lora_rank, self.lora_alpha)
        self._check_policy()
        self._check_passes()
        self._check_layers()
        check_device(self.device)
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {short_repr(self.dtype)} is not one of {', '.join(DTYPES)}")

    def _check_policy(self) -> None:
        schedule = [] if self.prompt_schedule is None else self.prompt_schedule
        if not isinstance(schedule, list) or not all(isinstance(switch, dict) for switch in schedule):
            raise ConfigError(
                f"prompt_schedule is {short_repr(schedule)}, not a list of switches of a frame and a prompt"
            )
        if self.cache_policy is not None and (self.local_attn_size != -1 or self.sink_size):
            raise ConfigError(
                f"local_attn_size {self.local_attn_size} and sink_size {self.sink_size} mean cache_policy "
                f"{{name: window, window: {self.local_attn_size}, sink: {self.sink_size}}}; leave them out "
                "where cache_policy is given"
            )
        if self.sampler == "rolling_forcing":
            self._check_rolling()
        if self.cache_policy is None and not self.prompt_schedule and not self.recompute_context:
            return  # a config must not wait for torch
        from wan.prompt_schedule import check_recompute, check_schedule

        policy = self.policy
        policy.check(self.block_sizes)
        check_schedule(self.switches, block_ranges(self.block_sizes), policy)
        check_recompute(self.recompute_context, policy, self.num_frame_per_block)

    def _check_rolling(self) -> None:
        rolling_attention_size(self.local_attn_size, len(self.denoising_step_list), self.num_frame_per_block)
        if self.gpus > 1:
            raise ConfigError(f"sampler rolling_forcing runs on one GPU, not {self.gpus}; leave gpus out")
        names = ("cache_policy", "prompt_schedule", "first_block_steps", "independent_first_frame")
        for name in (*names, "recompute_context", "interventions"):
            if getattr(self, name):
                raise ConfigError(f"sampler rolling_forcing knows no {name}; leave it out, or take blocks")

    @property
    def policy(self) -> "CachePolicy":
        """What a block may look at: cache_policy, or what local_attn_size and sink_size mean."""
        from wan.policies import of_window, read_policy

        if self.cache_policy is None:
            return of_window(self.local_attn_size, self.sink_size)
        return read_policy(self.cache_policy)

    @property
    def switches(self) -> "list[PromptSwitch]":
        """The prompts that follow the first one."""
        from wan.prompt_schedule import read_switch

        return [read_switch(settings) for settings in self.prompt_schedule or []]

    def _check_passes(self) -> None:
        for name in ("denoising_step_list", "first_block_steps"):
            steps = getattr(self, name)
            if steps is not None:
                check_steps(name, steps)
        check_shift("timestep_shift", self.timestep_shift)
        check_number("context_noise", self.context_noise, 0, NUM_TRAIN_TIMESTEPS)
        last = self.num_passes - 1
        if not 0 <= self.step <= last:
            raise ConfigError(f"step {short_repr(self.step)} is not in 0..{last}; {last} is the clean pass")

    def _check_layers(self) -> None:
        if not 1 <= len(self.layer_indices) <= MAX_LAYERS:
            raise ConfigError(f"layer_indices has {len(self.layer_indices)} layers, not 1..{MAX_LAYERS}")
        for layer in (*self.layer_indices, self.layer_index):
            if not 0 <= layer < MAX_LAYERS:
                raise ConfigError(
                    f"layer {short_repr(layer)} is not in 0..{MAX_LAYERS - 1}; layers count from 0"
                )

    @property
    def block_sizes(self) -> list[int]:
        return block_sizes(self.num_frames, self.num_frame_per_block, self.independent_first_frame)

    @property
    def num_passes(self) -> int:
        """Denoising passes that any block has, and the clean pass."""
        return len({*self.denoising_step_list, *(self.first_block_steps or ())}) + 1

    def passes_of_block(self, block: int) -> list[int]:
        """The passes of a block as captures number them (wan/pipeline.py); the last one is clean."""
        _, first, later = steps_of_blocks(self.denoising_step_list, self.first_block_steps)
        return [*(later if block else first), self.num_passes - 1]


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a YAML file into a RunConfig; entries of overrides that are not None win.

    With an independent first frame, frames that do not fit whole blocks are left out, with a warning.
    Raises ConfigError for a file that is not there, an unknown key, or a value that no run can have.
    """
    if not Path(path).is_file():
        beside = ", ".join(sorted(p.name for p in Path("configs").glob("*.yaml")))
        raise ConfigError(f"config {path} not found; configs/ holds: {beside}")
    from_file = read_yaml(path)
    known = {f.name for f in fields(RunConfig)}
    if unknown := [name for name in from_file if name not in known]:
        raise ConfigError(
            f"{path}: unknown key {short_repr(unknown[0])}; known keys: {', '.join(sorted(known))}"
        )
    chosen = {k: v for k, v in (overrides or {}).items() if v is not None}
    replaced = {name for name in ("cache_policy", "prompt_schedule") if name in chosen}
    settings = merged(RunConfig, path, {k: v for k, v in from_file.items() if k not in replaced}, chosen)
    first, n = settings["independent_first_frame"], settings["num_frame_per_block"]
    if first and settings["num_frames"] > 1 and n >= 1:
        asked = settings["num_frames"]
        settings["num_frames"] = 1 + (asked - 1) // n * n
        if settings["num_frames"] != asked:
            fits = settings["num_frames"]
            warnings.warn(f"with an independent first frame {asked} frames become {fits}", stacklevel=2)
    return RunConfig(**settings | {"base": BaseSampling(**settings["base"])})

"""Sizes of the models, and the settings of a run: of the model, and of a rollout."""

import re
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from wan import blocks, errors, files

CARDS = {  # GPU -> multiprocessors, and threads of each: they decide which value torch.randn draws where
    "A100": (108, 2048),
    "H100": (132, 2048),  # and H200
    "L40": (142, 1536),
    "RTX 4090": (128, 1536),
}
NUM_TRAIN_TIMESTEPS = 1000  # noise levels that the model was trained on
MAX_SCALE = 1000.0  # shift of noise levels, guidance
TINY = 1e-9  # below any shift or LoRA alpha
PIXELS, WIDE_PIXELS = 8, 16  # of a video along a side of a latent: Wan2.1's VAE, and Wan2.2's of 48 channels


# --- Types of settings, which errors.check_fields checks
def plain_text(value: str) -> str:
    """Return a text that a file can hold: without NUL and halves of characters."""
    try:
        return errors.require_text(value, "should be text: it")
    except errors.ConfigError as error:
        raise ValueError(str(error)) from None


def given_text(value: str) -> str:
    """Return a prompt, which is more than spaces."""
    if not value.strip():
        raise ValueError(
            "should be a text; without one, prompt_embeds takes a file of states and a name as its prompt"
        )
    return value


def place_name(value: str) -> str:
    """Return the name of a file or folder, which is more than spaces."""
    if not value.strip():
        raise ValueError("should name a file or folder")
    return value


def device_name(value: str) -> str:
    """Return auto, cpu, cuda or cuda:N; other devices lack operations."""
    if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d{0,4}))?", value):
        raise ValueError("should be one of auto, cpu, cuda, cuda:N")
    return value


def once_each(numbers: list[int]) -> list[int]:
    """Return numbers of which none comes twice."""
    for n, number in enumerate(numbers):
        if number in numbers[:n]:
            raise ValueError(f"should name {number} once")
    return numbers


Text = Annotated[str, AfterValidator(plain_text)]
Device = Annotated[str, AfterValidator(device_name)]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Layer = Annotated[int, Field(ge=0, lt=files.MAX_LAYERS)]
Noise = Literal["seeded", "released", "A100", "H100", "L40", "RTX 4090"]  # released, or as one of CARDS
Place = Annotated[Text, AfterValidator(place_name), Field(max_length=4096)]  # of a file or folder
Prompt = Annotated[Text, AfterValidator(given_text), Field(max_length=files.MAX_TEXT)]
NegativePrompt = Annotated[Text, Field(max_length=files.MAX_TEXT)]  # may be empty
Scale = Annotated[float, Field(ge=TINY, le=MAX_SCALE)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Side = Annotated[int, Field(ge=1, le=1024)]
Size = Annotated[int, Field(ge=1, le=files.MAX_SIZE)]  # of a layer
Rank = Size  # of a LoRA
Alpha = Annotated[float, Field(ge=TINY, le=files.MAX_SIZE)]  # of a LoRA
Steps = Annotated[list[int], BeforeValidator(errors.as_list)]  # timesteps
Layers = Annotated[
    list[Layer],
    BeforeValidator(errors.as_list),
    Field(min_length=1, max_length=files.MAX_LAYERS),
    AfterValidator(once_each),
]

# The default reference set of mean ablation: subjects, cameras and styles that lie apart.
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


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Wan transformer; the defaults are shared by Wan2.1's released 1.3B and 14B models."""

    dim: Size
    ffn_dim: Size
    num_heads: Size
    num_layers: Annotated[int, Field(ge=1, le=files.MAX_LAYERS)]
    freq_dim: Size = 256
    text_dim: Size = 4096
    text_len: Size = 512
    in_dim: Size = 16
    out_dim: Size = 16
    patch_size: tuple[Literal[1], Side, Side] = (1, 2, 2)  # latents that become one token
    eps: Annotated[float, Field(ge=0, le=1)] = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", tuple(self.patch_size))  # JSON has a list
        errors.check_fields(self)
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise errors.ConfigError(
                f"dim {self.dim} does not split into {self.num_heads} heads of even size"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens S of one latent frame of height x width."""
        _, patch_h, patch_w = self.patch_size
        if height % patch_h or width % patch_w:
            latent_sides(f"{PIXELS * height}x{PIXELS * width}", PIXELS, (patch_h, patch_w))
        return (height // patch_h) * (width // patch_w)


MODELS = {
    "Wan2.1-T2V-1.3B": ModelConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30),
    "Wan2.1-T2V-14B": ModelConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
    "Wan2.2-TI2V-5B": ModelConfig(
        dim=3072, ffn_dim=14336, num_heads=24, num_layers=30, in_dim=48, out_dim=48
    ),
}


# Of https://github.com/Wan-Video/Wan2.1, wan/configs/shared_config.py: what a video should not look like.
WAN_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass(frozen=True)
class BaseSampling:
    """Bidirectional sampling of the base weights with classifier-free guidance (wan/text2video.py)."""

    shift: Scale = 8.0  # these two are Wan's own for 1.3B; 5 and 5 for 14B
    guidance_scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)] = 6.0
    num_steps: Annotated[int, Field(ge=1, le=10_000)] = 50
    negative_prompt: NegativePrompt = WAN_NEGATIVE_PROMPT
    num_video_frames: Annotated[int, Field(ge=1, le=4 * files.MAX_FRAMES - 3)] = 21  # 4n + 1
    layer_index: Layer = 20  # the last one where the model has fewer

    def __post_init__(self) -> None:
        errors.check_fields(self, "base: ")
        blocks.latent_frames(self.num_video_frames)


@dataclass(frozen=True)
class LoRAFile:
    """A LoRA that is merged into the weights: strength times its changes."""

    path: Place
    strength: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)] = 1.0
    rank: Rank | None = None  # what the file must have
    alpha: Alpha | None = None  # where the file has none

    def __post_init__(self) -> None:
        errors.check_fields(self, "lora: ")

    def __str__(self) -> str:
        """Return its name, with the strength where it is not 1: a.safetensors:0.8, as --lora takes it."""
        name = Path(self.path).name
        if self.strength == 1:
            return name
        return f"{name}:{self.strength:g}"


def setting(default: Any, *, flag: str = "", changes_numbers: bool = True) -> Any:
    """Return the field of a setting.

    flag: what the scripts' --help says of it. changes_numbers: False for what changes no number of a rollout,
    and for what stands for something else that is compared: a file for its content, a device for its dtype.
    """
    about = {"flag": flag, "changes_numbers": changes_numbers}
    if isinstance(default, list):
        return field(default_factory=lambda: copy(default), metadata=about)
    return field(default=default, metadata=about)


def made_of_mapping(kind: type, where: str) -> Callable[[Any], Any]:
    """Return a function that makes a dataclass of a mapping; a value of that class stays."""

    def make(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        return errors.from_values(kind, value, where)

    return make


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a model and its sampler: another value loads the model again."""

    # --- Weights
    model: Annotated[str, Field(max_length=200)] = setting("Wan2.1-T2V-1.3B")  # as caches and figures name it
    ckpt_dir: Place = setting(
        "wan_models/Wan2.1-T2V-1.3B",
        flag="directory of the base model in diffusers layout",
        changes_numbers=False,
    )
    # .pt or .safetensors (docs/models.md); None runs the base weights
    checkpoint_path: Place | None = setting(
        None, flag="Self-Forcing style .pt with the causal weights", changes_numbers=False
    )
    use_ema: bool = setting(True, flag="the checkpoint's generator_ema rather than its generator")
    lora_path: Place | None = setting(None, changes_numbers=False)  # merged into the weights on loading
    lora_rank: Rank | None = setting(None)  # what the file must have; alpha is rarely in it
    lora_alpha: Alpha | None = setting(None)
    # Further LoRAs, merged in this order
    lora: list[Annotated[LoRAFile, BeforeValidator(made_of_mapping(LoRAFile, "lora: "))]] | None = setting(
        None, changes_numbers=False
    )
    prompt_embeds: Place | None = setting(
        None, flag="a .pt of prompt embeddings, in place of umT5", changes_numbers=False
    )

    # --- What a block sees
    num_frame_per_block: files.Count = setting(3)
    independent_first_frame: bool = setting(False, flag="the first block is one frame")
    # frames; -1: attend to the whole past
    local_attn_size: Annotated[int, Field(ge=-1, le=files.MAX_FRAMES)] = setting(-1)
    sink_size: files.Frames = setting(0)
    cache_policy: dict[str, object] | None = setting(None)  # name and fields (wan/policies/)

    # --- Its steps, from t = 1000 down
    denoising_step_list: Steps = setting([1000, 750, 500, 250])
    first_block_steps: Steps | None = setting(None)  # of the first block that is denoised
    warp_denoising_step: bool = setting(True)
    timestep_shift: Scale = setting(5.0)
    context_noise: Annotated[int, Field(ge=0, le=NUM_TRAIN_TIMESTEPS)] = setting(0)  # of the clean pass
    recompute_context: files.Frames = setting(0)  # whose keys are computed again before each block (Krea)
    # blocks, or a window of blocks at rising noise levels
    sampler: Literal["blocks", "rolling_forcing"] = setting("blocks")
    # from a noise level to the next: new noise, or UniPC without any
    solver: Literal["fresh_noise", "unipc"] = setting("fresh_noise")
    # a picture is the first frame of block 0, clean at every step, and no block of its own
    held_first_frame: bool = setting(False)

    # --- Its videos
    pixels_per_latent: Literal[8, 16] = setting(PIXELS, changes_numbers=False)  # along a side
    fps: Annotated[int, Field(ge=1, le=240)] = setting(16, changes_numbers=False)

    # --- Where it runs
    device: Device = setting("auto", flag="auto, cpu, cuda or cuda:N", changes_numbers=False)
    dtype: DType = setting(
        "auto",
        flag="of weights and generation; auto: bfloat16 on a GPU, float32 on a CPU",
        changes_numbers=False,
    )
    # By heads (wan/wings/parallel.py)
    gpus: Annotated[int, Field(ge=1, le=4096)] = setting(
        1, flag="split one rollout over this many GPUs of the host (the script starts torchrun)"
    )
    offload: bool = setting(
        False,
        flag="keep the layers' weights on the host and stream them to the GPU: the same bits, less GPU "
        "memory; umT5 stays where it is",
        changes_numbers=False,
    )
    t5_cpu: bool = setting(False, flag="run umT5 on the CPU; other bits than on a GPU", changes_numbers=False)


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of one rollout: a loaded model takes another value."""

    prompt: Prompt = setting(
        "A majestic eagle soaring through a cloudy sky, cinematic lighting", flag="text to generate from"
    )
    num_frames: files.Count = setting(21, flag="latent frames; 21 are 81 video frames")
    height: Side = setting(60)  # of a latent frame
    width: Side = setting(104)
    seed: Seed = setting(42, flag="of all noise")
    noise: Noise = setting(
        "seeded",
        flag="seeded: the same on every device; released, or a card: as the public scripts draw it there",
    )
    first_frames: Place | None = setting(
        None,
        flag="latents, an mp4 or a picture that the video begins with; num_frames counts them",
        changes_numbers=False,
    )
    prompt_schedule: list[dict[str, object]] | None = setting(None)  # later prompts: frame, prompt, how

    # --- What is captured and edited
    layer_indices: Layers = setting([1, 5], flag="layers, counted from 0", changes_numbers=False)
    layer_index: Layer = setting(
        3, flag="layer, counted from 0; the cache goes to cache/layerN.pt", changes_numbers=False
    )
    step: files.Frames = setting(
        0, flag="which pass: 0 is t = 1000, the last is the clean pass", changes_numbers=False
    )
    interventions: list[object] = setting([], changes_numbers=False)  # docs/interventions.md
    reference_prompts: list[Prompt] = setting(list(REFERENCE_PROMPTS))  # of mean ablation
    base: Annotated[BaseSampling, BeforeValidator(made_of_mapping(BaseSampling, "base: "))] = field(
        default_factory=BaseSampling, metadata={"flag": "", "changes_numbers": False}
    )

    # --- Files
    release: dict[str, object] | None = setting(None, changes_numbers=False)  # who published the weights, how
    # Where prompt embeddings are remembered; None: nowhere
    embeds_dir: Place | None = setting("cache/prompt_embeds", changes_numbers=False)


NOT_OF_ROLLING_FORCING = (
    "cache_policy",
    "prompt_schedule",
    "first_block_steps",
    "independent_first_frame",
    "recompute_context",
    "interventions",
    "first_frames",
    "held_first_frame",
)


@dataclass(frozen=True)
class RunConfig(ModelSettings, RolloutSettings):
    """All settings of a run. A YAML file fills it, flags override it, an unknown key is an error."""

    def __post_init__(self) -> None:
        errors.check_fields(self)
        for name in ("denoising_step_list", "first_block_steps"):
            steps = getattr(self, name)
            falls = steps is None or all(a > b for a, b in pairwise([NUM_TRAIN_TIMESTEPS + 1, *steps, -1]))
            if not falls or steps == []:
                remedy = f"does not go down within {NUM_TRAIN_TIMESTEPS}..1, or to a last 0"
                raise errors.ConfigError(
                    f"{name} {errors.short_repr(steps)} {remedy}; try [1000, 750, 500, 250]"
                )
        # Captures name passes by their index; the clean pass comes last.
        if self.step >= self.num_passes:
            last = self.num_passes - 1
            raise errors.ConfigError(f"step {self.step} is not in 0..{last}; {last} is the clean pass")
        if self.solver == "unipc" and 0 in {*self.denoising_step_list, *(self.first_block_steps or ())}:
            raise errors.ConfigError("solver unipc ends at 0 by itself; leave the step 0 out")
        self.block_sizes  # noqa: B018 - refuses frames that are no whole blocks
        if self.sampler == "rolling_forcing":
            steps, size = len(self.denoising_step_list), self.num_frame_per_block
            blocks.rolling_attention_size(self.local_attn_size, steps, size)
            unknown = [name for name in NOT_OF_ROLLING_FORCING if getattr(self, name)]
            if self.gpus > 1:
                unknown.append("gpus above 1")
            if self.solver != "fresh_noise":
                unknown.append(f"solver {self.solver}")
            if unknown:
                raise errors.ConfigError(f"sampler rolling_forcing knows no {unknown[0]}; leave it out")
        # A window has two spellings, of which only one may be used.
        has_window = self.local_attn_size != -1 or self.sink_size > 0
        if self.cache_policy is not None and has_window:
            policy = f"{{name: window, window: {self.local_attn_size}, sink: {self.sink_size}}}"
            remedy = "leave them out where cache_policy is given"
            raise errors.ConfigError(f"local_attn_size and sink_size mean cache_policy {policy}; {remedy}")

    @property
    def loras(self) -> list[LoRAFile]:
        """The LoRAs of the run in the order of merging: lora_path's, then those of lora."""
        files_of_run = []
        if self.lora_path:
            first = LoRAFile(self.lora_path, strength=1.0, rank=self.lora_rank, alpha=self.lora_alpha)
            files_of_run.append(first)
        return [*files_of_run, *(self.lora or [])]

    @property
    def block_sizes(self) -> list[int]:
        return blocks.block_sizes(self.num_frames, self.num_frame_per_block, self.independent_first_frame)

    @property
    def num_passes(self) -> int:
        """Denoising passes that any block has, and the clean pass."""
        return len({*self.denoising_step_list, *(self.first_block_steps or ())}) + 1

    def passes_of_block(self, block: int) -> list[int]:
        """Return the passes of a block as captures number them (wan/pipeline.py); the last one is clean."""
        _, first, later = blocks.steps_of_blocks(self.denoising_step_list, self.first_block_steps)
        steps = later
        if block == 0:
            steps = first
        return [*steps, self.num_passes - 1]


def as_one_block(config: RunConfig) -> RunConfig:
    """Return the settings of a bidirectional run: base weights, base.num_video_frames as one block."""
    frames = blocks.latent_frames(config.base.num_video_frames)
    return replace(
        config,
        num_frames=frames,
        num_frame_per_block=frames,
        independent_first_frame=False,
        local_attn_size=-1,
        sink_size=0,
        cache_policy=None,
        checkpoint_path=None,
        lora=None,
        lora_path=None,
        lora_rank=None,
        lora_alpha=None,
    )


def changed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings of a cache that differ from the defaults: an older cache lacks some of these."""
    usual = RunConfig()
    return {name: value for name, value in settings.items() if value != getattr(usual, name, None)}


def latent_sides(size: Any, pixels: int = PIXELS, patch: tuple[int, int] = (2, 2)) -> dict[str, int]:
    """Return height and width of latents for a video's height x width in pixels, such as "480x832".

    pixels: along a side of a latent. ConfigError for sides that are not in whole patches; it names the
    nearest ones.
    """
    sides = [int(side) for side in str(size).split("x") if side.isdecimal() and len(side) < 6]
    if len(sides) != 2 or str(size).count("x") != 1:
        raise errors.ConfigError(
            f"size {errors.short_repr(size)} is not a height and a width in pixels, such as 480x832"
        )
    steps = [pixels * side for side in patch]
    nearest = [
        {max(step, side // step * step), -(-side // step) * step or step}
        for side, step in zip(sides, steps, strict=True)
    ]
    if any(side not in near for side, near in zip(sides, nearest, strict=True)):
        legal = " or ".join(
            f"{height}x{width}" for height in sorted(nearest[0]) for width in sorted(nearest[1])
        )
        raise errors.ConfigError(
            f"{size} pixels are not in whole patches of {steps[0]} x {steps[1]}: take {legal}"
        )
    return {"height": sides[0] // pixels, "width": sides[1] // pixels}


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a YAML file into a RunConfig; entries of overrides that are not None win.

    With an independent first frame, frames that do not fit whole blocks are left out, with a warning.
    Raise ConfigError for a file that is not there, an unknown key, or a value that no run can have.
    """
    # 1. Flags win over the file; a policy and later prompts are replaced as a whole.
    settings = files.read_yaml(path)
    overrides = {k: v for k, v in (overrides or {}).items() if v is not None}
    pixels = (settings | overrides).get("pixels_per_latent")
    if pixels != WIDE_PIXELS:  # other values are refused below
        pixels = PIXELS
    if "size" in overrides:  # of the video; height and width are of its latents
        overrides |= latent_sides(overrides.pop("size"), pixels)
    if "size" in settings:
        with errors.in_context(path):
            settings |= latent_sides(settings.pop("size"), pixels)
    settings |= overrides
    # 2. Frames that fit whole blocks behind a first one; values of other types are refused below.
    usual = RunConfig()
    frames = settings.get("num_frames", usual.num_frames)
    block = settings.get("num_frame_per_block", usual.num_frame_per_block)
    are_counts = type(frames) is type(block) is int and frames > 1 and block >= 1
    if are_counts and settings.get("independent_first_frame") is True:
        fitting = 1 + (frames - 1) // block * block
        settings["num_frames"] = fitting
        if fitting != frames:
            warnings.warn(f"with an independent first frame {frames} frames become {fitting}", stacklevel=2)
    try:
        return errors.from_values(RunConfig, settings)
    except errors.ConfigError as problem:
        # A message begins with the setting or its value: a flag may be wrong, and not the file
        if str(problem).partition(" ")[0] in {*overrides, *map(str, overrides.values())}:
            raise
        raise errors.ConfigError(f"{path}: {problem}") from None

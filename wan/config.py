"""Sizes of the models, and the settings of a run."""

import warnings
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from wan.blocks import block_ranges, block_sizes, latent_frames, rolling_attention_size, steps_of_blocks
from wan.errors import ConfigError, check_fields, from_values, named, short_repr
from wan.files import MAX_FRAMES, MAX_LAYERS, MAX_SIZE, MAX_TEXT, Count, Frames, read_yaml

if TYPE_CHECKING:
    from wan.cache import CachePolicy, PromptSwitch
    from wan.interventions import Edit

DTYPES = ("auto", "bfloat16", "float16", "float32")
SAMPLERS = ("blocks", "rolling_forcing")
CARDS = {  # GPU -> multiprocessors, and threads of each: they decide which value torch.randn draws where
    "A100": (108, 2048),
    "H100": (132, 2048),  # and H200
    "L40": (142, 1536),
    "RTX 4090": (128, 1536),
}
NOISES = ("seeded", "released", *CARDS)
NUM_TRAIN_TIMESTEPS = 1000  # noise levels that the model was trained on
MAX_SCALE = 1000.0  # shift of noise levels, guidance
TINY = 1e-9  # below any shift or LoRA alpha

Device = Annotated[str, ("auto", "cpu", "cuda", "cuda:N")]  # others lack operations
Layer = Annotated[int, 0, MAX_LAYERS - 1]
Place = Annotated[str, 1, 4096]  # of a file or folder
Prompt = Annotated[str, 0, MAX_TEXT]
PIXELS = 8  # of a video along a side of a latent
Scale = Annotated[float, TINY, MAX_SCALE]
Side = Annotated[int, 1, 1024]
Size = Annotated[int, 1, MAX_SIZE]  # of a layer

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
    """Sizes of a Wan2.1 transformer; the defaults are shared by the released 1.3B and 14B models."""

    dim: Size
    ffn_dim: Size
    num_heads: Size
    num_layers: Annotated[int, 1, MAX_LAYERS]
    freq_dim: Size = 256
    text_dim: Size = 4096
    text_len: Size = 512
    in_dim: Size = 16
    out_dim: Size = 16
    patch_size: tuple[Annotated[int, 1, 1], Side, Side] = (1, 2, 2)  # latents that become one token
    eps: Annotated[float, 0, 1] = 1e-6

    def __post_init__(self):
        check_fields(self)
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ConfigError(f"dim {self.dim} does not split into {self.num_heads} heads of even size")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens S of one latent frame of height x width."""
        _, patch_h, patch_w = self.patch_size
        if height % patch_h or width % patch_w:
            latent_sides(f"{PIXELS * height}x{PIXELS * width}", (patch_h, patch_w))
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


@dataclass(frozen=True)
class BaseSampling:
    """Bidirectional sampling of the base weights with classifier-free guidance (wan/text2video.py)."""

    shift: Scale = 8.0  # these two are Wan's own for 1.3B; 5 and 5 for 14B
    guidance_scale: Annotated[float, -MAX_SCALE, MAX_SCALE] = 6.0
    num_steps: Annotated[int, 1, 10_000] = 50
    negative_prompt: Prompt = WAN_NEGATIVE_PROMPT
    num_video_frames: Annotated[int, 1, 4 * MAX_FRAMES - 3] = 21  # 4n + 1
    layer_index: Layer = 20  # the last one where the model has fewer

    def __post_init__(self) -> None:
        check_fields(self, "base: ")
        latent_frames(self.num_video_frames)


@dataclass(frozen=True)
class LoRAFile:
    """A LoRA that is merged into the weights: strength times its changes."""

    path: Place
    strength: Annotated[float, -MAX_SCALE, MAX_SCALE] = 1.0
    rank: Annotated[int, 1, MAX_SIZE] | None = None  # what the file must have
    alpha: Annotated[float, TINY, MAX_SIZE] | None = None  # where the file has none

    def __post_init__(self) -> None:
        check_fields(self, "lora: ")

    def __str__(self) -> str:
        """Return its name, with the strength where it is not 1: a.safetensors:0.8, as --lora takes it."""
        return Path(self.path).name + f":{self.strength:g}" * (self.strength != 1)


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. A YAML file fills it, flags override it, an unknown key is an error."""

    # --- Weights
    model: Annotated[str, 0, 200] = "Wan2.1-T2V-1.3B"  # the name caches and figures carry
    ckpt_dir: Place = "wan_models/Wan2.1-T2V-1.3B"
    checkpoint_path: Place | None = None  # .pt or .safetensors (docs/models.md); None runs the base weights
    use_ema: bool = True
    lora_path: Place | None = None  # merged into the weights on loading
    lora_rank: Annotated[int, 1, MAX_SIZE] | None = None  # what the file must have; alpha is rarely in it
    lora_alpha: Annotated[float, TINY, MAX_SIZE] | None = None
    lora: list[LoRAFile] | None = None  # further ones, merged in this order
    release: dict[str, Any] | None = None  # who published the weights, and how (docs/models.md)

    # --- The video
    prompt: Prompt = "A majestic eagle soaring through a cloudy sky, cinematic lighting"
    num_frames: Count = 21  # latent frames
    height: Side = 60  # of a latent frame, 1/8 of the video's
    width: Side = 104
    seed: Annotated[int, -(2**63), 2**63 - 1] = 42
    first_frames: Place | None = None  # latents, an mp4 or a picture that the video begins with, whole blocks
    noise: Annotated[str, NOISES] = "seeded"  # released: as public scripts draw it, here or on one of CARDS

    # --- What a block sees
    num_frame_per_block: Count = 3
    independent_first_frame: bool = False
    local_attn_size: Annotated[int, -1, MAX_FRAMES] = -1  # frames; -1: attend to the whole past
    sink_size: Frames = 0  # frames
    cache_policy: dict[str, Any] | None = None  # name and fields (wan/policies/)
    prompt_schedule: list[dict[str, Any]] | None = None  # later prompts: frame, prompt, how

    # --- Its steps, from t = 1000 down
    denoising_step_list: list[int] = field(default_factory=lambda: [1000, 750, 500, 250])
    first_block_steps: list[int] | None = None  # of block 0, where they differ
    warp_denoising_step: bool = True
    timestep_shift: Scale = 5.0
    context_noise: Annotated[int, 0, NUM_TRAIN_TIMESTEPS] = 0  # timestep of the clean pass
    recompute_context: Frames = 0  # whose keys are computed again before each block (Krea)
    sampler: Annotated[str, SAMPLERS] = (
        "blocks"  # or rolling_forcing: a window of blocks at rising noise levels
    )

    # --- What is captured and edited
    layer_indices: Annotated[list[Layer], 1, MAX_LAYERS] = field(default_factory=lambda: [1, 5])
    layer_index: Layer = 3
    step: Frames = 0  # which pass is extracted; 0 is t = 1000

    interventions: list[Any] = field(default_factory=list)  # docs/interventions.md; none
    # of mean ablation
    reference_prompts: list[Prompt] = field(default_factory=lambda: list(REFERENCE_PROMPTS))

    base: BaseSampling = field(default_factory=BaseSampling)

    # --- Where it runs
    device: Device = "auto"
    dtype: Annotated[str, DTYPES] = "auto"  # bfloat16 on a GPU, float32 on a CPU
    gpus: Annotated[int, 1, 4096] = 1  # how many make one rollout together, by heads (wan/wings/parallel.py)
    offload: bool = False  # the layers' weights stay on the host and are streamed
    t5_cpu: bool = False  # umT5 runs on the CPU, where it rounds otherwise
    prompt_embeds: Place | None = None  # a file of prompt embeddings, in place of umT5
    embeds_dir: Place | None = "cache/prompt_embeds"  # where prompt embeddings are remembered; None: nowhere

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("denoising_step_list", "first_block_steps"):
            steps = getattr(self, name)
            falls = steps is None or all(a > b for a, b in pairwise([NUM_TRAIN_TIMESTEPS + 1, *steps, -1]))
            if not falls or steps == []:
                remedy = f"does not go down within {NUM_TRAIN_TIMESTEPS}..1, or to a last 0"
                raise ConfigError(f"{name} {short_repr(steps)} {remedy}; try [1000, 750, 500, 250]")
        # Captures name passes by their index; the clean pass comes last.
        if self.step >= self.num_passes:
            last = self.num_passes - 1
            raise ConfigError(f"step {self.step} is not in 0..{last}; {last} is the clean pass")
        sizes = self.block_sizes
        if self.sampler == "rolling_forcing":
            steps, size = len(self.denoising_step_list), self.num_frame_per_block
            rolling_attention_size(self.local_attn_size, steps, size)
            names = "cache_policy prompt_schedule first_block_steps independent_first_frame recompute_context"
            unknown = [
                name for name in (*names.split(), "interventions", "first_frames") if getattr(self, name)
            ]
            unknown += ["gpus above 1"] * (self.gpus > 1)
            if unknown:
                raise ConfigError(f"sampler rolling_forcing knows no {unknown[0]}; leave it out")
        # A window has two spellings, of which only one may be used.
        has_window = self.local_attn_size != -1 or self.sink_size > 0
        if self.cache_policy is not None and has_window:
            said = f"{{name: window, window: {self.local_attn_size}, sink: {self.sink_size}}}"
            remedy = "leave them out where cache_policy is given"
            raise ConfigError(f"local_attn_size and sink_size mean cache_policy {said}; {remedy}")
        if self.cache_policy is not None or has_window or self.prompt_schedule or self.recompute_context:
            policy = self.policy
            policy.check(sizes)
            policy.check_schedule(self.switches, block_ranges(sizes))
            if self.recompute_context:
                policy.check_recompute(self.recompute_context, self.num_frame_per_block)

    @property
    def loras(self) -> list[LoRAFile]:
        """The LoRAs of the run in the order of merging: lora_path's, then those of lora."""
        first = [LoRAFile(self.lora_path, 1.0, self.lora_rank, self.lora_alpha)] if self.lora_path else []
        return [*first, *(self.lora or [])]

    @property
    def policy(self) -> "CachePolicy":
        """The cache policy: cache_policy, or the window that local_attn_size and sink_size describe."""
        # Most runs keep the whole past, and need none of wan/policies/
        if self.cache_policy is None and self.local_attn_size == -1:
            return _cache().Full()
        if self.cache_policy is None:
            return _policies().of_window(self.local_attn_size, self.sink_size)
        return _policies().read_policy(self.cache_policy)

    @property
    def policy_classes(self) -> "list[type[CachePolicy]]":
        """The classes of cache_policy, and of its policies for classes of heads; no file of it is read."""
        found, settings = list[Any](), [self.cache_policy] if self.cache_policy else []
        for each in settings:
            settings += (each.get("policies") or {}).values()
            found.append(_policies().POLICIES[each["name"]])
        return found

    @property
    def edits(self) -> "list[Edit]":
        """The edits that interventions describe."""
        if not self.interventions:
            return []
        from wan.interventions import edits_of

        return edits_of(self.interventions, "config")

    @property
    def switches(self) -> "list[PromptSwitch]":
        """The prompts that follow the first one."""
        return [_cache().read_switch(settings) for settings in self.prompt_schedule or []]

    @property
    def block_sizes(self) -> list[int]:
        return block_sizes(self.num_frames, self.num_frame_per_block, self.independent_first_frame)

    @property
    def num_passes(self) -> int:
        """Denoising passes that any block has, and the clean pass."""
        return len({*self.denoising_step_list, *(self.first_block_steps or ())}) + 1

    def passes_of_block(self, block: int) -> list[int]:
        """Return the passes of a block as captures number them (wan/pipeline.py); the last one is clean."""
        _, first, later = steps_of_blocks(self.denoising_step_list, self.first_block_steps)
        return [*(later if block else first), self.num_passes - 1]


def _policies() -> ModuleType:
    """Import wan.policies, which most runs do not need."""
    from wan import policies

    return policies


def _cache() -> ModuleType:
    """Import wan.cache and torch here, so that --help need not wait for them."""
    from wan import cache

    return cache


def as_one_block(config: RunConfig) -> RunConfig:
    """Return the settings of a bidirectional run: base weights, base.num_video_frames as one block."""
    frames = latent_frames(config.base.num_video_frames)
    one: dict[str, Any] = {"num_frames": frames, "num_frame_per_block": frames, "local_attn_size": -1}
    one |= {"sink_size": 0, "independent_first_frame": False}
    one |= dict.fromkeys(("checkpoint_path", "lora_path", "lora_rank", "lora_alpha", "lora", "cache_policy"))
    return replace(config, **one)


def latent_sides(size: Any, patch: tuple[int, int] = (2, 2)) -> dict[str, int]:
    """Return height and width of latents for a video's height x width in pixels, such as "480x832".

    ConfigError for sides that are not in whole patches; it names the nearest ones.
    """
    sides = [int(side) for side in str(size).split("x") if side.isdecimal() and len(side) < 6]
    if len(sides) != 2 or str(size).count("x") != 1:
        raise ConfigError(f"size {short_repr(size)} is not a height and a width in pixels, such as 480x832")
    steps = [PIXELS * side for side in patch]
    nearest = [
        {max(step, side // step * step), -(-side // step) * step or step}
        for side, step in zip(sides, steps, strict=True)
    ]
    if any(side not in near for side, near in zip(sides, nearest, strict=True)):
        legal = " or ".join(
            f"{height}x{width}" for height in sorted(nearest[0]) for width in sorted(nearest[1])
        )
        raise ConfigError(f"{size} pixels are not in whole patches of {steps[0]} x {steps[1]}: take {legal}")
    return {"height": sides[0] // PIXELS, "width": sides[1] // PIXELS}


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a YAML file into a RunConfig; entries of overrides that are not None win.

    With an independent first frame, frames that do not fit whole blocks are left out, with a warning.
    Raise ConfigError for a file that is not there, an unknown key, or a value that no run can have.
    """
    # 1. Flags win over the file; a policy and later prompts are replaced as a whole.
    settings = read_yaml(path)
    overrides = {k: v for k, v in (overrides or {}).items() if v is not None}
    with named(path):
        for given in (settings, overrides):  # size is of the video, height and width of its latents
            if "size" in given:
                given |= latent_sides(given.pop("size"))
    settings |= overrides
    # 2. Frames that fit whole blocks behind a first one; values of other types are refused below.
    defaults = {each.name: each.default for each in fields(RunConfig)}
    asked, n = (settings.get(name, defaults[name]) for name in ("num_frames", "num_frame_per_block"))
    if settings.get("independent_first_frame") is True and type(asked) is type(n) is int and asked > 1 <= n:
        settings["num_frames"] = fits = 1 + (asked - 1) // n * n
        if fits != asked:
            warnings.warn(f"with an independent first frame {asked} frames become {fits}", stacklevel=2)
    with named(path):
        return from_values(RunConfig, settings)

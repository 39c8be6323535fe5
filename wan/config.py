"""Sizes of the models, the settings of a run, and the block structure that follows from them."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from wan.blocks import block_sizes
from wan.errors import ConfigError

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


def check_sampling(shift: float, num_steps: int) -> None:
    """A sampler takes at least one step, and its shift of noise levels keeps them between 0 and 1."""
    if num_steps < 1:
        raise ConfigError(f"num_steps must be at least 1, not {num_steps}")
    if shift <= 0:
        raise ConfigError(f"shift must be above 0, not {shift:g}")


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


@dataclass
class RunConfig:
    """All that one extraction needs. A YAML file fills it, flags override it, an unknown key is an error."""

    model: str = "Wan2.1-T2V-1.3B"  # the name caches and figures carry
    ckpt_dir: str = "wan_models/Wan2.1-T2V-1.3B"
    checkpoint_path: str | None = None  # Self-Forcing style .pt; None runs the base weights
    use_ema: bool = True

    prompt: str = "A majestic eagle soaring through a cloudy sky, cinematic lighting"
    num_frames: int = 21  # latent frames
    height: int = 60  # of a latent frame, 1/8 of the video's
    width: int = 104
    seed: int = 42

    num_frame_per_block: int = 3
    independent_first_frame: bool = False
    local_attn_size: int = -1  # frames; -1: attend to the whole past
    sink_size: int = 0  # frames

    denoising_step_list: list[int] = field(default_factory=lambda: [1000, 750, 500, 250])
    warp_denoising_step: bool = True
    timestep_shift: float = 5.0
    context_noise: int = 0  # timestep of the clean pass

    layer_indices: list[int] = field(default_factory=lambda: [1, 5])
    layer_index: int = 3
    step: int = 0  # which pass is extracted; 0 is t = 1000

    base: BaseSampling = field(default_factory=BaseSampling)

    device: str = "auto"
    dtype: str = "auto"  # bfloat16 on a GPU, float32 on a CPU
    offload: bool = False  # the layers' weights stay on the host and are streamed; umT5 runs there
    t5_cpu: bool = False  # umT5 runs on the CPU
    prompt_embeds: str | None = None  # a file of text states, in place of umT5
    embeds_dir: str | None = "cache/prompt_embeds"  # where text states are remembered; None: nowhere

    @property
    def block_sizes(self) -> list[int]:
        return block_sizes(self.num_frames, self.num_frame_per_block, self.independent_first_frame)

    @property
    def num_passes(self) -> int:
        """Denoising steps and the clean pass."""
        return len(self.denoising_step_list) + 1


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a YAML file into a RunConfig; entries of overrides that are not None win.

    Raises ConfigError for a file that is not there, an unknown key or a value of the wrong type.
    """
    path = Path(path)
    known = {f.name for f in fields(RunConfig)}
    if not path.is_file():
        beside = ", ".join(sorted(p.name for p in Path("configs").glob("*.yaml")))
        raise ConfigError(f"config {path} not found; configs/ holds: {beside}")
    try:
        from_file = OmegaConf.load(path)
        if not OmegaConf.is_dict(from_file):
            raise ConfigError(f"{path}: not a mapping of settings")
        unknown = sorted(set(from_file) - known)
        if unknown:
            raise ConfigError(f"{path}: unknown key {unknown[0]!r}; known keys: {', '.join(sorted(known))}")
        chosen = {k: v for k, v in (overrides or {}).items() if v is not None}
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), from_file, chosen)
        return OmegaConf.to_object(merged)
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{path}: {reason} (key {getattr(error, 'full_key', None)})") from error
    except Exception as error:  # PyYAML's own error classes
        raise ConfigError(f"{path}: not a YAML file of settings: {' '.join(str(error).split())}") from error

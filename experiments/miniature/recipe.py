"""Sizes of the miniature, the table of its training stages, counts of its evaluation. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wan.config import ModelConfig

if TYPE_CHECKING:
    import torch

SIDE, FRAMES = 64, 81  # pixels, video frames
MODEL = ModelConfig(dim=192, ffn_dim=640, num_heads=12, num_layers=8, freq_dim=64, text_dim=64, text_len=64)
VAE = {  # patches of 2 x 2 pixels are channels, as in Wan2.2's: no layer works at full size
    "base_dim": 24,
    "decoder_base_dim": 24,
    "z_dim": 16,
    "num_res_blocks": 1,
    "dim_mult": [1, 2, 4],
    "temperal_downsample": [True, True],
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
}
TEXT = {
    "d_model": MODEL.text_dim,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
SHIFT = 5.0
SAMPLER_STEPS = (1000, 750, 500, 250)  # of the few-step sampler, before warping
OPTIMIZERS = ("muon", "adamw")
CAPTION_DROPOUT = 0.1
SHORT_CLIPS, LONG_CLIPS = (5, 17), (17, 33, FRAMES, 129)  # video frames; the VAE must see beyond its past
HELD_OUT_SEED = 1_000_003
SHIPPED = Path(__file__).parents[2] / "checkpoints/wan-mini"
LOG = "training.json"  # in the checkpoint's folder: the numbers of every stage
CHECKPOINT_REPORT = Path("cache/wan-mini-training/moments.json")  # of measure_checkpoints.py

# Drawn evenly, so two that cross and what hides behind a wall are two thirds: they are the hard ones.
HARD_KINDS = ("single", "landmark", "crossing", "crossing", "wall", "wall")

# Steps of causal training whose weights --training_checkpoints keeps; the last step is kept too.
KEPT_STEPS = (0, 100, 250, 500, 1000, 2000, 4000, 8000)


@dataclass(frozen=True)
class Recipe:
    """One stage: its steps, the data of a step, and the files that it needs."""

    steps: int
    lr: float  # at its peak
    batch: int  # clips of 81 frames per step
    clips: int = 16384  # different clips
    kinds: tuple[str, ...] = HARD_KINDS  # of scenes
    needs: tuple[str, ...] = ()  # files and folders of earlier stages
    optimizer: str = "muon"  # of matrices and kernels; AdamW has the rest


GUIDANCE = 1.5  # of the few-step stage's teacher
TEACHER_STEPS = 20  # of its ODE; a multiple of the sampler's 4, whose noise levels are among its own
CAUSAL_FILES = ("vae", "text_encoder", "causal.pt")  # what the few-step stage needs

RECIPES = {
    "vae": Recipe(12000, 2e-3, 4),
    "base": Recipe(30000, 1e-3, 128, 40960, needs=("vae",)),
    "causal": Recipe(30000, 8e-4, 80, 40960, needs=("vae", "transformer", "text_encoder")),
    "few_step": Recipe(30000, 5e-4, 80, 40960, needs=CAUSAL_FILES),
    "lora": Recipe(6000, 1e-3, 64, 40960, needs=(*CAUSAL_FILES, "self_forcing_mini.pt")),
    "framewise": Recipe(6000, 1e-3, 64, 40960, needs=(*CAUSAL_FILES, "self_forcing_mini.pt")),
}


@dataclass(frozen=True)
class StageRun:
    """A stage on this machine: its folder, device and limits."""

    stage: str
    recipe: Recipe
    output_dir: Path
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    minutes: float | None = None
    resume: bool = False
    compile: bool = False
    training_checkpoints: Path | None = None
    start_from: Path | None = None  # a folder of earlier weights; of the VAE, the base and the causal model

    @property
    def state_file(self) -> Path:
        """The state of a training that was stopped."""
        return self.output_dir / f"{self.stage}.resume.pt"


@dataclass(frozen=True)
class Counts:
    """Counts of evaluate_mini.py."""

    captions: int = 96  # of each set
    pasts: int = 96  # captions of the table of pasts
    clips: int = 96  # of 81 frames, for the VAE's PSNR
    long_videos: int = 4  # of a minute, of each set
    base: bool = True  # the base weights too

"""Stages of low-rank changes to the causal miniature: a window that forgets, and blocks of one frame.

Both train LoRA (arXiv 2106.09685) on every linear layer of the blocks with the few-step stage's loss, and
write a file as PEFT writes it, which a config names beside the causal weights (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.caches.atomic_files import replacing
from experiments.miniature.checkpoint_files import CAUSAL
from experiments.miniature.few_step import FewStep
from experiments.miniature.latent_clips import LatentClips
from experiments.miniature.recipe import MODEL, StageRun
from experiments.miniature.stages import OWN_PAST_AFTER
from experiments.miniature.training import Schedule, Trainer
from wan.blocks import block_ranges, block_sizes, visible_frames
from wan.checkpoint_layouts import read_self_forcing_state
from wan.modules.causal_model import CausalWanModel
from wan.modules.model import TextKeysValues

ALPHA_PER_RANK = 1.0  # alpha = rank, as LongLive's


@dataclass(frozen=True)
class Change:
    """What a stage changes: its file, the LoRA's rank, and the rollout that it trains for."""

    file: str
    rank: int
    block: int = 3  # frames
    window: int = -1  # frames that a block sees; -1: the whole past
    sink: int = 0  # of these, the first frames of the video


CHANGES = {
    "lora": Change("lora_window.pt", rank=16, window=9, sink=3),
    "framewise": Change("lora_framewise.pt", rank=32, block=1),
}


class LowRank(nn.Linear):
    """A linear layer that stays as it is, and beside it alpha / rank · B A x, which is trained."""

    def __init__(self, linear: nn.Linear, pair: Sequence[nn.Parameter]):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.pair = tuple(pair)  # no parameters of this module: the adapters' own

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.pair
        return super().forward(x) + ALPHA_PER_RANK * F.linear(F.linear(x, down), up)


def adapt(model: CausalWanModel, rank: int) -> nn.ParameterDict:
    """Put a LoRA beside every linear layer of the blocks -> its matrices: A as Kaiming says, B zero."""
    model.requires_grad_(False)
    adapters = nn.ParameterDict()
    for name, layer in list(model.blocks.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        down = torch.empty(rank, layer.in_features, device=layer.weight.device)
        nn.init.kaiming_uniform_(down, a=5**0.5)
        pair = nn.Parameter(down), nn.Parameter(down.new_zeros(layer.out_features, rank))
        key = f"blocks/{name}".replace(".", "/")
        adapters[f"{key}/lora_A"], adapters[f"{key}/lora_B"] = pair
        parent, _, own = name.rpartition(".")
        setattr(model.blocks.get_submodule(parent), own, LowRank(layer, pair))
    return adapters


def lora_state(adapters: nn.ParameterDict) -> dict[str, Tensor]:
    """The names that PEFT gives: base_model.model.blocks.0.self_attn.q.lora_A.weight."""
    return {
        f"base_model.model.{name.replace('/', '.')}.weight": value.detach().cpu()
        for name, value in adapters.items()
    }


def frame_mask(sizes: Sequence[int], window: int = -1, sink: int = 0) -> Tensor:
    """[2F, 2F] bool for clean frames and then noisy copies: what each frame may look at.

    Clean frames see what a rollout's block sees, and noisy ones the same with their own block noisy.
    """
    count = sum(sizes)
    mask = torch.zeros(2 * count, 2 * count, dtype=torch.bool)
    for block, frames in enumerate(block_ranges(list(sizes))):
        now = torch.arange(frames.start, frames.stop)
        seen = torch.tensor(visible_frames(sizes, block, window, sink))
        past = seen[(seen < frames.start) | (seen >= frames.stop)]
        mask[now[:, None], seen] = True
        mask[count + now[:, None], past] = True
        mask[count + now[:, None], count + now] = True
    return mask


class AdaptedForcing(FewStep):
    """The few-step stage's loss for blocks of another size, or a window; gradients reach the first layer."""

    def __init__(self, run: StageRun, model: CausalWanModel, clips: LatentClips, change: Change):
        super().__init__(run, model, clips)
        sizes = block_sizes(self.num_frames, change.block)
        self.blocks = block_ranges(sizes)
        tokens = MODEL.tokens_per_frame(*clips.latents.shape[3:])
        mask = frame_mask(sizes, change.window, change.sink)
        self.mask = mask.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1).to(run.device)

    def predict(self, past: Tensor, x: Tensor, t: Tensor, text: TextKeysValues) -> Tensor:
        return super().predict(past, x.detach().requires_grad_(), t, text)  # no fused kernels, then


def train_change(run: StageRun) -> dict:
    """A LoRA on the causal weights; after a third of the stage half of the pasts are the model's own."""
    # CUDA graphs alone: a step takes 1.0 ms a clip on an H200, and 0.7 ms with the causal stage's compiled
    # layers, but to compile those took 30 s, and this stage lasts about a minute.
    run = replace(run, compile=False)
    change, clips = CHANGES[run.stage], LatentClips(run)
    model = CausalWanModel(**asdict(MODEL)).to(run.device)
    model.load_state_dict(read_self_forcing_state(run.output_dir / CAUSAL))
    model.to(run.dtype)
    adapters = adapt(model, change.rank)
    loss = AdaptedForcing(run, model, clips, change)
    schedule = Schedule(run.recipe.steps, run.minutes, run.ranks)
    trainer = Trainer([adapters], run.recipe.lr, schedule, run.dtype)

    def save() -> None:
        with replacing(run.output_dir / change.file) as file:
            torch.save({"generator_lora": lora_state(trainer.averaged()[0])}, file)

    def one_step(step: int) -> None:
        own = bool(step % 2) and schedule.progress > OWN_PAST_AFTER
        trainer.step("own past" if own else "true past", lambda: loss(own))

    trainer.train(run.state_file, run.resume, one_step, save)
    return trainer.numbers() | asdict(change) | {"alpha": change.rank * ALPHA_PER_RANK}

"""Stages 2 and 3: the bidirectional base with its umT5, and its block-causal fine-tune. The table of all
stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import UMT5Config, UMT5EncoderModel

from experiments.miniature.checkpoint_files import CAUSAL, TEACHER, save_causal, save_index, save_transformer
from experiments.miniature.latent_clips import LatentClips, add_noise, draw, encode_text
from experiments.miniature.recipe import KEPT_STEPS, MODEL, SAMPLER_STEPS, SHIFT, TEXT, StageRun
from experiments.miniature.tokenizer import build_tokenizer
from experiments.miniature.training import Schedule, Trainer
from experiments.miniature.vae_training import train_vae
from wan.blocks import block_ranges, block_sizes
from wan.checkpoint import read_transformer_state
from wan.checkpoint_layouts import read_self_forcing_state
from wan.modules.attention import MaskedAttention
from wan.modules.causal_model import CausalWanModel, teacher_forcing_mask
from wan.modules.model import TextKeysValues, WanModel
from wan.scheduler import FlowSchedule

OWN_PAST_AFTER = 1 / 3  # of the causal stage; from then on every other past is the model's own


def compile_blocks(model: WanModel, wanted: bool) -> None:
    """Fuse each transformer layer; all layers share one compiled graph."""
    for block in model.blocks if wanted else ():
        block.compile()


def layer_matrices(run: StageRun) -> Callable[[str, Tensor], bool]:
    """Which parameters are Muon's: the matrices of the transformer's layers."""
    return lambda name, p: run.recipe.optimizer == "muon" and name.startswith("blocks.") and p.ndim == 2


def train_base(run: StageRun) -> dict:
    """Flow matching over whole clips, jointly with the text encoder: transformer/, text_encoder/,
    tokenizer/."""
    recipe, device = run.recipe, run.device
    tokenizer, clips = build_tokenizer(), LatentClips(run)
    timesteps = FlowSchedule(SHIFT).timesteps.to(device)
    model = WanModel(**asdict(MODEL)).to(device)
    model.init_weights()
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **TEXT))
    if run.start_from:
        model.load_state_dict(read_transformer_state(run.start_from))
        encoder = UMT5EncoderModel.from_pretrained(run.start_from / "text_encoder")
    encoder.to(device)
    schedule = Schedule(recipe.steps, run.minutes, run.ranks)
    trainer = Trainer([model, encoder], recipe.lr, schedule, run.dtype, layer_matrices(run))
    compile_blocks(model, run.compile)

    def save() -> None:
        averaged, averaged_encoder = trainer.averaged()
        save_transformer(averaged.state_dict(), run.output_dir / "transformer")
        averaged_encoder.save_pretrained(run.output_dir / "text_encoder")
        tokenizer.save_pretrained(run.output_dir / "tokenizer")
        save_index(run.output_dir)

    def loss() -> Tensor:
        x0, ids, mask = clips.batch(run.batch)
        noise, t = torch.randn_like(x0), draw(timesteps, len(x0))
        flow = model(add_noise(x0, noise, t / 1000), t, encode_text(encoder, ids, mask))
        return F.mse_loss(flow.float(), (noise - x0).float())

    trainer.train(run.state_file, run.resume, lambda _: trainer.step("clips", loss), save)
    return trainer.numbers()


def masked_attention(
    blocks: Sequence[range], tokens: int, run: StageRun, queries: Literal["all", "clean", "noisy"] = "all"
) -> Tensor | MaskedAttention:
    """The mask of teacher forcing; where a stage is compiled, attention that skips what the mask hides.

    Of the clean queries alone, over the clean keys, or of the noisy ones, it is for layers that are not
    compiled themselves.
    """
    block_of_frame = torch.tensor([i for i, block in enumerate(blocks) for _ in block])
    length, block_length = tokens * len(block_of_frame), tokens * len(blocks[0])
    first, last = length * (queries == "noisy"), length * (1 if queries == "clean" else 2)
    if not run.compile:
        return teacher_forcing_mask(block_of_frame.tolist(), tokens)[first:last, :last].to(run.device)

    def attends(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        query = row + first
        query_block, key_block = query % length // block_length, key % length // block_length
        own = (query_block == key_block) & ((query < length) == (key < length))
        return own | ((key < length) & (key_block < query_block))

    mask = create_block_mask(attends, None, None, last - first, last, device=run.device)
    attend = flex_attention if queries == "all" else torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attend(q, k, v, block_mask=mask)


class TeacherForcing:
    """The causal loss: noisy copies of all blocks are predicted at once, each from the clean blocks before
    it."""

    def __init__(self, run: StageRun, model: CausalWanModel, clips: LatentClips):
        self.model, self.clips, self.batch = model, clips, run.batch
        self.encoder = UMT5EncoderModel.from_pretrained(run.output_dir / "text_encoder")
        self.encoder.to(run.device, run.dtype).requires_grad_(False)
        self.num_frames = clips.latents.shape[2]
        self.blocks = block_ranges(block_sizes(self.num_frames))
        tokens = MODEL.tokens_per_frame(*clips.latents.shape[3:])
        self.mask = masked_attention(self.blocks, tokens, run)
        self.frames = [*range(self.num_frames)] * 2
        schedule = FlowSchedule(SHIFT)
        self.timesteps = schedule.timesteps.to(run.device)
        self.sampler_steps = schedule.warp(SAMPLER_STEPS).to(run.device)

    def __call__(self, own_past: bool) -> Tensor:
        """Loss of a random batch; half of the timesteps are the sampler's. own_past: of a past that the
        model made."""
        latents, ids, text_mask = self.clips.batch(self.batch)
        x0 = latents.transpose(1, 2)  # [B, F, C, h, w]
        noise = torch.randn_like(x0)
        with torch.no_grad():
            context = encode_text(self.encoder, ids, text_mask)
        text = self.model.text_keys_values(context)
        past = self._own_past(x0, text) if own_past else x0
        shape = len(x0), len(self.blocks)
        t, sampled = draw(self.timesteps, *shape), draw(self.sampler_steps, *shape)
        t = torch.where(torch.rand_like(t) < 0.5, sampled, t).repeat_interleave(len(self.blocks[0]), 1)
        flow = self.predict(past, add_noise(x0, noise, t / 1000), t, text)
        return F.mse_loss(flow.float(), (noise - x0).float())

    def before(self, step: int) -> None:
        """Called before every step."""

    def numbers(self) -> dict:
        """What a log says of it beside the training's own numbers."""
        return {}

    def predict(self, past: Tensor, x: Tensor, t: Tensor, text: TextKeysValues) -> Tensor:
        """Flow of the noisy frames x [B, F, C, h, w] at t [B, F], with `past` as clean frames."""
        both = torch.cat([torch.zeros_like(t), t], 1)
        clean_and_noisy = torch.cat([past, x], 1)
        flow = self.model(clean_and_noisy, both, text, frames=self.frames, mask=self.mask)
        return flow[:, self.num_frames :]

    def _own_past(self, x0: Tensor, text: TextKeysValues) -> Tensor:
        """x0 as the model sees it from the last step's noise level: the kind of past it will have in a
        rollout."""
        t = self.sampler_steps[-1].expand(x0.shape[:2])
        x = add_noise(x0, torch.randn_like(x0), t / 1000)
        x0 = x - t[:, :, None, None, None] / 1000 * self.predict(x0, x, t, text)
        return x0.to(x.dtype).detach()


def train_causal(run: StageRun) -> dict:
    """Teacher forcing from the base weights, or from those of an earlier few-step stage."""
    if run.start_from:
        state = read_self_forcing_state(run.start_from / CAUSAL)
    else:
        state = read_transformer_state(run.output_dir)
    return train_rollouts(run, state, TeacherForcing, TEACHER)


def train_rollouts(
    run: StageRun, state: dict[str, Tensor], forcing: type[TeacherForcing], file: str, after: int = 0
) -> dict:
    """A causal model from these weights into this file; after a third of the stage half of the pasts are the
    model's own.

    Of a stage after others, of so many steps, only the end is among the kept steps.
    """
    clips = LatentClips(run)
    model = CausalWanModel(**asdict(MODEL)).to(run.device)
    model.load_state_dict(state)
    loss = forcing(run, model, clips)
    schedule = Schedule(run.recipe.steps, run.minutes, run.ranks)
    trainer = Trainer([model], run.recipe.lr, schedule, run.dtype, layer_matrices(run))
    compile_blocks(model, run.compile)
    keeps = run.training_checkpoints is not None and run.ranks.first

    def save(name: str = file) -> None:
        folder = run.output_dir if name == file else run.training_checkpoints
        assert folder is not None  # steps are kept only where there is a place for them
        save_causal(trainer.averaged()[0].state_dict(), folder / name)

    def one_step(step: int) -> None:
        if keeps and not after and step in KEPT_STEPS:
            save(f"step_{step:05d}.pt")
        loss.before(step)
        own = bool(step % 2) and schedule.progress > OWN_PAST_AFTER
        trainer.step("own past" if own else "true past", lambda: loss(own))

    trainer.train(run.state_file, run.resume, one_step, save)
    if keeps:
        save(f"step_{after + trainer.steps:05d}.pt")
    return trainer.numbers() | loss.numbers()


STAGES: dict[str, Callable[[StageRun], dict]] = {
    "vae": train_vae,
    "base": train_base,
    "causal": train_causal,
}

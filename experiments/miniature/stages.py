"""Stages 2 to 4, the bidirectional base, its block-causal fine-tune and the few-step one, and LoRAs of it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from experiments.caches.files import replacing
from experiments.miniature import recipe
from experiments.miniature.moving_shapes import sample_scenes
from experiments.miniature.recipe import MODEL, SHIFT, SHIPPED, TEACHER_STEPS, StageRun
from experiments.miniature.training import CAUSAL, TEACHER, Trainer, generator_state, kept_steps, save_base
from experiments.miniature.vae_training import encode_scenes, train_vae
from wan.attention import MaskedAttention
from wan.blocks import block_ranges, block_sizes, visible_frames
from wan.checkpoint import read_self_forcing_state, read_transformer_state
from wan.model import CausalWanModel, TextKeysValues, WanModel
from wan.pipeline import FlowSchedule
from wan.vae import channels_last

OWN_PAST_AFTER = 1 / 3  # of a causal stage; from then on every other past is the model's own
TEACHER_BATCH = 256  # clips of one call of the teacher, each with and without its caption
PATH_USES = 4  # steps that draw a path before the teacher makes the clip another, on average
PATHS_APART = 1_000_003  # between the random numbers of batches of paths
EVERY = TEACHER_STEPS // len(recipe.SAMPLER_STEPS)  # of the teacher's noise levels are the sampler's


# --- Data: latents of rendered clips, tokens of their captions, noise
def shipped_tokenizer() -> PreTrainedTokenizerFast:
    """Read the miniature's tokenizer, a unigram model laid out like umT5's: pad 0, </s> 1, byte fallback."""
    return PreTrainedTokenizerFast.from_pretrained(SHIPPED / "tokenizer")


class LatentClips:
    """Normalised latents [N, C, F, h, w] of random scenes on the device, and their captions."""

    def __init__(self, run: StageRun):
        seed = run.seed + 2
        scenes = list(itertools.islice(sample_scenes(seed, kinds=run.recipe.kinds), run.recipe.clips))
        weights = (run.output_dir / "vae/diffusion_pytorch_model.safetensors").read_bytes()
        made_of = [seed, run.recipe.clips, list(run.recipe.kinds), sha256(weights).hexdigest()]
        file, saved = run.output_dir / "latents.pt", {}
        if file.is_file():  # an earlier stage's
            saved = torch.load(file, weights_only=True, map_location="cpu")
        if saved.get("made_of") != made_of:
            vae = AutoencoderKLWan.from_pretrained(run.output_dir / "vae").to(run.device, run.dtype)
            channels_last(vae)
            statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=run.device)
            mean, std = statistics.view(2, 1, -1, 1, 1, 1)
            latents = (encode_scenes(vae, scenes, run.device) - mean) / std
            saved = {"made_of": made_of, "latents": latents.to(run.dtype)}
            torch.save(saved, file)
        self.latents = saved["latents"].to(run.device)
        captions = ["", *(scene.caption for scene in scenes)]  # row 0 is the empty one
        tokens = shipped_tokenizer()(captions, padding=True, return_tensors="pt")
        self.ids, self.mask = tokens.input_ids.to(run.device), tokens.attention_mask.to(run.device)

    def draw(self, size: int) -> Tensor:
        """Draw numbers of clips; clip i has the caption in row i + 1 of ids and mask."""
        return torch.randint(len(self.latents), (size,), device=self.latents.device)

    def drop_captions(self, chosen: Tensor) -> Tensor:
        """Return the rows of clips' captions, some of them the empty one's, for guidance."""
        return torch.where(
            torch.rand(len(chosen), device=chosen.device) < recipe.CAPTION_DROPOUT, 0, chosen + 1
        )


def encode_text(encoder: UMT5EncoderModel, clips: LatentClips, rows: Tensor) -> Tensor:
    """Return umT5 states [B, n, text_dim] of rows of captions, zero beyond each one's end."""
    mask = clips.mask[rows]
    states = encoder(input_ids=clips.ids[rows], attention_mask=mask).last_hidden_state
    return states * mask[..., None].to(encoder.dtype)


def draw(table: Tensor, *shape: int) -> Tensor:
    """Draw entries of a table."""
    return table[torch.randint(len(table), shape, device=table.device)]


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return x_t of the flow path, in the dtype of x0; sigma broadcasts from the left."""
    sigma = sigma.view(*sigma.shape, *[1] * (x0.ndim - sigma.ndim))
    return ((1 - sigma) * x0 + sigma * noise).to(x0.dtype)


# --- The base, and what the stages share
def train_base(run: StageRun) -> dict:
    """Match the flow of whole clips, jointly with the text encoder -> files of both and the tokenizer."""
    clips = LatentClips(run)
    timesteps = FlowSchedule(SHIFT).timesteps.to(run.device)
    model = WanModel(**asdict(MODEL)).to(run.device)
    model.init_weights()
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(shipped_tokenizer()), **recipe.TEXT))
    if run.start_from:
        model.load_state_dict(read_transformer_state(run.start_from))
        encoder = UMT5EncoderModel.from_pretrained(run.start_from / "text_encoder")
    encoder.to(run.device)
    trainer = transformer_trainer(run, model, encoder)

    def save() -> None:
        averaged, averaged_encoder = trainer.averaged()
        save_base(averaged.state_dict(), run.output_dir)
        averaged_encoder.save_pretrained(run.output_dir / "text_encoder")

    def loss() -> Tensor:
        chosen = clips.draw(run.recipe.batch)
        x0, rows = clips.latents[chosen], clips.drop_captions(chosen)
        noise, t = torch.randn_like(x0), draw(timesteps, len(x0))
        flow = model(add_noise(x0, noise, t / 1000), t, encode_text(encoder, clips, rows))
        return F.mse_loss(flow.float(), (noise - x0).float())

    trainer.train(lambda _: trainer.update("clips", loss), save)
    return trainer.numbers()


def transformer_trainer(run: StageRun, model: WanModel, *others: nn.Module) -> Trainer:
    """Train a transformer; Muon has its layers' matrices, unless it is a LoRA's. Compile where asked for."""
    muon = run.recipe.optimizer == "muon" and all(p.requires_grad for p in model.parameters())
    trainer = Trainer(
        run, [model, *others], lambda name, p: muon and name.startswith("blocks.") and p.ndim == 2
    )
    for block in model.blocks if run.compile else ():
        block.compile(fullgraph=True)  # all layers share one graph; a break fails
    return trainer


def frame_mask(sizes: Sequence[int], window: int = -1, sink: int = 0) -> Tensor:
    """Return the mask [2F, 2F] of clean frames and then noisy copies: rows see columns.

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


def masked_attention(mask: Tensor, run: StageRun, compiled: bool = False) -> Tensor | MaskedAttention:
    """Return a mask [Lq, Lk]; where a stage is compiled, attention that skips what it hides.

    compiled: for layers that are not compiled themselves.
    """
    if not run.compile:
        return mask
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # takes a second

    queries, keys = mask.shape
    blocks = create_block_mask(lambda b, h, q, k: mask[q, k], None, None, queries, keys, device=run.device)
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return lambda q, k, v: attend(q, k, v, block_mask=blocks)


@dataclass(frozen=True)
class Change:
    """A causal stage: the files that it starts from and writes, and the rollout that it is trained for."""

    file: str
    rank: int = 0  # of a LoRA; 0: all weights are trained
    block: int = 3  # frames
    window: int = -1  # frames that a block sees; -1: the whole past
    sink: int = 0  # of these, the first frames of the video

    @property
    def start(self) -> str:
        return TEACHER if self.file == CAUSAL else CAUSAL


CHANGES = {
    "causal": Change(TEACHER),
    "few_step": Change(CAUSAL),
    "lora": Change("lora_window.pt", rank=16, window=9, sink=3),
    "framewise": Change("lora_framewise.pt", rank=32, block=1),
}


class TeacherForcing:
    """The causal loss: predict noisy copies of all blocks at once, each from the clean blocks before it."""

    def __init__(self, run: StageRun, model: CausalWanModel, clips: LatentClips, change: Change):
        self.model, self.clips, self.batch = model, clips, run.recipe.batch
        self.encoder = UMT5EncoderModel.from_pretrained(run.output_dir / "text_encoder")
        self.encoder.to(run.device, run.dtype).requires_grad_(False)
        self.num_frames = clips.latents.shape[2]
        self.tokens = MODEL.tokens_per_frame(*clips.latents.shape[3:])
        sizes = block_sizes(self.num_frames, change.block)
        self.blocks = block_ranges(sizes)
        self.mask = masked_attention(self.token_mask(sizes, run, change.window, change.sink), run)
        self.frames = [*range(self.num_frames)] * 2
        schedule = FlowSchedule(SHIFT)
        self.timesteps = schedule.timesteps.to(run.device)
        self.sampler_steps = schedule.warp(recipe.SAMPLER_STEPS).to(run.device)

    def token_mask(self, sizes: Sequence[int], run: StageRun, window: int = -1, sink: int = 0) -> Tensor:
        """Return frame_mask() of tokens, [2L, 2L]."""
        mask = frame_mask(sizes, window, sink)
        return mask.repeat_interleave(self.tokens, 0).repeat_interleave(self.tokens, 1).to(run.device)

    def __call__(self, own_past: bool) -> Tensor:
        """Return the loss of a random batch, half of whose timesteps are the sampler's.

        own_past: the clean frames are the model's own.
        """
        chosen = self.clips.draw(self.batch)
        rows = self.clips.drop_captions(chosen)
        x0 = self.clips.latents[chosen].transpose(1, 2)  # [B, F, C, h, w]
        noise = torch.randn_like(x0)
        past, text = self.given(x0, rows, own_past)
        shape = len(x0), len(self.blocks)
        t, sampled = draw(self.timesteps, *shape), draw(self.sampler_steps, *shape)
        t = torch.where(torch.rand_like(t) < 0.5, sampled, t).repeat_interleave(len(self.blocks[0]), 1)
        flow = self.predict(past, add_noise(x0, noise, t / 1000), t, text)
        return F.mse_loss(flow.float(), (noise - x0).float())

    def before(self, step: int) -> None:
        """Prepare a step."""

    def predict(self, past: Tensor, x: Tensor, t: Tensor, text: TextKeysValues) -> Tensor:
        """Return the flow of noisy frames x [B, F, C, h, w] at t [B, F], with `past` as clean frames."""
        both = torch.cat([torch.zeros_like(t), t], 1)
        clean_and_noisy = torch.cat([past, x.detach().requires_grad_()], 1)  # a LoRA's gradients end there
        flow = self.model(clean_and_noisy, both, text, frames=self.frames, mask=self.mask)
        return flow[:, self.num_frames :]

    def given(self, x0: Tensor, rows: Tensor, own_past: bool) -> tuple[Tensor, TextKeysValues]:
        """Return the clean frames and the text of a step.

        own_past: x0 as the model predicts it from the last step's noise level, as in a rollout.
        """
        with torch.no_grad():
            context = encode_text(self.encoder, self.clips, rows)
        text = self.model.text_keys_values(context)
        if not own_past:
            return x0, text
        t = self.sampler_steps[-1].expand(x0.shape[:2])
        x = add_noise(x0, torch.randn_like(x0), t / 1000)
        past = x - t[:, :, None, None, None] / 1000 * self.predict(x0, x, t, text)
        return past.to(x.dtype).detach(), text


def train_causal(run: StageRun) -> dict:
    """Train a causal model, or a LoRA of one, each stage from the files of the one before.

    The causal stage may go on from an earlier few-step stage; kept steps of the few-step stage follow its.
    """
    change, kept = CHANGES[run.stage], run.training_checkpoints
    if change.rank:
        # By CUDA graphs alone a step takes 1.0 ms a clip on an H200, and 0.7 ms compiled, but to compile took
        # 30 s, and this stage lasts about a minute.
        run = replace(run, compile=False)
    clips = LatentClips(run)
    model = CausalWanModel(**asdict(MODEL)).to(run.device)
    if run.stage == "causal" and not run.start_from:
        state = read_transformer_state(run.output_dir)
    else:
        state = read_self_forcing_state((run.start_from or run.output_dir) / change.start)
    model.load_state_dict(state)
    if change.rank:
        adapt(model, change.rank)
        model.to(run.dtype)
    loss = (TeacherForcing if run.stage == "causal" else FewStep)(run, model, clips, change)
    trainer = transformer_trainer(run, model)
    after = max(kept_steps(kept), default=0) if kept and run.stage == "few_step" else 0

    def save(path: Path) -> None:
        averaged = trainer.averaged()[0]
        with replacing(path) as file:
            torch.save(lora_state(averaged) if change.rank else generator_state(averaged), file)

    def one_step(step: int) -> None:
        if kept and not after and step in recipe.KEPT_STEPS:
            save(kept / f"step_{step:05d}.pt")
        loss.before(step)
        own = bool(step % 2) and trainer.progress > OWN_PAST_AFTER
        trainer.update("own past" if own else "true past", lambda: loss(own))

    trainer.train(one_step, lambda: save(run.output_dir / change.file))
    if kept:
        save(kept / f"step_{after + trainer.step:05d}.pt")
    return trainer.numbers() | (asdict(change) | {"alpha": float(change.rank)} if change.rank else {})


# --- The few-step stage: the sampler's few steps land where many steps of the causal model do


def teacher_sigmas() -> Tensor:
    """Return the noise levels of the teacher's ODE, float32 [TEACHER_STEPS + 1], from 1 to 0."""
    sigmas = torch.linspace(1, 0, TEACHER_STEPS + 1)
    return SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)


class FewStep(TeacherForcing):
    """The distance of the model's jumps from the ends of its teacher's paths; captions are always given.

    The teacher goes on making paths: a model that sees one too often learns it by heart.
    """

    def __init__(self, run: StageRun, model: CausalWanModel, clips: LatentClips, change: Change):
        super().__init__(run, model, clips, change)
        self.teacher = CausalWanModel(**asdict(MODEL)).to(run.device, run.dtype).requires_grad_(False)
        self.teacher.load_state_dict(read_self_forcing_state(run.output_dir / TEACHER))
        mask, length = self.token_mask(block_sizes(self.num_frames), run), self.tokens * self.num_frames
        self.clean = masked_attention(mask[:length, :length], run, compiled=True)
        self.noisy = masked_attention(mask[length:], run, compiled=True)
        self.seed = run.seed
        self.sigmas = teacher_sigmas()[:-1:EVERY].to(run.device)
        latents = clips.latents.transpose(1, 2)
        self.paths = latents.new_empty(len(latents), len(self.sigmas) + 1, *latents.shape[1:])
        self.turns = torch.arange(len(latents), device=latents.device).split(TEACHER_BATCH)
        self.made = 0  # batches of paths, so far
        self.before(0)

    @torch.no_grad()
    def path(self, some: Tensor, seed: int) -> list[Tensor]:
        """Take the teacher's guided Euler steps from noise to clean blocks, each after the clip's own past.

        Returns x_t [B, F, C, h, w] of these clips at the sampler's noise levels and at 0. Keys and values of
        the clean blocks are the same at every step, and stay in a KV cache.
        """
        model, past = self.teacher, self.clips.latents[some].transpose(1, 2)
        random = torch.Generator(past.device).manual_seed(seed)
        x = torch.randn(past.shape, generator=random, device=past.device)
        rows = torch.cat([some + 1, torch.zeros_like(some)])  # with the caption, and with the empty one
        text = model.text_keys_values(encode_text(self.encoder, self.clips, rows))
        sigmas, frames = teacher_sigmas().to(x.device), range(x.shape[1])
        cache: Any = model.new_kv_cache(2 * len(x), 2 * len(frames), *x.shape[3:])
        cache.advance(frames, text)
        model(past.repeat(2, 1, 1, 1, 1), torch.zeros_like(sigmas[0]), text, cache, mask=self.clean)
        cache.advance(frames, text)  # the same frames again, noisy
        points = [x]
        for step, (now, after) in enumerate(pairwise(sigmas)):
            both = x.to(past.dtype).repeat(2, 1, 1, 1, 1)
            flow = model(both, 1000 * now, text, cache, mask=self.noisy)
            guided, free = flow.float().chunk(2)
            x = x + (after - now) * (free + recipe.GUIDANCE * (guided - free))
            if (step + 1) % EVERY == 0:
                points.append(x)
        return points

    def before(self, step: int) -> None:
        """Make paths of the clips whose turn it is anew, each after PATH_USES draws on average.

        Paths follow from the step alone.
        """
        turns = len(self.turns)
        wanted = turns + step * self.batch * turns // (PATH_USES * len(self.paths))
        for number in range(max(self.made, wanted - turns), wanted):
            some = self.turns[number % turns]
            for i, x in enumerate(self.path(some, self.seed + PATHS_APART * number)):
                self.paths[some, i] = x.to(self.paths.dtype)
        self.made = wanted

    def __call__(self, own_past: bool) -> Tensor:
        """Return the loss of a random batch, each block at one of the sampler's noise levels."""
        chosen = self.clips.draw(self.batch)
        paths, x0 = self.paths[chosen], self.clips.latents[chosen].transpose(1, 2)
        past, text = self.given(x0, chosen + 1, own_past)
        step = torch.randint(len(self.sigmas), (len(x0), len(self.blocks)), device=x0.device)
        step = step.repeat_interleave(len(self.blocks[0]), 1)  # [B, F]
        frames = torch.arange(x0.shape[1], device=x0.device)
        x = paths[torch.arange(len(x0), device=x0.device)[:, None], step, frames]
        sigma = self.sigmas[step]
        flow = self.predict(past, x, 1000 * sigma, text)
        jump = x.float() - sigma[..., None, None, None] * flow.float()
        return F.mse_loss(jump, paths[:, -1].float())


# --- Low-rank changes to the causal miniature: a window that forgets, and blocks of one frame


class LowRank(nn.Linear):
    """A linear layer that stays as it is, plus B A x, which is trained; alpha = rank, as LongLive's."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)


def adapt(model: CausalWanModel, rank: int) -> None:
    """Put a LoRA beside every linear layer of the blocks; nothing else is trained."""
    model.requires_grad_(False)
    for name, layer in list(model.blocks.named_modules()):
        if isinstance(layer, nn.Linear):
            model.blocks.set_submodule(name, LowRank(layer, rank))


def lora_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Name weights as PEFT does: base_model.model.blocks.0.self_attn.q.lora_A.weight."""
    state = model.state_dict().items()
    return {"generator_lora": {f"base_model.model.{k}.weight": v.cpu() for k, v in state if "lora_" in k}}


STAGES: dict[str, Callable[[StageRun], dict]] = {
    "vae": train_vae,
    "base": train_base,
    **dict.fromkeys(CHANGES, train_causal),
}

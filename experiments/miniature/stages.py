"""Stages 2 to 4, the bidirectional base, its block-causal fine-tune and the few-step one, and LoRAs of it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from experiments.caches.files import replacing
from experiments.miniature.moving_shapes import Scene, sample_scenes
from experiments.miniature.recipe import (
    CAPTION_DROPOUT,
    GUIDANCE,
    KEPT_STEPS,
    MODEL,
    SAMPLER_STEPS,
    SHIFT,
    SHIPPED,
    TEACHER_STEPS,
    TEXT,
    StageRun,
)
from experiments.miniature.training import CAUSAL, TEACHER, Trainer, kept_steps, save_base, save_causal
from experiments.miniature.vae_training import encode_scenes, set_layout, train_vae
from wan.attention import MaskedAttention
from wan.blocks import block_ranges, block_sizes, visible_frames
from wan.checkpoint import read_self_forcing_state, read_transformer_state
from wan.model import CausalWanModel, TextKeysValues, WanModel, teacher_forcing_mask
from wan.pipeline import FlowSchedule

OWN_PAST_AFTER = 1 / 3  # of a causal stage; from then on every other past is the model's own
TEACHER_BATCH = 256  # clips of one call of the teacher, each with and without its caption
PATH_USES = 4  # steps that draw a path before the teacher makes the clip another, on average
PATHS_APART = 1_000_003  # between the random numbers of a rank's batches of paths
EVERY = TEACHER_STEPS // len(SAMPLER_STEPS)  # of the teacher's noise levels are the sampler's
ALPHA_PER_RANK = 1.0  # of a LoRA: alpha = rank, as LongLive's


# --- Data: latents of rendered clips, tokens of their captions, noise
def shipped_tokenizer() -> PreTrainedTokenizerFast:
    """Read the miniature's tokenizer, a unigram model laid out like umT5's: pad 0, </s> 1, byte fallback."""
    return PreTrainedTokenizerFast.from_pretrained(SHIPPED / "tokenizer")


class LatentClips:
    """Normalised latents [N, C, F, h, w] of random scenes on the device, and their captions."""

    def __init__(self, run: StageRun):
        device, seed = run.device, run.rank_seed + 2
        scenes = list(itertools.islice(sample_scenes(seed, kinds=run.recipe.kinds), run.clips))
        weights = (run.output_dir / "vae/diffusion_pytorch_model.safetensors").read_bytes()
        made_of = [seed, run.clips, list(run.recipe.kinds), sha256(weights).hexdigest()]
        saved = {}
        if run.latents_file.is_file():  # an earlier stage's
            saved = torch.load(run.latents_file, weights_only=True, map_location="cpu")
        if saved.get("made_of") != made_of:
            saved = {"made_of": made_of, "latents": _encoded(run, scenes)}
            torch.save(saved, run.latents_file)
        self.latents = saved["latents"].to(device)
        captions = ["", *(scene.caption for scene in scenes)]  # row 0 is the empty one
        tokens = shipped_tokenizer()(captions, padding=True, return_tensors="pt")
        self.ids, self.mask = tokens.input_ids.to(device), tokens.attention_mask.to(device)

    def batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw latents with token ids and mask [B, n]; some captions are empty, for guidance."""
        chosen = self.draw(size)
        row = torch.where(torch.rand(size, device=chosen.device) < CAPTION_DROPOUT, 0, chosen + 1)
        return self.latents[chosen], self.ids[row], self.mask[row]

    def draw(self, size: int) -> Tensor:
        """Draw numbers of clips; clip i has the caption in row i + 1 of ids and mask."""
        return torch.randint(len(self.latents), (size,), device=self.latents.device)


def _encoded(run: StageRun, scenes: Sequence[Scene]) -> Tensor:
    vae = AutoencoderKLWan.from_pretrained(run.output_dir / "vae").to(run.device, run.dtype)
    if run.device.type == "cuda":
        set_layout(vae, torch.channels_last, torch.channels_last_3d)
    mean, std = (
        torch.tensor(statistic, device=run.device).view(1, -1, 1, 1, 1)
        for statistic in (vae.config.latents_mean, vae.config.latents_std)
    )
    return ((encode_scenes(vae, scenes, run.device) - mean) / std).to(run.dtype)


def encode_text(encoder: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Return umT5 states [B, n, text_dim], zero beyond each caption's end."""
    return encoder(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None].to(encoder.dtype)


def draw(timesteps: Tensor, *shape: int) -> Tensor:
    """Draw entries of a table of timesteps."""
    return timesteps[torch.randint(len(timesteps), shape, device=timesteps.device)]


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
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(shipped_tokenizer()), **TEXT))
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
        x0, ids, mask = clips.batch(run.batch)
        noise, t = torch.randn_like(x0), draw(timesteps, len(x0))
        flow = model(add_noise(x0, noise, t / 1000), t, encode_text(encoder, ids, mask))
        return F.mse_loss(flow.float(), (noise - x0).float())

    trainer.train(lambda _: trainer.update("clips", loss), save)
    return trainer.numbers()


def transformer_trainer(run: StageRun, model: WanModel, *others: nn.Module) -> Trainer:
    """Train a transformer: matrices of its layers are Muon's, and each layer is compiled where asked for."""
    muon = run.recipe.optimizer == "muon"
    trainer = Trainer(
        run, [model, *others], lambda name, p: muon and name.startswith("blocks.") and p.ndim == 2
    )
    for block in model.blocks if run.compile else ():
        block.compile()  # all layers share one compiled graph
    return trainer


def masked_attention(
    blocks: Sequence[range], tokens: int, run: StageRun, queries: Literal["all", "clean", "noisy"] = "all"
) -> Tensor | MaskedAttention:
    """Return the mask of teacher forcing; where a stage is compiled, attention that skips what it hides.

    queries "clean" (over the clean keys) and "noisy" are for layers that are not compiled themselves.
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
    """The causal loss: predict noisy copies of all blocks at once, each from the clean blocks before it."""

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
        """Return the loss of a random batch, half of whose timesteps are the sampler's.

        own_past: the clean frames are the model's own.
        """
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
        """Prepare a step."""

    def numbers(self) -> dict:
        """Return what a log says of the loss beside the training's own numbers."""
        return {}

    def predict(self, past: Tensor, x: Tensor, t: Tensor, text: TextKeysValues) -> Tensor:
        """Return the flow of noisy frames x [B, F, C, h, w] at t [B, F], with `past` as clean frames."""
        both = torch.cat([torch.zeros_like(t), t], 1)
        clean_and_noisy = torch.cat([past, x], 1)
        flow = self.model(clean_and_noisy, both, text, frames=self.frames, mask=self.mask)
        return flow[:, self.num_frames :]

    def _own_past(self, x0: Tensor, text: TextKeysValues) -> Tensor:
        """Return x0 as the model predicts it from the last step's noise level, as in a rollout."""
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


def train_few_step(run: StageRun) -> dict:
    """Train the causal stage's weights to jump; of the kept steps its end is the last."""
    after = max(kept_steps(run.training_checkpoints), default=0) if run.training_checkpoints else 0
    return train_rollouts(run, read_self_forcing_state(run.output_dir / TEACHER), FewStep, CAUSAL, after)


def train_rollouts(
    run: StageRun, state: dict[str, Tensor], forcing: type[TeacherForcing], file: str, after: int = 0
) -> dict:
    """Train a causal model from these weights into this file.

    A stage that begins after that many kept steps keeps its end alone.
    """
    clips = LatentClips(run)
    model = CausalWanModel(**asdict(MODEL)).to(run.device)
    model.load_state_dict(state)
    loss = forcing(run, model, clips)
    trainer = transformer_trainer(run, model)
    kept = run.training_checkpoints if run.rank.is_first else None

    def save() -> None:
        save_causal(trainer.averaged()[0].state_dict(), run.output_dir / file)

    def one_step(step: int) -> None:
        if kept and not after and step in KEPT_STEPS:
            save_causal(trainer.averaged()[0].state_dict(), kept / f"step_{step:05d}.pt")
        loss.before(step)
        update_with_past(trainer, loss)

    trainer.train(one_step, save)
    if kept:
        save_causal(trainer.averaged()[0].state_dict(), kept / f"step_{after + trainer.step:05d}.pt")
    return trainer.numbers() | loss.numbers()


def update_with_past(trainer: Trainer, loss: TeacherForcing) -> None:
    """Take a step; after a third of the stage every other past is the model's own."""
    own = bool(trainer.step % 2) and trainer.progress > OWN_PAST_AFTER
    trainer.update("own past" if own else "true past", lambda: loss(own))


# --- The few-step stage: the sampler's few steps land where many steps of the causal model do


def teacher_sigmas() -> Tensor:
    """Return the noise levels of the teacher's ODE, float32 [TEACHER_STEPS + 1], from 1 to 0."""
    sigmas = torch.linspace(1, 0, TEACHER_STEPS + 1)
    return SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)


class FewStep(TeacherForcing):
    """The distance of the model's jumps from the ends of its teacher's paths; captions are always given.

    The teacher goes on making paths: a model that sees one too often learns it by heart.
    """

    def __init__(self, run: StageRun, model: CausalWanModel, clips: LatentClips):
        super().__init__(run, model, clips)
        self.teacher = CausalWanModel(**asdict(MODEL)).to(run.device, run.dtype).requires_grad_(False)
        self.teacher.load_state_dict(read_self_forcing_state(run.output_dir / TEACHER))
        tokens = MODEL.tokens_per_frame(*clips.latents.shape[3:])
        self.clean = masked_attention(self.blocks, tokens, run, "clean")
        self.noisy = masked_attention(self.blocks, tokens, run, "noisy")
        self.processes, self.seed = run.rank.count, run.rank_seed
        self.sigmas = teacher_sigmas()[:-1:EVERY].to(run.device)
        latents = clips.latents
        self.paths = latents.new_empty(
            len(latents), len(self.sigmas) + 1, latents.shape[2], latents.shape[1], *latents.shape[3:]
        )  # [N, S + 1, F, C, h, w]
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
        text = model.text_keys_values(encode_text(self.encoder, self.clips.ids[rows], self.clips.mask[rows]))
        sigmas, frames = teacher_sigmas().to(x.device), range(x.shape[1])
        cache = model.new_kv_cache(2 * len(x), 2 * len(frames), *x.shape[3:])
        cache.advance(frames, text)
        model(past.repeat(2, 1, 1, 1, 1), torch.zeros_like(sigmas[0]), text, cache, mask=self.clean)
        cache.advance(frames, text)  # the same frames again, noisy
        points = [x]
        for step, (now, after) in enumerate(pairwise(sigmas)):
            both = x.to(past.dtype).repeat(2, 1, 1, 1, 1)
            flow = model(both, 1000 * now, text, cache, mask=self.noisy)
            guided, free = flow.float().chunk(2)
            x = x + (after - now) * (free + GUIDANCE * (guided - free))
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

    def numbers(self) -> dict:
        """Count the paths of all processes, which make as many."""
        rounds, more = divmod(self.made, len(self.turns))
        paths = rounds * len(self.paths) + sum(len(some) for some in self.turns[:more])
        return {"paths": paths * self.processes}

    def __call__(self, own_past: bool) -> Tensor:
        """Return the loss of a random batch, each block at one of the sampler's noise levels."""
        chosen = self.clips.draw(self.batch)
        paths, x0 = self.paths[chosen], self.clips.latents[chosen].transpose(1, 2)
        with torch.no_grad():
            context = encode_text(self.encoder, self.clips.ids[chosen + 1], self.clips.mask[chosen + 1])
        text = self.model.text_keys_values(context)
        past = self._own_past(x0, text) if own_past else x0
        step = torch.randint(len(self.sigmas), (len(x0), len(self.blocks)), device=x0.device)
        step = step.repeat_interleave(len(self.blocks[0]), 1)  # [B, F]
        frames = torch.arange(x0.shape[1], device=x0.device)
        x = paths[torch.arange(len(x0), device=x0.device)[:, None], step, frames]
        sigma = self.sigmas[step]
        flow = self.predict(past, x, 1000 * sigma, text)
        jump = x.float() - sigma[..., None, None, None] * flow.float()
        return F.mse_loss(jump, paths[:, -1].float())


# --- Low-rank changes to the causal miniature: a window that forgets, and blocks of one frame


@dataclass(frozen=True)
class Change:
    """A LoRA: its file and rank, and the rollout that it is trained for."""

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
    """A linear layer that stays as it is, plus alpha / rank · B A x, which is trained."""

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
    """Name weights as PEFT does: base_model.model.blocks.0.self_attn.q.lora_A.weight."""
    return {
        f"base_model.model.{name.replace('/', '.')}.weight": value.detach().cpu()
        for name, value in adapters.items()
    }


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
    """Train a LoRA on the causal weights."""
    # CUDA graphs alone: a step takes 1.0 ms a clip on an H200, and 0.7 ms with the causal stage's compiled
    # layers, but to compile those took 30 s, and this stage lasts about a minute.
    run = replace(run, compile=False)
    change, clips = CHANGES[run.stage], LatentClips(run)
    model = CausalWanModel(**asdict(MODEL)).to(run.device)
    model.load_state_dict(read_self_forcing_state(run.output_dir / CAUSAL))
    model.to(run.dtype)
    adapters = adapt(model, change.rank)
    loss = AdaptedForcing(run, model, clips, change)
    trainer = Trainer(run, [adapters])

    def save() -> None:
        with replacing(run.output_dir / change.file) as file:
            torch.save({"generator_lora": lora_state(trainer.averaged()[0])}, file)

    trainer.train(lambda _: update_with_past(trainer, loss), save)
    return trainer.numbers() | asdict(change) | {"alpha": change.rank * ALPHA_PER_RANK}


STAGES: dict[str, Callable[[StageRun], dict]] = {
    "vae": train_vae,
    "base": train_base,
    "causal": train_causal,
    "few_step": train_few_step,
    **dict.fromkeys(CHANGES, train_change),
}

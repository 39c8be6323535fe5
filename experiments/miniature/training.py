"""Train the miniature: its VAE, the bidirectional base, the causal and the few-step model, two LoRAs.

`fit` is the loop of every stage; a stage says what is trained, on which loss, and which files it writes. The
table STAGES has their recipes, experiments/train_mini.py the commands.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.utils import logging as diffusers_logging
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from experiments.analysis.stats import psnr
from experiments.caches import files
from experiments.miniature import SHIPPED, moving_shapes
from experiments.provenance import choose_device, choose_dtype, environment
from wan import checkpoint, pipeline
from wan.attention import MaskedAttention
from wan.blocks import block_ranges, block_sizes, visible_frames
from wan.cache import KVCache, of_window
from wan.config import ModelConfig
from wan.errors import ConfigError
from wan.files import read_json
from wan.model import CausalWanModel, TextKeysValues, WanModel
from wan.vae import channels_last, patched, unpatched
from wan.wings import graphs

# --- Sizes of the models
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

# --- Recipes
# Two shapes that cross and a shape behind a wall are the hard scenes: they are two thirds of the data.
KINDS = ("single", "landmark", "crossing", "crossing", "wall", "wall")
CAUSAL_FILES = ("vae", "text_encoder", "causal.pt")
CPU = torch.device("cpu")
LOGGED = ("seed", "lr", "batch", "clips", "rank", "block", "window", "sink")  # fields of Stage in the log
GENERATOR = "self_forcing_mini.pt"  # the few-step model, which is what the configs load


@dataclass(frozen=True)
class Stage:
    """One training: its recipe and, after `seed`, where it runs."""

    name: str
    steps: int
    lr: float  # at its peak
    batch: int  # clips of 81 frames per step
    clips: int = 40960  # different clips
    needs: tuple[str, ...] = ()  # files and folders of earlier stages
    file: str = ""  # that a causal stage writes
    rank: int = 0  # of a LoRA; 0: all weights are trained
    block: int = 3  # latent frames
    window: int = -1  # latent frames that a block sees; -1: the whole past
    sink: int = 0  # of these, the first frames of the video
    seed: int = 0
    minutes: float | None = None  # ends the stage before its steps
    output_dir: Path = SHIPPED
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32  # of forward and backward

    @property
    def compiled(self) -> bool:
        """Return whether layers are fused, on a GPU."""
        # Compiling took 30 s and saved a third of a step on an H200: not worth it for a LoRA, of a minute.
        return self.device.type == "cuda" and not self.rank


STAGES = {
    stage.name: stage
    for stage in (
        Stage("vae", 12000, 2e-3, 4, clips=16384),
        Stage("base", 30000, 1e-3, 128, needs=("vae",)),
        Stage("causal", 30000, 8e-4, 80, needs=("vae", "transformer", "text_encoder"), file="causal.pt"),
        Stage("few_step", 30000, 5e-4, 80, needs=CAUSAL_FILES, file=GENERATOR),
        Stage(
            "lora",
            6000,
            1e-3,
            64,
            needs=(*CAUSAL_FILES, GENERATOR),
            file="lora_window.pt",
            rank=16,
            window=9,
            sink=3,
        ),
        Stage(
            "framewise",
            6000,
            1e-3,
            64,
            needs=(*CAUSAL_FILES, GENERATOR),
            file="lora_framewise.pt",
            rank=32,
            block=1,
        ),
    )
}

# --- The loop
ADAM_BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01
MOMENTUM = 0.95
UPDATE_RMS = 0.2  # AdamW's, so that Muon takes the same learning rate (arXiv 2502.16982, eq. 4)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # 5 steps bring singular values to 0.7 .. 1.2
NEWTON_SCHULZ_STEPS = 5  # https://kellerjordan.github.io/posts/muon
FAST = {"cuda": torch.bfloat16, "cpu": torch.float32}  # dtype of its products; bfloat16 is exact enough
LR_WARM_UP = 200  # steps
AVERAGE_DECAY = 0.999  # of the weights' moving average, which is what is written
GRAPH_WARM_UP = 3  # eager calls before a CUDA graph is captured, as PyTorch asks

Loss = Callable[[], Tensor]


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for parameters [out, in, ...], all of one shape at once, with a tensor as lr.

    PyTorch's takes matrices one after the other and fits into no CUDA graph: 51 ms a step for the miniature's
    80 matrices on an H100, where a whole training step takes 15.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's may return a loss
        [group] = self.param_groups
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            by_shape[p.flatten(1).shape].append(p)
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        for shape, params in by_shape.items():
            gradients = [gradient_of(p) for p in params]
            momenta = [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            nesterov = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            updates = orthogonal(torch.stack([update.flatten(1) for update in nesterov]))  # [n, out, in]
            updates *= group["lr"] * UPDATE_RMS * max(shape) ** 0.5
            torch._foreach_mul_(params, 1 - WEIGHT_DECAY * group["lr"])
            torch._foreach_sub_(params, [u.view_as(p) for p, u in zip(params, updates, strict=True)])


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def orthogonal(x: Tensor) -> Tensor:
    """Bring all singular values of matrices [n, rows, columns] near 1; float32."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT.contiguous()
    # x <- a x + (b x xT + c (x xT)^2) x, a polynomial that pulls singular values towards 1
    a, b, c = NEWTON_SCHULZ
    x = x.to(FAST[x.device.type])
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.float()


def fit(
    stage: Stage,
    modules: Sequence[nn.Module],
    loss_of: Callable[[int, float], tuple[str, Loss]],
    muon: Callable[[str, Tensor], bool],
    before: Callable[[int, Callable[[], list[Any]]], None] = lambda step, averaged: None,
) -> tuple[list[Any], dict[str, Any]]:
    """Train modules in place; return copies with averaged weights in bfloat16, and numbers for the log.

    loss_of(step, progress) returns the kind of a step and a function that draws a batch and returns its loss;
    steps of one kind have the same shapes. muon(name, parameter) says which parameters are Muon's; AdamW has
    the others. before(step, averaged) is called before every step; averaged() makes the copies as of now.
    """
    on_gpu = stage.device.type == "cuda"

    # 1. The optimizers step float32 masters; the modules have working copies of them in stage.dtype.
    named = [(name, p) for m in modules for name, p in m.named_parameters() if p.requires_grad]
    params: list[Tensor] = [p for _, p in named]
    masters = [p.detach().float().clone(memory_format=torch.contiguous_format) for p in params]
    averages = [master.clone() for master in masters]
    for master in masters:
        master.grad = torch.zeros_like(master)
    for module in modules:
        module.to(stage.dtype)

    # 2. Muon has the matrices that a stage names, AdamW the rest: embeddings, norms, biases, heads.
    lr = torch.zeros((), device=stage.device)  # a tensor: a replayed graph reads its new value
    is_matrix = [muon(name, p) for name, p in named]
    matrices = [master for master, chosen in zip(masters, is_matrix, strict=True) if chosen]
    others = [master for master, chosen in zip(masters, is_matrix, strict=True) if not chosen]
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, {"lr": lr})] if matrices else []
    if others:
        adam = torch.optim.AdamW(
            others, lr, ADAM_BETAS, weight_decay=WEIGHT_DECAY, fused=on_gpu, capturable=on_gpu
        )
        optimizers.append(adam)

    def backward(loss: Loss) -> Tensor:
        """Backpropagate, copy the gradients to the masters, and return the loss."""
        value = loss()
        torch._foreach_copy_([gradient_of(master) for master in masters], torch.autograd.grad(value, params))
        return value.detach()

    @torch.no_grad()
    def update() -> Tensor:
        """Step the optimizers, and copy the masters to the modules."""
        norm = nn.utils.clip_grad_norm_(masters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        torch._foreach_copy_(params, masters)
        return norm

    def averaged() -> list[Any]:
        """Return copies of the modules with averaged weights in bfloat16, as they are written."""
        copies = deepcopy(list(modules))
        trained = (p for module in copies for p in module.parameters() if p.requires_grad)
        for p, average in zip(trained, averages, strict=True):
            p.data = average.clone()
        return [module.to(torch.bfloat16).requires_grad_(False) for module in copies]

    # 3. The loop. It ends after the stage's steps or minutes, whichever are over first.
    call = CudaGraphs(stage.device) if on_gpu else lambda kind, function: function()
    step, curve, begin = 0, [], time.monotonic()
    while True:
        seconds = time.monotonic() - begin
        by_time = seconds / (60 * stage.minutes) if stage.minutes else 0.0
        progress = min(1.0, max(step / stage.steps, by_time))
        if progress == 1 and step:
            break
        before(step, averaged)
        # The learning rate warms up and falls to zero by a cosine.
        decayed = stage.lr * 0.5 * (1 + math.cos(math.pi * progress))
        lr.fill_(decayed * min(1, (step + 1) / LR_WARM_UP))
        kind, loss = loss_of(step, progress)
        value = call(kind, partial(backward, loss))
        call("update", update)
        # The average forgets the random start: its memory grows with the steps, up to AVERAGE_DECAY.
        torch._foreach_lerp_(averages, masters, 1 - min(AVERAGE_DECAY, (1 + step) / (10 + step)))
        if step % 100 == 0:
            curve.append([step, round(seconds, 1), round(value.item(), 5)])
        step += 1

    last = [loss for *_, loss in curve[-10:]]
    return averaged(), {
        "steps": step,
        "seconds": round(seconds, 1),
        "parameters": sum(p.numel() for p in params),
        "loss_mean_of_last_10": round(sum(last) / len(last), 5),
        "loss_curve": curve,  # [step, seconds, loss]
    }


class CudaGraphs:
    """Replay calls of a kind from CUDA graphs, after a few eager ones.

    A GPU would wait for Python with models this small: the causal stage's backward pass takes 14 ms as a CUDA
    graph and 49 without.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: Counter[str] = Counter()
        self.replays: dict[str, graphs.Replay] = {}
        self.values: dict[str, Tensor] = {}  # what a call returned, in its graph's memory

    def __call__(self, kind: str, function: Callable[[], Tensor]) -> Tensor:
        self.calls[kind] += 1
        if self.calls[kind] <= GRAPH_WARM_UP:  # on a side stream, as a capture is
            side, current = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                value = function()
            current.wait_stream(side)
            return value
        if kind not in self.replays:

            def run() -> None:
                self.values[kind] = function()

            self.replays[kind] = graphs.Recorder(self.device).record(run)  # each kind has memory of its own
        self.replays[kind]()
        return self.values[kind]


# --- Stage 1: the VAE, on short clips first, then on clips longer than it can see back
FRAMES = moving_shapes.FRAMES  # of a clip; its scenes are of as many, whatever is trained on
SHORT_CLIPS, LONG_CLIPS = (
    (5, 17),
    (17, 33, FRAMES, 129),
)  # video frames; the decoder sees 109 back
SHORT_SHARE = 0.4  # of the stage, with short clips
QUALITY_POINTS = 10  # of the PSNR curve
CHECKED_CLIPS, FINAL_CLIPS = 8, 32
KL_WEIGHT = 1e-4
# A shape is its outline: pixels that differ from the mean of their 5 x 5 neighbours count more.
EDGE_CONTRAST, EDGE_WEIGHT = 0.1, 5.0


def train_vae(stage: Stage) -> dict:
    """Train random weights -> vae/. Return losses and the PSNR of held-out clips."""
    vae = AutoencoderKLWan(**VAE).to(stage.device, torch.float32)
    channels_last(vae)
    scenes = list(itertools.islice(moving_shapes.sample_scenes(stage.seed, kinds=KINDS), stage.clips))
    table = moving_shapes.scene_table(scenes).to(stage.device)
    curve: list[list[float]] = []

    def loss_of(step: int, progress: float) -> tuple[str, Loss]:
        lengths = SHORT_CLIPS if progress < SHORT_SHARE else LONG_CLIPS
        frames = lengths[step % len(lengths)]
        size = (max(1, round(stage.batch * FRAMES / frames)),)  # as many frames in every step

        def loss() -> Tensor:
            chosen = table[torch.randint(len(table), size, device=stage.device)]
            return vae_loss(vae, moving_shapes.render_table(chosen, frames, moving_shapes.SIDE))

        return f"{frames} frames", loss

    def before(step: int, averaged: Callable[[], list[Any]]) -> None:
        if step % max(1, stage.steps // QUALITY_POINTS) == 0:
            quality = vae_quality(averaged()[0], stage.device, min(CHECKED_CLIPS, stage.clips))
            curve.append([step, *quality.values()])

    [averaged], numbers = fit(stage, [vae], loss_of, lambda _, p: p.ndim >= 4, before)

    # Latents are normalised by the statistics of their channels, which the VAE's config keeps.
    sample = list(
        itertools.islice(moving_shapes.sample_scenes(stage.seed + 1, kinds=KINDS), min(256, stage.clips))
    )
    latents = encode_scenes(averaged, sample, stage.device).float()  # [N, z, f, h, w]
    std, mean = torch.std_mean(latents, (0, 2, 3, 4))
    averaged.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    averaged.save_pretrained(stage.output_dir / "vae")
    quality = vae_quality(averaged, stage.device, min(FINAL_CLIPS, stage.clips))
    return numbers | {"psnr_curve": curve} | quality


def vae_loss(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    """Return the squared and absolute error of the reconstruction, more of it at outlines, and a little KL.

    video [B, 3, F, H, W] is in -1..1, and so is the contrast.
    """
    mean, log_var = encode(vae, video.to(vae.dtype))
    log_var = log_var.float().clamp(-20, 10)
    z = mean + (torch.randn_like(mean) * (0.5 * log_var).exp()).to(mean.dtype)
    error = decode(vae, z).float() - video
    kl = 0.5 * (mean.float().square() + log_var.exp() - 1 - log_var).mean()
    around = F.avg_pool3d(video, (1, 5, 5), stride=1, padding=(0, 2, 2), count_include_pad=False)
    is_edge = (video - around).abs().amax(1, keepdim=True) > EDGE_CONTRAST  # [B, 1, F, H, W]
    weights = torch.where(is_edge, EDGE_WEIGHT, 1.0)
    return (weights * (error.square() + 0.2 * error.abs())).mean() + KL_WEIGHT * kl


def encode(vae: AutoencoderKLWan, video: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log variance [B, z, f, h, w] of video [B, 3, F, H, W].

    As vae.encode, which takes four frames at a time, in two calls: frame 0 and the others.
    """
    cache = [None] * vae._cached_conv_counts["encoder"]
    parts = [
        vae.encoder(patched(vae, x), feat_cache=cache, feat_idx=[0])
        for x in (video[:, :, :1], video[:, :, 1:])
        if x.numel()
    ]
    return vae.quant_conv(torch.cat(parts, 2)).chunk(2, 1)


def decode(vae: AutoencoderKLWan, z: Tensor) -> Tensor:
    """Decode latents to video, not clamped. As vae.decode, in two calls: frame 0 and the others."""
    cache, z = [None] * vae._cached_conv_counts["decoder"], vae.post_quant_conv(z)
    first = vae.decoder(z[:, :, :1], feat_cache=cache, feat_idx=[0], first_chunk=True)
    rest = [vae.decoder(z[:, :, 1:], feat_cache=cache, feat_idx=[0])] if z.shape[2] > 1 else []
    return unpatched(vae, torch.cat([first, *rest], 2))


@torch.no_grad()
def encode_scenes(
    vae: AutoencoderKLWan, scenes: Sequence[moving_shapes.Scene], device: torch.device
) -> Tensor:
    """Render clips of 81 frames -> latent means [N, z, f, h, w]."""
    batches = (scenes[i : i + 32] for i in range(0, len(scenes), 32))
    videos = (
        moving_shapes.render_batch(list(batch), FRAMES, moving_shapes.SIDE, device) for batch in batches
    )
    return torch.cat([encode(vae, video.to(vae.dtype))[0] for video in videos])


@torch.no_grad()
def vae_quality(vae: AutoencoderKLWan, device: torch.device, clips: int) -> dict[str, float]:
    """Return the mean PSNR in dB of held-out clips of 81 frames: all frames, first second, last second."""
    scenes = list(
        itertools.islice(moving_shapes.sample_scenes(moving_shapes.HELD_OUT_SEED, held_out=True), clips)
    )
    frames = {
        "psnr": slice(None),
        "psnr_first_second": slice(moving_shapes.FPS),
        "psnr_last_second": slice(-moving_shapes.FPS, None),
    }
    decibels = defaultdict[str, list[float]](list)
    for i in range(0, clips, 8):
        video = moving_shapes.render_batch(
            scenes[i : i + 8], FRAMES, moving_shapes.SIDE, device
        )  # [N, 3, T, H, W] in -1..1
        decoded = decode(vae, encode(vae, video.to(vae.dtype))[0]).float().clamp(-1, 1)
        for name, chosen in frames.items():
            pair = video[:, :, chosen].cpu().numpy(), decoded[:, :, chosen].cpu().numpy()
            decibels[name] += psnr(*pair, peak=2).tolist()  # a clip counts as one frame
    return {name: round(fmean(values), 2) for name, values in decibels.items()}


# --- Data of the transformers: latents of rendered clips, tokens of their captions, noise
CAPTION_DROPOUT = 0.1  # for classifier-free guidance
SHIFT = 5.0  # of the noise levels, as Self-Forcing's


def shipped_tokenizer() -> PreTrainedTokenizerFast:
    """Read the miniature's tokenizer, a unigram model laid out like umT5's: pad 0, </s> 1, byte fallback."""
    return PreTrainedTokenizerFast.from_pretrained(SHIPPED / "tokenizer")


class LatentClips:
    """Normalised latents [N, C, F, h, w] of random scenes on the device, and their captions."""

    def __init__(self, stage: Stage):
        seed, file = stage.seed + 2, stage.output_dir / "latents.pt"
        scenes = list(itertools.islice(moving_shapes.sample_scenes(seed, kinds=KINDS), stage.clips))
        weights = (stage.output_dir / "vae/diffusion_pytorch_model.safetensors").read_bytes()
        made_of = [seed, stage.clips, list(KINDS), sha256(weights).hexdigest()]
        saved = torch.load(file, weights_only=True, map_location="cpu") if file.is_file() else {}
        if saved.get("made_of") != made_of:  # not those of an earlier stage
            vae = AutoencoderKLWan.from_pretrained(stage.output_dir / "vae").to(stage.device, stage.dtype)
            channels_last(vae)
            statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=stage.device)
            mean, std = statistics.view(2, 1, -1, 1, 1, 1)
            latents = (encode_scenes(vae, scenes, stage.device) - mean) / std
            saved = {"made_of": made_of, "latents": latents.to(stage.dtype)}
            torch.save(saved, file)
        self.latents = saved["latents"].to(stage.device)
        captions = ["", *(scene.caption for scene in scenes)]  # row 0 is the empty one
        tokens = shipped_tokenizer()(captions, padding=True, return_tensors="pt")
        self.ids, self.mask = tokens.input_ids.to(stage.device), tokens.attention_mask.to(stage.device)

    def draw(self, size: int) -> Tensor:
        """Draw numbers of clips; clip i has the caption in row i + 1 of ids and mask."""
        return torch.randint(len(self.latents), (size,), device=self.latents.device)

    def drop_captions(self, chosen: Tensor) -> Tensor:
        """Return the rows of clips' captions, some of them the empty one's."""
        return torch.where(torch.rand(len(chosen), device=chosen.device) < CAPTION_DROPOUT, 0, chosen + 1)


def encode_text(encoder: UMT5EncoderModel, clips: LatentClips, rows: Tensor) -> Tensor:
    """Return umT5 states [B, n, text_dim] of rows of captions, zero beyond each one's end."""
    mask = clips.mask[rows]
    states = encoder(input_ids=clips.ids[rows], attention_mask=mask).last_hidden_state
    return states * mask[..., None].to(encoder.dtype)


def draw(table: Tensor, *shape: int) -> Tensor:
    """Draw entries of a table."""
    return table[torch.randint(len(table), shape, device=table.device)]


def noise_levels(t: Tensor, x: Tensor) -> Tensor:
    """Return the levels sigma of timesteps [B] or [B, F] with as many axes as latents x."""
    return (t / 1000).view(*t.shape, *[1] * (x.ndim - t.ndim))


def is_block_matrix(name: str, p: Tensor) -> bool:
    """Return whether a parameter is a matrix of the transformer's layers, which Muon trains."""
    return name.startswith("blocks.") and p.ndim == 2


# --- Stage 2: the bidirectional base and its text encoder
def train_base(stage: Stage) -> dict:
    """Match the flow of whole clips, jointly with the text encoder -> files of both and the tokenizer."""
    clips = LatentClips(stage)
    timesteps = pipeline.FlowSchedule(SHIFT).timesteps.to(stage.device)
    model = WanModel(**asdict(MODEL)).to(stage.device)
    model.init_weights()
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(shipped_tokenizer()), **TEXT))
    encoder.to(stage.device)
    compile_layers(stage, model)

    def loss() -> Tensor:
        chosen = clips.draw(stage.batch)
        x0, rows = clips.latents[chosen], clips.drop_captions(chosen)  # [B, C, F, h, w]
        noise, t = torch.randn_like(x0), draw(timesteps, len(x0))
        flow = model(pipeline.add_noise(x0, noise, noise_levels(t, x0)), t, encode_text(encoder, clips, rows))
        return F.mse_loss(flow.float(), (noise - x0).float())

    modules = [model, encoder]
    (averaged, averaged_encoder), numbers = fit(stage, modules, lambda *_: ("clips", loss), is_block_matrix)
    save_base(averaged.state_dict(), stage.output_dir)
    averaged_encoder.save_pretrained(stage.output_dir / "text_encoder")
    return numbers


def compile_layers(stage: Stage, model: WanModel) -> None:
    """Fuse each layer: all share one graph, and a break fails."""
    for block in model.blocks if stage.compiled else ():
        block.compile(fullgraph=True)


def save_base(native: dict[str, Tensor], folder: Path) -> None:
    """Save a transformer under diffusers' names, and what else of a WanPipeline no training changes."""
    (folder / "transformer").mkdir(parents=True, exist_ok=True)
    weights = {k: v.cpu().contiguous() for k, v in checkpoint.to_diffusers_names(native).items()}
    save_file(weights, folder / "transformer/diffusion_pytorch_model.safetensors")
    if folder.resolve() != SHIPPED.resolve():
        for name in ("scheduler", "tokenizer"):
            shutil.copytree(SHIPPED / name, folder / name, dirs_exist_ok=True)
        for name in ("transformer/config.json", "model_index.json"):
            shutil.copy(SHIPPED / name, folder / name)


# --- Stage 3: the causal model, by teacher forcing
SAMPLER_STEPS = (1000, 750, 500, 250)  # of the few-step sampler, before warping
OWN_PAST_AFTER = 1 / 3  # of a causal stage; from then on every other past is the model's own


def frame_mask(sizes: Sequence[int], window: int = -1, sink: int = 0) -> Tensor:
    """Return the mask [2F, 2F] of clean frames and then noisy copies: rows see columns.

    Clean frames see what a rollout's block sees, and noisy ones the same with their own block noisy.
    """
    count = sum(sizes)
    mask = torch.zeros(2 * count, 2 * count, dtype=torch.bool)
    for block, frames in enumerate(block_ranges(list(sizes))):
        places = torch.arange(frames.start, frames.stop)
        seen = torch.tensor(visible_frames(sizes, block, window, sink))
        past = seen[(seen < frames.start) | (seen >= frames.stop)]
        mask[places[:, None], seen] = True
        mask[count + places[:, None], past] = True
        mask[count + places[:, None], count + places] = True
    return mask


def masked_attention(mask: Tensor, stage: Stage, compiles: bool = False) -> Tensor | MaskedAttention:
    """Return a mask [Lq, Lk]; where a stage is compiled, attention that skips what it hides.

    compiles: for layers that are not compiled themselves.
    """
    if not stage.compiled:
        return mask
    queries, keys = mask.shape
    blocks = create_block_mask(lambda b, h, q, k: mask[q, k], None, None, queries, keys, device=stage.device)
    attend = torch.compile(flex_attention, dynamic=False) if compiles else flex_attention
    return lambda q, k, v: attend(q, k, v, block_mask=blocks)


class TeacherForcing:
    """The causal loss: predict noisy copies of all blocks at once, each from the clean blocks before it."""

    def __init__(self, stage: Stage, model: CausalWanModel, clips: LatentClips):
        self.model, self.clips, self.batch = model, clips, stage.batch
        self.encoder = UMT5EncoderModel.from_pretrained(stage.output_dir / "text_encoder")
        self.encoder.to(stage.device, stage.dtype).requires_grad_(False)
        self.num_frames = clips.latents.shape[2]
        self.tokens = MODEL.tokens_per_frame(*clips.latents.shape[3:])
        sizes = block_sizes(self.num_frames, stage.block)
        self.blocks = block_ranges(sizes)
        mask = self.token_mask(frame_mask(sizes, stage.window, stage.sink)).to(stage.device)
        self.mask = masked_attention(mask, stage)
        self.frames = [*range(self.num_frames)] * 2
        schedule = pipeline.FlowSchedule(SHIFT)
        self.timesteps = schedule.timesteps.to(stage.device)
        self.sampler_steps = schedule.warp(SAMPLER_STEPS).to(stage.device)

    def token_mask(self, mask: Tensor) -> Tensor:
        """Return a mask of frames [2F, 2F] as one of tokens, [2L, 2L]."""
        return mask.repeat_interleave(self.tokens, 0).repeat_interleave(self.tokens, 1)

    def before(self, step: int) -> None:
        """Prepare a step."""

    def __call__(self, own_past: bool) -> Tensor:
        """Return the loss of a random batch, half of whose timesteps are the sampler's.

        own_past: the clean frames are the model's own.
        """
        # 1. Clips, captions and the clean past
        chosen = self.clips.draw(self.batch)
        rows = self.clips.drop_captions(chosen)
        x0 = self.clips.latents[chosen].transpose(1, 2)  # [B, F, C, h, w]
        noise = torch.randn_like(x0)
        past, text = self.given(x0, rows, own_past)
        # 2. A noise level for each block: half of them the sampler's, which the rollout will meet
        shape = len(x0), len(self.blocks)
        t, sampled = draw(self.timesteps, *shape), draw(self.sampler_steps, *shape)
        t = torch.where(torch.rand_like(t) < 0.5, sampled, t)
        t = t.repeat_interleave(len(self.blocks[0]), 1)  # [B, blocks] -> [B, F]
        # 3. The flow from clean latents to noise
        flow = self.predict(past, pipeline.add_noise(x0, noise, noise_levels(t, x0)), t, text)
        return F.mse_loss(flow.float(), (noise - x0).float())

    def predict(self, past: Tensor, x: Tensor, t: Tensor, text: TextKeysValues) -> Tensor:
        """Return the flow of noisy frames x [B, F, C, h, w] at t [B, F], with `past` as clean frames."""
        both = torch.cat([torch.zeros_like(t), t], 1)  # [B, 2F]
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
        sigma = noise_levels(t, x0)
        x = pipeline.add_noise(x0, torch.randn_like(x0), sigma)
        past = x - sigma * self.predict(x0, x, t, text)
        return past.to(x.dtype).detach(), text


def train_causal(stage: Stage) -> dict:
    """Train a causal model, or a LoRA of one -> stage.file.

    The causal stage starts from the base, few_step from the causal model, and LoRAs from the few-step model.
    """
    clips = LatentClips(stage)
    model = CausalWanModel(**asdict(MODEL)).to(stage.device)
    if stage.name == "causal":
        state = checkpoint.read_transformer_state(stage.output_dir)
    else:
        state = checkpoint.read_self_forcing_state(
            stage.output_dir / (GENERATOR if stage.rank else "causal.pt")
        )
    model.load_state_dict(state)
    if stage.rank:
        adapt(model, stage.rank)
        model.to(stage.dtype)
    losses = (TeacherForcing if stage.name == "causal" else FewStep)(stage, model, clips)
    compile_layers(stage, model)

    def loss_of(step: int, progress: float) -> tuple[str, Loss]:
        losses.before(step)
        from_own_past = bool(step % 2) and progress > OWN_PAST_AFTER
        return "own past" if from_own_past else "true past", lambda: losses(from_own_past)

    muon = (lambda *_: False) if stage.rank else is_block_matrix
    [averaged], numbers = fit(stage, [model], loss_of, muon)
    with files.replacing(stage.output_dir / stage.file) as file:
        torch.save(lora_state(averaged) if stage.rank else generator_state(averaged), file)
    return numbers


def generator_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return a Self-Forcing style checkpoint: generator_ema, with the prefix model."""
    return {"generator_ema": {f"model.{name}": x.cpu() for name, x in model.state_dict().items()}}


# --- Stage 4: few steps of the sampler land where many steps of the causal model do
GUIDANCE = 1.5  # of the teacher, which is the causal model
TEACHER_STEPS = 20  # of its ODE; a multiple of the sampler's 4, whose noise levels are among its own
EVERY = TEACHER_STEPS // len(SAMPLER_STEPS)  # of the teacher's noise levels are the sampler's
TEACHER_BATCH = 256  # clips of one call of the teacher, each with and without its caption
PATH_USES = 4  # steps that draw a path before the teacher makes the clip another, on average
PATHS_APART = 1_000_003  # between the random numbers of batches of paths


def teacher_sigmas() -> Tensor:
    """Return the noise levels of the teacher's ODE, float32 [TEACHER_STEPS + 1], from 1 to 0."""
    sigmas = torch.linspace(1, 0, TEACHER_STEPS + 1)
    return SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)


class FewStep(TeacherForcing):
    """The distance of the model's jumps from the ends of its teacher's paths; captions are always given.

    The teacher goes on making paths: a model that sees one too often learns it by heart.
    """

    def __init__(self, stage: Stage, model: CausalWanModel, clips: LatentClips):
        super().__init__(stage, model, clips)
        self.teacher = CausalWanModel(**asdict(MODEL)).to(stage.device, stage.dtype).requires_grad_(False)
        self.teacher.load_state_dict(checkpoint.read_self_forcing_state(stage.output_dir / "causal.pt"))
        # The teacher always works in blocks of three that see the whole past, whatever a LoRA is trained for.
        mask = self.token_mask(frame_mask(block_sizes(self.num_frames))).to(stage.device)
        length = self.tokens * self.num_frames
        self.clean = masked_attention(mask[:length, :length], stage, compiles=True)
        self.noisy = masked_attention(mask[length:], stage, compiles=True)
        self.seed = stage.seed
        self.sigmas = teacher_sigmas()[:-1:EVERY].to(stage.device)
        latents = clips.latents.transpose(1, 2)  # [N, F, C, h, w]
        self.paths = latents.new_empty(len(latents), len(self.sigmas) + 1, *latents.shape[1:])
        self.turns = torch.arange(len(latents), device=latents.device).split(TEACHER_BATCH)
        self.made = 0  # batches of paths, so far
        self.before(0)

    @torch.no_grad()
    def path(self, clips: Tensor, seed: int) -> list[Tensor]:
        """Take the teacher's guided Euler steps from noise to clean blocks, each after the clip's own past.

        Returns x_t [B, F, C, h, w] of these clips at the sampler's noise levels and at 0. Keys and values of
        the clean blocks are the same at every step, and stay in a KV cache.
        """
        # 1. Noise, and the text with and without the caption
        model, past = self.teacher, self.clips.latents[clips].transpose(1, 2)
        random = torch.Generator(past.device).manual_seed(seed)
        x = torch.randn(past.shape, generator=random, device=past.device)
        rows = torch.cat([clips + 1, torch.zeros_like(clips)])  # with the caption, and with the empty one
        text = model.text_keys_values(encode_text(self.encoder, self.clips, rows))
        sigmas, frames = teacher_sigmas().to(x.device), range(x.shape[1])
        # 2. Keys and values of the clean clip
        height, width = x.shape[3:]
        cache = model.new_kv_cache(2 * len(x), 2 * len(frames), height, width, of_window(-1, 0))
        assert isinstance(cache, KVCache)  # a window's
        cache.advance(frames, text)
        model(past.repeat(2, 1, 1, 1, 1), torch.zeros_like(sigmas[0]), text, cache, mask=self.clean)
        # 3. The same frames again, noisy, by Euler steps of the guided flow
        cache.advance(frames, text)
        points = [x]
        for step, (sigma, after) in enumerate(pairwise(sigmas)):
            both = x.to(past.dtype).repeat(2, 1, 1, 1, 1)
            flow = model(both, 1000 * sigma, text, cache, mask=self.noisy)
            guided, free = flow.float().chunk(2)
            x = x + (after - sigma) * (free + GUIDANCE * (guided - free))
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
            clips = self.turns[number % turns]
            for i, x in enumerate(self.path(clips, self.seed + PATHS_APART * number)):
                self.paths[clips, i] = x.to(self.paths.dtype)
        self.made = wanted

    def __call__(self, own_past: bool) -> Tensor:
        """Return the loss of a random batch, each block at one of the sampler's noise levels."""
        chosen = self.clips.draw(self.batch)
        paths, x0 = self.paths[chosen], self.clips.latents[chosen].transpose(1, 2)
        past, text = self.given(x0, chosen + 1, own_past)
        step = torch.randint(len(self.sigmas), (len(x0), len(self.blocks)), device=x0.device)
        step = step.repeat_interleave(len(self.blocks[0]), 1)  # [B, blocks] -> [B, F]
        frames = torch.arange(x0.shape[1], device=x0.device)
        x = paths[torch.arange(len(x0), device=x0.device)[:, None], step, frames]  # [B, F, C, h, w]
        sigma = self.sigmas[step]
        flow = self.predict(past, x, 1000 * sigma, text)
        jump = x.float() - sigma[..., None, None, None] * flow.float()
        return F.mse_loss(jump, paths[:, -1].float())


# --- LoRAs of the few-step model: a window that forgets, and blocks of one frame
class LowRank(nn.Linear):
    """A linear layer that stays as it is, plus B A x, which is trained; alpha = rank, as LongLive's."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)  # as nn.Linear's weight

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


# --- A stage from its start to its log
OF_STAGES = {"vae": "vae", "base": "transformer"}  # the folders that two stages write; others write a file


def train(name: str, output_dir: Path, device: str = "auto", overwrite: bool = False, **given: Any) -> dict:
    """Train a stage, write its files, and set its entry in OUTPUT_DIR/training.json; return the entry.

    >>> train("vae", Path("outputs/mini"), minutes=8)["psnr"]

    given are fields of Stage that differ from the recipe. ConfigError without files of an earlier stage, and,
    unless overwrite, with weights of this one.
    """
    chosen = choose_device(device)
    dtype = choose_dtype("auto", chosen)
    stage = replace(STAGES[name], output_dir=output_dir, device=chosen, dtype=dtype, **given)
    missing = [file for file in stage.needs if not (output_dir / file).exists()]
    if missing:
        raise ConfigError(f"{output_dir / missing[0]} not found; --stage {name} needs it")
    weights = output_dir / (stage.file or OF_STAGES[name])
    if weights.exists() and not overwrite:
        raise ConfigError(f"{weights} is there; choose another --output_dir, or --overwrite replaces it")
    path = output_dir / "training.json"
    files.require_writable(path)
    torch.manual_seed(stage.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 5
    diffusers_logging.set_verbosity_error()
    numbers = {"vae": train_vae, "base": train_base}.get(name, train_causal)(stage)
    recipe = {field: getattr(stage, field) for field in LOGGED}
    entry = {"environment": environment(chosen)} | recipe | numbers
    log = read_json(path) if path.exists() else {}
    files.save_report(log | {name: entry}, path)
    return entry

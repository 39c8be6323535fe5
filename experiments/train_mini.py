"""Train the miniature Wan2.1 of checkpoints/wan-mini in stages, each starting from the files of the one before.

    python experiments/train_mini.py --stage vae --minutes 8                         # AutoencoderKLWan on moving shapes, 64x64
    python experiments/train_mini.py --stage vae --resume --minutes 2.2 --lr 5e-4    # the same on whole clips, against drift
    python experiments/train_mini.py --stage base --minutes 6                        # bidirectional WanModel and its umT5
    python experiments/train_mini.py --stage causal --minutes 5.6                    # block-causal fine-tune, teacher forcing

A stage ends after its minutes with bf16 weights written (the moving average of training) and its numbers in
training.json. On a CPU, `--minutes 0.1 --batch 1 --clips 4` rehearses a stage in seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
from safetensors.torch import save_file
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from experiments.caches.atomic_files import require_writable
from experiments.extraction.devices import choose_device
from experiments.miniature.moving_shapes import (
    FPS,
    Scene,
    render_batch,
    render_table,
    sample_scenes,
    scene_table,
)
from experiments.miniature.tokenizer import build_tokenizer
from experiments.miniature.training import Clock, Trainer
from experiments.running.cli import Parser, main
from wan.blocks import block_ranges, block_sizes
from wan.checkpoint import read_self_forcing_state, read_transformer_state
from wan.config import ModelConfig
from wan.errors import ConfigError
from wan.modules.causal_model import CausalWanModel, teacher_forcing_mask
from wan.modules.model import WanModel
from wan.scheduler import FlowSchedule
from wan.weight_names import to_diffusers_names

SIDE, FRAMES = 64, 81  # pixels, video frames
MODEL = ModelConfig(dim=192, ffn_dim=640, num_heads=12, num_layers=8, freq_dim=64, text_dim=64, text_len=64)
VAE = {"base_dim": 16, "decoder_base_dim": 24, "z_dim": 16, "num_res_blocks": 1, "dim_mult": [1, 2, 4, 4]}
TEXT = {
    "d_model": MODEL.text_dim,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
SHIFT = 5.0
STEPS = (1000, 750, 500, 250)  # of the few-step sampler, before warping
CAPTION_DROPOUT = 0.1
KL_WEIGHT = 1e-4
HELD_OUT_SEED = 1_000_003
SHORT_CLIPS = 0.4  # of the VAE's time
MOMENTS = (
    0,
    100,
    250,
    500,
    1000,
    2000,
    4000,
    8000,
)  # steps of causal training whose weights can be kept; and the last


@dataclass(frozen=True)
class Recipe:
    """Sizes of a stage: peak learning rate, clips of 81 frames per step, different clips."""

    lr: float
    batch: int
    clips: int = 0


NEEDS = {"vae": [], "base": ["vae"], "causal": ["vae", "transformer", "text_encoder"]}
RECIPES = {
    "vae": Recipe(1e-3, 2, 16384),
    "base": Recipe(1e-3, 128, 16384),
    "causal": Recipe(6e-4, 64, 16384),
}


def compile_blocks(model: WanModel, wanted: bool) -> None:
    """Fuse each transformer layer; all layers share one compiled graph."""
    for block in model.blocks if wanted else ():
        block.compile()


# -- stage 1: the VAE ------------------------------------------------------------------------------------------------


def encode(vae: AutoencoderKLWan, video: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance [B, z, f, h, w] of video [B, 3, F, H, W]; vae.encode in two calls, frame 0 and the others."""
    cache = [None] * vae._cached_conv_counts["encoder"]
    parts = [vae.encoder(x, feat_cache=cache, feat_idx=[0]) for x in (video[:, :, :1], video[:, :, 1:])]
    return vae.quant_conv(torch.cat(parts, 2)).chunk(2, 1)


def decode(vae: AutoencoderKLWan, z: Tensor) -> Tensor:
    """Latents to video, not clamped; vae.decode in two calls, frame 0 and the others."""
    cache, z = [None] * vae._cached_conv_counts["decoder"], vae.post_quant_conv(z)
    first = vae.decoder(z[:, :, :1], feat_cache=cache, feat_idx=[0], first_chunk=True)
    return torch.cat([first, vae.decoder(z[:, :, 1:], feat_cache=cache, feat_idx=[0])], 2)


def set_layout(vae: AutoencoderKLWan, planes: torch.memory_format, volumes: torch.memory_format) -> None:
    """Memory layout of the kernels of 2D and 3D convolutions, which their outputs take over."""
    for p in vae.parameters():
        p.data = p.data.contiguous(memory_format={4: planes, 5: volumes}.get(p.ndim, torch.contiguous_format))


def vae_loss(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    """Squared and absolute error of the reconstruction, and a little KL."""
    mean, log_var = encode(vae, video.to(vae.dtype))
    log_var = log_var.float().clamp(-20, 10)
    z = mean + (torch.randn_like(mean) * (0.5 * log_var).exp()).to(mean.dtype)
    error = decode(vae, z).float() - video
    kl = 0.5 * (mean.float().square() + log_var.exp() - 1 - log_var).mean()
    return error.square().mean() + 0.2 * error.abs().mean() + KL_WEIGHT * kl


@torch.no_grad()
def vae_quality(vae: AutoencoderKLWan, device: torch.device, clips: int, batch: int = 8) -> dict[str, float]:
    """PSNR in dB of held-out clips of 81 frames, mean over clips: all frames, the first second, the last second."""
    scenes = list(itertools.islice(sample_scenes(HELD_OUT_SEED, held_out=True), clips))
    squared = []
    for i in range(0, clips, batch):
        video = render_batch(scenes[i : i + batch], FRAMES, SIDE, device)
        error = decode(vae, encode(vae, video.to(vae.dtype))[0]).float().clamp(-1, 1) - video
        squared.append(error.square().mean((1, 3, 4)) / 4)  # [B, F], for values in 0..1
    squared = torch.cat(squared)
    parts = {"psnr": squared, "psnr_first_second": squared[:, :FPS], "psnr_last_second": squared[:, -FPS:]}
    return {k: round((-10 * v.mean(1).log10()).mean().item(), 2) for k, v in parts.items()}


def train_vae(args: argparse.Namespace, recipe: Recipe) -> dict:
    """Clips of 5 and 17 frames first, which teach shapes and colours soonest; then long ones, against drift.

    Resumed, it takes mostly whole clips.
    """
    vae = (
        AutoencoderKLWan.from_pretrained(args.output_dir / "vae").float()
        if args.resume
        else AutoencoderKLWan(**VAE)
    )
    vae.to(args.device)
    set_layout(vae, torch.channels_last, torch.channels_last_3d)
    table = scene_table(list(itertools.islice(sample_scenes(args.seed), recipe.clips))).to(args.device)
    trainer, curve = Trainer([vae], recipe.lr, args.clock), []

    def clips_of(frames: int) -> Callable[[], Tensor]:
        """The loss of random clips of so many frames."""
        size = (max(1, round(recipe.batch * FRAMES / frames)),)
        return lambda: vae_loss(
            vae, render_table(table[torch.randint(len(table), size, device=table.device)], frames, SIDE)
        )

    losses = {frames: clips_of(frames) for frames in (5, 17, 33, FRAMES)}

    def save() -> None:
        averaged = trainer.averaged()[0]
        curve.append([trainer.steps, *vae_quality(averaged, args.device, min(8, recipe.clips)).values()])
        z = encode_clips(
            averaged,
            list(itertools.islice(sample_scenes(args.seed + 1), min(256, recipe.clips))),
            args.device,
        )
        std, mean = torch.std_mean(z.float(), (0, 2, 3, 4))
        averaged.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
        set_layout(averaged, torch.contiguous_format, torch.contiguous_format)
        averaged.save_pretrained(args.output_dir / "vae")

    for step in trainer.loop(save):
        lengths = (
            (33, FRAMES, FRAMES)
            if args.resume
            else (5, 17)
            if args.clock.progress < SHORT_CLIPS
            else (17, 33, FRAMES)
        )
        frames = lengths[step % len(lengths)]
        trainer.step(f"{frames} frames", losses[frames])
    return (
        trainer.numbers()
        | {"psnr_curve": curve}
        | vae_quality(trainer.averaged()[0], args.device, min(32, recipe.clips))
    )


# -- data of the transformer stages ------------------------------------------------------------------------------------


@torch.no_grad()
def encode_clips(vae: AutoencoderKLWan, scenes: list[Scene], device: torch.device, batch: int = 32) -> Tensor:
    """Latent means [N, z, f, h, w] of rendered scenes."""
    parts = (render_batch(scenes[i : i + batch], FRAMES, SIDE, device) for i in range(0, len(scenes), batch))
    return torch.cat([encode(vae, video.to(vae.dtype))[0] for video in parts])


class Clips:
    """Normalised latents [N, C, F, h, w] of random scenes and their captions, on the training device."""

    def __init__(self, args: argparse.Namespace, count: int, seed: int):
        vae = AutoencoderKLWan.from_pretrained(args.output_dir / "vae").to(args.device, args.dtype)
        mean, std = (torch.tensor(s, device=args.device).view(1, -1, 1, 1, 1)
                     for s in (vae.config.latents_mean, vae.config.latents_std))  # fmt: skip
        scenes = list(itertools.islice(sample_scenes(seed), count))
        self.latents = ((encode_clips(vae, scenes, args.device) - mean) / std).to(args.dtype)
        tokens = build_tokenizer()(["", *(s.caption for s in scenes)], padding=True, return_tensors="pt")
        self.ids, self.mask = (
            tokens.input_ids.to(args.device),
            tokens.attention_mask.to(args.device),
        )  # row 0 is ""

    def batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random latents with token ids and mask [B, n]; some captions are empty, for guidance."""
        chosen = torch.randint(len(self.latents), (size,), device=self.latents.device)
        row = torch.where(torch.rand(size, device=chosen.device) < CAPTION_DROPOUT, 0, chosen + 1)
        return self.latents[chosen], self.ids[row], self.mask[row]


def encode_text(encoder: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """umT5 states [B, n, text_dim], zero beyond each caption's end."""
    return encoder(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None].to(encoder.dtype)


def draw(timesteps: Tensor, *shape: int) -> Tensor:
    """Random entries of a table of timesteps."""
    return timesteps[torch.randint(len(timesteps), shape, device=timesteps.device)]


def noised(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_t of the flow path, in the dtype of x0; sigma broadcasts from the left."""
    sigma = sigma.view(*sigma.shape, *[1] * (x0.ndim - sigma.ndim))
    return ((1 - sigma) * x0 + sigma * noise).to(x0.dtype)


# -- stage 2: the bidirectional base -----------------------------------------------------------------------------------


def train_base(args: argparse.Namespace, recipe: Recipe) -> dict:
    """Flow matching over whole clips, jointly with the text encoder."""
    tokenizer, clips = build_tokenizer(), Clips(args, recipe.clips, args.seed + 2)
    timesteps = FlowSchedule(SHIFT).timesteps.to(args.device)
    model = WanModel(**asdict(MODEL)).to(args.device)
    model.init_weights()
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **TEXT)).to(args.device)
    if args.resume:
        model.load_state_dict(read_transformer_state(args.output_dir))
        encoder = UMT5EncoderModel.from_pretrained(args.output_dir / "text_encoder").to(
            args.device, torch.float32
        )
    trainer = Trainer([model, encoder], recipe.lr, args.clock)
    compile_blocks(model, args.compile)

    def save() -> None:
        averaged, averaged_encoder = trainer.averaged()
        save_transformer(averaged.state_dict(), args.output_dir / "transformer")
        averaged_encoder.save_pretrained(args.output_dir / "text_encoder")
        tokenizer.save_pretrained(args.output_dir / "tokenizer")
        save_index(args.output_dir)

    def loss() -> Tensor:
        x0, ids, mask = clips.batch(recipe.batch)
        noise, t = torch.randn_like(x0), draw(timesteps, len(x0))
        flow = model(noised(x0, noise, t / 1000), t, encode_text(encoder, ids, mask))
        return F.mse_loss(flow.float(), (noise - x0).float())

    for _ in trainer.loop(save):
        trainer.step("clips", loss)
    return trainer.numbers()


# -- stage 3: the causal fine-tune -------------------------------------------------------------------------------------


def train_causal(args: argparse.Namespace, recipe: Recipe) -> dict:
    """Teacher forcing; after a third of the time, half of the pasts are the model's own predictions."""
    schedule, clips = FlowSchedule(SHIFT), Clips(args, recipe.clips, args.seed + 3)
    model = CausalWanModel(**asdict(MODEL)).to(args.device)
    checkpoint = args.output_dir / "self_forcing_mini.pt"
    model.load_state_dict(
        read_self_forcing_state(checkpoint) if args.resume else read_transformer_state(args.output_dir)
    )
    encoder = UMT5EncoderModel.from_pretrained(args.output_dir / "text_encoder").to(args.device, args.dtype)
    trainer = Trainer([model], recipe.lr, args.clock)
    num_frames = clips.latents.shape[2]
    blocks = block_ranges(block_sizes(num_frames))
    block_of_frame = [i for i, block in enumerate(blocks) for _ in block]
    mask = teacher_forcing_mask(block_of_frame, MODEL.tokens_per_frame(*clips.latents.shape[3:])).to(
        args.device
    )
    frames, per_block = [*range(num_frames)] * 2, len(blocks[0])
    compile_blocks(model, args.compile)
    timesteps, steps = schedule.timesteps.to(args.device), schedule.warp(STEPS).to(args.device)

    def predict(past: Tensor, x: Tensor, t: Tensor, text) -> Tensor:
        """Flow of the noisy frames x [B, F, C, h, w] at t [B, F], with `past` as clean frames."""
        both = torch.cat([torch.zeros_like(t), t], 1)
        return model(torch.cat([past, x], 1), both, text, frames=frames, mask=mask)[:, num_frames:]

    def own_past(x0: Tensor, text) -> Tensor:
        """x0 as the model sees it from the last step's noise level: the kind of past it will have in a rollout."""
        t = steps[-1].expand(x0.shape[:2])
        x = noised(x0, torch.randn_like(x0), t / 1000)
        return (x - t[:, :, None, None, None] / 1000 * predict(x0, x, t, text)).to(x0.dtype).detach()

    def loss(own: bool) -> Tensor:
        latents, ids, text_mask = clips.batch(recipe.batch)
        x0, noise = latents.transpose(1, 2), torch.randn_like(latents.transpose(1, 2))
        with torch.no_grad():
            context = encode_text(encoder, ids, text_mask)
        text = model.text_keys_values(context)
        past = own_past(x0, text) if own else x0
        t, sampled = draw(timesteps, len(x0), len(blocks)), draw(steps, len(x0), len(blocks))
        t = torch.where(torch.rand_like(t) < 0.5, sampled, t).repeat_interleave(per_block, 1)
        flow = predict(past, noised(x0, noise, t / 1000), t, text)
        return F.mse_loss(flow.float(), (noise - x0).float())

    def save(path: Path = checkpoint) -> None:
        path.parent.mkdir(exist_ok=True)
        weights = {f"model.{k}": v.cpu() for k, v in trainer.averaged()[0].state_dict().items()}
        torch.save({"generator_ema": weights}, path)

    for step in trainer.loop(save):
        if args.moments and step in MOMENTS:
            save(args.moments / f"step_{step:05d}.pt")
        own = bool(step % 2) and args.clock.progress > 1 / 3
        trainer.step("own past" if own else "true past", lambda own=own: loss(own))
    if args.moments:
        save(args.moments / f"step_{trainer.steps:05d}.pt")
    return trainer.numbers()


# -- files -------------------------------------------------------------------------------------------------------------

WEIGHTS = "diffusion_pytorch_model.safetensors"


def save_transformer(native: dict[str, Tensor], folder: Path) -> None:
    """Weights under diffusers' names, and the config of its WanTransformer3DModel."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.cpu().contiguous() for k, v in to_diffusers_names(native).items()}, folder / WEIGHTS)
    config = {
        "_class_name": "WanTransformer3DModel", "num_attention_heads": MODEL.num_heads,
        "attention_head_dim": MODEL.head_dim, "in_channels": MODEL.in_dim, "out_channels": MODEL.out_dim,
        "patch_size": MODEL.patch_size, "text_dim": MODEL.text_dim, "freq_dim": MODEL.freq_dim,
        "ffn_dim": MODEL.ffn_dim, "num_layers": MODEL.num_layers, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "eps": MODEL.eps, "rope_max_seq_len": 1024,
        "text_len": MODEL.text_len,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_index(folder: Path) -> None:
    """What makes the directory a diffusers WanPipeline: the scheduler and model_index.json."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
    )
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline", "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"], "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"], "vae": ["diffusers", "AutoencoderKLWan"],
    }  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def log_stage(path: Path, stage: str, entry: dict) -> None:
    """Set one stage's entry of the log."""
    log = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(log | {stage: entry}, indent=1) + "\n")


def run(argv=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", required=True, choices=RECIPES)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training, data included")
    parser.add_argument("--output_dir", type=Path, default=Path("checkpoints/wan-mini"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--log", type=Path, help="JSON with the numbers of every stage (OUTPUT_DIR/training.json)"
    )
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--batch", type=int, help="clips of 81 frames per step")
    parser.add_argument("--clips", type=int, help="different clips to train on")
    parser.add_argument("--moments", type=Path, metavar="DIR", help="keep causal weights of some steps there")
    parser.add_argument("--resume", action="store_true", help="start from the files this stage wrote before")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    args = parser.parse_args(argv)
    args.device, args.log = choose_device(args.device), args.log or args.output_dir / "training.json"
    missing = [p for p in NEEDS[args.stage] if not (args.output_dir / p).exists()]
    if missing:
        raise ConfigError(f"{args.output_dir / missing[0]} not found; --stage {args.stage} needs it")
    for name in ("minutes", "lr", "batch", "clips"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise ConfigError(f"--{name} must be above 0, not {value:g}")
    for path in (args.output_dir / "training.json", args.log):
        require_writable(path)

    given = {k: v for k in ("lr", "batch", "clips") if (v := getattr(args, k)) is not None}
    recipe = replace(RECIPES[args.stage], **given)
    args.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    args.clock = Clock(args.minutes)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 5

    entry = {"vae": train_vae, "base": train_base, "causal": train_causal}[args.stage](args, recipe)
    device = torch.cuda.get_device_name() if args.device.type == "cuda" else "cpu"
    about = {
        "device": device,
        "torch": torch.__version__,
        "seed": args.seed,
        "dtype": str(args.dtype),
        **asdict(recipe),
    }
    name = f"{args.stage}_resumed" if args.resume else args.stage
    log_stage(args.log, name, about | entry)
    print(f"{args.stage}: " + ", ".join(f"{k} {v}" for k, v in entry.items() if k != "loss_curve"))


if __name__ == "__main__":
    main(run)

"""diffusers' WanPipeline: the miniature's text encoder and VAE, and a small transformer of random weights."""

import torch
from conftest import ROOT
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import AutoTokenizer, UMT5EncoderModel

MINI = ROOT / "checkpoints" / "wan-mini"


def small_wan_pipeline() -> WanPipeline:
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, ffn_dim=64, num_layers=2, freq_dim=32, text_dim=64
    )
    pipeline = WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(MINI / "tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(MINI / "text_encoder"),
        transformer=transformer.eval(),
        vae=AutoencoderKLWan.from_pretrained(MINI / "vae"),
        scheduler=UniPCMultistepScheduler.from_pretrained(MINI / "scheduler"),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: WanPipeline, **more) -> torch.Tensor:
    """Latents [1, C, 3, 8, 8] of three steps, unless more says otherwise."""
    sizes = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 3, "max_sequence_length": 16}
    generator = torch.Generator().manual_seed(1)
    return pipeline("a circle", output_type="latent", generator=generator, **sizes | more).frames

"""Tiny pipelines of diffusers beside WanPipeline, with the arguments of one call."""

from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.modular_pipelines import WanBlocks
from PIL import Image
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from helpers.checkpoints import MINI, small_wan_pipeline
from helpers.video_transformers import HEADS

SIZES = {"height": 64, "width": 64, "output_type": "latent", "max_sequence_length": 16}
WIDE = {"ffn_dim": 64, "freq_dim": 32, "text_dim": 64, "in_channels": 16, "out_channels": 16}
Pipe = tuple[Any, dict[str, Any]]


def call(pipe: Any, given: dict[str, Any], **more: Any) -> torch.Tensor:
    torch.manual_seed(2)  # SkyReels adds noise of the process's generator
    out = pipe(**given | {"generator": torch.Generator().manual_seed(1)} | more)
    return getattr(out, "frames", out)


def _parts(wan: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(wan, name) for name in ("tokenizer", "text_encoder", "vae", *names)}


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def video_to_video() -> Pipe:
    """Half of six steps."""
    wan = small_wan_pipeline()
    wan.vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()
    pipe = diffusers.WanVideoToVideoPipeline(**_parts(wan, "scheduler", "transformer"))
    video = [Image.new("RGB", (64, 64), (20 * n, 0, 0)) for n in range(9)]
    return _quiet(pipe), SIZES | {
        "prompt": "a circle",
        "video": video,
        "num_inference_steps": 6,
        "strength": 0.5,
    }


def vace(count: int = 1) -> Pipe:
    """With reference images."""
    wan = small_wan_pipeline()
    model = diffusers.WanVACETransformer3DModel(**HEADS, **WIDE, vace_layers=[0], vace_in_channels=96).eval()
    pipe = diffusers.WanVACEPipeline(**_parts(wan, "scheduler"), transformer=model)
    pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal = 8, 4
    images = [Image.new("RGB", (64, 64), (255, 0, 40 * n)) for n in range(count)] or None
    given = {"prompt": "a circle", "reference_images": images, "num_frames": 9, "num_inference_steps": 2}
    return _quiet(pipe), SIZES | given


def skyreels(**more: Any) -> Pipe:
    wan = small_wan_pipeline()
    model = diffusers.SkyReelsV2Transformer3DModel(**HEADS, **WIDE, inject_sample_info=True).eval()
    scheduler = diffusers.UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=8.0
    )
    kind = diffusers.SkyReelsV2DiffusionForcingPipeline
    pipe = kind(**_parts(wan), scheduler=scheduler, transformer=model)
    given = {"prompt": "a circle", "num_frames": 17, "base_num_frames": 17, "num_inference_steps": 3}
    return _quiet(pipe), SIZES | given | {"ar_step": 0} | more


def helios() -> Pipe:
    """Three chunks of three frames."""
    wan = small_wan_pipeline()
    model = diffusers.HeliosTransformer3DModel(**HEADS, **WIDE, rope_dim=(4, 6, 6)).eval()
    pipe = diffusers.HeliosPipeline(
        **_parts(wan), transformer=model, scheduler=diffusers.HeliosScheduler(stages=1, stage_range=[0, 1])
    )
    given = {"prompt": "a circle", "num_frames": 27, "num_inference_steps": 2, "history_sizes": [4, 2, 1]}
    return _quiet(pipe), SIZES | given | {"num_latent_frames_per_chunk": 3}


def anyflow(guidance: float = 3.0) -> Pipe:
    """Three chunks of 1, 1 and 2 frames."""
    wan = small_wan_pipeline()
    model = diffusers.AnyFlowFARTransformer3DModel(**HEADS, **WIDE).eval()
    scheduler = diffusers.FlowMapEulerDiscreteScheduler()
    pipe = diffusers.AnyFlowFARPipeline(**_parts(wan), transformer=model, scheduler=scheduler)
    given = {"prompt": "a circle", "num_frames": 13, "num_inference_steps": 2, "guidance_scale": guidance}
    return _quiet(pipe), SIZES | given | {"chunk_partition": [1, 1, 2]}


class NoChecker:
    """In the place of Cosmos' safety checker."""

    def to(self, device: Any) -> None:
        pass

    def check_text_safety(self, prompt: str) -> bool:
        return True


def cosmos() -> Pipe:
    model = diffusers.CosmosTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, text_embed_dim=8, adaln_lora_dim=4, max_size=(8, 16, 16),
        concat_padding_mask=False,
    )  # fmt: skip
    wan = small_wan_pipeline()
    wan.vae.register_to_config(temporal_compression_ratio=4, spatial_compression_ratio=8)
    pipe = diffusers.CosmosTextToWorldPipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=model.eval(),
        vae=wan.vae,
        scheduler=diffusers.EDMEulerScheduler(sigma_min=0.002, sigma_max=80, sigma_data=0.5),
        safety_checker=NoChecker(),
    )
    given = {name: torch.randn(1, 7, 8) for name in ("prompt_embeds", "negative_prompt_embeds")}
    sizes = {"height": 64, "width": 64, "output_type": "latent", "num_frames": 9}
    return _quiet(pipe), sizes | given | {"num_inference_steps": 3}


def cosmos_with_text() -> Pipe:
    """Of a prompt, by a T5 of random weights."""
    pipe, given = cosmos()
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    sizes = T5Config(vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    pipe.register_modules(tokenizer=tokenizer, text_encoder=T5EncoderModel(sizes).eval())
    del given["prompt_embeds"], given["negative_prompt_embeds"]
    return pipe, given | {"prompt": "a circle", "negative_prompt": "dark", "max_sequence_length": 16}


def ltx() -> Pipe:
    """Whose latents are packed; a T5 of random weights reads the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    sizes = T5Config(vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = diffusers.LTXVideoTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, cross_attention_dim=48, caption_channels=8
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
    )  # fmt: skip
    pipe = diffusers.LTXPipeline(
        tokenizer=tokenizer,
        text_encoder=T5EncoderModel(sizes).eval(),
        transformer=model.eval(),
        vae=vae.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    given = {"prompt": "a circle", "num_frames": 17, "num_inference_steps": 2, "max_sequence_length": 16}
    return _quiet(pipe), given | {"height": 64, "width": 96}


TEMPLATE = {"template": "a red square: {}</s>", "crop_start": 4}


def _of_hunyuan(tokenizer: Any, text_encoder: Any, **more: Any) -> dict[str, Any]:
    """The parts of HunyuanVideo's pipelines."""
    model = diffusers.HunyuanVideoTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, num_layers=1, num_single_layers=1, num_refiner_layers=1,
        in_channels=4, out_channels=4, text_embed_dim=12, pooled_projection_dim=12, rope_axes_dim=(4, 6, 6),
        **more,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    )
    of_clip = CLIPTextConfig(**_sizes_of_text(tokenizer))
    return {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder.eval(),
        "tokenizer_2": tokenizer,
        "text_encoder_2": CLIPTextModel(of_clip).eval(),
        "transformer": model.eval(),
        "vae": vae.eval(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }


def _sizes_of_text(tokenizer: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 12, "intermediate_size": 8, "num_attention_heads": 3, "num_hidden_layers": 2}
    return sizes | {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 1}


def hunyuan() -> Pipe:
    """Behind a template, of which the model does not read the first tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    text_encoder = LlamaModel(LlamaConfig(**_sizes_of_text(tokenizer)))
    pipe = diffusers.HunyuanVideoPipeline(**_of_hunyuan(tokenizer, text_encoder))
    given = {"prompt": "a circle", "num_frames": 9, "num_inference_steps": 2, "prompt_template": TEMPLATE}
    return _quiet(pipe), SIZES | given | {"height": 32, "width": 48}


def hunyuan_image() -> Pipe:
    """Of an image, whose every fourth token the model reads before the prompt's; its template is cut off."""
    # 1. The prompt's encoder, which reads the image in 4 x 4 tokens.
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<|end_header_id|>"]})
    padding, image_token = tokenizer.pad_token_id, tokenizer.convert_tokens_to_ids("<image>")
    of_images = {"hidden_size": 12, "intermediate_size": 8, "num_attention_heads": 3, "num_hidden_layers": 1}
    of_text = _sizes_of_text(tokenizer) | {"num_hidden_layers": 3, "pad_token_id": padding}
    llava = LlavaConfig(
        vision_config=CLIPVisionConfig(**of_images, image_size=16, patch_size=4),
        text_config=LlamaConfig(**of_text),
        image_token_index=image_token,
        vision_feature_layer=-1,
        pad_token_id=padding,
    )
    parts = _of_hunyuan(tokenizer, LlavaForConditionalGeneration(llava), image_condition_type="token_replace")
    size = {"height": 16, "width": 16}
    pipe = diffusers.HunyuanVideoImageToVideoPipeline(
        **parts, image_processor=CLIPImageProcessor(size=size, crop_size=size)
    )
    # 2. A template with the places of the image, and of the headers around the prompt.
    header = "<|end_header_id|>"
    template = f"a red{header} <image> square{header} {{}}</s> dark blue{header} a"
    names = tokenizer.tokenize(template)
    start = names.index("<image>")
    places = {"image_emb_len": 16, "image_emb_start": start, "image_emb_end": start + 16}
    cropped = [place for place, name in enumerate(names) if name == header][1] + 1
    given = {"prompt_template": {"template": template, "crop_start": cropped} | places}
    given |= {"prompt": "a circle", "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 24}
    given |= {"image": Image.fromarray(np.arange(32 * 48 * 3, dtype=np.uint8).reshape(32, 48, 3))}
    return _quiet(pipe), given | {"height": 32, "width": 48, "guidance_scale": 1.0, "output_type": "latent"}


def hunyuan15() -> Pipe:
    """Behind a chat template, of which the model does not read the first tokens; with 8 tokens of letters."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    content = "message.content if message.content is string else message.content[0].text"
    tokenizer.chat_template = f"{{% for message in messages %}}a red {{{{ {content} }}}}</s>{{% endfor %}}"
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 3, "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 1}
    of_letters = T5Config(vocab_size=400, d_model=6, d_kv=3, d_ff=8, num_layers=1, num_heads=2)
    model = diffusers.HunyuanVideo15Transformer3DModel(
        **HEADS, in_channels=9, out_channels=4, num_refiner_layers=1, text_embed_dim=8, text_embed_2_dim=6,
        image_embed_dim=10, rope_axes_dim=(4, 6, 6), patch_size=2, target_size=16,
    )  # fmt: skip
    pipe = diffusers.HunyuanVideo15Pipeline(
        tokenizer=tokenizer,
        text_encoder=LlamaModel(LlamaConfig(**sizes)).eval(),
        tokenizer_2=ByT5Tokenizer(),
        text_encoder_2=T5EncoderModel(of_letters).eval(),
        transformer=model.eval(),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(32,) * 5, layers_per_block=1
        ).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )
    pipe.system_message, pipe.prompt_template_encode_start_idx = "dark", 4
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 24, 8
    pipe.vision_num_semantic_tokens, pipe.vision_states_dim = 2, 10
    given = {"prompt": 'a circle, "hi"', "num_frames": 9, "num_inference_steps": 2}
    return _quiet(pipe), given | {"height": 64, "width": 64, "output_type": "latent"}


def hunyuan15_image() -> Pipe:
    """Of an image, whose 2 x 2 tokens stand before those of letters and of the prompt."""
    of_text, given = hunyuan15()
    sizes = {"hidden_size": 10, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    of_images = SiglipVisionConfig(**sizes, image_size=8, patch_size=4)
    names = ("tokenizer_2", "text_encoder_2", "transformer", "guider")
    pipe = diffusers.HunyuanVideo15ImageToVideoPipeline(
        **_parts(of_text, "scheduler", *names),
        image_encoder=SiglipVisionModel(of_images).eval(),
        feature_extractor=SiglipImageProcessor(size={"height": 8, "width": 8}),
    )
    for name in ("system_message", "prompt_template_encode_start_idx"):
        setattr(pipe, name, getattr(of_text, name))
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 24, 8
    pipe.vision_num_semantic_tokens, pipe.vision_states_dim, pipe.target_size = 4, 10, 64
    image = Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3))
    del given["height"], given["width"]  # they are the image's
    return _quiet(pipe), given | {"image": image}


def modular(guider: Any = None) -> Pipe:
    wan = small_wan_pipeline()
    wan.transformer.to(torch.bfloat16)
    pipe = WanBlocks().init_pipeline()
    parts = _parts(wan, "scheduler", "transformer")
    if guider is not None:
        parts["guider"] = guider
    pipe.update_components(**parts)
    given = {"prompt": "a circle", "num_frames": 9, "num_inference_steps": 2, "output": "latents"}
    return pipe, SIZES | given | {"output_type": "pt"}

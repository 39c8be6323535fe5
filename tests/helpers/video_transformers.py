"""Tiny random transformers of diffusers' families, each with the arguments of one forward."""

import diffusers
import torch

F, H, W = 3, 4, 6  # latents; 2 x 3 tokens a frame with patches of 2
HEADS = {"num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2}


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wan(name: str = "WanTransformer3DModel", batch: int = 2, texts: int = 7, timestep=None, **more):
    sizes = {"ffn_dim": 32, "freq_dim": 16, "text_dim": 8, "in_channels": 4, "out_channels": 4}
    model = getattr(diffusers, name)(**(HEADS | sizes | more))
    given = {"hidden_states": noise(batch, 4, F, H, W), "encoder_hidden_states": noise(batch, texts, 8)}
    return model, given | {"timestep": torch.full((batch,), 700.0) if timestep is None else timestep}


def wan_i2v():
    """257 image tokens in the released model, 5 here; the processor holds all but the last 512 for images."""
    model, given = wan(texts=512, added_kv_proj_dim=48, image_dim=10)
    return model, given | {"encoder_hidden_states_image": noise(2, 5, 10)}


def wan_ti2v():
    """A timestep a token; the first frame is given."""
    t = torch.full((2, F, 6), 700.0)
    t[:, 0] = 0
    return wan(timestep=t.flatten(1))


def wan_vace():
    model, given = wan("WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=6)
    return model, given | {"control_hidden_states": noise(2, 6, F, H, W)}


def skyreels():
    """Diffusion forcing: a timestep a frame, and a mask of causal blocks."""
    t = torch.tensor([[100.0, 400.0, 700.0]]).expand(2, F)
    model, given = wan("SkyReelsV2Transformer3DModel", timestep=t)
    given["hidden_states"] = noise(2, 4, 4, H, W)
    given["timestep"] = torch.tensor([[100.0, 400.0, 700.0, 900.0]]).expand(2, 4)
    model._set_ar_attention(2)
    return model, given | {"enable_diffusion_forcing": True}


def ltx():
    model = diffusers.LTXVideoTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, cross_attention_dim=48, caption_channels=8
    )
    mask = torch.ones(2, 7)
    mask[0, 4:] = 0
    given = {"hidden_states": noise(2, F * 6, 4), "encoder_hidden_states": noise(2, 7, 8)}
    given |= {"timestep": torch.tensor([700.0, 700.0]), "encoder_attention_mask": mask}
    return model, given | {"num_frames": F, "height": 2, "width": 3}


def hunyuan15():
    model = diffusers.HunyuanVideo15Transformer3DModel(
        **HEADS, in_channels=4, out_channels=4, num_refiner_layers=1, text_embed_dim=8, text_embed_2_dim=6,
        image_embed_dim=10, rope_axes_dim=(4, 6, 6), patch_size=2, target_size=16,
    )  # fmt: skip
    masks = [torch.ones(2, n) for n in (7, 3)]
    masks[0][0, 4:] = 0
    given = {"hidden_states": noise(2, 4, F, H, W), "timestep": torch.tensor([700.0, 700.0])}
    given |= {"encoder_hidden_states": noise(2, 7, 8), "encoder_attention_mask": masks[0]}
    given |= {"encoder_hidden_states_2": noise(2, 3, 6), "encoder_attention_mask_2": masks[1]}
    return model, given | {"image_embeds": noise(2, 2, 10)}


def hunyuan():
    model = diffusers.HunyuanVideoTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, num_layers=1, num_single_layers=1, num_refiner_layers=1,
        in_channels=4, out_channels=4, text_embed_dim=8, pooled_projection_dim=6, rope_axes_dim=(4, 6, 6),
        guidance_embeds=False,
    )  # fmt: skip
    mask = torch.ones(2, 7)
    mask[0, 4:] = 0
    given = {"hidden_states": noise(2, 4, F, H, W), "timestep": torch.tensor([700.0, 700.0])}
    given |= {"encoder_hidden_states": noise(2, 7, 8), "encoder_attention_mask": mask}
    return model, given | {"pooled_projections": noise(2, 6)}


def cosmos():
    model = diffusers.CosmosTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, text_embed_dim=8, adaln_lora_dim=4, max_size=(8, 16, 16),
        concat_padding_mask=False,
    )  # fmt: skip
    given = {"hidden_states": noise(2, 4, F, H, W), "timestep": torch.tensor([0.7, 0.7])}
    return model, given | {"encoder_hidden_states": noise(2, 7, 8)}


def cosmos_image():
    """Cross-attention over text, then over image tokens, with queries of its own."""
    model = diffusers.CosmosTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, text_embed_dim=8, adaln_lora_dim=4, max_size=(8, 16, 16),
        concat_padding_mask=False, img_context_dim_in=10, img_context_num_tokens=5, img_context_dim_out=48,
    )  # fmt: skip
    given = {"hidden_states": noise(2, 4, F, H, W), "timestep": torch.tensor([0.7, 0.7])}
    return model, given | {"encoder_hidden_states": (noise(2, 7, 8), noise(2, 5, 10))}


def ltx2():
    """With sound, which has attention of its own in every layer."""
    model = diffusers.LTX2VideoTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, cross_attention_dim=48, audio_in_channels=4,
        audio_out_channels=4, audio_num_attention_heads=3, audio_attention_head_dim=8,
        audio_cross_attention_dim=24, caption_channels=8, gated_attn=True,
    )  # fmt: skip
    mask = torch.ones(2, 7)
    mask[0, 4:] = 0
    given = {"hidden_states": noise(2, F * 6, 4), "audio_hidden_states": noise(2, 9, 4)}
    given |= {"encoder_hidden_states": noise(2, 7, 8), "audio_encoder_hidden_states": noise(2, 7, 8)}
    given |= {"encoder_attention_mask": mask, "audio_encoder_attention_mask": mask}
    given |= {"timestep": torch.full((2, F * 6), 700.0), "audio_timestep": torch.full((2, 9), 700.0)}
    return model, given | {"num_frames": F, "height": 2, "width": 3, "audio_num_frames": 9}


def helios():
    """Three histories before the frames, of patches of 2, 4 and 8."""
    model = diffusers.HeliosTransformer3DModel(
        **HEADS, ffn_dim=32, freq_dim=16, text_dim=8, in_channels=4, out_channels=4, rope_dim=(4, 6, 6),
        is_amplify_history=True,
    )  # fmt: skip
    given = {"hidden_states": noise(2, 4, F, H, W), "encoder_hidden_states": noise(2, 7, 8)}
    given |= {"timestep": torch.tensor([700.0, 700.0]), "indices_hidden_states": torch.arange(7, 10)[None]}
    for name, frames, first in (("long", 3, 0), ("mid", 2, 3), ("short", 2, 5)):
        given[f"latents_history_{name}"] = noise(2, 4, frames, H, W, seed=first)
        given[f"indices_latents_history_{name}"] = torch.arange(first, first + frames)[None]
    given = {name: x.expand(2, -1) if "indices" in name else x for name, x in given.items()}
    return model, given


def anyflow(**more):
    """Chunks of 1, 2, 1 and 2 frames: those but the last three are compressed, and a mask is causal."""
    model = diffusers.AnyFlowFARTransformer3DModel(
        **HEADS, ffn_dim=32, freq_dim=16, text_dim=8, in_channels=4, out_channels=4
    )
    times = {name: torch.full((2, 6), t) for name, t in (("timestep", 700.0), ("r_timestep", 500.0))}
    given = {"hidden_states": noise(2, 6, 4, H, W), "encoder_hidden_states": noise(2, 7, 8)}
    return model, given | times | {"chunk_partition": [1, 2, 1, 2]} | more


def anyflow_cached():
    """The last chunk, whose keys follow those of a compressed and of two whole chunks."""
    flags = {"num_cached_chunks": 3, "is_cache_step": False}
    lengths = {"compressed_cache": 2, "full_cache": 20}  # longer than what is in them: 1 and 18 tokens
    cache = [{name: noise(2, 2, 3, n, 16, seed=layer) for name, n in lengths.items()} for layer in (0, 1)]
    model, given = anyflow(kv_cache=cache, kv_cache_flag=flags)
    given["hidden_states"] = noise(2, 2, 4, H, W)
    return model, given | {name: given[name][:, :2] for name in ("timestep", "r_timestep")}


MODELS = {
    "wan": wan,
    "wan_i2v": wan_i2v,
    "wan_ti2v": wan_ti2v,
    "wan_vace": wan_vace,
    "skyreels": skyreels,
    "ltx": ltx,
    "hunyuan15": hunyuan15,
    "hunyuan": hunyuan,
    "cosmos": cosmos,
    "cosmos_image": cosmos_image,
    "ltx2": ltx2,
    "helios": helios,
    "anyflow": anyflow,
    "anyflow_cached": anyflow_cached,
}


# Tokens before those of frames, in queries and in keys of self-attention
BEFORE = {"helios": (15, 15), "anyflow": (1, 1), "anyflow_cached": (0, 1)}


def made(name: str):
    torch.manual_seed(0)
    model, given = MODELS[name]()
    return model.eval(), given | {"return_dict": False}

"""Tiny random transformers of diffusers' families, each with the arguments of one forward."""

import diffusers
import torch

F, H, W = 3, 4, 6  # latents; 2 x 3 tokens a frame with patches of 2
HEADS = {"num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2}


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wan(name: str = "WanTransformer3DModel", batch: int = 2, texts: int = 7, timestep=None, **more):
    sizes = {"ffn_dim": 32, "freq_dim": 16, "text_dim": 8, "in_channels": 4, "out_channels": 4}
    model = getattr(diffusers, name)(**HEADS, **sizes | more)
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
}


def made(name: str):
    torch.manual_seed(0)
    model, given = MODELS[name]()
    return model.eval(), given | {"return_dict": False}

"""Video transformers of diffusers at their real widths and token counts, with random weights and four layers.

model, arguments = made(VIDEO_MODELS["HunyuanVideo"], device, torch.bfloat16)
model(**arguments)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

LAYERS = 4
Arguments = dict[str, Any]


@dataclass(frozen=True)
class VideoModel:
    """A class of diffusers, what its constructor takes, its latents [C, F, h, w], and the forward's rest."""

    kind: str
    latents: tuple[int, int, int, int]
    rest: Callable[[nn.Module, "VideoModel"], Arguments]
    sizes: Mapping[str, object] = field(default_factory=dict)
    heads: tuple[int, int] = (12, 128)  # and their dims
    layers: dict[str, int] = field(default_factory=lambda: {"num_layers": LAYERS})
    text: tuple[int, int] = (512, 4096)


def made(model: VideoModel, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Arguments]:
    """Return a transformer with random weights and the arguments of a forward, on a device."""
    with torch.device(device):
        torch.manual_seed(0)
        number, dims = model.heads
        heads = {"num_attention_heads": number, "attention_head_dim": dims}
        transformer = getattr(diffusers, model.kind)(**heads, **model.layers, **model.sizes).to(dtype).eval()
        arguments = {
            "hidden_states": torch.randn(1, *model.latents),
            "encoder_hidden_states": torch.randn(1, *model.text),
            "timestep": torch.tensor([700.0]),
            "return_dict": False,
        }
        arguments |= model.rest(transformer, model)
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point() and "mask" not in name:
                arguments[name] = value.to(dtype)
    return transformer, arguments


# --- What forwards take beside latents, text and a timestep
def _nothing(transformer: Any, model: VideoModel) -> Arguments:
    return {}


def _padded(transformer: Any, model: VideoModel) -> Arguments:
    """A prompt of 100 tokens, padded."""
    mask = torch.zeros(1, model.text[0])
    mask[:, :100] = 1
    return {"encoder_attention_mask": mask}


def _of_hunyuan(transformer: Any, model: VideoModel) -> Arguments:
    return _padded(transformer, model) | {"pooled_projections": torch.randn(1, 768)}


def _of_hunyuan15(transformer: Any, model: VideoModel) -> Arguments:
    more = {"encoder_hidden_states_2": torch.randn(1, 256, 1472), "image_embeds": torch.zeros(1, 729, 1152)}
    return _padded(transformer, model) | more | {"encoder_attention_mask_2": torch.zeros(1, 256)}


def _forcing(transformer: Any, model: VideoModel) -> Arguments:
    """A mask of causal blocks of 5 frames, and a timestep a frame."""
    transformer._set_ar_attention(5)
    times = torch.linspace(100.0, 900.0, model.latents[1])[None]
    return {"enable_diffusion_forcing": True, "timestep": times}


def _of_chunks(transformer: Any, model: VideoModel) -> Arguments:
    channels, frames, rows, columns = model.latents
    chunks = [1, *[4] * (frames // 4)]
    times = torch.full((1, frames), 700.0)
    latents = torch.randn(1, frames, channels, rows, columns)
    return {"hidden_states": latents, "chunk_partition": chunks, "timestep": times, "r_timestep": times - 100}


def _packed(transformer: Any, model: VideoModel) -> Arguments:
    channels, frames, rows, columns = model.latents
    tokens = torch.randn(1, frames * rows * columns, channels)
    sizes = {"num_frames": frames, "height": rows, "width": columns}
    return _padded(transformer, model) | sizes | {"hidden_states": tokens}


def _with_sound(transformer: Any, model: VideoModel) -> Arguments:
    packed = _packed(transformer, model)
    audio: Arguments = {"audio_hidden_states": torch.randn(1, 126, 128)}
    audio["audio_encoder_hidden_states"] = torch.randn(1, *model.text)
    audio |= {"audio_encoder_attention_mask": packed["encoder_attention_mask"], "audio_num_frames": 126}
    times = {"timestep": torch.full((1, packed["hidden_states"].shape[1]), 700.0)}
    return packed | audio | times | {"audio_timestep": torch.full((1, 126), 700.0)}


WIDE = {"ffn_dim": 8960}
VIDEO_MODELS = {
    "Wan2.2 5B, 27,280 tokens": VideoModel(
        "WanTransformer3DModel",
        (48, 31, 44, 80),
        _nothing,
        {"ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
        heads=(24, 128),
    ),
    "Wan2.1 14B, 75,600 tokens": VideoModel(
        "WanTransformer3DModel", (16, 21, 90, 160), _nothing, {"ffn_dim": 13824}, heads=(40, 128)
    ),
    "LTX, 5,280 tokens": VideoModel(
        "LTXVideoTransformer3DModel", (128, 16, 15, 22), _packed, heads=(32, 64), text=(128, 4096)
    ),
    "LTX-2, 6,144 tokens": VideoModel(
        "LTX2VideoTransformer3DModel", (128, 16, 16, 24), _with_sound, heads=(32, 128), text=(1024, 3840)
    ),
    "Cosmos, 56,320 tokens": VideoModel(
        "CosmosTransformer3DModel",
        (16, 16, 88, 160),
        _nothing,
        {"in_channels": 16, "concat_padding_mask": False},
        heads=(32, 128),
        text=(512, 1024),
    ),
    "SkyReels-V2, 51,000 tokens": VideoModel(
        "SkyReelsV2Transformer3DModel", (16, 25, 68, 120), _nothing, WIDE
    ),
    "SkyReels-V2 diffusion forcing, 51,000 tokens": VideoModel(
        "SkyReelsV2Transformer3DModel", (16, 25, 68, 120), _forcing, WIDE
    ),
    "HunyuanVideo, 48,616 tokens": VideoModel(
        "HunyuanVideoTransformer3DModel",
        (16, 31, 60, 104),
        _of_hunyuan,
        {"guidance_embeds": False},
        heads=(24, 128),
        layers={"num_layers": LAYERS // 2, "num_single_layers": LAYERS // 2},
        text=(256, 4096),
    ),
    "HunyuanVideo-1.5, 50,345 tokens": VideoModel(
        "HunyuanVideo15Transformer3DModel",
        (65, 31, 30, 52),
        _of_hunyuan15,
        {"target_size": 640},
        heads=(16, 128),
        text=(1000, 3584),
    ),
    "AnyFlow, causal, 21 frames": VideoModel(
        "AnyFlowFARTransformer3DModel", (16, 21, 60, 104), _of_chunks, WIDE
    ),
}

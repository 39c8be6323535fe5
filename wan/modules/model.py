"""The Wan2.1 text-to-video transformer (https://github.com/Wan-Video/Wan2.1): latents and text to flow."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from wan.config import ModelConfig
from wan.errors import ConfigError
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE, MaskedAttention
from wan.modules.key_layout import KeyLayout
from wan.modules.kv_cache import KVCache
from wan.modules.layers import Block, Head, Rope, sinusoidal_embedding
from wan.modules.per_head_cache import PerHeadCache
from wan.modules.rope import RotaryTable

TextKeysValues = list[tuple[Tensor, Tensor]]  # per layer, [B, text_len, H, D] each


class WanModel(nn.Module):
    """Bidirectional model; CausalWanModel shares every parameter, so one state dict serves both."""

    def __init__(self, **sizes):
        """sizes: the fields of ModelConfig."""
        super().__init__()
        self.config = config = ModelConfig(**sizes)
        dim = config.dim
        self.patch_embedding = nn.Conv3d(config.in_dim, dim, config.patch_size, stride=config.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.head = Head(config)
        self.rotary = RotaryTable(config.head_dim)

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        """Flow of latents x [B, C, F, h, w] at timestep t [B], context [B, n, text_dim] from umT5."""
        text = self.text_keys_values(context)
        return self.flow(x, t.expand(x.shape[0])[:, None], text, frames=range(x.shape[2]))

    def text_keys_values(self, context: Tensor) -> TextKeysValues:
        """Cross-attention keys and values of every layer, from prompt embeddings [B, n, text_dim].

        Rows of zeros fill the text up to text_len before the embedding; their embeddings are attended, as in
        training.
        """
        config = self.config
        if context.ndim != 3 or context.shape[-1] != config.text_dim or context.shape[1] > config.text_len:
            raise ConfigError(
                f"prompt embeddings of shape {tuple(context.shape)} do not fit "
                f"[B, at most {config.text_len}, {config.text_dim}]"
            )
        padded = F.pad(context, (0, 0, 0, config.text_len - context.shape[1]))
        text = self.text_embedding(padded.to(self.text_embedding[0].weight.dtype))  # [B, text_len, dim]
        return [block.cross_attn.keys_values(text) for block in self.blocks]

    def flow(
        self,
        x: Tensor,
        t: Tensor,
        text: TextKeysValues,
        frames: Sequence[int],
        kv_cache: KVCache | PerHeadCache | None = None,
        mask: Tensor | MaskedAttention | None = None,
    ) -> Tensor:
        """The transformer: x [B, C, F, h, w], t [B, F or 1], indices of the F frames -> flow like x."""
        config = self.config
        ATTENTION_WEIGHT_CAPTURE.check_model(config.num_layers)
        if x.ndim != 5 or x.shape[1] != config.in_dim:
            raise ConfigError(
                f"latents of shape {tuple(x.shape)} are not [B, {config.in_dim} channels, F, h, w]"
            )
        check_batch(text[0][0].shape[0], x.shape[0])
        config.tokens_per_frame(*x.shape[3:])

        dtype = self.patch_embedding.weight.dtype
        x = self.patch_embedding(x.to(dtype))  # [B, dim, F, h, w]
        grid_h, grid_w = x.shape[3:]
        rope = self.rope_tables(frames, grid_h, grid_w, kv_cache)
        x = rearrange(x, "b dim f h w -> b (f h w) dim").contiguous()  # [B, L, dim]
        time = self.time_embedding(sinusoidal_embedding(t, config.freq_dim).to(dtype))  # [B, F or 1, dim]
        rows = self.time_projection(time).unflatten(-1, (6, -1)).float()  # [B, F or 1, 6, dim]
        layout = KeyLayout.of_frames(frames, x.shape[1]) if kv_cache is None else None
        for block, block_text in zip(self.blocks, text, strict=True):
            x = block(x, rows, rope, block_text, kv_cache, mask, layout)
        x = self.head(x, time.float())  # [B, L, ph·pw·channels]
        return rearrange(
            x,
            "b (f h w) (ph pw c) -> b c f (h ph) (w pw)",
            h=grid_h,
            w=grid_w,
            ph=config.patch_size[1],
            pw=config.patch_size[2],
        )

    def rope_tables(
        self, frames: Sequence[int], height: int, width: int, kv_cache: KVCache | PerHeadCache | None
    ) -> Rope:
        """Tables for the positions that a cache gives to queries and keys,
        or for those of the frames without one.
        """
        at = frames if kv_cache is None else kv_cache.key_positions
        keys = self.rotary(at, height, width, self.device)
        asks = at if kv_cache is None else kv_cache.query_positions
        if tuple(asks) == tuple(at):
            return Rope(keys, keys)
        return Rope(self.rotary(asks, height, width, self.device), keys)

    def init_weights(self) -> None:
        """Initial values for training: Xavier for products, normal for embeddings, zero for the head."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patch_embedding.weight.flatten(1))
        for embedding in (self.text_embedding, self.time_embedding):
            for module in embedding:
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.head.head.weight)

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.patch_embedding.weight.device


def check_batch(texts: int, videos: int) -> None:
    """Raise ConfigError where each video has no text of its own: attention would read memory of others."""
    if texts != videos:
        raise ConfigError(
            f"prompt embeddings of batch {texts} for latents of batch {videos}; give each video its own"
        )

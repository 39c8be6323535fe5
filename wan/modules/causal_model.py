"""The block-causal Wan of Self-Forcing: the same parameters, one block of frames at a time, a KV cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wan.blocks import check_window
from wan.modules.attention import MaskedAttention
from wan.modules.cache_policies import CachePolicy, of_window
from wan.modules.head_shard import HeadShard
from wan.modules.kv_cache import KVCache
from wan.modules.model import TextKeysValues, WanModel
from wan.modules.per_head_cache import PerHeadCache
from wan.modules.policies.per_head import PerHead
from wan.modules.rope import RotaryTable


class CausalWanModel(WanModel):
    """local_attn_size (-1: the whole past) and sink_size, in frames, shape the KV cache of its rollouts."""

    def __init__(self, *, local_attn_size: int = -1, sink_size: int = 0, **sizes):
        super().__init__(**sizes)
        check_window(local_attn_size, sink_size, block_size=1)
        self.local_attn_size, self.sink_size = local_attn_size, sink_size
        self.head_shard = HeadShard.whole(self.config.num_heads)  # wan/parallel.py has less of them here

    def forward(  # type: ignore[override]  # it shares parameters with WanModel, not its call
        self,
        x: Tensor,
        t: Tensor,
        text: TextKeysValues,
        kv_cache: KVCache | PerHeadCache | None = None,
        frames: Sequence[int] | None = None,
        mask: Tensor | MaskedAttention | None = None,
    ) -> Tensor:
        """Flow of x [B, F, C, h, w] at timesteps t ([], [B] or [B, F]), text from text_keys_values().

        With a KV cache, x is the block it was last advanced to. Without one, frames gives the absolute
        indices of the F frames (default 0..F-1) and mask [L, L] what may be attended: a training step.
        """
        if frames is None:
            frames = range(x.shape[1]) if kv_cache is None else kv_cache.newest
        t = t if t.ndim == 2 else t.expand(x.shape[0])[:, None]
        return self.flow(x.transpose(1, 2), t, text, frames, kv_cache, mask).transpose(1, 2)

    def new_kv_cache(
        self,
        batch: int,
        num_frames: int,
        height: int,
        width: int,
        policy: CachePolicy | None = None,
        block_size: int = 3,
    ) -> KVCache | PerHeadCache:
        """An empty cache for a rollout of num_frames latent frames of height x width in blocks of block_size.

        Without a policy it is that of the model's local_attn_size and sink_size.
        """
        config, device, shard = self.config, self.device, self.head_shard
        policy = policy or of_window(self.local_attn_size, self.sink_size)
        _, patch_h, patch_w = config.patch_size
        rotary = RotaryTable(config.head_dim)  # of its own: each remembers one table

        def build(num_heads: Sequence[int], of_class: CachePolicy) -> KVCache:
            return KVCache(
                num_heads,
                batch,
                config.head_dim,
                config.tokens_per_frame(height, width),
                num_frames,
                of_class,
                block_size,
                rope=lambda positions: rotary(positions, height // patch_h, width // patch_w, device),
                dtype=self.dtype,
                device=device,
                shard=shard,
            )

        if isinstance(policy, PerHead):
            policy.check_model(config.num_layers, config.num_heads)
            return PerHeadCache(policy, build, device, shard)
        return build([len(shard.heads)] * config.num_layers, policy)


def teacher_forcing_mask(frame_blocks: Sequence[int], tokens_per_frame: int) -> Tensor:
    """Block mask [2L, 2L] for clean frames followed by noisy copies of them, True where a query may look.

    frame_blocks gives the block of each frame. Clean frames see clean blocks up to their own. Noisy frames
    see the clean blocks before their own, and their own noisy block.
    """
    block = torch.as_tensor(frame_blocks).repeat_interleave(tokens_per_frame)
    query, key = block[:, None], block[None, :]
    clean_rows = torch.cat([key <= query, torch.zeros_like(key == query)], 1)
    noisy_rows = torch.cat([key < query, key == query], 1)
    return torch.cat([clean_rows, noisy_rows])

"""The parts of a Wan2.1 transformer layer. Parameter names are those of the released checkpoints.

Letters: B batch, F latent frames, S tokens per frame, L = F·S, H heads, D head dim. Norms, modulation and
RoPE are computed in float32 whatever the dtype of the weights, and stored in that dtype.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan.config import ModelConfig
from wan.modules.attention import MaskedAttention, attention, attention_by_heads
from wan.modules.captured_call import Site
from wan.modules.gelu_linear import gelu_linear
from wan.modules.kernels import fused_kernels
from wan.modules.key_layout import KeyLayout
from wan.modules.kv_cache import KVCache
from wan.modules.per_head_cache import PerHeadCache
from wan.modules.rope import rotate


class Rope(NamedTuple):
    """Tables of RoPE for a call's queries and for its own keys, cos and sin [L, 1, D];
    mostly the same ones.
    """

    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]


class Modulation(NamedTuple):
    """What a sublayer does with its input and output per frame, float32 [B, F or 1, dim] each."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


def modulations_in(table: Tensor) -> tuple[Modulation, Modulation]:
    """Those of self-attention and of the FFN, views of a layer's table [B, F or 1, 6, dim]."""
    rows = table.unbind(2)
    return Modulation(*rows[:3]), Modulation(*rows[3:])


def sinusoidal_embedding(timestep: Tensor, freq_dim: int) -> Tensor:
    """concat(cos, sin) of t·10000^(−i/(freq_dim/2)), in float64: [...] -> [..., freq_dim]."""
    half = freq_dim // 2
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=timestep.device) / half)
    angles = timestep.double()[..., None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


class QueryKeyNorm(nn.Module):
    """RMSNorm of queries or keys over the whole dim, before they are split into heads and rotated."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_heads, self.eps = config.num_heads, config.eps
        self.weight = nn.Parameter(torch.ones(config.dim))

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None, place: Tensor | None = None
    ) -> Tensor:
        """[B, L, dim] -> [B, L, H, D]; in a place that is given."""
        if kernels := fused_kernels(x):
            return kernels.norm_rotate(x, self.weight, rope, self.num_heads, self.eps, place)
        x = F.rms_norm(x, x.shape[-1:], self.weight, self.eps).unflatten(-1, (self.num_heads, -1))
        return _stored(x if rope is None else rotate(x, *rope), place)


class ModulatedNorm(nn.Module):
    """LayerNorm(x) * (1 + scale) + shift, without affine parameters.

    scale and shift are given per frame, float32 [B, F or 1, dim].
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, place: Tensor | None = None) -> Tensor:
        """[B, L, dim]; in a place that is given."""
        if kernels := fused_kernels(x):
            return kernels.modulated_norm(x, scale, shift, self.eps, place)
        normed = F.layer_norm(x, (self.dim,), eps=self.eps)
        normed = normed.unflatten(1, (scale.shape[1], -1))  # [B, F, S, dim]
        modulated = torch.addcmul(shift[:, :, None], normed, 1 + scale[:, :, None])
        return _stored(modulated.flatten(1, 2).to(x.dtype), place)


class GatedAdd(nn.Module):
    """x + gate * y, with a gate per frame, float32 [B, F or 1, dim]."""

    def forward(self, x: Tensor, y: Tensor, gate: Tensor, place: Tensor | None = None) -> Tensor:
        """[B, L, dim]; in a place that is given."""
        if kernels := fused_kernels(x):
            return kernels.gated_add(x, y, gate, place)
        x_frames, y_frames = (z.unflatten(1, (gate.shape[1], -1)) for z in (x, y))  # [B, F, S, dim]
        added = torch.addcmul(x_frames, y_frames, gate[:, :, None])
        return _stored(added.flatten(1, 2).to(x.dtype), place)


def multiply(linear: nn.Linear, x: Tensor, place: Tensor) -> Tensor:
    """linear(x) of tokens [B, L, ...] in a place [B, L, ...] whose tokens are rows, bit for bit."""
    rows = place.view(-1, linear.out_features)
    torch.addmm(linear.bias, x.reshape(-1, linear.in_features), linear.weight.t(), out=rows)
    return place


def _stored(x: Tensor, place: Tensor | None) -> Tensor:
    return x if place is None else place.copy_(x)


class FeedForward(nn.Sequential):
    """Linear, GELU (tanh), Linear."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        if not fused_kernels(x) or x.dtype == torch.float32:  # its tanh is not good enough for float32
            return super().forward(x)
        widen, _, narrow = cast(Iterator[nn.Linear], iter(self))
        hidden = gelu_linear(x.flatten(0, 1), widen.weight, widen.bias)
        return narrow(hidden).view(x.shape)


class _Attention(nn.Module):
    """Projections and query/key norms that self- and cross-attention share."""

    def __init__(self, config: ModelConfig, site: Site):
        super().__init__()
        dim = config.dim
        self.site, self.num_heads = site, config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = QueryKeyNorm(config), QueryKeyNorm(config)

    def values(self, x: Tensor, place: Tensor | None = None) -> Tensor:
        """[B, L, dim] -> [B, L, H, D]; in a place [1, L, H, D] that is given."""
        if place is None:
            return self.v(x).unflatten(-1, (self.num_heads, -1))
        return multiply(self.v, x, place)


class SelfAttention(_Attention):
    """Attention of a block's tokens to each other and, through the KV cache, to the past."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, Site(layer, "self"))

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        kv_cache: KVCache | PerHeadCache | None = None,
        mask: Tensor | MaskedAttention | None = None,
        layout: KeyLayout | None = None,
    ) -> Tensor:
        """x [B, L, dim]. layout says what the keys are where there is no cache to say it."""
        in_place = fused_kernels(x) and not torch.is_grad_enabled()
        places = self.places(kv_cache, x.shape) if in_place else None
        own = self.project(x, rope, kv_cache is not None and kv_cache.stores_raw, places)
        return self.merge(self.attend(own, kv_cache, mask, layout))

    def places(
        self, kv_cache: KVCache | PerHeadCache | None, shape: torch.Size
    ) -> tuple[Tensor, Tensor] | None:
        """Where keys and values of tokens [B, L, dim] can be computed in the cache, if they can."""
        return kv_cache.places(self.site.layer, shape) if isinstance(kv_cache, KVCache) else None

    # What stands before and after attention knows nothing of the past, nor of who is looking:
    # wan/parallel.py exchanges tokens for heads in between, wan/cuda_graphs.py replays both.

    def project(
        self, x: Tensor, rope: Rope, with_raw: bool, places: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values [B, L, H, D] of the tokens, and with_raw their keys without RoPE."""
        of_k, of_v = places or (None, None)
        q = self.norm_q(self.q(x), rope.queries)  # a norm finds its product in the GPU's cache
        projected = self.k(x)
        k = self.norm_k(projected, rope.keys, of_k)
        raw_k = (self.norm_k(projected),) if with_raw else ()
        return q, k, self.values(x, of_v), *raw_k

    def attend(
        self,
        own: Sequence[Tensor],
        kv_cache: KVCache | PerHeadCache | None = None,
        mask: Tensor | MaskedAttention | None = None,
        layout: KeyLayout | None = None,
    ) -> Tensor:
        """What heads see with what project() gave, [B, L, H, D]."""
        q, k, v = own[:3]
        if kv_cache is not None:
            raw_k = own[3] if len(own) > 3 else None
            if isinstance(kv_cache, PerHeadCache):
                return attention_by_heads(kv_cache.write(self.site.layer, q, k, v, raw_k), self.site)
            k, v = kv_cache.write(self.site.layer, q, k, v, raw_k)  # [B, Lk, H, D]
            layout = kv_cache.layouts[self.site.layer]
        return attention(q, k, v, self.site, mask, layout)

    def merge(self, seen: Tensor, place: Tensor | None = None) -> Tensor:
        """What all heads saw, [B, L, H, D] -> [B, L, dim]; in a place that is given."""
        return self.o(seen.flatten(2)) if place is None else multiply(self.o, seen, place)


class CrossAttention(_Attention):
    """Attention of video tokens to the text, whose keys and values are computed once per prompt."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, Site(layer, "cross"))

    def keys_values(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Embedded text [B, n, dim] -> keys and values [B, n, H, D]."""
        return self.norm_k(self.k(text)), self.values(text)

    def forward(self, x: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
        return self.o(attention(self.norm_q(self.q(x)), *text, self.site).flatten(2))


class Block(nn.Module):
    """One transformer layer: modulated self-attention, cross-attention to the text, modulated FFN."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        dim, eps = config.dim, config.eps
        self.norm1, self.norm2 = ModulatedNorm(dim, eps), ModulatedNorm(dim, eps)
        self.norm3 = nn.LayerNorm(dim, eps)
        self.self_attn = SelfAttention(config, layer)
        self.cross_attn = CrossAttention(config, layer)
        self.ffn = FeedForward(dim, config.ffn_dim)
        self.gate1, self.gate2 = GatedAdd(), GatedAdd()
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        rope: Rope,
        text: tuple[Tensor, Tensor],
        kv_cache: KVCache | PerHeadCache | None = None,
        mask: Tensor | MaskedAttention | None = None,
        layout: KeyLayout | None = None,
    ) -> Tensor:
        """x [B, L, dim], time the time projection per frame, float32 [B, F or 1, 6, dim].

        text are its keys and values, [B, n, H, D] each.
        """
        attend, feed = self.modulations(time)
        seen = self.self_attn(self.norm1(x, attend.scale, attend.shift), rope, kv_cache, mask, layout)
        return self.finish(x, seen, attend, feed, text)

    def modulations(self, time: Tensor, place: Tensor | None = None) -> tuple[Modulation, Modulation]:
        """Those of self-attention and of the FFN; in a place like time that is given."""
        return modulations_in(torch.add(self.modulation, time, out=place))  # float32 as time is

    def finish(
        self, x: Tensor, seen: Tensor, attend: Modulation, feed: Modulation, text: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The layer's output from its input and what self-attention gave, [B, L, dim] each."""
        x, fed = self.feed(x, seen, attend, feed, text)
        return self.gate2(x, fed, feed.gate)

    def feed(
        self, x: Tensor, seen: Tensor, attend: Modulation, feed: Modulation, text: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """finish() but for its last sum: what is added to, and what the FFN gave, [B, L, dim] each."""
        if kernels := fused_kernels(x):  # a sum and the norm behind it at once
            norm = self.norm3
            x, normed = kernels.add_norm(x, seen, attend.gate, norm.weight, norm.bias, norm.eps, affine=True)
            x, normed = kernels.add_norm(
                x, self.cross_attn(normed, text), None, feed.scale, feed.shift, self.norm2.eps
            )
            return x, self.ffn(normed)
        x = self.gate1(x, seen, attend.gate)
        x = x + self.cross_attn(self.norm3(x), text)
        return x, self.ffn(self.norm2(x, feed.scale, feed.shift))


class Head(nn.Module):
    """Modulated projection of every token to its patch of the flow, channels last."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        patch_h, patch_w = config.patch_size[1:]
        self.norm = ModulatedNorm(config.dim, config.eps)
        self.head = nn.Linear(config.dim, config.out_dim * patch_h * patch_w)
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x [B, L, dim], time embedding per frame, float32 [B, F or 1, dim] -> [B, L, patch · channels]."""
        shift, scale = (self.modulation + time[:, :, None]).unbind(2)  # float32 as time is
        return self.head(self.norm(x, scale, shift))

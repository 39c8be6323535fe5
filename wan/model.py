"""The Wan2.1 text-to-video transformer (https://github.com/Wan-Video/Wan2.1): latents and text to flow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from wan import cache, sites
from wan.attention import MaskedAttention, attention, attention_by_heads
from wan.config import ModelConfig
from wan.errors import ConfigError
from wan.kernels import fused_kernels
from wan.keys import HeadShard, KeyLayout, RotaryTable, rotate

Cache = cache.AnyCache | None
Mask = Tensor | MaskedAttention | None
TextKeysValues = list[tuple[Tensor, Tensor]]  # per layer, [B, text_len, H, D] each

# The parts of a layer. Parameter names are those of the released checkpoints.


class Rope(NamedTuple):
    """Tables of RoPE for a call's queries and for its own keys, cos and sin [L, 1, D]; mostly the same."""

    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What all layers of a forward take alike; x and the text's keys and values are of each layer alone.

    Without a KV cache the keys are the call's own: layout says what they are, and mask what may be attended.
    """

    time: Tensor  # time projection per frame, float32 [B, F or 1, 6, dim]
    rope: Rope
    kv_cache: Cache = None
    mask: Mask = None
    layout: KeyLayout | None = None


class Modulation(NamedTuple):
    """Shift and scale of a sublayer's input, gate of its output: per frame, float32 [B, F or 1, dim]."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


def sinusoidal_embedding(timestep: Tensor, freq_dim: int) -> Tensor:
    """Return concat(cos, sin) of t·10000^(−i/(freq_dim/2)), in float64: [...] -> [..., freq_dim]."""
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
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """[B, L, dim] -> [B, L, H, D]; written into out where it is given."""
        # One kernel reads x once; PyTorch would write the norm and read it again to rotate it.
        kernels = fused_kernels(x)
        if kernels:
            return kernels.norm_rotate(x, self.weight, rope, num_heads=self.num_heads, eps=self.eps, out=out)
        x = F.rms_norm(x, x.shape[-1:], self.weight, self.eps).unflatten(-1, (self.num_heads, -1))
        if rope is not None:
            x = rotate(x, *rope)
        return written(x, out)


def written(x: Tensor, out: Tensor | None) -> Tensor:
    """Return x, written into out where it is given."""
    if out is None:
        return x
    return out.copy_(x)


def modulated_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute LayerNorm(x) * (1 + scale) + shift, [B, L, dim]; written into out where it is given.

    scale and shift are given per frame, float32 [B, F or 1, dim].
    """
    kernels = fused_kernels(x, scale, shift)
    if kernels:
        return kernels.modulated_norm(x, scale, shift, eps=eps, out=out)
    # All tokens of a frame share one row of scale and shift: [B, F, 1, dim] against [B, F, S, dim].
    normed = F.layer_norm(x, x.shape[-1:], eps=eps).unflatten(1, (scale.shape[1], -1))
    modulated = torch.addcmul(shift[:, :, None], normed, 1 + scale[:, :, None]).flatten(1, 2).to(x.dtype)
    return written(modulated, out)


def gated_add(x: Tensor, y: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x + gate * y, [B, L, dim], with a gate per frame, float32 [B, F or 1, dim].

    It is written into out where that is given.
    """
    kernels = fused_kernels(x, y, gate)
    if kernels:
        return kernels.gated_add(x, y, gate, out)
    x_frames, y_frames = (z.unflatten(1, (gate.shape[1], -1)) for z in (x, y))  # [B, F, S, dim]
    added = torch.addcmul(x_frames, y_frames, gate[:, :, None]).flatten(1, 2).to(x.dtype)
    return written(added, out)


def multiply(linear: nn.Linear, x: Tensor, out: Tensor) -> Tensor:
    """Write linear(x) of tokens [B, L, ...] into out [B, L, ...] whose tokens are rows: the same bits."""
    rows = out.view(-1, linear.out_features)
    torch.addmm(linear.bias, x.reshape(-1, linear.in_features), linear.weight.t(), out=rows)
    return out


class FeedForward(nn.Sequential):
    """Linear, GELU (tanh), Linear."""

    def __init__(self, dim: int, ffn_dim: int, layer: int = 0):
        super().__init__(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        widen, gelu, narrow = cast(Iterator[nn.Linear], iter(self))
        # cuBLAS applies GELU in the product's epilogue; only who watches mlp_pre needs what is before it.
        by_kernel = fused_kernels(x) and x.dtype != torch.float32  # its tanh is not good enough for float32
        if by_kernel and not sites.wanted("mlp_pre", self.layer):
            hidden = self.widened(x)
        else:
            wide = widen(x)
            watched = sites.hook_point("mlp_pre", self.layer, wide)
            if by_kernel and not sites.is_changed(watched, wide):
                hidden = self.widened(x)
            else:
                hidden = gelu(watched)
        return narrow(sites.hook_point("mlp_post", self.layer, hidden))

    def widened(self, x: Tensor) -> Tensor:
        """GELU of the first product by one kernel."""
        widen = cast(nn.Linear, self[0])
        rows = x.flatten(0, 1)
        hidden = torch._addmm_activation(widen.bias, rows, widen.weight.t(), use_gelu=True)
        return hidden.unflatten(0, x.shape[:2])


class _Attention(nn.Module):
    """Projections and query/key norms that self- and cross-attention share."""

    kind: Literal["self", "cross"]  # what its queries attend to

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        dim = config.dim
        self.site, self.num_heads = sites.Site(layer, self.kind), config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = QueryKeyNorm(config), QueryKeyNorm(config)

    def values(self, x: Tensor) -> Tensor:
        """[B, L, dim] -> [B, L, H, D]."""
        return self.v(x).unflatten(-1, (self.num_heads, -1))


class SelfAttention(_Attention):
    """Attention of a block's tokens to each other and, through the KV cache, to the past."""

    kind = "self"

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """[B, L, dim] -> [B, L, dim]."""
        with_raw = inputs.kv_cache is not None and inputs.kv_cache.stores_raw
        projected = self.project(x, inputs.rope, with_raw)
        return self.merge(self.attend(projected, inputs))

    # project() and merge() know nothing of the past, nor of who is looking: wan/wings/parallel.py exchanges
    # tokens for heads in between, wan/wings/graphs.py replays both.

    def project(self, x: Tensor, rope: Rope, with_raw: bool) -> tuple[Tensor, ...]:
        """Return queries, keys and values [B, L, H, D] of tokens, and with_raw their keys without RoPE."""
        q, _ = self.turned("q", self.q(x), rope.queries, False)  # a norm finds its product in the GPU's cache
        k, raw_k = self.turned("k", self.k(x), rope.keys, with_raw)
        return q, k, sites.hook_point("v", self.site.layer, self.values(x)), *raw_k

    def turned(
        self, name: str, projected: Tensor, rope: tuple[Tensor, Tensor], with_raw: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return queries or keys [B, L, H, D] of a product [B, L, dim], and with_raw those without RoPE."""
        norm, layer = getattr(self, f"norm_{name}"), self.site.layer
        # 1. Norm and RoPE in one kernel: all that a plain rollout needs.
        rotated = norm(projected, rope)
        if not with_raw and not sites.wanted(name, layer):
            return sites.hook_point(f"{name}_rot", layer, rotated), ()
        # 2. The same without RoPE, for policies that move keys and for watchers, who may change it.
        plain = norm(projected)
        raw = sites.hook_point(name, layer, plain)
        # 3. Rotate again only what was changed: another kernel would give other bits.
        if sites.is_changed(raw, plain):
            rotated = rotate(raw, *rope)
        rotated = sites.hook_point(f"{name}_rot", layer, rotated)
        if with_raw:
            return rotated, (raw,)
        return rotated, ()

    def attend(self, projected: Sequence[Tensor], inputs: LayerInputs) -> Tensor:
        """Return what heads see with what project() gave, [B, L, H, D]."""
        q, k, v, *raw_k = projected  # [B, L, H, D]
        kv_cache, layout = inputs.kv_cache, inputs.layout
        if kv_cache is not None:
            # The cache takes this block's keys and gives back those of the past with them.
            seen = kv_cache.write(self.site.layer, q, k, v, *raw_k)
            if isinstance(seen, list):  # heads that see keys of their own
                return attention_by_heads(seen, self.site, len(q))
            k, v = seen  # [B, Lk, H, D]
            layout = kv_cache.layouts[self.site.layer]
        return attention(q, k, v, site=self.site, mask=inputs.mask, layout=layout)

    def merge(self, seen: Tensor, out: Tensor | None = None) -> Tensor:
        """Project what all heads saw, [B, L, H, D] -> [B, L, dim]; written into out where it is given."""
        if out is None:
            return self.o(seen.flatten(2))
        return multiply(self.o, seen, out)


class CrossAttention(_Attention):
    """Attention of video tokens to the text, whose keys and values are computed once per prompt."""

    kind = "cross"

    def forward(self, x: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            sites.hook_point(f"cross_{name}", self.site.layer, part)
            for name, part in zip("qkv", (self.norm_q(self.q(x)), *text), strict=True)
        )
        return self.o(attention(q, k, v, self.site).flatten(2))


def random_rows(rows: int, dim: int) -> nn.Parameter:
    """Draw a modulation [1, rows, dim]. On meta nothing is drawn: that imports torch._dynamo, for seconds."""
    x = torch.empty(1, rows, dim)
    if not x.is_meta:
        x.normal_().div_(dim**0.5)
    return nn.Parameter(x)


class Block(nn.Module):
    """One transformer layer: modulated self-attention, cross-attention to the text, modulated FFN."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        dim, eps = config.dim, config.eps
        self.layer, self.eps = layer, eps
        self.norm3 = nn.LayerNorm(dim, eps)  # norm1 and norm2 have no weights: modulated_norm()
        self.self_attn = SelfAttention(config, layer)
        self.cross_attn = CrossAttention(config, layer)
        self.ffn = FeedForward(dim, config.ffn_dim, layer)
        self.modulation = random_rows(6, dim)

    def forward(self, x: Tensor, text: tuple[Tensor, Tensor], inputs: LayerInputs) -> Tensor:
        """[B, L, dim] -> [B, L, dim]; text are the prompt's keys and values, [B, n, H, D] each."""
        # 1. Shift, scale and gate of both sublayers (AdaLN-zero of DiT, arXiv 2212.09748).
        x = sites.hook_point("resid_pre", self.layer, x)
        attend, feed = self.modulations(inputs.time)
        if sites.watchers() and sites.is_shown("mod_shift", "mod_scale", "mod_gate"):
            # Watchers see self-attention's and the FFN's rows as one tensor [B, F or 1, 2, dim].
            rows = [
                sites.hook_point(f"mod_{name}", self.layer, torch.stack(pair, 2)).unbind(2)
                for name, *pair in zip(Modulation._fields, attend, feed, strict=True)
            ]
            attend, feed = (Modulation(*parts) for parts in zip(*rows, strict=True))
        # 2. Self-attention over the KV cache, cross-attention to the text, FFN; each adds to the stream.
        normed = modulated_norm(x, attend.scale, attend.shift, self.eps)
        seen = self.self_attn(normed, inputs)
        x, fed = self.feed(x, seen, attend, feed, text)
        return sites.hook_point("resid_post", self.layer, gated_add(x, fed, feed.gate))

    def modulations(self, time: Tensor) -> tuple[Modulation, Modulation]:
        """Return the modulations of self-attention and of the FFN, each [B, F or 1, dim]."""
        rows = (self.modulation + time).unbind(2)  # float32 as time is
        return Modulation(*rows[:3]), Modulation(*rows[3:])

    def feed(
        self, x: Tensor, seen: Tensor, attend: Modulation, feed: Modulation, text: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the FFN's output before the last gated add, [B, L, dim] each."""
        seen = sites.hook_point("attn_out", self.layer, seen)
        x, normed = self.add_norm("resid_mid", x, seen, gate=attend.gate)
        crossed = sites.hook_point("cross_out", self.layer, self.cross_attn(normed, text))
        x, normed = self.add_norm("resid_cross", x, crossed, feed=feed)
        return x, sites.hook_point("mlp_out", self.layer, self.ffn(normed))

    def add_norm(
        self, site: str, x: Tensor, y: Tensor, gate: Tensor | None = None, feed: Modulation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x + gate * y (None: x + y), and its norm: norm3's, or with feed that of the FFN's input."""
        # A kernel adds and norms in one pass over memory; a watcher's replacement is normed once more.
        kernels = fused_kernels(x, y, gate, *(feed or ()))
        if kernels:
            norm = self.norm3
            how: tuple = (norm.weight, norm.bias, norm.eps, True)
            if feed is not None:
                how = (feed.scale, feed.shift, self.eps)
            added, normed = kernels.add_norm(x, y, gate, *how)
            total = sites.hook_point(site, self.layer, added)
            if total is added:
                return total, normed
            if not total.requires_grad:
                return total, kernels.add_norm(total, torch.zeros_like(total), None, *how)[1]
        elif gate is None:
            total = sites.hook_point(site, self.layer, x + y)
        else:
            total = sites.hook_point(site, self.layer, gated_add(x, y, gate))
        if feed is None:
            return total, self.norm3(total)
        return total, modulated_norm(total, feed.scale, feed.shift, self.eps)


class Head(nn.Module):
    """Modulated projection of every token to its patch of the flow, channels last."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        patch_h, patch_w = config.patch_size[1:]
        self.eps = config.eps
        self.head = nn.Linear(config.dim, config.out_dim * patch_h * patch_w)
        self.modulation = random_rows(2, config.dim)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x [B, L, dim], time embedding per frame, float32 [B, F or 1, dim] -> [B, L, patch · channels]."""
        shift, scale = (self.modulation + time[:, :, None]).unbind(2)  # float32 as time is
        return self.head(modulated_norm(x, scale, shift, self.eps))


def by_video(module: nn.Module, x: Tensor, videos: int) -> Tensor:
    """Return module(x) of a batch, each of these videos on its own."""
    return torch.cat([module(video) for video in x.chunk(videos)])


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
        self.head_shard: HeadShard | None = None  # where other heads are elsewhere (wan/wings/parallel.py)

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        """Flow of latents x [B, C, F, h, w] at timestep t [B], context [B, n, text_dim] from umT5."""
        text = self.text_keys_values(context)
        return self.flow(x, t.expand(x.shape[0])[:, None], text, frames=range(x.shape[2]))

    def text_keys_values(self, context: Tensor) -> TextKeysValues:
        """Return cross-attention keys and values of every layer, from prompt embeddings [B, n, text_dim].

        Rows of zeros fill the text up to text_len before the embedding; their embeddings are attended, as in
        training.
        """
        config = self.config
        if context.shape[1] > config.text_len:  # padding would cut them
            raise ConfigError(
                f"prompt embeddings of {context.shape[1]} tokens, the model reads {config.text_len}"
            )
        # The rows of zeros are embedded and attended too, so they are no mask: [B, text_len, text_dim].
        padded = F.pad(context, (0, 0, 0, config.text_len - context.shape[1]))
        text = self.text_embedding(padded.to(self.text_embedding[0].weight.dtype))  # [B, text_len, dim]
        keys_values = []
        for block in self.blocks:  # each computes within its turn: wan/wings/offload.py streams its weights
            attn = block.cross_attn
            keys_values.append((attn.norm_k(attn.k(text)), attn.values(text)))  # [B, text_len, H, D] each
        return keys_values

    def flow(
        self,
        x: Tensor,
        t: Tensor,
        text: TextKeysValues,
        frames: Sequence[int],
        kv_cache: Cache = None,
        mask: Mask = None,
    ) -> Tensor:
        """The transformer: x [B, C, F, h, w], t [B, F or 1], indices of the F frames -> flow like x."""
        # What torch would compute with all the same: keys of other videos, patches without the last rows.
        texts = len(text[0][0])
        if texts != len(x):
            raise ConfigError(
                f"prompt embeddings of batch {texts} for latents of batch {len(x)}; give each video its own"
            )
        self.config.tokens_per_frame(*x.shape[3:])

        # 1. Latents to tokens, frame by frame and row by row.
        dtype = self.patch_embedding.weight.dtype
        # Videos of a batch are alone in convolutions and in products of one row, which sum several in another
        # order than one: a video would not be what it is alone. Rows of larger products have the same bits.
        videos = 1
        if kv_cache is not None:
            videos = len(x)
        x = by_video(self.patch_embedding, x.to(dtype), videos)  # [B, dim, F, h, w]
        grid_h, grid_w = x.shape[3:]
        rope = self.rope_tables(frames, grid_h, grid_w, kv_cache)
        x = rearrange(x, "b dim f h w -> b (f h w) dim").contiguous()  # [B, L, dim]
        # 2. The noise level of each frame.
        waves = sinusoidal_embedding(t, self.config.freq_dim).to(dtype)
        time = by_video(self.time_embedding, waves, videos)  # [B, F or 1, dim]
        rows = by_video(self.time_projection, time, videos)
        rows = rearrange(rows, "b f (six dim) -> b f six dim", six=6).float()  # [B, F or 1, 6, dim]
        # 3. The layers. Without a cache the keys are the frames' own.
        layout = None
        if kv_cache is None:
            layout = KeyLayout.of_frames(frames, x.shape[1])
        inputs = LayerInputs(time=rows, rope=rope, kv_cache=kv_cache, mask=mask, layout=layout)
        x = self.run_layers(x, text, inputs)
        # 4. Tokens to flow.
        return self.flow_of(x, time, grid_h, grid_w)

    def run_layers(self, x: Tensor, text: TextKeysValues, inputs: LayerInputs) -> Tensor:
        """Run all layers one after the other, [B, L, dim] -> [B, L, dim]."""
        # A layer that took its text by its own number would be compiled anew for each layer.
        for block, block_text in zip(self.blocks, text, strict=True):
            x = block(x, block_text, inputs)
        return x

    def flow_of(self, x: Tensor, time: Tensor, height: int, width: int) -> Tensor:
        """Flow [B, C, F, h, w] that a residual stream [B, L, dim] stands for, of height x width tokens.

        time is the time embedding [B, F or 1, dim].
        """
        _, ph, pw = self.config.patch_size
        x = self.head(x, time.float())  # [B, L, ph·pw·channels]
        pattern = "b (f h w) (ph pw c) -> b c f (h ph) (w pw)"
        return rearrange(x, pattern, h=height, w=width, ph=ph, pw=pw)

    def rope_tables(self, frames: Sequence[int], height: int, width: int, kv_cache: Cache) -> Rope:
        """Return tables for the positions that a cache gives to queries and keys, else for the frames'."""
        # Policies such as Infinity-RoPE place queries and keys elsewhere than their frames.
        of_keys = of_queries = frames
        if kv_cache is not None:
            of_keys, of_queries = kv_cache.key_positions, kv_cache.query_positions
        keys = self.rotary(of_keys, height, width, self.device)
        if tuple(of_queries) == tuple(of_keys):
            return Rope(keys, keys)
        return Rope(self.rotary(of_queries, height, width, self.device), keys)

    def init_weights(self) -> None:
        """Initialise for training: Xavier for products, normal for embeddings, zero for the head."""
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


class CausalWanModel(WanModel):
    """Block-causal Wan of Self-Forcing: the same parameters, one block of frames at a time, a KV cache.

    local_attn_size (-1: the whole past) and sink_size, in frames, shape the KV cache of its rollouts.
    """

    def __init__(self, *, local_attn_size: int = -1, sink_size: int = 0, **sizes):
        super().__init__(**sizes)
        self.local_attn_size, self.sink_size = local_attn_size, sink_size

    def _replicate_for_data_parallel(self):
        raise ConfigError(
            "nn.DataParallel cannot divide a rollout's cache: make one rollout on N GPUs by --gpus N, "
            "several by --workers N"
        )

    def forward(  # type: ignore[override]  # it shares parameters with WanModel, not its call
        self,
        x: Tensor,
        t: Tensor,
        text: TextKeysValues,
        kv_cache: Cache = None,
        frames: Sequence[int] | None = None,
        mask: Mask = None,
    ) -> Tensor:
        """Flow of x [B, F, C, h, w] at timesteps t ([], [B] or [B, F]), text from text_keys_values().

        With a KV cache, x is the block it was last advanced to. Without one, frames gives the absolute
        indices of the F frames (default 0..F-1) and mask [L, L] what may be attended: a training step.
        """
        if kv_cache is not None and torch.compiler.is_compiling():
            raise ConfigError(
                "torch.compile cannot follow a rollout's cache: compile modules, such as "
                "model.blocks[5].ffn.compile(); a GPU's layers are replayed from CUDA graphs anyway"
            )
        if frames is None:
            frames = range(x.shape[1])
            if kv_cache is not None:
                frames = kv_cache.newest
        if t.ndim < 2:
            t = t.expand(x.shape[0])[:, None]  # [B, F or 1]
        x = sites.hook_point("x_t", None, x)  # [B, F, C, h, w]; convolutions want [B, C, F, h, w]
        flow = self.flow(x.transpose(1, 2), t, text, frames=frames, kv_cache=kv_cache, mask=mask)
        return sites.hook_point("flow", None, flow.transpose(1, 2))

    def new_kv_cache(
        self,
        batch: int,
        num_frames: int,
        height: int,
        width: int,
        policy: cache.CachePolicy,
        block_size: int = 3,
    ) -> cache.AnyCache:
        """Return an empty cache for num_frames latent frames of height x width in blocks of block_size."""
        config, device, shard = self.config, self.device, self.head_shard
        _, patch_h, patch_w = config.patch_size
        rotary = RotaryTable(config.head_dim)  # of its own: each remembers one table
        num_heads = config.num_heads
        if shard:
            num_heads = len(shard.heads)

        sizes = cache.CacheSizes(
            num_heads=[num_heads] * config.num_layers,
            head_dim=config.head_dim,
            tokens_per_frame=config.tokens_per_frame(height, width),
            num_frames=num_frames,
            batch=batch,
            block_size=block_size,
            rope=lambda positions: rotary(positions, height // patch_h, width // patch_w, device),
            dtype=self.dtype,
            device=device,
            head_shard=shard,
        )
        return policy.cache_type(sizes, policy)

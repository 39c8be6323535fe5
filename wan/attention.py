"""The one place that computes softmax(q kᵀ / √D) v, with hooks for edits and captures.

Plain and captured runs make the same fused call, which returns its log-sum-exp (LSE) anyway, so capturing
changes no bit of the video.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from wan import backends, keys, masks, sites
from wan.errors import ConfigError
from wan.kernels import fused_kernels

# Of q, k, v [B, H, L, D], under a mask of its own.
MaskedAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(eq=False)
class Call:
    """An attention call in progress: edits change q, k, v and bias before the softmax."""

    site: sites.Site
    at: sites.Pass | None  # None where nobody announced the forward
    q: Tensor  # [B, Lq, H, D]
    k: Tensor  # [B, Lk, H, D]
    v: Tensor
    layout: keys.KeyLayout | None = None  # None for cross-attention
    bias: keys.KeyBias | None = None
    of_heads: tuple[int, ...] | None = None  # the heads that q has, where a call is of some of those here
    layer_heads: int = 0  # and how many of the layer are here then
    lse: Tensor | None = None  # log-sum-exp of its logits [B, H, Lq], once the softmax is done
    tails: Tensor | None = None  # what the attention kernel knows of the mass of slots
    moved: Tensor | None = None  # by how many frames edits moved its keys, [H, slots]
    drift: Tensor | None = None  # what edits added to RoPE's frequencies in time, float64 [H, pairs]
    mask: Tensor | None = None  # of the model, to [B, H, Lq, Lk]: True for what is seen, or added to logits
    runs: tuple[masks.Runs, ...] | None = None  # in its place, of each item: which keys its queries see
    around: tuple[int, int] = (0, 0)  # keys of text, images or histories before and behind those of frames
    around_q: tuple[int, int] = (0, 0)  # and queries
    beside: tuple[tuple[str, int], ...] = ()  # what keys before and behind those of frames are, how many
    check: sites.FrameCheck | None = None  # of somebody's model: how sure it is where its frames lie
    text: int | None = None  # the key of the text's first token; cross-attention has no other keys

    def __post_init__(self) -> None:
        if self.site.kind == "cross":
            self.text = 0

    @property
    def key_layout(self) -> keys.KeyLayout:
        """The layout of keys of frames, which those of the text do not have."""
        assert self.layout is not None, "keys of the text lie in no slots"
        return self.layout

    @property
    def shard(self) -> keys.HeadShard:
        """The heads of this process."""
        return self.site.shard or keys.HeadShard.whole(self.layer_heads or self.q.shape[2])

    @property
    def numbers(self) -> list[int]:
        """The numbers of its heads in the model."""
        here: Sequence[int] = range(self.q.shape[2])
        if self.of_heads is not None:
            here = self.of_heads
        return [self.shard.heads.start + head for head in here]

    def of_item(self, item: int) -> "Call":
        """Return the call of one item of the batch, with the keys that this item has."""
        q, k, v = (x[item : item + 1] for x in (self.q, self.k, self.v))
        lse, tails = self.lse, self.tails
        if lse is not None:
            lse = lse[item : item + 1]
        if tails is not None:
            tails = tails[:, item : item + 1]
        return replace(self, q=q, k=k, v=v, layout=self.key_layout.of_item(item), lse=lse, tails=tails)

    def parts(self) -> Iterator["Call"]:
        """Yield the call of each block of a forward over blocks at several noise levels."""
        assert self.at is not None
        tokens, start = self.q.shape[1] // len(self.at.query_frames), 0
        for part in self.at.parts:
            stop = start + tokens * len(part.query_frames)
            rows, start, lse = slice(start, stop), stop, self.lse
            if lse is not None:
                lse = lse[..., rows].contiguous()
            at = replace(part, levels=self.at.levels)
            yield replace(self, at=at, q=self.q[:, rows].contiguous(), lse=lse)


# --- What modules call
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: sites.Site | None = None,
    mask: Tensor | MaskedAttention | None = None,
    layout: keys.KeyLayout | None = None,
) -> Tensor:
    """Multi-head attention of queries [B, Lq, H, D] over keys and values [B, Lk, H, D] -> [B, Lq, H, D].

    mask [Lq, Lk] (True: may attend), or attention that knows its mask, is for training, which nobody watches.
    site says who calls and layout what the keys are, for edits and captures.
    """
    is_seen = site is not None and (sites.watchers() or sites.observer())
    if not all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k, v)):
        raise ConfigError("attention takes tensors q, k, v [B, L, H, D]")
    if mask is not None:
        if is_seen:
            raise ConfigError("a training step with a mask takes no edits and no captures")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, L, D]
        if isinstance(mask, Tensor):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = mask(q, k, v)
        return out.transpose(1, 2)
    if site is None or not is_seen:
        return attention_with_lse(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)
    # Somebody looks: the call goes by as a value, which edits replace before the softmax.
    call = Call(site=site, at=sites.current_pass(), q=q, k=k, v=v, layout=layout)
    out = _attend_watched(call)
    by = sites.observer()
    if by:
        by.observe(call)
    return sites.hook_point(site_name(site, "z"), site.layer, out, site.shard)


def attention_by_heads(groups: Sequence[keys.HeadGroup], site: sites.Site, batch: int = 1) -> Tensor:
    """attention() of heads that see keys of their own: groups of h heads each -> [B, Lq, H, D].

    Where q of the groups has one item for a larger batch, their heads list all items' heads in turn.
    A group goes through attention at once. Captures get a call for each of its layouts; under captures
    or edits each of these calls has a softmax of its own.
    """
    # 1. Where nobody edits, one fused call per group.
    items, len_q, _, head_dim = groups[0].q.shape
    num_heads = sum(len(group.numbers) for group in groups)
    out, calls = groups[0].q.new_empty(items, len_q, num_heads, head_dim), []
    is_watched, by = bool(sites.watchers()), sites.observer()
    for numbers, heads, q, k, v, parts in groups:
        if not is_watched:
            whole, lse = attention_with_lse(*(x.transpose(1, 2) for x in (q, k, v)))
            if isinstance(heads, slice):
                out = whole.transpose(1, 2)
            else:
                out.index_copy_(2, heads, whole.transpose(1, 2))
        # 2. A call for each layout of the group's heads, to those who look.
        if not is_watched and not by:
            continue
        for rows, layout in parts():
            of_heads = tuple(numbers[row] for row in rows)
            q_part, k_part, v_part = q, k, v
            if len(rows) < len(numbers):
                q_part, k_part, v_part = (keys.select(x, rows, 2) for x in (q, k, v))
            call = Call(
                site=site,
                at=sites.current_pass(),
                q=q_part,
                k=k_part,
                v=v_part,
                layout=layout,
                of_heads=of_heads,
                layer_heads=num_heads,
            )
            if is_watched:  # before the next: a source stops in each call
                out[:, :, keys.as_index(of_heads, q.device)] = _attend_watched(call)
            else:
                call.lse = keys.select(lse, rows, 1)
            calls.append(call)
    # 3. Captures see all heads of the layer at once.
    if by:
        by.observe_groups(calls)
    if items != batch:
        out = out[0].unflatten(1, (batch, -1)).transpose(0, 1)
    return sites.hook_point(site_name(site, "z"), site.layer, out, site.shard)


def site_name(site: sites.Site, name: str) -> str:
    """Return the name of a site of one of a layer's two attentions."""
    if site.kind == "self":
        return name
    return f"cross_{name}"


def _attend_watched(call: Call) -> Tensor:
    """Compute a call's output [B, Lq, H, D], showing the call to watchers before and after."""
    # 1. Edits change q, k, v and the bias.
    layer, shard, of_heads = call.site.layer, call.site.shard, call.of_heads
    sites.hook_point(call.site.kind, layer, call, shard, of_heads)
    q, k, v = readable(*(x.transpose(1, 2) for x in (call.q, call.k, call.v)))  # as edits left them
    call.q, call.k, call.v = (x.transpose(1, 2) for x in (q, k, v))  # captures have kernels, too
    # 2. The softmax. FlashAttention-4 gives the mass of key frames beside it, where that is captured.
    slots, by = 0, sites.observer()
    if call.of_heads is None and by and backends.gives_tails(q, k, v):
        slots = by.slots_weighed(call.site, call.layout)
    if call.bias is not None:
        out, call.lse = attend_by_groups(q, k, v, call.bias, call)
    elif 0 < slots * backends.TILE <= k.shape[2]:
        out, call.lse, call.tails = backends.fa4_attention(q, k, v, slots)
    else:
        out, call.lse = _fused(q, k, v)
    out = out.transpose(1, 2)
    # 3. Only who watches scores or pattern pays for the matrix [B, H, Lq, Lk].
    names = site_name(call.site, "scores"), site_name(call.site, "pattern")
    if not any(sites.wanted(name, layer) for name in names):
        return out
    bias = None
    if call.bias is not None:
        bias = keys.send(call.bias.per_token(), q.device)[:, None]
    plain = logits_of(q, k, bias)
    scores = sites.hook_point(names[0], layer, plain, shard, of_heads)
    softmax = scores.softmax(-1)
    pattern = sites.hook_point(names[1], layer, softmax, shard, of_heads)
    if not sites.is_changed(scores, plain) and not sites.is_changed(pattern, softmax):
        return out  # the fused kernel's bits
    mixed = (pattern.to(v.dtype) @ v).transpose(1, 2)
    if torch.equal(scores, plain) and torch.equal(pattern, softmax):
        return out.detach() + (mixed - mixed.detach())  # its bits again, with gradients of the matrix
    return mixed


# --- Plain, masked, and by groups of keys
def readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [B, H, L, D] of equal batch and heads that kernels can read; copies only where needed.

    The kernels are called directly, without the checks of F.scaled_dot_product_attention: they trust strides
    and would read other memory or crash. ConfigError for sizes that no attention has.
    """
    # 1. One batch, number of heads and dtype: kernels count with those of q.
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        dtypes = ", ".join(str(x.dtype) for x in (q, k, v))
        raise ConfigError(f"attention takes q, k, v of one floating dtype, not {dtypes}")
    if not q.shape[:2] == k.shape[:2] == v.shape[:2] or k.shape[2] != v.shape[2] or q.shape[3] != k.shape[3]:
        try:
            sizes = torch.broadcast_shapes(q.shape[:2], k.shape[:2], v.shape[:2])
        except RuntimeError:
            sizes = None
        if sizes is None or k.shape[2] != v.shape[2] or q.shape[3] != k.shape[3]:
            shapes = ", ".join(str([*x.transpose(1, 2).shape]) for x in (q, k, v))
            raise ConfigError(f"attention of q, k, v [B, L, H, D] does not fit: {shapes}")
        q, k, v = (x.expand(*sizes, -1, -1) for x in (q, k, v))
    # 2. Rows of D numbers in a piece; on a GPU they begin at multiples of 16 bytes and share no memory.
    if not backends.can_read(q):
        q = q.clone(memory_format=torch.contiguous_format)
    if not backends.can_read(k):
        k = k.clone(memory_format=torch.contiguous_format)
    if not backends.can_read(v):
        v = v.clone(memory_format=torch.contiguous_format)
    return q, k, v


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Fused attention over [B, H, L, D] and its natural log-sum-exp of q·k/√D, float32 [B, H, Lq].

    The backend follows from device, dtype and sizes (wan/backends.py): never from whether anybody is looking.
    """
    return _fused(*readable(q, k, v))


def _fused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """attention_with_lse of what is readable()."""
    aten = torch.ops.aten
    # Kernels divide by these sizes
    if not q.numel() or not k.numel() or q.shape[3] != v.shape[3]:
        return _by_formula(q, k, v)
    if q.device.type == "cpu":  # bit for bit what F.scaled_dot_product_attention returns there
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    if q.device.type == "cuda" and q.dtype != torch.float64 and backends.kernels_can_read(q):
        if backends.takes(q, k, v):
            return backends.fa4_attention(q, k, v)[:2]
        if q.dtype in backends.HALF:
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
            return out, lse.reshape(q.shape[:3])
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        return out, lse[..., : q.shape[2]]  # its rows are padded to 32
    return _by_formula(q, k, v)


def _by_formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """attention_with_lse without a kernel; 0 where there is no key."""
    logits = logits_of(q, k)
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None]).exp().to(v.dtype) @ v, lse


def attend_by_groups(
    q: Tensor, k: Tensor, v: Tensor, bias: keys.KeyBias, call: Call | None = None
) -> tuple[Tensor, Tensor]:
    """attention_with_lse of q [B, H, Lq, D] over k, v [B, H, Lk, D] under a bias.

    Groups of keys are merged by their LSE, without a mask kernel. ConfigError, which says of which call it
    is, where a head would see no key.
    """
    if bias.blind_heads:
        head, place = bias.blind_heads[0], ""
        if call is not None:
            head, place = call.numbers[head], f"layer {call.site.layer}: "
            if call.at is not None:
                place = f"layer {call.site.layer}, block {call.at.block}, step {call.at.step}: "
        remedy = "leave it a frame or a token"
        if call is not None and call.layout is not None and call.layout.own:
            remedy += ", such as its own (own) where there is no past, or choose blocks="
        raise ConfigError(f"{place}head {head} would see no key at all; {remedy}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        # Kernels' LSE has no gradient
        logits = logits_of(q, k, keys.send(bias.per_token(), q.device)[:, None])
        return logits.softmax(-1).to(v.dtype) @ v, logits.logsumexp(-1)
    parts = []
    for tokens, added in bias.runs():
        out, lse = attention_with_lse(q, k[:, :, tokens], v[:, :, tokens])
        if any(added):
            lse = lse + keys.send(torch.tensor(added), lse.device)[:, None]
        parts.append((out, lse))
    if len(parts) == 1:
        return parts[0]
    # As FlashAttention joins blocks of keys (arXiv 2205.14135): a part weighs e^(its lse - lse of all).
    kernels = fused_kernels(q)
    if kernels and q.dtype != torch.float64:  # PyTorch would write what is merged four times, in float32
        return kernels.merge_parts([out for out, _ in parts], [lse for _, lse in parts])
    lse = torch.stack([part for _, part in parts]).logsumexp(0)  # [B, H, Lq]
    merged = torch.zeros_like(parts[0][0], dtype=torch.promote_types(q.dtype, torch.float32))
    for out, part in parts:
        merged.addcmul_(out, (part - lse).exp()[..., None])
    return merged.to(q.dtype), lse


def logits_of(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """q·k/√D of [B, H, L, D], plus a bias: float32 [B, H, Lq, Lk], of float64 that."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) @ k.to(wide).mT) * max(q.shape[-1], 1) ** -0.5
    if bias is None:
        return logits
    return logits + bias

"""Attention calls of diffusers' transformers: who calls, edits, what captures see, and their own softmax.

    with calling(Site(0, "self"), module):       # what wan/diffusers_capture.py does around a module
        module(...)                              # calls dispatch(), in dispatch_attention_fn's place

Calls give sites q, k, v and z; modules give attn_out, cross_out, mlp_out and resid_post (wan/sites.py). q and
k are those of the call, after RoPE, so sites q and q_rot are the same. The output is diffusers' own, bit for
bit.
"""

import inspect
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan import attention, diffusers_frames, keys, masks, sites
from wan.errors import ConfigError
from wan.kernels import mass_kernels


# --- Who calls, and in which forward: of the context (contextvars), so that threads do not meet
@dataclass(eq=False)
class Forward:
    """A forward of a transformer: its passes with their items of the batch, and the place of the frames."""

    parts: tuple[tuple[sites.Pass, slice], ...]
    video: diffusers_frames.VideoTokens
    layout: keys.KeyLayout
    family: diffusers_frames.Family
    check: sites.FrameCheck
    text: list[int] = field(default_factory=list)  # by item: tokens behind the frames before the prompt's
    compared: list["Comparison"] = field(default_factory=list)  # read when it ends
    projected: list["Projection"] = field(default_factory=list)


class Comparison(NamedTuple):
    """Norms of a call's queries beside those that the module's norm returned, [B, rows, H, 4] each."""

    site: sites.Site
    module: nn.Module
    normed: Tensor
    sent: Tensor
    dtype: torch.dtype  # of the queries


class Projection(NamedTuple):
    """Whether what a module projects is [in order, in order or changed otherwise], bool on its device.

    That it is in order says nothing of what comes after.
    """

    site: sites.Site
    module: nn.Module
    answer: Tensor


@dataclass(eq=False)
class Caller:
    """The running attention module, and whether its next call is for image tokens."""

    site: sites.Site | None  # None for blocks that run before the layers
    module: nn.Module
    num_heads: int = 1
    is_wanted: bool = False  # by a capture, an edit or another watcher
    has_image_keys: bool = False
    has_called: bool = False
    normed_rows: int = 0  # queries that its norm returned; which of them are compared, and their norms
    sample: tuple[Sequence[int], Tensor | None] = ((), None)
    norms: Tensor | None = None  # [B, rows, H, 4]
    given: object = None  # hidden states [B, L, C]


class Reached(BaseException):
    """Ends a forward that is an experiment, where the queries of its first call are known."""

    def __init__(self, queries: Tensor, num_keys: int):
        super().__init__("an experiment has ended")
        self.queries, self.num_keys = queries, num_keys


FORWARD: ContextVar[Forward | None] = ContextVar("diffusers_forward", default=None)
CALLER: ContextVar[Caller | None] = ContextVar("diffusers_caller", default=None)
# The processes that share the tokens of the forward's model (wan/wings/ulysses.py); None: it is on one GPU
PARALLEL: ContextVar[Any] = ContextVar("diffusers_parallel", default=None)
IS_EXPERIMENT: ContextVar[bool] = ContextVar("diffusers_experiment", default=False)


@contextmanager
def calling(
    site: sites.Site | None, module: nn.Module, num_heads: int, given: Any = None
) -> Iterator[Caller]:
    """Say that an attention module, given hidden states, calls while the context lasts."""
    is_wanted = _is_wanted_now(FORWARD.get(), site)
    before, caller = CALLER.get(), Caller(site, module, num_heads, is_wanted=is_wanted, given=given)
    CALLER.set(caller)
    try:
        yield caller
    finally:
        CALLER.set(before)


def is_looked_at() -> bool:
    """Return whether a forward runs that somebody captures or edits."""
    return FORWARD.get() is not None and bool(sites.watchers() or sites.observer() is not None)


# The sites that watchers see of an attention call, by its kind
SHOWN: dict[str, tuple[str, ...]] = {
    "self": ("q", "k", "q_rot", "k_rot", "v", "z"),
    "cross": ("cross_q", "cross_k", "cross_v", "cross_z"),
}


def _is_wanted_now(forward: Forward | None, site: sites.Site | None) -> bool:
    """Return whether calls of a site's module are captured in a pass of a forward, or shown to a watcher."""
    if forward is None or site is None:
        return False
    if sites.is_shown(site.kind, *SHOWN[site.kind]):
        return True
    by = sites.observer()
    if by is None:
        return False
    captured = [site]
    if site.kind == "cross":  # the module makes the calls of image tokens, too
        captured.append(replace(site, kind="cross_image"))
    for at, _ in forward.parts:
        with sites.during(at):
            if any(by.wants(each) for each in captured):
                return True
    return False


def expect_image_call() -> None:
    """Note that the keys of image tokens are made: processors make them right before their call."""
    caller = CALLER.get()
    if caller is not None:
        caller.has_image_keys = True


def note_norms(normed: Any) -> None:
    """Note the norms of queries [B, L, H·D], [B, L, H, D] or [B, H, L, D] that a module's norm returned."""
    caller = CALLER.get()
    if caller is None or not caller.is_wanted or not isinstance(normed, Tensor):
        return
    if normed.ndim == 3:
        normed = normed.unflatten(-1, (caller.num_heads, -1))
    elif normed.shape[1] == caller.num_heads != normed.shape[2]:
        normed = normed.transpose(1, 2)
    caller.normed_rows = normed.shape[1]
    caller.sample = range(normed.shape[1]), None
    if PARALLEL.get() is None:
        caller.sample = diffusers_frames.sampled_rows(normed.shape[1], normed.device)
        _, index = caller.sample
        if index is not None:
            normed = normed.index_select(1, index)
    caller.norms = diffusers_frames.norms_of(normed.detach())


SAMPLED = 8  # channels that are compared


def note_projected(x: Any) -> None:
    """Compare the hidden states that a module projects to queries with those that it was given.

    Rows of others, as of text, may have been put behind them. Most processors hand on the same tensor.
    """
    caller, forward = CALLER.get(), FORWARD.get()
    if caller is None or caller.given is x or not caller.is_wanted:
        return
    assert forward is not None and caller.site is not None
    given = caller.given
    if not isinstance(given, Tensor) or given.device != x.device or given.ndim != 3 or x.ndim != 3:
        return
    if x.shape[0] != given.shape[0] or x.shape[1] < given.shape[1] or x.shape[2] != given.shape[2]:
        return
    sent = x[:, : given.shape[1], :SAMPLED].detach().float()
    given = given[..., :SAMPLED].detach().float()
    is_equal = torch.isclose(given, sent, rtol=1e-2, atol=1e-4).all()
    is_sum_equal = torch.isclose(given.sum(1), sent.sum(1), rtol=1e-2, atol=1e-2).all()
    # Other rows of the same sum are a permutation; anything else is not known.
    answer = torch.stack([is_equal, is_equal | ~is_sum_equal])
    forward.projected.append(Projection(caller.site, caller.module, answer))


# --- What modules return
def show_output(name: str, layer: int, out: Any) -> Any:
    """Show what a module returns for the video's tokens, its output or the first of several -> the output."""
    forward = FORWARD.get()
    if forward is None or not sites.watchers():
        return out
    x = out
    if isinstance(out, tuple):
        x = out[0]
    new = show(forward, name, layer, x, _around(forward.video, x.shape[1]))
    if isinstance(out, tuple):
        return new, *out[1:]
    return new


def _around(video: diffusers_frames.VideoTokens, length: int) -> tuple[int, int]:
    """Return the numbers of tokens before and after those of a forward's frames."""
    before = video.before
    if length < before + video.total:
        before = 0
    return before, length - before - video.total


def show(
    forward: Forward,
    name: str,
    layer: int,
    x: Tensor,
    around: tuple[int, int] = (0, 0),
    shard: keys.HeadShard | None = None,
) -> Tensor:
    """Show x [B, L, ...] to watchers, pass by pass and without tokens that belong to no frame -> x.

    shard says which heads x has, where others are in other processes.
    """
    pieces, is_changed = [], False
    start, stop = around[0], x.shape[1] - around[1]
    for at, items in forward.parts:
        piece = x[items]
        seen = piece[:, start:stop]
        with sites.during(at):
            new = sites.hook_point(name, layer, seen, shard)
        if new is not seen:
            is_changed = True
            piece = torch.cat([piece[:, :start], new, piece[:, stop:]], 1)
        pieces.append(piece)
    if not is_changed:
        return x
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces)


# --- The attention call itself
signature_of = lru_cache(maxsize=64)(inspect.signature)  # every call and forward asks for one


def dispatch(original: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Replace dispatch_attention_fn, so that captures and edits see the call."""
    caller, forward = CALLER.get(), FORWARD.get()
    if caller is None:
        return original(*args, **kwargs)
    caller.has_called = True
    is_reached = IS_EXPERIMENT.get() and (caller.site is None or caller.site.kind == "self")
    if not is_reached and not caller.is_wanted:
        return original(*args, **kwargs)
    bound = signature_of(original).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments, parallel, site = bound.arguments, PARALLEL.get(), caller.site
    if parallel is None and arguments["parallel_config"] is not None:
        raise ConfigError(
            "attention shares tokens with other GPUs, which its model does not say: it cannot be seen"
        )
    if site is not None and caller.has_image_keys:
        site, caller.has_image_keys = replace(site, kind="cross_image"), False
    # 1. On one GPU.
    if parallel is None and is_reached:
        raise Reached(arguments["query"], arguments["key"].shape[1])
    if parallel is None:
        assert forward is not None and site is not None
        return _attend(forward, caller, site, original, arguments)
    # 2. Of several GPUs each has some tokens of all heads: here it has all tokens of some heads.
    length, shard = arguments["query"].shape[1], parallel.shard(arguments["query"].shape[2])
    arguments = shard.whole_call(arguments)
    if is_reached:
        raise Reached(arguments["query"], arguments["key"].shape[1])
    assert forward is not None and site is not None
    out = _attend(forward, caller, replace(site, shard=shard), original, arguments)
    return shard.with_all_heads(out, length)


def tokens_around(
    forward: Forward, is_self: bool, len_q: int, len_k: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the numbers of tokens before and behind those of frames, in queries and in keys."""
    video = forward.video
    if not is_self:
        return _around(video, len_q), (0, 0)
    # What lies behind the frames does so in the queries, too.
    behind = len_k - video.before - len(forward.layout.slots) * video.tokens
    return (len_q - behind - video.total, behind), (video.before, behind)


def _attend(
    forward: Forward, caller: Caller, site: sites.Site, original: Any, arguments: dict[str, Any]
) -> Tensor:
    """Compute a call's output [B, Lq, H, D] with edits, and show it to captures."""
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    # 1. Which tokens of this call are of no frame, and whether queries are in order.
    is_self = site.kind == "self"
    is_edited = bool(sites.watchers()) and site.kind != "cross_image"
    video, len_q, len_k = forward.video, q.shape[1], k.shape[1]
    around_q, around = tokens_around(forward, is_self, len_q, len_k)
    if min(*around, *around_q) < 0 or (video.past is None and is_self and len_q != len_k):
        raise ConfigError(
            f"layer {site.layer}: {len_q} queries and {len_k} keys are not {video.frames} "
            f"frames of {video.tokens} tokens: give layout=(frames, tokens of each)"
        )
    layout = None
    if is_self:
        layout = forward.layout
    compare_queries(forward, caller, site, q, around_q)
    # 2. Edits change q, k, v, and add a bias to the logits of keys.
    calls = [
        attention.Call(
            site=site,
            at=at,
            q=q[items],
            k=k[items],
            v=v[items],
            layout=layout,
            around=around,
            around_q=around_q,
            check=forward.check,
            beside=_beside(forward, around),
            text=_text_of(forward, is_self, len_k - around[1], items),
        )
        for at, items in forward.parts
    ]
    is_changed = False
    if is_edited:
        q = show(forward, attention.site_name(site, "q"), site.layer, q, around_q, site.shard)
        k = show(forward, attention.site_name(site, "k"), site.layer, k, around, site.shard)
        v = show(forward, attention.site_name(site, "v"), site.layer, v, around, site.shard)
        if is_self:
            q = show(forward, "q_rot", site.layer, q, around_q, site.shard)
            k = show(forward, "k_rot", site.layer, k, around, site.shard)
        for call, (at, items) in zip(calls, forward.parts, strict=True):
            is_changed |= _edit(call, at, [x[items] for x in (q, k, v)])
        if is_changed:
            q, k, v = (torch.cat([getattr(call, name) for call in calls]) for name in "qkv")
    # 3. The softmax: diffusers' own, unless a bias was added.
    by, mask, runs = sites.observer(), None, None
    is_biased = any(call.bias is not None for call in calls)
    is_kept = by is not None and any(_is_wanted(by, call) for call in calls)
    if is_kept and not is_biased and is_self:
        runs = _runs_of(by, calls, arguments, q, k, any(around))
    if runs is None:
        mask = mask_of(arguments, q, k)
    if is_biased:
        outputs = []
        for call, (_, items) in zip(calls, forward.parts, strict=True):
            outputs.append(_attend_biased(call, arguments, _of_items(mask, items, len(q))))
        out, lse = torch.cat(outputs), None
    else:
        arguments = arguments | {"query": q, "key": k, "value": v}
        needs_lse = is_kept and mask is None and runs is None and not any(around)
        out, lse = _attend_as_they_do(original, arguments, needs_lse)
    # 4. Captures get what the softmax saw; a scale other than 1/√D goes into their q.
    if by is not None:
        for call, (at, items) in zip(calls, forward.parts, strict=True):
            call.mask = _of_items(mask, items, len(q))
            if runs is not None:
                call.runs = runs[items]
            call.q = _as_scaled(q[items], arguments["scale"])
            call.k = _of_all_heads(k[items], q)
            call.v = v[items]
            if lse is not None:
                call.lse = lse[items]
            with sites.during(at):
                by.observe(call)
    if not is_edited:
        return out
    return show(forward, attention.site_name(site, "z"), site.layer, out, around_q, site.shard)


def _runs_of(
    by: Any,
    calls: Sequence[attention.Call],
    arguments: Mapping[str, Any],
    q: Tensor,
    k: Tensor,
    has_others: bool,
) -> tuple[masks.Runs, ...] | None:
    """Return which keys queries see where that is a few intervals, and kernels can use it; else None."""
    mask = arguments["attn_mask"]
    has_usual_scale = arguments["scale"] in (None, q.shape[-1] ** -0.5)
    if (mask is None and not has_others) or arguments["is_causal"] or not has_usual_scale:
        return None
    if mass_kernels(q) is None or not all(_asks_frames_alone(by, call) for call in calls):
        return None
    if isinstance(mask, Tensor):
        require_mask(mask)
    return masks.runs_of_mask(mask, len(q), q.shape[1], k.shape[1])


def _asks_frames_alone(by: Any, call: attention.Call) -> bool:
    assert call.at is not None
    with sites.during(call.at):
        return by.wants_frames_alone(call.site)


def _text_of(forward: Forward, is_self: bool, behind: int, items: slice) -> int | None:
    """Return the key of the prompt's first token in a call of some items; None where it is not known."""
    starts = set(forward.text[items])
    if not is_self or len(starts) != 1:
        return None
    return behind + starts.pop()


def _beside(forward: Forward, around: tuple[int, int]) -> tuple[tuple[str, int], ...]:
    """Name the keys before and behind those of frames, and say how many they are."""
    named = [(name, count) for name, count in forward.video.names if around[0] and count]
    if around[1]:
        named.append((forward.family.behind, around[1]))
    return tuple(named)


def compare_queries(
    forward: Forward, caller: Caller, site: sites.Site, q: Tensor, around: tuple[int, int]
) -> None:
    """Note the norms of the video's queries in q [B, Lq, H, D] beside those that the module's norm returned.

    around are the numbers of others before and behind them: those of a history may have a RoPE that shortens
    them. Both are read when the forward ends (read_comparisons).
    """
    norms = caller.norms
    if norms is None:
        return
    num_rows, (rows, index) = caller.normed_rows, caller.sample
    if site.shard is not None:  # all tokens of some heads, where this process has some tokens of all heads
        norms = PARALLEL.get().whole_norms(norms)
        num_rows = norms.shape[1]
        rows = range(num_rows)
    start, stop = around[0], q.shape[1] - around[1]  # text or padding may have been put behind them
    shift = 0
    if num_rows < stop:  # the others were put in front of what the norm returned, as text in Flux
        shift = start
    if num_rows + shift < stop:
        raise _permuted(site, caller.module)
    sampled = slice(bisect_left(rows, start - shift), bisect_left(rows, stop - shift))
    if sampled.start == sampled.stop:  # no row of the video: nothing is known
        return
    seen = q[:, start:stop]
    if index is not None:
        seen = q.index_select(1, index[sampled] + shift)
    normed, sent = norms[:, sampled], diffusers_frames.norms_of(seen.detach())
    if normed.shape != sent.shape:
        raise _permuted(site, caller.module)
    comparison = Comparison(replace(site, shard=None), caller.module, normed, sent, q.dtype)
    forward.compared.append(comparison)


def read_comparisons(forward: Forward) -> None:
    """Note which calls have their queries in order. ConfigError where tokens were permuted."""
    # 1. Calls of one shape and device are compared at once, so that a GPU answers once.
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Comparison]] = {}
    for comparison in forward.compared:
        kind = comparison.sent.shape, comparison.dtype, comparison.sent.device
        alike.setdefault(kind, []).append(comparison)
    compared: list[Comparison | Projection] = list(forward.projected)
    answers: list[list[bool]] = [projection.answer.tolist() for projection in forward.projected]
    for (_, dtype, _), calls in alike.items():
        normed, sent = (torch.stack([getattr(call, name) for call in calls]) for name in ("normed", "sent"))
        compared += calls
        answers += diffusers_frames.compare_norms(normed, sent, dtype).tolist()
    forward.compared, forward.projected = [], []
    # 2. What each of them says. Image tokens may have queries of their own, which another norm made.
    in_order = forward.check.in_order
    for item, (is_in_order, is_changed) in zip(compared, answers, strict=True):
        if not is_in_order and not is_changed and item.site.kind != "cross_image":
            raise _permuted(item.site, item.module)
        if isinstance(item, Comparison) or not is_in_order:
            in_order[item.site] = is_in_order and in_order.get(item.site, True)


def _permuted(site: sites.Site, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"layer {site.layer}: {type(module.processor).__name__} permutes the tokens before it calls "
        "attention, so frames cannot be told: take the model's own processor"
    )


def _is_wanted(by: Any, call: attention.Call) -> bool:
    assert call.at is not None
    with sites.during(call.at):
        return by.wants(call.site)


def _edit(call: attention.Call, at: sites.Pass, parts: Sequence[Tensor]) -> bool:
    """Show watchers a call, of the tokens of frames, and put their q, k, v into it -> whether any changed."""
    beside = (call.around_q, call.around, call.around)
    seen = [x[:, before : x.shape[1] - behind] for x, (before, behind) in zip(parts, beside, strict=True)]
    call.q, call.k, call.v = seen
    with sites.during(at):
        sites.hook_point(call.site.kind, call.site.layer, call, call.site.shard)
    edited, is_changed = (call.q, call.k, call.v), False
    for name, whole, old, new, (before, behind) in zip("qkv", parts, seen, edited, beside, strict=True):
        if new is not old:
            is_changed = True
            whole = torch.cat([whole[:, :before], new, whole[:, whole.shape[1] - behind :]], 1)
        setattr(call, name, whole)
    return is_changed


def _attend_biased(call: attention.Call, arguments: Mapping[str, Any], mask: Tensor | None) -> Tensor:
    """Compute the output [B, Lq, H, D] of a call under a bias of its keys."""
    assert call.bias is not None
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    k, v = (_of_all_heads(x, q, 1) for x in (k, v))
    has_usual_scale = arguments["scale"] in (None, q.shape[-1] ** -0.5)
    if mask is None and not any(call.around) and has_usual_scale:
        # As our own models do: exact, and without a mask kernel
        out, call.lse = attention.attend_by_groups(q, k, v, call.bias, call)
        return out.transpose(1, 2)
    bias = keys.send(F.pad(call.bias.per_token(), call.around), q.device)[:, None].to(q.dtype)  # [H, 1, Lk]
    if mask is not None and mask.dtype == torch.bool:
        bias = bias.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        bias = bias + mask.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=arguments["scale"])
    return out.transpose(1, 2)


# --- Masks, scales and shared heads
def mask_of(arguments: Mapping[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
    """Return a call's mask as [B or 1, H or 1, Lq or 1, Lk], boolean or added to logits; None for none."""
    mask = arguments["attn_mask"]
    if arguments["is_causal"]:
        return torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()[None, None]
    if mask is None:
        return None
    if type(mask).__name__ == "BlockMask":  # of flex_attention, which computes it where it is needed
        sizes = (*mask.shape[:2], q.shape[1], k.shape[1])
        return sys.modules[type(mask).__module__].create_mask(mask.mask_mod, *sizes, device=str(q.device))
    require_mask(mask)
    if mask.ndim == 2 and mask.shape == (len(q), k.shape[1]):  # of keys, as diffusers reads it
        return mask[:, None, None]
    return mask.view(*[1] * (4 - mask.ndim), *mask.shape)


def require_mask(mask: Any) -> None:
    """Raise ConfigError for a mask that is neither boolean nor added to the logits."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = getattr(mask, "dtype", type(mask).__name__)
        raise ConfigError(f"a mask of attention is boolean or added to logits; one of {kind} cannot be seen")


def _of_items(mask: Tensor | None, items: slice, batch: int) -> Tensor | None:
    if mask is None or len(mask) != batch:
        return mask
    return mask[items]


def _as_scaled(q: Tensor, scale: float | None) -> Tensor:
    default = q.shape[-1] ** -0.5
    if scale is None or scale == default:
        return q
    return q.float() * (scale / default)


def _of_all_heads(x: Tensor, q: Tensor, dim: int = 2) -> Tensor:
    """Repeat heads of k or v where queries share them."""
    if x.shape[dim] == q.shape[dim]:
        return x
    return x.repeat_interleave(q.shape[dim] // x.shape[dim], dim)


# --- Their softmax, with its log-sum-exp where that costs nothing
_proven: dict[
    tuple, bool
] = {}  # by kernel, shapes and dtype: whether it gives the bits of diffusers' own call


def _attend_as_they_do(
    original: Any, arguments: dict[str, Any], needs_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return diffusers' own output, bit for bit, and on a GPU the log-sum-exp [B, H, Lq] if needed.

    The backend's own kernel returns it, and is used once its output equals diffusers' for these shapes. For
    other backends we make a second attention call.
    """
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    has_usual_scale = arguments["scale"] in (None, q.shape[-1] ** -0.5)
    if not needs_lse or not q.is_cuda or q.shape[2] != k.shape[2] or not has_usual_scale:
        return original(**arguments), None  # on the CPU values do not need it
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return original(**arguments), attention.attention_with_lse(
            *(x.detach().transpose(1, 2) for x in (q, k, v))
        )[1]
    kernel = kernel_of(arguments)
    key = (kernel, q.shape, k.shape, q.dtype, q.stride(), k.stride(), v.stride())
    if kernel is None or _proven.get(key) is False:
        return original(**arguments), attention.attention_with_lse(*(x.transpose(1, 2) for x in (q, k, v)))[1]
    out, lse = _run(kernel, q, k, v)
    if key not in _proven:
        theirs = original(**arguments)
        _proven[key] = torch.equal(theirs, out)
        return theirs, lse
    return out, lse


def kernel_of(arguments: Mapping[str, Any]) -> str | None:
    """Name the kernel of PyTorch that a call's backend runs; None for backends that are not PyTorch's."""
    if arguments["dropout_p"] or arguments["attention_kwargs"] or arguments["query"].shape[-1] % 8:
        return None
    backend = arguments["backend"]
    if backend is None:  # diffusers is imported: its model calls this
        dispatch = sys.modules["diffusers.models.attention_dispatch"]
        backend, _ = dispatch._AttentionBackendRegistry.get_active_backend()
    name = str(getattr(backend, "value", backend))
    if name == "native":
        q, k, v = (arguments[x].transpose(1, 2) for x in ("query", "key", "value"))
        kinds: Any = torch.nn.attention.SDPBackend
        kernels = {
            int(kinds.FLASH_ATTENTION): "flash",
            int(kinds.EFFICIENT_ATTENTION): "efficient",
            int(kinds.CUDNN_ATTENTION): "cudnn",
        }
        return kernels.get(torch._fused_sdp_choice(q, k, v))
    of_backends = {
        "_native_flash": "flash",
        "_native_efficient": "efficient",
        "_native_cudnn": "cudnn_packed",
    }
    return of_backends.get(name)


def _run(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Run a fused kernel as PyTorch's scaled_dot_product_attention does -> [B, Lq, H, D], lse [B, H, Lq]."""
    aten = torch.ops.aten
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if kernel == "cudnn_packed":  # diffusers' cuDNN backend packs them first
        q, k, v = (x.contiguous() for x in (q, k, v))
    if kernel == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v)
    elif kernel == "efficient":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    else:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return out.transpose(1, 2), lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]]

"""One attention call under edit: what each intervention does to its q, k, v, biases and output.

q [B, Lq, H, D] and z, like it; k, v [B, Lk, H, D], which are views of the KV cache and are never written to.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from wan.modules.captured_call import Pass, Site
from wan.modules.edit_fields import Frames, InterventionError
from wan.modules.grouped_attention import KeyBias
from wan.modules.head_shard import HeadShard
from wan.modules.host_copies import picked, places, send
from wan.modules.interventions import Ablate, Bias, Edit, Jitter, Knockout, Move, Patch, Selection
from wan.modules.key_layout import EMPTY, MIXED, KeyLayout
from wan.modules.rope import ROPE_THETA, RotaryTable, rotate

EVERY = slice(None)  # token


@dataclass(eq=False)
class EditedCall:
    """An attention call on its way: edits change q, k, v and bias before it, and z, by after, behind it."""

    site: Site
    at: Pass
    layout: KeyLayout | None  # None for cross-attention
    q: Tensor
    k: Tensor
    v: Tensor
    bias: KeyBias | None = None
    after: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    has_other_keys: bool = False  # than those of the cache
    of_heads: tuple[int, ...] | None = None  # the heads that q has, where a call is of some of those here
    layer_heads: int = 0  # and how many of the layer are here then

    def finish(self, z: Tensor) -> Tensor:
        """The output of the call, from what attention gave."""
        for change in self.after:
            z = change(z)
        return z

    @property
    def shard(self) -> HeadShard:
        """The heads that the call has: those of this process."""
        return self.site.shard or HeadShard.whole(self.layer_heads or self.q.shape[2])

    def heads(self, edit: Selection) -> list[int]:
        """The heads of an edit, by their indices in the call; none where the call is of others."""
        if self.of_heads is not None:
            here = range(len(self.of_heads))
            return [n for n in here if edit.heads is None or self.number(n) in edit.heads]
        return list(range(self.q.shape[2])) if edit.heads is None else self.shard.local(list(edit.heads))

    def heads_in_model(self, edit: Selection) -> list[int]:
        """The same heads by their numbers in the model."""
        return [self.number(head) for head in self.heads(edit)]

    def number(self, head: int) -> int:
        """The number in the model of a head of the call."""
        return self.shard.heads.start + (head if self.of_heads is None else self.of_heads[head])

    @property
    def is_changed(self) -> bool:
        """Whether its softmax sees other keys, or other logits, than those of q and the cache's k."""
        return self.bias is not None or self.has_other_keys

    @property
    def known(self) -> KeyLayout:
        """The layout of the keys of self-attention; ValueError where the caller brought none."""
        if self.layout is None:
            raise ValueError(
                f"layer {self.site.layer}: self-attention was called without the layout of its keys"
            )
        return self.layout

    def slots(self, frames: Frames) -> list[int]:
        """Slots of the keys that frames name: of earlier blocks, unless they are own."""
        own, sink, found = set(self.known.own), set(self.known.sink), []
        for index, slot in enumerate(self.known.slots):
            where = index in own, index in sink
            if any(_names(name, frame, *where) for name in frames for frame in slot.by_item):
                found.append(index)
                if set(frames) - {"past", "sink"}:
                    self.check_items([index])
        return found

    def check_items(self, slots: Iterable[int]) -> None:
        """InterventionError where one of the slots holds another frame for each batch item."""
        for index in slots:
            if len(set(self.known.slots[index].by_item)) > 1:
                raise InterventionError(
                    f"slot {index} holds another frame for each batch item: edit them one by one"
                )

    def tokens(self, slots: Sequence[int]) -> slice | Tensor:
        """The tokens of slots among the keys, as an index."""
        S, some = self.known.tokens_per_slot, places(slots, self.k.device)
        if isinstance(some, slice):
            return slice(some.start * S, some.stop * S)
        return (some[:, None] * S + torch.arange(S, device=self.k.device)).flatten()

    def replace_keys(self, name: str, tokens: slice | Tensor, heads: Sequence[int], values: Tensor) -> None:
        """Let q, k or v have other values [B, tokens, heads, D] in this call; the cache stays as it is."""
        x, columns = getattr(self, name).clone(), places(heads, self.q.device)
        rows = tokens if isinstance(tokens, slice) or isinstance(columns, slice) else tokens[:, None]
        x[:, rows, columns] = values.to(x.dtype)
        setattr(self, name, x)
        self.has_other_keys |= name == "k"


class Means(Protocol):
    """Mean outputs of heads (wan/modules/head_outputs.py)."""

    def of(self, site: Site, at: Pass) -> Tensor:
        """[B or 1, query frames, H, D]."""
        ...


class InStep(Protocol):
    """Another run that is where this one is (wan/modules/run_in_step.py)."""

    def call(self, site: Site, at: Pass, of_heads: tuple[int, ...] | None = None) -> "SourceCall": ...


@dataclass(frozen=True, eq=False)
class SourceCall:
    """The same call of another run; its tensors last until the next one is asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    layout: KeyLayout | None = None


def edit_call(edit: Edit, call: EditedCall, data: Any = None) -> bool:
    """Apply an edit to a call that it selects -> whether the call has anything for it to change.

    data: Means of an ablation to means, an InStep of an edit with a source.
    """
    if not call.shard.is_whole and isinstance(edit, (Ablate, Patch)) and hasattr(data, "call"):
        _source(call, data)  # a source is run by all processes together, also by those it changes nothing in
    if call.of_heads is not None and not call.heads(edit):
        return _changes_another(edit, call)
    if isinstance(edit, (Knockout, Bias)):
        return _bias(edit, call)
    if isinstance(edit, Ablate):
        return _ablate(edit, call, data)
    if isinstance(edit, Patch):
        return _patch(edit, call, data)
    return _move(edit, call) if isinstance(edit, Move) else _jitter(edit, call)


def _changes_another(edit: Edit, call: EditedCall) -> bool:
    """Whether an edit is of heads in other processes too."""
    heads = range(call.shard.total) if edit.heads is None else edit.heads
    return any(head not in call.shard.heads for head in heads)


def _names(name: int | str, frame: int, is_own: bool, is_sink: bool) -> bool:
    if isinstance(name, str) and name.startswith("own"):
        return is_own and name in ("own", f"own:{frame}")
    named = {"past": frame != EMPTY, "sink": is_sink, "first": frame == 0}
    return not is_own and (named[name] if isinstance(name, str) else frame == name)


def _bias(edit: Knockout | Bias, call: EditedCall) -> bool:
    slots = list(edit.tokens or ()) if edit.frames is None else call.slots(edit.frames)
    if not slots:
        return False
    heads = torch.tensor(call.heads(edit), dtype=torch.long)
    if not len(heads):
        return True  # all of them are in other processes
    if call.bias is None:
        size = call.k.shape[1] if edit.frames is None else len(call.known.slots)
        call.bias = KeyBias(torch.zeros(call.q.shape[2], size), call.k.shape[1] // size)
    rows, columns = heads[:, None], torch.tensor(slots)
    call.bias.values[rows, columns] += edit.b if isinstance(edit, Bias) else -torch.inf
    if blind := call.bias.blind_heads:
        raise InterventionError(
            f"layer {call.site.layer}, block {call.at.block}: head {call.number(blind[0])} "
            "would lose all its keys"
        )
    return True


def _ablate(edit: Ablate, call: EditedCall, data: Any) -> bool:
    heads = call.heads(edit)

    def replace(z: Tensor) -> Tensor:
        if edit.how == "resample":
            return _with_heads(z, heads, picked(_source(call, data).z, heads, 2))
        if edit.how == "zero":
            return _with_heads(z, heads, z.new_zeros(()))
        means = data.of(call.site, call.at)[:, :, call.heads_in_model(edit)]  # [B or 1, Fq, heads, D]
        means = send(means.to(z.dtype), z.device)
        return _with_heads(z, heads, means.repeat_interleave(z.shape[1] // means.shape[1], 1))

    call.after.append(replace)
    return True


def _with_heads(z: Tensor, heads: Sequence[int], values: Tensor) -> Tensor:
    z = z.clone()
    z[:, :, places(heads, z.device)] = values
    return z


def _patch(edit: Patch, call: EditedCall, data: Any) -> bool:
    heads = call.heads(edit)
    if edit.what == "z":
        call.after.append(lambda z: _with_heads(z, heads, picked(_source(call, data).z, heads, 2)))
        return True
    slots = call.slots(edit.frames or ("past",)) if edit.what == "kv" else []
    if edit.what == "kv" and not slots:
        return False
    source = _source(call, data)
    if edit.what == "qk":
        call.replace_keys("q", EVERY, heads, picked(source.q, heads, 2))
        call.replace_keys("k", EVERY, heads, picked(source.k, heads, 2))
        return True
    _check_same_keys(call, source.layout or call.known, slots)
    tokens = call.tokens(slots)
    for name in ("k", "v"):
        call.replace_keys(name, tokens, heads, picked(getattr(source, name)[:, tokens], heads, 2))
    return True


def _source(call: EditedCall, data: Any) -> SourceCall:
    """The same call of another run; InterventionError where its shapes are others."""
    source: SourceCall = data.call(call.site, call.at, call.of_heads)
    theirs, mine = (tuple(x.shape for x in (each.q, each.k)) for each in (source, call))
    if theirs != mine:
        raise InterventionError(f"the source's call is of another shape: {theirs}, not {mine}")
    return source


def _check_same_keys(call: EditedCall, theirs: KeyLayout, slots: Sequence[int]) -> None:
    """InterventionError where the source's policy chose other keys for one of the slots."""
    mine = call.known
    others = [n for n in slots if mine.slots[n].by_item != theirs.slots[n].by_item]
    if mine.chosen and theirs.chosen and {*mine.chosen.slots} & {*slots}:
        one, other = mine.chosen.on_host, theirs.chosen.on_host
        if not (torch.equal(one.frames, other.frames) and torch.equal(one.indices, other.indices)):
            others += mine.chosen.slots
    if others:
        raise InterventionError(
            f"layer {call.site.layer}, block {call.at.block}: the source chose other keys for slot "
            f"{others[0]}; patch kv of frames that are not chosen, or under a policy such as window"
        )


def _move(edit: Move, call: EditedCall) -> bool:
    slots = call.slots(edit.frames)
    if not slots:
        return False
    if edit.offset is None:
        call.check_items(slots)
    heads, turns = call.heads(edit), []
    for slot in (call.known.slots[n] for n in slots):
        stands = slot.position if slot.is_rotated else 0
        if edit.offset is None and stands == MIXED:
            raise InterventionError("these keys stand at several positions: move them by offset=")
        turns.append((edit.position or 0) - stands if edit.offset is None else edit.offset)
    tokens = call.tokens(slots)
    head_dim = call.k.shape[3]
    angles = torch.tensor(turns, dtype=torch.float64)[:, None, None] * time_frequencies(head_dim)
    moved = turn(picked(call.k[:, tokens], heads, 2), angles, call.known.tokens_per_slot)
    call.replace_keys("k", tokens, heads, moved)
    return True


def _jitter(edit: Jitter, call: EditedCall) -> bool:
    layout, heads, head_dim = call.known, call.heads(edit), call.q.shape[3]
    if MIXED in layout.positions:
        raise InterventionError(
            "Jitter needs the position of every key: this cache policy has keys without one"
        )
    call.check_items(range(len(layout.slots)))
    bases = jittered_bases(edit, call.site.layer, call.shard.total)[call.heads_in_model(edit)]
    share = time_frequencies(head_dim, bases)
    drift = share - time_frequencies(head_dim)  # [heads, pairs]
    stands = [slot.position if slot.is_rotated else 0 for slot in layout.slots]
    for name, positions in (("q", layout.query_positions), ("k", stands)):
        x = getattr(call, name)
        angles = torch.tensor(positions, dtype=torch.float64)[:, None, None] * drift
        turned = turn(picked(x, heads, 2), angles, x.shape[1] // len(positions))
        call.replace_keys(name, EVERY, heads, turned)
    return True


def jittered_bases(edit: Jitter, layer: int, num_heads: int) -> Tensor:
    """The RoPE base of each head of a layer, float64 [H]."""
    generator = torch.Generator().manual_seed(edit.seed * 100_003 + layer)
    e = 2 * torch.rand(num_heads, generator=generator, dtype=torch.float64) - 1
    return ROPE_THETA * (1 + edit.scale * e)


def time_frequencies(head_dim: int, bases: Tensor | None = None) -> Tensor:
    """Radians per frame of each pair of the temporal share, float64 [heads or 1, pairs]; bases [heads]."""
    share = RotaryTable(head_dim).axes_dim[0]
    exponents = torch.arange(0, share, 2, dtype=torch.float64) / share
    bases = torch.tensor([ROPE_THETA], dtype=torch.float64) if bases is None else bases
    return bases[:, None] ** -exponents


def turn(x: Tensor, angles: Tensor, tokens_per_frame: int) -> Tensor:
    """Turn the temporal share of x [B, L, heads, D] by angles [frames, heads or 1, pairs] -> float32."""
    rest = x.shape[3] // 2 - angles.shape[2]
    whole = torch.cat([angles, angles.new_zeros(*angles.shape[:2], rest)], 2)
    cos, sin = whole.cos().float(), whole.sin().float()  # [frames, heads, D/2]
    tables = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    there = [send(table, x.device).repeat_interleave(tokens_per_frame, 0) for table in tables]
    return rotate(x.float(), *there)

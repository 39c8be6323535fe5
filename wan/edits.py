"""Interventions at work: attention() asks here for every call while any is active, and nowhere else."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor

from wan.backends import KeyBias
from wan.cache import CachePolicy, KVCache
from wan.captured_call import HeadShard, Pass, Site
from wan.interventions import (
    Ablate,
    Bias,
    Edit,
    Frames,
    InterventionError,
    Jitter,
    KeySelection,
    Knockout,
    Move,
    Patch,
    Selection,
    numbered,
)
from wan.keys import EMPTY, MIXED, KeyLayout, picked, places, send
from wan.policies import PromptSwitch, apply_switch
from wan.rope import ROPE_THETA, RotaryTable, rotate

# --- One attention call under edit: what each intervention does to its q, k, v, biases and output
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
    """Mean outputs of heads (wan/recorders.py)."""

    def of(self, site: Site, at: Pass) -> Tensor:
        """[B or 1, query frames, H, D]."""
        ...


class InStep(Protocol):
    """Another run that is where this one is (wan/recorders.py)."""

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


# --- What a rollout is going to do: enough to tell, before it runs, which calls an edit changes
@dataclass(frozen=True)
class BlockKeys:
    """The frames whose keys a block sees. past are those of earlier blocks, as far as they have a number."""

    own: tuple[int, ...]
    past: tuple[int, ...] = ()
    sink: tuple[int, ...] = ()
    is_given: bool = False  # no denoising, a clean pass alone
    sees_more: bool = False  # whether keys of its past may have no frame number
    steps: tuple[int, ...] | None = None  # its denoising steps; None: every one of the rollout's
    is_recomputed: bool = False  # whether a forward of step -1 makes the keys of its past again

    def named(self, frames: Frames) -> set[int]:
        """The frames among the keys that these name; -1 stands for a past without numbers."""
        found: set[int] = set()
        for name in frames:
            if name == "first":
                found |= {0} & set(self.past)
            elif isinstance(name, int):
                found |= {name} & set(self.past)
            elif name in ("past", "sink"):
                found |= set(self.past if name == "past" else self.sink)
                found |= {-1} if name == "past" and self.sees_more else set()
            else:
                found |= set(self.own) if name == "own" else {int(name[4:])} & set(self.own)
        return found


@dataclass(frozen=True)
class RolloutPlan:
    """Layers, heads, passes and blocks of a rollout. Denoising steps come first, the clean pass is last."""

    num_layers: int
    num_heads: int
    num_steps: int
    blocks: tuple[BlockKeys, ...]
    text_len: int
    has_clean_pass: bool = True
    branches: tuple[str, ...] = ("cond",)
    keeps_clean_keys: bool = True  # False: before each block all keys are computed again, without edits

    def passes(self, edit: Edit, block: int) -> list[int]:
        """The steps of a block that an edit selects."""
        last = self.num_steps if self.has_clean_pass else None
        first = self.num_steps if self.blocks[block].is_given else 0
        own = self.blocks[block].steps
        steps = range(first, self.num_steps + self.has_clean_pass)
        again = [-1] * self.blocks[block].is_recomputed
        there = again + [step for step in steps if own is None or step in own or step == last]
        return [step for step in there if edit.selects_pass(step, step == last)]

    def calls(self, edit: Edit) -> list[tuple[int, int]]:
        """(block, step) of the calls of one layer and branch that an edit changes."""
        chosen = range(len(self.blocks)) if edit.blocks is None else edit.blocks
        return [
            (block, step)
            for block in chosen
            if (keys := keys_of(edit)) is None or self.blocks[block].named(keys)
            for step in self.passes(edit, block)
        ]

    def check(self, edits: Sequence[Edit]) -> None:
        """Raise InterventionError for an edit that this rollout cannot make, or that would change nothing."""
        for edit in edits:
            self._check_indices(edit)
            if not self.calls(edit):
                raise InterventionError(f"no call can be edited: {edit}; {self._remedy(edit)}")

    def check_keys_left(self, edits: Sequence[Edit]) -> None:
        """Raise InterventionError where knockouts together leave a head no key."""
        knockouts = [edit for edit in edits if isinstance(edit, Knockout)]
        if sum(len(edit.tokens or ()) for edit in knockouts) < self.text_len:
            knockouts = [edit for edit in knockouts if edit.tokens is None]
        if not any(
            edit.tokens or any(str(name)[:3] == "own" for name in edit.frames or ()) for edit in knockouts
        ):
            return
        places = product(
            range(self.num_layers), range(self.num_heads), range(len(self.blocks)), self.branches
        )
        for layer, head, block, branch in places:
            here = [edit for edit in knockouts if _covers(edit, layer, head, block, branch)]
            for step in range(self.num_steps + self.has_clean_pass):
                now = [edit for edit in here if step in self.passes(edit, block)]
                if now and self._loses_all(now, block):
                    raise InterventionError(
                        f"layer {layer}, block {block}, step {step}: head {head} would lose all its keys"
                    )

    def count(self, edit: Edit) -> int:
        """How many attention calls an edit changes."""
        layers = len(edit.layers or range(self.num_layers))
        return len(self.calls(edit)) * layers * len([edit.branch] if edit.branch else self.branches)

    def in_words(self, edit: Edit) -> str:
        """What an edit is going to do: edits 1 of 12 heads in 5 passes of 7 blocks: 35 calls."""
        calls, count = self.calls(edit), self.count(edit)
        layers = len(edit.layers or range(self.num_layers))
        heads = len(edit.heads or range(self.num_heads))
        passes, blocks = len({step for _, step in calls}), len({block for block, _ in calls})
        of_layers = f" in {layers} of {self.num_layers} layers," if layers > 1 else ""
        return (
            f"edits {heads} of {self.num_heads} heads{of_layers} in {passes} pass{'es' * (passes != 1)} of "
            f"{blocks} block{'s' * (blocks != 1)}: {count} call{'s' * (count != 1)}"
        )

    def _loses_all(self, knockouts: Sequence[Knockout], block: int) -> bool:
        keys = self.blocks[block]
        frames = set().union(*(keys.named(edit.frames) for edit in knockouts if edit.frames is not None))
        tokens = set().union(*(edit.tokens for edit in knockouts if edit.tokens is not None))
        everything = set(keys.own) | set(keys.past) | ({-1} if keys.sees_more else set())
        return frames >= everything or len(tokens) >= self.text_len

    def _check_indices(self, edit: Edit) -> None:
        for noun, chosen, count in (
            ("layer", edit.layers, self.num_layers),
            ("head", edit.heads, self.num_heads),
            ("block", edit.blocks, len(self.blocks)),
            ("prompt token", getattr(edit, "tokens", None), self.text_len),
        ):
            for index in chosen or ():
                if index >= count:
                    raise InterventionError(f"{noun} {index} is not in 0..{count - 1}: {edit}")
        for step in edit.steps or ():
            if step == self.num_steps and self.has_clean_pass:
                raise InterventionError(f"step {step} is the clean pass: name it by passes, not by steps")
            if step >= self.num_steps:
                raise InterventionError(f"step {step} is not in 0..{self.num_steps - 1}: {edit}")
        if edit.passes == "clean" and not self.has_clean_pass:
            raise InterventionError("the base model has no clean pass: passes are denoise or all")
        if edit.passes == "clean" and not self.keeps_clean_keys:
            raise InterventionError(
                "recompute_context computes the keys of clean passes again: no later block would see an edit "
                "of passes='clean'; take denoise or all, or leave recompute_context out"
            )
        if edit.branch is not None and edit.branch not in self.branches:
            raise InterventionError(f"branch {edit.branch} is not there: this rollout has no guidance")

    def _remedy(self, edit: Edit) -> str:
        chosen = range(len(self.blocks)) if edit.blocks is None else edit.blocks
        if keys_of(edit) is None or not any(self.passes(edit, block) for block in chosen):
            return "its blocks have no such pass"
        past = sorted(set().union(*(self.blocks[block].past for block in chosen)))
        own = sorted(set().union(*(self.blocks[block].own for block in chosen)))
        there = numbered("frame", past) if past else "nothing"
        return f"earlier blocks hold {there}; own keys are {numbered('frame', own)}, named by own or own:N"


def blocks_of_policy(
    policy: CachePolicy,
    blocks: Sequence[range],
    given: int = 0,
    prompt_schedule: Sequence[PromptSwitch] = (),
    context: int = 0,
) -> tuple[BlockKeys, ...]:
    """Blocks of a causal rollout, and what some head of theirs sees; context is recompute_context.

    Of policies that average or choose, the whole past is what their blocks may see.
    """
    classes = getattr(policy, "policies", {"": policy}).values()  # of per_head several
    seen = [_slots_of_blocks(one, blocks, prompt_schedule, context) for one in classes]
    whole = all(one.keeps_whole_frames for one in classes)
    found, again = [], {switch.frame for switch in prompt_schedule if switch.how == "recache"}
    for frames, each in zip(blocks, zip(*seen, strict=True), strict=True):
        past, sink = (tuple(sorted(set().union(*kind))) for kind in zip(*each, strict=True))
        keys = BlockKeys(
            tuple(frames),
            past,
            sink,
            is_given=frames.start < given,
            sees_more=bool(past) and not whole,
            is_recomputed=frames.start in again or bool(context and past),
        )
        found.append(keys)
    return tuple(found)


def _slots_of_blocks(
    policy: CachePolicy, blocks: Sequence[range], prompt_schedule: Sequence[PromptSwitch], context: int
) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
    """Past frames and sink of each block, by the policy's own rules in a cache without heads."""
    if not policy.keeps_whole_frames:
        sink = getattr(policy, "sink", 0)
        return [(range(block.start), range(min(sink, block.start))) for block in blocks]
    nothing = torch.zeros(())
    size = max(map(len, blocks))
    cache = KVCache([0], 1, 2, 1, blocks[-1].stop, policy, size, rope=lambda _: (nothing, nothing))
    switches = {switch.frame: switch.how for switch in prompt_schedule}
    found, past = [], 0
    for block in blocks:
        how = switches.get(block.start, "keep")
        past, again = apply_switch(cache, how, past, context)
        if again:
            cache.recache(range(cache.newest.stop - again, cache.newest.stop), (), lasts=not context)
        cache.advance(block, cut=how == "cut")
        past = min(past + len(block), policy.num_frames or block.stop)
        earlier = [frame for index, frame in enumerate(cache.frames) if index not in cache.own]
        frames = [frame for frame in earlier if frame != EMPTY]
        found.append((frames, frames[: len(cache.layouts[0].sink)]))
    return found


def keys_of(edit: Edit) -> Frames | None:
    """The frames that an edit needs among the keys of a call; None where it needs none."""
    if isinstance(edit, Patch):
        return (edit.frames or ("past",)) if edit.what == "kv" else None
    return edit.frames if isinstance(edit, (KeySelection, Move)) else None


def _covers(edit: Edit, layer: int, head: int, block: int, branch: str) -> bool:
    return all(
        chosen is None or index in chosen
        for chosen, index in (
            (edit.layers, layer),
            (edit.heads, head),
            (edit.blocks, block),
            (None if edit.branch is None else (edit.branch,), branch),
        )
    )


# --- Interventions at work: attention() asks here for every call while any is active, and nowhere else
class Hand(Protocol):
    """Whoever has a hand in calls: edits, recorders of head outputs, runs in step."""

    def touch(self, call: EditedCall) -> None: ...

    def check(self, plan: RolloutPlan) -> None: ...


@dataclass(eq=False)
class Edits:
    """Edits that were asked for together, what they need, and how many calls each of them changed so far."""

    edits: tuple[Edit, ...]
    data: Mapping[Edit, object] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.changed = [0] * len(self.edits)
        for edit in self.edits:
            if (need := needed_by(edit)) and edit not in self.data:
                raise InterventionError(f"{edit!r} needs data={{edit: ...}}: {need}")

    def touch(self, call: EditedCall) -> None:
        for i, edit in enumerate(self.edits):
            if selects(edit, call.site, call.at):
                self.changed[i] += edit_call(edit, call, self.data.get(edit))

    def check(self, plan: RolloutPlan) -> None:
        plan.check(self.edits)


def needed_by(edit: Edit) -> str:
    """What an edit cannot do without, in words; nothing for most."""
    if isinstance(edit, Patch) or (isinstance(edit, Ablate) and edit.how == "resample"):
        return "its source as a wan.recorders.RunInStep"
    if isinstance(edit, Ablate) and edit.how != "zero":
        return "means of head outputs, from wan.recorders"
    return ""


def selects(edit: Edit, site: Site, at: Pass) -> bool:
    """Whether a call is one of those that an edit is for."""
    return (
        site.kind == edit.kind
        and (edit.layers is None or site.layer in edit.layers)
        and (edit.blocks is None or at.block in edit.blocks)
        and (edit.branch is None or at.branch == edit.branch)
        and edit.selects_pass(at.step, at.is_clean_pass)
    )


class ActiveEdits:
    """Who has a hand in attention calls now, in order of nesting."""

    def __init__(self) -> None:
        self._hands: list[Hand] = []

    @property
    def active(self) -> bool:
        return bool(self._hands)

    @property
    def edits(self) -> list[Edit]:
        """All that apply now, in order of nesting."""
        return [edit for hand in self._hands if isinstance(hand, Edits) for edit in hand.edits]

    def check(self, plan: RolloutPlan) -> None:
        """Raise InterventionError for an edit that does not fit the rollout that is about to run."""
        for hand in self._hands:
            hand.check(plan)
        plan.check_keys_left(self.edits)

    def begin(
        self,
        site: Site,
        at: Pass | None,
        layout: KeyLayout | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        of_heads: tuple[int, ...] | None = None,
        layer_heads: int = 0,
    ) -> EditedCall:
        """Called by attention() before the softmax: q [B, Lq, H, D], k and v [B, Lk, H, D].

        of_heads are those of q, where it has some of a layer's layer_heads heads.
        """
        if at is None:
            raise InterventionError(
                "an edit needs to know the pass of each call: run the model through the pipeline, "
                "or inside ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=...))"
            )
        call = EditedCall(site, at, layout, q, k, v, of_heads=of_heads, layer_heads=layer_heads)
        for hand in self._hands:
            hand.touch(call)
        return call

    @contextmanager
    def with_hand(self, hand: Hand) -> Iterator[None]:
        """Give it a hand in all calls while the context lasts; what was there before is there again after."""
        before = list(self._hands)
        self._hands.append(hand)
        try:
            yield
        finally:
            self._hands[:] = before

    def exchange(self, hands: list[Hand]) -> list[Hand]:
        """Put other hands in place of these -> these. For runs in step."""
        before, self._hands = self._hands, hands
        return before


ACTIVE_EDITS = ActiveEdits()


@contextmanager
def intervene(*edits: Edit, data: Mapping[Edit, object] | None = None) -> Iterator[Edits]:
    """Edit attention calls while the context lasts; contexts nest, and apply from the outermost in.

    data has, by edit, the means of Ablate("mean" or "frame_mean") and the run in step of what has a source;
    experiments.load("wan_mini", interventions=[{"edit": "ablate", "how": "mean", ...}]) makes them itself.
    Yields the edits with the number of calls that each changed. Warns of one that changed none.
    """
    if not edits or not all(isinstance(edit, Edit) for edit in edits):
        raise InterventionError(
            "intervene takes Knockout, Bias, Ablate, Patch, Move and Jitter, at least one"
        )
    session = Edits(edits, data or {})
    with ACTIVE_EDITS.with_hand(session):
        yield session
    for edit, changed in zip(edits, session.changed, strict=True):
        if not changed:
            warnings.warn(f"no call was edited by: {edit}", stacklevel=3)

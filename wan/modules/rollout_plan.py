"""What a rollout is going to do: enough to tell, before it runs, which calls an edit changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from wan.modules.edit_fields import Frames, InterventionError, numbered
from wan.modules.interventions import Edit, KeySelection, Knockout, Move, Patch
from wan.modules.key_layout import EMPTY
from wan.modules.kv_cache import KVCache
from wan.modules.policies.base import CachePolicy
from wan.prompt_schedule import PromptSwitch, forget


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
    classes = getattr(policy, "classes", {"": policy}).values()  # of per_head several
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
        past, again = forget(cache, how, past, context)
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

"""Interventions at work: attention() asks here for every call while any is active, and nowhere else."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from wan.modules.captured_call import Pass, Site
from wan.modules.edit_fields import InterventionError
from wan.modules.edited_call import EditedCall, edit_call
from wan.modules.interventions import Ablate, Edit, Patch
from wan.modules.key_layout import KeyLayout
from wan.modules.rollout_plan import RolloutPlan


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
        return "its source as a wan.modules.run_in_step.RunInStep"
    if isinstance(edit, Ablate) and edit.how != "zero":
        return "means of head outputs, from wan.modules.head_outputs"
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

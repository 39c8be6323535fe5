"""Observing attention: who is asked for, where the rollout is, and what is kept of each call.

A call is identified by who it is. Each attention module carries its Site, the rollout announces its Pass, the
call brings its KeyLayout, and nothing is counted. Whatever is kept is computed beside the call, from its own
q, k and log-sum-exp.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from wan.modules import frame_reductions, host_copies, reductions
from wan.modules.capture_session import Session
from wan.modules.captured_call import CapturedCall, Kind, Pass, Site, move_to_cpu, parts_of
from wan.modules.edited_call import EditedCall
from wan.modules.edited_capture import edited_values
from wan.modules.head_groups import HeadGroup, joined, joint_layout
from wan.modules.key_layout import KeyLayout
from wan.modules.key_maps import MapQuery, check_queries, maps_of_call, queries_of
from wan.modules.key_segments import segments_of


@dataclass(frozen=True)
class CaptureRequest:
    """Which calls to keep and what of them. None selects all, step -1 excepted.

    granularity: "token" keeps [B, H, Lq, Lk] on the CPU in token_dtype, logits q·k/√D or probabilities; "key"
    the query-averaged logits [B, H, Lk]; "frame" mean logits and, with mass, the mass per frame [B, H, Fq,
    Fk]. Of cross-attention, "frame" keeps the mass per text token [B, H, Fq, tokens]. "map" keeps what each
    of the queries sees of every key token [B, heads, queries, Lk] (wan/modules/key_maps.py); of
    cross-attention the mass of every query token on the first num_words words [B, heads, Lq, words].
    """

    layers: Collection[int] | None = None
    kinds: tuple[Kind, ...] = ("self",)
    blocks: Collection[int] | None = None
    steps: Collection[int] | None = None
    granularity: Literal["token", "key", "frame", "map"] = "token"
    is_logits: bool = True
    mass: bool = True
    rope_bands: bool = False  # "frame" keeps the mean logits by RoPE band too, [B, H, Fq, Fk, bands]
    token_dtype: torch.dtype = torch.float32
    heads: tuple[int, ...] | None = None  # of "map", in this order
    queries: tuple[MapQuery, ...] = (MapQuery(),)  # of "map": (frame, token), (frame, -1) or (-1, -1)
    num_words: int | None = None  # of "map" and cross-attention

    def __post_init__(self) -> None:
        if self.granularity not in ("token", "key", "frame", "map"):
            raise ValueError(f"granularity {self.granularity!r} is not one of token, key, frame, map")
        if not set(self.kinds) <= {"self", "cross"}:
            raise ValueError(f"kinds {self.kinds} may hold 'self' and 'cross'")
        if self.granularity == "key" and not self.is_logits:
            raise ValueError("granularity 'key' keeps mean logits; probabilities need granularity 'token'")
        if self.rope_bands and (self.granularity != "frame" or "self" not in self.kinds):
            raise ValueError(
                "rope_bands needs granularity 'frame' of self-attention: nothing else has RoPE bands"
            )
        if self.granularity == "map":
            object.__setattr__(self, "queries", tuple(MapQuery(*query) for query in self.queries))
            check_queries(self.queries)
        elif self.heads is not None:
            raise ValueError(f"heads are chosen of granularity 'map'; {self.granularity!r} keeps all")

    def selects(self, site: Site) -> bool:
        """Whether the calls of an attention module are asked for."""
        return site.kind in self.kinds and (self.layers is None or site.layer in self.layers)

    def wants(self, site: Site, at: Pass | None) -> bool:
        if not self.selects(site):
            return False
        if at is None:
            return True
        in_block = self.blocks is None or at.block in self.blocks
        if self.granularity == "map" and site.kind == "self":
            in_block = in_block and bool(queries_of(self.queries, at.query_frames))
        return in_block and (at.step >= 0 if self.steps is None else at.step in self.steps)

    def check(self, num_layers: int, num_blocks: int | None = None, num_passes: int | None = None) -> None:
        """Raise ValueError for a layer, block or step that this model and rollout do not have."""
        check_indices("layer", self.layers, num_layers)
        check_indices("block", self.blocks, num_blocks)
        check_indices("step", self.steps and [step for step in self.steps if step != -1], num_passes)


def check_indices(name: str, chosen: Collection[int] | None, count: int | None) -> None:
    """Raise ValueError for a chosen index that is not in 0..count - 1."""
    for index in chosen or ():
        if count is not None and not 0 <= index < count:
            raise ValueError(f"{name} {index} is not in 0..{count - 1}")


class AttentionCapture:
    """What attention modules report to; idle until a request is made, and idle again when it ends."""

    call_type: type[CapturedCall] = CapturedCall

    def __init__(self) -> None:
        self._sessions = [Session()]  # the last one is served
        self._pass: Pass | None = None

    # -- asking ----------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self, *requests: CaptureRequest, **fields: Any) -> Iterator[list[CapturedCall]]:
        """Keep what the requests (or one request of the given fields) ask for while the context lasts.

        Yields the list of calls, complete and on the CPU once the context has ended. On exit, also on an
        error, what was asked for before is asked for again.
        """
        session = Session(requests or (CaptureRequest(**fields),))
        depth = len(self._sessions)
        self._sessions.append(session)
        try:
            yield session.calls
            session.finish()
            move_to_cpu(session.calls)
        finally:
            session.forget()
            del self._sessions[depth:]
            if depth == 1:  # an error left copies behind
                host_copies.forget()

    @property
    def active(self) -> bool:
        return bool(self._sessions[-1].requests)

    @property
    def now(self) -> Pass | None:
        """The forward that runs, as the sampler announced it."""
        return self._pass

    # -- being told ------------------------------------------------------------------------------------------

    def check_model(
        self, num_layers: int, num_blocks: int | None = None, num_passes: int | None = None
    ) -> None:
        """Raise ValueError where a request does not fit the model (and rollout) that is about to run."""
        for request in self._sessions[-1].requests:
            request.check(num_layers, num_blocks, num_passes)

    @contextmanager
    def during(self, at: Pass) -> Iterator[None]:
        """The sampler announces the forward that runs inside this context."""
        before, self._pass = self._pass, at
        try:
            yield
            for session in self._sessions:
                session.finish()
        finally:
            for session in self._sessions:  # after an error
                session.forget()
            self._pass = before

    def wants(self, site: Site) -> bool:
        """Whether the call that a site is about to make in this pass is asked for."""
        return any(request.wants(site, self._pass) for request in self._sessions[-1].requests)

    def frames_weighed(self, site: Site, layout: KeyLayout | None) -> int:
        """In how many key frames the mass of the call that a site is about to make is wanted; 0: not so."""
        if layout is None or self._pass is None or self._pass.parts:
            return 0
        requests = [request for request in self._sessions[-1].requests if request.wants(site, self._pass)]
        weighs = any(request.granularity == "frame" and request.mass for request in requests)
        return len(layout.slots) if weighs else 0

    def observe(
        self,
        site: Site,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        layout: KeyLayout | None = None,
        mask: Tensor | None = None,
        tails: Tensor | None = None,
    ) -> None:
        """Called by attention(): q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq], mask [Lq, Lk].

        tails [2, B, H, Fk, Lq] come where frames_weighed() asked for them. Of a forward over blocks at
        several noise levels each block's queries are a call of their own.
        """
        if self._pass is not None and self._pass.parts:
            for part, rows in parts_of(self._pass, q.shape[1]):
                with self.during(part):
                    self.observe(site, q[:, rows].contiguous(), k, lse[..., rows].contiguous(), layout)
            return
        session = self._sessions[-1]
        requests = [request for request in session.requests if request.wants(site, self._pass)]
        if not requests:
            return

        def keep(q: Tensor) -> None:
            for request in requests:
                values = self._reduce(
                    session, request, site, q, k, lse, layout, mask, tails=tails, waits=True
                )
                shapes = tuple(q.shape), tuple(k.shape)
                kept = layout and layout.on_host
                session.keep(self.call_type(site, self._pass, values, *shapes, kept))

        if session.late.is_for(layout):
            session.late.add(partial(keep, q.clone()))  # whose memory the next layer may take
        else:
            keep(q)

    def observe_groups(
        self,
        site: Site,
        groups: Sequence[HeadGroup],
        lses: Sequence[Tensor],
        edited: Sequence[EditedCall] = (),
    ) -> None:
        """Called by attention_by_heads(): frame values of all heads together,
        NaN where one does not see a frame; edited are the groups' calls where edits are active.
        """
        session = self._sessions[-1]
        session.late.finish()
        for request in session.requests:
            if not request.wants(site, self._pass):
                continue
            if request.granularity != "frame" or request.rope_bands:
                raise ValueError("under cache_policy per_head calls are kept at granularity 'frame' alone")
            parts = [
                edited_values(request, edited[index], lse)
                if edited and edited[index].is_changed
                else self._reduce(session, request, site, group.q, group.k, lse, group.layout, None, index)
                for index, (group, lse) in enumerate(zip(groups, lses, strict=True))
            ]
            layouts = [group.layout for group in groups]
            columns = [x.frames if x.is_plain else segments_of(x).columns for x in layouts]
            values, layout = joined(parts, columns, groups), joint_layout(columns, groups[0].layout)
            q_shape = (*groups[0].q.shape[:2], sum(len(g.heads) for g in groups), groups[0].q.shape[3])
            k_shape = (q_shape[0], len(layout.slots) * layout.tokens_per_slot, *q_shape[2:])
            session.keep(self.call_type(site, self._pass, values, q_shape, k_shape, layout))

    def observe_edited(self, call: EditedCall, lse: Tensor) -> None:
        """Called by attention() of a call under edit: what its softmax saw is kept."""
        session = self._sessions[-1]
        session.late.finish()
        shapes = tuple(call.q.shape), tuple(call.k.shape)
        for request in session.requests:
            if not request.wants(call.site, self._pass):
                continue
            if not call.is_changed:
                values = self._reduce(session, request, call.site, call.q, call.k, lse, call.layout, None)
            else:
                values = edited_values(request, call, lse)
            kept = call.layout and call.layout.on_host
            session.keep(self.call_type(call.site, self._pass, values, *shapes, kept))

    def exchange(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take on another state -> the one before. For two runs that go in step."""
        before = dict(self.__dict__)
        self.__dict__.update(state)
        return before

    def fresh_state(self) -> dict[str, Any]:
        """The state of a capture that nobody has asked for anything."""
        return dict(type(self)().__dict__)

    def _reduce(
        self,
        session: Session,
        request: CaptureRequest,
        site: Site,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        layout: KeyLayout | None,
        mask: Tensor | None,
        group: int = 0,
        tails: Tensor | None = None,
        waits: bool = False,
    ) -> dict[str, Tensor]:
        """What is kept of a call, by name; where it waits, complete at the end of the forward."""
        if request.granularity == "token":
            name = "token_logits" if request.is_logits else "token_probabilities"
            values = {name: reductions.token_matrix(q, k, request.is_logits, request.token_dtype, mask)}
            return values | frame_reductions.of_keys(layout, k)
        if request.granularity == "key":
            return {"key_curve": reductions.key_curve(q, k, mask)} | frame_reductions.of_keys(layout, k)
        if self._pass is None:
            raise ValueError(
                f"{request.granularity} granularity needs to know the frames of each call: run the model "
                "through the pipeline, or inside ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=...))"
            )
        if request.granularity == "map":
            return maps_of_call(request, site, self._pass, q, k, lse, layout, mask)
        num_query_frames = len(self._pass.query_frames)
        if site.kind == "cross":
            return {"cross_mass": reductions.token_mass(q, k, num_query_frames)}
        if layout is None:
            raise ValueError(f"layer {site.layer}: self-attention was called without the layout of its keys")
        if mask is not None:
            return reductions.masked_frames(q, k, mask, num_query_frames, len(layout.slots), request.mass)
        exchanged = site.shard is not None
        call = frame_reductions.Call(q, k, lse, layout, num_query_frames, tails, exchanged)
        return session.of_frames((site.layer, group), call, request.mass, request.rope_bands, waits)

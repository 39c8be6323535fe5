"""Observing attention: who is asked for, where the rollout is, and what is kept of each call.

A call is identified by who it is. Each attention module carries its Site, the rollout announces its Pass, the
call brings its KeyLayout, and nothing is counted. Whatever is kept is computed beside the call, from its own
q, k and log-sum-exp.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from wan import keys as host_copies
from wan import reductions
from wan import reductions as frame_reductions
from wan.captured_call import (
    CapturedCall,
    HeadGroup,
    HeadShard,
    Kind,
    Pass,
    Site,
    joined,
    joint_layout,
    move_to_cpu,
    parts_of,
)
from wan.edits import EditedCall
from wan.keys import KeyLayout, key_frames, picked, segments_of, send
from wan.late_logits import LateLogits, LateWork
from wan.reductions import of_keys
from wan.rope import RotaryTable

# --- What is asked for together, and what is kept for it while the rollout goes on
if TYPE_CHECKING:
    pass


@dataclass(eq=False)
class Session:
    """What was asked for together, and what was kept for it so far."""

    requests: tuple["CaptureRequest", ...] = ()
    calls: list[CapturedCall] = field(default_factory=list)
    late: LateWork = field(default_factory=LateWork)
    logits: LateLogits = field(default_factory=LateLogits)

    def keep(self, call: CapturedCall) -> None:
        self.calls.append(call)
        host_copies.start(call.values)

    def finish(self) -> None:
        """Complete what was kept so far."""
        self.late.finish()
        self.logits.finish()

    def forget(self) -> None:
        """After an error: what is not complete is not kept."""
        self.late.forget()
        gone = self.logits.forget()
        if gone:
            self.calls[:] = [call for call in self.calls if not any(call.values is x for x in gone)]

    def of_frames(
        self, layer: Hashable, call: frame_reductions.Call, mass: bool, rope_bands: bool, waits: bool
    ) -> dict[str, Tensor]:
        """What is kept of a call by frame; of one that waits, in finish()."""
        self.logits.make_way(layer)
        if not waits or rope_bands or not call.layout.is_plain:
            means = self.logits.key_means.of(layer, call.layout, call.k)
            return frame_reductions.of_frames(call, means, mass, rope_bands)
        others = {"frame_mass": frame_reductions.mass_of(call)} if mass else {}
        return self.logits.add(layer, call, others)


# --- What chosen queries of one call see of every key token: mean logit and mass, for maps over video frames
if TYPE_CHECKING:
    pass

ALL = -1


class MapQuery(NamedTuple):
    """Whose map: of all queries of a call, of one query frame (its global index), or of one of its tokens.

    Tokens count from 0, row by row.
    """

    frame: int = ALL
    token: int = ALL


def queries_of(queries: Sequence[MapQuery], query_frames: Sequence[int]) -> list[MapQuery]:
    """Those that a call with these query frames has."""
    return [query for query in queries if query.frame in (ALL, *query_frames)]


def check_queries(queries: Sequence[MapQuery]) -> None:
    """Raise ValueError for what no call can have, and for one that is named twice."""
    if not queries:
        raise ValueError("granularity 'map' needs a query: (-1, -1) is the mean over all of a call")
    for frame, token in queries:
        if min(frame, token) < ALL or (frame == ALL and token != ALL):
            raise ValueError(f"query ({frame}, {token}) is not (frame, token), (frame, -1) or (-1, -1)")
    if twice := [query for n, query in enumerate(queries) if query in queries[:n]]:
        raise ValueError(f"query {tuple(twice[0])} is named twice")


def maps_of_call(
    request: "CaptureRequest",
    site: Site,
    at: Pass,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    layout: KeyLayout | None,
    mask: Tensor | None,
) -> dict[str, Tensor]:
    """What a request for maps keeps of a call."""
    if mask is not None:
        raise ValueError("granularity 'map' is of rollouts: a training step with a mask has none")

    def of(heads: list[int]) -> dict[str, Tensor]:
        chosen = picked(q, heads, 2), picked(k, heads, 2)
        if site.kind == "cross":
            return {"word_map": word_map(*chosen, request.num_words)}
        if layout is None:
            raise ValueError(f"layer {site.layer}: self-attention was called without the layout of its keys")
        S = layout.tokens_per_slot
        return key_maps(*chosen, picked(lse, heads, 1), request.queries, at.query_frames, S)

    return of_chosen_heads(request.heads, site.shard or HeadShard.whole(q.shape[2]), of)


def key_maps(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    queries: Sequence[MapQuery],
    query_frames: Sequence[int],
    tokens_per_slot: int,
    bias: Tensor | None = None,
) -> dict[str, Tensor]:
    """map_logits and map_mass [B, H, n, Lk], float16, and map_queries [n, 2], whose rows they are.

    q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq]; bias [H, Lk] was added to the logits, −inf where a key
    was left out. Mass is times tokens_per_slot; logits that were left out are NaN.
    """
    found = queries_of(queries, query_frames)
    S = q.shape[1] // len(query_frames)
    if late := [query for query in found if query.token >= S]:
        raise ValueError(f"token {late[0].token} is not in 0..{S - 1}")
    shape = (q.shape[0], q.shape[2], len(found), k.shape[1])
    logits, mass = (torch.empty(shape, dtype=torch.float16, device=q.device) for _ in range(2))
    alone = [row for row, query in enumerate(found) if query.token != ALL]
    if alone:
        places = [query_frames.index(found[row].frame) * S + found[row].token for row in alone]
        of_tokens = _token_rows(picked(q, places, 1), k, tokens_per_slot, bias)
        for number, row in enumerate(alone):
            logits[:, :, row], mass[:, :, row] = (rows[:, :, number] for rows in of_tokens)
    for row, query in enumerate(found):
        if query.token == ALL:
            first = 0 if query.frame == ALL else query_frames.index(query.frame) * S
            some = slice(first, q.shape[1] if query.frame == ALL else first + S)
            means, columns = reductions.key_token_means(q[:, some], k, lse[:, :, some], bias)
            logits[:, :, row], mass[:, :, row] = means, columns * tokens_per_slot
    return {"map_logits": logits, "map_mass": mass, "map_queries": torch.tensor(found)}


def of_chosen_heads(
    heads: Sequence[int] | None, shard: HeadShard, make: Callable[[list[int]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """make(heads) of those chosen heads (None: all) that are in this process, by their indices here.

    Raises ValueError for a head that the layer does not have.
    """
    if heads is None:
        return make(list(range(len(shard.heads))))
    for head in heads:
        if not 0 <= head < shard.total:
            raise ValueError(f"head {head} is not in 0..{shard.total - 1}")
    if not shard.is_whole and list(heads) != sorted(heads):
        raise ValueError(f"several GPUs keep maps of heads in ascending order, not of {list(heads)}")
    here = shard.local(list(heads))
    values = make(here or [0])
    return values if here else {n: x if n == "map_queries" else x[:, :0] for n, x in values.items()}


def word_map(q: Tensor, k: Tensor, num_words: int | None, bias: Tensor | None = None) -> Tensor:
    """Softmax of cross-attention of every query on the first words -> float16 [B, H, Lq, words].

    DAAM's map (arXiv 2210.04885). num_words None keeps all text tokens, padding too.
    """
    rows = (part.softmax(-1)[..., :num_words].half() for part in reductions.scaled_logits(q, k, bias=bias))
    return torch.cat([*rows], 2)


def _token_rows(q: Tensor, k: Tensor, tokens_per_slot: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits and mass of a few queries [B, n, H, D] on every key, some rows at a time."""
    logits, mass = [], []
    for rows in reductions.scaled_logits(q, k, bias=bias):
        mass.append((rows.softmax(-1) * tokens_per_slot).half())
        logits.append((rows if bias is None else reductions.absent(rows)).half())
    return torch.cat(logits, 2), torch.cat(mass, 2)


# --- What is kept of a call under edit: of the q and k that its softmax saw, with what was added to its
if TYPE_CHECKING:
    pass


def edited_values(request: "CaptureRequest", call: EditedCall, lse: Tensor) -> dict[str, Tensor]:
    """The quantities that a request asks for, of a call with other keys or a bias; lse [B, H, Lq]."""
    q, k, bias = call.q, call.k, call.bias
    on_host = None if bias is None else bias.per_token()
    per_token = None if on_host is None else send(on_host, q.device)
    if request.granularity == "token":
        name = "token_logits" if request.is_logits else "token_probabilities"
        matrix = reductions.token_matrix(q, k, request.is_logits, request.token_dtype, bias=per_token)
        attended = _attended((*matrix.shape[:2], 1, matrix.shape[3]), on_host, q.device)
        return {name: matrix} | attended | of_keys(call.layout, k)
    if request.granularity == "key":
        curve = _biased(reductions.key_curve(q, k), per_token)
        return {"key_curve": curve} | _attended(curve.shape, on_host, q.device) | of_keys(call.layout, k)
    if request.granularity == "map":
        return _maps(request, call, lse, on_host)
    num_query_frames = len(call.at.query_frames)
    if call.site.kind == "cross":
        mass = reductions.token_mass(q, k, num_query_frames, per_token)
        return {"cross_mass": mass} | _attended(mass.shape, on_host, q.device)
    return _frames(request, call, lse, num_query_frames)


def _maps(request: "CaptureRequest", call: EditedCall, lse: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """Maps of the chosen heads; lse [B, H, Lq], bias [H, Lk] on the host."""

    def of(heads: list[int]) -> dict[str, Tensor]:
        q, k = picked(call.q, heads, 2), picked(call.k, heads, 2)
        chosen = None if bias is None else picked(bias, heads, 0)
        added = None if chosen is None else send(chosen, q.device)
        if call.site.kind == "cross":
            return {"word_map": word_map(q, k, request.num_words, added)}
        S = call.known.tokens_per_slot
        maps = key_maps(q, k, picked(lse, heads, 1), request.queries, call.at.query_frames, S, added)
        return maps | _attended((*maps["map_mass"].shape[:2], 1, k.shape[1]), chosen, q.device)

    return of_chosen_heads(request.heads, call.shard, of)


def _frames(
    request: "CaptureRequest", call: EditedCall, lse: Tensor, num_query_frames: int
) -> dict[str, Tensor]:
    q, k = call.q, call.k
    if call.layout is None:
        raise ValueError(f"layer {call.site.layer}: self-attention was called without the layout of its keys")
    if call.of_heads is not None and not call.layout.is_plain:
        raise ValueError(
            "what edits change is captured under cache_policy per_head for classes of whole frames alone"
        )
    if not call.layout.is_plain:
        return _mixed_frames(request, call, call.layout, num_query_frames)
    slots = len(call.layout.slots)
    on_host = None if call.bias is None else call.bias.values
    per_slot = None if on_host is None else send(on_host, q.device)
    means = reductions.frame_means(k, slots)
    logits = _biased(reductions.frame_logits(q, means, num_query_frames), per_slot)
    values = {"frame_logits": logits} | _attended(logits.shape, on_host, q.device)
    if request.rope_bands:
        bands = list(RotaryTable(q.shape[-1]).bands.values())
        by_band = reductions.frame_logits_by_band(q, means, num_query_frames, bands)
        if "attended" in values:  # a bias belongs to no band: only what was left out shows here
            by_band = by_band.masked_fill(~values["attended"][..., None], torch.nan)
        values["frame_logits_by_band"] = by_band
    if request.mass:
        values["frame_mass"] = reductions.frame_mass(q, k, lse, num_query_frames, slots, per_slot)
    return values


def _mixed_frames(
    request: "CaptureRequest", call: EditedCall, layout: KeyLayout, num_query_frames: int
) -> dict[str, Tensor]:
    """What frame_reductions.of_frames keeps, token by token, because an edit may leave some of them out."""
    q, k, segments = call.q, call.k, segments_of(layout)
    on_host = None if call.bias is None else call.bias.per_token()
    bias = None if on_host is None else send(on_host, q.device)
    frames = key_frames(layout, len(k))[0]
    slots = (torch.arange(k.shape[1]) // layout.tokens_per_slot).expand_as(frames)
    logits = _biased(reductions.frame_logits(q, k.float(), num_query_frames), bias)  # [B, H, Fq, Lk]
    mass = reductions.token_mass(q, k, num_query_frames, bias) if request.mass else None
    values = {"tokens_kept": segments.tokens_kept.expand(len(k), -1).clone()}
    for kind, names, columns in (
        ("frame", frames, segments.columns),
        ("slot", slots, range(len(layout.slots))),
    ):
        members = (names[:, :, None] == torch.tensor(columns)).float()[:, None]  # [B, 1, Lk, n]
        members = send(members, q.device)
        values[f"{kind}_logits"] = _visible_mean(logits, members)
        if mass is not None:
            values[f"{kind}_mass"] = mass @ members
        if kind == "frame" and request.rope_bands:
            sizes = list(RotaryTable(q.shape[-1]).bands.values())
            by_band = reductions.frame_logits_by_band(q, k.float(), num_query_frames, sizes)
            out = logits.isnan()
            parts = [_visible_mean(band.masked_fill(out, torch.nan), members) for band in by_band.unbind(-1)]
            values["frame_logits_by_band"] = torch.stack(parts, -1)
    if on_host is not None and not on_host.isfinite().all():
        values["attended"] = ~values["frame_logits"].isnan()
    return values


def _visible_mean(logits: Tensor, members: Tensor) -> Tensor:
    """Mean over the members [B, 1, Lk, n] that are not NaN of logits [B, H, Fq, Lk]; NaN where all are."""
    return (logits.nan_to_num() @ members) / ((~logits.isnan()).float() @ members)


def _biased(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Logits [B, H, ..., keys] plus a bias [H, keys], NaN where it is -inf."""
    if bias is None:
        return logits
    bias = bias.view(bias.shape[0], *[1] * (logits.ndim - 3), bias.shape[1])
    return (logits + bias).masked_fill(bias == -torch.inf, torch.nan)


def _attended(shape: Sequence[int], bias: Tensor | None, device: torch.device) -> dict[str, Tensor]:
    """Which keys were attended, bool of this shape [B, H, ..., keys]; nothing where all were.

    The bias [H, keys] is on the host, which thus need not ask the device.
    """
    if bias is None or bias.isfinite().all():
        return {}
    view = send(bias.isfinite(), device).view(bias.shape[0], *[1] * (len(shape) - 3), bias.shape[1])
    return {"attended": view.expand(shape).clone()}


# --- Observing attention: who is asked for, where the rollout is, and what is kept of each call
@dataclass(frozen=True)
class CaptureRequest:
    """Which calls to keep and what of them. None selects all, step -1 excepted.

    granularity: "token" keeps [B, H, Lq, Lk] on the CPU in token_dtype, logits q·k/√D or probabilities; "key"
    the query-averaged logits [B, H, Lk]; "frame" mean logits and, with mass, the mass per frame [B, H, Fq,
    Fk]. Of cross-attention, "frame" keeps the mass per text token [B, H, Fq, tokens]. "map" keeps what each
    of the queries sees of every key token [B, heads, queries, Lk] (wan/capture.py); of
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

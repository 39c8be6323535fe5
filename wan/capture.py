"""Observe attention: who is asked for, which pass of the rollout runs, and what is kept of each call.

A call is identified by who it is. Each attention module carries its Site, the rollout announces its Pass, the
call brings its KeyLayout, and nothing is counted. Whatever is kept is computed beside the call, from its own
q, k and log-sum-exp (wan/reductions.py).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wan import reductions
from wan.keys import HeadShard, KeyBias, KeyLayout, RotaryTable, Slot, as_index, select, send
from wan.sites import Pass, Site, check_indices, during, now

Kind = Literal["self", "cross"]


# --- A call, and what was kept of it
@dataclass(eq=False)
class Call:
    """An attention call on its way: edits change q, k, v and bias before the softmax."""

    site: Site
    at: Pass | None  # None where nobody announced the forward
    q: Tensor  # [B, Lq, H, D]
    k: Tensor  # [B, Lk, H, D]
    v: Tensor
    layout: KeyLayout | None = None  # None for cross-attention
    mask: Tensor | None = None  # [Lq, Lk], of a training step
    bias: KeyBias | None = None
    of_heads: tuple[int, ...] | None = None  # the heads that q has, where a call is of some of those here
    layer_heads: int = 0  # and how many of the layer are here then
    lse: Tensor | None = None  # log-sum-exp of its logits [B, H, Lq], once the softmax is done
    tails: Tensor | None = None  # what the attention kernel knows of the mass of slots

    @property
    def shard(self) -> HeadShard:
        """The heads of this process."""
        return self.site.shard or HeadShard.whole(self.layer_heads or self.q.shape[2])

    @property
    def numbers(self) -> list[int]:
        """The numbers of its heads in the model."""
        here = range(self.q.shape[2]) if self.of_heads is None else self.of_heads
        return [self.shard.heads.start + head for head in here]

    @property
    def known_layout(self) -> KeyLayout:
        """The layout of the keys of self-attention; ValueError where the caller brought none."""
        if self.layout is None:
            raise ValueError(
                f"layer {self.site.layer}: self-attention was called without the layout of its keys"
            )
        return self.layout

    def parts(self) -> Iterator["Call"]:
        """Yield the call of each block, where a forward is over blocks at several noise levels."""
        if self.at is None or not self.at.parts:
            yield self
            return
        tokens, start = self.q.shape[1] // len(self.at.query_frames), 0
        for part in self.at.parts:
            rows = slice(start, start := start + tokens * len(part.query_frames))
            lse = None if self.lse is None else self.lse[..., rows].contiguous()
            at = replace(part, levels=self.at.levels)
            yield replace(self, at=at, q=self.q[:, rows].contiguous(), lse=lse)


@dataclass(frozen=True, eq=False)
class CapturedCall(Mapping[str, Any]):
    """One attention call and what was kept of it: values by name, on the CPU once the capture has ended.

    call["layer"], call["frame_logits"], ...: a mapping of the call's facts and then its values.
    """

    site: Site
    at: Pass | None  # None where nobody announced the forward
    values: dict[str, Tensor] = field()  # type: ignore[assignment]  # in the place of Mapping.values()
    q_shape: tuple[int, ...]  # [B, Lq, H, D]
    k_shape: tuple[int, ...]  # [B, Lk, H, D]
    layout: KeyLayout | None = None  # None for cross-attention

    __eq__, __hash__ = object.__eq__, object.__hash__  # a call equals itself alone

    def of_item(self, item: int) -> "CapturedCall":
        """Return the call of one item of a batch."""
        values = dict(self.values)
        for name in values.keys() - {"map_queries"}:
            values[name] = values[name][item : item + 1].clone()
        q_shape, k_shape = ((1, *shape[1:]) for shape in (self.q_shape, self.k_shape))
        return replace(self, values=values, q_shape=q_shape, k_shape=k_shape)

    @property
    def is_logits(self) -> bool:
        """True where the values hold logits q·k/√D; probabilities and masses otherwise."""
        return not {"token_probabilities", "cross_mass", "word_map"} & self.values.keys()

    @property
    def facts(self) -> dict[str, Any]:
        """Who called, in which pass, and what the keys were; None for what nobody told."""
        at, layout = self.at, self.layout
        facts: dict[str, Any] = {
            "layer": self.site.layer,
            "kind": self.site.kind,
            "q_shape": list(self.q_shape),
            "k_shape": list(self.k_shape),
            "is_logits": self.is_logits,
        }
        for name in ("block", "step", "timestep", "is_clean_pass", "branch"):
            facts[name] = None if at is None else getattr(at, name)
        facts["query_frames"] = None if at is None else list(at.query_frames)
        # A frame that is not there is clean.
        levels = {} if at is None else dict(at.levels) or dict.fromkeys(at.query_frames, at.timestep)
        return facts | {
            "frame_timesteps": levels,
            "key_frames": None if layout is None else list(layout.columns),  # of the columns of frame_logits
            "slot_frame": None if layout is None else list(layout.frames),
            "slot_position": None if layout is None else list(layout.positions),
            "slot_tokens": None if layout is None else [layout.tokens_per_slot] * len(layout.slots),
        }

    def __getitem__(self, name: str) -> Any:
        return self.values[name] if name in self.values else self.facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.facts, *self.values])

    def __len__(self) -> int:
        return sum(1 for _ in self)


SMALL = 1 << 15  # elements; values up to here are copied together


def start_copies(values: dict[str, Tensor]) -> None:
    """Begin to copy large values from a GPU to pinned memory, in place; move_to_cpu() waits for them."""
    for name, value in values.items():
        if value.is_cuda and value.numel() > SMALL:
            values[name] = value.contiguous().to("cpu", non_blocking=True)


def move_to_cpu(calls: Collection[CapturedCall]) -> None:
    """Bring captured tensors to the CPU, small ones in one copy per dtype: each would wait for the device."""
    if any(value.is_pinned() for call in calls for value in call.values.values()):
        torch.cuda.synchronize()
    small = [(call.values, name) for call in calls for name, value in call.values.items() if value.is_cuda]
    for dtype in {values[name].dtype for values, name in small}:
        group = [(values, name) for values, name in small if values[name].dtype == dtype]
        flat = torch.cat([values[name].flatten() for values, name in group]).cpu()
        parts = flat.split([values[name].numel() for values, name in group])
        for (values, name), part in zip(group, parts, strict=True):
            values[name] = part.view(values[name].shape).clone()  # a view would be saved with all of flat


# --- What is asked for
ALL = -1


class MapQuery(NamedTuple):
    """Whose map: of all queries of a call, of one query frame (its global index), or of one of its tokens.

    Tokens count from 0, row by row.
    """

    frame: int = ALL
    token: int = ALL


def queries_of(queries: Sequence[MapQuery], query_frames: Sequence[int]) -> list[MapQuery]:
    """Return those that a call with these query frames has."""
    return [query for query in queries if query.frame in (ALL, *query_frames)]


@dataclass(frozen=True)
class CaptureRequest:
    """Which calls to keep and what of them. None selects all, step -1 excepted.

    granularity: "token" keeps [B, H, Lq, Lk] on the CPU in token_dtype, logits q·k/√D or probabilities; "key"
    the query-averaged logits [B, H, Lk]; "frame" mean logits and, with mass, the mass per frame [B, H, Fq,
    Fk]. Of cross-attention, "frame" keeps the mass per text token [B, H, Fq, tokens]. "map" keeps what each
    of the queries sees of every key token [B, heads, queries, Lk]; of cross-attention the mass of every query
    token on the first num_words words [B, heads, Lq, words].
    """

    layers: Collection[int] | None = None
    kinds: tuple[Kind, ...] = ("self",)
    blocks: Collection[int] | None = None
    steps: Collection[int] | None = None
    granularity: Literal["token", "key", "frame", "map"] = "token"
    is_logits: bool = True
    mass: bool = True
    rope_bands: bool = False  # "frame" keeps the mean logits by RoPE band too, [B, H, Fq, Fk, bands]
    query_key_means: bool = False  # "frame" keeps the means of q and of the block's own k before RoPE too
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
        for name in ("rope_bands", "query_key_means"):
            if getattr(self, name) and (self.granularity != "frame" or "self" not in self.kinds):
                raise ValueError(f"{name} needs granularity 'frame' of self-attention")
        if self.heads is not None and self.granularity != "map":
            raise ValueError(f"heads are chosen of granularity 'map'; {self.granularity!r} keeps all")
        queries = tuple(MapQuery(*query) for query in self.queries)
        object.__setattr__(self, "queries", queries)
        if not queries or len({*queries}) < len(queries):
            raise ValueError(f"granularity 'map' needs queries, each once: {list(map(tuple, queries))}")
        for frame, token in queries:
            if min(frame, token) < ALL or (frame == ALL and token != ALL):
                raise ValueError(f"query ({frame}, {token}) is not (frame, token), (frame, -1) or (-1, -1)")

    def selects(self, site: Site) -> bool:
        """Return whether the calls of an attention module are asked for."""
        return site.kind in self.kinds and (self.layers is None or site.layer in self.layers)

    def wants(self, site: Site, at: Pass | None) -> bool:
        """Return whether the call of a site in a pass is asked for."""
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


# --- What is kept of a call: of the q and k that its softmax saw, and of what edits added to its logits
def values_of(request: CaptureRequest, call: Call) -> dict[str, Tensor]:
    """Compute the quantities that a request asks for, by name; ValueError where the call cannot have them."""
    q, k, mask = call.q, call.k, call.mask
    on_host = None if call.bias is None else call.bias.per_token()
    bias = None if on_host is None else send(on_host, q.device)
    if request.granularity == "token":
        name = "token_logits" if request.is_logits else "token_probabilities"
        matrix = reductions.token_matrix(q, k, request.is_logits, request.token_dtype, mask, bias)
        attended = _attended((*matrix.shape[:2], 1, matrix.shape[3]), on_host, q.device)
        return {name: matrix} | attended | reductions.key_names(call.layout, k)
    if request.granularity == "key":
        curve = reductions.with_bias(reductions.key_curve(q, k, mask), bias)
        attended = _attended(curve.shape, on_host, q.device)
        return {"key_curve": curve} | attended | reductions.key_names(call.layout, k)
    if call.at is None:
        raise ValueError(
            f"{request.granularity} granularity needs to know the frames of each call: run the model "
            "through the pipeline, or inside ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=...))"
        )
    if request.granularity == "map":
        return _map_values(request, call, call.at, on_host)
    num_query_frames = len(call.at.query_frames)
    if call.site.kind == "cross":
        mass = reductions.token_mass(q, k, num_query_frames, bias)
        return {"cross_mass": mass} | _attended(mass.shape, on_host, q.device)
    layout = call.known_layout
    if mask is not None:
        return reductions.masked_frames(q, k, mask, num_query_frames, len(layout.slots), request.mass)
    assert call.lse is not None
    bands = list(RotaryTable(q.shape[-1]).bands.values()) if request.rope_bands else []
    values = reductions.frame_values(
        q, k, call.lse, layout, num_query_frames, request.mass, bands, call.bias, call.tails
    )
    if request.query_key_means:
        S, own = layout.tokens_per_slot, [n for n in layout.own if layout.frames[n] in call.at.query_frames]
        positions = [layout.positions[n] for n in own]
        own_k = k.unflatten(1, (-1, S))[:, own[0] : own[-1] + 1].flatten(1, 2)
        values["query_means"] = reductions.temporal_means(q, positions)
        values["key_means"] = reductions.temporal_means(own_k, positions)
    return values


def _attended(shape: Sequence[int], bias: Tensor | None, device: torch.device) -> dict[str, Tensor]:
    """Which keys were attended, bool of this shape [B, H, ..., keys]; nothing where all were.

    The bias [H, keys] is on the host, which thus need not ask the device.
    """
    if bias is None or bias.isfinite().all():
        return {}
    view = send(bias.isfinite(), device).view(bias.shape[0], *[1] * (len(shape) - 3), bias.shape[1])
    return {"attended": view.expand(shape).clone()}


def _map_values(request: CaptureRequest, call: Call, at: Pass, bias: Tensor | None) -> dict[str, Tensor]:
    """Return what a request for maps keeps of a call, whose bias [H, Lk] is on the host."""
    if call.mask is not None:
        raise ValueError("granularity 'map' is of rollouts: a training step with a mask has none")
    shard = call.shard
    heads = list(shard.heads) if request.heads is None else list(request.heads)
    for head in heads:
        if not 0 <= head < shard.total:
            raise ValueError(f"head {head} is not in 0..{shard.total - 1}")
    if not shard.is_whole and heads != sorted(heads):
        raise ValueError(f"several GPUs keep maps of heads in ascending order, not of {heads}")
    here = shard.local(heads)
    some = here or [0]  # a process without any of them keeps maps of 0 heads
    q, k = select(call.q, some, 2), select(call.k, some, 2)
    of_heads = None if bias is None else select(bias, some, 0)
    added = None if of_heads is None else send(of_heads, q.device)
    if call.site.kind == "cross":
        values = {"word_map": word_map(q, k, request.num_words, added)}
    else:
        assert call.lse is not None
        S, lse = call.known_layout.tokens_per_slot, select(call.lse, some, 1)
        values = key_maps(q, k, lse, request.queries, at.query_frames, S, added)
        values |= _attended((*values["map_mass"].shape[:2], 1, k.shape[1]), of_heads, q.device)
    return values if here else {n: x if n == "map_queries" else x[:, :0] for n, x in values.items()}


def key_maps(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    queries: Sequence[MapQuery],
    query_frames: Sequence[int],
    tokens_per_slot: int,
    bias: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return map_logits and map_mass [B, H, n, Lk], float16, and map_queries [n, 2], whose rows they are.

    q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq]; bias [H, Lk] was added to the logits, -inf where a key
    was left out. Mass is times tokens_per_slot; logits that were left out are NaN.
    """
    found = queries_of(queries, query_frames)
    S = q.shape[1] // len(query_frames)
    if late := [query for query in found if query.token >= S]:
        raise ValueError(f"token {late[0].token} is not in 0..{S - 1}")
    shape = (q.shape[0], q.shape[2], len(found), k.shape[1])
    logits, mass = (torch.empty(shape, dtype=torch.float16, device=q.device) for _ in range(2))
    alone = [row for row, query in enumerate(found) if query.token != ALL]
    places = [query_frames.index(found[row].frame) * S + found[row].token for row in alone]
    number = 0
    for rows in reductions.scaled_logits(select(q, places, 1), k, bias=bias) if alone else ():
        for of_token, of_mass in zip(rows.unbind(2), rows.softmax(-1).unbind(2), strict=True):
            logits[:, :, alone[number]] = reductions.absent(of_token)
            mass[:, :, alone[number]] = of_mass * tokens_per_slot
            number += 1
    for row, query in enumerate(found):
        if query.token == ALL:
            first = 0 if query.frame == ALL else query_frames.index(query.frame) * S
            some = slice(first, q.shape[1] if query.frame == ALL else first + S)
            means, columns = reductions.key_token_means(q[:, some], k, lse[:, :, some], bias)
            logits[:, :, row], mass[:, :, row] = means, columns * tokens_per_slot
    return {"map_logits": logits, "map_mass": mass, "map_queries": torch.tensor(found)}


def word_map(q: Tensor, k: Tensor, num_words: int | None, bias: Tensor | None = None) -> Tensor:
    """Softmax of cross-attention of every query on the first words -> float16 [B, H, Lq, words].

    DAAM's map (arXiv 2210.04885). num_words None keeps all text tokens, padding too.
    """
    rows = (part.softmax(-1)[..., :num_words].half() for part in reductions.scaled_logits(q, k, bias=bias))
    return torch.cat([*rows], 2)


# --- Heads of one layer that see keys of their own, as one call
BY_FRAME = ("frame_logits", "frame_mass")  # what is kept of calls whose heads see different frames


def joint_layout(columns: Sequence[Sequence[int]], like: KeyLayout) -> KeyLayout:
    """Return a layout of all frames that some head sees."""
    frames = sorted({frame for frames in columns for frame in frames})
    slots = tuple(Slot(frame, frame) for frame in frames)
    return KeyLayout(slots, like.tokens_per_slot, query_positions=like.query_positions)


def spread(values: Tensor, seen: Sequence[int], frames: Sequence[int]) -> Tensor:
    """Values [..., seen] by some frames as values [..., frames], NaN for those that are not among them."""
    whole = values.new_full((*values.shape[:-1], len(frames)), torch.nan)
    whole[..., as_index([frames.index(frame) for frame in seen], values.device)] = values
    return whole


class Asked(NamedTuple):
    """Hold requests that were made together and what was kept for them so far."""

    requests: tuple[CaptureRequest, ...]
    calls: list[CapturedCall]


NOTHING = Asked((), [])


class AttentionCapture:
    """Take the reports of attention modules; idle until a request is made, and idle again when it ends.

    capture() belongs to the context that opened it; _asked, of the older interface, to the whole process.
    """

    call_type: type[CapturedCall] = CapturedCall

    def __init__(self) -> None:
        self._asked = NOTHING
        self._inner: ContextVar[Asked | None] = ContextVar("asked", default=None)

    @property
    def asked(self) -> Asked:
        """Return the innermost capture of this context."""
        return self._inner.get() or self._asked

    # -- asking ----------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self, *requests: CaptureRequest, **fields: Any) -> Iterator[list[CapturedCall]]:
        """Keep what the requests (or one request of the given fields) ask for while the context lasts.

        Yields the list of calls, on the CPU once the context has ended. On exit, also on an error, what was
        asked for before is asked for again.
        """
        with self.serving(Asked(requests or (CaptureRequest(**fields),), [])) as calls:
            yield calls
        move_to_cpu(calls)

    @contextmanager
    def serving(self, asked: Asked = NOTHING) -> Iterator[list[CapturedCall]]:
        """Serve what is asked, or nobody, while the context lasts."""
        before = self._inner.get()
        self._inner.set(asked)
        try:
            yield asked.calls
        finally:
            self._inner.set(before)

    @property
    def active(self) -> bool:
        return bool(self.asked.requests)

    @property
    def now(self) -> Pass | None:
        """The forward that runs, as the sampler announced it."""
        return now()

    # -- being told ------------------------------------------------------------------------------------------

    def check_model(
        self, num_layers: int, num_blocks: int | None = None, num_passes: int | None = None
    ) -> None:
        """Raise ValueError where a request does not fit the model (and rollout) that is about to run."""
        for request in self.asked.requests:
            request.check(num_layers, num_blocks, num_passes)

    def during(self, at: Pass) -> AbstractContextManager[None]:
        """Announce the forward that runs inside this context."""
        return during(at)

    def wants(self, site: Site) -> bool:
        """Return whether the call that a site is about to make in this pass is asked for."""
        return any(request.wants(site, self.now) for request in self.asked.requests)

    def frames_weighed(self, site: Site, layout: KeyLayout | None) -> int:
        """Return in how many slots the mass of a site's next call is wanted; 0 where it is not."""
        if layout is None or layout.chosen or self.now is None or self.now.parts:
            return 0
        requests = [request for request in self.asked.requests if request.wants(site, self.now)]
        weighs = any(request.granularity == "frame" and request.mass for request in requests)
        return len(layout.slots) if weighs else 0

    def observe(self, call: Call) -> None:
        """Keep what is asked for of a call whose softmax is done."""
        for part in call.parts():
            for request in self.asked.requests:
                if request.wants(part.site, part.at):
                    shapes = tuple(part.q.shape), tuple(part.k.shape)
                    layout = part.layout and part.layout.on_host
                    self._keep(part, values_of(request, part), *shapes, layout)

    def observe_groups(self, calls: Sequence[Call]) -> None:
        """Keep frame values of heads with keys of their own as of one call; NaN for frames a head lacks."""
        for request in self.asked.requests if calls else ():
            if not request.wants(calls[0].site, self.now):
                continue
            if request.granularity != "frame" or request.rope_bands:
                raise ValueError("where heads keep keys of their own, calls are kept at granularity 'frame'")
            request = replace(request, query_key_means=False)
            parts = [values_of(request, call) for call in calls]
            columns = [call.known_layout.columns for call in calls]
            first = calls[0].known_layout
            tokens = calls[0].q.shape[1] // len(first.query_positions)
            layout = joint_layout(columns, replace(first, tokens_per_slot=tokens))
            num_heads, values = sum(call.q.shape[2] for call in calls), dict[str, Tensor]()
            for name in BY_FRAME:
                if name not in parts[0]:
                    continue
                batch, _, queries, _ = parts[0][name].shape
                values[name] = parts[0][name].new_empty(batch, num_heads, queries, len(layout.slots))
                for part, seen, call in zip(parts, columns, calls, strict=True):
                    heads = as_index(call.of_heads or (), call.q.device)
                    values[name][:, heads] = spread(part[name], seen, layout.frames)
            if any("attended" in part for part in parts):
                values["attended"] = ~values["frame_logits"].isnan()
            batch, length, _, head_dim = calls[0].q.shape
            keys = len(layout.slots) * layout.tokens_per_slot
            shapes = (batch, length, num_heads, head_dim), (batch, keys, num_heads, head_dim)
            self._keep(calls[0], values, *shapes, layout)

    def _keep(
        self,
        call: Call,
        values: dict[str, Tensor],
        q_shape: tuple[int, ...],
        k_shape: tuple[int, ...],
        layout: KeyLayout | None,
    ) -> None:
        start_copies(values)
        self.asked.calls.append(self.call_type(call.site, call.at, values, q_shape, k_shape, layout))

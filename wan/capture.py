"""Capture attention: select calls by site and pass, and keep reduced values of each.

Calls are identified, never counted: each attention module carries its Site, the rollout announces its Pass,
and the call brings its KeyLayout. Kept values are computed beside the call from its own q, k and log-sum-exp
(wan/reductions.py).
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from wan import errors, reductions, sites
from wan.attention import Call
from wan.keys import HeadShard, KeyLayout, RotaryTable, Slot, as_index, select, send, to_host, wait_for_host
from wan.sites import Pass, Site, current_pass, during

Kind = Literal["self", "cross", "cross_image"]


def call_index(site: Site) -> int:
    """Return the place of a site's call in one forward: 2N for self-attention of layer N, else 2N + 1."""
    return 2 * site.layer + (site.kind != "self")


# --- What was kept of a call
@dataclass(frozen=True, eq=False)
class CapturedCall(Mapping[str, Any]):
    """One attention call and what was kept of it: values by name, on the CPU once the capture has ended.

    call["layer"], call["frame_logits"], ...: a mapping of the call's facts and then its values. layer_idx and
    attn_weights are older names, of the call index and of token logits or probabilities.
    """

    site: Site
    at: Pass | None  # None where nobody announced the forward
    values: dict[str, Tensor] = field()  # type: ignore[assignment]  # in the place of Mapping.values()
    q_shape: tuple[int, ...]  # [B, Lq, H, D]
    k_shape: tuple[int, ...]  # [B, Lk, H, D]
    layout: KeyLayout | None = None  # None for cross-attention
    item: int | None = None  # of a batch whose items keep other keys, and have calls of their own
    check: sites.FrameCheck | None = None  # of somebody's model: how sure it is where its frames lie
    beside: tuple[tuple[str, int], ...] = ()  # what condition_mass is of: names of keys, and how many each

    __eq__, __hash__ = object.__eq__, object.__hash__  # a call equals itself alone

    def __repr__(self) -> str:
        place = f"{self.site.kind}-attention of layer {self.site.layer}"
        if self.at is not None:
            place += f", block {self.at.block}, step {self.at.step}"
        shapes = [f"{name} {list(value.shape)}" for name, value in self.values.items()]
        return f"CapturedCall: {place}; {', '.join(shapes)}"

    def of_item(self, item: int) -> "CapturedCall":
        """Return the call of one item of a batch."""
        if self.item is not None:
            assert self.item == item
            return self
        values = dict(self.values)
        for name in values.keys() - {"map_queries"}:
            values[name] = values[name][item : item + 1].clone()
        q_shape, k_shape = ((1, *shape[1:]) for shape in (self.q_shape, self.k_shape))
        return replace(self, values=values, q_shape=q_shape, k_shape=k_shape)

    @property
    def frames(self) -> sites.Checked | None:
        """How sure it is where frames lie: "verified", "told" or "unverified"; None for models of ours."""
        if self.check is None:
            return None
        return self.check.of_call(self.site)

    @property
    def is_logits(self) -> bool:
        """True where the values hold logits q·k/√D; probabilities and masses otherwise."""
        return (
            not {"token_probabilities", "cross_mass", "image_mass", "word_map", "word_share"}
            & self.values.keys()
        )

    @property
    def named(self) -> dict[str, Any]:
        """Site, pass and keys of the call, None for what is unknown; then its values."""
        facts: dict[str, object] = {
            "layer_idx": call_index(self.site),
            "layer": self.site.layer,
            "kind": self.site.kind,
            "q_shape": list(self.q_shape),
            "k_shape": list(self.k_shape),
            "is_logits": self.is_logits,
            "frames": self.frames,
            "beside": [list(part) for part in self.beside],
        }
        of_pass = ("block", "step", "evaluation", "timestep", "is_clean_pass", "branch", "model")
        facts |= dict.fromkeys((*of_pass, "query_frames")) | {"frame_timesteps": {}}
        if self.at is not None:
            facts |= {name: getattr(self.at, name) for name in of_pass}
            facts["query_frames"] = list(self.at.query_frames)
            # An absent frame counts as clean.
            levels = dict(self.at.levels) or dict.fromkeys(self.at.query_frames, self.at.timestep)
            facts["frame_timesteps"] = levels
        facts |= dict.fromkeys(("key_frames", "slot_frame", "slot_position", "slot_tokens"))
        if self.layout is not None:
            facts |= {
                "key_frames": list(self.layout.columns),  # of the columns of frame_logits
                "slot_frame": list(self.layout.frames),
                "slot_position": list(self.layout.positions),
                "slot_tokens": [self.layout.tokens_per_slot] * len(self.layout.slots),
            }
        for name in ("token_logits", "token_probabilities"):
            if name in self.values:
                facts["attn_weights"] = self.values[name]
        return facts | self.values

    def __getitem__(self, name: str) -> Any:
        return self.named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return sum(1 for _ in self)


SMALL = 1 << 15  # elements; values up to here wait for the end: pinned memory of their own costs more


def move_to_cpu(calls: Collection[CapturedCall]) -> None:
    """Copy captured tensors to the CPU, those not on their way yet in one copy per shape and pass.

    Small values of a pass share memory: separate memory would take 6 us each, thousands of times.
    """
    pinned, waiting = False, dict[Any, list[tuple[dict[str, Tensor], str, Tensor]]]()
    for call in calls:
        for name, value in call.values.items():
            if value.is_cuda:
                alike = id(call.at), value.shape, value.dtype, value.device
                waiting.setdefault(alike, []).append((call.values, name, value))
            elif value.numel() > SMALL:
                pinned = pinned or value.is_pinned()
    if pinned:
        wait_for_host()
    for small in waiting.values():  # a copy of each would wait for the GPU a thousand times
        together = torch.stack([value for *_, value in small]).cpu()
        for (values, name, _), value in zip(small, together.unbind(), strict=True):
            values[name] = value


# --- What is asked for
ALL = -1


class MapQuery(NamedTuple):
    """Whose map: of all queries of a call, of one query frame (its global index), or of one of its tokens.

    Tokens count from 0, row by row.
    """

    frame: int = ALL
    token: int = ALL


def queries_of(queries: Sequence[MapQuery], query_frames: Sequence[int]) -> list[MapQuery]:
    """Return the queries that belong to a call with these query frames."""
    return [query for query in queries if query.frame in (ALL, *query_frames)]


@dataclass(frozen=True)
class CaptureRequest:
    """Which calls to keep and what of them. None selects all, but no recache (Pass).

    granularity: "token" keeps [B, H, Lq, Lk] on the CPU in token_dtype, logits q·k/√D or probabilities; "key"
    the query-averaged logits [B, H, Lk]; "frame" mean logits and, with mass, the mass per frame [B, H, Fq,
    Fk]. Of cross-attention, "frame" keeps the mass per token [B, H, Fq, tokens]. "map" keeps what each
    of the queries sees of every key token [B, heads, queries, Lk]; of cross-attention the mass of every query
    token on the first num_words words [B, heads, Lq, words]. "words" keeps the mass of every token of the
    video on words of the prompt [B, 1 or H, Lq, words], of the conditional branch.
    """

    layers: Collection[int] | None = None
    kinds: tuple[Kind, ...] = ("self",)
    blocks: Collection[int] | None = None
    steps: Collection[int] | None = None
    granularity: Literal["token", "key", "frame", "map", "words"] = "token"
    is_logits: bool = True
    mass: bool = True
    rope_bands: bool = False  # "frame" keeps the mean logits by RoPE band too, [B, H, Fq, Fk, bands]
    query_key_means: bool = False  # "frame" keeps the means of q and of the block's own k before RoPE too
    token_dtype: torch.dtype = torch.float32
    heads: tuple[int, ...] | None = None  # of "map" and "words", in this order
    queries: tuple[MapQuery, ...] = (MapQuery(),)  # of "map": (frame, token), (frame, -1) or (-1, -1)
    num_words: int | None = None  # of "map" and cross-attention
    words: Sequence[tuple[tuple[int, ...], ...]] = ()  # of "words": tokens by item and word
    by_head: bool = False  # "words" keeps each head; else their mean
    call_indices: frozenset[int] | None = None  # in place of layers and kinds: how older scripts say it
    num_calls: int | None = None  # what such a script said of the model

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", tuple(MapQuery(*query) for query in self.queries))
        problem = self.conflict()
        if problem:
            raise errors.ConfigError(problem)

    def conflict(self) -> str:
        """Say which fields have no meaning, or none together; "" for none."""
        queries = self.queries
        wrong = [query for query in queries if min(query) < ALL or (query.frame == ALL != query.token)]
        of_frames = self.granularity == "frame" and "self" in self.kinds
        kind, granularities = self.granularity, ("token", "key", "frame", "map", "words")
        for name in ("is_logits", "mass", "rope_bands", "query_key_means"):
            if not isinstance(getattr(self, name), bool):
                return f"{name} {errors.short_repr(getattr(self, name))} should be True or False"
        if kind not in granularities:
            return f"granularity {kind!r} is not one of {', '.join(granularities)}"
        if not {*self.kinds} <= {*get_args(Kind)}:
            return f"kinds {self.kinds} may hold {', '.join(get_args(Kind))}"
        if kind == "key" and not self.is_logits:
            return "probabilities need granularity 'token', not 'key'"
        # A field that the granularity does not read would be ignored in silence
        if self.rope_bands and not of_frames:
            return "rope_bands needs granularity 'frame' of self-attention"
        if self.query_key_means and not of_frames:
            return "query_key_means needs 'frame' of self-attention"
        if (kind == "words") != bool(self.words):
            return "granularity 'words' takes words, the numbers of their tokens"
        if self.heads is not None and kind not in ("map", "words"):
            return f"heads need granularity 'map' or 'words', not {kind!r}"
        if not queries or len({*queries}) < len(queries):
            return "granularity 'map' needs queries, each once"
        if self.heads is not None and len({*self.heads}) < len(self.heads):
            return f"heads {errors.short_repr(self.heads)} should be named once each"
        if wrong:
            shown = [*map(tuple, wrong)]
            return f"queries {shown} are not (frame, token), (frame, -1) or (-1, -1)"
        return ""

    def wants(self, site: Site, at: Pass | None) -> bool:
        """Return whether the call of a site in a pass is asked for; at None: where nobody announced it."""
        if self.call_indices is None:
            selected = site.kind in self.kinds and (self.layers is None or site.layer in self.layers)
        else:
            selected = call_index(site) in self.call_indices
        if not selected or at is None:
            return selected
        if self.granularity == "words" and at.branch == "uncond":
            return False  # its text is another one
        of_map = self.granularity == "map" and site.kind == "self"
        return sites.asks_for(self, None, at) and not (
            of_map and not queries_of(self.queries, at.query_frames)
        )

    def check(self, num_layers: int, num_blocks: int | None = None, num_passes: int | None = None) -> None:
        """Raise ConfigError for a layer, block or step that this model and rollout do not have."""
        count = 2 * num_layers
        if self.num_calls not in (None, count):
            remedy = f"this model has {count} attention calls; pass num_layers={count}"
            raise errors.ConfigError(f"num_layers={self.num_calls}: {remedy}")
        sites.check_indices("call index", self.call_indices, count)
        sites.check_indices("layer", self.layers, num_layers)
        sites.check_indices("block", self.blocks, num_blocks)
        sites.check_indices("step", self.steps, num_passes)


MASS_OF = {"cross": "cross_mass", "cross_image": "image_mass"}  # of every token, where there are no frames
MATRIX = {True: "token_logits", False: "token_probabilities"}  # by is_logits


# --- What is kept of a call: of the q and k that its softmax saw, and of what edits added to its logits
def values_of(request: CaptureRequest, call: Call) -> dict[str, Tensor]:
    """Compute what a request asks for, by name; ConfigError where the call cannot have it."""
    of_text = request.granularity == "map" and call.site.kind != "self"
    if of_text or request.granularity == "words":
        return _word_values(request, call)
    # 1. What edits added to the logits [H, Lk]: what is captured is what the softmax saw.
    is_masked = call.mask is not None or call.runs is not None
    if is_masked or any(call.around) or any(call.around_q):
        return _masked_values(request, call)
    q, k = call.q, call.k
    on_host: Tensor | None = None
    bias: Tensor | None = None
    if call.bias is not None:
        on_host = call.bias.per_token()
        bias = send(on_host, q.device)
    # 2. Matrices and curves of tokens need no frames.
    if request.granularity == "token":
        matrix = reductions.token_matrix(q, k, request.is_logits, request.token_dtype, bias)
        attended = _attended((*matrix.shape[:2], 1, matrix.shape[3]), on_host, q.device)
        return {MATRIX[request.is_logits]: matrix} | attended | reductions.key_names(call.layout, k)
    if request.granularity == "key":
        curve = reductions.with_bias(reductions.key_curve(q, k), bias)
        attended = _attended(curve.shape, on_host, q.device)
        return {"key_curve": curve} | attended | reductions.key_names(call.layout, k)
    # 3. All else is by frame.
    at = call.at or sites.announced_pass()
    if request.granularity == "map":
        return _map_values(request, call, at, on_host)
    num_query_frames = len(at.query_frames)
    # 4. Cross-attention has words in place of frames: a mean logit over padding would say nothing.
    if call.site.kind != "self":
        mass = reductions.token_mass(q, k, num_query_frames, bias)
        return {MASS_OF[call.site.kind]: mass} | _attended(mass.shape, on_host, q.device)
    layout = call.key_layout
    bands = []
    if request.rope_bands:
        bands = list(RotaryTable(q.shape[-1]).bands.values())
    values = reductions.frame_values(
        q,
        k,
        lse=call.lse,
        layout=layout,
        num_query_frames=num_query_frames,
        mass=request.mass,
        bands=bands,
        bias=call.bias,
        tails=call.tails,
    )
    # 5. Means of q and of the block's own k before RoPE, from which curves over distance follow.
    if request.query_key_means and call.at is not None:
        S = layout.tokens_per_slot
        slots = [n for n in layout.own if layout.frames[n] in call.at.query_frames]
        positions = [layout.positions[n] for n in slots]
        own_k = k[:, slots[0] * S : (slots[-1] + 1) * S]
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


def _masked_values(request: CaptureRequest, call: Call) -> dict[str, Tensor]:
    """values_of a call with a mask of the model's own, or with tokens of no frame beside those of the video.

    Means are over the pairs that are seen; logits are NaN where none is. "token" keeps all tokens of a call,
    the others those of frames; "frame" adds condition_mass [B, H, Fq, tokens], on each token of no frame.
    """
    if request.rope_bands:
        raise errors.ConfigError("rope_bands are of calls without a mask and without text among the frames")
    if request.query_key_means:
        raise errors.ConfigError("query_key_means are of calls without a mask and text among the frames")
    if call.runs is not None:  # frames alone are asked for
        return reductions.values_of_runs(
            call.q,
            call.k,
            call.runs,
            num_query_frames=len((call.at or sites.announced_pass()).query_frames),
            num_slots=len(call.key_layout.slots),
            around=call.around,
            around_q=call.around_q,
            mass=request.mass,
        )
    # 1. What was added to the logits of all keys, and the rows of queries that are of frames.
    (before, behind), mask, k, bias = call.around, call.mask, call.k, None
    if call.bias is not None:
        bias = send(F.pad(call.bias.per_token(), (before, behind)), k.device)
    if request.granularity == "token":
        name = MATRIX[request.is_logits]
        return {name: reductions.token_matrix(call.q, k, request.is_logits, request.token_dtype, bias, mask)}
    keys = slice(before, k.shape[1] - behind)
    rows = slice(call.around_q[0], call.q.shape[1] - call.around_q[1])
    q, mask = call.q[:, rows], reductions.rows_of_mask(mask, rows)
    # 2. A curve, maps, or cross-attention's words.
    if request.granularity == "key":
        sums, pairs, _ = reductions.visible_sums(q, k, groups=1, mask=mask, bias=bias)
        return {"key_curve": (sums / pairs)[:, :, 0, keys]}
    at = call.at or sites.announced_pass()
    if request.granularity == "map":
        return _masked_maps(request, call, at, (q, k, mask, bias), keys)
    sums, pairs, mass = reductions.visible_sums(q, k, groups=len(at.query_frames), mask=mask, bias=bias)
    if call.site.kind != "self":
        return {MASS_OF[call.site.kind]: mass}
    # 3. Frames: 0 / 0 is NaN where a frame has no key that is seen.
    sums, pairs, of_frames = (
        x[..., keys].unflatten(-1, (len(call.key_layout.slots), -1)).sum(-1) for x in (sums, pairs, mass)
    )
    values = {"frame_logits": sums / pairs}
    if request.mass:
        values["frame_mass"] = of_frames
        if before or behind:
            values["condition_mass"] = torch.cat([mass[..., :before], mass[..., keys.stop :]], -1)
    if bool((pairs == 0).any()):
        values["attended"] = pairs > 0
    return values


def _masked_maps(
    request: CaptureRequest, call: Call, at: Pass, parts: tuple[Tensor, Tensor, Any, Any], keys: slice
) -> dict[str, Tensor]:
    """_map_values of such a call: its q, k, mask and bias, and the keys that are of frames."""
    here = _heads_of(request, call.shard)
    heads = here or [0]
    q, k, mask, bias = parts
    q, k, bias = select(q, heads, 2), select(k, heads, 2), _selected(bias, heads, 0)
    if mask is not None and mask.shape[1] > 1:
        mask = select(mask, heads, 1)
    queries, S = queries_of(request.queries, at.query_frames), call.key_layout.tokens_per_slot
    sites.check_indices("token", [query.token for query in queries if query.token != ALL], S)
    logits, masses = [], []
    for query in queries:
        rows = _rows_of(query, at.query_frames, S, q.shape[1])
        rows_mask = reductions.rows_of_mask(mask, rows)
        sums, pairs, mass = reductions.visible_sums(q[:, rows], k, groups=1, mask=rows_mask, bias=bias)
        logits.append((sums / pairs)[..., keys].half())
        masses.append((mass * S)[..., keys].half())
    maps = {"map_logits": torch.cat(logits, 2), "map_mass": torch.cat(masses, 2)}
    return _of_heads(maps, here) | {"map_queries": torch.tensor(queries)}


def _word_values(request: CaptureRequest, call: Call) -> dict[str, Tensor]:
    """Return word_share [B, heads or 1, Lq, words] of the video's tokens; of joint attention text_share, too.

    text_share is the mass that a word's own queries give to every token of the video, summed over its tokens.
    Of a request for maps each token of the text is a word: word_map [B, heads, Lq, num_words], float16.
    """
    # 1. The heads, with what was added to their logits; the queries and keys of the video's tokens.
    here = _heads_of(request, call.shard)
    heads = here or [0]
    all_q, all_k = select(call.q, heads, 2), select(call.k, heads, 2)
    bias: Tensor | None = None
    if call.bias is not None:
        bias = send(F.pad(select(call.bias.per_token(), heads, 0), call.around), call.k.device)
    lse, mask = _selected(call.lse, heads, 1), call.mask
    if mask is not None and mask.shape[1] > 1:
        mask = select(mask, heads, 1)
    rows = slice(call.around_q[0], call.q.shape[1] - call.around_q[1])
    keys = slice(call.around[0], call.k.shape[1] - call.around[1])
    if request.granularity == "map":
        rows_mask = reductions.rows_of_mask(mask, rows)
        word_maps = word_map(all_q[:, rows], all_k, request.num_words, bias=bias, mask=rows_mask)
        return _of_heads({"word_map": word_maps}, here)
    if call.text is None:
        raise errors.ConfigError(
            f"layer {call.site.layer}: which keys are of text is not known here; leave words out"
        )
    # 2. Items have prompts of their own.
    masses, masses_of_text = [], []
    for item in range(len(call.q)):
        words = request.words[item % len(request.words)]
        q, k, mask_of_item, lse_of_item = all_q[item : item + 1], all_k[item : item + 1], mask, lse
        if mask is not None and len(mask) > 1:
            mask_of_item = mask[item : item + 1]
        if lse is not None:
            lse_of_item = lse[item : item + 1, :, rows]
        columns = [[call.text + token for token in word] for word in words]
        rows_mask = reductions.rows_of_mask(mask_of_item, rows)
        mass = reductions.word_mass(q[:, rows], k, columns, lse=lse_of_item, bias=bias, mask=rows_mask)
        masses.append(mass)
        # 3. Joint attention: queries of the word, which stand behind or before the video's as its keys do.
        if call.site.kind == "self":
            shift = call.q.shape[1] - call.k.shape[1]
            queries = [[column + shift for column in word] for word in columns]
            of_text = reductions.mass_of_queries(q, k, queries, bias=bias, mask=mask_of_item)
            masses_of_text.append(of_text[..., keys].mT)
    values = {"word_share": torch.cat(masses)}
    if masses_of_text:
        values["text_share"] = torch.cat(masses_of_text)
    # 4. The mean over heads; several GPUs have some of them each, and keep them.
    if request.by_head:
        return _of_heads({name: value.half() for name, value in values.items()}, here)
    if call.shard.is_whole:
        return {name: value.mean(1, keepdim=True) for name, value in values.items()}
    return _of_heads(values, here)


def _map_values(request: CaptureRequest, call: Call, at: Pass, bias: Tensor | None) -> dict[str, Tensor]:
    """Return what a request for maps keeps of a call, whose bias [H, Lk] is on the host."""
    here = _heads_of(request, call.shard)
    computed = here or [0]
    q, k, bias = select(call.q, computed, 2), select(call.k, computed, 2), _selected(bias, computed, 0)
    on_device = None
    if bias is not None:
        on_device = send(bias, q.device)
    values = key_maps(
        q,
        k,
        lse=_selected(call.lse, computed, 1),
        queries=request.queries,
        query_frames=at.query_frames,
        tokens_per_slot=call.key_layout.tokens_per_slot,
        bias=on_device,
    )
    values |= _attended((*values["map_mass"].shape[:2], 1, k.shape[1]), bias, q.device)
    return _of_heads(values, here)


def _heads_of(request: CaptureRequest, shard: HeadShard) -> list[int]:
    """Return the heads of a request for maps that are here, by their local numbers: all if it names none.

    Gathering puts those of several processes one behind the other. ConfigError for heads that are not there.
    """
    if request.heads is None:
        return shard.local(shard.heads)
    heads = list(request.heads)
    sites.check_indices("head", heads, shard.total)
    if not shard.is_whole and heads != sorted(heads):
        raise errors.ConfigError(f"several GPUs keep maps of heads in ascending order, not of {heads}")
    return shard.local(heads)


def _of_heads(values: dict[str, Tensor], heads: Sequence[int]) -> dict[str, Tensor]:
    """Return maps [B, H, ...]; of 0 heads in a process that has none of those that are asked for."""
    if heads:
        return values
    return {name: value if name == "map_queries" else value[:, :0] for name, value in values.items()}


def _selected(x: Tensor | None, numbers: Sequence[int], dim: int) -> Tensor | None:
    """select() of a tensor that may be absent."""
    if x is None:
        return None
    return select(x, numbers, dim)


def _rows_of(query: MapQuery, query_frames: Sequence[int], tokens: int, length: int) -> slice:
    """Return the rows of a query among length queries of frames of so many tokens."""
    if query.frame == ALL:
        return slice(0, length)
    first = query_frames.index(query.frame) * tokens
    if query.token == ALL:
        return slice(first, first + tokens)
    return slice(first + query.token, first + query.token + 1)


def key_maps(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    queries: Sequence[MapQuery],
    query_frames: Sequence[int],
    tokens_per_slot: int,
    bias: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return map_logits and map_mass [B, H, n, Lk], float16, and map_queries [n, 2], whose rows they are.

    q [B, Lq, H, D], k [B, Lk, H, D], lse [B, H, Lq]; bias [H, Lk] was added to the logits, -inf where a key
    was left out. Mass is times tokens_per_slot; logits that were left out are NaN.
    """
    # 1. Which rows of q the queries of this call are: frame f holds rows f·S to f·S + S - 1.
    queries = queries_of(queries, query_frames)
    S = q.shape[1] // len(query_frames)
    sites.check_indices("token", [query.token for query in queries if query.token != ALL], S)
    shape = (q.shape[0], q.shape[2], len(queries), k.shape[1])
    logits, mass = (torch.empty(shape, dtype=torch.float16, device=q.device) for _ in range(2))
    # 2. Single tokens: their rows of the softmax are formed.
    alone = [row for row, query in enumerate(queries) if query.token != ALL]
    if alone:
        places = [query_frames.index(queries[row].frame) * S + queries[row].token for row in alone]
        rows_left = iter(alone)
        for part in reductions.scaled_logits(select(q, places, 1), k, bias):
            for of_token, of_mass in zip(part.unbind(2), part.softmax(-1).unbind(2), strict=True):
                row = next(rows_left)
                logits[:, :, row] = reductions.absent(of_token)
                mass[:, :, row] = of_mass * tokens_per_slot
    # 3. Whole frames or calls: means over their queries, without the matrix.
    for row, query in enumerate(queries):
        if query.token == ALL:
            rows = _rows_of(query, query_frames, S, q.shape[1])
            lse_rows = None
            if lse is not None:
                lse_rows = lse[:, :, rows]
            means, columns = reductions.key_token_means(q[:, rows], k, lse_rows, bias)
            logits[:, :, row], mass[:, :, row] = means, columns * tokens_per_slot
    return {"map_logits": logits, "map_mass": mass, "map_queries": torch.tensor(queries)}


def word_map(
    q: Tensor, k: Tensor, num_words: int | None, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Softmax of cross-attention of every query on the first words -> float16 [B, H, Lq, words].

    DAAM's map (arXiv 2210.04885). num_words None keeps all text tokens, padding too.
    """
    parts = reductions.scaled_logits(q, k, bias, mask)
    return torch.cat([part.softmax(-1)[..., :num_words].half() for part in parts], 2)


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


def items_of(calls: Sequence[Call]) -> Iterator[tuple[Sequence[Call], int | None]]:
    """Yield the calls of a layer's heads, item by item with its number where items keep other keys.

    A frame that some item lacks has no column of its own then, as in that item's run alone.
    """
    is_batch = len(calls[0].q) > 1
    if is_batch and any(call.layout is not None and call.layout.differs for call in calls):
        for item in range(len(calls[0].q)):
            yield [call.of_item(item) for call in calls], item
    else:
        yield calls, None


# --- Keep what is asked for
@dataclass(eq=False)
class Capture(AbstractContextManager[list[CapturedCall]]):
    """Requests of one capture, and the calls that were kept for them."""

    requests: tuple[CaptureRequest, ...]
    calls: list[CapturedCall] = field(default_factory=list)
    open: list[tuple[AbstractContextManager[None], list[CapturedCall]]] = field(default_factory=list)
    models: Container[int] | None = None  # ids of the transformers whose calls it takes; None: of any

    def __enter__(self) -> list[CapturedCall]:
        context = sites.observed(self)
        context.__enter__()
        self.open.append((context, self.calls))
        self.calls = []
        return self.calls

    def __exit__(self, *error: Any) -> None:
        (context, before), calls = self.open.pop(), self.calls
        self.calls = before
        context.__exit__(*error)
        if error[0] is None:
            move_to_cpu(calls)

    def wants(self, site: Site) -> bool:
        """Return whether a site's next call in this pass is requested."""
        return any(request.wants(site, current_pass()) for request in self.requests)

    def wants_frames_alone(self, site: Site) -> bool:
        """Return whether frame values, without bands, are all that is requested of a site's next call."""
        requests = [request for request in self.requests if request.wants(site, current_pass())]
        return all(request.granularity == "frame" and not request.rope_bands for request in requests)

    def slots_weighed(self, site: Site, layout: KeyLayout | None) -> int:
        """Return in how many slots the mass of a site's next call is wanted; 0 where it is not."""
        at = current_pass()
        # The kernel knows whole slots of one pass: no chosen tokens, no blocks at several noise levels.
        if layout is None or layout.chosen or at is None or at.parts:
            return 0
        requests = [request for request in self.requests if request.wants(site, at)]
        if any(request.granularity == "frame" and request.mass for request in requests):
            return len(layout.slots)
        return 0

    @torch.no_grad()
    def observe(self, call: Call) -> None:
        """Compute and keep what is requested of a finished call."""
        parts: Iterable[Call] = (call,)
        if call.at is not None and call.at.parts:
            parts = call.parts()
        for part in parts:
            requests = [request for request in self.requests if request.wants(part.site, part.at)]
            if not requests:
                continue
            for [of_item], item in items_of([part]):
                layout = of_item.layout and of_item.layout.on_host
                for request in requests:
                    values = values_of(request, of_item)
                    self._keep(of_item, values, of_item.q.shape, of_item.k.shape, layout, item)

    @torch.no_grad()
    def observe_groups(self, calls: Sequence[Call]) -> None:
        """Keep frame values of heads with keys of their own as of one call; NaN for frames a head lacks."""
        if calls and self.wants(calls[0].site):
            for of_item, item in items_of(calls):
                self._observe_groups(of_item, item)

    def _observe_groups(self, calls: Sequence[Call], item: int | None) -> None:
        for request in self.requests:
            if not request.wants(calls[0].site, current_pass()):
                continue
            if request.granularity != "frame" or request.rope_bands:
                raise errors.ConfigError(
                    "where heads keep keys of their own, calls are kept at granularity 'frame'"
                )
            # Each group has other key frames: columns are those of all, NaN where a head lacks one.
            request = replace(request, query_key_means=False)
            parts = [values_of(request, call) for call in calls]
            columns = [call.key_layout.columns for call in calls]
            first = calls[0].key_layout
            (batch, length, _, head_dim), queries = calls[0].q.shape, len(first.query_positions)
            layout = joint_layout(columns, replace(first, tokens_per_slot=length // queries))
            num_heads = sum(call.q.shape[2] for call in calls)
            values: dict[str, Tensor] = {}
            for name in BY_FRAME:
                if name not in parts[0]:
                    continue
                values[name] = parts[0][name].new_empty(batch, num_heads, queries, len(layout.slots))
                for part, seen, call in zip(parts, columns, calls, strict=True):
                    heads = as_index(call.of_heads or (), call.q.device)
                    values[name][:, heads] = spread(part[name], seen, layout.frames)
            if any("attended" in part for part in parts):
                values["attended"] = ~values["frame_logits"].isnan()
            keys = len(layout.slots) * layout.tokens_per_slot
            shapes = (batch, length, num_heads, head_dim), (batch, keys, num_heads, head_dim)
            self._keep(calls[0], values, *shapes, layout, item)

    def _keep(
        self,
        call: Call,
        values: dict[str, Tensor],
        q_shape: Any,
        k_shape: Any,
        layout: Any,
        item: int | None,
    ) -> None:
        """Keep values of a call; start copying large ones to pinned memory (move_to_cpu() waits for them)."""
        for name, value in values.items():
            if value.is_cuda and value.numel() > SMALL:
                values[name] = to_host(value.contiguous())
        self.calls.append(
            CapturedCall(
                site=call.site,
                at=call.at,
                values=values,
                q_shape=tuple(q_shape),
                k_shape=tuple(k_shape),
                layout=layout,
                item=item,
                check=call.check,
                beside=call.beside,
            )
        )


class AttentionCapture:
    """The capture of this process: capture() for a context, enable() and disable() for older scripts."""

    def capture(self, *requests: CaptureRequest, **fields: Any) -> AbstractContextManager[list[CapturedCall]]:
        """Keep what the requests (or one request of the given fields) ask for while the context lasts.

        Yields the list of calls, which are on the CPU after exit. On exit, also after an error, the previous
        capture is restored. It may be entered again, for another list.
        """
        return Capture(requests or (CaptureRequest(**fields),))

    @property
    def active(self) -> bool:
        """True if a capture is open in this context."""
        return sites.observer() is not None

    @property
    def current_pass(self) -> Pass | None:
        """The forward that runs, as the sampler announced it."""
        return current_pass()

    now = current_pass  # its name before 0.2, for one release

    def during(self, at: Pass) -> AbstractContextManager[None]:
        """Announce the forward that runs inside this context."""
        return during(at)

    _enabled = Capture(())

    def enable(
        self,
        layer_indices: Collection[int] | None = None,
        capture_logits: bool = True,
        num_layers: int | None = None,
    ) -> None:
        """Keep token matrices of the given call indices (None: all) until disable().

        num_layers is the number of call indices, twice the model's layers; ConfigError where an index is
        outside.
        """
        self.disable()
        sites.check_indices("call index", layer_indices, num_layers or 1 << 30)
        indices = None
        if layer_indices is not None:
            indices = frozenset(layer_indices)
        request = CaptureRequest(
            kinds=("self", "cross"), is_logits=capture_logits, call_indices=indices, num_calls=num_layers
        )
        self._enabled = Capture((request,))
        sites.observe_process(self._enabled)

    def disable(self) -> None:
        """Stop, and forget what was captured."""
        self._enabled = Capture(())
        sites.observe_process(None)

    @property
    def captured_weights(self) -> list[CapturedCall]:
        """What was kept since enable(), one call after the other, on the CPU; each reads like a dict."""
        move_to_cpu(self._enabled.calls)
        return self._enabled.calls


ATTENTION_WEIGHT_CAPTURE = AttentionCapture()

"""What chosen queries of one call see of every key token: mean logit and mass, for maps over video frames.

A map is a row for each query that was asked for: the mean over all queries of the call, over those of one
frame, or one token. Mass is stored times S, the tokens of a frame: its mean over a frame's tokens is the mass
of that frame.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from wan.modules import reductions
from wan.modules.captured_call import Pass, Site
from wan.modules.head_shard import HeadShard
from wan.modules.host_copies import picked
from wan.modules.key_layout import KeyLayout

if TYPE_CHECKING:
    from wan.modules.capture import CaptureRequest

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

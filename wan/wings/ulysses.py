"""Attention calls under diffusers' context parallelism (Ulysses, arXiv 2309.14509): all tokens of some heads.

    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    with capture(pipe, layers=[1]) as captured:  # in each of the processes that torchrun started
        pipe("a red circle moving right")
    captured.atlas()                             # of all heads, in the first process of the group

Between layers a process has some tokens of all heads. Attention exchanges them for all tokens of some heads,
and back; here the same exchange is made around the call that captures see.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wan import capture
from wan.errors import ConfigError
from wan.wings import parallel, peer_memory

WAIT = timedelta(minutes=3)  # for another process, which may still load something


@dataclass(frozen=True, eq=False)
class UlyssesShard(parallel.ProcessShard):
    """The heads of one process in the calls of a diffusers transformer."""

    of_tokens: parallel.Group  # diffusers' own, which exchanges tokens; that of ProcessShard is of CPUs
    counts: tuple[int, ...]  # heads of each process
    is_even: bool  # False: processes have different numbers of tokens

    def lengths(self, length: int) -> list[int]:
        """Return the number of tokens of each process, given that of this one."""
        if self.is_even:
            return [length] * self.size
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([length]), group=self.group)
        return [int(n) for n in lengths]

    def with_all_tokens(self, x: Tensor) -> Tensor:
        """Exchange some tokens of all heads [B, L/P, H, D] for all tokens of some heads [B, L, H/P, D]."""
        batch, length, _, head_dim = x.shape
        lengths, heads = self.lengths(length), len(self.heads)
        sent = torch.cat([part.flatten() for part in x.split(self.counts, 2)])
        sizes = [batch * n * heads * head_dim for n in lengths]
        arrived = self._exchanged(sent, [batch * length * n * head_dim for n in self.counts], sizes)
        parts = zip(arrived.split(sizes), lengths, strict=True)
        return torch.cat([part.view(batch, n, heads, head_dim) for part, n in parts], 1)

    def with_all_heads(self, x: Tensor, length: int) -> Tensor:
        """Exchange all tokens of some heads [B, L, H/P, D] for this process's tokens of all heads."""
        batch, _, heads, head_dim = x.shape
        lengths = self.lengths(length)
        sent = torch.cat([part.flatten() for part in x.split(lengths, 1)])
        sizes = [batch * length * n * head_dim for n in self.counts]
        arrived = self._exchanged(sent, [batch * n * heads * head_dim for n in lengths], sizes)
        parts = zip(arrived.split(sizes), self.counts, strict=True)
        return torch.cat([part.view(batch, length, n, head_dim) for part, n in parts], 2)

    def _exchanged(self, sent: Tensor, sizes: list[int], arriving: list[int]) -> Tensor:
        if sent.requires_grad:
            raise ConfigError(
                "no gradients are computed of a call that several GPUs share: use torch.no_grad(), or one GPU"
            )
        arrived = sent.new_empty(sum(arriving))
        dist.all_to_all_single(
            arrived, sent, output_split_sizes=arriving, input_split_sizes=sizes, group=self.of_tokens
        )
        return arrived

    def whole_call(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of all tokens and this process's heads, given those of its tokens.

        Keys and values of text that no process shares stay whole (parallel_config None).
        """
        keys, values, mask = (arguments[name] for name in ("key", "value", "attn_mask"))
        if arguments["parallel_config"] is None:
            keys, values = self.of(keys), self.of(values)
        else:
            if mask is not None and mask.shape[-1] == keys.shape[1]:
                mask = self._whole_mask(mask)
            keys, values = self.with_all_tokens(keys), self.with_all_tokens(values)
        if mask is not None and mask.ndim == 4 and mask.shape[1] == self.total:
            mask = mask[:, self.heads.start : self.heads.stop]
        changed = {
            "query": self.with_all_tokens(arguments["query"]),
            "key": keys,
            "value": values,
            "attn_mask": mask,
        }
        return {**arguments, **changed, "parallel_config": None}

    def _whole_mask(self, mask: Tensor) -> Tensor:
        """Join a mask [..., Lk/P] of all processes' keys."""
        lengths = self.lengths(mask.shape[-1])
        padded = F.pad(mask, (0, max(lengths) - mask.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.of_tokens)
        return torch.cat([part[..., :n] for part, n in zip(parts, lengths, strict=True)], -1)


@dataclass(frozen=True, eq=False)
class Ulysses:
    """The processes that share the tokens of a transformer."""

    of_tokens: parallel.Group  # diffusers' own
    group: parallel.Group  # of the same processes' CPUs
    is_even: bool  # all have as many tokens and heads

    def shard(self, num_heads: int) -> UlyssesShard:
        """Return this process's heads of a call. ConfigError where they do not split."""
        size, rank = self.group.size(), self.group.rank()
        if self.is_even and num_heads % size:
            raise ConfigError(
                f"{num_heads} heads do not split over {size} GPUs: take "
                "ContextParallelConfig(ulysses_degree=..., ulysses_anything=True)"
            )
        most = -(-num_heads // size)
        starts = [min(process * most, num_heads) for process in range(size + 1)]
        return UlyssesShard(
            heads=range(starts[rank], starts[rank + 1]),
            total=num_heads,
            group=self.group,
            all_to_all=peer_memory.AllToAll(self.of_tokens),
            peer_memory=None,
            of_tokens=self.of_tokens,
            counts=tuple(stop - start for start, stop in pairwise(starts)),
            is_even=self.is_even,
        )

    def whole_norms(self, norms: Tensor) -> Tensor:
        """Exchange norms [B, L/P, H, 4] of queries as their calls are."""
        return self.shard(norms.shape[2]).with_all_tokens(norms)

    def require_alike(self, requests: Sequence[capture.CaptureRequest]) -> None:
        """Wait for all processes. ConfigError where they do not capture the same."""
        described = [vars(request) | {"words": [*request.words]} for request in requests]
        digest = torch.tensor([zlib.crc32(repr(described).encode())])
        digests = [torch.empty_like(digest) for _ in range(self.group.size())]
        with _waiting():
            dist.all_gather(digests, digest, group=self.group)
        if len(set(map(int, digests))) > 1:
            raise ConfigError(
                "processes that share a transformer capture different things: ask all for the same"
            )

    def gathered(self, calls: Sequence[capture.CapturedCall]) -> list[capture.CapturedCall]:
        """Return captured calls with all heads in the first process, none in the others."""
        if not calls:
            return []
        capture.move_to_cpu(calls)
        shard = calls[0].site.shard
        assert shard is not None, "a call of another forward"
        whole = shard.gather_calls(calls)
        return [replace(call, site=replace(call.site, shard=None)) for call in whole]


@contextmanager
def _waiting() -> Iterator[None]:
    """Say in one line that another process did not come."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
            raise
        raise ConfigError(
            f"another process did not capture within {WAIT.seconds} s: all that share a transformer open the "
            "same captures"
        ) from error


_joined: dict[int, tuple[Any, Ulysses]] = {}  # by the id of a parallelism's settings, which are held


def processes_of(model: Any) -> Ulysses | None:
    """Return the processes that share a transformer's tokens; None where it runs on one GPU.

    ConfigError for tensor and ring parallelism, and for tokens that no plan splits.
    """
    config = getattr(model, "_parallel_config", None)
    if config is None:
        return None
    # 1. What is not seen.
    context, title = config.context_parallel_config, type(model).__name__
    if context is None:
        raise ConfigError(f"{title}: tensor parallelism cannot be seen; take one GPU, or context parallelism")
    if context.ring_degree > 1:
        raise ConfigError(
            f"{title}: ring attention cannot be seen, since no GPU has all keys; take "
            "ContextParallelConfig(ulysses_degree=...)"
        )
    registries = [getattr(part, "_diffusers_hook", None) for part in model.modules()]
    hooks = [name for registry in registries if registry is not None for name in registry.hooks]
    if not any(name.startswith("cp_input") for name in hooks):
        raise ConfigError(
            f"{title}: context parallelism has no plan of its tokens (cp_plan), and was not enabled"
        )
    # 2. The groups: all processes come here together, at their first forward that is watched.
    if id(context) not in _joined:
        of_tokens = context._ulysses_mesh.get_group()
        with _waiting():
            group = dist.new_group(
                dist.get_process_group_ranks(of_tokens),
                timeout=WAIT,
                backend="gloo",
                use_local_synchronization=True,
            )
        joined = Ulysses(of_tokens=of_tokens, group=group, is_even=not context.ulysses_anything)
        _joined[id(context)] = context, joined
    return _joined[id(context)][1]

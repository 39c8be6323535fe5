"""One rollout over several GPUs by heads (DeepSpeed-Ulysses, arXiv 2309.14509), put on a model from outside.

Norms, products and FFN are done by each process for its share of a call's tokens. Before attention one
all-to-all brings whole sequences of its share of the heads together, and another one goes back behind it. The
KV cache, what is captured and what is edited stay with the heads; gather_calls() joins it at the end.

    model = build_model(...)                       # in each of the processes that torchrun started
    apply_head_parallel(model, join(device))
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls:
        latents = CausalInferencePipeline(model).inference(noise, ...)  # the same in every process
    calls = gather_calls(model, calls)             # of all heads, in the first process
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wan.attention import ATTENTION_WEIGHT_CAPTURE, attention
from wan.capture import Call, HeadShard
from wan.errors import ConfigError
from wan.exchange import AllToAll, Exchange, Group
from wan.interventions import ACTIVE_EDITS
from wan.kernels.peer_memory import PeerMemory, peer_memory_of
from wan.model import CausalWanModel, CrossAttention, Rope, SelfAttention, WanModel


@dataclass(frozen=True, eq=False)
class ProcessShard(HeadShard):
    """The heads of one process of a group. It also has the share of every call's tokens that is as large."""

    group: Group
    all_to_all: AllToAll
    peer_memory: PeerMemory | None  # where the processes have it

    @classmethod
    def of_model(cls, num_heads: int, group: Group, device: torch.device) -> "ProcessShard":
        """All processes of the group must ask."""
        share = num_heads // group.size()
        heads = range(group.rank() * share, (group.rank() + 1) * share)
        return cls(heads, num_heads, group, AllToAll(group), peer_memory_of(group, device))

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def exchange(self) -> Exchange:
        """How tokens and heads are exchanged; peers' memory is overwritten, and knows no gradients."""
        return self.all_to_all if self.peer_memory is None or torch.is_grad_enabled() else self.peer_memory

    # -- heads -----------------------------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(x, device="cpu") for _ in range(self.size)]
        dist.all_gather(parts, x.cpu().contiguous(), group=self.group)
        return torch.cat(parts, dim)

    # -- tokens ----------------------------------------------------------------------------------------------

    def tokens(self, x: Tensor, dim: int) -> Tensor:
        """This process's share of all tokens along dim."""
        if x.shape[dim] % self.size:
            raise ConfigError(f"a call of {x.shape[dim]} tokens does not split over {self.size} GPUs")
        share = x.shape[dim] // self.size
        return x.narrow(dim, self.group.rank() * share, share)

    def all_tokens(self, x: Tensor) -> Tensor:
        """All tokens of x, whose share is here: [B, L/P, n] -> [B, L, n]."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, 1)


# -- the model -----------------------------------------------------------------------------------------------


def apply_head_parallel(model: CausalWanModel, group: Group) -> None:
    """Let the processes of a group compute each call of a model together, by heads.

    All of them must make the same calls, each with the whole input; each gets the whole output. The weights
    are whole everywhere. Raises ConfigError where the heads do not split over the group.
    """
    size, heads = group.size(), model.config.num_heads
    if heads % size:
        raise ConfigError(f"{heads} heads do not split over {size} GPUs; {_or(legal_sizes(heads))} would do")
    if size == 1:
        return
    shard = ProcessShard.of_model(heads, group, model.device)
    model.head_shard = shard
    _split_tokens(model, shard)
    for block in model.blocks:
        _exchange_self(block.self_attn, shard)
        _exchange_cross(block.cross_attn, shard)


def _split_tokens(model: CausalWanModel, shard: ProcessShard) -> None:
    """Between the patch embedding and the head's output, each process has its share of the tokens."""
    tables = model.rope_tables

    def own_tables(*args: Any) -> Rope:
        (q_cos, q_sin), (k_cos, k_sin) = tables(*args)
        own = [shard.tokens(x, 0) for x in (q_cos, q_sin, k_cos, k_sin)]
        return Rope((own[0], own[1]), (own[2], own[3]))

    def own_tokens(block: nn.Module, args: tuple) -> tuple:
        x, rows, _, _, _, mask, *_ = args
        if mask is not None or rows.shape[1] != 1:
            raise ConfigError(
                "several GPUs make rollouts: no mask, and one timestep for all frames of a call"
            )
        return shard.tokens(x, 1), *args[1:]

    vars(model)["rope_tables"] = own_tables
    model.blocks[0].register_forward_pre_hook(own_tokens)
    model.head.register_forward_hook(lambda head, args, out: shard.all_tokens(out))


def _exchange_self(attn: SelfAttention, shard: ProcessShard) -> None:
    """Between its projections and attention, and behind it, one exchange each."""
    project, attend, merge = attn.project, attn.attend, attn.merge

    def sent(x: Tensor, *args: Any) -> tuple[Tensor]:
        return (shard.exchange.send(project(x, *args)),)

    def attend_whole(own: Sequence[Tensor], kv_cache: Any, *args: Any) -> Tensor:
        whole = shard.exchange.receive(own[0], lasts=ACTIVE_EDITS.active)
        return shard.exchange.send_back(attend(whole, kv_cache, *args))

    def merge_all(seen: Tensor) -> Tensor:
        return merge(shard.exchange.receive_back(seen))

    attn.site = replace(attn.site, shard=shard)
    vars(attn).update(project=sent, attend=attend_whole, merge=merge_all)


def _exchange_cross(attn: CrossAttention, shard: ProcessShard) -> None:
    """Cross-attention needs no exchange: each token looks at the text alone, which is whole everywhere.

    Whoever captures it, or edits anything, gets whole sequences of own heads all the same.
    """
    attn.site = replace(attn.site, shard=shard)

    def whole(q: Tensor) -> Tensor:
        return shard.exchange.receive(shard.exchange.send([q]), lasts=ACTIVE_EDITS.active)[0]

    def forward(x: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
        q, own = attn.norm_q(attn.q(x)), shard.of_text([text])[0]
        if ACTIVE_EDITS.active:
            z = attention(whole(q), *own, attn.site)  # [B, L, H/P, D]
            return attn.o(shard.exchange.receive_back(shard.exchange.send_back(z)).flatten(2))
        if ATTENTION_WEIGHT_CAPTURE.wants(attn.site):
            ATTENTION_WEIGHT_CAPTURE.observe(
                Call(
                    attn.site,
                    ATTENTION_WEIGHT_CAPTURE.now,
                    whole(q),
                    *own,
                )
            )
        return attn.o(attention(q, *text).flatten(2))

    vars(attn)["forward"] = forward


# -- what fits -----------------------------------------------------------------------------------------------


def legal_sizes(num_heads: int, tokens: Iterable[int] = ()) -> list[int]:
    """Over how many GPUs a model's heads, and calls of so many tokens, split."""
    wanted = [num_heads, *tokens]
    return [size for size in range(1, num_heads + 1) if not any(n % size for n in wanted)]


def check_size(size: int, model: str, num_heads: int, tokens: Iterable[int]) -> None:
    """Raise ConfigError, naming the numbers of GPUs that would do, where heads or tokens do not split."""
    tokens = sorted(set(tokens))
    if size not in (legal := legal_sizes(num_heads, tokens)):
        blocks = f"{_or(tokens)} tokens"
        raise ConfigError(
            f"--gpus {size} does not split {model}: its {num_heads} heads and blocks of {blocks} "
            f"go on {_or(legal)} GPUs"
        )


def _or(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def shard_of(model: WanModel) -> ProcessShard | None:
    """The share of a model that this process has, or None where it has it all."""
    shard = getattr(model, "head_shard", None)
    return shard if isinstance(shard, ProcessShard) else None


def any_process(model: WanModel, said: bool) -> bool:
    """Whether any of the processes that share a model says so; all of them must ask."""
    shard = shard_of(model)
    if shard is None:
        return said
    answer = torch.tensor([float(said)])
    dist.all_reduce(answer, group=shard.group)
    return bool(answer.item())

"""Split one rollout by heads over several GPUs (DeepSpeed-Ulysses, arXiv 2309.14509), from outside the model.

Each process computes norms, products and FFN for its share of a call's tokens. One exchange before attention
gives it whole sequences for its share of the heads; a second one after attention returns to shares of tokens.
The KV cache, captures and edits are split by heads; model.head_shard.gather_calls() joins captured calls.

    model = build_model(...)                       # in each of the processes that torchrun started
    apply_head_parallel(model, join(device))
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame") as calls:
        latents = CausalInferencePipeline(model).inference(noise, ...)  # the same in every process
    calls = model.head_shard.gather_calls(calls)   # of all heads, in the first process
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from wan import attention, capture, keys, sites
from wan import model as wan_model
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.wings import peer_memory as exchanges

Group = dist.ProcessGroup

# The processes: torchrun starts them; NCCL connects GPUs, and gloo CPUs and what was captured.

_errors: list[Store] = []  # where the processes of the group say what went wrong


def on_own_device(config: RunConfig) -> RunConfig:
    """Return the config of one of several processes: each has its own GPU, or all share the CPU.

    torchrun numbers the processes of a host; torch raises if there are fewer GPUs.
    """
    alone = not os.environ.get("RANK") or os.environ.get("WORLD_SIZE", "1") == "1"
    if alone or config.device == "cpu":
        return config
    if config.device == "auto" and not torch.cuda.device_count():
        return replace(config, device="cpu")
    return replace(config, device=f"cuda:{os.environ.get('LOCAL_RANK') or 0}")


def join(device: torch.device) -> Group:
    """Join the group of all processes that were started together."""
    store, rank, size = next(rendezvous("env://", timeout=exchanges.TIMEOUT))
    _errors.append(PrefixStore("errors", store))
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        # torch's flight recorder walks through Python's frames at every exchange, and every layer has two.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    group_store = PrefixStore("group", store)
    dist.init_process_group(backend, store=group_store, timeout=exchanges.TIMEOUT, rank=rank, world_size=size)
    if threading.current_thread() is threading.main_thread():
        # A process that waits in NCCL or gloo runs no Python: let a signal end it all the same.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def joined() -> Group | None:
    """Return the group that this process has joined."""
    if not dist.is_initialized():
        return None
    return dist.group.WORLD


def leave() -> None:
    """Leave the group, all processes together; do nothing if none was joined."""
    group = joined()
    if group is not None:
        wait_for_all(group)
        dist.destroy_process_group()


def wait_for_all(group: Group) -> None:
    """Wait until every process of a group gets here, without using a GPU."""
    dist.all_reduce(torch.zeros(1), group=group)


def trouble_with_others(error: BaseException) -> str:
    """Return "lost" or "late" if an exchange failed because of another process, "" for other errors."""
    text = str(error).lower()
    if joined() is None or not isinstance(error, RuntimeError):
        return ""
    if "timed out" in text or "timeout" in text:
        return "late"
    lost = ("closed by peer", "reset by peer", "socket closed", "broken pipe", "remote error")
    if any(words in text for words in lost):
        return "lost"
    return ""


def is_first_to_fail(message: str) -> bool:
    """Return True if no other process of the group has reported an error yet; this one is about to."""
    if _errors:
        with suppress(Exception):  # the store is gone with the process that had it
            report = f"{os.getpid()} {message}"
            return _errors[-1].compare_set("first", "", report) == report.encode()
    return True


# The model.

LayerArguments = tuple[Tensor, tuple[Tensor, Tensor], wan_model.LayerInputs]  # of Block.forward()
Alike = Sequence[tuple[Any, int]]  # runs of calls: names, shapes and dtypes of their values, and how many


@dataclass(frozen=True, eq=False)
class ProcessShard(keys.HeadShard):
    """One process's share of a group's work: some of the heads, and an equal part of every call's tokens."""

    group: Group
    all_to_all: exchanges.AllToAll
    peer_memory: exchanges.PeerMemory | None  # where the processes have it

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def exchange(self) -> exchanges.AllToAll | exchanges.PeerMemory:
        """Return the exchange to use: peer memory is overwritten and has no gradients."""
        if self.peer_memory is None or torch.is_grad_enabled():
            return self.all_to_all
        return self.peer_memory

    def sum(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(x, device="cpu") for _ in range(self.size)]
        dist.all_gather(parts, x.cpu().contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def any_process(self, flag: bool) -> bool:
        return bool(self.sum(torch.tensor([float(flag)])).item())

    def gather_calls(self, calls: Sequence[capture.CapturedCall]) -> list[capture.CapturedCall]:
        """Join calls, which must be on the CPU, in portions of at most BYTES_AT_ONCE."""
        # Processes may hold different amounts of a call, but all must send the same calls together.
        sizes = torch.tensor([sum(value.nbytes for value in call.values.values()) for call in calls])
        if calls:
            dist.all_reduce(sizes, dist.ReduceOp.MAX, group=self.group)
        whole: list[capture.CapturedCall] = []
        for rows in _portions(sizes.tolist(), BYTES_AT_ONCE):
            portion = calls[rows.start : rows.stop]
            # 1. Describe the values by a few objects: most calls of a pass have the same shapes.
            runs = [list(run) for _, run in groupby(portion, lambda call: (id(call.at), _kinds_of(call)))]
            alike = [(_kinds_of(run[0]), len(run)) for run in runs]
            of_all: list[Alike] | None = None
            if self.group.rank() == 0:
                of_all = [()] * self.size
            dist.gather_object(alike, of_all, group=self.group, group_dst=0)
            # 2. Send the numbers as one tensor of bytes.
            packed = self._gather_bytes(_as_bytes(runs))
            if of_all is None:
                continue
            # 3. Join calls that are similar in all processes at once.
            unpacked = [_unpacked(kinds, values) for kinds, values in zip(of_all, packed, strict=True)]
            if all(kinds == alike for kinds in of_all):
                start = 0
                for (_, count), *parts in zip(alike, *unpacked, strict=True):
                    whole += _joined(portion[start : start + count], parts, self.total)
                    start += count
                continue
            singly = [list(_one_by_one(of, kinds)) for of, kinds in zip(unpacked, of_all, strict=True)]
            for call, *parts in zip(portion, *singly, strict=True):
                whole += _joined([call], parts, self.total)
        return whole

    def _gather_bytes(self, values: Tensor) -> list[Tensor]:
        """Return the bytes of all processes in the first process, an empty list in the others."""
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([values.numel()]), group=self.group)
        longest = int(max(sizes))  # gloo gathers tensors of one size
        if values.numel() < longest:
            values = F.pad(values, (0, longest - values.numel()))
        if self.group.rank() > 0:
            dist.gather(values, group=self.group, group_dst=0)
            return []
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.gather(values, parts, group=self.group, group_dst=0)
        return [part[: int(size)] for part, size in zip(parts, sizes, strict=True)]

    def tokens(self, x: Tensor, dim: int) -> Tensor:
        """Return this process's share of all tokens along dim."""
        if x.shape[dim] % self.size:
            raise ConfigError(f"a call of {x.shape[dim]} tokens does not split over {self.size} GPUs")
        share = x.shape[dim] // self.size
        return x.narrow(dim, self.group.rank() * share, share)

    def all_tokens(self, x: Tensor) -> Tensor:
        """Gather all tokens of x, whose share is here: [B, L/P, n] -> [B, L, n]."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, 1)


def apply_head_parallel(model: wan_model.CausalWanModel, group: Group) -> None:
    """Make the processes of a group compute each call of a model together, split by heads.

    All processes must make the same calls with the whole input; each gets the whole output and holds all
    weights. Raise ConfigError if the heads do not split over the group.
    """
    size, heads = group.size(), model.config.num_heads
    check_size(size, "the model", heads)
    if size == 1:
        return
    share = heads // size
    own_heads = range(group.rank() * share, (group.rank() + 1) * share)
    shard = ProcessShard(
        heads=own_heads,
        total=heads,
        group=group,
        all_to_all=exchanges.AllToAll(group),
        peer_memory=exchanges.peer_memory_of(group, model.device),
    )
    model.head_shard = shard

    # Between the patch embedding and the head's output, each process has its share of the tokens.
    tables = model.rope_tables

    def own_tables(
        frames: Sequence[int], height: int, width: int, kv_cache: wan_model.Cache
    ) -> wan_model.Rope:
        (q_cos, q_sin), (k_cos, k_sin) = tables(frames, height, width, kv_cache)
        queries = shard.tokens(q_cos, 0), shard.tokens(q_sin, 0)
        return wan_model.Rope(queries, (shard.tokens(k_cos, 0), shard.tokens(k_sin, 0)))

    # Layer 0 takes this process's tokens, the head's output is joined: [B, L/P, dim] in between.
    def own_tokens(block: nn.Module, args: LayerArguments) -> LayerArguments:
        x, text, inputs = args
        if inputs.mask is not None or inputs.time.shape[1] != 1:
            raise ConfigError(
                "several GPUs make rollouts: no mask, and one timestep for all frames of a call"
            )
        return shard.tokens(x, 1), text, inputs

    own_tokens.is_replayed = True  # type: ignore[attr-defined]  # a graph of a whole pass has it
    vars(model)["rope_tables"] = own_tables
    model.blocks[0].register_forward_pre_hook(own_tokens)
    model.head.register_forward_hook(lambda head, args, out: shard.all_tokens(out))
    for block in model.blocks:
        _exchange_self(block.self_attn, shard)
        _exchange_cross(block.cross_attn, shard)


def _exchange_self(attn: wan_model.SelfAttention, shard: ProcessShard) -> None:
    """Exchange once before attention and once after it."""
    project, attend, merge = attn.project, attn.attend, attn.merge

    def sent(x: Tensor, rope: wan_model.Rope, with_raw: bool) -> tuple[Tensor]:
        return (shard.exchange.send(project(x, rope, with_raw)),)

    def attend_whole(projected: Sequence[Tensor], inputs: wan_model.LayerInputs) -> Tensor:
        whole = shard.exchange.receive(projected[0], lasts=bool(sites.watchers()))
        return shard.exchange.send_back(attend(whole, inputs))

    def merge_all(seen: Tensor) -> Tensor:
        return merge(shard.exchange.receive_back(seen))

    attn.site = replace(attn.site, shard=shard)
    vars(attn).update(project=sent, attend=attend_whole, merge=merge_all)


def _exchange_cross(attn: wan_model.CrossAttention, shard: ProcessShard) -> None:
    """Compute cross-attention without an exchange, since every process has the whole text.

    Captures and edits still get whole sequences of this process's heads.
    """
    attn.site = replace(attn.site, shard=shard)

    def whole(q: Tensor) -> Tensor:
        return shard.exchange.receive(shard.exchange.send([q]), lasts=bool(sites.watchers()))[0]

    def forward(x: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
        q, by = attn.norm_q(attn.q(x)), sites.observer()
        k, v = shard.of_text([text])[0]
        if sites.watchers():
            z = attention.attention(whole(q), k, v, attn.site)  # [B, L, H/P, D]
            return attn.o(shard.exchange.receive_back(shard.exchange.send_back(z)).flatten(2))
        if by and by.wants(attn.site):
            by.observe(attention.Call(site=attn.site, at=sites.current_pass(), q=whole(q), k=k, v=v))
        return attn.o(attention.attention(q, *text).flatten(2))

    vars(attn)["forward"] = forward


def legal_sizes(num_heads: int, tokens: Iterable[int] = ()) -> list[int]:
    """Return the numbers of GPUs that divide a model's heads and these numbers of tokens."""
    wanted = [num_heads, *tokens]
    return [size for size in range(1, num_heads + 1) if not any(n % size for n in wanted)]


def check_size(size: int, model: str, num_heads: int, tokens: Iterable[int] = ()) -> None:
    """Raise ConfigError if heads or tokens do not split, naming the numbers of GPUs that work."""
    tokens = sorted(set(tokens))
    legal = legal_sizes(num_heads, tokens)
    if size not in legal:
        parts = f"its {num_heads} heads"
        if tokens:
            parts += f" and blocks of {' or '.join(map(str, tokens))} tokens"
        sizes = " or ".join(map(str, legal))
        raise ConfigError(f"--gpus {size} does not split {model}: {parts} go on {sizes} GPUs")


# What was captured.

WITHOUT_HEADS = ("tokens_kept", "key_frame", "key_token", "key_position", "map_queries")  # same everywhere
BYTES_AT_ONCE = 1 << 26  # of a process's values that are sent together; a call may have more


def _portions(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Yield ranges of consecutive indices whose sizes sum to at most a limit, or a larger one alone."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield range(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield range(start, len(sizes))


def _kinds_of(call: capture.CapturedCall) -> tuple[Any, ...]:
    """Return names, shapes and dtypes of a call's values, and the frames of its columns."""
    kinds = tuple((name, value.shape, value.dtype) for name, value in call.values.items())
    if call.layout is None:
        return kinds, ()
    return kinds, tuple(call.layout.frames)


def _as_bytes(runs: Sequence[Sequence[capture.CapturedCall]]) -> Tensor:
    """Concatenate the values of runs of similar calls, name by name, as uint8 [n]."""
    named = [[call.values[name] for call in run] for run in runs for name in run[0].values]
    parts = [torch.stack(values).flatten().view(torch.uint8) for values in named]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *parts])


Values = dict[str, Tensor]  # of n calls alike, [n, B, H, ...] each


def _unpacked(alike: Alike, packed: Tensor) -> list[tuple[Values, Sequence[int]]]:
    """Split a process's bytes into values of runs of similar calls, with the frames of their columns."""
    runs, start = [], 0
    for (kinds, frames), count in alike:
        values = {}
        for name, shape, dtype in kinds:
            nbytes = count * shape.numel() * dtype.itemsize
            part = packed[start : start + nbytes]
            if start % dtype.itemsize:
                part = part.clone()  # begins where its dtype may begin
            values[name] = part.view(dtype).view(count, *shape)
            start += nbytes
        runs.append((values, frames))
    return runs


def _one_by_one(
    runs: Sequence[tuple[Values, Sequence[int]]], alike: Alike
) -> Iterator[tuple[Values, Sequence[int]]]:
    """Yield the calls of all runs one by one."""
    for (values, frames), (_, count) in zip(runs, alike, strict=True):
        for n in range(count):
            yield {name: of[n : n + 1] for name, of in values.items()}, frames


def _joined(
    calls: Sequence[capture.CapturedCall], parts: Sequence[tuple[Values, Sequence[int]]], num_heads: int
) -> Iterator[capture.CapturedCall]:
    """Join the values of similar calls over all processes, head by head and frame by frame."""
    values, frames = [part[0] for part in parts], [part[1] for part in parts]
    edited = [of["attended"] for of in values if "attended" in of]
    # 1. Under per_head the heads of the processes see different frames: a column for each frame of any.
    layout = calls[0].layout
    differ = layout is not None and len({*map(tuple, frames)}) > 1
    if layout is not None and differ:
        layout = capture.joint_layout(frames, layout)
        of_all = values
        values = []
        for of, has in zip(of_all, frames, strict=True):
            names = [name for name in capture.BY_FRAME if name in of]
            values.append({name: capture.spread(of[name], has, layout.frames) for name in names})
    # 2. Where keys of some heads were left out, say of all heads which of theirs were not.
    if edited:
        for of in values:
            if "attended" not in of and "frame_logits" in of:
                of["attended"] = ~of["frame_logits"].isnan()
            elif "attended" not in of:
                of["attended"] = torch.ones_like(edited[0])
    # 3. Heads lie in dim 2 of all values [n, B, H, ...]; processes are in the order of their heads.
    whole: dict[str, Sequence[Tensor]] = {}
    for name in values[0]:
        if name in WITHOUT_HEADS:
            of_calls: Sequence[Tensor] = values[0][name].clone().unbind()
        else:
            of_calls = torch.cat([of[name] for of in values], 2).unbind()
        # Small values of a pass share memory; a large one has its own, so that it can be freed alone.
        if of_calls[0].numel() > capture.SMALL:
            of_calls = [x.clone() for x in of_calls]
        whole[name] = of_calls
    # 4. Each call as if one process had made it.
    for number, call in enumerate(calls):
        if not differ:
            layout = call.layout
        batch, length, _, head_dim = call.q_shape
        keys = call.k_shape[1]
        if layout is not None:
            keys = len(layout.slots) * layout.tokens_per_slot
        yield capture.CapturedCall(
            site=call.site,
            at=call.at,
            values={name: of_calls[number] for name, of_calls in whole.items()},
            q_shape=(batch, length, num_heads, head_dim),
            k_shape=(batch, keys, num_heads, head_dim),
            layout=layout,
            item=call.item,
            check=call.check,
            beside=call.beside,
        )

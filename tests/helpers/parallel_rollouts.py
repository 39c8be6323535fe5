"""Rollouts of a small model, alone and in processes that share a group on this machine."""

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from conftest import require_forks

from helpers.rollouts import TWO_STEPS
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest, MapQuery
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline

HEADS, LAYERS = 6, 2
SIZES = {"dim": 48, "ffn_dim": 64, "freq_dim": 32, "text_dim": 16, "text_len": 8}
SIZES |= {"num_heads": HEADS, "num_layers": LAYERS}
TWO_QUERIES = {"granularity": "map", "queries": (MapQuery(), MapQuery(4, 2))}
REQUESTS = (
    CaptureRequest(granularity="frame", kinds=("self", "cross"), rope_bands=True),
    CaptureRequest(granularity="key", layers=[1], steps=[0]),
    CaptureRequest(layers=[0], heads=(1, 3), steps=[1], **TWO_QUERIES),
    CaptureRequest(granularity="map", layers=[1], kinds=("cross",), num_words=5, blocks=[2], steps=[0]),
    CaptureRequest(granularity="token", layers=[0], blocks=[1], steps=[2], is_logits=False),
)


def small_model() -> CausalWanModel:
    torch.manual_seed(0)
    return CausalWanModel(**SIZES).eval().requires_grad_(False)


def roll_out(
    model, policy=None, *requests, frames=12, seed=1, batch=1, size=(4, 6), first=False, gathers=True, **more
):
    """Latents and the calls of all processes; first: a first block of one frame."""
    generator = torch.Generator().manual_seed(seed)  # the same numbers on every device
    shape = batch, frames, 16, *size
    shapes = shape, (1, *shape), (batch, 8, 16)
    noise, renoise, embeds = (torch.randn(n, generator=generator).to(model.device) for n in shapes)
    pipeline = CausalInferencePipeline(model, 3, first, cache_policy=policy, **TWO_STEPS)
    with ATTENTION_WEIGHT_CAPTURE.capture(*(requests or [CaptureRequest(layers=[])])) as calls:
        latents = pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise, **more)[1]
    return latents, (model.head_shard.gather_calls(calls) if model.head_shard else calls) if gathers else []


def together(
    count: int, function: Callable[[dist.ProcessGroup], Any], seconds: float = 20, on_gpus: bool = False
) -> list[Any]:
    """What function(group) returns in each of count processes. Raises what the first of them raised.

    They are forks of this one; on_gpus: new ones, with a GPU each, or all on one where there are fewer.
    """
    if not on_gpus:
        require_forks()
    with tempfile.TemporaryDirectory() as folder:
        task = function, f"{folder}/store", count, timedelta(seconds=seconds), on_gpus
        with get_context("spawn" if on_gpus else "fork").Pool(count, _be_given, [task]) as pool:
            # In the order of their ends: one that raises leaves the others waiting for it.
            found = dict(pool.imap_unordered(_member, range(count)))
    return [pickle.loads(found[rank]) for rank in range(count)]


def _be_given(task: tuple) -> None:
    globals()["TASK"] = task


def _member(rank: int) -> tuple[int, bytes]:
    """In a process of its own, where nobody does a task before all have begun one -> rank, what it found."""
    function, store, count, timeout, on_gpus = globals()["TASK"]
    backend = "gloo"
    if on_gpus:
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        backend = "cpu:gloo,cuda:nccl"
        if gpus < count:  # NCCL takes one process for each GPU
            backend = "cpu:gloo,cuda:gloo"
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": count, "timeout": timeout}
    dist.init_process_group(backend, store=dist.FileStore(store, count), **options)
    found = function(dist.group.WORLD)
    dist.barrier()
    return rank, pickle.dumps(found)  # by value: a tensor that is shared needs the process that made it

"""Rollouts of a small model that many processes share: every policy, every capture, edits of all kinds."""

import csv
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.rollouts import TWO_STEPS
from wan import interventions
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest, MapQuery
from wan.interventions import Ablate, Bias, Jitter, Knockout, Move, Patch, RunInStep, intervene
from wan.model import CausalWanModel
from wan.parallel import gather_calls
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy

HEADS, LAYERS = 6, 2
SIZES = {"dim": 48, "ffn_dim": 64, "freq_dim": 32, "text_dim": 16, "text_len": 8}
SIZES |= {"num_heads": HEADS, "num_layers": LAYERS}
POLICIES = {
    "window": {"name": "window", "window": 6, "sink": 2},
    "relative": {"name": "relative", "window": 6, "sink": 2},
    "participative": {"name": "participative", "window": 6, "sink": 1, "budget": 5, "recent": 3},
    "ema_sink": {"name": "ema_sink", "window": 6, "sink": 2},
    "memory_bank": {"name": "memory_bank", "window": 6, "sink": 2, "bank": 2, "interval": 1},
    "per_head": {"name": "per_head"},
    "dummy_forcing": {"name": "dummy_forcing", "num_dummy": 6, "row_seed": 2},
    "forcing_kv": {"name": "forcing_kv", "heads": [[n % 3 == 0 for n in range(HEADS)]] * LAYERS},
    "triattention": {"name": "triattention", "budget_tokens": 40, "sink": 1},
}
LONG = ("memory_bank", "per_head", "triattention")  # what they choose is seen in the fourth block
REQUESTS = (
    CaptureRequest(granularity="frame", kinds=("self", "cross"), rope_bands=True),
    CaptureRequest(granularity="key", layers=[1], steps=[0]),
    CaptureRequest(
        granularity="map", layers=[0], heads=(1, 3), queries=(MapQuery(), MapQuery(4, 2)), steps=[1]
    ),
    CaptureRequest(granularity="map", layers=[1], kinds=("cross",), num_words=5, blocks=[2], steps=[0]),
    CaptureRequest(granularity="token", layers=[0], blocks=[1], steps=[2], is_logits=False),
)


def small_model() -> CausalWanModel:
    torch.manual_seed(0)
    return CausalWanModel(**SIZES).eval().requires_grad_(False)


def policy_of(name: str, folder):
    settings = dict(POLICIES[name])
    if name == "per_head":  # a class lives in the first heads alone, another in one layer alone
        labels = [["a", "a", "b", "b", "b", "b"], ["a", "c", "a", "c", "a", "c"]]
        path = folder / f"labels_{os.getpid()}.csv"  # no process reads what another one is writing
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(labels)
        classes = {"a": "participative", "b": "window", "c": "memory_bank"}
        settings |= {"file": str(path)}
        settings |= {"policies": {label: POLICIES[policy] for label, policy in classes.items()}}
    if name == "triattention":
        random = torch.Generator().manual_seed(4)
        means = torch.randn(LAYERS, HEADS, 4, generator=random, dtype=torch.complex64)
        settings["statistics"] = {"q_mean": means, "q_abs_mean": means.abs() + 0.5}
    return make_policy(**settings)


def roll_out(
    model,
    policy=None,
    *requests,
    num_frames=12,
    seed=1,
    batch=1,
    size=(4, 6),
    first=False,
    gathers=True,
    **more,
):
    """Latents and the calls of all processes; first: a first block of one frame."""
    draw = {"generator": torch.Generator(model.device).manual_seed(seed), "device": model.device}
    shape = batch, num_frames, 16, *size
    noise, renoise, embeds = (torch.randn(n, **draw) for n in (shape, (1, *shape), (batch, 8, 16)))
    pipeline = CausalInferencePipeline(model, 3, first, cache_policy=policy, **TWO_STEPS)
    with ATTENTION_WEIGHT_CAPTURE.capture(*(requests or [CaptureRequest(layers=[])])) as calls:
        latents = pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise, **more)[1]
    return latents, gather_calls(model, calls) if gathers else []


def every_policy(model, folder):
    """Latents and calls under each policy; token and key captures where slots are frames."""
    found = {}
    for name in POLICIES:
        policy = policy_of(name, folder)
        requests = REQUESTS if name in ("window", "memory_bank") else REQUESTS[:1]
        if policy.by_heads:
            requests = [replace(requests[0], rope_bands=False, kinds=("self",))]
        size = {"num_frames": 12 if name in LONG else 9, "batch": 1 + (name == "window")}
        found[name] = stripped(roll_out(model, policy, *requests, **size))
    return found


def stripped(run):
    """Layouts and sites that can travel between processes."""
    return run[0], [replace(call, site=replace(call.site, shard=None)) for call in run[1]]


def edited_runs(model, folder):
    """Latents and calls under edits of some heads, of means, of another run, of text."""
    frames = CaptureRequest(granularity="frame")
    with interventions.record_head_outputs() as outputs:
        roll_out(model)
    means = interventions.ReferenceMeans.over([outputs])
    frame_mean = Ablate("frame_mean", layers=[1], heads=[0, 4], passes="denoise")
    mean = Ablate("mean", layers=[0], heads=[5], passes="all")
    swap = Patch("kv", source={"seed": 5}, layers=[1], heads=[3, 5], passes="denoise")
    bias = Bias(-2.0, frames="past", layers=[1], heads=[5], passes="denoise")
    text = Knockout(tokens=[0, 5], heads=[4], passes="denoise")
    cases = {
        "keys": [Knockout(frames="first", heads=[1, 2, 5], passes="all"), Jitter(seed=3), bias],
        "means": [Move(frames=[0], offset=3, heads=[0, 2, 4], passes="all"), frame_mean, text, mean],
        "step": [swap],
        "per_head": [Knockout(frames="past", heads=[1, 5], passes="denoise"), swap],
    }
    by_class = policy_of("per_head", folder)
    by_class.policies["a"], by_class.policies["c"] = make_policy("window", window=6), make_policy("full")
    found = {}
    for name, edits in cases.items():
        policy = by_class if name == "per_head" else None
        with RunInStep(lambda p=policy: roll_out(model, p, seed=5, gathers=False)) as other:
            data = {frame_mean: outputs, mean: means, swap: other}
            with intervene(*edits, data={edit: data[edit] for edit in edits if edit in data}):
                found[name] = stripped(roll_out(model, policy, frames, num_frames=9))
    return found, torch.cat([norms.flatten() for norms in outputs.norms.values()])


# --- Processes that share a gloo group, on this machine
def together(count: int, function: Callable[[dist.ProcessGroup], Any], seconds: float = 20) -> list[Any]:
    """What function(group) returns in each of count forks. Raises RuntimeError with what they raised."""
    if torch.cuda.is_initialized():
        pytest.skip("this process has used a GPU, which its forks then cannot: run this test alone")
    with tempfile.TemporaryDirectory() as folder:
        children = [
            os.fork() or _child(Path(folder), rank, count, function, seconds) for rank in range(count)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        found = [(Path(folder) / f"{rank}.pkl") for rank in range(count)]
        results = [pickle.loads(path.read_bytes()) if path.exists() else None for path in found]
    if any(codes):
        raise RuntimeError(
            "\n".join(str(result) for result, code in zip(results, codes, strict=True) if code)
        )
    return results


def _child(folder: Path, rank: int, count: int, function: Callable, seconds: float) -> None:
    """Never returns: pytest must not go on in a fork."""
    code = 0
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), count)
        options = {"rank": rank, "world_size": count, "timeout": timedelta(seconds=seconds)}
        dist.init_process_group("gloo", store=store, **options)
        result = function(dist.group.WORLD)
        dist.barrier()
    except BaseException:
        code, result = 1, traceback.format_exc()
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    os._exit(code)

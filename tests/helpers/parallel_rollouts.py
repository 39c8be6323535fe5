"""Rollouts of the golden model that many processes share: every policy, every capture, edits of all kinds."""

import csv
import dataclasses
import os

import torch

from helpers.rollouts import TWO_STEPS
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest, MapQuery
from wan.interventions import (
    Ablate,
    Bias,
    Jitter,
    Knockout,
    Move,
    Patch,
    ReferenceMeans,
    RunInStep,
    intervene,
    record_head_outputs,
)
from wan.parallel import gather_calls
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy

HEADS, LAYERS = 12, 5
POLICIES = {
    "full": {"name": "full"},
    "window": {"name": "window", "window": 9, "sink": 3},
    "longlive": {"name": "window", "window": 9, "sink": 3, "released": "longlive"},
    "relative": {"name": "relative", "window": 9, "sink": 3},
    "deep_sink": {"name": "deep_sink", "window": 9, "sink": 3},
    "participative": {"name": "participative", "window": 9, "sink": 3, "budget": 7, "recent": 3},
    "ema_sink": {"name": "ema_sink", "window": 9, "sink": 3},
    "two_memories": {"name": "two_memories", "window": 9, "sink": 3},
    "rolling_sink": {"name": "rolling_sink", "window": 9},
    "memory_bank": {"name": "memory_bank", "window": 9, "sink": 3, "bank": 2, "interval": 1},
    "per_head": {"name": "per_head"},
    "dummy_forcing": {"name": "dummy_forcing", "num_dummy": 30, "row_seed": 2},
    "forcing_kv": {"name": "forcing_kv", "heads": [[n % 3 == 0 for n in range(12)]] * 5},
    "triattention": {"name": "triattention", "budget_tokens": 40, "sink": 1},
}
REQUESTS = (
    CaptureRequest(granularity="frame", kinds=("self", "cross"), layers=[1, 3], rope_bands=True),
    CaptureRequest(granularity="key", layers=[1], steps=[0]),
    CaptureRequest(
        granularity="map", layers=[2], heads=(1, 3), queries=(MapQuery(), MapQuery(4, 2)), steps=[1]
    ),
    CaptureRequest(granularity="map", layers=[4], kinds=("cross",), num_words=5, blocks=[2], steps=[0]),
    CaptureRequest(granularity="token", layers=[2], blocks=[1], steps=[2], is_logits=False),
)


def policy_of(name: str, folder):
    settings = dict(POLICIES[name])
    if name == "per_head":  # a class lives in the first heads alone, another in one layer alone
        labels = [["a" if head < 4 else "b" for head in range(HEADS)] for _ in range(LAYERS)]
        labels[3] = ["c" if head % 2 else "a" for head in range(HEADS)]
        path = folder / f"labels_{os.getpid()}.csv"  # no process reads what another one is writing
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(labels)
        classes = {"a": "participative", "b": "full", "c": "memory_bank"}
        settings |= {"file": str(path)}
        settings |= {"policies": {label: POLICIES[policy] for label, policy in classes.items()}}
    if name == "triattention":
        random = torch.Generator().manual_seed(4)
        means = torch.randn(5, HEADS, 8, generator=random, dtype=torch.complex64)
        settings["statistics"] = {"q_mean": means, "q_abs_mean": means.abs() + 0.5}
    return make_policy(**settings)


def roll_out(model, policy=None, *requests, num_frames=12, seed=1, batch=1, gathers=True, **more):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, num_frames, 16, 4, 6, generator=generator)
    renoise = torch.randn(1, *noise.shape, generator=generator)
    embeds = torch.randn(batch, 32, 64, generator=generator)
    pipeline = CausalInferencePipeline(model, cache_policy=policy, **TWO_STEPS)
    with ATTENTION_WEIGHT_CAPTURE.capture(*(requests or [CaptureRequest(layers=[])])) as calls:
        latents = pipeline.inference(noise, prompt_embeds=embeds, renoise=renoise, **more)[1]
    return latents, gather_calls(model, calls) if gathers else []


def every_policy(model, folder):
    """Latents and calls under each policy; token and key captures where slots are frames."""
    found = {}
    for name in POLICIES:
        policy = policy_of(name, folder)
        requests = REQUESTS[: 1 if policy.by_heads or name == "participative" else None]
        if policy.by_heads:
            requests = [dataclasses.replace(requests[0], rope_bands=False, kinds=("self",))]
        found[name] = stripped(roll_out(model, policy, *requests, batch=1 + (name == "window")))
    return found


def stripped(run):
    """Layouts and sites that can travel between processes."""
    latents, calls = run
    return latents, [dataclasses.replace(c, site=dataclasses.replace(c.site, shard=None)) for c in calls]


def edited_runs(model, folder):
    """Latents and calls under edits of some heads, of means, of another run, of text."""
    frames = CaptureRequest(granularity="frame", layers=[1, 3])
    with record_head_outputs() as outputs:
        roll_out(model)
    means = ReferenceMeans.over([outputs])
    frame_mean = Ablate("frame_mean", layers=[3], heads=[0, 7], passes="denoise")
    mean = Ablate("mean", layers=[1], heads=[5], passes="all")
    swap = Patch("kv", source={"seed": 5}, layers=[2], heads=[3, 11], passes="denoise")
    cases = {
        "knockout": [Knockout(frames="first", layers=[1, 3], heads=[1, 2, 10], passes="all")],
        "bias": [Bias(-2.0, frames="past", layers=[1], heads=[11], passes="denoise"), Jitter(seed=3)],
        "move": [Move(frames=[0], offset=3, heads=[0, 4, 8], passes="all"), frame_mean],
        "text": [Knockout(tokens=[0, 5], heads=[6], passes="denoise"), mean],
        "step": [swap],
        "per_head": [Knockout(frames="past", heads=[1, 10], passes="denoise"), swap],
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

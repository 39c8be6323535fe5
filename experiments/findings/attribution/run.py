"""Compare attribution patching with exact patching of every head of the miniature.

    python experiments/findings/attribution/run.py --minutes 10

results.json beside this file has, for every pair of captions, the scores of all heads and what patching them
does: in the last block's first pass, where the past is a constant and x0 that pass's, and in all denoising
passes of a rollout. Without --minutes its correlations are printed. The metric is how far x0, or the video,
moves towards that of the other caption; both have the same noise.
"""

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.analysis.panels import table
from experiments.analysis.results import attribution_rows
from experiments.analysis.stats import rounded
from experiments.caches.files import save_report
from experiments.extraction.provenance import environment
from experiments.miniature.tracking import SETS, held_out_scenes
from experiments.running.cli import Parser, count, main
from experiments.session import Session, load
from wan.activations import SiteCapture
from wan.attention import Call
from wan.files import read_json
from wan.gradients import Attribution
from wan.noise import draw_noise
from wan.pipeline import flow_to_x0
from wan.sites import ActivationSite, Watcher, during, watched

RESULTS = Path(__file__).with_name("results.json")
NUM_FRAMES, STEP, SEED, POINTS = 6, 0, 1, 5


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--minutes", type=float, help="measure anew: half the time for passes, half for rollouts")
    flag("--pairs", type=count, default=24, help="of captions, at most")
    args = parser.parse_args(argv)
    if args.minutes is not None:
        save_report(measure(args.minutes, args.pairs), RESULTS)
    print(table(attribution_rows(read_json(RESULTS))))


def measure(minutes: float, most: int) -> dict[str, Any]:
    """Return scores and effects [layers, heads] of pairs of captions, and the settings."""
    session, started = load("wan_mini", num_frames=NUM_FRAMES, seed=SEED).prepare(), time.monotonic()
    captions = [scene.caption for scene in held_out_scenes(SETS["one shape"], most + 1)]
    pairs, rows = [], []
    # 1. Scores, and one pass with each head patched.
    for prompt, other in pairwise(captions):
        if time.monotonic() - started > 30 * minutes:
            break
        pairs.append(pair := Pair(session, prompt, other))
        of_passes = pair.scores(pair.record)  # [layers, passes, heads]
        row = {"attribution": of_passes[:, pair.block * len(pair.steps) + STEP]}
        row["attribution_of_all"] = of_passes.sum(1) / len(session.config.block_sizes)
        row["integrated"] = pair.scores(blocks=[pair.block], steps=[STEP], points=POINTS)[:, 0]
        rows.append({**row, "exact": pair.exact()})
        print(f"pass {len(rows)}: {time.monotonic() - started:.0f} s", flush=True)
    # 2. Whole rollouts with each head patched, as far as the time goes.
    for number, (pair, row) in enumerate(zip(pairs, rows, strict=True), 1):
        if time.monotonic() - started > 60 * minutes:
            break
        row["rollout"] = pair.rollouts()
        print(f"rollout {number}: {time.monotonic() - started:.0f} s", flush=True)
    found = [
        {"prompt": pair.config.prompt, "source": pair.other}
        | {name: [rounded(heads, 6) for heads in x.tolist()] for name, x in row.items()}
        for pair, row in zip(pairs, rows, strict=True)
    ]
    how: dict[str, Any] = {
        "num_frames": NUM_FRAMES,
        "block": pair.block,
        "step": STEP,
        "seed": SEED,
        "points": POINTS,
    }
    how |= {"seconds": round(time.monotonic() - started), "environment": environment(session.device)}
    return {**how, "pairs": found}


@dataclass
class HeadPatches(Watcher):
    """Take z of one head for each item of a batch: item l·H + h has head h of layer l from the source."""

    source: dict[ActivationSite, Tensor]
    num_heads: int

    def on_activation(self, x: Any, where: ActivationSite) -> Any:
        if where.site != "z" or where not in self.source:
            return None
        x, H, first = x.clone(), self.num_heads, (where.layer or 0) * self.num_heads
        for head in range(H):
            x[first + head, :, head] = self.source[where][0, :, head]
        return x


@dataclass
class PassRecord(Watcher):
    """The keys and values that each layer sees in one pass, its input, and its x0."""

    block: int
    step: int

    def __post_init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.at: Any = None

    def wants(self, site: str, layer: int | None, at: Any) -> bool:
        return site in ("self", "x_t", "x0") and (at.block, at.step) == (self.block, self.step)

    def on_activation(self, x: Any, where: ActivationSite) -> None:
        if not self.wants(where.site, where.layer, where.at):
            return
        if where.site == "self":  # the cache goes on in the same memory
            x.k, x.v = x.k.clone(), x.v.clone()
            self.calls[where.layer or 0], self.at = x, where.at
        elif where.site == "x_t":
            self.x = x.clone()
        else:
            self.x0 = x.detach()


class ConstantPast:
    """The KV cache of one pass, for a batch whose own keys differ and whose past is the same."""

    stores_raw = False

    def __init__(self, record: PassRecord):
        self.calls = record.calls
        self.layouts = [record.calls[layer].layout for layer in sorted(record.calls)]
        self.newest = self.key_positions = self.query_positions = record.at.query_frames

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, raw_k: Any = None) -> tuple[Tensor, ...]:
        call, past = self.calls[layer], self.calls[layer].k.shape[1] - k.shape[1]
        both = zip((call.k, call.v), (k, v), strict=True)
        return tuple(torch.cat([x[:, :past].expand(len(own), -1, -1, -1), own], 1) for x, own in both)


class Pair:
    """Two captions of one noise, and what taking heads of one does to the other."""

    def __init__(self, session: Session, prompt: str, other: str):
        self.session, self.pipeline, self.other = session, session.pipeline, other
        self.config = replace(session.config, prompt=prompt)
        self.block, model = len(session.config.block_sizes) - 1, session.model_config
        self.steps = range(session.config.num_passes - 1)
        self.layers, self.heads = model.num_layers, model.num_heads
        # Of the source what can be taken from it: z of all denoising passes, x0, and their inputs.
        sites = ("z", "x0", "x_t", "cross_k", "cross_v")
        seen = SiteCapture(sites, steps=self.steps, to=None)
        with watched(seen):
            self.theirs = session.rollout(replace(self.config, prompt=other))
        self.source = {one.where: one.value for one in seen.kept}
        self.record = PassRecord(self.block, STEP)

    def scores(self, *more: Watcher, **chosen: Any) -> Tensor:
        """Return attribution scores [layers, passes, heads], as attribute() makes them."""
        how = {"steps": self.steps, "source": self.source, "sigmas": self.pipeline.sigmas} | chosen
        recorder = Attribution(("z",), **how)
        with watched(recorder, *more), recorder.calls_of(self.session.model):
            self.own = self.session.rollout(self.config)
        found = torch.stack([*recorder.scores.values()])  # layer by layer in each pass
        return found.unflatten(0, (-1, self.layers)).transpose(0, 1)

    @torch.no_grad()
    def exact(self) -> Tensor:
        """Patch each head in the pass: how far x0 moves towards the source's, [layers, heads]."""
        record, count = self.record, self.layers * self.heads
        text = self.session.model.text_keys_values(self.session.texts[self.config.prompt][0])
        text = [(k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)) for k, v in text]
        x = record.x.expand(count, -1, -1, -1, -1)
        with watched(HeadPatches(self.source, self.heads)), during(record.at):
            t = torch.tensor(record.at.timestep)
            flow = self.session.model(x, t, text, ConstantPast(record))
        x0 = flow_to_x0(flow, x, self.pipeline.sigmas[STEP])
        return self.moved(x0, record.x0, self.source[ActivationSite("x0", None, record.at)])

    def rollouts(self) -> Tensor:
        """Patch each head in all denoising passes: how far the video moves, [layers, heads]."""
        count = self.layers * self.heads
        session = self.session
        noise, renoise = draw_noise(self.config, session.model_config, session.dtype, session.device)
        texts = session.texts[self.config.prompt][0].expand(count, -1, -1)
        with watched(HeadPatches(self.source, self.heads)):
            latents = self.pipeline.inference(
                noise.expand(count, *noise.shape[1:]),
                prompt_embeds=texts,
                renoise=renoise.expand(-1, count, *renoise.shape[2:]),
            )[1]
        return self.moved(latents, self.own, self.theirs)

    def moved(self, x: Tensor, own: Tensor, theirs: Tensor) -> Tensor:
        """Return the way of each item of a batch from own to theirs, as a share, [layers, heads]."""
        way = (theirs - own).double()
        return (((x - own).double() * way).flatten(1).sum(1) / way.square().sum()).unflatten(
            0, (self.layers, -1)
        )


if __name__ == "__main__":
    main(run)

"""Compare attribution patching with exact patching of every head of the miniature.

    python experiments/findings/attribution/run.py --measure --jobs 16     # 30 minutes of a core

results.json beside this file has, for every pair of captions, the scores of all heads and what patching them
does: in the last block's first pass, where the past is a constant and x0 that pass's, and in all denoising
passes of a rollout. Without --measure its correlations are printed. The metric is how far x0, or the video,
moves towards that of the other caption; both have the same noise.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
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
NUM_FRAMES, LAST, STEP, SEED, POINTS = 6, 1, 0, 1, 5  # LAST: the block that is patched


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--measure", action="store_true", help="measure anew; else what is there is printed")
    flag("--pairs", type=count, default=24, help="of captions")
    flag("--jobs", type=count, default=1, help="processes, of one thread each")
    flag("--output_path", type=Path, default=RESULTS, help="where the numbers are, or go")
    args = parser.parse_args(argv)
    if args.measure:
        save_report(measure(args.pairs, args.jobs), args.output_path)
    print(table(attribution_rows(read_json(args.output_path))))


def measure(num_pairs: int, jobs: int) -> dict[str, Any]:
    """Return scores and effects [layers, heads] of pairs of captions, and the settings."""
    started, found = time.monotonic(), list[dict[str, Any]]()
    captions = [scene.caption for scene in held_out_scenes(SETS["one shape"], num_pairs + 1)]
    # Spawned: a fork has the threads of its parent's torch
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for row in pool.map(measured, captions[:-1], captions[1:]):
            found.append(row)
            print(f"pair {len(found)}: {time.monotonic() - started:.0f} s", flush=True)
    how: dict[str, Any] = {"num_frames": NUM_FRAMES, "block": LAST, "step": STEP, "seed": SEED}
    how |= {"points": POINTS, "jobs": jobs, "seconds": round(time.monotonic() - started)}
    return {**how, "environment": environment(torch.device("cpu")), "pairs": found}


@cache
def model() -> Session:
    """Return the miniature, loaded once a process."""
    torch.set_num_threads(1)
    return load("wan_mini", num_frames=NUM_FRAMES, seed=SEED, device="cpu").prepare()


def measured(prompt: str, other: str) -> dict[str, Any]:
    """Return the scores of all heads, in one pass and in all, and what patching does there."""
    pair = Pair(model(), prompt, other)
    of_passes = pair.scores(pair.record)  # [layers, passes, heads]
    row = {"attribution": of_passes[:, pair.block * len(pair.steps) + STEP]}
    row["attribution_of_all"] = of_passes.sum(1) / len(pair.config.block_sizes)
    row["integrated"] = pair.scores(blocks=[pair.block], steps=[STEP], points=POINTS)[:, 0]
    row |= {"exact": pair.exact(), "rollout": pair.rollouts()}
    about: dict[str, Any] = {"prompt": prompt, "source": other}
    return about | {name: [rounded(heads, 6) for heads in x.tolist()] for name, x in row.items()}


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

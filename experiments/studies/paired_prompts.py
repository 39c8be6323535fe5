"""Measure on pairs of prompts which heads need their past, and make a cache budget of it.

Two runs of one noise differ in the caption of block 0, such as in a colour. After that both have the caption
without it: what differs later is carried by cached keys and values. A head's effect is how far the last block
moves when the head loses that past, or takes the other run's; no tracker is needed.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from experiments.caches.files import replacing, require_writable, save_report
from experiments.extraction.provenance import environment, fingerprint
from experiments.extraction.rollout import Progress, observed
from experiments.running.engine import Results, cached, called, dask_client, work_through
from experiments.session import Session, load, pipeline_of
from experiments.studies.batches import Batch, Head, knockouts, outside
from wan.cache import PromptSwitch
from wan.config import RunConfig
from wan.errors import ConfigError, check_fields, from_values, short_repr
from wan.files import read_yaml
from wan.interventions import Edit, Patch, Source, intervene
from wan.sites import ActivationSite, Pass, Watcher, check_indices, watched

OTHER = Source(prompt="the other colour")  # a name: its calls are given as data
# Where the two runs differ most is where the object is; elsewhere noise would drown the effect.
REGION = 0.1  # of the places of a latent frame


@dataclass(eq=False)
class RecordedCalls(Watcher):
    """Self-attention calls of one pass of every block; a policy that keeps all leaves them valid."""

    step: int
    found: dict[tuple[str, int | None, int], Any] = field(default_factory=dict)

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        return site == "self" and at is not None and at.step == self.step

    def on_activation(self, x: Any, where: ActivationSite) -> None:
        if self.wants(where.site, where.layer, where.at):
            self.found[where.site, where.layer, where.block] = x

    def value(self, where: ActivationSite) -> Any:
        """Return what was there in this block, whatever the step: the past is the same in all."""
        return self.found[where.site, where.layer, where.block]


@dataclass(frozen=True)
class Pair:
    """Two captions of block 0, the caption of all later blocks, and the seed of the noise."""

    captions: tuple[str, str]
    later: str
    seed: int

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.captions, self.later)


@dataclass(frozen=True)
class PairOfFile:
    """A pair as YAML has it; its number is its seed where none is given."""

    prompts: tuple[str, str]
    then: str
    seed: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prompts[0] == self.prompts[1]:
            raise ConfigError(f"prompts {short_repr(self.prompts)} are one: nothing tells its runs apart")


def read_pairs(path: str | Path) -> list[Pair]:
    """Read pairs from a YAML: a list of {prompts: [A, B], then: C, seed: 0}. ConfigError for others."""
    form = "write pairs: [{prompts: [A, B], then: C}, ...]"
    pairs = read_yaml(path, form=form).get("pairs")
    if not isinstance(pairs, list) or not pairs:
        raise ConfigError(f"{path} holds no pairs; {form}")
    read = [from_values(PairOfFile, one, f"{path}: pair {n}: ") for n, one in enumerate(pairs)]
    return [Pair(one.prompts, one.then, n if one.seed is None else one.seed) for n, one in enumerate(read)]


@dataclass
class PairedRuns:
    """A batch of pairs: noise, texts, and rollouts of either caption."""

    config: RunConfig
    session: Session
    pairs: Sequence[Pair]

    def __post_init__(self) -> None:
        configs = [replace(self.config, prompt=pair.later, seed=pair.seed) for pair in self.pairs]
        self.batch = Batch(self.session, configs)
        self.first = [self.batch.encoded([pair.captions[n] for pair in self.pairs]) for n in range(2)]
        self.ranges = self.batch.ranges

    def rollout(self, which: int, *records: Watcher, **kwargs: Any) -> Tensor:
        """Roll out all pairs in their first or second colour -> latents [B, F, C, h, w]."""
        # Block 0 reads its own caption; all later blocks read the caption that both share.
        switch = PromptSwitch(self.ranges[1].start, prompt_embeds=self.batch.text)
        with watched(*records):
            return self.batch.rollout(self.first[which], prompt_schedule=[switch], **kwargs)


@dataclass
class HeadEffects:
    """Effects of all heads in the last block of pairs (the engine's Work)."""

    config: RunConfig
    session: Session
    folder: Path
    window: int
    sink: int
    how: str  # knockout or patch
    layers: Sequence[int]  # the effects of others are 0

    def name(self, pair: Pair) -> str:
        how = {"window": self.window, "sink": self.sink, "how": self.how, "layers": [*self.layers]}
        identity = self.session.identity(replace(self.config, prompt="", seed=0))
        return fingerprint(identity, pair=[*pair.texts, pair.seed], **how)

    @property
    def results(self) -> Results:
        return Results(self.folder / "pairs")

    def is_done(self, name: str, pair: Pair) -> bool:
        return self.results.read(name) is not None

    def make(self, name: str, pair: Pair, watch: Progress) -> None:
        """Measure every head in one pair -> effects [layers, H], and the seconds that took."""
        watch.log("rollout", pair=pair.later)
        start = time.monotonic()
        # 1. Roll out the second run; patches take its keys and values.
        runs, model = PairedRuns(self.config, self.session.here(cached), [pair]), self.session.model_config
        recorded, last = RecordedCalls(0), len(runs.ranges) - 1
        own = runs.ranges[last]
        other = runs.rollout(1, *([recorded] if self.how == "patch" else []))[:, own.start : own.stop]
        effects, of_heads = np.zeros((model.num_layers, model.num_heads)), 0.0

        def probe(block: int, denoise: Any) -> None:
            nonlocal of_heads
            if block < last:
                return
            # 2. Denoise the last block as it is, and find the region where the two runs differ.
            one = denoise()
            apart = (other - one).float().square().mean((0, 1, 2)).flatten()  # [h w]
            region = apart.topk(max(1, round(REGION * len(apart)))).indices
            began = time.monotonic()
            for layer, head in product(self.layers, range(model.num_heads)):
                # 3. Again without this head's older past: how far does x0 move there, by the runs' distance?
                edits = self.edits((layer, head), last)
                with intervene(*edits, data=dict.fromkeys(edits, recorded)):
                    moved = (denoise() - one).float().square().mean((0, 1, 2)).flatten()
                effects[layer, head] = (moved[region].mean() / apart[region].mean()).sqrt().item()
                watch.log("head", layer=layer, head=head)
            of_heads = time.monotonic() - began

        runs.rollout(0, probe=probe)
        seconds = {"seconds": time.monotonic() - start, "seconds of heads": of_heads}
        self.results.write(name, {"effects": effects.round(5).tolist()} | seconds)

    def edits(self, head: Head, block: int) -> list[Edit]:
        """Return edits that remove, or exchange, the part of a head's past that a window would drop."""
        dropped, sizes = outside(self.window, self.sink), self.config.block_sizes
        [lost] = knockouts([head], dropped, sizes, passes="denoise", blocks=[block])
        if self.how == "knockout":
            return [lost]
        layer, number = head
        where: dict[str, Any] = {"layers": (layer,), "heads": (number,), "blocks": (block,)}
        return [Patch("kv", OTHER, frames=lost.frames, passes="denoise", **where)]


def budget_rows(effects: np.ndarray, budget: float, window: int, sink: int, frames: int) -> list[list[int]]:
    """Return layer, head, window and sink of every head: the largest effects keep all frames."""
    # whole heads keep F frames, the others `window`: budget · heads = whole · F + (heads - whole) · window
    whole = int(effects.size * (budget - window) / (frames - window) + 1e-9)
    whole_heads = {divmod(int(n), effects.shape[1]) for n in np.argsort(-effects, axis=None)[:whole]}
    return [
        [*head, *((frames, 0) if head in whole_heads else (window, sink))]
        for head in np.ndindex(*effects.shape)
    ]


def tried(config: RunConfig, session: Session, pair: Pair, path: str) -> dict[str, float]:
    """Roll out a pair's first run with the whole past and with the budget -> seconds, and their distance."""
    session, found, latents = session.here(cached), {}, []
    for name, settings in {"without": None, "with budget": {"name": "head_budget", "file": path}}.items():
        pipeline = pipeline_of(session.pipeline.model, replace(config, cache_policy=settings))
        start = time.monotonic()
        latents.append(PairedRuns(config, session.replaced(pipeline=pipeline), [pair]).rollout(0).cpu())
        found[f"seconds {name}"] = round(time.monotonic() - start, 2)
    # In standard deviations of the latents: 0 is the same video.
    apart = (latents[0] - latents[1]).float().square().mean().sqrt() / latents[0].float().std()
    return found | {"distance / standard deviation": round(apart.item(), 4)}


# --- From flags to a CSV of budgets
def measure_heads(args: argparse.Namespace, config: RunConfig, out: Path) -> None:
    """Measure the pairs that are missing; write the budget as a CSV, and effects and times beside it."""
    pairs = read_pairs(args.pairs)
    require_writable(out)
    with observed(args, "pair") as watch, dask_client(args, config.device) as client:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair.texts))
        session = called(client, load(config).prepare, (), texts)
        every = session.model_config.num_layers
        check_indices("--layers", args.layers, every)
        layers = sorted({*(args.layers or range(every))})
        if len(layers) < every:  # no budget to use: other heads may have larger effects
            out = out.with_stem(f"{out.stem}_rehearsal")
        # 1. Measure every head in each pair; what is done is read.
        work = HeadEffects(config, session, args.folder, args.window, args.sink, args.measure, layers)
        items = {work.name(pair): pair for pair in pairs}
        work_through(work, items, args.folder, watch, client)
        found = [work.results.read(name) or {} for name in items]
        effects = np.array([one["effects"] for one in found])
        # 2. Give the heads of largest mean effect the whole past.
        rows = budget_rows(effects.mean(0), args.budget, args.window, args.sink, config.num_frames)
        with replacing(out) as file:
            np.savetxt(file, rows, "%d", ",", header="layer,head,window,sink", comments="")
        report = {
            "environment": called(client, environment, session.device),
            "pairs": [[*pair.texts, pair.seed] for pair in pairs],
            "effects": effects.mean(0).round(5).tolist(),
            "effects of pairs": effects.tolist(),
            "layers": layers,
            "seconds of pairs": [one["seconds"] for one in found],
            "seconds of heads": [one["seconds of heads"] for one in found],
        }
        # 3. Try the budget in a rollout, so that its time and its distance are known.
        report |= called(client, tried, config, session, pairs[0], str(out))
        save_report(report, out.with_suffix(".json"))
        print(f"{out}: {report['seconds with budget']} s a rollout, {report['seconds without']} s without")
        whole, heads = (np.mean(report[f"seconds of {of}"]) for of in ("pairs", "heads"))
        all_heads = whole + heads * (every / len(layers) - 1)
        parts = f"{heads:.0f} s of them for {len(layers)} layers"
        print(f"{whole:.0f} s a pair, {parts}: {all_heads:.0f} s for all {every}")

"""Pairs of prompts: trace by path patching which heads remember what differed, and measure heads' effects.

Two runs of one noise differ in the caption of block 0, such as in a colour. After that both have the caption
without it: what differs later is carried by cached keys and values. trace() takes those of one run into the
other, a head at a time, where a hidden shape returns; HeadEffects needs no tracker, and takes a head's past.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import dist
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from experiments.extraction.causal import LoadedModel, pipeline_of
from experiments.extraction.provenance import fingerprint
from experiments.extraction.rollout import RunObserver
from experiments.miniature.moving_shapes import BACKGROUNDS, COLORS, MIN_CONTRAST, Scene
from experiments.miniature.tracking import EvalPool
from experiments.running.engine import Results, kept
from experiments.studies.runs import Batch, Head, by_layer, knockouts, outside
from experiments.studies.shape_attention import hidden_frames, hiding
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.files import read_yaml
from wan.interventions import Edit, Patch, Source, intervene
from wan.interventions import Frames as EditFrames
from wan.policies import PromptSwitch
from wan.sites import ActivationSite, Pass, Watcher, watched
from wan.vae import VAE

OTHER = Source(prompt="the other colour")  # a name: its calls are given as data
REGION = 0.1  # of the places of a latent frame
Frames = tuple[int, ...]


@dataclass(eq=False)
class RecordedCalls(Watcher):
    """Self-attention calls and z of one pass of every block; a policy that keeps all leaves them valid."""

    step: int
    found: dict[tuple[str, int | None, int], Any] = field(default_factory=dict)

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        return site in ("self", "z") and at is not None and at.step == self.step

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
    scene: Scene | None = None  # for the tracker

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.captions, self.later)


def read_pairs(path: str | Path) -> list[Pair]:
    """Read pairs from a YAML: a list of {prompts: [A, B], then: C, seed: 0}. ConfigError for others."""
    found = []
    try:
        for number, one in enumerate(read_yaml(path)["pairs"]):
            first, second, *_ = map(str, one["prompts"])
            found.append(Pair((first, second), str(one["then"]), int(one.get("seed", number))))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error!r}; write pairs: [{{prompts: [A, B], then: C}}, ...]") from None
    return found


def pairs_of(scenes: Sequence[tuple[int, Scene]]) -> list[Pair]:
    """Return, for every scene, the two colours that stand out most from background, wall and each other."""
    found = []
    for seed, scene in scenes:
        behind = BACKGROUNDS[scene.background], COLORS[scene.wall or "white"]
        far = [c for c, rgb in COLORS.items() if min(dist(rgb, other) for other in behind) >= MIN_CONTRAST]
        apart = [(dist(COLORS[a], COLORS[b]), a, b) for a in far for b in far if a < b]
        if apart:
            movers = (replace(scene.movers[0], color=color) for color in max(apart)[1:])
            named = [replace(scene, movers=(mover,), unnamed_color=False).caption for mover in movers]
            found.append(Pair((named[0], named[1]), scene.caption, seed, scene))
    return found


@dataclass
class PairedRuns:
    """A batch of pairs: noise, texts, and rollouts of either caption."""

    config: RunConfig
    session: LoadedModel
    pairs: Sequence[Pair]

    def __post_init__(self) -> None:
        configs = [replace(self.config, prompt=pair.later, seed=pair.seed) for pair in self.pairs]
        self.batch = Batch(self.session, configs)
        self.first = [self.batch.encoded([pair.captions[n] for pair in self.pairs]) for n in range(2)]
        self.ranges = self.batch.ranges

    def rollout(self, which: int, *records: RecordedCalls, **kwargs: Any) -> Tensor:
        """Roll out all pairs in their first or second colour -> latents [B, F, C, h, w]."""
        switch = PromptSwitch(self.ranges[1].start, prompt_embeds=self.batch.text)
        with watched(*records):
            return self.batch.rollout(self.first[which], prompt_schedule=[switch], **kwargs)

    def blocks_of_hiding(self, vae: VAE, pool: EvalPool) -> list[tuple[int, int]]:
        """Return, by pair, the first block that shows no shape, and that of its return; 0, 0: not alike."""
        found = []
        for which in range(2):
            videos = zip(vae.decode(self.rollout(which)).cpu(), self.pairs, strict=True)
            futures = [pool.submit(hidden_frames, video.numpy(), pair.scene) for video, pair in videos]
            found.append([hiding(future.result(), self.config.block_sizes) for future in futures])
        return [one if one == other else (0, 0) for one, other in zip(*found, strict=True)]


def patch(
    heads: Iterable[Head] | None, frames: EditFrames | None, what: str = "kv", **when: Any
) -> list[Patch]:
    """Return patches of cached keys and values, or of z, one a layer; heads None are all."""
    if heads is None:
        return [Patch(what, OTHER, frames=frames, **when)]
    of = by_layer(heads).items()
    return [Patch(what, OTHER, frames=frames, layers=(layer,), heads=some, **when) for layer, some in of]


# --- Path patching: 0 is no change of x0 of the returning block, 1 the other run's x0
@dataclass
class Tracer:
    """Patches in pairs whose shape is hidden in blocks first_hidden..back - 1 and returns in block back."""

    paths: PairedRuns
    first_hidden: int
    back: int

    def __post_init__(self) -> None:
        ranges = self.paths.ranges
        own, start = ranges[self.back], ranges[self.first_hidden].start
        self.visible: Frames = tuple(range(start))
        self.hidden: Frames = tuple(range(start, own.start))
        self.other = RecordedCalls(0)
        self.clean = RecordedCalls(len(self.paths.config.denoising_step_list))
        one, other = self.paths.rollout(0), self.paths.rollout(1, self.other, self.clean)
        self.one = one[:, own.start : own.stop]
        self.toward = (other[:, own.start : own.stop] - self.one).flatten(1).double()

    def share(self, x0: Tensor) -> list[float]:
        """Return how far x0 of the returning block is on the way to the other run's, by pair."""
        moved = (x0 - self.one).flatten(1).double()
        return ((moved * self.toward).sum(1) / self.toward.square().sum(1)).tolist()

    def read(
        self, patches: Mapping[str, tuple[Iterable[Head] | None, Frames]], source: RecordedCalls | None = None
    ) -> dict[str, list[float]]:
        """Denoise the returning block of the first run with patched keys and values -> share() by name.

        heads None are all; source: the run that they are taken from, the other one where left out.
        """
        found, data = {}, source or self.other

        def probe(block: int, denoise: Callable[[], Tensor]) -> None:
            if block == self.back:
                for name, (heads, frames) in patches.items():
                    edits = patch(heads, frames, passes="denoise", blocks=(block,))
                    with intervene(*edits, data=dict.fromkeys(edits, data)):
                        found[name] = self.share(denoise())

        self.paths.rollout(0, probe=probe)
        return found

    def relayed(self) -> RecordedCalls:
        """Roll out the first run, whose hidden blocks read the other run's visible frames as they write."""
        blocks = range(self.first_hidden, self.back)
        return self._written(patch(None, self.visible, passes="clean", blocks=blocks), self.other)

    def written(self, heads: Sequence[Head]) -> RecordedCalls:
        """Roll out the first run with the other run's z of heads in clean passes of visible blocks."""
        when = {"passes": "clean", "blocks": range(self.first_hidden)}
        return self._written(patch(heads, None, "z", **when), self.clean)

    def _written(self, edits: Sequence[Edit], source: RecordedCalls) -> RecordedCalls:
        """Roll out with edits of clean passes: latents stay as they are, and keys and values differ."""
        record = RecordedCalls(0)
        with intervene(*edits, data=dict.fromkeys(edits, source)):
            self.paths.rollout(0, record)
        return record


def trace(
    config: RunConfig, session: LoadedModel, vae: VAE, pool: EvalPool, pairs: Sequence[Pair], most: int = 6
) -> dict[str, Any]:
    """Trace the colour in the pairs of the commonest hiding and return -> shares by pair, from 0 to 1.

    Where no pair hides and returns alike, only their number, 0.

    whole: all heads' keys and values of the past, of visible and of hidden frames, and of hidden frames whose
    blocks read the other run's past as they wrote (relayed). readers: each head's keys and values of visible
    frames, and of a layer's. writers: z of a layer, or of a head of the strongest layer, in clean passes of
    visible blocks, as each of the strongest readers, all together and all heads see it.
    """
    blocks = PairedRuns(config, session, pairs).blocks_of_hiding(vae, pool)
    hidden, back = next(iter(Counter(one for one in blocks if one[1]).most_common(1)), ((0, 0),))[0]
    if not back:
        return {"pairs": 0, "of": len(pairs)}
    alike = [pair for pair, one in zip(pairs, blocks, strict=True) if one == (hidden, back)]
    tracer = Tracer(PairedRuns(config, session, alike), hidden, back)
    model, visible = session.model_config, tracer.visible
    layers = [[(layer, head) for head in range(model.num_heads)] for layer in range(model.num_layers)]
    of_layers = {f"layer {layer[0][0]}": layer for layer in layers}
    of_heads = {f"layer {n} head {h}": [(n, h)] for layer in layers for n, h in layer}

    def strongest(shares: Mapping[str, Sequence[float]], names: Iterable[str], count: int) -> list[str]:
        return sorted(names, key=lambda name: -float(np.mean(shares[name])))[:count]

    past = {"past": visible + tracer.hidden, "visible frames": visible, "hidden frames": tracer.hidden}
    whole = tracer.read({name: (None, frames) for name, frames in past.items()})
    whole |= tracer.read({"hidden frames, relayed": (None, tracer.hidden)}, tracer.relayed())
    readers = tracer.read({name: (heads, visible) for name, heads in (of_layers | of_heads).items()})
    chosen = strongest(readers, of_heads, most)
    together = [head for name in chosen for head in of_heads[name]]
    seen_by: dict[str, tuple[Iterable[Head] | None, Frames]]
    seen_by = {name: (of_heads[name], visible) for name in chosen}
    seen_by |= {"these readers": (together, visible), "all heads": (None, visible)}
    whole["strongest readers"] = tracer.read({"": (together, visible)})[""]
    writers = {name: tracer.read(seen_by, tracer.written(heads)) for name, heads in of_layers.items()}
    writers["all layers"] = tracer.read(seen_by, tracer.written([head for layer in layers for head in layer]))
    [first] = strongest({name: one["all heads"] for name, one in writers.items()}, of_layers, 1)
    for name in (f"layer {n} head {h}" for n, h in of_layers[first]):
        writers[name] = tracer.read(seen_by, tracer.written(of_heads[name]))
    return {
        "pairs": len(alike),
        "of": len(pairs),
        "captions": [pair.later for pair in alike],
        "captions of block 0": [list(pair.captions) for pair in alike],
        "hidden from block": hidden,
        "returns in block": back,
        "whole": whole,
        "readers": readers,
        "writers": writers,
    }


# --- Effects of heads, and the budget that they give
@dataclass
class HeadEffects:
    """Effects of all heads in the last block of pairs (the engine's Work)."""

    config: RunConfig
    session: LoadedModel
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

    def make(self, name: str, pair: Pair, watch: RunObserver) -> None:
        """Measure every head in one pair -> effects [layers, H], and the seconds that took."""
        watch.log("rollout", pair=pair.later)
        start = time.monotonic()
        runs, model = PairedRuns(self.config, self.session.here(kept), [pair]), self.session.model_config
        recorded, last = RecordedCalls(0), len(runs.ranges) - 1
        own = runs.ranges[last]
        other = runs.rollout(1, *([recorded] if self.how == "patch" else []))[:, own.start : own.stop]
        effects, of_heads = np.zeros((model.num_layers, model.num_heads)), 0.0

        def probe(block: int, denoise: Any) -> None:
            nonlocal of_heads
            if block < last:
                return
            one = denoise()
            apart = (other - one).float().square().mean((0, 1, 2)).flatten()  # [h w]
            region = apart.topk(max(1, round(REGION * len(apart)))).indices
            began = time.monotonic()
            for layer, head in product(self.layers, range(model.num_heads)):
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
        return [*patch([head], lost.frames, passes="denoise", blocks=(block,))]


def budget_rows(effects: np.ndarray, budget: float, window: int, sink: int, frames: int) -> list[list[int]]:
    """Return layer, head, window and sink of every head: the largest effects keep all frames."""
    whole = int(effects.size * (budget - window) / (frames - window) + 1e-9)
    kept = {divmod(int(n), effects.shape[1]) for n in np.argsort(-effects, axis=None)[:whole]}
    return [
        [*head, *((frames, 0) if head in kept else (window, sink))] for head in np.ndindex(*effects.shape)
    ]


def tried(config: RunConfig, session: LoadedModel, pair: Pair, path: str) -> dict[str, float]:
    """Roll out a pair's first run with the whole past and with the budget -> seconds, and their distance."""
    session, found, latents = session.here(kept), {}, []
    for name, settings in {"without": None, "with budget": {"name": "head_budget", "file": path}}.items():
        pipeline = pipeline_of(session.pipeline.model, replace(config, cache_policy=settings))
        start = time.monotonic()
        latents.append(PairedRuns(config, replace(session, pipeline=pipeline), [pair]).rollout(0).cpu())
        found[f"seconds {name}"] = round(time.monotonic() - start, 2)
    apart = (latents[0] - latents[1]).float().square().mean().sqrt() / latents[0].float().std()
    return found | {"distance / standard deviation": round(apart.item(), 4)}

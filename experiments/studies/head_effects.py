"""Effects of heads in pairs of prompts, without a tracker, and the budget that they give."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.extraction.causal import LoadedModel, pipeline_of
from experiments.extraction.observer import RunObserver
from experiments.extraction.provenance import fingerprint
from experiments.running.engine import Results, loaded_here
from experiments.studies.color_paths import Pair, PairedRuns, RecordedCalls, patch
from experiments.studies.hidden_shapes import Head, knockouts, outside
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.files import read_yaml
from wan.interventions import Edit, intervene

REGION = 0.1  # of the places of a latent frame


@dataclass
class HeadEffects:
    """Effects of all heads in the last block of pairs (the engine's Work)."""

    config: RunConfig
    session: LoadedModel
    folder: Path
    window: int
    sink: int
    how: str  # knockout or patch

    def name(self, pair: Pair) -> str:
        how = {"window": self.window, "sink": self.sink, "how": self.how}
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
        start, session = time.monotonic(), loaded_here(self.session)
        runs, model = PairedRuns(self.config, session, [pair]), session.model_config
        recorded, last = RecordedCalls(0), len(runs.ranges) - 1
        own = runs.ranges[last]
        other = runs.rollout(1, *([recorded] if self.how == "patch" else []))[:, own.start : own.stop]
        effects = np.zeros((model.num_layers, model.num_heads))

        def probe(block: int, denoise: Any) -> None:
            if block < last:
                return
            one = denoise()
            apart = (other - one).float().square().mean((0, 1, 2)).flatten()  # [h w]
            region = apart.topk(max(1, round(REGION * len(apart)))).indices
            for layer, head in np.ndindex(*effects.shape):
                edits = self.edits((layer, head), last)
                with intervene(*edits, data=dict.fromkeys(edits, recorded)):
                    moved = (denoise() - one).float().square().mean((0, 1, 2)).flatten()
                effects[layer, head] = (moved[region].mean() / apart[region].mean()).sqrt().item()
                watch.log("head", layer=layer, head=head)

        runs.rollout(0, probe=probe)
        seconds = round(time.monotonic() - start, 1)
        self.results.write(name, {"effects": effects.round(5).tolist(), "seconds": seconds})

    def edits(self, head: Head, block: int) -> list[Edit]:
        """Return what takes from a head, or exchanges, the past that a window would drop."""
        dropped, sizes = outside(self.window, self.sink), self.config.block_sizes
        [lost] = knockouts([head], dropped, sizes, passes="denoise", blocks=[block])
        if self.how == "knockout":
            return [lost]
        return list(patch([head], lost.frames, passes="denoise", blocks=(block,)))


def read_pairs(path: str | Path) -> list[Pair]:
    """Read pairs from a YAML: a list of {prompts: [A, B], then: C, seed: 0}. ConfigError for others."""
    try:
        return [
            Pair(
                (str(one["prompts"][0]), str(one["prompts"][1])),
                str(one["then"]),
                int(one.get("seed", number)),
            )
            for number, one in enumerate(read_yaml(path)["pairs"])
        ]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ConfigError(f"{path}: {error!r}; write pairs: [{{prompts: [A, B], then: C}}, ...]") from None


def budget_rows(effects: np.ndarray, budget: float, window: int, sink: int, frames: int) -> list[list[int]]:
    """Return layer, head, window and sink of every head: the largest effects keep all frames."""
    whole = int(effects.size * (budget - window) / (frames - window) + 1e-9)
    kept = {divmod(int(n), effects.shape[1]) for n in np.argsort(-effects, axis=None)[:whole]}
    return [
        [*head, *((frames, 0) if head in kept else (window, sink))] for head in np.ndindex(*effects.shape)
    ]


def tried(config: RunConfig, session: LoadedModel, pair: Pair, path: str) -> dict[str, float]:
    """Roll out a pair's first run with the whole past and with the budget -> seconds, and their distance."""
    session, found, latents = loaded_here(session), {}, []
    for name, settings in {"without": None, "with budget": {"name": "head_budget", "file": path}}.items():
        pipeline = pipeline_of(session.pipeline.model, replace(config, cache_policy=settings))
        start = time.monotonic()
        latents.append(PairedRuns(config, replace(session, pipeline=pipeline), [pair]).rollout(0).cpu())
        found[f"seconds {name}"] = round(time.monotonic() - start, 2)
    apart = (latents[0] - latents[1]).float().square().mean().sqrt() / latents[0].float().std()
    return found | {"distance / standard deviation": round(apart.item(), 4)}

"""Which heads bring a hidden shape back? The past is knocked out of more and more heads, in several orders.

Heads are ranked on selection captions and judged on others. All captions and seeds of a condition are one
batched rollout; a condition is a work item, and the same command goes on where it stopped.
"""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from experiments.analysis.knockout_curves import BACK
from experiments.extraction.causal import Session
from experiments.miniature import tracking
from experiments.miniature.frozen import SETS, held_out_scenes
from experiments.miniature.judges import Answers, Judges
from experiments.miniature.moving_shapes import Scene
from experiments.running.claims import Claims
from experiments.running.ranks import Rank
from experiments.studies import direct_effects
from experiments.studies.head_attention import attention_measures
from experiments.studies.work_items import WorkItems
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.modules.edits import intervene
from wan.modules.interventions import Knockout
from wan.modules.vae import VAE

QUESTIONS = ("same", "same_color", "same_shape", "comes_back", "hides", "background")
SEED_STEP = 10_000  # between seeds of a caption; the first is the caption's number, as in evaluation.json
DECODED_AT_ONCE = 96  # videos
WAITING = 3 * DECODED_AT_ONCE  # that are judged while the next ones are made
ALONE = Rank()

Head = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class Design:
    """How large the study is."""

    captions: int = 96
    selection: int = 24
    seeds: int = 3
    draws: int = 20  # of random orders
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # heads without a past
    layers: tuple[int, ...] | None = None  # whose heads are edited; None is all


@dataclass(frozen=True)
class Condition:
    """Heads without a past, in one set of captions; name and count say where it belongs."""

    captions: str  # test or selection
    name: str
    heads: tuple[Head, ...] = ()

    @property
    def edits(self) -> list[Knockout]:
        by_layer: dict[int, list[int]] = {}
        for layer, head in sorted(self.heads):
            by_layer.setdefault(layer, []).append(head)
        return [
            Knockout(frames=("past",), layers=(layer,), heads=tuple(heads), passes="all")
            for layer, heads in by_layer.items()
        ]


NumberedScenes = list[tuple[int, Scene]]


def captions_behind_a_wall(design: Design) -> tuple[NumberedScenes, NumberedScenes]:
    """Held-out scenes of different captions with their numbers: to judge heads on, then to rank them by."""
    first, all_of_them = design.captions, design.captions + design.selection
    found: dict[str, tuple[int, Scene]] = {}
    for number, scene in enumerate(held_out_scenes(SETS["behind a wall"], 4 * all_of_them)):
        found.setdefault(scene.caption, (number, scene))
    chosen = list(found.values())[:all_of_them]
    if len(chosen) < all_of_them:
        raise ConfigError(f"{all_of_them} captions behind a wall are asked for, {len(chosen)} are held out")
    return chosen[:first], chosen[first:]


@dataclass
class HiddenShapes:
    """The study of one model: what is made is kept in folder."""

    design: Design
    config: RunConfig
    session: Session
    vae: VAE
    judges: Judges
    folder: Path
    say: Callable[[str], None] = print
    stopping: Callable[[], bool] = lambda: False
    _runs: dict[str, direct_effects.Runs] = field(default_factory=dict)
    _pending: deque[tuple[Condition, dict[str, Any], list[Future[dict[str, bool]]]]] = field(
        default_factory=deque
    )

    @cached_property
    def scenes(self) -> dict[str, list[tuple[int, Scene]]]:
        test, selection = captions_behind_a_wall(self.design)
        return {"test": test, "selection": selection}

    @cached_property
    def items(self) -> WorkItems:
        code = Path(tracking.__file__).read_bytes()
        shared = {
            "weights": self.session.sha256.result(),
            "dtype": str(self.session.dtype),
            "device": self.session.device.type,
            "frames": self.config.num_frames,
            "settings": {k: str(v) for k, v in self.session.common["config"].items()},
            "tracker": hashlib.sha256(code).hexdigest(),
        }
        return WorkItems(self.folder / "items", shared)

    @cached_property
    def heads(self) -> list[Head]:
        sizes = self.session.model_config
        layers = range(sizes.num_layers) if self.design.layers is None else self.design.layers
        return [(layer, head) for layer in layers for head in range(sizes.num_heads)]

    @cached_property
    def configs(self) -> dict[str, list[RunConfig]]:
        """Of each set, seeds outermost: all captions with their first seed, then with the next."""
        return {
            captions: [
                replace(self.config, prompt=scene.caption, seed=number + SEED_STEP * n)
                for n in range(self.design.seeds)
                for number, scene in scenes
            ]
            for captions, scenes in self.scenes.items()
        }

    def runs(self, captions: str) -> direct_effects.Runs:
        """Noise, text and base rollouts of a set, made once."""
        if captions not in self._runs:
            self._runs.clear()  # one set's at a time
            self._runs[captions] = direct_effects.begin(self.session, self.configs[captions])
        return self._runs[captions]

    # -- conditions ------------------------------------------------------------------------------------------

    def singles(self) -> Iterator[Condition]:
        """On the selection captions: nothing, and the past knocked out of one head after the other."""
        yield Condition("selection", "base")
        for layer, head in self.heads:
            yield Condition("selection", f"layer {layer} head {head}", ((layer, head),))

    def orders(self) -> dict[str, list[Head]]:
        """Heads in every order; of the measured ones the largest first."""
        measured = self.selection_measures()
        by = {
            name: sorted(self.heads, key=lambda head: measured[name][head], reverse=True)
            for name in ("effect", "change", "s", "mass on the past")
        }
        for draw in range(self.design.draws):
            by[f"random {draw}"] = random.Random(draw).sample(self.heads, len(self.heads))
        return by

    def ends(self) -> tuple[Condition, Condition]:
        return Condition("test", "base"), Condition("test", "all", tuple(self.heads))

    def conditions(self) -> Iterator[Condition]:
        """On the test captions: nothing, all heads, then the first heads of every order."""
        yield from self.ends()
        for name, heads in self.orders().items():
            for count in self.design.counts:
                yield Condition("test", f"{name}: {count}", tuple(sorted(heads[:count])))

    # -- running ---------------------------------------------------------------------------------------------

    def run(self, rank: Rank = ALONE) -> bool:
        """Make what is not done yet, beside other ranks -> whether all is done."""
        for name, make in (("selection", self.singles), ("test", self.conditions)):
            wanted = {self.items.path(self._settings(one)).stem: one for one in make()}
            with Claims(self.folder / "claims", rank) as claims:
                for number, one in enumerate(claims.to_make([*wanted], self._holds, behind=1), 1):
                    self._make(wanted[one])
                    if number % 10 == 0:
                        self.say(f"{name}: {number} of {len(wanted)} conditions made here")
                    if self.stopping():
                        self._collect(0)
                        return False
                self._collect(0)
            self.say(f"{name}: {len(wanted)} conditions are done")
        return True

    def _holds(self, name: str) -> bool:
        """Whether a condition is done; what is judged meanwhile is saved: others may wait for it."""
        while self._pending and all(one.done() for one in self._pending[0][-1]):
            self._collect(len(self._pending) - 1)
        return self.items.holds(name)

    def read(self, condition: Condition) -> dict[str, Any] | None:
        return self.items.read(self._settings(condition))

    def answers(self, condition: Condition, question: str = BACK) -> torch.Tensor:
        """Of a condition that is done: share over seeds, float64 [captions]."""
        values = self.read(condition)
        assert values is not None, f"{condition.name} is not done"
        return torch.tensor(values[question], dtype=torch.float64).view(self.design.seeds, -1).mean(0)

    def _settings(self, condition: Condition) -> dict[str, Any]:
        runs = [[config.prompt, config.seed] for config in self.configs[condition.captions]]
        return {"runs": runs, "edits": [edit.to_dict() for edit in condition.edits]}

    def _make(self, condition: Condition) -> None:
        runs, edits = self.runs(condition.captions), condition.edits
        with intervene(*edits) if edits else nullcontext():
            latents = runs.inference() if edits else runs.latents
        change = direct_effects.distance(latents, runs.latents) / runs.between_seeds
        values: dict[str, Any] = {"change": change.mean(1).tolist()}
        if not edits and condition.captions == "selection":
            values["measures"] = attention_measures(runs)
        scenes = [scene for _, scene in self.scenes[condition.captions]] * self.design.seeds
        videos = (video for part in latents.split(DECODED_AT_ONCE) for video in self.vae.decode(part).cpu())
        judged = [self.judges.submit(video, scene) for video, scene in zip(videos, scenes, strict=True)]
        self._pending.append((condition, values, judged))
        self._collect(1)

    def _collect(self, most: int) -> None:
        """Save judged conditions until at most so many wait."""
        while len(self._pending) > most:
            condition, values, judged = self._pending.popleft()
            answers: Answers = [one.result() for one in judged]
            said = {question: [int(one[question]) for one in answers] for question in QUESTIONS}
            self.items.write(self._settings(condition), values | said)

    def selection_measures(self) -> Mapping[str, Mapping[Head, float]]:
        """By order, a number per head: what knocking its past out does to selection captions, s, mass.

        effect: fall of the share that comes back, ties broken by the change of x0.
        """
        base, *singles = self.singles()
        first = self.read(base)
        assert first is not None
        back, change = self.answers(base).mean().item(), {}
        effect = {}
        for one in singles:
            change[one.heads[0]] = self.answers(one, "change").mean().item()
            effect[one.heads[0]] = back - self.answers(one).mean().item() + 1e-6 * change[one.heads[0]]
        measures = {
            name: {(layer, head): values[layer][head] for layer, head in self.heads}
            for name, values in first["measures"].items()
        }
        return {"effect": effect, "change": change} | measures

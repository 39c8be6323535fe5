"""Measure which heads need which part of their past, by which route, and which rule picks heads best.

Captions that do not name the colour alone: what comes back from behind a wall can then come from memory only.
A window of W frames with a sink of S is made by knockouts of what it would drop: the same attention as a
cache policy, a head at a time.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.miniature.moving_shapes import Scene
from experiments.miniature.tracking import SETS
from experiments.running.engine import Crew
from experiments.running.progress import Progress
from experiments.studies.hidden_shapes import (
    PAST,
    Head,
    NumberedScenes,
    Trial,
    Trials,
    different,
    outside,
)
from wan.errors import ConfigError
from wan.files import read_json

HALVES = 2  # of the captions: heads are chosen on one and judged on the other
RIDGE = 3.0  # of the regression on random sets of heads


@dataclass(frozen=True)
class Sizes:
    """Sizes of the study."""

    captions: int = 96
    draws: int = 20  # of random heads, matched by layer
    budget_draws: int = 3
    samples: int = 32  # of random halves of all heads
    budgets: tuple[int, ...] = (7, 8, 9, 10, 12, 15)  # frames of the mean head
    narrow: int = 6  # window of the heads that get no more
    sink: int = 3
    folds: int = HALVES  # halves on which budgets are judged; of 1, routes too


@dataclass(kw_only=True)
class HeadMemory(Trials):
    """The study of one model. known: heads of largest effect, found on other captions."""

    sizes: Sizes
    known: Sequence[Head]

    def __post_init__(self) -> None:
        if len(self.scenes) % HALVES:
            raise ConfigError(f"--captions {len(self.scenes)} cannot be halved; take an even number")

    def half(self, number: int) -> tuple[int, ...]:
        """Return the rows of a half of the captions."""
        return self.everyone[number::HALVES]

    # -- what is tried ---------------------------------------------------------------------------------------

    def first(self) -> Iterator[Trial]:
        """Yield the unedited runs, and all heads without a past, with windows, and with windows of a sink."""
        yield self.base()
        yield self.trial("no past", self.heads, PAST["past"])
        for size in (self.sizes.narrow, *self.sizes.budgets):
            yield self.trial(f"window {size}", self.heads, outside(size))
            yield self.trial(f"window {size}, sink", self.heads, outside(size, self.sizes.sink))

    def controls(self) -> Iterator[Trial]:
        """Yield the known heads without a past, and as many others of the same layers, drawn at random."""
        yield self.trial("known", self.known, PAST["past"])
        for draw in range(self.sizes.draws):
            yield self.trial(f"matched {draw}", self.matched(self.known, draw), PAST["past"])

    def matched(self, heads: Sequence[Head], draw: int) -> list[Head]:
        """Return random other heads, as many in each layer as there are among these, where it has as many."""
        chosen, layers = random.Random(draw), [layer for layer, _ in heads]
        found: list[Head] = []
        for layer in sorted(set(layers)):
            others = [head for head in self.heads if head[0] == layer and head not in heads]
            if len(others) < layers.count(layer):
                others = [head for head in self.heads if head[0] == layer]
            found += chosen.sample(others, layers.count(layer))
        return found

    def routes(self) -> Iterator[Trial]:
        """Yield the known heads, all at once and one by one, without parts of their past, in some passes."""
        chosen = self.everyone if self.sizes.folds == HALVES else self.half(0)
        for part, dropped in PAST.items():
            for passes in ("all", "denoise", "clean"):
                yield self.trial(f"known: {part}, {passes}", self.known, dropped, chosen, passes=passes)
        blocks = len(self.config.block_sizes)
        for back, rows in self.by_return(chosen).items():
            for part, dropped in PAST.items():
                for when, some in (("before", range(back)), ("after", range(back, blocks))):
                    name = f"known: {part}, {when} it returns, block {back}"
                    yield self.trial(name, self.known, dropped, rows, blocks=some)
        for head in self.known:
            for part, passes in (*((part, "all") for part in PAST), ("past", "denoise"), ("past", "clean")):
                yield self.trial(f"{head}: {part}, {passes}", [head], PAST[part], chosen, passes=passes)

    def by_return(self, chosen: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return some rows of unedited runs by the block in which the hidden shape is seen again."""
        found: dict[int, list[int]] = {}
        for row, back in enumerate(self.read(self.base())["returns"]):
            if back and row in chosen:
                found.setdefault(back, []).append(row)
        return {back: tuple(rows) for back, rows in sorted(found.items())}

    def sampled(self) -> Iterator[Trial]:
        """Yield random halves of all heads with narrow windows, the others with the whole past."""
        for number, narrow in enumerate(self.random_halves()):
            yield self.trial(f"sample {number}", narrow, outside(self.sizes.narrow))

    def random_halves(self) -> list[list[Head]]:
        """Return the heads of each sample that get narrow windows; every other sample is the complement."""
        found = []
        for number in range(self.sizes.samples):
            order = random.Random(number // 2).sample(self.heads, len(self.heads))
            middle = len(order) // 2
            found.append(sorted(order[:middle] if number % 2 else order[middle:]))
        return found

    def budgets(self, rules: Sequence[str], sink: int, draws: int = 0) -> Iterator[Trial]:
        """Yield, for each rule and budget, heads with the whole past, chosen on the other half of captions.

        The rest have narrow windows with a sink. draws: random heads, matched by layer with the effect's.
        """
        for half in range(self.sizes.folds):
            scores = self.scores(1 - half)
            for budget in self.sizes.budgets:
                whole = {rule: self.chosen(scores[rule], budget) for rule in rules if rule in scores}
                for draw in range(draws):
                    whole[f"random {draw}"] = self.matched(self.chosen(scores["effect"], budget), draw)
                for rule, heads in whole.items():
                    rest, name = [head for head in self.heads if head not in heads], f"{rule}, {budget}"
                    dropped = outside(self.sizes.narrow, sink)
                    yield self.trial(f"{name}, sink {sink}, half {half}", rest, dropped, self.half(half))

    def chosen(self, scores: np.ndarray, budget: int) -> list[Head]:
        """Return the heads of highest score [layers, H] that can have the whole past within a budget."""
        frames, narrow = self.config.num_frames, self.sizes.narrow
        count = int(len(self.heads) * (budget - narrow) / (frames - narrow) + 1e-9)
        return sorted(self.heads, key=lambda head: -scores[head])[:count]

    def stages(self) -> Iterator[tuple[str, Callable[[], Iterable[Trial]]]]:
        """Yield names and trials in their order; later ones need results of earlier ones."""
        yield "first", self.first
        yield "controls", self.controls
        yield "singles", self.singles
        sizes = self.sizes
        yield "budgets", lambda: self.budgets(RULES, sizes.sink, sizes.budget_draws)
        yield "routes", self.routes
        yield "budgets without a sink", lambda: self.budgets(RULES[:3], 0, 1)
        yield "samples", self.sampled
        yield "budgets by interactions", lambda: self.budgets(("interactions",), sizes.sink)

    # -- scores of heads -------------------------------------------------------------------------------------

    def scores(self, half: int) -> dict[str, np.ndarray]:
        """Return a score of every head [layers, H] by rule, from a half of the captions: high is kept."""
        rows, base = list(self.half(half)), self.read(self.base())
        shape = self.session.model_config.num_layers, self.session.model_config.num_heads
        found = {name: np.array(values)[rows].mean(0) for name, values in base["measures"].items()}
        singles = [self.read(one) for one in self.singles()]
        change = np.array([np.array(one["change"])[rows].mean() for one in singles]).reshape(shape)
        back = np.array([np.array(one["same"])[rows].mean() for one in singles]).reshape(shape)
        fall = np.array(base["same"])[rows].mean() - back
        found |= {"change of x0": change, "effect": fall + 1e-6 * change}  # ties by the change of x0
        if paths := read_json(self.folder / "paths.json") if (self.folder / "paths.json").is_file() else None:
            found["path patching"] = self._read_shares(paths["paths"], half).reshape(shape)
        samples = [self.read(one) for one in self.sampled()]
        if all(samples):
            returns = np.array([np.array(one["same"])[rows].mean() for one in samples])
            found["interactions"] = regressed(self.random_halves(), returns, self.heads).reshape(shape)
        return found

    def _read_shares(self, paths: Mapping[str, Any], half: int) -> np.ndarray:
        """Return how much of the colour each head reads, without pairs of the other half's captions."""
        rows = {scene.caption: row for row, (_, scene) in enumerate(self.scenes)}
        used = [rows.get(caption, half) % HALVES == half for caption in paths["captions"]]
        of_heads = (np.array(paths["readers"][f"layer {layer} head {head}"]) for layer, head in self.heads)
        return np.array([shares[used].mean() for shares in of_heads])

    def make_all(self, watch: Progress, crew: Crew | None = None) -> None:
        """Make the trials that are missing. Raises what work_through raises."""
        for stage, trials in self.stages():
            self.run(stage, trials(), watch, crew)


RULES = (
    "effect",
    "change of x0",
    "mass on the past",
    "mass on the older past",
    "Pyramid Forcing",
    "Forcing-KV",
    "Dummy Forcing",
    "path patching",
)


def regressed(narrow: Sequence[Sequence[Head]], returns: np.ndarray, heads: Sequence[Head]) -> np.ndarray:
    """Return what each head's past adds over random sets of others, by ridge regression, [heads].

    With half of the heads in every set it estimates Banzhaf's value; narrow: the heads without, by sample.
    """
    kept = np.array([[head not in set(one) for head in heads] for one in narrow], float) - 0.5
    centred = returns - returns.mean()
    return np.linalg.solve(kept.T @ kept + RIDGE * np.eye(len(heads)), kept.T @ centred)


def unnamed_captions(count: int, without: Mapping[str, Any]) -> NumberedScenes:
    """Return held-out scenes behind a wall whose captions do not name the colour, and are none of others."""

    def wanted(scene: Scene) -> bool:
        return scene.unnamed_color and scene.caption not in without

    return different(SETS["behind a wall"], count, wanted, among=12)

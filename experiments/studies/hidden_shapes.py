"""Find the heads that bring a hidden shape back, which part of their past they need, and who picks them best.

A trial is one batched rollout of some captions and seeds under some edits, a work item. HiddenShapes ranks
heads on selection captions, in several orders, and knocks the past out of more and more of them on others.
HeadMemory takes captions that do not name the colour alone: what comes back from behind a wall can then come
from memory only.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.drift import FPS, hue_kept, sharpness_change
from experiments.analysis.effects import BACK
from experiments.extraction.provenance import fingerprint
from experiments.extraction.rollout import RunObserver
from experiments.miniature.moving_shapes import KINDS, Scene
from experiments.miniature.tracking import SETS, EvalPool, hashes, held_out_scenes
from experiments.running.engine import Crew, Results, kept, work_through
from experiments.running.progress import Progress
from experiments.session import Session
from experiments.studies.runs import (
    MASS_PAST,
    PAST,
    Dropped,
    Head,
    Runs,
    S,
    attention_measures,
    distance,
    frame_matrices,
    knockouts,
    outside,
)
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Edit, intervene
from wan.vae import VAE

QUESTIONS = ("same", "same_color", "same_shape", "comes_back", "hides", "shape", "direction", "background")
DECODED_AT_ONCE = 96  # videos
HALVES = 2  # of the captions: heads are chosen on one and judged on the other
RIDGE = 3.0  # of the regression on random sets of heads
RULES = (
    *("effect", "change of x0", "mass on the past", "mass on the older past"),
    *("Pyramid Forcing", "Forcing-KV", "Dummy Forcing", "interactions"),
)
MEASURED = "effect", "change of x0", "interactions"  # rules by edits; the others: attention

NumberedScenes = list[tuple[int, Scene]]


# --- Scenes
def different(
    kinds: Sequence[str], count: int, wanted: Callable[[Scene], bool] = lambda scene: True, among: int = 4
) -> NumberedScenes:
    """Return the first held-out scenes of different captions, with their numbers."""
    found: dict[str, tuple[int, Scene]] = {}
    for number, scene in enumerate(held_out_scenes(kinds, among * count)):
        if wanted(scene):
            found.setdefault(scene.caption, (number, scene))
    if len(found) < count:
        raise ConfigError(f"{count} captions of {', '.join(kinds)} are asked for, {len(found)} are held out")
    return list(found.values())[:count]


def unnamed_captions(count: int, without: Mapping[str, Any]) -> NumberedScenes:
    """Return held-out scenes behind a wall whose captions do not name the colour, and are none of others."""

    def wanted(scene: Scene) -> bool:
        return scene.unnamed_color and scene.caption not in without

    return different(SETS["behind a wall"], count, wanted, among=12)


def captions(count: int) -> dict[str, int]:
    """Return the first held-out captions of all kinds, each with its number, which is its first seed."""
    return {scene.caption: number for number, scene in different(KINDS, count)}


# --- Trials
@dataclass(frozen=True)
class Trial:
    """Runs, by their rows, under some edits."""

    name: str  # trials of one claim, on other captions, differ behind a semicolon
    rows: tuple[int, ...]
    edits: tuple[Edit, ...] = ()
    measured: bool = False  # what heads attend to as well
    drift: bool = False  # how the video changes as it goes on as well

    def __str__(self) -> str:
        return self.name


def by_claim(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """Return the trials of each claim."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.name.partition(";")[0], []).append(trial)
    return found


@dataclass
class Trials:
    """Trials of runs of one model: scenes, each with its seed. Items lie in folder (the engine's Work)."""

    scenes: NumberedScenes
    config: RunConfig
    session: Session
    folder: Path
    judges: int = 1  # processes that judge videos

    def __post_init__(self) -> None:
        model = self.session.model_config
        self.shape = model.num_layers, model.num_heads
        self.heads: list[Head] = [*np.ndindex(self.shape)]
        self.everyone = tuple(range(len(self.scenes)))
        self.store = Results(self.folder / "items")

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return all that trials depend on, but for prompts, seeds and edits."""
        return self.session.identity(replace(self.config, prompt="", seed=0), tracker=hashes()["tracker"])

    def runs(self, rows: Sequence[int]) -> Runs:
        """Return noise, text and unedited rollouts of some scenes, which are made for all together."""
        configs = [replace(self.config, prompt=scene.caption, seed=seed) for seed, scene in self.scenes]
        key = fingerprint(self.identity, runs=self.of(self.everyone))
        return self.keep("runs", key, lambda: Runs(self.session.here(kept), configs)).of(rows)

    def keep(self, what: str, key: str, load: Callable[[], Any]) -> Any:
        """Return what load() returned before in this process."""
        return kept(what, key, load)

    def of(self, rows: Iterable[int]) -> list[list[Any]]:
        """Return prompts and seeds of rows."""
        return [[self.scenes[row][1].caption, self.scenes[row][0]] for row in rows]

    def base(self, measured: bool = True) -> Trial:
        """Return the unedited runs."""
        return Trial("base", self.everyone, measured=measured)

    def trial(self, name: str, heads: Iterable[Head], dropped: Dropped, rows=None, **when: Any) -> Trial:
        """Return a trial in which heads lose part of their past."""
        edits = knockouts(heads, dropped, self.config.block_sizes, **when)
        return Trial(name, self.everyone if rows is None else rows, edits)

    def singles(self) -> Iterator[Trial]:
        """Yield one head after another without a past."""
        for head in self.heads:
            yield self.trial(f"without {head}", [head], PAST["past"])

    def name(self, trial: Trial, identity: Mapping[str, Any] | None = None) -> str:
        """Return the name of a trial's work item: of what its numbers depend on."""
        edits, about = [edit.to_dict() for edit in trial.edits], {"measured": trial.measured}
        return fingerprint(identity or self.identity, runs=self.of(trial.rows), edits=edits, **about)

    def read(self, trial: Trial) -> dict[str, Any]:
        """Return the numbers of a trial, lists over its rows; nothing where it is not done."""
        return self.store.read(self.name(trial)) or {}

    def scores(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Score every head [layers, H] on some rows of trials that are done: high is important.

        effect: fall of the share that comes back without its past, ties broken by the change of x0; what it
        attends to in unedited runs.
        """
        base, singles = self.read(self.base()), [self.read(one) for one in self.singles()]

        def means(name: str) -> np.ndarray:
            return np.array([np.array(one[name])[list(rows)].mean() for one in singles]).reshape(self.shape)

        found = {name: np.array(values)[list(rows)].mean(0) for name, values in base["measures"].items()}
        found["change of x0"] = change = means("change")
        return found | {"effect": np.array(base[BACK])[list(rows)].mean() - means(BACK) + 1e-6 * change}

    def run(self, stage: str, trials: Iterable[Trial], watch: Progress, crew: Crew | None = None) -> None:
        """Make the trials that are missing. Raises what work_through raises.

        Claims come in an order of this process: another one, on the same folder, makes others meanwhile.
        """
        claims = by_claim(trials)
        order = random.Random(os.getpid()).sample([*claims], len(claims))
        wanted = {self.name(one): one for claim in order for one in claims[claim]}
        work_through(self, wanted, self.folder, watch, crew)
        watch.print(f"{stage}: {len(wanted)} trials are done")

    def is_done(self, name: str, trial: Trial) -> bool:
        return bool(self.read(trial))

    def make(self, name: str, trial: Trial, watch: RunObserver) -> None:
        watch.log("rollout", trial=trial.name)
        self.store.write(name, self.measure(trial))

    def measure(self, trial: Trial) -> dict[str, Any]:
        """Roll out a trial -> by row: 0 or 1 for each question, the change of x0; of base runs more."""
        runs = self.runs(trial.rows)
        with intervene(*trial.edits) if trial.edits else nullcontext():
            latents = runs.rollout() if trial.edits else runs.latents
        change = distance(latents, runs.latents) / runs.between_seeds
        ckpt_dir, device = self.config.ckpt_dir, self.session.device
        vae = self.keep("vae", ckpt_dir, lambda: VAE.from_pretrained(ckpt_dir, device=device))
        pool = self.keep("judges", str(self.judges), lambda: EvalPool(self.judges, "spawn"))
        parts = latents.split(2 if device.type == "cpu" else DECODED_AT_ONCE)  # two stay in a core's cache
        videos = [v for part in parts for v in vae.decode(part).cpu()]
        scenes = [self.scenes[row][1] for row in trial.rows]
        answers = pool.judge_all(videos, scenes)
        found: dict[str, Any] = {"trial": trial.name, "change": change.mean(1).tolist()}
        found |= {question: [int(one[question]) for one in answers] for question in QUESTIONS}
        if trial.drift:
            drifts = [one.result() for one in [pool.submit(drift_of, video.numpy()) for video in videos]]
            found |= {name: [round(one[name], 4) for one in drifts] for name in drifts[0]}
        if trial.measured:
            last = slice(-self.config.block_sizes[-1], None)
            curve = frame_matrices(runs, 0)[0][..., last, :].mean((0, -2))  # [layers, H, F]
            found["curve"] = curve.round(4).tolist()
            found["measures"] = {name: x.round(4).tolist() for name, x in attention_measures(runs).items()}
        return found


def drift_of(video: np.ndarray) -> dict[str, float]:
    """Return the change of a video [T, 3, H, W] in 0..1 from its first to its last second, by measure."""
    pixels = (video.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
    ends = np.concatenate([pixels[:FPS], pixels[-FPS:]])
    return {"hue kept": float(hue_kept(ends)[-1]), "sharpness": sharpness_change(pixels)}


# --- More and more heads without a past
@dataclass(frozen=True)
class Design:
    """Sizes of the study."""

    captions: int = 96
    selection: int = 24
    seeds: int = 3
    draws: int = 20  # of random orders
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # heads without a past


def captions_behind_a_wall(design: Design) -> tuple[NumberedScenes, NumberedScenes]:
    """Return held-out scenes of different captions with their numbers, of the test and of the selection."""
    chosen = different(SETS["behind a wall"], design.captions + design.selection)
    return chosen[: design.captions], chosen[design.captions :]


@dataclass
class HiddenShapes:
    """The study of one model: heads are ranked by trials of selection, and judged by those of test."""

    design: Design
    selection: Trials
    test: Trials

    def orders(self) -> dict[str, list[Head]]:
        """Return heads in every order; of the measured ones the largest first."""
        measured, heads = self.selection_measures(), self.test.heads
        by = {
            name: sorted(heads, key=lambda head: measured[name][head], reverse=True)
            for name in ("effect", "change", S, MASS_PAST)
        }
        random_orders = (random.Random(draw).sample(heads, len(heads)) for draw in range(self.design.draws))
        return by | {f"random {draw}": order for draw, order in enumerate(random_orders)}

    def conditions(self) -> Iterator[Trial]:
        """Yield trials of the test captions: nothing, all heads, the first heads of every order."""
        yield self.test.base(measured=False)
        yield self.test.trial("all", self.test.heads, PAST["past"])
        for name, heads in self.orders().items():
            for count in self.design.counts:
                yield self.test.trial(f"{name}: {count}", heads[:count], PAST["past"])

    def run(self, watch: Progress, crew: Crew | None = None) -> None:
        """Make the trials that are missing. Raises what work_through raises."""
        self.selection.run("selection", [self.selection.base(), *self.selection.singles()], watch, crew)
        self.test.run("test", self.conditions(), watch, crew)

    def answers(self, trial: Trial, question: str = BACK) -> np.ndarray:
        """Return the share over seeds of a trial of the test that is done, [captions]."""
        return np.array(self.test.read(trial)[question], float).reshape(self.design.seeds, -1).mean(0)

    def selection_measures(self) -> dict[str, np.ndarray]:
        """Return, by order, a number per head [layers, H], from the selection captions."""
        found = self.selection.scores(self.selection.everyone)
        return {"effect": found.pop("effect"), "change": found.pop("change of x0")} | found


# --- Which part of the past, and which heads keep it at equal bytes
@dataclass(frozen=True)
class Sizes:
    """Sizes of the study of memory."""

    captions: int = 80
    known: int = 8  # heads of largest single effect
    draws: int = 4  # of random heads for each fold, matched by layer with the known ones
    samples: int = 32  # of random halves of all heads
    budgets: tuple[int, ...] = (7, 8, 9, 10, 12, 15)  # frames of the mean head
    narrow: tuple[tuple[int, int], ...] = ((6, 3),)  # windows, and sinks, of the other heads
    folds: int = 5  # parts of the captions, each judged by heads chosen on the others; 1: only half is


@dataclass(kw_only=True)
class HeadMemory(Trials):
    """The study of one model. known: heads of largest effect, found on other captions; else chosen here."""

    sizes: Sizes
    known: Sequence[Head] = ()
    shared: dict[str, Any] = field(default_factory=dict)  # by all trials: runs, VAE, judges

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = max(self.sizes.folds, HALVES)
        if len(self.scenes) % parts:
            raise ConfigError(
                f"--captions {len(self.scenes)} has no {parts} equal parts: take a multiple of {parts}"
            )
        self.folds = [self.everyone[number::parts] for number in range(parts)]
        self.judged = self.folds[: self.sizes.folds]

    def keep(self, what: str, key: str, load: Callable[[], Any]) -> Any:
        return self.shared[what] if what in self.shared else self.shared.setdefault(what, load())

    def about(self, what: str, load: Callable[[], dict[str, Any]] | None = None) -> dict[str, Any]:
        """Return what load() found once for these runs, such as ceilings; {} before."""
        key = fingerprint(self.identity, runs=self.of(self.everyone))
        beside, name = Results(self.folder), f"{what}_{key}"
        if load and beside.read(name) is None:
            beside.write(name, load())
        return beside.read(name) or {}

    def others(self, fold: int) -> list[int]:
        """Return the rows on which heads are chosen for a fold: all but its own."""
        return [row for row in self.everyone if row not in self.folds[fold]]

    def stages(self) -> Iterator[tuple[str, Iterable[Trial]]]:
        """Yield names and trials, what says most first; later ones need the results of the first two."""
        yield "first", self.first()
        yield "singles", self.singles()
        if not all(map(self.read, (self.base(), *self.singles()))):
            return
        yield "controls", self.controls()
        for narrow in self.sizes.narrow:
            yield f"samples, {narrow}", self.sampled(*narrow)
            yield f"budgets, {narrow}", self.budgets(*narrow)

    def make_all(self, watch: Progress, crew: Crew | None = None) -> None:
        """Make the trials that are missing. Raises what work_through raises."""
        for stage, trials in self.stages():
            self.run(stage, trials, watch, crew)

    def of_folds(self, heads_of: Callable[[int], Iterable[Head]]) -> dict[frozenset[Head], list[int]]:
        """Return the rows that each set of heads is judged on, that of a fold: folds of the same in one."""
        found: dict[frozenset[Head], list[int]] = {}
        for fold, own in enumerate(self.judged):
            found.setdefault(frozenset(heads_of(fold)), []).extend(own)
        return found

    def by_folds(
        self, name: str, heads_of: Callable[[int], Iterable[Head]], dropped: Dropped, **when: Any
    ) -> Iterator[Trial]:
        """Yield trials of the heads of each fold, judged on its captions."""
        for number, (heads, rows) in enumerate(self.of_folds(heads_of).items()):
            trial = self.trial(f"{name}; {number}", heads, dropped, tuple(sorted(rows)), **when)
            yield replace(trial, drift=True)

    def first(self) -> Iterator[Trial]:
        """Yield the unedited runs, and all heads without a past, with windows, and with windows of a sink."""
        yield replace(self.base(), drift=True)
        yield replace(self.trial("no past", self.heads, PAST["past"]), drift=True)
        windows, sinks = zip(*self.sizes.narrow, strict=True)
        for size, sink in product(sorted({*windows, *self.sizes.budgets}), sorted({*sinks})):
            trial = self.trial(f"uniform, {size}, sink {sink}", self.heads, outside(size, sink))
            yield replace(trial, drift=True)

    def known_of(self, fold: int) -> list[Head]:
        """Return the heads of largest single effect: those given, or chosen on the captions of others."""
        if self.known:
            return [*self.known]
        return self.highest(self.scores_of(self.others(fold))["effect"], self.sizes.known)

    def controls(self) -> Iterator[Trial]:
        """Yield the known heads without a past, and as many others of the same layers, drawn at random."""
        yield from self.by_folds("known", self.known_of, PAST["past"])
        for draw in range(self.sizes.draws):

            def others(fold: int, draw: int = draw) -> list[Head]:
                return self.matched(self.known_of(fold), len(self.judged) * draw + fold)

            yield from self.by_folds(f"matched; {draw}", others, PAST["past"])

    def matched(self, heads: Sequence[Head], draw: int) -> list[Head]:
        """Return random other heads, as many in each layer as there are among these, where it has as many."""
        chosen, layers = random.Random(draw), [layer for layer, _ in heads]
        found: list[Head] = []
        for layer in sorted(set(layers)):
            whole = [head for head in self.heads if head[0] == layer]
            others = [head for head in whole if head not in heads]
            count = layers.count(layer)
            found += chosen.sample(others if len(others) >= count else whole, count)
        return found

    def sampled(self, window: int, sink: int) -> Iterator[Trial]:
        """Yield random halves of all heads with narrow windows, the others with the whole past."""
        for number, narrow in enumerate(self.random_halves()):
            yield self.trial(f"sample {number} of {window}/{sink}", narrow, outside(window, sink))

    def random_halves(self) -> list[list[Head]]:
        """Return the heads of each sample that get narrow windows; every other sample is the complement."""
        found, middle = [], len(self.heads) // 2
        for number in range(self.sizes.samples):
            order = random.Random(number // 2).sample(self.heads, len(self.heads))
            found.append(sorted(order[:middle] if number % 2 else order[middle:]))
        return found

    def budgets(self, window: int, sink: int) -> Iterator[Trial]:
        """Yield, for each rule and budget, heads with the whole past, chosen on the other folds' captions.

        The rest have narrow windows with a sink. random heads are matched by layer with the effect's.
        """
        scores = [self.scores_of(self.others(fold), (window, sink)) for fold in range(len(self.judged))]
        known = [*(rule for rule in RULES if rule in scores[0]), "random"]
        for budget, rule in product([size for size in self.sizes.budgets if size > window], known):

            def rest(fold: int, rule: str = rule, budget: int = budget) -> list[Head]:
                whole = self.chosen(scores[fold], rule, budget, fold, window)
                return [head for head in self.heads if head not in whole]

            name = f"{rule}, {budget}, {window} with sink {sink}"
            yield from self.by_folds(name, rest, outside(window, sink))

    def chosen(
        self, scores: Mapping[str, np.ndarray], rule: str, budget: int, fold: int = 0, window: int = 0
    ) -> list[Head]:
        """Return the heads that a rule gives the whole past within a budget, of scores [layers, H]."""
        frames, window = self.config.num_frames, window or self.sizes.narrow[0][0]
        count = int(len(self.heads) * (budget - window) / (frames - window) + 1e-9)
        best = self.highest(scores["effect" if rule == "random" else rule], count)
        return self.matched(best, fold) if rule == "random" else best

    def highest(self, scores: np.ndarray, count: int) -> list[Head]:
        """Return the heads of highest score [layers, H]."""
        return sorted(self.heads, key=lambda head: -scores[head])[:count]

    def scores_of(self, rows: Sequence[int], narrow: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
        """Return a score of every head [layers, H] by rule, from some captions: high is kept.

        interactions are those of heads with narrow windows (window, sink), the first ones where left out.
        """
        found = {**self.keep(f"scores of {rows}", "", lambda: self.scores(rows))}
        if all(samples := [self.read(one) for one in self.sampled(*(narrow or self.sizes.narrow[0]))]):
            returns = np.array([np.array(one[BACK])[list(rows)].mean() for one in samples])
            found["interactions"] = regressed(self.random_halves(), returns, self.heads).reshape(self.shape)
        return found


def regressed(narrow: Sequence[Sequence[Head]], returns: np.ndarray, heads: Sequence[Head]) -> np.ndarray:
    """Return what each head's past adds over random sets of others, by ridge regression, [heads].

    With half of the heads in every set it estimates Banzhaf's value; narrow: the heads without, by sample.
    """
    whole = np.array([[head not in set(one) for head in heads] for one in narrow], float) - 0.5
    centred = returns - returns.mean()
    return np.linalg.solve(whole.T @ whole + RIDGE * np.eye(len(heads)), whole.T @ centred)

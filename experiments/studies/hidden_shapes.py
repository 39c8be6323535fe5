"""Find the heads that bring a hidden shape back, which part of their past they need, and who picks them best.

A trial is one batched rollout of some captions and seeds under some edits, a work item. HiddenShapes ranks
heads on selection captions, in several orders, and knocks the past out of more and more of them on others.
HeadMemory takes captions that do not name the colour alone: what comes back from behind a wall can then come
from memory only.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.effects import BACK
from experiments.extraction.causal import LoadedModel
from experiments.extraction.provenance import fingerprint
from experiments.extraction.rollout import RunObserver
from experiments.miniature.moving_shapes import KINDS, Scene
from experiments.miniature.tracking import SETS, EvalPool, hashes, held_out_scenes
from experiments.running.engine import Crew, Results, kept, work_through
from experiments.running.progress import Progress
from experiments.studies.runs import (
    MASS_PAST,
    PAST,
    Dropped,
    Head,
    Runs,
    S,
    attention_measures,
    distance,
    knockouts,
    outside,
)
from experiments.studies.shape_attention import hidden_frames, return_block
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.files import read_json
from wan.interventions import Edit, intervene
from wan.vae import VAE

QUESTIONS = ("same", "same_color", "same_shape", "comes_back", "hides", "shape", "direction", "background")
DECODED_AT_ONCE = 96  # videos
HALVES = 2  # of the captions: heads are chosen on one and judged on the other
RIDGE = 3.0  # of the regression on random sets of heads
RULES = (
    *("effect", "change of x0", "mass on the past", "mass on the older past"),
    *("Pyramid Forcing", "Forcing-KV", "Dummy Forcing", "path patching"),
)

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

    name: str
    rows: tuple[int, ...]
    edits: tuple[Edit, ...] = ()
    measured: bool = False  # what heads attend to as well

    def __str__(self) -> str:
        return self.name


@dataclass
class Trials:
    """Trials of runs of one model: scenes, each with its seed. Items lie in folder (the engine's Work)."""

    scenes: NumberedScenes
    config: RunConfig
    session: LoadedModel
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
        """Return noise, text and unedited rollouts of some scenes."""
        scenes = [self.scenes[row] for row in rows]
        configs = [replace(self.config, prompt=scene.caption, seed=seed) for seed, scene in scenes]
        key = fingerprint(self.identity, runs=self.of(rows))
        return kept("runs", key, lambda: Runs(self.session.here(kept), configs))

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

    def name(self, trial: Trial) -> str:
        """Return the name of a trial's work item: of what its numbers depend on."""
        edits, about = [edit.to_dict() for edit in trial.edits], {"measured": trial.measured}
        return fingerprint(self.identity, runs=self.of(trial.rows), edits=edits, **about)

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
        """Make the trials that are missing. Raises what work_through raises."""
        wanted = {self.name(one): one for one in trials}
        work_through(self, wanted, self.folder, watch, crew)
        watch.print(f"{stage}: {len(wanted)} trials are done")

    def is_done(self, name: str, trial: Trial) -> bool:
        return self.store.read(name) is not None

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
        vae = kept("vae", ckpt_dir, lambda: VAE.from_pretrained(ckpt_dir, device=device))
        pool = kept("judges", str(self.judges), lambda: EvalPool(self.judges, "spawn"))
        videos = [v for part in latents.split(DECODED_AT_ONCE) for v in vae.decode(part).cpu()]
        scenes = [self.scenes[row][1] for row in trial.rows]
        answers = pool.judge_all(videos, scenes)
        found: dict[str, Any] = {"trial": trial.name, "change": change.mean(1).tolist()}
        found |= {question: [int(one[question]) for one in answers] for question in QUESTIONS}
        if trial.measured:
            pairs = zip(videos, scenes, strict=True)
            hidden = [pool.submit(hidden_frames, video.numpy(), scene) for video, scene in pairs]
            found["returns"] = [return_block(one.result(), self.config.block_sizes) for one in hidden]
            found["measures"] = {name: x.round(4).tolist() for name, x in attention_measures(runs).items()}
        return found


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

    captions: int = 96
    draws: int = 20  # of random heads, matched by layer
    budget_draws: int = 3
    samples: int = 32  # of random halves of all heads
    budgets: tuple[int, ...] = (7, 8, 9, 10, 12, 15)  # frames of the mean head
    narrow: int = 6  # window of the heads that get no more
    sink: int = 3
    folds: int = HALVES  # parts of the captions, each judged by heads chosen on the others; 1: only half is


@dataclass(kw_only=True)
class HeadMemory(Trials):
    """The study of one model. known: heads of largest effect, found on other captions."""

    sizes: Sizes
    known: Sequence[Head]

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = max(self.sizes.folds, HALVES)
        if len(self.scenes) % parts:
            raise ConfigError(
                f"--captions {len(self.scenes)} has no {parts} equal parts: take a multiple of {parts}"
            )
        self.folds = [self.everyone[number::parts] for number in range(parts)]
        self.judged = self.folds[: self.sizes.folds]

    def others(self, fold: int) -> list[int]:
        """Return the rows on which heads are chosen for a fold: all but its own."""
        return [row for row in self.everyone if row not in self.folds[fold]]

    def stages(self) -> Iterator[tuple[str, Callable[[], Iterable[Trial]]]]:
        """Yield names and trials in their order; later ones need results of earlier ones."""
        sizes = self.sizes
        yield "first", self.first
        yield "controls", self.controls
        yield "singles", self.singles
        yield "budgets", lambda: self.budgets(RULES, sizes.sink, sizes.budget_draws)
        yield "routes", self.routes
        yield "budgets without a sink", lambda: self.budgets(RULES[:3], 0, 1)
        yield "samples", self.sampled
        yield "budgets by interactions", lambda: self.budgets(("interactions",), sizes.sink)

    def make_all(self, watch: Progress, crew: Crew | None = None) -> None:
        """Make the trials that are missing. Raises what work_through raises."""
        for stage, trials in self.stages():
            self.run(stage, trials(), watch, crew)

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
            whole = [head for head in self.heads if head[0] == layer]
            others = [head for head in whole if head not in heads]
            count = layers.count(layer)
            found += chosen.sample(others if len(others) >= count else whole, count)
        return found

    def routes(self) -> Iterator[Trial]:
        """Yield the known heads, all at once and one by one, without parts of their past, in some passes."""
        chosen = self.folds[0] if self.sizes.folds == 1 else self.everyone
        for part, dropped in PAST.items():
            for passes in ("all", "denoise", "clean"):
                yield self.trial(f"known: {part}, {passes}", self.known, dropped, chosen, passes=passes)
        blocks, returns = len(self.config.block_sizes), self.read(self.base())["returns"]
        for back in sorted({returns[row] for row in chosen} - {0}):  # when the hidden shape is seen again
            rows = tuple(row for row in chosen if returns[row] == back)
            for part, dropped in PAST.items():
                for when, some in (("before", range(back)), ("after", range(back, blocks))):
                    name = f"known: {part}, {when} it returns, block {back}"
                    yield self.trial(name, self.known, dropped, rows, blocks=some)
        for head in self.known:
            for part, passes in (*((part, "all") for part in PAST), ("past", "denoise"), ("past", "clean")):
                yield self.trial(f"{head}: {part}, {passes}", [head], PAST[part], chosen, passes=passes)

    def sampled(self) -> Iterator[Trial]:
        """Yield random halves of all heads with narrow windows, the others with the whole past."""
        for number, narrow in enumerate(self.random_halves()):
            yield self.trial(f"sample {number}", narrow, outside(self.sizes.narrow))

    def random_halves(self) -> list[list[Head]]:
        """Return the heads of each sample that get narrow windows; every other sample is the complement."""
        found, middle = [], len(self.heads) // 2
        for number in range(self.sizes.samples):
            order = random.Random(number // 2).sample(self.heads, len(self.heads))
            found.append(sorted(order[:middle] if number % 2 else order[middle:]))
        return found

    def budgets(self, rules: Sequence[str], sink: int, draws: int = 0) -> Iterator[Trial]:
        """Yield, for each rule and budget, heads with the whole past, chosen on the other folds' captions.

        The rest have narrow windows with a sink. draws: random heads, matched by layer with the effect's.
        """
        for fold, rows in enumerate(self.judged):
            scores = self.scores_of(self.others(fold))
            for budget in self.sizes.budgets:
                whole = {rule: self.chosen(scores[rule], budget) for rule in rules if rule in scores}
                for draw in range(draws):
                    whole[f"random {draw}"] = self.matched(self.chosen(scores["effect"], budget), draw)
                for rule, heads in whole.items():
                    rest = [head for head in self.heads if head not in heads]
                    name = f"{rule}, {budget}, sink {sink}, fold {fold}"
                    yield self.trial(name, rest, outside(self.sizes.narrow, sink), rows)

    def chosen(self, scores: np.ndarray, budget: int) -> list[Head]:
        """Return the heads of highest score [layers, H] that can have the whole past within a budget."""
        frames, narrow = self.config.num_frames, self.sizes.narrow
        count = int(len(self.heads) * (budget - narrow) / (frames - narrow) + 1e-9)
        return sorted(self.heads, key=lambda head: -scores[head])[:count]

    def scores_of(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Return a score of every head [layers, H] by rule, from some captions: high is kept."""
        found = self.scores(rows)
        if (self.folder / "paths.json").is_file():  # without pairs of other captions that are judged
            paths = read_json(self.folder / "paths.json")["paths"]
            numbers = {scene.caption: row for row, (_, scene) in enumerate(self.scenes)}
            used = [numbers.get(caption, rows[0]) in rows for caption in paths["captions"]]
            readers = (np.array(paths["readers"][f"layer {n} head {h}"]) for n, h in self.heads)
            found["path patching"] = np.array([shares[used].mean() for shares in readers]).reshape(self.shape)
        if all(samples := [self.read(one) for one in self.sampled()]):
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

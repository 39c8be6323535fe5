"""Give the heads that a rule picks the whole past within a budget, and judge what comes back.

A trial is one batched rollout of some captions under some edits, a work item that is made once. Captions have
a shape behind a wall and do not name its colour: what comes back in it can come from memory only.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.analysis.first_frame import context_cells, first_frame_effect, sign_rate
from experiments.analysis.results import BACK
from experiments.analysis.taxonomy import Thresholds, local_mass_share
from experiments.extraction.provenance import fingerprint
from experiments.extraction.rollout import Progress
from experiments.findings.head_memory.captions import NumberedScenes
from experiments.miniature.moving_shapes import FRAMES, rendered
from experiments.miniature.tracking import EvalPool, hashes
from experiments.running.engine import Results, cached, work_through
from experiments.session import Session
from experiments.studies.batches import (
    Dropped,
    Head,
    Runs,
    distance,
    frame_matrices,
    knockouts,
    matched,
    outside,
)
from wan.config import RunConfig
from wan.interventions import Edit, intervene
from wan.vae import VAE

QUESTIONS = BACK, "comes_back"
DECODED_AT_ONCE = 96  # videos
HALVES = 2  # of the captions: heads are chosen on one and judged on the other
RIDGE = 3.0  # of the regression on random sets of heads
# "path patching" is in the results too: its scores need trace() of commit 01e1ad6, and are not made here.
RULES = (
    *("effect", "change of x0", "mass on the past", "mass on the older past"),
    *("Pyramid Forcing", "Forcing-KV", "Dummy Forcing", "path patching", "interactions"),
)
MEASURED = "effect", "change of x0", "path patching", "interactions"  # rules by edits; the others: attention


# --- What heads attend to in unedited runs
def measures_of_pass(runs: Runs, step: int) -> dict[str, np.ndarray]:
    """Measure what heads attend to in a pass of unedited runs -> means over frames, [R, layers, H]."""
    sizes = runs.configs[0].block_sizes
    past = context_cells(sizes)  # [F, F]
    logits, mass = frame_matrices(runs, step)
    of_past = np.where(past, mass, 0)[..., past.any(1), :]
    return {
        "s": first_frame_effect(logits, sizes).effect,
        "share of positive logits": sign_rate(logits[..., past]),
        "mass on frame 0": of_past[..., 0].mean(-1),
        "mass on the past": of_past.sum(-1).mean(-1),
    }


def attention_measures(runs: Runs) -> dict[str, np.ndarray]:
    """Return scores [R, layers, H] of unedited runs: of the first pass, and of the clean pass of block 1.

    Those of published rules are high for heads to which the rule would give more of the past.
    """
    sizes, clean = runs.configs[0].block_sizes, len(runs.configs[0].denoising_step_list)
    frames, own, found = range(sum(sizes)), runs.ranges[1], measures_of_pass(runs, 0)
    # Before the last block
    older = np.array([[key < b.start - len(b) for key in frames] for b in runs.ranges for _ in b])
    mass, clean_mass = (np.nan_to_num(frame_matrices(runs, step)[1]) for step in (0, clean))
    # Dummy Forcing: what block 1 reads of frame 0 and of the frames between, each relative to all heads.
    first, middle = (
        clean_mass[..., own.start : own.stop, keys].sum(-1).mean(-1)
        for keys in (slice(1), slice(1, own.start))
    )
    shares = (x / x.sum((1, 2), keepdims=True) for x in (first, middle))
    near = local_mass_share(mass[..., -sizes[-1] :, :].mean(-2), Thresholds())
    return found | {
        "mass on the older past": np.where(older, mass, 0)[..., own.start :, :].sum(-1).mean(-1),
        "Pyramid Forcing": found["share of positive logits"],
        "Forcing-KV": 1 - near,
        "Dummy Forcing": np.maximum(*shares),
    }


# --- Trials
@dataclass(frozen=True)
class Trial:
    """Runs, by their rows, under some edits."""

    name: str  # trials of one claim, on other captions, differ behind a semicolon
    rows: tuple[int, ...]
    edits: tuple[Edit, ...] = ()
    measured: bool = False  # what heads attend to as well

    def __str__(self) -> str:
        return self.name


def whole_past(own: range) -> range:
    """Return the frames that a block loses without its past."""
    return range(own.start)


def by_claim(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """Return the trials of each claim."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.name.partition(";")[0], []).append(trial)
    return found


@dataclass(frozen=True)
class Sizes:
    """Sizes of the study of memory."""

    captions: int = 40
    samples: int = 32  # of random halves of all heads
    budgets: tuple[int, ...] = (7, 8, 9, 10, 12, 15)  # frames of the mean head
    narrow: tuple[tuple[int, int], ...] = ((6, 3), (6, 0), (9, 3))  # windows, and sinks, of the other heads
    folds: int = 5  # parts of the captions, each judged by heads chosen on the others


@dataclass
class HeadMemory:
    """The study of one model on scenes, each with its seed. Items lie in folder (the engine's Work)."""

    scenes: NumberedScenes
    config: RunConfig
    session: Session
    folder: Path
    judges: int = 1  # processes that judge videos
    sizes: Sizes = Sizes()

    def __post_init__(self) -> None:
        model = self.session.model_config
        self.shape = model.num_layers, model.num_heads
        self.heads: list[Head] = [*np.ndindex(self.shape)]
        self.everyone = tuple(range(len(self.scenes)))
        self.store = Results(self.folder / "items")
        self.folds = [self.everyone[number :: self.sizes.folds] for number in range(self.sizes.folds)]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return all that trials depend on, but for prompts, seeds and edits."""
        return self.session.identity(replace(self.config, prompt="", seed=0), tracker=hashes()["tracker"])

    def runs(self, rows: Sequence[int]) -> Runs:
        """Return noise, text and unedited rollouts of some scenes, which are made for all together."""
        configs = [replace(self.config, prompt=scene.caption, seed=seed) for seed, scene in self.scenes]
        key = fingerprint(self.identity, runs=self.of(self.everyone))
        return cached("runs", key, lambda: Runs(self.session, configs)).of(rows)

    def vae(self) -> VAE:
        ckpt_dir, device = self.config.ckpt_dir, self.session.device
        return cached("vae", ckpt_dir, lambda: VAE.from_pretrained(ckpt_dir, device=device))

    def pool(self) -> EvalPool:
        return cached("judges", str(self.judges), lambda: EvalPool(self.judges, "spawn"))

    def of(self, rows: Iterable[int]) -> list[list[Any]]:
        """Return prompts and seeds of rows."""
        return [[self.scenes[row][1].caption, self.scenes[row][0]] for row in rows]

    def base(self) -> Trial:
        """Return the unedited runs."""
        return Trial("base", self.everyone, measured=True)

    def trial(self, name: str, heads: Iterable[Head], dropped: Dropped, rows=None) -> Trial:
        """Return a trial in which heads lose part of their past."""
        edits = knockouts(heads, dropped, self.config.block_sizes)
        return Trial(name, self.everyone if rows is None else rows, edits)

    def singles(self) -> Iterator[Trial]:
        """Yield one head after another without a past."""
        for head in self.heads:
            yield self.trial(f"without {head}", [head], whole_past)

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

    def run(self, stage: str, trials: Iterable[Trial], watch: Progress) -> None:
        """Make the trials that are missing. Raises what work_through raises.

        Claims come in an order of this process: another one, on the same folder, makes others meanwhile.
        """
        claims = by_claim(trials)
        order = random.Random(os.getpid()).sample([*claims], len(claims))
        wanted = {self.name(one): one for claim in order for one in claims[claim]}
        work_through(self, wanted, self.folder, watch)
        watch.print(f"{stage}: {len(wanted)} trials are done")

    def is_done(self, name: str, trial: Trial) -> bool:
        return bool(self.read(trial))

    def make(self, name: str, trial: Trial, watch: Progress) -> None:
        watch.log("rollout", trial=trial.name)
        self.store.write(name, self.measure(trial))

    def measure(self, trial: Trial) -> dict[str, Any]:
        """Roll out a trial -> by row: 0 or 1 for each question, the change of x0; of base runs more."""
        runs = self.runs(trial.rows)
        with intervene(*trial.edits) if trial.edits else nullcontext():
            latents = runs.rollout() if trial.edits else runs.latents
        change = distance(latents, runs.latents) / runs.between_seeds
        # On a CPU two videos at a time stay in a core's cache.
        parts = latents.split(2 if self.session.device.type == "cpu" else DECODED_AT_ONCE)
        videos = (video for part in parts for video in self.vae().decode(part).cpu())
        answers = self.pool().judge_all(videos, [self.scenes[row][1] for row in trial.rows])
        found: dict[str, Any] = {"trial": trial.name, "change": change.mean(1).tolist()}
        found |= {question: [int(one[question]) for one in answers] for question in QUESTIONS}
        if trial.measured:
            found["measures"] = {name: x.round(4).tolist() for name, x in attention_measures(runs).items()}
        return found

    # -- which heads keep their past at equal bytes
    def others(self, fold: int) -> list[int]:
        """Return the rows on which heads are chosen for a fold: all but its own."""
        return [row for row in self.everyone if row not in self.folds[fold]]

    def stages(self) -> Iterator[tuple[str, Iterable[Trial]]]:
        """Yield names and trials; later ones need the results of the first two."""
        yield "first", self.first()
        yield "singles", self.singles()
        if not all(map(self.read, (self.base(), *self.singles()))):
            return
        for narrow in self.sizes.narrow:
            yield f"samples, {narrow}", self.sampled(*narrow)
            yield f"budgets, {narrow}", self.budgets(*narrow)

    def make_all(self, watch: Progress) -> None:
        """Make the trials that are missing. Raises what work_through raises."""
        for stage, trials in self.stages():
            self.run(stage, trials, watch)

    def by_folds(
        self, name: str, heads_of: Callable[[int], Iterable[Head]], dropped: Dropped
    ) -> Iterator[Trial]:
        """Yield trials of the heads of each fold, judged on its captions; folds of the same heads in one."""
        rows: dict[frozenset[Head], list[int]] = {}
        for fold, own in enumerate(self.folds):
            rows.setdefault(frozenset(heads_of(fold)), []).extend(own)
        for number, (heads, judged) in enumerate(rows.items()):
            yield self.trial(f"{name}; {number}", heads, dropped, tuple(sorted(judged)))

    def first(self) -> Iterator[Trial]:
        """Yield the unedited runs, and all heads without a past, with windows, and with windows of a sink."""
        yield self.base()
        yield self.trial("no past", self.heads, whole_past)
        windows, sinks = zip(*self.sizes.narrow, strict=True)
        for size, sink in product(sorted({*windows, *self.sizes.budgets}), sorted({*sinks})):
            yield self.trial(f"uniform, {size}, sink {sink}", self.heads, outside(size, sink))

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
        scores = [self.scores_of(self.others(fold), (window, sink)) for fold in range(len(self.folds))]
        rules = [*(rule for rule in RULES if rule in scores[0]), "random"]
        for budget, rule in product([size for size in self.sizes.budgets if size > window], rules):

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
        return matched(self.heads, best, fold) if rule == "random" else best

    def highest(self, scores: np.ndarray, count: int) -> list[Head]:
        """Return the heads of highest score [layers, H]."""
        return sorted(self.heads, key=lambda head: -scores[head])[:count]

    def scores_of(self, rows: Sequence[int], narrow: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
        """Return a score of every head [layers, H] by rule, from some captions: high is kept.

        interactions are those of heads with narrow windows (window, sink), the first ones where left out.
        """
        found = self.scores(rows)
        if all(samples := [self.read(one) for one in self.sampled(*(narrow or self.sizes.narrow[0]))]):
            returns = np.array([np.array(one[BACK])[list(rows)].mean() for one in samples])
            found["interactions"] = regressed(self.random_halves(), returns, self.heads).reshape(self.shape)
        return found

    def ceilings(self) -> dict[str, list[int]]:
        """Return whether the judge says `same` of the scenes as rendered, and after the VAE."""
        scenes, vae = [scene for _, scene in self.scenes], self.vae()
        videos = rendered(scenes, FRAMES)
        parts = (vae.decode(vae.encode(x.to(self.session.device))) for x in torch.stack(videos).split(32))
        after = self.pool().judge_all((video.cpu() for part in parts for video in part), scenes)
        judged = {"rendered": self.pool().judge_all(videos, scenes), "VAE": after}
        return {name: [int(one[BACK]) for one in answers] for name, answers in judged.items()}


def regressed(narrow: Sequence[Sequence[Head]], returns: np.ndarray, heads: Sequence[Head]) -> np.ndarray:
    """Return what each head's past adds over random sets of others, by ridge regression, [heads].

    With half of the heads in every set it estimates Banzhaf's value; narrow: the heads without, by sample.
    """
    whole = np.array([[head not in set(one) for head in heads] for one in narrow], float) - 0.5
    centred = returns - returns.mean()
    return np.linalg.solve(whole.T @ whole + RIDGE * np.eye(len(heads)), whole.T @ centred)

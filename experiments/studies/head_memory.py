"""Measure which heads need which part of their past, by which route, and which rule picks heads best.

Captions that do not name the colour alone: what comes back from behind a wall can then come from memory only.
A trial is one rollout of some captions under some edits, and a work item. A window of W frames with a sink of
S is made by knockouts of what it would drop: the same attention as a cache policy, a head at a time.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.analysis.measures import sign_rate
from experiments.analysis.taxonomy import Thresholds, local_mass_share
from experiments.extraction.causal import LoadedModel
from experiments.extraction.observer import RunObserver
from experiments.miniature.moving_shapes import Scene
from experiments.miniature.recipe import SIDE
from experiments.miniature.tracking import SETS, EvalPool, hashes, held_out_scenes
from experiments.running.ranks import Rank
from experiments.running.work_items import WorkItems, item_name
from experiments.studies import causal_atlas
from experiments.studies.causal_atlas import Runs
from experiments.studies.hidden_shapes import Head, NumberedScenes, frame_matrices
from experiments.studies.shape_attention import cover_of
from wan.blocks import block_ranges
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.files import read_json
from wan.interventions import Edit, Knockout, intervene
from wan.vae import VAE

QUESTIONS = ("same", "same_color", "same_shape", "comes_back", "hides", "shape", "direction", "background")
DECODED_AT_ONCE = 96  # videos
HALVES = 2  # of the captions: heads are chosen on one and judged on the other
RIDGE = 3.0  # of the regression on random sets of heads

Dropped = Callable[[range], Iterable[int]]  # the frames of a block -> frames of its past that are left out

PAST: dict[str, Dropped] = {
    "past": lambda own: range(own.start),
    "older past": lambda own: range(max(0, own.start - len(own))),
    "last block": lambda own: range(max(0, own.start - len(own)), own.start),
    "frame 0": lambda own: range(min(1, own.start)),
}


def outside(window: int, sink: int = 0) -> Dropped:
    """Return the frames that a window, of which the first `sink` frames are a sink, does not hold."""
    return lambda own: range(sink, max(sink, own.stop - (window - sink)))


def knockouts(
    heads: Iterable[Head],
    dropped: Dropped,
    block_sizes: Sequence[int],
    passes: str = "all",
    blocks: Iterable[int] | None = None,
) -> tuple[Knockout, ...]:
    """Leave frames of their past out of the view of heads, in some passes and blocks."""
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        by_layer.setdefault(layer, []).append(head)
    ranges = block_ranges(list(block_sizes))
    return tuple(
        Knockout(frames=tuple(frames), layers=(layer,), heads=tuple(numbers), blocks=(block,), passes=passes)
        for block in (range(len(ranges)) if blocks is None else blocks)
        if (frames := [*dropped(ranges[block])])
        for layer, numbers in by_layer.items()
    )


@dataclass(frozen=True)
class Trial:
    """Captions, by their rows, under some edits."""

    name: str
    rows: tuple[int, ...]
    edits: tuple[Edit, ...] = ()
    measured: bool = False  # what heads attend to as well


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


@dataclass
class HeadMemory:
    """The study of one model, items in folder; known: heads of largest effect, found on other captions."""

    sizes: Sizes
    scenes: NumberedScenes
    known: Sequence[Head]
    config: RunConfig
    session: LoadedModel
    vae: VAE
    pool: EvalPool
    folder: Path
    watch: RunObserver = field(default_factory=RunObserver)

    def __post_init__(self) -> None:
        if len(self.scenes) % HALVES:
            raise ConfigError(f"--captions {len(self.scenes)} cannot be halved; take an even number")

    @cached_property
    def store(self) -> WorkItems:
        return WorkItems(self.folder / "items")

    @cached_property
    def configs(self) -> list[RunConfig]:
        return [replace(self.config, prompt=scene.caption, seed=n) for n, scene in self.scenes]

    @cached_property
    def runs(self) -> Runs:
        """Noise, text and unedited rollouts of all captions."""
        return causal_atlas.begin(self.session, self.configs)

    @cached_property
    def heads(self) -> list[Head]:
        model = self.session.model_config
        return [(layer, head) for layer in range(model.num_layers) for head in range(model.num_heads)]

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(len(self.scenes)))

    def half(self, number: int) -> tuple[int, ...]:
        """Return the rows of a half of the captions."""
        return self.everyone[number::HALVES]

    def trial(self, name: str, heads: Iterable[Head], dropped: Dropped, rows=None, **when: Any) -> Trial:
        """Return a trial in which heads lose part of their past."""
        edits = knockouts(heads, dropped, self.config.block_sizes, **when)
        return Trial(name, self.everyone if rows is None else rows, edits)

    # -- what is tried ---------------------------------------------------------------------------------------

    def first(self) -> Iterator[Trial]:
        """Yield the unedited runs, and all heads without a past, with windows, and with windows of a sink."""
        yield Trial("base", self.everyone, measured=True)
        yield self.trial("no past", self.heads, PAST["past"])
        for size in (self.sizes.narrow, *self.sizes.budgets):
            yield self.trial(f"window {size}", self.heads, outside(size))
            yield self.trial(f"window {size}, sink", self.heads, outside(size, self.sizes.sink))

    def singles(self) -> Iterator[Trial]:
        """Yield one head after another without a past."""
        for head in self.heads:
            yield self.trial(f"without {head}", [head], PAST["past"])

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
        for part, dropped in PAST.items():
            for passes in ("all", "denoise", "clean"):
                yield self.trial(f"known: {part}, {passes}", self.known, dropped, passes=passes)
            for head in self.known:
                yield self.trial(f"{head}: {part}, all", [head], dropped)
        for head in self.known:
            for passes in ("denoise", "clean"):
                yield self.trial(f"{head}: past, {passes}", [head], PAST["past"], passes=passes)
        blocks = len(self.config.block_sizes)
        for back, rows in self.by_return().items():
            for part, dropped in PAST.items():
                for when, some in (("before", range(back)), ("after", range(back, blocks))):
                    name = f"known: {part}, {when} it returns, block {back}"
                    yield self.trial(name, self.known, dropped, rows, blocks=some)

    def by_return(self) -> dict[int, tuple[int, ...]]:
        """Return the rows of unedited runs by the block in which the hidden shape is seen again."""
        found: dict[int, list[int]] = {}
        for row, back in enumerate(self.read(next(self.first()))["returns"]):
            if back:
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
        for half in range(HALVES):
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
        rows, base = list(self.half(half)), self.read(next(self.first()))
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

    # -- running ---------------------------------------------------------------------------------------------

    def name(self, trial: Trial) -> str:
        """Return the name of a trial's work item: of what its numbers depend on, but the device."""
        depends = {
            "weights": self.session.sha256.result(),
            "dtype": str(self.session.dtype),
            "settings": {k: str(v) for k, v in self.session.common["config"].items()},
            "tracker": hashes()["tracker"],
            "all": [[config.prompt, config.seed] for config in self.configs] if trial.measured else [],
            "runs": [[self.configs[row].prompt, self.configs[row].seed] for row in trial.rows],
            "edits": [edit.to_dict() for edit in trial.edits],
        }
        return item_name(depends)

    def read(self, trial: Trial) -> dict[str, Any]:
        """Return the numbers of a trial, lists over its rows; nothing where it is not done."""
        return self.store.read(self.name(trial)) or {}

    def run(self, rank: Rank | None = None) -> bool:
        """Make the trials that are missing, beside other processes -> whether all are done."""
        for stage, trials in self.stages():
            wanted = {self.name(one): one for one in trials()}
            with WorkItems(self.store.folder, rank) as items:
                for item in items.claim([*wanted], watch=self.watch):
                    items.write(item, self.make(wanted[item]))
                    if self.watch.stopping:
                        return False
            self.watch.print(f"{stage}: {len(wanted)} trials are done")
        return True

    def make(self, trial: Trial) -> dict[str, Any]:
        """Roll out a trial -> by row: 0 or 1 for each question, the change of x0; of base runs more."""
        rows = torch.tensor(trial.rows)
        runs = select_runs(self.runs, rows)
        with intervene(*trial.edits) if trial.edits else nullcontext():
            latents = runs.inference() if trial.edits else runs.latents
        change = causal_atlas.distance(latents, runs.latents) / runs.between_seeds
        videos = [v for part in latents.split(DECODED_AT_ONCE) for v in self.vae.decode(part).cpu()]
        scenes = [self.scenes[row][1] for row in trial.rows]
        found: dict[str, Any] = {"name": trial.name, "change": change.mean(1).tolist()}
        answers = self.pool.judge_all(videos, scenes)
        found |= {question: [int(one[question]) for one in answers] for question in QUESTIONS}
        if trial.measured:
            hidden = [
                self.pool.call(hidden_frames, video.numpy(), scene)
                for video, scene in zip(videos, scenes, strict=True)
            ]
            found["returns"] = [return_block(one.result(), self.config.block_sizes) for one in hidden]
            found["measures"] = {name: x.round(4).tolist() for name, x in attention_measures(runs).items()}
        return found


def select_runs(runs: Runs, rows: torch.Tensor) -> Runs:
    """Return some runs of a batch."""
    if len(rows) == len(runs.configs):
        return runs
    at = rows.to(runs.noise.device)
    return replace(
        runs,
        configs=[runs.configs[row] for row in rows.tolist()],
        noise=runs.noise[at],
        renoise=runs.renoise[:, at],
        text=runs.text[at],
        latents=runs.latents[at],
        between_seeds=runs.between_seeds[rows],
    )


def hidden_frames(video: np.ndarray, scene: Scene) -> list[bool]:
    """Return which latent frames of a video [T, 3, H, W] in 0..1 show no shape where it could be seen."""
    return cover_of(torch.from_numpy(video), scene, SIDE // 16, SIDE // 16).hidden.tolist()


def return_block(hidden: Sequence[bool], block_sizes: Sequence[int]) -> int:
    """Return the first block after hidden frames in which a frame is seen again; 0 where there is none."""
    if not any(hidden):
        return 0
    first = list(hidden).index(True)
    seen = [frame for frame in range(first, len(hidden)) if not hidden[frame]]
    ranges = block_ranges(list(block_sizes))
    return next((block for block, frames in enumerate(ranges) if seen and seen[0] in frames), 0)


# -- rules: a score of every head by what it attends to, and by sampled interactions -----------------------


def attention_measures(runs: Runs) -> dict[str, np.ndarray]:
    """Return scores [R, layers, H] of unedited runs: of the first pass, and of the clean pass of block 1.

    Each is high for heads to which a published rule, or the mass itself, would give more of the past.
    """
    sizes, clean = runs.configs[0].block_sizes, len(runs.configs[0].denoising_step_list)
    ranges = block_ranges(sizes)
    (logits, mass), (_, clean_mass) = (frame_matrices(runs, step) for step in (0, clean))
    past, older = (
        np.array([[key in dropped(own) for key in range(sum(sizes))] for own in ranges for _ in own])
        for dropped in (PAST["past"], PAST["older past"])
    )
    later = past.any(1)
    first, middle = (
        np.nansum(clean_mass[..., ranges[1].start : ranges[1].stop, keys], -1).mean(-1)
        for keys in (slice(1), slice(1, ranges[1].start))
    )
    near = local_mass_share(np.nan_to_num(mass[..., -sizes[-1] :, :]).mean(-2), Thresholds())
    return {
        "mass on the past": np.where(past, np.nan_to_num(mass), 0)[..., later, :].sum(-1).mean(-1),
        "mass on the older past": np.where(older, np.nan_to_num(mass), 0)[..., later, :].sum(-1).mean(-1),
        "Pyramid Forcing": sign_rate(logits[..., past]),
        "Forcing-KV": 1 - near,
        "Dummy Forcing": np.maximum(
            *(x / x.sum((1, 2), keepdims=True) for x in (first, middle))
        ),  # shares of all heads' mass on frame 0, and on the other frames of block 0
    }


def regressed(narrow: Sequence[Sequence[Head]], returns: np.ndarray, heads: Sequence[Head]) -> np.ndarray:
    """Return what each head's past adds over random sets of others, by ridge regression, [heads].

    With half of the heads in every set it estimates Banzhaf's value; narrow: the heads without, by sample.
    """
    kept = np.array([[head not in set(one) for head in heads] for one in narrow], float) - 0.5
    centred = returns - returns.mean()
    return np.linalg.solve(kept.T @ kept + RIDGE * np.eye(len(heads)), kept.T @ centred)


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


def unnamed_captions(count: int, without: Mapping[str, Any]) -> NumberedScenes:
    """Return held-out scenes behind a wall whose captions do not name the colour, and are none of others."""
    found: dict[str, tuple[int, Scene]] = {}
    for number, scene in enumerate(held_out_scenes(SETS["behind a wall"], 12 * count)):
        if scene.unnamed_color and scene.caption not in without:
            found.setdefault(scene.caption, (number, scene))
    if len(found) < count:
        raise ConfigError(f"--captions {count}: only {len(found)} such captions are held out")
    return list(found.values())[:count]

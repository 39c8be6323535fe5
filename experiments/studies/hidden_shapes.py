"""Find the heads that bring a hidden shape back, by knocking the past out of more and more of them.

Heads are ranked on selection captions, in several orders, and judged on others. A trial is one batched
rollout of some captions and seeds under some edits, and a work item. Beside it a study removes frame 0 from
the view of each head.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.analysis.effects import BACK
from experiments.analysis.first_frame import context_cells, first_frame_effect
from experiments.analysis.measures import sign_rate
from experiments.analysis.taxonomy import Thresholds, local_mass_share
from experiments.extraction.causal import LoadedModel
from experiments.extraction.observer import RunObserver
from experiments.extraction.provenance import fingerprint
from experiments.miniature.moving_shapes import KINDS, Scene
from experiments.miniature.recipe import SIDE
from experiments.miniature.tracking import SETS, EvalPool, hashes, held_out_scenes
from experiments.running.engine import Crew, Results, kept, work_through
from experiments.running.progress import Progress
from experiments.studies import causal_atlas
from experiments.studies.causal_atlas import Runs, Study, merged
from experiments.studies.shape_attention import cover_of
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.blocks import block_ranges
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Edit, Knockout, intervene
from wan.vae import VAE

S, MASS_0, MASS_PAST, RATE = "s", "mass on frame 0", "mass on the past", "share of positive logits"
QUESTIONS = ("same", "same_color", "same_shape", "comes_back", "hides", "shape", "direction", "background")
SEED_STEP = 10_000  # between seeds of a caption; the first is the caption's number, as in evaluation.json
DECODED_AT_ONCE = 96  # videos

Head = tuple[int, int]  # layer, head
NumberedScenes = list[tuple[int, Scene]]
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


def by_layer(heads: Iterable[Head]) -> dict[int, tuple[int, ...]]:
    """Return the heads of each layer."""
    found: dict[int, tuple[int, ...]] = {}
    for layer, head in sorted(heads):
        found[layer] = (*found.get(layer, ()), head)
    return found


def knockouts(
    heads: Iterable[Head],
    dropped: Dropped,
    block_sizes: Sequence[int],
    passes: str = "all",
    blocks: Iterable[int] | None = None,
) -> tuple[Knockout, ...]:
    """Leave frames of their past out of the view of heads, in some passes and blocks."""
    ranges, layers = block_ranges(list(block_sizes)), by_layer(heads)
    return tuple(
        Knockout(frames=tuple(frames), layers=(layer,), heads=some, blocks=(block,), passes=passes)
        for block in (range(len(ranges)) if blocks is None else blocks)
        if (frames := [*dropped(ranges[block])])
        for layer, some in layers.items()
    )


# -- scenes --------------------------------------------------------------------------------------------------


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


# -- trials --------------------------------------------------------------------------------------------------


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
    pool: EvalPool | None = None  # of this process

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a worker without the pool, which forks."""
        return {**self.__dict__, "pool": None}

    @cached_property
    def store(self) -> Results:
        return Results(self.folder / "items")

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return all that trials depend on, but for prompts, seeds and edits."""
        return self.session.identity(replace(self.config, prompt="", seed=0), tracker=hashes()["tracker"])

    @cached_property
    def configs(self) -> list[RunConfig]:
        return [replace(self.config, prompt=scene.caption, seed=seed) for seed, scene in self.scenes]

    @property
    def runs(self) -> Runs:
        """Noise, text and unedited rollouts of all scenes."""
        key = fingerprint(self.identity, runs=self.of(self.everyone))
        return kept("runs", key, lambda: causal_atlas.begin(self.session, self.configs))

    def of(self, rows: Iterable[int]) -> list[list[Any]]:
        """Return prompts and seeds of rows."""
        return [[self.configs[row].prompt, self.configs[row].seed] for row in rows]

    @cached_property
    def heads(self) -> list[Head]:
        model = self.session.model_config
        return [(layer, head) for layer in range(model.num_layers) for head in range(model.num_heads)]

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(len(self.scenes)))

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

    def run(self, stage: str, trials: Iterable[Trial], watch: Progress, crew: Crew | None = None) -> None:
        """Make the trials that are missing. Raises what work_through raises."""
        wanted = {self.name(one): one for one in trials}
        work_through(self, wanted, self.folder, watch, crew)
        watch.print(f"{stage}: {len(wanted)} trials are done")

    def is_done(self, name: str, trial: Trial) -> bool:
        """Check that a trial's numbers are there."""
        return self.store.read(name) is not None

    def make(self, name: str, trial: Trial, watch: RunObserver) -> None:
        """Measure a trial and write its numbers."""
        watch.log("rollout", trial=trial.name)
        self.store.write(name, self.measure(trial))

    def measure(self, trial: Trial) -> dict[str, Any]:
        """Roll out a trial -> by row: 0 or 1 for each question, the change of x0; of base runs more."""
        runs = select_runs(self.runs, trial.rows)
        with intervene(*trial.edits) if trial.edits else nullcontext():
            latents = runs.inference() if trial.edits else runs.latents
        change = causal_atlas.distance(latents, runs.latents) / runs.between_seeds
        ckpt_dir, device = self.config.ckpt_dir, self.session.device
        vae = kept("vae", ckpt_dir, lambda: VAE.from_pretrained(ckpt_dir, device=device))
        pool = self.pool or kept("judges", str(self.judges), lambda: EvalPool(self.judges, "spawn"))
        videos = [v for part in latents.split(DECODED_AT_ONCE) for v in vae.decode(part).cpu()]
        scenes = [self.scenes[row][1] for row in trial.rows]
        answers = pool.judge_all(videos, scenes)
        found: dict[str, Any] = {"trial": trial.name, "change": change.mean(1).tolist()}
        found |= {question: [int(one[question]) for one in answers] for question in QUESTIONS}
        if trial.measured:
            pairs = zip(videos, scenes, strict=True)
            hidden = [pool.call(hidden_frames, video.numpy(), scene) for video, scene in pairs]
            found["returns"] = [return_block(one.result(), self.config.block_sizes) for one in hidden]
            found["measures"] = {name: x.round(4).tolist() for name, x in attention_measures(runs).items()}
        return found


def select_runs(runs: Runs, rows: Sequence[int]) -> Runs:
    """Return some runs of a batch."""
    if len(rows) == len(runs.configs):
        return runs
    at = torch.tensor(rows, device=runs.noise.device)
    return replace(
        runs,
        configs=[runs.configs[row] for row in rows],
        noise=runs.noise[at],
        renoise=runs.renoise[:, at],
        text=runs.text[at],
        latents=runs.latents[at],
        between_seeds=runs.between_seeds[list(rows)],
    )


def hidden_frames(video: np.ndarray, scene: Scene) -> list[bool]:
    """Return which latent frames of a video [T, 3, H, W] in 0..1 show no shape where it could be seen."""
    return cover_of(torch.from_numpy(video), scene, SIDE // 16, SIDE // 16).hidden.tolist()


def return_block(hidden: Sequence[bool], block_sizes: Sequence[int]) -> int:
    """Return the first block after hidden frames in which a frame is seen again; 0 where there is none."""
    first = list(hidden).index(True) if any(hidden) else len(hidden)
    seen = next((frame for frame in range(first, len(hidden)) if not hidden[frame]), None)
    return next((block for block, own in enumerate(block_ranges(list(block_sizes))) if seen in own), 0)


# -- what heads attend to ------------------------------------------------------------------------------------


def frame_matrices(runs: Runs, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean logits and mass of a pass of unedited runs, float64 [R, layers, H, F, F]; NaN: not seen."""
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", steps=[step]) as calls:
        runs.inference()
    model, frames = runs.session.model_config, runs.configs[0].num_frames
    shape = len(runs.configs), model.num_layers, model.num_heads, frames, frames
    logits, mass = (np.full(shape, np.nan) for _ in range(2))
    for call in calls:
        assert call.at is not None and call.layout is not None
        rows, columns = np.array(call.at.query_frames)[:, None], np.array(call.layout.frames)
        for matrix, name in ((logits, "frame_logits"), (mass, "frame_mass")):
            matrix[:, call.site.layer][:, :, rows, columns] = call.values[name].double().numpy()
    return logits, mass


def measures_of_pass(runs: Runs, step: int) -> dict[str, np.ndarray]:
    """Measure what heads attend to in a pass of unedited runs -> means over frames, [R, layers, H]."""
    sizes = runs.configs[0].block_sizes
    past = context_cells(sizes)  # [F, F]
    logits, mass = frame_matrices(runs, step)
    of_past = np.where(past, mass, 0)[..., past.any(1), :]
    return {
        S: first_frame_effect(logits, sizes).effect,
        RATE: sign_rate(logits[..., past]),
        MASS_0: of_past[..., 0].mean(-1),
        MASS_PAST: of_past.sum(-1).mean(-1),
    }


def attention_measures(runs: Runs) -> dict[str, np.ndarray]:
    """Return scores [R, layers, H] of unedited runs: of the first pass, and of the clean pass of block 1.

    Those of published rules are high for heads to which the rule would give more of the past.
    """
    sizes, clean = runs.configs[0].block_sizes, len(runs.configs[0].denoising_step_list)
    ranges, frames = block_ranges(sizes), range(sum(sizes))
    older = np.array([[key in PAST["older past"](own) for key in frames] for own in ranges for _ in own])
    found, own = measures_of_pass(runs, 0), ranges[1]
    mass, clean_mass = (np.nan_to_num(frame_matrices(runs, step)[1]) for step in (0, clean))
    first, middle = (
        clean_mass[..., own.start : own.stop, keys].sum(-1).mean(-1)
        for keys in (slice(1), slice(1, own.start))
    )
    shares = (x / x.sum((1, 2), keepdims=True) for x in (first, middle))  # of what all heads read
    near = local_mass_share(mass[..., -sizes[-1] :, :].mean(-2), Thresholds())
    return found | {
        "mass on the older past": np.where(older, mass, 0)[..., own.start :, :].sum(-1).mean(-1),
        "Pyramid Forcing": found[RATE],
        "Forcing-KV": 1 - near,
        "Dummy Forcing": np.maximum(*shares),
    }


# -- more and more heads without a past ----------------------------------------------------------------------


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

    def answers(self, trials: Trials, trial: Trial, question: str = BACK) -> Tensor:
        """Return the share over seeds of a trial that is done, float64 [captions]."""
        values = torch.tensor(trials.read(trial)[question], dtype=torch.float64)
        return values.view(self.design.seeds, -1).mean(0)

    def selection_measures(self) -> Mapping[str, Mapping[Head, float]]:
        """Return, by order, a number per head: the effect of its knockout on selection captions, s, mass.

        effect: fall of the share that comes back, ties broken by the change of x0.
        """
        base = self.selection.base()
        singles = dict(zip(self.selection.heads, self.selection.singles(), strict=True))

        def mean(trial: Trial, question: str = BACK) -> float:
            return self.answers(self.selection, trial, question).mean().item()

        change = {head: mean(one, "change") for head, one in singles.items()}
        effect = {head: mean(base) - mean(one) + 1e-6 * change[head] for head, one in singles.items()}
        measures = {
            name: {head: np.array(values)[:, head[0], head[1]].mean() for head in singles}
            for name, values in self.selection.read(base)["measures"].items()
        }
        return {"effect": effect, "change": change} | measures


# -- frame 0 removed from a head's view, beside what that head attends to ----------------------------------


def captions(count: int) -> dict[str, int]:
    """Return the first held-out captions of all kinds, each with its number, which is its first seed."""
    return {scene.caption: number for number, scene in different(KINDS, count)}


def first_frame_study(
    prompts: Mapping[str, int], seeds: int, config: RunConfig, session: LoadedModel, folder: Path
) -> Study:
    """Return the causal atlas of frame 0: runs of all captions with their first seed, then with the next."""
    configs = [
        replace(config, prompt=caption, seed=first + SEED_STEP * n)
        for n in range(seeds)
        for caption, first in prompts.items()
    ]
    knockout = Knockout(frames=("first",), passes="denoise")
    return Study(folder, knockout, "head", configs, session)


def first_frame_numbers(study: Study, seeds: int) -> dict[str, np.ndarray]:
    """Return means over frames and seeds of a study that is done, [prompts, layers, H] each.

    effect and control (the same on a random earlier frame) in units of the distance between seeds, norm of z,
    and s and masses, of the first pass and as the mean over the denoising passes.
    """
    atlas = merged(study)
    found = {
        "effect": np.nanmean(atlas["effects"].numpy(), -1),
        "control": np.nanmean(atlas["frame_control"].numpy(), -1),
        "norm": atlas["head_norms"].numpy(),
        "floor": np.nanmean(atlas["floor"].numpy(), -1),
    }
    runs, steps = causal_atlas.begin(study.session, study.configs), study.configs[0].denoising_step_list
    passes = [measures_of_pass(runs, step) for step in range(len(steps))]
    for name in passes[0]:
        of_layers = np.stack([one[name] for one in passes])[:, :, [layer or 0 for layer in study.layers]]
        found |= {f"{name}, first pass": of_layers[0], f"{name}, all passes": of_layers.mean(0)}
    return {name: x.reshape(seeds, -1, *x.shape[1:]).mean(0) for name, x in found.items()}

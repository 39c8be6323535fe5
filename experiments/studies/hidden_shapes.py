"""Find the heads that bring a hidden shape back, by knocking the past out of more and more of them.

Heads are ranked on selection captions, in several orders, and judged on others. A condition is a work item:
all captions and seeds in one batched rollout. Beside it a study removes frame 0 from the view of each head.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.analysis.effects import BACK
from experiments.analysis.first_frame import context_cells, first_frame_effect
from experiments.analysis.measures import sign_rate
from experiments.extraction.causal import LoadedModel
from experiments.extraction.observer import RunObserver
from experiments.extraction.provenance import fingerprint
from experiments.miniature.moving_shapes import KINDS, Scene
from experiments.miniature.tracking import SETS, EvalPool, hashes, held_out_scenes
from experiments.running.engine import Crew, Results, kept, work_through
from experiments.running.progress import Progress
from experiments.studies import causal_atlas
from experiments.studies.causal_atlas import Runs, Study, merged
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Knockout, intervene
from wan.vae import VAE

S, MASS_0, MASS_PAST, RATE = "s", "mass on frame 0", "mass on the past", "share of positive logits"
QUESTIONS = ("same", "same_color", "same_shape", "comes_back", "hides", "background")
SEED_STEP = 10_000  # between seeds of a caption; the first is the caption's number, as in evaluation.json
DECODED_AT_ONCE = 96  # videos

Head = tuple[int, int]  # layer, head
NumberedScenes = list[tuple[int, Scene]]


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


def measures_by_pass(runs: Runs, steps: Sequence[int]) -> dict[str, np.ndarray]:
    """Measure what heads attend to in unedited runs -> means over frames, [steps, R, layers, H]."""
    found: dict[str, list[np.ndarray]] = {S: [], MASS_0: [], MASS_PAST: [], RATE: []}
    sizes = runs.configs[0].block_sizes
    past = context_cells(sizes)  # [F, F]
    for step in steps:
        logits, mass = frame_matrices(runs, step)
        of_past = np.where(past, mass, 0)[..., past.any(1), :]
        found[S].append(first_frame_effect(logits, sizes).effect)
        found[RATE].append(sign_rate(logits[..., past]))
        found[MASS_0].append(of_past[..., 0].mean(-1))
        found[MASS_PAST].append(of_past.sum(-1).mean(-1))
    return {name: np.stack(values) for name, values in found.items()}


@dataclass(frozen=True)
class Design:
    """Sizes of the study."""

    captions: int = 96
    selection: int = 24
    seeds: int = 3
    draws: int = 20  # of random orders
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # heads without a past


@dataclass(frozen=True)
class Condition:
    """Heads without a past, in one set of captions; name and count say where it belongs."""

    captions: str  # test or selection
    name: str
    heads: tuple[Head, ...] = ()

    def __str__(self) -> str:
        return f"{self.captions}, {self.name}"

    @property
    def edits(self) -> list[Knockout]:
        by_layer: dict[int, list[int]] = {}
        for layer, head in sorted(self.heads):
            by_layer.setdefault(layer, []).append(head)
        return [
            Knockout(frames=("past",), layers=(layer,), heads=tuple(heads), passes="all")
            for layer, heads in by_layer.items()
        ]


def captions_behind_a_wall(design: Design) -> tuple[NumberedScenes, NumberedScenes]:
    """Return held-out scenes of different captions with their numbers, of the test and of the selection."""
    chosen = different(SETS["behind a wall"], design.captions + design.selection)
    return chosen[: design.captions], chosen[design.captions :]


def different(kinds: Sequence[str], count: int) -> NumberedScenes:
    """Return the first held-out scenes of different captions, with their numbers."""
    found: dict[str, tuple[int, Scene]] = {}
    for number, scene in enumerate(held_out_scenes(kinds, 4 * count)):
        found.setdefault(scene.caption, (number, scene))
    if len(found) < count:
        raise ConfigError(f"{count} captions of {', '.join(kinds)} are asked for, {len(found)} are held out")
    return list(found.values())[:count]


@dataclass
class HiddenShapes:
    """The study of one model; items lie in folder."""

    design: Design
    config: RunConfig
    session: LoadedModel
    folder: Path
    judges: int = 1  # processes that judge videos
    pool: EvalPool | None = None  # of this process

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a worker without the pool, which forks."""
        return {**self.__dict__, "pool": None}

    @cached_property
    def scenes(self) -> dict[str, NumberedScenes]:
        test, selection = captions_behind_a_wall(self.design)
        return {"test": test, "selection": selection}

    @cached_property
    def store(self) -> Results:
        return Results(self.folder / "items")

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return all that the conditions depend on, but for prompts, seeds and edits."""
        config = replace(self.config, prompt="", seed=0)
        return self.session.identity(config, tracker=hashes()["tracker"])

    @cached_property
    def heads(self) -> list[Head]:
        sizes = self.session.model_config
        return [(layer, head) for layer in range(sizes.num_layers) for head in range(sizes.num_heads)]

    @cached_property
    def configs(self) -> dict[str, list[RunConfig]]:
        """Runs of each set, seeds outermost: all captions with their first seed, then with the next."""
        return {
            captions: [
                replace(self.config, prompt=scene.caption, seed=number + SEED_STEP * n)
                for n in range(self.design.seeds)
                for number, scene in scenes
            ]
            for captions, scenes in self.scenes.items()
        }

    def runs(self, captions: str) -> Runs:
        """Return noise, text and base rollouts of a set, made once."""
        key = fingerprint(self.identity, captions=captions, design=asdict(self.design))
        begun = partial(causal_atlas.begin, self.session, self.configs[captions])
        return kept("runs", key, begun)

    # -- conditions ------------------------------------------------------------------------------------------

    def singles(self) -> Iterator[Condition]:
        """Yield conditions of the selection captions: nothing, then the past of one head after another."""
        yield Condition("selection", "base")
        for layer, head in self.heads:
            yield Condition("selection", f"layer {layer} head {head}", ((layer, head),))

    def orders(self) -> dict[str, list[Head]]:
        """Return heads in every order; of the measured ones the largest first."""
        measured = self.selection_measures()
        by = {
            name: sorted(self.heads, key=lambda head: measured[name][head], reverse=True)
            for name in ("effect", "change", "s", "mass on the past")
        }
        for draw in range(self.design.draws):
            by[f"random {draw}"] = random.Random(draw).sample(self.heads, len(self.heads))
        return by

    def conditions(self) -> Iterator[Condition]:
        """Yield the conditions of the test captions: nothing, all heads, the first heads of every order."""
        yield Condition("test", "base")
        yield Condition("test", "all", tuple(self.heads))
        for name, heads in self.orders().items():
            for count in self.design.counts:
                yield Condition("test", f"{name}: {count}", tuple(sorted(heads[:count])))

    def name(self, condition: Condition) -> str:
        """Return the name of a condition's work item."""
        runs = [[config.prompt, config.seed] for config in self.configs[condition.captions]]
        edits = [edit.to_dict() for edit in condition.edits]
        return fingerprint(self.identity, runs=runs, edits=edits)

    # -- running ---------------------------------------------------------------------------------------------

    def run(self, watch: Progress, crew: Crew | None = None) -> None:
        """Make the conditions that are missing. Raises what work_through raises."""
        for name, conditions in (("selection", self.singles), ("test", self.conditions)):
            wanted = {self.name(one): one for one in conditions()}
            work_through(self, wanted, self.folder, watch, crew)
            watch.print(f"{name}: {len(wanted)} conditions are done")

    def is_done(self, name: str, condition: Condition) -> bool:
        """Check that a condition's numbers are there (the engine's Work)."""
        return self.store.read(name) is not None

    def make(self, name: str, condition: Condition, watch: RunObserver) -> None:
        """Measure a condition and write its numbers."""
        watch.log("rollout", condition=condition.name)
        self.store.write(name, self.measure(condition))

    def measure(self, condition: Condition) -> dict[str, Any]:
        """Roll out a condition -> 0 or 1 by question and run, the change of x0, what heads attend to."""
        runs, edits = self.runs(condition.captions), condition.edits
        with intervene(*edits) if edits else nullcontext():
            latents = runs.inference() if edits else runs.latents
        change = causal_atlas.distance(latents, runs.latents) / runs.between_seeds
        values: dict[str, Any] = {"change": change.mean(1).tolist()}
        if not edits and condition.captions == "selection":
            measures = measures_by_pass(runs, [0])
            values["measures"] = {name: of_pass[0].mean(0).tolist() for name, of_pass in measures.items()}
        scenes = [scene for _, scene in self.scenes[condition.captions]] * self.design.seeds
        ckpt_dir, device = self.config.ckpt_dir, self.session.device
        vae = kept("vae", ckpt_dir, lambda: VAE.from_pretrained(ckpt_dir, device=device))
        pool = self.pool or kept("judges", str(self.judges), lambda: EvalPool(self.judges, "spawn"))
        videos = (video for part in latents.split(DECODED_AT_ONCE) for video in vae.decode(part).cpu())
        answers = pool.judge_all(videos, scenes)
        return values | {question: [int(one[question]) for one in answers] for question in QUESTIONS}

    # -- results ---------------------------------------------------------------------------------------------

    def read(self, condition: Condition) -> dict[str, Any]:
        """Return the numbers of a condition that is done."""
        values = self.store.read(self.name(condition))
        assert values is not None, f"{condition.name} is not done"
        return values

    def answers(self, condition: Condition, question: str = BACK) -> Tensor:
        """Return the share over seeds of a condition that is done, float64 [captions]."""
        values = torch.tensor(self.read(condition)[question], dtype=torch.float64)
        return values.view(self.design.seeds, -1).mean(0)

    def selection_measures(self) -> Mapping[str, Mapping[Head, float]]:
        """Return, by order, a number per head: the effect of its knockout on selection captions, s, mass.

        effect: fall of the share that comes back, ties broken by the change of x0.
        """
        base, *singles = self.singles()
        back = self.answers(base).mean().item()
        change = {one.heads[0]: self.answers(one, "change").mean().item() for one in singles}
        fall = {one.heads[0]: back - self.answers(one).mean().item() for one in singles}
        measures = {
            name: {(layer, head): values[layer][head] for layer, head in self.heads}
            for name, values in self.read(base)["measures"].items()
        }
        effect = {head: fall[head] + 1e-6 * change[head] for head in fall}
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
    runs = {
        "effect": np.nanmean(atlas["effects"].numpy(), -1),
        "control": np.nanmean(atlas["frame_control"].numpy(), -1),
        "norm": atlas["head_norms"].numpy(),
        "floor": np.nanmean(atlas["floor"].numpy(), -1),
    }
    steps = range(len(study.configs[0].denoising_step_list))
    measures = measures_by_pass(causal_atlas.begin(study.session, study.configs), steps)
    for name, values in measures.items():
        of_layers = values[:, :, [layer or 0 for layer in study.layers]]
        runs |= {f"{name}, first pass": of_layers[0], f"{name}, all passes": of_layers.mean(0)}
    return {name: x.reshape(seeds, -1, *x.shape[1:]).mean(0) for name, x in runs.items()}

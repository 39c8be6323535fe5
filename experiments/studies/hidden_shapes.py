"""Which heads bring a hidden shape back? The past is knocked out of more and more heads, in several orders.

Heads are ranked on selection captions and judged on others. All captions and seeds of a condition are one
batched rollout; a condition is a work item, and the same command goes on where it stopped.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.analysis.effects import BACK
from experiments.analysis.first_frame import context_cells, first_frame_effect
from experiments.analysis.measures import sign_rate
from experiments.extraction.causal import Session
from experiments.miniature.evaluation import Answers, EvalPool
from experiments.miniature.frozen import SETS, hashes, held_out_scenes
from experiments.miniature.moving_shapes import KINDS, Scene
from experiments.running import work_items
from experiments.running.ranks import Rank
from experiments.studies import causal_atlas, direct_effects
from experiments.studies.direct_effects import Runs
from experiments.studies.work_items import WorkItems
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.capture import CapturedCall
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Knockout, intervene
from wan.vae import VAE

# --- What heads attend to in a batch of unedited runs: s, masses, and the signs that kinds of heads go by
S, MASS_0, MASS_PAST, RATE = "s", "mass on frame 0", "mass on the past", "share of positive logits"


def measures_by_pass(runs: Runs, steps: Sequence[int]) -> dict[str, np.ndarray]:
    """By name [steps, R, layers, H] of R runs in these denoising steps; means over frames with a past."""
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", steps=steps) as calls:
        runs.inference()
    found: dict[str, list[np.ndarray]] = {S: [], MASS_0: [], MASS_PAST: [], RATE: []}
    sizes = runs.configs[0].block_sizes
    past = context_cells(sizes)  # [F, F]
    has_past = past.any(1)
    for step in steps:
        now = [call for call in calls if call.at is not None and call.at.step == step]
        logits, mass = (_matrices(now, name, len(past)) for name in ("frame_logits", "frame_mass"))
        found[S].append(first_frame_effect(logits, sizes).effect)
        found[RATE].append(sign_rate(logits[..., past]))
        of_past = np.where(past, mass, 0)[..., has_past, :]
        found[MASS_0].append(of_past[..., 0].mean(-1))
        found[MASS_PAST].append(of_past.sum(-1).mean(-1))
    return {name: np.stack(values) for name, values in found.items()}


def attention_measures(runs: Runs) -> dict[str, list[list[float]]]:
    """The same of the first pass, means over runs: [layers][H] each."""
    return {name: values[0].mean(0).tolist() for name, values in measures_by_pass(runs, [0]).items()}


def _matrices(calls: Sequence[CapturedCall], name: str, num_frames: int) -> np.ndarray:
    """A quantity of one pass as [R, layers, H, F, F]; NaN where nothing was attended."""
    layers = sorted({call.site.layer for call in calls})
    batch, heads = calls[0].values[name].shape[:2]
    matrix = torch.full((batch, len(layers), heads, num_frames, num_frames), torch.nan)
    for call in calls:
        values: Tensor = call.values[name]  # [R, H, Fq, Fk]
        assert call.at is not None and call.layout is not None
        rows, columns = torch.tensor(call.at.query_frames), torch.tensor(call.layout.frames)
        of_layer = matrix[:, layers.index(call.site.layer)]
        of_layer[:, :, rows[:, None], columns] = values.float()
    return matrix.double().numpy()


# --- Which heads bring a hidden shape back? The past is knocked out of more and more heads, in several orders
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
    judges: EvalPool
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
        shared = {
            "weights": self.session.sha256.result(),
            "dtype": str(self.session.dtype),
            "device": self.session.device.type,
            "frames": self.config.num_frames,
            "settings": {k: str(v) for k, v in self.session.common["config"].items()},
            "tracker": hashes()["tracker"],
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
            with work_items.WorkItems(self.folder / "claims", rank) as claims:
                for number, one in enumerate(claims.claim([*wanted], self._holds, behind=1), 1):
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


# --- What removing frame 0 from a head's view does, beside what that head attends to
REMOVED_SEED_STEP = 10_000


def captions(count: int) -> dict[str, int]:
    """The first held-out captions of all kinds, each with its number, which is its first seed."""
    numbers: dict[str, int] = {}
    for number, scene in enumerate(held_out_scenes(KINDS, 4 * count)):
        numbers.setdefault(scene.caption, number)
    if len(numbers) < count:
        raise ConfigError(f"{count} captions are asked for, {len(numbers)} are held out")
    return dict(list(numbers.items())[:count])


@dataclass(frozen=True)
class FirstFrameRemoved:
    """The study of one model; prompts and seeds in the order of its configs, seeds outermost."""

    prompts: Mapping[str, int]  # caption -> its first seed
    seeds: int
    config: RunConfig
    session: Session
    folder: Path
    layers: tuple[int, ...] | None = None  # None is all

    @property
    def configs(self) -> list[RunConfig]:
        return [
            replace(self.config, prompt=caption, seed=first + REMOVED_SEED_STEP * n)
            for n in range(self.seeds)
            for caption, first in self.prompts.items()
        ]

    @property
    def study(self) -> causal_atlas.Study:
        sizes = self.session.model_config
        return causal_atlas.Study(
            self.folder,
            Knockout(frames=("first",), layers=self.layers, passes="denoise"),
            "head",
            self.configs,
            sizes.num_layers,
            sizes.num_heads,
            self.session.sha256.result(),
            str(self.session.dtype),
            self.session.common["files"],
        )

    def run(self, say: Callable[[str], None], stopping: Callable[[], bool], rank: Rank | None = None) -> bool:
        """Make what is not done yet, all runs in one batch, layers shared by ranks -> whether all is done."""
        return causal_atlas.run(self.study, self.session, len(self.configs), say, stopping, rank)

    def numbers(self) -> dict[str, np.ndarray]:
        """Of a study that is done, means over frames and seeds, [prompts, layers, H] each.

        effect and control (the same on a random earlier frame) in units of the distance between seeds, norm
        of z, and s and masses, of the first pass and as the mean over the denoising passes.
        """
        merged, study = causal_atlas.merged(self.study), self.study
        found = {
            name: self._by_prompt(np.nanmean(merged[field].numpy(), -1))
            for name, field in (("effect", "effects"), ("control", "frame_control"))
        }
        found["norm"] = self._by_prompt(merged["head_norms"].numpy())
        found["floor"] = self._by_prompt(np.nanmean(merged["floor"].numpy(), -1))
        steps = range(len(self.config.denoising_step_list))
        for name, values in measures_by_pass(direct_effects.begin(self.session, self.configs), steps).items():
            of_layers = values[:, :, [layer or 0 for layer in study.layers]]
            found[f"{name}, first pass"] = self._by_prompt(of_layers[0])
            found[f"{name}, all passes"] = self._by_prompt(of_layers.mean(0))
        return found

    def _by_prompt(self, values: np.ndarray) -> np.ndarray:
        """Runs [R, ...] -> prompts [prompts, ...], mean over seeds."""
        return values.reshape(self.seeds, -1, *values.shape[1:]).mean(0)

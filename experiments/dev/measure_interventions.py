"""A rollout with edits beside a plain one, and how long a causal atlas of every head takes."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from experiments.dev.measure_capture import Rollout
from experiments.extraction.causal import Session
from experiments.extraction.observer import RunObserver
from experiments.studies import causal_atlas
from wan.config import ModelConfig, RunConfig
from wan.interventions import Ablate, Bias, Edit, Knockout, Move, intervene

FIRST = ("first",)
PLAIN, AFTER = "plain", "nothing active, after an edit"


def rows(config: RunConfig, sizes: ModelConfig) -> dict[str, list[Edit]]:
    """What is edited, by the name of its row; a row that edits nothing follows one that does."""
    half = tuple(range(sizes.num_heads // 2))
    middle, first_half = (3, 4, 5), tuple(range(config.num_frames // 2))
    return {
        PLAIN: [],
        "knockout of 3 frames, half of the heads": [Knockout(frames=middle, heads=half, passes="all")],
        AFTER: [],
        "knockout of frame 0, one head": [Knockout(frames=FIRST, heads=(0,), passes="all")],
        "knockout of frame 0, all heads": [Knockout(frames=FIRST, passes="all")],
        "knockout of the first half, all heads": [Knockout(frames=first_half, passes="all")],
        "bias on frame 0, half of the heads": [Bias(1.0, frames=FIRST, heads=half, passes="all")],
        "frame 0 moved by 1, all heads": [Move(FIRST, offset=1, passes="all")],
        "zero ablation, half of the heads": [Ablate("zero", heads=half, passes="all")],
    }


def measure(
    rollout: Rollout,
    table: dict[str, list[Edit]],
    repeats: int,
    keep: Callable[[dict[str, dict]], None] = lambda rows: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, dict[str, Any]]:
    """Medians over repeats, rows in turn after an untimed round; edits are of every layer.

    bit_identical: the latents equal those of the first plain rollout. keep gets the rows so far after each
    one, say a line.
    """

    def run(edits: list[Edit]) -> tuple[float, torch.Tensor, int]:
        with intervene(*edits) if edits else nullcontext() as session:
            ran = rollout.run([])
        return ran.seconds, ran.latents, sum(session.changed) if session else 0

    plain = run([])[1]
    found: dict[str, dict[str, Any]] = {}
    for name, edits in table.items():
        seconds, latents, calls = run(edits)
        found[name] = {"edited_calls": calls, "bit_identical": torch.equal(latents, plain), "seconds": []}
        say(f"{name}: {seconds:.3f} s, not counted")
    for _ in range(repeats):
        for name, edits in table.items():
            seconds, latents, _ = run(edits)
            found[name]["seconds"].append(round(seconds, 4))
            found[name]["bit_identical"] &= torch.equal(latents, plain)
            say(f"{name}: {seconds:.3f} s")
            keep(_with_medians(found))
    return _with_medians(found)


def _with_medians(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows that have run, each with its median and that over the plain one's."""
    medians = {name: statistics.median(row["seconds"]) for name, row in found.items() if row["seconds"]}
    return {
        name: found[name] | {"median_seconds": median, "times_plain": round(median / medians[PLAIN], 3)}
        for name, median in medians.items()
    }


def session_of(rollout: Rollout, sizes: ModelConfig, config: RunConfig, weights: str) -> Session:
    """What a study takes, of a rollout's model; every prompt has the rollout's states."""
    sha256: Future[str] = Future()
    sha256.set_result(weights)
    states: Any = _SameStates((rollout.prompt_embeds, []))
    common = {"config": {"model": config.model}, "files": []}  # its weights may be of no file
    noise = rollout.noise
    return Session(sizes, rollout.pipeline, states, common, sha256, noise.device, noise.dtype)


class _SameStates(dict):
    """The same states for every prompt."""

    def __init__(self, states: tuple[torch.Tensor, list[str]]):
        super().__init__()
        self.states = states

    def __getitem__(self, prompt: str) -> tuple[torch.Tensor, list[str]]:
        return self.states


def sweep(
    session: Session,
    config: RunConfig,
    prompts: int,
    seconds: float,
    folder: Path,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The causal atlas of mean ablation of every head, for so many seconds, at least two layers.

    What is done in folder is not made again: seconds are of this call, and extrapolated to all items.
    """
    sizes = session.model_config
    configs = [replace(config, prompt=prompt) for prompt in config.reference_prompts[:prompts]]
    edit = Ablate("mean", passes="denoise")
    study = causal_atlas.Study(folder, edit, "head", configs, session)
    before = sum(study.store.read(name) is not None for name in study.items)
    stamps: list[float] = []

    class Clock(RunObserver):
        """Time each line, one at first and one a layer; stop when the seconds are over."""

        def print(self, line: str) -> None:
            stamps.append(time.monotonic())
            self.stopping = len(stamps) > 2 and stamps[-1] - stamps[0] > seconds
            say(f"atlas: {line}")

    finished = causal_atlas.run(study, len(configs), Clock())
    layers = [round(after - start, 3) for start, after in pairwise(stamps[1:])]
    of_layer = statistics.median(layers) if layers else stamps[-1] - stamps[0]
    first = stamps[1] - stamps[0] if len(stamps) > 1 else 0.0
    return {
        "prompts": prompts,
        "heads": sizes.num_layers * sizes.num_heads,
        "layers": sizes.num_layers,
        "layers_done_before": before // prompts,
        "layers_done_now": len(stamps) - 1,
        "finished": finished,
        "seconds": round(stamps[-1] - stamps[0], 2),
        "first_layer_seconds": round(first, 2),  # with the base runs, and the reference set if it is new
        "layer_seconds": layers,
        "all_layers_seconds": round(first + of_layer * (sizes.num_layers - 1), 1),
    }

"""First-frame measures of the weights that a causal training kept on its way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.analysis.measures import measure_heads, open_quantity
from experiments.caches.files import CacheError
from experiments.extraction import cache_builders, causal
from experiments.miniature.training import kept_steps
from wan.config import RunConfig

MEASURES = ("first_minus_context", "equal_distance_excess", "wave_r2", "first_context_mass")


def kept_weights(folder: Path) -> dict[int, Path]:
    """Step -> file, of the step_*.pt in a folder. Raises CacheError where there are none."""
    files = kept_steps(folder)
    if not files:
        made_with = "python experiments/train_mini.py --stage causal --training_checkpoints"
        raise CacheError(f"{folder} has no step_*.pt; make them with: {made_with} {folder}")
    return files


def measure(
    config: RunConfig, files: dict[int, Path], captions: Sequence[str]
) -> Iterator[tuple[dict, dict]]:
    """For each step: measures [layers, heads] of the first and the clean pass, and the atlas of the first
    caption."""
    for step, path in files.items():
        atlases = _atlases(replace(config, checkpoint_path=str(path)), captions)
        last = len(atlases[0]["pass_timesteps"]) - 1
        measures = {"first pass": _means(atlases, 0), "clean pass": _means(atlases, last)}
        yield {"step": step} | measures, atlases[0]


def read_report(path: Path) -> dict:
    """What measure_checkpoints.py wrote. Raises CacheError where it is something else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        steps = report["training_checkpoints"] if "training_checkpoints" in report else report["moments"]
        return {**report, "training_checkpoints": steps}  # `moments` was their name
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(
            f"{path} was not written by measure_checkpoints.py ({type(error).__name__})"
        ) from error


def _means(atlases: Sequence[dict], step: int) -> dict[str, list]:
    """Measures [layers, heads] of one pass, mean over the atlases."""
    of_atlases = [
        measure_heads(open_quantity(a, step, "mean_logit"), open_quantity(a, step, "mass")) for a in atlases
    ]
    maps = {
        name: np.mean(
            [next(m.values for m in s if m.name == name and m.values is not None) for s in of_atlases], 0
        )
        for name in MEASURES
    }
    return {name: values.round(4).tolist() for name, values in maps.items()}


def _atlases(config: RunConfig, captions: Sequence[str]) -> list[dict]:
    """Of each caption, with its number as seed."""
    requests = cache_builders.atlas_requests(config, mass=True, key_curve=False, cross=False)
    session = causal.prepare(config, requests, captions)
    runs = (
        causal.extract_next(session, replace(config, prompt=c, seed=i), requests)
        for i, c in enumerate(captions)
    )
    return [cache_builders.atlas_cache(run) for run in runs]

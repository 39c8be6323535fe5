"""Measure first-frame effects of the weights that a causal training kept on its way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.measures import measure_heads, open_quantity
from experiments.caches.files import CacheError
from experiments.extraction import cache_builders, causal
from experiments.miniature.training import kept_steps
from wan.config import RunConfig

MEASURES = ("first_minus_context", "equal_distance_excess", "wave_r2", "first_context_mass")


def kept_weights(folder: Path) -> dict[int, Path]:
    """Return step -> file, of the step_*.pt in a folder. Raises CacheError where there are none."""
    files = kept_steps(folder)
    if not files:
        made_with = "python experiments/train_mini.py --stage causal --training_checkpoints"
        raise CacheError(f"{folder} has no step_*.pt; make them with: {made_with} {folder}")
    return files


def measure(
    config: RunConfig, files: dict[int, Path], captions: Sequence[str]
) -> Iterator[tuple[dict, dict]]:
    """Yield, for each step, means over captions [layers, heads] of two passes, and an atlas.

    The number of a caption is its seed; the atlas is the first caption's.
    """
    for step, path in files.items():
        config = replace(config, checkpoint_path=str(path))
        requests = cache_builders.atlas_requests(config, mass=True, key_curve=False, cross=False)
        loaded, atlases = causal.prepare(config, requests, captions), []
        for seed, caption in enumerate(captions):
            run = causal.extract_next(loaded, replace(config, prompt=caption, seed=seed), requests)
            atlases.append(cache_builders.atlas_cache(run))
        found: dict[str, Any] = {"step": step}
        for name, index in (("first pass", 0), ("clean pass", len(atlases[0]["pass_timesteps"]) - 1)):
            quantities = [[open_quantity(a, index, q) for q in ("mean_logit", "mass")] for a in atlases]
            by_caption = [
                {m.name: m.values for m in measure_heads(*both) if m.values is not None}
                for both in quantities
            ]
            found[name] = {m: np.mean([one[m] for one in by_caption], 0).round(4).tolist() for m in MEASURES}
        yield found, atlases[0]


def read_report(path: Path) -> dict:
    """Read what measure_checkpoints.py wrote. Raises CacheError where it is something else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        steps = report["training_checkpoints"] if "training_checkpoints" in report else report["moments"]
        return {**report, "training_checkpoints": steps}  # `moments` was their name
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(
            f"{path} was not written by measure_checkpoints.py ({type(error).__name__})"
        ) from error

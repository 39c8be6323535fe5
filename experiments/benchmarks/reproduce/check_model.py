"""Calibrate the verdict of experiments/check_model.py on right, other and wrong videos of known models.

python experiments/benchmarks/reproduce/check_model.py

Writes docs/check_model.json. Rows of the published data: eagle beside castle, and eagle beside its own heads
and layers in another order. Rows of the trained miniature: the same video in other arithmetic, other seeds
and prompts, random weights, and models with one thing wrong, beside the right one's own atlas.
"""

from dataclasses import replace
from itertools import permutations
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from experiments.analysis import published
from experiments.analysis.agreement import AGREES, OTHER_OWN, OTHER_R, Comparison, compare
from experiments.analysis.first_frame import matrices
from experiments.analysis.rope_waves import fitted_frequencies, temporal_frequencies
from experiments.benchmarks.reproduce.common import finding_parser, save_finding
from experiments.benchmarks.rollouts import fill_
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.running.cli import main
from experiments.session import load, load_pipeline, pipeline_of
from experiments.studies.runs import Batch, frame_matrices
from wan import keys as rope
from wan.config import RunConfig, load_config
from wan.model import QueryKeyNorm

PROMPTS = (
    "a red circle moving right over a dark blue background",
    "a green square moving up and left and a red triangle moving up over a light green background",
    "a yellow circle moving left behind a white wall over a dark red background",
    "a purple triangle moving down over a light blue background with a small green circle at the top left",
)


def run(argv=None):
    args = finding_parser(__doc__, "docs/check_model.json").parse_args(argv)
    config = load_config(args.config_path, {"device": "cpu"})
    borders = {"agrees from r": AGREES, "wrong below r": OTHER_R, "wrong below own heads": OTHER_OWN}
    report = {"borders": borders, "published": of_published(), config.model: of_miniature(config)}
    save_finding(args, report)


def row(*comparisons: Comparison) -> dict[str, Any]:
    """Return the mean over videos of each number, ranges of those that decide, and how often each verdict."""
    each, verdicts = [one.numbers() for one in comparisons], [one.verdict for one in comparisons]
    found: dict[str, Any] = {"videos": len(each)}
    for what, name in (("r", "r of last-block curves, median"), ("own heads", "heads most like their own")):
        values = [float(one[name] or 0) for one in each]
        found[f"{what}: lowest, highest"] = [min(values), max(values)]
    found["verdicts"] = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    for name in each[0]:
        known = [value for one in each if (value := one[name]) is not None]
        found[name] = round(float(np.nanmean(known)), 3) if known else None
    return found


def of_published() -> dict[str, Any]:
    """Compare the two prompts, and one with its own heads or layers in another order."""
    found: dict[str, Any] = {}
    generator = np.random.default_rng(0)
    for length in (21, 72):
        paths = [published.FOLDER / f"self_forcing_dmd_{name}_{length}f.pt" for name in ("eagle", "castle")]
        eagle, castle = (open_profiles(load_cache(path)) for path in paths)
        sizes, A = eagle.block_sizes, matrices(eagle)
        frequencies = fitted_frequencies(eagle, length - sizes[-1])

        def beside(view, *ours: np.ndarray) -> dict[str, Any]:
            theirs = view.profiles(), view.frame_matrices(), sizes, frequencies  # noqa: B023
            return row(*(compare(one, *theirs) for one in ours))

        orders = [[generator.permutation(A.shape[1]) for _ in A] for _ in range(5)]
        permuted = [np.stack([layer[order] for layer, order in zip(A, one, strict=True)]) for one in orders]
        found[f"another prompt, {length} frames"] = beside(castle, A)
        found[f"heads of a layer permuted, {length} frames"] = beside(castle, *permuted)
        for axis, which in ((1, "heads"), (0, "layers")):
            shifted = np.roll(A, 1, axis)
            found[f"{which} shifted by one, {length} frames"] = beside(castle, shifted)
            found[f"{which} shifted by one, its own prompt, {length} frames"] = beside(eagle, shifted)
    return found


def of_miniature(config: RunConfig) -> dict[str, Any]:
    """Compare right, other and wrong videos of the miniature with its own, a row each."""
    loaded = load(config).prepare((), PROMPTS)
    sizes, last, right_model = loaded.model_config, config.block_sizes[-1], loaded.pipeline.model
    frequencies = temporal_frequencies(sizes.head_dim)
    frequencies = frequencies[2 * np.pi / frequencies <= config.num_frames - last]

    def logits(step: int = 0, model: Any = right_model, text_scale: int = 1, **settings: Any) -> np.ndarray:
        """Return mean logits [prompts, layers, H, F, F] of a pass, of a rollout of each prompt."""
        found = []
        for prompt in PROMPTS:
            own = replace(config, prompt=prompt, **settings)
            session = loaded.replaced(pipeline=pipeline_of(model, own), dtype=model.dtype)
            alone = Batch(session, [own])
            alone.text = alone.text.to(model.dtype) * text_scale
            found.append(frame_matrices(alone, step)[0][0])
        return np.stack(found)

    def model_of(config: RunConfig, dtype: torch.dtype = loaded.dtype) -> Any:
        return load_pipeline(config, sizes, dtype, loaded.device).model

    right = logits()

    def beside(ours: np.ndarray) -> dict[str, Any]:
        return row(*(compared(a, b) for a, b in zip(right, ours, strict=True)))

    def compared(own: np.ndarray, ours: np.ndarray) -> Comparison:
        return compare(ours, own[..., -last:, :].mean(-2), own, config.block_sizes, frequencies)

    random = model_of(config)
    for name, parameter in random.named_parameters():
        parameter.data = fill_(torch.empty_like(parameter), name)
    found = {
        "another prompt": row(*(compared(a, b) for a, b in permutations(right, 2))),
        "another seed": beside(logits(seed=config.seed + 1)),
        "the same in bfloat16": beside(logits(model=model_of(config, torch.bfloat16))),
        "base weights": beside(logits(model=model_of(replace(config, checkpoint_path=None)))),
        "random weights": beside(logits(model=random)),
        "no text": beside(logits(text_scale=0)),
        "blocks of 1": beside(logits(num_frame_per_block=1)),
        "blocks of 7": beside(logits(num_frame_per_block=7)),
        "timestep shift 8": beside(logits(timestep_shift=8.0)),
        "steps not warped": beside(logits(warp_denoising_step=False)),
        "pass 1": beside(logits(1)),
        "pass 3": beside(logits(config.num_passes - 2)),
        "clean pass": beside(logits(config.num_passes - 1)),
        "heads shifted by one": beside(np.roll(right, 1, 2)),
        "layers shifted by one": beside(np.roll(right, 1, 1)),
    }
    usual = rope.RotaryTable.freqs_cis

    def without(*axes: int) -> Any:
        """Return a patch after which RoPE turns nothing along these axes."""

        def turned(table: rope.RotaryTable, axis: int, at: Any) -> Tensor:
            return usual(table, axis, at) ** int(axis not in axes)

        return mock.patch.object(rope.RotaryTable, "freqs_cis", turned)

    def without_norm(self: QueryKeyNorm, x: Tensor, tables: Any = None, out: Tensor | None = None) -> Tensor:
        x = x.unflatten(-1, (self.num_heads, -1))
        x = x if tables is None else rope.rotate(x, *tables)
        return x if out is None else out.copy_(x)

    for name, wrong in {
        "no norm of queries and keys": mock.patch.object(QueryKeyNorm, "forward", without_norm),
        "RoPE off": without(0, 1, 2),
        "RoPE off in time": without(0),
        "RoPE of base 5,000": mock.patch.object(rope, "ROPE_THETA", 5e3),
        "RoPE of base 1,000,000": mock.patch.object(rope, "ROPE_THETA", 1e6),
    }.items():
        right_model.rotary._last.clear()
        with wrong:
            found[name] = beside(logits())
    return found


if __name__ == "__main__":
    main(run)

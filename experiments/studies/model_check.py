"""Tell whether a model is right by its attention, and calibrate that verdict on models with one thing wrong.

check() generates the videos of reference atlases and compares mean logits head by head. calibrate() writes
docs/check_model.json. Rows of the published data: eagle beside castle, and eagle beside its own heads and
layers in another order. Rows of the trained miniature: the same video in other arithmetic, other seeds and
prompts, random weights, and models with one thing wrong, beside the right one's own atlas.
"""

import argparse
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from experiments.analysis import published
from experiments.analysis.first_frame import context_cells, first_frame_effect, matrices, sign_rate
from experiments.analysis.panels import table
from experiments.analysis.rope_waves import (
    fit_waves,
    fitted_frequencies,
    last_block_context,
    temporal_frequencies,
)
from experiments.analysis.stats import mean_without_nan, pearson, rms_difference, spearman
from experiments.analysis.taxonomy import Thresholds, agreement, kinds
from experiments.caches import load_cache
from experiments.caches.files import RunError, save_report
from experiments.caches.view import open_profiles
from experiments.extraction import cache_builders
from experiments.extraction.provenance import choose_device, environment
from experiments.extraction.rollout import observed
from experiments.figures.heads import HeadPair, heads_by_agreement
from experiments.figures.style import save_svg
from experiments.session import load, load_pipeline, pipeline_of
from experiments.studies.batches import Batch, frame_matrices
from wan import keys as rope
from wan.config import CARDS, RunConfig
from wan.errors import ConfigError
from wan.model import QueryKeyNorm

# The log of the published run names an L40. It may have been made on another card.
TRIED = ("L40", "released", *(card for card in CARDS if card != "L40"))
PROMPTS = (  # of the calibration
    "a red circle moving right over a dark blue background",
    "a green square moving up and left and a red triangle moving up over a light green background",
    "a yellow circle moving left behind a white wall over a dark red background",
    "a purple triangle moving down over a light blue background with a small green circle at the top left",
)
# Borders, by docs/check_model.json: right models were seen above AGREES, other prompts between, wrong models
# below one of the others. r is the median over heads, own the share of heads most like themselves.
AGREES, OTHER_R, OTHER_OWN = 0.985, 0.80, 0.30
VERDICTS = ("agrees", "differs like another prompt", "wrong")
MEANING = {
    "agrees": "the heads attend as in the published runs",
    "differs like another prompt": "the heads are the published ones, of another noise or prompt",
    "wrong": "the heads are not those of the published model; docs/real_model.md says what to look at",
}


# --- Heads beside their published selves
class Comparison(NamedTuple):
    """How heads [layers, H] agree with their published selves."""

    r: np.ndarray  # of last-block curves over context frames
    is_best: np.ndarray  # bool: no other published head is more like this one
    of_heads: Mapping[str, float | None]  # further numbers over all heads; None where the data lack them

    def numbers(self) -> dict[str, float | None]:
        """Return what a table shows, each over all heads."""
        found = {
            "r of last-block curves, median": self.median_r,
            "r, 5 % of heads are below": float(np.nanpercentile(self.r, 5)),
            "heads most like their own": float(self.is_best.mean()),
            **self.of_heads,
        }
        return {name: value if value is None else round(value, 3) for name, value in found.items()}

    @property
    def median_r(self) -> float:
        """Median over heads of r."""
        return float(np.nanmedian(self.r))

    @property
    def verdict(self) -> str:
        """Return one of VERDICTS for one video."""
        if self.median_r >= AGREES:
            return VERDICTS[0]
        return VERDICTS[1 if self.median_r >= OTHER_R and self.is_best.mean() >= OTHER_OWN else 2]

    def worst(self, count: int) -> list[tuple[int, int]]:
        """Return the heads (layer, head) of lowest r, by index."""
        order = np.argsort(np.nan_to_num(self.r, nan=-2), axis=None, kind="stable")[:count]
        return [(int(i // self.r.shape[1]), int(i % self.r.shape[1])) for i in order]


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Return the worst verdict of several videos."""
    return max((one.verdict for one in comparisons), key=VERDICTS.index)


def compare(
    ours: np.ndarray,
    curves: np.ndarray,
    matrix: np.ndarray | None,
    block_sizes: Sequence[int],
    frequencies: np.ndarray,
) -> Comparison:
    """Compare our matrices with published curves and, where there is one, the published matrix."""
    cells = context_cells(block_sizes)
    # [layers, H, F]: the mean over the last block's queries
    last = np.asarray(ours, np.float64)[..., -block_sizes[-1] :, :].mean(-2)
    (mine, distances), (theirs, _) = (last_block_context(one, block_sizes) for one in (last, curves))
    # Amplitudes of the waves that RoPE makes, [layers, H, bands].
    a, b = (fit_waves(np.nan_to_num(one), distances, frequencies).amplitude for one in (mine, theirs))
    rho = [spearman(a[..., band].ravel(), b[..., band].ravel()) for band in range(a.shape[-1])]
    matrix_r, of_s, rates = None, None, [sign_rate(mine), sign_rate(theirs)]
    if matrix is not None:
        both = [np.where(cells, np.asarray(one, np.float64), np.nan) for one in (ours, matrix)]
        # Softmax ignores a constant of a query: rows are compared without their mean.
        within = [(one - mean_without_nan(one)[..., None])[..., cells] for one in both]  # of each query
        matrix_r = float(np.nanmedian(pearson(*within)))
        s = np.stack([first_frame_effect(one, block_sizes).effect.ravel() for one in (ours, matrix)])
        s = s[:, np.isfinite(s).all(0)]
        of_s = float(pearson(*s)) if s.shape[1] > 2 else None
        rates = [sign_rate(one[..., cells]) for one in (ours, matrix)]
    r = pearson(mine, theirs)
    flat = [one.reshape(-1, one.shape[-1]) for one in (mine, theirs)]
    # Shifted or permuted heads agree well with another head, not with their own.
    others = pearson(flat[0][:, None], flat[1][None])  # [heads, published heads]
    is_best = np.isfinite(r) & ((others > r.reshape(-1, 1)).sum(1).reshape(r.shape) == 0)
    # None where the published data lack the matrix.
    of_heads = {
        "RMS, median (logits)": float(np.nanmedian(rms_difference(mine, theirs))),
        "r of whole matrices, median": matrix_r,
        "r of s over heads": of_s,
        "heads of the same kind": agreement(*(kinds(rate, Thresholds()) for rate in rates)),
        "ρ of wave amplitudes": float(np.mean(rho)) if rho else None,
    }
    return Comparison(r, is_best, of_heads)


# --- The check
def check(args: argparse.Namespace, config: RunConfig) -> None:
    """Print how the heads agree with the references, draw it, and say the verdict. RunError for wrong."""
    # 1. Read the references, and make each one's run from this config.
    config = replace(config, num_frames=args.frames)
    names = [f"self_forcing_dmd_{name}_{args.frames}f.pt" for name in ("eagle", "castle")]
    paths = [Path(path) for path in args.reference or [published.FOLDER / name for name in names]]
    caches = [load_cache(path, expect=("atlas",)) for path in paths]
    views = [open_profiles(cache) for cache in caches]
    for path, view in zip(paths, views, strict=True):
        if view.model != config.model or view.quantity != "mean_logit":
            raise ConfigError(
                f"{path} holds {view.quantity} of {view.model}, not mean logits of {config.model}; "
                "name an atlas of this model by --reference"
            )

    # Noise on a GPU depends on the card. The published log does not say for sure which one it was.
    given = [cache.get("config", {}).get("noise", "seeded") for cache in caches]
    noises = TRIED if all(cache["weights"] == "published" for cache in caches) else given[:1]
    if config.noise != "seeded":
        noises = (config.noise,)
    configs = [
        replace(config, prompt=cache["prompt"], seed=cache["seed"], num_frames=cache["num_frames"])
        for cache in caches
    ]
    largest = max(configs, key=lambda one: one.num_frames)
    requests = cache_builders.atlas_requests(largest, mass=False, key_curve=False, cross=False)

    # 2. Generate the same videos, under one noise after another until the heads agree.
    def closest(found: list[Comparison]) -> float:
        """Return how near the farther video is."""
        return min(one.median_r for one in found)

    best: list[Comparison] = []
    best_logits, best_noise = [], ""
    with observed(args) as watch:
        session = load(largest).prepare(requests, [one.prompt for one in configs], watch)
        for noise in noises:
            found, logits = [], []
            for one, view in zip(configs, views, strict=True):
                own = replace(one, noise=noise)
                made = session.generate(config=own, requests=requests, observer=watch)
                if made.stopped:
                    raise RunError(f"stopped after {made.stopped}: nothing was compared")
                ours = matrices(open_profiles(cache_builders.atlas_cache(made)))
                logits.append(ours)
                waves = fitted_frequencies(view, view.num_frames - view.block_sizes[-1])
                theirs = view.profiles(), view.frame_matrices()
                found.append(compare(ours, *theirs, view.block_sizes, waves))
            if not best or closest(found) > closest(best):
                best, best_logits, best_noise = found, logits, noise
            watch.print(f"noise {noise}: median r {closest(found):.3f}")
            # The right noise is found: no other one is tried.
            if verdict(best) == VERDICTS[0]:
                break

    # 3. Print the table, draw r of all heads beside the curves of the worst, and say the verdict.
    titles = [path.stem.removeprefix("self_forcing_dmd_") for path in paths]
    compared = dict(zip(titles, best, strict=True))
    columns = {name: one.numbers() for name, one in compared.items()}
    shown = [{"": row} | {name: of[row] for name, of in columns.items()} for row in best[0].numbers()]
    for layer, head, label in published.FIGURE4_HEADS:  # a model of fewer heads lacks them
        if all(layer < one.r.shape[0] and head < one.r.shape[1] for one in best):
            shown.append({"": f"{label}: r"} | {name: one.r[layer, head] for name, one in compared.items()})
    print(table(shown))
    worst = []
    for name, comparison, ours, view in zip(titles, best, best_logits, views, strict=True):
        context, _ = last_block_context(view.profiles(), view.block_sizes)
        mine = ours[..., -view.block_sizes[-1] :, : context.shape[-1]].mean(-2)
        for layer, head in comparison.worst(4):
            pair = (mine[layer, head], context[layer, head], comparison.r[layer, head])
            worst.append(HeadPair(f"{name}, L{view.layers[layer]}H{head}", *pair))
    curves = {name: one.r.ravel() for name, one in compared.items()}
    says = verdict(best)
    figure = heads_by_agreement(curves, worst, f"{config.model}, noise {best_noise}: {says}")
    print(save_svg(figure, args.output_path))
    if says == VERDICTS[2]:
        raise RunError(f"{config.model} is wrong: {MEANING[says]}")
    print(f"{config.model} {says}: {MEANING[says]}")


# --- Calibration
def calibrate(config: RunConfig, path: str) -> None:
    """Write how the verdict falls for right, other and wrong videos of known models."""
    borders = {"agrees from r": AGREES, "wrong below r": OTHER_R, "wrong below own heads": OTHER_OWN}
    report = {"environment": environment(choose_device(config.device)), "borders": borders}
    report |= {"published": of_published(), config.model: of_miniature(config)}
    save_report(report, path)
    print(path)


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

        # Five draws of a random order of heads within each layer.
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
    # Waves slower than the video are lines.
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
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data = parameter.normal_(0, 0.02, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1
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

    def backwards(table: rope.RotaryTable, axis: int, at: Any) -> Tensor:
        return usual(table, axis, at if axis else -at)

    time_reversed = mock.patch.object(rope.RotaryTable, "freqs_cis", backwards)

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
        "RoPE's time reversed": time_reversed,  # after the borders were chosen, as UNSEEN_FAULTS
    }.items():
        right_model.rotary._last.clear()
        with wrong:
            found[name] = beside(logits())
    right_model.rotary._last.clear()
    for name, spoil in UNSEEN_FAULTS.items():
        spoiled = model_of(config)
        with torch.no_grad():
            spoil(spoiled)
        found[name] = beside(logits(model=spoiled))
    return found


# --- Faults on which no border was chosen
def exchange_queries_and_keys(model: Any) -> None:
    for block in model.blocks:
        attention = block.self_attn
        attention.q, attention.k = attention.k, attention.q
        attention.norm_q, attention.norm_k = attention.norm_k, attention.norm_q


def exchange_two_layers(model: Any) -> None:
    one, other = (model.blocks[layer].state_dict() for layer in (3, 4))
    kept = {name: value.clone() for name, value in one.items()}
    model.blocks[3].load_state_dict(other)
    model.blocks[4].load_state_dict(kept)


def randomise(model: Any, layers: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in (parameter for layer in layers for parameter in model.blocks[layer].parameters()):
        if parameter.ndim > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.std())


def add_noise(model: Any, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in (parameter for parameter in model.parameters() if parameter.ndim > 1):
        parameter.add_(share * parameter.std() * torch.randn(parameter.shape, generator=generator))


def silence_a_layer(model: Any) -> None:
    model.blocks[2].self_attn.o.weight.zero_()


UNSEEN_FAULTS: dict[str, Callable[[Any], None]] = {
    "queries and keys exchanged": exchange_queries_and_keys,
    "layers 3 and 4 exchanged": exchange_two_layers,
    "layer 4 random": partial(randomise, layers=[4]),
    "layers 4 to 7 random": partial(randomise, layers=[4, 5, 6, 7]),
    "noise of 20 % in every weight": partial(add_noise, share=0.2),
    "layer 2 adds no attention": silence_a_layer,
}

"""Classes of heads by the rules of head-wise cache policies, and the mean queries that TriAttention needs."""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.analysis import taxonomy
from experiments.caches import files, load_cache, outputs
from experiments.caches.view import open_profiles
from experiments.session import load
from wan.blocks import block_frames
from wan.config import RunConfig

SINK, NEIGHBOUR, DUMMY = range(3)  # as in wan/headwise.py
CLASS_NAMES = {  # rule -> class -> its name
    "forcing_kv": taxonomy.LOCALITY,
    "dummy": {SINK: "sink", NEIGHBOUR: "neighbour", DUMMY: "dummy"},
    "pyramid": taxonomy.KINDS,
    "mass": {1: "most mass on older frames", 0: "other"},
    "effect": {1: "largest effect", 0: "other"},
}


def classes_of(
    rule: str, atlas: Any, step: int | None = None, num: int | None = None, block: int = 1
) -> np.ndarray:
    """Return the class of every head, int [layers, heads], by a rule of make_head_classes.py.

    atlas: an attention atlas, or for rule effect a causal one. num heads are dummy, have the most mass on
    older frames, or the largest effect; half of all where not given. Raises CacheError for an atlas that does
    not hold what the rule needs.
    """
    if rule == "effect":
        # [R, layers, heads, F] -> [layers, heads]; NaN where a block had nothing to edit
        effects = np.nanmean(atlas["effects"].numpy(), (0, -1))
        if atlas["each"] != "head" or effects.shape[1] != atlas["num_heads"]:
            raise files.CacheError("rule effect needs a causal atlas of every head: make it by --each head")
        return most(effects, count_of(num, effects.size))
    # Pyramid counts signs of logits; the others read what softmax leaves.
    view = open_profiles(atlas, step, quantity="mean_logit" if rule == "pyramid" else "mass")
    num = count_of(num, len(view.layers) * view.num_heads)
    labels = None
    if rule == "pyramid":
        labels = taxonomy.head_kinds(view, taxonomy.Thresholds())
    elif rule == "forcing_kv":
        labels = taxonomy.locality(
            taxonomy.local_mass_share(view.profiles(), taxonomy.Thresholds()), taxonomy.Thresholds()
        )
    else:
        if rule == "dummy":
            files.require_held("--block", block, range(1, len(view.block_sizes)), "the blocks with a past")
        block_of_queries = block_frames(atlas["block_sizes"], block if rule == "dummy" else -1)
        mass = view.frame_matrices()  # [layers, H, F, F]
        if mass is not None and block_of_queries[0]:
            rows = mass[:, :, block_of_queries].mean(2)  # [layers, H, F]
            if rule == "dummy":
                labels = dummy(rows, block_of_queries, num)
            else:  # frames before the last three of the past
                labels = most(np.nansum(rows[:, :, : block_of_queries[0] - 3], -1), num)
    if labels is None or (labels == taxonomy.ABSENT).any():
        raise files.CacheError(f"rule {rule} needs an atlas with more: masses of all frames, or all passes")
    return labels


def count_of(num: int | None, heads: int) -> int:
    """Return how many heads are chosen, half of all where no number is given."""
    if num is None:
        return heads // 2
    if num > heads:
        raise files.CacheError(f"--num {num} heads were asked for, and this atlas has {heads}")
    return num


def most(values: np.ndarray, num: int) -> np.ndarray:
    """Return 1 for the num heads of the largest values, 0 for the others."""
    chosen = np.zeros(values.size, int)
    chosen[np.argsort(-values, axis=None, kind="stable")[:num]] = 1
    return chosen.reshape(values.shape)


def dummy(mass: np.ndarray, newest: list[int], num: int) -> np.ndarray:
    """Return SINK, NEIGHBOUR or DUMMY by masses [layers, H, F] of a block: Dummy Forcing's rule, all rows."""
    # Shares of what all heads read, so that sinks and neighbours compete on one scale.
    first, middle = mass[:, :, 0], mass[:, :, 1 : newest[0]].sum(-1)
    first, middle = first / first.sum(), middle / middle.sum()
    classes = np.where(first < middle, NEIGHBOUR, SINK)
    return np.where(most(-np.maximum(first, middle), num) == 1, DUMMY, classes)


@dataclass(frozen=True)
class QuerySums:
    """Sums over tokens of a layer's queries, float64."""

    pairs: Tensor  # [H, D / 2, 2]
    moduli: Tensor  # [H, D / 2]
    tokens: int

    def plus(self, other: "QuerySums") -> "QuerySums":
        return QuerySums(self.pairs + other.pairs, self.moduli + other.moduli, self.tokens + other.tokens)


def query_means(config: RunConfig) -> dict[str, np.ndarray]:
    """Roll a model out with its whole past; return q_mean_real, q_mean_imag, q_abs_mean [layers, H, D / 2].

    Means over tokens of all passes of queries before RoPE, as complex pairs of dims, and of their moduli.
    """
    # The statistics are of a rollout with the whole past.
    config = replace(config, cache_policy=None, local_attn_size=-1, sink_size=0)
    session = load(config).prepare()
    sums: dict[int, QuerySums] = {}

    def add(layer: int, norm: nn.Module, module: nn.Module, inputs: object, projected: Tensor) -> None:
        # The hook sees projections before the norm and RoPE.
        q = norm(projected).double().unflatten(-1, (-1, 2))  # [B, L, H, D / 2, 2]
        of_pass = QuerySums(q.sum((0, 1)), q.norm(dim=-1).sum((0, 1)), projected[..., 0].numel())
        sums[layer] = sums[layer].plus(of_pass) if layer in sums else of_pass

    for layer, block in enumerate(session.pipeline.model.blocks):
        block.self_attn.q.register_forward_hook(partial(add, layer, block.self_attn.norm_q))
    session.rollout(config)
    by_layer = [sums[layer] for layer in sorted(sums)]
    pairs = torch.stack([total.pairs / total.tokens for total in by_layer]).float().cpu()
    sizes = torch.stack([total.moduli / total.tokens for total in by_layer]).float().cpu()
    means = {"q_mean_real": pairs[..., 0], "q_mean_imag": pairs[..., 1], "q_abs_mean": sizes}
    return {name: values.numpy() for name, values in means.items()}


def write_classes(args: argparse.Namespace, config: RunConfig | None) -> None:
    """Write the classes of an atlas as a CSV, or the mean queries of a config's rollout as an .npz."""
    if config is not None:
        output = Path(args.output_path or f"outputs/head_classes/{args.rule}.npz")
        outputs.require_replaceable(output, outputs.Contents("table"), overwrite=args.overwrite)
        means = query_means(config)
        with files.replacing(output) as file:
            np.savez_compressed(file, allow_pickle=False, **means)
        print(output)
        return
    output = Path(args.output_path or f"outputs/head_classes/{args.rule}.csv")
    outputs.require_replaceable(output, outputs.Contents("table"), overwrite=args.overwrite)
    atlas = load_cache(args.atlas, expect=("causal_atlas" if args.rule == "effect" else "atlas",))
    classes = classes_of(args.rule, atlas, args.step, args.num, args.block)
    with files.replacing(output) as file:
        np.savetxt(file, classes, "%d", ",")
    counts = zip(*np.unique(classes, return_counts=True), strict=True)
    names = CLASS_NAMES[args.rule]
    print(f"{output}: {', '.join(f'{n} of class {label} ({names[label]})' for label, n in counts)}")

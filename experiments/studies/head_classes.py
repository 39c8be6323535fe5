"""Classes of heads by the rules of head-wise cache policies, and the mean queries that TriAttention needs."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.analysis.taxonomy import ABSENT, Thresholds, head_kinds, local_mass_share, locality
from experiments.caches import load_cache
from experiments.caches.files import CacheError, replacing, require_held, save_report
from experiments.caches.view import open_profiles
from experiments.session import load
from wan.blocks import block_frames
from wan.config import RunConfig

SINK, NEIGHBOUR, DUMMY = range(3)  # as in wan/headwise.py


def classes_of(
    rule: str, atlas: Any, step: int | None = None, num: int | None = None, block: int = 1
) -> np.ndarray:
    """Return the class of every head, int [layers, heads], by a rule of make_head_classes.py.

    num heads are dummy, or have the most mass on older frames; half of all where not given. Raises CacheError
    for an atlas that does not hold what the rule needs.
    """
    # pyramid counts signs of logits; the others read what softmax leaves.
    view = open_profiles(atlas, step, quantity="mean_logit" if rule == "pyramid" else "mass")
    heads, blocks = len(view.layers) * view.num_heads, len(view.block_sizes)
    if num is not None and num > heads:
        raise CacheError(f"--num {num} heads were asked for, and this atlas has {heads}")
    if rule == "dummy":
        require_held("--block", block, range(1, blocks), "the blocks with a past")
    own, mass = block_frames(atlas["block_sizes"], block if rule == "dummy" else -1), view.frame_matrices()
    if rule == "pyramid":
        labels = head_kinds(view, Thresholds())
    elif rule == "forcing_kv":
        labels = locality(local_mass_share(view.profiles(), Thresholds()), Thresholds())
    elif mass is None or not own[0]:
        labels = None
    else:
        # Rule mass counts frames before the last three of the past.
        rows = mass[:, :, own].mean(2)  # [layers, H, F]
        num = rows[..., 0].size // 2 if num is None else num
        older = np.nansum(rows[:, :, : own[0] - 3], -1)
        labels = dummy(rows, own, num) if rule == "dummy" else most(older, num)
    if labels is None or (labels == ABSENT).any():
        raise CacheError(f"rule {rule} needs an atlas with more: masses of all frames, or all passes")
    return labels


def most(values: np.ndarray, num: int) -> np.ndarray:
    """Return 1 for the num heads of the largest values, 0 for the others."""
    found = np.zeros(values.size, int)
    found[np.argsort(-values, axis=None, kind="stable")[:num]] = 1
    return found.reshape(values.shape)


def dummy(mass: np.ndarray, own: list[int], num: int) -> np.ndarray:
    """Return SINK, NEIGHBOUR or DUMMY by masses [layers, H, F] of a block: Dummy Forcing's rule, all rows."""
    # Shares of what all heads read, so that sinks and neighbours compete on one scale.
    first, middle = mass[:, :, 0], mass[:, :, 1 : own[0]].sum(-1)
    first, middle = first / first.sum(), middle / middle.sum()
    found = np.where(first < middle, NEIGHBOUR, SINK)
    return np.where(most(-np.maximum(first, middle), num) == 1, DUMMY, found)


def stability(
    rule: str, atlases: Mapping[str, Any], num: int | None = None, block: int = 1
) -> list[dict[str, Any]]:
    """Compare the classes of one model's heads between its atlases by name, and between their passes.

    A row per kind of pair: how many there are, the share of heads with the same class in both (mean and
    lowest), what labels drawn with the same counts would share, and the heads of one class throughout.
    """
    # 1. The classes of every pass of every atlas
    labels = {
        (name, step): classes_of(rule, atlas, step, num, block)
        for name, atlas in atlases.items()
        for step in atlas.get("pass_steps") or range(len(atlas["pass_timesteps"]))
    }
    # 2. Pairs that differ in one thing
    rows = []
    for what, differs in (("passes", 1), ("atlases", 0)):
        pairs = [
            (labels[a], labels[b]) for a, b in combinations(labels, 2) if a[1 - differs] == b[1 - differs]
        ]
        pairs = [(a, b) for a, b in pairs if a.shape == b.shape]
        if not pairs:
            continue
        shares = [float((a == b).mean()) for a, b in pairs]
        chance = [sum((a == k).mean() * (b == k).mean() for k in np.unique(a)) for a, b in pairs]
        row: dict[str, Any] = {"between": what, "pairs": len(pairs), "same": float(np.mean(shares))}
        rows.append(row | {"lowest": min(shares), "chance": float(np.mean(chance))})
    whole = np.stack([*labels.values()])
    return [row | {"one_class_throughout": float((whole == whole[0]).all(0).mean())} for row in rows]


def query_means(config: RunConfig) -> dict[str, np.ndarray]:
    """Roll a model out with its whole past; return q_mean_real, q_mean_imag, q_abs_mean [layers, H, D / 2].

    Means over tokens of all passes of queries before RoPE, as complex pairs of dims, and of their moduli.
    """
    # The statistics are of a rollout with the whole past.
    config = replace(config, cache_policy=None, local_attn_size=-1, sink_size=0)
    session = load(config).prepare()
    sums: dict[int, Any] = {}

    def add(layer: int, norm: Any, module: Any, given: Any, projected: torch.Tensor) -> None:
        # The hook sees projections before the norm and RoPE.
        q = norm(projected).double().unflatten(-1, (-1, 2))  # [B, L, H, D / 2, 2]
        new = q.sum((0, 1)), q.norm(dim=-1).sum((0, 1)), projected[..., 0].numel()
        sums[layer] = [a + b for a, b in zip(sums.get(layer, (0, 0, 0)), new, strict=True)]

    for layer, block in enumerate(session.pipeline.model.blocks):
        block.self_attn.q.register_forward_hook(partial(add, layer, block.self_attn.norm_q))
    session.rollout(config)
    of_layers = [sums[layer] for layer in sorted(sums)]
    pairs, sizes = (torch.stack([one[i] / one[2] for one in of_layers]).float().cpu() for i in (0, 1))
    found = {"q_mean_real": pairs[..., 0], "q_mean_imag": pairs[..., 1], "q_abs_mean": sizes}
    return {name: values.numpy() for name, values in found.items()}


def write_classes(args: argparse.Namespace, config: RunConfig | None) -> None:
    """Write the classes of an atlas as a CSV, or the mean queries of a config's rollout as an .npz."""
    output = Path(args.output_path or f"outputs/head_classes/{args.rule}.{'npz' if config else 'csv'}")
    if config is not None:
        with replacing(output) as file:
            means: dict[str, Any] = query_means(config)
            np.savez_compressed(file, **means)
        print(output)
        return
    atlases = {path: load_cache(path) for path in args.atlas}
    if len(atlases) > 1:
        rows = stability(args.rule, atlases, args.num, args.block)
        for row in rows:
            print(
                "  ".join(f"{name} {round(x, 3) if isinstance(x, float) else x}" for name, x in row.items())
            )
        if args.output_path:
            save_report({"rule": args.rule, "atlases": [*atlases], "rows": rows}, output)
        return
    (atlas,) = atlases.values()
    classes = classes_of(args.rule, atlas, args.step, args.num, args.block)
    with replacing(output) as file:
        np.savetxt(file, classes, "%d", ",")
    counts = zip(*np.unique(classes, return_counts=True), strict=True)
    print(f"{output}: {', '.join(f'{n} of class {label}' for label, n in counts)}")

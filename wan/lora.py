"""LoRA (arXiv 2106.09685) merged into weights on loading: W + alpha / rank · B A, in float32.

Files are those that PEFT writes (lora_A, lora_B), with or without base_model.model., or with lora_down and
lora_up. PEFT stores no alpha beside its weights: a config gives it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan.checkpoint import CheckpointError
from wan.checkpoint_layouts import SHOWN, WRAPPERS, lead_of, prefixes_of, read_weights_file
from wan.errors import named
from wan.weight_names import StateDict, to_native_names

CONTAINERS = ("generator_lora", "lora")
PEFT = "base_model.model."
KEY = re.compile(r"(.+)\.(lora_A|lora_B|lora_down|lora_up)(?:\.default)?\.weight")
HALVES = {"lora_A": "A", "lora_down": "A", "lora_B": "B", "lora_up": "B"}
MERGED, SURE = 0.5, 0.1  # of already_merged: at least so much of the LoRA, known to within so much


@dataclass(frozen=True)
class LoRA:
    """Low-rank changes of some linear layers: layer -> A [rank, in], B [out, rank]."""

    file: str
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    alpha: float

    def __str__(self) -> str:
        return f"{self.file} merged into {len(self.pairs)} layers (rank {self.rank}, alpha {self.alpha:g})"

    def changes(self) -> Iterator[tuple[str, Tensor]]:
        """What is added to the weight of every layer, float32 [out, in]."""
        for layer, (down, up) in self.pairs.items():
            yield layer, self.alpha / self.rank * (up.float() @ down.float())


def read_lora(path: str | Path, rank: int | None = None, alpha: float | None = None) -> LoRA:
    """A LoRA from its file. rank, where given, must be the file's; alpha too, where the file has one.

    Raises CheckpointError for a half without the other, ranks that differ, values that are not finite, and
    an alpha that nobody gives.
    """
    content = read_weights_file(path)
    inner = next((content[name] for name in CONTAINERS if isinstance(content.get(name), dict)), content)
    return lora_of(path, {str(name): value for name, value in inner.items()}, rank, alpha)


def lora_of(path: str | Path, state: Mapping[str, Any], rank: int | None, alpha: float | None) -> LoRA:
    """read_lora() for keys that are read already."""
    halves: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    alphas: dict[str, float] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {named(name)} is no tensor; not a LoRA")
        bare = _bare(name)
        if match := KEY.fullmatch(bare):
            half, layer = halves[HALVES[match[2]]], _native(match[1])
            if layer in half:
                raise CheckpointError(f"{path} has two keys for one half of {named(layer)}: {named(name)}")
            half[layer] = value
        elif bare.endswith(".alpha") and value.numel() == 1:
            alphas[_native(bare.removesuffix(".alpha"))] = float(value)
        else:
            raise CheckpointError(
                f"{path}: {named(name)} is not of a LoRA's names; its keys begin with {prefixes_of(state)}"
            )
    pairs = _paired(path, halves)
    found = _rank(path, pairs, rank)
    return LoRA(Path(path).name, pairs, found, _alpha(path, alphas, alpha))


def _bare(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    while (short := name.removeprefix(PEFT)) != name or lead_of(name):
        name = short[len(lead_of(short)) :]
    return name


def _native(layer: str) -> str:
    return next(iter(to_native_names({f"{layer}.": torch.empty(0)}))).removesuffix(".")


def _paired(path: str | Path, halves: dict[str, dict[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Both halves of every layer, of shapes that go together."""
    A, B = halves["A"], halves["B"]
    if not A and not B:
        raise CheckpointError(f"{path} holds no LoRA: neither lora_A nor lora_B")
    if half := sorted(A.keys() ^ B.keys()):
        missing = "lora_B" if half[0] in A else "lora_A"
        raise CheckpointError(
            f"{path} holds half a LoRA: {len(half)} of {len(A.keys() | B.keys())} layers have one half, "
            f"such as {named(half[0])} without {missing}; get the file again"
        )
    for layer, down in A.items():
        up = B[layer]
        shapes = f"lora_A {list(down.shape)} and lora_B {list(up.shape)}"
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
            raise CheckpointError(f"{path}: {named(layer)} has {shapes}, which do not multiply")
        if not (down.is_floating_point() and up.is_floating_point()):
            raise CheckpointError(f"{path}: {named(layer)} is not of floating point, but {down.dtype}")
        if not (down.float().isfinite().all() and up.float().isfinite().all()):
            raise CheckpointError(f"{path}: {named(layer)} has values that are not finite; get it again")
    return {layer: (A[layer], B[layer]) for layer in A}


def _rank(path: str | Path, pairs: Mapping[str, tuple[Tensor, Tensor]], wanted: int | None) -> int:
    ranks = {down.shape[0]: layer for layer, (down, _) in pairs.items()}
    if len(ranks) > 1:
        parts = ", ".join(f"{rank} of {named(layer)}" for rank, layer in list(ranks.items())[:SHOWN])
        raise CheckpointError(f"{path} has layers of different ranks: {parts}")
    rank = next(iter(ranks))
    if wanted is not None and rank != wanted:
        raise CheckpointError(f"{path} has rank {rank}, not {wanted} as lora_rank says; name the right file")
    return rank


def _alpha(path: str | Path, found: Mapping[str, float], given: float | None) -> float:
    alphas = set(found.values()) | (set() if given is None else {float(given)})
    if not alphas:
        raise CheckpointError(f"{path} does not say its alpha; give lora_alpha in the config")
    if len(alphas) > 1:
        said = "lora_alpha and the file say" if given is not None else "its layers say"
        raise CheckpointError(
            f"{path}: {said} different alphas: {', '.join(f'{a:g}' for a in sorted(alphas))}"
        )
    alpha = alphas.pop()
    if not 0 < alpha < float("inf"):
        raise CheckpointError(f"{path} has alpha {alpha:g}, not a number above 0")
    return alpha


def merge_lora(state: StateDict, lora: LoRA, source: str | Path) -> StateDict:
    """The state dict with a LoRA merged into its weights, float32 where they are changed.

    Raises CheckpointError for a layer that the state dict does not have, or of another shape, and where it
    holds the LoRA already.
    """
    merged, along, size, noise = dict(state), 0.0, 0.0, 0.0
    for layer, change in lora.changes():
        name = f"{layer}.weight"
        if name not in state:
            raise CheckpointError(f"{lora.file} changes {named(layer)}, which {source} does not have")
        weight = state[name].float()
        if weight.shape != change.shape:
            raise CheckpointError(
                f"{lora.file} changes {named(layer)} {list(weight.shape)} by {list(change.shape)}: "
                "it is of another model"
            )
        merged[name] = weight + change
        square = float(change.square().sum())
        along, size = along + float((weight * change).sum()), size + square
        noise += float(weight.square().mean()) * square
    if already_merged(along, size, noise):
        raise CheckpointError(
            f"{source} holds {lora.file} already: {along / size:.2f} times its changes lie in its weights; "
            "leave lora_path out"
        )
    return merged


def already_merged(along: float, size: float, noise: float) -> bool:
    """Whether weights W hold changes D: along = Σ W·D and size = Σ D·D over all layers.

    along / size estimates how many times D is in W: about 1 if it was merged, 0 if not. Its standard error
    for a W that has nothing to do with D is √noise / size, noise = Σ mean(W²) D·D. Where the changes are so
    small that this is large, nothing can be said.
    """
    return size > 0 and along / size > MERGED and noise**0.5 / size < SURE

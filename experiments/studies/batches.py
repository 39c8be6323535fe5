"""Batches of rollouts, with their unedited latents; heads that lose their past.

Differences are root mean squares of x0 per latent frame, in units of the distance between two seeds: a
rollout feeds on itself, so that any edit ends as far away as another seed would.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.extraction.provenance import threads_for
from wan.blocks import block_ranges
from wan.config import RunConfig
from wan.interventions import HeadOutputs, Knockout, record_head_outputs
from wan.noise import draw_noise

if TYPE_CHECKING:
    from experiments.session import Session

ANOTHER_SEED = 1_000_003  # added to a seed: the distance between two seeds is the unit of effects
FLOOR_NOISE = 1e-6  # added to the noise, in float32
FLOOR_BIAS = 1e-6  # in other dtypes: too small for a logit, but attention then runs by groups

Head = tuple[int, int]  # layer, head
Dropped = Callable[[range], Iterable[int]]  # the frames of a block -> frames of its past that are left out


@dataclass
class Batch:
    """Rollouts of one model that differ in prompt and seed, made together."""

    session: "Session"
    configs: Sequence[RunConfig]

    def __post_init__(self) -> None:
        s = self.session
        drawn = [draw_noise(config, s.model_config, s.dtype, s.device) for config in self.configs]
        noise, renoise = zip(*drawn, strict=True)
        self.noise = torch.cat(noise)  # [B, F, C, h, w]
        self.renoise = torch.cat(renoise, 1)  # [steps - 1, B, F, C, h, w]
        self.text = self.encoded([config.prompt for config in self.configs])
        self.ranges = block_ranges(self.configs[0].block_sizes)

    def encoded(self, prompts: Sequence[str]) -> Tensor:
        """Return the states of prompts [B, text_len, text_dim]."""
        return torch.cat([self.session.texts[prompt][0] for prompt in prompts])

    def rollout(self, text: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return latents [B, F, C, h, w], of the configs' prompts where no other states are given."""
        text = self.text if text is None else text
        with threads_for(self.noise[:1], self.session.model_config):
            inputs = {"prompt_embeds": text, "renoise": self.renoise, **kwargs}
            return self.session.pipeline.inference(self.noise, **inputs)[1]


@dataclass
class Runs(Batch):
    """A batch with its unedited latents, the outputs of heads, and the distance to another seed [B, F]."""

    sites: Sequence[str] = ()  # whose outputs are recorded, beside those of heads

    def __post_init__(self) -> None:
        super().__post_init__()
        with record_head_outputs(*dict.fromkeys((*HeadOutputs.sites, *self.sites))) as self.outputs:
            self.latents = self.rollout()
        # The unit of effects: the same prompts from other noise.
        others = [replace(config, seed=config.seed + ANOTHER_SEED) for config in self.configs]
        self.between_seeds = distance(self.latents, Batch(self.session, others).rollout())
        self.means: dict[object, object] = {}  # of reference sets, read once


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the root mean square difference per frame, float64 [B, F] of [B, F, C, h, w], on the CPU."""
    return (one.double() - other.double()).square().mean((2, 3, 4)).sqrt().cpu()


# --- Heads that lose a part of their past: a window is made by knockouts of what it would drop
def outside(window: int, sink: int = 0) -> Dropped:
    """Return the frames that a window, of which the first `sink` frames are a sink, does not hold."""
    return lambda own: range(sink, max(sink, own.stop - (window - sink)))


def by_layer(heads: Iterable[Head]) -> dict[int, tuple[int, ...]]:
    """Return the heads of each layer."""
    found: dict[int, tuple[int, ...]] = {}
    for layer, head in sorted(heads):
        found[layer] = (*found.get(layer, ()), head)
    return found


def matched(everyone: Sequence[Head], heads: Sequence[Head], draw: int) -> list[Head]:
    """Return random other heads, as many in each layer as there are among these, where it has as many."""
    chosen, layers = random.Random(draw), [layer for layer, _ in heads]
    found: list[Head] = []
    for layer in sorted(set(layers)):
        whole = [head for head in everyone if head[0] == layer]
        others = [head for head in whole if head not in heads]
        count = layers.count(layer)
        found += chosen.sample(others if len(others) >= count else whole, count)
    return found


def knockouts(
    heads: Iterable[Head],
    dropped: Dropped,
    block_sizes: Sequence[int],
    passes: str = "all",
    blocks: Iterable[int] | None = None,
) -> tuple[Knockout, ...]:
    """Leave frames of their past out of the view of heads, in some passes and blocks."""
    # A Knockout names whole heads of one layer, and what a block loses depends on the block.
    ranges, layers = block_ranges(list(block_sizes)), by_layer(heads)
    return tuple(
        Knockout(frames=tuple(frames), layers=(layer,), heads=some, blocks=(block,), passes=passes)
        for block in (range(len(ranges)) if blocks is None else blocks)
        if (frames := [*dropped(ranges[block])])
        for layer, some in layers.items()
    )

"""Direct effects: how far an edit moves x0 of each block, denoised again over the unedited past.

All runs of a batch share a base rollout, a rollout of another seed (the unit of distance) and a floor.
"""

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from experiments.extraction.causal import LoadedModel, draw_noise, reference_means
from experiments.extraction.devices import threads_for
from wan.blocks import block_ranges
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Ablate, Bias, Edit, KeySelection, Move, Patch, intervene
from wan.recorders import HeadOutputs, record_head_outputs

ANOTHER_SEED = 1_000_003  # added to a seed: the distance between two seeds is the unit of effects
FLOOR_NOISE = 1e-6  # added to the noise, in float32
FLOOR_BIAS = 1e-6  # in other dtypes: too small for a logit, but attention then runs by groups

EditOfBlock = Callable[[int], Edit | None]  # block -> its edit, or None


@dataclass(frozen=True)
class Runs:
    """A batch of rollouts that differ in prompt and seed: noise, text, and the unedited rollout."""

    session: LoadedModel
    configs: Sequence[RunConfig]
    noise: Tensor  # [B, F, C, h, w]
    renoise: Tensor  # [steps - 1, B, F, C, h, w]
    text: Tensor  # [B, text_len, text_dim]
    latents: Tensor  # of the base rollout, like noise
    outputs: HeadOutputs
    between_seeds: Tensor  # [B, F]: distance to another seed
    means: dict[object, object] = field(default_factory=dict)  # of reference sets, read once

    def inference(self, **kwargs: Any) -> Tensor:
        with threads_for(self.noise[:1], self.session.model_config):
            return self.session.pipeline.inference(
                self.noise, prompt_embeds=self.text, renoise=self.renoise, **kwargs
            )[1]


def begin(session: LoadedModel, configs: Sequence[RunConfig]) -> Runs:
    """Roll out a batch, and the same with another seed each."""
    text = torch.cat([session.texts[config.prompt][0] for config in configs])

    def drawn(more: int) -> tuple[Tensor, Tensor]:
        seeded = [replace(config, seed=config.seed + more) for config in configs]
        pairs = [draw_noise(c, session.model_config, session.dtype, session.device) for c in seeded]
        noise, renoise = zip(*pairs, strict=True)
        return torch.cat(noise), torch.cat(renoise, 1)

    def roll_out(noise: Tensor, renoise: Tensor) -> Tensor:
        with threads_for(noise[:1], session.model_config):
            return session.pipeline.inference(noise, prompt_embeds=text, renoise=renoise)[1]

    noise, renoise = drawn(0)
    with record_head_outputs() as outputs:
        latents = roll_out(noise, renoise)
    other = roll_out(*drawn(ANOTHER_SEED))
    return Runs(session, configs, noise, renoise, text, latents, outputs, distance(latents, other))


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the root mean square difference per frame, float64 [B, F] of [B, F, C, h, w], on the CPU."""
    return (one.double() - other.double()).square().mean((2, 3, 4)).sqrt().cpu()


def measure(runs: Runs, edits: Mapping[Any, EditOfBlock]) -> dict[Any, Tensor]:
    """Return the direct effect of every edit by name, float64 [B, F], in units of the distance between seeds.

    NaN where a block has nothing to edit.
    """
    frames = block_ranges(runs.configs[0].block_sizes)
    found = {name: torch.full(runs.between_seeds.shape, torch.nan, dtype=torch.float64) for name in edits}

    def probe(block: int, denoise: Callable[[], Tensor]) -> None:
        now = slice(frames[block].start, frames[block].stop)
        for name, edit_of in edits.items():
            edit = edit_of(block)
            if edit is None:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a block without such keys is NaN
                with intervene(edit, data={edit: needed(runs, edit)}) as session:
                    x0 = denoise()
            if session.changed[0]:
                found[name][:, now] = distance(x0, runs.latents[:, now])

    runs.inference(probe=probe)
    return {name: values / runs.between_seeds for name, values in found.items()}


def needed(runs: Runs, edit: Edit) -> object:
    """Return the means that an ablation takes. Raises ConfigError for edits with a source run."""
    if isinstance(edit, Patch) or (isinstance(edit, Ablate) and edit.how == "resample"):
        raise ConfigError(f"direct effects take no edit with a source: {edit}")
    if isinstance(edit, Ablate) and edit.how == "frame_mean":
        return runs.outputs
    if isinstance(edit, Ablate) and edit.how == "mean":
        if edit.source not in runs.means:
            runs.means[edit.source] = reference_means(runs.session, runs.configs[0], edit.source)
        return runs.means[edit.source]
    return None


def floor(runs: Runs) -> Tensor:
    """Return the same distance [B, F] for what should change nothing: noise of 1e-6, or another backend."""
    if runs.session.dtype != torch.float32:
        backend = Bias(FLOOR_BIAS, frames=("past",), passes="denoise")
        return measure(runs, {"floor": lambda block: backend})["floor"]
    generator = torch.Generator().manual_seed(0)
    shaken = runs.noise + FLOOR_NOISE * torch.randn(runs.noise.shape, generator=generator).to(runs.noise)
    frames = block_ranges(runs.configs[0].block_sizes)
    found = torch.full(runs.between_seeds.shape, torch.nan, dtype=torch.float64)

    def probe(block: int, denoise: Callable[[Tensor], Tensor]) -> None:
        now = slice(frames[block].start, frames[block].stop)
        found[:, now] = distance(denoise(shaken[:, now]), runs.latents[:, now])

    runs.inference(probe=probe)
    return found / runs.between_seeds


def on_a_random_frame(edit: Edit, block_sizes: Sequence[int], salt: str) -> EditOfBlock:
    """Move an edit of frames to as many other earlier frames, drawn anew for each block."""
    assert isinstance(edit, (KeySelection, Move)) and edit.frames is not None
    named = {0 if name == "first" else name for name in edit.frames}
    ranges = block_ranges(list(block_sizes))

    def edit_of(block: int) -> Edit | None:
        others = [frame for frame in range(ranges[block].start) if frame not in named]
        chosen = random.Random(f"{salt} {block}").sample(others, min(len(others), len(named)))
        return replace(edit, frames=tuple(chosen)) if chosen else None

    return edit_of

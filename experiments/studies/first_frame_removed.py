"""What removing frame 0 from a head's view does, beside what that head attends to.

Runs are held-out captions of every kind, with several seeds each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.extraction.causal import Session
from experiments.miniature.frozen import held_out_scenes
from experiments.miniature.moving_shapes import KINDS
from experiments.running.ranks import Rank
from experiments.studies import causal_atlas, direct_effects
from experiments.studies.head_attention import measures_by_pass
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.modules.interventions import Knockout

SEED_STEP = 10_000


def captions(count: int) -> dict[str, int]:
    """The first held-out captions of all kinds, each with its number, which is its first seed."""
    numbers: dict[str, int] = {}
    for number, scene in enumerate(held_out_scenes(KINDS, 4 * count)):
        numbers.setdefault(scene.caption, number)
    if len(numbers) < count:
        raise ConfigError(f"{count} captions are asked for, {len(numbers)} are held out")
    return dict(list(numbers.items())[:count])


@dataclass(frozen=True)
class FirstFrameRemoved:
    """The study of one model; prompts and seeds in the order of its configs, seeds outermost."""

    prompts: Mapping[str, int]  # caption -> its first seed
    seeds: int
    config: RunConfig
    session: Session
    folder: Path
    layers: tuple[int, ...] | None = None  # None is all

    @property
    def configs(self) -> list[RunConfig]:
        return [
            replace(self.config, prompt=caption, seed=first + SEED_STEP * n)
            for n in range(self.seeds)
            for caption, first in self.prompts.items()
        ]

    @property
    def study(self) -> causal_atlas.Study:
        sizes = self.session.model_config
        return causal_atlas.Study(
            self.folder,
            Knockout(frames=("first",), layers=self.layers, passes="denoise"),
            "head",
            self.configs,
            sizes.num_layers,
            sizes.num_heads,
            self.session.sha256.result(),
            str(self.session.dtype),
            self.session.common["files"],
        )

    def run(self, say: Callable[[str], None], stopping: Callable[[], bool], rank: Rank | None = None) -> bool:
        """Make what is not done yet, all runs in one batch, layers shared by ranks -> whether all is done."""
        return causal_atlas.run(self.study, self.session, len(self.configs), say, stopping, rank)

    def numbers(self) -> dict[str, np.ndarray]:
        """Of a study that is done, means over frames and seeds, [prompts, layers, H] each.

        effect and control (the same on a random earlier frame) in units of the distance between seeds, norm
        of z, and s and masses, of the first pass and as the mean over the denoising passes.
        """
        merged, study = causal_atlas.merged(self.study), self.study
        found = {
            name: self._by_prompt(np.nanmean(merged[field].numpy(), -1))
            for name, field in (("effect", "effects"), ("control", "frame_control"))
        }
        found["norm"] = self._by_prompt(merged["head_norms"].numpy())
        found["floor"] = self._by_prompt(np.nanmean(merged["floor"].numpy(), -1))
        steps = range(len(self.config.denoising_step_list))
        for name, values in measures_by_pass(direct_effects.begin(self.session, self.configs), steps).items():
            of_layers = values[:, :, [layer or 0 for layer in study.layers]]
            found[f"{name}, first pass"] = self._by_prompt(of_layers[0])
            found[f"{name}, all passes"] = self._by_prompt(of_layers.mean(0))
        return found

    def _by_prompt(self, values: np.ndarray) -> np.ndarray:
        """Runs [R, ...] -> prompts [prompts, ...], mean over seeds."""
        return values.reshape(self.seeds, -1, *values.shape[1:]).mean(0)

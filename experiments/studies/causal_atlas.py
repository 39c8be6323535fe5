"""Causal atlas: the direct effect of one edit on every head, layer or frame, made in resumable items.

A direct effect is how far an edit moves x0 of a block that is denoised again over the unedited past, in units
of the distance between two seeds. An item is one prompt, seed and layer, in items/NAME.json.
"""

import argparse
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import progress, provenance
from experiments.caches import files
from experiments.caches.store import save_cache
from experiments.edits import MeanRuns, reference_means
from experiments.extraction import cache_builders, sweep
from experiments.running.cli import plan
from experiments.session import Session, load
from experiments.studies.interventions import ANOTHER_SEED, FLOOR_BIAS, FLOOR_NOISE, distance
from wan import interventions
from wan.blocks import block_ranges
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.noise import draw_noise

ADDED = ("attn_out", "cross_out", "mlp_out")  # the units of --each site: what is added to the residual stream
ATLAS = "causal_atlas.pt"

EditOfBlock = Callable[[int], interventions.Edit | None]  # block -> its edit, or None
Denoise = Callable[..., Tensor]


# --- Direct effects in a batch of runs
@dataclass
class Runs:
    """Unedited rollouts, made together: latents, outputs of heads, and the distance to another seed."""

    session: Session
    configs: Sequence[RunConfig]  # they differ in prompt and seed
    sites: Sequence[str] = ()  # whose outputs are recorded, beside those of heads

    def __post_init__(self) -> None:
        texts = self.session.texts
        self.text = torch.cat([texts[config.prompt][0] for config in self.configs])  # [B, text_len, text_dim]
        self.ranges = block_ranges(self.configs[0].block_sizes)
        self.noise, self.renoise = self._noise(self.configs)
        with interventions.record_head_outputs(
            *dict.fromkeys((*interventions.HeadOutputs.sites, *self.sites))
        ) as self.outputs:
            self.latents = self.rollout()
        # The unit of effects: the same prompts from other noise.
        others = [replace(config, seed=config.seed + ANOTHER_SEED) for config in self.configs]
        noise, renoise = self._noise(others)
        other_latents = self.rollout(noise=noise, renoise=renoise)
        self.between_seeds = distance(self.latents, other_latents)  # [B, F]
        self.means: dict[object, object] = {}  # of reference sets, read once

    def rollout(
        self, noise: Tensor | None = None, renoise: Tensor | None = None, probe: Any = None
    ) -> Tensor:
        """Return latents [B, F, C, h, w], from the configs' own noise where no other is given."""
        noise = self.noise if noise is None else noise
        renoise = self.renoise if renoise is None else renoise
        with provenance.threads_for(noise[:1], self.session.model_config):
            return self.session.pipeline.inference(
                noise, prompt_embeds=self.text, renoise=renoise, probe=probe
            )[1]

    def _noise(self, configs: Sequence[RunConfig]) -> tuple[Tensor, Tensor]:
        """Return noise [B, F, C, h, w] and the noise of later steps [steps - 1, B, F, C, h, w]."""
        s = self.session
        drawn = [draw_noise(config, s.model_config, s.dtype, s.device) for config in configs]
        noise, renoise = zip(*drawn, strict=True)
        return torch.cat(noise), torch.cat(renoise, 1)


def measure(runs: Runs, edits: Mapping[Any, EditOfBlock]) -> dict[Any, Tensor]:
    """Return every edit's direct effect by name, float64 [B, F]; NaN where a block has nothing to edit."""

    def under(edit_of: EditOfBlock) -> Callable[[int, Denoise], Tensor | None]:
        def denoised(block: int, denoise: Denoise) -> Tensor | None:
            edit = edit_of(block)
            if edit is None:
                return None
            # A warning for each block and unit would bury the progress.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a block without such keys is NaN
                with interventions.intervene(edit, data={edit: _needed(runs, edit)}) as active:
                    x0 = denoise()
            if not active.changed[0]:
                return None
            return x0

        return denoised

    return denoised_again(runs, {name: under(edit_of) for name, edit_of in edits.items()})


def denoised_again(
    runs: Runs, ways: Mapping[Any, Callable[[int, Denoise], Tensor | None]]
) -> dict[Any, Tensor]:
    """Denoise every block in other ways over the unedited past -> effects float64 [B, F]; None is NaN."""
    effects = {name: torch.full(runs.between_seeds.shape, torch.nan, dtype=torch.float64) for name in ways}

    def probe(block: int, denoise: Denoise) -> None:
        # The past stays the unedited one: the difference is the direct effect of this block's edit.
        frames = slice(runs.ranges[block].start, runs.ranges[block].stop)
        for name, way in ways.items():
            x0 = way(block, denoise)
            if x0 is not None:
                effects[name][:, frames] = distance(x0, runs.latents[:, frames])

    runs.rollout(probe=probe)
    return {name: values / runs.between_seeds for name, values in effects.items()}


def _needed(runs: Runs, edit: interventions.Edit) -> object:
    """Return the means that an ablation takes; None for other edits."""
    if not isinstance(edit, interventions.Ablate):
        return None
    if edit.how == "frame_mean":
        return runs.outputs
    if edit.how != "mean":
        return None
    key = edit.source, edit.sites
    if key not in runs.means:
        runs.means[key] = reference_means(runs.session, runs.configs[0], *key)
    return runs.means[key]


def measure_floor(runs: Runs) -> Tensor:
    """Measure what should change nothing, like an effect: noise of 1e-6, or another backend."""
    if runs.session.dtype != torch.float32:
        backend = interventions.Bias(FLOOR_BIAS, frames=("past",), passes="denoise")
        return measure(runs, {"floor": lambda block: backend})["floor"]
    # In float32 the floor is noise far below what any edit does.
    generator = torch.Generator().manual_seed(0)
    noise = runs.noise + FLOOR_NOISE * torch.randn(runs.noise.shape, generator=generator).to(runs.noise)
    shaken = [noise[:, frames.start : frames.stop] for frames in runs.ranges]
    return denoised_again(runs, {"floor": lambda block, denoise: denoise(shaken[block])})["floor"]


def on_a_random_frame(edit: interventions.Edit, block_sizes: Sequence[int], salt: str) -> EditOfBlock:
    """Move an edit of frames to as many other earlier frames, drawn anew for each block."""
    # The edit's own frames are no control.
    edited_frames = set(edit.key_frames or ())
    if "first" in edited_frames:
        edited_frames = edited_frames - {"first"} | {0}
    ranges = block_ranges(list(block_sizes))

    def edit_of(block: int) -> interventions.Edit | None:
        others = [frame for frame in range(ranges[block].start) if frame not in edited_frames]
        count = min(len(others), len(edited_frames))
        if count == 0:
            return None
        frames = tuple(random.Random(f"{salt} {block}").sample(others, count))
        return replace(edit, frames=frames)  # type: ignore[call-arg]  # an edit of frames

    return edit_of


# --- The study and its items
@dataclass(frozen=True)
class Piece:
    """What is made at a time: a layer (None: all together) in a batch of runs."""

    configs: Sequence[RunConfig]
    layer: int | None

    def __str__(self) -> str:
        return f"layer {self.layer} of {len(self.configs)} runs from {self.configs[0].prompt[:40]!r}"


@dataclass
class Study:
    """An edit, the runs that it is made in, and the folder of the items (the Work of extraction/sweep.py)."""

    folder: Path
    edit: interventions.Edit
    each: str
    configs: Sequence[RunConfig]
    session: Session

    def __post_init__(self) -> None:
        edit, each, sizes = self.edit, self.each, self.session.model_config
        # 1. Refuse what has no direct effect, or none in these units.
        if "source" in edit.needs:
            raise ConfigError(f"direct effects take no edit with a source: {edit}")
        if edit.kind != "self":
            raise ConfigError("a causal atlas edits self-attention: frames, not tokens")
        if edit.passes == "clean":
            raise ConfigError("a clean pass has no direct effect on its block: take passes denoise")
        if each == "site" and (not isinstance(edit, interventions.Ablate) or edit.heads):
            raise ConfigError("--each site needs an ablate without heads")
        if each == "frame" and not isinstance(edit, (interventions.KeySelection, interventions.Move)):
            raise ConfigError("--each frame needs knockout, bias or move, of frames")
        # 2. Layers are edited one by one; frames in all layers together (None).
        self.layers: list[int | None] = [*(edit.layers or range(sizes.num_layers))]
        if each == "frame":
            self.layers = [None]
        # 3. Rows of an item: heads, frames, sites, or the one layer.
        units = {
            "head": edit.heads or range(sizes.num_heads),
            "site": range(len(ADDED)),
            "frame": range(self.configs[0].num_frames),
            "layer": range(1),
        }
        self.units = [*units[each]]
        # 4. Sites whose outputs a mean over the run itself takes.
        self.recorded: Sequence[str] = ()
        if isinstance(edit, interventions.Ablate) and edit.how == "frame_mean":
            self.recorded = ADDED if each == "site" else edit.sites
        self.store = sweep.Results(self.folder / "items")

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything but prompt, seed and layer that numbers depend on, and the files that the edit reads."""
        config = replace(provenance.of_any_prompt(self.configs[0]), interventions=[self.edit.to_dict()])
        return self.session.identity(config, each=self.each)

    @property
    def items(self) -> dict[str, tuple[RunConfig, int | None]]:
        """Run and layer of every item by its name, grouped by run."""
        return {self.name(config, layer): (config, layer) for config in self.configs for layer in self.layers}

    def name(self, config: RunConfig, layer: int | None) -> str:
        return provenance.fingerprint(self.identity, prompt=config.prompt, seed=config.seed, layer=layer)

    def pieces(self, batch: int) -> list[Piece]:
        """Return a batch of runs and a layer each."""
        # Layers of one batch follow each other, so that its unedited rollouts are made once.
        batches = [self.configs[i : i + batch] for i in range(0, len(self.configs), batch)]
        return [Piece(configs, layer) for configs in batches for layer in self.layers]

    def is_done(self, piece: Piece) -> bool:
        return all(self.store.read(self.name(c, piece.layer)) is not None for c in piece.configs)

    def make(self, piece: Piece, watch: progress.Progress) -> None:
        """Measure the effects of a layer in a batch of runs, whose unedited rollouts are kept for others."""
        watch.log("rollout", piece=str(piece))  # from here on Ctrl-C ends a layer first

        def begun() -> tuple[Runs, Tensor]:
            runs = Runs(self.session.here(sweep.cached), piece.configs, self.recorded)
            return runs, measure_floor(runs)

        # 1. Roll out the batch without edits, or take the rollouts of the layer before.
        names = [self.name(config, None) for config in piece.configs]
        runs, floor = sweep.cached("runs", provenance.fingerprint({"runs": names}), begun)
        # 2. Denoise every block again under each unit's edit -> [B, F] by unit.
        layer, effects = piece.layer, measure(runs, dict(self.edits(piece.layer)))
        # 3. Keep an item a run; the norm of z is a covariate of the effects.
        norms = [x for (key, _), x in runs.outputs.norms.items() if key[:2] == ("self", layer)]
        for row, config in enumerate(piece.configs):
            values: files.Record = {"prompt": config.prompt, "seed": config.seed, "layer": layer}
            values |= {"floor": floor[row].tolist(), "between_seeds": runs.between_seeds[row].tolist()}
            for kind in dict.fromkeys(kind for kind, _ in effects):
                values[kind] = [effects[kind, unit][row].tolist() for unit in self.units]  # [U, F]
            if norms:  # none of all layers together
                norm = torch.stack([x[row].mean(0) for x in norms]).mean(0)
                values["norm"] = (norm[self.units] if self.each == "head" else norm).tolist()
            self.store.write(self.name(config, layer), values)

    def edits(self, layer: int | None) -> Iterator[tuple[tuple[str, int], EditOfBlock]]:
        """Yield ("effect" or "frame_control", unit) and a function from a block to its edit."""
        # The past and the own block as wholes have no other frames to compare with.
        edit = self.edit
        of_frames = isinstance(
            edit, (interventions.KeySelection, interventions.Move)
        ) and edit.frames not in (("past",), ("own",))
        for unit in self.units:
            fields: files.Record = {}
            if layer is not None:
                fields["layers"] = (layer,)
            if self.each == "site":
                fields["site"] = ADDED[unit]
            elif self.each != "layer":
                fields[f"{self.each}s"] = (unit,)
            unit_edit = replace(self.edit, **fields)

            def always(block: int, edit: interventions.Edit = unit_edit) -> interventions.Edit:
                return edit

            yield ("effect", unit), always
            if of_frames and self.each != "frame":
                sizes = self.configs[0].block_sizes
                yield ("frame_control", unit), on_a_random_frame(unit_edit, sizes, f"{layer} {unit}")


def run(study: Study, batch: int, watch: progress.Progress, client: Any = None) -> None:
    """Make missing items, up to batch runs at a time. Raises as work_through does."""
    light = copy(study)  # with what it is of
    light.configs = study.configs[:1]  # pieces have their own, and it travels with each
    sweep.work_through(light, study.pieces(batch), watch, client)


def merged(study: Study) -> dict[str, Tensor]:
    """Return the tensors of an atlas of R runs, N layers, U units and F frames: effects [R, N, U, F]."""
    rows = [study.store.read(name) for name in study.items]
    items = [row for row in rows if row is not None]
    assert len(items) == len(rows), "an item is missing"  # run() makes all of them, or raises

    def stacked(name: str) -> Tensor:
        # [R · N, ...] -> [R, N, ...]
        values = torch.tensor([item[name] for item in items], dtype=torch.float64)
        return values.unflatten(0, (len(study.configs), len(study.layers))).float()

    effects = stacked("effect")
    atlas = {
        "effects": effects,
        "floor": stacked("floor")[:, 0],
        "between_seeds": stacked("between_seeds")[:, 0],
    }
    if "frame_control" in items[0]:
        atlas["frame_control"] = stacked("frame_control")
    if study.each in ("head", "site"):
        atlas["head_control"] = another_unit(effects)
    if study.each == "head":
        atlas["head_norms"] = stacked("norm")
    return atlas


def another_unit(effects: Tensor) -> Tensor:
    """Return effects [R, N, U, F] of a random other unit of the layer; NaN where there is no other.

    The draw is the same in every run, so that the control is paired.
    """
    control = torch.full_like(effects, torch.nan)
    num_layers, num_units = effects.shape[1:3]
    if num_units > 1:
        for layer, unit in product(range(num_layers), range(num_units)):
            others = [other for other in range(num_units) if other != unit]
            control[:, layer, unit] = effects[:, layer, random.Random(f"{layer} {unit}").choice(others)]
    return control


def atlas_cache(study: Study) -> dict:
    """Return the cache of a finished study."""
    return {
        **study.session.common(study.configs[0]),
        "format": "causal_atlas",
        "prompt": study.configs[0].prompt,
        "seed": None,
        "weights_sha256": study.session.weights_sha256,
        "fingerprint": provenance.fingerprint({"items": list(study.items)}),
        "is_logits": False,
        "interventions": provenance.record_of([study.edit]),
        "prompts": [config.prompt for config in study.configs],
        "seeds": [config.seed for config in study.configs],
        "each": study.each,
        "layers": [layer or 0 for layer in study.layers],
        "units": study.units,
        **merged(study),
    }


def prepared(
    folder: Path,
    edit: interventions.Edit,
    each: str,
    configs: Sequence[RunConfig],
    watch: progress.Progress | None = None,
) -> Study:
    """Return the study of an edit, with a model that is loaded here; it leaves a worker without that."""
    prompts = list(dict.fromkeys(config.prompt for config in configs))
    session = sweep.cached(
        "model",
        provenance.fingerprint(provenance.identity(configs[0])),
        lambda: load(configs[0]).prepare((), prompts, watch),
    )
    edit.check(session.pipeline.sizes(configs[0].num_frames))
    study = Study(folder, edit, each, configs, session)
    assert study.identity  # by the device here
    return study


class Means(MeanRuns):
    """The runs of a reference set, made by workers, and put together once."""

    def make(self, run: RunConfig, watch: progress.Progress) -> None:
        MeanRuns(self.session.here(sweep.cached), self.config, self.sites).make(run, watch)

    def begun(self) -> "Means":
        assert self.made_of  # by the device here
        return self


def make_atlas(args: argparse.Namespace, config: RunConfig) -> None:
    """Make the items that are missing, and the atlas when all are done. Raises StoppedError after Ctrl-C."""
    configs, folder = list(plan(args, config).values()), Path(args.output_dir)
    edits = (
        interventions.read_edits(args.edit) if args.edit else [interventions.Ablate("mean", passes="denoise")]
    )
    if len(edits) != 1 or configs[0].gpus > 1:
        raise ConfigError("a causal atlas takes one edit, and several GPUs by --workers N instead of gpus")
    with_edit = replace(configs[0], interventions=[edits[0].to_dict()])
    edits[0].check_source(with_edit)
    provenance.check_outputs(args, with_edit, [folder / ATLAS])
    with (
        files.claimed({str(folder / ATLAS): 0}),
        progress.observed(args, "layer") as watch,
        sweep.dask_client(args, configs[0].device) as client,
    ):
        parts = {"frames": range(configs[0].num_frames), "prompts": {run.prompt for run in configs}}
        parts["seeds"] = {run.seed for run in configs}
        cache_builders.require_free_cache(folder / ATLAS, "causal_atlas", parts, configs[0])
        start = time.monotonic()
        own_watch = [] if client else [watch]
        study = sweep.call_on_worker(client, prepared, folder, edits[0], args.each, configs, *own_watch)
        edit = edits[0]
        takes_means = isinstance(edit, interventions.Ablate) and edit.how == "mean" and not edit.source
        if client and takes_means:
            # Each reference prompt is an item: workers share them before the first ablation.
            means = sweep.call_on_worker(client, Means(study.session, configs[0], edit.sites).begun)
            sweep.work_through(means, means.runs, watch, client)
            sweep.call_on_worker(client, reference_means, study.session, configs[0], None, edit.sites)
        run(study, args.batch, watch, client)
        save_cache(folder / ATLAS, atlas_cache(study), overwrite=True)
        seconds = time.monotonic() - start
        watch.print(f"{folder / ATLAS}: {edits[0]}, each {args.each}: {seconds:.1f} s, {progress.memory()}")

"""Causal atlas: the direct effect of one edit on every head, layer or frame, made in resumable items.

A direct effect is how far an edit moves x0 of a block that is denoised again over the unedited past, in units
of the distance between two seeds. An item is one prompt, seed and layer, in items/NAME.json; index.json says
which are done.
"""

import argparse
import json
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.caches import save_cache
from experiments.caches.files import replacing
from experiments.extraction import causal
from experiments.extraction.causal import LoadedModel, draw_noise, reference_means
from experiments.extraction.devices import threads_for
from experiments.extraction.edits import check_sources, read_edits, record_of
from experiments.extraction.observer import RunObserver
from experiments.extraction.provenance import fingerprint, identity
from experiments.running.engine import Crew, Results, called, crew_of, kept, loaded_here, work_through
from experiments.running.locks import claimed
from experiments.running.progress import Progress, check_outputs, memory, observed
from wan.blocks import block_ranges
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Ablate, Bias, Edit, KeySelection, Knockout, Move, Patch, intervene
from wan.recorders import HeadOutputs, record_head_outputs

EACH = ("head", "layer", "frame", "site")
ADDED = ("attn_out", "cross_out", "mlp_out")  # the units of --each site: what is added to the residual stream
ATLAS = "causal_atlas.pt"
ANOTHER_SEED = 1_000_003  # added to a seed: the distance between two seeds is the unit of effects
FLOOR_NOISE = 1e-6  # added to the noise, in float32
FLOOR_BIAS = 1e-6  # in other dtypes: too small for a logit, but attention then runs by groups

EditOfBlock = Callable[[int], Edit | None]  # block -> its edit, or None


# -- direct effects in a batch of runs -----------------------------------------------------------------------


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
        return _inference(self.session, self.noise, self.renoise, self.text, **kwargs)


def _inference(session: LoadedModel, noise: Tensor, renoise: Tensor, text: Tensor, **kwargs: Any) -> Tensor:
    with threads_for(noise[:1], session.model_config):
        return session.pipeline.inference(noise, prompt_embeds=text, renoise=renoise, **kwargs)[1]


def begin(session: LoadedModel, configs: Sequence[RunConfig], sites: Sequence[str] = ()) -> Runs:
    """Roll out a batch and record its outputs, and the same with another seed each."""
    session = loaded_here(session)
    text = torch.cat([session.texts[config.prompt][0] for config in configs])

    def drawn(more: int) -> tuple[Tensor, Tensor]:
        seeded = [replace(config, seed=config.seed + more) for config in configs]
        pairs = [draw_noise(c, session.model_config, session.dtype, session.device) for c in seeded]
        noise, renoise = zip(*pairs, strict=True)
        return torch.cat(noise), torch.cat(renoise, 1)

    noise, renoise = drawn(0)
    with record_head_outputs(*dict.fromkeys((*HeadOutputs.sites, *sites))) as outputs:
        latents = _inference(session, noise, renoise, text)
    other = _inference(session, *drawn(ANOTHER_SEED), text)
    return Runs(session, configs, noise, renoise, text, latents, outputs, distance(latents, other))


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the root mean square difference per frame, float64 [B, F] of [B, F, C, h, w], on the CPU."""
    return (one.double() - other.double()).square().mean((2, 3, 4)).sqrt().cpu()


def measure(runs: Runs, edits: Mapping[Any, EditOfBlock]) -> dict[Any, Tensor]:
    """Return every edit's direct effect by name, float64 [B, F]; NaN where a block has nothing to edit."""
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
                with intervene(edit, data={edit: _needed(runs, edit)}) as session:
                    x0 = denoise()
            if session.changed[0]:
                found[name][:, now] = distance(x0, runs.latents[:, now])

    runs.inference(probe=probe)
    return {name: values / runs.between_seeds for name, values in found.items()}


def _needed(runs: Runs, edit: Edit) -> object:
    """Return the means that an ablation takes. Raises ConfigError for edits with a source run."""
    if isinstance(edit, Patch) or (isinstance(edit, Ablate) and edit.how == "resample"):
        raise ConfigError(f"direct effects take no edit with a source: {edit}")
    if isinstance(edit, Ablate) and edit.how == "frame_mean":
        return runs.outputs
    if isinstance(edit, Ablate) and edit.how == "mean":
        key = edit.source, edit.sites
        if key not in runs.means:
            runs.means[key] = reference_means(runs.session, runs.configs[0], *key)
        return runs.means[key]
    return None


def measure_floor(runs: Runs) -> Tensor:
    """Measure what should change nothing, like an effect: noise of 1e-6, or another backend."""
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


def _in_every_block(edit: Edit, block: int) -> Edit:
    return edit


# -- the study and its items ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """What is made at a time: a layer (None: all together) in a batch of runs."""

    configs: Sequence[RunConfig]
    layer: int | None

    def __str__(self) -> str:
        return f"layer {self.layer} of {len(self.configs)} runs from {self.configs[0].prompt[:40]!r}"


@dataclass(frozen=True)
class Study:
    """An edit, the runs that it is made in, and the folder of the items."""

    folder: Path
    edit: Edit
    each: str
    configs: Sequence[RunConfig]
    session: LoadedModel

    def __post_init__(self) -> None:
        if self.each not in EACH:
            raise ConfigError(f"--each {self.each} is not one of {', '.join(EACH)}")
        if self.edit.kind != "self":
            raise ConfigError("a causal atlas is of self-attention: its edit takes frames, not tokens")
        if self.edit.passes == "clean":
            raise ConfigError("a clean pass has no direct effect on its block: take passes denoise")
        if self.each == "site" and (not isinstance(self.edit, Ablate) or self.edit.heads):
            raise ConfigError(
                "--each site needs an ablate without heads: it takes attn_out, cross_out, mlp_out"
            )
        if self.each == "frame" and not isinstance(self.edit, (KeySelection, Move)):
            raise ConfigError("--each frame needs an edit of frames: knockout, bias or move")

    @property
    def layers(self) -> list[int | None]:
        """Layers that are edited one by one; [None] where frames are edited in all layers."""
        if self.each == "frame":
            return [None]
        return [*(self.edit.layers or range(self.session.model_config.num_layers))]

    @property
    def units(self) -> list[int]:
        """Rows of an item: heads, frames, or the one layer."""
        if self.each == "head":
            return [*(self.edit.heads or range(self.session.model_config.num_heads))]
        if self.each == "site":
            return list(range(len(ADDED)))
        return list(range(self.configs[0].num_frames)) if self.each == "frame" else [0]

    @property
    def recorded(self) -> tuple[str, ...]:
        """Sites whose outputs a mean over the run itself takes."""
        of_run = isinstance(self.edit, Ablate) and self.edit.how == "frame_mean"
        return (ADDED if self.each == "site" else self.edit.sites) if of_run else ()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything but prompt, seed and layer that numbers depend on, and the files that the edit reads."""
        config = replace(self.configs[0], prompt="", seed=0, interventions=[self.edit.to_dict()])
        return self.session.identity(config, each=self.each)

    @property
    def items(self) -> dict[str, tuple[RunConfig, int | None]]:
        """Run and layer of every item by its name, those of one run together."""
        return {self.name(config, layer): (config, layer) for config in self.configs for layer in self.layers}

    def name(self, config: RunConfig, layer: int | None) -> str:
        return fingerprint(self.identity, prompt=config.prompt, seed=config.seed, layer=layer)

    def pieces(self, batch: int) -> dict[str, Piece]:
        """Return what is made at a time, by name: a batch of runs and a layer, the same whoever makes it."""
        batches = [self.configs[i : i + batch] for i in range(0, len(self.configs), batch)]
        return {
            fingerprint({"items": [self.name(config, layer) for config in configs]}): Piece(configs, layer)
            for configs in batches
            for layer in self.layers
        }

    @property
    def store(self) -> Results:
        return Results(self.folder / "items")

    def is_done(self, name: str, piece: Piece) -> bool:
        """Check that the items of a piece are there (the engine's Work)."""
        return all(self.store.read(self.name(c, piece.layer)) is not None for c in piece.configs)

    def make(self, name: str, piece: Piece, watch: RunObserver) -> None:
        """Measure the effects of a layer in a batch of runs, whose unedited rollouts are kept for others."""
        watch.log("rollout", piece=str(piece))  # from here on Ctrl-C ends a layer first

        def begun() -> tuple[Runs, Tensor]:
            runs = begin(self.session, piece.configs, self.recorded)
            return runs, measure_floor(runs)

        names = [self.name(config, None) for config in piece.configs]
        runs, floor = kept("runs", fingerprint({"runs": names}), begun)
        layer, effects = piece.layer, measure(runs, dict(self.edits(piece.layer)))
        norms = [x for (key, _), x in runs.outputs.norms.items() if key[:2] == ("self", layer)]
        for row, config in enumerate(piece.configs):
            values: dict[str, Any] = {"prompt": config.prompt, "seed": config.seed, "layer": layer}
            values |= {"floor": floor[row].tolist(), "between_seeds": runs.between_seeds[row].tolist()}
            for kind in dict.fromkeys(kind for kind, _ in effects):
                values[kind] = [effects[kind, unit][row].tolist() for unit in self.units]  # [U, F]
            if norms:  # none of all layers together
                norm = torch.stack([x[row].mean(0) for x in norms]).mean(0)
                values["norm"] = (norm[self.units] if self.each == "head" else norm).tolist()
            self.store.write(self.name(config, layer), values)

    def edits(self, layer: int | None) -> Iterator[tuple[tuple[str, int], EditOfBlock]]:
        """Yield ("effect" or "frame_control", unit) and a function from a block to its edit."""
        for unit in self.units:
            edit = self.edit if layer is None else replace(self.edit, layers=(layer,))
            if self.each == "head":
                edit = replace(edit, heads=(unit,))
            elif self.each == "site" and isinstance(edit, Ablate):
                edit = replace(edit, site=ADDED[unit])
            elif self.each == "frame" and isinstance(edit, (Knockout, Bias, Move)):
                edit = replace(edit, frames=(unit,))
            yield ("effect", unit), partial(_in_every_block, edit)
            of_frames = isinstance(edit, (Knockout, Bias, Move)) and edit.frames not in (("past",), ("own",))
            if of_frames and self.each != "frame":
                sizes = self.configs[0].block_sizes
                yield ("frame_control", unit), on_a_random_frame(edit, sizes, f"{layer} {unit}")

    def write_index(self) -> None:
        """Write index.json: the study, and each item's name, prompt, seed, layer and whether it is done."""
        done = {path.stem for path in self.store.folder.glob("*.json")}
        rows = [
            [name, config.prompt, config.seed, layer, name in done]
            for name, (config, layer) in self.items.items()
        ]
        index = {"edit": self.edit.to_dict(), "each": self.each, "identity": self.identity}
        with replacing(self.folder / "index.json") as file:
            file.write(json.dumps(index | {"items": rows}, ensure_ascii=False, indent=1).encode() + b"\n")


def run(study: Study, batch: int, watch: Progress, crew: Crew | None = None) -> None:
    """Make the items that are not done, up to batch runs at a time. Raises what work_through raises."""
    pieces, light = study.pieces(batch), copy(study)  # with what it is of
    object.__setattr__(light, "configs", study.configs[:1])  # pieces have their own, and it travels with each
    try:
        work_through(light, pieces, study.folder, watch, crew, lambda name, state: study.write_index())
    finally:
        study.write_index()


def merged(study: Study) -> dict[str, Tensor]:
    """Return the tensors of an atlas of R runs, N layers, U units and F frames: effects [R, N, U, F]."""
    rows = [study.store.read(name) for name in study.items]
    done = [row for row in rows if row is not None]
    if len(done) < len(rows):
        missing = len(rows) - len(done)
        raise ConfigError(f"{missing} of {len(rows)} items are missing; run the same command again")

    def stacked(name: str) -> Tensor:
        values = torch.tensor([row[name] for row in done], dtype=torch.float64)
        return values.unflatten(0, (len(study.configs), len(study.layers))).float()

    effects = stacked("effect")
    atlas = {"effects": effects, "floor": stacked("floor")[:, 0]}
    atlas["between_seeds"] = stacked("between_seeds")[:, 0]
    if "frame_control" in done[0]:
        atlas["frame_control"] = stacked("frame_control")
    if study.each in ("head", "site"):
        control = torch.full_like(effects, torch.nan)  # of every unit the effect of another of its layer
        units = range(effects.shape[2])
        for layer in range(effects.shape[1]) if len(units) > 1 else ():
            for unit in units:
                other = random.Random(f"{layer} {unit}").choice([n for n in units if n != unit])
                control[:, layer, unit] = effects[:, layer, other]
        atlas["head_control"] = control
    if study.each == "head":
        atlas["head_norms"] = stacked("norm")
    return atlas


def atlas_cache(study: Study) -> dict:
    """Return the cache of a finished study."""
    return {
        **study.session.common,
        "format": "causal_atlas",
        "prompt": study.configs[0].prompt,
        "seed": None,
        "weights_sha256": study.session.sha256.result(),
        "fingerprint": fingerprint({"items": list(study.items)}),
        "is_logits": False,
        "interventions": record_of([study.edit]),
        "prompts": [config.prompt for config in study.configs],
        "seeds": [config.seed for config in study.configs],
        "each": study.each,
        "layers": [layer or 0 for layer in study.layers],
        "units": study.units,
        **merged(study),
    }


def prepared(
    folder: Path, edit: Edit, each: str, configs: Sequence[RunConfig], watch: RunObserver | None = None
) -> Study:
    """Return the study of an edit, with a model that is loaded here; it leaves a worker without that."""
    prompts = list(dict.fromkeys(config.prompt for config in configs))
    session = kept(
        "model", fingerprint(identity(configs[0])), lambda: causal.prepare(configs[0], [], prompts, watch)
    )
    session.pipeline.plan(configs[0].num_frames).check([edit])
    study = Study(folder, edit, each, configs, session)
    assert study.identity  # by the device here
    return study


def make_atlas(args: argparse.Namespace, configs: Sequence[RunConfig]) -> None:
    """Make the items that are missing, and the atlas when all are done. Raises StoppedError after Ctrl-C."""
    folder = Path(args.output_dir)
    edits = read_edits(args.edit) if args.edit else [Ablate("mean", passes="denoise")]
    if len(edits) != 1:
        raise ConfigError(f"{args.edit} holds {len(edits)} interventions; a causal atlas is of one")
    with_edit = replace(configs[0], interventions=[edits[0].to_dict()])
    check_sources(edits, with_edit)
    check_outputs(args, with_edit, [folder / ATLAS, folder / "index.json"])
    if configs[0].gpus > 1:
        raise ConfigError(f"gpus {configs[0].gpus} is of one rollout; share an atlas by --workers N")
    with (
        claimed({str(folder / ATLAS): 0}),
        observed(args, "layer") as watch,
        crew_of(args, configs[0].device) as crew,
    ):
        start = time.monotonic()
        study = called(crew, prepared, folder, edits[0], args.each, configs, *([] if crew else [watch]))
        run(study, args.batch, watch, crew)
        save_cache(folder / ATLAS, atlas_cache(study))
        seconds = time.monotonic() - start
        watch.print(f"{folder / ATLAS}: {edits[0]}, each {args.each}: {seconds:.1f} s, {memory()}")

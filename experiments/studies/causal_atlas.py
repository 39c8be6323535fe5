"""Causal atlas: the direct effect of one edit on every head, layer or frame, made in resumable items.

An item is one prompt, seed and layer, in items/NAME.json; index.json says which are done.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.caches import save_cache
from experiments.caches.files import StoppedError, replacing, require_writable
from experiments.extraction import causal
from experiments.extraction.causal import LoadedModel
from experiments.extraction.edits import read_edits, record_of
from experiments.extraction.observer import RunObserver
from experiments.extraction.provenance import files_of
from experiments.running.progress import check_outputs, memory, observed
from experiments.running.ranks import Rank
from experiments.running.work_items import WorkItems, common_settings, item_name
from experiments.studies import direct_effects
from experiments.studies.direct_effects import EditOfBlock, Runs
from wan import checkpoint
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Ablate, Bias, Edit, KeySelection, Knockout, Move, fingerprint

EACH = ("head", "layer", "frame")
ATLAS = "causal_atlas.pt"

Item = tuple[RunConfig, int | None]  # a run and a layer; None where frames are edited in all layers


@dataclass(frozen=True)
class Study:
    """An edit, the runs that it is made in, and the folder of the items."""

    folder: Path
    edit: Edit
    each: str
    configs: Sequence[RunConfig]
    session: LoadedModel
    files: Sequence[Mapping[str, Any]] = ()  # that the runs and the edit read, by what they hold

    def __post_init__(self) -> None:
        if self.each not in EACH:
            raise ConfigError(f"--each {self.each} is not one of {', '.join(EACH)}")
        if self.edit.kind != "self":
            raise ConfigError("a causal atlas is of self-attention: its edit takes frames, not tokens")
        if self.edit.passes == "clean":
            raise ConfigError("a clean pass has no direct effect on its block: take passes denoise")
        if self.each == "frame" and not isinstance(self.edit, (KeySelection, Move)):
            raise ConfigError("--each frame needs an edit of frames: knockout, bias or move")

    @property
    def layers(self) -> list[int | None]:
        if self.each == "frame":
            return [None]
        return [*(self.edit.layers or range(self.session.model_config.num_layers))]

    @property
    def units(self) -> list[int]:
        """Rows of an item: heads, frames, or the one layer."""
        if self.each == "head":
            return [*(self.edit.heads or range(self.session.model_config.num_heads))]
        return list(range(self.configs[0].num_frames)) if self.each == "frame" else [0]

    @cached_property
    def settings(self) -> str:
        """Everything but prompt, seed and layer that numbers depend on, as JSON."""
        config = common_settings(self.configs[0]) | {
            "edit": fingerprint([self.edit]),
            "each": self.each,
            "weights": self.session.sha256.result(),
            "files": list(self.files),
            "run_dtype": str(self.session.dtype),
        }
        return json.dumps(config, sort_keys=True, default=str)

    @property
    def items(self) -> dict[str, Item]:
        """All items by their names, those of one run together."""
        return {self.name(config, layer): (config, layer) for config in self.configs for layer in self.layers}

    def name(self, config: RunConfig, layer: int | None) -> str:
        text = json.dumps([self.settings, config.prompt, config.seed, layer])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def pieces(self, batch: int) -> dict[str, tuple[Sequence[RunConfig], int | None]]:
        """Return what is made at a time, by name: a batch of runs and a layer, the same whoever makes it."""
        batches = [self.configs[i : i + batch] for i in range(0, len(self.configs), batch)]
        return {
            item_name([self.name(config, layer) for config in configs]): (configs, layer)
            for configs in batches
            for layer in self.layers
        }

    @property
    def store(self) -> WorkItems:
        return WorkItems(self.folder / "items")

    def write_index(self) -> None:
        """Write index.json: the study, and each item's name, prompt, seed, layer and whether it is done."""
        done = {path.stem for path in self.store.folder.glob("*.json")}
        rows = [
            [name, config.prompt, config.seed, layer, name in done]
            for name, (config, layer) in self.items.items()
        ]
        index = {"edit": self.edit.to_dict(), "each": self.each, "settings": json.loads(self.settings)}
        with replacing(self.folder / "index.json") as file:
            file.write(json.dumps(index | {"items": rows}, ensure_ascii=False, indent=1).encode() + b"\n")


def run(study: Study, batch: int, watch: RunObserver, rank: Rank | None = None) -> bool:
    """Make what is neither done nor being made, up to batch runs at a time -> whether all is done."""
    study.session.pipeline.plan(study.configs[0].num_frames).check([study.edit])
    pieces, runs = study.pieces(batch), None
    with WorkItems(study.folder / "items", rank) as items:

        def is_done(piece: str) -> bool:
            configs, layer = pieces[piece]
            return all(items.read(study.name(config, layer)) is not None for config in configs)

        def report() -> None:
            done = sum(items.read(name) is not None for name in study.items)
            watch.print(f"{done} of {len(study.items)} items are done")

        report()
        for piece in items.claim(list(pieces), is_done, watch):
            configs, layer = pieces[piece]
            if runs is None or runs.configs is not configs:
                runs = None  # its tensors leave first
                runs = direct_effects.begin(study.session, configs)
                floor = direct_effects.floor(runs)
            effects = direct_effects.measure(runs, dict(_edits(study, layer)))
            for row, config in enumerate(configs):
                items.write(study.name(config, layer), _values(study, runs, layer, row, floor, effects))
            report()
            study.write_index()
            if watch.stopping:
                break
        study.write_index()
        return all(map(is_done, pieces))


def _edits(study: Study, layer: int | None) -> Iterator[tuple[tuple[str, int], EditOfBlock]]:
    """Yield ("effect" or "frame_control", unit) and a function from a block to its edit."""
    for unit in study.units:
        edit = study.edit if layer is None else replace(study.edit, layers=(layer,))
        if study.each == "head":
            edit = replace(edit, heads=(unit,))
        elif study.each == "frame" and isinstance(edit, (Knockout, Bias, Move)):
            edit = replace(edit, frames=(unit,))
        yield ("effect", unit), partial(_in_every_block, edit)
        of_frames = isinstance(edit, (Knockout, Bias, Move)) and edit.frames not in (("past",), ("own",))
        if of_frames and study.each != "frame":
            sizes = study.configs[0].block_sizes
            yield ("frame_control", unit), direct_effects.on_a_random_frame(edit, sizes, f"{layer} {unit}")


def _in_every_block(edit: Edit, block: int) -> Edit:
    return edit


def _values(
    study: Study,
    runs: Runs,
    layer: int | None,
    row: int,
    floor: Tensor,
    effects: dict[tuple[str, int], Tensor],
) -> dict[str, Any]:
    """Return the numbers of one item; effect, frame_control [U, F]."""
    values: dict[str, Any] = {
        "prompt": runs.configs[row].prompt,
        "seed": runs.configs[row].seed,
        "layer": layer,
        "floor": floor[row].tolist(),
        "between_seeds": runs.between_seeds[row].tolist(),
    }
    for kind in dict.fromkeys(kind for kind, _ in effects):
        values[kind] = [effects[kind, unit][row].tolist() for unit in study.units]
    if layer is not None:
        of_layer = [
            x[row].mean(0) for (key, _), x in runs.outputs.norms.items() if key[:2] == ("self", layer)
        ]
        norms = torch.stack(of_layer).mean(0)
        values["norm"] = (norms[study.units] if study.each == "head" else norms).tolist()
    return values


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
    if study.each == "head":
        control = torch.full_like(effects, torch.nan)  # of every head the effect of another of its layer
        heads = range(effects.shape[2])
        for layer in range(effects.shape[1]) if len(heads) > 1 else ():
            for head in heads:
                other = random.Random(f"{layer} {head}").choice([n for n in heads if n != head])
                control[:, layer, head] = effects[:, layer, other]
        atlas |= {"head_control": control, "head_norms": stacked("norm")}
    return atlas


def atlas_cache(study: Study) -> dict:
    """Return the cache of a finished study."""
    first = study.configs[0]
    return {
        **study.session.common,
        "format": "causal_atlas",
        "prompt": first.prompt,
        "seed": None,
        "weights_sha256": study.session.sha256.result(),
        "is_logits": False,
        "interventions": record_of([study.edit]),
        "prompts": [config.prompt for config in study.configs],
        "seeds": [config.seed for config in study.configs],
        "each": study.each,
        "layers": [layer or 0 for layer in study.layers],
        "units": study.units,
        **merged(study),
    }


def make_atlas(args: argparse.Namespace, configs: Sequence[RunConfig], rank: Rank) -> None:
    """Make the items that are missing, and the atlas when all are done. Raises StoppedError after Ctrl-C.

    Several ranks make different items, and the first of them the atlas; without a launcher each writes it,
    whole and with the same bytes.
    """
    edits, folder = (
        read_edits(args.edit) if args.edit else [Ablate("mean", passes="denoise")],
        Path(args.output_dir),
    )
    if len(edits) != 1:
        raise ConfigError(f"{args.edit} holds {len(edits)} interventions; a causal atlas is of one")
    [edit] = edits
    with_edit = replace(configs[0], interventions=[edit.to_dict()])
    check_outputs(args, with_edit, [folder / ATLAS, folder / "index.json"])
    with observed(args, "layer") as watch:
        require_writable(folder / ATLAS)
        prompts = list(dict.fromkeys(config.prompt for config in configs))
        session = causal.prepare(configs[0], [], prompts, watch)
        files = files_of(with_edit, checkpoint.weights_file(with_edit.ckpt_dir, with_edit.checkpoint_path))
        start, study = time.monotonic(), Study(folder, edit, args.each, configs, session, files)
        watch.log("rollout", items=len(study.items))  # from here on Ctrl-C ends a layer first
        if not run(study, args.batch, watch, rank):
            raise StoppedError("stopped; what is done will not be made again: run the same command to go on")
        if rank.is_first:
            save_cache(folder / ATLAS, atlas_cache(study))
            seconds = time.monotonic() - start
            watch.print(f"{folder / ATLAS}: {edit}, each {args.each}: {seconds:.1f} s, {memory()}")

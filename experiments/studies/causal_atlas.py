"""A causal atlas: the direct effect of the same edit on every head, layer or frame, made in resumable pieces.

A work item is one prompt, seed and layer, named by the hash of its settings: items/HASH.json. The index says
which are done; the atlas is made of them when all are.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.caches import save_cache
from experiments.caches.files import StoppedError, replacing, require_writable
from experiments.extraction import causal
from experiments.extraction.causal import Session
from experiments.extraction.edits import read_edits, record_of
from experiments.extraction.observer import RunObserver
from experiments.extraction.provenance import files_of
from experiments.running.jobs import deterministic, name_inputs
from experiments.running.progress import Progress, memory, stopping_when_asked
from experiments.running.ranks import Rank
from experiments.running.sweep_state import NOT_SETTINGS
from experiments.running.work_items import WorkItems, item_name
from experiments.studies import direct_effects
from wan import checkpoint
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Ablate, Bias, Edit, KeySelection, Knockout, Move, fingerprint

# --- A causal atlas: the direct effect of the same edit on every head, layer or frame, made in resumable
EACH = ("head", "layer", "frame")

RunIndex = tuple[str, int]  # prompt and seed


@dataclass(frozen=True)
class Item:
    """One piece of an atlas; layer is None where frames are edited in all layers."""

    config: RunConfig
    layer: int | None
    settings: str  # of everything else that its numbers depend on

    @property
    def name(self) -> str:
        said = json.dumps([self.settings, self.config.prompt, self.config.seed, self.layer])
        return hashlib.sha256(said.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """What is edited, of which runs, and where the pieces lie."""

    folder: Path
    edit: Edit
    each: str
    configs: Sequence[RunConfig]
    num_layers: int
    num_heads: int
    weights_sha256: str
    dtype: str
    files: Sequence[Mapping[str, Any]] = ()  # what the runs read, by what they hold

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
        return list(range(self.num_layers)) if self.edit.layers is None else list(self.edit.layers)

    @property
    def settings(self) -> str:
        """Everything but prompt, seed and layer that numbers depend on, as JSON."""
        config = {name: value for name, value in asdict(self.configs[0]).items() if name not in NOT_SETTINGS}
        config |= {
            "edit": fingerprint([self.edit]),
            "each": self.each,
            "weights": self.weights_sha256,
            "files": list(self.files),
            "run_dtype": self.dtype,
        }
        return json.dumps(config, sort_keys=True, default=str)

    def items(self) -> Iterator[Item]:
        settings = self.settings
        for config in self.configs:
            for layer in self.layers:
                yield Item(config, layer, settings)

    def path(self, item: Item) -> Path:
        return self.folder / "items" / f"{item.name}.json"

    def read(self, item: Item) -> dict[str, Any] | None:
        """An item's numbers, or None where it is not done; what cannot be read is made again."""
        try:
            return json.loads(self.path(item).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write_index(self) -> None:
        """index.json: what the study is, and each item's name, prompt, seed, layer and whether it is done."""
        done = {path.stem for path in (self.folder / "items").glob("*.json")}
        rows = [
            [item.name, item.config.prompt, item.config.seed, item.layer, item.name in done]
            for item in self.items()
        ]
        index = {"edit": self.edit.to_dict(), "each": self.each, "settings": json.loads(self.settings)}
        with replacing(self.folder / "index.json") as file:
            file.write(json.dumps(index | {"items": rows}, ensure_ascii=False, indent=1).encode() + b"\n")


@dataclass(frozen=True)
class Piece:
    """What is made at a time: one layer of a batch of runs, which are the same whoever makes them."""

    configs: Sequence[RunConfig]
    layer: int | None
    items: Sequence[Item]

    @property
    def name(self) -> str:
        return item_name([item.name for item in self.items])


def pieces_of(study: Study, batch: int) -> dict[str, Piece]:
    """All pieces by their names, those of one batch together."""
    settings, found = study.settings, []
    for start in range(0, len(study.configs), batch):
        configs = study.configs[start : start + batch]
        for layer in study.layers:
            found.append(Piece(configs, layer, [Item(config, layer, settings) for config in configs]))
    return {piece.name: piece for piece in found}


def run(
    study: Study,
    session: Session,
    batch: int,
    say: Callable[[str], None],
    stopping: Callable[[], bool],
    rank: Rank | None = None,
    watch: RunObserver | None = None,
) -> bool:
    """Make what is not done yet, up to batch runs at a time, and nobody else makes -> whether all is done.

    A watch that is asked to stop ends the wait for others too.
    """
    (study.folder / "items").mkdir(parents=True, exist_ok=True)
    session.pipeline.plan(study.configs[0].num_frames).check([study.edit])
    pieces, done = pieces_of(study, batch), set()

    def is_done(name: str) -> bool:
        if name not in done and all(study.read(item) is not None for item in pieces[name].items):
            done.add(name)
        return name in done

    def say_done() -> None:
        count = sum(len(piece.items) for name, piece in pieces.items() if is_done(name))
        say(f"{count} of {sum(len(piece.items) for piece in pieces.values())} items are done")

    say_done()
    runs: direct_effects.Runs | None = None
    with WorkItems(study.folder / "items", rank) as claims:
        for name in claims.claim(list(pieces), is_done, watch):
            piece = pieces[name]
            if runs is None or runs.configs is not piece.configs:
                runs = None  # its tensors leave first
                runs = direct_effects.begin(session, piece.configs)
                floors = direct_effects.floor(runs)
            found = direct_effects.measure(runs, dict(_edits(study, piece.layer)))
            _save(study, runs, piece.layer, floors, found)
            say_done()
            study.write_index()
            if stopping():
                return all(map(is_done, pieces))
    study.write_index()
    return all(map(is_done, pieces))


def units(study: Study) -> list[int]:
    """What an item has a row for: heads, frames, or the one layer."""
    if study.each == "head":
        return list(range(study.num_heads)) if study.edit.heads is None else list(study.edit.heads)
    return list(range(study.configs[0].num_frames)) if study.each == "frame" else [0]


def _edits(study: Study, layer: int | None) -> Iterator[tuple[tuple[str, int], Callable[[int], Edit | None]]]:
    """By ("effect" or "frame_control", unit), the edit of each block."""
    for unit in units(study):
        edit = study.edit if layer is None else replace(study.edit, layers=(layer,))
        if study.each == "head":
            edit = replace(edit, heads=(unit,))
        elif study.each == "frame" and isinstance(edit, (Knockout, Bias, Move)):
            edit = replace(edit, frames=(unit,))
        yield ("effect", unit), partial(_in_every_block, edit)
        some_frames = isinstance(edit, (Knockout, Bias, Move)) and edit.frames not in (("past",), ("own",))
        if some_frames and study.each != "frame":
            salt = f"{layer} {unit}"
            control = direct_effects.on_a_random_frame(edit, study.configs[0].block_sizes, salt)
            yield ("frame_control", unit), control


def _in_every_block(edit: Edit, block: int) -> Edit:
    return edit


def _save(
    study: Study,
    runs: direct_effects.Runs,
    layer: int | None,
    floors: torch.Tensor,
    found: Mapping[tuple[str, int], torch.Tensor],
) -> None:
    settings = study.settings
    for row, config in enumerate(runs.configs):
        values: dict[str, Any] = {
            "prompt": config.prompt,
            "seed": config.seed,
            "layer": layer,
            "floor": floors[row].tolist(),
            "between_seeds": runs.between_seeds[row].tolist(),
        }
        for kind in dict.fromkeys(kind for kind, _ in found):
            values[kind] = [found[kind, unit][row].tolist() for unit in units(study)]
        if layer is not None:
            norms = [
                x[row].mean(0) for (key, _), x in runs.outputs.norms.items() if key[:2] == ("self", layer)
            ]
            values["norm"] = (
                torch.stack(norms).mean(0)[units(study) if study.each == "head" else ...].tolist()
            )
        with replacing(study.path(Item(config, layer, settings))) as file:
            file.write(json.dumps(values).encode() + b"\n")


def merged(study: Study) -> dict[str, Any]:
    """The tensors of a causal atlas, from the items: effects [R, N, U, F] of R runs and the like."""
    rows = [study.read(item) for item in study.items()]
    if missing := sum(row is None for row in rows):
        raise ConfigError(f"{missing} of {len(rows)} items are missing; run the same command again")
    done = [row for row in rows if row is not None]
    shape = (len(study.configs), len(study.layers))

    def stacked(name: str) -> torch.Tensor:
        values = torch.tensor([row[name] for row in done], dtype=torch.float64)
        return values.view(*shape, *values.shape[1:]).float()

    atlas = {"effects": stacked("effect"), "floor": stacked("floor")[:, 0]}
    atlas["between_seeds"] = stacked("between_seeds")[:, 0]
    if "frame_control" in done[0]:
        atlas["frame_control"] = stacked("frame_control")
    if study.each == "head":
        atlas["head_control"] = _of_another_head(atlas["effects"])
        atlas["head_norms"] = stacked("norm")
    return atlas


def _of_another_head(effects: torch.Tensor) -> torch.Tensor:
    """For every head the effect of another one of its layer, drawn at random: [R, N, H, F] -> the same."""
    heads = effects.shape[2]
    if heads < 2:
        return torch.full_like(effects, torch.nan)
    control = torch.empty_like(effects)
    for layer in range(effects.shape[1]):
        for head in range(heads):
            other = random.Random(f"{layer} {head}").choice([n for n in range(heads) if n != head])
            control[:, layer, head] = effects[:, layer, other]
    return control


# --- From flags to a causal atlas: pieces are made until asked to stop, the cache when all are there
ATLAS = "causal_atlas.pt"


def the_edit(path: str | None) -> Edit:
    """The one edit of a file; the default is mean ablation."""
    if path is None:
        return Ablate("mean", passes="denoise")
    edits = read_edits(path)
    if len(edits) != 1:
        raise ConfigError(f"{path} holds {len(edits)} interventions; a causal atlas is of one")
    return edits[0]


def make_atlas(args: argparse.Namespace, configs: Sequence[RunConfig], rank: Rank) -> None:
    """Make what is not done yet of an atlas, and the atlas when all is. Raises StoppedError after Ctrl-C.

    Several ranks make different pieces, and the first of them the atlas; without a launcher each writes it,
    whole and with the same bytes.
    """
    edit, folder = the_edit(args.edit), Path(args.output_dir)
    with_edit = replace(configs[0], interventions=[edit.to_dict()])
    name_inputs(args, with_edit)
    args.files.writes("the atlas", folder / ATLAS)
    args.files.writes("the index", folder / "index.json")
    with (
        Progress(args.quiet, args.log_file) as watch,
        stopping_when_asked(watch, "layer"),
        deterministic(args.deterministic),
    ):
        require_writable(folder / ATLAS)
        files = files_of(with_edit, checkpoint.weights_file(with_edit.ckpt_dir, with_edit.checkpoint_path))
        prompts = list(dict.fromkeys(config.prompt for config in configs))
        session = causal.prepare(configs[0], [], prompts, watch)
        study = Study(
            folder,
            edit,
            args.each,
            configs,
            session.model_config.num_layers,
            session.model_config.num_heads,
            session.sha256.result(),
            str(session.dtype),
            files,
        )
        start = time.monotonic()
        watch.log("rollout", items=sum(1 for _ in study.items()))  # from here on Ctrl-C ends a layer first
        done = run(study, session, args.batch, watch.print, lambda: watch.stopping, rank, watch)
        if not done:
            raise StoppedError("stopped; what is done will not be made again: run the same command to go on")
        if not rank.is_first:
            return
        save_cache(folder / ATLAS, atlas_cache(study, session))
        watch.print(
            f"{folder / ATLAS}: {edit}, each {args.each}: {time.monotonic() - start:.1f} s, {memory()}"
        )


def atlas_cache(study: Study, session: causal.Session) -> dict:
    """The cache of a finished study."""
    first = study.configs[0]
    return {
        **session.common,
        "format": "causal_atlas",
        "prompt": first.prompt,
        "seed": None,
        "weights_sha256": study.weights_sha256,
        "is_logits": False,
        "interventions": record_of([study.edit]),
        "prompts": [config.prompt for config in study.configs],
        "seeds": [config.seed for config in study.configs],
        "each": study.each,
        "layers": [layer or 0 for layer in study.layers],
        "units": units(study),
        **merged(study),
    }

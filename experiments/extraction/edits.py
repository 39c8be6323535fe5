"""Edits of a rollout with what they need: means of a reference set, and runs in step."""

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor

from experiments.caches.files import replacing
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError, short_repr
from wan.files import UnreadableError, load_tensors, load_yaml, read_text
from wan.interventions import (
    Ablate,
    Edit,
    Edits,
    Patch,
    Source,
    edit_from_dict,
    fingerprint,
    intervene,
)
from wan.recorders import HeadOutputs, Key, ReferenceMeans, RunInStep, record_head_outputs

# --- Interventions by name: YAML and CSV files to edits and back. Imports no torch: flags are read with it
MAX_BYTES = 1 << 20  # of a file of edits
MAX_EDITS = 1000


def edits_of(values: Any, where: str) -> list[Edit]:
    """Edits from a list of mappings, as a config's key interventions holds it.

    Raises ConfigError, with the place of the first that is wrong.
    """
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ConfigError(f"{where}: interventions are a list: - {{edit: knockout, frames: first, ...}}")
    if len(values) > MAX_EDITS:
        raise ConfigError(f"{where}: {len(values)} interventions, at most {MAX_EDITS} are read")
    edits = []
    for number, each in enumerate(values, 1):
        try:
            edits.append(edit_from_dict(each))
        except ConfigError as error:
            raise ConfigError(f"{where}: intervention {number}: {error}") from None
    return edits


def read_edits(path: str | Path) -> list[Edit]:
    """Edits from a YAML file: a list of them, or a mapping with the key interventions."""
    values = load_yaml(path, "interventions", MAX_BYTES)
    if isinstance(values, Mapping):
        if set(values) != {"interventions"}:
            raise ConfigError(f"{path}: it may hold the key interventions and nothing else")
        values = values["interventions"]
    edits = edits_of(values, str(path))
    if not edits:
        raise ConfigError(f"{path} holds no intervention; write - {{edit: knockout, frames: first, ...}}")
    return edits


def sources_of(edits: Sequence[Edit]) -> list[str]:
    """What edits take values from: files of means, and weights of runs in step, "base" among them."""
    sources = [edit.source for edit in edits if isinstance(edit, (Ablate, Patch))]
    found = [source.weights if isinstance(source, Source) else source for source in sources]
    return [str(file) for file in found if file is not None]


def to_yaml(edits: Sequence[Edit]) -> str:
    """The text of a file that read_edits reads."""
    said = {"interventions": [edit.to_dict() for edit in edits]}
    plain = json.loads(json.dumps(said))  # nothing stands in it twice, so that no alias is written
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def read_ablated_heads(
    path: str | Path, num_layers: int, num_heads: int, passes: str, how: str = "zero"
) -> list[Edit]:
    """Ablate edits from a CSV of layers x heads without headings: 1 drops a head, 0 keeps it.

    Raises ConfigError for another shape, naming the model's, and for other values.
    """
    lines = read_text(path, MAX_BYTES).splitlines()
    try:
        rows = [row for row in csv.reader(lines) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ConfigError(f"{path} is not a CSV of layers x heads: {error}") from None
    widths = sorted({len(row) for row in rows})
    if len(rows) != num_layers or widths != [num_heads]:
        shape = f"{len(rows)} x {' or '.join(map(str, widths[:3])) or 0}"
        raise ConfigError(f"{path} is {shape}; this model has {num_layers} layers x {num_heads} heads")
    edits: list[Edit] = []
    for layer, row in enumerate(rows):
        for head, cell in enumerate(row):
            if cell.strip() not in ("0", "1"):
                raise ConfigError(f"{path}: layer {layer}, head {head}: {cell.strip()[:20]!r} is not 0 or 1")
        heads = [head for head, cell in enumerate(row) if cell.strip() == "1"]
        if heads:
            edits.append(Ablate(how, layers=(layer,), heads=tuple(heads), passes=passes))
    if not edits:
        raise ConfigError(f"{path} drops no head: every value is 0")
    return edits


def record_of(edits: Sequence[Edit]) -> dict[str, Any]:
    """Return what caches say of edits: the values, one line, and the hash that tells them apart."""
    return {
        "edits": [edit.to_dict() for edit in edits],
        "words": "; ".join(map(str, edits)),
        "hash": fingerprint(edits),
    }


# --- Mean outputs of heads over a reference set of unedited runs, made once, in cache/reference_means
if TYPE_CHECKING:
    from experiments.extraction.causal import Session

FOLDER = Path("cache/reference_means")
SEEDS = (0, 1)


def reference_means(session: "Session", config: RunConfig, path: object = None) -> ReferenceMeans:
    """The means of a config's model over its reference_prompts and two seeds, or those of a named file."""
    if isinstance(path, (str, Path)):
        return ReferenceMeans(_read(Path(path), session.model_config))
    kept = FOLDER / f"{_name(session, config)}.pt"
    if kept.is_file():
        return ReferenceMeans(_read(kept, session.model_config))
    runs = []
    for prompt in config.reference_prompts:
        for seed in SEEDS:
            one = replace(config, prompt=prompt, seed=seed)
            with record_head_outputs() as outputs:
                session.rollout(one)
            runs.append(outputs)
    means = ReferenceMeans.over(runs)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with replacing(kept) as file:
        torch.save({"|".join(map(str, key)): values for key, values in means.values.items()}, file)
    return means


def _name(session: "Session", config: RunConfig) -> str:
    """16 digits of the hash of what the means depend on."""
    said = {
        "weights": session.sha256.result(),
        "dtype": str(session.dtype),
        "prompts": list(config.reference_prompts),
        "seeds": SEEDS,
        "config": session.common["config"],
        "files": session.common["files"],  # also the LoRA and the text encoder
        "blocks": config.block_sizes,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def require_means(path: str | Path) -> None:
    """Raise ConfigError where a file of means is not there."""
    if not Path(path).is_file():
        raise ConfigError(
            f"{path} not found; leave source out, and the run makes the means of its reference_prompts"
        )


def _read(path: Path, sizes: ModelConfig) -> Mapping[Key, Tensor]:
    require_means(path)
    try:
        values = load_tensors(path, False)
        keys = {name: name.split("|") for name in values}
        means = {
            (kind, int(layer), int(step), branch): values[name]
            for name, (kind, layer, step, branch) in keys.items()
        }
    except (OSError, UnreadableError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read as means of head outputs: {error}; remove it") from None
    wanted = (sizes.num_heads, sizes.head_dim)
    for values in means.values():
        if not isinstance(values, Tensor) or not values.is_floating_point() or values.ndim != 3:
            raise ConfigError(
                f"{path} holds no means of head outputs; leave source out, or name another file"
            )
        if tuple(values.shape[1:]) != wanted:
            raise ConfigError(
                f"{path} has means of {values.shape[1]} heads of {values.shape[2]} numbers, this model has "
                f"{wanted[0]} of {wanted[1]}; leave source out, or name a file of this model's"
            )
    return means


# --- Edits of a rollout with what they need: means of a reference set, and runs in step
if TYPE_CHECKING:
    from experiments.extraction.causal import Session


@contextmanager
def edited(session: "Session", config: RunConfig, edits: Sequence[Edit]) -> Iterator[Edits | None]:
    """Make edits while a rollout of config runs, with the means and the runs in step that they need."""
    if not edits:
        yield None
        return
    session.pipeline.plan(config.num_frames, prompt_schedule=config.switches).check(edits)
    check_sources(edits, config)
    with ExitStack() as stack:
        data = dict(_data_of(session, config, edits, stack))
        yield stack.enter_context(intervene(*edits, data=data))


def check_sources(edits: Sequence[Edit], config: RunConfig) -> None:
    """Raise ConfigError, with the command that makes it, where a file that an edit needs is not there, where
    a run in step would take the edited run's streamed layers, and where --prompt_embeds lacks a prompt.
    """
    for edit in edits:
        source = edit.source if isinstance(edit, (Ablate, Patch)) else None
        _check_prompt(edit, source, config)
        if isinstance(source, str):
            require_means(source)
        weights = source.weights if isinstance(source, Source) else None
        if config.offload and isinstance(source, Source) and weights is None:
            raise ConfigError(f"streamed layers cannot serve two runs in step; leave offload out for {edit}")
        if weights not in (None, "base") and not Path(str(weights)).is_file():
            raise ConfigError(
                f"source: weights {weights} not found; bash experiments/download_weights.sh gets the "
                "released ones, python experiments/train_mini.py --stage causal makes the miniature's"
            )


def _check_prompt(edit: Edit, source: object, config: RunConfig) -> None:
    """Raise ConfigError for an edit that needs a prompt which is not that of a config's prompt_embeds."""
    if not config.prompt_embeds:
        return
    if isinstance(edit, Ablate) and edit.how == "mean" and source is None:
        needed = "the reference prompts of a mean; name a file of means as its source"
    elif isinstance(source, Source) and source.prompt not in (None, config.prompt):
        needed = f"the source's {short_repr(source.prompt)}; leave --prompt_embeds out"
    else:
        return
    raise ConfigError(f"{config.prompt_embeds} holds the states of one prompt, and {edit} needs {needed}")


def plain_edits_of(config: RunConfig) -> list[Edit]:
    """The edits of a run of the base model, which has no means of a reference set and no runs in step."""
    edits = edits_of(config.interventions, "config")
    for edit in edits:
        if edit.needs:
            raise ConfigError(
                f"runs of the base model cannot make this edit, which needs {edit.needs}: {edit}"
            )
    return edits


@contextmanager
def plainly_edited(edits: Sequence[Edit]) -> Iterator[None]:
    """Make edits that need nothing, or none, while the context lasts."""
    with intervene(*edits) if edits else nullcontext():
        yield


def _data_of(
    session: "Session", config: RunConfig, edits: Sequence[Edit], stack: ExitStack
) -> Iterator[tuple[Edit, object]]:
    runs: dict[Source, RunInStep] = {}
    own: HeadOutputs | None = None
    for edit in edits:
        source = edit.source if isinstance(edit, (Ablate, Patch)) else None
        if isinstance(source, Source):
            if source not in runs:
                runs[source] = stack.enter_context(run_of(session, config, source))
            yield edit, runs[source]
        elif isinstance(edit, Ablate) and edit.how == "frame_mean":
            own = own or _own_means(session, config)
            yield edit, own
        elif isinstance(edit, Ablate) and edit.how == "mean":
            yield edit, reference_means(session, config, source)


def _own_means(session: "Session", config: RunConfig) -> HeadOutputs:
    with record_head_outputs() as outputs:
        session.rollout(config)
    return outputs


def run_of(session: "Session", config: RunConfig, source: Source) -> RunInStep:
    """The run in step that a source names."""
    other = replace(
        config,
        prompt=config.prompt if source.prompt is None else source.prompt,
        seed=config.seed if source.seed is None else source.seed,
    )
    if source.weights is not None:
        path = None if source.weights == "base" else source.weights
        session = session.with_weights(replace(other, checkpoint_path=path))
    return RunInStep(lambda: session.rollout(other))

"""Edits of a rollout with what they need: means of a reference set, and runs in step."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.extraction.edit_files import edits_of
from experiments.extraction.reference_means import reference_means, require_means
from wan.config import RunConfig
from wan.errors import ConfigError, quoted
from wan.modules.edits import Edits, intervene, needed_by
from wan.modules.head_outputs import HeadOutputs, record_head_outputs
from wan.modules.interventions import Ablate, Edit, Patch, Source
from wan.modules.run_in_step import RunInStep

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
        needed = f"the source's {quoted(source.prompt)}; leave --prompt_embeds out"
    else:
        return
    raise ConfigError(f"{config.prompt_embeds} holds the states of one prompt, and {edit} needs {needed}")


def plain_edits_of(config: RunConfig) -> list[Edit]:
    """The edits of a run of the base model, which has no means of a reference set and no runs in step."""
    edits = edits_of(config.interventions, "config")
    for edit in edits:
        if needed_by(edit):
            raise ConfigError(
                f"runs of the base model cannot make this edit, which needs {needed_by(edit)}: {edit}"
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

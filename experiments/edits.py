"""What edits need of a session: means over a reference set, unedited outputs, and runs in step.

    with edited(session, config, config_edits(config)):
        session.rollout(config)

Only a run with edits imports this.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.caches import files
from experiments.progress import Progress
from experiments.provenance import fingerprint, of_any_prompt
from wan import interventions
from wan.config import ModelConfig, RunConfig
from wan.errors import library_reads
from wan.files import load_tensors
from wan.sites import observed, require_no_data

if TYPE_CHECKING:
    from experiments.session import Session

MEANS = Path("cache/reference_means")
MEANS_SEEDS = (0, 1)


@contextmanager
def edited(
    session: Any, config: RunConfig, edits: Sequence[interventions.Edit], batch: int = 1
) -> Iterator[interventions.Edits | None]:
    """Make edits while a rollout of config runs, with the means and the runs in step that they need.

    Those of one's own intervene() around this get what they lack, too.
    """
    outer_edits = [active for active in session.watchers() if isinstance(active, interventions.Edits)]
    lacking = [
        edit for active in outer_edits for edit in active.edits if edit.needs and edit not in active.data
    ]
    if batch > 1:
        require_no_data((*edits, *lacking), "videos that are made together")
    if edits:
        sizes = session.pipeline.sizes(config.num_frames)
        for edit in edits:
            edit.check(sizes)
    with ExitStack() as stack:
        # What they need: runs by source and unedited outputs by sites, which several edits share
        data, sources = dict[interventions.Edit, object](), dict[Any, Any]()
        for edit in (*edits, *lacking):
            edit.check_source(config)
        for edit in (*edits, *lacking):
            source, how = (
                getattr(edit, "source", None),
                edit.how if isinstance(edit, interventions.Ablate) else None,
            )
            if isinstance(source, interventions.Source):
                if source not in sources:
                    sources[source] = stack.enter_context(run_of(session, config, source))
                data[edit] = sources[source]
            elif how == "mean":
                data[edit] = reference_means(session, config, source, edit.sites)
            elif how == "frame_mean":
                if edit.sites not in sources:
                    sources[edit.sites] = _head_outputs(session, config, edit.sites)
                data[edit] = sources[edit.sites]
        for active in outer_edits:
            stack.callback(setattr, active, "data", active.data)
            active.data = {edit: data[edit] for edit in active.edits if edit in data} | active.data
        yield stack.enter_context(interventions.intervene(*edits, data=data)) if edits else None


def run_of(session: "Session", config: RunConfig, source: interventions.Source) -> interventions.RunInStep:
    """Return the run in step that a source names."""
    session, other = source_of(session, config, source)
    return interventions.RunInStep(lambda: session.rollout(other))


def source_of(session: Any, config: Any, source: interventions.Source) -> tuple[Any, Any]:
    """Return the session and config that make the run that a source names."""
    changes = {
        name: getattr(source, name) for name in ("prompt", "seed") if getattr(source, name) is not None
    }
    other = replace(config, **changes)
    if source.weights is not None:
        other = replace(other, checkpoint_path=None if source.weights == "base" else source.weights)
        session = session.with_weights(other)
    return session, other


def _head_outputs(session: "Session", config: RunConfig, sites: Sequence[str]) -> interventions.HeadOutputs:
    def unedited() -> interventions.HeadOutputs:
        with interventions.record_head_outputs(*sites) as outputs, observed():
            session.rollout(config)
        return outputs

    return Context().run(unedited)  # without anybody's edits


@dataclass(frozen=True)
class MeanRuns:
    """The rollouts of a config's reference set, an item each (the Work of extraction/sweep.py)."""

    session: "Session"
    config: RunConfig
    sites: Sequence[str] = ("z",)

    @property
    def recorded(self) -> tuple[str, ...]:
        return (
            interventions.HeadOutputs.sites
            if set(self.sites) <= set(interventions.HeadOutputs.sites)
            else tuple(self.sites)
        )

    @cached_property
    def runs(self) -> list[RunConfig]:
        plain = replace(self.config, prompt_schedule=None, interventions=[])
        prompts = self.config.reference_prompts
        return [replace(plain, prompt=prompt, seed=seed) for prompt in prompts for seed in MEANS_SEEDS]

    @cached_property
    def made_of(self) -> str:
        plain = replace(of_any_prompt(self.config), prompt_schedule=None, interventions=[])
        details: dict[str, Any] = {"mean_seeds": MEANS_SEEDS}
        if self.recorded != interventions.HeadOutputs.sites:
            details["sites"] = self.recorded
        if self.session.kind == "pipeline":  # the identity of a causal run has them
            details["reference_prompts"] = list(self.config.reference_prompts)
        return fingerprint(self.session.identity(plain, [], **details))

    @property
    def path(self) -> Path:
        return MEANS / f"{self.made_of}.pt"

    def name(self, run: RunConfig) -> str:
        return fingerprint({"means": self.made_of, "prompt": run.prompt, "seed": run.seed})

    def part(self, run: RunConfig) -> Path:
        return MEANS / self.made_of / f"{self.name(run)}.pt"

    def read(self, run: RunConfig) -> dict[tuple[interventions.Key, int], Tensor] | None:
        """Return the means of a run that is done."""
        content = files.finished(self.part(run), self.name(run), "remove it")
        return None if content is None else content["means"]

    def are_done(self) -> bool:
        return files.finished(self.path, self.made_of, "remove it") is not None

    def is_done(self, run: RunConfig) -> bool:
        return self.are_done() or self.read(run) is not None

    def make(self, run: RunConfig, watch: Progress) -> None:
        """Roll out a run and write its mean outputs, which reference_means takes."""
        means = _head_outputs(self.session, run, self.recorded).means
        with files.replacing(self.part(run)) as file:
            torch.save({"means": means, "fingerprint": self.name(run)}, file)


def reference_means(
    session: "Session", config: RunConfig, path: object = None, sites: Sequence[str] = ("z",)
) -> interventions.ReferenceMeans:
    """Return mean outputs over a config's reference_prompts, kept on disk, or a named file's."""
    if isinstance(path, (str, Path)):
        return interventions.ReferenceMeans(_read_means(Path(path), session.model_config))
    runs = MeanRuns(session, config, sites)
    if runs.are_done():
        return interventions.ReferenceMeans(_read_means(runs.path, session.model_config, runs.made_of))
    outputs = []
    for run in runs.runs:
        of_worker = runs.read(run)
        if of_worker is None:
            outputs.append(_head_outputs(session, run, runs.recorded))
        else:
            outputs.append(interventions.HeadOutputs(means=of_worker))
    means = interventions.ReferenceMeans.over(outputs)
    by_name = {"|".join(map(str, key)): values for key, values in means.values.items()}
    with files.replacing(runs.path) as file:
        torch.save({**by_name, "fingerprint": runs.made_of}, file)
    shutil.rmtree(MEANS / runs.made_of, ignore_errors=True)
    return means


def _read_means(path: Path, sizes: ModelConfig, made_of: str = "") -> dict[interventions.Key, Tensor]:
    """Read a file of means: any that is named (made_of is empty), or one that was made of this."""
    wanted, means = [sizes.num_heads, sizes.head_dim], dict[interventions.Key, Tensor]()
    remedy = "name another file"
    if made_of:
        remedy = "remove it"
    with library_reads(f"{path}: means of head outputs", remedy=remedy):
        content = dict(load_tensors(path, mmap=False))
        fingerprint = content.pop("fingerprint", None)
        for name, values in content.items():
            kind, layer, step, branch = name.split("|")
            if not values.is_floating_point() or (
                kind in ("self", "cross") and [*values.shape[1:]] != wanted
            ):
                raise ValueError(
                    f"it holds no means of this model's {wanted[0]} heads of {wanted[1]} numbers"
                )
            means[kind, int(layer), int(step), branch] = values
    if made_of:
        files.require_same(path, fingerprint, made_of, remedy)
    return means

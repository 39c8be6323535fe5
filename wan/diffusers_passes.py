"""Which pass a forward of diffusers' transformers is: its chunk of frames, step, evaluation and branch.

    told = told_of(model, None)             # what its pipeline knows, in the forward's call
    told.step, told.branch                  # 3, "cond"

Whoever knows it says it: the pipeline names the branch to transformer.cache_context, its scheduler has the
step, and variables of the method that calls the transformer have the rest: chunks, guiders' branches, how
many references lie in front. Nothing is inferred from the order of calls, and what nobody says is None.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from wan import compiled, sites
from wan.diffusers_frames import Variables, VideoTokens

TRANSFORMERS = ("transformer", "transformer_2")  # names in pipelines; Wan2.2 has two experts

# The names of guidance's branches -> ours. A joint call has a batch of both, the negative prompt's first.
BRANCHES = {"pred_cond": "cond", "pred_uncond": "uncond"}
JOINT_BRANCHES = "cond_uncond"

Parts = tuple[tuple[sites.Pass, slice], ...]  # the passes of a forward, with their items of the batch


class Context(NamedTuple):
    """What a pipeline tells transformer.cache_context."""

    model: int  # the transformer's id
    name: str
    step: int | None


_CONTEXT: ContextVar[Context | None] = ContextVar("cache_context", default=None)


@contextmanager
def telling(model: int, original: Callable[..., Any], name: str, **options: Any) -> Any:
    """Run cache_context and remember the branch that the pipeline names while it lasts."""
    before = _CONTEXT.get()
    _CONTEXT.set(Context(model, name, options.get("step_index")))
    try:
        with original(name, **options):
            yield
    finally:
        _CONTEXT.set(before)


def forget(model: int) -> None:
    """Drop what is told to a model's cache_context: its context was never left."""
    context = _CONTEXT.get()
    if context is not None and context.model == model:
        _CONTEXT.set(None)


# --- What a pipeline's variables say
class Place(NamedTuple):
    """Where a loop stands: the number of its chunk of frames, that chunk's first frame, the step in it."""

    block: int
    start: int
    step: int


def _of_helios(variables: Variables) -> Place:
    """Chunks follow each other; a given image or video comes before them. Stages continue the steps."""
    frames, start = variables["num_latent_frames_per_chunk"], variables["total_generated_latent_frames"]
    given = 0
    if variables.get("fake_image_latents") is not None:
        given += 1
    if variables.get("video_latents") is not None:
        given += variables["video_latents"].shape[2]
    step = variables["i"]
    steps = variables.get("pyramid_num_inference_steps_list")
    if steps is not None:  # of which the first chunk may make several times as many
        times = variables["num_inference_steps"] // sum(steps)
        step += times * sum(steps[: variables["stage_idx"]])
    return Place((start - given) // frames, start, step)


def _of_diffusion_forcing(variables: Variables) -> Place:
    """Parts of a long video overlap; a part may see a window of its frames."""
    start, before = variables["valid_interval_start"], variables.get("accumulated_latents")
    if before is not None:
        start += before.shape[2] - variables["overlap_history_latent_frames"]
    return Place(variables["iter_idx"], start, variables["i"])


def _of_windows(variables: Variables) -> Place:
    return Place(variables["w_idx"], variables["w_start"], variables["i"])


def _of_guiders(variables: Variables) -> Place:
    return Place(0, 0, variables["i"])


# By a variable that tells the loop from others
LOOPS: dict[str, Callable[[Variables], Place]] = {
    "total_generated_latent_frames": _of_helios,
    "valid_interval_start": _of_diffusion_forcing,
    "w_start": _of_windows,
    "guider_state_batch": _of_guiders,
}


@dataclass(frozen=True)
class Told:
    """What is known of a forward from outside of it."""

    pipeline: Any = None
    name: str | None = None  # of the transformer in the pipeline
    variables: Variables = field(default_factory=dict)
    context: Context | None = None
    place: Place | None = None

    @property
    def is_in_loop(self) -> bool:
        """True where the pipeline runs; a loop of one's own around its transformer tells nothing."""
        in_loop = getattr(self.pipeline, "_current_timestep", None) is not None
        return in_loop or self.context is not None or bool(self.variables)

    @property
    def step(self) -> int | None:
        """The index of the sampler's step; None: nobody says it."""
        if self.context is not None and self.context.step is not None:
            return self.context.step
        if self.place is not None:
            return self.place.step
        if self.is_in_loop:
            return scheduler_step(self.pipeline)
        return None


def told_of(model: nn.Module, pipeline: Any, name: str | None = None) -> Told:
    """Return what is known of the forward of a model that is called now, by the pipeline that calls it.

    pipeline and name are of that which is watched, where no other is found to call.
    """
    # 1. Variables of the methods of a pipeline that has this model, the innermost first.
    variables: dict[str, Any] = {}
    modules = {kind.__module__ for kind in type(pipeline).__mro__}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("diffusers.") or module in modules:
            local = frame.f_locals
            owner = local.get("components", local.get("self"))
            own_name = _name_in(owner, model)
            if own_name is not None:
                pipeline, name = owner, own_name
                variables = {**local, **variables}
        frame = frame.f_back
    # 2. The branch that was told to this model, and the place of its loop.
    context = _CONTEXT.get()
    if context is not None and context.model != id(model):
        context = None
    for key, place_of in LOOPS.items():
        if key in variables:
            return Told(pipeline, name, variables, context, place_of(variables))
    return Told(pipeline, name, variables, context)


def _name_in(owner: Any, model: nn.Module) -> str | None:
    """Return the name of a model in a pipeline; None where it is not in it."""
    if owner is None or isinstance(owner, nn.Module):
        return None
    for name in TRANSFORMERS:
        if compiled.plain(getattr(owner, name, None)) is model:
            return name
    return None


def scheduler_step(pipeline: Any) -> int | None:
    """Return the index in scheduler.timesteps of the step that a pipeline makes; None: it has no such."""
    scheduler = getattr(pipeline, "scheduler", None)
    if scheduler is None or not hasattr(scheduler, "step_index"):
        return None
    if scheduler.step_index is not None:
        return scheduler.step_index
    # The first step has not begun: it will be that of begin_index, or of its timestep.
    if scheduler.begin_index is not None:
        return scheduler.begin_index
    timestep = getattr(pipeline, "_current_timestep", None)
    if not isinstance(timestep, Tensor) or timestep.numel() != 1 or timestep not in scheduler.timesteps:
        return 0
    return int(scheduler.index_for_timestep(timestep))


# --- The passes of a forward
def passes_of(told: Told, arguments: Mapping[str, Any], video: VideoTokens) -> Parts:
    """Return the passes of a forward, with their items of the batch."""
    timestep, levels = _timesteps(arguments.get("timestep"), video)
    block, step, is_clean = 0, told.step, False
    if told.place is not None:
        block = told.place.block
    # AnyFlow computes the keys of a finished chunk in a pass of their own, after its steps.
    flags = arguments.get("kv_cache_flag") or {}
    if arguments.get("chunk_partition") is not None:
        block = len(arguments["chunk_partition"]) - 1
        is_clean = bool(flags.get("is_cache_step"))
        if is_clean and told.is_in_loop:
            step = told.variables.get("num_inference_steps", len(told.pipeline.scheduler.timesteps))
    at = sites.Pass(
        query_frames=tuple(range(video.start, video.start + video.frames)),
        block=block,
        step=step,
        timestep=timestep,
        is_clean_pass=is_clean,
        branch=None,
        model=told.name,
        levels=levels,
    )
    return _branches(told, at, arguments)


def _timesteps(timestep: Any, video: VideoTokens) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the largest timestep of a forward, and each frame's where they are given by frame or token."""
    if timestep is None:
        return 0.0, ()
    t = torch.as_tensor(timestep).float()
    if t.ndim > 2:
        t = t.flatten(1)
    if t.ndim < 2 or t.shape[1] <= 1:
        return float(t.max()), ()
    # Frames of the input that are none of the video's come first; tokens of conditions may come behind.
    first, count = video.skipped, video.skipped + video.frames
    if t.shape[1] != count:
        first, count = video.before, video.before + video.total
    if t.shape[1] < count:
        return float(t.max()), ()
    by_frame = t.amax(0)[first:count].unflatten(0, (video.frames, -1)).amax(1).tolist()
    return max(by_frame), tuple(enumerate(by_frame, video.start))


def _branches(told: Told, at: sites.Pass, arguments: Mapping[str, Any]) -> Parts:
    """Return a pass for each branch of guidance that a forward computes."""
    name, is_guided = None, getattr(told.pipeline, "do_classifier_free_guidance", None)
    items = len(arguments["hidden_states"])
    is_joint = arguments.get("chunk_partition") is not None and told.is_in_loop  # AnyFlow names no branch
    # 1. By name: a context of the transformer, a batch of a guider, or the pipeline's embeddings.
    batch = told.variables.get("guider_state_batch")
    if told.context is not None:
        name = told.context.name
        is_joint = name == JOINT_BRANCHES
    elif batch is not None:
        name = getattr(batch, "__guidance_identifier__", None)
    elif not is_joint:
        name = _branch_of_text(told.variables, arguments.get("encoder_hidden_states"), is_guided)
    if not is_joint:
        branch = None
        if name:
            branch = BRANCHES.get(name, name.removeprefix("pred_"))
        return ((replace(at, branch=branch), slice(None)),)
    # 2. A batch of both: whether guidance doubles it, only the pipeline knows.
    if is_guided is None and items > 1:
        return ((at, slice(None)),)
    if not is_guided:
        return ((replace(at, branch="cond"), slice(None)),)
    half = items // 2
    return (
        (replace(at, branch="uncond"), slice(0, half)),
        (replace(at, branch="cond"), slice(half, items)),
    )


def _branch_of_text(variables: Variables, text: Any, is_guided: bool | None) -> str | None:
    """Return the branch of a forward by the embeddings that its pipeline handed to it."""
    if not variables or text is None:
        return None
    if text is variables.get("negative_prompt_embeds"):
        return "uncond"
    if text is variables.get("prompt_embeds") or is_guided is False:
        return "cond"
    return None


# --- Evaluations: forwards of the same model, block, step and branch
@dataclass(eq=False)
class Evaluations:
    """Counts forwards that nothing else tells apart, anew for each run and each schedule of timesteps."""

    counts: Counter[Any] = field(default_factory=Counter)
    run: object = None
    schedule: ReferenceType[Any] | None = None

    def number(self, parts: Parts, pipeline: Any) -> Parts:
        """Return passes with the number of their evaluation."""
        # 1. A new run counts anew. A pipeline makes a new tensor of timesteps for each.
        timesteps = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        known = None
        if self.schedule is not None:
            known = self.schedule()
        if self.run is not sites.current_run() or (isinstance(timesteps, Tensor) and timesteps is not known):
            self.counts.clear()
            self.run = sites.current_run()
            if isinstance(timesteps, Tensor):
                self.schedule = ref(timesteps)
        # 2. Each pass has a number among its equals.
        numbered = []
        for at, items in parts:
            key = at.model, at.block, at.step, at.branch, at.is_clean_pass
            numbered.append((replace(at, evaluation=self.counts[key]), items))
            self.counts[key] += 1
        return tuple(numbered)

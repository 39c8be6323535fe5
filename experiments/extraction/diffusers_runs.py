"""Runs of diffusers' pipelines: what was captured while they ran, and the atlas that comes of it.

with pipeline_runs(pipe, [CaptureRequest(granularity="frame")]) as runs:
    pipe("a red circle moving right")
pipeline_atlas(runs[0])         # once the context has ended
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.caches.activations import StoredRun
from experiments.caches.files import RunError, require_held
from experiments.caches.formats import READ_BY
from experiments.caches.frames import stack
from experiments.provenance import device_name, record_of, versions
from experiments.runs import Run
from wan.activations import Activation, SiteCapture
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CapturedCall, CaptureRequest
from wan.config import RunConfig
from wan.diffusers_capture import count_layers, transformers_of, watching
from wan.errors import ConfigError
from wan.sites import ActivationSite, active_edits, check_indices, watched


@dataclass(frozen=True, repr=False)
class PipelineRun(Run):
    """One video of somebody's pipeline: what was captured of it. The pipeline returned the video itself."""

    kept: list[Activation] = field(default_factory=list)

    def decoded(self, vae: Any = None) -> Tensor:
        raise RunError("the video is what the pipeline returned; a captured run of a pipeline has none")

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        self.decoded()

    def __repr__(self) -> str:
        return (
            f"PipelineRun: {self.common['model']}, {self.config.prompt!r}, {len(self.records)} captured calls"
        )


@contextmanager
def pipeline_runs(
    x: Any, requests: Sequence[CaptureRequest], watcher: SiteCapture | None = None, layout: Any = None
) -> Iterator[list[PipelineRun]]:
    """Capture the videos of a pipeline, or a transformer: calls that requests ask for, or activations.

    Yields a list that is filled when the context ends, with a run for each item of a batch. A video begins
    where the pipeline encodes a prompt. layout: see wan.diffusers_capture.watching.
    """
    runs: list[PipelineRun] = []
    with ExitStack() as stack:
        models = stack.enter_context(watching(x, layout))
        for model in models.values():
            for request in requests:
                check_indices("layer", request.layers, count_layers(model))
        starts: list[list[Any]] = [[0, 0, None]]  # first call, first activation, prompt
        calls = stack.enter_context(ATTENTION_WEIGHT_CAPTURE.capture(*requests)) if requests else []
        kept = watcher.kept if watcher else []
        if watcher:
            stack.enter_context(watched(watcher))

        def note(prompt: Any) -> None:
            """Note what is encoded; a second encoding before any call belongs to the same video."""
            if starts[-1][:2] != [len(calls), len(kept)]:
                starts.append([len(calls), len(kept), None])
            starts[-1][2] = starts[-1][2] or prompt

        stack.enter_context(noting_prompts(x, note))
        edits = active_edits()
        try:
            yield runs
        finally:  # also of an error: videos before it are whole
            if watcher:
                watcher.flush()
            for (first, seen, prompt), after in pairwise([*starts, [len(calls), len(kept), None]]):
                runs += _runs_of(x, calls[first : after[0]], kept[seen : after[1]], prompt, edits)


@contextmanager
def noting_prompts(x: Any, note: Callable[[Any], None]) -> Iterator[None]:
    """Tell note(prompt) of every video's prompt that a pipeline encodes, before it does.

    Contexts share one function in encode_prompt's place, so they may end in any order.
    """
    if (encode := getattr(x, "encode_prompt", None)) is None:
        yield
        return
    if (notes := getattr(encode, "notes", None)) is None:
        notes, own = list[Callable[[Any], None]](), vars(x).get("encode_prompt")

        @wraps(encode)
        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(encode).bind(*args, **kwargs).arguments | kwargs
            if getattr(x, "_current_timestep", None) is None:  # else a callback's, amid a video
                for each in [*notes]:
                    each(given.get("prompt"))
            return encode(*args, **kwargs)

        encode_prompt.notes, encode_prompt.own = notes, own  # type: ignore[attr-defined]
        x.encode_prompt = encode_prompt
    notes.append(note)
    try:
        yield
    finally:
        notes.remove(note)
        if not notes:
            own = x.encode_prompt.own
            del x.encode_prompt
            if own is not None:
                x.encode_prompt = own


@dataclass(eq=False)
class StepCapture(SiteCapture):
    """Hand on what a step kept when the next begins: a pipeline makes all frames as one block."""

    step: tuple[Any, ...] = ()

    def on_activation(self, x: Tensor, where: ActivationSite) -> None:
        if self.step != (now := (where.step, where.timestep)):
            self.flush()
            self.step = now
        super().on_activation(x, where)


@contextmanager
def streamed_runs(
    x: Any,
    watcher: SiteCapture,
    layout: Any,
    begin: Callable[[dict[str, Any]], StoredRun],
    tables_of: Callable[[list[Activation], int], Any],
) -> Iterator[list[PipelineRun]]:
    """Write the activations of a pipeline's videos as they come, a step in memory at a time.

    begin(facts) returns where a run goes. A pipeline names no seed that would tell a run from others, so each
    video is a run of its own. ConfigError for several videos at once.
    """
    runs, edits = list[PipelineRun](), list[Any]()
    stored: StoredRun | None = None
    prompt: Any = None

    def write(kept: list[Activation]) -> None:
        nonlocal stored
        if watcher.reduce is None and any(len(one.value) > 1 for one in kept):
            raise ConfigError("stream_to= takes a pipeline's videos one after the other, not as a batch")
        if stored is None:
            text = (prompt[0] if isinstance(prompt, list | tuple) else prompt) or ""
            config, common = _facts(x, text, len(kept[0].where.frames), edits)
            stored = begin(common)
            common |= {name: stored.about[name] for name in ("seed", "fingerprint")}
            runs.append(PipelineRun(config, 0, [], torch.empty(0), [], [], common))
        stored.write(tables_of(kept, 0))

    def finish() -> None:
        nonlocal stored, prompt
        watcher.flush()
        if stored is not None:
            if not stopped_early(x):
                stored.finish(None)
            stored, prompt = None, None

    def note(text: Any) -> None:
        nonlocal prompt
        finish()
        prompt = prompt or text

    given = {each.name: getattr(watcher, each.name) for each in fields(watcher) if each.init}
    watcher = StepCapture(**given | {"on_block": write, "kept": []})
    with watching(x, layout), watched(watcher), noting_prompts(x, note):
        edits += active_edits()
        yield runs
    finish()


def stopped_early(x: Any) -> bool:
    """Return whether a pipeline's last video ended before its last step, by an error or on request."""
    scheduler: Any = getattr(x, "scheduler", None)
    step = getattr(scheduler, "step_index", None)
    return step is not None and step < len(scheduler.timesteps)


def _facts(
    x: Any, text: str, frames: int, edits: Sequence[Any], tokens: int = 1, heads: int = 1, head_dim: int = 1
) -> tuple[RunConfig, dict[str, Any]]:
    """Return what is known of a pipeline's video: as settings, and the fields that its caches share."""
    model = next(iter(transformers_of(x).values()))
    sizes: dict[str, Any] = {"num_frames": frames, "num_frame_per_block": frames}
    return RunConfig(model=name_of(x), prompt=text, **sizes), {
        **{"schema_version": 1, "read_by": READ_BY, "prompt": text, "seed": None},
        **{"num_frames": frames, "num_frame_per_block": frames, "block_sizes": [frames]},
        **{"frame_seq_length": tokens, "num_heads": heads, "head_dim": head_dim},
        **{"model": name_of(x), "weights": "unknown", "weights_file": None, "weights_sha256": None},
        "fingerprint": None,  # nobody knows all that its numbers depend on
        **{"versions": versions(), "device": device_name(model.device)},
        **{"dtype": str(model.dtype).removeprefix("torch.")},
        **({"interventions": record_of(edits)} if edits else {}),
    }


def _runs_of(
    x: Any, calls: list[CapturedCall], kept: list[Activation], prompt: Any, edits: Sequence[Any]
) -> list[PipelineRun]:
    """Make a run for each item of the batch of one video's calls; none where nothing was captured."""
    if not calls and not kept:
        return []
    prompts = [prompt] if not isinstance(prompt, list | tuple) else list(prompt)
    count = max((call.q_shape[0] for call in calls), default=1)
    at = calls[0].at if calls else kept[0].where.at
    frames = len(at.query_frames) if at else 1
    layout = next((call.layout for call in calls if call.layout), None)
    tokens = layout.tokens_per_slot if layout else 1
    heads, head_dim = (calls[0].q_shape[2:]) if calls else (1, 1)
    columns = next((call.k_shape[1] for call in calls if call.site.kind == "cross"), None)
    found = []
    for item in range(count):
        text = prompts[item * len(prompts) // count] or ""
        config, common = _facts(x, text, frames, edits, tokens, heads, head_dim)
        own = calls if count == 1 else [call.of_item(item) for call in calls if item < call.q_shape[0]]
        layers = max(call.site.layer for call in calls) + 1 if calls else 0
        of_item = kept if item == 0 else []  # activations have the whole batch
        latents = torch.empty(0)
        words = words_of(x, text, columns)
        found.append(PipelineRun(config, layers, own, latents, [], words, common, kept=of_item))
    return found


def name_of(x: Any) -> str:
    """Return the repository or folder that a pipeline was read from, or its class."""
    origin = getattr(x.config, "_name_or_path", None) or getattr(x.config, "name_or_path", None)
    return Path(origin).name if origin and Path(origin).is_dir() else origin or type(x).__name__


def words_of(x: Any, prompt: str, columns: int | None) -> list[str]:
    """Return the text of each token of a prompt, cleaned and cut off as the pipeline does before it encodes.

    columns is how many tokens the model attends to. None are returned where there is no tokenizer.
    """
    tokenizer = getattr(x, "tokenizer", None)
    if not tokenizer or not prompt:
        return []
    modules = (sys.modules[kind.__module__] for kind in type(x).__mro__)
    clean = next((module.prompt_clean for module in modules if hasattr(module, "prompt_clean")), str)
    ids = tokenizer(clean(prompt), truncation=columns is not None, max_length=columns).input_ids
    return tokenizer.convert_ids_to_tokens(ids)


def pipeline_atlas(run: Run, branch: str | None = None) -> dict[str, Any]:
    """Return a run's attention by frame, of one branch of guidance; None: cond, or the only one.

    RunError where nobody told the steps of several forwards: an atlas names its passes.
    """
    # 1. The branch.
    branches = list(dict.fromkeys(call.at.branch for call in run.records if call.at))
    chosen = branch or ("cond" if "cond" in branches else branches[0] if branches else None)
    require_held("branch", chosen, branches, "what was captured", RunError)
    mine = Run.of_branch(run, chosen)  # type: ignore[arg-type]
    calls = [call for call in mine.records if "frame_logits" in call.values]
    if not calls:
        raise RunError('an atlas needs frames: capture granularity="frame", of self-attention')
    # 2. Its steps, each of one forward.
    timesteps = {call.at.step: call.at.timestep for call in calls if call.at}
    steps: list[Any] = sorted(timesteps, key=lambda step: step or 0)
    layers = sorted({call.site.layer for call in calls})
    if len(calls) != len(steps) * len(layers):
        raise RunError(
            f"{len(calls)} calls are not one of each of {len(layers)} layers and {len(steps)} steps: capture "
            "the pipeline, which tells its steps, or announce them, "
            "ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=..., step=...))"
        )
    atlas: dict[str, Any] = {
        "format": "atlas",
        "is_logits": True,
        "layers": layers,
        "pass_timesteps": [float(timesteps[step]) for step in steps],
        "pass_is_clean": [False] * len(steps),
        **({"branch": chosen} if chosen else {}),
        **({} if steps == [None] else {"pass_steps": steps}),
    }
    # 3. What was kept of each call, [layers, passes, H, F, ...].
    of_call = {(call.site.layer, call.at.step): call.values for call in calls if call.at}
    for name in ("frame_logits", "frame_mass", "condition_mass", "attended", "frame_logits_by_band"):
        there = [name in values for values in of_call.values()]
        if all(there):
            atlas[name] = stack(lambda *at, name=name: of_call[at][name][0], layers, steps)
    if "cross_mass" in mine.quantities and chosen != "uncond" and (words := len(run.prompt_tokens)):
        rows = stack(lambda *at: mine.captured("cross_mass", *at)[0].values["cross_mass"][0], layers, steps)
        atlas |= {"cross_mass": rows[..., :words], "cross_tokens": run.prompt_tokens}
    return run.common | atlas


def pipeline_requests(
    granularity: Any = "frame",
    layers: list[int] | None = None,
    steps: list[int] | None = None,
    mass: bool = True,
    cross: bool = False,
    rope_bands: bool = False,
    blocks: Any = None,
) -> list[CaptureRequest]:
    """Ask for attention of a pipeline, as capture(session, ...) does; cross is of text and image tokens."""
    if blocks is not None:
        raise ConfigError("a pipeline makes all frames at once: leave blocks out")
    kinds: Any = ("self", "cross", "cross_image") if cross else ("self",)
    request = CaptureRequest(layers, kinds, None, steps, granularity, mass=mass, rope_bands=rope_bands)
    return [request]

"""Look inside a session's videos: capture activations and attention, compare edits, read the x0 lens.

with capture(session, "resid_post", layers=[5]) as captured, intervene(at("z"), lambda z, where: 2 * z):
    run = session.generate("a red circle moving right over a dark blue background", seed=42)
captured["resid_post"].stack()
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy  # scipy.stats is loaded by its first use
import torch
from torch import Tensor

from experiments import caches, memory, pipeline_session
from experiments import words as words_of_prompts
from experiments.analysis import prompt_words
from experiments.analysis.measures import head_statistics
from experiments.analysis.stats import pearson, psnr
from experiments.caches import files, formats, store
from experiments.caches.activations import (
    Activations,
    ActivationStore,
    Place,
    StoredRun,
    chosen_numbers,
    save_activations,
    texts_by_name,
)
from experiments.caches.mp4 import write_mp4
from experiments.caches.titles import conditions_of, ranges, seed_in_words
from experiments.caches.view import Profiles, open_profiles
from experiments.extraction import cache_builders
from experiments.extraction.video import decode
from experiments.lens import PipelineLens
from experiments.runs import CAPTURES, AnySession, Run
from experiments.session import Session, load
from wan import diffusers_capture, errors
from wan import sites as watching
from wan.activations import Activation, SiteCapture
from wan.blocks import VIDEO_FRAMES_PER_LATENT, block_frames
from wan.capture import CapturedCall, CaptureRequest
from wan.config import RunConfig
from wan.identity import identity_of
from wan.interventions import Edits, reusable
from wan.interventions import intervene as edited
from wan.model import sinusoidal_embedding
from wan.pipeline import flow_to_x0
from wan.vae import VAE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Letters of the cache schema; other axes are called as they are there
AXES = {"N": "layers", "P": "passes", "H": "heads", "F": "frames", "L": "key tokens"}
UNITS = {
    "frame_logits": "mean q·k/√D over the token pairs of a query and a key frame",
    "frame_mass": "softmax summed over a key frame's tokens, mean over the query frame's; rows sum to 1",
    "key_curve": "q·k/√D of every key token, mean over the last block's queries",
    "cross_mass": "softmax of cross-attention on every prompt token, mean over a frame's queries",
    "condition_mass": "softmax on every text or image token beside the frames, mean over a frame's queries",
    "frame_logits_by_band": "frame_logits by RoPE band, in logits; the bands sum to them",
    "last_block_frame_logits": "mean q·k/√D, mean over the last block's queries",
}


QUANTITY_OF = {"frame_logits": "mean_logit", "frame_mass": "mass"}  # of views, by the tensor of an atlas


# --- Capture
def as_session(x: Any) -> Any:
    """Return a session as it is, and that of a pipeline or a transformer. ConfigError for anything else."""
    if isinstance(x, AnySession):
        return x
    if pipeline_session.is_pipeline(x):
        return pipeline_session.session_of(x)
    problem = (
        f"{type(x).__name__} is no session, no pipeline of diffusers with a transformer, and no model; "
        f"{pipeline_session.GIVE_A_PIPELINE}"
    )
    if isinstance(x, str | Path):
        problem = f"{errors.short_repr(x)} is a name: open it first, session = load({errors.short_repr(x)})"
    raise errors.ConfigError(problem)


def resolved_steps(session: Any, steps: Sequence[int] | None) -> list[int] | None:
    """Return steps with the number of the last denoising step in place of -1.

    ConfigError where blocks end with different steps, or nobody knows how many there are.
    """
    config = session.config
    if isinstance(session, pipeline_session.PipelineSession) and min(steps or (), default=0) < 0:
        raise errors.ConfigError(
            f"step {min(steps or ())}: a pipeline tells its steps when it runs; name them from 0"
        )
    if -1 not in (steps or ()):
        return None if steps is None else [*steps]
    lasts = {config.base.num_steps - 1}
    if not session.bidirectional:
        lasts = {config.passes_of_block(block)[-2] for block in range(len(config.block_sizes))}
    if len(lasts) > 1:
        raise errors.ConfigError(f"the last steps of blocks are {sorted(lasts)}: name steps, not -1")
    [last] = lasts
    return errors.as_numbers("steps", [last if step == -1 else step for step in steps or ()])


@reusable
def capture(
    session: Any,
    *sites: Any,
    stream_to: str | Path | None = None,
    layout: Any = None,
    words: Any = None,
    each: bool = False,
    **chosen: Any,
) -> Iterator["Captured"]:
    """Capture what happens inside the videos of a session, or of a pipeline of diffusers.

    With sites it keeps activations, without one attention by frame, and with words the mass of a prompt's
    words. Each video of a batch is captured and reduced on its own. Capturing does not change the video.

    Args:
        session: what load() returned, a pipeline of diffusers, or its transformer.
        *sites: names of sites (wan.sites.SITES), such as "resid_post" or "z". A list of numbers in their
            place is layers.
        stream_to: a folder for activations of any number of runs: memory holds one block at a time, and runs
            that the folder has are not repeated.
        layout: where frames lie in a transformer that is not known (wan.diffusers_capture.watching).
        words: of the prompt: captured.words() has their mass on the video, of layers, heads and steps.
        each: keep the maps of words of every head.
        **chosen: layers, blocks, steps, frames and heads, one number or several, all by default; step -1 is
            the last denoising step. Of sites also dtype, to (a device, None to leave values where they
            are), and reduce(x, where) or reduce(x), which returns the value to keep. Of attention also
            granularity ("frame", "key", "token"), mass, key_curve, cross, rope_bands, query_key_means and
            queries, a mask on the video [F, H, W].

    Yields:
        A Captured; its runs are there when the call has returned, of a pipeline when the context has ended.

    Raises:
        ConfigError: for a selection that the model lacks or that does not fit in memory.
        CacheError: for a folder of another capture.

    Examples:
        >>> with capture(session, layers=[1, 5]) as captured:
        ...     run = session.generate("a red circle moving right", seed=42)
        >>> captured.atlas()["frame_mass"].shape  # [layers, passes, heads, frames, frames]
        [2, 5, 12, 6, 6]
    """
    if sites and isinstance(sites[0], list | tuple) and any(isinstance(name, str) for name in sites[0]):
        names = ", ".join(errors.short_repr(name) for name in sites[0])
        raise errors.ConfigError(f"sites are arguments of their own: capture(session, {names})")
    if sites and not isinstance(sites[0], str):  # capture(session, [1, 5]): the layers of an atlas
        chosen["layers"], sites = sites[0], sites[1:]
    for name in {"layers", "blocks", "steps", "frames", "heads"} & {*chosen}:
        chosen[name] = errors.as_numbers(name, chosen[name])
    if stream_to is not None and not sites:
        raise errors.ConfigError(
            'stream_to= takes activations: name a site, as capture(session, "resid_post", ...)'
        )
    session = as_session(session)
    captured = Captured([], None, stream_to)
    chosen["steps"] = resolved_steps(session, chosen.get("steps"))
    with session.opened(layout):
        if words is not None:
            asked = words_of_prompts.WordsAsked.of(words, each, session, sites, chosen)
            check_requests(
                session, [CaptureRequest(layers=asked.layers, steps=asked.steps, granularity="frame")]
            )
            captured.asked_words = asked
        elif sites:
            check_chosen(chosen)
            captured.watcher = SiteCapture(tuple(watching.check_site(name) for name in sites), **chosen)
            check_capture(session, captured.watcher, stream_to is not None)
            if captured.folder is not None:
                captured.folder.require(captured.request)
                captured.folder.require_folder()
        else:
            require_parameters(attention_requests, chosen)
            captured.requests = attention_requests(session, **chosen)
            check_requests(session, captured.requests)
        # An inner capture would leave the outer one without calls.
        others = session.captures()
        of_attention = any(other.requests or other.asked_words for other in others)
        if others and (not session.can_nest or (not sites and of_attention)):
            raise errors.ConfigError(
                f"this {session.kind} is captured already; ask one capture for all layers: layers=[0, 1], or "
                "leave the one that is open first"
            )
        with watching.pushed(CAPTURES, (id(session), captured)), session.beside_calls(captured):
            yield captured


@reusable
def intervene(*edits: Any, data: Any = None, layout: Any = None) -> Iterator[Edits]:
    """Apply edits while the context lasts.

    Args:
        *edits: edits, or at(...) and a function behind it; nested contexts apply outermost first. A session
            or a pipeline of diffusers may come first: only its models are edited then.
        data: by edit, what it takes of an unedited run; a session makes it itself.
        layout: where frames lie in a transformer that is not known (wan.diffusers_capture.watching).

    Yields:
        The edits, with `changed`, the number of calls that each has changed. An edit that changed none is
        warned of, except for a function that was called and returned None.

    Raises:
        ConfigError: for what is no edit.

    Examples:
        >>> with intervene(Knockout(frames="past", layers=[3], heads=[6], passes="all")) as active:
        ...     edited = session.generate("a red circle moving right", seed=42)
        >>> active.changed
        [5]
    """
    if not edits or not (isinstance(edits[0], AnySession) or pipeline_session.is_pipeline(edits[0])):
        with edited(*edits, data=data) as active:
            yield active
        return
    session = as_session(edits[0])
    with session.opened(layout), edited(*edits[1:], data=data, models=session.models_watched) as active:
        yield active


def require_parameters(function: Callable[..., Any], chosen: Collection[str]) -> None:
    """Raise ConfigError for what a capture was asked for and does not know, with the nearest that it does."""
    parameters = inspect.signature(function).parameters
    for name in chosen:
        errors.require_known(name, parameters, "capture knows no {}")


INTERNAL = (
    "sites",
    "on_block",
    "kept",
    "items",
    "newest",
    "by_step",
    "step",
)  # of SiteCapture, not for a caller


def check_chosen(chosen: dict[str, Any]) -> None:
    """Raise ConfigError for values that SiteCapture does not accept; replace a dtype's name by the dtype."""
    known = [each.name for each in fields(SiteCapture) if each.name not in INTERNAL]
    for name in chosen:
        errors.require_known(name, known, "capture of sites knows no {}")
    if isinstance(dtype := chosen.get("dtype"), str):
        chosen["dtype"] = getattr(torch, dtype, dtype)


def attention_requests(
    session: Any,
    granularity: str = "frame",
    layers: list[int] | None = None,
    blocks: list[int] | None = None,
    steps: list[int] | None = None,
    mass: bool = True,
    key_curve: bool = False,
    cross: bool = False,
    rope_bands: bool = False,
    query_key_means: bool = False,
    queries: Any = None,
    heads: list[int] | None = None,
) -> list[CaptureRequest]:
    """Ask for attention: of granularity "frame" for an atlas, or calls of granularity "key" or "token".

    queries is a mask on the video, boolean [F, H, W] in latent or video frames, of tokens or pixels: calls
    keep what each token of it, map_queries [n, 2] (frame, token), sees of every key token, map_logits and
    map_mass [B, heads, n, Lk]; of the pass config.step where steps are not given.

    mass per frame, key_curve (the last block's), cross (of every prompt token), rope_bands, query_key_means
    (before RoPE). A pipeline has the first six and rope_bands.
    """
    config = session.config
    if isinstance(session, pipeline_session.PipelineSession):
        if heads is not None:
            raise errors.ConfigError("heads go with a site, or with words=; attention has all heads")
        absent = {"blocks": blocks, "key_curve": key_curve, "query_key_means": query_key_means}
        for name, value in (absent | {"queries": queries}).items():
            if value is not None and value is not False:
                raise errors.ConfigError(
                    f"{name} belong to causal models; a pipeline makes all frames at once: leave {name} out"
                )
        request = CaptureRequest(
            layers=layers,
            steps=steps,
            granularity=granularity,  # type: ignore[arg-type]
            mass=mass,
            rope_bands=rope_bands,
        )
        if cross:
            request = replace(request, kinds=("self", "cross", "cross_image"))
        return [request]
    if queries is not None:
        grid = cache_builders.token_grid(config)
        places = cache_builders.patches_of_mask(queries, config)
        return cache_builders.map_requests(config, grid, places, layers, heads, blocks, steps, words=cross)
    if heads is not None:
        raise errors.ConfigError("heads go with a site, or with queries=; attention has all heads")
    # An atlas has its layers in any order; calls, and passes, come in the order of the rollout
    is_atlas = granularity == "frame" and blocks is steps is None
    for name, numbers in (("layers", layers), ("blocks", blocks), ("steps", steps)):
        if not (is_atlas and name == "layers"):
            errors.require_ascending(name, numbers, "calls come in the order of the rollout")
    if is_atlas:
        return cache_builders.atlas_requests(
            config, mass, key_curve, cross, rope_bands, query_key_means, layers
        )
    kinds: Any = ("self", "cross") if cross else ("self",)
    level: Any = granularity
    return [CaptureRequest(layers, kinds, blocks, steps, level, mass=mass, rope_bands=rope_bands)]


def check_requests(session: Any, requests: Sequence[CaptureRequest]) -> None:
    """Raise ConfigError for layers, blocks or passes that a run of the session lacks."""
    if not isinstance(session, pipeline_session.PipelineSession):
        memory.check_requests(session.config, session.model_config, requests)
        return
    for model in session.models.values():
        diffusers_capture.check_requests(model, requests)


def check_capture(session: Any, watcher: SiteCapture, streams: bool) -> None:
    """Raise ConfigError for a selection that a run lacks or that does not fit in memory."""
    config, model, sites = session.config, session.model_config, {*watcher.sites}
    if watcher.heads is not None and not sites & watching.OF_HEADS:
        raise errors.ConfigError(f"{watcher.sites[0]} has no heads: leave heads out")
    if watcher.layers is not None and sites <= {*watching.OF_FORWARD}:
        raise errors.ConfigError(f"{watcher.sites[0]} belongs to no layer: leave layers out")
    if isinstance(session, pipeline_session.PipelineSession):  # steps and frames are known when it runs
        watching.check_indices("layer", watcher.layers, model.num_layers)
        watching.check_indices("head", watcher.heads, model.num_heads)
        gpus = session.place_among_gpus[1]
        if streams and gpus > 1:
            raise errors.ConfigError(
                f"the processes of {gpus} GPUs would write to one folder: leave stream_to out, save in rank 0"
            )
        return
    there = {"layers": model.num_layers, "blocks": len(config.block_sizes), "steps": config.num_passes}
    with errors.in_context(config.model):
        for name, count in (there | {"frames": config.num_frames, "heads": model.num_heads}).items():
            watching.check_indices(name.removesuffix("s"), getattr(watcher, name), count)
    if watcher.reduce is None and watcher.to == "cpu":
        parts = {"activations": memory.bytes_of_sites(config, model, watcher, streams)}
        need = memory.Need(f"capturing {', '.join(watcher.sites)}", "host", parts)
        remedy = "choose layers, blocks, steps or frames, a dtype, reduce=, or stream_to= a folder"
        memory.require_memory(config.model, [need], memory.free_memory(session.device), remedy)


def tables(
    kept: Sequence[Activation], is_reduced: bool = False, chosen: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Activations]:
    """Return the captured activations of one video, a table per site; chosen: see Activations."""
    by_site: dict[str, tuple[list[Place], list[Tensor]]] = {}
    for activation in kept:
        at = activation.where
        places, values = by_site.setdefault(at.site, ([], []))
        place = Place(
            layer=at.layer,
            block=at.block,
            step=at.step,
            frames=tuple(at.frames) if activation.frames is None else activation.frames,
            is_clean_pass=at.is_clean_pass,
            timestep=at.timestep,
            branch=at.branch,
            evaluation=at.evaluation,
            model=at.at.model,
        )
        places.append(place)
        values.append(activation.value)
    return {
        site: Activations(site, tuple(places), tuple(values), is_reduced, chosen or {})
        for site, (places, values) in by_site.items()
    }


def is_seen(session: Session) -> bool:
    """Return whether edits, other captures or hooks also see the session's forwards."""
    hooks = "_forward_hooks", "_forward_pre_hooks"
    has_hooks = any(getattr(part, name) for part in session.model.modules() for name in hooks)
    return bool(has_hooks or watching.watchers() or watching.observer())


class Captured:
    """The runs generated in a capture's context, and calls, sites and atlas of the last one.

    Attributes:
        runs: every run of the context, in order.

    Examples:
        >>> with capture(session, "resid_post", layers=[5], steps=[0]) as captured:
        ...     run = session.generate("a red circle moving right", seed=42)
        >>> captured["resid_post"].stack().shape  # [layers, blocks, steps, B, L, dim]
        [1, 2, 1, 1, 48, 192]
        >>> captured.keys()
        ["resid_post"]
    """

    def __init__(
        self, requests: Sequence[CaptureRequest], watcher: SiteCapture | None, folder: str | Path | None
    ):
        self.requests, self.watcher = list(requests), watcher
        self.folder = None if folder is None else ActivationStore(folder)
        self.asked_words: words_of_prompts.WordsAsked | None = None
        self.runs: list[Run] = []

    def roll_out(
        self,
        session: Session,
        configs: Sequence[RunConfig],
        make: Callable[[AbstractContextManager[None]], list[Run]],
        has_frames_by_value: bool = False,
    ) -> list[Run]:
        """Generate runs and keep the requested values of each, in memory or in the folder."""
        recording = Recording(self, session, configs)
        if self.folder is not None:
            if has_frames_by_value:
                raise errors.ConfigError("runs of a folder are told apart by files: give first_frames as one")
            # What is whole is read, unless somebody else wants to see the run again.
            facts = session.facts_of(configs)
            recording.begin(facts)
            if not recording.missing and not is_seen(session) and not configs[0].first_frames:
                runs = [
                    Run(
                        config=config,
                        num_layers=session.model_config.num_layers,
                        records=[],
                        latents=stored.latents,
                        pass_timesteps=session.pipeline.pass_timesteps,
                        prompt_tokens=session.texts[config.prompt][1],
                        common=common,
                        preview=session.preview,
                    )
                    for config, stored, common in zip(configs, recording.stored, facts, strict=True)
                ]
                self.runs += runs
                return runs
        runs = make(recording.watching())
        recording.finish(runs)
        return runs

    def requests_of(
        self, numbers_of: Callable[[Sequence[str]], prompt_words.Numbers]
    ) -> list[CaptureRequest]:
        """Return what is captured of attention; numbers_of finds words in the tokens of the prompts."""
        if self.asked_words is None:
            return self.requests
        return [self.asked_words.request(numbers_of(self.asked_words.words))]

    def words(self, run: Run | None = None, direction: str = "video_to_text") -> "words_of_prompts.WordMaps":
        """Return the maps of the words that were asked for.

        Args:
            run: one of the context's; None: the last.
            direction: "video_to_text", the mass that the video's queries give to a word; "text_to_video",
                what a word's own tokens see, which joint attention alone has.

        Raises:
            ConfigError: where no words were asked for.
        """
        if self.asked_words is None:
            raise errors.ConfigError('no words were asked for: capture(session, words=["circle"])')
        asked = self.asked_words
        run = run or self._last()
        if not isinstance(run, Run):
            raise errors.ConfigError(f"words takes a run of this capture, not {errors.short_repr(run)}")
        run.require_gathered()
        return words_of_prompts.maps_of_run(run, asked.words, each=asked.by_head, direction=direction)

    @contextmanager
    def recording(
        self, session: Any, configs: Sequence[Any], runs: list[Run], models: Any = None
    ) -> Iterator[None]:
        """Keep the requested values of runs that are made in this context and put into a list.

        Also of those that an error ends. models are the transformers whose activations are kept.
        """
        recording = Recording(self, session, configs, models)
        try:
            with recording.watching():
                yield
        finally:
            recording.finish(runs)

    def tables_of(self, kept: Sequence[Activation], item: int) -> dict[str, Activations]:
        """Return the captured activations of one video of a batch, a table per site."""
        assert self.watcher is not None
        of_item = [activation for activation in kept if activation.item == item]
        return tables(of_item, self.watcher.reduce is not None, chosen_numbers(self.request))

    @property
    def request(self) -> dict[str, Any]:
        """The request as plain values, which all runs of a folder share."""
        watcher = self.watcher
        assert watcher is not None
        request: dict[str, Any] = {"sites": [*watcher.sites]}
        for name in ("layers", "blocks", "steps", "frames", "heads"):
            numbers = getattr(watcher, name)
            request[name] = None if numbers is None else [*numbers]
        request |= {"dtype": None, "reduce": None}
        if watcher.dtype is not None:
            request["dtype"] = str(watcher.dtype).removeprefix("torch.")
        if watcher.reduce is not None:
            request["reduce"] = identity_of(watcher.reduce)
        return request

    @property
    def calls(self) -> list[CapturedCall]:
        """The captured calls of the last run: call.site.layer, call.at.step, call.values["frame_logits"]."""
        return self._last().records

    @property
    def tables(self) -> dict[str, Activations]:
        """The last run's activations by site, read from the folder where there is one."""
        run = self._last()
        if self.folder is None:
            return run.activations
        wanted = files.settings_and_text(run.common["fingerprint"])
        stored = [
            other
            for other in self.folder.all_runs
            if files.settings_and_text(other.about["fingerprint"]) == wanted
        ]
        return stored[-1].tables  # behind an earlier run that it has not replaced yet

    def __getitem__(self, site: str) -> Activations:
        tables = self.tables
        if self.watcher is None:
            raise errors.ConfigError(
                f"captured[{errors.short_repr(site)}]: attention was captured, which captured.atlas() has; "
                "for a site name it, capture(session, 'resid_post')"
            )
        errors.require_known(site, tables, "{} was not captured")
        return tables[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def keys(self) -> list[str]:
        """Return the sites that were captured; there is none where attention was."""
        return list(self.tables)

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the activations of the last run, which load_cache reads.

        Args:
            path: its name, which ends in .safetensors.
            overwrite: replace any file there.

        Raises:
            CacheError: where it cannot be written, and for a file there that must stay.
        """
        common = self._last().common
        about = {name: common[name] for name in ("model", "prompt", "seed", "fingerprint")}
        if "uncompiled" in common:
            about["uncompiled"] = common["uncompiled"]
        return save_activations(path, self.tables, about, overwrite)

    def atlas(self, run: Run | None = None, branch: str | None = None, **chosen: Any) -> "Atlas":
        """Return a run's attention, as experiments/run_extraction_all.py writes it.

        Args:
            run: one of the context's; None: the last.
            branch: "cond" or "uncond", of a pipeline with guidance; None: cond.
            **chosen: a block, an evaluation or a model, where a pipeline has several that one atlas cannot
                hold.

        Raises:
            ConfigError: for a run without attention, and for a choice that it does not have.
        """
        if self.asked_words is not None:
            raise errors.ConfigError(
                "atlas: words were captured, which captured.words() has; for an atlas leave words= out"
            )
        run = run or self._last()
        if isinstance(run, Run):
            run.require_gathered()
        if not getattr(run, "records", None):
            raise errors.ConfigError(
                f"atlas: {errors.short_repr(run)} has no attention: make it inside capture(session), with "
                "layers and steps that it has"
            )
        if run.bidirectional:
            cache = cache_builders.bidirectional_atlas(run, branch, **chosen)
        elif chosen or branch not in (None, "cond"):
            names = ", ".join(chosen or ["branch"])
            raise errors.ConfigError(
                f"atlas takes no {names} of a causal run: it has all layers, blocks and passes; "
                "atlas.layer(5, step=0) is one layer in one pass"
            )
        else:
            cache = cache_builders.atlas_cache(run)
        layers = self.requests[0].layers if self.requests else None
        return Atlas(cache if layers is None else store.layers_of(cache, list(layers)))

    def _last(self) -> Run:
        if not self.runs:
            raise files.RunError(
                "nothing was generated while capturing; call session.generate(...) inside, in the same "
                "thread. Runs of a pipeline are there once the context has ended"
            )
        return self.runs[-1]

    def __repr__(self) -> str:
        count = f"{len(self.runs)} runs"
        if len(self.runs) == 1:
            count = "1 run"
        what = "attention"
        if self.watcher is not None:
            what = ", ".join(self.watcher.sites)
        elif self.asked_words is not None:
            what = f"words {', '.join(self.asked_words.words)}"
        lines = [f"Captured: {count}, {what}"]
        for run in self.runs[-1:]:
            lines.append(f"  the last: {run!r}")
            if "rank" in run.common:
                lines.append("  rank 0 has what was captured")
        return "\n".join(lines)


class Recording:
    """What a capture keeps of the runs of one batch while they are made: in memory, or in its folder."""

    def __init__(self, captured: Captured, session: Any, configs: Sequence[Any], models: Any = None):
        self.captured, self.session, self.configs = captured, session, configs
        self.stored: list[StoredRun] = []  # of the folder, a video each
        self.missing: dict[int, StoredRun] = {}  # those that the folder lacks, by the number of the video
        self.watcher: SiteCapture | None = None
        if captured.watcher is not None:
            self.watcher = replace(
                captured.watcher,
                kept=[],
                items=session.items_of(configs),
                on_block=self.write if captured.folder is not None else None,
                by_step=session.bidirectional,
            )
            self.watcher.models = models

    def watching(self) -> AbstractContextManager[None]:
        """Let the capture see activations; nothing where the folder has all runs."""
        if self.watcher is None or (self.stored and not self.missing):
            return nullcontext()
        return watching.watched(self.watcher)

    def begin(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Find the runs of these facts in the folder. Equal ones of a batch are one."""
        folder = self.captured.folder
        assert folder is not None
        begun = [folder.begin(self.captured.request, each, len(facts)) for each in facts]
        by_path = {run.path: run for run in begun}
        self.stored = [by_path[run.path] for run in begun]
        self.missing = {self.stored.index(run): run for run in by_path.values() if not run.is_complete}

    def write(self, kept: list[Activation]) -> None:
        """Write what came of each run when a later block begins, or a later step of all frames."""
        if not self.stored:  # a pipeline's runs are known once the first step is done
            count = 1 + max(activation.item for activation in kept)
            self.begin(self.session.facts_of(self.configs, count, len(kept[0].where.frames)))
        for item, run in self.missing.items():
            activations = self.captured.tables_of(kept, item)
            if activations:
                run.write(activations)

    def finish(self, runs: Sequence[Run]) -> None:
        """Keep what came last, and file each run of the folder as what it turned out to be."""
        if self.watcher is not None:
            self.watcher.flush()
        for item, run in enumerate(runs):
            if self.watcher is not None and self.captured.folder is None:
                run.activations.update(self.captured.tables_of(self.watcher.kept, item))
            if item >= len(self.stored) or run.stopped:
                continue
            stored = self.stored[item]
            if item in self.missing:
                latents = run.latents if run.latents.numel() else None
                stored.finish(latents, run.common)
                continue
            # Random numbers of one's own are in no fingerprint: they would leave another run's activations.
            is_same_batch = stored.about["batch"] == len(runs)
            is_same = run.bidirectional or torch.equal(run.latents.cpu(), stored.latents)
            if is_same_batch and not is_same:
                of_functions = "what changed them"
                if texts_by_name(stored.about["edits"]):
                    of_functions = "what a named function reads (give it another name then)"
                raise files.CacheError(
                    f"{stored.path} holds this run with other latents: {of_functions} is in no fingerprint; "
                    "choose another folder"
                )
        self.captured.runs += runs


def drawing() -> Any:
    """Import experiments.figures, which loads matplotlib, only when something is drawn."""
    from experiments import figures

    return figures


# --- Atlases, and layers taken out of them
class AtlasLayer(dict[str, Any]):
    """One layer of a rollout in one pass: the fields of a layer cache.

    >>> Atlas.open("cache/atlas.pt").layer(20).save("cache/layer20.pt")
    """

    def __repr__(self) -> str:
        return f"AtlasLayer: {open_profiles(self)!r}"

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the cache that extract_all_attention.ipynb opens. CacheError where it cannot be written."""
        caches.save_cache(path, self, overwrite)
        return Path(path)


class Atlas(dict[str, Any]):
    """Attention of one rollout at frame level, by quantity.

    A mapping of the cache's fields: tensors such as atlas["frame_logits"], and prompt, seed, layers and so
    on. print(atlas) says what it is of and which tensors it has; `axes` and `units` name them.

    Examples:
        >>> atlas = Atlas.open("cache/atlas.pt")
        >>> atlas.axes["frame_logits"]
        ("layers", "passes", "heads", "frames", "frames")
        >>> atlas["frame_logits"][5, 0, 3].shape  # of layer 5, pass 0, head 3
        [6, 6]
        >>> atlas.plot(layer=5)
    """

    def __init__(self, cache: Mapping[str, Any]):
        super().__init__(cache)
        self.cache = formats.AtlasCache.from_dict(cache)

    def __missing__(self, name: Any) -> Any:
        problem = "an atlas has no {}"
        if not isinstance(name, str):
            problem = "atlas[{}]: a layer is atlas.layer(5), and atlas[...] takes the name of a quantity"
        errors.require_known(name, self.units, problem, files.CacheError)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise files.CacheError(
            "an atlas is what a run measured, and is read-only: change a copy, Atlas({**atlas, name: values})"
        )

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)

    @classmethod
    def open(cls, path: str | Path) -> "Atlas":
        """Read an atlas from its file.

        Args:
            path: a file that save() or a script wrote.

        Raises:
            CacheError: for any other file.
        """
        return cls(caches.load_cache(path, expect=("atlas",)))

    @property
    def layers(self) -> list[int]:
        """The numbers of its layers, in the order of the first axis."""
        return list(self["layers"])

    @property
    def units(self) -> dict[str, str]:
        """Return what each quantity is, by its name."""
        return {name: unit for name, unit in UNITS.items() if name in self}

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each quantity's axes: ("layers", "passes", "heads", "frames", "frames")."""
        letters = formats.declared_fields(formats.AtlasCache)
        lengths = {name: letters[name].partition("[")[2].partition("]")[0].split(", ") for name in self.units}
        return {name: tuple(AXES.get(letter, letter) for letter in found) for name, found in lengths.items()}

    def view(self, step: int | None = None, quantity: str | None = None) -> Profiles:
        """Return one pass in one quantity, as the notebooks see it.

        Args:
            step: the pass; None: the first.
            quantity: mean_logit, mass or mean_prob; or as the atlas calls its tensor, frame_logits or
                frame_mass.

        Raises:
            CacheError: for a pass or quantity that is not there.
        """
        return open_profiles(self, step, QUANTITY_OF.get(quantity or "", quantity))

    def layer(self, layer: int, step: int | None = None) -> AtlasLayer:
        """Return a layer in one pass.

        Args:
            layer: its number.
            step: the pass; None: the first.

        Raises:
            CacheError: for one that is not there.
        """
        return AtlasLayer(store.layer_from_atlas(self, layer, step))

    def plot(
        self,
        layer: int | None = None,
        step: int | None = None,
        quantity: str | None = None,
        head: int | Literal["mean"] | None = None,
    ) -> "Figure":
        """Draw what heads see in each key frame.

        With a layer alone: the profile of every head, seen by the last block's queries. With a head too, its
        matrix, query by key frames. Without a layer: matrices of all layers.

        Args:
            layer: the number of a layer; None: all.
            step: the pass; None: the first.
            quantity: mean_logit, mass or mean_prob; None: the first that the atlas has.
            head: the number of a head, or "mean" over all.

        Raises:
            CacheError: for a layer, head, pass or quantity that is not there.
        """
        view, draw = self.view(step, quantity), drawing()
        if layer is None or head is not None:
            chosen = "mean" if head is None else head
            if chosen != "mean":
                files.require_held("head", chosen, range(view.num_heads))
            chosen_layers = view.layers if layer is None else [layer]
            found = [matrix for n in chosen_layers if (matrix := view.key_matrix(n)) is not None]
            if len(found) < len(chosen_layers):
                raise files.CacheError(
                    f"this cache has no {view.quantity} by query frame: give a layer, and no head"
                )
            matrices = np.stack(found)  # [layers, H, rows, columns]
            maps = matrices[:, chosen] if isinstance(chosen, int) else matrices.mean(1)
            name = "mean over heads" if chosen == "mean" else f"head {chosen}"
            title = f"{'All layers' if layer is None else f'Layer {layer}'}, {name}"
            names = [f"L{n}" for n in view.layers] if layer is None else [""]
            return draw.frame_maps(maps, view.matrix_rows, view.caption, layer=title, heads=names)
        titles = draw.head_titles(head_statistics(view.frame_profile(layer)).delta)
        note = "Δ = first − middle"
        return draw.head_grid(view.key_profile(layer), titles, view.caption, layer=layer, note=note)

    @classmethod
    def mean(cls, atlases: Iterable["Atlas"]) -> "MeanAtlas":
        """Return the mean over runs of one model, with its interval.

        Args:
            atlases: two or more, such as those of several prompts and seeds.
        """
        return MeanAtlas(atlases)

    def compare(self, other: "Atlas", quantity: str = "frame_logits") -> "AtlasComparison":
        """Correlate every head's frame matrix with another atlas's.

        Args:
            other: an atlas of the same layers, passes and frames.
            quantity: frame_logits or frame_mass.

        Raises:
            CacheError: for an atlas of other layers, passes or frames.
        """
        return AtlasComparison(self, other, quantity)

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the cache that the notebooks open, and the folders above it.

        A file there is replaced if it is a cache of the same model that has nothing more.

        Args:
            path: the name of the file.
            overwrite: replace any file there.

        Raises:
            CacheError: where it cannot be written, and for a file there that must stay.
        """
        caches.save_cache(path, self, overwrite)
        return Path(path)

    def __repr__(self) -> str:
        lines = [f"Atlas: {self.view().source}", f"  {conditions_of(self, [self.get('branch')])}"]
        lines.append(f"  layers: {ranges(self.layers)}")
        for name, names in self.axes.items():
            shape = ", ".join(f"{axis} {n}" for axis, n in zip(names, self[name].shape, strict=True))
            lines.append(f"  {name} [{shape}]: {UNITS[name]}")
        return "\n".join(lines)


class MeanAtlas:
    """Means over atlases by quantity, their deviations (n - 1) and 95 % intervals over runs (Student's t).

    Args:
        atlases: of one model, two or more, such as those of several seeds.

    Examples:
        >>> with capture(session) as captured:
        ...     runs = session.generate("a red circle moving right", seeds=[1, 2])
        >>> mean = Atlas.mean([captured.atlas(run) for run in runs])
        >>> mean["frame_mass"], mean.std("frame_mass"), mean.interval("frame_mass")
        >>> mean.plot(layer=5)  # means and deviations, and each run
    """

    def __init__(self, atlases: Iterable[Atlas]):
        runs = list(atlases) if isinstance(atlases, Iterable) else []
        if len(runs) < 2 or not all(isinstance(atlas, Atlas) for atlas in runs):
            raise errors.ConfigError(
                f"a mean takes a list of atlases, two or more, not {errors.short_repr(atlases)}"
            )
        atlases = runs
        store.require_one_model({f"atlas {n}": atlas for n, atlas in enumerate(atlases)}, "a mean")
        self.count, self.layers = len(atlases), atlases[0]["layers"]
        self.atlases = list(atlases)
        self.quantile = float(scipy.stats.t.ppf(0.975, self.count - 1))
        self.means, self.deviations = dict[str, Tensor](), dict[str, Tensor]()
        for name in atlases[0].units:
            values = [atlas[name] for atlas in atlases if name in atlas]
            if len({x.shape for x in values}) == 1 and len(values) == self.count:
                stacked = torch.stack(values).float()
                self.means[name] = stacked.mean(0)
                self.deviations[name] = stacked.std(0)

    def __getitem__(self, name: str) -> Tensor:
        return self.means[name]

    def interval(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the ends of the interval of a quantity.

        Args:
            name: of the quantity, such as frame_mass.
        """
        half = self.quantile * self.std(name) / self.count**0.5
        return self[name] - half, self[name] + half

    def std(self, name: str) -> Tensor:
        """Return the standard deviation (n - 1) of a quantity over runs.

        Args:
            name: of the quantity, such as frame_mass.
        """
        return self.deviations[name]

    def plot(
        self, layer: int, step: int | None = None, quantity: str | None = None, head: int | None = None
    ) -> "Figure":
        """Draw profiles of every head of a layer, or of one: mean and deviation over runs, and each run.

        Args:
            layer: the number of the layer.
            step: the pass; None: the first.
            quantity: mean_logit, mass or mean_prob; None: the first that the atlases have.
            head: the number of a head; None: all.
        """
        views = [atlas.view(step, quantity) for atlas in self.atlases]
        heads = range(views[0].num_heads) if head is None else [head]
        for one in heads:
            files.require_held("head", one, range(views[0].num_heads))
        # [runs, H, F + averages] -> a panel per head
        profiles = np.stack([view.key_profile(layer) for view in views])
        panels = {f"L{layer} H{n}": profiles[:, n] for n in heads}
        caption = replace(views[0].caption, source=f"{views[0].model}, {self.count} runs")
        return drawing().sweep_curves(panels, caption, [f"run {n}" for n in range(self.count)])

    def __repr__(self) -> str:
        lines = [f"MeanAtlas: {self.count} runs of {self.atlases[0]['model']}, layers {self.layers}"]
        for name, mean in self.means.items():
            known = self.deviations[name][self.deviations[name].isfinite()]
            said = f"mean deviation {known.mean().item():.3g}" if len(known) else "nothing attended"
            lines.append(f"  {name} {list(mean.shape)}: {said}")
        return "\n".join(lines)


class AtlasComparison:
    """How alike two atlases are: the correlation [layers, heads] of every head's matrix, over all passes."""

    def __init__(self, one: Atlas, other: Atlas, quantity: str):
        if not isinstance(other, Mapping) or "layers" not in other:
            raise errors.ConfigError(
                f"an atlas is compared with another atlas, not with {errors.short_repr(other)}"
            )
        matrices = [
            name for name, axes in one.axes.items() if axes[-2:] == ("frames", "frames") and name in other
        ]
        errors.require_known(quantity, matrices, "compare: {} is no matrix of both")
        if one["layers"] != other["layers"] or one[quantity].shape != other[quantity].shape:
            raise files.CacheError("atlases are compared that have the same layers, passes and frames")
        self.layers, self.quantity = one["layers"], quantity
        # [N, P, H, F, F] -> [N, H, P * F * F]; what either run did not attend to counts in neither
        rows = [atlas[quantity].float().transpose(1, 2).flatten(2) for atlas in (one, other)]
        there = rows[0].isfinite() & rows[1].isfinite()
        count = there.sum(-1, keepdim=True)
        a, b = (x.masked_fill(~there, 0) for x in rows)
        # In their places the mean: it takes part in no sum
        a, b = (torch.where(there, x, x.sum(-1, keepdim=True) / count).numpy() for x in (a, b))
        self.correlation = torch.from_numpy(pearson(a, b)).float()

    def plot(self) -> "Figure":
        """Draw the correlations, layers by heads."""
        return drawing().correlation_map(self.correlation.numpy(), self.layers, self.quantity)

    def __repr__(self) -> str:
        known = self.correlation[self.correlation.isfinite()]  # a head may look at all frames alike
        if not len(known):
            return f"AtlasComparison: {self.quantity} of no head varies"
        low, mean = known.min().item(), known.mean().item()
        return f"AtlasComparison: {self.quantity} of heads correlate by {mean:.3f}, at least {low:.3f}"


def policy_atlas(source: str | Path, settings: Mapping[str, Any], num_frames: int) -> Atlas:
    """Return mean logits and mass of every call of num_frames frames under the policy of settings."""
    session = load(source, cache_policy=dict(settings), num_frames=num_frames)
    with capture(session) as captured:
        session.generate()
    return captured.atlas()


# --- Videos side by side
def compare(run_a: Run, run_b: Run) -> "Comparison":
    """Compare two runs of the same length: videos side by side, and their difference.

    Args:
        run_a: a run, as session.generate() returns it.
        run_b: another run, with latents of the same shape.

    Raises:
        ConfigError: for anything else, and for runs of different sizes.

    Examples:
        >>> compare(run, edited).save("outputs/edited.mp4", overwrite=True)
    """
    return Comparison(run_a, run_b)


class Comparison:
    """Two runs and the differences between them."""

    show, preview = Run.show, None  # the three side by side, for a notebook

    def __init__(self, run_a: Run, run_b: Run):
        for run in (run_a, run_b):
            if not isinstance(run, Run):
                raise errors.ConfigError(
                    f"compare takes two runs, as session.generate() returns them, not "
                    f"{errors.short_repr(run)}; "
                    "atlases have a method compare"
                )
        self.runs = run_a, run_b
        shapes = [list(run.latents.shape[1:]) for run in self.runs]
        if shapes[0] != shapes[1]:
            raise errors.ConfigError(
                f"compare takes runs of one size, not latents {shapes[0]} and {shapes[1]}"
            )

    @property
    def fps(self) -> int:
        return self.runs[0].config.fps

    @cached_property
    def psnr(self) -> Tensor:
        """Peak signal-to-noise ratio of every frame in dB, float32 [frames]; infinite for equal ones."""
        one, other = (run.video.numpy() for run in self.runs)
        return torch.from_numpy(psnr(one, other, peak=255)).float()

    @property
    def video(self) -> Tensor:
        """uint8 [frames, height, 3 x width, 3]: one, the other, and the distance of their colours."""
        one, other = (run.video for run in self.runs)
        return torch.cat([one, other, (one.short() - other.short()).abs().to(one.dtype)], 2)

    @property
    def noise(self) -> str:
        """Whether the runs began with other noise, or nobody knows it; "" where both had the same."""
        starts: list[tuple[Any, Any]] = [
            (run.config.seed, run.common.get("generator_state")) for run in self.runs
        ]
        one, other = starts
        if one != other:
            return "they began with different noise: give both one seed"
        if one == (None, None):
            return "whether they began with the same noise is not known"
        return ""

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the three side by side as an mp4 -> its path.

        Args:
            path: its name, which ends in .mp4.
            overwrite: replace any file there.

        Raises:
            CacheError: where it cannot be written, and for a file there that must stay.
        """
        files.require_writable(path)
        about = f"comparison, {self.runs[0].model_title}"
        write_mp4(self.video.numpy(), path, model=about, fps=self.fps, overwrite=overwrite)
        return Path(path)

    def __repr__(self) -> str:
        names = [f"{run.edits or 'no edit'}, {seed_in_words(run.config.seed)}" for run in self.runs]
        low, whole = self.psnr.min().item(), -10 * (10 ** (-self.psnr / 10)).mean().log10().item()
        text = f"Comparison: {names[0]} | {names[1]}: PSNR {whole:.1f} dB, at least {low:.1f}"
        if self.noise:
            text += f"; {self.noise}"
        return text


# --- The x0 lens
def x0_lens(
    session: Any,
    prompt: str | None = None,
    seed: int | None = None,
    *,
    layers: int | Collection[int] | None = None,
    blocks: int | Collection[int] | None = None,
    **call: Any,
) -> "Lens":
    """Decode x0 from the residual stream after each layer, with the model's own norm, modulation and head.

    This is the logit lens (nostalgebraist 2020) for this model. The head was trained on the last layer only:
    a layer whose x0 looks empty may still hold information that later layers use.

    Args:
        session: a session of a causal model, or a pipeline of diffusers.
        prompt: of the video; None is the session's.
        seed: of the noise; None is the session's.
        layers: one number or several; None: all.
        blocks: likewise, of causal models.
        **call: further arguments of a pipeline, of whose conditional branch the lens is.

    Raises:
        ConfigError: for a layer or block that is not there, and for samplers that do not denoise block by
            block.

    Examples:
        >>> lens = x0_lens(session, "a red circle moving right", seed=42, layers=[0, 7], blocks=[0])
        >>> lens.distance.shape  # to the final x0, [layers, blocks, steps]
        [2, 1, 4]
    """
    session = as_session(session)
    chosen, rows = errors.as_numbers("layers", layers), errors.as_numbers("blocks", blocks)
    if isinstance(session, pipeline_session.PipelineSession):
        if rows is not None:
            raise errors.ConfigError("a pipeline makes all frames at once, not in blocks: leave blocks out")
        of_passes = dict[tuple[int, int, int], Tensor]()
        with session.opened(), ExitStack() as stack:
            check_capture(session, SiteCapture(("resid_post",), chosen), streams=True)
            for model in session.models.values():  # experts have steps of their own
                lens = PipelineLens(model, chosen, of_passes)
                lens.models = frozenset([id(model)])
                stack.enter_context(watching.watched(lens))
                stack.enter_context(lens.hooked())
            run = session.generate(prompt, seed=seed, **call)
        return Lens(run, of_passes, None)
    errors.require_ascending("blocks", rows, "blocks come in the order of the rollout")
    if session.bidirectional or session.config.sampler != "blocks":
        raise errors.ConfigError("x0_lens reads runs whose blocks are denoised one by one: sampler blocks")
    watcher = SiteCapture(("x_t", "resid_post"), chosen, rows)
    check_capture(session, watcher, streams=True)
    found, noisy = dict[tuple[int, int, int], Tensor](), [torch.empty(0)]

    def read(x: Tensor, where: watching.ActivationSite) -> Tensor:
        pipeline, model = session.pipeline, session.pipeline.model
        if where.site == "x_t":  # comes once a pass, before the layers: [B, n, C, h, w]
            noisy[0] = x
        elif not where.is_clean_pass:  # which steps a block has, the run says
            (*_, h, w), (_, ph, pw) = noisy[0].shape, model.config.patch_size
            # as the model's own last layer does: from [B, L, dim] to the flow, and to x0 at this noise level
            t = x.new_full((len(x), 1), where.timestep, dtype=torch.float32)
            time = model.time_embedding(sinusoidal_embedding(t, model.config.freq_dim).to(model.dtype))
            flow = model.flow_of(x, time, h // ph, w // pw).transpose(1, 2)
            x0 = flow_to_x0(flow, noisy[0], pipeline.sigmas[where.step], where.at.num_held)
            found[where.layer or 0, where.block, where.step] = x0.cpu()
        return x.new_zeros(())

    with watching.watched(replace(watcher, reduce=read)):
        run = session.generate(prompt, seed)
    if chosen is not None:  # layers in the asked order
        found = dict(sorted(found.items(), key=lambda item: chosen.index(item[0][0])))
    return Lens(run, found, session.vae)


class Lens:
    """x0 as the head decodes it after each layer: latents by (layer, block, step), and the run itself."""

    def __init__(self, run: Run, latents: Mapping[tuple[int, int, int], Tensor], vae: VAE | None):
        self.run, self.latents, self.vae = run, dict(latents), vae
        self.layers = list(dict.fromkeys(layer for layer, _, _ in latents))
        self.blocks, self.steps = (sorted({key[n] for key in latents}) for n in (1, 2))

    def __repr__(self) -> str:
        return f"Lens: layers {self.layers}, blocks {self.blocks}, steps {self.steps} of {self.run!r}"

    @cached_property
    def distance(self) -> Tensor:
        """Root mean square distance to the final x0, [layers, blocks, steps]; NaN for no pass."""
        # NaN: with first_block_steps blocks differ in their passes
        found = torch.full((len(self.layers), len(self.blocks), len(self.steps)), torch.nan)
        for (layer, block, step), x0 in self.latents.items():
            place = self.layers.index(layer), self.blocks.index(block), self.steps.index(step)
            final = self.run.latents[:, block_frames(self.run.config.block_sizes, block)].cpu()
            found[place] = (x0 - final).square().mean().sqrt()
        return found

    def frames(self, layer: int, block: int, step: int) -> Tensor:
        """Decode one x0 behind the video's earlier latents: uint8 [frames of the block, height, width, 3].

        Args:
            layer: the layer after which x0 was read.
            block: the block of frames.
            step: the denoising step.
        """
        if self.run.decoder is not None:  # a pipeline's, of all frames
            return self.run.decoder(self.latents[layer, block, step])
        assert self.vae is not None
        # The decoder's convolutions look back, so it gets the earlier frames too; theirs are cut off again.
        first = block_frames(self.run.config.block_sizes, block)[0]
        latents = torch.cat([self.run.latents[:, :first].cpu(), self.latents[layer, block, step]], 1)
        video = decode(latents, self.vae)
        return video[1 + VIDEO_FRAMES_PER_LATENT * (first - 1) if first else 0 :]

    def plot(self, block: int) -> "Figure":
        """Draw the last frame of a block: layers down, steps across, with the distance to the final x0.

        Args:
            block: the block of frames.
        """
        last = lambda layer, step: self.frames(layer, block, step)[-1].numpy()  # noqa: E731
        images = [[last(layer, step) for step in self.steps] for layer in self.layers]
        distance = self.distance[:, self.blocks.index(block)].numpy()
        return drawing().lens_strip(images, self.layers, self.steps, distance)

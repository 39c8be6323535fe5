"""Compute gradients of a session's videos at named sites, and attribution scores.

with gradients(session, "z", layers=[5], blocks=[1], steps=[3]) as grads:
    run = session.generate("a red circle moving right over a dark blue background", seed=42)
    grads.backward(lambda x0: x0.square().mean())
grads["z"].stack()  # named and shaped like captured activations
scores = attribute(session, prompt, seed=42, source=Source(prompt="a blue square moving left"))
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from experiments import caches, captured, memory
from experiments.analysis.panels import table
from experiments.caches.activations import Activations, save_activations
from experiments.caches.files import Record, claimed
from experiments.caches.titles import prompt_in_words, seed_in_words
from experiments.edits import source_of
from experiments.extraction import cache_builders
from experiments.pipeline_session import PipelineSession
from experiments.progress import observed as observing
from experiments.provenance import check_outputs
from experiments.runs import Run
from experiments.session import Session, load
from wan import errors, interventions
from wan.activations import SiteCapture
from wan.config import RunConfig
from wan.gradients import Attribution, Gradients, Metric
from wan.policies import policy_of
from wan.sites import OF_FORWARD, ActivationSite, check_site, observed, watched

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAY = ("multi_shot", "full", "window")  # policies whose keys stand where they were made


@interventions.reusable
def gradients(
    session: Any,
    *sites: Any,
    through: str = "pass",
    metric: Metric | None = None,
    recompute: bool = False,
    to: str | None = "cpu",
    layers: Any = None,
    blocks: Any = None,
    steps: Any = None,
    layout: Any = None,
) -> Iterator["SiteGradients"]:
    """Record videos generated in this context with autograd, for gradients at sites.

    The video is unchanged: same bits on a CPU; on a GPU recorded passes run without fused kernels and CUDA
    graphs. Keys and values of earlier blocks are constants, except for through="rollout". Of a pipeline x0 is
    that of each forward's own output, by branch, within that step's forward.

    Args:
        session: a session, a pipeline of diffusers, or its transformer.
        *sites: names of sites (wan.sites.SITES), such as "z".
        through: which x0 is differentiated: that of each chosen "pass", of a whole "block" (its steps
            depend on each other), or of the "rollout" from the first chosen block on, through the KV cache.
        metric: a function of x0 that returns a number. Given here it frees each graph at once; it may also be
            given to backward() later.
        recompute: store less of each layer, at about the cost of one more forward.
        to: the device of the gradients; None leaves them.
        layers: one number or several; None: all.
        blocks: likewise.
        steps: likewise; -1 is the last denoising step.
        layout: where frames lie in a transformer that is not known (wan.diffusers_capture.watching).

    Raises:
        ConfigError: for layers, blocks or steps that do not exist, for what cannot be differentiated, and for
            too little memory.

    Examples:
        >>> with gradients(session, "z", layers=[5], blocks=[1], steps=-1) as grads:
        ...     run = session.generate("a red circle moving right", seed=42)
        ...     grads.backward(lambda x0: x0.square().mean())
    """
    session = captured.as_session(session)
    chosen = numbers_of(session, layers, blocks, steps)
    named = tuple(check_site(name) for name in sites)
    recorder = Gradients(named, **chosen, through=through, metric=metric, to=to)
    recorder.models = session.models_watched
    with ExitStack() as stack:
        stack.enter_context(session.opened(layout))
        check_gradients(session, recorder, recompute)
        if isinstance(session, PipelineSession):
            recorder.begin()  # forwards of a transformer alone are of no run that begins
        stack.enter_context(watched(recorder))
        if recompute:
            stack.enter_context(recorder.recomputed(session.model))
        yield SiteGradients(session, recorder)


class Chosen(TypedDict):
    """The layers, blocks and steps that are differentiated; None: all."""

    layers: list[int] | None
    blocks: list[int] | None
    steps: list[int] | None


def numbers_of(session: Any, layers: Any, blocks: Any, steps: Any) -> Chosen:
    """Return the selected layers, blocks and steps as lists of numbers, -1 resolved."""
    chosen = Chosen(
        layers=errors.as_numbers("layers", layers),
        blocks=errors.as_numbers("blocks", blocks),
        steps=captured.resolved_steps(session, errors.as_numbers("steps", steps)),
    )
    order = "passes are differentiated in the order of the rollout"
    errors.require_ascending("blocks", chosen["blocks"], order)
    errors.require_ascending("steps", chosen["steps"], order)
    return chosen


def check_gradients(session: Any, recorder: Gradients, recompute: bool = False) -> None:
    """Raise ConfigError for a selection that a run lacks, cannot differentiate or cannot hold in memory."""
    config, model, sites = session.config, session.model_config, recorder.sites
    if isinstance(session, PipelineSession):
        if not sites:
            raise errors.ConfigError("gradients: name a site, such as z or resid_post")
        if recorder.through != "pass" or recompute:
            raise errors.ConfigError(
                "gradients of a pipeline are of one step's x0: its sampler cannot be differentiated; leave "
                "through and recompute out"
            )
        captured.check_capture(
            session, SiteCapture(sites, recorder.layers, None, recorder.steps), streams=False
        )
        return
    policy, problem = policy_of(config), ""
    if not sites:
        problem = "name a site, such as z or resid_post"
    elif session.bidirectional or config.sampler == "rolling_forcing":
        problem = "causal rollouts that denoise a block at a time have them, not this sampler"
    elif config.offload or config.gpus > 1:
        problem = "they take a model that is whole on one device; leave offload out, and take one GPU"
    elif recorder.through == "rollout" and (policy.name not in STAY or config.recompute_context):
        problem = (
            f"through the KV cache they take cache_policy {' or '.join(STAY)}, without recompute_context"
        )
    if problem:
        raise errors.ConfigError(f"gradients: {problem}")
    chosen = SiteCapture(sites, recorder.layers, recorder.blocks, recorder.steps)
    captured.check_capture(session, chosen, streams=False)
    needed = memory.bytes_of_graphs(config, model, chosen, recorder.through, session.dtype, recompute)
    if recorder.metric is not None and recorder.through != "rollout":  # one graph at a time
        needed //= recorder_graphs(config, recorder)
    where = "GPU" if session.device.type == "cuda" else "host"
    need = memory.Need(f"holding graphs for gradients at {', '.join(sites)}", where, {"graphs": needed})
    remedy = "choose blocks, steps or layers, give metric= here, or recompute"
    memory.require_memory(config.model, [need], memory.free_memory(session.device), remedy)


def recorder_graphs(config: Any, recorder: Gradients) -> int:
    """Count the graphs of a rollout."""
    blocks = range(len(config.block_sizes)) if recorder.blocks is None else recorder.blocks
    if recorder.through == "block":
        return len(blocks)
    steps = [{*config.passes_of_block(block)[:-1]} for block in blocks]
    return max(1, sum(len(own if recorder.steps is None else own & {*recorder.steps}) for own in steps))


class SiteGradients(Mapping[str, Activations]):
    """Gradients by site of the last run in the context.

    Examples:
        >>> with gradients(session, "z", layers=[5], blocks=[1], steps=[3]) as grads:
        ...     run = session.generate("a red circle moving right", seed=42)
        ...     grads.backward(lambda x0: x0[:, :, :, 2:6, 2:6].mean())
        >>> grads["z"].stack().shape  # [layers, blocks, steps, B, L, H, D]
        [1, 1, 1, 1, 48, 12, 16]
    """

    def __init__(self, session: Session, recorder: Gradients):
        self.session, self.recorder = session, recorder

    def backward(self, metric: Metric, retain_graph: bool = False) -> None:
        """Compute the gradient of a metric for each recorded graph.

        Args:
            metric: a function of x0, or of x0 and `seen`. x0 is [B, n, C, h, w] of the pass or the block's
                last one, [B, F, C, h, w] of a rollout; `seen["z"]` lists the activations of a site in the
                order of calls.
            retain_graph: keep the graphs for another metric.
        """
        self.recorder.backward(metric, retain_graph)

    @property
    def values(self) -> list[float]:  # type: ignore[override]  # those of the mapping are tables
        """Values of the metric, one per graph."""
        return self.recorder.values

    @property
    def tables(self) -> dict[str, Activations]:
        """Gradients by site; ConfigError if none were computed yet."""
        if not self.recorder.found:
            raise errors.ConfigError("no gradient is there yet: generate, then call backward(lambda x0: ...)")
        chosen = {} if self.recorder.layers is None else {"layers": list(self.recorder.layers)}
        return captured.tables(self.recorder.found, chosen=chosen)

    def __getitem__(self, site: str) -> Activations:
        errors.require_known(site, self.recorder.sites, "no gradient at {}")
        return self.tables[site]

    def __contains__(self, site: object) -> bool:
        return site in self.recorder.sites

    def __iter__(self) -> Iterator[str]:
        return iter(self.recorder.sites)

    def __len__(self) -> int:
        return len(self.recorder.sites)

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the gradients, which load_cache reads like activations.

        Args:
            path: its name, which ends in .safetensors.
            overwrite: replace any file there.

        Raises:
            CacheError: where it cannot be written, and for a file there that must stay.
        """
        about = {"model": self.session.config.model, "gradients": True}
        return save_activations(path, self.tables, about, overwrite)

    def __repr__(self) -> str:
        recorder = self.recorder
        what = f"{len(recorder.found)} gradients" if recorder.found else f"{len(recorder.graphs)} graphs"
        return f"SiteGradients: {', '.join(recorder.sites)} through each {recorder.through}, {what}"


# --- Attribution patching
def attribute(
    session: Any,
    prompt: str | None = None,
    seed: int | None = None,
    *,
    source: interventions.Source,
    metric: Metric | None = None,
    sites: Sequence[str] = ("z", "mlp_out"),
    layers: Any = None,
    blocks: Any = None,
    steps: Any = None,
    integrated: int = 1,
    branch: str | None = None,
    **call: Any,
) -> "Scores":
    """Estimate how patching a site from the source run would change the metric of the same pass's x0.

    A score is (source - own activation) times gradient, summed per layer, or per head at sites with heads.
    The cost is one rollout of each run, with the same noise unless the source has its own seed, and a
    backward pass per chosen pass; earlier blocks are constants.

    Args:
        session: a session of a causal model, or a pipeline of diffusers.
        prompt: of the run; None is the session's.
        seed: of its noise, of a pipeline that of a generator; None is the session's.
        source: the run to patch from: another prompt, seed or weights.
        metric: a function of x0 that returns a number; None: the progress of x0 towards the source's, 0 to 1.
        sites: names of sites.
        layers: one number or several; None: all.
        blocks: likewise.
        steps: likewise; -1 is the last denoising step.
        integrated: average gradients over that many points between the inputs of both runs.
        branch: "cond" or "uncond", of a pipeline with guidance; None: cond.
        **call: further arguments of a pipeline.

    Raises:
        ConfigError: for what cannot be differentiated or patched.

    Examples:
        >>> scores = attribute(session, prompt, source=Source(prompt=other), sites=["z"], blocks=[1])
    """
    session = captured.as_session(session)
    chosen = numbers_of(session, layers, blocks, steps)
    if isinstance(session, PipelineSession):
        if integrated != 1:
            raise errors.ConfigError(
                "integrated is 1 for a pipeline, whose passes cannot run again: leave it out"
            )
        call = session.seeded({"prompt": prompt} | call, seed)
        recorder = Attribution(tuple(sites), **chosen, metric=metric, branch=branch or "cond")
        return _attribute_pipeline(session, call, source, recorder)
    if branch is not None:
        raise errors.ConfigError("branch is of a pipeline's guidance, which causal runs lack: leave it out")
    for name in call:
        raise errors.ConfigError(
            f"attribute knows no {errors.short_repr(name)}; a pipeline takes its own arguments"
        )
    config = session.config
    if prompt is not None:
        config = replace(config, prompt=prompt)
    if seed is not None:
        config = replace(config, seed=seed)
    if not chosen["steps"]:
        chosen["steps"] = list(range(config.num_passes - 1))
    # 1. Refuse before anything runs.
    check_patches(sites, source, config)
    if integrated < 1 or (integrated > 1 and policy_of(config).name not in STAY):
        raise errors.ConfigError(
            f"integrated is {integrated}: it is a number of points, 1 or more; several take cache_policy "
            f"{' or '.join(STAY)}, whose passes can run again"
        )
    recorder = Attribution(tuple(sites), **chosen, metric=metric, points=integrated)
    check_gradients(session, recorder)
    # 2. The source: its activations at sites, its x0, and with several points its inputs.
    session.prepare(config=config)
    inputs = ["x0"]
    if integrated > 1:
        inputs += ["x_t", "cross_k", "cross_v"]
    recorder.source = source_activations(
        *source_of(session, config, source),
        SiteCapture(tuple(sites), **chosen, to=None),
        SiteCapture(tuple(inputs), blocks=chosen["blocks"], steps=chosen["steps"], to=None),
    )
    recorder.sigmas = session.pipeline.sigmas
    # 3. The run itself, whose passes are differentiated as they come.
    with watched(recorder), recorder.calls_of(session.model):
        run = session.generate(config=config)
    return Scores(scores_cache(recorder, run, source))


def check_patches(sites: Sequence[str], source: interventions.Source, config: Any) -> None:
    """Raise ConfigError for a site of no layer, and for a source that is no other run."""
    for site in sites:
        if check_site(site) in OF_FORWARD:
            raise errors.ConfigError(
                f"{site} belongs to no layer: attribute a site of layers, such as z or mlp_out"
            )
        interventions.Patch(site, source, passes="denoise").check_source(config)


def source_activations(session: Any, config: Any, *captures: SiteCapture) -> dict[ActivationSite, Tensor]:
    """Roll out a source's run without anybody's edits -> what the captures kept, by where it was."""

    def run_source() -> None:
        with watched(*captures), observed():
            session.rollout(config)

    Context().run(run_source)
    return {activation.where: activation.value for capture in captures for activation in capture.kept}


def _attribute_pipeline(
    session: PipelineSession,
    call: dict[str, Any],
    source: interventions.Source,
    recorder: Attribution,
) -> "Scores":
    """Attribute as attribute() does, between two calls of a pipeline."""
    sites, layers, steps = recorder.sites, recorder.layers, recorder.steps
    recorder.models = session.models_watched
    with session.opened():
        # 1. Refuse before anything runs.
        check_gradients(session, recorder)
        session.check_call((), call)
        planned = session.plan((), call)
        check_patches(sites, source, planned.configs[0])
        # 2. The source: its activations at sites, and its x0.
        of_call = session.replaced(call=planned, config=planned.configs[0])
        recorder.source = source_activations(
            *source_of(of_call, planned.configs[0], source),
            SiteCapture(sites, layers, steps=steps, to=None),
            SiteCapture(("x0",), steps=steps, to=None),
        )
        # 3. The run itself, whose passes are differentiated as they come.
        with watched(recorder):
            run = session.generate(**call)
    if not recorder.scores:
        branches = sorted(branch for branch in recorder.branches if branch is not None)
        raise errors.ConfigError(
            f"branch {errors.short_repr(recorder.branch)} is not in the run; it has {', '.join(branches)}"
        )
    return Scores(scores_cache(recorder, run, source))


def make_scores(args: argparse.Namespace, config: RunConfig) -> None:
    """Write the scores of a run (run_attribution.py)."""
    check_outputs(args, config, [args.output_path])
    with claimed({args.output_path: 0}), observing(args, unit=None) as watch:
        parts = {"sites": args.sites, "frames": range(config.num_frames)}
        parts["blocks"] = args.blocks or range(len(config.block_sizes))
        cache_builders.require_free_cache(args.output_path, "attribution", parts, config, args.overwrite)
        session = load(config).prepare(observer=watch)
        chosen = {"sites": args.sites, "blocks": args.blocks, "integrated": args.integrated}
        scores = attribute(session, source=interventions.Source(prompt=args.source_prompt), **chosen)
        scores.save(args.output_path, overwrite=True)
        watch.print(scores.table())


def scores_cache(recorder: Attribution, run: Run, source: interventions.Source) -> Record:
    """Return the scores of a run as a cache."""
    # 1. Scores of each site, [layers, passes, heads or 1]; NaN where a layer has no such site.
    passes = list(dict.fromkeys(place.at for place in recorder.scores))
    layers = sorted({place.layer or 0 for place in recorder.scores})
    if recorder.layers is not None:
        layers = list(recorder.layers)
    sites = []
    for site in recorder.sites:
        known = [score for place, score in recorder.scores.items() if place.site == site]
        if not known:
            continue
        absent = torch.full_like(known[0], torch.nan)
        of_layers = []
        for layer in layers:
            of_passes = [recorder.scores.get(ActivationSite(site, layer, at), absent) for at in passes]
            of_layers.append(torch.stack(of_passes))
        sites.append({"site": site, "scores": torch.stack(of_layers)})
    # 2. The name of the metric.
    metric_name = "towards"
    if not recorder.follows_source:
        metric_name = getattr(recorder.metric, "__qualname__", type(recorder.metric).__name__)
    cache = {
        **run.common,
        "format": "attribution",
        "is_logits": False,
        "source": source.to_dict(),
        "metric": metric_name,
        "integrated": recorder.points,
        "layers": layers,
        "pass_timesteps": [at.timestep for at in passes],
        "pass_blocks": [at.block for at in passes],
        "pass_steps": [at.step for at in passes],
        "metric_own": torch.tensor(recorder.values),
        "metric_source": torch.tensor(recorder.reached),
        "sites": sites,
    }
    if run.bidirectional:
        cache["pass_branches"] = [at.branch for at in passes]
    return cache


class Scores(dict[str, Tensor]):
    """Attribution scores by site, [layers, passes, heads or 1] in units of the metric.

    A layer without a site, such as a single-stream layer without mlp_out, has NaN there.

    Examples:
        >>> scores = attribute(session, prompt, seed=1, source=Source(prompt=other), blocks=[1], steps=[3])
        >>> scores["z"].shape
        [8, 1, 12]
        >>> print(scores.table())
        >>> scores.save("cache/attribution.pt")
    """

    def __init__(self, cache: Mapping[str, Any]):
        super().__init__({each["site"]: each["scores"] for each in cache["sites"]})
        self.cache = dict(cache)
        self.layers: list[int] = self.cache["layers"]
        self.passes = [*zip(self.cache["pass_blocks"], self.cache["pass_steps"], strict=True)]

    @classmethod
    def open(cls, path: str | Path) -> "Scores":
        """Read scores from their file.

        Args:
            path: a file that save() wrote.

        Raises:
            CacheError: for any other file.
        """
        return cls(caches.load_cache(path, expect=("attribution",)))

    def __missing__(self, site: str) -> Tensor:
        raise errors.ConfigError(
            f"no scores of {errors.short_repr(site)}{errors.did_you_mean(site, [*self])}"
        )

    def table(self, count: int = 12) -> str:
        """Return the largest scores, each the mean over passes, with the heads or layers they are of.

        Args:
            count: how many.
        """
        rows = [
            {"site": site, "layer": layer, "head": head if self[site].shape[2] > 1 else None, "score": score}
            for site in self
            for layer, heads in zip(self.layers, self[site].mean(1).tolist(), strict=True)
            for head, score in enumerate(heads)
            if score == score  # NaN: the layer has no such site
        ]
        return table(sorted(rows, key=lambda row: -abs(row["score"]))[:count])

    def plot(self) -> "Figure":
        """Draw layers x heads, or layers, of each site: the mean over passes."""
        maps = {site: self[site].mean(1).numpy() for site in self}
        return captured.drawing().attribution_maps(maps, self.layers, subtitle=self.about)

    @property
    def about(self) -> str:
        """The two runs, and the metric."""
        cache = self.cache
        theirs = ", ".join(f"{name} “{value}”" for name, value in cache["source"].items())
        passes = "1 pass"
        if len(self.passes) != 1:
            passes = f"{len(self.passes)} passes"
        own = f"{prompt_in_words(cache['prompt'])}, {seed_in_words(cache['seed'])}"
        branches = sorted({branch for branch in cache.get("pass_branches", ()) if branch is not None})
        if branches:
            passes += f", branch {' and '.join(branches)}"
        return f"{own}, towards {theirs}; {cache['metric']}, mean of {passes}"

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the cache that notebooks/interventions.ipynb opens.

        Args:
            path: the name of the file.
            overwrite: replace any file there.

        Raises:
            CacheError: where it cannot be written, and for a file there that must stay.
        """
        caches.save_cache(path, self.cache, overwrite)
        return Path(path)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{site} {list(self[site].shape)}" for site in self)
        return f"Scores: {shapes}; {self.about}"

"""Compute gradients at named sites of a rollout, of its x0 or anything computed from it.

    recorder = Gradients(("z", "resid_post"), layers=[5], blocks=[6], steps=[3])
    with watched(recorder):
        pipeline.inference(...)
    recorder.backward(lambda x0: x0.square().mean())
    recorder.found[0].where, recorder.found[0].value  # shaped like the activation

A rollout runs under torch.no_grad. The recorder turns autograd on at x_t of a pass and off at its x0, so that
all other passes stay as they are. Keys and values go into the KV cache without gradients (KVCache.write), and
each call sees its own with them: earlier blocks are constants, unless a whole rollout is recorded.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from wan import errors
from wan.activations import Activation, check_device
from wan.attention import Call
from wan.interventions import Edits
from wan.keys import to_host, wait_for_host
from wan.model import Cache, CausalWanModel, TextKeysValues
from wan.pipeline import flow_to_x0
from wan.sites import (
    SITES,
    ActivationSite,
    Pass,
    RolloutSizes,
    Watcher,
    asks_for,
    check_indices,
    check_sites,
    current_pass,
    during,
    hook_point,
    observed,
    watched,
    watchers,
)

THROUGH = ("pass", "block", "rollout")
Metric = Callable[..., Tensor]


def takes_activations(metric: Metric) -> bool:
    """Return whether a metric takes (x0, seen), not x0 alone. ConfigError where it is called otherwise."""
    parameters: list[inspect.Parameter] = []
    if callable(metric):
        try:
            parameters = list(inspect.signature(metric).parameters.values())
        except (TypeError, ValueError):  # of a builtin, such as torch.mean
            return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(needed) > 2 or not (positional or takes_any):
        raise errors.ConfigError(
            f"metric {errors.short_repr(metric)} is no function of x0, or of x0 and the activations"
        )
    return len(needed) == 2 or any(p.name == "seen" for p in positional)


@dataclass(eq=False)
class Graph:
    """One recorded autograd graph: the activations at sites, and x0."""

    nodes: dict[ActivationSite, Tensor] = field(default_factory=dict)
    x0: Tensor | None = None  # [B, n, C, h, w] of the pass or block, or [B, F, C, h, w] of the rollout
    is_shared: bool = False  # another graph has nodes of the same forward, of a batch of both branches

    @property
    def seen(self) -> dict[str, list[Tensor]]:
        """The activations by site, in the order of their calls."""
        of_sites: dict[str, list[Tensor]] = {}
        for where, x in self.nodes.items():
            of_sites.setdefault(where.site, []).append(x)
        return of_sites


@dataclass(eq=False)
class Gradients(Watcher):
    """Record passes with autograd, and return gradients at some sites; None selects all.

    through says what a graph holds, and so what x0 is: each chosen denoising "pass" alone, all denoising
    steps of a "block", or the "rollout" from the first chosen block on, through the KV cache. metric(x0), or
    metric(x0, seen) with the activations by site, returns a scalar: given here, each graph is freed as soon
    as it is complete; else they stay until backward(metric).
    """

    sites: tuple[str, ...]
    layers: Collection[int] | None = None
    blocks: Collection[int] | None = None
    steps: Collection[int] | None = None
    through: str = "pass"
    metric: Metric | None = None
    to: str | None = "cpu"
    found: list[Activation] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # of the metric, one a graph
    graphs: list[Graph] = field(default_factory=list)  # complete ones that backward() has not freed

    def __post_init__(self) -> None:
        errors.require_known(self.through, THROUGH, "through is {}")
        check_device(self.to)
        if self.metric is not None:
            takes_activations(self.metric)
        self._sizes: RolloutSizes | None = None
        self._has_begun = False
        self._open: dict[Pass | None, Graph] = {}  # by pass, where each is differentiated alone
        self._finished: list[Tensor] = []  # x0 of the rollout's blocks so far
        self._past: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (layer, frame) -> keys, values
        self._positions: dict[int, int] = {}  # frame -> where its keys stand

    # --- As a watcher
    def records(self, at: Pass | None) -> bool:
        """Return whether autograd is on in a pass."""
        is_told = at is not None and (at.step is not None or self._sizes is None)
        if at is None or not is_told or not self._has_begun or at.is_recache:
            return False
        if self.through == "rollout":
            return self._first <= at.block and not (at.is_clean_pass and at.block == self._last)
        in_step = self.through == "block" or self.steps is None or at.step in self.steps
        return in_step and not at.is_clean_pass and (self.blocks is None or at.block in self.blocks)

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        return self.records(at) and site in self.sites and asks_for(self, layer, at)  # type: ignore[arg-type]

    def hides(self, layer: int, at: Pass | None) -> bool:
        return self.records(at)

    def check(self, sizes: RolloutSizes) -> None:
        check_sites(self.sites, sizes)
        if any(isinstance(watcher, Gradients) and watcher is not self for watcher in watchers()):
            raise errors.ConfigError("gradients are recorded already in this context: ask one for all sites")
        check_indices("layer", self.layers, sizes.num_layers)
        check_indices("block", self.blocks, sizes.num_blocks)
        num_passes = sizes.num_passes
        if self.through != "rollout":
            num_passes = sizes.num_steps
            if num_passes in (self.steps or ()):
                raise errors.ConfigError(
                    f"step {num_passes} is the clean pass, which has no x0: choose others"
                )
        check_indices("step", self.steps, num_passes)
        self._sizes = sizes
        self._first = min(self.blocks or [0])
        self._last = sizes.num_blocks - 1
        self.begin()

    def begin(self) -> None:
        self._has_begun = True
        self._open, self._finished, self._past, self._positions = {}, [], {}, {}
        self.found, self.values, self.graphs = [], [], []

    def _key(self, at: Pass) -> Pass | None:
        """Return what tells the graph of a pass from other open ones."""
        if self.through == "pass":
            return at
        return None

    def on_activation(self, x: Any, where: ActivationSite) -> Any:
        records = self.records(where.at)
        if where.site == "x_t":
            # The pipeline's no_grad comes back at x0, or where the rollout leaves it.
            if records:
                self._open.setdefault(self._key(where.at), Graph())
            torch.set_grad_enabled(records or (self.through == "pass" and bool(self._open)))
        if isinstance(x, Call):
            if records and self.through == "rollout":
                return self._with_past(x, where)
            return None
        if self.wants(where.site, where.layer, where.at):
            x = self.node(x)
            self._open[self._key(where.at)].nodes[where] = x
        if where.site == "x0":
            return self._close(x, where.at, records)
        return x

    @staticmethod
    def node(x: Tensor) -> Tensor:
        """Return x as a separate node of the graph; begin the graph if there is none."""
        if x.requires_grad:
            return x.view_as(x)
        return x.detach().requires_grad_()

    def _close(self, x0: Tensor, at: Pass, records: bool) -> Tensor:
        """End a graph at its last x0 and continue with x0 detached."""
        is_last = False
        if self.through != "pass":
            assert self._sizes is not None  # of a pipeline's run each pass is alone
            is_last = at.step == self._sizes.last_steps[at.block]
        if self.through == "rollout" and is_last:
            self._finished.append(x0)
        ends = {"pass": True, "block": is_last, "rollout": is_last and at.block == self._last}
        if not (records and ends[self.through]):
            return x0
        graph = self._open.pop(self._key(at))
        if not graph.nodes:  # as of mlp_out in single-stream layers
            raise errors.ConfigError(
                f"no layer that was chosen has {' or '.join(self.sites)} in step {at.step}: choose other "
                "layers or sites"
            )
        graph.x0, graph.is_shared = x0, bool(self._open)
        if self.through == "rollout":
            graph.x0 = torch.cat(self._finished, 1)
        torch.set_grad_enabled(graph.is_shared)
        if self.metric is None:
            self.graphs.append(graph)
        else:
            self._differentiate(graph, self.metric, retain_graph=False)
        return x0.detach()

    def _with_past(self, call: Call, where: ActivationSite) -> Call | None:
        """Give a call the keys of earlier blocks as their clean passes made them, with gradients."""
        if where.site != "self":
            return None
        layout, layer, S = call.key_layout, call.site.layer, call.key_layout.tokens_per_slot
        stays = layout.is_plain and call.of_heads is None
        for slot in layout.slots:
            stays = stays and self._positions.setdefault(slot.frame, slot.position) == slot.position
        if not stays:
            raise errors.ConfigError(
                "through='rollout' takes keys that stay in place: cache_policy multi_shot, full or window"
            )
        keys, values = [], []
        for n, slot in enumerate(layout.slots):
            k, v = call.k[:, n * S : (n + 1) * S], call.v[:, n * S : (n + 1) * S]
            if n not in layout.own:
                k, v = self._past.get((layer, slot.frame), (k, v))
            elif where.is_clean_pass:
                self._past[layer, slot.frame] = k, v
            keys.append(k)
            values.append(v)
        call.k, call.v = torch.cat(keys, 1), torch.cat(values, 1)
        return call

    # --- Gradients
    def backward(self, metric: Metric, retain_graph: bool = False) -> list[Activation]:
        """Compute the gradient of metric at the sites of every recorded graph; it stays in found.

        ConfigError where nothing was recorded, or metric is no scalar that depends on x0.
        """
        takes_activations(metric)
        if not self.graphs:
            remedy = (
                "generate inside the context first; a second backward needs retain_graph=True at the first"
            )
            raise errors.ConfigError(f"no pass is recorded: {remedy}")
        self.found, self.values = [], []
        for graph in self.graphs:
            self._differentiate(graph, metric, retain_graph)
        if not retain_graph:
            self.graphs = []
        return self.found

    def _differentiate(self, graph: Graph, metric: Metric, retain_graph: bool) -> None:
        nodes = list(graph.nodes.values())
        x0, value = self._evaluated(graph, metric)
        problem = ""
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            problem = errors.short_repr(value)
            if isinstance(value, Tensor):
                problem = f"a tensor of {value.dtype} and shape {list(value.shape)}"
        elif not value.isfinite():
            problem = f"{value.item()}"
        elif not value.requires_grad or not self._depends(value, x0, nodes, metric):
            problem = "a number that depends on no x0"
        if problem:
            raise errors.ConfigError(
                f"a metric must return one number that depends on x0 (x0.mean()); it returned {problem}"
            )
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                value.sum(), nodes, retain_graph=retain_graph or graph.is_shared, materialize_grads=True
            )
        self.values.append(value.item())
        self.take(graph, gradients)

    @staticmethod
    def _evaluated(graph: Graph, metric: Metric) -> tuple[Tensor, Any]:
        """Return the x0 that a metric was given, and its value."""
        assert graph.x0 is not None
        with torch.enable_grad():
            x0 = graph.x0.clone()  # the video's own, whatever the metric does with what it gets
            if takes_activations(metric):
                return x0, metric(x0, graph.seen)
            return x0, metric(x0)

    @staticmethod
    def _depends(value: Tensor, x0: Tensor, nodes: Sequence[Tensor], metric: Metric) -> bool:
        """Return whether a metric's value depends on x0, or on activations that it takes.

        Parameters of its own have gradients, too, behind an x0 that was detached.
        """
        inputs = []
        if x0.requires_grad:
            inputs.append(x0)
        if takes_activations(metric):
            inputs += nodes
        if not inputs:
            return False
        with torch.enable_grad():
            gradients = torch.autograd.grad(value.sum(), inputs, retain_graph=True, allow_unused=True)
        return any(gradient is not None for gradient in gradients)

    @classmethod
    def value_of(cls, graph: Graph, metric: Metric) -> Any:
        """Return a metric of a graph's x0, and of its activations if the metric takes them."""
        return cls._evaluated(graph, metric)[1]

    def take(self, graph: Graph, gradients: Sequence[Tensor]) -> None:
        """Keep the gradients of a graph, in the order of its nodes."""
        if self.to is not None and torch.device(self.to).type == "cpu":
            gradients = [to_host(gradient) for gradient in gradients]
            wait_for_host()
        elif self.to is not None:
            gradients = [gradient.to(self.to) for gradient in gradients]
        self.found += map(Activation, graph.nodes, gradients)

    # --- Less memory, more work
    @contextmanager
    def recomputed(self, model: Any) -> Iterator[None]:
        """Keep queries, keys, values and attention of recorded layers alone; compute the rest again.

        That is about one more forward in the backward pass. Edits that take a run in step cannot be repeated.
        """
        changed = [(block.self_attn, "project") for block in model.blocks]
        changed += [(block, "feed") for block in model.blocks]
        for module, name in changed:
            setattr(module, name, partial(self._remembering, getattr(module, name)))
        try:
            yield
        finally:
            for module, name in changed:
                delattr(module, name)

    def _remembering(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a part of a layer that the backward pass recomputes instead of storing it."""
        at, before = current_pass(), list[Tensor]()
        if at is None or not self.records(at):
            return function(*args)
        watching = self._beside(_Replay(self))
        for edit in (edit for watcher in watching for edit in watcher.edits):
            if "source" in edit.needs:
                raise errors.ConfigError(
                    f"recompute=True cannot repeat an edit that takes another run: {edit}"
                )

        def run(*inputs: Any) -> Any:
            if not before:
                outputs = function(*inputs)
                before.append(size_of(outputs))
                return outputs
            outputs = Context().run(self._again, at, watching, partial(function, *inputs))
            if not torch.isclose(size_of(outputs), before[0], rtol=1e-3):
                raise errors.ConfigError(
                    "recompute=True calls functions of one's own twice, and one gave something else then"
                )
            return outputs

        with set_checkpoint_early_stop(False):  # run() has to come to its end, which it compares
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)

    def _beside(self, me: Watcher) -> list[Watcher]:
        """Return who watches a repeated call: me in my place, and edits, which count no call twice."""
        watching: list[Watcher] = []
        for watcher in watchers():
            if watcher is self:
                watching.append(me)
            elif isinstance(watcher, Edits):
                watching.append(Edits(watcher.edits, watcher.data))
        return watching

    @staticmethod
    def _again(at: Pass, watching: Sequence[Watcher], function: Callable[[], Any]) -> Any:
        """Call a function again as in its pass, without other watchers."""
        with watched(*watching), during(at), observed():
            return function()


class ModelCall(NamedTuple):
    """A forward of the model as its hooks see it: CausalWanModel.forward() and its arguments."""

    model: CausalWanModel
    x: Tensor  # [B, F, C, h, w]
    t: Tensor
    text: TextKeysValues
    kv_cache: Cache


@dataclass(eq=False)
class Attribution(Gradients):
    """Attribute the difference between two runs to sites: (source - own activation) times gradient, by pass.

    Attribution patching (https://www.neelnanda.io/mechanistic-interpretability/attribution-patching): a first
    order estimate of what taking an activation from the source run does to the metric of the pass's x0.
    source has the other run's activations, and its x0. Without a metric it is how far x0 moved towards the
    source's, which is 1 there and 0 here. With points above 1 the pass runs again between the inputs of both
    runs, x_t and the prompt's keys and values, and its gradient is the mean (EAP-IG, arXiv 2403.17806).
    """

    source: Mapping[ActivationSite, Tensor] = field(default_factory=dict)
    branch: str | None = None  # of guidance, the only one that is scored; None: all
    points: int = 1
    sigmas: Sequence[float] = ()  # by step, where there are several points
    scores: dict[ActivationSite, Tensor] = field(default_factory=dict)  # [H] of sites with heads, else [1]
    reached: list[float] = field(default_factory=list)  # the metric of the source's x0, by pass

    def __post_init__(self) -> None:
        super().__post_init__()
        # With a metric each graph is freed as soon as it is complete; _metric() says which one counts
        self.follows_source = self.metric is None
        self.metric = self.metric or Tensor.sum
        self._own: dict[ActivationSite, Tensor] = {}
        self.branches: list[str | None] = []  # of the passes that came
        self._call: ModelCall | None = None
        self._runs_again = False

    @contextmanager
    def calls_of(self, model: Any) -> Iterator[None]:
        """Record the model's calls, for passes that run again."""

        def record(model: CausalWanModel, args: tuple[Any, ...]) -> None:
            self._call = ModelCall(model, *args)

        handle = model.register_forward_pre_hook(record)
        try:
            yield
        finally:
            handle.remove()

    def _is_scored(self, at: Pass | None) -> bool:
        """Return whether a pass is scored; one whose branch nobody tells is of any."""
        if at is not None and self.branch is not None and at.branch not in (None, self.branch):
            return False
        return super().records(at)

    def records(self, at: Pass | None) -> bool:
        return (self.points == 1 or self._runs_again) and self._is_scored(at)

    def hides(self, layer: int, at: Pass | None) -> bool:
        return self._is_scored(at)

    def wants(self, site: str, layer: int | None, at: Pass | None) -> bool:
        if at is None or site not in self.sites or not self._is_scored(at):
            return False
        return asks_for(self, layer, at)

    def check(self, sizes: RolloutSizes) -> None:
        super().check(sizes)
        self.scores, self.reached, self._own = {}, [], {}

    def on_activation(self, x: Any, where: ActivationSite) -> Any:
        if where.site == "x_t" and where.branch not in self.branches:
            self.branches.append(where.branch)
        if self.points == 1 or self._runs_again or isinstance(x, Call):
            return super().on_activation(x, where)
        # The plain pass, whose activations are the run's own; behind it the passes that are recorded.
        if self.wants(where.site, where.layer, where.at):
            self._own[where] = x.detach().clone()
        if where.site == "x0" and self._is_scored(where.at):
            self._run_again(x, where)
        return None

    def _run_again(self, x0: Tensor, where: ActivationSite) -> None:
        """Record the pass at points between both runs; the cache's own slots are written by later passes."""
        call = self._call
        assert call is not None  # of calls_of()
        # 1. What this pass takes in the source's run: x_t, and the prompt's keys and values of every layer.
        source_x = self.of("x_t", None, where)
        source_text = [
            (self.of("cross_k", layer, where), self.of("cross_v", layer, where))
            for layer in range(len(call.text))
        ]

        def at_point(share: float) -> None:
            """Run the pass with inputs of which this share is the source's."""
            x = call.x.lerp(source_x, share)
            text = []
            for (k, v), (source_k, source_v) in zip(call.text, source_text, strict=True):
                text.append((k.lerp(source_k, share), v.lerp(source_v, share)))
            flow = call.model.forward(x, call.t, text, call.kv_cache)
            sigma = self.sigmas[where.at.step or 0]
            with torch.enable_grad():
                hook_point("x0", None, flow_to_x0(flow, x, sigma, where.at.num_held))

        # 2. Record the pass in the middle of each of the points' equal shares of the way.
        num_values, watching = len(self.values), self._beside(self)
        self._own_x0, self._runs_again = x0.detach(), True
        try:
            for point in range(self.points):
                run = partial(at_point, (point + 0.5) / self.points)
                Context().run(self._again, where.at, watching, run)
        finally:
            self._runs_again, self._open = False, {}
            torch.set_grad_enabled(False)
        # 3. One pass has one value, that of its own x0.
        value = self.value_of(Graph(x0=self._own_x0), self._metric(where))
        self.values[num_values:] = [value.item()]
        self.reached[num_values + 1 :] = []

    def of(self, site: str, layer: int | None, where: ActivationSite) -> Tensor:
        """Return what the source has at a site of a pass; ConfigError where it has none."""
        place = ActivationSite(site, layer, where.at)
        if place not in self.source:
            raise errors.ConfigError(
                f"the source has no {place}: it must have the same frames, blocks and steps"
            )
        return self.source[place]

    def _metric(self, where: ActivationSite) -> Metric:
        """Return the metric of a pass: what was given, or the way from the own x0 to the source's."""
        if not self.follows_source:
            assert self.metric is not None
            return self.metric
        start = self._own_x0.double()
        way = self.of("x0", None, where).double() - start
        length = way.square().sum()
        if length == 0:  # both runs have the same x0 so far: nothing moves it, 0
            length = length + 1
        return lambda x0: ((x0.double() - start) * way).sum() / length

    def _differentiate(self, graph: Graph, metric: Metric, retain_graph: bool) -> None:
        where = next(iter(graph.nodes))
        if not self._runs_again:
            assert graph.x0 is not None
            self._own_x0 = graph.x0.detach()
        metric = self._metric(where)
        super()._differentiate(graph, metric, retain_graph)
        reached = float("nan")  # of the activations that a metric takes, the source has a few
        if not takes_activations(metric):
            reached = float(self.value_of(Graph(x0=self.of("x0", None, where)), metric))
        self.reached.append(reached)

    def take(self, graph: Graph, gradients: Sequence[Tensor]) -> None:
        for (where, node), gradient in zip(graph.nodes.items(), gradients, strict=True):
            before = self._own.get(where, node).detach()
            change = (self.of(where.site, where.layer, where) - before).double() * gradient.double()
            axes = SITES[where.site].split()
            score = change.sum([n for n, axis in enumerate(axes) if axis != "H"]).reshape(-1).float().cpu()
            self.scores[where] = self.scores.get(where, 0) + score / self.points


def size_of(outputs: Any) -> Tensor:
    """Return the mean size of what a part of a layer returned: a tensor or several."""
    if isinstance(outputs, Tensor):
        outputs = [outputs]
    return torch.stack([x.detach().abs().mean(dtype=torch.float32) for x in outputs]).sum()


class _Replay(Watcher):
    """In the backward pass: make the nodes that a recorder made, and keep none."""

    def __init__(self, recorder: Gradients):
        self.wants = recorder.wants  # type: ignore[method-assign]
        self.node = recorder.node

    def on_activation(self, x: Any, where: ActivationSite) -> Any:
        if self.wants(where.site, where.layer, where.at):
            return self.node(x)
        return None

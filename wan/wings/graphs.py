"""CUDA graphs of layers and of whole passes, added to a model from outside.

Python may launch the thirty kernels of a layer more slowly than a GPU runs them. Two graphs a layer launch
most of them: one for the projections, one for everything after attention. Attention itself, the KV cache and
captures run between the two, as they do without graphs.

On several GPUs each share is so small that the Python between the graphs takes longer than the GPU. There a
repeated pass (same slots of a cache, at the same addresses) becomes one graph of all layers (ReplayedPass),
including attention, the writes into the cache, and the frame values that a capture asks for.

Graphs read and write at fixed addresses. On one GPU keys, values and the product after attention are computed
between the graphs. On several GPUs the first graph ends with the exchange's send(), so all processes record
and replay alike.

    model = build_model(...)
    apply_cuda_graphs(model)  # before or after apply_head_parallel()

The first calls of a shape run without graphs, to choose and compile kernels; the next one records.
Afterwards weights may change in place, and model.to(...) drops the recordings; call forget_cuda_graphs(model)
before replacing weights in another way. Hooks inside a layer do not run during a replay. On a CPU a replay
computes again.
"""

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from threading import Lock
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wan import cache as kv
from wan import capture, keys, sites
from wan import model as wan_model
from wan.activations import SiteCapture
from wan.attention import Call
from wan.errors import one_line

Replay = Callable[[], None]


def apply_cuda_graphs(model: wan_model.CausalWanModel, after: int = 1, whole: bool | None = None) -> None:
    """Replay the layers of rollouts after so many calls of a shape, since recording takes time.

    Under gradients, edits or captured text attention they run as before. whole: whether passes become one
    graph too; None: on several GPUs.
    """
    recorder, fixed = Recorder(model.device), dict[Hashable, OnOneGPU]()
    layers = [ReplayedBlock(block, recorder, fixed, after) for block in model.blocks]
    for block, replayed in zip(model.blocks, layers, strict=True):
        vars(block)["forward"] = replayed
    vars(model)["run_layers"] = ReplayedPass(model, layers, recorder, whole)
    move = model._apply

    def forget_and_move(*args: Any, **kwargs: Any) -> Any:
        """Drop the graphs, which hold old addresses, then move: model.to() and similar call this."""
        forget_cuda_graphs(model)
        return move(*args, **kwargs)

    vars(model)["_apply"] = forget_and_move


def forget_cuda_graphs(model: wan_model.CausalWanModel) -> None:
    """Free all recordings, for example before moving weights; they are made again when needed."""
    for block in model.blocks:
        layer = vars(block).get("forward")
        if isinstance(layer, ReplayedBlock):
            for recordings in (layer.graphs, layer.texts, layer.copied, layer.fixed):
                recordings.clear()
            layer.recorder.renew()
    whole = vars(model).get("run_layers")
    if isinstance(whole, ReplayedPass):
        whole.forget()


# CUDA ends a recording with an error, for good, where an older graph is freed meanwhile. A dropped model is a
# reference cycle, so Python's collector may free its graphs at any moment: they are held here until no
# recording is under way.
_recording = Lock()
_retired: list[list[torch.cuda.CUDAGraph]] = []


def _retire(graphs: list[torch.cuda.CUDAGraph]) -> None:
    """Free the graphs of a deleted recorder: now, or before the next recording if one is running."""
    _retired.append(graphs)
    if _recording.acquire(blocking=False):  # the collector may run within record() of this very thread
        _retired.clear()
        _recording.release()


class Recorder:
    """Record calls that share one memory pool; tensors that a later call reads must be kept alive."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Goes before what a capture computes beside it (CaptureBeside): the lower number has priority.
            self.stream = torch.cuda.Stream(device, priority=-1)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.is_whole = False  # while the layers of a whole pass run, for a recording or in its place
        weakref.finalize(self, _retire, self.graphs).atexit = False
        self.renew()

    def renew(self) -> None:
        """Take a new memory pool; PyTorch refuses one whose graphs were all freed."""
        self.graphs.clear()
        self.pool: torch.cuda._POOL_HANDLE | None = None
        if self.stream:
            self.pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], None]) -> Replay:
        """Record call() without running it; return a function that launches all of its kernels at once.

        If recording fails, this recorder's calls run eagerly from then on, with one warning.
        """
        if self.stream is None:
            return call
        current = torch.cuda.current_stream(self.device)
        with _recording:
            _retired.clear()
            collects = gc.isenabled()
            gc.disable()  # a collection could free other CUDA objects, of which a recording knows nothing
            self.stream.wait_stream(current)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.stream(self.stream):
                    # "global" forbids what NCCL's watchdog does in its own thread
                    graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                    try:
                        call()
                    finally:
                        graph.capture_end()  # else the stream records for ever, and the process has lost it
            except RuntimeError as error:
                self.stream = None
                message = f"calls run without CUDA graphs, since recording one failed: {one_line(error)}"
                warnings.warn(message, stacklevel=2)
                return call
            finally:
                if collects:
                    gc.enable()
        current.wait_stream(self.stream)
        self.graphs.append(graph)
        return graph.replay


class OnOneGPU:
    """Hold the tensors at fixed addresses that all layers' graphs of one shape read and write.

    The methods define what runs in which graph, and what runs between them.
    """

    def __init__(self, x: Tensor, inputs: wan_model.LayerInputs, num_heads: int):
        self.x = torch.empty_like(x, memory_format=torch.contiguous_format)  # at the end, what a layer gives
        self.time = torch.empty_like(inputs.time)
        queries, keys = ((torch.empty_like(cos), torch.empty_like(sin)) for cos, sin in inputs.rope)
        self.rope = wan_model.Rope(queries, keys)
        self._taken: tuple[Tensor, wan_model.Rope] | None = None
        self.allocate(num_heads)

    def allocate(self, num_heads: int) -> None:
        """Allocate the tensors that pass from graph to graph."""
        self.normed = torch.empty_like(self.x)  # what self-attention is given, and then what it gives
        self.keys = torch.empty_like(self.x)  # before their norm
        self.queries = torch.empty_like(self.x).unflatten(-1, (num_heads, -1))

    def take(self, x: Tensor, inputs: wan_model.LayerInputs) -> None:
        """Copy a layer's input in: x unless the layer before wrote it here, the rest once per forward."""
        if x is not self.x:
            self.x.copy_(x)
        time, rope = inputs.time, inputs.rope
        if self._taken is None or self._taken[0] is not time or self._taken[1] is not rope:
            self.time.copy_(time)
            copy_all([*self.rope.queries, *self.rope.keys], [*rope.queries, *rope.keys])
            # Held so that nothing else can be the same object; the inputs would hold their KV cache too.
            self._taken = time, rope

    def project(self, block: wan_model.Block, with_raw: bool) -> None:
        """Compute the recorded part before attention."""
        attend, attn = block.modulations(self.time)[0], block.self_attn
        wan_model.modulated_norm(self.x, attend.scale, attend.shift, eps=block.eps, out=self.normed)
        attn.norm_q(attn.q(self.normed), self.rope.queries, self.queries)
        wan_model.multiply(attn.k, self.normed, self.keys)

    def attend(self, attn: wan_model.SelfAttention, inputs: wan_model.LayerInputs) -> None:
        """Compute what is not recorded: keys, values, attention and the product after it."""
        projected = [self.queries, attn.norm_k(self.keys, self.rope.keys), attn.values(self.normed)]
        if inputs.kv_cache is not None and inputs.kv_cache.stores_raw:
            projected.append(attn.norm_k(self.keys))
        attn.merge(attn.attend(projected, inputs), self.normed)

    def merged(self, attn: wan_model.SelfAttention) -> Tensor:
        """Return self-attention's output, inside the second recorded part."""
        return self.normed

    def finish(self, block: wan_model.Block, text: tuple[Tensor, Tensor]) -> None:
        """Compute the recorded part after attention, into x."""
        attend, feed = block.modulations(self.time)
        seen = self.merged(block.self_attn)
        x, fed = block.feed(self.x, seen, attend, feed, text)
        wan_model.gated_add(x, fed, feed.gate, self.x)


class OnSeveralGPUs(OnOneGPU):
    """The first graph sends tokens; the second one receives the heads' outputs."""

    def allocate(self, num_heads: int) -> None:
        self.projected: tuple[Tensor, ...] = ()
        self.heads: Tensor | None = None  # what its heads saw

    def project(self, block: wan_model.Block, with_raw: bool) -> None:
        attend = block.modulations(self.time)[0]
        normed = wan_model.modulated_norm(self.x, attend.scale, attend.shift, block.eps)
        projected = block.self_attn.project(normed, self.rope, with_raw)
        self.projected = self.projected or projected
        copy_all(self.projected, projected)

    def attend(self, attn: wan_model.SelfAttention, inputs: wan_model.LayerInputs) -> None:
        heads = attn.attend(self.projected, inputs)
        if self.heads is None:
            self.heads = heads
        copy_all([self.heads], [heads])

    def merged(self, attn: wan_model.SelfAttention) -> Tensor:
        assert self.heads is not None
        return attn.merge(self.heads)


class ReplayedBlock:
    """The forward of a layer: two graphs, and self-attention between them."""

    def __init__(
        self,
        block: wan_model.Block,
        recorder: Recorder,
        fixed: dict[Hashable, OnOneGPU],
        after: int,
    ):
        self.block, self.recorder, self.fixed, self.after = block, recorder, fixed, after
        self.eager: Callable[..., Tensor] = block.forward
        if isinstance(self.eager, ReplayedBlock):
            self.eager = self.eager.eager
        self.graphs: dict[Hashable, Replay] = {}
        self.texts: dict[Hashable, tuple[Tensor, Tensor]] = {}  # the prompt's, at fixed addresses
        self.copied: dict[Hashable, weakref.ref[Tensor]] = {}  # and whose they are now
        self.calls: Counter[Hashable] = Counter()  # without graphs

    def __call__(self, x: Tensor, text: tuple[Tensor, Tensor], inputs: wan_model.LayerInputs) -> Tensor:
        # 1. Training and whoever looks inside a layer need its Python; so do the first calls of a shape, and
        #    the recording of a whole pass.
        if self.recorder.is_whole:
            return self.eager(x, text, inputs)
        by, attn, kv_cache = sites.observer(), self.block.self_attn, inputs.kv_cache
        hidden = sites.is_hidden(self.block.layer) or (by and by.wants(self.block.cross_attn.site))
        if kv_cache is None or inputs.mask is not None or hidden or torch.is_grad_enabled():
            if any(isinstance(watcher, SiteCapture) for watcher in sites.watchers()):
                say_that_graphs_wait()
            return self.eager(x, text, inputs)
        with_raw = attn.site.shard is not None and kv_cache.stores_raw  # one GPU has them between the graphs
        key = with_raw, x.shape, inputs.time.shape, inputs.rope.keys[0].shape, text[0].shape
        if self.calls[key] < self.after:
            self.calls[key] += 1
            return self.eager(x, text, inputs)

        # 2. Bring the inputs to the addresses that the graphs know.
        if key not in self.fixed:  # of all layers
            kind = OnOneGPU
            if attn.site.shard is not None:
                kind = OnSeveralGPUs
            self.fixed[key] = kind(x, inputs, attn.num_heads)
        fixed = self.fixed[key]
        fixed.take(x, inputs)
        fixed_text = self.text_of(text)
        # 3. Graph, attention, graph.
        if ("before", key) not in self.graphs:
            fixed.project(self.block, with_raw)  # compiles what no call without graphs did; finds addresses
        self._replay(("before", key), lambda: fixed.project(self.block, with_raw))
        fixed.attend(attn, inputs)
        self._replay(("after", key), lambda: fixed.finish(self.block, fixed_text))
        return fixed.x

    def text_of(self, text: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the prompt's keys and values at the addresses that the graphs read."""
        shape = text[0].shape
        if shape not in self.texts:
            self.texts[shape] = torch.empty_like(text[0]), torch.empty_like(text[1])
        copied = self.copied.get(shape)
        if copied is None or copied() is not text[0]:  # once a prompt: nobody writes what a rollout computed
            copy_all(self.texts[shape], text)
            self.copied[shape] = weakref.ref(text[0])
        return self.texts[shape]

    def _replay(self, name: Hashable, call: Callable[[], None]) -> None:
        if name not in self.graphs:
            self.graphs[name] = self.recorder.record(call)
        self.graphs[name]()


@dataclass(eq=False)
class WholePass:
    """One graph of all layers and its outputs, which the next replay overwrites."""

    x: Tensor  # [B, L, dim]
    replay: Replay = field(init=False)
    calls: list[capture.CapturedCall] = field(default_factory=list)  # what a capture keeps of the pass
    flat: Tensor | None = None  # their values, one behind the other


class PassKey(NamedTuple):
    """What two passes have in common if one graph serves both."""

    shapes: tuple[torch.Size, ...]
    addresses: tuple[int, ...]  # of the cache's buffers
    num_slots: int
    own: tuple[int, int]  # slots of the block, from the first to behind the last
    requests: tuple[Hashable, ...]


READ_IN_PASSES = ("written", "own_slots", "layout")  # methods of a policy that see queries, or the pass


class ReplayedPass:
    """Run all layers of a pass: one by one, or as one graph if the pass was seen before and needs no Python.

    Passes are the same if slots and addresses of the cache, shapes, and requested values are. Recording takes
    as long as a pass, so a pass is recorded the AFTER-th time: in the second video, with five passes a block.
    """

    AFTER = 5
    AT_MOST = 128  # graphs; caches at ever new addresses would make more and more of them

    def __init__(
        self,
        model: wan_model.CausalWanModel,
        layers: list[ReplayedBlock],
        recorder: Recorder,
        whole: bool | None,
    ):
        self.model, self.layers, self.recorder, self.whole = model, layers, recorder, whole
        self.in_turn = MethodType(type(model).run_layers, model)
        self.beside: torch.cuda.Stream | None = None
        if recorder.stream:
            self.beside = torch.cuda.Stream(model.device)
        self.forget()

    def forget(self) -> None:
        self.fixed: dict[tuple[torch.Size, ...], Inputs] = {}  # by shapes
        self.passes: dict[PassKey, WholePass | None] = {}  # None: what is captured of it does not fit
        self.counts: Counter[PassKey] = Counter()
        self.newest: weakref.ref[kv.KVCache] | None = None  # the newest cache, and its addresses
        self.addresses: tuple[int, ...] = ()

    def __call__(self, x: Tensor, text: wan_model.TextKeysValues, inputs: wan_model.LayerInputs) -> Tensor:
        by = sites.observer()
        # 1. A pass that needs Python runs layer by layer; so do the first of a kind.
        key = self.key_of(x, text, inputs, by)
        if key is None:
            return self.in_turn(x, text, inputs)
        if key not in self.passes and not self.is_due(key):
            self.count(key)
            return self.watched_in_turn(key, x, text, inputs, by)
        if key in self.passes and self.passes[key] is None:
            return self.in_turn(x, text, inputs)
        # 2. Copy the inputs to the addresses that the graph reads.
        if key.shapes not in self.fixed:
            self.fixed[key.shapes] = Inputs(x, inputs)
        fixed = self.fixed[key.shapes]
        fixed.take(x, inputs)
        fixed_text = [layer.text_of(pair) for layer, pair in zip(self.layers, text, strict=True)]
        fixed_inputs = replace(inputs, time=fixed.time, rope=fixed.rope)
        # 3. Record, and replay.
        whole = self.passes.get(key)
        if whole is None:
            whole = self.passes[key] = WholePass(fixed.x)
            run = partial(self.run, whole, fixed.x, fixed_text, fixed_inputs, by)
            whole.replay = self.recorder.record(run)
        whole.replay()
        # 4. Copy captured values out of the graph's memory.
        if by and whole.flat is not None:
            sizes = [values.numel() for call in whole.calls for values in call.values.values()]
            assert inputs.kv_cache is not None  # or it had no key
            by.calls += self.calls_of(whole, whole.flat.clone().split(sizes), inputs.kv_cache.layouts)
        return whole.x

    def is_due(self, key: PassKey) -> bool:
        """Return whether a pass was seen often enough to be recorded, and there is room for its graph."""
        return self.counts[key] >= self.AFTER and len(self.passes) < self.AT_MOST

    def count(self, key: PassKey) -> None:
        """Count a pass that runs layer by layer."""
        if len(self.counts) > 8 * self.AT_MOST:  # most are of caches that are gone
            self.counts.clear()
        self.counts[key] += 1

    def watched_in_turn(
        self,
        key: PassKey,
        x: Tensor,
        text: wan_model.TextKeysValues,
        inputs: wan_model.LayerInputs,
        by: capture.Capture | None,
    ) -> Tensor:
        """Run layer by layer; remember a pass of which more is captured than a graph can hold."""
        if by is None:
            return self.in_turn(x, text, inputs)
        before = len(by.calls)
        x = self.in_turn(x, text, inputs)
        if not all(map(fits_a_graph, by.calls[before:])):
            self.passes[key] = None
        return x

    def key_of(
        self, x: Tensor, text: wan_model.TextKeysValues, inputs: wan_model.LayerInputs, by: object
    ) -> PassKey | None:
        """Return the key under which a pass is recorded; None if it needs Python."""
        # 1. Whole passes are replayed by several GPUs with peer memory, or where they are asked for.
        shard, kv_cache = self.model.head_shard, inputs.kv_cache
        by_peers = getattr(shard, "peer_memory", None) is not None
        is_asked = by_peers or (self.whole and shard is None)
        if not is_asked or self.whole is False:
            return None
        # 2. A cache of one buffer a layer, whose policy runs no Python in write() or between passes.
        if type(kv_cache) is not kv.KVCache or inputs.mask is not None:
            return None
        policy, plain = type(kv_cache.policy), kv.CachePolicy
        overridden = [name for name in READ_IN_PASSES if getattr(policy, name) is not getattr(plain, name)]
        if overridden or kv_cache.stores_raw or not kv_cache.layouts[0].is_plain:
            return None
        # 3. Nobody edits, differentiates or hooks layers, and captures ask for frame values alone.
        if sites.watchers() or torch.is_grad_enabled() or any(self.hooks()):
            return None
        requests = self.requests_of(by, len(x))
        if requests is None:
            return None
        if self.newest is None or self.newest() is not kv_cache:
            self.newest = weakref.ref(kv_cache)
            self.addresses = tuple(buffer.data_ptr() for buffer in (*kv_cache.keys, *kv_cache.values))
        return PassKey(
            shapes=(x.shape, inputs.time.shape, inputs.rope.keys[0].shape, text[0][0].shape),
            addresses=self.addresses,
            num_slots=len(kv_cache.slots),
            own=(kv_cache.own.start, kv_cache.own.stop),
            requests=requests,
        )

    def hooks(self) -> Iterator[Any]:
        """Yield hooks between layers that a replay would skip; those marked is_replayed are recorded."""
        for block in self.model.blocks:
            yield from block._forward_hooks.values()
            for hook in block._forward_pre_hooks.values():
                if not getattr(hook, "is_replayed", False):
                    yield hook

    def requests_of(self, by: object, batch: int) -> tuple[Hashable, ...] | None:
        """Return what a capture asks of each layer; None if it is more than frame values of one video."""
        if by is None:
            return ()
        at = sites.current_pass()
        if type(by) is not capture.Capture or batch > 1 or at is None or at.parts:
            return None
        layers = [attn.site for block in self.model.blocks for attn in (block.self_attn, block.cross_attn)]
        wanted: list[Hashable] = []
        for request in by.requests:
            chosen = tuple(site.layer for site in layers if request.wants(site, at))
            by_frame = request.granularity == "frame" and request.kinds == ("self",)
            if chosen and (not by_frame or request.query_key_means or request.call_indices is not None):
                return None
            wanted.append((chosen, request.mass, request.rope_bands))
        return tuple(wanted)

    def run(
        self,
        whole: WholePass,
        x: Tensor,
        text: wan_model.TextKeysValues,
        inputs: wan_model.LayerInputs,
        by: capture.Capture | None,
    ) -> None:
        """Run the layers one by one and concatenate the values that a capture keeps."""
        beside: CaptureBeside | None = None
        if by:
            beside = CaptureBeside(by.requests, self.beside)
        self.recorder.is_whole = True
        try:
            with sites.observed(beside):
                whole.x = self.in_turn(x, text, inputs)
        finally:
            self.recorder.is_whole = False
        if beside and beside.calls:
            beside.join()
            whole.calls = beside.calls
            whole.flat = torch.cat([x.reshape(-1) for call in whole.calls for x in call.values.values()])

    def calls_of(
        self, whole: WholePass, parts: Sequence[Tensor], layouts: Sequence[keys.KeyLayout]
    ) -> Iterator[capture.CapturedCall]:
        """Yield the captured calls of the current pass, of the parts [n] of their values in turn."""
        at, remaining = sites.current_pass(), iter(parts)
        for call in whole.calls:
            values = {name: next(remaining).view(like.shape) for name, like in call.values.items()}
            layout = layouts[call.site.layer].on_host
            yield replace(call, at=at, values=values, layout=layout)


class CaptureBeside(capture.Capture):
    """Compute captured values on a second stream beside the layers; the streams join when the pass ends.

    Layers leave part of a GPU idle while they exchange tokens and where a product is too small to fill it;
    the smaller a GPU's share of the heads, the larger that part.
    """

    def __init__(self, requests: tuple[capture.CaptureRequest, ...], stream: "torch.cuda.Stream | None"):
        super().__init__(requests)
        self.stream = stream
        self.in_use: list[tuple[Tensor | None, ...]] = []  # keeps memory that the stream reads

    def observe(self, call: Call) -> None:
        if self.stream is not None and self.wants(call.site):
            # Peers overwrite these queries with the next layer's; keys stay in the cache during the pass.
            call = replace(call, q=call.q.clone())
            self.in_use.append((call.q, call.k, call.lse, call.tails))
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            super().observe(call)

    def join(self) -> None:
        """Let the current stream wait for the second one, at the end of a pass."""
        if self.in_use and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.in_use.clear()


class Inputs(OnOneGPU):
    """Hold the inputs of a pass at fixed addresses."""

    def __init__(self, x: Tensor, inputs: wan_model.LayerInputs):
        super().__init__(x, inputs, num_heads=1)

    def allocate(self, num_heads: int) -> None:
        """Allocate nothing: everything else is in the graph's own memory."""


def fits_a_graph(call: capture.CapturedCall) -> bool:
    """Return whether a call's values stay on the GPU until the capture ends and can be concatenated."""
    return all(x.numel() <= capture.SMALL and x.dtype == torch.float32 for x in call.values.values())


@cache
def say_that_graphs_wait() -> None:
    warnings.warn(
        "layers run without their CUDA graphs in passes whose activations are captured", stacklevel=5
    )


def copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr():  # several GPUs exchange by buffers of their own
            target.copy_(source)

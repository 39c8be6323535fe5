"""Gradients of a session's videos at named sites: of a pass's x0, of a block, through a rollout.

with gradients(session, "z", layers=[5], blocks=[6], steps=[3]) as grads:
    run = session.generate("a red circle moving right over a dark blue background", seed=42)
    grads.backward(lambda x0: x0.square().mean())
grads["z"].stack()  # named and shaped like captured activations
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

from experiments.caches.activations import Activations, save_activations
from experiments.captured import as_numbers, check_capture, tables
from experiments.extraction import memory
from experiments.session import Session
from wan.activations import SiteCapture
from wan.errors import ConfigError
from wan.gradients import Gradients, Metric
from wan.sites import check_site, watched

STAY = ("full", "window")  # policies whose keys stand where they were made


@contextmanager
def gradients(
    session: Session,
    *sites: Any,
    through: str = "pass",
    metric: Metric | None = None,
    recompute: bool = False,
    **chosen: Any,
) -> Iterator["SiteGradients"]:
    """Record videos made in this context with autograd, for gradients at some sites (wan.sites.SITES).

    chosen are layers, blocks and steps (a number or several; every one where not given) and to (a device, or
    None to stay). through says of which x0: of each chosen "pass", of a whole "block", whose steps depend on
    each other, or of the "rollout" from the first chosen block on, through the KV cache. Else the keys and
    values of earlier blocks are constants. metric(x0) is given here, and each graph is freed at once, or to
    backward(). recompute keeps less of each layer, and takes about one forward more. The video is the plain
    one, in the bits of a CPU; a GPU computes recorded passes without fused kernels and graphs. Raises
    ConfigError for what the model does not have, cannot be differentiated or does not fit in memory.
    """
    for name in {"layers", "blocks", "steps"} & {*chosen}:
        chosen[name] = as_numbers(name, chosen[name])
    recorder = Gradients(tuple(check_site(name) for name in sites), through=through, metric=metric, **chosen)
    check_gradients(session, recorder, recompute)
    with watched(recorder), recorder.recomputed(session.model) if recompute else nullcontext():
        yield SiteGradients(session, recorder)


def check_gradients(session: Session, recorder: Gradients, recompute: bool = False) -> None:
    """Raise ConfigError for what a run does not have, cannot be differentiated or does not fit in memory."""
    config, model, sites = session.config, session.model_config, recorder.sites
    policy, problem = config.policy, ""
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
        raise ConfigError(f"gradients: {problem}")
    chosen = SiteCapture(sites, recorder.layers, recorder.blocks, recorder.steps)
    check_capture(session, chosen, streams=False)
    needed = memory.bytes_of_graphs(config, model, chosen, recorder.through, session.dtype, recompute)
    if recorder.metric is not None and recorder.through != "rollout":  # one graph at a time
        needed //= recorder_graphs(config, recorder)
    where, free = "host", psutil.virtual_memory().available
    if session.device.type == "cuda":
        where, free = "GPU", torch.cuda.mem_get_info(session.device)[0]
    if needed > free:
        raise ConfigError(
            f"gradients at {', '.join(sites)} keep about {memory.amount(needed)}, and {memory.amount(free)} "
            f"of {where} memory are free: choose blocks, steps or layers, give metric= here, or recompute"
        )


def recorder_graphs(config: Any, recorder: Gradients) -> int:
    """Count the graphs of a rollout."""
    blocks = range(len(config.block_sizes)) if recorder.blocks is None else recorder.blocks
    if recorder.through == "block":
        return len(blocks)
    steps = [{*config.passes_of_block(block)[:-1]} for block in blocks]
    return max(1, sum(len(own if recorder.steps is None else own & {*recorder.steps}) for own in steps))


class SiteGradients(Mapping[str, Activations]):
    """Gradients by site, of the last run that was made in the context.

    >>> with gradients(session, "z", layers=[5], blocks=[6], steps=[3]) as grads:
    ...     session.generate("a red circle moving right", seed=42)
    ...     grads.backward(lambda x0: x0[:, :, :, 2:6, 2:6].mean())
    >>> grads["z"].stack().shape  # [layers, blocks, steps, B, L, H, D]
    [1, 1, 1, 1, 48, 12, 16]
    """

    def __init__(self, session: Session, recorder: Gradients):
        self.session, self.recorder = session, recorder

    def backward(self, metric: Metric, retain_graph: bool = False) -> None:
        """Compute the gradient of metric(x0), or metric(x0, seen), for each recorded graph.

        x0 is [B, n, C, h, w] of the pass or the block's last one, [B, F, C, h, w] of a rollout. seen has the
        activations by site, in the order of calls: seen["z"][0]. Graphs are freed unless retain_graph.
        """
        self.recorder.backward(metric, retain_graph)

    @property
    def values(self) -> list[float]:  # type: ignore[override]  # those of the mapping are tables
        """What metric was, graph by graph."""
        return self.recorder.values

    @property
    def tables(self) -> dict[str, Activations]:
        """The gradients by site; ConfigError before there are some."""
        if not self.recorder.found:
            raise ConfigError("no gradient is there yet: generate, then call backward(lambda x0: ...)")
        return tables(self.recorder.found)

    def __getitem__(self, site: str) -> Activations:
        return self.tables[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.recorder.sites)

    def __len__(self) -> int:
        return len(self.recorder.sites)

    def save(self, path: str | Path) -> Path:
        """Write the gradients, which load_cache reads like activations: a .safetensors."""
        return save_activations(path, self.tables, {"model": self.session.config.model, "gradients": True})

    def __repr__(self) -> str:
        recorder = self.recorder
        what = f"{len(recorder.found)} gradients" if recorder.found else f"{len(recorder.graphs)} graphs"
        return f"SiteGradients: {', '.join(recorder.sites)} through each {recorder.through}, {what}"

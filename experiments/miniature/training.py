"""A training loop that can be killed: float32 masters behind bf16 weights, their moving average, CUDA
graphs, exact resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.caches.atomic_files import replacing
from experiments.caches.errors import CacheError, StoppedError
from experiments.miniature.optimizer import Optimizer
from experiments.miniature.ranks import Ranks

GRAPH_WARM_UP = 3  # eager calls before a CUDA graph is captured, as PyTorch asks
LR_WARM_UP = 200  # steps
SAVE_SECONDS = 60.0
AVERAGE_DECAY = 0.999
AGREE_EVERY = 20  # steps; ranks read the first one's clock that often


class Schedule:
    """How far a stage has come: by its steps or, where its time ends first, by its minutes.

    Seconds count over all runs of the stage. With steps alone (minutes None) nothing depends on a clock.
    Ranks go by the clock of the first one.
    """

    def __init__(self, steps: int, minutes: float | None = None, ranks: Ranks | None = None):
        self.total_steps, self.budget = steps, None if minutes is None else 60 * minutes
        self.ranks, self.agreed_seconds = ranks or Ranks(), 0.0
        self.begin, self.earlier_seconds, self.step = time.monotonic(), 0.0, 0

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + time.monotonic() - self.begin

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end."""
        seconds = self.seconds if self.ranks.count == 1 else self.agreed_seconds
        by_time = 0.0 if self.budget is None else seconds / self.budget
        return min(1.0, max(self.step / self.total_steps, by_time))

    def agree(self) -> None:
        """Before every step: now and then all ranks read the first one's clock."""
        if self.ranks.count > 1 and self.step % AGREE_EVERY == 0:
            self.agreed_seconds = self.ranks.agree(self.seconds)


class Trainer:
    """Working weights (bf16 on a GPU), float32 masters under AdamW, and their moving average as modules.

    Models this small leave a GPU waiting for Python, so each kind of step runs as CUDA graphs after its
    first calls. Parameters that do not require gradients stay as they are.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        peak_lr: float,
        schedule: Schedule,
        dtype: torch.dtype,
        in_muon: Callable[[str, Tensor], bool] = lambda name, p: False,
    ):
        """in_muon says by name which parameters are Muon's."""
        self.averaged_modules = [deepcopy(m).float().requires_grad_(False) for m in modules]
        named = [(name, p) for m in modules for name, p in m.named_parameters()]
        trained = [p.requires_grad for _, p in named]
        self.params: list[Tensor] = [p for _, p in named if p.requires_grad]
        self.averages: list[Tensor] = list(
            compress((p for m in self.averaged_modules for p in m.parameters()), trained)
        )
        self.masters: list[Tensor] = [p.detach().float().clone() for p in self.params]
        self.gradients = self._one_buffer_of_gradients()
        device = self.params[0].device
        self.on_gpu = device.type == "cuda"
        self.lr = torch.zeros((), device=device)  # a tensor, so that graphs see it change
        self.optimizer = Optimizer(
            self.masters, [in_muon(name, p) for name, p in named if p.requires_grad], self.lr
        )
        for m in modules:
            m.to(dtype)
        self.peak_lr, self.schedule, self.ranks = peak_lr, schedule, schedule.ranks
        self.curve: list[list[float]] = []  # [step, seconds, loss]
        self.notes: dict[str, list] = {}  # what a stage measures on the way
        self.calls: dict[str, int] = {}
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def _one_buffer_of_gradients(self) -> Tensor:
        """All gradients of the masters, as one tensor that ranks average at once."""
        buffer = torch.zeros(sum(m.numel() for m in self.masters), device=self.masters[0].device)
        for master, part in zip(self.masters, buffer.split([m.numel() for m in self.masters]), strict=True):
            master.grad = part.as_strided(master.size(), master.stride(), part.storage_offset())  # its layout
        return buffer

    @property
    def steps(self) -> int:
        return self.schedule.step

    def step(self, kind: str, loss: Callable[[], Tensor]) -> None:
        """One update along the gradient of loss(), which draws its own data. Steps of a kind have the same
        shapes.

        The learning rate warms up over 200 steps and falls to zero by a cosine.
        """
        decayed = self.peak_lr * 0.5 * (1 + math.cos(math.pi * self.schedule.progress))
        self.lr.fill_(decayed * min(1, (self.steps + 1) / LR_WARM_UP))
        value = self._run(kind, lambda: self._backward(loss))
        self.ranks.average(self.gradients)
        self._run("update", self._update)
        decay = min(AVERAGE_DECAY, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.masters, 1 - decay)
        if self.steps % 100 == 0:
            self.curve.append([self.steps, round(self.schedule.seconds, 1), round(value.item(), 5)])
        self.schedule.step += 1

    def _run(self, kind: str, call: Callable[[], Tensor]) -> Tensor:
        """What call() returns, eager or replayed."""
        calls = self.calls[kind] = self.calls.get(kind, 0) + 1
        if not self.on_gpu:
            return call()
        if calls <= GRAPH_WARM_UP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                value = call()
            torch.cuda.current_stream().wait_stream(side)
            return value
        if kind not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog asks for its events in a thread of its own, which "global" forbids.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                value = call()
            self.graphs[kind] = graph, value
        graph, value = self.graphs[kind]
        graph.replay()
        return value

    def _backward(self, loss: Callable[[], Tensor]) -> Tensor:
        """Gradients of the masters; the loss."""
        for p in self.params:
            p.grad = None
        value = loss()
        value.backward()
        with torch.no_grad():
            torch._foreach_copy_(gradients(self.masters), gradients(self.params))
        return value.detach()

    def _update(self) -> Tensor:
        """One step of the optimizer; the norm of the gradients before it."""
        with torch.no_grad():
            norm = nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.optimizer.step()
            torch._foreach_copy_(self.params, self.masters)
        return norm

    # -- stopping and going on ------------------------------------------------------------------------------

    def train(
        self,
        state_file: Path,
        resume: bool,
        one_step: Callable[[int], None],
        save_weights: Callable[[], None],
    ) -> None:
        """Call one_step(step) to the stage's end, at least once, then save_weights().

        The state of a process alone is saved every minute and on Ctrl-C, and removed at the end. Several
        ranks keep no state: the first one saves the weights every minute. Raises StoppedError on Ctrl-C.
        """
        alone = self.ranks.count == 1
        if not alone:  # weights were drawn alike, clips must not be
            torch.manual_seed(self.ranks.seed(torch.initial_seed()))
        if resume:
            self.load_state(state_file)
        saved = time.monotonic()
        try:
            while self._goes_on():
                one_step(self.steps)
                if self.ranks.first and time.monotonic() - saved > SAVE_SECONDS:
                    if alone:
                        self.save_state(state_file)
                    else:
                        save_weights()
                    saved = time.monotonic()
        except KeyboardInterrupt:
            if not alone:
                raise
            self.save_state(state_file)
            raise StoppedError(
                f"stopped at step {self.steps}; the same command with --resume goes on from there"
            ) from None
        if self.ranks.first:
            save_weights()
            state_file.unlink(missing_ok=True)

    def _goes_on(self) -> bool:
        self.schedule.agree()
        return self.schedule.progress < 1 or not self.steps

    def save_state(self, path: Path) -> None:
        """Everything that later steps depend on: weights, moments, the random numbers to come."""
        state = {
            "step": self.steps,
            "total_steps": self.schedule.total_steps,
            "seconds": self.schedule.seconds,
            "curve": self.curve,
            "notes": self.notes,
            "masters": self.masters,
            "averages": self.averages,
            "optimizer": self.optimizer.state(),
            "random": torch.get_rng_state(),
            "gpu_random": torch.cuda.get_rng_state(self.lr.device) if self.on_gpu else None,
        }
        with replacing(path) as file:
            torch.save(state, file)

    def load_state(self, path: Path) -> None:
        """Go on where save_state was called. Raises CacheError where the file is of another training."""
        if not path.is_file():
            raise CacheError(f"{path} not found, so nothing can be resumed; leave --resume out")
        try:
            state = torch.load(path, weights_only=True, map_location=self.lr.device)
            if state["total_steps"] != self.schedule.total_steps:
                raise CacheError(
                    f"{path} is of a stage of {state['total_steps']} steps, not "
                    f"{self.schedule.total_steps}; give --steps {state['total_steps']}"
                )
            with torch.no_grad():
                torch._foreach_copy_(self.masters, state["masters"])
                torch._foreach_copy_(self.averages, state["averages"])
                torch._foreach_copy_(self.params, self.masters)
            self.optimizer.load(state["optimizer"])
            torch.set_rng_state(state["random"].cpu())
            if self.on_gpu:
                torch.cuda.set_rng_state(state["gpu_random"].cpu(), self.lr.device)
        except CacheError:
            raise
        except Exception as error:  # whatever a damaged file makes torch raise
            raise CacheError(
                f"{path} is no state of this stage ({type(error).__name__}); remove it"
            ) from error
        self.schedule.step, self.schedule.earlier_seconds = state["step"], state["seconds"]
        self.curve, self.notes = state["curve"], state["notes"]

    # -- results --------------------------------------------------------------------------------------------

    def averaged(self) -> list[Any]:
        """Copies of the modules with averaged weights in bf16, as they are written."""
        return [deepcopy(m).to(torch.bfloat16) for m in self.averaged_modules]

    def numbers(self) -> dict:
        """What a log says of the training; the curve holds [step, seconds, loss]."""
        last = [loss for *_, loss in self.curve[-10:]]
        return {
            "steps": self.steps,
            "seconds": round(self.schedule.seconds, 1),
            "parameters": sum(p.numel() for p in self.params),
            "loss_mean_of_last_10": round(sum(last) / len(last), 5),
            "loss_curve": self.curve,
            **self.notes,
        }


def gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of tensors that a backward pass has reached."""
    return [tensor.grad for tensor in tensors if tensor.grad is not None]

"""A training loop that ends on time: float32 masters behind bf16 weights, their moving average, CUDA graphs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import compress

import torch
from torch import Tensor, nn

WARM_UP = 3  # eager calls before a CUDA graph is captured, as PyTorch asks


class Clock:
    """The time a stage has, from now on."""

    def __init__(self, minutes: float):
        self.begin, self.budget = time.monotonic(), 60 * minutes

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def progress(self) -> float:
        return self.seconds / self.budget


class Trainer:
    """Working weights in bf16 (float32 on a CPU), float32 masters under AdamW, and their moving average as modules.

    Models this small leave a GPU waiting for Python, so each kind of step runs as one CUDA graph after its first calls.
    Parameters that do not require gradients stay as they are.
    """

    def __init__(self, modules: Sequence[nn.Module], peak_lr: float, clock: Clock, ema_decay: float = 0.999):
        self.ema = [deepcopy(m).float().requires_grad_(False) for m in modules]
        trained = [p.requires_grad for m in modules for p in m.parameters()]
        self.params = list(compress((p for m in modules for p in m.parameters()), trained))
        self.averages = list(compress((p for m in self.ema for p in m.parameters()), trained))
        self.masters = [p.detach().float().clone() for p in self.params]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        device = self.params[0].device
        self.on_gpu = device.type == "cuda"
        self.lr = torch.zeros((), device=device)  # a tensor, so that graphs see it change
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=self.lr,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=self.on_gpu,
            capturable=self.on_gpu,
        )
        for m in modules:
            m.to(torch.bfloat16 if self.on_gpu else torch.float32)
        self.peak_lr, self.ema_decay, self.clock = peak_lr, ema_decay, clock
        self.steps, self.curve = 0, []
        self.calls: dict[str, int] = {}
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def step(self, kind: str, loss: Callable[[], Tensor]) -> None:
        """One update along the gradient of loss(), which draws its own data; steps of a kind have the same shapes.

        The learning rate warms up over 200 steps and falls to zero by a cosine over the time given.
        """
        decayed = self.peak_lr * 0.5 * (1 + math.cos(math.pi * min(self.clock.progress, 1)))
        self.lr.fill_(decayed * min(1, (self.steps + 1) / 200))
        value = self._run(kind, loss)
        decay = min(self.ema_decay, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.masters, 1 - decay)
        if self.steps % 100 == 0:
            self.curve.append([self.steps, round(self.clock.seconds, 1), round(value.item(), 5)])
        self.steps += 1

    def _run(self, kind: str, loss: Callable[[], Tensor]) -> Tensor:
        """The update, eager or replayed; the loss before it."""
        calls = self.calls[kind] = self.calls.get(kind, 0) + 1
        if not self.on_gpu:
            return self._update(loss)
        if calls <= WARM_UP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                value = self._update(loss)
            torch.cuda.current_stream().wait_stream(side)
            return value
        if kind not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                value = self._update(loss)
            self.graphs[kind] = graph, value
        graph, value = self.graphs[kind]
        graph.replay()
        return value

    def _update(self, loss: Callable[[], Tensor]) -> Tensor:
        for p in self.params:
            p.grad = None
        value = loss()
        value.backward()
        with torch.no_grad():
            torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.params])
            nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.optimizer.step()
            torch._foreach_copy_(self.params, self.masters)
        return value.detach()

    def loop(self, save: Callable[[], None]) -> Iterator[int]:
        """Step numbers until the time is over, at least one; save() is called every minute and at the end."""
        saved = self.clock.seconds
        while self.clock.progress < 1 or not self.steps:
            yield self.steps
            if self.clock.seconds - saved > 60:
                save()
                saved = self.clock.seconds
        save()

    def averaged(self) -> list[nn.Module]:
        """Copies of the modules with averaged weights in bf16, as they are written."""
        return [deepcopy(m).to(torch.bfloat16) for m in self.ema]

    def numbers(self) -> dict:
        """What a log says of the training; the curve holds [step, seconds, loss]."""
        last = [loss for *_, loss in self.curve[-10:]]
        return {
            "steps": self.steps,
            "seconds": round(self.clock.seconds, 1),
            "parameters": sum(p.numel() for p in self.params),
            "loss_mean_of_last_10": round(sum(last) / len(last), 5),
            "loss_curve": self.curve,
        }

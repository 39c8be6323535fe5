"""Train a stage: Muon and AdamW on float32 masters, a moving average, CUDA graphs, resume; its files."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.caches.files import CacheError, StoppedError, replacing
from experiments.miniature.recipe import SHIPPED, StageRun
from wan.checkpoint import to_diffusers_names
from wan.errors import library_reads

ADAM_BETAS = (0.9, 0.95)
MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
UPDATE_RMS = 0.2  # AdamW's, so that both take one learning rate (arXiv 2502.16982, eq. 4)
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon
FAST = {"cuda": torch.bfloat16, "cpu": torch.float32}  # dtype of its products; bfloat16 is exact enough

GRAPH_WARM_UP = 3  # eager calls before a CUDA graph is captured, as PyTorch asks
LR_WARM_UP = 200  # steps
SAVE_SECONDS = 60.0
AVERAGE_DECAY = 0.999


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for parameters [out, in, ...], all of one shape at once, with a tensor as lr.

    PyTorch's takes matrices one after the other and fits into no CUDA graph: 51 ms a step for the miniature's
    80 matrices on an H100, where a whole training step takes 15.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's may return a loss
        [group] = self.param_groups
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            by_shape[p.flatten(1).shape].append(p)
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        for shape, params in by_shape.items():
            gradients: Any = [p.grad for p in params]
            momenta = [self.state[p]["momentum"] for p in params]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            nesterov = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            updates = orthogonal(torch.stack([update.flatten(1) for update in nesterov]))
            updates *= group["lr"] * UPDATE_RMS * max(shape) ** 0.5
            torch._foreach_mul_(params, 1 - WEIGHT_DECAY * group["lr"])
            torch._foreach_sub_(params, [u.view_as(p) for p, u in zip(params, updates, strict=True)])


def orthogonal(x: Tensor) -> Tensor:
    """Bring all singular values of matrices [n, rows, columns] near 1; float32."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT.contiguous()
    a, b, c = NEWTON_SCHULZ
    x = x.to(FAST[x.device.type])
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.float()


class Trainer:
    """Train modules in run.dtype by float32 masters; keep the masters' moving average.

    A GPU would wait for Python with models this small: the causal stage's backward pass takes 14 ms as a CUDA
    graph and 49 without. So each kind of step is captured after its first calls.
    """

    def __init__(
        self,
        run: StageRun,
        modules: Sequence[nn.Module],
        is_matrix: Callable[[str, Tensor], bool] = lambda name, p: False,
    ):
        """is_matrix says by name which parameters are Muon's; AdamW has the others."""
        self.run, self.modules, self.on_gpu = run, modules, run.device.type == "cuda"
        named = [(name, p) for m in modules for name, p in m.named_parameters() if p.requires_grad]
        self.params: list[Tensor] = [p for _, p in named]
        self.masters = [p.detach().float().clone(memory_format=torch.contiguous_format) for p in self.params]
        self.averages = [master.clone() for master in self.masters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.lr = torch.zeros((), device=run.device)  # a tensor, so that graphs see it change
        matrices = {id(m) for m, (name, p) in zip(self.masters, named, strict=True) if is_matrix(name, p)}
        others = [m for m in self.masters if id(m) not in matrices]
        options: dict[str, Any] = {"betas": ADAM_BETAS, "weight_decay": WEIGHT_DECAY}
        options |= {"fused": self.on_gpu, "capturable": self.on_gpu}
        self.optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self.optimizers.append(Muon([m for m in self.masters if id(m) in matrices], {"lr": self.lr}))
        if others:
            self.optimizers.append(torch.optim.AdamW(others, self.lr, **options))
        for module in modules:
            module.to(run.dtype)
        self.step, self.seconds = 0, 0.0  # of all runs of the stage
        self.curve: list[list[float]] = []  # [step, seconds, loss]
        self.notes: dict[str, list] = {}  # what a stage measures on the way
        self.calls: dict[str, int] = defaultdict(int)
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end: by steps or, where its minutes end first, by seconds."""
        by_time = 0.0 if self.run.minutes is None else self.seconds / (60 * self.run.minutes)
        return min(1.0, max(self.step / self.run.recipe.steps, by_time))

    def update(self, kind: str, loss: Callable[[], Tensor]) -> None:
        """Take one step along the gradient of loss(), which draws its own data.

        Steps of one kind have the same shapes. The learning rate warms up and falls to zero by a cosine.
        """
        decayed = self.run.recipe.lr * 0.5 * (1 + math.cos(math.pi * self.progress))
        self.lr.fill_(decayed * min(1, (self.step + 1) / LR_WARM_UP))
        value = self._graphed(kind, lambda: self._backward(loss))
        self._graphed("update", self._optimize)
        decay = min(AVERAGE_DECAY, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.averages, self.masters, 1 - decay)
        if self.step % 100 == 0:
            self.curve.append([self.step, round(self.seconds, 1), round(value.item(), 5)])
        self.step += 1

    def _graphed(self, kind: str, call: Callable[[], Tensor]) -> Tensor:
        """Return call(), eager at first and on a CPU, then replayed."""
        self.calls[kind] += 1
        if not self.on_gpu:
            return call()
        if self.calls[kind] <= GRAPH_WARM_UP:
            side, now = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(now)
            with torch.cuda.stream(side):
                value = call()
            now.wait_stream(side)
            return value
        if kind not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                value = call()
            self.graphs[kind] = graph, value
        graph, value = self.graphs[kind]
        graph.replay()
        return value

    def _backward(self, loss: Callable[[], Tensor]) -> Tensor:
        """Copy the gradients of loss() to the masters -> the loss."""
        value = loss()
        gradients: Any = [master.grad for master in self.masters]
        torch._foreach_copy_(gradients, torch.autograd.grad(value, self.params))
        return value.detach()

    @torch.no_grad()
    def _optimize(self) -> Tensor:
        """Step the optimizers and copy the masters to the modules -> the norm of the gradients."""
        norm = nn.utils.clip_grad_norm_(self.masters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        torch._foreach_copy_(self.params, self.masters)
        return norm

    def train(self, one_step: Callable[[int], None], save_weights: Callable[[], None]) -> None:
        """Call one_step(step) to the stage's end, at least once, then save_weights().

        The state is saved every minute and on Ctrl-C, and removed at the end. Raises StoppedError on Ctrl-C.
        """
        file = self.run.state_file
        if self.run.resume:
            self.load_state(file)
        begin, saved = time.monotonic() - self.seconds, self.seconds
        try:
            while self.progress < 1 or not self.step:
                one_step(self.step)
                self.seconds = time.monotonic() - begin
                if self.seconds - saved > SAVE_SECONDS:
                    saved = self.seconds
                    self.save_state(file)
        except KeyboardInterrupt:
            self.save_state(file)
            message = f"stopped at step {self.step}; the same command with --resume goes on from there"
            raise StoppedError(message) from None
        save_weights()
        file.unlink(missing_ok=True)

    def save_state(self, path: Path) -> None:
        """Save everything that later steps depend on: weights, moments, the random numbers to come."""
        state = {name: getattr(self, name) for name in ("step", "seconds", "curve", "notes")}
        state |= {"total_steps": self.run.recipe.steps, "masters": self.masters, "averages": self.averages}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        state["random"] = torch.get_rng_state()
        state["gpu_random"] = torch.cuda.get_rng_state(self.lr.device) if self.on_gpu else None
        with replacing(path) as file:
            torch.save(state, file)

    def load_state(self, path: Path) -> None:
        """Go on where save_state was called. Raises CacheError for another training's file."""
        if not path.is_file():
            raise CacheError(f"{path} not found, so nothing can be resumed; leave --resume out")
        with library_reads(f"{path}, a stage's state,", CacheError, "remove it"):
            state = torch.load(path, weights_only=True, map_location=self.lr.device)
            steps, wanted = state["total_steps"], self.run.recipe.steps
            if steps != wanted:
                raise CacheError(f"{path} is a stage of {steps} steps, not {wanted}; give --steps {steps}")
            with torch.no_grad():
                torch._foreach_copy_(self.masters, state["masters"])
                torch._foreach_copy_(self.averages, state["averages"])
                torch._foreach_copy_(self.params, self.masters)
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
                optimizer.param_groups[0]["lr"] = self.lr  # loading copied the tensor
            torch.set_rng_state(state["random"].cpu())
            if self.on_gpu:
                torch.cuda.set_rng_state(state["gpu_random"].cpu(), self.lr.device)
            for name in ("step", "seconds", "curve", "notes"):
                setattr(self, name, state[name])

    def averaged(self) -> list[Any]:
        """Return copies of the modules with averaged weights in bf16, as they are written."""
        copies = deepcopy(list(self.modules))
        trained = (p for module in copies for p in module.parameters() if p.requires_grad)
        for p, average in zip(trained, self.averages, strict=True):
            p.data = average.clone()
        return [module.to(torch.bfloat16).requires_grad_(False) for module in copies]

    def numbers(self) -> dict:
        """Return what a log says of the training; the curve holds [step, seconds, loss]."""
        last = [loss for *_, loss in self.curve[-10:]]
        return {
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "parameters": sum(p.numel() for p in self.params),
            "loss_mean_of_last_10": round(sum(last) / len(last), 5),
            "loss_curve": self.curve,
            **self.notes,
        }


# --- The files of checkpoints/wan-mini
CAUSAL = "self_forcing_mini.pt"
TEACHER = "causal.pt"  # of the causal stage: the few-step stage starts from it; not shipped


def kept_steps(folder: Path) -> dict[int, Path]:
    """Return step -> file of the weights that a training kept on its way, step_*.pt, in their order."""
    numbers = {path: path.stem.removeprefix("step_") for path in folder.glob("step_*.pt")}
    return dict(sorted((int(n), path) for path, n in numbers.items() if n.isascii() and n.isdigit()))


def save_base(native: dict[str, Tensor], folder: Path) -> None:
    """Save a transformer under diffusers' names, and what else of a WanPipeline no training changes."""
    (folder / "transformer").mkdir(parents=True, exist_ok=True)
    weights = {k: v.cpu().contiguous() for k, v in to_diffusers_names(native).items()}
    save_file(weights, folder / "transformer/diffusion_pytorch_model.safetensors")
    if folder.resolve() != SHIPPED.resolve():
        for name in ("scheduler", "tokenizer"):
            shutil.copytree(SHIPPED / name, folder / name, dirs_exist_ok=True)
        for name in ("transformer/config.json", "model_index.json"):
            shutil.copy(SHIPPED / name, folder / name)


def generator_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return a Self-Forcing style checkpoint: generator_ema, with the prefix model."""
    return {"generator_ema": {f"model.{name}": x.cpu() for name, x in model.state_dict().items()}}


def log_stage(path: Path, stage: str, entry: dict) -> None:
    """Set one stage's entry of the log. Raises CacheError where the file is no log."""
    with library_reads(f"{path}, the log of a training,", CacheError, "remove it"):
        log = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        text = json.dumps(log | {stage: entry}, indent=1)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")

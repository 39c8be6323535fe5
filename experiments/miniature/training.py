"""Train a stage: Muon and AdamW, float32 masters, a moving average, CUDA graphs, exact resume; its files."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.caches.files import CacheError, StoppedError, replacing
from experiments.miniature.recipe import SHIPPED, StageRun
from wan.checkpoint import to_diffusers_names

ADAM_BETAS = (0.9, 0.95)
MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
# Makes an update's RMS that of AdamW's, so both take the same learning rate (arXiv 2502.16982, eq. 4).
UPDATE_RMS = 0.2
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon

GRAPH_WARM_UP = 3  # eager calls before a CUDA graph is captured, as PyTorch asks
LR_WARM_UP = 200  # steps
SAVE_SECONDS = 60.0
AVERAGE_DECAY = 0.999
CLOCK_EVERY = 20  # steps between two broadcasts of the first process's clock


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, of parameters [out, in, ...] that count as matrices of `out` rows.

    torch.optim.Muon computes the same (a test compares them) for parameters of two dimensions, one after the
    other: 51 ms a step for the miniature's 80 matrices on an H100, where a whole training step takes 15.
    Batches of one shape can be captured in a CUDA graph and take 1 or 2. lr is a tensor, so that a graph sees
    it change.
    """

    def __init__(self, params: Iterable[Tensor], lr: Tensor):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's may return a loss
        [group] = self.param_groups
        by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            by_shape[tuple(sorted(p.flatten(1).shape))].append(p)
        for (_, longer), params in by_shape.items():
            updates = []
            for p in params:
                assert p.grad is not None
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                momentum = self.state[p]["momentum"].lerp_(p.grad, 1 - MOMENTUM)
                update = p.grad.lerp(momentum, MOMENTUM).flatten(1)  # Nesterov's
                updates.append(update.T if is_tall(p) else update)
            step = orthogonal(torch.stack(updates)) * (group["lr"] * UPDATE_RMS * longer**0.5)
            for p, update in zip(params, step, strict=True):
                p.mul_(1 - WEIGHT_DECAY * group["lr"])
                p.sub_((update.T if is_tall(p) else update).reshape(p.shape))


def is_tall(p: Tensor) -> bool:
    """Compare the rows of a parameter [out, in, ...] with its columns as a matrix."""
    return p.shape[0] > p[0].numel()


def orthogonal(x: Tensor) -> Tensor:
    """Bring all singular values of matrices [n, rows, columns], rows <= columns, near 1; float32."""
    a, b, c = NEWTON_SCHULZ
    x = x.to(fast_dtype(x.device))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.float()


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of fast products. bfloat16 is exact enough here, and slow on most CPUs."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Trainer:
    """Train modules in run.dtype by float32 masters; keep the masters' moving average as modules.

    A GPU would wait for Python with models this small: the causal stage's backward pass takes 14 ms as a CUDA
    graph and 49 without. So each kind of step is captured after its first calls. Parameters that do not
    require gradients stay as they are.
    """

    def __init__(
        self,
        run: StageRun,
        modules: Sequence[nn.Module],
        is_matrix: Callable[[str, Tensor], bool] = lambda name, p: False,
    ):
        """is_matrix says by name which parameters are Muon's; AdamW has the others."""
        self.run = run
        self.averaged_modules = [deepcopy(m).float().requires_grad_(False) for m in modules]
        trained = [
            (name, p, average)
            for module, copy in zip(modules, self.averaged_modules, strict=True)
            for (name, p), average in zip(module.named_parameters(), copy.parameters(), strict=True)
            if p.requires_grad
        ]
        self.params: list[Tensor] = [p for _, p, _ in trained]
        self.averages: list[Tensor] = [average for _, _, average in trained]
        self.masters = [p.detach().float().clone() for p in self.params]
        sizes = [m.numel() for m in self.masters]
        self.gradients = torch.zeros(sum(sizes), device=run.device)  # of all masters: averaged at once
        self.gradient_views = [
            part.as_strided(master.size(), master.stride(), part.storage_offset())
            for master, part in zip(self.masters, self.gradients.split(sizes), strict=True)
        ]
        for master, view in zip(self.masters, self.gradient_views, strict=True):
            master.grad = view
        self.lr = torch.zeros((), device=run.device)  # a tensor, so that graphs see it change
        self.on_gpu = run.device.type == "cuda"
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for (name, p, _), master in zip(trained, self.masters, strict=True):
            groups[is_matrix(name, p)].append(master)
        self.optimizers: list[torch.optim.Optimizer] = []
        if groups[True]:
            self.optimizers.append(Muon(groups[True], self.lr))
        if groups[False]:
            options: dict[str, Any] = {"fused": self.on_gpu, "capturable": self.on_gpu}
            options |= {"betas": ADAM_BETAS, "weight_decay": WEIGHT_DECAY}
            self.optimizers.append(torch.optim.AdamW(groups[False], self.lr, **options))
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

        Steps of one kind have the same shapes. The learning rate warms up over 200 steps and falls to zero by
        a cosine.
        """
        decayed = self.run.recipe.lr * 0.5 * (1 + math.cos(math.pi * self.progress))
        self.lr.fill_(decayed * min(1, (self.step + 1) / LR_WARM_UP))
        value = self._graphed(kind, lambda: self._backward(loss))
        if self.run.rank.count > 1:
            dist.all_reduce(self.gradients)
            self.gradients /= self.run.rank.count
        self._graphed("update", self._optimize)
        decay = min(AVERAGE_DECAY, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
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
        """Copy the gradients of loss() to the masters -> the loss."""
        value = loss()
        torch._foreach_copy_(self.gradient_views, torch.autograd.grad(value, self.params))
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

        The state of a process alone is saved every minute and on Ctrl-C, and removed at the end. Of several
        processes the first one saves the weights every minute, and no state. Raises StoppedError on Ctrl-C.
        """
        run, alone = self.run, self.run.rank.count == 1
        if not alone:  # weights were drawn alike, clips must not be
            torch.manual_seed(run.rank_seed)
        if run.resume:
            self.load_state(run.state_file)
        begin, saved = time.monotonic() - self.seconds, self.seconds
        try:
            while self.progress < 1 or not self.step:
                one_step(self.step)
                if alone or self.step % CLOCK_EVERY == 0:
                    now = torch.tensor([time.monotonic() - begin], dtype=torch.float64)
                    if not alone:
                        dist.broadcast(now, src=0)
                    self.seconds = now.item()
                if run.rank.is_first and self.seconds - saved > SAVE_SECONDS:
                    saved = self.seconds
                    if alone:
                        self.save_state(run.state_file)
                    else:
                        save_weights()
        except KeyboardInterrupt:
            if not alone:
                raise
            self.save_state(run.state_file)
            raise StoppedError(
                f"stopped at step {self.step}; the same command with --resume goes on from there"
            ) from None
        if run.rank.is_first:
            save_weights()
            run.state_file.unlink(missing_ok=True)

    def save_state(self, path: Path) -> None:
        """Save everything that later steps depend on: weights, moments, the random numbers to come."""
        state = {
            "step": self.step,
            "total_steps": self.run.recipe.steps,
            "seconds": self.seconds,
            "curve": self.curve,
            "notes": self.notes,
            "masters": self.masters,
            "averages": self.averages,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
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
            steps, wanted = state["total_steps"], self.run.recipe.steps
            if steps != wanted:
                raise CacheError(f"{path} is of a stage of {steps} steps, not {wanted}; give --steps {steps}")
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
            self.step, self.seconds = state["step"], state["seconds"]
            self.curve, self.notes = state["curve"], state["notes"]
        except CacheError:
            raise
        except Exception as error:  # whatever a damaged file makes torch raise
            raise CacheError(
                f"{path} is no state of this stage ({type(error).__name__}); remove it"
            ) from error

    def averaged(self) -> list[Any]:
        """Return copies of the modules with averaged weights in bf16, as they are written."""
        return [deepcopy(m).to(torch.bfloat16) for m in self.averaged_modules]

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
WEIGHTS = "diffusion_pytorch_model.safetensors"
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
    save_file(weights, folder / "transformer" / WEIGHTS)
    if folder.resolve() != SHIPPED.resolve():
        for name in ("scheduler", "tokenizer"):
            shutil.copytree(SHIPPED / name, folder / name, dirs_exist_ok=True)
        for name in ("transformer/config.json", "model_index.json"):
            shutil.copy(SHIPPED / name, folder / name)


def save_causal(native: dict[str, Tensor], path: Path) -> None:
    """Save a Self-Forcing style checkpoint: generator_ema, with the prefix model."""
    weights = {f"model.{name}": tensor.cpu() for name, tensor in native.items()}
    with replacing(path) as file:
        torch.save({"generator_ema": weights}, file)


def log_stage(path: Path, stage: str, entry: dict) -> None:
    """Set one stage's entry of the log. Raises CacheError where the file is no log."""
    try:
        log = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        text = json.dumps(log | {stage: entry}, indent=1)
    except (ValueError, TypeError) as error:
        raise CacheError(f"{path} is no log of a training ({type(error).__name__}); remove it") from error
    with replacing(path) as file:
        file.write(text.encode() + b"\n")

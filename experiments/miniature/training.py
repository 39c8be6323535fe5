"""A training loop that can be killed: float32 masters behind bf16 weights, their moving average, CUDA
graphs, exact resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.caches.files import CacheError, StoppedError, replacing
from experiments.miniature.ranks import Ranks
from experiments.miniature.recipe import MODEL, SHIFT
from wan.checkpoint import to_diffusers_names

# --- Muon for the matrices of a network's layers, AdamW for every other parameter
ADAM_BETAS = (0.9, 0.95)
MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
# Makes an update's RMS that of AdamW's, so both take the same learning rate (arXiv 2502.16982, eq. 4).
UPDATE_RMS = 0.2
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon


class Muon:
    """Momentum, made orthogonal (https://kellerjordan.github.io/posts/muon), of float32 matrices [out, in].

    Kernels [out, in, ...] count as matrices of `out` rows.
    """

    def __init__(self, matrices: Sequence[Tensor], lr: Tensor):
        self.lr = lr
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(tuple(sorted(matrix.flatten(1).shape)), []).append(matrix)
        self.groups = list(by_shape.values())
        self.momenta = [[torch.zeros_like(m) for m in group] for group in self.groups]

    @torch.no_grad()
    def step(self) -> None:
        for matrices, momenta in zip(self.groups, self.momenta, strict=True):
            gradients = [m.grad for m in matrices if m.grad is not None]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's
            update = orthogonal(torch.stack([as_wide(x) for x in ahead]))
            update *= self.lr * UPDATE_RMS * max(update.shape[1:]) ** 0.5
            torch._foreach_mul_(matrices, 1 - WEIGHT_DECAY * self.lr)
            torch._foreach_sub_(matrices, [of_wide(u, m) for u, m in zip(update, matrices, strict=True)])


def as_wide(x: Tensor) -> Tensor:
    """[rows, columns] of a matrix or kernel, rows <= columns."""
    x = x.flatten(1)
    return x.T if x.shape[0] > x.shape[1] else x


def of_wide(x: Tensor, like: Tensor) -> Tensor:
    """as_wide() undone."""
    return (x if x.shape[0] == like.shape[0] else x.T).reshape(like.shape)


def orthogonal(x: Tensor) -> Tensor:
    """Matrices [n, rows, columns], rows <= columns, with all singular values brought near 1; float32."""
    a, b, c = NEWTON_SCHULZ
    x = x.to(fast_dtype(x.device))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.float()


def fast_dtype(device: torch.device) -> torch.dtype:
    """In which products are fast. bfloat16 is exact enough here, and slow on most CPUs."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Optimizer:
    """One update of masters whose gradients are there. Steps of a CUDA graph see `lr` change."""

    def __init__(self, masters: Sequence[Tensor], is_matrix: Sequence[bool], lr: Tensor):
        chosen = [m for m, muon in zip(masters, is_matrix, strict=True) if muon]
        others = [m for m, muon in zip(masters, is_matrix, strict=True) if not muon]
        on_gpu = lr.device.type == "cuda"
        self.muon = Muon(chosen, lr)
        self.adamw = torch.optim.AdamW(
            others, lr=lr, betas=ADAM_BETAS, weight_decay=WEIGHT_DECAY, fused=on_gpu, capturable=on_gpu
        )

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def state(self) -> dict:
        """What later steps depend on."""
        return {"muon": self.muon.momenta, "adamw": self.adamw.state_dict()["state"]}

    @torch.no_grad()
    def load(self, state: dict) -> None:
        """Go on from state()."""
        for momenta, saved in zip(self.muon.momenta, state["muon"], strict=True):
            torch._foreach_copy_(momenta, saved)
        self.adamw.load_state_dict(self.adamw.state_dict() | {"state": state["adamw"]})
        self.adamw.param_groups[0]["lr"] = self.muon.lr  # loading copied the tensor


# --- A training loop that can be killed: float32 masters behind bf16 weights, their moving average, CUDA
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


# --- The files of checkpoints/wan-mini: a diffusers WanPipeline, a Self-Forcing style checkpoint, the log of
WEIGHTS = "diffusion_pytorch_model.safetensors"
CAUSAL = "self_forcing_mini.pt"
TEACHER = "causal.pt"  # of the causal stage: the few-step stage starts from it; not shipped


def kept_steps(folder: Path) -> dict[int, Path]:
    """Step -> file of the weights that a training kept on its way, step_*.pt, in their order."""
    numbers = {path: path.stem.removeprefix("step_") for path in folder.glob("step_*.pt")}
    return dict(sorted((int(n), path) for path, n in numbers.items() if n.isascii() and n.isdigit()))


def save_transformer(native: dict[str, Tensor], folder: Path) -> None:
    """Weights under diffusers' names, and the config of its WanTransformer3DModel."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.cpu().contiguous() for k, v in to_diffusers_names(native).items()}, folder / WEIGHTS)
    config = {
        "_class_name": "WanTransformer3DModel",
        "num_attention_heads": MODEL.num_heads,
        "attention_head_dim": MODEL.head_dim,
        "in_channels": MODEL.in_dim,
        "out_channels": MODEL.out_dim,
        "patch_size": MODEL.patch_size,
        "text_dim": MODEL.text_dim,
        "freq_dim": MODEL.freq_dim,
        "ffn_dim": MODEL.ffn_dim,
        "num_layers": MODEL.num_layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": MODEL.eps,
        "rope_max_seq_len": 1024,
        "text_len": MODEL.text_len,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_index(folder: Path) -> None:
    """What makes the directory a diffusers WanPipeline: the scheduler and model_index.json."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
    )
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_causal(native: dict[str, Tensor], path: Path) -> None:
    """A Self-Forcing style checkpoint: generator_ema, with the prefix model."""
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

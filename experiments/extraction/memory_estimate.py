"""What a run will need, computed from the config and the headers of its files before anything is loaded; and whether it fits.

Bytes follow from sizes: parameters times the dtype, keys and values of every frame, the widest activations of
a layer, and what a capture forms on the way. GB are 10^9 bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import UMT5EncoderModel

from experiments.caches.atomic_files import MARGIN
from experiments.extraction import prompt_embeds
from wan import checkpoint
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.modules.capture import CaptureRequest
from wan.modules.causal_model import CausalWanModel
from wan.modules.offload import streamed_bytes
from wan.modules.reductions import CHUNK_ELEMENTS
from wan.modules.rope import RotaryTable
from wan.modules.text_encoder import encoder_config, encoder_file

GB = 10**9

FLOAT = torch.float32.itemsize


@dataclass(frozen=True)
class Need:
    """What one part of a run holds at once in one memory: bytes by purpose."""

    phase: str
    where: str  # GPU or host
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {amount(size)}" for name, size in self.parts.items() if size >= self.total / 100
        )
        return f"{amount(self.total)} of {self.where} memory while {self.phase} ({parts})"


@dataclass(frozen=True)
class Memory:
    """One run's use of memory, and what can be had."""

    config: RunConfig
    model_config: ModelConfig
    requests: Sequence[CaptureRequest]
    dtype: torch.dtype
    device: torch.device
    encodes: bool  # whether umT5 is to be loaded
    bidirectional: bool = False  # the base model's sampling: no KV cache, the texts of both branches

    def needs(self) -> list[Need]:
        """The parts of the run, for each memory."""
        found = [
            *(self._encoding() if self.encodes and not self.config.prompt_embeds else []),
            *self._rollout(),
        ]
        return [need for need in found if need.total]

    def _encoding(self) -> Iterator[Need]:
        sizes, tokens = encoder_config(self.config.ckpt_dir), self.model_config.text_len
        with torch.device("meta"):
            weights = sum(p.numel() for p in UMT5EncoderModel(sizes).parameters()) * self.dtype.itemsize
        logits = (
            sizes.num_heads * tokens**2 * (3 * self.dtype.itemsize + 2 * FLOAT)
        )  # with bias, and their softmax
        where = prompt_embeds.encoding_device(self.config, self.device)
        yield Need("encoding the prompt", self._name(where), {"umT5": weights, "its activations": logits})

    def _rollout(self) -> Iterator[Need]:
        c, m, itemsize = self.config, self.model_config, self.dtype.itemsize
        layers, dim, S = m.num_layers, m.dim, m.tokens_per_frame(c.height, c.width)
        policy, widest = c.policy, max(c.block_sizes)
        frames = policy.capacity(c.num_frames, widest)
        cached = (2 * frames + policy.raw_slots(frames)) * itemsize + 2 * policy.state_frames() * FLOAT
        queries, keys = max(c.block_sizes) * S, frames * S
        with torch.device("meta"):
            model = CausalWanModel(**vars(m))
        weights, layer = sum(p.numel() for p in model.parameters()) * itemsize, model.blocks[0]
        streamed = streamed_bytes(layer, self.dtype)
        on_host = layers * streamed if c.offload else 0
        if c.offload:
            weights += 2 * streamed - layers * sum(p.numel() for p in layer.parameters()) * itemsize
        latents = c.num_frames * m.in_dim * c.height * c.width
        kept = captured_bytes(c, m, [r for r in self.requests if r.granularity != "token"])
        tokens = captured_bytes(c, m, [r for r in self.requests if r.granularity == "token"])
        gpu = {
            "weights": weights,
            "KV cache": layers * S * cached * dim * (not self.bidirectional),
            "text": (1 + self.bidirectional) * layers * 2 * m.text_len * dim * itemsize,
            "activations": queries * ((m.ffn_dim + 6 * dim) * itemsize + 6 * m.head_dim * FLOAT),
            "latents": latents * (c.num_passes + 1) * itemsize,
            "capture": kept + max((self._capturing(r, queries, keys, S) for r in self.requests), default=0),
        }
        host = {"weights": on_host, "captured": tokens + 2 * kept}  # arranging frames in a cache copies them
        if self.device.type == "cuda":
            yield Need("rolling out", "GPU", gpu)
            yield Need("rolling out", "host", host)
        else:
            yield Need("rolling out", "host", gpu | {"captured": host["captured"]})

    def _capturing(self, request: CaptureRequest, queries: int, keys: int, S: int) -> int:
        """Bytes that looking at one call takes beside what is kept of it; and of mean keys, which stay with the KV cache."""
        m = self.model_config
        if "self" not in request.kinds:
            keys = m.text_len
        rows = FLOAT * min(CHUNK_ELEMENTS, m.num_heads * queries * keys)  # a chunk of logits
        whole = FLOAT * keys * m.dim + 2 * rows  # keys in float32, logits, softmax
        if request.granularity == "token":
            return whole + rows * request.token_dtype.itemsize // FLOAT
        if request.granularity == "key":
            return 2 * FLOAT * min(CHUNK_ELEMENTS, keys * m.dim)
        mean_keys = FLOAT * m.num_layers * (keys // S) * m.dim
        fused = self.device.type == "cuda" and self.dtype != torch.float32  # a kernel forms no matrix
        mass = FLOAT * m.num_heads * (keys // S) * queries if fused and "self" in request.kinds else whole
        return mean_keys + (mass if request.mass or "cross" in request.kinds else 0)

    @staticmethod
    def _name(device: torch.device) -> str:
        return "GPU" if device.type == "cuda" else "host"

    def free(self) -> dict[str, int]:
        """Bytes that can still be had of each memory."""
        gpu = {"GPU": torch.cuda.mem_get_info(self.device)[0]} if self.device.type == "cuda" else {}
        return {"host": free_host_bytes()} | gpu

    def too_large(self, free: dict[str, int]) -> Need | None:
        """The part that fits least, where one does not."""
        return max(
            (need for need in self.needs() if need.total > free[need.where]),
            key=lambda need: need.total / max(1, free[need.where]),
            default=None,
        )

    def remedies(self) -> Iterator[tuple[str, "Memory"]]:
        """Flags that make a run smaller, and the run that each makes."""
        c, on_gpu = self.config, self.device.type == "cuda"
        if self.encodes and on_gpu and not c.t5_cpu:
            yield "--t5_cpu", replace(self, config=replace(c, t5_cpu=True))
        if on_gpu and not c.offload:
            yield "--offload", replace(self, config=replace(c, offload=True))
        if self.encodes and not c.prompt_embeds and not self.bidirectional:
            yield "--prompt_embeds FILE", replace(self, config=replace(c, prompt_embeds="FILE"))
        if self.dtype == torch.float32:
            yield "--dtype bfloat16", replace(self, dtype=torch.bfloat16)
        if any(request.granularity == "token" for request in self.requests):
            frames = [replace(r, granularity="frame", is_logits=True) for r in self.requests]
            yield "--granularity frame", replace(self, requests=frames)
        for count in range(len(c.block_sizes) - 1, 0, -1):  # the longest that fits is the first
            frames = sum(c.block_sizes[:count])
            requests = [
                replace(r, blocks=r.blocks and [min(b, count - 1) for b in r.blocks]) for r in self.requests
            ]
            yield (
                f"--num_frames {frames}",
                replace(self, config=replace(c, num_frames=frames), requests=requests),
            )


def check_memory(memory: Memory, quiet: bool = False) -> None:
    """Print what a run needs. Raises ConfigError, naming the flags that help, where that is more than can be had."""
    files, free = {path for path in _files(memory) if path.is_file()}, memory.free()
    if not quiet:
        print(f"reads {amount(sum(path.stat().st_size for path in files))} of files")
        for need in memory.needs():
            print(f"needs {need}; {amount(free[need.where])} are free")
    if problem := memory.too_large(free):
        raise ConfigError(
            f"{memory.config.model} needs {problem}, but {amount(free[problem.where])} are free; "
            f"{_advice(memory, partial(Memory.too_large, free=free))}"
        )


def _advice(memory: Memory, too_large: Callable[[Memory], Need | None]) -> str:
    found: dict[str, None] = {}
    smaller, together = memory, []
    for flag, run in memory.remedies():
        if not too_large(run) and not any(
            "--num_frames" in known and "--num_frames" in flag for known in found
        ):
            found[flag] = None
    if found:
        return f"it fits with {' or '.join(found)}"
    for name in ("--t5_cpu", "--offload", "--dtype bfloat16", "--granularity frame"):
        if name in (flags := dict(smaller.remedies())):
            smaller = flags[name]
            together.append(name)
    shorter = next(
        (flag for flag, run in smaller.remedies() if "--num_frames" in flag and not too_large(run)), None
    )
    together += [shorter] if shorter else []
    fits = shorter or not too_large(smaller)
    return (
        f"it fits with {' '.join(together)}"
        if fits and together
        else "no flag makes it fit: it needs a larger machine"
    )


def _files(memory: Memory) -> Iterator[Path]:
    c = memory.config
    yield from checkpoint.shards(checkpoint.weights_file(c.ckpt_dir, c.checkpoint_path))
    if memory.encodes and not c.prompt_embeds:
        yield from checkpoint.shards(encoder_file(c.ckpt_dir))


def amount(nbytes: int) -> str:
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB / 10 else f"{nbytes / 1e6:.0f} MB"


def free_host_bytes() -> int:
    """Memory that this process can still take: what Linux calls available, or less where a control group limits it."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    available = next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), math.inf
    )
    return int(min(available, _group_free()))


def _group_free(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes up to a control group's limit, with what the kernel can take back from its file pages."""
    try:
        limit, used = (
            (root / f"memory.{name}").read_text(encoding="utf-8").strip() for name in ("max", "current")
        )
        files = dict(line.split() for line in (root / "memory.stat").read_text(encoding="utf-8").splitlines())
        return math.inf if limit == "max" else int(limit) - int(used) + int(files["inactive_file"])
    except (OSError, ValueError, KeyError):
        return math.inf


def estimate_bytes(
    config: RunConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> int:
    """Upper bound of what is kept in a cache; exact for frames and tokens. num_passes is the rollout's where not given.

    Raises ConfigError for a request that does not fit the model or the rollout.
    """
    model = checkpoint.read_model_config(config.ckpt_dir)
    check_requests(config, model, requests, num_passes)
    return MARGIN + captured_bytes(config, model, requests, num_passes)


def captured_bytes(
    config: RunConfig, model: ModelConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> int:
    """What requests that fit keep of a rollout, in memory and in a cache alike."""
    S, H, F = model.tokens_per_frame(config.height, config.width), model.num_heads, config.num_frames
    blocks = config.block_sizes
    window = config.policy.num_frames or F
    passes, total = num_passes or config.num_passes, 0
    for request in requests:
        calls = len(list(request.layers or range(model.num_layers))) * len(
            list(request.steps or range(passes))
        )
        for block in range(len(blocks)) if request.blocks is None else request.blocks:
            queries, seen = blocks[block], min(sum(blocks[: block + 1]), window)
            for kind in request.kinds:
                keys = seen * S if kind == "self" else model.text_len
                if request.granularity == "token":
                    values = queries * S * keys * request.token_dtype.itemsize
                elif request.granularity == "key":
                    values = F * S * 4
                elif kind == "cross":
                    values = queries * keys * 4
                else:
                    bands = len(RotaryTable(model.head_dim).bands) if request.rope_bands else 0
                    slots = 0 if config.policy.keeps_whole_frames else window
                    values = queries * 4 * (F * (1 + request.mass + bands) + slots * (1 + request.mass))
                total += calls * H * values
    return total


def check_requests(
    config: RunConfig,
    model_config: ModelConfig,
    requests: Sequence[CaptureRequest],
    num_passes: int | None = None,
) -> None:
    """Raise ConfigError for a layer, block or pass that the model or the rollout does not have."""
    policy = config.policy
    if not policy.keeps_whole_frames and any(request.granularity != "frame" for request in requests):
        raise ConfigError(
            f"cache_policy {policy.name} keeps slots that are not frames of their own, which token matrices and "
            "key curves in caches cannot tell; use --granularity frame, or run_extraction_all.py without key_curve"
        )
    for request in requests:
        try:
            request.check(model_config.num_layers, len(config.block_sizes), num_passes or config.num_passes)
        except ValueError as error:
            raise ConfigError(f"{config.model}: {error}") from None

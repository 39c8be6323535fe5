"""What a run will need, computed before anything is loaded, whether it fits, and which flags make it fit.

py has the bytes of each part; the headers of files give what a run reads. GB are 10^9 bytes.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil
import torch

from experiments.extraction import prompt_embeds
from wan import checkpoint
from wan.blocks import block_frames, rolling_attention_size
from wan.capture import ALL, CaptureRequest, check_indices, queries_of
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.model import CausalWanModel
from wan.offload import streamed_bytes
from wan.reductions import CHUNK_ELEMENTS
from wan.rope import RotaryTable
from wan.text_encoder import encoder_config, encoder_file

# --- Bytes that each part of a run takes, from sizes alone: weights, KV cache, activations, what is captured
FLOAT, HALF = torch.float32.itemsize, torch.float16.itemsize


def text_encoder(config: RunConfig, text_len: int, dtype: torch.dtype) -> dict[str, int]:
    """umT5, and the widest of its activations: the logits of a layer with their bias, and their softmax."""
    sizes = encoder_config(config.ckpt_dir)
    weights = _encoder_parameters(sizes.to_json_string()) * dtype.itemsize
    logits = sizes.num_heads * text_len**2 * (3 * dtype.itemsize + 2 * FLOAT)
    return {"umT5": weights, "its activations": logits}


@cache
def _encoder_parameters(sizes: str) -> int:
    from transformers import UMT5Config, UMT5EncoderModel  # takes a second to import

    with torch.device("meta"):
        return sum(p.numel() for p in UMT5EncoderModel(UMT5Config(**json.loads(sizes))).parameters())


@cache  # building a model without weights takes 0.1 s, and advice tries a dozen runs of the same one
def transformer(model: ModelConfig, dtype: torch.dtype, offload: bool) -> tuple[int, int]:
    """The transformer's weights on the device and, with offload, on the host.

    Two layers are then on the device at a time.
    """
    with torch.device("meta"):
        module = CausalWanModel(**vars(model))
    weights, layer = sum(p.numel() for p in module.parameters()) * dtype.itemsize, module.blocks[0]
    if not offload:
        return weights, 0
    layers = model.num_layers * sum(p.numel() for p in layer.parameters()) * dtype.itemsize
    streamed = streamed_bytes(layer, dtype)
    return weights - layers + 2 * streamed, model.num_layers * streamed


def merged_layers(model: ModelConfig) -> int:
    """Every linear layer of the blocks in float32, as a LoRA merged on loading leaves them."""
    return model.num_layers * (8 * model.dim**2 + 2 * model.dim * model.ffn_dim) * FLOAT


def kv_cache(config: RunConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of every slot in every layer, and what the policy keeps beside them."""
    size, slots = config.policy.capacity(config.num_frames, max(config.block_sizes)), cached_frames(config)
    per_value = (2 * slots + size.raw_slots) * dtype.itemsize + 2 * size.state_frames * FLOAT
    return model.num_layers * model.tokens_per_frame(config.height, config.width) * model.dim * per_value


def frames_at_once(config: RunConfig) -> int:
    """Frames that one forward takes at most: a block or a window of them, or clean ones computed again."""
    blocks = len(config.denoising_step_list) if config.sampler == "rolling_forcing" else 1
    again = [min(config.recompute_context, config.num_frames)]
    for switch in config.switches:
        if switch.how == "recache":
            again.append(min(switch.frame, config.policy.num_frames or switch.frame))
    return max(min(config.num_frames, blocks * max(config.block_sizes)), *again)


def cached_frames(config: RunConfig) -> int:
    """Slots of the KV cache, each of one frame's tokens."""
    if config.sampler == "rolling_forcing":  # the anchor stays beside what a forward sees
        block = max(config.block_sizes)
        return block + rolling_attention_size(config.local_attn_size, len(config.denoising_step_list), block)
    return config.policy.capacity(config.num_frames, max(config.block_sizes)).slots


def text_states(model: ModelConfig, dtype: torch.dtype) -> int:
    """Cross-attention's keys and values of one prompt, in every layer."""
    return model.num_layers * 2 * model.text_len * model.dim * dtype.itemsize


def activations(model: ModelConfig, dtype: torch.dtype, queries: int) -> int:
    """The widest point of a layer: the feed-forward's inner values beside its input, and RoPE in float32."""
    return queries * ((model.ffn_dim + 6 * model.dim) * dtype.itemsize + 6 * model.head_dim * FLOAT)


def exchange(
    config: RunConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    queries: int,
    requests: Sequence[CaptureRequest],
) -> int:
    """Places by which processes exchange q, k, v and outputs, all with raw keys, queries of captured text."""
    if config.gpus == 1:
        return 0
    has_raw = config.policy.capacity(config.num_frames, max(config.block_sizes)).raw_slots > 0
    tensors = 4 + 4 * has_raw + any("cross" in request.kinds for request in requests)
    return tensors * queries * model.dim // config.gpus * dtype.itemsize


def latents(config: RunConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """The video's latents, and noise for every step."""
    values = config.num_frames * model.in_dim * config.height * config.width
    return values * (config.num_passes + 1) * dtype.itemsize


def capturing(request: CaptureRequest, config: RunConfig, model: ModelConfig, fused: bool) -> int:
    """What looking at one call takes beside what is kept of it; mean keys, which stay, are part of it.

    fused: a kernel computes the mass and forms no matrix.
    """
    S, is_self = model.tokens_per_frame(config.height, config.width), "self" in request.kinds
    queries, seen = max(config.block_sizes) * S, cached_frames(config)
    keys = seen * S if is_self else model.text_len
    rows = FLOAT * min(CHUNK_ELEMENTS, model.num_heads * queries * keys)  # a chunk of logits
    whole = FLOAT * keys * model.dim + 2 * rows  # keys in float32, logits, softmax
    if request.granularity == "token":
        return whole + rows * request.token_dtype.itemsize // FLOAT
    if request.granularity == "key":
        return 2 * FLOAT * min(CHUNK_ELEMENTS, keys * model.dim)
    if request.granularity == "map":  # of patches a few rows of the matrix, of means no more than columns
        few = FLOAT * min(CHUNK_ELEMENTS, model.num_heads * len(request.queries) * keys)
        return FLOAT * keys * model.dim + 2 * few if fused and is_self else whole
    mean_keys = FLOAT * model.num_layers * (keys // S) * model.dim
    mass = FLOAT * model.num_heads * (keys // S) * queries if fused and is_self else whole
    return mean_keys + (mass if request.mass or "cross" in request.kinds else 0)


def captured(
    config: RunConfig, model: ModelConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> int:
    """What requests that fit keep of a rollout, in memory and in a cache alike."""
    blocks, policy = config.block_sizes, config.policy
    passes, total = range(num_passes or config.num_passes), 0
    for request in requests:
        layers = range(model.num_layers) if request.layers is None else request.layers
        calls = len(layers) * len(passes if request.steps is None else request.steps)
        for block in range(len(blocks)) if request.blocks is None else request.blocks:
            seen = policy.most_slots(sum(blocks[: block + 1]))
            for kind in request.kinds:
                if request.granularity == "map":
                    frames = block_frames(blocks, block)
                    total += calls * _maps_of_call(request, kind, config, model, frames, seen)
                else:
                    sizes = blocks[block], seen
                    total += calls * model.num_heads * _kept_of_call(request, kind, config, model, *sizes)
    return total


def _maps_of_call(
    request: CaptureRequest,
    kind: str,
    config: RunConfig,
    model: ModelConfig,
    query_frames: Sequence[int],
    seen: int,
) -> int:
    """Bytes of the maps of one call: logits and mass of every key, or the mass on every word."""
    S = model.tokens_per_frame(config.height, config.width)
    heads = model.num_heads if request.heads is None else len(request.heads)
    if kind == "self":
        return heads * len(queries_of(request.queries, query_frames)) * seen * S * 2 * HALF
    most = min(model.text_len, len(config.prompt.encode()) + 2)  # a token is a byte or more, but for two
    return heads * len(query_frames) * S * (request.num_words or most) * HALF


def _kept_of_call(
    request: CaptureRequest, kind: str, config: RunConfig, model: ModelConfig, query_frames: int, seen: int
) -> int:
    """Bytes that one call keeps per head."""
    S = model.tokens_per_frame(config.height, config.width)
    keys = seen * S if kind == "self" else model.text_len
    if request.granularity == "token":
        return query_frames * S * keys * request.token_dtype.itemsize
    if request.granularity == "key":
        return max(config.num_frames, seen) * S * FLOAT
    if kind == "cross":
        return query_frames * keys * FLOAT
    policy, bands = config.policy, len(RotaryTable(model.head_dim).bands) if request.rope_bands else 0
    slots = 0 if policy.keeps_whole_frames else policy.num_frames or config.num_frames
    per_query = config.num_frames * (1 + request.mass + bands) + slots * (1 + request.mass)
    return query_frames * FLOAT * per_query


# --- What a run will need, computed before anything is loaded, whether it fits, and which flags make it fit
MARGIN = 1 << 16  # bytes of a cache beside its tensors: names, numbers, the archive
GB = 10**9


@dataclass(frozen=True)
class Need:
    """What one phase of a run holds at once in one memory: bytes by purpose."""

    phase: str
    where: str  # GPU or host
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        large = {name: size for name, size in self.parts.items() if size >= self.total / 100}
        parts = ", ".join(f"{name} {amount(size)}" for name, size in large.items())
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
    replays: bool = False  # layers from graphs on one GPU too

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def needs(self) -> list[Need]:
        """The phases of the run, for each memory."""
        phases = [*self._encoding(), *self._merging(), *self._rollout()]
        return [need for need in phases if need.total]

    def _encoding(self) -> Iterator[Need]:
        if self.encodes and not self.config.prompt_embeds:
            where = prompt_embeds.encoding_device(self.config, self.device)
            parts = text_encoder(self.config, self.model_config.text_len, self.dtype)
            yield Need("encoding the prompt", "GPU" if where.type == "cuda" else "host", parts)

    def _merging(self) -> Iterator[Need]:
        if self.config.lora_path:
            merged = merged_layers(self.model_config)
            yield Need("merging the LoRA", "host", {"merged layers": merged})

    def _rollout(self) -> Iterator[Need]:
        c, m, dtype = self.config, self.model_config, self.dtype
        weights, on_host = transformer(m, dtype, c.offload)
        queries = frames_at_once(c) * m.tokens_per_frame(c.height, c.width)
        fused = self.on_gpu and dtype != torch.float32
        looking = [capturing(request, c, m, fused) for request in self.requests]
        tokens = captured(c, m, [r for r in self.requests if r.granularity == "token"])
        kept = captured(c, m, [r for r in self.requests if r.granularity != "token"])
        cache = 0 if self.bidirectional else kv_cache(c, m, dtype)
        replays = self.replays or c.gpus > 1
        replayed = self.on_gpu and replays and not c.offload  # graphs keep the text at places of their own
        device = {
            "weights": weights,
            "KV cache": cache // c.gpus,  # each process keeps its share of the heads
            "text": (1 + self.bidirectional + replayed) * text_states(m, dtype),
            "activations": activations(m, dtype, queries),
            "exchange": exchange(c, m, dtype, queries, self.requests),
            "latents": latents(c, m, dtype),
            "capture": kept + max(looking, default=0),
        }
        copies = {"captured": tokens + 2 * kept}  # building a cache of frames copies them
        if self.on_gpu:
            yield Need("rolling out", "GPU", device)
            yield Need("rolling out", "host", {"weights": on_host} | copies)
        else:
            yield Need("rolling out", "host", device | copies)

    def free(self) -> dict[str, int]:
        """Bytes that can still be had of each memory."""
        gpu = {"GPU": torch.cuda.mem_get_info(self.device)[0]} if self.on_gpu else {}
        return {"host": free_host_bytes()} | gpu

    def too_large(self, free: dict[str, int]) -> Need | None:
        """The phase that fits least, where one does not."""
        return max(
            (need for need in self.needs() if need.total > free[need.where]),
            key=lambda need: need.total / max(1, free[need.where]),
            default=None,
        )


def check_memory(memory: Memory, quiet: bool = False) -> None:
    """Print what a run needs. Raises ConfigError, naming flags that help, where that cannot be had."""
    files, free = {path for path in _files(memory) if path.is_file()}, memory.free()
    if not quiet:
        print(f"reads {amount(sum(path.stat().st_size for path in files))} of files")
        for need in memory.needs():
            print(f"needs {need}; {amount(free[need.where])} are free")
    if problem := memory.too_large(free):
        advice = advise(memory, lambda smaller: not smaller.too_large(free))
        raise ConfigError(
            f"{memory.config.model} needs {problem}, but {amount(free[problem.where])} are free; {advice}"
        )


# -- flags that make a run smaller ---------------------------------------------------------------------------

Smaller = Iterator[tuple[str, Memory]]  # a flag, and the run that it makes; several from large to small


def _t5_cpu(run: Memory) -> Smaller:
    if run.encodes and run.on_gpu and not run.config.t5_cpu:
        yield "--t5_cpu", replace(run, config=replace(run.config, t5_cpu=True))


def _offload(run: Memory) -> Smaller:
    if run.on_gpu and not run.config.offload:
        yield "--offload", replace(run, config=replace(run.config, offload=True))


def _prompt_embeds(run: Memory) -> Smaller:
    if run.encodes and not run.config.prompt_embeds and not run.bidirectional:
        yield "--prompt_embeds FILE", replace(run, config=replace(run.config, prompt_embeds="FILE"))


def _bfloat16(run: Memory) -> Smaller:
    if run.dtype == torch.float32:
        yield "--dtype bfloat16", replace(run, dtype=torch.bfloat16)


def _frame_granularity(run: Memory) -> Smaller:
    if any(request.granularity == "token" for request in run.requests):
        requests = [replace(r, granularity="frame", is_logits=True) for r in run.requests]
        yield "--granularity frame", replace(run, requests=requests)


def _fewer_frames(run: Memory) -> Smaller:
    c = run.config
    for count in range(len(c.block_sizes) - 1, 0, -1):
        config = replace(c, num_frames=sum(c.block_sizes[:count]))
        blocks = [r.blocks and [min(block, count - 1) for block in r.blocks] for r in run.requests]
        requests = [replace(r, blocks=b) for r, b in zip(run.requests, blocks, strict=True)]
        yield f"--num_frames {config.num_frames}", replace(run, config=config, requests=requests)


REMEDIES = (_t5_cpu, _offload, _prompt_embeds, _bfloat16, _frame_granularity, _fewer_frames)


def advise(run: Memory, fits: Callable[[Memory], bool]) -> str:
    """The flags of which each alone makes a run fit, or else those that do together, one after another."""
    alone = [next((flag for flag, smaller in remedy(run) if fits(smaller)), None) for remedy in REMEDIES]
    if any(alone):
        return f"it fits with {' or '.join(filter(None, alone))}"
    together = []
    for remedy in (_t5_cpu, _offload, _bfloat16, _frame_granularity, _fewer_frames):  # no file to be made
        runs = list(remedy(run))
        if runs:
            flag, run = next(((flag, smaller) for flag, smaller in runs if fits(smaller)), runs[-1])
            together.append(flag)
        if fits(run):
            return f"it fits with {' '.join(together)}"
    return "no flag makes it fit: it needs a larger machine"


# -- what is there -------------------------------------------------------------------------------------------


def _files(memory: Memory) -> Iterator[Path]:
    c = memory.config
    yield from checkpoint.shards(checkpoint.weights_file(c.ckpt_dir, c.checkpoint_path))
    if c.lora_path:
        yield Path(c.lora_path)
    if memory.encodes and not c.prompt_embeds:
        yield from checkpoint.shards(encoder_file(c.ckpt_dir))


def amount(nbytes: int) -> str:
    """Bytes in words: 9.2 GB, 12 MB."""
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB / 10 else f"{nbytes / 1e6:.0f} MB"


def free_host_bytes() -> int:
    """Memory that this process can take: what is available, or less under a control group's limit."""
    return int(min(psutil.virtual_memory().available, _group_free()))


def _group_free(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes up to a control group's limit, with what the kernel can take back from its file pages."""
    try:
        limit, used, stat = (
            (root / f"memory.{name}").read_text(encoding="utf-8").strip()
            for name in ("max", "current", "stat")
        )
        files = dict(line.split() for line in stat.splitlines())
        return math.inf if limit == "max" else int(limit) - int(used) + int(files["inactive_file"])
    except (OSError, ValueError, KeyError):
        return math.inf


# -- requests ------------------------------------------------------------------------------------------------


def estimate_bytes(
    config: RunConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> int:
    """Upper bound of what is kept in a cache; exact for frames and tokens.

    num_passes is the rollout's where not given. Raises ConfigError for a request that does not fit.
    """
    model = checkpoint.read_model_config(config.ckpt_dir)
    check_requests(config, model, requests, num_passes)
    return MARGIN + captured(config, model, requests, num_passes)


def check_requests(
    config: RunConfig,
    model_config: ModelConfig,
    requests: Sequence[CaptureRequest],
    num_passes: int | None = None,
) -> None:
    """Raise ConfigError for a layer, block or pass that the model or the rollout does not have."""
    policy = config.policy
    if policy.name == "per_head" and any(request.granularity != "frame" for request in requests):
        raise ConfigError(
            "under cache_policy per_head heads see keys of their own, of which no maps, token matrices or "
            "key curves are kept; use --granularity frame, or run_extraction_all.py without --key_curve"
        )
    for request in requests:
        try:
            request.check(model_config.num_layers, len(config.block_sizes), num_passes or config.num_passes)
            if request.granularity == "map":
                check_maps(request, config, model_config)
        except ValueError as error:
            raise ConfigError(f"{config.model}: {error}") from None
        if num_passes is None:
            _check_passes(config, request)


def _check_passes(config: RunConfig, request: CaptureRequest) -> None:
    """Raise ConfigError for a pass that the last of the chosen blocks does not have."""
    block = max(range(len(config.block_sizes)) if request.blocks is None else request.blocks)
    there = config.passes_of_block(block)
    for step in request.steps or ():
        if step not in there and step >= 0:
            raise ConfigError(
                f"step {step} is a pass of other blocks than block {block}, which has "
                f"{', '.join(map(str, there))}; first_block_steps differ from denoising_step_list"
            )


def said_of(requests: Sequence[CaptureRequest], config: RunConfig) -> str:
    """How much requests for maps keep at most, in words. ConfigError for one that does not fit."""
    model = checkpoint.read_model_config(config.ckpt_dir)
    check_requests(config, model, requests)
    r = requests[0]
    layers, heads = (
        n if chosen is None else len(chosen)
        for n, chosen in ((model.num_layers, r.layers), (model.num_heads, r.heads))
    )
    size = amount(captured(config, model, requests))
    return (
        f"at most {size} of maps: {layers} layers, {heads} heads, {len(r.steps or ())} passes, "
        f"{len(r.queries)} queries{', words' * (len(requests) > 1)}"
    )


def check_maps(request: CaptureRequest, config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ValueError for a head, frame or token that the model or the video does not have."""
    check_indices("head", request.heads, model_config.num_heads)
    named = [query for query in request.queries if query.frame != ALL]
    check_indices("query frame", [query.frame for query in named], config.num_frames)
    tokens = [query.token for query in named if query.token != ALL]
    check_indices("query token", tokens, model_config.tokens_per_frame(config.height, config.width))

"""Estimate what a run needs before anything is loaded, refuse what does not fit, and check what is asked for.

GB are 10^9 bytes.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch

from experiments.extraction.devices import choose_device, choose_dtype, encoding_device
from experiments.extraction.prompt_embeds import needs_encoder
from experiments.extraction.provenance import vae_files
from wan import checkpoint
from wan.blocks import VIDEO_FRAMES_PER_LATENT, block_frames, rolling_attention_size
from wan.capture import ALL, CaptureRequest, queries_of
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError
from wan.keys import RotaryTable
from wan.model import CausalWanModel
from wan.offload import streamed_bytes
from wan.reductions import CHUNK_ELEMENTS
from wan.sites import OF_FORWARD, SITES, SiteCapture, check_indices
from wan.text_encoder import encoder_file, encoder_sizes
from wan.vae import POSITIONS_AT_ONCE

GB = 10**9
FLOAT, HALF = torch.float32.itemsize, torch.float16.itemsize
FRAMES_HELD, FRAMES_AT_WORK = 24, 30  # of the decoder
SAVE_VIDEO = "--save_video"
ROOM = 0.93  # of what is free: the allocator held up to 7 % more than was used (docs/benchmarks/cards.json)
NEED_A_USER = ("--num_frames", "--prompt_embeds", "no ")  # they change what is asked for, or name a file
BESIDE_TENSORS = 1 << 16  # bytes of a cache: names, numbers, the archive's directory


# --- Bytes of each part of a run
def kv_cache(config: RunConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of every slot in every layer, and what the policy keeps beside them."""
    size, slots = config.policy.capacity(config.num_frames, max(config.block_sizes)), cached_frames(config)
    per_value = (2 * slots + size.raw_slots) * dtype.itemsize + 2 * size.state_frames * FLOAT
    return model.num_layers * model.tokens_per_frame(config.height, config.width) * model.dim * per_value


def cached_frames(config: RunConfig) -> int:
    """Count the slots of the KV cache, each of one frame's tokens."""
    if config.sampler == "rolling_forcing":  # the anchor stays beside what a forward sees
        block = max(config.block_sizes)
        return block + rolling_attention_size(config.local_attn_size, len(config.denoising_step_list), block)
    return config.policy.capacity(config.num_frames, max(config.block_sizes)).slots


@cache  # building a model without weights takes 0.1 s, and the hint tries a dozen runs of the same one
def transformer(model: ModelConfig, dtype: torch.dtype, offload: bool) -> tuple[int, int]:
    """The weights on the device and, with offload, on the host: two layers at a time are on the device."""
    with torch.device("meta"):
        module = CausalWanModel(**vars(model))
    weights, layer = sum(p.numel() for p in module.parameters()) * dtype.itemsize, module.blocks[0]
    if not offload:
        return weights, 0
    layers = model.num_layers * sum(p.numel() for p in layer.parameters()) * dtype.itemsize
    streamed = streamed_bytes(layer, dtype)
    return weights - layers + 2 * streamed, model.num_layers * streamed


def text_encoder(config: RunConfig, text_len: int, dtype: torch.dtype) -> dict[str, int]:
    """umT5, and the widest of its activations: the logits of a layer with their bias, and their softmax."""
    c = SimpleNamespace(**encoder_sizes(config.ckpt_dir))
    attention = 4 * c.d_model * c.d_kv * c.num_heads + c.relative_attention_num_buckets * c.num_heads
    feed_forward = 3 * c.d_model * c.d_ff  # gated
    layers = c.num_layers * (attention + feed_forward + 2 * c.d_model)
    logits = c.num_heads * text_len**2 * (3 * dtype.itemsize + 2 * FLOAT)
    return {
        "umT5": (c.vocab_size * c.d_model + layers + c.d_model) * dtype.itemsize,
        "its activations": logits,
    }


def decoder(config: RunConfig, dtype: torch.dtype) -> dict[str, int]:
    """The VAE, what its layers hold of the frames before and at work, and the video in float32.

    FRAMES_HELD of the decoder's widest layer, and FRAMES_AT_WORK for each latent frame of a call, were fitted
    to 8.5-9.2 GiB for 21 frames at 480 x 832 on an H100.
    """
    folder = Path(config.ckpt_dir)
    c = {} if checkpoint.is_native(folder) else checkpoint.read_component_config(folder / "vae")
    pixels, size = config.height * config.width * 8**2, dtype.itemsize
    frame = size * (c.get("decoder_base_dim") or c.get("base_dim") or 96) * pixels
    calls = max(1, POSITIONS_AT_ONCE // (config.height * config.width))
    held = (FRAMES_HELD + FRAMES_AT_WORK * calls) * frame // (c.get("patch_size") or 1) ** 2
    video = FLOAT * 3 * pixels * (1 + VIDEO_FRAMES_PER_LATENT * (config.num_frames - 1))
    return {"VAE": sum(file["size"] for file in vae_files(config)), "its layers": held, "video": 2 * video}


def frames_at_once(config: RunConfig) -> int:
    """Frames that one forward takes at most: a block or a window of them, or clean ones computed again."""
    blocks = len(config.denoising_step_list) if config.sampler == "rolling_forcing" else 1
    again = [min(config.recompute_context, config.num_frames)]
    for switch in config.switches:
        if switch.how == "recache":
            again.append(min(switch.frame, config.policy.recomputed_frames or switch.frame))
    return max(min(config.num_frames, blocks * max(config.block_sizes)), *again)


def capturing(request: CaptureRequest, config: RunConfig, model: ModelConfig, fused: bool) -> int:
    """Bytes that looking at one call takes beside what is kept of it; mean keys, which stay, are part of it.

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
    """Bytes that requests keep of a rollout, in memory and in a cache alike."""
    total = 0
    for request in requests:
        layers = _count(request.layers, model.num_layers)
        calls = layers * _count(request.steps, num_passes or config.num_passes)
        for block in range(len(config.block_sizes)) if request.blocks is None else request.blocks:
            total += calls * sum(_kept_of_call(request, kind, config, model, block) for kind in request.kinds)
    return total


def _count(chosen: Collection[int] | None, every: int) -> int:
    return every if chosen is None else len(chosen)


def _kept_of_call(
    request: CaptureRequest, kind: str, config: RunConfig, model: ModelConfig, block: int
) -> int:
    S, policy, queries = (
        model.tokens_per_frame(config.height, config.width),
        config.policy,
        config.block_sizes[block],
    )
    seen = policy.most_slots(sum(config.block_sizes[: block + 1]))
    keys = seen * S if kind == "self" else model.text_len
    if request.granularity == "map":
        heads = _count(request.heads, model.num_heads)
        if kind == "self":  # logits and mass
            asked = queries_of(request.queries, block_frames(config.block_sizes, block))
            return heads * len(asked) * keys * 2 * HALF
        most = min(model.text_len, len(config.prompt.encode()) + 2)  # a token is a byte or more, but for two
        return heads * queries * S * (request.num_words or most) * HALF
    if request.granularity == "token":
        return model.num_heads * queries * S * keys * request.token_dtype.itemsize
    if request.granularity == "key":
        return model.num_heads * max(config.num_frames, seen) * S * FLOAT
    if kind == "cross":
        return model.num_heads * queries * keys * FLOAT
    bands = len(RotaryTable(model.head_dim).bands) if request.rope_bands else 0
    slots = 0 if policy.keeps_whole_frames else policy.num_frames or config.num_frames
    values = config.num_frames * (1 + request.mass + bands) + slots * (1 + request.mass)
    if request.query_key_means:
        values += 2 * RotaryTable(model.head_dim).axes_dim[0]
    return model.num_heads * queries * FLOAT * values


def bytes_of_sites(config: RunConfig, model: ModelConfig, watcher: SiteCapture, streams: bool) -> int:
    """Bytes that a capture of sites keeps of a rollout, or where it streams, of its largest block."""
    S, grid = model.tokens_per_frame(config.height, config.width), (config.height, config.width)
    sizes = {
        "B": 1,
        "dim": model.dim,
        "ffn_dim": model.ffn_dim,
        "D": model.head_dim,
        "2": 2,
        "C": model.in_dim,
    }
    sizes |= {"T": model.text_len, "K": cached_frames(config) * S, "h": grid[0], "w": grid[1]}
    sizes["H"] = _count(watcher.heads, model.num_heads)
    of_blocks = [0]
    for block in range(len(config.block_sizes)) if watcher.blocks is None else watcher.blocks:
        frames = block_frames(config.block_sizes, block)
        F = len(frames if watcher.frames is None else {*frames} & {*watcher.frames})
        passes = config.passes_of_block(block)
        calls = len(passes if watcher.steps is None else {*passes} & {*watcher.steps})
        for site in watcher.sites:
            layers = 1 if site in OF_FORWARD else _count(watcher.layers, model.num_layers)
            numbers = prod((sizes | {"F": F, "L": F * S})[axis] for axis in SITES[site].split())
            of_blocks.append(numbers * layers * calls * (watcher.dtype or torch.float32).itemsize)
    return max(of_blocks) if streams else sum(of_blocks)


def estimate_bytes(
    config: RunConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> int:
    """Upper bound of what a cache keeps; exact for frames and tokens. ConfigError: a request does not fit."""
    model = checkpoint.read_model_config(config.ckpt_dir)
    check_requests(config, model, requests, num_passes)
    return BESIDE_TENSORS + captured(config, model, requests, num_passes)


# --- A run against the memory that is there
@dataclass(frozen=True)
class Need:
    """Bytes by purpose that one phase of a run holds at once in one memory."""

    phase: str
    where: str  # GPU or host
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{k} {amount(size)}" for k, size in self.parts.items() if size >= self.total / 100)
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
    decodes: str = ""  # what asks for a video, after the rollout: the model stays beside the VAE

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def needs(self) -> list[Need]:
        """List the phases of the run, for each memory."""
        c, m, dtype, size = self.config, self.model_config, self.dtype, self.dtype.itemsize
        found = []
        if self.encodes and not c.prompt_embeds:
            where = "GPU" if encoding_device(c, self.device).type == "cuda" else "host"
            found.append(Need("encoding the prompt", where, text_encoder(c, m.text_len, dtype)))
        if c.lora_path:  # leaves every linear layer of the blocks in float32
            merged = m.num_layers * (8 * m.dim**2 + 2 * m.dim * m.ffn_dim) * FLOAT
            found.append(Need("merging the LoRA", "host", {"merged layers": merged}))
        weights, on_host = transformer(m, dtype, c.offload)
        queries = frames_at_once(c) * m.tokens_per_frame(c.height, c.width)
        fused = self.on_gpu and dtype != torch.float32
        kept = captured(c, m, [r for r in self.requests if r.granularity != "token"])
        # graphs keep the text at places of their own
        texts = 1 + self.bidirectional + (self.on_gpu and (self.replays or c.gpus > 1) and not c.offload)
        has_raw = c.policy.capacity(c.num_frames, max(c.block_sizes)).raw_slots > 0
        exchanged = 4 + 4 * has_raw + any("cross" in r.kinds for r in self.requests)  # q, k, v, outputs, raw
        device = {
            "weights": weights,
            # each process keeps its share of the heads
            "KV cache": 0 if self.bidirectional else kv_cache(c, m, dtype) // c.gpus,
            "text": texts * m.num_layers * 2 * m.text_len * m.dim * size,
            # a layer's widest point: the feed-forward's inner values beside its input, RoPE in float32
            "activations": queries * ((m.ffn_dim + 6 * m.dim) * size + 6 * m.head_dim * FLOAT),
            "exchange": exchanged * queries * m.dim // c.gpus * size if c.gpus > 1 else 0,
            "latents": c.num_frames * m.in_dim * c.height * c.width * (c.num_passes + 1) * size,
            "capture": kept + max((capturing(r, c, m, fused) for r in self.requests), default=0),
        }
        tokens = captured(c, m, [r for r in self.requests if r.granularity == "token"])
        copies = {"captured": tokens + 2 * kept}  # building a cache of frames copies them
        if self.on_gpu:
            found.append(Need("rolling out", "GPU", device))
            found.append(Need("rolling out", "host", {"weights": on_host} | copies))
        else:
            found.append(Need("rolling out", "host", device | copies))
        if self.decodes:
            vae_dtype = torch.bfloat16 if self.on_gpu else torch.float32  # --vae_dtype auto
            held = {"weights": weights} | ({} if self.on_gpu else copies)
            found.append(
                Need("decoding the video", "GPU" if self.on_gpu else "host", held | decoder(c, vae_dtype))
            )
        return [need for need in found if need.total]

    def free(self) -> dict[str, int]:
        """Bytes that can still be had of each memory, within what this process may take of the GPU."""
        if not self.on_gpu:
            return {"host": free_host_bytes()}
        free, total = torch.cuda.mem_get_info(self.device)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)  # takes no bare "cuda"
        return {
            "host": free_host_bytes(),
            "GPU": min(free, allowed - torch.cuda.memory_reserved(self.device)),
        }

    def smaller(self) -> Iterator[tuple[str, "Memory"]]:
        """Yield flags that make this run smaller, each with that run."""
        c = self.config
        if self.encodes and self.on_gpu and not c.t5_cpu:
            yield "--t5_cpu", replace(self, config=replace(c, t5_cpu=True))
        if self.decodes == SAVE_VIDEO:
            yield f"no {SAVE_VIDEO}", replace(self, decodes="")
        if self.on_gpu and not c.offload:
            yield "--offload", replace(self, config=replace(c, offload=True))
        if self.encodes and not c.prompt_embeds and not self.bidirectional:
            yield "--prompt_embeds FILE", replace(self, config=replace(c, prompt_embeds="FILE"))
        if self.dtype == torch.float32:
            yield "--dtype bfloat16", replace(self, dtype=torch.bfloat16)
        if any(request.granularity == "token" for request in self.requests):
            requests = [replace(r, granularity="frame", is_logits=True) for r in self.requests]
            yield "--granularity frame", replace(self, requests=requests)
        for count in range(len(c.block_sizes) - 1, 0, -1):
            config = replace(c, num_frames=sum(c.block_sizes[:count]))
            requests = [
                replace(r, blocks=r.blocks and [min(block, count - 1) for block in r.blocks])
                for r in self.requests
            ]
            yield f"--num_frames {config.num_frames}", replace(self, config=config, requests=requests)

    def fitting(self, free: dict[str, int]) -> "tuple[list[str], Memory | None]":
        """Return flags that make the run fit, the fewest that are found, and that run; None where none do."""
        run, flags = self, list[str]()
        while True:
            if all(need.total <= free[need.where] for need in run.needs()):
                return flags, run
            options = list(run.smaller())
            for flag, smaller in options:
                if all(need.total <= free[need.where] for need in smaller.needs()):
                    return [*flags, flag], smaller
            lasting = [x for x in options if not x[0].startswith(NEED_A_USER)]
            if not lasting:
                return flags, None
            flag, run = lasting[0]
            flags.append(flag)

    def hint(self, free: dict[str, int]) -> str:
        """Name a flag that makes the run fit, or flags that do together."""
        flags, run = self.fitting(free)
        return f"it fits with {' '.join(flags)}" if run else "no flag makes it fit: it needs a larger machine"


def fit(config: RunConfig, requests: Sequence[CaptureRequest], decodes: str) -> Memory:
    """Choose flags of memory so that a run fits, and print them. ConfigError where none are enough."""
    device = choose_device(config.device, config.offload)
    dtype, model = choose_dtype(config.dtype, device), checkpoint.read_model_config(config.ckpt_dir)
    encodes = needs_encoder(config, [config.prompt], model, dtype, device)
    memory = Memory(config, model, requests, dtype, device, encodes, decodes=decodes)
    flags, fitting = memory.fitting({where: int(ROOM * size) for where, size in memory.free().items()})
    if fitting is None or any(flag.startswith(NEED_A_USER) for flag in flags):
        check_memory(memory, quiet=True)
    assert fitting is not None
    print(f"--fit chose {' '.join(flags) or 'nothing: all of it fits'}")
    return replace(fitting, config=replace(fitting.config, dtype=str(fitting.dtype).removeprefix("torch.")))


def check_memory(memory: Memory, quiet: bool = False) -> None:
    """Print what a run needs. Raises ConfigError, naming a flag that helps, where that cannot be had."""
    c, free = memory.config, memory.free()
    if not quiet:
        files = set(checkpoint.shards(checkpoint.weights_file(c.ckpt_dir, c.checkpoint_path)))
        files |= {Path(c.lora_path)} if c.lora_path else set()
        files |= set(checkpoint.shards(encoder_file(c.ckpt_dir))) if memory.encodes else set()
        print(f"reads {amount(sum(path.stat().st_size for path in files if path.is_file()))} of files")
        for need in memory.needs():
            print(f"needs {need}; {amount(free[need.where])} are free")
    worst = max(memory.needs(), key=lambda need: need.total / max(1, free[need.where]))
    if worst.total > free[worst.where]:
        raise ConfigError(
            f"{c.model} needs {worst}, but {amount(free[worst.where])} are free; {memory.hint(free)}"
        )


def amount(nbytes: int) -> str:
    """Bytes in words: 9.2 GB, 12 MB."""
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB / 10 else f"{nbytes / 1e6:.0f} MB"


def free_host_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process can take: what is available, or less under a control group's limit."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no control group of this version, or no limit
        limit, used, stat = ((root / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        files = dict(line.split() for line in stat.splitlines())
        free = min(free, int(limit) - int(used) + int(files["inactive_file"]))  # file pages can be taken back
    return free


# --- The one check of what is asked for
def check_requests(
    config: RunConfig, model: ModelConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> None:
    """Raise ConfigError for a layer, block, pass, head or place that model or rollout do not have."""
    if config.policy.by_heads and any(request.granularity != "frame" for request in requests):
        raise ConfigError(
            f"under cache_policy {config.policy.name} heads see keys of their own, of which no maps, token "
            "matrices or key curves are kept; use --granularity frame, or leave --key_curve out"
        )
    blocks = len(config.block_sizes)
    for request in requests:
        try:
            request.check(model.num_layers, blocks, num_passes or config.num_passes)
            if request.granularity == "map":
                named = [query for query in request.queries if query.frame != ALL]
                tokens = [query.token for query in named if query.token != ALL]
                check_indices("head", request.heads, model.num_heads)
                check_indices("query frame", [query.frame for query in named], config.num_frames)
                check_indices("query token", tokens, model.tokens_per_frame(config.height, config.width))
        except ValueError as error:
            raise ConfigError(f"{config.model}: {error}") from None
        last = max(range(blocks) if request.blocks is None else request.blocks)
        there = config.passes_of_block(last)
        absent = [step for step in request.steps or () if step not in there and step >= 0]
        if absent and num_passes is None:
            raise ConfigError(
                f"step {absent[0]} is a pass of other blocks than block {last}, which has "
                f"{', '.join(map(str, there))}; first_block_steps differ from denoising_step_list"
            )


def said_of(requests: Sequence[CaptureRequest], config: RunConfig) -> str:
    """Say how much requests for maps keep at most. ConfigError for one that does not fit."""
    model = checkpoint.read_model_config(config.ckpt_dir)
    check_requests(config, model, requests)
    first = requests[0]
    layers, heads = _count(first.layers, model.num_layers), _count(first.heads, model.num_heads)
    return (
        f"at most {amount(captured(config, model, requests))} of maps: {layers} layers, {heads} heads, "
        f"{len(first.steps or ())} passes, {len(first.queries)} queries{', words' * (len(requests) > 1)}"
    )

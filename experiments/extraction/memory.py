"""Estimate what a run needs before anything is loaded, refuse what does not fit, and check what is asked for.

GB are 10^9 bytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from wan import checkpoint
from wan.blocks import VIDEO_FRAMES_PER_LATENT, block_frames, rolling_attention_size
from wan.capture import ALL, CaptureRequest, queries_of
from wan.checkpoint import VAE_FILE, CheckpointError, encoder_config
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError, named
from wan.files import read_json
from wan.keys import RotaryTable
from wan.model import CausalWanModel
from wan.reductions import CHUNK_ELEMENTS
from wan.sites import OF_FORWARD, SITES, check_indices

if TYPE_CHECKING:
    from wan.activations import SiteCapture

GB = 10**9
FLOAT, HALF = torch.float32.itemsize, torch.float16.itemsize
FRAMES_HELD, FRAMES_AT_WORK = 24, 30  # of the decoder
POSITIONS_AT_ONCE = 1024  # of latents, in one call of it
# What autograd keeps of a layer's token: float32 times dim, numbers times ffn_dim; fewer where it recomputes.
# Measured on the miniature: 9.7 and 2, or 5.3 beside the inputs of what is computed again.
PER_TOKEN = {False: (12, 2), True: (9, 0)}
OF_SCORES = 4  # matrices [H, L, K] in float32: logits, their softmax, and gradients
SAVE_VIDEO = "--save_video"
NEED_A_USER = ("--num_frames", "--prompt_embeds", "no ")  # they change what is asked for, or name a file
BESIDE_TENSORS = 1 << 16  # bytes of a cache: names, numbers, the archive's directory


# --- Bytes of each part of a run
def kv_cache(config: RunConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values of every slot in every layer, and of the policy's own tensors."""
    size, slots = config.policy.capacity(config.num_frames, max(config.block_sizes)), cached_frames(config)
    per_value = (2 * slots + size.raw_slots) * dtype.itemsize + 2 * size.state_frames * FLOAT
    return model.num_layers * model.tokens_per_frame(config.height, config.width) * model.dim * per_value


def cached_frames(config: RunConfig) -> int:
    """Count the slots of the KV cache, each of one frame's tokens."""
    block = max(config.block_sizes)
    if config.sampler == "rolling_forcing":  # the anchor stays beside what a forward sees
        return block + rolling_attention_size(config.local_attn_size, len(config.denoising_step_list), block)
    return config.policy.capacity(config.num_frames, block).slots


@cache  # building a model without weights takes 0.1 s, and the hint tries a dozen runs of the same one
def transformer(model: ModelConfig, dtype: torch.dtype, offload: bool) -> tuple[int, int]:
    """The weights on the device and, with offload, on the host: two layers at a time are on the device."""
    with torch.device("meta"):
        module = CausalWanModel(**vars(model))
    # On the meta device: sizes without memory
    whole, layer = (sum(p.nbytes for p in m.to(dtype).parameters()) for m in (module, module.blocks[0]))
    if not offload:
        return whole, 0
    from wan.wings.offload import streamed_bytes

    streamed = streamed_bytes(module.blocks[0], dtype)
    return whole - model.num_layers * layer + 2 * streamed, model.num_layers * streamed


def decoder(config: RunConfig, dtype: torch.dtype) -> dict[str, int]:
    """The VAE, what its layers hold of the frames before and at work, and the video in float32.

    FRAMES_HELD of the decoder's widest layer, and FRAMES_AT_WORK for each latent frame of a call, were fitted
    to 8.5-9.2 GiB for 21 frames at 480 x 832 on an H100.
    """
    folder = Path(config.ckpt_dir)
    is_native = checkpoint.is_native(folder)
    c = {} if is_native else read_json(folder / "vae/config.json", CheckpointError)
    files = [folder / VAE_FILE] if is_native else (folder / "vae").iterdir()
    pixels, size = config.height * config.width * 8**2, dtype.itemsize
    frame = size * (c.get("decoder_base_dim") or c.get("base_dim") or 96) * pixels
    calls = max(1, POSITIONS_AT_ONCE // (config.height * config.width))
    held = (FRAMES_HELD + FRAMES_AT_WORK * calls) * frame // (c.get("patch_size") or 1) ** 2
    video = FLOAT * 3 * pixels * (1 + VIDEO_FRAMES_PER_LATENT * (config.num_frames - 1))
    return {"VAE": sum(path.stat().st_size for path in files), "its layers": held, "video": 2 * video}


def captured(
    config: RunConfig, model: ModelConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> int:
    """Bytes that requests keep of a rollout, in memory and in a cache alike."""
    S, F, sizes = model.tokens_per_frame(config.height, config.width), config.num_frames, config.block_sizes
    policy, rope, total = config.policy, RotaryTable(model.head_dim), 0
    for r, kind in ((request, kind) for request in requests for kind in request.kinds):
        passes = num_passes or config.num_passes
        chosen = ((r.layers, model.num_layers), (r.steps, passes), (r.heads, model.num_heads))
        rows = prod(every if some is None else len(some) for some, every in chosen)
        for block in range(len(sizes)) if r.blocks is None else r.blocks:
            queries, frames, of_self = sizes[block], sum(sizes[: block + 1]), kind == "self"
            seen = min(frames, policy.num_frames or frames)
            keys = seen * S if of_self else model.text_len
            if r.granularity == "map" and of_self:  # logits and mass
                size = len(queries_of(r.queries, block_frames(sizes, block))) * keys * 2 * HALF
            elif r.granularity == "map":  # a token is a byte or more, but for two
                most = min(model.text_len, len(config.prompt.encode()) + 2)
                size = queries * S * (r.num_words or most) * HALF
            elif r.granularity == "token":
                size = queries * S * keys * r.token_dtype.itemsize
            elif r.granularity == "key":
                size = max(F, seen) * S * FLOAT
            elif not of_self:
                size = queries * keys * FLOAT
            else:
                slots = 0 if policy.keeps_whole_frames else policy.num_frames or F
                numbers = (F + slots) * (1 + r.mass) + (F * len(rope.bands) if r.rope_bands else 0)
                size = queries * FLOAT * (numbers + 2 * rope.axes_dim[0] * r.query_key_means)
            total += rows * size
    return total


def bytes_of_sites(config: RunConfig, model: ModelConfig, watcher: "SiteCapture", streams: bool) -> int:
    """Bytes that a capture of sites keeps of a rollout, or where it streams, of its largest block."""
    S, of_blocks = model.tokens_per_frame(config.height, config.width), [0]
    sizes = {"B": 1, "2": 2, "dim": model.dim, "ffn_dim": model.ffn_dim, "D": model.head_dim}
    sizes |= {"T": model.text_len, "K": cached_frames(config) * S, "C": model.in_dim}
    sizes |= {
        "h": config.height,
        "w": config.width,
        "H": model.num_heads if watcher.heads is None else len(watcher.heads),
    }
    num_layers = model.num_layers if watcher.layers is None else len(watcher.layers)
    for block in range(len(config.block_sizes)) if watcher.blocks is None else watcher.blocks:
        frames, passes = block_frames(config.block_sizes, block), config.passes_of_block(block)
        F = len(frames if watcher.frames is None else {*frames} & {*watcher.frames})
        calls = len(passes if watcher.steps is None else {*passes} & {*watcher.steps})
        for site in watcher.sites:
            layers = 1 if site in OF_FORWARD else num_layers
            numbers = prod((sizes | {"F": F, "L": F * S})[axis] for axis in SITES[site].split())
            of_blocks.append(numbers * layers * calls * (watcher.dtype or torch.float32).itemsize)
    return max(of_blocks) if streams else sum(of_blocks)


def bytes_of_graphs(
    config: RunConfig,
    model: ModelConfig,
    chosen: "SiteCapture",
    through: str,
    dtype: torch.dtype,
    recompute: bool,
) -> int:
    """Bytes that autograd keeps of a rollout until its graphs are differentiated.

    Layers count from the first chosen one on, or all where a graph holds several passes.
    """
    S, total = model.tokens_per_frame(config.height, config.width), 0
    first = min(chosen.layers or [0]) if through == "pass" else 0
    wide, hidden = PER_TOKEN[recompute]
    per_token = FLOAT * wide * model.dim + dtype.itemsize * hidden * model.ffn_dim
    is_matrix = {*chosen.sites} & {"scores", "pattern"}
    watched = len(chosen.layers or range(model.num_layers)) if is_matrix else 0
    blocks = range(len(config.block_sizes)) if chosen.blocks is None else chosen.blocks
    if through == "rollout":
        blocks = range(min(blocks), len(config.block_sizes))
    for block in blocks:
        passes = config.passes_of_block(block)
        if through == "pass":
            passes = [step for step in passes[:-1] if chosen.steps is None or step in chosen.steps]
        tokens, seen = config.block_sizes[block] * S, sum(config.block_sizes[: block + 1])
        keys = min(seen, config.policy.num_frames or seen) * S
        of_layer = tokens * per_token + 2 * keys * model.dim * dtype.itemsize
        matrices = OF_SCORES * watched * model.num_heads * tokens * keys * FLOAT
        total += len(passes) * ((model.num_layers - first) * of_layer + matrices)
    return total


def estimate_bytes(
    config: RunConfig, requests: Sequence[CaptureRequest], num_passes: int | None = None
) -> int:
    """Upper bound of what a cache keeps; exact for frames and tokens. ConfigError: a request does not fit."""
    model = checkpoint.read_model_config(config.ckpt_dir)
    check_requests(config, model, requests, num_passes)
    return BESIDE_TENSORS + captured(config, model, requests, num_passes)


# --- A run against the memory that is there
class Need(NamedTuple):
    """Bytes by purpose that one phase of a run holds at once in one memory: GPU or host."""

    phase: str
    where: str
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

    def needs(self) -> list[Need]:
        """List the phases of the run, for each memory."""
        c, m, dtype, size = self.config, self.model_config, self.dtype, self.dtype.itemsize
        on_gpu, found = self.device.type == "cuda", list[Need]()
        here, S = "GPU" if on_gpu else "host", m.tokens_per_frame(c.height, c.width)
        largest = max(c.block_sizes)
        # 1. umT5, and the widest of its activations: a layer's logits with their bias, and their softmax
        if self.encodes and not c.prompt_embeds:
            t5 = SimpleNamespace(**encoder_config(c.ckpt_dir))
            attention = 4 * t5.d_model * t5.d_kv * t5.num_heads
            attention += t5.relative_attention_num_buckets * t5.num_heads
            layers = t5.num_layers * (attention + 3 * t5.d_model * t5.d_ff)
            encoding = {
                "umT5": (t5.vocab_size * t5.d_model + layers) * size,
                "its activations": t5.num_heads * m.text_len**2 * (3 * size + 2 * FLOAT),
            }
            found.append(Need("encoding the prompt", "host" if c.t5_cpu else here, encoding))
        # 2. A LoRA leaves every linear layer of the blocks in float32
        if c.loras:
            merged = m.num_layers * (8 * m.dim**2 + 2 * m.dim * m.ffn_dim) * FLOAT
            found.append(Need("merging the LoRA", "host", {"merged layers": merged}))
        # 3. Most frames of one forward: a block, a window of blocks, or clean frames computed again
        blocks = len(c.denoising_step_list) if c.sampler == "rolling_forcing" else 1
        again = [switch.frame for switch in c.switches if switch.how == "recache"]
        again = [min(frame, c.policy.recomputed_frames or frame) for frame in again]
        frames = max(min(c.num_frames, blocks * largest), min(c.recompute_context, c.num_frames), *again)
        # 4. A captured call, beside what is kept: keys in float32, and a chunk of rows (wan/reductions.py) of
        #    logits and softmax. A kernel that computes the mass forms no matrix
        fused, working = on_gpu and dtype != torch.float32, 0
        for request in self.requests:
            is_self = "self" in request.kinds
            if request.granularity == "frame" and is_self and (fused or not request.mass):
                continue
            keys = cached_frames(c) * S if is_self else m.text_len
            in_kernel = request.granularity == "map" and fused and is_self
            queries = len(request.queries) if in_kernel else largest * S
            rows = FLOAT * min(CHUNK_ELEMENTS, m.num_heads * queries * keys)
            working = max(working, FLOAT * keys * m.dim + 2 * rows)
        # 5. The rollout: what stays for all blocks, and the widest moment of one layer
        weights, on_host = transformer(m, dtype, c.offload)
        kept = captured(c, m, [r for r in self.requests if r.granularity != "token"])
        texts = 2 if self.bidirectional or self.replays or c.gpus > 1 else 1  # graphs have copies
        rolling = {
            "weights": weights,
            "KV cache": 0 if self.bidirectional else kv_cache(c, m, dtype) // c.gpus,  # each has some heads
            "text": texts * m.num_layers * 2 * m.text_len * m.dim * size,
            # a layer's widest point: the feed-forward's inner values beside its input, RoPE in float32
            "activations": frames * S * ((m.ffn_dim + 6 * m.dim) * size + 6 * m.head_dim * FLOAT),
            "latents": c.num_frames * m.in_dim * c.height * c.width * (c.num_passes + 1) * size,
            "capture": kept + working,
        }
        tokens = captured(c, m, [r for r in self.requests if r.granularity == "token"])
        copies = {"captured": tokens + 2 * kept}  # building a cache of frames copies them
        found.append(Need("rolling out", here, rolling if on_gpu else rolling | copies))
        if on_gpu:
            found.append(Need("rolling out", "host", {"weights": on_host} | copies))
        # 6. The VAE, while the model stays beside it
        if self.decodes:
            vae = decoder(c, torch.bfloat16 if on_gpu else torch.float32)  # --vae_dtype auto
            held = {"weights": weights} if on_gpu else {"weights": weights} | copies
            found.append(Need("decoding the video", here, held | vae))
        return [need for need in found if need.total]

    def free(self, root: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
        """Bytes that can still be had of each memory: what is available, or less where there is a limit."""
        # 1. The host's, within the limit of a control group
        host = psutil.virtual_memory().available
        with suppress(OSError, ValueError, KeyError):  # no control group of this version, or no limit
            limit, used, stat = ((root / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
            files = dict(line.split() for line in stat.splitlines())
            host = min(host, int(limit) - int(used) + int(files["inactive_file"]))  # file pages can be freed
        if self.device.type != "cuda":
            return {"host": host}
        # 2. The GPU's, within what this process may take of it
        free, total = torch.cuda.mem_get_info(self.device)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)  # takes no bare "cuda"
        return {"host": host, "GPU": min(free, allowed - torch.cuda.memory_reserved(self.device))}

    def fits(self, free: dict[str, int]) -> bool:
        return all(need.total <= free[need.where] for need in self.needs())

    def smaller(self) -> Iterator[tuple[str, "Memory"]]:
        """Yield flags that make this run smaller, each with that run."""

        def changed(**settings: Any) -> "Memory":
            return replace(self, config=replace(self.config, **settings))

        c, on_gpu = self.config, self.device.type == "cuda"
        if self.encodes and on_gpu and not c.t5_cpu:
            yield "--t5_cpu", changed(t5_cpu=True)
        if self.decodes == SAVE_VIDEO:
            yield f"no {SAVE_VIDEO}", replace(self, decodes="")
        if on_gpu and not c.offload:
            yield "--offload", changed(offload=True)
        if self.encodes and not c.prompt_embeds and not self.bidirectional:
            yield "--prompt_embeds FILE", changed(prompt_embeds="FILE")
        if self.dtype == torch.float32:
            yield "--dtype bfloat16", replace(self, dtype=torch.bfloat16)
        if any(request.granularity == "token" for request in self.requests):
            requests = [replace(r, granularity="frame", is_logits=True) for r in self.requests]
            yield "--granularity frame", replace(self, requests=requests)
        for count in range(len(c.block_sizes) - 1, 0, -1):
            # Fewer blocks, the last resort, and the requests of the last one with them
            frames = sum(c.block_sizes[:count])
            requests = [
                replace(r, blocks=r.blocks and [min(block, count - 1) for block in r.blocks])
                for r in self.requests
            ]
            yield f"--num_frames {frames}", replace(changed(num_frames=frames), requests=requests)

    def fitting(self, free: dict[str, int]) -> "tuple[list[str], Memory | None]":
        """Return flags that make the run fit, the fewest that are found, and that run; None where none do."""
        run, flags = self, list[str]()
        while not run.fits(free):
            options = list(run.smaller())
            for flag, smaller in options:
                if smaller.fits(free):
                    return [*flags, flag], smaller
            lasting = [x for x in options if not x[0].startswith(NEED_A_USER)]
            if not lasting:
                return flags, None
            flag, run = lasting[0]
            flags.append(flag)
        return flags, run


def check_memory(memory: Memory, quiet: bool = False) -> None:
    """Print what a run needs. Raises ConfigError, naming a flag that helps, where that cannot be had."""
    free, needs = memory.free(), memory.needs()
    for need in needs if not quiet else ():
        print(f"needs {need}; {amount(free[need.where])} are free")
    # The scarcest memory decides, by the share of it that is needed
    worst = max(needs, key=lambda need: need.total / max(1, free[need.where]))
    if worst.total > free[worst.where]:
        flags, run = memory.fitting(free)
        hint = f"it fits with {' '.join(flags)}" if run else "no flag makes it fit: it needs a larger machine"
        raise ConfigError(
            f"{memory.config.model} needs {worst}, but {amount(free[worst.where])} are free; {hint}"
        )


def amount(nbytes: int) -> str:
    """Bytes in words: 9.2 GB, 12 MB."""
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB / 10 else f"{nbytes / 1e6:.0f} MB"


def require_room(what: str, needed: int, free: int, remedy: str) -> None:
    """Raise ConfigError, which ends with the remedy, where captures need more bytes than are free."""
    if needed > free:
        raise ConfigError(f"{what} needs about {amount(needed)}, and {amount(free)} are free: {remedy}")


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
        of_frames = [query for query in request.queries if query.frame != ALL]
        tokens = [query.token for query in of_frames if query.token != ALL]
        with named(config.model):
            request.check(model.num_layers, blocks, num_passes or config.num_passes)
            check_indices("head", request.heads, model.num_heads)
            check_indices("query frame", [query.frame for query in of_frames], config.num_frames)
            check_indices("query token", tokens, model.tokens_per_frame(config.height, config.width))
        last = max(range(blocks) if request.blocks is None else request.blocks)
        there = config.passes_of_block(last)
        absent = [step for step in request.steps or () if step not in there]
        if absent and num_passes is None:
            raise ConfigError(
                f"step {absent[0]} is a pass of other blocks than block {last}, which has "
                f"{', '.join(map(str, there))}; first_block_steps differ from denoising_step_list"
            )

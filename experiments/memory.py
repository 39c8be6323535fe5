"""Estimate the memory of a run, part by part, before anything is loaded, and refuse what does not fit.

GB are 10^9 bytes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import torch

from experiments.caches.files import RunError
from experiments.progress import print_out
from wan import capture, checkpoint, errors, sites
from wan.blocks import VIDEO_FRAMES_PER_LATENT, block_frames, rolling_attention_size
from wan.cache import read_switches
from wan.config import ModelConfig, RunConfig
from wan.files import read_json
from wan.keys import RotaryTable
from wan.model import CausalWanModel
from wan.policies import policy_of
from wan.reductions import CHUNK_ELEMENTS
from wan.vae import WIDE_SIZES, Sizes

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
BESIDE_TENSORS = 1 << 16  # bytes of a cache: names, numbers, the archive's directory
REMEDY = (
    "on a GPU --offload and --t5_cpu take less of it; fewer layers (--layer_indices), no token matrices "
    "(--granularity frame) and fewer --num_frames take less anywhere"
)


# --- Bytes of each part of a run
def kv_cache(config: RunConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of every slot in every layer, and of the policy's own tensors."""
    size = policy_of(config).capacity(config.num_frames, max(config.block_sizes))
    per_value = (2 * cached_frames(config) + size.raw_slots) * dtype.itemsize + 2 * size.state_frames * FLOAT
    return model.num_layers * model.tokens_per_frame(config.height, config.width) * model.dim * per_value


def cached_frames(config: RunConfig) -> int:
    """Count the slots of the KV cache, each of one frame's tokens."""
    block = max(config.block_sizes)
    if config.sampler == "rolling_forcing":  # the anchor stays beside what a forward sees
        return block + rolling_attention_size(config.local_attn_size, len(config.denoising_step_list), block)
    return policy_of(config).capacity(config.num_frames, block).slots


def transformer(model: ModelConfig, dtype: torch.dtype, offload: bool) -> tuple[int, int]:
    """Return the bytes of weights on the device and, with offload, on the host.

    With offload two layers at a time are on the device.
    """
    with torch.device("meta"):  # sizes without memory
        module = CausalWanModel(**vars(model)).to(dtype)
    weights = sum(parameter.nbytes for parameter in module.parameters())
    if not offload:
        return weights, 0
    from wan.wings.offload import streamed_bytes

    layer = sum(parameter.nbytes for parameter in module.blocks[0].parameters())
    streamed = streamed_bytes(module.blocks[0], dtype)
    return weights - model.num_layers * layer + 2 * streamed, model.num_layers * streamed


def decoder(config: RunConfig, dtype: torch.dtype) -> dict[str, int]:
    """Return the bytes of the VAE, of what its layers hold and work on, and of the video in float32.

    FRAMES_HELD of the decoder's widest layer, and FRAMES_AT_WORK for each latent frame of a call, were fitted
    to 8.5-9.2 GiB for 21 frames at 480 x 832 on an H100.
    """
    folder = Path(config.ckpt_dir)
    if checkpoint.is_native(folder):
        files = [checkpoint.part_file(folder, "vae")]
        sizes: Mapping[str, int] | Sizes = {}
        if checkpoint.has_wide_vae(folder):
            sizes = WIDE_SIZES
    else:
        files = [*(folder / "vae").iterdir()]
        sizes = read_json(folder / "vae/config.json", checkpoint.CheckpointError)
    width = sizes.get("decoder_base_dim") or sizes.get("base_dim") or 96
    pixels = config.height * config.width * config.pixels_per_latent**2
    frame = dtype.itemsize * width * pixels // (sizes.get("patch_size") or 1) ** 2
    calls = max(1, POSITIONS_AT_ONCE // (config.height * config.width))
    video = FLOAT * 3 * pixels * (1 + VIDEO_FRAMES_PER_LATENT * (config.num_frames - 1))
    return {
        "VAE": sum(path.stat().st_size for path in files),
        "its layers": (FRAMES_HELD + FRAMES_AT_WORK * calls) * frame,
        "video": 2 * video,
    }


def captured(
    config: RunConfig,
    model: ModelConfig,
    requests: Sequence[capture.CaptureRequest],
    num_passes: int | None = None,
) -> int:
    """Return the bytes that requests keep of a rollout, in memory and in a cache alike."""
    S, F, sizes = model.tokens_per_frame(config.height, config.width), config.num_frames, config.block_sizes
    policy, rope, total = policy_of(config), RotaryTable(model.head_dim), 0
    passes = num_passes or config.num_passes
    slots = policy.num_frames or F
    if policy.keeps_whole_frames:
        slots = 0
    for request in requests:
        chosen = (request.layers, model.num_layers), (request.steps, passes), (request.heads, model.num_heads)
        rows = prod(count if indices is None else len(indices) for indices, count in chosen)
        for block in range(len(sizes)) if request.blocks is None else request.blocks:
            queries, frames = sizes[block], sum(sizes[: block + 1])
            seen = min(frames, policy.num_frames or frames)
            for kind in request.kinds:
                of_self, keys = kind == "self", seen * S
                if not of_self:
                    keys = model.text_len
                if request.granularity == "map" and of_self:  # logits and mass
                    places = capture.queries_of(request.queries, block_frames(sizes, block))
                    size = len(places) * keys * 2 * HALF
                elif request.granularity == "map":  # a token is a byte or more, but for two
                    words = request.num_words or min(model.text_len, len(config.prompt.encode()) + 2)
                    size = queries * S * words * HALF
                elif request.granularity == "words":
                    size = queries * S * len(request.words[0]) * FLOAT
                elif request.granularity == "token":
                    size = queries * S * keys * request.token_dtype.itemsize
                elif request.granularity == "key":
                    size = max(F, seen) * S * FLOAT
                elif not of_self:
                    size = queries * keys * FLOAT
                else:
                    numbers = F + slots  # of a query frame and head: logits, and mass
                    if request.mass:
                        numbers *= 2
                    if request.rope_bands:
                        numbers += F * len(rope.bands)
                    if request.query_key_means:
                        numbers += 2 * rope.axes_dim[0]
                    size = queries * FLOAT * numbers
                total += rows * size
    return total


def bytes_of_sites(config: RunConfig, model: ModelConfig, watcher: "SiteCapture", streams: bool) -> int:
    """Return the bytes that a capture of sites keeps: of a rollout, or where it streams, of a block."""
    S = model.tokens_per_frame(config.height, config.width)
    sizes = {"B": 1, "2": 2, "dim": model.dim, "ffn_dim": model.ffn_dim, "D": model.head_dim}
    sizes |= {"T": model.text_len, "K": cached_frames(config) * S, "C": model.in_dim}
    sizes |= {"h": config.height, "w": config.width, "H": count_of(watcher.heads, model.num_heads)}
    num_layers, itemsize = (
        count_of(watcher.layers, model.num_layers),
        (watcher.dtype or torch.float32).itemsize,
    )
    of_blocks = [0]
    for block in range(len(config.block_sizes)) if watcher.blocks is None else watcher.blocks:
        frames, passes = {*block_frames(config.block_sizes, block)}, {*config.passes_of_block(block)}
        if watcher.frames is not None:
            frames &= {*watcher.frames}
        if watcher.steps is not None:
            passes &= {*watcher.steps}
        sizes |= {"F": len(frames), "L": len(frames) * S}
        nbytes = 0
        for site in watcher.sites:
            numbers = prod(sizes[axis] for axis in sites.SITES[site].split())
            if site not in sites.OF_FORWARD:
                numbers *= num_layers
            nbytes += numbers * len(passes) * itemsize
        of_blocks.append(nbytes)
    if streams:
        return max(of_blocks)
    return sum(of_blocks)


def count_of(indices: Collection[int] | None, total: int) -> int:
    """Count chosen indices; None chooses all."""
    if indices is None:
        return total
    return len(indices)


def bytes_of_graphs(
    config: RunConfig,
    model: ModelConfig,
    chosen: "SiteCapture",
    through: str,
    dtype: torch.dtype,
    recompute: bool,
) -> int:
    """Return the bytes that autograd keeps of a rollout until its graphs are differentiated.

    Layers count from the first chosen one on, or all where a graph holds several passes.
    """
    S, total, first = model.tokens_per_frame(config.height, config.width), 0, 0
    if through == "pass":
        first = min(chosen.layers or [0])
    wide, hidden = PER_TOKEN[recompute]
    per_token = FLOAT * wide * model.dim + dtype.itemsize * hidden * model.ffn_dim
    with_matrices = 0  # layers
    if {*chosen.sites} & {"scores", "pattern"}:
        with_matrices = len(chosen.layers or range(model.num_layers))
    blocks = range(len(config.block_sizes)) if chosen.blocks is None else chosen.blocks
    if through == "rollout":
        blocks = range(min(blocks), len(config.block_sizes))
    for block in blocks:
        passes = config.passes_of_block(block)
        if through == "pass":
            passes = [step for step in passes[:-1] if chosen.steps is None or step in chosen.steps]
        tokens, seen = config.block_sizes[block] * S, sum(config.block_sizes[: block + 1])
        keys = min(seen, policy_of(config).num_frames or seen) * S
        of_layer = tokens * per_token + 2 * keys * model.dim * dtype.itemsize
        matrices = OF_SCORES * with_matrices * model.num_heads * tokens * keys * FLOAT
        total += len(passes) * ((model.num_layers - first) * of_layer + matrices)
    return total


def estimate_bytes(
    config: RunConfig, requests: Sequence[capture.CaptureRequest], num_passes: int | None = None
) -> int:
    """Return an upper bound of what a cache keeps, exact for frames and tokens.

    Raises ConfigError where a request does not fit the model or the rollout.
    """
    model = checkpoint.read_model_config(config.ckpt_dir)
    check_requests(config, model, requests, num_passes)
    return BESIDE_TENSORS + captured(config, model, requests, num_passes)


# --- A run against the memory that is free
@dataclass(frozen=True)
class Need:
    """Bytes by purpose that one phase of a run holds at once in one memory, "GPU" or "host"."""

    phase: str
    where: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {amount(size)}" for name, size in self.parts.items() if size >= self.total / 100
        )
        return f"{amount(self.total)} of {self.where} memory while {self.phase} ({parts})"


def needs_of_run(
    config: RunConfig,
    model: ModelConfig,
    requests: Sequence[capture.CaptureRequest],
    dtype: torch.dtype,
    device: torch.device,
    *,
    encodes: bool,
    bidirectional: bool = False,
    replays: bool = False,
    decodes: bool = False,
) -> list[Need]:
    """Return what each phase of a run needs of each memory.

    encodes: umT5 is to be loaded. bidirectional: the base model's sampling, without a KV cache and with the
    texts of both branches. replays: layers run from CUDA graphs. decodes: a video is made after the rollout,
    while the model stays beside the VAE.
    """
    on_gpu, needs = device.type == "cuda", list[Need]()
    here = "GPU" if on_gpu else "host"
    S, largest = model.tokens_per_frame(config.height, config.width), max(config.block_sizes)
    # 1. umT5, and the widest of its activations: a layer's logits with their bias, and their softmax
    if encodes and not config.prompt_embeds:
        t5 = SimpleNamespace(**checkpoint.encoder_config(config.ckpt_dir))
        attention = 4 * t5.d_model * t5.d_kv * t5.num_heads + t5.relative_attention_num_buckets * t5.num_heads
        layers = t5.num_layers * (attention + 3 * t5.d_model * t5.d_ff)
        encoding = {
            "umT5": (t5.vocab_size * t5.d_model + layers) * dtype.itemsize,
            "its activations": t5.num_heads * model.text_len**2 * (3 * dtype.itemsize + 2 * FLOAT),
        }
        needs.append(Need("encoding the prompt", "host" if config.t5_cpu else here, encoding))
    # 2. A LoRA leaves every linear layer of the blocks in float32
    if config.loras:
        merged = model.num_layers * (8 * model.dim**2 + 2 * model.dim * model.ffn_dim) * FLOAT
        needs.append(Need("merging the LoRA", "host", {"merged layers": merged}))
    # 3. Most frames of one forward: a block, a window of blocks, or clean frames computed again
    frames = min(config.num_frames, largest)
    if config.sampler == "rolling_forcing":
        frames = min(config.num_frames, len(config.denoising_step_list) * largest)
    again = [switch.frame for switch in read_switches(config.prompt_schedule) if switch.how == "recache"]
    again = [min(frame, policy_of(config).recomputed_frames or frame) for frame in again]
    frames = max(frames, min(config.recompute_context, config.num_frames), *again)
    # 4. A captured call, beside what is kept: keys in float32, and a chunk of rows (wan/reductions.py) of
    #    logits and softmax. A kernel that computes the mass forms no matrix
    fused, working = on_gpu and dtype != torch.float32, 0
    for request in requests:
        is_self = "self" in request.kinds
        if request.granularity == "frame" and is_self and (fused or not request.mass):
            continue
        keys, queries = model.text_len, largest * S
        if is_self:
            keys = cached_frames(config) * S
        if request.granularity == "map" and fused and is_self:  # in a kernel
            queries = len(request.queries)
        rows = FLOAT * min(CHUNK_ELEMENTS, model.num_heads * queries * keys)
        working = max(working, FLOAT * keys * model.dim + 2 * rows)
    # 5. The rollout: what stays for all blocks, and the widest moment of one layer
    weights, on_host = transformer(model, dtype, config.offload)
    tokens = captured(config, model, [request for request in requests if request.granularity == "token"])
    captured_bytes = captured(config, model, requests) - tokens
    keys_and_values, texts = kv_cache(config, model, dtype) // config.gpus, 1  # each GPU has some heads
    if bidirectional:
        keys_and_values = 0
    if bidirectional or replays or config.gpus > 1:  # graphs have copies
        texts = 2
    # the feed-forward's inner values beside its input, RoPE in float32
    widest = (model.ffn_dim + 6 * model.dim) * dtype.itemsize + 6 * model.head_dim * FLOAT
    latent = model.in_dim * config.height * config.width * dtype.itemsize
    rolling = {
        "weights": weights,
        "KV cache": keys_and_values,
        "text": texts * model.num_layers * 2 * model.text_len * model.dim * dtype.itemsize,
        "activations": frames * S * widest,
        "latents": config.num_frames * (config.num_passes + 1) * latent,
        "capture": captured_bytes + working,
    }
    copies = {"captured": tokens + 2 * captured_bytes}  # building a cache of frames copies them
    if on_gpu:
        needs.append(Need("rolling out", "GPU", rolling))
        needs.append(Need("rolling out", "host", {"weights": on_host} | copies))
    else:
        needs.append(Need("rolling out", "host", rolling | copies))
    # 6. The VAE, while the model stays beside it
    if decodes and on_gpu:
        vae = decoder(config, torch.bfloat16)  # --vae_dtype auto
        needs.append(Need("decoding the video", "GPU", {"weights": weights} | vae))
    elif decodes:
        vae = decoder(config, torch.float32)
        needs.append(Need("decoding the video", "host", {"weights": weights} | copies | vae))
    return [need for need in needs if need.total]


def free_memory(device: torch.device, root: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Return the bytes that can still be had of each memory: what is available, or less under a limit."""
    # 1. The host's, within the limit of a control group
    host = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no control group of this version, or no limit
        limit, used, stat = ((root / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        files = dict(line.split() for line in stat.splitlines())
        host = min(host, int(limit) - int(used) + int(files["inactive_file"]))  # file pages can be freed
    if device.type != "cuda":
        return {"host": host}
    # 2. The GPU's, within what this process may take of it
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total)  # takes no bare "cuda"
    return {"host": host, "GPU": min(free, allowed - torch.cuda.memory_reserved(device))}


def require_memory(
    who: str, needs: Sequence[Need], free: Mapping[str, int], remedy: str = REMEDY, quiet: bool = True
) -> None:
    """Print what is needed, unless quiet. Raises ConfigError, with the remedy, where less is free."""
    if not quiet:
        for need in needs:
            print_out(f"needs {need}; {amount(free[need.where])} are free")
    # The scarcest memory is named, by the share of it that is needed
    worst = max(needs, key=lambda need: need.total / max(1, free[need.where]))
    if worst.total > free[worst.where]:
        raise errors.ConfigError(f"{who} needs {worst}, but {amount(free[worst.where])} are free; {remedy}")


def amount(nbytes: int) -> str:
    """Return bytes in words: 9.2 GB, 12 MB."""
    if nbytes >= GB / 10:
        return f"{nbytes / GB:.1f} GB"
    return f"{nbytes / 1e6:.0f} MB"


# --- The one check of what is asked for
def check_requests(
    config: RunConfig,
    model: ModelConfig,
    requests: Sequence[capture.CaptureRequest],
    num_passes: int | None = None,
) -> None:
    """Raise ConfigError for a layer, block, pass, head or place that model or rollout do not have."""
    if policy_of(config).by_heads and any(request.granularity != "frame" for request in requests):
        raise errors.ConfigError(
            f"under cache_policy {policy_of(config).name} heads see keys of their own, of which no maps, "
            "token matrices or key curves are kept; use --granularity frame, or leave --key_curve out"
        )
    blocks = len(config.block_sizes)
    for request in requests:
        of_frames = [query for query in request.queries if query.frame != capture.ALL]
        tokens = [query.token for query in of_frames if query.token != capture.ALL]
        with errors.in_context(config.model):
            request.check(model.num_layers, blocks, num_passes or config.num_passes)
            sites.check_indices("head", request.heads, model.num_heads)
            sites.check_indices("query frame", [query.frame for query in of_frames], config.num_frames)
            sites.check_indices("query token", tokens, model.tokens_per_frame(config.height, config.width))
        last = max(range(blocks) if request.blocks is None else request.blocks)
        passes = config.passes_of_block(last)
        absent = [step for step in request.steps or () if step not in passes]
        if absent and num_passes is None:
            raise errors.ConfigError(
                f"step {absent[0]} is a pass of other blocks than block {last}, which has "
                f"{', '.join(map(str, passes))}; first_block_steps differ from denoising_step_list"
            )


# --- Memory that did not suffice
NO_MEMORY = ("can't allocate memory", "not enough memory")  # how torch's CPU allocator says it


@contextmanager
def out_of_memory(
    doing: str | Callable[[], str], requests: Sequence[capture.CaptureRequest] = ()
) -> Iterator[None]:
    """Say in which phase (a text, or a function that gives it) memory did not suffice, and what helps."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        on_host = isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY)
        if not on_host and not isinstance(error, torch.OutOfMemoryError):
            raise
        phase = doing() if callable(doing) else doing
        if any(request.granularity == "token" for request in requests):
            remedy = "--granularity frame keeps no token matrices, fewer --layer_indices fewer of them"
        elif "rolling" in phase or "sampling" in phase:
            remedy = "take fewer --num_frames, or a --cache_policy with a window"
        else:
            remedy = "a GPU that nothing else uses (--gpu_id N), or --device cpu"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        memory = "host" if on_host else "GPU"
        raise RunError(f"out of {memory} memory while {phase}: {reason}; {remedy}") from error

"""Bytes that each part of a run takes, from sizes alone: weights, KV cache, activations, what is captured."""

import json
from collections.abc import Sequence
from functools import cache

import torch

from wan.blocks import block_frames, rolling_attention_size
from wan.config import ModelConfig, RunConfig
from wan.modules.capture import CaptureRequest
from wan.modules.causal_model import CausalWanModel
from wan.modules.key_maps import queries_of
from wan.modules.offload import streamed_bytes
from wan.modules.reductions import CHUNK_ELEMENTS
from wan.modules.rope import RotaryTable
from wan.modules.text_encoder import encoder_config

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
    policy, slots, S = (
        config.policy,
        cached_frames(config),
        model.tokens_per_frame(config.height, config.width),
    )
    policy.check(config.block_sizes)  # some learn there how many slots they fill with their own frames
    per_value = (2 * slots + policy.raw_slots(slots)) * dtype.itemsize + 2 * policy.state_frames() * FLOAT
    return model.num_layers * S * model.dim * per_value


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
    return config.policy.capacity(config.num_frames, max(config.block_sizes))


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
    has_raw = config.policy.raw_slots(cached_frames(config)) > 0
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

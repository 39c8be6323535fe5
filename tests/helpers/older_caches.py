"""Every format of cache, files as older scripts wrote them, and equality of what was read."""

import torch
from omegaconf import OmegaConf

from helpers import synthetic_caches

MAKERS = {
    "figure4": synthetic_caches.figure4,
    "figure4 by key": lambda: synthetic_caches.figure4(granularity="key"),
    "figure4 probabilities": lambda: synthetic_caches.figure4(is_logits=False, H=3, S=5),
    "figure4 window": lambda: synthetic_caches.figure4(keys=[0, 17, 18, 19, 20], S=5, granularity="frame"),
    "layer": synthetic_caches.layer,
    "layer of other blocks": lambda: synthetic_caches.layer(F=8, H=1, blocks=[1, 4, 3]),
    "inference": lambda: synthetic_caches.inference(window=[0, 4, 5, 6, 7, 8]),
    "atlas": synthetic_caches.atlas,
    "maps": synthetic_caches.maps,
    "effects": synthetic_caches.effects,
    "causal_atlas": synthetic_caches.causal_atlas,
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7e4), b.nan_to_num(7e4))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def older_figure4(F=21, claimed=None, H=3, S=5, **more):
    tokens, last = synthetic_caches.token_logits(H, 3, F, S), claimed or F
    sizes = {"num_frames": last, "frame_seq_length": S, "is_logits": True}
    entry = {"layer_idx": 4, "attn_logits": tokens[None], "num_query_frames": 3, "num_key_frames": F}
    own = {"prompt": "x", "num_frame_per_block": 3, "layer_indices": [4], "capture_method": "native"}
    frames = {"query_frames": list(range(last - 3, last)), "key_frames": list(range(F))}
    return {"attention_weights": [{**entry, **sizes, "num_heads": H}], **sizes, **own, **frames, **more}


OLDER_LAYER_FIELDS = (  # that the older script wrote beside its two tensors
    *("layer_index", "is_logits", "prompt", "num_frames", "frame_seq_length", "num_frame_per_block"),
    *("num_heads", "block_sizes", "query_frames", "key_frames", "last_block_query_frames"),
)


def older_layer(**more):
    now = synthetic_caches.layer(F=9)
    matrix = now["full_frame_attention"].nan_to_num(0).half()
    matrix[:, 4, 2] = 0  # a real zero
    values = {"last_block_frame_attention": now["last_block_frame_attention"].half()}
    fields = {name: now[name] for name in OLDER_LAYER_FIELDS}
    return {**fields, "full_frame_attention": matrix, **values, **more}


def older_inference(blocks, passes, layers=(2, 4), window=None, S=5, H=3):
    """Calls in rollout order: block, pass, layer; the value of every probability is 1 / Lk."""
    calls = []
    for b, size in enumerate(blocks):
        Lk = min(sum(blocks[: b + 1]), window or 99) * S
        calls += [
            {"layer_idx": layer, "attn_weights": torch.full((1, H, size * S, Lk), 1 / Lk),
             "q_shape": torch.Size([1, size * S, H, 4]), "k_shape": torch.Size([1, Lk, H, 4])}
            for _ in range(passes) for layer in layers
        ]  # fmt: skip
    return {
        "attention_weights": calls,
        "layer_indices": list(layers),
        "prompt": "x",
        "num_frames": sum(blocks),
        "frame_seq_length": S,
        "num_frame_per_block": 3,
        "num_transformer_blocks": 8,
        "config": {"denoising_step_list": OmegaConf.create([1000, 750, 500, 250])},
    }

"""Small caches of every format: a first-frame sink, a wave and noise per head, exact in float16; files as
older scripts wrote them; equality of what was read.
"""

import numpy as np
import torch
from omegaconf import OmegaConf

from experiments.caches.frames import curves_to_frames, query_frame_curves, spread_keys
from wan.blocks import block_frames
from wan.keys import later_block

PROMPT = "a red circle moving right over a dark blue background"


def token_matrix_to_frames(tokens, S):
    """Mean over the token pairs of each frame pair: [H, Lq, Lk] -> [H, Fq, Fk]."""
    return curves_to_frames(query_frame_curves(tokens, S), S)


def reference_means(tokens, S):
    """[H, Fq, Fk] in float64, by an einsum with frame indicators instead of a reshape."""
    x = tokens.double().numpy()
    query, key = (np.repeat(np.eye(n // S), S, axis=0) / S for n in x.shape[1:])  # [L, F]
    return np.einsum("hij,ia,jb->hab", x, query, key)


def common(kind, F=21, H=12, S=16, blocks=None, **more):
    of_model = {"frame_seq_length": S, "num_heads": H, "model": "wan-mini", "weights": "checkpoint"}
    of_run = {"prompt": PROMPT, "seed": 42, "num_frames": F, "num_frame_per_block": 3, "is_logits": True}
    of_model |= {"weights_file": "self_forcing.pt", "weights_sha256": "0" * 64}
    of_run["block_sizes"] = blocks or [3] * (F // 3)
    return {"format": kind, "schema_version": 1} | of_run | of_model | more


def pass_of(step=0):
    return {"step": step, "timestep": [1000.0, 937.5, 833.33, 625.0, 0.0][step], "is_clean_pass": step == 4}


def token_logits(H, Fq, Fk, S, seed=0):
    """[H, Fq*S, Fk*S] float16: head h prefers frame 0 by h/2 and oscillates over key frames."""
    generator = torch.Generator().manual_seed(seed)
    frame = torch.arange(Fk).repeat_interleave(S)
    sink = torch.arange(H)[:, None] / 2 * (frame == 0)
    shape = sink + torch.cos(frame - torch.arange(H)[:, None] * 0.5) + 0.3  # [H, Lk]
    return (shape[:, None] + 0.5 * torch.randn(H, Fq * S, Fk * S, generator=generator)).half()


def tokens_of(logits, is_logits):
    return {"attn_logits": logits[None]} if is_logits else {"attn_weights": logits.float().softmax(-1)[None]}


def figure4(
    layers=(1, 5), F=21, H=12, S=16, blocks=None, keys=None, granularity="token", is_logits=True, step=0
):
    cache = common("figure4", F, H, S, blocks, is_logits=is_logits)
    queries, keys = block_frames(cache["block_sizes"], -1), list(range(F)) if keys is None else keys
    repeated = {"num_query_frames": len(queries), "num_key_frames": len(keys), "is_logits": is_logits}
    repeated |= {"num_frames": F, "frame_seq_length": S, "num_heads": H, "last_block_start_frame": queries[0]}
    entries = []
    for layer in layers:
        logits = token_logits(H, len(queries), len(keys), S, seed=layer)
        values = tokens_of(logits, is_logits)
        if granularity != "token":
            curves, mass = query_frame_curves(logits, S), query_frame_curves(logits.float().softmax(-1), S)
            means, shares = curves_to_frames(curves, S), curves_to_frames(mass, S) * S
            by_frame = {"frame_logits": means, "frame_mass": shares}
            values = {name: spread_keys(value, keys, F) for name, value in by_frame.items()}
            values |= {"key_curve": curves.mean(1)} if granularity == "key" else {}
        entries.append({"layer_idx": layer, **repeated, **values})
    own = {"attention_weights": entries, "layer_indices": list(layers), "capture_method": "hook"}
    return {**cache, **pass_of(step), **own, "query_frames": queries, "key_frames": keys}


def layer(N=3, F=9, H=3, S=5, blocks=None):
    cache = common("layer", F, H, S, blocks)
    matrix, last = frame_matrix(H, cache["block_sizes"], seed=N), block_frames(cache["block_sizes"], -1)
    values = {"full_frame_attention": matrix, "last_block_frame_attention": matrix[:, last].mean(1)}
    frames = {"query_frames": list(range(F)), "key_frames": list(range(F)), "last_block_query_frames": last}
    return {**cache, **pass_of(), "layer_index": N, **values, **frames}


def inference(layers=(1, 5), steps=(0,), F=9, H=3, S=5, window=None, is_logits=False):
    """Calls of the last block; window names its key frames."""
    cache = common("inference", F, H, S, is_logits=is_logits)
    queries, keys = block_frames(cache["block_sizes"], -1), window or list(range(F))
    own = {"block": len(cache["block_sizes"]) - 1, "query_frames": queries, "key_frames": keys}
    own |= {"q_shape": [1, len(queries) * S, H, 16], "k_shape": [1, len(keys) * S, H, 16]}
    calls = []
    for step in steps:
        for N in layers:
            values = tokens_of(token_logits(H, len(queries), len(keys), S, seed=10 * step + N), is_logits)
            calls.append({**values, **pass_of(step), **own, "layer_idx": N, "is_logits": is_logits})
    return cache | {"attention_weights": calls, "layer_indices": list(layers), "num_transformer_blocks": 8}


def atlas(layers=(0, 1, 5), steps=(0, 4), F=9, H=3, S=5, blocks=None, curve=True):
    cache = common("atlas", F, H, S, blocks)
    shape = (len(layers), len(steps))
    logits = torch.stack([frame_matrix(H, cache["block_sizes"], 100 * N + s) for N in layers for s in steps])
    logits = logits.view(*shape, H, F, F)
    mass = logits.masked_fill(logits.isnan(), -torch.inf).softmax(-1).masked_fill(logits.isnan(), torch.nan)
    cache |= {"layers": list(layers), "pass_timesteps": [pass_of(s)["timestep"] for s in steps]}
    cache |= {"pass_steps": list(steps), "frame_logits": logits, "frame_mass": mass}
    if curve:  # every token of a frame at the frame's mean, plus a ripple that averages out
        last = block_frames(cache["block_sizes"], -1)
        ripple = torch.linspace(-0.25, 0.25, S).repeat(F)
        cache["key_curve"] = (logits[..., last, :].mean(-2).repeat_interleave(S, -1) + ripple).half()
    return cache


def maps(F=3, rows=2, columns=2, layers=(2,), steps=(0,), heads=(1, 2), places=None, **changes):
    """Of the last block; query n, a patch, a frame or all of them, reads token n of every frame most."""
    S, places = rows * columns, places or ((1, 1, 0), (2, -1, -1), (-1, -1, -1))
    cache, shape = common("maps", F, 3, S), (len(layers), len(steps))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, len(heads), len(places), F * S, generator=generator)
    for n in range(len(places)):
        logits[..., n, n::S] += 4
    keys = torch.arange(F * S).int().expand(*shape, -1)
    entry = {"key_frame": keys // S, "key_token": keys % S, "key_position": keys // S}
    entry |= {"map_logits": logits.half(), "map_mass": (S * logits.softmax(-1)).half()}
    entry |= {"block": F // 3 - 1, "query_frames": block_frames(cache["block_sizes"], -1)}
    own = {"layers": list(layers), "heads": list(heads), "rows": rows, "columns": columns}
    own |= {"pass_timesteps": [pass_of(s)["timestep"] for s in steps], "pass_steps": list(steps)}
    own["pass_is_clean"] = [pass_of(s)["is_clean_pass"] for s in steps]
    return cache | own | {"blocks": [entry | {"queries": torch.tensor(places).int()}]} | changes


def edited(kind, F):
    said = {"edits": [], "words": "nothing", "hash": "0" * 16}
    of_frames = {name: torch.ones(F) for name in ("between_seeds", "floor")}
    return common(kind, F) | of_frames | {"interventions": said}


def effects(F=9):
    latents = {name: torch.zeros(F, 4, 2, 2) for name in ("latents_base", "latents_edited")}
    return edited("effects", F) | latents | {name: torch.ones(F) for name in ("own_block", "total")}


def causal_atlas(F=9, layers=(0, 1), heads=3):
    own = {"prompts": [PROMPT], "seeds": [42], "each": "head", "layers": list(layers), "num_heads": heads}
    values = {"units": list(range(heads)), "effects": torch.ones(1, len(layers), heads, F)}
    of_runs = {name: torch.ones(1, F) for name in ("between_seeds", "floor")}
    return edited("causal_atlas", F) | of_runs | own | values


def attribution(F=9, layers=(0, 1), heads=3):
    own = {"source": {"prompt": "a blue square"}, "metric": "towards", "integrated": 1}
    own |= {"layers": list(layers), "pass_timesteps": [1000.0, 625.0], "pass_blocks": [2, 2]}
    own |= {"pass_steps": [0, 3], "metric_own": torch.zeros(2), "metric_source": torch.ones(2)}
    ramp = torch.linspace(-1, 1, len(layers) * 2 * heads).view(len(layers), 2, heads)
    sites = {"z": ramp, "mlp_out": ramp[..., :1].clone()}
    own["sites"] = [{"site": site, "scores": scores} for site, scores in sites.items()]
    return common("attribution", F) | {"num_heads": heads} | own


def frame_matrix(H, blocks, seed=0):
    """[H, F, F] float32, NaN in later blocks."""
    F = sum(blocks)
    matrix = torch.randn(H, F, F, generator=torch.Generator().manual_seed(seed))
    return (matrix + 2 * (torch.arange(F) == 0)).masked_fill(later_block(blocks), float("nan"))


MAKERS = {
    "figure4": figure4,
    "figure4 by key": lambda: figure4(granularity="key"),
    "figure4 probabilities": lambda: figure4(is_logits=False, H=3, S=5),
    "figure4 window": lambda: figure4(keys=[0, 17, 18, 19, 20], S=5, granularity="frame"),
    "layer": layer,
    "layer of other blocks": lambda: layer(F=8, H=1, blocks=[1, 4, 3]),
    "inference": lambda: inference(window=[0, 4, 5, 6, 7, 8]),
    "atlas": atlas,
    "maps": maps,
    "effects": effects,
    "causal_atlas": causal_atlas,
    "attribution": attribution,
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
    tokens, last = token_logits(H, 3, F, S), claimed or F
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
    now = layer(F=9)
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
    own = {"layer_indices": list(layers), "prompt": "x", "num_frames": sum(blocks), "frame_seq_length": S}
    own |= {"num_frame_per_block": 3, "num_transformer_blocks": 8}
    steps = OmegaConf.create([1000, 750, 500, 250])
    return {"attention_weights": calls, **own, "config": {"denoising_step_list": steps}}

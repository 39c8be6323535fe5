"""LongLive 2.0's causal inference once more, in float64, without slots and without code of ours.

Every layer keeps the clean keys and values of every frame that it has seen, by number; which of them a block
attends to is a list of frame numbers. The solver is written out for four levels or fewer. Source: the rules
of https://github.com/NVlabs/LongLive (7860ad9).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]
MARK = "The scene transitions. "


# --- Which frames a block attends to
def attended_blocks(num_blocks: int, capacity: int, cuts: list[int]) -> list[list[int]]:
    """Return for every block the blocks that it sees, its own last; the sink is one block, as is a pin."""
    cached, pinned, seen = list[int](), None, []
    for block in range(num_blocks):
        if block - 1 in cuts:  # its clean pass is over
            pinned = block - 1
        if len(cached) == capacity:
            # What follows the sink leaves, unless it is the pin: then what follows that.
            leaving = 1
            if cached[1] == pinned:
                leaving = 2
            del cached[leaving]
        cached.append(block)
        seen.append(list(cached))
    return seen


# --- The transformer, over plain lists of keys
def turned(x: Tensor, times: list[int], rows: int, columns: int) -> Tensor:
    """Rotate [B, L, H, D] of frames at these times, of rows x columns tokens each."""
    half = x.shape[-1] // 2
    pairs = (half - 2 * (half // 3), half // 3, half // 3)
    angles = []
    for time in times:
        for row in range(rows):
            for column in range(columns):
                angle = []
                for place, count in zip((time, row, column), pairs, strict=True):
                    angle += [place / 10000 ** (i / count) for i in range(count)]
                angles.append(angle)
    a = torch.tensor(angles, dtype=torch.float64)[:, None]  # [L, 1, D / 2]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * a.cos() - odd * a.sin(), even * a.sin() + odd * a.cos()], -1).flatten(-2)


def linear(w: State, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def root_mean_square(w: State, name: str, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]


def normal(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax_mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of [B, L, H, D] without a mask -> [B, L, H D]."""
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v).flatten(2)


def network(
    w: State,
    sizes: dict[str, Any],
    x: Tensor,
    timesteps: Tensor,
    text: Tensor,
    times: list[int],
    past: list[list[tuple[Tensor, Tensor]]],
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return flow of x [B, n, C, h, w] at timesteps [B, n], and each layer's keys and values of the block.

    past are those of the blocks that it sees, layer by layer; times where its frames stand.
    """
    batch, n, channels, height, width = x.shape
    heads, dim, rows, columns = sizes["num_heads"], sizes["dim"], height // 2, width // 2
    # Patches of 2 x 2: [B, n · rows · columns, C · 4].
    patches = x.reshape(batch, n, channels, rows, 2, columns, 2).permute(0, 1, 3, 5, 2, 4, 6).flatten(4)
    tokens = patches.reshape(batch, n * rows * columns, -1) @ w["patch_embedding.weight"].flatten(1).T
    tokens = tokens + w["patch_embedding.bias"]
    context = linear(w, "text_embedding.2", gelu(linear(w, "text_embedding.0", text)))
    half = sizes["freq_dim"] // 2
    angles = timesteps[..., None] / 10000 ** (torch.arange(half, dtype=torch.float64) / half)
    waves = torch.cat([angles.cos(), angles.sin()], -1)
    time = linear(w, "time_embedding.2", F.silu(linear(w, "time_embedding.0", waves)))  # [B, n, dim]
    six = linear(w, "time_projection.1", F.silu(time)).unflatten(-1, (6, dim))

    def each_token(rows_of_frames: Tensor) -> Tensor:
        return rows_of_frames.repeat_interleave(rows * columns, 1)

    written = []
    for layer in range(sizes["num_layers"]):
        name = f"blocks.{layer}"
        parts = [each_token(part) for part in (six + w[f"{name}.modulation"][:, None]).unbind(2)]
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = parts
        y = normal(tokens) * (1 + scale) + shift
        q, k = (
            root_mean_square(w, f"{name}.self_attn.norm_{c}", linear(w, f"{name}.self_attn.{c}", y))
            for c in "qk"
        )
        q, k = (turned(z.unflatten(-1, (heads, -1)), times, rows, columns) for z in (q, k))
        v = linear(w, f"{name}.self_attn.v", y).unflatten(-1, (heads, -1))
        written.append((k, v))
        keys = torch.cat([*(pair[0] for pair in past[layer]), k], 1)
        values = torch.cat([*(pair[1] for pair in past[layer]), v], 1)
        tokens = tokens + gate * linear(w, f"{name}.self_attn.o", softmax_mix(q, keys, values))
        y = normal(tokens) * w[f"{name}.norm3.weight"] + w[f"{name}.norm3.bias"]
        q = root_mean_square(w, f"{name}.cross_attn.norm_q", linear(w, f"{name}.cross_attn.q", y))
        k = root_mean_square(w, f"{name}.cross_attn.norm_k", linear(w, f"{name}.cross_attn.k", context))
        v = linear(w, f"{name}.cross_attn.v", context)
        seen = softmax_mix(*(z.unflatten(-1, (heads, -1)) for z in (q, k, v)))
        tokens = tokens + linear(w, f"{name}.cross_attn.o", seen)
        y = normal(tokens) * (1 + scale_mlp) + shift_mlp
        y = linear(w, f"{name}.ffn.2", gelu(linear(w, f"{name}.ffn.0", y)))
        tokens = tokens + gate_mlp * y
    shift, scale = (each_token(part) for part in (time[:, :, None] + w["head.modulation"][:, None]).unbind(2))
    out = linear(w, "head.head", normal(tokens) * (1 + scale) + shift)
    out = out.view(batch, n, rows, columns, 2, 2, -1).permute(0, 1, 6, 2, 4, 3, 5)
    return out.reshape(batch, n, -1, height, width), written


# --- UniPC, second order, written out
class Solver:
    """Steps of UniPC (arXiv 2302.04867) with B2 and predictions of x0; alpha = 1 - sigma."""

    def __init__(self, sigmas: list[float]):
        self.sigmas = [*sigmas, 0.0]
        self.predictions: list[Tensor] = []
        self.corrected: list[Tensor] = []  # the sample at each level once it is corrected

    def advance(self, x: Tensor, x0: Tensor) -> Tensor:
        """Return the sample at the next level, from what the network saw and its prediction."""
        step = len(self.predictions)
        if step:
            x = self.moved(step, corrector=x0)
        self.corrected.append(x)
        self.predictions.append(x0)
        return self.moved(step + 1)

    def moved(self, level: int, corrector: Tensor | None = None) -> Tensor:
        """Return the sample at a level from the one before; a corrector knows the prediction there."""
        before, at = self.sigmas[level - 1], self.sigmas[level]
        x, newest = self.corrected[level - 1], self.predictions[level - 1]
        if at == 0:
            return newest
        h = self.log_ratio(at) - self.log_ratio(before)
        phi = math.expm1(-h)
        linear_part = at / before * x - (1 - at) * phi * newest
        if level == 1:
            if corrector is None:
                return linear_part
            return linear_part - (1 - at) * phi * 0.5 * (corrector - newest)
        ratio = (self.log_ratio(self.sigmas[level - 2]) - self.log_ratio(before)) / h
        slope = (self.predictions[level - 2] - newest) / ratio
        if corrector is None:
            return linear_part - (1 - at) * phi * 0.5 * slope
        # Weights a, b of both slopes: a + b = first, ratio a + b = second.
        first = (phi / -h - 1) / phi
        second = ((phi / -h - 1) / -h - 0.5) * 2 / phi
        a = (second - first) / (ratio - 1)
        return linear_part - (1 - at) * phi * (a * slope + (first - a) * (corrector - newest))

    @staticmethod
    def log_ratio(sigma: float) -> float:
        return math.log((1 - sigma) / sigma)


# --- The whole run
def naive_latents(config: dict[str, Any], arrays: dict[str, Tensor]) -> Tensor:
    """Return the latents [B, F, C, h, w] of a run (helpers/longlive2.py), sink and blocks of one size."""
    case, sizes = config["case"], config["model"]
    size, texts = case["nfpb"], config["prompts"][0]
    assert case["sink"] == size
    w = {name[2:]: x.double() for name, x in arrays.items() if name.startswith("w.")}
    noise, embeds = arrays["noise"].double(), arrays["prompt_embeds"].double()
    image = arrays.get("initial_latent")
    cuts = [block for block, text in enumerate(texts) if block and text.startswith(MARK)]
    seen = attended_blocks(len(texts), case["window"] // size, cuts)
    steps, shift = config["sampling_steps"], config["timestep_shift"]
    base = [0.999 * (1 - step / steps) for step in range(steps)]
    sigmas = [shift * s / (1 + (shift - 1) * s) for s in base]
    clean: dict[int, list[tuple[Tensor, Tensor]]] = {}  # block -> each layer's keys and values
    finished = []
    for block in range(len(texts)):
        offset = case["phi"] * sum(cut <= block for cut in cuts)
        times = [size * block + frame + offset for frame in range(size)]
        past = [[clean[b][layer] for b in seen[block][:-1]] for layer in range(sizes["num_layers"])]
        x, holds = noise[:, size * block : size * (block + 1)].clone(), image is not None and block == 0
        solver = Solver(sigmas)
        for sigma in sigmas:
            t = torch.full(x.shape[:2], float(int(1000 * sigma)), dtype=torch.float64)
            if holds:
                x[:, :1], t[:, :1] = image.double(), 0
            flow, _ = network(w, sizes, x, t, embeds[:, block], times, past)
            x = solver.advance(x, x - sigma * flow)
        if holds:
            x[:, :1] = image.double()
        _, clean[block] = network(w, sizes, x, torch.zeros_like(t), embeds[:, block], times, past)
        finished.append(x)
    return torch.cat(finished, 1)


def random_run(
    *,
    prompts: list[list[str]],
    frames: int = 2,
    blocks_in_window: int = 4,
    offset: int = 8,
    image: bool = False,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Make a run of random weights, noise and prompts, as those of other inferences are stored."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"dim": 48, "ffn_dim": 64, "num_heads": 3, "num_layers": 2, "freq_dim": 64, "text_dim": 32}
    sizes |= {"text_len": 16, "in_dim": 48, "out_dim": 48}
    dim, wide = sizes["dim"], sizes["ffn_dim"]
    shapes: dict[str, tuple[int, ...]] = {"patch_embedding": (dim, 48, 1, 2, 2), "head.head": (48 * 4, dim)}
    shapes |= {
        "text_embedding.0": (dim, 32),
        "text_embedding.2": (dim, dim),
        "time_projection.1": (6 * dim, dim),
    }
    shapes |= {"time_embedding.0": (dim, 64), "time_embedding.2": (dim, dim)}
    for layer in range(sizes["num_layers"]):
        name = f"blocks.{layer}"
        for kind in ("self_attn", "cross_attn"):
            shapes |= {f"{name}.{kind}.{part}": (dim, dim) for part in "qkvo"}
        shapes |= {f"{name}.ffn.0": (wide, dim), f"{name}.ffn.2": (dim, wide)}
    arrays: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        spread = math.prod(shape[1:]) ** -0.5
        arrays[f"w.{name}.weight"] = spread * torch.randn(shape, generator=generator)
        arrays[f"w.{name}.bias"] = 0.1 * torch.randn(shape[0], generator=generator)
    for layer in range(sizes["num_layers"]):
        name = f"w.blocks.{layer}"
        arrays[f"{name}.modulation"] = 0.5 * torch.randn(1, 6, dim, generator=generator)
        for norm in (
            "self_attn.norm_q",
            "self_attn.norm_k",
            "cross_attn.norm_q",
            "cross_attn.norm_k",
            "norm3",
        ):
            arrays[f"{name}.{norm}.weight"] = 1 + 0.2 * torch.randn(dim, generator=generator)
        arrays[f"{name}.norm3.bias"] = 0.2 * torch.randn(dim, generator=generator)
    arrays["w.head.modulation"] = 0.5 * torch.randn(1, 2, dim, generator=generator)
    batch, blocks = len(prompts), len(prompts[0])
    arrays["noise"] = torch.randn(batch, blocks * frames, 48, 4, 4, generator=generator)
    of_text = {
        text: torch.randn(16, 32, generator=generator) for text in sorted({t for p in prompts for t in p})
    }
    embeds = torch.stack([torch.stack([of_text[text] for text in texts]) for texts in prompts])
    embeds[:, :, 11:] = 0  # rows behind the text
    arrays["prompt_embeds"] = embeds
    if image:
        arrays["initial_latent"] = torch.randn(batch, 1, 48, 4, 4, generator=generator)
    case = {"nfpb": frames, "window": blocks_in_window * frames, "sink": frames, "phi": offset}
    config = {"model": sizes, "case": case, "prompts": prompts, "sampling_steps": 4, "timestep_shift": 5.0}
    return config | {"independent_first_frame": image}, arrays

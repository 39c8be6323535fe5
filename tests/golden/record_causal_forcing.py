"""Record what Causal Forcing's own inference makes of the golden weights: minutes of video, framewise I2V.

    git clone https://github.com/thu-ml/Causal-Forcing; git -C Causal-Forcing checkout 1fc7bbc
    python tests/golden/record_causal_forcing.py Causal-Forcing tests/golden/causal_forcing

Its pipelines, wrapper, scheduler and transformer run as they are, in float32 on a CPU. Replaced are:
attention by PyTorch's without a mask, sizes that are numbers in the code (1560 tokens a frame, 30 layers,
caches of 12 heads of 128), the loading of weights, text encoder and VAE, and torch.randn_like by a seeded
generator whose values are stored.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
SIZES = json.loads((HERE / "golden_config.json").read_text())["model"]
HEIGHT, WIDTH = 2, 6  # of a latent frame: 3 tokens
TOKENS = HEIGHT * WIDTH // 4
STEPS = [1000, 750, 500, 250]
CASES = {  # name -> package of the checkout, frames, batch, steps, steps of the first chunk, given frames
    "long12": ("long_video", 12, 1, STEPS, None, 0),
    "long15_batch": ("long_video", 15, 2, STEPS, None, 0),
    "long33": ("long_video", 33, 1, STEPS, None, 0),
    "i2v_4step": (".", 7, 1, STEPS, None, 1),
    "i2v_2step": (".", 5, 2, [1000, 500], STEPS, 1),
    "i2v_1step": (".", 4, 1, [1000], STEPS, 1),
    "long21": ("long_video", 21, 1, STEPS, None, 0),
    "long18_5step": ("long_video", 18, 1, [1000, 800, 600, 400, 200], None, 0),
    "i2v_4step_batch": (".", 9, 2, STEPS, None, 1),
    "i2v_2step_longer": (".", 8, 1, [1000, 500], STEPS, 1),
}


def attention(q, k, v, **options):
    """Attend without a mask, [B, L, H, D]."""
    assert not any(value is not None and value is not False for value in options.values()), options
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def checkout_modules(root: Path) -> tuple[ModuleType, ModuleType]:
    """Import the pipeline and the transformer of a checkout without its packages' other imports."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("wan", "pipeline", "utils", "demo_utils")]:
        del sys.modules[name]
    for name in ("wan", "wan.modules", "pipeline", "utils"):
        package = ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    stubs = {
        "wan.modules.attention": {"attention": attention, "flash_attention": attention},
        "wan.modules.tokenizers": {"HuggingfaceTokenizer": None},
        "wan.modules.vae": {"_video_vae": None},
        "wan.modules.t5": {"umt5_xxl": None},
        "demo_utils.memory": dict.fromkeys(
            (
                "gpu",
                "get_cuda_free_memory_gb",
                "DynamicSwapInstaller",
                "move_model_to_device_with_memory_preservation",
            )
        ),
        "demo_utils": {},
    }
    for name, contents in stubs.items():
        module = ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
    name = "causal_inference"
    if root.name == "long_video":
        name = "rolling_forcing_inference"
    return import_module(f"pipeline.{name}"), import_module("wan.modules.causal_model")


def small_model(causal_model: ModuleType) -> torch.nn.Module:
    """Return its transformer with the golden weights and sizes."""
    names = (
        "model_type",
        "text_len",
        "in_dim",
        "dim",
        "ffn_dim",
        "freq_dim",
        "text_dim",
        "out_dim",
        "num_heads",
    )
    sizes = {name: SIZES[name] for name in (*names, "num_layers", "qk_norm", "cross_attn_norm", "eps")}
    model = causal_model.CausalWanModel(patch_size=(1, 2, 2), **sizes)
    with np.load(HERE / "golden_weights.npz") as file:
        model.load_state_dict({name: torch.from_numpy(file[name]).float() for name in file.files})
    for block in model.blocks:
        attn = block.self_attn
        if hasattr(attn, "frame_length"):  # of long_video
            attn.frame_length, attn.block_length = TOKENS, 3 * TOKENS
            attn.max_attention_size = 21 * TOKENS
    return model.eval().requires_grad_(False)


def caches(layers: int, batch: int, tokens: int, **more) -> list[dict]:
    """Return buffers of keys and values for each layer."""
    shape = (batch, tokens, SIZES["num_heads"], SIZES["dim"] // SIZES["num_heads"])
    layer_caches = []
    for _ in range(layers):
        ends = {name: make() for name, make in more.items()}
        layer_caches.append({"k": torch.zeros(shape), "v": torch.zeros(shape)} | ends)
    return layer_caches


def record(root: Path, case: str) -> dict[str, np.ndarray]:
    """Run one case -> noise, noise between steps, prompt states, given frames and latents."""
    folder, frames, batch, steps, first_steps, given = CASES[case]
    rolls = folder == "long_video"
    inference, causal_model = checkout_modules((root / folder).resolve())
    model = small_model(causal_model)
    causal_model.CausalWanModel.from_pretrained = classmethod(lambda cls, *args, **options: model)
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def draw(*shape):  # values that half precision holds
        return torch.randn(shape, generator=generator).half().float()

    size = 3 if rolls else 1
    first = draw(batch, frames, 16, HEIGHT, WIDTH)
    embeds = draw(batch, SIZES["text_len"], SIZES["text_dim"])
    args = SimpleNamespace(
        denoising_step_list=steps,
        warp_denoising_step=True,
        num_frame_per_block=size,
        independent_first_frame=False,
        context_noise=0,
        model_kwargs={"timestep_shift": 5.0},
        denoising_step_list_first_chunk=first_steps,
    )
    vae = torch.nn.Module()
    vae.decode_to_pixel = lambda latents, use_cache: latents
    text = torch.nn.Module()
    text.forward = lambda text_prompts: {"prompt_embeds": embeds}
    pipeline = inference.CausalInferencePipeline(args, "cpu", text_encoder=text, vae=vae)
    pipeline.num_transformer_blocks, pipeline.frame_seq_length = SIZES["num_layers"], TOKENS
    ends = {name: lambda: torch.tensor([0]) for name in ("global_end_index", "local_end_index")}
    keys_values = caches(SIZES["num_layers"], batch, TOKENS * (24 if rolls else frames), **ends)
    texts = caches(SIZES["num_layers"], batch, SIZES["text_len"], is_init=lambda: False)
    pipeline._initialize_kv_cache = lambda **sizes: setattr(
        pipeline, "kv_cache_clean" if rolls else "kv_cache1", keys_values
    )
    pipeline._initialize_crossattn_cache = lambda **sizes: setattr(pipeline, "crossattn_cache", texts)
    # Noise between steps, as it is asked for: of a block, or of a whole window of which one block is used
    drawn: list[torch.Tensor] = []

    def randn_like(x):
        drawn.append(draw(*x.shape))
        return drawn[-1]

    torch.randn_like, usual = randn_like, torch.randn_like
    try:
        run = pipeline.inference_rolling_forcing if rolls else pipeline.inference
        initial = first[:, :given] if given else None
        _, latents = run(first[:, given:].clone(), ["a"] * batch, initial_latent=initial, return_latents=True)
    finally:
        torch.randn_like = usual
    most = max(len(steps), len(first_steps or []))
    renoise = torch.zeros(most - 1, *first.shape)
    if rolls:
        blocks = frames // size
        for newest in range(blocks + len(steps) - 1):
            window = range(max(0, newest - len(steps) + 1), min(newest, blocks - 1) + 1)
            for block in window:
                if newest - block < len(steps) - 1:
                    noise = drawn.pop(0).unflatten(0, (batch, -1))
                    place = slice(size * (block - window.start), size * (block - window.start + 1))
                    renoise[newest - block, :, size * block : size * (block + 1)] = noise[:, place]
    else:
        for number, frame in enumerate(range(given, frames)):
            for step in range(len(first_steps if number == 0 and first_steps else steps) - 1):
                renoise[step, :, frame] = drawn.pop(0).unflatten(0, (batch, -1))[:, 0]
    assert not drawn
    inputs = {"noise": first, "renoise": renoise, "prompt_embeds": embeds}
    arrays = {name: x.half().numpy() for name, x in inputs.items()}
    return arrays | {"latents": latents.numpy()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    Path(sys.argv[2]).mkdir(exist_ok=True)
    for case in CASES:
        np.savez_compressed(Path(sys.argv[2]) / f"{case}.npz", **record(Path(sys.argv[1]), case))

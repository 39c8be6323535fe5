"""Time others beside ours in one process: Self-Forcing's public code, FlashDreams, diffusers and its tools.

    git clone https://github.com/guandeh17/Self-Forcing ../Self-Forcing
    python experiments/benchmarks/peers.py --config_path configs/wan_mini.yaml --checkout ../Self-Forcing
    python experiments/benchmarks/peers.py --random_weights --device cuda --checkout ../Self-Forcing

Rollouts: Self-Forcing's public transformer from a checkout, called as its own pipeline calls it, with its
attention and with our kernel, and FlashDreams 0.1.0 with weights of its own. Pipelines: diffusers'
WanPipeline plain and captured, with the log-sum-exp of the attention kernel or of a call beside it, and
attention-map-diffusers 1.0.0. Decoder: diffusers' VAE. Prompt states are random. A row whose package is not
installed is said to be absent, with the reason. Beyond 21 frames of 480 x 832 the public code leaves older
keys out.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor

from experiments.benchmarks.rollouts import (
    Part,
    Rollout,
    Rows,
    Timed,
    capture_requests,
    capturing,
    decoder,
    fill_,
    released_sizes,
    seconds_of,
    time_rows,
    warmed_up,
)
from experiments.provenance import choose_device, choose_dtype
from experiments.running.cli import config_from, count, main, run_parser
from wan import diffusers_capture
from wan.attention import attention_with_lse
from wan.blocks import block_ranges, block_sizes
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError, reason_of
from wan.pipeline import add_noise, flow_to_x0
from wan.policies import policy_of
from wan.wings import parallel

URL, TRANSFORMER = "https://github.com/guandeh17/Self-Forcing", "wan/modules/causal_model.py"
SIZES = ("text_len", "in_dim", "dim", "ffn_dim", "freq_dim", "text_dim", "out_dim", "num_heads", "num_layers")
PUBLIC = "public code"
FLASHDREAMS, MAPS = "FlashDreams 0.1.0", "attention-map-diffusers 1.0.0"
NUM_STEPS = 2  # of the pipelines


def run(argv=None):
    parser = run_parser(__doc__, None)
    flag = parser.add_argument
    flag("--checkout", type=Path, default=Path("../Self-Forcing"), help="of Self-Forcing's repository")
    flag("--random_weights", action="store_true", help="the shapes of the config's model, without any file")
    flag("--repeats", type=count, default=5, help="timed rounds, of all rows in turn")
    flag("--what", nargs="+", choices=[*PEERS], default=[*PEERS], help="which peers")
    modes = ("eager", "default", "max-autotune-no-cudagraphs")
    flag("--flashdreams_mode", choices=modes, default="default", help="of torch.compile; its own is the last")
    parser.set_defaults(graphs=False)
    args = parser.parse_args(argv)
    config = parallel.on_own_device(config_from(args))
    time_rows(args, config, (part for name in args.what for part in PEERS[name](args, config)))


def absent(error: Exception) -> dict[str, Any]:
    """Return a row of what could not be run."""
    return {"absent": reason_of(error)}


# --- Rollouts
def rollouts(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield the public rollout, FlashDreams's and ours, with latents' differences to ours in float32."""
    if policy_of(config).name != "full" or config.sampler != "blocks" or config.independent_first_frame:
        raise ConfigError("the public code has equal blocks that see the whole past: leave the rest out")
    rollout = Rollout(config, args.random_weights)
    latents, timed, about = dict[str, Tensor](), Timed(), Rows()
    requests = capture_requests(config, rollout.sizes.num_layers)
    # 1. The public model with our weights, with its own attention and with our kernel.
    try:
        model_class, users, attention = import_public(args.checkout)
        sizes = {name: getattr(rollout.sizes, name) for name in (*SIZES, "eps")}
        with torch.device(rollout.device):
            public = model_class(**sizes)
        torch.nn.Module.to(public, rollout.dtype).eval().requires_grad_(
            False
        )  # diffusers' own warns of nothing
        public.load_state_dict(rollout.model.state_dict())

        def with_our_kernel() -> None:
            model, causal_model = map(vars, users)
            ours = mock.patch.dict(causal_model, attention=our_kernel)
            with mock.patch.dict(model, flash_attention=our_kernel), ours:
                roll_out_public(public, rollout)

        timed[PUBLIC] = partial(seconds_of, partial(roll_out_public, public, rollout))
        timed[f"{PUBLIC}, our kernel"] = partial(seconds_of, with_our_kernel)
        about[PUBLIC] = {"public_attention": attention}
    except ConfigError as error:
        about[PUBLIC] = absent(error)
    # 2. Ours
    for name in ("plain", "logits", "mass"):
        timed[f"ours, {name}"] = partial(rollout.seconds, capturing(requests[name]))
    if rollout.device.type == "cuda":
        replayed = Rollout(config, args.random_weights, graphs=True)
        timed["ours, plain, CUDA graphs"] = replayed.seconds
    # 3. FlashDreams, of the same shapes and passes, with weights of its own.
    try:
        dreams = FlashDreams(rollout, args.flashdreams_mode)
        timed[FLASHDREAMS] = partial(seconds_of, dreams.roll_out)
        about[FLASHDREAMS] = {"compiled": args.flashdreams_mode, "warm_up_seconds": timed[FLASHDREAMS]()}
    except Exception as error:  # of its code, or of a package that it needs
        timed.pop(FLASHDREAMS, None)
        about[FLASHDREAMS] = absent(error)
    # 4. Rows, each called twice: graphs are recorded in the second.
    warmed_up(timed)

    def more() -> dict[str, Any]:
        latents[[*timed][len(latents)]] = rollout.latents.double()
        return {}

    for name, known in warmed_up(timed, more).items():
        about[name] = about.get(name, {}) | known
    # 5. Differences of latents: to the public code's, and of both to ours in float32
    given = rollout.noise, rollout.renoise, rollout.text
    rollout.model.float()  # the same weights and inputs, exactly
    rollout.noise, rollout.renoise, rollout.text = (x.float() for x in given)
    exact = rollout.generate().double()
    rollout.model.to(rollout.dtype)
    rollout.noise, rollout.renoise, rollout.text = given
    for name, own in latents.items():
        if name in (FLASHDREAMS, "ours, plain, CUDA graphs"):
            continue
        for beside, other in (("difference", latents.get(PUBLIC)), ("error", exact)):
            if other is not None:
                about[name][beside] = float(f"{((own - other).norm() / other.norm()).item():.3g}")
    yield timed, about


def our_kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return attention of [B, L, H, D] by the kernel that our rollouts take."""
    return attention_with_lse(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)


def import_public(checkout: Path) -> tuple[type, list[ModuleType], str]:
    """Return the class of its transformer, the modules that call attention and the name of what computes it.

    Its package is named wan like ours, which is out of the way meanwhile. The package's own __init__ is left
    out: it loads every model of the release. Raises ConfigError where it cannot be had.
    """
    # Its files import each other as wan.modules.X, so that name must be theirs while they load.
    ours = take_wan()
    try:
        for name in ("wan", "wan.modules"):
            package = ModuleType(name)
            package.__path__ = [str(checkout / name.replace(".", "/"))]
            sys.modules[name] = package
        names = ("attention", "model", "causal_model")
        attention, *users = (import_module(f"wan.modules.{name}") for name in names)
        return users[-1].CausalWanModel, users, choose_attention(attention, *users)
    except Exception as error:  # of its code, or of a package that it needs
        raise ConfigError(
            f"the transformer of {checkout} cannot be imported: {reason_of(error)}; run: git clone {URL} "
            f"{checkout}, and install what its requirements.txt names"
        ) from error
    finally:
        take_wan()
        sys.modules.update(ours)


def take_wan() -> dict[str, ModuleType]:
    """Remove the package wan from the imported modules, and return it."""
    names = [name for name in sys.modules if name.partition(".")[0] == "wan"]
    return {name: sys.modules.pop(name) for name in names}


def choose_attention(attention: ModuleType, model: ModuleType, causal_model: ModuleType) -> str:
    """Leave the public code its own choice; without FlashAttention cross-attention takes its fallback too."""
    if attention.FLASH_ATTN_3_AVAILABLE:
        return "FlashAttention-3"
    if hasattr(getattr(attention, "flash_attn", None), "flash_attn_varlen_func"):
        return "FlashAttention-2"
    vars(attention)["FLASH_ATTN_2_AVAILABLE"] = False  # flash-attn-4 alone is a package flash_attn too
    fallback = attention.attention

    def in_its_own_dtype(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Call the fallback, which returns bfloat16 unless told otherwise."""
        return fallback(q, k, v, **{"dtype": q.dtype} | options)

    vars(model)["flash_attention"] = vars(causal_model)["attention"] = in_its_own_dtype
    return "PyTorch's scaled_dot_product_attention"


def roll_out_public(model: Any, rollout: Rollout) -> None:
    """Make the rollout's latents by the public transformer, with the passes, noise and formulas of ours."""
    pipeline, noise, sizes = rollout.pipeline, rollout.noise, rollout.sizes
    batch, num_frames, _, height, width = noise.shape
    S = sizes.tokens_per_frame(height, width)

    def buffers(length: int) -> dict[str, Tensor]:
        shape = (batch, length, sizes.num_heads, sizes.head_dim)
        return {"k": noise.new_zeros(shape), "v": noise.new_zeros(shape)}

    def index() -> Tensor:
        return torch.zeros(1, dtype=torch.long, device=noise.device)

    # Its KV cache: buffers of the whole video and of the text, and where each ends
    layers, ends = range(sizes.num_layers), ("global_end_index", "local_end_index")
    past = [buffers(num_frames * S) | {name: index() for name in ends} for _ in layers]
    text = [buffers(sizes.text_len) | {"is_init": index().bool()} for _ in layers]

    def predict_flow(x: Tensor, frames: range, step: int) -> Tensor:
        t = torch.full((batch, len(frames)), pipeline.pass_timesteps[step], device=noise.device)
        flow = model(
            x.transpose(1, 2),
            t=t,
            context=rollout.text,
            seq_len=num_frames * S,
            kv_cache=past,
            crossattn_cache=text,
            current_start=frames.start * S,
        )
        return flow.transpose(1, 2)

    in_blocks(rollout, predict_flow)


def in_blocks(rollout: Rollout, predict_flow: Callable[[Tensor, range, int], Tensor]) -> None:
    """Make the rollout's latents [B, F, C, h, w] block by block; predict_flow is of x, frames and a step."""
    pipeline, noise = rollout.pipeline, rollout.noise
    finished, sigmas = [], pipeline.sigmas
    for block, frames in enumerate(block_ranges(block_sizes(noise.shape[1], pipeline.num_frame_per_block))):
        own, steps = slice(frames.start, frames.stop), rollout.config.passes_of_block(block)[:-1]
        x = noise[:, own]
        for number, step in enumerate(steps):
            x0 = flow_to_x0(predict_flow(x, frames, step), x, sigmas[step])
            if number + 1 < len(steps):
                x = add_noise(x0, rollout.renoise[number][:, own], sigmas[steps[number + 1]])
        # The clean pass writes the keys and values that later blocks see.
        predict_flow(x0, frames, len(pipeline.timesteps))
        finished.append(x0)
    rollout.latents = torch.cat(finished, 1)


class FlashDreams:
    """FlashDreams's transformer (PyPI, flashdreams) at the sizes of a rollout, with random weights."""

    def __init__(self, rollout: Rollout, mode: str):
        import_module("flashdreams")
        if find_spec("boto3") is None:  # 15 MB to read checkpoints from S3, and none is read here
            sys.modules |= {name: mock.MagicMock() for name in ("boto3", "botocore", "botocore.exceptions")}
        wan21 = import_module("flashdreams.recipes.wan.transformer.wan21")
        network = import_module("flashdreams.recipes.wan.transformer.impl.network")
        if rollout.device.type != "cuda":
            raise ConfigError("its RoPE is a kernel of a GPU")
        sizes = {name: getattr(rollout.sizes, name) for name in (*SIZES, "eps")}
        length = rollout.config.num_frame_per_block
        config = wan21.Wan21TransformerConfig(
            network=network.WanDiTNetworkConfig(**sizes), dtype=rollout.dtype, len_t=length,
            window_size_t=rollout.noise.shape[1], compile_network=mode != "eager",
        )  # fmt: skip
        with torch.device(rollout.device), mock.patch.object(wan21, "compile_module",
                                                             partial(torch.compile, mode=mode)):  # fmt: skip
            self.model = config.setup().requires_grad_(False)
        for name, parameter in self.model.named_parameters():
            fill_(parameter, name)
        self.rollout = rollout

    def roll_out(self) -> None:
        rollout, model = self.rollout, self.model
        *_, height, width = rollout.noise.shape
        cache = model.initialize_autoregressive_cache(
            height=height, width=width, text_embeddings=rollout.text
        )
        clean = len(rollout.pipeline.timesteps)

        def predict_flow(x: Tensor, frames: range, step: int) -> Tensor:
            block = frames.start // len(frames)
            if cache.autoregressive_index != block:
                cache.start(block)
            t = torch.tensor(float(rollout.pipeline.pass_timesteps[step]), device=x.device)
            flow = model.predict_flow(model.patchify_and_maybe_split_cp(x), t, cache)
            if step == clean:
                cache.finalize(block)
            return model.unpatchify_and_maybe_gather_cp(flow)

        in_blocks(rollout, predict_flow)


# --- Pipelines of diffusers
def pipelines(args: argparse.Namespace, config: RunConfig) -> Iterator[Part]:
    """Yield a WanPipeline, plain and with frame logits and mass of layer 1 or all captured, by backend.

    The log-sum-exp comes from the kernel that diffusers would run, or from a call of ours beside it.
    """
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    sizes = released_sizes(config) if args.random_weights else read_model_config(config.ckpt_dir)
    same = {name: getattr(sizes, name) for name in ("ffn_dim", "num_layers", "freq_dim", "text_dim")}
    heads = {"num_attention_heads": sizes.num_heads, "attention_head_dim": sizes.head_dim}
    with torch.device(device):
        transformer = WanTransformer3DModel(
            in_channels=sizes.in_dim, out_channels=sizes.out_dim, **heads, **same
        )
        text = torch.randn(1, sizes.text_len, sizes.text_dim, dtype=dtype)
    transformer.to(dtype).eval().requires_grad_(False)
    for name, parameter in transformer.named_parameters():
        fill_(parameter, name)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=transformer
    )
    pipe.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {
        "height": 8 * config.height,
        "width": 8 * config.width,
        "num_frames": 4 * config.num_frames - 3,
    }
    given |= {"num_inference_steps": NUM_STEPS, "guidance_scale": 1.0, "output_type": "latent"}
    made = list[Tensor]()

    def sample() -> None:
        generator = torch.Generator().manual_seed(config.seed)
        made[:] = [pipe(prompt_embeds=text, generator=generator, **given).frames]

    def captured(layers: list[int] | None, way: str) -> None:
        # Without a kernel the original is called, and a call of ours for the log-sum-exp.
        kernel = diffusers_capture._kernel_of if way == "its kernel" else lambda given: None
        with (
            mock.patch.object(diffusers_capture, "_kernel_of", kernel),
            diffusers_capture.capture_diffusers(pipe, layers=layers, granularity="frame"),
        ):
            sample()

    layer = min(1, sizes.num_layers - 1)
    for backend in ("native", "_native_cudnn") if device.type == "cuda" else ("native",):
        transformer.set_attention_backend(backend)
        diffusers_capture._proven.clear()
        title = f"WanPipeline, {backend.removeprefix('_native_')}"
        timed: Timed = {f"{title}, plain": partial(seconds_of, sample)}
        for which, layers in ((f"layer {layer}", [layer]), (f"all {sizes.num_layers} layers", None)):
            for way in ("its kernel", "a call beside"):
                row = f"{title}, {which}, log-sum-exp of {way}"
                timed[row] = partial(seconds_of, partial(captured, layers, way))
        about = Rows()
        if backend == "native":
            for row, options in MAPS_OF_TOKENS.items():
                call = partial(seconds_of, partial(maps_of_tokens, pipe, sample, layer, device, options))
                try:
                    call()
                    timed[row] = call
                except Exception as error:  # it refuses, or memory ends
                    about[row] = absent(error)
        plain = list[Tensor]()

        def more(plain: list[Tensor] = plain) -> dict[str, Any]:
            plain += made
            return {"same_bits": torch.equal(plain[0], plain[-1])}

        for name, known in warmed_up(timed, more).items():
            about[name] = about.get(name, {}) | known
        proven = [is_equal for (kernel, *_), is_equal in diffusers_capture._proven.items() if kernel]
        about[f"{title}, plain"]["kernel_gives_its_bits"] = all(proven) if proven else None
        yield timed, about


def maps_of_tokens(
    pipe: Any, sample: Callable[[], None], layer: int, device: torch.device, options: dict[str, Any]
) -> None:
    """Sample while attention-map-diffusers (PyPI) keeps a layer's self-attention of the last step."""
    package = import_module("attention_map_diffusers")
    chosen = {"relations": ("video->video",), "layers": [f"blocks.{layer}.attn1"]}
    with package.AttentionCapture(pipe, **chosen, **options) as capture:
        sample()
    capture.compute(compute_device=str(device))


WHOLE = {"allow_large_maps": True, "max_capture_bytes": None}  # its limits are 128,000,000 values and 8 GB
MAPS_OF_TOKENS: dict[str, dict[str, Any]] = {
    f"{MAPS}, every head": {"heads": "all"},
    f"{MAPS}, mean over heads": {},
    f"{MAPS}, mean over heads, limits raised": WHOLE,
}
PEERS: dict[str, Callable[[argparse.Namespace, RunConfig], Iterator[Part]]] = {
    "rollouts": rollouts,
    "pipelines": pipelines,
    "decoder": decoder,
}


if __name__ == "__main__":
    main(run)

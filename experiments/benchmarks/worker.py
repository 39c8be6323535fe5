"""Roll out one model again and again and return seconds: in this process, or in one that rollout.py started.

    PYTHONPATH=TREE python experiments/benchmarks/worker.py     # settings and rows come as JSON lines

Only `wan` is imported, by its names here or in older checkouts: rollout.py --other TREE starts a worker of
each tree and lets them take turns.
"""

import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MIB = 2**20
Active = Callable[[], AbstractContextManager]  # makes what is on while a model generates: a capture, an edit


def of_wan(*names: str) -> Any:
    """Import the first of these modules of the package wan that the tree has, by its files.

    An editable installation elsewhere would find those that the tree lacks.
    """
    import wan

    home = Path(wan.__path__[0]).parent
    return import_module(next(n for n in names if home.joinpath(*n.split(".")).with_suffix(".py").is_file()))


def capture_requests(config: Any, num_layers: int) -> dict[str, list[dict[str, Any]]]:
    """Return the fields of the CaptureRequests of every row."""
    last, everything = len(config.block_sizes) - 1, {"granularity": "frame"}
    half = {"granularity": "token", "token_dtype": torch.float16}
    return {
        "plain": [],
        "logits": [everything | {"mass": False}],
        "mass": [everything],
        "key_curve": [everything, {"granularity": "key", "blocks": [last]}],
        "tokens": [half | {"layers": [num_layers // 2], "blocks": [last], "steps": [0]}],
    }


def capturing(requests: list[dict[str, Any]]) -> Active:
    """Return what captures these requests; nothing is active without any."""
    if not requests:
        return nullcontext
    capture = of_wan("wan.attention", "wan.modules.attention").ATTENTION_WEIGHT_CAPTURE
    request = of_wan("wan.capture", "wan.modules.capture").CaptureRequest
    return lambda: capture.capture(*(request(**fields) for fields in requests))


def fill_(values: Tensor, name: str) -> Tensor:
    """Fill a parameter with normal noise of std 0.02 (a norm's weights around 1), the same in every tree."""
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()))
    values.normal_(0, 0.02, generator=generator)
    return values.add_(1) if "norm" in name and name.endswith("weight") else values


class Rollout:
    """A model on its device, with noise and random prompt states.

    latents [1, F, C, h, w] and kept, which the active context gave, are those of the last rollout.
    """

    latents: Tensor
    kept: Any = None

    def __init__(self, config: Any, sizes: Any, random_weights: bool, model: Any = None):
        self.config, self.sizes = config, sizes
        usual = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(usual if config.device == "auto" else config.device)
        usual = "bfloat16" if self.device.type == "cuda" else "float32"
        self.dtype = getattr(torch, usual if config.dtype == "auto" else config.dtype)
        torch.set_num_threads(1)  # rollouts on a CPU are small ones, and others use its cores
        self.model = model or self.build_model(random_weights)
        module, name = "wan.pipeline", "CausalInferencePipeline"
        if config.sampler == "rolling_forcing":
            module, name = "wan.rolling_forcing", "RollingForcingPipeline"
        self.pipeline = getattr(of_wan(module), name)(
            self.model,
            config.num_frame_per_block,
            config.independent_first_frame,
            config.denoising_step_list,
            config.warp_denoising_step,
            config.timestep_shift,
            config.context_noise,
            cache_policy=config.policy,
            first_block_steps=config.first_block_steps,
            recompute_context=config.recompute_context,
        )
        shape = (1, config.num_frames, sizes.in_dim, config.height, config.width)
        self.noise = self.randn(shape, config.seed)
        steps = max(len(config.denoising_step_list), len(config.first_block_steps or ()))
        self.renoise = self.randn((steps - 1, *shape), config.seed + 1)
        self.text = self.randn((1, sizes.text_len, sizes.text_dim), config.seed + 2)
        self.switches = [replace(switch, prompt_embeds=self.text.flip(1)) for switch in config.switches]

    def randn(self, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    def build_model(self, random_weights: bool) -> Any:
        """Return the model with the config's weights, or with random ones made on its device in its dtype."""
        model_class = of_wan("wan.model", "wan.modules.causal_model").CausalWanModel
        window = {"local_attn_size": self.config.local_attn_size, "sink_size": self.config.sink_size}
        if not random_weights:
            state, _ = of_wan("wan.weights", "wan.checkpoint").read_weights(self.config, self.sizes)
            at = (self.config.ckpt_dir, self.dtype, self.device)
            return of_wan("wan.checkpoint").build_model(model_class, self.sizes, state, *at, **window)
        with torch.device("meta"):
            model = model_class(**vars(self.sizes), **window)
        model = model.to(self.dtype).to_empty(device=self.device).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            fill_(parameter, name)
        return model

    def generate(self) -> Tensor:
        ends: list[tuple[float, Any]] = []  # of blocks, on the host's clock and on the GPU's

        def end(block: int, latents: Tensor) -> None:
            event = torch.cuda.Event(enable_timing=True) if latents.is_cuda else None
            if event:
                event.record()
            ends.append((1000 * time.perf_counter(), event))

        latents = self.pipeline.inference(
            self.noise,
            prompt_embeds=self.text,
            renoise=self.renoise,
            prompt_schedule=self.switches,
            on_block=end,
        )[1]
        self._ends = ends[-2:]
        return latents

    @property
    def last_block_ms(self) -> float:
        """Milliseconds of the last block of the last rollout, once the device has it."""
        (start, before), (stop, after) = self._ends
        return before.elapsed_time(after) if before else stop - start

    def seconds(self, active: Active = nullcontext, policy: Any = None) -> float:
        """Generate one video and return the seconds until the device and the host have everything."""
        self.pipeline.cache_policy = policy or self.config.policy
        self.wait()
        start = time.perf_counter()
        with active() as self.kept:
            self.latents = self.generate()
        self.wait()
        return time.perf_counter() - start

    def peak_mib(self, row: Callable[[], float]) -> float:
        """Call a row and return the GPU's peak memory above the start; 0 on a CPU."""
        if self.device.type != "cuda":
            row()
            return 0.0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        row()
        return round((torch.cuda.max_memory_allocated(self.device) - before) / MIB, 1)

    def in_float32(self) -> Tensor:
        """Return the latents of the same weights and inputs in float32; the model stays in float32."""
        self.model.float()
        self.noise, self.renoise, self.text = (x.float() for x in (self.noise, self.renoise, self.text))
        return self.generate()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def digest(self) -> str:
        """Return the SHA-256 of the last latents and of everything that was captured."""
        found = hashlib.sha256()
        captured = [call.values[name] for call in self.kept or () for name in sorted(call.values)]
        for tensor in (self.latents, *captured):
            found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        return found.hexdigest()


def serve() -> None:
    """Load what the first line of stdin says; then answer every name of a row with seconds or a digest."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    settings = of_wan("wan.config")
    given = json.loads(sys.stdin.readline())
    known = {field.name for field in fields(settings.RunConfig)}
    config = settings.RunConfig(**{name: x for name, x in given["config"].items() if name in known})
    read_sizes = of_wan("wan.checkpoint").read_model_config
    sizes = settings.MODELS[config.model] if given["random_weights"] else read_sizes(config.ckpt_dir)
    rollout = Rollout(config, sizes, given["random_weights"])
    requests = capture_requests(config, sizes.num_layers)
    print(json.dumps({"wan": str(Path(settings.__file__).parent)}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        row = partial(rollout.seconds, capturing(requests[asked["row"]]))
        answer: dict[str, Any] = {}
        if asked["timed"]:
            answer["seconds"] = row()
        else:
            answer |= {"gpu_peak_mib": rollout.peak_mib(row), "sha256": rollout.digest()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()

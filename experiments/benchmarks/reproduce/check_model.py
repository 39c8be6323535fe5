"""Calibrate the verdict of experiments/check_model.py on right, other and wrong videos of known models.

    python experiments/benchmarks/reproduce/check_model.py
    python experiments/benchmarks/reproduce/check_model.py --random_weights --device cuda \
        --output_path docs/benchmarks/check_model_random.json

Writes docs/check_model.json. Rows of the published data: eagle beside castle, and eagle beside its own heads
and layers in another order. Rows of the trained miniature, or of 1.3B with random weights: the same video in
other arithmetic, other seeds and prompts, and models with one thing wrong, beside the right one's own atlas.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.analysis import published
from experiments.analysis.agreement import AGREES, OTHER_OWN, OTHER_R, Comparison, compare
from experiments.analysis.first_frame import matrices
from experiments.analysis.rope_waves import fitted_frequencies, temporal_frequencies
from experiments.benchmarks.harness import save_report
from experiments.benchmarks.worker import fill_
from experiments.caches import load_cache
from experiments.caches.view import open_profiles
from experiments.extraction import causal
from experiments.extraction.devices import choose_device, choose_dtype
from experiments.extraction.provenance import environment
from experiments.running.cli import Parser, main
from wan import model as wan_model
from wan import rope
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.checkpoint import read_model_config
from wan.config import MODELS, RunConfig, load_config
from wan.model import CausalWanModel
from wan.pipeline import CausalInferencePipeline

PROMPTS = (
    "a red circle moving right over a dark blue background",
    "a green square moving up and left and a red triangle moving up over a light green background",
    "a yellow circle moving left behind a white wall over a dark red background",
    "a purple triangle moving down over a light blue background with a small green circle at the top left",
)
Change = Callable[[], Any]  # a context in which a model is wrong


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--config_path", default="configs/wan_mini.yaml", help="a model whose weights are here")
    flag("--random_weights", action="store_true", help="1.3B with random weights in its place")
    flag("--device", default="auto")
    flag("--output_path", type=Path, default=Path("docs/check_model.json"))
    args = parser.parse_args(argv)
    name = "configs/self_forcing_dmd.yaml" if args.random_weights else args.config_path
    config = load_config(name, {"device": args.device})
    report: dict[str, Any] = {
        "environment": environment(choose_device(config.device)),
        "borders": {"agrees from r": AGREES, "wrong below r": OTHER_R, "wrong below own heads": OTHER_OWN},
    }
    if not args.random_weights:
        report["published"] = of_published()
    trial = Trial(config, args.random_weights)
    report[config.model + (", random weights" if args.random_weights else "")] = of_model(trial)
    save_report(report, args.output_path)
    print(args.output_path)


def row(*comparisons: Comparison) -> dict[str, Any]:
    """Return the mean over videos of each number, the range of the median r, and how often each verdict."""
    each = [one.numbers() for one in comparisons]
    found: dict[str, Any] = {"videos": len(each)}
    for what, name in (("r", "r of last-block curves, median"), ("own heads", "heads most like their own")):
        values = [float(one[name] or 0) for one in each]
        found[f"{what}: lowest, highest"] = [min(values), max(values)]
    found["verdicts"] = {v: n for v in dict.fromkeys(c.verdict for c in comparisons)
                         if (n := sum(c.verdict == v for c in comparisons))}  # fmt: skip
    for name in each[0]:
        known = [one[name] for one in each if one[name] is not None]
        found[name] = round(float(np.nanmean(known)), 3) if known else None
    return found


# --- The published data
def of_published() -> dict[str, Any]:
    """Compare the two prompts, and one with its own heads or layers in another order."""
    found: dict[str, Any] = {}
    generator = np.random.default_rng(0)
    for length in (21, 72):
        views = [open_profiles(load_cache(published.FOLDER / f"self_forcing_dmd_{name}_{length}f.pt"))
                 for name in ("eagle", "castle")]  # fmt: skip
        eagle, castle = views
        sizes, frequencies = eagle.block_sizes, fitted_frequencies(eagle, length - eagle.block_sizes[-1])
        A, B = matrices(eagle), castle.frame_matrices()
        compared = lambda ours: compare(ours, castle.profiles(), B, sizes, frequencies)  # noqa: B023, E731
        found[f"another prompt, {length} frames"] = row(compared(A))
        found[f"heads shifted by one, {length} frames"] = row(compared(np.roll(A, 1, 1)))
        found[f"layers shifted by one, {length} frames"] = row(compared(np.roll(A, 1, 0)))
        orders = [[generator.permutation(A.shape[1]) for _ in A] for _ in range(5)]
        permuted = [np.stack([layer[order] for layer, order in zip(A, one, strict=True)]) for one in orders]
        found[f"heads of a layer permuted, {length} frames"] = row(*map(compared, permuted))
        same = np.roll(A, 1, 1), np.roll(A, 1, 0)
        for which, ours in zip(("heads", "layers"), same, strict=True):
            itself = compare(ours, eagle.profiles(), A, sizes, frequencies)
            found[f"{which} shifted by one, its own prompt, {length} frames"] = row(itself)
    return found


# --- A model whose weights are here
class Trial:
    """A model and the rollouts of it that are compared."""

    def __init__(self, config: RunConfig, random_weights: bool):
        self.config, self.random = config, random_weights
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        self.sizes = MODELS[config.model] if random_weights else read_model_config(config.ckpt_dir)
        prompts = [f"random text {n}" for n in range(2)] if random_weights else list(PROMPTS)
        self.prompts = prompts
        self.texts: dict[str, Tensor] = {}
        if random_weights:
            for number, prompt in enumerate(prompts):
                states = torch.zeros(1, self.sizes.text_len, self.sizes.text_dim)
                generator = torch.Generator().manual_seed(number)
                states[:, :20] = torch.randn(1, 20, self.sizes.text_dim, generator=generator) * 0.1
                self.texts[prompt] = states.to(self.device, self.dtype)
            self.pipeline = causal.pipeline_of(self.random_model(""), config)
        else:
            loaded = causal.prepare(config, [], prompts)
            self.pipeline = loaded.pipeline
            self.texts = {prompt: loaded.texts[prompt][0] for prompt in prompts}

    def random_model(self, salt: str) -> CausalWanModel:
        with torch.device("meta"):
            model = CausalWanModel(**vars(self.sizes))
        model = model.to(self.dtype).to_empty(device=self.device).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            fill_(parameter, name + salt)
        return model

    def logits(
        self, prompt: str, config: RunConfig | None = None, pipeline: CausalInferencePipeline | None = None,
        text: Tensor | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return mean logits [passes, layers, H, F, F] of one rollout."""
        config = config or self.config
        pipeline = pipeline or causal.pipeline_of(self.pipeline.model, config)
        noise, renoise = causal.draw_noise(config, self.sizes, self.dtype, self.device)
        dtype = pipeline.model.patch_embedding.weight.dtype
        text = (self.texts[prompt] if text is None else text).to(dtype)
        with ATTENTION_WEIGHT_CAPTURE.capture(granularity="frame", mass=False) as calls:
            pipeline.inference(noise.to(dtype), prompt_embeds=text, renoise=renoise.to(dtype))
        F, passes = config.num_frames, config.num_passes
        found = np.full((passes, self.sizes.num_layers, self.sizes.num_heads, F, F), np.nan)
        for call in calls:
            step = passes - 1 if call["is_clean_pass"] else call["step"]
            value = call.values["frame_logits"][0].float().cpu().numpy()
            found[step, call["layer"], :, list(call["query_frames"]), : value.shape[-1]] = value.swapaxes(
                0, 1
            )
        return found


def of_model(trial: Trial) -> dict[str, Any]:
    """Compare right, other and wrong videos of a model with its own, a row each."""
    config, model = trial.config, trial.pipeline.model
    sizes, last = config.block_sizes, config.block_sizes[-1]
    frequencies = temporal_frequencies(trial.sizes.head_dim)
    frequencies = frequencies[2 * np.pi / frequencies <= config.num_frames - last]
    right = {prompt: trial.logits(prompt) for prompt in trial.prompts}

    def beside(prompt: str, ours: np.ndarray) -> Comparison:
        own = right[prompt][0]
        return compare(ours, own[..., -last:, :].mean(-2), own, sizes, frequencies)

    def every(ours: Callable[[str], np.ndarray]) -> dict[str, Any]:
        return row(*(beside(prompt, ours(prompt)) for prompt in trial.prompts))

    found: dict[str, Any] = {}
    if trial.random:
        eagle = open_profiles(load_cache(published.FOLDER / published.DEFAULT_ATLAS))
        theirs = eagle.profiles(), eagle.frame_matrices(), sizes, frequencies
        found["beside the published eagle"] = row(*(compare(one[0], *theirs) for one in right.values()))
    pairs = [(a, b) for a in trial.prompts for b in trial.prompts if a != b]
    found["another prompt"] = row(*(beside(a, right[b][0]) for a, b in pairs))
    other_seed = replace(config, seed=config.seed + 1)
    found["another seed"] = every(lambda prompt: trial.logits(prompt, other_seed)[0])
    other = torch.float32 if trial.dtype == torch.bfloat16 else torch.bfloat16
    if not trial.random:
        model.to(other)
        found[f"the same in {str(other).removeprefix('torch.')}"] = every(lambda p: trial.logits(p)[0])
        model.to(trial.dtype)
    if trial.random:
        same = causal.pipeline_of(trial.random_model("other weights"), config)
        found["other weights"] = every(lambda p: trial.logits(p, pipeline=same)[0])
        del same
    else:
        base = causal.load_pipeline(
            replace(config, checkpoint_path=None), trial.sizes, trial.dtype, trial.device
        )
        found["base weights"] = every(lambda p: trial.logits(p, pipeline=base)[0])
    found["no text"] = every(lambda p: trial.logits(p, text=torch.zeros_like(trial.texts[p]))[0])
    for name, change in wrong_models().items():
        with change():
            model.rotary._last.clear()
            found[name] = every(lambda p: trial.logits(p)[0])
        model.rotary._last.clear()
    if trial.random:
        return found
    for size in (1, 7):
        if config.num_frames % size == 0:
            blocks = replace(config, num_frame_per_block=size)
            found[f"blocks of {size}"] = every(lambda p: trial.logits(p, blocks)[0])  # noqa: B023
    shifted = replace(config, timestep_shift=8.0)
    found["timestep shift 8"] = every(lambda p: trial.logits(p, shifted)[0])
    found["steps not warped"] = every(
        lambda p: trial.logits(p, replace(config, warp_denoising_step=False))[0]
    )
    for step in (1, config.num_passes - 2, config.num_passes - 1):
        found[f"pass {step}" if step < config.num_passes - 1 else "clean pass"] = every(
            lambda p: right[p][step]  # noqa: B023
        )
    found["heads shifted by one"] = every(lambda p: np.roll(right[p][0], 1, 1))
    found["layers shifted by one"] = every(lambda p: np.roll(right[p][0], 1, 0))
    return found


def wrong_models() -> dict[str, Change]:
    """Return what can be wrong inside a forward, as contexts."""

    @contextmanager
    def base_of_rope(theta: float) -> Iterator[None]:
        usual, rope.ROPE_THETA = rope.ROPE_THETA, theta
        try:
            yield
        finally:
            rope.ROPE_THETA = usual

    @contextmanager
    def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
        usual = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, usual)

    def without_norm(self, x, rope=None, out=None):
        x = x.unflatten(-1, (self.num_heads, -1))
        return wan_model._stored(x if rope is None else rope_module_rotate(x, *rope), out)

    rope_module_rotate = rope.rotate
    usual = rope.RotaryTable.freqs_cis

    def no_angles(self, axis, positions):
        return torch.ones_like(usual(self, axis, positions))

    def no_time(self, axis, positions):
        found = usual(self, axis, positions)
        return torch.ones_like(found) if axis == 0 else found

    return {
        "RoPE off": lambda: instead(rope.RotaryTable, "freqs_cis", no_angles),
        "RoPE off in time": lambda: instead(rope.RotaryTable, "freqs_cis", no_time),
        "RoPE of base 5,000": lambda: base_of_rope(5e3),
        "RoPE of base 1,000,000": lambda: base_of_rope(1e6),
        "no norm of queries and keys": lambda: instead(wan_model.QueryKeyNorm, "forward", without_norm),
    }


if __name__ == "__main__":
    main(run)

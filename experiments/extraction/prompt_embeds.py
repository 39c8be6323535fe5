"""Prompts to embeddings, once: remembered by prompt and encoder, or given in a file in place of umT5.

A file of states is a .pt of {"prompt": str, "tokens": [str], "prompt_embeds": [1, n, text_dim]}; embeds_dir
of the config holds those that were made before. prompt and tokens may be left out of a file of one's own.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor

from experiments.caches.files import replacing
from experiments.caches.frames import one_thread
from experiments.extraction.provenance import device_name, versions
from wan.checkpoint import CheckpointError, describe_files, read_torch_file, require_file
from wan.config import ModelConfig, RunConfig
from wan.errors import ConfigError, require_text, short_repr
from wan.text_encoder import TextEncoder, encoder_files

PROMPTS_AT_ONCE = 8  # they are rolled out in more time than it takes to load umT5 again

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

PromptStates = tuple[Tensor, list[str]]  # states [1, n, text_dim], tokens without padding

MAKE_ONE = 'torch.save({"prompt": text, "prompt_embeds": states}, FILE), or copy one of cache/prompt_embeds/'


def encode_prompts(
    config: RunConfig,
    prompts: Sequence[str],
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, PromptStates]:
    """Embeddings and tokens of each prompt; the encoder is loaded only where it is needed, and freed."""
    if config.prompt_embeds:
        if len(prompts) > 1:
            raise ConfigError(
                f"{config.prompt_embeds} holds the states of one prompt, and this run needs {len(prompts)}"
            )
        if prompts and prompts[0] != (own := with_given_prompt(config, None)):
            raise ConfigError(
                f"{config.prompt_embeds} holds the states of {short_repr(own)}, and this run needs those of "
                f"{short_repr(prompts[0])}; leave --prompt_embeds out"
            )
        states, tokens = read_states(config.prompt_embeds, model_config)
        return dict.fromkeys(prompts, (states.to(device, dtype), tokens))
    where = encoding_device(config, device)
    known: dict[str, PromptStates] = {}
    encoder: TextEncoder | None = None
    paths = states_files(config, prompts, model_config, dtype, where)
    for prompt, path in zip(prompts, paths, strict=True):
        found = _remembered(path, model_config, dtype)
        if found is None:
            encoder = encoder or TextEncoder.from_pretrained(
                config.ckpt_dir, model_config.text_len, dtype, where
            )
            with one_thread() if where.type == "cpu" and model_config.text_dim < 1024 else nullcontext():
                found = encoder([prompt]), encoder.words(prompt)
            _remember(path, prompt, *found)
        known[prompt] = found
    if encoder is not None and where.type == "cuda":
        del encoder
        torch.cuda.empty_cache()  # else its gigabytes stay reserved beside the transformer's
    return {prompt: (states.to(device), tokens) for prompt, (states, tokens) in known.items()}


class PromptTexts:
    """States and tokens of many prompts, encoded a few at a time as they are asked for, in their order.

    A sweep over thousands of prompts starts at once, and holds the states of PROMPTS_AT_ONCE.
    """

    def __init__(self, prompts: Sequence[str], encode: Callable[[Sequence[str]], dict[str, PromptStates]]):
        """encode gives the states of some of the prompts, as encode_prompts does."""
        self._prompts, self._encode = list(prompts), encode
        self._place = {prompt: i for i, prompt in enumerate(self._prompts)}
        self._known: dict[str, PromptStates] = {}

    def __getitem__(self, prompt: str) -> PromptStates:
        if prompt not in self._known:
            start = self._place.get(prompt)
            some = [prompt] if start is None else self._prompts[start : start + PROMPTS_AT_ONCE]
            self._known = self._encode(some)
        return self._known[prompt]


def encoding_device(config: RunConfig, device: torch.device) -> torch.device:
    """Where umT5 runs: on the host where the GPU is to be spared."""
    return torch.device("cpu") if config.t5_cpu or config.offload else device


def states_file(
    config: RunConfig, prompt: str, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Path | None:
    """Where one prompt's states are remembered; None where nothing is."""
    return states_files(config, [prompt], model_config, dtype, device)[0]


def states_files(
    config: RunConfig,
    prompts: Sequence[str],
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Path | None]:
    """Where prompts' states are remembered: named by all that their bits depend on. None: they are not."""
    if config.embeds_dir is None:
        return [None] * len(prompts)
    key = [
        describe_files(encoder_files(config.ckpt_dir)),
        model_config.text_len,
        str(dtype),
        device_name(device),
        versions(),
    ]
    digests = (hashlib.sha256(json.dumps([prompt, *key]).encode()).hexdigest() for prompt in prompts)
    return [Path(config.embeds_dir) / f"{digest[:32]}.pt" for digest in digests]


def needs_encoder(
    config: RunConfig,
    prompts: Sequence[str],
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether encode_prompts would load umT5."""
    if config.prompt_embeds:
        return False
    paths = states_files(config, prompts, model_config, dtype, encoding_device(config, device))
    return any(path is None or not path.is_file() for path in paths)


def with_given_prompt(config: RunConfig, prompt: str | None) -> str:
    """The prompt of a run with --prompt_embeds: the file's own, else the one asked for; not both."""
    own = read_torch_file(require_file(config.prompt_embeds or "", MAKE_ONE)).get("prompt")
    if own is not None and not isinstance(own, str):
        raise CheckpointError(f"{config.prompt_embeds}: its prompt is a {type(own).__name__}, not a text")
    if prompt is not None and own is not None and prompt != own:
        raise ConfigError(
            f"--prompt is {short_repr(prompt)}, but {config.prompt_embeds} holds the states of "
            f"{short_repr(own)}"
        )
    return next(text for text in (own, prompt, config.prompt) if text is not None)  # "" is a prompt too


def read_states(path: str | Path, model_config: ModelConfig) -> PromptStates:
    """Embeddings [1, n, text_dim] of a file, n at most text_len, and their tokens. Else CheckpointError."""
    content = read_torch_file(require_file(path, MAKE_ONE))
    states = content.get("prompt_embeds")
    if not isinstance(states, Tensor) or states.dtype not in FLOATS:
        raise CheckpointError(f"{path} holds no prompt_embeds of floating point; make one: {MAKE_ONE}")
    states = states[None] if states.ndim == 2 else states
    fits = states.ndim == 3 and states.shape[0] == 1 and states.shape[2] == model_config.text_dim
    if not fits or not 1 <= states.shape[1] <= model_config.text_len:
        raise CheckpointError(
            f"{path}: prompt_embeds {list(states.shape)} are not [1, at most {model_config.text_len}, "
            f"{model_config.text_dim}], the prompt embeddings of this model"
        )
    if not states.isfinite().all():
        raise CheckpointError(f"{path}: prompt_embeds are not finite")
    rows = int(states[0].any(-1).sum())  # padding is zero
    tokens = content.get("tokens", [str(i) for i in range(rows)])
    if (
        not isinstance(tokens, list)
        or len(tokens) > states.shape[1]
        or not all(isinstance(t, str) for t in tokens)
    ):
        raise CheckpointError(f"{path}: tokens are not a list of at most {states.shape[1]} texts")
    for token in tokens:
        require_text(token, f"{path}: a token")
    return states, tokens


def _remembered(path: Path | None, model_config: ModelConfig, dtype: torch.dtype) -> PromptStates | None:
    if path is None or not path.is_file():
        return None
    try:
        states, tokens = read_states(path, model_config)
    except CheckpointError:  # damaged: to be made again
        return None
    return (states, tokens) if states.dtype == dtype else None


def _remember(path: Path | None, prompt: str, states: Tensor, tokens: list[str]) -> None:
    if path is not None:
        with (
            suppress(OSError, RuntimeError),
            replacing(path) as file,
        ):  # a full disk costs the next run some seconds
            torch.save({"prompt": prompt, "tokens": tokens, "prompt_embeds": states.cpu()}, file)

"""Prompts to embeddings: encoded once by umT5, remembered by prompt and encoder, or given in a file.

A file of states is a .pt of {"prompt": str, "tokens": [str], "prompt_embeds": [1, n, text_dim]}; embeds_dir
of the config holds those that were made before. prompt and tokens may be left out of a file of one's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import Tensor

from experiments.caches.files import replacing
from experiments.caches.frames import one_thread
from experiments.provenance import encoding_device, fingerprint
from wan import errors
from wan.checkpoint import describe_files, encoder_files
from wan.config import ModelConfig, RunConfig
from wan.files import read_weights_file, require_file
from wan.identity import NUMBERS
from wan.text_encoder import TextEncoder

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAKE_ONE = 'make it: torch.save({"prompt": text, "prompt_embeds": states}, FILE); or copy one of '
MAKE_ONE += "cache/prompt_embeds/"

PromptStates = tuple[Tensor, list[str]]  # states [1, n, text_dim], tokens without padding


def encode_prompts(
    config: RunConfig, prompts: Sequence[str], sizes: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, PromptStates]:
    """Return embeddings and tokens of each prompt; load the encoder only if needed, and free it."""
    if config.prompt_embeds:
        file_prompt = with_given_prompt(config, None)
        for prompt in prompts:
            if prompt != file_prompt:
                raise errors.ConfigError(
                    f"{config.prompt_embeds} holds the states of {errors.short_repr(file_prompt)}, and this "
                    f"run needs those of {errors.short_repr(prompt)}; leave --prompt_embeds out"
                )
        states, tokens = read_states(config.prompt_embeds, sizes)
        return {file_prompt: (states.to(device, dtype), tokens)}
    # Remembered states are taken where all that their bits depend on is the same (states_files)
    where, states_by_prompt = encoding_device(config, device), dict[str, PromptStates]()
    encoder: TextEncoder | None = None
    for prompt, path, is_there in states_files(config, prompts, sizes, dtype, where):
        if path is not None and is_there:
            with suppress(errors.CheckpointError):  # damaged: to be made again
                states_by_prompt[prompt] = read_states(path, sizes)
                continue
        # umT5 has 11 GB in bfloat16: it is loaded once, for the prompts that are not remembered
        encoder = encoder or TextEncoder.from_pretrained(config.ckpt_dir, sizes.text_len, dtype, where)
        with ExitStack() as stack:
            if where.type == "cpu" and sizes.text_dim < 1024:  # a small encoder
                stack.enter_context(one_thread())
            states, tokens = encoder([prompt]), encoder.words(prompt)
        states_by_prompt[prompt] = states, tokens
        if path is not None:  # a full disk costs the next run some seconds
            with suppress(OSError, RuntimeError), replacing(path) as file:
                content = {"prompt": prompt, "tokens": tokens, "prompt_embeds": states.cpu()}
                torch.save(content | {"fingerprint": path.stem}, file)
    if encoder is not None and where.type == "cuda":
        del encoder
        torch.cuda.empty_cache()  # else its gigabytes stay reserved beside the transformer's
    return {prompt: (states.to(device), tokens) for prompt, (states, tokens) in states_by_prompt.items()}


def needs_encoder(
    config: RunConfig, prompts: Sequence[str], sizes: ModelConfig, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True where encode_prompts would load umT5."""
    if config.prompt_embeds:
        return False
    files = states_files(config, prompts, sizes, dtype, encoding_device(config, device))
    return not all(is_there for *_, is_there in files)


def states_files(
    config: RunConfig, prompts: Sequence[str], sizes: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Path | None, bool]]:
    """Return the file of each prompt's states, named by everything its bits depend on, and whether it exists.

    None: states are not stored.
    """
    if config.embeds_dir is None:
        yield from ((prompt, None, False) for prompt in prompts)
        return
    files = describe_files(encoder_files(config.ckpt_dir))
    made_of = {"files": files, "text_len": sizes.text_len, "dtype": str(dtype), "numbers": NUMBERS}
    for prompt in prompts:
        path, is_there = Path(config.embeds_dir) / f"{fingerprint(made_of, prompt=prompt)}.pt", False
        with suppress(errors.CheckpointError):  # absent or damaged; a file of another name is of other states
            is_there = read_weights_file(path).get("fingerprint") == path.stem
        yield prompt, path, is_there


def with_given_prompt(config: RunConfig, prompt: str | None) -> str:
    """Return the prompt of a run with --prompt_embeds: the file's own, or else the given one; not both."""
    file_prompt = read_weights_file(require_file(config.prompt_embeds or "", MAKE_ONE)).get("prompt")
    if file_prompt is not None and not isinstance(file_prompt, str):
        raise errors.CheckpointError(
            f"{config.prompt_embeds}: its prompt is {errors.short_repr(file_prompt)}, not a text"
        )
    if prompt is not None and file_prompt is not None and prompt != file_prompt:
        holds = f"{config.prompt_embeds} holds the states of {errors.short_repr(file_prompt)}"
        raise errors.ConfigError(f"--prompt is {errors.short_repr(prompt)}, but {holds}")
    return next(text for text in (file_prompt, prompt, config.prompt) if text is not None)


def read_states(path: str | Path, sizes: ModelConfig) -> PromptStates:
    """Read embeddings [1, n, text_dim], n at most text_len, and their tokens. CheckpointError for others."""
    content = read_weights_file(require_file(path, MAKE_ONE))
    states = content.get("prompt_embeds")
    if isinstance(states, Tensor) and states.ndim == 2:
        states = states[None]
    wanted = f"[1, at most {sizes.text_len}, {sizes.text_dim}], as this model's are; make one: {MAKE_ONE}"
    if not isinstance(states, Tensor) or states.dtype not in FLOATS or not states.isfinite().all():
        raise errors.CheckpointError(
            f"{path}: prompt_embeds are missing, or not finite numbers of floating point; wanted {wanted}"
        )
    fits = states.ndim == 3 and states.shape[::2] == (1, sizes.text_dim)
    if not fits or not 1 <= states.shape[1] <= sizes.text_len:
        raise errors.CheckpointError(f"{path}: prompt_embeds {list(states.shape)}; wanted {wanted}")
    # Padding is zero: the other rows are tokens
    count = int(states[0].any(-1).sum())
    tokens = content.get("tokens", [str(number) for number in range(count)])
    are_texts = isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)
    if not are_texts or len(tokens) > states.shape[1]:
        raise errors.CheckpointError(f"{path}: tokens are not a list of at most {states.shape[1]} texts")
    for token in tokens:
        errors.require_text(token, f"{path}: a token")
    return states, tokens
